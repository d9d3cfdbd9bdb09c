"""From tables of text to arrays: what is kept, rejected and counted, the key, the split; and the folder that
is found again, made again when it was damaged, and never taken half made.
"""

import dataclasses
import itertools
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import examples, mutations, read, write_csv
from hypothesis import given, settings
from hypothesis import strategies as st
from preparing import HEADER, Result, prepare, problems, quiet, refusal, settings_for
from test_outputs import contents, make

from histocc import prepare as command
from histocc.data import arrays, rows
from histocc.data import prepare as prep
from histocc.data import report as data_report
from histocc.data.arrays import META, PreparedData, fault
from histocc.data.config import PrepareSettings, file_problems, fingerprint
from histocc.data.learned import entries, hashes_of
from histocc.data.split import split_values
from histocc.formatter import make_formatter
from histocc.runtime.errors import UserError
from histocc.text import join_columns, text_hashes


def table(*rows: str, header: str = "occ1,hisco_1,hisco_2") -> str:
    return "\n".join([header, *rows, ""])


# ---- rows that are kept, and those that are not


def test_texts_stay_as_they_are_in_every_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("histocc.data.tables.CHUNK", 3)
    texts = ["None", "0123", "1e5", "TRUE", "a, b; c", 'said "hello"', "two\nlines"]
    texts += ["cr\r\nlf", "huusmand  og\tvæver", "𝔊🙂", "ÆØÅ", "-", "'"]
    rows = [(f"  {text} ", f"6111{i % 10}") for i, text in enumerate(texts)]
    words = "NA", "null", " nan", "#N/A", "<NA>", "\\N", "#REF!"  # of programs
    rows += [(text, "61110") for text in words]
    result = prepare(tmp_path, [HEADER[:2], *rows])
    assert result.train == [(text, "unk", [f"6111{i % 10}"]) for i, text in enumerate(texts)]
    assert result.report["rejected"] == {"empty text": 7}


def test_several_files(tmp_path):
    others = [("", "41025", "merchant"), ("", "", "bad"), ("", "83110", "smith")]
    train = [write_csv(tmp_path / "a.csv", HEADER, [("farmer", "61110", "")])]
    train.append(write_csv(tmp_path / "b.csv", HEADER[::-1], others))
    val = [("farmer", "61120", ""), ("weaver", "75400", "")]
    val = write_csv(tmp_path / "v.csv", HEADER, val, delimiter=";")
    chosen = settings_for(train, cols=HEADER[1:], val_files=[val])
    result = Result(prep.prepare(chosen, str(tmp_path / "out"), quiet))
    assert result.texts == ["farmer", "merchant", "smith"]
    assert result.val == [("farmer", "unk", ["61120"]), ("weaver", "unk", ["75400"])]
    assert result.codes == ["41025", "61110", "61120", "75400", "83110"]  # of both together
    assert result.table("key.csv")[:3] == [["system_code", "code"], ["41025", "0"], ["61110", "1"]]
    assert [row[:2] for row in result.rejected] == [[train[1], "3"]]
    empty = write_csv(tmp_path / "w.csv", HEADER, [("", "61110", "")])
    message = refusal(tmp_path, "occ1,hisco_1\nfarmer,61110\n", val_files=[empty])
    assert "w.csv: no valid row to validate on" in message


def test_what_is_wrong_with_files_and_columns_is_said_together(tmp_path):
    none, folder = str(tmp_path / "none.csv"), str(tmp_path)
    what = settings_for([none, folder], val_files=[none])
    assert file_problems(what) == [f"{none}: no such file", f"{folder}: is a folder, not a file"]
    first = write_csv(tmp_path / "a.csv", ("text", "hisco_1", "hisco_1", "x", "x"), [])
    second = write_csv(tmp_path / "b.csv", ("occ1", "hisco_1"), [])
    lines = file_problems(settings_for(first, cols=HEADER[1:], val_files=[second], language_col="lang"))
    assert [line.split(": ")[0] for line in lines] == [first] * 3 + [second] * 2
    for line, name in zip(lines, ["occ1", "hisco_2", "lang", "hisco_2", "lang"]):
        assert repr(name) in line.partition("; it has ")[0]
    [problem] = problems(tmp_path, b"\xef\xbb\xbf")
    assert problem == f"{tmp_path / 'data.csv'}: is empty"


