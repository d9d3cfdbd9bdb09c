"""Files of rows, read in chunks of columns: CSV in whatever encoding and with whatever delimiter it has, and
Parquet.

Values stay the text that stands in the file: "NA", "null" and "0123" are never turned into anything else.
Memory holds one chunk, however long the file is.
"""

import codecs
import csv
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import compress, islice

import numpy as np

from histocc.data import parquet_files
from histocc.data.csv_text import BEGIN, CsvLines, detect_encoding, encoding_of_header, is_torn, unquoted
from histocc.data.parquet_files import is_parquet
from histocc.runtime.errors import UserError
from histocc.runtime.files import opened

CHUNK = 1 << 12  # rows: few enough for the cells of a chunk to stay in the processor's cache
DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
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
    b"PARE": "an encrypted Parquet file; write it without encryption",
    **dict.fromkeys(
        (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
        "text in UTF-32; save it as UTF-8, for example with: iconv -f UTF-32 -t UTF-8 FILE > utf8.csv",
    ),
    **dict.fromkeys(
        (b"+/v8", b"+/v9", b"+/v+", b"+/v/"),
        "text in UTF-7; save it as UTF-8, for example with: iconv -f UTF-7 -t UTF-8 FILE > utf8.csv",
    ),
}
_LINE_BREAK = re.compile("\r\n|\r|\n")


@dataclass
class Chunk:
    """Some rows of a file, below the header. lines: where each row begins in the file, int64 [n], 1 is the
    first line (Parquet: the number of the row); columns: the cells of each wanted column, n texts each;
    faults: rows that cannot be read, as (line, kind, reason); share: of the file that
    is read, 0…1, where that is known.
    """

    lines: np.ndarray
    columns: list[list[str]]
    faults: list[tuple[int, str, str]] = field(default_factory=list)
    share: float | None = None


def read_header(path: str, delimiter: str | None = None) -> tuple[list[str], str]:
    """(column names, delimiter) of a file; `delimiter` None finds it. Raises UserError for what cannot be a
    table.
    """
    with opened(path) as file:
        begin = file.read(BEGIN)
        kind = next((kind for magic, kind in _OTHERS.items() if begin.startswith(magic)), None)
        if kind:
            raise UserError(f"{path}: is not a CSV file but {kind}")
        if begin.startswith(parquet_files.MAGIC):
            return parquet_files.column_names(path), ""
        encoding = encoding_of_header(path, begin)
        file.seek(0)
        table = CsvLines(path, file, encoding, errors="replace")
        line = table.begin.partition(table.end)[0]
        if not line.strip():
            raise UserError(
                f"{path}: is empty"
                if not table.begin
                else f"{path}: the first line, with the column names, is blank"
            )
        found = delimiter or max(DELIMITERS.values(), key=unquoted(line).count)  # the first where none occurs
        try:
            return next(table.rows(found)), found
        except csv.Error as error:
            reason = "a carriage return stands inside it" if is_torn(error) else error
            raise UserError(
                f"{path}: the column names in the first line are not readable as CSV ({reason})"
            ) from None


def column_problems(
    path: str, header: list[str], wanted: list[str], flags: dict[str, str] | None = None
) -> list[str]:
    """What is wrong with the columns of a file, a line each. flags: that name a column, by its name."""
    problems = []
    for name in dict.fromkeys(wanted):
        if name not in header:
            near = [other for other in header if other.strip().casefold() == name.strip().casefold()]
            problems.append(
                f"{path}: has no column {name!r}; it has {', '.join(map(repr, header))}"
                + (f". Is {near[0]!r} meant?" if near else "")
                + (f" ({flags[name]} names it)" if flags and name in flags and len(header) > 1 else "")
                + (" (several columns are parted by blanks)" if "," in name else "")
                + (" (one column only: --delimiter names the column delimiter)" if len(header) == 1 else "")
            )
        elif header.count(name) > 1:
            problems.append(
                f"{path}: column {name!r} stands there {header.count(name)} times; rename one of them"
            )
    return problems


def read_chunks(
    path: str, columns: list[str] | None, delimiter: str | None = None, encoding: str | None = None
) -> Iterator[Chunk]:
    """All rows below the header, with the cells of `columns`, which the header must have; None: all columns,
    in order.

    delimiter, encoding: None finds them. Raises UserError where the rest of the file cannot be read.
    """
    header, delimiter = read_header(path, delimiter)
    if is_parquet(path):
        row = 0
        for cells in parquet_files.read_columns(path, columns, CHUNK):
            yield Chunk(np.arange(row, row + len(cells[0]), dtype=np.int64) + 1, cells)
            row += len(cells[0])
        return
    places = list(range(len(header))) if columns is None else [header.index(name) for name in columns]
    yield from _csv_chunks(path, encoding or detect_encoding(path), delimiter, len(header), places)


