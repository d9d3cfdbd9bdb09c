"""Tables in the forms that people have: rows come back as they were written, or are refused with their line;
and what the user is told.
"""

import csv
import gzip
import io
import os
import re
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import examples, run_inside, write_csv
from hypothesis import example, given
from hypothesis import strategies as st
from preparing import HEADER, Result, codes_of, prepare, problems, quiet, settings_for, written

from histocc import prepare as command
from histocc.data import prepare as prep
from histocc.data import tables
from histocc.data.config import columns_of, file_problems, settings_from
from histocc.data.report import report_lines
from histocc.data.rows import code_of_cell, read_columns, read_key, read_words
from histocc.data.tables import read_chunks, table_format
from histocc.formatter import hisco_key, make_formatter
from histocc.job.config import finetune_parser
from histocc.runtime import checkpoint, files
from histocc.runtime.config import read_file
from histocc.runtime.errors import UserError

FILES = Path(__file__).parent / "data" / "tables"


def rows_of(path, columns=None, *how):
    """({line: cells}, [(line, kind)])"""
    rows, faults = {}, []
    for chunk in read_chunks(str(path), columns, *how):
        rows.update(zip(chunk.lines.tolist(), zip(*chunk.columns), strict=True))
        faults += [(line, kind) for line, kind, _ in chunk.faults]
    return rows, faults


# ---- any table, however it is written

CELLS = st.lists(
    st.sampled_from(["a", "é", " ", "\r", "\n", "\r\n", '"', ",", ";", "\0", "\x85", "\u2028", "\x1c", "😀"]),
    max_size=5,
).map("".join)
TABLES = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(CELLS, min_size=width, max_size=width), min_size=1, max_size=14)
)


@examples(400)
@given(
    rows=TABLES,
    end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "cp1252"]),
    chunk=st.integers(1, 4),
)
@example([["a\n,é", "é"], ["a", "b"]], "\n", csv.QUOTE_ALL, "utf-8", 4)  # a cell that looks like two rows
def test_rows_come_back_or_are_refused_by_line(rows, end, quoting, encoding, chunk):
    text, begins = io.StringIO(newline=""), []
    writer = csv.writer(text, lineterminator=end, quoting=quoting)
    for row in ([f"é{i}" for i in range(len(rows[0]))], *rows):
        begins.append(len(re.findall("\r\n|\r|\n", text.getvalue())) + 1)
        writer.writerow(row)
    torn = quoting == csv.QUOTE_MINIMAL and any("\r" in cell for row in rows for cell in row)
    expected = dict(zip(begins[1:], map(tuple, rows), strict=True))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "CHUNK", chunk)
        try:
            path = written(Path(folder) / "data.csv", text.getvalue().encode(encoding))
            found, faults = rows_of(path)
        except UnicodeEncodeError:
            return
        except UserError as error:
            inside = [cell for row in rows for cell in row if "\r" in cell or "\n" in cell]
            assert inside or encoding == "cp1252", str(error)
            return
    if torn:
        return  # each part is a row, or has too few cells
    assert len(found) + len(faults) == len(rows), (found, faults)
    assert {kind for _, kind in faults} <= {"rows inside a cell"}
    assert all(row == expected[line] for line, row in found.items())
    assert {line for line, _ in faults} == expected.keys() - found.keys()


BROKEN, WRONG_NUMBER = "broken quotation marks", "wrong number of cells"


@pytest.mark.parametrize(
    "content, rows, faults",
    [
        (b"a\nx\ry\nz\n", {2: ("x",), 3: ("y",), 4: ("z",)}, []),
        (b"a,b\n1,x\ry\n2,z\n", {2: ("1", "x"), 4: ("2", "z")}, [(3, WRONG_NUMBER)]),
        (b'a,b\n1,"x\ry"\n2,z\n', {2: ("1", "x\ry"), 4: ("2", "z")}, []),
        (b"a,b\r\r\n1,2\r\r\n\r\r\n3,4\r\r\n", {3: ("1", "2"), 7: ("3", "4")}, []),
        (b'a,b\n"x"y,1\n\n1,x,\n1,2\n', {5: ("1", "2")}, [(2, BROKEN), (4, WRONG_NUMBER)]),
        (b'a,b\n1,2\n3,"4', {2: ("1", "2")}, [(3, BROKEN)]),
        (b'a,b\n1,"x"y\n1,"x"y\n2,z\n', {4: ("2", "z")}, [(2, BROKEN), (3, BROKEN)]),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2, 4096])