def test_rejected_rows_are_listed_with_line_column_value_and_reason(tmp_path):
    content = table(
        "farmer,61110,",
        ",61110,",  # line 3: no text
        "smith,,83110",
        '"two\nlines",83110,',  # lines 5 and 6
        "weaver,  ,",
        "",
        "tailor,79100",  # line 9
        "baker,77610,7761x",
        "cook,53100,,",
        "miller,77120,41025",
        '"old" carter,98620,',  # line 13
        "carter,98620,",
    )
    fixed = ["61110", "83110", "77610", "77120", "53100"]
    result = prepare(tmp_path, content, cols=HEADER[1:], drop_bad_labels=True, fixed_codes=fixed)
    assert result.texts == ["farmer", "two\nlines"]
    assert result.table("rejected_rows.csv")[0] == ["file", "line", "column", "value", "reason"]
    assert {row[0] for row in result.rejected} == {str(tmp_path / "data.csv")}
    expected = {
        (3, "occ1", ""): "description is empty",
        (4, "hisco_1", ""): "--missing-code",
        (7, "hisco_1", "  "): "--missing-code",
        (9, "", ""): "cells in the row: 2, columns in the header: 3",
        (10, "hisco_2", "7761x"): "'x'",
        (11, "", ""): "cells in the row: 4",
        (12, "hisco_2", "41025"): "'41025' is not among the codes of the key",
        (13, "", ""): "those inside it must be doubled",
        (14, "hisco_1", "98620"): "'98620' is not among",
    }
    assert result.reasons == list(expected)
    assert all(words in row[4] for words, row in zip(expected.values(), result.rejected))
    counts = {"empty text": 1, "first code missing": 2, "wrong number of cells": 2, "code does not fit": 1}
    counts |= {"code outside the key": 2, "broken quotation marks": 1}
    assert result.report["rejected"] == counts
    assert result.report["rows"] == 11 and result.report["rejected_rows"] == 9
    content = 'occ1,hisco_1\n"a\rb",61110\n"a\rb",83110\n"c\rd",\n'
    result = prepare(tmp_path, content)  # the lists can be read again, whatever their texts
    assert [row[0] for row in result.table("conflicts.csv")[1:]] == ["a\rb"] * 2
    assert [len(row) for row in result.table("rejected_rows.csv")] == [5, 5] and result.reasons[0][0] == 6


def test_lists_hold_no_formulas_and_keys_read_back(tmp_path):
    """A spreadsheet would run them; numbers such as -1 stay."""
    cells = [("=cmd()", "=A1"), ("=cmd()", "@b"), ("+x", "-1"), ("", "-c"), ("y", "-c"), ("z", "'=d")]
    content = table(*(f'"{text}","{code}",' for text, code in cells))
    result = prepare(tmp_path, content, kind="gpf", cols=HEADER[1:2], block_size=4, allow_short=True)
    assert {row[0] for row in result.table("conflicts.csv")[1:]} == {"'=cmd()"}
    assert result.codes == ["-1", "-c", "=A1", "=d", "@b"]  # =d was guarded
    written = [row[0] for row in result.table("key.csv")[1:]]
    assert written == ["-1", "'-c", "'=A1", "'=d", "'@b"]
    assert rows.read_key(str(result.folder / "key.csv")) == result.codes
    content = table("farmer,=61110,", "smith,83110,")
    result = prepare(tmp_path, content, cols=HEADER[1:2], fixed_codes=["83110"], drop_bad_labels=True)
    assert [row[3] for row in result.rejected] == ["'=61110"]


def test_names_of_columns_that_files_repeat_are_no_row(tmp_path):
    content = "occ1,hisco_1\na,61110\nocc1,hisco_1\nb,83110\n\ufeffocc1, hisco_1\nocc1,83110\n"
    content += 'OCC1,Hisco_1\nocc1 , hisco_1\n\ufeff"occ1","hisco_1"\n"\ufeff""occ1""",hisco_1\n'
    for kind in ("classes", "hisco"):
        result = prepare(tmp_path, content, kind=kind, empty_text="61110")
        assert result.texts == ["a", "b", "occ1"] and result.codes == ["61110", "83110"]
        assert result.report["rejected"] == {"names of the columns": 6}
        assert [row[0] for row in result.reasons] == [3, 5, 7, 8, 9, 10]
    content = content.replace("_1\n", "_1,part\n").replace('_1"\n', '_1",part\n').replace("0\n", "0,train\n")
    assert prepare(tmp_path, content, split_col="part").report["rejected"] == {"names of the columns": 6}


