"""Coding tables as users have them: which columns and rows come out, what was coded before, workbooks, rows
that cannot be read; and what is refused.
"""

import csv
import datetime
import os
import re
import shlex
import sys

import pytest
from helpers import read, run_here, write_csv
from test_predict import CODES, HEADER, columns, flags, model, predict_here, refused, save_model, table  # noqa: F401

from histocc.data.binary import Cell
from histocc.data.tables import read_chunks, table_format
from histocc.formatter import ANSWER, CLASSES, hisco_blocky5
from histocc.predict import __main__ as predict
from histocc.predict import coding
from histocc.review import __main__ as review
from histocc.review.sheet import CodedFile, most_wrong_first
from histocc.runtime import checkpoint
from histocc.runtime.files import OwnFiles


def test_a_workbook_has_codes_as_text_and_room_for_every_cell(model, tmp_path, monkeypatch):
    python_calamine, _ = pytest.importorskip("python_calamine"), pytest.importorskip("xlsxwriter")
    source, output = table(tmp_path / "in.csv", 30), tmp_path / "out.xlsx"
    predict_here(*flags(model, source, output))
    header, *rows = python_calamine.load_workbook(output).get_sheet_by_index(0).iter_rows()
    kinds = {name: {type(row[place]) for row in rows} - {str} for place, name in enumerate(header)}
    numbers = {"conf", "conf_fitted", "needs_review"}
    assert {name for name in kinds if kinds[name] and not re.fullmatch(r"prob_\d", name)} == numbers
    assert kinds["prob_1"] == {float} and " 007 " in {row[header.index("note")] for row in rows}
    long = write_csv(tmp_path / "long.csv", HEADER, [("1", "smed", "da", "x" * 40_000)])
    said = refused(*flags(model, long, tmp_path / "l.xlsx"))
    assert "characters, but a cell of .xlsx holds at most 32,767" in said
    monkeypatch.setattr(coding, "SHEET_ROWS", 30)
    again = flags(model, source, output, "--overwrite")
    assert "a sheet has 30 rows, but the output has 30" in refused(*again)
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    assert "out.xlsx needs xlsxwriter: pip install 'histocc[excel]'" in refused(*again)


def test_ordered_classes_are_numbers_in_all_but_csv(model, tmp_path):
    for package in ("python_calamine", "xlsxwriter", "pyarrow", "pyreadstat", "pandas"):
        pytest.importorskip(package)
    source = write_csv(tmp_path / "in.csv", ["occ1", "hisco_1"], [("smed", "61110"), ("smed", "22222")])
    more = ["--model", model, "--input", source, "--only-missing", "--classes", *CLASSES]
    predict_here(*more, "--output", tmp_path / "out.csv")
    farmer, none = ([row[f"{name}_1"] for name in CLASSES] for row in read(tmp_path / "out.csv"))
    assert all(farmer) and not any(none)
    for ending in (".xlsx", ".parquet", ".dta", ".sav"):
        predict_here(*more, "--output", tmp_path / f"out{ending}")
        [chunk] = read_chunks(str(tmp_path / f"out{ending}"), [f"{name}_1" for name in CLASSES])
        for name, cell, (held, blank) in zip(CLASSES, farmer, chunk.columns):
            assert held == cell and not blank and isinstance(held, Cell) == (name != "socpo"), (ending, name)


def test_a_workbook_differs_in_the_new_columns_alone(model, tmp_path):
    openpyxl, *_ = map(pytest.importorskip, ("openpyxl", "python_calamine", "xlsxwriter"))
    book, rows = openpyxl.Workbook(), [["id", "occ1", "born", "paid", "farm", "is"]]
    for i in range(1, 40):
        rows.append([i, f"smed {i}", datetime.date(1900 + i, 5, 1), i / 8, f"0{i}", i % 2 == 0])
    for row in rows:
        book.active.append(row)
    for (cell,) in book.active["C2:C40"]:
        cell.number_format = "yyyy-mm-dd"
    book.save(tmp_path / "in.xlsx")
    given = ["--model", model, "--input", tmp_path / "in.xlsx", "--columns", "beside", "--overwrite-columns"]
    for name in ("a", "b"):  # b codes a again
        predict_here(*given, "--output", tmp_path / f"{name}.xlsx")
        given[3] = tmp_path / "a.xlsx"
    before, *after = (openpyxl.load_workbook(tmp_path / f"{name}.xlsx").active for name in ("in", "a", "b"))
    for sheet in after:
        columns = [column for column in sheet.iter_cols() if column[0].value in rows[0]]
        assert len(columns) == 6 and sheet.max_row == 40
        for own, column in zip(before.iter_cols(), columns):
            held = [[(x.value, x.data_type, x.number_format) for x in cells] for cells in (own, column)]
            assert held[0] == held[1]
    assert (tmp_path / "a.xlsx").read_bytes() == (tmp_path / "b.xlsx").read_bytes()
    assert [cell.value for cell in after[0][1]].index("hisco_1") == 2