def test_line_ends_and_broken_rows(tmp_path, content, rows, faults, chunk, monkeypatch):
    monkeypatch.setattr(tables, "CHUNK", chunk)
    assert rows_of(written(tmp_path / "f.csv", content)) == (rows, faults)


def test_encodings_that_are_named(tmp_path):
    path = tmp_path / "f.csv"
    for encoding in ("utf-16-le", "utf-16-be"):
        written(path, "occ1,lang\nsmed,da\n".encode(encoding))
        with pytest.raises(UserError, match=r"not a text file .*--encoding utf-16-le \(or -be\)"):
            tables.table_format(str(path), flags=True)
        with pytest.raises(UserError, match="not a text file .*save it as UTF-8"):
            rows_of(path)  # a file that no flag describes
        assert rows_of(path, ["occ1"], None, encoding)[0] == {2: ("smed",)}
        broken = "\ufeffa,b\n1,2\nsm".encode(encoding) + "\ud800".encode(encoding, "surrogatepass")
        written(path, broken + "x,2\n".encode(encoding))
        with pytest.raises(UserError, match="f.csv, line [123] or below: cannot be read as UTF-16"):
            rows_of(path)


def test_every_reader_looks_at_the_path_first(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "READ_SECONDS", 0)
    os.mkfifo(tmp_path / "fifo")
    os.symlink("loop", tmp_path / "loop")
    (tmp_path / "plain").write_text("a\n")
    paths = {
        str(tmp_path / "fifo"): "is a pipe, which can be read only once; save it as a file first",
        str(tmp_path): "is a folder",
        "/dev/null": "is a device",
        str(tmp_path / "loop"): "symbolic links",
        "a\0b": "cannot be read: ",
        "x" * 300: "cannot be read: ",
        str(tmp_path / "plain" / "f.csv"): "no such file",
        str(tmp_path / "plian"): f"no such file; did you mean {tmp_path / 'plain'}?",
        "": "an input without a name: no such file",
    }
    readers = [table_format, lambda path: list(read_chunks(path, None)), read_key, read_words, read_file]
    for path, words in paths.items():
        for reader in (*readers, checkpoint.load, lambda path: read_columns(path, ["a"])):
            with pytest.raises(UserError) as caught:
                reader(path)
            assert words in str(caught.value) and len(str(caught.value)) < 700, (path, reader)
            assert str(caught.value).startswith("--config ") == (reader is read_file)


# ---- pipes


def test_what_comes_through_a_pipe_becomes_a_file(tmp_path):
    pipe, target, checks = str(tmp_path / "pipe"), tmp_path / "target", []
    os.mkfifo(pipe)
    # more than a pipe holds, in one piece: a shell's small ones would each be asked about
    slow = "sleep 0.6; (echo a; sleep 0.1; dd if=/dev/zero bs=100000 count=1) > pipe 2> said"
    for line, content in ((slow, b"a\n" + bytes(100_000)), (": > pipe", b"")):
        writer = subprocess.Popen(["sh", "-c", line], cwd=tmp_path)
        files.save_pipe(pipe, str(target), lambda: checks.append(1), 20)
        assert writer.wait() == 0 and target.read_bytes() == content
    assert 4 <= len(checks) <= 40


def test_a_silent_pipe_ends_at_the_limit_and_at_a_stop(tmp_path):
    pipe, target, stop = str(tmp_path / "pipe"), tmp_path / "target", [None, None, KeyboardInterrupt]
    os.mkfifo(pipe)
    with pytest.raises(UserError, match=r"pipe: nothing has come through this pipe for 0\.3 s"):
        files.save_pipe(pipe, str(target), lambda: None, 0.3)  # no writer
    with open(pipe, "rb+", buffering=0), pytest.raises(KeyboardInterrupt):  # a writer that says nothing
        files.save_pipe(pipe, str(target), Mock(side_effect=stop), 60)
    assert not target.exists()


# ---- Parquet


