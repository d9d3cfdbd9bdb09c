"""Files of rows, read in chunks of columns: CSV in whatever encoding and with whatever delimiter it has, and Parquet.

Values stay the text that stands in the file: "NA", "null" and "0123" are never turned into anything else. Memory holds
one chunk, however long the file is.
"""

import codecs
import csv
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import compress, islice

import numpy as np

from histocc.errors import UserError
from histocc.text import code_points

CHUNK = 1 << 12               # rows: few enough for the cells of a chunk to stay in the processor's cache
DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
_BLOCK = 1 << 22              # bytes
_PARQUET = b"PAR1"
# What the first bytes of other files are.
_OTHERS = {
    b"PK\x03\x04": "an Excel workbook or a zip archive; save the sheet as CSV (UTF-8), or unpack the archive",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook; save the sheet as CSV (UTF-8)",
    b"\x1f\x8b": "compressed with gzip (or an R data file); unpack it with gunzip, or save it as CSV from R",
    b"BZh": "compressed with bzip2; unpack it with bunzip2",
    b"\xfd7zXZ\x00": "compressed with xz; unpack it with unxz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it with unzstd",
    b"<stata_dta>": "a Stata file; save it as CSV with: export delimited",
    b"$FL": "an SPSS file; save it as CSV from SPSS",
    b"ARROW1": "an Arrow (Feather) file; save it as Parquet or CSV",
    b"SQLite format 3": "a database; export the table as CSV",
    b"%PDF": "a PDF",
}
_BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_SYMBOL_IN_WORD = re.compile(rb"[A-Za-z][\xa0-\xbf](?=[a-z])")       # in Windows-1252 signs such as ¢ and ¿, elsewhere letters
_LINE_BREAK = re.compile("\r\n|\r|\n")
_NOT_IN_WINDOWS_1252 = (0x81, 0x8D, 0x8F, 0x90, 0x9D)

csv.field_size_limit(1 << 24)   # characters of a cell: an open quotation mark must not swallow the memory with the file


@dataclass
class Chunk:
    """Some rows of a file, below the header. lines: where each row begins in the file, int64 [n], 1 is the first line
    (Parquet: the number of the row); columns: the cells of each wanted column, n texts each; faults: rows that cannot be
    read, as (line, kind, reason)."""

    lines: np.ndarray
    columns: list[list[str]]
    faults: list[tuple[int, str, str]] = field(default_factory=list)