def test_rows_of_a_reviewed_file_that_nobody_has_decided_are_rejected(tmp_path):
    content = "occ1,hisco_1,decided_by\na,61110,Ann\nb,83110,guess\nc,83110,model\nd,61110,\n"
    result = prepare(tmp_path, content)
    assert result.texts == ["a", "d"]  # a blank: the code was there before
    assert result.report["rejected"] == {"decided by nobody": 2}
    assert [row[:2] for row in result.reasons] == [(3, "decided_by"), (4, "decided_by")]
    content = "occ1,hisco_1,prob_1,decided_by\na,61110,1,Ann\nb,83110,1,\nc,83110,1,NA\n"
    result = prepare(tmp_path, content)
    assert result.texts == ["a"] and result.report["rejected"] == {"decided by nobody": 2}


def test_a_row_is_rejected_for_one_reason(tmp_path):
    content = "occ1,hisco_1,n\na,61110,1\nb\0,,0\nc,,0\n,61110,x\n"
    result = prepare(tmp_path, content, weight_col="n")  # the report counts each row once
    assert result.texts == ["a"] and [*result.report["rejected"].values()] == [1, 1, 1]
    assert any("weight is not above 0" in kind for kind in result.report["rejected"])


def test_a_text_of_many_rows_is_trained_on_and_said(tmp_path):
    texts = [f"text {i}" for i in range(1000)]
    order = split_values(text_hashes(texts)).argsort()
    of_val, of_train, of_test = (texts[i] for i in order[[0, 500, -1]])
    rows = [(text, "61110", "x") for text in texts] + [(of_val, "61110", "x")] * 500
    rows += [(of_test.upper(), "61110", "x")] * 200 + [(of_train, "61110", "y")] * 300
    write_csv(tmp_path / "a.csv", HEADER, rows)

    def parts(**flags):
        chosen = settings_for(tmp_path / "a.csv", share_val=0.1, share_test=0.1, **flags)
        result = Result(prep.prepare(chosen, str(tmp_path / "out"), quiet))
        said = [note for note in result.report["read"] if "texts trained on" in note]
        return {row[0] for row in result.train}, len(result.val), result.report["test_rows"], said

    trained, val, test, [said] = parts()
    assert {of_val, of_train, of_test} <= trained and said.endswith(" requested for a part: 2")
    assert 70 < val < 130 and 70 < test < 130
    trained, _, test, [said] = parts(leave_out=["hisco_2=y"])  # who names a part has it
    assert of_train not in trained and 370 < test < 430 and said.endswith(": 2")
    rows = [(text, "61110", "") for text in [*texts, *[of_train] * 1000]]  # which no hash draws
    said = "\n".join(prepare(tmp_path, [HEADER, *rows], share_val=0.1, share_test=0.1).report["read"])
    assert "Note: one text has 1,001 rows, all in one part: val has 5.3 % of all rows, test has" in said
    # nothing else would be left for the validation
    rows = [(of_val, "61110", ""), (of_test, "61110", "")] * 30
    assert prepare(tmp_path, [HEADER, *rows], share_val=0.5).report["val_rows"] == 30


@pytest.mark.parametrize("flags", [{"split_col": "part"}, {"leave_out": ["part=test"]}])
def test_a_forbidden_character_is_rejected_where_columns_split(tmp_path, flags):
    content = "occ1,hisco_1,part\na,61110,train\nb\0,83110,test\nc,83110,test\n"
    result = prepare(tmp_path, content, **flags)
    assert result.texts == ["a"] and result.report["test_rows"] == 1
    assert result.report["rejected"] == {"forbidden character": 1}


# ---- training and validation


def rows_of(texts) -> list:
    return [HEADER[:2], *((text, "61110") for text in texts)]


