"""Tables that are no text, read through the packages of extras: Parquet (pyarrow), workbooks of Excel and
OpenDocument (python-calamine), files of Stata, SPSS and SAS (pyreadstat); and the tables that predict writes.

Cells become texts: whole numbers have no fraction, an empty cell is "", a date is 2026-01-31. Parquet, Stata,
SPSS and SAS files are read piece by piece; a workbook is held in memory while it is read.
"""

import contextlib
import datetime
import functools
import gzip
import importlib.util
import itertools
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from math import isfinite
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from histocc.data.workbook import looks_of, merged_in_document, scanned
from histocc.formatter import PROBABILITIES
from histocc.runtime.errors import UserError
from histocc.runtime.files import opened

CHUNK = 1 << 12  # rows: few enough for the cells of a chunk to stay in the processor's cache
_STATA_CHUNK = 1 << 16  # rows of Stata and SPSS files, whose beginning is read again for each chunk
_TOP = 20  # rows among which the names of the columns are looked for
MAX_ROWS, MAX_COLUMNS, MAX_CELL = 1 << 20, 1 << 14, 32_767  # of a sheet of .xlsx; characters of a cell
# Kinds of tables, and patterns of their first bytes
_KINDS = {
    "Parquet": rb"PAR1(?![\w .-]*[,;\t|\"\r\n])",  # else the name of a CSV file's first column
    "workbook": rb"PK\x03\x04|\xd0\xcf\x11\xe0",
    "Stata": rb"<stata_dta>|[\x69-\x73][\x01\x02]\x01\0",
    "SPSS": rb"\$FL[23]",
    "SAS": rb"\0{12}\xc2\xea\x81\x60",
    "SAS transport": rb"HEADER RECORD\*{7}LIB",
}
# those that pyreadstat reads, by its name for them
_STATISTICS = {"Stata": "dta", "SPSS": "sav", "SAS": "sas7bdat", "SAS transport": "xport"}
OF_DOCUMENT = "copy the table in it into a spreadsheet, and save that as .xlsx"
_DOCUMENTS = {  # what else begins as workbooks do
    rb"word/document\.xml|W\0o\0r\0d\0D\0o\0c\0u\0m|opendocument\.text": "a Word document or the like",
    rb"ppt/presentation\.xml|P\0o\0w\0e\0r\0P\0o\0i\0n\0t|opendocument\.presentation": "a presentation",
}

# Characters that XML does not allow, and a text that xlsxwriter takes for its own markup
_NO_CELL = re.compile("[\ud800-\udfff\ufffe\uffff]|^<r>.*</r>\\Z", re.DOTALL)
_HOURS = re.compile(r"(-?)PT0*(\d+)H(\d+)M(\d+)(\.\d+)?S")
# The beginnings of formats of Stata and SPSS, what they show, the unit that they count, and from when
_OF_STATA, _OF_SPSS = datetime.datetime(1960, 1, 1), datetime.datetime(1582, 10, 14)
_MOMENTS = (
    ("%-?t[cC]H", "time", "milliseconds", _OF_STATA),
    ("%-?t[cC]", "", "milliseconds", _OF_STATA),
    ("%-?t?d", "date", "days", _OF_STATA),
    ("DATETIME|YMDHMS", "", "seconds", _OF_SPSS),
    ("[AEJS]?DATE|(MO|Q|WK)YR", "date", "seconds", _OF_SPSS),
    ("[DM]?TIME", "time", "seconds", _OF_SPSS),
)
# The look of times in .xlsx, if their table has none
_DATED: dict[type, str] = {
    datetime.datetime: "yyyy-mm-dd hh:mm:ss",
    datetime.date: "yyyy-mm-dd",
    datetime.time: "hh:mm:ss",
    datetime.timedelta: "[h]:mm:ss",
}
# When a file of Stata or SPSS was written: the bytes before, and the time
_CREATED = re.compile(rb"\A(<stata_dta>.*?<timestamp>\x11|\$FL2.{88})(.{17})", re.DOTALL)
# The process that reads a file of Stata, SPSS or SAS: a damaged one may end it with a signal
_READ_STATISTICS = """
import pickle, sys
sys.path[:], reader, path, how = pickle.load(sys.stdin.buffer)
import pyreadstat
pickle.dump(getattr(pyreadstat, reader)(path, output_format="dict", **how), sys.stdout.buffer)
"""

