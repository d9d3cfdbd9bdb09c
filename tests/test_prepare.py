"""From tables of text to arrays: what is kept, what is rejected and why, the key, and the split."""

import tempfile
from pathlib import Path

import pytest
from helpers import examples, write_csv
from hypothesis import given
from hypothesis import strategies as st
from preparing import HEADER, Result, prepare, problems, quiet, refusal, settings_for

from histocc.data import prepare as prep
from histocc.data import rows
from histocc.data.config import file_problems
from histocc.data.prepare import split_values
from histocc.data.report import report_lines
from histocc.runtime.errors import UserError
from histocc.text import text_hashes


def codes_of(result: Result) -> list[list[str]]:
    return [codes for _, _, codes in result.train]


def csv(*rows: str, header: str = "occ1,hisco_1,hisco_2") -> str:
    return "\n".join([header, *rows, ""])


# ---- files that are tables


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfocc1,hisco_1\nv\xc3\xa6ver,75400\nfarmer,61110\n",
        b"occ1,hisco_1\r\nv\xc3\xa6ver,75400\r\nfarmer,61110\r\n",
        b'\xef\xbb\xbf"occ1";"hisco_1"\r\n"v\xc3\xa6ver";"75400"\r\nfarmer;61110',
        b"hisco_1\tnote\tocc1\n75400\ta, b; c\tv\xc3\xa6ver\n61110\t\tfarmer\n",
        b"\n".join([b"occ1,hisco_1", b"", b"v\xc3\xa6ver,75400", b"", b"farmer,61110", b"", b""]),
        b" occ1,occ1,hisco_1\nx,v\xc3\xa6ver,75400\nx,farmer,61110\n",
    ],
    ids=["BOM", "CRLF", "semicolon", "tab", "blank lines", "similar name"],
)
def test_ways_to_write_a_table(tmp_path, content):
    result = prepare(tmp_path, content)
    assert result.train == [("væver", "unk", ["75400"]), ("farmer", "unk", ["61110"])] and result.val == []
    assert result.codes == ["61110", "75400"] and result.rejected == []
    assert (result.report["rows"], result.report["train_rows"], result.report["codes"]) == (2, 2, 2)


def test_texts_stay_as_they_are_in_every_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("histocc.data.tables.CHUNK", 3)
    texts = ["NA", "null", "nan", "None", "0123", "1e5", "TRUE", "a, b; c", 'said "hello"', "two\nlines"]
    texts += ["cr\r\nlf", "huusmand  og\tvæver", "𝔊🙂", "ÆØÅ", "#N/A", "-", "'"]
    rows = [(f"  {text} ", f"6111{i % 10}") for i, text in enumerate(texts)]
    result = prepare(tmp_path, Path(write_csv(tmp_path / "rows.csv", HEADER[:2], rows)).read_bytes())
    assert result.train == [(text, "unk", [f"6111{i % 10}"]) for i, text in enumerate(texts)]


def test_several_files(tmp_path):
    others = [("", "41025", "merchant"), ("", "", "bad"), ("", "83110", "smith")]
    train = [
        write_csv(tmp_path / "a.csv", HEADER, [("farmer", "61110", "")]),
        write_csv(tmp_path / "b.csv", HEADER[::-1], others),
    ]
    val = [("farmer", "61120", ""), ("weaver", "75400", "")]
    val = write_csv(tmp_path / "v.csv", HEADER, val, delimiter=";")
    settings = settings_for(train, cols=HEADER[1:], val_files=[val])
    result = Result(prep.prepare(settings, str(tmp_path / "out"), quiet))
    assert result.texts == ["farmer", "merchant", "smith"]
    assert result.val == [("farmer", "unk", ["61120"]), ("weaver", "unk", ["75400"])]
    assert result.codes == ["41025", "61110", "61120", "75400", "83110"]  # of both together
    assert result.table("key.csv")[:3] == [["system_code", "code"], ["41025", "0"], ["61110", "1"]]
    assert [row[:2] for row in result.rejected] == [[train[1], "3"]]


