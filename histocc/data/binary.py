"""Tables that are no text, read through the packages of extras: Parquet (pyarrow), workbooks of Excel and
OpenDocument (python-calamine), files of Stata and SPSS (pyreadstat); and the tables that predict writes.

Cells become texts: whole numbers have no fraction, an empty cell is "", a date is 2026-01-31. Parquet, Stata
and SPSS files are read piece by piece; a workbook is held in memory while it is read.
"""

import contextlib
import datetime
import gzip
import importlib.util
import itertools
import os
import pickle
import re
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from histocc.runtime.errors import UserError
from histocc.runtime.files import opened

CHUNK = 1 << 12  # rows: few enough for the cells of a chunk to stay in the processor's cache
_STATA_CHUNK = 1 << 16  # rows of Stata and SPSS files, whose beginning is read again for each chunk
_TOP = 20  # rows among which the names of the columns are looked for
MAX_ROWS, MAX_CELL = 1 << 20, 32_767  # rows of a sheet of .xlsx, characters of a cell
# Kinds of tables, and patterns of their first bytes
_KINDS = {
    "Parquet": rb"PAR1",
    "workbook": rb"PK\x03\x04|\xd0\xcf\x11\xe0",
    "Stata": rb"<stata_dta>|[\x69-\x73][\x01\x02]\x01\0",
    "SPSS": rb"\$FL[23]",
}
# A cell with a formula but without the value that it had in a spreadsheet program. No part crosses a "<", so
# that it takes time in proportion to the text, whatever that is.
_UNSTORED = re.compile(
    rb'<c (?![^<>]*t="str")[^<>]*>(?:<f[^<>]*/>|<f[^<>]*>[^<]*</f>)(?:<v ?/>|<v></v>)?</c>'
)

# Characters that XML does not allow, and a text that xlsxwriter takes for its own markup
_NO_CELL = re.compile("[\ud800-\udfff\ufffe\uffff]|^<r>.*</r>\\Z", re.DOTALL)
# The process that reads a file of Stata or SPSS: a damaged one may end it with a signal
_READ_STATISTICS = """
import pickle, sys
sys.path[:], reader, path, how = pickle.load(sys.stdin.buffer)
import pyreadstat
pickle.dump(getattr(pyreadstat, reader)(path, output_format="dict", **how), sys.stdout.buffer)
"""

Rows = tuple[np.ndarray, list[list[str]]]  # numbers of rows, int64 [n], from 1; n cells of each column
# Endings of the tables that predict writes → the package that it takes, and the extra with that package
ENDINGS = {
    ".csv": None,
    ".csv.gz": None,
    ".xlsx": ("xlsxwriter", "excel"),
    ".parquet": ("pyarrow", "parquet"),
}


def composed(name: str) -> str:
    """Return the name of a column with one blank between words, however its accents are stored."""
    return " ".join(unicodedata.normalize("NFC", name).split())


def ending_of(path: str) -> str:
    """Return the one of ENDINGS that a name has; without any it is that of CSV."""
    return next((ending for ending in ENDINGS if path.lower().endswith(ending)), ".csv")


def missing_package(path: str) -> list[str]:
    """Return what lacks to write a table of this name, in a line, or []."""
    package, extra = ENDINGS[ending_of(path)] or ("csv", "")
    if importlib.util.find_spec(package) is None:
        return [f"--output {path} needs {package}: pip install 'histocc[{extra}]'"]
    return []


