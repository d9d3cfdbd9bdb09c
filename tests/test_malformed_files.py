"""Files that are not what they should be, and what the user is told for each.

`PYTHONPATH=. python tests/test_malformed_files.py` prints the table: what is wrong, what comes of it, what is
said.
"""

import io
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import REPO, run_inside

from histocc import prepare

HEAD = b"occ1,hisco_1\n"
GOOD = b"farmer,61110\nsmith,83110\n"
HISCO = ("--formatter", "hisco", "--target-cols", "hisco_1", "--share-val", "0")


@dataclass
class Case:
    """rows: how many are used; None: the file is refused. said: a regular expression, all of it in the
    output.
    """

    wrong: str
    content: bytes
    rows: int | None
    said: str
    flags: tuple = HISCO
    name: str = "data.csv"


def parquet(**columns) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as pq

    buffer = io.BytesIO()
    pq.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


LONG = b"x" * 200
CASES = [
    Case("empty file", b"", None, r"data\.csv: is empty"),
    Case("byte order mark alone", b"\xef\xbb\xbf", None, r"data\.csv: is empty"),
    Case("column names alone", HEAD, None, r"no valid row to train on \(there are only column names\)"),
    Case("first line blank", b"\n" + HEAD + GOOD, None, r"the first line, with the column names, is blank"),
    Case("no line with column names", GOOD, None, r"has no column 'occ1'; it has 'farmer', '61110'"),
    Case(
        "column misspelt",
        b"Occ1,hisco_1\n" + GOOD,
        None,
        r"has no column 'occ1'; it has 'Occ1', 'hisco_1'\. Is 'Occ1' meant\?",
    ),
    Case(
        "column of codes missing",
        b"occ1,code\n" + GOOD,
        None,
        r"has no column 'hisco_1'; it has 'occ1', 'code'",
    ),
    Case(
        "column twice",
        b"occ1,hisco_1,hisco_1\nfarmer,61110,1\n",
        None,
        r"column 'hisco_1' is listed 2 times",
    ),
    Case(
        "column names broken",
        b'"occ1"x,hisco_1\n' + GOOD,
        None,
        r"column names in the first line are not readable as CSV",
    ),
    Case(
        "parted by a character that is not looked for",
        b"occ1/hisco_1\nfarmer/61110\n",
        None,
        r"one column only: --delimiter names",
    ),
    Case(
        "the same, named",
        b"occ1/hisco_1\nfarmer/61110\n",
        1,
        r"1 read, 1 for training",
        (*HISCO, "--delimiter", "/"),
    ),
    Case("semicolons", (HEAD + GOOD).replace(b",", b";"), 2, r"2 read, 2 for training"),
    Case(
        "tabs and CRLF",
        (HEAD + GOOD).replace(b",", b"\t").replace(b"\n", b"\r\n"),
        2,
        r"2 read, 2 for training",
    ),
    Case(
        "semicolons, but a comma named",
        (HEAD + GOOD).replace(b",", b";"),
        None,
        r"has no column 'occ1'; it has 'occ1;hisco_1'",
        (*HISCO, "--delimiter", "comma"),
    ),
    Case("old Macintosh line ends", (HEAD + GOOD).replace(b"\n", b"\r"), 2, r"2 read, 2 for training"),
    Case(
        "blank lines, no line end at the last",
        HEAD + b"\n\nfarmer,61110\n\nsmith,83110",
        2,
        r"2 read, 2 for training",
    ),
    Case(
        "Windows-1252",
        HEAD + GOOD + b"v\xe6ver,75400\n",
        3,
        r"data\.csv was read as Windows-1252, since it is not UTF-8: 'væver'; --encoding names another",
    ),
    Case(
        "UTF-16 with byte order mark",
        (HEAD + GOOD).decode().encode("utf-16"),
        2,
        r"data\.csv was read as UTF-16",
    ),
    Case(
        "UTF-16 without byte order mark",
        (HEAD + GOOD).decode().encode("utf-16-le"),
        None,
        r"--encoding utf-16-le reads it if it is UTF-16",
    ),
    Case(
        "DOS code page",
        HEAD + GOOD + "væver på møllen,75400\n".encode("cp850"),
        None,
        r"its code page cannot be told. --encoding NAME(?s:.*)cp850: 'væver på møllen'",
    ),
    Case(
        "UTF-8 with a line in Windows-1252",
        HEAD + "væver,75400\nhusmand og træskærer,61115\nbødker,81110\n".encode() * 5 + b"m\xf8ller,77120\n",
        None,
        r"is not UTF-8 in line 17, as 15 other lines are\. Parts of different encodings",
    ),
    Case("a whole file of zeros", b"\0" * 100, None, r"is not a text file"),
    Case(
        "Excel workbook",
        b"PK\x03\x04rest",
        None,
        r"is not a CSV file but an Excel workbook or a zip archive; save the sheet as CSV",
    ),
    Case("compressed with gzip", b"\x1f\x8b\x08\x00rest", None, r"compressed with gzip .*gunzip"),
    Case("Stata file", b"<stata_dta><header>", None, r"a Stata file; save it as CSV with: export delimited"),
    Case("damaged Parquet file", b"PAR1 cut off", None, r"is a damaged Parquet file"),
    Case(
        "description empty",
        HEAD + GOOD + b" ,83110\n",
        2,
        r"1 rows rejected.*\n  1 × empty text \(data\.csv line 4\)",
    ),
    Case(
        "every description empty",
        HEAD + b",83110\n,61110\n",
        None,
        r"no valid row to train on \(2 × empty text\)",
    ),
    Case(
        "descriptions NA, null, nan and None",
        HEAD + b"NA,-1\nnull,-1\nnan,-1\nNone,-1\n",
        4,
        r"4 read, 4 for training",
    ),
    Case(
        "description too long",
        HEAD + GOOD + LONG + b",83110\n",
        3,
        r"1 descriptions are longer than the model reads and are cut \(data\.csv line 4\)",
    ),
    Case(
        "NUL character inside", HEAD + GOOD + b"sm\0ith,83110\n", 2, r"1 × NUL character \(data\.csv line 4\)"
    ),
    Case(
        "a cell too few, a cell too many",
        HEAD + GOOD + b"baker\nbaker,77610,x\n",
        2,
        r"2 × wrong number of cells \(data\.csv lines 4, 5\)",
    ),
    Case(
        "comma in a text without quotation marks",
        HEAD + GOOD + b"smith, old,83110\n",
        2,
        r"1 × wrong number of cells \(data\.csv line 4\)",
    ),
    Case(
        "text after a quotation mark",
        HEAD + GOOD + b'"old" smith,83110\n',
        2,
        r"1 × broken quotation marks \(data\.csv line 4\)",
    ),
    Case(
        "quotation mark never closed",
        HEAD + b'"old smith,83110\n' + GOOD,
        None,
        r"data\.csv, line 2: a quotation mark there is not closed before line 4",
    ),
    Case(
        "quotation mark that swallows rows",
        HEAD + GOOD + b'"old smith,83110\nbaker,77610\nx",77610\n',
        2,
        r"1 × rows inside a cell \(data\.csv line 4\)",
    ),
    Case(
        "line break within quotation marks",
        HEAD + GOOD + b'"old\nsmith",83110\nbaker,\n',
        3,
        r"1 × first code missing \(data\.csv line 6\)",
    ),
    Case("first code missing", HEAD + GOOD + b"baker,\n", 2, r"1 × first code missing \(data\.csv line 4\)"),
    Case(
        "the same with --missing-code",
        HEAD + GOOD + b"baker,\n",
        3,
        r"1 rows without a first code got the code of --missing-code",
        (*HISCO, "--missing-code", "-1"),
    ),
    Case("NA as a code", HEAD + GOOD + b"baker,NA\n", 2, r"1 × first code missing \(data\.csv line 4\)"),
    Case("leading zero lost", HEAD + GOOD + b"physician,6105\n", 3, r"1 codes got a lost leading zero"),
    Case(
        "codes with a decimal point",
        HEAD + b"farmer,61110.0\n",
        1,
        r"1 codes got a lost leading zero \(or a trailing \.0\) repaired",
    ),
    Case(
        "code too short",
        HEAD + GOOD + b"baker,776\n",
        None,
        r"line 4, column 'hisco_1': code '776' has 3 tokens.*\n.*What to do:\n.*--drop-bad-labels",
    ),
    Case(
        "the same with --drop-bad-labels",
        HEAD + GOOD + b"baker,776\n",
        2,
        r"1 × code does not fit \(data\.csv line 4\)",
        (*HISCO, "--drop-bad-labels"),
    ),
    Case(
        "code too short for the general formatter",
        HEAD + GOOD + b"baker,776\n",
        None,
        r"--formatter hisco is for HISCO codes, and restores lost leading"
        r" zeros\n.*--allow-codes-shorter-than-block-size fills shorter codes up\n.*--drop-bad-labels",
        ("--target-cols", "hisco_1", "--share-val", "0"),
    ),
    Case("letters in a code", HEAD + GOOD + b"baker,77a10\n", None, r"'a' is not a token of formatter hisco"),
    Case(
        "code outside the key",
        HEAD + GOOD + b"baker,77610\n",
        2,
        r"1 × code outside the key \(data\.csv line 4\)",
        (*HISCO, "--key", "key.csv"),
    ),
    Case(
        "numbers beyond the key",
        b"occ1,code1\nfarmer,0\nsmith,7\n",
        None,
        r"'7' is not a number of the key, 0 … 1",
        ("--formatter", "hisco", "--target-cols", "code1", "--share-val", "0", "--key", "key.csv"),
    ),
    Case(
        "same text, different codes",
        HEAD + GOOD + b"Farmer,61115\n",
        3,
        r"texts that are coded differently in different rows: 1, listed in conflicts\.csv",
    ),
    Case("rows that repeat others", HEAD + GOOD + GOOD, 4, r"2 distinct; 2 rows repeat an earlier one"),
    Case(
        "language missing",
        b"occ1,hisco_1,lang\nfarmer,61110,en\nsmith,83110,\n",
        2,
        r"1 rows without a language are coded as unk",
        (*HISCO, "--language-col", "lang"),
    ),
    Case(
        "languages with other names",
        b"occ1,hisco_1,lang\nbonde,61110,sv\n",
        1,
        r"languages that the published models were not trained on: sv \(se there\)",
        (*HISCO, "--language-col", "lang"),
    ),
    Case(
        "column that is not the language",
        b"occ1,hisco_1,lang\nfarmer,61110," + LONG + b"\n",
        None,
        r"of 200 characters; is it the language\?",
        (*HISCO, "--language-col", "lang"),
    ),
    Case(
        "short codes that are accepted",
        HEAD + GOOD + b"baker,776\n",
        3,
        r"1 codes are shorter than the block and are filled up \(data\.csv line 4\)",
        ("--target-cols", "hisco_1", "--share-val", "0", "--allow-codes-shorter-than-block-size"),
    ),
    Case(
        "wrong column of codes",
        b"occ1,hisco_1,lang\nfarmer,61110,en\nsmith,83110,en\n",
        None,
        r"Most rows are of this kind: look whether --target-cols",
        ("--formatter", "hisco", "--target-cols", "lang", "--share-val", "0"),
    ),
    Case(
        "columns parted by a comma in the flag",
        b"occ1,hisco_1,hisco_2\nfarmer,61110,\n",
        None,
        r"has no column 'hisco_1,hisco_2'.*\(separate several columns by spaces\)",
        ("--formatter", "hisco", "--target-cols", "hisco_1,hisco_2"),
    ),
    Case(
        "a column of languages that is not named",
        b"occ1,hisco_1,lang\nfarmer,61110,en\n",
        1,
        r"there is a column 'lang' that is not read; --language-col lang reads it",
    ),
    Case(
        "letters broken before",
        HEAD + GOOD + "vÃ¦ver,75400\nsm�th,83110\n".encode(),
        4,
        r"2 descriptions hold letters that were broken by a wrong encoding before",
    ),
    Case(
        "byte order mark and a line in Windows-1252",
        b"\xef\xbb\xbf" + HEAD + "væver,75400\nbødker,81110\n".encode() * 9 + b"m\xf8ller,77120\n",
        None,
        r"is not UTF-8 in line 20, as 19 other lines are\. Parts of different encodings",
    ),
    Case(
        "Windows-1252 with some lines in UTF-8",
        HEAD + b"caf\xe9,51020\n" * 100 + "møller,77120\n".encode() * 9,
        None,
        r"is not UTF-8 in line 2, as 9 other lines are\. Parts of different encodings",
    ),
    Case(
        "DOS code page whose letters are signs elsewhere",
        HEAD + "peón,99910\nalbañil,95120\ncapitán,58320\n".encode("cp850") * 3,
        9,
        r"was read as cp850, since it is not UTF-8: 'peón', 'albañil', 'capitán'; --encoding names another",
    ),
    Case(
        "UTF-8 that ends within a letter",
        HEAD + GOOD + "væver,75400\n".encode() * 3 + b"v" + b"\xc3",
        None,
        r"is not UTF-8 in line 7, as 3 other lines are",
    ),
    Case(
        "quotation mark that swallows rows, CR line ends",
        b'occ1,hisco_1,lang\rfarmer,61110,en\r"smith,83110,en\rx,61110,en\rbaker",77610,en\r',
        1,
        r"1 × rows inside a cell",
    ),
    Case(
        "two rows joined in a middle column",
        b'occ1,note,hisco_1\nfarmer,,61110\nsmith,"tall,83110\nbaker,short",77610\n',
        1,
        r"1 × rows inside a cell",
    ),
    Case(
        "prose of several lines with commas",
        HEAD + GOOD + b'"farmer, tenant\nof the parish, old",61110\n',
        3,
        r"3 read, 3 for training",
    ),
    Case(
        "character that the model uses itself",
        HEAD + GOOD + "smith \ue001,83110\n".encode(),
        2,
        r"1 × character of the model \(data\.csv line 4\)",
    ),
    Case(
        "language from the column of codes",
        HEAD + GOOD,
        None,
        r"--language-col hisco_1 is also the column",
        (*HISCO, "--language-col", "hisco_1"),
    ),
    Case(
        "number of five thousand digits",
        b"occ1,code1\nfarmer,0\nsmith," + b"7" * 5000 + b"\n",
        None,
        r"is not a number of the key|what is not a number of the key",
        ("--formatter", "hisco", "--target-cols", "code1", "--share-val", "0", "--key", "key.csv"),
    ),
    Case(
        "--max-len out of reach",
        HEAD + GOOD,
        None,
        r"--max-len must be at least 16 and at most 2048, not 999999999",
        (*HISCO, "--max-len", "999999999"),
    ),
    Case(
        "carriage return inside a row",
        HEAD + GOOD + b"old\rsmith,83110\n",
        3,
        r"1 × wrong number of cells \(data\.csv line 4\)",
    ),
    Case(
        "Macintosh lines in a file of others",
        HEAD + GOOD + GOOD.replace(b"\n", b"\r"),
        4,
        r"4 read, 4 for training",
    ),
    Case("carriage returns doubled", (HEAD + GOOD).replace(b"\n", b"\r\r\n"), 2, r"2 read, 2 for training"),
    Case("UTF-32", (HEAD + GOOD).decode().encode("utf-32"), None, r"text in UTF-32; save it as UTF-8"),
    Case(
        "UTF-32 without byte order mark",
        (HEAD + GOOD).decode().encode("utf-32-be"),
        None,
        r"is not a text file \(a NUL byte in the first line\)",
    ),
    Case(
        "encrypted Parquet file",
        b"PARE" + b"\0" * 20,
        None,
        r"an encrypted Parquet file; write it without encryption",
    ),
    Case(
        "several things at once",
        b"occ1,hisco_1\n,61110\nfarmer,\nbaker\nsmith,83110\n",
        1,
        r"3 rows rejected(.*\n)+.*1 × ",
        HISCO,
    ),
]