def test_same_text_is_on_the_same_side(tmp_path):
    texts = [f"Old smed {i} og væver" for i in range(200)]
    ways = (str, str.upper, str.lower, " {}  ".format, lambda text: text.replace(" ", " \t "))
    result = prepare(tmp_path, rows_of(way(text) for text in texts for way in ways), share_val=0.3)
    sides = [{" ".join(text.lower().split()) for text, _, _ in part} for part in (result.train, result.val)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 200 and len(sides[1]) > 20
    assert len(result.train) == 5 * len(sides[0]) and len(result.val) == 5 * len(sides[1])


def test_split_depends_on_the_text_alone(tmp_path):
    texts = [f"occupation {i}" for i in range(300)]
    forwards, backwards, more = (
        {text for text, _, _ in prepare(tmp_path, rows_of(some), share_val=share).val}
        for some, share in ((texts, 0.1), ([*texts[::-1], "other"], 0.1), (texts, 0.2))
    )
    assert forwards == backwards - {"other"} and forwards < more
    values = split_values(text_hashes([f"occupation {i}" for i in range(10_000)]))
    assert 0 <= values.min() and values.max() < 1
    for share in (0.05, 0.1, 0.5):
        assert abs((values < share).mean() - share) < 5 * (share * (1 - share) / len(values)) ** 0.5
    assert split_values(text_hashes(["Wine  merchant"])).tolist() == [0.9023891211929064]  # on every machine
    content = rows_of(texts[:40])
    assert prepare(tmp_path, content, share_val=0.0).val == []
    assert "lower --share-val" in refusal(tmp_path, content, share_val=1.0)
    assert "raise it" in refusal(tmp_path, "occ1,hisco_1\noccupation 3,61110\n", share_val=1e-9)


def sides_of(tmp_path, content, **options):
    """The texts of training, validation and test, each in the case of its first row."""
    fitted = prepare(tmp_path, content, **options)
    learned = text_hashes([text for text, _, _ in fitted.train + fitted.val])
    whole = prepare(tmp_path, content).train
    is_new = ~np.isin(text_hashes([text for text, _, _ in whole]), learned)  # as evaluate finds them
    tested = list(itertools.compress(whole, is_new))
    assert fitted.report["test_rows"] == len(tested) and not hasattr(fitted.data, "test")
    texts = [{text.lower() for text, _, _ in rows} for rows in (fitted.train, fitted.val, tested)]
    assert not texts[0] & texts[1] and not (texts[0] | texts[1]) & texts[2]
    return texts


def test_few_texts_are_all_trained_on(tmp_path):
    """As if no share had been named; with more of them, or a column of parts, as without the limit."""
    rows = [(f"occupation {i % 40}", f"6111{i % 7}", "en", ("train", "val")[i % 40 % 2]) for i in range(80)]
    content = "occ1,hisco_1,lang,part\n" + "".join(",".join(row) + "\n" for row in [*rows, rows[0]])
    how = {"share_val": 0.5, "language_col": "lang"}
    whole = prepare(tmp_path, content, **how | {"share_val": 0.0})
    few, more, usual = (prepare(tmp_path, content, **how, few_texts=n) for n in (40, 39, 0))
    assert few.val == whole.val == [] and sorted(few.train) == sorted(whole.train)
    conflicts = [each.table("conflicts.csv") for each in (few, whole)]
    assert conflicts[0][1:] and len(conflicts[0]) == len(conflicts[1])
    assert few.codes == whole.codes and more.val == usual.val and more.train == usual.train
    assert 10 < len(usual.val) < 70
    named = prepare(tmp_path, content, **how | {"split_col": "part"}, few_texts=40)
    assert {int(text.split()[1]) % 2 for text, _, _ in named.val} == {1}
    tested = prepare(tmp_path, content, **how, share_test=0.3, few_texts=40)
    assert tested.val == [] and tested.report["test_rows"] == 81 - len(tested.train) > 10


def test_a_third_part_is_kept_for_a_test(tmp_path):
    """By the hash, by a column, by a value of a column; a text is on one side with all its rows."""
    texts = [f"occupation {i}" for i in range(300)]
    rows = [(way(text), f"6111{i % 7}") for i, text in enumerate(texts) for way in (str, str.upper)]
    content = "occ1,hisco_1\n" + "".join(f"{text},{code}\n" for text, code in rows)
    before = prepare(tmp_path, content, share_val=0.1)
    train, val, test = sides_of(tmp_path, content, share_val=0.1, share_test=0.2)
    assert {text.lower() for text, _, _ in before.val} == val and 40 < len(test) < 80 and len(train) > 180
    said = problems(tmp_path, content, share_val=0.5, share_test=0.6)[0]
    assert "--share-test add up to more than 1" in said
    assert "--share-test 1e-09 leaves no row" in refusal(tmp_path, content, share_val=0.1, share_test=1e-9)

    words = [("train", "Val", " TEST ")[i % 3] for i in range(9)]
    rows = [(f"smith {i}", word, ("Lund", "Åbo")[i % 2]) for i, word in enumerate(words)]
    rows += [("SMITH 0", "test", "Åbo"), ("Smith 3", "val", "Åbo"), ("Smith 5", "val", "Åbo")]
    content = "occ1,hisco_1,part,source\n" + "".join(f"{a},83110,{b},{c}\n" for a, b, c in rows)
    expected = {"smith 6"}, {"smith 1", "smith 3", "smith 4", "smith 7"}
    found = sides_of(tmp_path, content, split_col="part", share_val=0.5, share_test=0.5)
    assert (*found[:2],) == expected and found[2] == {f"smith {i}" for i in (0, 2, 5, 8)}
    found = sides_of(tmp_path, content, leave_out=["source=lund"])
    assert found == [{f"smith {i}" for i in (1, 3, 5, 7)}, set(), {f"smith {i}" for i in range(0, 9, 2)}]
    for name, rows in (("a.csv", "farmer,61110,test\nsmith,83110,train\n"), ("b.csv", "do.,83110,test\n")):
        (tmp_path / name).write_text(f"occ1,hisco_1,part\n{rows}")
    files = settings_for([tmp_path / "a.csv", tmp_path / "b.csv"], split_col="part")
    assert Result(prep.prepare(files, str(tmp_path / "two"), quiet)).report["test_rows"] == 1
    said = refusal(tmp_path, content, leave_out=["source=Lynd"])
    assert "'Lynd' is not in column 'source'; most frequent: 'Åbo', 'Lund'" in said
    said = refusal(tmp_path, content, split_col="source")
    assert "'source' holds 'Lund', 'Åbo'; write train, val or test" in said
    assert "no column 'x'" in problems(tmp_path, content, split_col="x")[0]


def test_a_checkpoint_knows_its_texts_by_hashes_that_stay(tmp_path):
    """Whatever their case, blanks and language; those of an earlier training, too."""
    some = hashes_of(["Wine  merchant", "wine merchant ", "gårdmand"], "as-is").tolist()
    assert some == [-1800602900164335229, -1800602900164335229, -4237871475127976014]
    content = "occ1,shop,hisco_1,lang\n" + "".join(f"smith {i},Forge {i % 2},83110,en\n" for i in range(30))
    more = {"input_col": ["occ1", "shop"], "language_col": "lang", "share_val": 0.3}
    data = prepare(tmp_path, content, **more).data
    kept = entries(data, None, {}, {"trained": torch.tensor([7])})
    texts = join_columns([f"SMITH {i}" for i in range(30)], [[f"forge {i % 2} " for i in range(30)]])
    of_texts = hashes_of(texts, "as-is").tolist()
    assert sorted([7, *of_texts]) == sorted([*kept["trained"].tolist(), *kept["validated"].tolist()])
    assert kept["trained"].tolist() == sorted(kept["trained"].tolist()) and 0 < len(kept["validated"]) < 20
    assert kept["data"]["rows"] == {"train": len(data.train), "val": len(data.val), "test": 0}
    assert kept["data"]["rows_of_codes"] == [len(data.train)]


# ---- the report

COLUMNS = ("occ1", "hisco_1", "hisco_2", "lang")
FEW = ["farmer", "Farmer", "old  farmer", "old farmer", "smith", "SMITH", "baker of bread", "x" * 40]
CODES = ["61110", "83110", "77610"], ["", "61110", "83110"]
ROWS = st.lists(st.tuples(*map(st.sampled_from, (FEW, *CODES, ["en", "da"]))), min_size=1, max_size=40)


def same(text: str) -> str:
    return " ".join(text.casefold().split())


@examples(60)
@given(ROWS, ROWS, st.sampled_from([1, 3, 1 << 22]), st.sampled_from([2, 5, 1 << 18]))
def test_counts_are_those_of_plain_python(train, val, bucket, block):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_report, "_BUCKET", bucket)
        patch.setattr(data_report, "_BLOCK", block)
        parts = {"train": train, "val": val}
        files = [write_csv(Path(folder) / f"{name}.csv", COLUMNS, rows) for name, rows in parts.items()]
        chosen = settings_for(files[0], cols=COLUMNS[1:3], val_files=files[1:], language_col="lang")
        data = PreparedData.open(prep.prepare(chosen, folder, quiet))
        conflicts = read(Path(data.folder) / "conflicts.csv")
    rows = [(same(text), lang, frozenset(codes) - {""}) for text, *codes, lang in (*train, *val)]
    report = data.report
    assert report["distinct_texts"] == len({text for text, *_ in rows})
    assert report["duplicates"] == len(rows) - len(set(rows))
    assert report["languages"] == Counter(lang for _, lang, _ in rows)
    assert report["codes_per_row"] == Counter(str(len(codes)) for *_, codes in rows)
    counts = Counter(code for *_, codes in rows for code in codes)
    assert report["rare_codes"] == {code: n for code, n in counts.items() if n < data_report.RARE}
    seen = {same(text) for text, *_ in train}
    assert report["val_rows_seen_in_training"] == sum(same(text) in seen for text, *_ in val)
    lengths = np.array([len(text) for text, *_ in (*train, *val)])
    mean = round(float(lengths.mean()), 2)
    assert report["length"] == {"mean": mean, "median": int(np.median(lengths)), "max": lengths.max()}

    labels = defaultdict(Counter)
    for text, lang, codes in rows:
        labels[text, lang][codes] += 1
    expected = {key: found for key, found in labels.items() if len(found) > 1}
    assert report["conflicts"] == len(expected)
    listed = defaultdict(Counter)
    for line in conflicts:
        listed[same(line["text"]), line["language"]][frozenset(line["codes"].split())] += int(line["rows"])
        number = int(line["line"]) - 2 + (len(train) if line["file"].endswith("val.csv") else 0)
        first = (*train, *val)[number]
        assert same(first[0]) == same(line["text"]) and set(line["codes"].split()) == set(first[1:3]) - {""}
    assert listed == expected