def parquet_file(path, columns: dict, **options) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def test_values_of_any_kind_are_their_text(tmp_path):
    pa, path, nan = pytest.importorskip("pyarrow"), tmp_path / "f.parquet", float("nan")
    for values, expected in (
        (pa.array([61110, None, -1, 2**63 - 1]), "61110||-1|9223372036854775807"),
        (pa.array([61110.0, None, nan, -0.0, 1110.5, 1e15, 1e22]), "61110|||0|1110.5|1000000000000000|1e+22"),
        (pa.array([61110.0, 2048.0, nan], pa.float32()), "61110|2048|"),
        (pa.array(["a", None, "NA", "a\0b", "\r\n"], pa.large_string()), "a||NA|a\0b|\r\n"),
        (pa.array([b"\xc3\xa5"]), "å"),
        (pa.array(["a", None, "a"]).dictionary_encode(), "a||a"),
    ):
        found = [cells[0] for cells in rows_of(parquet_file(path, {"a": values}), ["a"])[0].values()]
        assert found == expected.split("|"), values.type
    parquet_file(path, {unicodedata.normalize("NFD", "ä"): ["x"], "b": [["a"]]})
    assert rows_of(path, ["ä"]) == ({1: ("x",)}, []) and table_format(str(path)).names == ["ä", "b"]
    for columns in (["b"], None):
        with pytest.raises(UserError, match="column 'b' has several values per cell: write each cell as"):
            rows_of(path, columns)
    assert rows_of(parquet_file(path, {})) == ({}, []) and table_format(str(path))[:2] == ([], "")
    cells = [str(i) for i in range(1000)]
    parquet_file(path, {"a": cells, "a.b": ["x"] * 1000}, row_group_size=3)
    assert [row[0] for row in rows_of(path, ["a"])[0].values()] == cells


# ---- tables in the forms that historians have


def read(tmp_path, name: str, *flags: str) -> tuple[Result, str]:
    """(a table prepared with these flags, what is said of it)"""
    path = str(FILES / name)
    args, problems = finetune_parser().parse_args([f"--dataset={path}", "--share-val", "0", *flags]), []
    settings = settings_from(columns_of(args, path, problems)[0], [path], [], problems)
    result = Result(prep.prepare(settings, str(tmp_path / "out"), quiet))
    return result, "\n".join(report_lines(result.report))


def refused(tmp_path, name: str, *flags: str) -> str:
    with pytest.raises(UserError) as caught:
        read(tmp_path, name, *flags)
    return str(caught.value)


@pytest.fixture
def without_charset_normalizer(monkeypatch):
    monkeypatch.setitem(sys.modules, "charset_normalizer", None)
    tables._detected.cache_clear()
    yield
    tables._detected.cache_clear()


def test_code_pages_are_read_by_name_and_never_as_windows_1252(tmp_path, without_charset_normalizer):
    for page, texts in (
        ("cp1250", ["kovář", "řezník"]),
        ("cp1251", ["крестьянин", "кузнец"]),
        ("cp1253", ["γεωργός", "ράπτης"]),
        ("cp1254", ["çiftçi", "dülger"]),
    ):
        message = refused(tmp_path, f"{page}.csv")
        assert "is not UTF-8 (line 2), and its code page is unclear. Name it with --encoding NAME" in message
        assert "  cp1252: '" in message and f"  {page}: '{texts[0]}" in message
        result, _ = read(tmp_path, f"{page}.csv", "--encoding", page)
        assert result.texts[:2] == texts and result.rejected == []


def test_charset_normalizer_is_asked_where_it_is_installed(tmp_path):
    pytest.importorskip("charset_normalizer")
    result, said = read(tmp_path, "cp1251.csv")
    assert "cp1251.csv was read as" in said and "because it is not UTF-8: '" in said
    assert result.report["files"][0]["encoding"] != "UTF-8"


@pytest.mark.parametrize(
    "texts",
    [
        ["væver", "gårdmand", "bødker", "skrædder"],
        ["Bürgermeister", "Schlösser", "Fährmann"],
        ["tonnelier à Orléans", "maçon", "forgeron, né à Liège"],
        ["smiður", "bóndi", "þjónn", "húsfreyja"],
        ["shoemaker’s apprentice", "“smith”", "café keeper"],
    ],
)
def test_windows_1252_is_recognized_by_the_letters_of_its_languages(tmp_path, texts):
    content = "occ1,hisco_1\n" + "".join(f'"{text}",61110\n' for text in texts)
    result = prepare(tmp_path, content.encode("cp1252"))
    assert result.texts == texts
    said = "\n".join(report_lines(result.report))
    assert "Note: data.csv was read as Windows-1252, because it is not UTF-8: " in said
    assert "--encoding" in said