def test_as_many_columns_of_codes_as_the_training_had_or_as_are_asked_for(tmp_path):
    source, formatter = table(tmp_path / "in.csv", 30), hisco_blocky5(["hisco_1"])
    usual = {"default": 0.3, "by_language": {}, "source": "usual"}
    one = save_model(tmp_path / "one", formatter, CODES, thresholds={**usual, "at_most": 1})
    any_number = save_model(tmp_path / "any", formatter, CODES, thresholds=usual)
    for path, more, codes in [
        (one, ["--decoder", "flat"], 1),
        (one, ["--decoder", "flat", "--k", 2], 2),  # room for a code that a person adds
        (one, ["--decoder", "topk"], 5),
        (one, ["--decoder", "full", "--k", 2], 2),
        (any_number, ["--decoder", "flat", "--k", 3], 3),  # as many as the longest answer
        (any_number, ["--decoder", "flat", "--threshold", 1], 1),
    ]:
        predict_here(*flags(path, source, tmp_path / "out.csv", *more, "--overwrite"))
        names = columns(codes, "hisco", "title", "prob")
        assert list(read(tmp_path / "out.csv")[0]) == [*HEADER, *names, *ANSWER]


def test_columns_stand_together_at_the_end_or_beside_the_texts_and_none_is_empty(model, tmp_path):
    names, rows = ["id", "occ1", "decided_by", "note"], [(1, "smed", "", "a"), (2, "fisker", "Ann", "b")]
    source, output = write_csv(tmp_path / "in.csv", names, rows), tmp_path / "out.csv"
    known = write_csv(tmp_path / "known.csv", ["occ1", "hisco_1", "hisco_2"], [("x", "22222", "33333")])
    more = ["--model", model, "--decoder", "flat", "--k", 1, "--choices", 2, "--classes", "hisclass"]
    more += ["--known", known]
    new = ["hisco_1", "title_1", "prob_1", "source", *ANSWER, "hisclass_1"]
    new += columns(2, "choice", "choice_prob", "choice_title")
    predict_here("--input", source, "--output", output, *more)
    end = read(output)
    assert list(end[0]) == [*names, *new]  # the known text of two codes is in no row
    predict_here("--input", source, "--output", output, *more, "--columns", "beside", "--overwrite")
    assert list(read(output)[0]) == ["id", "occ1", "decided_by", *new, "note"]
    assert [dict(sorted(row.items())) for row in read(output)] == [dict(sorted(row.items())) for row in end]
    # both are found again, and so is the order of earlier versions, wherever its columns are
    older = ["hisco_1", "prob_1", "title_1", "hisclass_1", *new[8:], "source", *ANSWER]
    rows = [[row[name] for name in [*names, *older]] + ["own"] for row in end]
    moved = write_csv(tmp_path / "moved.csv", [*names, *older, "mine"], rows)
    predict_here("--input", output, "--output", tmp_path / "b.csv", *more, "--only-missing")
    assert read(tmp_path / "b.csv") == read(output)
    predict_here("--input", moved, "--output", tmp_path / "m.csv", *more, "--only-missing")
    for path in (output, moved, tmp_path / "m.csv"):
        coded = CodedFile(str(path))
        assert [coded.header[i] for i in (*coded.codes, *coded.probs)] == ["hisco_1", "prob_1"]
        assert len(coded.choices) == 2 and coded.classes["hisclass"] and coded.system == "hisco"


