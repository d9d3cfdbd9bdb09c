"""From tables of text to arrays: what is kept, what is rejected and why, the key, the split, and the folder itself."""

import csv
import dataclasses
import errno
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import write_csv
from hypothesis import given, settings
from hypothesis import strategies as st

from histocc import data_settings, findings, prepared_folder, row_writer, tables
from histocc import prepare as prep
from histocc.arrays import PreparedData
from histocc.data_report import report_lines
from histocc.data_settings import PrepareSettings, file_problems, fingerprint
from histocc.errors import UserError
from histocc.formatter import make_formatter
from histocc.row_writer import split_values
from histocc.text import text_hashes

HEADER = ("occ1", "hisco_1", "hisco_2")


def quiet(*_):
    pass


def settings_for(train, *, kind="hisco", cols=("hisco_1",), block_size=5, allow_short=False, **more):
    formatter = make_formatter(kind, list(cols), block_size, allow_short=allow_short)
    train = [train] if isinstance(train, (str, Path)) else train
    more = {"share_val": None if "val_files" in more else 0.0, **more}
    return PrepareSettings([str(path) for path in train], formatter.to_dict(), list(cols), **more)


class Result:
    """A prepared folder, read back as plain Python."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.data = PreparedData.open(folder)
        self.codes, self.report = self.data.codes, self.data.report
        self.train, self.val = (list(self.rows(part)) for part in (self.data.train, self.data.val))
        self.rejected = self.table("rejected_rows.csv")[1:]

    def rows(self, part):
        """(text, language, codes) of each row."""
        for i in range(len(part)):
            points, _ = part.texts(np.array([i]))
            yield ("".join(map(chr, points)), self.data.languages[part.language[i]],
                   [self.codes[number] for number in part.codes[i] if number >= 0])

    def table(self, name):
        with open(self.folder / name, encoding="utf-8", newline="") as file:
            return list(csv.reader(file))

    @property
    def texts(self):
        return [text for text, _, _ in self.train]

    @property
    def reasons(self):
        return [(int(row[1]), *row[2:4]) for row in self.rejected]


def prepare(tmp_path, content: str | bytes, **options) -> Result:
    """Prepares a file of this content."""
    path = tmp_path / "data.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    what = settings_for(path, **options)
    assert file_problems(what) == []
    return Result(prep.prepare(what, str(tmp_path / "out"), quiet))


def refusal(tmp_path, content: str | bytes, **options) -> str:
    """The message with which a file of this content is refused; nothing may stay behind."""
    folder = tmp_path / "refused"
    (folder / "out").mkdir(parents=True, exist_ok=True)
    with pytest.raises(UserError) as caught:
        prepare(folder, content, **options)
    assert list((folder / "out").iterdir()) == []
    return str(caught.value)


def problems(tmp_path, content: str | bytes, **options) -> list[str]:
    path = tmp_path / "data.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file_problems(settings_for(path, **options))


# ---- files that are tables

def test_plain_file(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1\nwine merchant,41025\nfarmer,61110\n")
    assert result.train == [("wine merchant", "unk", ["41025"]), ("farmer", "unk", ["61110"])]
    assert result.codes == ["41025", "61110"] and result.val == [] and result.rejected == []
    assert (result.report["rows"], result.report["train_rows"], result.report["codes"]) == (2, 2, 2)


@pytest.mark.parametrize("content", [
    b"\xef\xbb\xbfocc1,hisco_1\nv\xc3\xa6ver,75400\nfarmer,61110\n",
    b"occ1,hisco_1\r\nv\xc3\xa6ver,75400\r\nfarmer,61110\r\n",
    b"\xef\xbb\xbf\"occ1\";\"hisco_1\"\r\n\"v\xc3\xa6ver\";\"75400\"\r\nfarmer;61110",
    b"hisco_1\tnote\tocc1\n75400\ta, b; c\tv\xc3\xa6ver\n61110\t\tfarmer\n",
    b"\n".join([b"occ1,hisco_1", b"", b"v\xc3\xa6ver,75400", b"", b"farmer,61110", b"", b""]),
    b" occ1,occ1,hisco_1\nx,v\xc3\xa6ver,75400\nx,farmer,61110\n",
], ids=["BOM", "CRLF", "semicolon", "tab", "blank lines", "similar name"])
def test_ways_to_write_a_table(tmp_path, content):
    result = prepare(tmp_path, content)
    assert result.train == [("væver", "unk", ["75400"]), ("farmer", "unk", ["61110"])]
    assert result.report["rows"] == 2 and result.report["rejected_rows"] == 0


def test_texts_stay_as_they_are(tmp_path):
    texts = ["NA", "null", "nan", "None", "0123", "1e5", "TRUE", "a, b; c", 'said "hello"', "two\nlines", "cr\r\nlf",
             "huusmand  og\tvæver", "𝔊🙂", "ÆØÅ", "#N/A", "-", "'"]
    path = write_csv(tmp_path / "rows.csv", HEADER[:2], [(f"  {text} ", "61110") for text in texts])
    assert prepare(tmp_path, Path(path).read_bytes()).texts == texts


def test_rows_longer_than_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("histocc.table_files.CHUNK", 3)
    rows = [(f"{'ø𝔊' * (i % 4)}{i}", f"6111{i % 10}") for i in range(10)]
    result = prepare(tmp_path, "occ1,hisco_1\n" + "".join(f"{text},{code}\n" for text, code in rows))
    assert result.train == [(text, "unk", [code]) for text, code in rows]


def test_several_files(tmp_path):
    train = [write_csv(tmp_path / "a.csv", HEADER, [("farmer", "61110", "")]),
             write_csv(tmp_path / "b.csv", HEADER[::-1], [("", "41025", "merchant"), ("", "", "bad"), ("", "83110", "smith")])]
    val = write_csv(tmp_path / "v.csv", HEADER, [("farmer", "61120", ""), ("weaver", "75400", "")], delimiter=";")
    result = Result(prep.prepare(settings_for(train, cols=HEADER[1:], val_files=[val]), str(tmp_path / "out"), quiet))
    assert result.train == [("farmer", "unk", ["61110"]), ("merchant", "unk", ["41025"]), ("smith", "unk", ["83110"])]
    assert result.val == [("farmer", "unk", ["61120"]), ("weaver", "unk", ["75400"])]
    assert result.codes == ["41025", "61110", "61120", "75400", "83110"]     # of training and validation together
    assert [row[:2] for row in result.rejected] == [[train[1], "3"]]


# ---- files that are not

@pytest.mark.parametrize("content, words", [
    (b"", "is empty"), (b"\xef\xbb\xbf", "is empty"), (b"\n\nocc1,hisco_1\n", "first line"), (b"  \nocc1\n", "first line"),
    (b"v\xe6ver,hisco_1\n", "'v\xe6ver'"), (b"occ1\0,hisco_1\n", "not a text file"),
])
def test_no_table(tmp_path, content, words):
    [problem] = problems(tmp_path, content)
    assert "data.csv" in problem and words in problem


def test_no_file(tmp_path):
    what = settings_for([tmp_path / "none.csv", tmp_path], val_files=[str(tmp_path / "none.csv")])
    assert file_problems(what) == [f"{tmp_path / 'none.csv'}: no such file", f"{tmp_path}: is a folder, not a file"]


def test_missing_and_doubled_columns_are_named_together(tmp_path):
    first = write_csv(tmp_path / "a.csv", ("text", "hisco_1", "hisco_1", "x", "x"), [])
    second = write_csv(tmp_path / "b.csv", ("occ1", "hisco_1"), [])
    found = file_problems(settings_for(first, cols=HEADER[1:], val_files=[second], language_col="lang"))
    assert len(found) == 6
    assert [problem.split(": ")[0] for problem in found] == [first] * 4 + [second] * 2
    for problem, name in zip(found, ["occ1", "hisco_1", "hisco_2", "lang", "hisco_2", "lang"]):
        assert repr(name) in problem.partition("; it has ")[0]
    assert "it has 'text', 'hisco_1', 'hisco_1', 'x', 'x'" in found[0] and "2 times" in found[1]


@pytest.mark.parametrize("rows, words", [
    ("", "only column names"), ("\n\n", "only column names"),
    (",61110\nfarmer,\nfarmer,,\n", "1 × empty text; 1 × first code missing; 1 × wrong number of cells"),
])
def test_no_valid_row(tmp_path, rows, words):
    message = refusal(tmp_path, "occ1,hisco_1\n" + rows)
    assert "data.csv" in message and "no valid row" in message and words in message


def test_no_valid_row_to_validate_on(tmp_path):
    val = write_csv(tmp_path / "v.csv", HEADER, [("", "61110", "")])
    assert "v.csv: no valid row to validate on" in refusal(tmp_path, "occ1,hisco_1\nfarmer,61110\n", val_files=[val])


@pytest.mark.parametrize("row", ['83110,"smith', '"83110,smith', '83110,"smith\n61110,the "old" farmer'])
def test_quotation_mark_that_is_never_closed_does_not_swallow_rows(tmp_path, row):
    content = f"hisco_1,occ1\n61110,farmer\n{row}\n" + "61110,farm hand\n" * 20
    assert "data.csv, line 3: a quotation mark there is not closed" in refusal(tmp_path, content)


def test_a_quotation_mark_within_one_line_costs_that_row_alone(tmp_path):
    result = prepare(tmp_path, 'occ1,hisco_1\nfarmer,61110\n"old" smith,83110\n\nweaver,75400\n')
    assert result.texts == ["farmer", "weaver"] and [row[1] for row in result.rejected] == ["3"]
    assert result.report["rejected"] == {"broken quotation marks": 1}


# ---- rejected rows

def test_rejected_rows_are_listed(tmp_path):
    content = ("occ1,hisco_1,hisco_2\n"            # line 1
               "farmer,61110,\n"
               ",61110,\n"                         # line 3: no text
               "smith,,83110\n"                    # line 4: no first code
               '"two\nlines",83110,\n'             # lines 5 and 6
               "weaver,  ,\n"                      # line 7: a blank first code
               "\n"
               "tailor,79100\n"                    # line 9: two cells
               "baker,77610,7761x\n"               # line 10: the second code does not fit
               "cook,53100,,\n"                    # line 11: four cells
               "miller,77120,41025\n"              # line 12: outside the key
               '"no\n\ncode",,\n'                  # lines 13 to 15
               "carter,98620,\n")                  # line 16: outside the key
    result = prepare(tmp_path, content, cols=HEADER[1:], drop_bad_labels=True,
                     fixed_codes=["61110", "83110", "77610", "77120", "53100"])
    assert result.texts == ["farmer", "two\nlines"]
    assert result.table("rejected_rows.csv")[0] == ["file", "line", "column", "value", "reason"]
    assert {row[0] for row in result.rejected} == {str(tmp_path / "data.csv")}
    assert [row for row in result.reasons if row[0] not in (13, 14, 15)] == [
        (3, "occ1", ""), (4, "hisco_1", ""), (7, "hisco_1", "  "), (9, "", ""), (10, "hisco_2", "7761x"), (11, "", ""),
        (12, "hisco_2", "41025"), (16, "hisco_1", "98620")]
    reasons = {int(row[1]): row[4] for row in result.rejected}
    assert len(reasons) == 9 and any(line in reasons for line in (13, 14, 15))
    for line, words in {3: "description is empty", 4: "--missing-code", 9: "2 cells in the row, 3 columns", 10: "'x'",
                        11: "4 cells", 12: "'41025' is not among the 5 codes of the key"}.items():
        assert words in reasons[line]
    assert result.report["rejected"] == {"empty text": 1, "first code missing": 3, "wrong number of cells": 2,
                                         "code does not fit": 1, "code outside the key": 2}
    assert result.report["rows"] == 11 and result.report["rejected_rows"] == 9


CELLS = st.sampled_from(["61110", "83110", "1110", "-1", "", " ", "x", "61110.0"])
TEXTS = st.sampled_from(["farmer", "Farmer ", "smith", "baker", "miller", "", " "])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(TEXTS, CELLS, CELLS) | st.tuples(TEXTS, CELLS), max_size=25), st.sampled_from([0.0, 0.3, 0.6]),
       st.sampled_from([None, "-1", "61110"]), st.sampled_from([None, ["61110", "01110", "-1"]]))
def test_counts_of_the_report_add_up(rows, share_val, missing_code, fixed_codes):
    with tempfile.TemporaryDirectory() as folder:
        path = write_csv(Path(folder) / "data.csv", HEADER, [*rows, ("cook", "61110", ""), ("farmer", "61110", "")])
        what = settings_for(path, cols=HEADER[1:], share_val=share_val, missing_code=missing_code, fixed_codes=fixed_codes,
                            drop_bad_labels=True)
        try:
            result = Result(prep.prepare(what, folder, quiet))
        except UserError as error:
            assert "--share-val" in str(error)
            return
        report = result.report
        assert report["rows"] == len(rows) + 2 == report["train_rows"] + report["val_rows"] + report["rejected_rows"]
        assert (report["train_rows"], report["val_rows"]) == (len(result.train), len(result.val))
        assert report["rejected_rows"] == len(result.rejected) == sum(report["rejected"].values())
        assert report["codes"] == len(result.codes)
        assert sum(report["languages"].values()) == len(result.train) + len(result.val)


def test_report_says_what_happened_and_nothing_else(tmp_path):
    assert not any("Note" in line for line in report_lines(prepare(tmp_path, "occ1,hisco_1\nfarmer,61110\n").report))
    content = "occ1,hisco_1,hisco_2,lang\nfarmer,1110,1110,\nsmith,,,en\nbaker,,77610,en\n,61110,,en\n" + "x" * 130 + ",61110,,da\n"
    result = prepare(tmp_path, content, cols=HEADER[1:], language_col="lang", missing_code="-1")
    text = "\n".join(report_lines(result.report))
    for words in ("5 read, 4 for training, 0 for validation", "en 2", "unk 1", "Note: 2 codes got a lost leading zero",
                  "Note: 1 rows without a language are coded as unk", "Note: 1 descriptions are longer", "Note: 2 rows without a first",
                  "Note: 1 codes repeated", "Note: 1 rows rejected, listed in rejected_rows.csv", "1 × empty text (data.csv line 5)"):
        assert words in text


# ---- codes

def test_hisco_gets_its_leading_zero_back(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1\na,1110\nb,01110\nc,1110.0\nd,61110\ne,61110.0\nf,-1\ng,-3.0\n")
    assert [codes for _, _, codes in result.train] == [["01110"]] * 3 + [["61110"]] * 2 + [["-1"], ["-3"]]
    assert result.codes == ["-1", "-3", "01110", "61110"] and result.report["zeros_restored"] == 4


def test_general_formatter_restores_nothing(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1\na,1110\nb,01110\nc,NA\n", kind="gpf", allow_short=True)
    assert result.codes == ["01110", "1110"] and result.report["zeros_restored"] == 0 and result.report["codes_short"] == 1
    assert result.report["rejected"] == {"first code missing": 1}
    result = prepare(tmp_path, "occ1,hisco_1\na,1110\nc,NA\n", kind="gpf", allow_short=True, fixed_codes=["1110", "NA"])
    assert [codes for _, _, codes in result.train] == [["1110"], ["NA"]]             # the key has it: it is a code


def test_minus_codes_and_question_mark_are_never_short(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1\na,-1\nb,-2\nc,-3\nd,61110\ne,?\n", kind="gpf")
    assert result.codes == ["-1", "-2", "-3", "61110", "?"]


def test_bad_labels_stop_with_their_rows_and_the_flags(tmp_path):
    content = "occ1,hisco_1\nfarmer,61110\n" + "\n".join(f"smith,1{i}" for i in range(7)) + "\nmiller,77120\n"
    message = refusal(tmp_path, content, kind="gpf")
    assert "7 rows" in message and "block size 5" in message
    for i in range(findings.EXAMPLES):
        assert f"data.csv, line {i + 3}, column 'hisco_1': code '1{i}' has 2 tokens" in message
    assert f"'1{findings.EXAMPLES}'" not in message
    for flag in ("--allow-codes-shorter-than-block-size", "--drop-bad-labels", "--formatter hisco", "--block-size"):
        assert flag in message


def test_bad_labels_of_hisco_name_only_what_helps(tmp_path):
    message = refusal(tmp_path, "occ1,hisco_1,hisco_2\nfarmer,61110,\nsmith,83110,831\n", cols=HEADER[1:])
    assert "1 rows" in message and "line 3, column 'hisco_2': code '831'" in message and "--drop-bad-labels" in message
    assert "--allow-codes-shorter" not in message and "--formatter" not in message


def test_bad_labels_are_dropped_on_request(tmp_path):
    content = "occ1,hisco_1,hisco_2\nfarmer,61110,\nsmith,831,\nbaker,77610,7761012\n"
    result = prepare(tmp_path, content, kind="gpf", cols=HEADER[1:], drop_bad_labels=True)
    assert result.texts == ["farmer"] and result.reasons == [(3, "hisco_1", "831"), (4, "hisco_2", "7761012")]


def test_missing_first_code_rejects_and_missing_second_does_not(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1,hisco_2\na,61110,\nb,,61110\nc,   ,\nd,61110,   \n", cols=HEADER[1:])
    assert result.texts == ["a", "d"] and [row[0] for row in result.reasons] == [3, 4]


@pytest.mark.parametrize("kind, code", [("gpf", "?"), ("hisco", "-1"), ("hisco", "99999")])
def test_missing_code(tmp_path, kind, code):
    content = "occ1,hisco_1,hisco_2\na,61110,\nb,,\nc, ,61110\n,,\n"
    result = prepare(tmp_path, content, kind=kind, cols=HEADER[1:], missing_code=code)
    assert [codes for _, _, codes in result.train] == [["61110"], [code], [code, "61110"]]
    assert result.report["missing_code_used"] == 2 and [row[0] for row in result.reasons] == [5]


def test_missing_code_that_the_key_does_not_have(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1\na,61110\nb,\n", missing_code="-1", fixed_codes=["61110"])
    assert result.texts == ["a"] and result.report["rejected"] == {"code outside the key": 1}


def test_repeated_codes_count_once(tmp_path):
    content = "occ1,hisco_1,hisco_2,hisco_3\na,61110,61110,83110\nb,1110,01110,\nc,83110,,61110\nd,61110,83110,61110\n"
    result = prepare(tmp_path, content, cols=("hisco_1", "hisco_2", "hisco_3"))
    assert [codes for _, _, codes in result.train] == [["61110", "83110"], ["01110"], ["83110", "61110"], ["61110", "83110"]]
    assert result.report["codes_repeated"] == 3
    assert result.data.train.codes.tolist() == [[1, 2, -1], [0, -1, -1], [2, 1, -1], [1, 2, -1]]


# ---- key

def test_key_is_sorted_and_of_both_parts(tmp_path):
    val = write_csv(tmp_path / "v.csv", HEADER, [("x", "41025", "")])
    result = prepare(tmp_path, "occ1,hisco_1\na,83110\nb,1110\nc,61110\n", val_files=[val])
    assert result.table("key.csv") == [["system_code", "code"], ["01110", "0"], ["41025", "1"], ["61110", "2"], ["83110", "3"]]
    assert result.data.train.codes[:, 0].tolist() == [3, 0, 2] and result.data.val.codes[:, 0].tolist() == [1]


def test_key_holds_no_code_of_rejected_rows_alone(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1,hisco_2\na,61110,\nb,83110,x\n", cols=HEADER[1:], drop_bad_labels=True)
    assert result.codes == ["61110"]


def test_key_holds_the_missing_code_only_where_used(tmp_path):
    assert prepare(tmp_path, "occ1,hisco_1\na,61110\n", missing_code="-1").codes == ["61110"]


def test_fixed_codes_keep_their_order(tmp_path):
    fixed = ["83110", "-1", "61110", "00001"]
    result = prepare(tmp_path, "occ1,hisco_1\na,61110\nb,83110\nc,77610\n", fixed_codes=fixed)
    assert result.codes == fixed == [row[0] for row in result.table("key.csv")[1:]]
    assert result.train == [("a", "unk", ["61110"]), ("b", "unk", ["83110"])]
    assert result.data.train.codes.tolist() == [[2], [0]]
    assert result.reasons == [(4, "hisco_1", "77610")] and result.report["rejected"] == {"code outside the key": 1}


def test_columns_of_numbers(tmp_path):
    content = "occ1,code1,code2\na,0,\nb,2,1\nc,1.0,-1\nd,3,\ne,x,\nf,,0\ng,-1,\n"
    result = prepare(tmp_path, content, cols=("code1", "code2"), numbered=True, drop_bad_labels=True,
                     fixed_codes=["-1", "61110", "01110"])
    assert [(text, codes) for text, _, codes in result.train] == [("a", ["-1"]), ("b", ["01110", "61110"])]
    assert result.reasons == [(4, "code2", "-1"), (5, "code1", "3"), (6, "code1", "x"), (7, "code1", ""), (8, "code1", "-1")]
    assert "0 … 2" in result.rejected[1][4] and result.report["zeros_restored"] == 0


def test_numbers_with_a_missing_code(tmp_path):
    """--missing-code is a code, whatever the cells hold."""
    result = prepare(tmp_path, "occ1,code1\na,1\nb,\n", cols=("code1",), numbered=True, missing_code="-1",
                     fixed_codes=["-1", "61110"])
    assert [codes for _, _, codes in result.train] == [["61110"], ["-1"]]


# ---- languages

def test_language_of_all_rows(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1\na,61110\nb,61110\n", language="da")
    assert [language for _, language, _ in result.train] == ["da", "da"] and result.data.languages == ["unk", "da"]
    assert result.report["languages"] == {"da": 2} and result.report["language_missing"] == 0


def test_language_column(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1,lang\na,61110,se\nb,61110,\nc,61110, da \nd,61110,se\n", language_col="lang")
    assert [language for _, language, _ in result.train] == ["se", "unk", "da", "se"]
    assert result.report["languages"] == {"se": 2, "unk": 1, "da": 1} and result.report["language_missing"] == 1


def test_too_many_languages(tmp_path, monkeypatch):
    monkeypatch.setattr("histocc.code_book.MOST_LANGUAGES", 3)
    content = "occ1,hisco_1,lang\na,61110,se\nb,61110,da\n"
    assert len(prepare(tmp_path, content, language_col="lang").train) == 2
    assert "'lang'" in refusal(tmp_path, content + "c,61110,en\n", language_col="lang")


@pytest.mark.parametrize("letters, cut", [(121 - 2, 0), (121 - 1, 1)])
def test_descriptions_that_will_be_cut_are_counted(tmp_path, letters, cut):
    """[CLS], two letters of language, five of [SEP], the text, [SEP]: 128 positions in all."""
    assert prepare(tmp_path, f"occ1,hisco_1\n{'x' * letters},61110\n", language="en").report["texts_cut"] == cut


# ---- training and validation

def many(n: int, repeat: int = 1) -> list[tuple[str, str]]:
    return [(f"occupation {i % n}", "61110") for i in range(n * repeat)]


def test_same_text_is_on_the_same_side(tmp_path):
    rows = [(variant, "61110") for i in range(200) for text in [f"Old smed {i} og væver"]
            for variant in (text, text.upper(), text.lower(), f" {text}  ", text.replace(" ", "   "), text.replace(" ", "\t"))]
    result = prepare(tmp_path, Path(write_csv(tmp_path / "rows.csv", HEADER[:2], rows)).read_bytes(), share_val=0.3)
    sides = [{" ".join(text.lower().split()) for text, _, _ in part} for part in (result.train, result.val)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 200 and len(sides[1]) > 20
    assert len(result.train) == 6 * len(sides[0]) and len(result.val) == 6 * len(sides[1])


def test_split_depends_on_the_text_alone(tmp_path):
    rows = many(300)
    forwards, backwards, more = (
        {text for text, _, _ in prepare(tmp_path, Path(write_csv(tmp_path / "rows.csv", HEADER[:2], chosen)).read_bytes(),
                                        share_val=share).val}
        for chosen, share in ((rows, 0.1), ([*rows[::-1], ("other", "83110")], 0.1), (rows, 0.2)))
    assert forwards == backwards - {"other"} and forwards < more


def test_share_of_texts():
    values = split_values(text_hashes([f"occupation {i}" for i in range(10_000)]))
    assert 0 <= values.min() and values.max() < 1
    for share in (0.05, 0.1, 0.5):
        assert abs((values < share).mean() - share) < 5 * (share * (1 - share) / len(values))**0.5


def test_split_is_the_same_on_every_machine():
    values = split_values(text_hashes(["Wine  merchant", "wine merchant", "wine merchants", "ÆBLE 𝔊", "æble 𝔊"]))
    assert values[0] == values[1] == 0.9023891211929064 and values[3] == values[4] and len(set(values)) == 3


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=12))
def test_texts_have_the_same_number_only_if_they_differ_in_case_and_blanks_alone(texts):
    texts = [text for text in (text.replace("\0", "").strip() for text in texts) if text] or ["x"]
    same = [" ".join(text.casefold().split()) for text in texts]
    numbers = text_hashes(texts)
    assert all((a == b) == (one == other) for a, one in zip(numbers, same) for b, other in zip(numbers, same))
    assert numbers.tolist() == [int(text_hashes([text])[0]) for text in texts]       # the others play no part


def test_whole_shares(tmp_path):
    content = Path(write_csv(tmp_path / "rows.csv", HEADER[:2], many(40))).read_bytes()
    assert prepare(tmp_path, content, share_val=0.0).val == []
    assert "lower --share-val" in refusal(tmp_path, content, share_val=1.0)
    assert "raise it" in refusal(tmp_path, "occ1,hisco_1\noccupation 3,61110\n", share_val=1e-9)


def test_files_of_their_own_are_not_split(tmp_path):
    val = write_csv(tmp_path / "v.csv", HEADER, [(text, code, "") for text, code in many(50)])
    result = prepare(tmp_path, Path(write_csv(tmp_path / "rows.csv", HEADER[:2], many(60))).read_bytes(), val_files=[val])
    assert (len(result.train), len(result.val)) == (60, 50)


# ---- words

def test_words_of_the_training_texts(tmp_path):
    val = write_csv(tmp_path / "v.csv", HEADER, [("unseen word", "61110", "")])
    content = 'occ1,hisco_1\nfarm hand,61110\n"hand, old\thand",61110\nFarm,61110\nrejected,\n'
    result = prepare(tmp_path, content, val_files=[val])
    assert result.table("words.csv") == [["word", "freq"], ["hand", "2"], ["Farm", "1"], ["farm", "1"], ["hand,", "1"], ["old", "1"]]
    assert tables.read_words(str(result.folder / "words.csv")) == {"hand": 2, "Farm": 1, "farm": 1, "hand,": 1, "old": 1}


def test_the_most_frequent_words_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MOST_WORDS", 2)
    result = prepare(tmp_path, "occ1,hisco_1\na b c b c c,61110\n")
    assert result.table("words.csv")[1:] == [["c", "3"], ["b", "2"]]


# ---- the folder

def test_found_again(tmp_path):
    path = write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", "")])
    said = []
    folder = prep.prepare(settings_for(path), str(tmp_path / "out"), said.append)
    before = {file.name: file.stat().st_mtime_ns for file in Path(folder).iterdir()}
    assert said == [f"Preparing data: {path}"]
    os.rename(path, tmp_path / "renamed.csv")                        # the content counts, not the path
    assert prep.prepare(settings_for(tmp_path / "renamed.csv"), str(tmp_path / "out"), said.append) == folder
    assert said[1] == f"Prepared data: found in {folder}, made from {path}" and {file.name: file.stat().st_mtime_ns for file in Path(folder).iterdir()} == before
    assert sorted(before) == ["conflicts.csv", "data_report.json", "key.csv", "meta.json", "rejected_rows.csv",
                              *(f"{part}.{name}" for part in ("train", "val") for name in ("chars", "codes", "language", "offsets", "text_hash")),
                              "words.csv"]


def test_a_changed_byte_is_prepared_anew(tmp_path):
    first = prepare(tmp_path, "occ1,hisco_1\nfarmer,61110\n")
    second = prepare(tmp_path, "occ1,hisco_1\nfarmes,61110\n")
    assert first.folder != second.folder and (first.texts, second.texts) == (["farmer"], ["farmes"])


def test_every_setting_counts(tmp_path, monkeypatch):
    a, b = (write_csv(tmp_path / name, HEADER, [(name, "61110", "")]) for name in ("a.csv", "b.csv"))
    plain = settings_for(a, val_files=[b])
    other = {"train_files": [a, a], "val_files": [], "formatter": make_formatter("gpf", ["hisco_1"]).to_dict(),
             "target_cols": ["hisco_2"], "share_val": 0.1, "input_col": "x", "language": "en", "language_col": "lang",
             "max_len": 64, "missing_code": "-1", "drop_bad_labels": True, "fixed_codes": ["61110"], "numbered": True, "delimiter": ";"}
    assert set(other) == {field.name for field in dataclasses.fields(PrepareSettings)}
    changed = [dataclasses.replace(plain, **{name: value}) for name, value in other.items()]
    changed += [dataclasses.replace(plain, train_files=[b], val_files=[a]), dataclasses.replace(plain, train_files=[a, b], val_files=[])]
    prints = [fingerprint(what) for what in (plain, *changed)]
    assert len(set(prints)) == len(prints) and fingerprint(plain) == prints[0]
    monkeypatch.setattr(data_settings, "PREPARED_FORMAT", data_settings.PREPARED_FORMAT + 1)
    assert fingerprint(plain) != prints[0]


def test_nothing_stays_behind_after_an_error(tmp_path, monkeypatch):
    path = write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", "")])

    def fails(*_):
        raise OSError("disk full")
    for name in ("write_key", "write_words"):
        with monkeypatch.context() as patch:
            patch.setattr(prep, name, fails)
            with pytest.raises(UserError, match="could not be prepared in .*: disk full"):
                prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
        assert [file.name for file in tmp_path.iterdir()] == ["data.csv"]


def test_an_error_leaves_other_prepared_data_alone(tmp_path):
    folder = prepare(tmp_path, "occ1,hisco_1\nfarmer,61110\n").folder
    with pytest.raises(UserError):
        prepare(tmp_path, "occ1,hisco_1\nfarmer,\n")
    assert list(folder.parent.iterdir()) == [folder] and Result(str(folder)).texts == ["farmer"]


def test_a_killed_preparation_leaves_nothing_that_stays(tmp_path):
    """A real process, killed while it writes; what it left is removed by the next, and the result is whole."""
    path = write_csv(tmp_path / "data.csv", HEADER, [(f"occupation {i}", "61110", "") for i in range(3000)])
    root, fork = tmp_path / "out" / "prepared", multiprocessing.get_context("fork")
    reached = fork.Event()

    def work():
        prep.write_key = lambda *_: (reached.set(), time.sleep(60))
        prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
    process = fork.Process(target=work)
    process.start()
    assert reached.wait(30)
    assert [name for name in os.listdir(root) if name != ".lock"][0].startswith(".")
    process.kill()
    process.join()
    result = Result(prep.prepare(settings_for(path), str(tmp_path / "out"), quiet))
    assert len(result.train) == 3000 and os.listdir(root) == [result.folder.name]


def test_without_locks_the_first_to_finish_wins(tmp_path, monkeypatch):
    """On a file system that has none: another job finishes the same while this one writes."""
    path = write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", "")])
    rename, others = os.rename, []

    def no_lock(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    def rename_after_the_other(source, target):
        monkeypatch.setattr(prepared_folder.os, "rename", rename)
        others.append(prep.prepare(settings_for(path), str(tmp_path / "out"), quiet))
        rename(source, target)
    monkeypatch.setattr(prepared_folder.fcntl, "flock", no_lock)
    monkeypatch.setattr(prepared_folder.os, "rename", rename_after_the_other)
    folder = prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
    assert [folder] == others and Result(folder).texts == ["farmer"]
    assert [entry.name for entry in Path(folder).parent.iterdir()] == [Path(folder).name]


def test_several_processes_at_once_do_the_work_once(tmp_path):
    path = write_csv(tmp_path / "data.csv", HEADER, [(f"occupation {i}", "61110", "") for i in range(3000)])
    fork = multiprocessing.get_context("fork")
    barrier, answers = fork.Barrier(3), fork.Queue()

    def work():
        written, said, write_key = [], [], prep.write_key
        prep.write_key = lambda *arguments: (written.append(1), time.sleep(0.5), write_key(*arguments))
        barrier.wait()
        answers.put((prep.prepare(settings_for(path), str(tmp_path / "out"), said.append), len(written), said[1:]))
    processes = [fork.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    found = sorted((answers.get(timeout=60) for _ in processes), key=lambda answer: -answer[1])
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0, 0] and len({folder for folder, *_ in found}) == 1
    assert [count for _, count, _ in found] == [1, 0, 0]
    assert found[0][2] == [] and all("Waiting for another job" in said for _, _, [said] in found[1:])
    folder = found[0][0]
    assert len(Result(folder).train) == 3000 and os.listdir(Path(folder).parent) == [Path(folder).name]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path, finish = write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", "")]), prep.Reader.finish

    def finish_and_change(reader):
        write_csv(path, HEADER, [("farmer", "61110", ""), ("smith", "83110", "")])
        return finish(reader)
    monkeypatch.setattr(prep.Reader, "finish", finish_and_change)
    with pytest.raises(UserError, match="data.csv changed while it was read"):
        prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
    assert not (tmp_path / "out").exists()


def test_lists_can_be_read_again_whatever_their_texts(tmp_path):
    content = 'occ1,hisco_1\n"a\rb",61110\n"a\rb",83110\n"c\rd",\n'
    result = prepare(tmp_path, content)
    assert [row[0] for row in result.table("conflicts.csv")[1:]] == ["a\rb"] * 2
    assert [len(row) for row in result.table("rejected_rows.csv")] == [5, 5] and result.reasons[0][0] == 6


@pytest.fixture
def second_process(monkeypatch):
    """Writing goes on in a process of its own from the second chunk on, as it does with many rows."""
    monkeypatch.setattr("histocc.table_files.CHUNK", 7)
    monkeypatch.setattr(row_writer, "PROCESS_FROM", 2)
    monkeypatch.setattr(row_writer.os, "sched_getaffinity", lambda _: {0, 1})


def test_a_second_process_writes_the_same(tmp_path, request):
    path = write_csv(tmp_path / "data.csv", HEADER, [(f"occupation {i % 40} ø𝔊", "61110", ("", "83110")[i % 2]) for i in range(200)])
    folders = []
    for name in ("alone", "beside"):
        folders.append(Path(prep.prepare(settings_for(path, cols=HEADER[1:], share_val=0.3), str(tmp_path / name), quiet)))
        request.getfixturevalue("second_process")
    assert [file.name for file in sorted(folders[0].iterdir())] == [file.name for file in sorted(folders[1].iterdir())]
    for file in folders[0].iterdir():
        assert file.read_bytes() == (folders[1] / file.name).read_bytes()


@pytest.mark.parametrize("end, words", [("full", "No space left on device"), ("killed", "process that writes the prepared data has died")])
def test_what_happens_to_the_second_process_is_said(tmp_path, second_process, monkeypatch, end, words):
    path, reader, add = write_csv(tmp_path / "data.csv", HEADER, [(f"occupation {i}", "61110", "") for i in range(20_000)]), os.getpid(), row_writer.PartFiles.add

    def fails(self, *arguments, **arrays):
        if os.getpid() != reader and self.info.rows > 50:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, *arguments, **arrays)
    monkeypatch.setattr(row_writer.PartFiles, "add", fails)
    with pytest.raises(UserError, match=words):
        prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
    assert [file.name for file in tmp_path.iterdir()] == ["data.csv"] and multiprocessing.active_children() == []


def test_words_of_many_rows_are_counted_in_a_part_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr("histocc.table_files.CHUNK", 10)
    monkeypatch.setattr(row_writer, "ALL_WORDS_OF", 20)
    monkeypatch.setattr(row_writer, "MOST_COUNTED_WORDS", 15)
    rows = [("common " + ("often" if i % 2 else f"once{i}"), "61110") for i in range(200)]
    result = prepare(tmp_path, Path(write_csv(tmp_path / "rows.csv", HEADER[:2], rows)).read_bytes())
    words = {word: int(count) for word, count in result.table("words.csv")[1:]}
    assert 40 < words["common"] < 80 and abs(words["often"] * 2 - words["common"]) <= 2 and len(words) <= 15


def test_description_of_the_folder_is_written_last(tmp_path, monkeypatch):
    """Who finds meta.json finds the rest."""
    present, write_last = [], prep.write_last
    monkeypatch.setattr(prep, "write_last", lambda folder, content: (present.extend(os.listdir(folder)), write_last(folder, content)))
    folder = prepare(tmp_path, "occ1,hisco_1\nfarmer,61110\n").folder
    assert sorted([*present, "meta.json"]) == sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("damage", ["short", "missing", "no json"])
def test_a_damaged_folder_is_made_anew(tmp_path, damage):
    content = "occ1,hisco_1\nfarmer,61110\nsmith,83110\n"
    folder = prepare(tmp_path, content).folder
    file = folder / ("meta.json" if damage == "no json" else "train.codes")
    file.unlink() if damage == "missing" else os.truncate(file, file.stat().st_size - 1)
    assert prepare(tmp_path, content).texts == ["farmer", "smith"] and os.listdir(folder.parent) == [folder.name]


# ---- tables

def test_target_columns_that_a_file_has():
    def find(*names, **options):
        return tables.find_target_columns(["occ1", *names], **options)
    assert find("hisco_1", "hisco_2", "hisco_4", "OCC1950_1", "code1") == ("hisco", ["hisco_1", "hisco_2", "hisco_4"])
    assert find("code1", "code2", "hisco_1", has_key=True) == ("hisco", ["code1", "code2"])
    assert find("code1", "code2") is None and find("hisco_2") is None
    assert find("OCC1950_2", "OCC1950_1") == ("occ1950", ["OCC1950_1", "OCC1950_2"])
    assert find("icem_1", "icem_2", naming="icem") == ("gpf", ["icem_1", "icem_2"])


@pytest.mark.parametrize("columns, numbers", [(["code1"], True), (["code1", "code2"], True), (["code1", "hisco_1"], False),
                                              (["code"], False), (["code1x"], False)])
def test_columns_that_hold_numbers(columns, numbers):
    assert tables.hold_numbers(columns) is numbers


def write_key(tmp_path, text: str) -> str:
    (tmp_path / "key.csv").write_text(text, encoding="utf-8")
    return str(tmp_path / "key.csv")


@pytest.mark.parametrize("text", [
    "system_code,code\n-3,0\n01110,1\n61110,2\n", "en_hisco_text,hisco,code\nempty, ,NA\nx,01110,1\n\"y, z\",61110,2\nw,-3,0\n"])
def test_key_file(tmp_path, text):
    assert tables.read_key(write_key(tmp_path, text)) == ["-3", "01110", "61110"]


@pytest.mark.parametrize("text, words", [
    ("hisco\n61110\n", "'code' and 'system_code'"), ("code,x\n0,61110\n", "'code' and 'system_code'"),
    ("system_code,code\n", "number the codes"), ("system_code,code\na,0\nb,2\n", "without a gap"), ("system_code,code\na,1\n", "without a gap"),
    ("system_code,code\na,0\nb,0\n", "each once"), ("system_code,code\na,x\n", "'x'"), ("system_code,code\na,-1\n", "'-1'"),
    ("system_code,code\na,\n", "''")])
def test_key_file_with_faults(tmp_path, text, words):
    with pytest.raises(UserError, match=words) as caught:
        tables.read_key(write_key(tmp_path, text))
    assert "key.csv" in str(caught.value)


def test_key_file_with_a_short_row_is_refused_not_shifted(tmp_path):
    with pytest.raises(UserError, match="key.csv"):
        tables.read_key(write_key(tmp_path, "code,system_code\n0,61110\n1\n2,83110\n"))


def test_key_file_with_a_code_twice_is_refused(tmp_path):
    with pytest.raises(UserError, match="61110"):
        tables.read_key(write_key(tmp_path, "system_code,code\n61110,0\n83110,1\n61110,2\n"))


def test_word_file(tmp_path):
    assert tables.read_words(write_key(tmp_path, "freq;word\n3;og\n1;NA\n")) == {"og": 3, "NA": 1}


@pytest.mark.parametrize("text", ["word,freq\n", "word,freq\na,x\n", "word,freq\n,3\n", "word,freq\na,1.5\n", "word,freq\na,1\nb\nc,2\n", "a,b\n1,2\n"])
def test_word_file_with_faults(tmp_path, text):
    with pytest.raises(UserError, match="key.csv"):
        tables.read_words(write_key(tmp_path, text))


def test_flags_for_the_launchers(tmp_path, capsys):
    path = write_csv(tmp_path / "a.csv", ("occ1", "OCC1950_1", "OCC1950_2"), [])
    assert tables.main([path]) == 0
    assert capsys.readouterr().out.split() == ["--formatter", "occ1950", "--target-cols", "OCC1950_1", "OCC1950_2"]
    for file, words in ((write_csv(tmp_path / "b.csv", ("occ1", "x"), []), "--target-cols"), (str(tmp_path / "none"), "no such file")):
        assert tables.main([file]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and words in err