def test_a_broken_word_among_ascii_tells_no_code_page(tmp_path):
    for word in ("кузнец".encode("cp1251"), b"sm\xc3\xadth\xff"):
        path = written(tmp_path / "f.csv", b"occ1\n" + b"farmer\n" * 40 + word + b"\nbaker\n")
        names, _, encoding, _, [note], *_ = table_format(path)
        assert (names, encoding) == (["occ1"], "cp1252") and "was read as Windows-1252" in note


def test_what_no_code_page_explains_is_refused(tmp_path, without_charset_normalizer):
    for content, words in (
        ("værksted, bødker, gårdmand".encode("cp850"), "cp850: 'værksted"),
        ("væver, gårdmand, bødker".encode("mac_roman"), "its code page is unclear"),
        ("væver\n".encode() * 9 + "væver".encode("cp1252"), "line 11 is not UTF-8; lines that are: 9. It"),
    ):
        [message] = problems(tmp_path, b"occ1\n" + content, cols=("occ1",))
        assert words in message


def test_what_programs_write_around_the_rows(tmp_path):
    result, said = read(tmp_path, "written_by_R.csv")
    assert result.texts == ["smith", "baker", "wheelwright"] and result.codes == ["77610", "83110", "95410"]
    assert "has rows with one cell more than names: the first was taken for R's row names" in said
    result, said = read(tmp_path, "excel.csv")  # sep=;
    assert result.texts == ["smed", "væver"] and "Windows-1252" in said
    assert list(rows_of(FILES / "excel.csv", ["occ1"])[0]) == [3, 4]
    problem = file_problems(settings_for(FILES / "comment.csv", cols=("hisco_1",)))[0]
    assert "has no column 'occ1'" in problem and "in line 2: remove the lines above" in problem


@pytest.mark.parametrize(
    "lines, delimiter",
    [
        ("x |#,ko|de\nsmith,1|2\nbaker,3", ","),
        ("x |#,ko|de\nsmith|1|2", "|"),
        ("name, title;code, old\nsmith;1\nbaker;2", ";"),
        ('"a;b;c";code\n"smith";1', ";"),
        ("x |#,ko|de", "|"),  # no rows: the most frequent one
        ("occ1\nbaker; smith\na; b", ","),  # one column
        ("a;b\n1;x, y;z\n2;x, y;z", ";"),  # the numbers of R's rows
    ],
)
def test_the_delimiter_gives_rows_as_many_cells_as_names(lines, delimiter, tmp_path):
    (tmp_path / "t.csv").write_text(lines)
    assert table_format(str(tmp_path / "t.csv")).delimiter == delimiter


def test_words_for_no_further_code(tmp_path):
    result, said = read(tmp_path, "second_code.csv")
    assert list(map(len, codes_of(result))) == [1] * 5 + [2] and result.rejected == []
    assert "Note: cells such as NA or null in the columns of codes, read as no code: 5 (" in said
    options = {"kind": "gpf", "cols": ("hisco_1", "hisco_2"), "block_size": 2, "allow_short": True}
    kept = prepare(tmp_path, "occ1,hisco_1,hisco_2\na,61,.\n", fixed_codes=["61", "."], **options)
    assert kept.train == [("a", "unk", ["61", "."])]  # the key has it


def test_codes_as_books_and_spreadsheets_have_them(tmp_path):
    result, said = read(tmp_path, "book.csv")
    assert codes_of(result) == [["63120"], ["06105"], ["83110"], ["79100"], ["-1"]]
    assert re.search("Note: codes rewritten .*: 4 ", said) and "'6-31.20'" in said
    assert "7,712E" in (message := refused(tmp_path, "numbers.csv")) and "number format" in message
    result, said = read(tmp_path, "numbers.csv", "--drop-bad-labels")
    codes = {"civil engineer": ["02210"], "baker": ["77610"], "no occupation": ["-1"], "farmer": ["61110"]}
    codes |= {"smith": ["83110"]}
    assert {text: codes for text, _, codes in result.train} == codes
    assert [row[2] for row in result.reasons] == ["7,712E+04"] and re.search("codes rewritten .*: 3 ", said)
    assert re.search("codes with a thousands separator, .*: 1 ", said)