def test_columns_of_an_earlier_coding_are_replaced(model, tmp_path):
    source, whole, coded = table(tmp_path / "in.csv", 40), tmp_path / "whole.csv", tmp_path / "coded.csv"
    flat = ["--decoder", "flat", "--overwrite-columns"]
    predict_here(*flags(model, source, whole, *flat))
    predict_here(*flags(model, source, coded, "--decoder", "topk", "--k", 7, "--classes", "hisclass"))
    rows, order = read(coded), [*list(read(coded)[0])[2:], "id", "occ1"]
    assert "hisclass_7" in order
    moved = write_csv(tmp_path / "moved.csv", order, [[row[name] for name in order] for row in rows])
    for path in (coded, moved):  # wherever they are, and however many
        predict_here(*flags(model, path, tmp_path / "out.csv", *flat, "--overwrite"))
        assert read(tmp_path / "out.csv") == read(whole)
    own = [*read(whole)[0], "source"]
    write_csv(coded, own, [[*row.values(), "the archive"] for row in read(whole)])
    known = write_csv(tmp_path / "known.csv", ["occ1", "hisco_1"], [("smed", "22222")])
    assert "columns 'source'" in refused(*flags(model, coded, tmp_path / "x.csv", *flat, "--known", known))


@pytest.mark.parametrize("ending", [".csv.gz", ".xlsx", ".parquet"])
def test_rows_without_a_code_are_coded_and_the_others_stay(model, tmp_path, ending):
    for package in {".xlsx": ["xlsxwriter", "python_calamine"], ".parquet": ["pyarrow"]}.get(ending, []):
        pytest.importorskip(package)
    source, more = table(tmp_path / "in.csv", 40), ["--decoder", "topk", "--k", 3]
    predict_here(*flags(model, source, tmp_path / "whole.csv", *more))
    whole = read(tmp_path / "whole.csv")
    before = [dict(row, decided_by="model") for row in whole]
    for i, row in enumerate(before):
        changed = {"hisco_1": ("44444", "", "NA", "")[i % 4], "decided_by": "Ann" if i % 4 == 3 else "model"}
        row |= changed | {"hisco_2": "", "hisco_3": "", "prob_1": "0.5", "conf": "", "title_1": "by hand"}
    write_csv(tmp_path / "coded.csv", before[0], [row.values() for row in before])
    for flag, kept in (("--only-missing", (0, 3)), ("--overwrite-columns", (3,))):
        output = tmp_path / f"{flag}{ending}"
        said = predict_here(*flags(model, tmp_path / "coded.csv", output, *more[:2], "--k", 2, flag))
        assert f"; {10 * len(kept)} with codes kept" in said
        columns = (cell for chunk in read_chunks(str(output), None) for cell in chunk.columns)
        rows = [dict(zip(before[0], cells)) for cells in zip(*columns, strict=True)]
        assert table_format(str(output)).names == list(before[0])
        for i, row in enumerate(rows):
            coded = whole[i] | {"hisco_3": "", "prob_3": "", "title_3": "", "decided_by": "model"}
            assert row == (before[i] if i % 4 in kept else coded)