FLAGS = ["--formatter", "hisco", "--target-cols", "hisco_1", "hisco_2", "--language-col", "lang"]


def test_the_command_shows_and_writes_what_a_file_holds(tmp_path, capsys):
    rows = [("farmer", "61110", "", "en"), ("farmer", "83110", "", "en"), ("", "61110", "", "en")]
    first = write_csv(tmp_path / "a.csv", COLUMNS, rows)
    rows = [("da", "", "61110", "bonde"), ("da", "", "61110", "bonde")]
    second = write_csv(tmp_path / "b.csv", COLUMNS[::-1], rows, delimiter=";")
    out = tmp_path / "out"
    line = [first, second, *FLAGS, "--share-val", "0", "--save-path", str(out)]
    assert command.main(line) == 0
    shown = capsys.readouterr().out
    for words in (
        "Rows: 5 read, 4 for training",
        "Texts: 2 distinct; rows that repeat an earlier one (text, language and codes): 1",
        "2 used, 2 of them in fewer than 10 rows",
        "rows with 1 code: 4",
        "Languages: en 2, da 2",
        "texts coded differently in different rows (see conflicts.csv): 1",
        "1 × empty text (a.csv line 4)",
    ):
        assert words in shown
    report = json.loads((out / "data_report.json").read_text())
    assert [file["delimiter"] for file in report["files"]] == [",", ";"]
    assert report["problems"][0]["kind"] == "empty text" and report["problems"][0]["first"][0]["line"] == 4
    conflicts = (out / "conflicts.csv").read_text().splitlines()
    assert conflicts[:2] == ["text,language,codes,rows,file,line", f"farmer,en,61110,1,{first},2"]
    assert len(conflicts) == 3 and command.main(line) == 0
    assert "Prepared data: found" in capsys.readouterr().out


