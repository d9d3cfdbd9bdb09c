"""Rows of files that are out of the ordinary: each comes back as it was written, or is refused with its
line.
"""

import contextlib
import csv
import io
import os
import random
import re
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from histocc.data import tables
from histocc.data.rows import read_columns, read_key, read_words
from histocc.data.tables import column_problems, read_chunks, table_format
from histocc.predict.output import save_pipe
from histocc.runtime.config import read_file
from histocc.runtime.errors import UserError
from histocc.runtime.files import kind_of


@contextlib.contextmanager
def limits(chunk=tables.CHUNK, block=tables._BLOCK):
    """Other sizes of what is read at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "CHUNK", chunk)
        patch.setattr(tables, "_BLOCK", block)
        yield


def read(path, columns=None):
    """({line: cells}, [(line, kind)])"""
    rows, faults = {}, []
    for chunk in read_chunks(str(path), columns):
        rows.update(zip(chunk.lines.tolist(), zip(*chunk.columns), strict=True))
        faults += [(line, kind) for line, kind, _ in chunk.faults]
    return rows, faults


def refusal(path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    return str(caught.value).replace(str(path), "FILE")


# ---- any table, however it is written

CELLS = st.lists(
    st.sampled_from(["a", "é", " ", "\r", "\n", "\r\n", '"', ",", ";", "\0", "\x85", "\u2028", "\x1c", "😀"]),
    max_size=5,
).map("".join)
TABLES = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(CELLS, min_size=width, max_size=width), min_size=1, max_size=14)
)


def written(rows, end, quoting, encoding) -> tuple[bytes, list[int]] | None:
    """(the file, the line on which each of its rows begins); None if the encoding has not all letters."""
    text, begins = io.StringIO(newline=""), []
    writer = csv.writer(text, lineterminator=end, quoting=quoting)
    for row in rows:
        begins.append(len(re.findall("\r\n|\r|\n", text.getvalue())) + 1)
        writer.writerow(row)
    with contextlib.suppress(UnicodeEncodeError):
        return text.getvalue().encode(encoding), begins


@examples(400)
@given(
    rows=TABLES,
    end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "cp1252"]),
    chunk=st.integers(1, 4),
    block=st.sampled_from([1, 5, 64, 1 << 16]),
)
def test_rows_come_back_or_are_refused_by_line(rows, end, quoting, encoding, chunk, block):
    header = [f"é{i}" for i in range(len(rows[0]))]
    content = written([header, *rows], end, quoting, encoding)
    torn = quoting == csv.QUOTE_MINIMAL and any("\r" in cell for row in rows for cell in row)
    if content is None:
        return
    content, begins = content
    expected = dict(zip(begins[1:], map(tuple, rows), strict=True))
    with tempfile.TemporaryDirectory() as folder, limits(chunk=chunk, block=block):
        path = Path(folder) / "data.csv"
        path.write_bytes(content)
        try:
            found, faults = read(path)
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


@pytest.mark.parametrize(
    "content, rows, faults",
    [
        (b"a\nx\ry\nz\n", {2: ("x",), 3: ("y",), 4: ("z",)}, []),
        (b"a,b\n1,x\ry\n2,z\n", {2: ("1", "x"), 4: ("2", "z")}, [(3, "wrong number of cells")]),
        (b'a,b\n1,"x\ry"\n2,z\n', {2: ("1", "x\ry"), 4: ("2", "z")}, []),
        (b"a\rx\ry", {2: ("x",), 3: ("y",)}, []),
        (b'a\r"x\ny"\rz\r', {2: ("x\ny",), 4: ("z",)}, []),
        (b"a,b\r\r\n1,2\r\r\n\r\r\n3,4\r\r\n", {3: ("1", "2"), 7: ("3", "4")}, []),
        (
            b'a,b\n"x"y,1\n\n1,x,\n1,2\n',
            {5: ("1", "2")},
            [(2, "broken quotation marks"), (4, "wrong number of cells")],
        ),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2, 4096])
def test_carriage_returns(tmp_path, content, rows, faults, chunk):
    (tmp_path / "f.csv").write_bytes(content)
    with limits(chunk=chunk):
        assert read(tmp_path / "f.csv") == (rows, faults)


def test_broken_rows_cost_their_line_or_the_file(tmp_path):
    for row in (b'"12" pipe fitter",2\n', b'"x"y,"z"\n', b'"x"y,""\n'):
        (tmp_path / "f.csv").write_bytes(b"a,b\n" + row + b"3,4\n")
        assert read(tmp_path / "f.csv") == ({3: ("3", "4")}, [(2, "broken quotation marks")])
    for end in (b"\n", b"\r"):  # open at the end of the file
        (tmp_path / "f.csv").write_bytes(end.join((b"a,b", b"1,2", b'3,"4')))
        assert read(tmp_path / "f.csv") == ({2: ("1", "2")}, [(3, "broken quotation marks")])
    for row in (b'"x"y,"a\nb,c"\n', b'"x"y,"a ""q""\nb,c"\n'):  # the rest would be taken for a row
        message = refusal(tmp_path / "f.csv", b"a,b\n1,2\n" + row + b"3,4\n")
        assert "FILE, line 3: a quotation mark there is not closed before line 3" in message
    before = csv.field_size_limit(100)
    try:
        message = refusal(tmp_path / "f.csv", b"a,b\n1,2\n" + b"x" * 101 + b",2\n")
        assert "line 3: a quotation mark there is not closed" in message
    finally:
        csv.field_size_limit(before)


def test_faults_do_not_make_chunks_small(tmp_path):
    (tmp_path / "f.csv").write_bytes(b"a,b\n" + b'1,"x"y\n2,z\n' * 300)
    chunks = list(read_chunks(str(tmp_path / "f.csv"), ["b"]))
    assert len(chunks) == 1 and chunks[0].lines.tolist() == list(range(3, 602, 2))
    assert [line for line, _, _ in chunks[0].faults] == list(range(2, 602, 2))


# ---- encodings


def test_encodings_that_are_named(tmp_path):
    path = tmp_path / "f.csv"
    for encoding, words in {
        "utf-32": "text in UTF-32",
        "utf-32-le": "not a text file",
        "utf-16-le": "not a text file .*; --encoding utf-16-le reads it if it is UTF-16",
        "utf-16-be": "not a text file .*; --encoding utf-16-be reads it if it is UTF-16",
    }.items():
        assert re.search(words, refusal(path, "occ1,lang\nsmed,da\n".encode(encoding)))
        if "16" in encoding:
            assert list(read_chunks(str(path), ["occ1"], encoding=encoding))[0].columns == [["smed"]]
            broken = "\ufeffa,b\n1,2\nsm".encode(encoding) + "\ud800".encode(encoding, "surrogatepass")
            with limits(block=4):
                message = refusal(path, broken + "x,2\n".encode(encoding))
            assert re.search("FILE, line [123] or below: cannot be read as UTF-16", message)


# ---- what a path is


def test_every_reader_looks_at_the_path_first(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    os.symlink("loop", tmp_path / "loop")
    (tmp_path / "plain").write_text("a\n")
    listening = socket.socket(socket.AF_UNIX)
    with contextlib.chdir(tmp_path):  # the name of a socket must be short
        listening.bind("socket")
    listening.close()
    paths = {
        str(tmp_path / "fifo"): "is a pipe, which can be read only once; save it as a file first",
        str(tmp_path): "is a folder",
        str(tmp_path / "socket"): "is a socket",
        "/dev/null": "is a device",
        str(tmp_path / "loop"): "symbolic links",
        str(tmp_path / ("x" * 300)): "name too long",
        "a\0b": "is not the name of a file",
        "a\ud800b": "is not the name of a file",
        str(tmp_path / "plain" / "f.csv"): "no such file",
        "": "the name of an input file is empty",
    }
    readers = [table_format, lambda path: list(read_chunks(path, None)), read_key, read_words, read_file]
    for path, words in paths.items():
        for reader in (*readers, lambda path: read_columns(path, ["a"])):
            with pytest.raises(UserError) as caught:
                reader(path)
            assert words in str(caught.value) and len(str(caught.value)) < 700, (path, reader)
    os.symlink(tmp_path / "plain", tmp_path / "link")
    assert read(tmp_path / "link") == ({}, []) and kind_of(str(tmp_path / "link")) == "a file"


# ---- pipes


def write_slowly(path, pieces, before=0.0):
    def write():
        time.sleep(before)
        with open(path, "wb", buffering=0) as pipe:
            for piece in pieces:
                pipe.write(piece)
                time.sleep(0.1)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_what_comes_through_a_pipe_becomes_a_file(tmp_path):
    pipe, target = str(tmp_path / "pipe"), str(tmp_path / "target")
    os.mkfifo(pipe)
    checks = []
    kinds = ["a pipe", "a folder", None, None]
    assert [kind_of(path) for path in (pipe, str(tmp_path), "none", "a\0b")] == kinds
    for pieces, before in (([b"a\n", b"x" * 300_000, b"y"], 0.6), ([b"a\n"], 0.0), ([], 0.3)):
        writer = write_slowly(pipe, pieces, before)
        save_pipe(pipe, target, lambda: checks.append(1), 20)
        writer.join()
        assert Path(target).read_bytes() == b"".join(pieces)
    assert 4 <= len(checks) <= 40


def test_a_silent_pipe_ends_at_the_limit_and_at_a_stop(tmp_path):
    pipe, target = str(tmp_path / "pipe"), tmp_path / "target"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match=r"pipe: nothing has come through this pipe for 0\.3 s"):
        save_pipe(pipe, str(target), lambda: None, 0.3)  # no writer
    reader, calls = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), []
    writer = os.open(pipe, os.O_WRONLY)  # a writer that says nothing

    def stop():
        calls.append(time.monotonic())
        if len(calls) == 3:
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            save_pipe(pipe, str(target), stop, 60)
        assert calls[-1] - calls[0] < 2 and not target.exists()
    finally:
        os.close(writer)
        os.close(reader)
    with pytest.raises(UserError, match="cannot be saved as .*: No such file or directory"):
        save_pipe(pipe, str(tmp_path / "none" / "t"), lambda: None, 0.3)


# ---- Parquet


@pytest.fixture(scope="module")
def pyarrow():
    return pytest.importorskip("pyarrow")


def parquet_file(path, columns: dict | list, names=None, **options) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns, names=names), path, **options)
    return path


def texts(pyarrow, path, values) -> list[str]:
    return [row[0] for row in read(parquet_file(path, {"a": values}), ["a"])[0].values()]


def test_values_of_any_kind_are_their_text(pyarrow, tmp_path):
    import datetime
    import decimal

    pa, path, nan, day = pyarrow, tmp_path / "f.parquet", float("nan"), datetime.datetime(1801, 2, 3)
    for values, expected in (
        (pa.array([61110, None, -1, 2**63 - 1]), "61110||-1|9223372036854775807"),
        (
            pa.array([61110.0, None, nan, -0.0, 1110.5, 1e15, 1e22, 0.1]),
            "61110|||0|1110.5|1000000000000000|1e+22|0.1",
        ),
        (pa.array([61110.0, 0.1, nan], pa.float32()), "61110|0.1|"),
        (pa.array([1.5, 2048.0], pa.float16()), "1.5|2048"),
        (pa.array([True, None, False]), "true||false"),
        (pa.nulls(2), "|"),
        (pa.array(["a", None, "NA", "a\0b", "\r\n"], pa.large_string()), "a||NA|a\0b|\r\n"),
        (pa.array(["a", None], pa.string_view()), "a|"),
        (pa.array([b"\xc3\xa5"]), "å"),
        (pa.array([b"ab"], pa.binary(2)), "ab"),
        (pa.array(["a", None, "a"]).dictionary_encode(), "a||a"),
        (pa.array([7, None]).dictionary_encode(), "7|"),
        (pa.array([decimal.Decimal("61110.50"), decimal.Decimal("1")]), "61110.50|1.00"),
        (pa.array([day.date()]), "1801-02-03"),
        (pa.array([datetime.time(1, 2, 3)]), "01:02:03.000000"),
        (pa.array([day], pa.timestamp("s")), "1801-02-03 00:00:00.000"),
    ):
        assert texts(pyarrow, path, values) == expected.split("|"), values.type
    assert texts(pyarrow, path, pa.array([], pa.string())) == []


def test_columns_that_hold_no_texts_are_named(pyarrow, tmp_path):
    path, pa = tmp_path / "f.parquet", pyarrow
    for values in ([["a"]], [{"x": 1}], pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))):
        parquet_file(path, {"a": ["x"], "b": values})
        assert read(path, ["a"]) == ({1: ("x",)}, [])
        for columns in (["b"], None):
            with pytest.raises(UserError, match="column 'b' holds .*, not texts or numbers; write the file"):
                read(path, columns)
    buffers = [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    for values in (pa.Array.from_buffers(pa.string(), 1, buffers), pa.array([b"\xff"])):
        with pytest.raises(UserError, match="row 1 or below: cannot be read as text"):
            texts(pa, path, values)


def test_shapes_of_parquet(pyarrow, tmp_path):
    cells = [str(i) for i in range(1000)]
    path = parquet_file(tmp_path / "f.parquet", {"a": cells, "a.b": ["x"] * 1000}, row_group_size=3)
    with limits(chunk=64):
        chunks = list(read_chunks(str(path), ["a"]))
    assert [cell for chunk in chunks for cell in chunk.columns[0]] == cells and len(chunks) < 20
    assert read(parquet_file(path, {})) == ({}, []) and table_format(str(path))[:2] == ([], "")
    assert column_problems(str(path), [], ["a"]) == [f"{path}: has no column 'a'; it has "]
    parquet_file(path, [["x"], ["y"]], names=["a", "a"])
    assert read(path) == ({1: ("x", "y")}, [])
    assert (
        "column 'a' is listed 2 times" in column_problems(str(path), table_format(str(path)).names, ["a"])[0]
    )
    path.write_bytes(b"PARE" + b"\0" * 50 + b"PARE")
    with pytest.raises(UserError, match="an encrypted Parquet file; write it without encryption"):
        read(path)


def test_damaged_parquet_gives_the_same_rows_or_one_message(pyarrow, tmp_path):
    """With checksums of the pages; a name in the footer has none."""
    rows, path, rng = 600, tmp_path / "f.parquet", random.Random(3)
    columns = {
        "a": [f"gårdmand no {i % 97}" for i in range(rows)],
        "b": [61110.0 if i % 7 else None for i in range(rows)],
        "c": pyarrow.array(["da", "en"] * (rows // 2)).dictionary_encode(),
    }
    good = parquet_file(path, columns, row_group_size=200, write_page_checksum=True).read_bytes()
    expected, refused = read(path, ["a", "b", "c"])[0], 0
    for i in range(400):
        content = bytearray(good[: rng.randrange(4, len(good))] if i % 2 else good)
        if i % 2 == 0:
            content[rng.randrange(4, len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            if column_problems(str(path), table_format(str(path)).names, ["a", "b", "c"]):
                continue
            assert read(path, ["a", "b", "c"])[0] == expected, i
        except UserError as error:
            refused += 1
            assert str(path) in str(error) and len(str(error)) < 700
    assert refused > 300


def test_parquet_that_is_shortened_while_it_is_read(pyarrow, tmp_path):
    path = parquet_file(
        tmp_path / "f.parquet", {"a": [str(random.random()) for _ in range(60_000)]}, row_group_size=5000
    )
    chunks = read_chunks(str(path), ["a"])
    next(chunks)
    os.truncate(path, 5000)
    with pytest.raises(UserError, match=r"row [0-9,]+ or below: cannot be read|is a damaged"):
        list(chunks)