Rows = tuple[np.ndarray, list[list[str]]]  # numbers of rows, int64 [n], from 1; n cells of each column
# Endings of the tables that predict writes → the extra that it takes, and its packages
ENDINGS: dict[str, tuple[str, ...]] = {
    ".csv": ("",),
    ".csv.gz": ("",),
    ".xlsx": ("excel", "xlsxwriter"),
    ".parquet": ("parquet", "pyarrow"),
    ".dta": ("stata", "pyreadstat", "pandas"),
    ".sav": ("stata", "pyreadstat", "pandas"),
}


class Cell(str):
    """The text of a cell that is no text in its table. Columns that are copied keep its value, None for a
    null, and in a workbook its number format ("" for the usual one).
    """

    __slots__ = ("look", "value")


class Missing(Cell):
    """A cell with a value that its file declares as missing: copied as it is, but neither text nor code."""


def _cell(text: str, value: Any, look: str | int = "") -> str:
    """Return the text of a value, as a Cell unless it is one, or no finite number."""
    if isinstance(value, str) or value is not None and text in ("", "inf", "-inf"):
        return text
    cell = Cell(text)
    cell.value, cell.look = value, look
    return cell


_NULL = _cell("", None)


def composed(name: str) -> str:
    """Return the name of a column with one blank between words, however its accents are stored."""
    return " ".join(unicodedata.normalize("NFC", name).split())


def unique_names(names: list[str]) -> list[str]:
    """Return names of columns with repeated ones told apart as pandas does: title, title.1, title.2."""
    found, seen, taken = [], set(), set(names)
    for name in names:
        if name and name in seen:
            name = next(other for i in itertools.count(1) if (other := f"{name}.{i}") not in taken)
        seen.add(name)
        taken.add(name)
        found.append(name)
    return found


def ending_of(path: str) -> str:
    """Return the one of ENDINGS that a name has; without any it is that of CSV."""
    return next((ending for ending in ENDINGS if path.lower().endswith(ending)), ".csv")


def missing_package(path: str) -> list[str]:
    """Return what lacks to write a table of this name, in a line, or []."""
    extra, *packages = ENDINGS[ending_of(path)]
    lacking = " and ".join(name for name in packages if importlib.util.find_spec(name) is None)
    return [f"--output {path} needs {lacking}: pip install 'histocc[{extra}]'"] if lacking else []


def unwritable(path: str, names: Sequence[str]) -> str:
    """Return why no table of this name has columns of these names; "" if one can have them."""
    ending, why = ending_of(path), ""
    if ending == ".xlsx" and len(names) > MAX_COLUMNS:
        why = f"a sheet has {MAX_COLUMNS:,} columns, and there are {len(names):,} to write"
    if ending in (".dta", ".sav"):
        most, sign = (32, r"\w") if ending == ".dta" else (64, r"[\w.$#@]")
        twice = [name for i, name in enumerate(names) if name in names[:i]]
        fits = re.compile(rf"[^\W\d]{sign}*").fullmatch
        if odd := [name for name in names if len(name.encode()) > most or not fits(name)] or twice:
            shown = ", ".join(map(repr, odd[:5])) + " …" * (len(odd) > 5)
            why = f"columns there have names of at most {most} letters, digits and _, each once, not {shown}"
    return why and f"--output {path}: {why}: name it .csv or .parquet"


def present(cells: list[str]) -> list[str]:
    """Return the cells, "" for values that the file declares as missing."""
    return ["" if isinstance(cell, Missing) else cell for cell in cells]


class Binary(NamedTuple):
    """A table that is no text."""

    kind: str  # for the user
    names: list[str]  # of the columns, as in the file
    read: Callable[[Sequence[int]], Iterator[Rows]]  # given the places of columns
    notes: tuple[str, ...] = ()  # for the user
    sheets: Sequence["_Sheet"] = ()
    types: dict[str, Any] = {}  # pyarrow's, of the columns of a Parquet file


