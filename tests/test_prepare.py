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

# ---- files that are tables


def test_plain_file(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1\nwine merchant,41025\nfarmer,61110\n")
    assert result.train == [("wine merchant", "unk", ["41025"]), ("farmer", "unk", ["61110"])]
    assert result.codes == ["41025", "61110"] and result.val == [] and result.rejected == []
    assert (result.report["rows"], result.report["train_rows"], result.report["codes"]) == (2, 2, 2)


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
    assert result.train == [("væver", "unk", ["75400"]), ("farmer", "unk", ["61110"])]
    assert result.report["rows"] == 2 and result.report["rejected_rows"] == 0


def test_texts_stay_as_they_are(tmp_path):
    texts = [
        "NA",
        "null",
        "nan",
        "None",
        "0123",
        "1e5",
        "TRUE",
        "a, b; c",
        'said "hello"',
        "two\nlines",
        "cr\r\nlf",
        "huusmand  og\tvæver",
        "𝔊🙂",
        "ÆØÅ",
        "#N/A",
        "-",
        "'",
    ]
    path = write_csv(tmp_path / "rows.csv", HEADER[:2], [(f"  {text} ", "61110") for text in texts])
    assert prepare(tmp_path, Path(path).read_bytes()).texts == texts


def test_rows_longer_than_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("histocc.data.tables.CHUNK", 3)
    rows = [(f"{'ø𝔊' * (i % 4)}{i}", f"6111{i % 10}") for i in range(10)]
    result = prepare(tmp_path, "occ1,hisco_1\n" + "".join(f"{text},{code}\n" for text, code in rows))
    assert result.train == [(text, "unk", [code]) for text, code in rows]


def test_several_files(tmp_path):
    train = [
        write_csv(tmp_path / "a.csv", HEADER, [("farmer", "61110", "")]),
        write_csv(
            tmp_path / "b.csv",
            HEADER[::-1],
            [("", "41025", "merchant"), ("", "", "bad"), ("", "83110", "smith")],
        ),
    ]
    val = write_csv(
        tmp_path / "v.csv", HEADER, [("farmer", "61120", ""), ("weaver", "75400", "")], delimiter=";"
    )
    result = Result(
        prep.prepare(settings_for(train, cols=HEADER[1:], val_files=[val]), str(tmp_path / "out"), quiet)
    )
    assert result.train == [
        ("farmer", "unk", ["61110"]),
        ("merchant", "unk", ["41025"]),
        ("smith", "unk", ["83110"]),
    ]
    assert result.val == [("farmer", "unk", ["61120"]), ("weaver", "unk", ["75400"])]
    # of training and validation together
    assert result.codes == [
        "41025",
        "61110",
        "61120",
        "75400",
        "83110",
    ]
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


def test_no_file(tmp_path):
    what = settings_for([tmp_path / "none.csv", tmp_path], val_files=[str(tmp_path / "none.csv")])
    assert file_problems(what) == [
        f"{tmp_path / 'none.csv'}: no such file",
        f"{tmp_path}: is a folder, not a file",
    ]


def test_missing_and_doubled_columns_are_named_together(tmp_path):
    first = write_csv(tmp_path / "a.csv", ("text", "hisco_1", "hisco_1", "x", "x"), [])
    second = write_csv(tmp_path / "b.csv", ("occ1", "hisco_1"), [])
    found = file_problems(settings_for(first, cols=HEADER[1:], val_files=[second], language_col="lang"))
    assert len(found) == 6
    assert [problem.split(": ")[0] for problem in found] == [first] * 4 + [second] * 2
    for problem, name in zip(found, ["occ1", "hisco_1", "hisco_2", "lang", "hisco_2", "lang"]):
        assert repr(name) in problem.partition("; it has ")[0]
    assert "it has 'text', 'hisco_1', 'hisco_1', 'x', 'x'" in found[0] and "2 times" in found[1]


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


def test_no_valid_row_to_validate_on(tmp_path):
    val = write_csv(tmp_path / "v.csv", HEADER, [("", "61110", "")])
    assert "v.csv: no valid row to validate on" in refusal(
        tmp_path, "occ1,hisco_1\nfarmer,61110\n", val_files=[val]
    )


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
    # line 16: outside the key
    content = (
        "occ1,hisco_1,hisco_2\n"  # line 1
        "farmer,61110,\n"
        ",61110,\n"  # line 3: no text
        "smith,,83110\n"  # line 4: no first code
        '"two\nlines",83110,\n'  # lines 5 and 6
        "weaver,  ,\n"  # line 7: a blank first code
        "\n"
        "tailor,79100\n"  # line 9: two cells
        "baker,77610,7761x\n"  # line 10: the second code does not fit
        "cook,53100,,\n"  # line 11: four cells
        "miller,77120,41025\n"  # line 12: outside the key
        '"no\n\ncode",,\n'  # lines 13 to 15
        "carter,98620,\n"
    )
    result = prepare(
        tmp_path,
        content,
        cols=HEADER[1:],
        drop_bad_labels=True,
        fixed_codes=["61110", "83110", "77610", "77120", "53100"],
    )
    assert result.texts == ["farmer", "two\nlines"]
    assert result.table("rejected_rows.csv")[0] == ["file", "line", "column", "value", "reason"]
    assert {row[0] for row in result.rejected} == {str(tmp_path / "data.csv")}
    assert [row for row in result.reasons if row[0] not in (13, 14, 15)] == [
        (3, "occ1", ""),
        (4, "hisco_1", ""),
        (7, "hisco_1", "  "),
        (9, "", ""),
        (10, "hisco_2", "7761x"),
        (11, "", ""),
        (12, "hisco_2", "41025"),
        (16, "hisco_1", "98620"),
    ]
    reasons = {int(row[1]): row[4] for row in result.rejected}
    assert len(reasons) == 9 and any(line in reasons for line in (13, 14, 15))
    for line, words in {
        3: "description is empty",
        4: "--missing-code",
        9: "2 cells in the row, 3 columns",
        10: "'x'",
        11: "4 cells",
        12: "'41025' is not among the 5 codes of the key",
    }.items():
        assert words in reasons[line]
    assert result.report["rejected"] == {
        "empty text": 1,
        "first code missing": 3,
        "wrong number of cells": 2,
        "code does not fit": 1,
        "code outside the key": 2,
    }
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
    with tempfile.TemporaryDirectory() as folder:
        path = write_csv(
            Path(folder) / "data.csv", HEADER, [*rows, ("cook", "61110", ""), ("farmer", "61110", "")]
        )
        what = settings_for(
            path,
            cols=HEADER[1:],
            share_val=share_val,
            missing_code=missing_code,
            fixed_codes=fixed_codes,
            drop_bad_labels=True,
        )
        try:
            result = Result(prep.prepare(what, folder, quiet))
        except UserError as error:
            assert "--share-val" in str(error)
            return
        report = result.report
        assert (
            report["rows"]
            == len(rows) + 2
            == report["train_rows"] + report["val_rows"] + report["rejected_rows"]
        )
        assert (report["train_rows"], report["val_rows"]) == (len(result.train), len(result.val))
        assert report["rejected_rows"] == len(result.rejected) == sum(report["rejected"].values())
        assert report["codes"] == len(result.codes)
        assert sum(report["languages"].values()) == len(result.train) + len(result.val)


def test_report_says_what_happened_and_nothing_else(tmp_path):
    assert not any(
        "Note" in line for line in report_lines(prepare(tmp_path, "occ1,hisco_1\nfarmer,61110\n").report)
    )
    content = (
        "occ1,hisco_1,hisco_2,lang\nfarmer,1110,1110,\nsmith,,,en\nbaker,,77610,en\n,61110,,en\n"
        + "x" * 130
        + ",61110,,da\n"
    )
    result = prepare(tmp_path, content, cols=HEADER[1:], language_col="lang", missing_code="-1")
    text = "\n".join(report_lines(result.report))
    for words in (
        "5 read, 4 for training, 0 for validation",
        "en 2",
        "unk 1",
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


def test_hisco_gets_its_leading_zero_back(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1\na,1110\nb,01110\nc,1110.0\nd,61110\ne,61110.0\nf,-1\ng,-3.0\n")
    assert [codes for _, _, codes in result.train] == [["01110"]] * 3 + [["61110"]] * 2 + [["-1"], ["-3"]]
    assert result.codes == ["-1", "-3", "01110", "61110"] and result.report["zeros_restored"] == 4


def test_general_formatter_restores_nothing(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1\na,1110\nb,01110\nc,NA\n", kind="gpf", allow_short=True)
    assert (
        result.codes == ["01110", "1110"]
        and result.report["zeros_restored"] == 0
        and result.report["codes_short"] == 1
    )
    assert result.report["rejected"] == {"first code missing": 1}
    result = prepare(
        tmp_path, "occ1,hisco_1\na,1110\nc,NA\n", kind="gpf", allow_short=True, fixed_codes=["1110", "NA"]
    )
    assert [codes for _, _, codes in result.train] == [["1110"], ["NA"]]  # the key has it: it is a code


def test_minus_codes_and_question_mark_are_never_short(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1\na,-1\nb,-2\nc,-3\nd,61110\ne,?\n", kind="gpf")
    assert result.codes == ["-1", "-2", "-3", "61110", "?"]


def test_bad_labels_stop_with_their_rows_and_the_flags(tmp_path):
    content = "occ1,hisco_1\nfarmer,61110\n" + "\n".join(f"smith,1{i}" for i in range(7)) + "\nmiller,77120\n"
    message = refusal(tmp_path, content, kind="gpf")
    assert "7 rows" in message and "block size 5" in message
    for i in range(rows.EXAMPLES):
        assert f"data.csv, line {i + 3}, column 'hisco_1': code '1{i}' has 2 tokens" in message
    assert f"'1{rows.EXAMPLES}'" not in message
    for flag in (
        "--allow-codes-shorter-than-block-size",
        "--drop-bad-labels",
        "--formatter hisco",
        "--block-size",
    ):
        assert flag in message


def test_bad_labels_of_hisco_name_only_what_helps(tmp_path):
    message = refusal(tmp_path, "occ1,hisco_1,hisco_2\nfarmer,61110,\nsmith,83110,831\n", cols=HEADER[1:])
    assert (
        "1 rows" in message
        and "line 3, column 'hisco_2': code '831'" in message
        and "--drop-bad-labels" in message
    )
    assert "--allow-codes-shorter" not in message and "--formatter" not in message


def test_bad_labels_are_dropped_on_request(tmp_path):
    content = "occ1,hisco_1,hisco_2\nfarmer,61110,\nsmith,831,\nbaker,77610,7761012\n"
    result = prepare(tmp_path, content, kind="gpf", cols=HEADER[1:], drop_bad_labels=True)
    assert result.texts == ["farmer"] and result.reasons == [(3, "hisco_1", "831"), (4, "hisco_2", "7761012")]


def test_missing_first_code_rejects_and_missing_second_does_not(tmp_path):
    result = prepare(
        tmp_path, "occ1,hisco_1,hisco_2\na,61110,\nb,,61110\nc,   ,\nd,61110,   \n", cols=HEADER[1:]
    )
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
    content = "occ1,hisco_1,hisco_2,hisco_3\na,61110,61110,83110\n"
    content += "b,1110,01110,\nc,83110,,61110\nd,61110,83110,61110\n"
    result = prepare(tmp_path, content, cols=("hisco_1", "hisco_2", "hisco_3"))
    assert [codes for _, _, codes in result.train] == [
        ["61110", "83110"],
        ["01110"],
        ["83110", "61110"],
        ["61110", "83110"],
    ]
    assert result.report["codes_repeated"] == 3
    assert result.data.train.codes.tolist() == [[1, 2, -1], [0, -1, -1], [2, 1, -1], [1, 2, -1]]


# ---- key


def test_key_is_sorted_and_of_both_parts(tmp_path):
    val = write_csv(tmp_path / "v.csv", HEADER, [("x", "41025", "")])
    result = prepare(tmp_path, "occ1,hisco_1\na,83110\nb,1110\nc,61110\n", val_files=[val])
    assert result.table("key.csv") == [
        ["system_code", "code"],
        ["01110", "0"],
        ["41025", "1"],
        ["61110", "2"],
        ["83110", "3"],
    ]
    assert result.data.train.codes[:, 0].tolist() == [3, 0, 2] and result.data.val.codes[:, 0].tolist() == [1]


def test_key_holds_no_code_of_rejected_rows_alone(tmp_path):
    result = prepare(
        tmp_path, "occ1,hisco_1,hisco_2\na,61110,\nb,83110,x\n", cols=HEADER[1:], drop_bad_labels=True
    )
    assert result.codes == ["61110"]


def test_key_holds_the_missing_code_only_where_used(tmp_path):
    assert prepare(tmp_path, "occ1,hisco_1\na,61110\n", missing_code="-1").codes == ["61110"]


def test_fixed_codes_keep_their_order(tmp_path):
    fixed = ["83110", "-1", "61110", "00001"]
    result = prepare(tmp_path, "occ1,hisco_1\na,61110\nb,83110\nc,77610\n", fixed_codes=fixed)
    assert result.codes == fixed == [row[0] for row in result.table("key.csv")[1:]]
    assert result.train == [("a", "unk", ["61110"]), ("b", "unk", ["83110"])]
    assert result.data.train.codes.tolist() == [[2], [0]]
    assert result.reasons == [(4, "hisco_1", "77610")] and result.report["rejected"] == {
        "code outside the key": 1
    }


def test_columns_of_numbers(tmp_path):
    content = "occ1,code1,code2\na,0,\nb,2,1\nc,1.0,-1\nd,3,\ne,x,\nf,,0\ng,-1,\n"
    result = prepare(
        tmp_path,
        content,
        cols=("code1", "code2"),
        number_codes=["-1", "61110", "01110"],
        drop_bad_labels=True,
        fixed_codes=["-1", "61110", "01110"],
    )
    assert [(text, codes) for text, _, codes in result.train] == [("a", ["-1"]), ("b", ["01110", "61110"])]
    assert result.reasons == [
        (4, "code2", "-1"),
        (5, "code1", "3"),
        (6, "code1", "x"),
        (7, "code1", ""),
        (8, "code1", "-1"),
    ]
    assert "0 … 2" in result.rejected[1][4] and result.report["zeros_restored"] == 0


def test_numbers_with_a_missing_code(tmp_path):
    """--missing-code is a code, whatever the cells hold."""
    result = prepare(
        tmp_path,
        "occ1,code1\na,1\nb,\n",
        cols=("code1",),
        number_codes=["-1", "61110"],
        missing_code="-1",
        fixed_codes=["-1", "61110"],
    )
    assert [codes for _, _, codes in result.train] == [["61110"], ["-1"]]


# ---- languages


def test_language_of_all_rows(tmp_path):
    result = prepare(tmp_path, "occ1,hisco_1\na,61110\nb,61110\n", language="da")
    assert [language for _, language, _ in result.train] == ["da", "da"] and result.data.languages == [
        "unk",
        "da",
    ]
    assert result.report["languages"] == {"da": 2} and result.report["language_missing"] == 0


def test_language_column(tmp_path):
    result = prepare(
        tmp_path, "occ1,hisco_1,lang\na,61110,se\nb,61110,\nc,61110, da \nd,61110,se\n", language_col="lang"
    )
    assert [language for _, language, _ in result.train] == ["se", "unk", "da", "se"]
    assert (
        result.report["languages"] == {"se": 2, "unk": 1, "da": 1} and result.report["language_missing"] == 1
    )


def test_too_many_languages(tmp_path, monkeypatch):
    monkeypatch.setattr("histocc.data.rows.MAX_LANGUAGES", 3)
    content = "occ1,hisco_1,lang\na,61110,se\nb,61110,da\n"
    assert len(prepare(tmp_path, content, language_col="lang").train) == 2
    assert "'lang'" in refusal(tmp_path, content + "c,61110,en\n", language_col="lang")


@pytest.mark.parametrize("letters, cut", [(121 - 2, 0), (121 - 1, 1)])
def test_descriptions_that_will_be_cut_are_counted(tmp_path, letters, cut):
    """[CLS], two letters of language, five of [SEP], the text, [SEP]: 128 positions in all."""
    assert (
        prepare(tmp_path, f"occ1,hisco_1\n{'x' * letters},61110\n", language="en").report["texts_cut"] == cut
    )


# ---- training and validation


def many(n: int, repeat: int = 1) -> list[tuple[str, str]]:
    return [(f"occupation {i % n}", "61110") for i in range(n * repeat)]


def test_same_text_is_on_the_same_side(tmp_path):
    rows = [
        (variant, "61110")
        for i in range(200)
        for text in [f"Old smed {i} og væver"]
        for variant in (
            text,
            text.upper(),
            text.lower(),
            f" {text}  ",
            text.replace(" ", "   "),
            text.replace(" ", "\t"),
        )
    ]
    result = prepare(
        tmp_path, Path(write_csv(tmp_path / "rows.csv", HEADER[:2], rows)).read_bytes(), share_val=0.3
    )
    sides = [{" ".join(text.lower().split()) for text, _, _ in part} for part in (result.train, result.val)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 200 and len(sides[1]) > 20
    assert len(result.train) == 6 * len(sides[0]) and len(result.val) == 6 * len(sides[1])


def test_split_depends_on_the_text_alone(tmp_path):
    rows = many(300)
    forwards, backwards, more = (
        {
            text
            for text, _, _ in prepare(
                tmp_path,
                Path(write_csv(tmp_path / "rows.csv", HEADER[:2], chosen)).read_bytes(),
                share_val=share,
            ).val
        }
        for chosen, share in ((rows, 0.1), ([*rows[::-1], ("other", "83110")], 0.1), (rows, 0.2))
    )
    assert forwards == backwards - {"other"} and forwards < more


def test_share_of_texts():
    values = split_values(text_hashes([f"occupation {i}" for i in range(10_000)]))
    assert 0 <= values.min() and values.max() < 1
    for share in (0.05, 0.1, 0.5):
        assert abs((values < share).mean() - share) < 5 * (share * (1 - share) / len(values)) ** 0.5


def test_split_is_the_same_on_every_machine():
    values = split_values(
        text_hashes(["Wine  merchant", "wine merchant", "wine merchants", "ÆBLE 𝔊", "æble 𝔊"])
    )
    assert values[0] == values[1] == 0.9023891211929064 and values[3] == values[4] and len(set(values)) == 3


@examples(200)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=12))
def test_texts_have_the_same_number_only_if_they_differ_in_case_and_blanks_alone(texts):
    texts = [text for text in (text.replace("\0", "").strip() for text in texts) if text] or ["x"]
    same = [" ".join(text.casefold().split()) for text in texts]
    numbers = text_hashes(texts)
    assert all((a == b) == (one == other) for a, one in zip(numbers, same) for b, other in zip(numbers, same))
    assert numbers.tolist() == [int(text_hashes([text])[0]) for text in texts]  # the others play no part


def test_whole_shares(tmp_path):
    content = Path(write_csv(tmp_path / "rows.csv", HEADER[:2], many(40))).read_bytes()
    assert prepare(tmp_path, content, share_val=0.0).val == []
    assert "lower --share-val" in refusal(tmp_path, content, share_val=1.0)
    assert "raise it" in refusal(tmp_path, "occ1,hisco_1\noccupation 3,61110\n", share_val=1e-9)


def test_files_of_their_own_are_not_split(tmp_path):
    val = write_csv(tmp_path / "v.csv", HEADER, [(text, code, "") for text, code in many(50)])
    result = prepare(
        tmp_path, Path(write_csv(tmp_path / "rows.csv", HEADER[:2], many(60))).read_bytes(), val_files=[val]
    )
    assert (len(result.train), len(result.val)) == (60, 50)