def test_codes_that_hisco_does_not_have(tmp_path):
    result, said = read(tmp_path, "ipums.csv")
    assert re.search("Note: codes outside the 1,919 of HISCO .*: 2 ", said) and "'98999', '12345'" in said
    rejected, _ = read(tmp_path, "ipums.csv", "--key", "hisco")
    assert rejected.texts == ["no occupation", "farmer", "smith"] and rejected.codes == list(hisco_key())
    recoded, said = read(tmp_path, "ipums.csv", "--recode", "99999=-1,98999=-1")
    assert codes_of(recoded)[:2] == [["-1"]] * 2
    assert "codes replaced, as --recode says: 2 " in said and re.search("outside the 1,919 of .*: 1 ", said)
    assert "--recode: code '7' has a length of 1" in refused(tmp_path, "ipums.csv", "--recode", "99999=7")


def test_too_many_codes_in_one_cell(tmp_path):
    content = "occ1,hisco_1\na,61110;83110;77610;51020;79100;64100\nb,61110\n"
    few = prepare(tmp_path, content, code_separator=";")
    assert few.texts == ["b"] and few.report["rejected"] == {"too many codes": 1}


def test_languages_and_letters(tmp_path):
    result, said = read(tmp_path, "langs.csv")
    assert result.report["languages"] == {"da": 5, "en": 1} and result.report["languages_renamed"] == 5
    assert "'DA', 'Danish', 'dan', 'da-DK', 'EN'" in said
    composed, decomposed = (read(tmp_path, name)[0] for name in ("nfc.csv", "nfd.csv"))
    assert composed.train == decomposed.train and composed.data.alphabet == decomposed.data.alphabet
    assert (composed.report["texts_composed"], decomposed.report["texts_composed"]) == (0, 8)
    result, said = read(tmp_path, "invisible.csv")
    assert result.texts == ["smith"] * 5 + ["smith\xa0senior"] and result.report["texts_composed"] == 6
    assert result.report["rejected"] == {"empty text": 2}
    result, said = read(tmp_path, "lowercased_mojibake.csv")
    assert result.report["letters_broken"] == 6 and result.texts[2] == "employã© olie-mij."


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        (["Fr&oslash;en", "Fr&#248;en", "Fr&#xF8;en", "Fr&amp;oslash;en", "Fr\\u00f8en"], "Frøen"),
        (["K=C3=B8bmand", "K=F8bmand", "K%C3%B8bmand", "K%F8bmand"], "Købmand"),
        (["KÃ¸bmand", "Kã¸bmand", "KÃƒÂ¸bmand"], "Købmand"),
        (["R&aring;d &amp; bager", "R=C3=A5d=20&=20bager", "R%C3%A5d%20%26%20bager"], "Råd & bager"),
        (["Smed &lt;gammel&gt;"], "Smed <gammel>"),
        (["Å‚awnik"], "ławnik"),
    ],
)
def test_broken_letters_and_escapes_are_counted_and_mended_if_asked(tmp_path, cells, text):
    path = write_csv(tmp_path / "a.csv", ("occ1", "hisco_1"), [(cell, "61110") for cell in ["smith", *cells]])
    result, said = read(tmp_path, path)
    assert result.report["letters_broken"] == len(cells) and result.texts[1:] == cells
    assert "--repair-text may repair: " in said
    result, said = read(tmp_path, path, "--repair-text")
    assert result.texts == ["smith", *[text] * len(cells)] and "letters_broken" not in said
    assert result.report["letters_repaired"] == len(cells) and result.report["letters_broken"] == 0


def test_what_only_looks_like_an_escape_stays(tmp_path):
    cells = ["R&D; man", "smith & son", "50%af land", "%20 hissedar", "10%80", "GÅ”", "irmã”", "a=b", "x=AB1"]
    cells += ["AT&T;", "&#57344;", "&#0;", "&notit;", "\\new", "CHÂTEAU", "Ålderman", "mãe", "faÃr"]
    path = write_csv(tmp_path / "a.csv", ("occ1", "hisco_1"), [(cell, "61110") for cell in cells])
    result, _ = read(tmp_path, path, "--repair-text")
    assert result.texts == cells and result.report["letters_repaired"] == 0


def test_texts_that_repeat_the_row_above(tmp_path):
    result, said = read(tmp_path, "dittos.csv", "--ditto", "none", "--clean-text", "ascii-lower")
    assert result.report["dittos"] == 6 and len(result.train) == 8
    assert result.texts[6] == '"'  # as the package Unidecode has it
    assert "dittos.csv lines 3, 5, 6, 7, 8 …: 'do.', 'ditto'" in said
    filled, said = read(tmp_path, "dittos.csv", "--clean-text", "ascii-lower")
    assert filled.texts == ["blacksmith"] * 2 + ["baker"] * 6 and "text of the row above: 6 " in said