def open_table(
    path: str,
    begin: bytes,
    is_packed: bool,
    encoding: str | None,
    sheet: str | None,
    texts: Sequence[str],
    flags: bool = False,
) -> Binary | None:
    """Return a table that is no text, or None. Raises UserError if it cannot be read.

    Args:
        begin: the first bytes of the file, or of what gzip packed in it (is_packed).
        encoding: that of the texts in a Stata, SPSS or SAS file, if it does not say it.
        sheet: name of the sheet of a workbook; None: the first that has the columns `texts`.
        texts: the columns that hold texts. A workbook's names of columns are in the first row that has these,
            and in files of Stata and SPSS they take the labels of values; other columns take the values.
        flags: whether messages may name the flags of reading.
    """
    kind = next((kind for kind, magic in _KINDS.items() if re.match(magic, begin)), None)
    if kind and is_packed:
        raise UserError(f"{path}: is another table ({kind}); unpack it by gunzip --keep {shlex.quote(path)}")
    if kind == "Parquet":
        return _parquet(path)
    if kind == "workbook":
        return _workbook(path, sheet, texts, flags)
    return _statistics(path, kind, encoding, texts, flags) if kind else None


def _package(path: str, name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{path}: reading it needs {name}: pip install 'histocc[{extra}]'") from None


def _number_text(number: float | None) -> str:
    """Return a float as text; a whole one (in pandas, whole numbers with gaps) has no fraction."""
    if number is None or number != number:
        return ""
    # beyond 2**53 a float does not tell whole numbers apart
    return str(int(number) if number % 1 == 0 and abs(number) < 2**53 else number)


def _text(value: Any) -> str:
    if isinstance(value, str):  # python-calamine leaves durations of OpenDocument as texts
        return _HOURS.sub(r"\1\2:\3:\4", value) if value.startswith(("PT", "-PT")) else value
    if value is None or isinstance(value, float):
        return _number_text(value)
    if isinstance(value, datetime.timedelta):  # 30:00:00
        hours, rest = divmod(abs(value), datetime.timedelta(hours=1))
        return f"{'-' * (value.days < 0)}{hours}{str(rest)[1:]}"
    return str(value).upper() if isinstance(value, bool) else str(value)  # dates by ISO


# ---- Parquet
#
# A changed byte is not detected if the writer has stored no checksums of pages (most do so only if asked to).


def _parquet(path: str) -> Binary:
    pyarrow, parquet = (_package(path, name, "parquet") for name in ("pyarrow", "pyarrow.parquet"))
    errors = pyarrow.lib.ArrowException, OSError, ValueError, MemoryError, OverflowError
    try:
        # Never mapped into memory: a file that is shortened meanwhile would end the process with a signal.
        # Nothing is read ahead: that would hold all row groups in memory.
        file = parquet.ParquetFile(pyarrow.OSFile(path), pre_buffer=False, page_checksum_verification=True)
        schema, names = file.schema_arrow, file.schema_arrow.names  # decodes names, where an error is caught
    except errors as error:
        raise UserError(f"{path}: is a damaged Parquet file ({error!s:.300})") from None

    def read(places: Sequence[int]) -> Iterator[Rows]:
        for column in map(schema.field, places):
            if column.type.num_fields:  # lists, records
                what = f"column {column.name!r} holds several values in a cell: write each cell as one text"
                raise UserError(f"{path}: {what}")
        # Columns are taken by place if all are read, or if names repeat.
        by_place = len(places) == len(names) or len({*names}) < len(names)
        columns = None if by_place else [names[place] for place in places]
        row, batches = 0, file.iter_batches(CHUNK, columns=columns)
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
        if names and row != (rows := file.metadata.num_rows):
            raise UserError(f"{path}: is a damaged Parquet file ({row:,} rows of {rows:,} are there)")

    return Binary("Parquet", names, read, types=dict(zip(names, schema.types)))


def _parquet_cells(values: Any) -> list[str]:
    import pyarrow

    if pyarrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pyarrow.types.is_floating(values.type):
        return [_number_text(value) or _NULL for value in values.to_pylist()]
    return [_NULL if text is None else text for text in values.cast(pyarrow.string()).to_pylist()]


# ---- workbooks


class _Sheet(NamedTuple):
    name: str
    rows: int
    left: int  # columns before the first one that holds something, which are left out
    top: list[list[str]]  # cells of its first rows
    special: dict[int, list[tuple]]  # cells that begin in a row: their column, last row and, of dates, text


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
    if texts and not is_found and len({each.name for each, _ in rows}) > 1:
        named = ", ".join(map(repr, texts))
        what = f"no sheet has a row with the column names {named} among its first {_TOP}"
        others = ". --sheet and --input-col name others" * flags
        tops = (max(each.top, key=lambda row: sum(map(bool, row)), default=[]) for each in among)
        columns = (", ".join(map(repr, filter(None, row))) for row in tops)
        has = "; ".join(f"{each.name!r} ({some})" for each, some in zip(among, columns))
        raise UserError(f"{path}: {what}; the sheets, with their columns, are {has}{others}")
    found, at = next(iter(is_found or rows), (among[0], -1))  # the row with the names of the columns
    while (found, at + 1) in is_found:  # merged cells are in two rows of names
        at += 1
    names = found.top[at] if at >= 0 else []
    if len(sheets) > 1:
        other = "; --sheet names another" * flags
        notes += (f"is a workbook of the sheets {listed}: {found.name!r} was read{other}",)
    if at > 0:
        notes += (f"has the column names in row {at + 1} of the sheet: the rows above are left out",)
    if found.rows in (1 << 16, MAX_ROWS):
        notes += (f"has a full sheet of {found.rows:,} rows: is the table cut there?",)
    if merged := sum(each[1] > row > at + 1 for row, cells in found.special.items() for each in cells):
        notes += (f"has merged cells ({merged:,}): each of their rows holds their value",)

    def read(places: Sequence[int]) -> Iterator[Rows]:
        blank = [""] * len(names)
        with _one_message(path), _calamine(path) as book:
            looks = looks_of(path, found.name, at + 1) if kind == "Excel" else {}
            cells = enumerate(_rows(book.get_sheet_by_name(found.name), found.special), 1)
            rows = ((number, row) for number, row in cells if number > at + 1 and row != blank)
            while piece := list(islice(rows, CHUNK)):
                columns = [[] for _ in places]
                for column, place in zip(columns, places):
                    look = [looks.get((found.left + place, is_time), "") for is_time in (False, True)]
                    values = (row[place] for _, row in piece)
                    column += (_cell(_text(value), value, look[type(value) in _DATED]) for value in values)
                yield np.array([number for number, _ in piece], dtype=np.int64), columns

    return Binary(kind, names, read, notes, sheets)


@lru_cache(maxsize=4)
def _sheets(path: str, *_state: int) -> tuple[str, list[_Sheet], tuple[str, ...]]:
    """Return (kind, sheets, notes for the user) of a workbook in this state."""
    kind, sheets, notes, special, is_unstored = "Excel 97", [], (), {}, False
    with _one_message(path):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:
                names = parts.namelist()
            if not re.search(r"content\.xml|(xl/workbook|word/document|ppt/presentation)\.", " ".join(names)):
                raise UserError(f"{path}: is not a table but a zip archive; unpack it")
            kind = "OpenDocument" if "content.xml" in names else "Excel"
            if kind == "OpenDocument":
                special = merged_in_document(path)
            elif "xl/workbook.xml" in names:
                special, is_unstored = scanned(path)
        with _calamine(path) as book:
            by_hidden = sorted(book.sheets_metadata, key=lambda about: int(about.visible))  # hidden ones last
            for name in (about.name for about in by_hidden):
                sheet = book.get_sheet_by_name(name)
                cells = defaultdict(list)
                (_, left), (last, right) = sheet.start or (0, 0), sheet.end or (-1, -1)
                for (row, column), (end, _), *text in (
                    *special.get(name, ()),
                    *(sheet.merged_cell_ranges or ()),
                ):
                    if left <= column <= right:
                        cells[row + 1].append((column - left, end + 1, *text))
                top = [list(map(_text, row)) for row in islice(_rows(sheet, cells), _TOP)]
                sheets.append(_Sheet(name, last + 1, left, top, cells))
        if is_unstored:
            what = "holds formulas without their values, which were read as empty cells"
            notes = (f"{what}: a spreadsheet program stores them when it saves the workbook",)
    return kind, sheets, notes


def _rows(sheet: Any, special: dict[int, list[tuple]]) -> Iterator[list]:
    """Yield the cells of each row, of the types of python-calamine. A merged cell's value is in its first
    column, in all of its rows that hold anything else.
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
    """Make a UserError of any other error of the programs that read a workbook."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's
            raise
        with opened(path) as file:
            content = file.read()
        if kind := next((kind for sign, kind in _DOCUMENTS.items() if re.search(sign, content)), None):
            raise UserError(f"{path}: is no table but {kind}; {OF_DOCUMENT}") from None
        remedy = "it is damaged, protected by a password or no workbook; save it again as .xlsx or CSV"
        raise UserError(f"{path}: cannot be read as a workbook ({error!s:.200}): {remedy}") from None


# ---- Stata, SPSS and SAS


def _statistics(path: str, kind: str, encoding: str | None, texts: Sequence[str], flags: bool) -> Binary:
    _package(path, "pyreadstat", "stata")
    reader = f"read_{_STATISTICS[kind]}"
    encoding = encoding and encoding.removesuffix("-sig").upper()
    # dates of SAS are read by pyreadstat, the others by `_moment`
    as_stored = {"disable_datetime_conversion": kind in ("Stata", "SPSS")}
    as_stored |= {} if kind == "SAS transport" else {"user_missing": True}

    def table(**rows: Any) -> tuple[dict[str, list], Any]:
        how = {"encoding": encoding, **as_stored, **rows}
        asked = pickle.dumps((sys.path, reader, path, how))
        command = [sys.executable, "-I", "-c", _READ_STATISTICS]
        # in a session of its own, so that Ctrl-C reaches this process only
        done = subprocess.run(command, input=asked, capture_output=True, start_new_session=True)
        if done.returncode:  # damaged files have errors of several kinds
            error = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            error = error or f"pyreadstat ended with exit code {done.returncode}"
            remedy = "it is damaged" + ", or its encoding must be named by --encoding" * flags
            remedy += "; else save it as CSV"
            raise UserError(f"{path}: cannot be read as a file of {kind} ({error:.200}): {remedy}")
        return pickle.loads(done.stdout)

    _, about = table(metadataonly=True)
    names, labels = [name or "" for name in about.column_names], about.variable_value_labels
    formats = {name: form or "" for name, form in about.original_variable_types.items()}

    def reader_of(name: str) -> Callable[[Any], str]:
        """Return a function that gives the text of a value in this column."""
        of_text = labels.get(name, {}) if composed(name) in texts else {}
        has_tags = about.readstat_variable_types[name] != "string"  # a text among numbers is one of .a to .z
        ranges = [(each["lo"], each["hi"]) for each in about.missing_ranges.get(name, ())]

        def text_of(value: Any) -> str:
            is_tag = has_tags and isinstance(value, str)
            is_missing = is_tag or any(type(value) is type(a) and a <= value <= b for a, b in ranges)
            shown = of_text.get(value, f".{value}" if is_tag else _moment(value, formats[name]))
            cell = _cell(_text(shown), shown)
            if is_missing:
                cell = Missing(cell)
                cell.value, cell.look = shown, ""
            return cell

        return functools.lru_cache(1 << 10)(text_of)

    def read(places: Sequence[int]) -> Iterator[Rows]:
        chosen, row, count = [names[place] for place in places], 0, _STATA_CHUNK
        readers = list(map(reader_of, chosen))
        while count == _STATA_CHUNK:
            cells, _ = table(usecols=chosen, row_offset=row, row_limit=_STATA_CHUNK)
            columns = [list(map(text_of, cells[name])) for name, text_of in zip(chosen, readers)]
            if count := len(columns[0]) if columns else 0:
                yield np.arange(row, row + count, dtype=np.int64) + 1, columns
            row += count

    return Binary(kind, names, read)


def _moment(value: Any, form: str) -> Any:
    """Return the date, time, duration or period that Stata and SPSS show for a number in a format; else the
    value itself.
    """
    if not isinstance(value, (int, float)):
        return value
    if period := re.match("%-?t([mqwh])", form):
        year, part = divmod(int(value), {"m": 12, "q": 4, "w": 52, "h": 2}[period[1]])
        return f"{1960 + year}{period[1]}{part + 1}"
    for pattern, kind, unit, first in _MOMENTS:
        if re.match(pattern, form):
            with contextlib.suppress(OverflowError):  # a year that Python does not know
                delta = datetime.timedelta(**{unit: value})
                if unit == "seconds" and kind == "time" and not 0 <= value < 86_400:
                    return delta
                return getattr(first + delta, kind)() if kind else first + delta
    return value


# ---- the tables that predict writes


@contextlib.contextmanager
def table_writer(
    file: BinaryIO,
    name: str,
    header: list[str],
    numbers: Container[str],
    as_csv: Callable[[list], bytes],
    types: dict[str, Any] | None = None,
) -> Iterator[Callable[[list], Any]]:
    """Give a function that writes rows, below the names of the columns, as the ending of `name` asks. Equal
    rows make equal bytes. Beside texts columns in `numbers`, and each Cell, are what they are, but in .csv;
    types: those of columns that are copied from a Parquet file to another. Raises UserError if the format
    has no room for a cell.
    """
    ending = ending_of(name)
    if problem := unwritable(name, header):
        raise UserError(problem)
    if ending.startswith(".csv"):
        packed = gzip.GzipFile("", "wb", 6, file, mtime=0) if ending == ".csv.gz" else None
        with packed or contextlib.nullcontext(file) as out:
            out.write(as_csv([header]))
            yield lambda rows: out.write(as_csv(rows))
        return
    write = {".parquet": _write_parquet, ".xlsx": _write_xlsx}.get(ending, _write_statistics)
    types = types or {}
    reads = [float if x in numbers else _type_of(types[x]) if x in types else None for x in header]
    with write(file, name, header, reads, types) as write_rows:
        yield write_rows


Read = Callable[[str], Any] | None  # returns the value that a text stands for in its column


def _type_of(kind: Any) -> Read:
    from pyarrow import types

    if types.is_integer(kind):
        return lambda text: int(text) if len(text) < 16 else text  # of more digits than floats have
    if types.is_floating(kind):
        return float
    of_others = {types.is_boolean: "true".__eq__, types.is_date: datetime.date.fromisoformat}
    return next((read for is_of, read in of_others.items() if is_of(kind)), None)


def _value(cell: str, read: Read) -> Any:
    if isinstance(cell, Cell) and not read:
        return cell.value
    return read(cell) if read and cell else cell or None


@contextlib.contextmanager
def _write_parquet(file: BinaryIO, _: str, header: list[str], reads: list[Read], types: dict) -> Any:
    import pyarrow
    from pyarrow import parquet

    text, kinds = pyarrow.string(), []
    for name, read in zip(header, reads):
        kinds.append(types.get(name, pyarrow.float64() if read else text))
        try:
            pyarrow.array([], text).cast(kinds[-1])
        except pyarrow.ArrowNotImplementedError:  # such as times of day
            kinds[-1] = text
    schema = pyarrow.schema(list(zip(header, kinds)))

    def array(cells: Sequence[str], read: Read, kind: Any) -> Any:
        held = [None if cell is _NULL or read and not cell else cell for cell in cells]
        return pyarrow.array(held, text).cast(kind)

    def write(rows: list) -> None:
        if rows:
            arrays = list(map(array, zip(*rows), reads, kinds))
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))

    with parquet.ParquetWriter(file, schema) as writer:
        yield write