def test_unusable_data_are_shown_all_the_same(tmp_path, capsys):
    rows = [("farmer", "61110"), ("smith", "8x110"), ("smith", "")]
    path, out = write_csv(tmp_path / "a.csv", COLUMNS[:2], rows), tmp_path / "out"
    assert command.main([path, *FLAGS[:4], "--save-path", str(out)]) == 2
    shown = capsys.readouterr()
    assert "Rows: 3 read" in shown.out and "1 row holds other codes than HISCO codes" in shown.err
    assert "--drop-bad-labels" in shown.err and not (out / "prepared").exists()
    report = json.loads((out / "data_report.json").read_text())
    kinds = [(problem["kind"], problem["action"]) for problem in report["problems"]]
    assert kinds == [("code does not fit", "error"), ("first code missing", "rejected")]


# ---- the folder: found again, or made again

CONTENT = "occ1,hisco_1,lang\n" + "".join(
    f"{text} {i},{code},{lang}\n"
    for i in range(30)
    for text, code, lang in (("farmer", "61110", "en"), ("smith", "83110", "da"))
)
OPTIONS = {"share_val": 0.3, "share_test": 0.2, "language_col": "lang"}
MADE = sorted(name for name in arrays.HELD if not name.endswith(".lines"))


@pytest.fixture
def made(tmp_path):
    """(result, settings, a function that prepares once more and returns (result, what was said))"""
    result = prepare(tmp_path, CONTENT, **OPTIONS)
    chosen = settings_for(tmp_path / "data.csv", **OPTIONS)

    def again():
        said = []
        return Result(prep.prepare(chosen, str(tmp_path / "out"), said.append)), said

    return result, chosen, again


