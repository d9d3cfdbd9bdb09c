"""Codes and languages of rows: what is repaired, told, separated and rejected."""

from collections import Counter

import pytest
from helpers import run_inside, words, write_csv
from preparing import HEADER, codes_of, prepare, refusal
from test_prepare import table

from histocc import prepare as command
from histocc.data import report as data_report
from histocc.data import rows
from histocc.data.split import split_values
from histocc.formatter import classes_in_words
from histocc.text import text_hashes


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
SPELLINGS, DATES = "I5.9 I5.9 i5.9 I59 1.11 11.1 111", "01.1 2024-10-01 1E5 Jan-10"
ONE_OF_MANY = "7000.0 7001.0 7002.0 " * 10 + "7213.5"


@pytest.mark.parametrize(
    "cells, more, codes, counts, words",
    [
        ("0110 110 110.0 2111 5223 7", {}, "0110 2111 5223 7", {"zeros_restored": 2}, ""),
        ("110 2000 2001 2002 2003 2004", {}, None, {}, "than the other 5 with 4 digits (1): 110; if"),
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
        ("83 110 83,110", {}, None, {}, "look like several in one cell, such as '83,110': 1; separate"),
        ("110.0 2111 9", {"fixed_codes": ["0110", "2111", "9"]}, "0110 2111 9", {"zeros_restored": 1}, ""),
        (SPELLINGS, {}, None, {}, "I59 for I5.9, i5.9 for I5.9; join them with --recode spellings"),
        ("é1 \u200be\u03011 \ufeffE\u03011 é1", {"join_spellings": True}, "é1", {}, ""),
        (SPELLINGS, {"join_spellings": True}, "1.11 11.1 111 I5.9", {}, ""),
        (ONE_OF_MANY, {}, "7000 7001 7002 7213.5", {"zeros_restored": 30}, "are whole (1): 7213.5;"),
        (DATES, {}, None, {}, "codes like dates or powers of ten, such as '2024-10-01': 2; did"),
        ("B5|J1.8 B5|J1.9 B5", {}, None, {}, "such as 'B5|J1.8': 2; separate them with --code-separator '|'"),
    ],
)
def test_what_all_codes_together_tell(tmp_path, cells, more, codes, counts, words):
    rows = [(f"text {i}", cell) for i, cell in enumerate(cells.split())]
    result = prepare(tmp_path, [HEADER[:2], *rows], kind="classes", **more)
    assert sorted(result.codes) == sorted(codes.split() if codes else set(cells.split()))
    assert result.report | counts == result.report and result.report["rejected_rows"] == 0
    notes = [line for line in result.report["read"] if line.startswith("Note")]
    assert [words in note for note in notes] == [True] * bool(words)
    assert f"({classes_in_words(result.codes)})" in result.report["read"][0]