class Binary(NamedTuple):
    """A table that is no text."""

    kind: str  # for the user
    names: list[str]  # of the columns, as in the file
    read: Callable[[Sequence[int]], Iterator[Rows]]  # given the places of columns
    notes: tuple[str, ...] = ()  # for the user


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
        encoding: that of the texts in a Stata or SPSS file, if it does not say it.
        sheet: name of the sheet of a workbook; None: the first that has the columns `texts`.
        texts: the columns that hold texts. A workbook's names of columns are in the first row that has these,
            and in files of Stata and SPSS they take the labels of values; other columns take the values.
        flags: whether messages may name the flags of reading.
    """
    kind = next((kind for kind, magic in _KINDS.items() if re.match(magic, begin)), None)
    if kind and is_packed:
        raise UserError(f"{path}: is not CSV in gzip but another table ({kind}); unpack it by gunzip --keep")
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
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, float):
        return _number_text(value)
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
        # Columns are taken by place if all are read, since names may repeat.
        columns = None if len(places) == len(names) else [names[place] for place in places]
        row, batches = 0, file.iter_batches(CHUNK, columns=columns)
        while names:
            try:
                if (batch := next(batches, None)) is None:
                    break
                order = places if columns is None else map(batch.schema.get_field_index, columns)
                cells = [_parquet_texts(batch.column(place)) for place in order]
            except errors as error:
                message = " ".join(str(error).split())[:300]
                what = f"{path}, row {row + 1:,} or below: cannot be read as text ({message})"
                raise UserError(what) from None
            yield np.arange(row, row + len(batch), dtype=np.int64) + 1, cells
            row += len(batch)
        if names and row != (rows := file.metadata.num_rows):
            raise UserError(f"{path}: is a damaged Parquet file ({row:,} rows of {rows:,} are there)")

    return Binary("Parquet", names, read)


def _parquet_texts(values: Any) -> list[str]:
    import pyarrow

    if pyarrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pyarrow.types.is_floating(values.type):
        return list(map(_number_text, values.to_pylist()))
    return [text or "" for text in values.cast(pyarrow.string()).to_pylist()]


# ---- workbooks


class _Sheet(NamedTuple):
    name: str
    rows: int
    top: list[list[str]]  # cells of its first rows


def _workbook(path: str, sheet: str | None, texts: Sequence[str], flags: bool) -> Binary:
    state = os.stat(path)
    kind, sheets, notes = _sheets(path, state.st_ino, state.st_size, state.st_mtime_ns)
    listed = ", ".join(repr(each.name) for each in sheets)
    if sheet is not None and not any(each.name == sheet for each in sheets):
        raise UserError(f"{path}: has no sheet {sheet!r}; it has {listed}")
    among = [each for each in sheets if sheet in (None, each.name)]
    rows = [(each, i) for each in among for i, row in enumerate(each.top) if any(row)]
    is_found = [row for row in rows if texts and {*texts} <= {composed(cell) for cell in row[0].top[row[1]]}]
    if texts and not is_found and len({each.name for each, _ in rows}) > 1:
        named = ", ".join(map(repr, texts))
        what = f"no sheet has a row with the column names {named} among its first {_TOP}"
        others = ". --sheet and --input-col name others" * flags
        raise UserError(f"{path}: {what}; the sheets are {listed}{others}")
    found, at = next(iter(is_found or rows), (among[0], -1))  # the row with the names of the columns
    names = found.top[at] if at >= 0 else []
    if len(sheets) > 1:
        other = "; --sheet names another" * flags
        notes += (f"is a workbook of the sheets {listed}: {found.name!r} was read{other}",)
    if at > 0:
        notes += (f"has the column names in row {at + 1} of the sheet: the rows above are left out",)
    if found.rows in (1 << 16, MAX_ROWS):
        notes += (f"has a full sheet of {found.rows:,} rows: is the table cut there?",)

    def read(places: Sequence[int]) -> Iterator[Rows]:
        blank = [""] * len(names)
        with _one_message(path), _calamine(path) as book:
            cells = enumerate(book.get_sheet_by_name(found.name).iter_rows(), 1)
            rows = ((number, row) for number, row in cells if number > at + 1 and row != blank)
            while piece := list(islice(rows, CHUNK)):
                columns = [[_text(row[place]) for _, row in piece] for place in places]
                yield np.array([number for number, _ in piece], dtype=np.int64), columns

    return Binary(kind, names, read, notes)


@lru_cache(maxsize=4)
def _sheets(path: str, *_state: int) -> tuple[str, list[_Sheet], tuple[str, ...]]:
    """Return (kind, sheets, notes for the user) of a workbook in this state."""
    kind, sheets, notes = "Excel 97", [], ()
    with _one_message(path):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:
                names = parts.namelist()
            if not {"content.xml", "xl/workbook.xml", "xl/workbook.bin"}.intersection(names):
                raise UserError(f"{path}: is not a table but a zip archive; unpack it")
            kind = "OpenDocument" if "content.xml" in names else "Excel"
        with _calamine(path) as book:
            by_hidden = sorted(book.sheets_metadata, key=lambda about: int(about.visible))  # hidden ones last
            for name in (about.name for about in by_hidden):
                sheet = book.get_sheet_by_name(name)
                top = [list(map(_text, row)) for row in islice(sheet.iter_rows(), _TOP)]
                sheets.append(_Sheet(name, 0 if sheet.end is None else sheet.end[0] + 1, top))
        if kind == "Excel" and _has_unstored_formulas(path):
            what = "holds formulas without their values, which were read as empty cells"
            notes = (f"{what}: a spreadsheet program stores them when it saves the workbook",)
    return kind, sheets, notes


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
        remedy = "it is damaged, protected by a password or no workbook; save it again as .xlsx or CSV"
        raise UserError(f"{path}: cannot be read as a workbook ({error!s:.200}): {remedy}") from None


def _has_unstored_formulas(path: str) -> bool:
    with zipfile.ZipFile(path) as parts:
        for name in parts.namelist():
            if not re.fullmatch(r"xl/worksheets/[^/]*\.xml", name):
                continue
            with parts.open(name) as part:
                block = b""
                while more := part.read(1 << 20):
                    block = block[-(1 << 14) :] + more  # a formula has 8,192 characters at most
                    if b"<f" in block and _UNSTORED.search(block):
                        return True
    return False


# ---- Stata and SPSS


def _statistics(path: str, kind: str, encoding: str | None, texts: Sequence[str], flags: bool) -> Binary:
    _package(path, "pyreadstat", "stata")
    reader = "read_dta" if kind == "Stata" else "read_sav"
    encoding = encoding and encoding.removesuffix("-sig").upper()

    def table(**rows: Any) -> tuple[dict[str, list], Any]:
        asked = pickle.dumps((sys.path, reader, path, {"encoding": encoding, **rows}))
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

    def read(places: Sequence[int]) -> Iterator[Rows]:
        chosen, row, count = [names[place] for place in places], 0, _STATA_CHUNK
        of_texts = [labels.get(name, {}) if composed(name) in texts else {} for name in chosen]
        while count == _STATA_CHUNK:
            cells, _ = table(usecols=chosen, row_offset=row, row_limit=_STATA_CHUNK)
            columns = [
                [_text(of_text.get(value, value)) for value in cells[name]]
                for name, of_text in zip(chosen, of_texts)
            ]
            if count := len(columns[0]) if columns else 0:
                yield np.arange(row, row + count, dtype=np.int64) + 1, columns
            row += count

    return Binary(kind, names, read)


# ---- the tables that predict writes


@contextlib.contextmanager
def table_writer(
    file: BinaryIO, name: str, header: list[str], numbers: Container[str], as_csv: Callable[[list], bytes]
) -> Iterator[Callable[[list], Any]]:
    """Give a function that writes rows, below the names of the columns, as the ending of `name` asks. Equal
    rows make equal bytes. Columns in `numbers` are numbers in .xlsx and .parquet. Raises UserError if the
    format has no room for a cell.
    """
    ending = ending_of(name)
    if ending.startswith(".csv"):
        packed = gzip.GzipFile("", "wb", 6, file, mtime=0) if ending == ".csv.gz" else None
        with packed or contextlib.nullcontext(file) as out:
            out.write(as_csv([header]))
            yield lambda rows: out.write(as_csv(rows))
    elif ending == ".parquet":
        import pyarrow
        from pyarrow import parquet

        kinds = [pyarrow.float64() if name in numbers else pyarrow.string() for name in header]
        schema = pyarrow.schema(list(zip(header, kinds)))

        def write_parquet(rows: list) -> None:
            columns = [
                [float(cell) if cell else None for cell in column] if name in numbers else column
                for name, column in zip(header, zip(*rows))
            ]
            arrays = [pyarrow.array(column, kind) for column, kind in zip(columns, kinds)]
            if rows:
                writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))

        with parquet.ParquetWriter(file, schema) as writer:
            yield write_parquet
    else:
        import xlsxwriter
        from xlsxwriter.exceptions import FileCreateError

        with tempfile.TemporaryDirectory() as folder:  # the rows, until the file is complete
            how = {"constant_memory": True, "nan_inf_to_errors": True, "tmpdir": folder}
            book = xlsxwriter.Workbook(file, how)
            book.set_properties({"created": datetime.datetime(2000, 1, 1)})
            sheet, places = book.add_worksheet(), itertools.count(1)

            def write_text(place: int, column: int, text: str) -> None:
                if _NO_CELL.search(text) or sheet.write_string(place, column, text):
                    what = f"{text[:40]!r} … has {len(text):,} characters, and a cell of .xlsx holds"
                    raise UserError(f"{name}: {what} {MAX_CELL:,} that XML allows: name the output .csv")

            for column, text in enumerate(header):
                write_text(0, column, text)

            def write_xlsx(rows: list) -> None:
                for row, place in zip(rows, places):
                    for column, cell in enumerate(row):
                        if cell and header[column] in numbers:
                            sheet.write_number(place, column, float(cell))
                        elif cell:
                            write_text(place, column, cell)

            yield write_xlsx
            try:
                book.close()
            except FileCreateError as error:
                raise error.args[0] from None  # the error of the machine