def farmer(tmp_path) -> PrepareSettings:
    return settings_for(write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", "")]))


def test_found_again_by_its_content(made, tmp_path):
    first, _, again = made
    assert sorted(os.listdir(first.folder)) == MADE
    before = {file.name: file.stat().st_mtime_ns for file in first.folder.iterdir()}
    assert again()[1] == [f"Prepared data: found in {first.folder}"]
    os.rename(tmp_path / "data.csv", tmp_path / "renamed.csv")
    renamed = settings_for(tmp_path / "renamed.csv", **OPTIONS)
    assert prep.prepare(renamed, str(tmp_path / "out"), quiet) == str(first.folder)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "prepared").symlink_to(tmp_path / "out" / "prepared")  # on another disk
    assert fault(prep.prepare(renamed, str(tmp_path / "linked"), quiet)) is None
    assert {file.name: file.stat().st_mtime_ns for file in first.folder.iterdir()} == before
    assert prepare(tmp_path, CONTENT.replace("farmer 3", "farmes 3"), **OPTIONS).folder != first.folder


def test_every_setting_counts(tmp_path):
    a, b = (write_csv(tmp_path / name, HEADER, [(name, "61110", "")]) for name in ("a.csv", "b.csv"))
    plain = settings_for(a, val_files=[b])
    other = {"train_files": [a, a], "val_files": [], "formatter": make_formatter("gpf", ["x"]).to_dict()}
    other |= {"target_cols": ["x"], "share_val": 0.1, "max_len": 64, "recode": {"1": "2"}, "few_texts": 9}
    other |= {"share_test": 0.1, "split_col": "x", "leave_out": ["x=y"], "by": ["x"]}
    other |= dict.fromkeys(("fixed_codes", "number_codes", "first_codes"), ["61110"])
    other |= dict.fromkeys(("drop_bad_labels", "repair_text", "no_quotes", "join_spellings"), True)
    other |= {"input_col": ["x"], "fill_down": ["x"], "ditto": "all"}
    texts = "weight_col language language_col missing_code empty_text delimiter clean_text encoding sheet"
    other |= dict.fromkeys([*texts.split(), "code_separator"], "x")
    assert set(other) == {field.name for field in dataclasses.fields(PrepareSettings)} - {"asked"}
    changed = [{name: value} for name, value in other.items()]
    changed += [{"train_files": [b], "val_files": [a]}, {"train_files": [a, b], "val_files": []}]
    prints = [fingerprint(dataclasses.replace(plain, **change)) for change in ({}, *changed)]
    assert len(set(prints)) == len(prints) and fingerprint(plain) == prints[0]


DAMAGE = st.sampled_from(["flip", "cut", "append", "delete", "swap", "empty", "folder", "pipe", "link"])


def damage(folder: Path, kind: str, name: str, number: int) -> None:
    path, content = folder / name, bytearray((folder / name).read_bytes())
    path.unlink()
    if kind == "flip" and content:
        content[number % len(content)] ^= 1 << number % 8
        path.write_bytes(content)
    elif kind in ("cut", "append", "empty", "swap", "flip"):
        cut = content[: number % (len(content) + 1)]
        other = (folder / sorted(os.listdir(folder))[number % (len(MADE) - 1)]).read_bytes()
        path.write_bytes({"cut": cut, "append": content + b"x", "swap": other}.get(kind, b""))
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(folder / MADE[0] if name != MADE[0] else "nowhere")


@settings(max_examples=mutations(0.34), deadline=None, derandomize=True)
@given(kind=DAMAGE, name=st.sampled_from(MADE), number=st.integers(0, 1 << 30))
def test_damaged_data_are_made_again_or_refused(tmp_path_factory, kind, name, number):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    result, said = prepare(folder, CONTENT, **OPTIONS), []
    before = {file.name: file.read_bytes() for file in result.folder.iterdir()}
    damage(result.folder, kind, name, number)
    try:
        chosen = settings_for(folder / "data.csv", **OPTIONS)
        found = PreparedData.open(prep.prepare(chosen, str(folder / "out"), said.append))
    except UserError as error:  # something else than a file is in the way: it stays
        assert kind in ("folder", "pipe", "link") and f"{result.folder / name}: found" in str(error)
        shutil.rmtree(result.folder)
        return
    assert {file.name: file.read_bytes() for file in result.folder.iterdir()} == before
    assert len(found.train) + len(found.val) + found.report["test_rows"] == 60 and len(said) in (1, 2)


