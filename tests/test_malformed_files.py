"""Files that are not what they should be, and what the user is told for each."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPO, run_inside

from histocc import prepare

HEAD = b"occ1,hisco_1\n"
GOOD = b"farmer,61110\nsmith,83110\n"
HISCO = ("--formatter", "hisco", "--target-cols", "hisco_1", "--share-val", "0")


def parquet(**columns) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as pq

    buffer = io.BytesIO()
    pq.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


LONG = b"x" * 200
CASES = {  # what is wrong → content, rows that are used (None: refused), what is said, other flags than HISCO
    "empty file": (b"", None, r"data\.csv: is empty"),
    "column names alone": (HEAD, None, r"no valid row to train on \(there are only column names\)"),
    "first line blank": (b"\n" + HEAD + GOOD, None, r"the first line, with the column names, is blank"),
    "no line with column names": (GOOD, None, r"has no column 'occ1'; it has 'farmer', '61110'"),
    "column misspelt": (
        b"Occ1,hisco_1\n" + GOOD,
        None,
        r"has no column 'occ1'; it has 'Occ1', 'hisco_1'\. Is 'Occ1' meant\?",
    ),
    "column twice": (b"occ1,hisco_1,hisco_1\nfarmer,61110,1\n", None, r"column 'hisco_1' is listed 2 times"),
    "column names broken": (
        b'"occ1"x,hisco_1\n' + GOOD,
        None,
        r"column names in the first line are not readable as CSV",
    ),
    "parted by a character that is not looked for": (
        b"occ1/hisco_1\nfarmer/61110\n",
        None,
        r"one column only: --delimiter names",
    ),
    "semicolons": ((HEAD + GOOD).replace(b",", b";"), 2, r"2 read, 2 for training"),
    "tabs and CRLF": (
        (HEAD + GOOD).replace(b",", b"\t").replace(b"\n", b"\r\n"),
        2,
        r"2 read, 2 for training",
    ),
    "semicolons, but a comma named": (
        (HEAD + GOOD).replace(b",", b";"),
        None,
        r"has no column 'occ1'; it has 'occ1;hisco_1'",
        (*HISCO, "--delimiter", "comma"),
    ),
    "old Macintosh line ends": ((HEAD + GOOD).replace(b"\n", b"\r"), 2, r"2 read, 2 for training"),
    "blank lines, no line end at the last": (
        HEAD + b"\n\nfarmer,61110\n\nsmith,83110",
        2,
        r"2 read, 2 for training",
    ),
    "Windows-1252": (
        HEAD + GOOD + b"v\xe6ver,75400\n",
        3,
        r"data\.csv was read as Windows-1252, since it is not UTF-8: 'væver'; --encoding names another",
    ),
    "UTF-16 with byte order mark": (
        (HEAD + GOOD).decode().encode("utf-16"),
        2,
        r"data\.csv was read as UTF-16",
    ),
    "UTF-16 without byte order mark": (
        (HEAD + GOOD).decode().encode("utf-16-le"),
        None,
        r"--encoding utf-16-le reads it if it is UTF-16",
    ),
    "DOS code page": (
        HEAD + GOOD + "væver på møllen,75400\n".encode("cp850"),
        None,
        r"its code page cannot be told. --encoding NAME(?s:.*)cp850: 'væver på møllen'",
    ),
    "UTF-8 with a line in Windows-1252": (
        HEAD + "væver,75400\nhusmand og træskærer,61115\nbødker,81110\n".encode() * 5 + b"m\xf8ller,77120\n",
        None,
        r"is not UTF-8 in line 17, as 15 other lines are\. Parts of different encodings",
    ),
    "a whole file of zeros": (b"\0" * 100, None, r"is not a text file"),
    "Excel workbook": (
        b"PK\x03\x04rest",
        None,
        r"is not a CSV file but an Excel workbook or a zip archive; save the sheet as CSV",
    ),
    "compressed with gzip": (b"\x1f\x8b\x08\x00rest", None, r"compressed with gzip .*gunzip"),
    "Stata file": (b"<stata_dta><header>", None, r"a Stata file; save it as CSV with: export delimited"),
    "damaged Parquet file": (b"PAR1 cut off", None, r"is a damaged Parquet file"),
    "description empty": (
        HEAD + GOOD + b" ,83110\n",
        2,
        r"1 rows rejected.*\n  1 × empty text \(data\.csv line 4\)",
    ),
    "every description empty": (
        HEAD + b",83110\n,61110\n",
        None,
        r"no valid row to train on \(2 × empty text\)",
    ),
    "descriptions NA, null, nan and None": (
        HEAD + b"NA,-1\nnull,-1\nnan,-1\nNone,-1\n",
        4,
        r"4 read, 4 for training",
    ),
    "description too long": (
        HEAD + GOOD + LONG + b",83110\n",
        3,
        r"1 descriptions are longer than the model reads and are cut \(data\.csv line 4\)",
    ),
    "NUL character inside": (
        HEAD + GOOD + b"sm\0ith,83110\n",
        2,
        r"1 × forbidden character \(data\.csv line 4\)",
    ),
    "a cell too few, a cell too many": (
        HEAD + GOOD + b"baker\nbaker,77610,x\n",
        2,
        r"2 × wrong number of cells \(data\.csv lines 4, 5\)",
    ),
    "text after a quotation mark": (
        HEAD + GOOD + b'"old" smith,83110\n',
        2,
        r"1 × broken quotation marks \(data\.csv line 4\)",
    ),
    "quotation mark never closed": (
        HEAD + b'"old smith,83110\n' + GOOD,
        None,
        r"data\.csv, line 2: a quotation mark there is not closed before line 4",
    ),
    "quotation mark that swallows rows": (
        HEAD + GOOD + b'"old smith,83110\nbaker,77610\nx",77610\n',
        2,
        r"1 × rows inside a cell \(data\.csv line 4\)",
    ),
    "line break within quotation marks": (
        HEAD + GOOD + b'"old\nsmith",83110\nbaker,\n',
        3,
        r"1 × first code missing \(data\.csv line 6\)",
    ),
    "first code missing": (HEAD + GOOD + b"baker,\n", 2, r"1 × first code missing \(data\.csv line 4\)"),
    "the same with --missing-code": (
        HEAD + GOOD + b"baker,\n",
        3,
        r"1 rows without a first code got the code of --missing-code",
        (*HISCO, "--missing-code", "-1"),
    ),
    "leading zero lost": (HEAD + GOOD + b"physician,6105\n", 3, r"1 codes got a lost leading zero"),
    "code too short": (
        HEAD + GOOD + b"baker,776\n",
        None,
        r"line 4, column 'hisco_1': code '776' has 3 tokens.*\n.*What to do:\n.*--drop-bad-labels",
    ),
    "the same with --drop-bad-labels": (
        HEAD + GOOD + b"baker,776\n",
        2,
        r"1 × code does not fit \(data\.csv line 4\)",
        (*HISCO, "--drop-bad-labels"),
    ),
    "code too short for the general formatter": (
        HEAD + GOOD + b"baker,776\n",
        None,
        (
            r"--formatter hisco is for HISCO codes, and restores lost leading"
            r" zeros\n.*--allow-codes-shorter-than-block-size fills shorter codes up\n.*--drop-bad-labels"
        ),
        ("--target-cols", "hisco_1", "--share-val", "0"),
    ),
    "code outside the key": (
        HEAD + GOOD + b"baker,77610\n",
        2,
        r"1 × code outside the key \(data\.csv line 4\)",
        (*HISCO, "--key", "key.csv"),
    ),
    "numbers beyond the key": (
        b"occ1,code1\nfarmer,0\nsmith,7\n",
        None,
        r"'7' is not a number of the key, 0 … 1",
        ("--formatter", "hisco", "--target-cols", "code1", "--share-val", "0", "--key", "key.csv"),
    ),
    "same text, different codes": (
        HEAD + GOOD + b"Farmer,61115\n",
        3,
        r"texts that are coded differently in different rows: 1, listed in conflicts\.csv",
    ),
    "rows that repeat others": (HEAD + GOOD + GOOD, 4, r"2 distinct; 2 rows repeat an earlier one"),
    "language missing": (
        b"occ1,hisco_1,lang\nfarmer,61110,en\nsmith,83110,\n",
        2,
        r"1 rows without a language are coded as unk",
        (*HISCO, "--language-col", "lang"),
    ),
    "languages with other names": (
        b"occ1,hisco_1,lang\nbonde,61110,sv\n",
        1,
        r"languages that the published models were not trained on: sv \(se there\)",
        (*HISCO, "--language-col", "lang"),
    ),
    "column that is not the language": (
        b"occ1,hisco_1,lang\nfarmer,61110," + LONG + b"\n",
        None,
        r"of 200 characters; is it the language\?",
        (*HISCO, "--language-col", "lang"),
    ),
    "short codes that are accepted": (
        HEAD + GOOD + b"baker,776\n",
        3,
        r"1 codes are shorter than the block and are filled up \(data\.csv line 4\)",
        ("--target-cols", "hisco_1", "--share-val", "0", "--allow-codes-shorter-than-block-size"),
    ),
    "wrong column of codes": (
        b"occ1,hisco_1,lang\nfarmer,61110,en\nsmith,83110,en\n",
        None,
        r"Most rows are of this kind: look whether --target-cols and --formatter are right",
        ("--formatter", "hisco", "--target-cols", "lang", "--share-val", "0"),
    ),
    "columns parted by a comma in the flag": (
        b"occ1,hisco_1,hisco_2\nfarmer,61110,\n",
        None,
        r"has no column 'hisco_1,hisco_2'.*\(separate several columns by spaces\)",
        ("--formatter", "hisco", "--target-cols", "hisco_1,hisco_2"),
    ),
    "a column of languages that is not named": (
        b"occ1,hisco_1,lang\nfarmer,61110,en\n",
        1,
        r"there is a column 'lang' that is not read; --language-col lang reads it",
    ),
    "letters broken before": (
        HEAD + GOOD + "vÃ¦ver,75400\nsm�th,83110\n".encode(),
        4,
        r"2 descriptions hold letters that were broken by a wrong encoding before",
    ),
    "DOS code page whose letters are signs elsewhere": (
        HEAD + "peón,99910\nalbañil,95120\ncapitán,58320\n".encode("cp850") * 3,
        9,
        r"was read as cp850, since it is not UTF-8: 'peón', 'albañil', 'capitán'; --encoding names another",
    ),
    "two rows joined in a middle column": (
        b'occ1,note,hisco_1\nfarmer,,61110\nsmith,"tall,83110\nbaker,short",77610\n',
        1,
        r"1 × rows inside a cell",
    ),
    "prose of several lines with commas": (
        HEAD + GOOD + b'"farmer, tenant\nof the parish, old",61110\n',
        3,
        r"3 read, 3 for training",
    ),
    "character that the model uses itself": (
        HEAD + GOOD + "smith \ue001,83110\n".encode(),
        2,
        r"1 × forbidden character \(data\.csv line 4\)",
    ),
    "carriage return inside a row": (
        HEAD + GOOD + b"old\rsmith,83110\n",
        3,
        r"1 × wrong number of cells \(data\.csv line 4\)",
    ),
    "UTF-32": ((HEAD + GOOD).decode().encode("utf-32"), None, r"text in UTF-32; save it as UTF-8"),
    "several things at once": (
        b"occ1,hisco_1\n,61110\nfarmer,\nbaker\nsmith,83110\n",
        1,
        r"3 rows rejected(.*\n)+.*1 × ",
    ),
}


def outcome(folder: Path, content: bytes, flags: tuple = HISCO, name: str = "data.csv") -> tuple[int, str]:
    (folder / name).write_bytes(content)
    (folder / "key.csv").write_text("system_code,code\n61110,0\n83110,1\n")
    flags = [str(folder / "key.csv") if flag == "key.csv" else flag for flag in flags]
    line = [folder / name, "--save-path", folder / "out", *flags]
    return run_inside(lambda argv: sys.exit(prepare.main(argv)), *line)


@pytest.mark.parametrize("wrong", CASES)
def test_what_the_user_is_told(wrong, tmp_path):
    if "Parquet" in wrong:
        pytest.importorskip("pyarrow")
    content, rows, said, *flags = CASES[wrong]
    code, output = outcome(tmp_path, content, *flags)
    assert re.search(said, output), output
    assert "Traceback" not in output and output.count("error: ") == (rows is None)
    assert code == (2 if rows is None else 0), output
    if rows is not None:
        assert f"{rows:,} for training" in output
    else:
        assert not list(tmp_path.glob("out/prepared/*"))


@pytest.mark.full
def test_a_terminal_without_the_letters_ends_nothing(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(HEAD + GOOD + b",1\n")
    line = [sys.executable, "-m", "histocc.prepare", path, *HISCO, "--save-path", tmp_path / "out"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(line, cwd=REPO, capture_output=True, env=env)
    assert done.returncode == 0 and b"1 ? empty text" in done.stdout and b"Traceback" not in done.stderr


def test_parquet_is_read_like_a_table_of_text(tmp_path):
    content = parquet(
        occ1=["farmer", None, "null", "smith"], hisco_1=[61110, 83110, -1, 1110], other=[1.5, None, 2, 3]
    )
    code, output = outcome(tmp_path, content, name="data.parquet")
    assert code == 0 and "4 read, 3 for training" in output and "1 codes got a lost leading zero" in output
    assert "1 × empty text (data.parquet line 2)" in output


def test_parquet_of_numbers_with_gaps_and_of_categories(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    content = parquet(
        occ1=pyarrow.array(["farmer", "smith", "farmer"]).dictionary_encode(),
        hisco_1=pyarrow.array([61110.0, None, 61110.0]),
    )
    code, output = outcome(tmp_path, content, name="data.parquet")
    assert code == 0 and "3 read, 2 for training" in output and "1 × first code missing" in output


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, output = outcome(tmp_path, b"PAR1....", name="data.parquet")
    assert code == 2 and "Traceback" not in output
    assert "data.parquet: reading Parquet needs pyarrow: pip install pyarrow" in output