def test_a_table_that_was_coded_in_part_can_be_reviewed(model, tmp_path):
    cells = [("smed", "22222", "mine"), ("fisker", "-", "mine"), ("kok", " 1234.0 ", "")]
    path, output = write_csv(tmp_path / "in.csv", ["occ1", "hisco_1", "note"], cells), tmp_path / "out.csv"
    predict_here("--model", model, "--input", path, "--output", output, "--only-missing", "--k", 1)
    rows = read(output)
    assert list(rows[0])[:4] == ["occ1", "hisco_1", "title_1", "prob_1"] and list(rows[0])[-1] == "note"
    assert [row["hisco_1"] for row in rows][::2] == ["22222", " 1234.0 "]
    assert rows[1]["prob_1"] and [row["conf"] for row in rows][::2] == ["1", ""]
    order = most_wrong_first(CodedFile(str(output)).texts.values())
    assert [text.text for text in order][:2] == ["kok", "fisker"]  # 1234 is no code
    odd = [("smed", "unclear"), ("smed", "=-1"), ("smed", '="22222"'), ("smed", ""), ("smed", "83110")]
    odd = [*((*row, "") for row in odd), ("smed", "", "22222")]  # a code in any column is kept
    source = write_csv(tmp_path / "odd.csv", ["occ1", "hisco_1", "hisco_2"], odd)
    said = predict_here("--model", model, "--input", source, "--output", tmp_path / "o.csv", "--only-missing")
    found = [(row["hisco_1"], row["title_1"][:7], row["needs_review"]) for row in read(tmp_path / "o.csv")]
    assert found[0] == ("unclear", "", "1") and found[1] == ("=-1", "Missing", "0")  # "1": it is no code
    assert [row[2] for row in (*found[2::2], found[5])] == ["0"] * 3 and "5 with codes kept" in said
    first, *_, last = read(tmp_path / "o.csv")
    assert [first["conf"], first["conf_fitted"]] == ["", "0"]
    assert [last[f"hisco_{i}"] for i in (1, 2)] == ["", "22222"] and last["conf"] == "1"
    # what stands beside a kept code is filled where it is missing
    path = write_csv(tmp_path / "in.csv", ["occ1", "hisco_1", "note"], [*cells, ("kemiker", "1110", "")])
    flags_of_classes = "--only-missing", "--classes", "hisclass", "--overwrite"
    predict_here("--model", model, "--input", path, "--output", output, *flags_of_classes)
    chemist = read(output)[-1]
    beside = [chemist[f"{name}_1"] for name in ("hisco", "title", "hisclass")]
    assert beside == ["1110", "Chemist, General", "2"]
    held = {"texts": 300, "maps": {"topk": [0.5, 0.0, 0.0, 0.3]}, "curves": {}}
    fitted = save_model(tmp_path / "run", hisco_blocky5(), CODES, confidence=held)
    topk = ("--decoder", "topk", "--only-missing", "--overwrite")
    predict_here("--model", fitted, "--input", path, "--output", output, *topk)
    assert [row["conf_fitted"] for row in read(output)] == ["1", "1", "0", "1"]  # also of codes that are kept
    pytest.importorskip("xlsxwriter")
    names = ["occ1", "hisco_1", "prob_1", "conf", "conf_fitted", "needs_review"]
    words = write_csv(tmp_path / "words.csv", names, [("smed", "22222", "", "0,83", "1", "0")])
    said = refused("--model", model, "--input", words, "--output", tmp_path / "x.xlsx", "--only-missing")
    assert "'0,83'; an output named .csv keeps such cells" in said


def test_rows_that_cannot_be_read_are_listed(model, tmp_path):
    source = tmp_path / "in.csv"
    source.write_text('occ1;lang\nsmed;da\nfisker;da;more\n"kok";en\n', encoding="cp1252")
    said = run_here(predict.main, *flags(model, source, tmp_path / "out.csv", "--device", "cpu"), code=1)
    assert "not in the output: 1;" in said and "out.csv.rejected.csv" in said
    assert [row["occ1"] for row in read(tmp_path / "out.csv")] == ["smed", "kok"]
    [rejected] = read(tmp_path / "out.csv.rejected.csv")
    assert rejected["line"] == "3" and "cells in the row: 3" in rejected["reason"]
    assert not (tmp_path / "out.csv.parts").exists()
    source.write_text('occ1;lang\n"smed;da\nkok;en\n')
    predict_here(*flags(model, source, tmp_path / "out.csv", "--no-quotes", "--overwrite"))
    assert [row["occ1"] for row in read(tmp_path / "out.csv")] == ['"smed', "kok"]
    assert not (tmp_path / "out.csv.rejected.csv").exists()  # it was about the output before
    source.write_text("occ1\nsmed\n\nkok\n")  # an empty line of a single column is an empty text
    predict_here("--model", model, "--input", source, "--output", tmp_path / "single.csv")
    assert [row["occ1"] for row in read(tmp_path / "single.csv")] == ["smed", "", "kok"]