def test_damage_is_said_by_name(made):
    first, _, again = made
    for name in ("train.codes", "words.csv", META):
        damage(first.folder, "flip", name, 0)
        assert fault(str(first.folder)) == name
        second, said = again()
        words = f"Prepared data: {first.folder}: {name} is not as it was written; preparing it again"
        assert said[0] == words and len(said) == 2 and second.train == first.train
    other = first.folder.with_name("0" * 16)
    shutil.copytree(first.folder, other)
    with pytest.raises(UserError, match=f"{META}: is not as it was written; move .* away"):
        PreparedData.open(str(other))
    assert fault(str(other)) == META and fault(str(first.folder)) is None


def test_a_node_that_sees_the_folder_looks_at_its_checksums(made, tmp_path):
    first, chosen, _ = made

    def on(rank: int):
        world = SimpleNamespace(rank=rank, leader=rank, node_leaders=lambda: [rank])
        world.run_on = lambda leaders, work: [work()]
        return prep.on_every_node(chosen, str(tmp_path / "out"), str(first.folder), world, quiet)

    assert len(on(2).train) == len(first.train)
    damage(first.folder, "flip", "train.codes", 0)
    on(0)  # the process that has just prepared them
    assert fault(str(first.folder)) is not None
    assert len(on(2).train) == len(first.train) and fault(str(first.folder)) is None


# ---- errors leave nothing behind, and files of others stay


def test_nothing_stays_behind_after_a_stop(tmp_path):
    stop = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        prep.prepare(farmer(tmp_path), str(tmp_path / "stopped"), quiet, check=stop)
    assert not (tmp_path / "stopped").exists()


def test_data_files_that_change_or_go(made, tmp_path, monkeypatch):
    chosen, finish = farmer(tmp_path), prep.Reader.finish

    def finish_and_change(reader):
        write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", ""), ("smith", "83110", "")])
        return finish(reader)

    with monkeypatch.context() as patch:
        patch.setattr(prep.Reader, "finish", finish_and_change)
        with pytest.raises(UserError, match="data.csv: changed while being read"):
            prep.prepare(chosen, str(tmp_path / "other"), quiet)
    assert not (tmp_path / "other").exists()
    os.unlink(tmp_path / "data.csv")
    with pytest.raises(UserError, match="data.csv: no such file"):
        made[2]()


def test_a_killed_preparation_is_made_again(tmp_path):
    """A real process, killed while it writes; meanwhile others are refused."""
    path = write_csv(tmp_path / "data.csv", HEADER, [(f"occupation {i}", "61110", "") for i in range(3000)])
    root, fork = tmp_path / "out" / "prepared", multiprocessing.get_context("fork")
    reached = fork.Event()

    def work():
        prep.csv_text = lambda *_: (reached.set(), time.sleep(60))
        prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)

    process = fork.Process(target=work)
    process.start()
    assert reached.wait(30)
    with pytest.raises(UserError, match=f"prepared is in use by another job: .* process {process.pid}"):
        prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
    process.kill()
    process.join()
    assert fault(str(root / fingerprint(settings_for(path)))) == META
    result = Result(prep.prepare(settings_for(path), str(tmp_path / "out"), quiet))
    assert len(result.train) == 3000 and os.listdir(root) == [result.folder.name]


def test_files_of_others_in_the_folder_stay(made):
    first, _, again = made
    before = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    make(first.folder / ".git", "folder", None)
    (first.folder / "val.lines").write_text("of a killed job")
    (first.folder / "notes.txt").write_text("mine")
    os.truncate(first.folder / "train.codes", 3)
    again()
    assert fault(str(first.folder)) is None and (first.folder / ".git" / "mine").read_text() == "mine"
    before["notes.txt"] = b"mine"
    assert {path.name: path.read_bytes() for path in first.folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("what", ["text", "dangling", "link", "pipe"])
def test_what_is_in_the_way_is_said_and_stays(tmp_path, what):
    chosen, elsewhere = farmer(tmp_path), tmp_path / "elsewhere"
    make(elsewhere, "folder", None)
    place = tmp_path / "out" / "prepared" / fingerprint(chosen)
    place.parent.mkdir(parents=True)
    make(place, what, elsewhere)
    before = contents(tmp_path)
    with pytest.raises(UserError):
        prep.prepare(chosen, str(tmp_path / "out"), quiet)
    assert contents(tmp_path) == before
