"""Tables that are not text files, read with the packages of extras: Parquet (pyarrow), workbooks of Excel and
OpenDocument (python-calamine), files of Stata, SPSS and SAS (pyreadstat).

Cells become text: whole numbers without a fraction, empty cells as "", dates as 2026-01-31. Parquet, Stata,
SPSS and SAS files are read piece by piece. A workbook is held in memory while it is read.
"""

import contextlib
import datetime
import functools
import importlib
import itertools
import os
import pickle
import re
import subprocess
import sys
import unicodedata
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from histocc.data.workbook import has_merged, scanned
from histocc.runtime.errors import UserError
from histocc.runtime.files import opened

RANGE = 1 << 23  # least bytes of a range of rows
CHUNK = 1 << 12  # rows: few enough for the cells of a chunk to stay in the processor's cache
_STATA_CHUNK = 1 << 16  # rows of Stata and SPSS files. Each chunk reads the beginning again
_TOP = 20  # rows searched for the column names
SHEET_ROWS = 1 << 20  # rows of a sheet of .xlsx
# Kinds of tables, and patterns of their first bytes
_KINDS = {
    "Parquet": rb"PAR1(?![\w .-]*[,;\t|\"\r\n])",  # otherwise the first column name of a CSV file
    "workbook": rb"PK\x03\x04|\xd0\xcf\x11\xe0",
    "Stata": rb"<stata_dta>|[\x69-\x73][\x01\x02]\x01\0",
    "SPSS": rb"\$FL[23]",
    "SAS": rb"\0{12}\xc2\xea\x81\x60",
    "SAS transport": rb"HEADER RECORD\*{7}LIB",
}
# formats that pyreadstat reads, with its names for them
_STATISTICS = {"Stata": "dta", "SPSS": "sav", "SAS": "sas7bdat", "SAS transport": "xport"}
OF_DOCUMENT = "copy the table in it into a spreadsheet, and save that as .xlsx"
_HOURS = re.compile(r"(-?)PT0*(\d+)H(\d+)M(\d+)(\.\d+)?S")
# How formats of Stata and SPSS begin, what they show, the unit that they count, and its origin
_OF_STATA, _OF_SPSS = datetime.datetime(1960, 1, 1), datetime.datetime(1582, 10, 14)
_MOMENTS = (
    ("%-?t[cC]H", "time", "milliseconds", _OF_STATA),
    ("%-?t[cC]", "", "milliseconds", _OF_STATA),
    ("%-?t?d", "date", "days", _OF_STATA),
    ("DATETIME|YMDHMS", "", "seconds", _OF_SPSS),
    ("[AEJS]?DATE|(MO|Q|WK)YR", "date", "seconds", _OF_SPSS),
    ("[DM]?TIME", "time", "seconds", _OF_SPSS),
)
# The process that reads a file of Stata, SPSS or SAS: a damaged file may kill it
_READ_STATISTICS = """
import pickle, sys
sys.path[:], reader, path, how = pickle.load(sys.stdin.buffer)
import pyreadstat
pickle.dump(getattr(pyreadstat, reader)(path, output_format="dict", **how), sys.stdout.buffer)
"""

RowBlock = tuple[np.ndarray, list[list[str]]]  # row numbers, int64 [n], from 1, and n cells of each column


class Cell(str):
    """The text of a cell that holds another type in its table. Copied columns keep its value."""

    __slots__ = ("stored", "value")  # stored: as in the Stata or SPSS file, such as the number of 1850q1

    def __new__(cls, text: str, value: Any = None, stored: Any = None) -> "Cell":
        cell = super().__new__(cls, text)
        cell.value, cell.stored = value, stored
        return cell


class Missing(Cell):
    """An error, or a value declared as missing in its file: copied unchanged, but neither text nor code."""


NULL = Cell("")


def composed(name: str) -> str:
    """Return a column name with single blanks between words and composed accents."""
    return " ".join(unicodedata.normalize("NFC", name).split())


def unique_names(names: list[str]) -> list[str]:
    """Return column names with repeated ones numbered as in pandas: title, title.1, title.2."""
    found, seen, taken = [], set(), set(names)
    for name in names:
        if name and name in seen:
            name = next(other for i in itertools.count(1) if (other := f"{name}.{i}") not in taken)
        seen.add(name)
        taken.add(name)
        found.append(name)
    return found