def test_a_joined_table_is_coded_by_a_numbered_name_and_keeps_its_own(model, tmp_path):
    header, rows = ["n", "text", "lang", "n", "text"], [["1", "no trade", "da", "2", "smed"]]
    source, output = write_csv(tmp_path / "in.csv", header, rows), tmp_path / "out.csv"
    said = predict_here(*flags(model, source, output, "--input-col", "text.1"))
    assert "has several columns of one name; flags call the later ones 'n.1', 'text.1'" in said
    with open(output, encoding="utf-8") as file:
        names, cells = csv.reader(file)
    assert (names[:6], cells[:5]) == ([*header, "hisco_1"], rows[0])
    alone = write_csv(tmp_path / "alone.csv", ["text", "lang"], [["smed", "da"]])
    predict_here(*flags(model, alone, tmp_path / "alone_coded.csv", "--input-col", "text"))
    [row] = read(tmp_path / "alone_coded.csv")
    assert cells[5:] == [*row.values()][2:]
    to_review = run_here(review.main, "make", output, "--output", tmp_path / "s.csv", "--input-col", "text.1")
    run_here(review.main, *shlex.split(to_review.splitlines()[-1])[2:])
    assert read(tmp_path / "s.csv")[0]["\ufefftext"] == "smed"
    assert (tmp_path / "out.final.csv").read_text("utf-8").startswith("n,text,lang,n,text,hisco_1,")
    twice = write_csv(tmp_path / "twice.csv", [*header, "hisco_1", "hisco_1"], [])
    given = flags(model, twice, tmp_path / "new.csv", "--input-col", "text.1")
    assert "would have several columns 'hisco_1'" in refused(*given)
    for way in ("--overwrite-columns", "--only-missing"):
        assert "column 'hisco_1' is listed 2 times" in refused(*given, way)


def test_mistakes_are_said_and_the_input_stays(model, tmp_path):
    source, output = table(tmp_path / "in.csv", 5), tmp_path / "out.csv"
    before = open(source, "rb").read()
    bad_key = write_csv(tmp_path / "key.csv", ["hisco", "description"], [("99999", "x")])
    existing = write_csv(tmp_path / "there.csv", ["a"], [["1"]])
    coded = write_csv(tmp_path / "coded.csv", ["occ1", "lang", "title_1"], [("smed", "da", "x")])
    before_it = write_csv(tmp_path / "before.csv", ["occ1", "lang", "hisco_1", "conf"], [])
    rejected = write_csv(existing + ".rejected.csv", ["occ1", "lang"], [])
    common, over = flags(model, source, output), flags(model, source, existing, "--overwrite")
    accuracy = [*common, "--target-accuracy", "0.9"]
    for arguments, message in [
        ([*common, "--column", "occ"], "has no column 'occ'; it has 'id', 'occ1', 'lang', 'note'"),
        (flags(model, source, source), "is the input, and inputs are never written to"),
        (flags(model, rejected, existing, "--overwrite"), "is the input, and inputs are never written to"),
        ([*over, "--descriptions", existing], "is the file of --descriptions, and inputs are never"),
        ([*over, "--key", existing], "is the file of --key, and inputs are never"),
        (flags(model, source, existing), "there.csv.rejected.csv exist; --overwrite replaces them"),
        (flags(model, source, tmp_path / "o.CSV.XZ"), "o.CSV.XZ: choose a name that ends in .csv, .csv.gz"),
        ([*common, "--language", "en"], "--language and --language-col are"),
        ([*common, "--decoder", "topk", "--threshold", "0.3"], "--threshold is for --decoder flat"),
        ([*common, "--decoder", "flat", "--threshold", "se=0.3"], "language 'se'; it knows unk, en, da"),
        ([*common, "--decoder", "flat", "--threshold", "1.3"], "is not a number between 0 and 1"),
        ([*common, "--descriptions", bad_key], "none of the codes of the model (7)"),
        (flags(model, coded, output), "would have several columns 'title_1': --overwrite-columns replaces"),
        (flags(model, coded, output, "--only-missing"), "rename your column of codes to hisco_1"),
        (flags(model, before_it, output), "'hisco_1', 'conf': --overwrite-columns replaces them, --only-m"),
        (flags(model, before_it, output), "--system NAME"),
        (flags(model, before_it, output, "--overwrite-columns"), "columns 'conf': no codes of predict"),
        ([*common, "--only-missing", "--overwrite-columns"], "are mutually exclusive"),
        ([*common, "--system", "prob"], "would have several columns 'prob_1'"),
        ([*common, "--formatter", "hisco"], "leave out --formatter"),
        ([*accuracy, "--raw-confidence"], "--target-accuracy and --raw-confidence are"),
        ([*accuracy, "--min-prob", "0"], "--min-prob and --target-accuracy are mutually"),
        ([*common, "--level", "2"], "the decoder is greedy here: give --decoder flat"),
        ([*common, "--explain"], "--explain shows training rows"),
        ([*common, "--int8", "--bf16"], "--bf16 and --int8 are mutually exclusive"),
        (flags(model, source, tmp_path / "in.csv" / "out.csv"), "is not a folder"),
    ]:
        assert message in refused(*arguments)
    assert open(source, "rb").read() == before
    there = "before.csv coded.csv in.csv key.csv there.csv there.csv.rejected.csv"
    assert sorted(os.listdir(tmp_path)) == there.split()
    predict_here(*over)
    assert len(read(existing)) == 5