class _Exact(float):
    """A float that xlsxwriter writes with all its digits."""

    def __format__(self, _: str) -> str:
        return _number_text(self)


@contextlib.contextmanager
def _write_xlsx(file: BinaryIO, name: str, header: list[str], reads: list[Read], _: dict) -> Any:
    import xlsxwriter
    from xlsxwriter.exceptions import FileCreateError
    from xlsxwriter.utility import xl_col_to_name, xl_range

    with tempfile.TemporaryDirectory() as folder:  # the rows, until the file is complete
        how = {"constant_memory": True, "tmpdir": folder}
        book = xlsxwriter.Workbook(file, how)
        book.set_properties({"created": datetime.datetime(2000, 1, 1)})
        sheet, places, widths = book.add_worksheet(), itertools.count(1), []
        bold, doubtful = book.add_format({"bold": True}), book.add_format({"bg_color": "#FFEB9C"})
        look_of = lru_cache(None)(lambda code: book.add_format({"num_format": code}))
        looks = ["0.0%" if re.fullmatch(PROBABILITIES, x) else "" for x in header]

        def write_text(place: int, column: int, text: str, look: Any = None) -> None:
            if _NO_CELL.search(text) or sheet.write_string(place, column, str(text), look):
                what = f"{text[:40]!r} … has {len(text):,} characters, and a cell of .xlsx holds"
                raise UserError(f"{name}: {what} {MAX_CELL:,} that XML allows: name the output .csv")

        def write_cell(place: int, column: int, cell: str) -> None:
            value = _value(cell, reads[column])
            look = looks[column] if reads[column] else getattr(cell, "look", "")
            if type(value) in _DATED and getattr(value, "year", 1900) >= 1900:
                sheet.write_datetime(place, column, value, look_of(look or _DATED[type(value)]))
            elif isinstance(value, bool):
                sheet.write_boolean(place, column, value)
            elif isinstance(value, (int, float)) and isfinite(value):
                sheet.write_number(place, column, _Exact(value), look_of(look) if look else None)
            else:
                write_text(place, column, cell)

        def write(rows: list) -> None:
            if not widths:
                lengths = (max(map(len, cells)) for cells in zip(header, *rows))
                widths.extend(min(max(length, 6), 48) + 3 for length in lengths)  # with the filter's button
            for row, place in zip(rows, places):
                for column, cell in enumerate(row):
                    if cell:
                        write_cell(place, column, cell)

        for column, text in enumerate(header):
            write_text(0, column, text, bold)
        yield write
        last, right = next(places) - 1, len(header) - 1
        sheet.freeze_panes(1, 0)
        sheet.autofilter(0, 0, last, right)
        sheet.ignore_errors({"number_stored_as_text": xl_range(0, 0, last, right)})  # codes with zeros
        for column, width in enumerate(widths):
            sheet.set_column(column, column, width)
        if "needs_review" in header and last:
            marked = f"={xl_col_to_name(header.index('needs_review'), col_abs=True)}2=1"
            rule = {"type": "formula", "criteria": marked, "format": doubtful}
            sheet.conditional_format(1, 0, last, right, rule)
        try:
            book.close()
        except FileCreateError as error:
            raise error.args[0] from None  # the error of the machine