def present(cells: list[str]) -> list[str]:
    """Return the cells, with "" for values that the file declares as missing."""
    return ["" if isinstance(cell, Missing) else cell for cell in cells]


class Binary(NamedTuple):
    """A table that is not a text file."""

    kind: str  # for the user
    names: list[str]  # names of the columns, as in the file
    # takes the places of columns, and the number of a range if there are several
    read: Callable[..., Iterator[tuple]]
    notes: tuple[str, ...] = ()  # for the user
    sheets: Sequence["_Sheet"] = ()
    # column name → ending of the outputs that keep its type, and the type of pyarrow, or the format of
    # numbers ("" for texts) and the missing values of Stata and SPSS
    types: dict[str, tuple] = {}
    ranges: int = 1  # ranges of rows that can be read independently


def table_kind(begin: bytes) -> str:
    """Return the kind of a binary table from its first bytes, or "" for other files."""
    return next((kind for kind, magic in _KINDS.items() if re.match(magic, begin)), "")


def open_table(
    path: str, kind: str, encoding: str | None, sheet: str | None, texts: Sequence[str], flags: bool
) -> Binary:
    """Return a table of a kind that `table_kind` returns. Raises UserError if it cannot be read.

    Args:
        encoding: encoding of the texts in a Stata, SPSS or SAS file that does not name it.
        sheet: name of the sheet of a workbook, or None for the first that has the columns `texts`.
        texts: the columns that hold texts. In a workbook, the first row with these holds the column names. In
            files of Stata and SPSS they take the labels of values, while other columns take the values.
        flags: whether messages may name the flags of reading.
    """
    if kind == "Parquet":
        return _parquet(path)
    if kind == "workbook":
        return _workbook(path, sheet, texts, flags)
    return _statistics(path, kind, encoding, texts, flags)