def test_only_missing_reads_codes_that_stand_above(model, tmp_path):
    rows = [("smed", "22222"), ("væver", ""), ("fisker", "")]
    source, written = write_csv(tmp_path / "in.csv", ["occ1", "hisco_1"], rows), tmp_path / "out"
    given = ["--model", model, "--input", source, "--output", written, "--only-missing"]
    said = predict_here(*given, "--fill-down", "hisco_1")
    assert [row["hisco_1"] for row in read(written)] == ["22222"] * 3 and "3 with codes kept" in said
    said = refused(*given, "--overwrite", "--fill-down", "no")
    assert "no column 'no'; it has 'occ1', 'hisco_1'. Name it with --fill-down" in said


def test_broken_texts_are_mended_if_asked_and_where_the_training_was(model, tmp_path):
    columns, texts = ["occ1", "lang", "note"], ["væver", "v&aelig;ver", "vÃ¦ver", "v=C3=A6ver"]
    path = write_csv(tmp_path / "in.csv", columns, [(text, "da", "&oslash;") for text in texts])
    said = predict_here(*flags(model, path, tmp_path / "plain.csv"))
    assert "broken letters or escapes (such as Ã¦, &oslash;): 3 rows; --repair-text" in said
    assert len({row["conf"] for row in read(tmp_path / "plain.csv")}) > 1
    said = predict_here(*flags(model, path, tmp_path / "out.csv", "--repair-text"))
    rows = read(tmp_path / "out.csv")
    assert [row["occ1"] for row in rows] == texts and {row["note"] for row in rows} == {"&oslash;"}
    assert len({(row["hisco_1"], row["conf"]) for row in rows}) == 1 and "--repair-text" not in said
    trained = {**checkpoint.load(os.path.join(model, "last.bin")), "args": {"repair_text": True}}
    checkpoint.save(OwnFiles(str(tmp_path)), ["best.bin"], trained)
    predict_here(*flags(tmp_path / "best.bin", path, tmp_path / "same.csv"))
    assert (tmp_path / "same.csv").read_bytes() == (tmp_path / "out.csv").read_bytes()


def test_tables_as_users_have_them(model, tmp_path, monkeypatch):
    """Texts that repeat the row above, across chunks; languages by other names; an encoding by name."""
    monkeypatch.setattr("histocc.data.tables.CHUNK", 2)
    rows = [("væver ", "DA"), ("do.", "da-DK"), ("ditto", "Danish"), ("smed", "en")]
    path, said, found = tmp_path / "in.csv", {}, {}
    write_csv(path, ["occ1", "lang"], rows)
    path.write_bytes(path.read_bytes().decode().encode("cp850"))
    for name, more in (("plain", ["--ditto", "none"]), ("filled", [])):
        said[name] = predict_here(*flags(model, path, tmp_path / name, *more, "--encoding", "cp850"))
        found[name] = read(tmp_path / name)
    assert [row["occ1"] for row in found["filled"]] == [text for text, _ in rows]
    assert [row["needs_review"] for row in found["plain"]][1:3] == ["1", "1"]
    assert "do., ditto or 〃 in 2 rows: 2 left, because of --ditto none" in said["plain"]
    answers = [(row["hisco_1"], row["conf"], row["needs_review"]) for row in found["filled"]]
    assert answers[0] == answers[1] == answers[2] != answers[3]
    assert "in 2 rows: 2 with the text of the row above" in said["filled"]
    assert "coded as unk" not in said["plain"]