def _csv_chunks(path: str, encoding: str, delimiter: str, width: int, places: list[int]) -> Iterator[Chunk]:
    with opened(path) as file:
        table = CsvLines(path, file, encoding)
        reader = table.rows(delimiter)
        next(reader, None)
        more = True
        while more:
            rows, faults, ends = [], [], [np.array([reader.line_num])]
            while more and len(rows) < CHUNK:
                start, before, last = reader.line_num, len(rows), None
                try:
                    rows.extend(islice(reader, CHUNK - before))  # keeps what came before an error
                    more, last = len(rows) == CHUNK, reader.line_num
                except csv.Error as error:
                    fault = error
                if width == 1:  # an empty line is a row with an empty cell
                    rows[before:] = [row or [""] for row in rows[before:]]
                ends.append(_ends(rows[before:], start, last, table.end))
                if last is None:
                    line = int(ends[-1][-1]) + 1 if len(rows) > before else start + 1
                    faults.append(_broken_row(table, line, delimiter, fault))
                    rows.append([])  # passed over, so that the next row's line is right
                    ends.append(np.array([reader.line_num]))
            if rows:
                spans = np.concatenate(ends)
                chunk = _chunk(
                    rows,
                    table.numbers(spans[:-1] + 1),
                    table.numbers(spans[1:], "right"),
                    faults,
                    delimiter,
                    width,
                    places,
                )
                chunk.share = file.tell() / max(1, table.size)
                yield chunk
            table.forget()


def _ends(rows: list[list[str]], start: int, last: int | None, end: str) -> np.ndarray:
    """The line on which each row ends, int64 [n], for rows that begin behind the line `start`; `last` is the
    last of them where it is known."""
    if last is not None and last == start + len(rows):  # only quoted line ends make a row longer than a line
        return np.arange(start + 1, last + 1)
    breaks = [sum(cell.count(end) for cell in row) for row in rows]
    return start + np.cumsum(np.array(breaks, dtype=np.int64) + 1)


def _is_open(line: str, delimiter: str) -> bool:
    """Whether a cell begins in the line with a quotation mark that is not closed there."""
    return re.search(f'(?:^|{re.escape(delimiter)})"[^"]*(?:""[^"]*)*$', line) is not None


def _broken_row(table: CsvLines, line: int, delimiter: str, error: csv.Error) -> tuple[int, str, str]:
    """The fault of a row that is not CSV; line: where it begins, as it is handed out. Raises UserError where
    other rows are lost with it."""
    last = table.reader.line_num
    first, end = int(table.numbers(line)), int(table.numbers(last))
    where = f"{table.path}, line {first:,}"
    if str(error).startswith("field larger"):
        raise UserError(
            f"{where}: a cell there has more than {csv.field_size_limit():,} characters (down to "
            f"line {end:,}). Is a quotation mark not closed?"
        )
    if last > line and not is_torn(error):
        raise UserError(
            f"{where}: a quotation mark there is not closed before line {end:,}, so that the rows "
            "between would be lost. A cell that begins with a quotation mark must end with one, and "
            f"quotation marks inside it must be doubled ({error})"
        )
    if not str(error).startswith("unexpected end") and _is_open(table.last_line(), delimiter):
        raise UserError(
            f"{where}: a row that cannot be read continues in the lines below {end:,}, so that it "
            f"cannot be told where the next one begins; mend it ({error})"
        )
    if is_torn(error):
        inside = int(table.numbers(last, "right")) - last - (first - line)  # line breaks that end no line
        if table.end == "\r" or inside > 1:
            mend = f"tr -s '\\r' '\\n' < {shlex.quote(table.path)} > mended.csv"
            raise UserError(
                f"{where}: lines end there in another way than before (some with a carriage return, "
                "some with a line feed), so that several rows would be taken for one. Give all "
                f"lines the same end, for example with\n  {mend}"
            )
        return (
            first,
            "carriage return in a row",
            (
                "a carriage return stands in the row outside of quotation "
                "marks, so that it may be one row or two: put the cell into quotation marks, or remove the "
                "carriage return"
            ),
        )
    return (
        first,
        "broken quotation marks",
        (
            "a cell that begins with a quotation mark must end with one, and "
            f"those inside it must be doubled ({error})"
        ),
    )


def _chunk(
    rows: list[list[str]],
    lines: np.ndarray,
    ends: np.ndarray,
    faults: list,
    delimiter: str,
    width: int,
    places: list[int],
) -> Chunk:
    """lines, ends: the first and the last line of each row, int64 [n]."""
    keep = None
    if set(map(len, rows)) != {width}:
        sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        keep = sizes == width
        # 0: a blank line between rows of several cells
        faults += [
            (
                int(lines[i]),
                "wrong number of cells",
                f"{sizes[i]} cells in the row, {width} columns in the header",
            )
            for i in np.flatnonzero((sizes != width) & (sizes != 0))
        ]
    tall = np.flatnonzero(ends > lines)
    swallowing = [i for i in tall if any(_swallows(cell, delimiter, width) for cell in rows[i])]
    if swallowing:
        keep = np.ones(len(rows), dtype=bool) if keep is None else keep
        keep[swallowing] = False
        faults += [
            (
                int(lines[i]),
                "rows inside a cell",
                (
                    f"a cell holds whole rows, down to line {ends[i]:,}: a quotation mark "
                    "that is not closed swallows the rows below it"
                ),
            )
            for i in swallowing
            if len(rows[i]) == width
        ]
    if keep is not None:
        rows, lines = list(compress(rows, keep)), lines[keep]
    return Chunk(lines, [[row[place] for row in rows] for place in places], sorted(faults))


def _swallows(cell: str, delimiter: str, columns: int) -> bool:
    """Whether a cell of several lines looks like rows of the table: with as many delimiters, for its lines,
    as rows have. A delimiter before a blank is taken for one of prose.
    """
    breaks = len(_LINE_BREAK.findall(cell))
    return (
        columns > 1
        and breaks > 0
        and cell.count(delimiter) - cell.count(delimiter + " ") >= breaks * (columns - 1)
    )