def _package(path: str, name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{path}: reading it needs {name}: pip install 'histocc[{extra}]'") from None


def text_of(value: Any) -> str:
    """Return the text of a cell. A whole number (as a float, from pandas) gets no fraction."""
    if isinstance(value, str):  # python-calamine returns durations of OpenDocument as texts
        return _HOURS.sub(r"\1\2:\3:\4", value) if value.startswith(("PT", "-PT")) else value
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value % 1 == 0 and abs(value) < 1e22:
        # beyond 2**53 floats cannot represent all whole numbers: take the digits that Python prints
        return str(int(value)) if abs(value) < 2**53 else np.format_float_positional(value, trim="-")
    if isinstance(value, datetime.timedelta):  # 30:00:00
        hours, rest = divmod(abs(value), datetime.timedelta(hours=1))
        return f"{'-' * (value.days < 0)}{hours}{str(rest)[1:]}"
    return str(value).upper() if isinstance(value, bool) else str(value)  # dates as in ISO 8601


def _cell(value: Any) -> str:
    """Return a value's text, as a Cell unless it is text or a number that other programs cannot hold."""
    text = text_of(value)
    is_text = isinstance(value, str) or text in ("", "inf", "-inf")
    return text if is_text or isinstance(value, int) and abs(value) > 2**53 else Cell(text, value)


# ---- Parquet
#
# A changed byte is not detected unless the writer has stored checksums of pages. Most do so only if asked to.


def _parquet(path: str) -> Binary:
    pyarrow, parquet = (_package(path, name, "parquet") for name in ("pyarrow", "pyarrow.parquet"))
    errors = pyarrow.lib.ArrowException, OSError, ValueError, MemoryError, OverflowError
    try:
        # Not mapped into memory: if a mapped file is shortened, a signal ends the process.
        # Nothing is read ahead: that would hold all row groups in memory.
        file = parquet.ParquetFile(pyarrow.OSFile(path), pre_buffer=False, page_checksum_verification=True)
        schema, names = file.schema_arrow, file.schema_arrow.names  # decodes names, so errors are caught
    except errors as error:
        raise UserError(f"{path}: is a damaged Parquet file ({error!s:.300})") from None

    def read(places: Sequence[int], span: int | None = None) -> Iterator[RowBlock]:
        for column in map(schema.field, places):
            if column.type.num_fields:  # lists, records
                what = f"column {column.name!r} has several values per cell: write each cell as one text"
                raise UserError(f"{path}: {what}")
        # Columns are taken by place if all are read or names repeat.
        by_place = len(places) == len(names) or len({*names}) < len(names)
        columns = None if by_place else [names[place] for place in places]
        of_group = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        groups = range(len(of_group))
        if span is not None:
            groups = range(*(len(of_group) * k // ranges for k in (span, span + 1)))
        row = sum(of_group[: groups.start])
        batches = file.iter_batches(CHUNK, groups, columns)
        while names:
            try:
                if (batch := next(batches, None)) is None:
                    break
                order = places if columns is None else map(batch.schema.get_field_index, columns)
                cells = [_parquet_cells(batch.column(place)) for place in order]
            except errors as error:
                message = " ".join(str(error).split())[:300]
                what = f"{path}, row {row + 1:,} or below: cannot be read as text ({message})"
                raise UserError(what) from None
            yield np.arange(row, row + len(batch), dtype=np.int64) + 1, cells
            row += len(batch)
        if names and row != (rows := sum(of_group[: groups.stop])):
            raise UserError(f"{path}: is a damaged Parquet file (rows: {row:,} of {rows:,})")

    is_of = pyarrow.types
    types = {
        name: (".parquet", kind)
        for name, kind in zip(names, schema.types)
        if is_of.is_primitive(kind) and not is_of.is_time(kind) and not is_of.is_duration(kind)
    }
    ranges = max(1, min(file.num_row_groups, os.path.getsize(path) // RANGE))
    return Binary("Parquet", names, read, types=types, ranges=ranges)


def _parquet_cells(values: Any) -> list[str]:
    from pyarrow import string, types

    of_values = types.is_integer, types.is_floating, types.is_boolean, types.is_date
    if any(is_it(values.type) for is_it in of_values):
        return [_cell(value) or NULL for value in values.to_pylist()]
    if types.is_dictionary(values.type):
        values = values.dictionary_decode()
    return [NULL if text is None else text for text in values.cast(string()).to_pylist()]


# ---- workbooks


class _Sheet(NamedTuple):
    name: str
    rows: int
    top: list[list[str]]  # cells of its first rows
    special: dict[int, list[tuple]]  # row → (column, last row, text if scanned) of the cells that begin there


def _workbook(path: str, sheet: str | None, texts: Sequence[str], flags: bool) -> Binary:
    state = os.stat(path)
    kind, sheets, notes = _sheets(path, state.st_ino, state.st_size, state.st_mtime_ns)
    listed = ", ".join(repr(each.name) for each in sheets)
    if sheet is not None and not any(each.name == sheet for each in sheets):
        raise UserError(f"{path}: has no sheet {sheet!r}; it has {listed}")
    among = [each for each in sheets if sheet in (None, each.name)]
    rows = [(each, i) for each in among for i, row in enumerate(each.top) if any(row)]
    names = [{*unique_names(list(map(composed, each.top[i])))} for each, i in rows]
    is_found = [row for row, there in zip(rows, names) if texts and {*texts} <= there]
    is_one = len({each.name for each, _ in rows}) == 1 and _row_of_names(rows[0][0].top) == rows[0][1]
    if texts and rows and not (is_found or is_one):
        named = ", ".join(map(repr, texts))
        what = f"no sheet has the column names {named} in one of its first {_TOP} rows"
        others = ". Name others with --sheet and --input-col" * flags
        places = [_row_of_names(each.top) for each in among]
        columns = (", ".join(map(repr, filter(None, [*x.top, []][i]))) for x, i in zip(among, places))
        has = "; ".join(f"{x.name!r} (row {i + 1}: {y})" for x, i, y in zip(among, places, columns))
        raise UserError(f"{path}: {what}; the sheets and their columns are {has}{others}")
    found, at = next(iter(is_found or rows), (among[0], -1))  # the row with the names of the columns
    while (found, at + 1) in is_found:  # merged cells repeat the row of names
        at += 1
    names = found.top[at] if at >= 0 else []
    if len(sheets) > 1:
        other = "; choose another with --sheet" * flags
        notes += (f"is a workbook of the sheets {listed}: {found.name!r} was read{other}",)
    if at > 0:
        notes += (f"has the column names in row {at + 1} of the sheet: the rows above are skipped",)
    if found.rows in (1 << 16, SHEET_ROWS):
        notes += (f"has a full sheet of {found.rows:,} rows: perhaps the table is cut there",)
    if merged := sum(each[1] > row > at + 1 for row, cells in found.special.items() for each in cells):
        notes += (f"has merged cells ({merged:,}): their rows that hold anything else get their value",)

    def read(places: Sequence[int]) -> Iterator[RowBlock]:
        blank = [""] * len(names)
        with _one_message(path), _calamine(path) as book:
            cells = enumerate(_rows(book.get_sheet_by_name(found.name), found.special), 1)
            rows = ((number, row) for number, row in cells if number > at + 1 and row != blank)
            while piece := list(islice(rows, CHUNK)):
                columns = [[_cell(row[place]) for _, row in piece] for place in places]
                yield np.array([number for number, _ in piece], dtype=np.int64), columns

    return Binary(kind, names, read, notes, sheets)


def _row_of_names(top: list[list[str]]) -> int:
    """Return the place of the likely column names: titles above them fill at most half as many cells."""
    filled = [sum(map(bool, row)) for row in top]
    return next((i for i, count in enumerate(filled) if 2 * count > max(filled)), 0)


@lru_cache(maxsize=4)
def _sheets(path: str, *_state: int) -> tuple[str, list[_Sheet], tuple[str, ...]]:
    """Return (kind, sheets, notes for the user) of a workbook."""
    kind, sheets, notes, special, is_unstored = "Excel 97", [], (), {}, False
    with _one_message(path):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:
                names = parts.namelist()
            if not {"content.xml", "xl/workbook.xml", "xl/workbook.bin"}.intersection(names):
                what = "a zip archive; unpack it"
                if {"word/document.xml", "ppt/presentation.xml"}.intersection(names):
                    what = f"a Word document or presentation; {OF_DOCUMENT}"
                raise UserError(f"{path}: is not a table but {what}")
            kind = "OpenDocument" if "content.xml" in names else "Excel"
            if kind == "OpenDocument" and has_merged(path):
                what = "has merged cells, but only their first row holds the value"
                notes += (f"{what}: save the workbook as .xlsx to have it in each row",)
            if "xl/workbook.xml" in names:
                special, is_unstored = scanned(path)
        with _calamine(path) as book:
            by_hidden = sorted(book.sheets_metadata, key=lambda about: int(about.visible))  # hidden last
            for name in (about.name for about in by_hidden):
                sheet = book.get_sheet_by_name(name)
                cells = defaultdict(list)
                (_, left), (last, right) = sheet.start or (0, 0), sheet.end or (-1, -1)
                merged = sheet.merged_cell_ranges or ()
                for (row, column), (end, _), *text in (*special.get(name, ()), *merged):
                    if left <= column <= right:
                        shown = (Missing(each) if each[0] == "#" else each for each in text)  # an error value
                        cells[row + 1].append((column - left, end + 1, *shown))
                top = [list(map(text_of, row)) for row in islice(_rows(sheet, cells), _TOP)]
                sheets.append(_Sheet(name, last + 1, top, cells))
        if is_unstored:
            what = "holds formulas without values, which were read as empty cells"
            notes += (f"{what}: save the workbook in a spreadsheet program to store their values",)
    return kind, sheets, notes


def _rows(sheet: Any, special: dict[int, list[tuple]]) -> Iterator[list]:
    """Yield the cells of each row, with the types of python-calamine. A merged cell's value is in its first
    column, in each of its rows that hold anything else.
    """
    held: dict[int, tuple[int, Any]] = {}  # column → last row, value
    for number, row in enumerate(sheet.iter_rows(), 1):
        is_blank = row.count("") == len(row)
        for column, last, *text in special.get(number, ()):
            row[column] = text[0] if text else row[column]
            held[column] = last, row[column]
        for column, (last, value) in held.items():
            if number <= last and not is_blank:
                row[column] = value
        yield row


def _calamine(path: str) -> Any:
    with opened(path) as file:
        return _package(path, "python_calamine", "excel").CalamineWorkbook.from_filelike(file)


@contextlib.contextmanager
def _one_message(path: str) -> Iterator[None]:
    """Turn other errors of the programs that read a workbook into a UserError."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's
            raise
        remedy = "it is damaged, password-protected or not a workbook; save its table as .xlsx or CSV"
        raise UserError(f"{path}: cannot be read as a workbook ({error!s:.200}): {remedy}") from None


# ---- Stata, SPSS and SAS


def _statistics(path: str, kind: str, encoding: str | None, texts: Sequence[str], flags: bool) -> Binary:
    _package(path, "pyreadstat", "stata")
    reader = f"read_{_STATISTICS[kind]}"
    encoding = encoding and encoding.removesuffix("-sig").upper()
    # pyreadstat converts dates of SAS, `_moment` those of Stata and SPSS
    as_stored = {"disable_datetime_conversion": kind in ("Stata", "SPSS")}
    as_stored |= {} if kind == "SAS transport" else {"user_missing": True}

    def table(**rows: Any) -> tuple[dict[str, list], Any]:
        asked = pickle.dumps((sys.path, reader, path, {"encoding": encoding, **as_stored, **rows}))
        command = [sys.executable, "-I", "-c", _READ_STATISTICS]
        # in a separate session, so that Ctrl-C reaches only this process
        done = subprocess.run(command, input=asked, capture_output=True, start_new_session=True)
        if done.returncode:  # damaged files cause various errors
            error = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            error = error or f"pyreadstat ended with exit code {done.returncode}"
            remedy = "it is damaged" + ", or its encoding must be named with --encoding" * flags
            remedy += "; otherwise save it as CSV"
            raise UserError(f"{path}: cannot be read as a file of {kind} ({error:.200}): {remedy}")
        return pickle.loads(done.stdout)

    _, about = table(metadataonly=True)
    names, labels = [name or "" for name in about.column_names], about.variable_value_labels
    formats = {name: form or "" for name, form in about.original_variable_types.items()}

    def reader_of(name: str) -> Callable[[Any], str]:
        """Return a function from a value in this column to its cell."""
        of_text = labels.get(name, {}) if composed(name) in texts else {}
        is_text = about.readstat_variable_types[name] == "string"
        ranges = [(each["lo"], each["hi"]) for each in about.missing_ranges.get(name, ())]

        def cell(value: Any) -> str:
            is_tag = not is_text and isinstance(value, str)  # one of .a to .z among numbers
            shown = of_text.get(value, f".{value}" if is_tag else _moment(value, formats[name]))
            text, shown = text_of(shown), None if is_tag else shown
            if is_tag or any(type(value) is type(a) and a <= value <= b for a, b in ranges):
                return Missing(text, shown, value)
            return text if is_text or not text else Cell(text, shown, value)

        return functools.lru_cache(1 << 10)(cell)

    def read(places: Sequence[int]) -> Iterator[RowBlock]:
        chosen, row, count = [names[place] for place in places], 0, _STATA_CHUNK
        readers = list(map(reader_of, chosen))
        while count == _STATA_CHUNK:
            cells, _ = table(usecols=chosen, row_offset=row, row_limit=_STATA_CHUNK)
            columns = [list(map(cell, cells[name])) for name, cell in zip(chosen, readers)]
            if count := len(columns[0]) if columns else 0:
                yield np.arange(row, row + count, dtype=np.int64) + 1, columns
            row += count

    ending = {"Stata": ".dta", "SPSS": ".sav"}.get(kind, "")
    types = {
        name: (ending, "" if held == "string" else formats[name], about.missing_ranges.get(name, []))
        for name, held in about.readstat_variable_types.items()
        if composed(name) not in texts or name not in labels
    }
    return Binary(kind, names, read, types=types)


def _moment(value: Any, form: str) -> Any:
    """Return the date, time, duration or period that Stata or SPSS shows for a value, or the value."""
    if not isinstance(value, (int, float)):
        return value
    if period := re.match("%-?t([mqwh])", form):
        year, part = divmod(int(value), {"m": 12, "q": 4, "w": 52, "h": 2}[period[1]])
        return f"{1960 + year}{period[1]}{part + 1}"
    for pattern, kind, unit, first in _MOMENTS:
        if re.match(pattern, form):
            with contextlib.suppress(OverflowError):  # a year outside Python's range
                delta = datetime.timedelta(**{unit: value})
                if unit == "seconds" and kind == "time" and not 0 <= value < 86_400:
                    return delta
                return getattr(first + delta, kind)() if kind else first + delta
    return value