FORMS = {  # of 08311 and 83110
    "codes_unguarded": [
        *('="08311"', "'08311", '"08311"', "'08311'", "=08311"),
        *('=T("08311")', '= "08311"', "“08311”", "‘08311"),
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
    result = prepare(tmp_path, [HEADER[:2], *rows], kind=kind)
    read = dict(zip((cell for _, cell in cells), codes_of(result), strict=True))
    assert read == {cell: ["83110" if name == "codes_grouped" else "08311"] for name, cell in cells}
    counts = {name: len(cells) for name, cells in forms.items()}
    counts["codes_unguarded"] += "codes_grouped" in forms  # '83'110
    assert result.report | counts == result.report
    lines = data_report.report_lines(result.report)
    assert all(any(rows_of[0] and repr(rows_of[0]) in line for line in lines) for rows_of in forms.values())


@pytest.mark.parametrize("cell", ["A'1", "l'a", "'s b", "x²", "Ⅳ", "é1", "a\xa0b", '"a" "b"', "1,5", "9.5"])
def test_other_signs_belong_to_a_code(tmp_path, cell):
    result = prepare(tmp_path, [HEADER[:2], ("a", cell), ("b", "83110")], kind="classes")
    assert codes_of(result) == [[cell], ["83110"]]


THREE = ["83110", "51020", "61110"]


@pytest.mark.parametrize(
    "cells, separator",
    [
        (["83110#51020"], "#"),
        *(([f"83110 {word} 51020"], word) for word in words("and og och und et en y e AND")),
        (["83110 & 51020"], "&"),
        (["83110\n51020", "83110\r\n51020"], r"\n"),
        (["83110\t51020"], r"\t"),
        (["83110  51020", "83110\xa0\xa051020"], "  "),
        (["83110 u. 51020"], "u."),
        (["83110 51020"], " "),
        (["83110:51020"], ":"),
        (["83110, 51020 and 61110"], ", and"),
        (["83110#51020", "51020;61110", "83110+61110"], "#;+"),
    ],
)
@pytest.mark.parametrize("formatter", ["auto", "hisco"])
def test_several_codes_in_one_cell_are_told_by_the_codes(tmp_path, formatter, cells, separator):
    rows = [(f"t{x}", x) for x in THREE] + [(x, x) for x in cells]
    data = write_csv(tmp_path / "a.csv", HEADER[:2], rows)
    flags = [data, "--target-cols", "hisco_1", "--share-val", 0, "--formatter", formatter, "--save-path"]
    code, said = run_inside(command.main, *flags, tmp_path / "out")
    flag = f"--code-separator '{separator.lower()}'"
    assert code == (2 if formatter == "hisco" else 0) and (flag in said or len(cells) > 1)
    code, said = run_inside(command.main, *flags, tmp_path / "out2", "--code-separator", separator.lower())
    codes = Counter(len([x for x in THREE if x in cell]) for cell in cells)
    assert code == 0 and all(f"{'s' * (n > 1)}: {rows}" in said for n, rows in codes.items())
    assert "(3 classes" in said or formatter == "hisco"


def test_recoded_codes_are_read_as_those_of_rows(tmp_path):
    for kind, old in (("hisco", "1110"), ("classes", "'01110")):
        result = prepare(tmp_path, "occ1,hisco_1\na,01110\nb,61110\n", kind=kind, recode={old: '="83110"'})
        assert result.codes == ["61110", "83110"] and result.report["codes_recoded"] == 1


def test_a_row_of_letters_has_as_many_codes_as_its_cells_hold(tmp_path):
    data = write_csv(tmp_path / "a.csv", HEADER[:2], [("a", "61110 | 61120|61130"), ("b", "61110|61110")])
    flags = words("--target-cols hisco_1 --share-val 0 --formatter gpf --block-size 5 --code-separator |")
    code, said = run_inside(command.main, data, *flags, "--save-path", tmp_path / "out")
    assert code == 0 and "rows with 1 code: 1; rows with 3 codes: 1" in said


def test_rows_outside_the_key_count_by_part_and_weight(tmp_path):
    texts = [f"text {i}" for i in range(20)]
    cells = [*((f"a{i}", "61110", 1) for i in range(10)), *((text, "99990", 3) for text in texts)]
    how = {"share_val": 0.5, "weight_col": "n", "fixed_codes": ["61110"]}
    report = prepare(tmp_path, [("occ1", "hisco_1", "n"), *cells], **how).report
    val = int((split_values(text_hashes(texts)) < 0.5).sum())
    assert report["rows_outside_key"] == {"train": 3 * (20 - val), "val": 3 * val} and 3 < val < 17


def test_bad_labels_stop_with_their_rows_and_the_flags_that_help(tmp_path):
    content = "occ1,hisco_1\nfarmer,61110\n" + "\n".join(f"smith,1{i}" for i in range(7)) + "\nmiller,77120\n"
    message = refusal(tmp_path, content, kind="gpf")
    assert "7 rows" in message and "length 5" in message and f"'1{rows.EXAMPLES}'" not in message
    for i in range(rows.EXAMPLES):
        assert f"data.csv, line {i + 3}, column 'hisco_1': code '1{i}' has a length of 2" in message
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
