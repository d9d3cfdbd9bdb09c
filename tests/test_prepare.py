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
from helpers import examples, mutations, read, run_inside, write_csv
from hypothesis import given, settings
from hypothesis import strategies as st
from preparing import HEADER, Result, codes_of, prepare, problems, quiet, refusal, settings_for
from test_outputs import contents, make

from histocc import prepare as command
from histocc.data import arrays, rows
from histocc.data import prepare as prep
from histocc.data import report as data_report
from histocc.data.arrays import META, PreparedData, fault
from histocc.data.config import PrepareSettings, file_problems, fingerprint
from histocc.data.learned import entries, hashes_of
from histocc.data.split import split_values
from histocc.formatter import classes_in_words, make_formatter
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
    result = prepare(tmp_path, Path(write_csv(tmp_path / "rows.csv", HEADER[:2], rows)).read_bytes())
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
        (9, "", ""): "2 cells in the row, 3 columns",
        (10, "hisco_2", "7761x"): "'x'",
        (11, "", ""): "4 cells",
        (12, "hisco_2", "41025"): "'41025' is not among the 5 codes of the key",
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


# ---- codes and languages


def test_hisco_gets_its_leading_zero_back_and_other_systems_nothing(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1\na,1110\nb,01110\nc,1110.0\nd,61110\ne,61110.0\nf,-1\ng,-3.0\n")
    assert codes_of(result) == [["01110"]] * 3 + [["61110"]] * 2 + [["-1"], ["-3"]]
    assert result.codes == ["-1", "-3", "01110", "61110"] and result.report["zeros_restored"] == 4
    result = prepare(tmp_path, "occ1,hisco_1\na,1110\nb,01110\nc,NA\n", kind="gpf", allow_short=True)
    assert result.codes == ["01110", "1110"] and result.report["rejected"] == {"first code missing": 1}
    assert (result.report["zeros_restored"], result.report["codes_short"]) == (0, 1)
    result = prepare(tmp_path, "occ1,hisco_1\na,-1\nb,-2\nc,-3\nd,61110\ne,?\n", kind="gpf")
    assert result.codes == ["-1", "-2", "-3", "61110", "?"]  # are never short


ISCO = ["1", "2", "01", "11", "12", "21", "22", "011", "111", "112", "121", "211", "221"]


@pytest.mark.parametrize(
    "cells, more, codes, counts, words",
    [
        ("0110 110 110.0 2111 5223 7", {}, "0110 2111 5223 7", {"zeros_restored": 2}, ""),
        ("110 2000 2001 2002 2003 2004", {}, None, {}, "1 codes are shorter than the other 5"),
        ("83110.0 -1.0 2.00", {}, "-1 2 83110", {"zeros_restored": 3}, ""),
        ("1 1.0 1.0.2 2 2.0 2.0.1", {}, None, {}, ""),  # levels
        ("1.0 2.0 A00.0", {}, None, {}, ""),
        ("7213.0 110.0 5223 2111.0", {}, "110 2111 5223 7213", {"zeros_restored": 3}, ""),
        ("7213,0 0110,0 2111,0", {}, "0110 2111 7213", {"zeros_restored": 3}, ""),
        ("7213.0 110.0", {"recode": {"110": "0110"}}, "0110 7213", {"zeros_restored": 2}, ""),
        ("110 21", {"first_codes": ["0110", "2111", "21"]}, "0110 2111 21", {"zeros_restored": 1}, ""),
        (" ".join(ISCO), {}, None, {}, ""),  # levels
        ("01.1 1.1 01.1.1 R54.005 1 1.0", {}, None, {}, ""),
        ("83110 83,110 61110 61,110 01110 1,110", {}, "01110 61110 83110", {"codes_grouped": 3}, ""),
        ("83110 83.110", {"first_codes": ["83110"]}, "83110", {"codes_grouped": 1}, ""),
        ("83110 83.110 8.31", {}, None, {}, "83110 for 83.110"),  # a system with points
        ("83 110 83,110", {}, None, {}, "look like several in one cell, such as '83,110'"),
        ("110.0 2111 9", {"fixed_codes": ["0110", "2111", "9"]}, "0110 2111 9", {"zeros_restored": 1}, ""),
        ("I5.9 I5.9 i5.9 I59 1.11 11.1 111", {}, None, {}, "I59 for I5.9, i5.9 for I5.9; --recode spellings"),
        ("é1 \u200be\u03011 \ufeffE\u03011 é1", {"join_spellings": True}, "é1", {}, ""),
        ("I5.9 I5.9 i5.9 I59 1.11 11.1 111", {"join_spellings": True}, "1.11 11.1 111 I5.9", {}, ""),
        (
            "01.1 2024-10-01 1E5 Jan-10",
            {},
            None,
            {},
            "2 codes look like dates or powers of ten, such as '2024-10",
        ),
        ("B05.9|J1.8 B05.9|J1.9 B05.9", {}, None, {}, "such as 'B05.9|J1.8'; --code-separator '|' separates"),
    ],
)
def test_what_all_codes_together_tell(tmp_path, cells, more, codes, counts, words):
    rows = [(f"text {i}", cell) for i, cell in enumerate(cells.split())]
    chosen = settings_for(write_csv(tmp_path / "a.csv", HEADER[:2], rows), kind="classes", **more)
    result = Result(prep.prepare(chosen, str(tmp_path / "out"), quiet))
    assert sorted(result.codes) == sorted(codes.split() if codes else set(cells.split()))
    assert result.report | counts == result.report and result.report["rejected_rows"] == 0
    notes = [line for line in result.report["read"] if line.startswith("Note")]
    assert [words in note for note in notes] == [True] * bool(words)
    assert f"({classes_in_words(result.codes)})" in result.report["read"][0]


FORMS = {  # of 08311 and 83110
    "codes_unguarded": [
        '="08311"',
        "'08311",
        '"08311"',
        "'08311'",
        "=08311",
        '=T("08311")',
        '= "08311"',
        "“08311”",
        "‘08311",
    ],
    "codes_invisible": ["083\u200b11", "083\xad11", "\ufeff08311", "08311\u2060", "\u200e08311"],
    "codes_wide": ["０８３１１", "٠٨٣١١", "०८३११", "0831１"],
    "codes_grouped": ["83'110", "83’110", "83\xa0110", "83\u202f110", "83\u2009110", "'83'110"],
}


@pytest.mark.parametrize("kind", ["classes", "hisco", "gpf"])
def test_a_code_is_the_same_however_it_is_written(tmp_path, kind):
    forms = {name: cells for name, cells in FORMS.items() if kind != "gpf" or name != "codes_grouped"}
    cells = [(name, cell) for name, cells in forms.items() for cell in cells]
    rows = [(f"text {i}", cell) for i, (_, cell) in enumerate(cells)]
    chosen = settings_for(write_csv(tmp_path / "a.csv", HEADER[:2], rows), kind=kind, block_size=5)
    result = Result(prep.prepare(chosen, str(tmp_path / "out"), quiet))
    read = dict(zip((cell for _, cell in cells), codes_of(result), strict=True))
    assert read == {cell: ["83110" if name == "codes_grouped" else "08311"] for name, cell in cells}
    counts = {name: len(cells) for name, cells in forms.items()}
    counts["codes_unguarded"] += "codes_grouped" in forms  # '83'110
    assert result.report | counts == result.report
    lines = data_report.report_lines(result.report)
    assert all(any(rows_of[0] and repr(rows_of[0]) in line for line in lines) for rows_of in forms.values())


@pytest.mark.parametrize(
    "cell", ["A'1", "l'art", "'s baas", "x²", "Ⅳ", "é1", "smith\xa0two", '"a" or "b"', "1,5", "10.5"]
)
def test_other_signs_belong_to_a_code(tmp_path, cell):
    rows = [("a", cell), ("b", "83110")]
    chosen = settings_for(write_csv(tmp_path / "a.csv", HEADER[:2], rows), kind="classes")
    result = Result(prep.prepare(chosen, str(tmp_path / "out"), quiet))
    assert codes_of(result) == [[cell], ["83110"]]


THREE = ["83110", "51020", "61110"]


@pytest.mark.parametrize(
    "cells, separator",
    [
        (["83110#51020"], "#"),
        *(
            ([f"83110 {word} 51020"], word)
            for word in ("and", "og", "och", "und", "et", "en", "y", "e", "AND")
        ),
        (["83110 & 51020"], "&"),
        (["83110\n51020", "83110\r\n51020"], r"\n"),
        (["83110\t51020"], r"\t"),
        (["83110  51020", "83110\xa0\xa051020"], "  "),
        (["83110\xa0\xa051020"], "  "),
        (["83110 u. 51020"], "u."),
        (["83110 51020"], " "),
        (["83110:51020"], ":"),
        (["83110, 51020 and 61110"], ", and"),
        (["83110#51020", "51020;61110", "83110+61110"], "#;+"),
    ],
)
@pytest.mark.parametrize("formatter", ["auto", "hisco"])
def test_several_codes_in_one_cell_are_told_by_the_codes(tmp_path, formatter, cells, separator):
    data = write_csv(
        tmp_path / "a.csv", HEADER[:2], [*((f"t{x}", x) for x in THREE), *((x, x) for x in cells)]
    )
    flags = [data, "--target-cols", "hisco_1", "--share-val", 0, "--formatter", formatter, "--save-path"]
    code, said = run_inside(command.main, *flags, tmp_path / "out")
    flag = f"--code-separator '{separator.lower()}'"
    assert code == (2 if formatter == "hisco" else 0) and (flag in said or len(cells) > 1)
    code, said = run_inside(command.main, *flags, tmp_path / "out2", "--code-separator", separator.lower())
    codes = Counter(len([x for x in THREE if x in cell]) for cell in cells)
    assert code == 0 and all(f"{'s' * (n > 1)}: {rows}" in said for n, rows in codes.items())
    assert "(3 classes" in said or formatter == "hisco"


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


def test_one_number_with_decimals_does_not_keep_the_others_from_repair(tmp_path):
    content = "occ1,hisco_1\n" + "".join(f"t{i},{7000 + i % 5}.0\n" for i in range(30)) + "x,7213.5\n"
    result = prepare(tmp_path, content, kind="classes")
    assert result.codes == ["7000", "7001", "7002", "7003", "7004", "7213.5"]
    assert result.report["zeros_restored"] == 30 and "1 codes have decimals" in result.report["read"][1]
    assert "7213.5" in result.report["read"][1]


def test_recoded_codes_are_read_as_those_of_rows(tmp_path):
    for kind, old in (("hisco", "1110"), ("classes", "'01110")):
        result = prepare(tmp_path, "occ1,hisco_1\na,01110\nb,61110\n", kind=kind, recode={old: '="83110"'})
        assert result.codes == ["61110", "83110"] and result.report["codes_recoded"] == 1


@pytest.mark.parametrize("flags", ["", "--formatter gpf --block-size 5", "--formatter hisco"])
def test_a_row_has_as_many_codes_as_its_cells_hold(tmp_path, flags):
    data = write_csv(tmp_path / "a.csv", HEADER[:2], [("a", "61110 | 61120|61130"), ("b", "61110|61110")])
    flags = ["--target-cols", "hisco_1", "--share-val", 0, "--save-path", tmp_path / "out", *flags.split()]
    code, said = run_inside(command.main, data, *flags)
    assert "--code-separator '|'" in said
    code, said = run_inside(command.main, data, *flags, "--code-separator", "|")
    assert code == 0 and "rows with 1 code: 1; rows with 3 codes: 1" in said


def test_rows_of_a_reviewed_file_that_nobody_has_decided_are_rejected(tmp_path):
    content = "occ1,hisco_1,decided_by\na,61110,Ann\nb,83110,guess\nc,83110,model\nd,61110,\n"
    result = prepare(tmp_path, content)
    assert result.texts == ["a", "d"]  # a blank: the code was there before
    assert result.report["rejected"] == {"decided by nobody": 2}
    assert [row[:2] for row in result.reasons] == [(3, "decided_by"), (4, "decided_by")]


def test_answers_of_a_model_that_nobody_has_decided_are_rejected(tmp_path):
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
        said = [note for note in result.report["read"] if "texts are trained on" in note]
        return {row[0] for row in result.train}, len(result.val), result.report["test_rows"], said

    trained, val, test, [said] = parts()
    assert {of_val, of_train, of_test} <= trained and "Note: 2 texts are trained on" in said
    assert 70 < val < 130 and 70 < test < 130
    trained, _, test, [said] = parts(leave_out=["hisco_2=y"])  # who names a part has it
    assert of_train not in trained and 370 < test < 430 and "Note: 2 texts" in said
    rows = [(text, "61110", "") for text in [*texts, *[of_train] * 1000]]  # which no hash draws
    skewed = settings_for(write_csv(tmp_path / "b.csv", HEADER, rows), share_val=0.1, share_test=0.1)
    said = "\n".join(Result(prep.prepare(skewed, str(tmp_path / "out"), quiet)).report["read"])
    assert "Note: one text has 1,001 rows, all in one part: val has 5.3 % of all rows, test has" in said
    rows = [
        (of_val, "61110", ""),
        (of_test, "61110", ""),
    ] * 30  # nothing else would be left for the validation
    few = settings_for(write_csv(tmp_path / "few.csv", HEADER, rows), share_val=0.5)
    assert Result(prep.prepare(few, str(tmp_path / "out"), quiet)).report["val_rows"] == 30


@pytest.mark.parametrize("flags", [{"split_col": "part"}, {"leave_out": ["part=test"]}])
def test_a_forbidden_character_is_rejected_where_columns_split(tmp_path, flags):
    content = "occ1,hisco_1,part\na,61110,train\nb\0,83110,test\nc,83110,test\n"
    result = prepare(tmp_path, content, **flags)
    assert result.texts == ["a"] and result.report["test_rows"] == 1
    assert result.report["rejected"] == {"forbidden character": 1}


def test_rows_outside_the_key_count_by_part_and_weight(tmp_path):
    texts = [f"text {i}" for i in range(20)]
    cells = [*((f"a{i}", "61110", 1) for i in range(10)), *((text, "99990", 3) for text in texts)]
    path = write_csv(tmp_path / "a.csv", ["occ1", "hisco_1", "n"], cells)
    chosen = settings_for(path, share_val=0.5, weight_col="n", fixed_codes=["61110"])
    report = Result(prep.prepare(chosen, str(tmp_path / "out"), quiet)).report
    val = int((split_values(text_hashes(texts)) < 0.5).sum())
    assert report["rows_outside_key"] == {"train": 3 * (20 - val), "val": 3 * val} and 3 < val < 17


def test_bad_labels_stop_with_their_rows_and_the_flags_that_help(tmp_path):
    content = "occ1,hisco_1\nfarmer,61110\n" + "\n".join(f"smith,1{i}" for i in range(7)) + "\nmiller,77120\n"
    message = refusal(tmp_path, content, kind="gpf")
    assert "7 rows" in message and "block size 5" in message and f"'1{rows.EXAMPLES}'" not in message
    for i in range(rows.EXAMPLES):
        assert f"data.csv, line {i + 3}, column 'hisco_1': code '1{i}' has 2 tokens" in message
    for flag in ("--allow-codes-shorter", "--formatter hisco", "--block-size", "--drop-bad-labels"):
        assert flag in message
    content = table("farmer,61110,", "smith,83110,831", "baker,77610,7761012", "miller,77120,")
    message = refusal(tmp_path, content, cols=HEADER[1:])
    assert "2 rows" in message and "line 3, column 'hisco_2': code '831'" in message
    assert "--drop-bad-labels" in message and "--allow-codes-shorter" not in message
    result = prepare(tmp_path, content, kind="gpf", cols=HEADER[1:], drop_bad_labels=True)
    assert result.reasons == [(3, "hisco_2", "831"), (4, "hisco_2", "7761012")]
    assert result.codes == ["61110", "77120"]  # none of rejected rows alone


@pytest.mark.parametrize("kind, code", [("gpf", "?"), ("hisco", "-1")])
def test_missing_first_code(tmp_path, kind, code):
    content = table("a,61110,", "b,,", "c, ,61110", ",,")
    plain = prepare(tmp_path, content, kind=kind, cols=HEADER[1:])
    assert plain.texts == ["a"] and [row[0] for row in plain.reasons] == [3, 4, 5]
    result = prepare(tmp_path, content, kind=kind, cols=HEADER[1:], missing_code=code)
    assert codes_of(result) == [["61110"], [code], [code, "61110"]]
    assert result.report["missing_code_used"] == 2 and [row[0] for row in result.reasons] == [5]
    unused = prepare(tmp_path, table("a,61110,"), kind=kind, missing_code=code)
    assert unused.codes == ["61110"]


def test_repeated_codes_count_once(tmp_path):
    rows = ["a,61110,61110,83110", "b,1110,01110,", "c,83110,,61110", "d,61110,83110,61110"]
    columns = ("hisco_1", "hisco_2", "hisco_3")
    result = prepare(tmp_path, table(*rows, header="occ1,hisco_1,hisco_2,hisco_3"), cols=columns)
    assert codes_of(result) == [["61110", "83110"], ["01110"], ["83110", "61110"], ["61110", "83110"]]
    assert result.report["codes_repeated"] == 3
    assert result.data.train.codes.tolist() == [[1, 2, -1], [0, -1, -1], [2, 1, -1], [1, 2, -1]]


def test_columns_of_numbers(tmp_path):
    content = "occ1,code1,code2\na,0,\nb,2,1\nc,1.0,-1\nd,3,\ne,x,\nf,,0\ng,-1,\n"
    fixed = ["-1", "61110", "01110"]
    options = {"cols": ("code1", "code2"), "number_codes": fixed, "fixed_codes": fixed}
    result = prepare(tmp_path, content, drop_bad_labels=True, **options)
    assert [(text, codes) for text, _, codes in result.train] == [("a", ["-1"]), ("b", ["01110", "61110"])]
    cells = [(4, "code2", "-1"), (5, "code1", "3"), (6, "code1", "x"), (7, "code1", ""), (8, "code1", "-1")]
    assert result.reasons == cells
    assert "0 … 2" in result.rejected[1][4] and result.report["zeros_restored"] == 0
    # --missing-code is a code, whatever the cells hold
    result = prepare(tmp_path, "occ1,code1,code2\na,1,\nb,,\n", missing_code="-1", **options)
    assert codes_of(result) == [["61110"], ["-1"]]


def test_languages(tmp_path, monkeypatch):
    result = prepare(tmp_path, "occ1,hisco_1\na,61110\nb,61110\n", language="da")
    assert result.report["languages"] == {"da": 2} and result.data.languages == ["unk", "da"]
    content = "occ1,hisco_1,lang\na,61110,se\nb,61110,\nc,61110, da \nd,61110,se\n"
    result = prepare(tmp_path, content, language_col="lang")
    assert [language for _, language, _ in result.train] == ["se", "unk", "da", "se"]
    assert result.report["languages"] == {"se": 2, "unk": 1, "da": 1}
    assert result.report["language_missing"] == 1
    monkeypatch.setattr("histocc.data.rows.MAX_LANGUAGES", 3)
    assert len(prepare(tmp_path, content, language_col="lang").train) == 4
    for name in ("en", "x" * 99):
        message = refusal(tmp_path, content + f"e,61110,{name}\n", language_col="lang")
        assert "column 'lang' holds" in message and "is it the language?" in message
    for letters, cut in ((121 - 2, 0), (121 - 1, 1)):  # [CLS], en, five of [SEP], the text, [SEP]: 128
        result = prepare(tmp_path, f"occ1,hisco_1\n{'x' * letters},61110\n", language="en")
        assert result.report["texts_cut"] == cut


# ---- training and validation


def texts_file(tmp_path, texts) -> bytes:
    rows = [(text, "61110") for text in texts]
    return Path(write_csv(tmp_path / "rows.csv", HEADER[:2], rows)).read_bytes()


def test_same_text_is_on_the_same_side(tmp_path):
    texts = [f"Old smed {i} og væver" for i in range(200)]
    ways = (str, str.upper, str.lower, " {}  ".format, lambda text: text.replace(" ", " \t "))
    content = texts_file(tmp_path, (way(text) for text in texts for way in ways))
    result = prepare(tmp_path, content, share_val=0.3)
    sides = [{" ".join(text.lower().split()) for text, _, _ in part} for part in (result.train, result.val)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 200 and len(sides[1]) > 20
    assert len(result.train) == 5 * len(sides[0]) and len(result.val) == 5 * len(sides[1])


def test_split_depends_on_the_text_alone(tmp_path):
    texts = [f"occupation {i}" for i in range(300)]
    forwards, backwards, more = (
        {text for text, _, _ in prepare(tmp_path, texts_file(tmp_path, some), share_val=share).val}
        for some, share in ((texts, 0.1), ([*texts[::-1], "other"], 0.1), (texts, 0.2))
    )
    assert forwards == backwards - {"other"} and forwards < more
    values = split_values(text_hashes([f"occupation {i}" for i in range(10_000)]))
    assert 0 <= values.min() and values.max() < 1
    for share in (0.05, 0.1, 0.5):
        assert abs((values < share).mean() - share) < 5 * (share * (1 - share) / len(values)) ** 0.5
    assert split_values(text_hashes(["Wine  merchant"])).tolist() == [0.9023891211929064]  # on every machine
    content = texts_file(tmp_path, texts[:40])
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
    assert few.table("conflicts.csv")[1:] and len(whole.table("conflicts.csv")) == len(
        few.table("conflicts.csv")
    )
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
    assert "--share-test are more than 1" in problems(tmp_path, content, share_val=0.5, share_test=0.6)[0]
    assert "--share-test 1e-09 leaves no row" in refusal(tmp_path, content, share_val=0.1, share_test=1e-9)

    words = [("train", "Val", " TEST ")[i % 3] for i in range(9)]
    rows = [(f"smith {i}", word, ("Lund", "Åbo")[i % 2]) for i, word in enumerate(words)]
    rows += [("SMITH 0", "test", "Åbo"), ("Smith 3", "val", "Åbo")]
    content = "occ1,hisco_1,part,source\n" + "".join(f"{a},83110,{b},{c}\n" for a, b, c in rows)
    expected = {"smith 6"}, {"smith 1", "smith 3", "smith 4", "smith 7"}
    found = sides_of(tmp_path, content, split_col="part", share_val=0.5, share_test=0.5)
    assert (*found[:2],) == expected and found[2] == {f"smith {i}" for i in (0, 2, 5, 8)}
    found = sides_of(tmp_path, content, leave_out=["source=lund"])
    assert found == [
        {"smith 1", "smith 3", "smith 5", "smith 7"},
        set(),
        {f"smith {i}" for i in range(0, 9, 2)},
    ]
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
HISCO = make_formatter("hisco", ["hisco_1", "hisco_2"])
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
        columns = HISCO.target_cols
        chosen = PrepareSettings(files[:1], HISCO.to_dict(), columns, files[1:], language_col="lang")
        data = PreparedData.open(prep.prepare(chosen, folder, quiet))
        conflicts = read(Path(data.folder) / "conflicts.csv")
    rows = [
        (same(text), lang, frozenset(code for code in (first, second) if code))
        for text, first, second, lang in (*train, *val)
    ]
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
        "Texts: 2 distinct; 1 rows repeat",
        "2 used, 2 of them in fewer than 10 rows",
        "rows with 1 code: 4",
        "Languages: en 2, da 2",
        "1 texts are coded differently in different rows",
        "1 × empty text (a.csv line 4)",
    ):
        assert words in shown
    report = json.loads((out / "data_report.json").read_text())
    names = ("rows", "distinct_texts", "rejected_rows", "duplicates", "conflicts")
    assert [report[name] for name in names] == [5, 2, 1, 1, 1] and report["languages"] == {"en": 2, "da": 2}
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
    assert "Rows: 3 read" in shown.out and "1 rows hold a code that does not fit" in shown.err
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
MADE = sorted(name for name in arrays.FILES if not name.endswith(".lines"))


@pytest.fixture
def made(tmp_path):
    """A prepared folder, its settings, and a function that prepares once more and returns (result, what was
    said)."""
    result = prepare(tmp_path, CONTENT, **OPTIONS)
    chosen = settings_for(tmp_path / "data.csv", **OPTIONS)

    def again():
        said = []
        return Result(prep.prepare(chosen, str(tmp_path / "out"), said.append)), said

    return result, chosen, again


def flip(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("x")
    return folder


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
    other |= {
        "target_cols": ["hisco_2"],
        "share_val": 0.1,
        "max_len": 64,
        "recode": {"1": "2"},
        "few_texts": 9,
    }
    other |= {"share_test": 0.1, "split_col": "x", "leave_out": ["x=y"], "by": ["x"]}
    other |= dict.fromkeys(("fixed_codes", "number_codes", "first_codes"), ["61110"])
    other |= dict.fromkeys(("drop_bad_labels", "repair_text", "no_quotes", "join_spellings"), True)
    other |= {"input_col": ["x"], "fill_down": ["x"], "ditto": "all"}
    texts = "weight_col language language_col missing_code empty_text delimiter clean_text encoding sheet"
    other |= dict.fromkeys([*texts.split(), "code_separator"], "x")
    assert set(other) == {field.name for field in dataclasses.fields(PrepareSettings)}
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
        flip(first.folder / name)
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
    flip(first.folder / "train.codes")
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
        with pytest.raises(UserError, match="data.csv: changed while it was read"):
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
    fill(first.folder / ".git", "config")
    (first.folder / "val.lines").write_text("of a killed job")
    (first.folder / "notes.txt").write_text("mine")
    os.truncate(first.folder / "train.codes", 3)
    again()
    assert fault(str(first.folder)) is None and (first.folder / ".git" / "config").read_text() == "x"
    before["notes.txt"] = b"mine"
    assert {path.name: path.read_bytes() for path in first.folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("what", ["text", "dangling", "link", "pipe", "folder inside", "link inside"])
def test_what_is_in_the_way_is_said_and_stays(tmp_path, what):
    chosen, elsewhere = farmer(tmp_path), fill(tmp_path / "elsewhere", "train.codes", META)
    place = tmp_path / "out" / "prepared" / fingerprint(chosen)
    if "inside" in what:
        place, elsewhere = place / "train.codes", elsewhere / "train.codes"
    place.parent.mkdir(parents=True)
    make(place, what.split()[0], elsewhere)
    before = contents(tmp_path)
    with pytest.raises(UserError):
        prep.prepare(chosen, str(tmp_path / "out"), quiet)
    assert contents(tmp_path) == before