def test_rows_without_a_description(tmp_path):
    name, columns = "published_training_rows.csv", ["--target-cols", "hisco_1", "--formatter", "hisco"]
    plain, _ = read(tmp_path, name, *columns)
    assert plain.report["rejected"] == {"empty text": 1} and len(plain.train) == 2
    kept, said = read(tmp_path, name, "--empty-text", "-1")
    assert kept.train[0] == ("", "da", ["-1"]) and len(kept.train) == 3
    assert "Note: rows without a description, kept with the code of --empty-text: 1 (" in said
    other = prepare(tmp_path, "occ1,hisco_1\n ,61110\nsmith,83110\n", empty_text="-1")
    assert other.texts == ["smith"] and "is not -1" in other.rejected[0][4]


# ---- what the user is told of a file

HEAD = b"occ1,hisco_1\n"
GOOD = b"farmer,61110\nsmith,83110\n"
DECOMPOSED = unicodedata.normalize("NFD", "métier,hisco_1\n").encode()
LANG = b"occ1,hisco_1,lang\nfarmer,61110,"
COMMAS = "--target-cols hisco_1,lang"
CASES = {  # what is wrong → content, rows that are used (None: refused), what is said, more flags
    "column names alone": (HEAD, None, r"no valid row to train on \(there are only column names\)"),
    "first line blank": (b"\n" + HEAD + GOOD, None, r"the first line, with the column names, is blank"),
    "no line with column names": (GOOD, None, r"has no column 'occ1'; it has 'farmer', '61110'"),
    "column misspelt": (b"Occ1,hisco_1\n" + GOOD, None, r"'hisco_1'\. Did you mean --input-col 'Occ1'\?"),
    "column names broken": (b'"occ1"x,hisco_1\n' + GOOD, None, r"column names cannot be read as CSV"),
    "unusual delimiter": (b"occ1/x\na/1\n", None, r"one column only: name the delimiter with --delimiter"),
    "blank lines, no line end at the last": (HEAD + b"\n\nfarmer,61110\n\nsmith,83110", 2, r"2 read"),
    "UTF-16": ((HEAD + GOOD).decode().encode("utf-16"), 2, r"data\.csv was read as UTF-16"),
    "UTF-32": (HEAD.decode().encode("utf-32"), None, r"is not a CSV file but UTF-32; save it as UTF-8"),
    "UTF-32 without BOM": (HEAD.decode().encode("utf-32-be"), None, r"not a CSV file but UTF-32; save it as"),
    "a whole file of zeros": (b"\0" * 100, None, r"is not a text file"),
    "damaged workbook": (b"PK\x03\x04rest", None, r"cannot be read as a workbook .* password-protected"),
    "password": (b"\xd0\xcf\x11\xe0", None, r"password-protected or not a workbook; save its table as"),
    "R data file": (gzip.compress(b"RDX3\nX\n\0\0\0\3"), None, r"an R data file; .*, or write\.csv\(x, "),
    "gzip of two parts, Windows-1252": (gzip.compress(HEAD) + gzip.compress(b"v\xe6ver,75400\n"), 1, r"1252"),
    "gzip that is cut": (gzip.compress(GOOD)[:-9], None, r"damaged gzip file \(.*; copy or make it again"),
    "blanks around names": (b" occ1,hisco_1 \n" + GOOD, 2, r"blanks around column names, or line breaks"),
    "Feather file": (b"ARROW1\0\0", None, r"a Feather file; save it as Parquet"),
    "HTML that is called .xls": (b"<html><table><tr><td>occ1", None, r"not a CSV file but HTML or XML"),
    "workbook in gzip": (gzip.compress(b"PK\x03\x04"), None, r"not CSV but workbook in gzip; unpack it"),
    "JSON": (b'[\n {"occ1": "farmer"}]', None, r"is not a CSV file but JSON; write its rows as JSON lines"),
    "JSON object": (b'{\n "a": "b"\n}', None, r"JSON; write each row as an object with the names of its"),
    "JSON in gzip": (gzip.compress(b'[{"a": "b"}]'), None, r"JSON in gzip; .*gunzip --keep .*data\.csv"),
    "JSON lines": (b'{"occ1": "farmer", "hisco_1": ["61110"]}\n' * 2, 2, r"2 read, 2 for training"),
    "JSON lines, cut": (b'{"a": "b"}\n\n{"a": "sm', None, r"line 3: is not a JSON object in utf-8"),
    "a list in JSON lines": (b'{"a": 1}\n[1]\n', None, r"line 2: is not a JSON object"),
    "lists in JSON lines": (b'["a","b"]\n["c","1"]\n', None, r"but JSON; write each row as an object"),
    "JSON lines in UTF-16": ('{"a": "b"}\n'.encode("utf-16"), None, r"JSON lines in UTF-16; save them in"),
    "PNG": (b"\x89PNG\r\n\x1a\n", None, r"is not a CSV file but a PNG, .* picture; transcribe"),
    "PDF": (b"%PDF-1.7\n", None, r"a PDF or RTF document; copy the table in it into a spreadsheet"),
    "damaged SAS file": (b"\0" * 12 + b"\xc2\xea\x81\x60", None, r"cannot be read as a file of SAS \("),
    "a column PAR1": (b"PAR1_x,hisco_1\n" + GOOD, 2, r"2 read", "--input-col PAR1_x"),
    "a column FEA1": (b"FEA1;occ1;hisco_1\n1;farmer;61110\n", 1, r"1 read"),
    "names in brackets": (b"[occ1],[hisco_1]\n" + GOOD, None, r"has no column 'occ1'; it has '\[occ1\]'"),
    "compressed with xz": (b"\xfd7zXZ\0", None, r"compressed with xz; unpack it"),
    "compressed with bzip2": (b"BZh91AY&SY", None, r"compressed with bzip2; unpack it"),
    "damaged Stata file": (b"<stata_dta>", None, r"cannot be read as a file of Stata \(.*save it as CSV"),
    "damaged Parquet file": (b"PAR1 cut off", None, r"is a damaged Parquet file"),
    "NUL inside": (HEAD + GOOD + b"sm\0ith,83110\n", 2, r"1 × forbidden character \(data\.csv line 4\)"),
    "quotation mark": (HEAD + GOOD + b'8,"x\n61110,the "old" man\n', None, r"before line 5.*--no-quotes"),
    "quotation marks as letters": (HEAD + GOOD + b'"a,1110\n5" b,77610\n', 4, r"4 read", "--no-quotes"),
    "column names in two forms": (DECOMPOSED + GOOD, 2, r"column métier", "--input-col métier"),
    "a code that begins like a flag": (HEAD + GOOD, 2, r"2 read", "--recode -1=61110"),
    "rows inside a cell": (
        HEAD + GOOD + b'"old smith,83110\nbaker,77610\nx",77610\n',
        2,
        r"1 × rows inside a cell \(data\.csv line 4\)",
    ),
    "joined rows": (b'occ1,note,hisco_1\na,,61110\nb,"t,83110\nc,s",77610\n', 1, r"1 × rows inside a cell"),
    "prose of several lines": (HEAD + GOOD + b'"farmer, old\nof it, x",61110\n', 3, r"lines of text: 1 "),
    "language": (LANG + b"fi\n", 1, r"models do not know .they know en da .*: fi", "--language-col lang"),
    "languages not named": (LANG + b"en\n", 1, r"not read; add --language-col lang to read it"),
    "wrong column": (LANG + b"en\n", None, r"check --target-cols and --formatter", "--target-cols lang"),
    "commas": (LANG + b"en\n", None, r"column 'hisco_1,lang'.*\(separate several columns by spaces", COMMAS),
    "letters broken": (HEAD + "vÃ¦ver,75400\nsm�th,83110\n".encode(), 2, r"-text may repair: 2 "),
    "no encoding": (HEAD + GOOD, None, r"is not an encoding", "--encoding base64"),
}