def is_parquet(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == _PARQUET


def read_header(path: str, delimiter: str | None = None) -> tuple[list[str], str]:
    """(column names, delimiter) of a file; `delimiter` None finds it. Raises UserError for what cannot be a table."""
    if os.path.isdir(path):
        raise UserError(f"{path}: is a folder, not a file")
    try:
        with open(path, "rb") as file:
            begin = file.read(16)
        kind = next((kind for magic, kind in _OTHERS.items() if begin.startswith(magic)), None)
        if kind:
            raise UserError(f"{path}: is not a CSV file but {kind}")
        if begin.startswith(_PARQUET):
            return _parquet(path).schema_arrow.names, ""
        return _csv_header(path, begin, delimiter)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _csv_header(path: str, begin: bytes, delimiter: str | None) -> tuple[list[str], str]:
    mark = next((encoding for mark, encoding in _BYTE_ORDER_MARKS.items() if begin.startswith(mark)), None)
    with open(path, "rb") as file:
        first = file.readline(1 << 20)
    if b"\0" in first and mark != "utf-16":
        what = "looks like UTF-16 without a byte order mark; save it as UTF-8" if first.strip(b"\0").count(b"\0") * 3 > len(first) else \
            "is not a text file (a NUL byte in the first line)"
        raise UserError(f"{path}: {what}")
    for encoding in [mark] if mark == "utf-16" else ["utf-8-sig", "windows-1252", "latin-1"]:
        try:
            if mark != "utf-16":
                first.decode(encoding)               # of the first line alone: what follows is looked at as a whole later
            with open(path, encoding=encoding, errors="replace", newline="") as file:
                line = file.readline(1 << 20)
                if not line.strip():
                    raise UserError(f"{path}: is empty" if not line else
                                    f"{path}: the first line, with the column names, is blank")
                found = delimiter or max(DELIMITERS.values(), key=_unquoted(line).count)    # the first where none occurs
                file.seek(0)
                return next(csv.reader(file, delimiter=found, strict=True)), found
        except UnicodeError:
            continue
        except csv.Error as error:
            raise UserError(f"{path}: the column names in the first line are not readable as CSV ({error})") from None
    raise UserError(f"{path}: the first line is not readable as text")


def _unquoted(line: str) -> str:
    return "".join(line.split('"')[::2])


def column_problems(path: str, header: list[str], wanted: list[str]) -> list[str]:
    """What is wrong with the columns of a file, a line each."""
    problems = []
    for name in dict.fromkeys(wanted):
        if name not in header:
            near = [other for other in header if other.strip().casefold() == name.strip().casefold()]
            problems.append(f"{path}: has no column {name!r}; it has {', '.join(map(repr, header))}"
                            + (f". Is {near[0]!r} meant?" if near else "")
                            + (" (several columns are parted by blanks)" if "," in name else "")
                            + (" (one column only: --delimiter names what parts the columns)" if len(header) == 1 else ""))
        elif header.count(name) > 1:
            problems.append(f"{path}: column {name!r} stands there {header.count(name)} times; rename one of them")
    return problems


def detect_encoding(path: str) -> str:
    """utf-8-sig (with or without byte order mark), utf-16 (with one) or windows-1252, from all bytes of a CSV file.

    Raises UserError for what is none of them, since guessing would spoil letters: a file that is UTF-8 for the most
    part, one whose bytes are those of an old DOS or Mac code page.
    """
    with open(path, "rb") as file:
        begin = file.read(3)
    if begin[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    if _is_utf8(path):
        return "utf-8-sig"
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    good = bad = lines = odd = 0
    first = (0, 0)                                   # line and byte
    bytes_seen = np.zeros(256, dtype=np.int64)
    with open(path, "rb") as file:
        more = True
        while more:
            block = file.read(_BLOCK)
            more = len(block) > 0
            text = decoder.decode(block, final=not more)
            if not text.isascii():
                points = code_points(text)
                wrong = (points >= 0xDC80) & (points <= 0xDCFF)
                found = int(wrong.sum())
                good += int((points >= 0x80).sum()) - found
                if found and not bad:
                    at = int(np.argmax(wrong))
                    first = (lines + (text.count("\n", 0, at) or text.count("\r", 0, at)) + 1, int(points[at]) - 0xDC00)
                bad += found
                bytes_seen += np.bincount(np.frombuffer(block, np.uint8), minlength=256)
                odd += len(_SYMBOL_IN_WORD.findall(block))
            lines += text.count("\n") or text.count("\r")
    where = f"{path}: is not UTF-8 (byte 0x{first[1]:02x} in line {first[0]:,}"
    if good * 100 > bad or begin == codecs.BOM_UTF8:
        raise UserError(f"{where}; {bad:,} such bytes beside {good:,} letters that are UTF-8). Parts of different encodings "
                        "were put together: save each as UTF-8 first, or mend these lines")
    if bytes_seen[list(_NOT_IN_WINDOWS_1252)].any() or bytes_seen[0x80:0xA0].sum() + odd > bytes_seen[0xC0:].sum():
        raise UserError(f"{where}) and not Windows-1252, but looks like an old DOS or Mac code page. Save it as UTF-8, for "
                        f"example with\n  iconv -f CP850 -t UTF-8 {shlex.quote(path)} > utf8.csv\n  (or -f MACINTOSH; look "
                        "at the letters afterwards)")
    return "windows-1252"


def _is_utf8(path: str) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        try:
            while block := file.read(_BLOCK):
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def read_chunks(path: str, columns: list[str] | None, delimiter: str | None = None, encoding: str | None = None) -> Iterator[Chunk]:
    """All rows below the header, with the cells of `columns`, which the header must have; None: all columns, in order.

    delimiter, encoding: None finds them. Raises UserError where the rest of the file cannot be read.
    """
    header, delimiter = read_header(path, delimiter)
    places = list(range(len(header))) if columns is None else [header.index(name) for name in columns]
    try:
        if is_parquet(path):
            yield from _parquet_chunks(path, columns)
            return
        yield from _csv_chunks(path, encoding or detect_encoding(path), delimiter, len(header), places)
    except UnicodeError as error:
        raise UserError(f"{path}: cannot be read as text ({error})") from None


def _csv_chunks(path: str, encoding: str, delimiter: str, width: int, places: list[int]) -> Iterator[Chunk]:
    with open(path, encoding=encoding, newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        next(reader, None)
        more = True
        while more:
            start, rows, faults = reader.line_num, [], []
            try:
                rows.extend(islice(reader, CHUNK))   # keeps what came before an error
                more = len(rows) == CHUNK
            except csv.Error as error:
                faults.append(_broken_row(path, int(_ends(rows, start)[-1]) + 1, reader.line_num, error))
                rows.append([])                      # passed over, so that the next row's line is right
            if width == 1:                           # an empty line is a row with an empty cell
                whole = len(rows) - len(faults)
                rows[:whole] = [row or [""] for row in rows[:whole]]
            if rows:
                ends = _ends(rows, start, reader.line_num)
                yield _chunk(rows, start, ends[1:], faults, delimiter, width, places)


def _ends(rows: list[list[str]], start: int, last: int | None = None) -> np.ndarray:
    """`start`, and the line on which each row ends, int64 [n + 1]; `last` is the last of them where it is known."""
    if last == start + len(rows):                    # only quoted line breaks make a row longer than a line
        return np.arange(start, last + 1)
    breaks = [sum(len(_LINE_BREAK.findall(cell)) for cell in row) for row in rows]
    return start + np.concatenate([[0], np.cumsum(np.array(breaks, dtype=np.int64) + 1)])


def _broken_row(path: str, line: int, last: int, error: csv.Error) -> tuple[int, str, str]:
    """The fault of a row that is not CSV. Raises UserError where it has swallowed the rows below it."""
    if last > line:
        raise UserError(f"{path}, line {line:,}: a quotation mark there is not closed before line {last:,}, so that the rows "
                        "between would be lost. A cell that begins with a quotation mark must end with one, and quotation "
                        f"marks inside it must be doubled ({error})")
    return (line, "broken quotation marks", "a cell that begins with a quotation mark must end with one, and those inside it "
            f"must be doubled ({error})")


def _chunk(rows: list[list[str]], start: int, ends: np.ndarray, faults: list, delimiter: str, width: int,
           places: list[int]) -> Chunk:
    lines = np.concatenate([[start], ends[:-1]]) + 1
    keep = None
    if set(map(len, rows)) != {width}:
        sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        keep = sizes == width
        faults += [(int(lines[i]), "wrong number of cells", f"{sizes[i]} cells in the row, {width} columns in the header")
                   for i in np.flatnonzero((sizes != width) & (sizes != 0))]                # 0: a blank line between rows of several cells
    tall = np.flatnonzero(ends > lines)
    swallowing = [i for i in tall if any(_swallows(cell, delimiter, width) for cell in rows[i])]
    if swallowing:
        keep = np.ones(len(rows), dtype=bool) if keep is None else keep
        keep[swallowing] = False
        faults += [(int(lines[i]), "rows inside a cell", f"a cell holds whole rows, down to line {ends[i]:,}: a quotation mark "
                    "that is not closed swallows the rows below it") for i in swallowing if len(rows[i]) == width]
    if keep is not None:
        rows, lines = list(compress(rows, keep)), lines[keep]
    return Chunk(lines, [[row[place] for row in rows] for place in places], faults)


def _swallows(cell: str, delimiter: str, columns: int) -> bool:
    """Whether a cell of several lines looks like rows of the table: with as many delimiters, for its lines, as rows have.
    A delimiter before a blank is taken for one of prose."""
    breaks = len(_LINE_BREAK.findall(cell))
    return columns > 1 and breaks > 0 and cell.count(delimiter) - cell.count(delimiter + " ") >= breaks * (columns - 1)


def _parquet(path: str):
    try:
        from pyarrow import lib, parquet
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow (or histocc with the extra parquet)") from None
    try:
        return parquet.ParquetFile(path)
    except lib.ArrowException as error:
        raise UserError(f"{path}: is a damaged Parquet file ({error})") from None


def _parquet_chunks(path: str, columns: list[str] | None) -> Iterator[Chunk]:
    import pyarrow

    row = 0
    try:
        for batch in _parquet(path).iter_batches(CHUNK, columns=columns):
            cells = []
            found = batch.columns if columns is None else [batch.column(batch.schema.get_field_index(name)) for name in columns]
            for values in found:                     # all of them: by place, since names may repeat
                if pyarrow.types.is_dictionary(values.type):
                    values = values.dictionary_decode()
                cells.append([value or "" for value in values.cast(pyarrow.string()).to_pylist()])
            yield Chunk(np.arange(row, row + len(batch), dtype=np.int64) + 1, cells)
            row += len(batch)
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise UserError(f"{path}, row {row + 1:,} or below: cannot be read as text ({error})") from None