@contextlib.contextmanager
def _write_statistics(file: BinaryIO, name: str, header: list[str], reads: list[Read], _: dict) -> Any:
    """Write a table of Stata or SPSS at once, so all rows are held in memory."""
    table: list[list[Any]] = [[] for _ in header]

    def write(rows: list) -> None:
        for held, read, cells in zip(table, reads, zip(*rows)):
            held += (_value(cell, read) for cell in cells) if read is float else cells

    yield write
    import pandas
    import pyreadstat

    columns = {}
    for column, read, cells in zip(header, reads, table):
        values = cells if read is float else [_value(cell, read) for cell in cells]
        kinds = {type(value) for value in values if value is not None}
        if read is float or kinds and kinds <= {int, float, bool}:
            columns[column] = pandas.Series(values, dtype=float)
        else:
            is_time = len(kinds) == 1 and kinds <= {datetime.date, datetime.datetime, datetime.time}
            columns[column] = pandas.Series(values if is_time else list(map(str, cells)), dtype=object)
    frame: Any = pandas.DataFrame(columns)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "table")
        try:
            if is_stata := ending_of(name) == ".dta":
                pyreadstat.write_dta(frame, path, version=14)  # a later one is read by Stata/MP alone
            else:
                pyreadstat.write_sav(frame, path)
        except (pyreadstat.PyreadstatError, pyreadstat.ReadstatError) as error:
            raise UserError(f"{name}: cannot be written ({error}); a .csv output can") from None
        then = b"01 Jan 2000 00:00" if is_stata else b"01 Jan 0000:00:00"
        with open(path, "rb") as written:
            file.write(_CREATED.sub(rb"\g<1>" + then, written.read(1 << 10)))
            shutil.copyfileobj(written, file)