def outcome(folder: Path, content: bytes, more: str = "", name: str = "data.csv") -> tuple[int, str]:
    (folder / name).write_bytes(content)
    given = ["--formatter", "hisco", "--target-cols", "hisco_1", "--share-val", "0", *more.split()]
    line = [folder / name, "--save-path", folder / "out", *given]
    return run_inside(lambda argv: sys.exit(command.main(argv)), *line)


@pytest.mark.parametrize("wrong", CASES)
def test_what_the_user_is_told(wrong, tmp_path):
    if "Parquet" in wrong:
        pytest.importorskip("pyarrow")
    content, rows, said, *more = CASES[wrong]
    code, output = outcome(tmp_path, content, *more)
    assert re.search(said, output), output
    assert "Traceback" not in output and output.count("error: ") == (rows is None)
    assert code == (2 if rows is None else 0), output
    if rows is not None:
        assert f"{rows:,} for training" in output
    else:
        assert not list(tmp_path.glob("out/prepared/*"))


# ---- files of codes and of words, and what the columns mean


def test_key_file(tmp_path):
    for text in (
        "system_code,code\n-3,0\n01110,1\n61110,2\n",
        'en_hisco_text,hisco,code\nempty, ,NA\nx,01110,1\n"y, z",61110,2\nw,-3,0\n',
    ):
        assert read_key(written(tmp_path / "key.csv", text)) == ["-3", "01110", "61110"]
    text = "system_code,code\n590,0\n,1\n?,2\n,3\n"  # as the published trainer leaves rows without a code
    assert read_key(written(tmp_path / "key.csv", text)) == ["590", "", "?", ""]