# ---- files that are not


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\n\nocc1,hisco_1\n", "first line"),
        (b"  \nocc1\n", "first line"),
        (b"v\xe6ver,hisco_1\n", "'v\xe6ver'"),
        (b"occ1\0,hisco_1\n", "not a text file"),
    ],
)
def test_no_table(tmp_path, content, words):
    [problem] = problems(tmp_path, content)
    assert "data.csv" in problem and words in problem


def test_what_is_wrong_with_files_and_columns_is_said_together(tmp_path):
    none, folder = str(tmp_path / "none.csv"), str(tmp_path)
    what = settings_for([none, folder], val_files=[none])
    assert file_problems(what) == [f"{none}: no such file", f"{folder}: is a folder, not a file"]
    first = write_csv(tmp_path / "a.csv", ("text", "hisco_1", "hisco_1", "x", "x"), [])
    second = write_csv(tmp_path / "b.csv", ("occ1", "hisco_1"), [])
    lines = file_problems(settings_for(first, cols=HEADER[1:], val_files=[second], language_col="lang"))
    assert [line.split(": ")[0] for line in lines] == [first] * 4 + [second] * 2
    for line, name in zip(lines, ["occ1", "hisco_1", "hisco_2", "lang", "hisco_2", "lang"]):
        assert repr(name) in line.partition("; it has ")[0]
    assert "it has 'text', 'hisco_1', 'hisco_1', 'x', 'x'" in lines[0] and "2 times" in lines[1]


@pytest.mark.parametrize(
    "rows, words",
    [
        ("", "only column names"),
        ("\n\n", "only column names"),
        (",61110\nfarmer,\nfarmer,,\n", "1 × empty text; 1 × first code missing; 1 × wrong number of cells"),
    ],
)
def test_no_valid_row(tmp_path, rows, words):
    message = refusal(tmp_path, "occ1,hisco_1\n" + rows)
    assert "data.csv" in message and "no valid row" in message and words in message
    val = write_csv(tmp_path / "v.csv", HEADER, [("", "61110", "")])
    message = refusal(tmp_path, "occ1,hisco_1\nfarmer,61110\n", val_files=[val])
    assert "v.csv: no valid row to validate on" in message


@pytest.mark.parametrize("row", ['83110,"smith', '"83110,smith', '83110,"smith\n61110,the "old" farmer'])
def test_quotation_mark_that_is_never_closed_does_not_swallow_rows(tmp_path, row):
    content = f"hisco_1,occ1\n61110,farmer\n{row}\n" + "61110,farm hand\n" * 20
    assert "data.csv, line 3: a quotation mark there is not closed" in refusal(tmp_path, content)


# ---- rejected rows