def outcome(case: Case, folder: Path) -> tuple[int, str]:
    (folder / case.name).write_bytes(case.content)
    (folder / "key.csv").write_text("system_code,code\n61110,0\n83110,1\n")
    flags = [str(folder / "key.csv") if flag == "key.csv" else flag for flag in case.flags]
    return run_inside(
        lambda argv: sys.exit(prepare.main(argv)), folder / case.name, "--save-path", folder / "out", *flags
    )


@pytest.mark.parametrize("case", CASES, ids=[case.wrong for case in CASES])
def test_what_the_user_is_told(case, tmp_path):
    if case.wrong == "damaged Parquet file":
        pytest.importorskip("pyarrow")
    code, output = outcome(case, tmp_path)
    assert re.search(case.said, output), output
    assert "Traceback" not in output and output.count("error: ") == (case.rows is None)
    assert code == (2 if case.rows is None else 0), output
    if case.rows is not None:
        assert f"{case.rows:,} for training" in output
    else:
        assert not list(tmp_path.glob("out/prepared/*"))


@pytest.mark.full
def test_a_terminal_without_the_letters_ends_nothing(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(HEAD + GOOD + b",1\n")
    done = subprocess.run(
        [sys.executable, "-m", "histocc.prepare", path, *HISCO, "--save-path", tmp_path / "out"],
        cwd=REPO,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0 and b"1 ? empty text" in done.stdout and b"Traceback" not in done.stderr


def test_there_are_forty():
    assert len(CASES) >= 40 and len({case.wrong for case in CASES}) == len(CASES)


def test_parquet_is_read_like_a_table_of_text(tmp_path):
    content = parquet(
        occ1=["farmer", None, "null", "smith"], hisco_1=[61110, 83110, -1, 1110], other=[1.5, None, 2, 3]
    )
    case = Case("", content, 3, "", name="data.parquet")
    code, output = outcome(case, tmp_path)
    assert (
        code == 0 and "4 read, 3 for training" in output and "1 × empty text (data.parquet line 2)" in output
    )
    assert "1 codes got a lost leading zero" in output


def test_parquet_of_numbers_with_gaps_and_of_categories(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    content = parquet(
        occ1=pyarrow.array(["farmer", "smith", "farmer"]).dictionary_encode(),
        hisco_1=pyarrow.array([61110.0, None, 61110.0]),
    )
    code, output = outcome(Case("", content, 2, "", name="data.parquet"), tmp_path)
    assert code == 0 and "3 read, 2 for training" in output and "1 × first code missing" in output


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, output = outcome(Case("", b"PAR1....", None, "", name="data.parquet"), tmp_path)
    assert (
        code == 2
        and "data.parquet: reading Parquet needs pyarrow: pip install pyarrow" in output
        and "Traceback" not in output
    )


def main() -> None:
    print("| what is wrong | rows used | what the user is told |\n|---|---|---|")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            code, output = outcome(case, Path(folder))
            said = re.search(f".*{case.said}.*", output)
        said = re.sub(r"\s+", " ", said.group().replace(folder + "/", "")) if said else output
        print(
            f"| {case.wrong} | {'refused' if code else case.rows} |"
            f" {said.replace('error: ', '').replace('|', chr(92) + '|')} |"
        )


if __name__ == "__main__":
    main()