@pytest.mark.parametrize(
    "text, words",
    [
        ("hisco\n61110\n", "'code' and 'system_code'"),
        ("system_code,code\n", "holds no code"),
        ("system_code,code\na,0\nb,2\n", "1 is missing"),
        ("system_code,code\na,0\nb,0\n", "each once"),
        ("system_code,code\na,-1\n", "0 is missing"),
        ("code,system_code\n0,61110\n1\n2,83110\n", "line 3: cells in the row: 1"),
        ("system_code,code\n61110,0\n83110,1\n61110,2\n", "code '61110' is listed 2 times"),
    ],
)
def test_key_file_with_faults(tmp_path, text, words):
    with pytest.raises(UserError, match=f"key.csv.*{words}"):
        read_key(written(tmp_path / "key.csv", text))


def test_codes_of_a_key_file_are_read_as_those_of_rows(tmp_path):
    codes = [('="08311"', "0"), ("'077\u200b61", "'1")]
    path = write_csv(tmp_path / "key.csv", ["system_code", "code"], codes)
    assert read_key(path) == ["08311", "07761"]
    path = write_csv(tmp_path / "twice.csv", ["word", "freq"], [("a", "1"), ("word", "freq"), ("b", "2")])
    assert read_words(path) == {"a": 1, "b": 2}  # of two files, with the names of the columns again


def test_word_file(tmp_path):
    assert read_words(written(tmp_path / "w.csv", "freq;word\n3;og\n1;NA\n")) == {"og": 3, "NA": 1}
    for text in ("word,freq\n", "word,freq\na,x\n", "word,freq\n,3\n", "word,freq\na,1.5\n", "a,b\n1,2\n"):
        with pytest.raises(UserError, match="w.csv"):
            read_words(written(tmp_path / "w.csv", text))


def test_a_cell_holds_the_code_that_it_would_in_training_data():
    hisco = make_formatter("hisco", ["hisco_1"])
    cells = {"1110": "01110", "8-31.10": "83110", " 61110.0 ": "61110", "NA": "", "": "", " ": "", ".": ""}
    assert {cell: code_of_cell(cell, hisco) for cell in cells} == cells
    gpf, key = make_formatter("gpf", ["a"]), {"08311", "8", "A'1", "０"}
    cells = dict.fromkeys(("8'311", "8,311", "8\xa0311", '="8311"'), "08311") | {"A'1": "A'1", "０": "０"}
    assert {cell: code_of_cell(cell, gpf, key) for cell in cells} == cells
    assert code_of_cell("8,311", gpf, key | {"311"}) == "8,311"  # two codes
    assert code_of_cell("NA", make_formatter("gpf", ["a"]), {"NA"}) == "NA"  # the key has it


def test_words_of_the_training_texts(tmp_path, monkeypatch):
    val = write_csv(tmp_path / "v.csv", HEADER, [("unseen word", "61110", "")])
    content = 'occ1,hisco_1\nfarm hand,61110\n"hand, old\thand",61110\nFarm,61110\nrejected,\n'
    result = prepare(tmp_path, content, val_files=[val])
    words = {"hand": 2, "Farm": 1, "farm": 1, "hand,": 1, "old": 1}
    assert list(read_words(str(result.folder / "words.csv")).items()) == list(words.items())
    monkeypatch.setattr("histocc.data.prepare.MAX_WORDS", 2)
    result = prepare(tmp_path, "occ1,hisco_1\na b c b c c,61110\n")
    assert result.table("words.csv") == [["word", "freq"], ["c", "3"], ["b", "2"]]