def test_rejected_rows_are_listed_with_line_column_value_and_reason(tmp_path):
    content = csv(
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


CELLS = st.sampled_from(["61110", "83110", "1110", "-1", "", " ", "x", "61110.0"])
TEXTS = st.sampled_from(["farmer", "Farmer ", "smith", "baker", "miller", "", " "])


@examples(30)
@given(
    st.lists(st.tuples(TEXTS, CELLS, CELLS) | st.tuples(TEXTS, CELLS), max_size=25),
    st.sampled_from([0.0, 0.3, 0.6]),
    st.sampled_from([None, "-1", "61110"]),
    st.sampled_from([None, ["61110", "01110", "-1"]]),
)
def test_counts_of_the_report_add_up(rows, share_val, missing_code, fixed_codes):
    more = {"share_val": share_val, "missing_code": missing_code, "fixed_codes": fixed_codes}
    with tempfile.TemporaryDirectory() as folder:
        rows = [*rows, ("cook", "61110", ""), ("farmer", "61110", "")]
        path = write_csv(Path(folder) / "data.csv", HEADER, rows)
        settings = settings_for(path, cols=HEADER[1:], drop_bad_labels=True, **more)
        try:
            result = Result(prep.prepare(settings, folder, quiet))
        except UserError as error:
            assert "--share-val" in str(error)
            return
    report = result.report
    assert (report["train_rows"], report["val_rows"]) == (len(result.train), len(result.val))
    assert report["rows"] == len(rows) == len(result.train) + len(result.val) + len(result.rejected)
    assert report["rejected_rows"] == len(result.rejected) == sum(report["rejected"].values())
    assert report["codes"] == len(result.codes)
    assert sum(report["languages"].values()) == len(result.train) + len(result.val)


def test_report_says_what_happened_and_nothing_else(tmp_path):
    plain = prepare(tmp_path, "occ1,hisco_1\nfarmer,61110\n")
    assert not any("Note" in line for line in report_lines(plain.report))
    rows = ["farmer,1110,1110,", "smith,,,en", "baker,,77610,en", ",61110,,en", "x" * 130 + ",61110,,da"]
    content = csv(*rows, header="occ1,hisco_1,hisco_2,lang")
    result = prepare(tmp_path, content, cols=HEADER[1:], language_col="lang", missing_code="-1")
    text = "\n".join(report_lines(result.report))
    for words in (
        "5 read, 4 for training, 0 for validation",
        "en 2, unk 1, da 1",
        "Note: 2 codes got a lost leading zero",
        "Note: 1 rows without a language are coded as unk",
        "Note: 1 descriptions are longer",
        "Note: 2 rows without a first",
        "Note: 1 codes repeated",
        "Note: 1 rows rejected, listed in rejected_rows.csv",
        "1 × empty text (data.csv line 5)",
    ):
        assert words in text


# ---- codes


def test_hisco_gets_its_leading_zero_back_and_other_systems_nothing(tmp_path):
    content = "occ1,hisco_1\na,1110\nb,01110\nc,1110.0\nd,61110\ne,61110.0\nf,-1\ng,-3.0\n"
    result = prepare(tmp_path, content)
    assert codes_of(result) == [["01110"]] * 3 + [["61110"]] * 2 + [["-1"], ["-3"]]
    assert result.codes == ["-1", "-3", "01110", "61110"] and result.report["zeros_restored"] == 4
    content = "occ1,hisco_1\na,1110\nb,01110\nc,NA\n"
    result = prepare(tmp_path, content, kind="gpf", allow_short=True)
    assert result.codes == ["01110", "1110"] and result.report["rejected"] == {"first code missing": 1}
    assert (result.report["zeros_restored"], result.report["codes_short"]) == (0, 1)
    fixed = ["1110", "NA", "01110"]
    result = prepare(tmp_path, content, kind="gpf", allow_short=True, fixed_codes=fixed)
    assert codes_of(result) == [["1110"], ["01110"], ["NA"]]  # the key has it: it is a code


def test_minus_codes_and_question_mark_are_never_short(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1\na,-1\nb,-2\nc,-3\nd,61110\ne,?\n", kind="gpf")
    assert result.codes == ["-1", "-2", "-3", "61110", "?"]


def test_bad_labels_stop_with_their_rows_and_the_flags_that_help(tmp_path):
    content = "occ1,hisco_1\nfarmer,61110\n" + "\n".join(f"smith,1{i}" for i in range(7)) + "\nmiller,77120\n"
    message = refusal(tmp_path, content, kind="gpf")
    assert "7 rows" in message and "block size 5" in message and f"'1{rows.EXAMPLES}'" not in message
    for i in range(rows.EXAMPLES):
        assert f"data.csv, line {i + 3}, column 'hisco_1': code '1{i}' has 2 tokens" in message
    for flag in ("--allow-codes-shorter-than-block-size", "--formatter hisco", "--block-size"):
        assert flag in message and "--drop-bad-labels" in message
    content = csv("farmer,61110,", "smith,83110,831", "baker,77610,7761012", "miller,77120,")
    message = refusal(tmp_path, content, cols=HEADER[1:])
    assert "2 rows" in message and "line 3, column 'hisco_2': code '831'" in message
    assert "--drop-bad-labels" in message
    assert "--allow-codes-shorter" not in message and "--formatter" not in message
    result = prepare(tmp_path, content, kind="gpf", cols=HEADER[1:], drop_bad_labels=True)
    assert result.reasons == [(3, "hisco_2", "831"), (4, "hisco_2", "7761012")]
    assert result.codes == ["61110", "77120"]  # none of rejected rows alone


@pytest.mark.parametrize("kind, code", [("gpf", "?"), ("hisco", "-1"), ("hisco", "99999")])
def test_missing_first_code(tmp_path, kind, code):
    content = csv("a,61110,", "b,,", "c, ,61110", ",,")
    plain = prepare(tmp_path, content, kind=kind, cols=HEADER[1:])
    assert plain.texts == ["a"] and [row[0] for row in plain.reasons] == [3, 4, 5]
    result = prepare(tmp_path, content, kind=kind, cols=HEADER[1:], missing_code=code)
    assert codes_of(result) == [["61110"], [code], [code, "61110"]]
    assert result.report["missing_code_used"] == 2 and [row[0] for row in result.reasons] == [5]
    assert prepare(tmp_path, csv("a,61110,"), kind=kind, missing_code=code).codes == [
        "61110"
    ]  # where it is used
    other = prepare(
        tmp_path, "occ1,hisco_1\na,61110\nb,\n", kind=kind, missing_code=code, fixed_codes=["61110"]
    )
    assert other.texts == ["a"] and other.report["rejected"] == {"code outside the key": 1}


def test_repeated_codes_count_once(tmp_path):
    rows = ["a,61110,61110,83110", "b,1110,01110,", "c,83110,,61110", "d,61110,83110,61110"]
    columns = ("hisco_1", "hisco_2", "hisco_3")
    result = prepare(tmp_path, csv(*rows, header="occ1,hisco_1,hisco_2,hisco_3"), cols=columns)
    assert codes_of(result) == [["61110", "83110"], ["01110"], ["83110", "61110"], ["61110", "83110"]]
    assert result.report["codes_repeated"] == 3
    assert result.data.train.codes.tolist() == [[1, 2, -1], [0, -1, -1], [2, 1, -1], [1, 2, -1]]


def test_fixed_codes_keep_their_order(tmp_path):
    fixed = ["83110", "-1", "61110", "00001"]
    result = prepare(tmp_path, "occ1,hisco_1\na,61110\nb,83110\nc,77610\n", fixed_codes=fixed)
    assert result.codes == fixed and result.data.train.codes.tolist() == [[2], [0]]
    assert result.reasons == [(4, "hisco_1", "77610")]


def test_columns_of_numbers(tmp_path):
    content = "occ1,code1,code2\na,0,\nb,2,1\nc,1.0,-1\nd,3,\ne,x,\nf,,0\ng,-1,\n"
    fixed = ["-1", "61110", "01110"]
    options = {"cols": ("code1", "code2"), "number_codes": fixed, "fixed_codes": fixed}
    result = prepare(tmp_path, content, drop_bad_labels=True, **options)
    assert [(text, codes) for text, _, codes in result.train] == [("a", ["-1"]), ("b", ["01110", "61110"])]
    rejected = [
        (4, "code2", "-1"),
        (5, "code1", "3"),
        (6, "code1", "x"),
        (7, "code1", ""),
        (8, "code1", "-1"),
    ]
    assert result.reasons == rejected
    assert "0 … 2" in result.rejected[1][4] and result.report["zeros_restored"] == 0
    # --missing-code is a code, whatever the cells hold
    result = prepare(tmp_path, "occ1,code1,code2\na,1,\nb,,\n", missing_code="-1", **options)
    assert codes_of(result) == [["61110"], ["-1"]]


# ---- languages


def test_languages(tmp_path, monkeypatch):
    result = prepare(tmp_path, "occ1,hisco_1\na,61110\nb,61110\n", language="da")
    assert result.report["languages"] == {"da": 2} and result.data.languages == ["unk", "da"]
    assert result.report["language_missing"] == 0
    content = "occ1,hisco_1,lang\na,61110,se\nb,61110,\nc,61110, da \nd,61110,se\n"
    result = prepare(tmp_path, content, language_col="lang")
    assert [language for _, language, _ in result.train] == ["se", "unk", "da", "se"]
    assert result.report["languages"] == {"se": 2, "unk": 1, "da": 1}
    assert result.report["language_missing"] == 1
    monkeypatch.setattr("histocc.data.rows.MAX_LANGUAGES", 3)
    assert len(prepare(tmp_path, content, language_col="lang").train) == 4
    assert "'lang' holds more than 3" in refusal(tmp_path, content + "e,61110,en\n", language_col="lang")
    assert "is it the language?" in refusal(tmp_path, content + f"e,61110,{'x' * 99}\n", language_col="lang")


@pytest.mark.parametrize("letters, cut", [(121 - 2, 0), (121 - 1, 1)])
def test_descriptions_that_will_be_cut_are_counted(tmp_path, letters, cut):
    """[CLS], two letters of language, five of [SEP], the text, [SEP]: 128 positions in all."""
    result = prepare(tmp_path, f"occ1,hisco_1\n{'x' * letters},61110\n", language="en")
    assert result.report["texts_cut"] == cut


# ---- training and validation


def table(tmp_path, texts) -> bytes:
    rows = [(text, "61110") for text in texts]
    return Path(write_csv(tmp_path / "rows.csv", HEADER[:2], rows)).read_bytes()


def test_same_text_is_on_the_same_side(tmp_path):
    texts = [f"Old smed {i} og væver" for i in range(200)]
    ways = (str, str.upper, str.lower, " {}  ".format, lambda text: text.replace(" ", " \t "))
    result = prepare(tmp_path, table(tmp_path, (way(text) for text in texts for way in ways)), share_val=0.3)
    sides = [{" ".join(text.lower().split()) for text, _, _ in part} for part in (result.train, result.val)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 200 and len(sides[1]) > 20
    assert len(result.train) == 5 * len(sides[0]) and len(result.val) == 5 * len(sides[1])


def test_split_depends_on_the_text_alone(tmp_path):
    texts = [f"occupation {i}" for i in range(300)]
    forwards, backwards, more = (
        {text for text, _, _ in prepare(tmp_path, table(tmp_path, some), share_val=share).val}
        for some, share in ((texts, 0.1), ([*texts[::-1], "other"], 0.1), (texts, 0.2))
    )
    assert forwards == backwards - {"other"} and forwards < more
    values = split_values(text_hashes([f"occupation {i}" for i in range(10_000)]))
    assert 0 <= values.min() and values.max() < 1
    for share in (0.05, 0.1, 0.5):
        assert abs((values < share).mean() - share) < 5 * (share * (1 - share) / len(values)) ** 0.5
    assert split_values(text_hashes(["Wine  merchant"])).tolist() == [0.9023891211929064]  # on every machine


def test_shares_of_nothing_and_of_all(tmp_path):
    content = table(tmp_path, (f"occupation {i}" for i in range(40)))
    assert prepare(tmp_path, content, share_val=0.0).val == []
    assert "lower --share-val" in refusal(tmp_path, content, share_val=1.0)
    assert "raise it" in refusal(tmp_path, "occ1,hisco_1\noccupation 3,61110\n", share_val=1e-9)
