"""Write the tables of commands: CSV, also in gzip, workbooks (xlsxwriter), Parquet (pyarrow), and files of
Stata and SPSS (pyreadstat). Except in CSV, numbers, dates and truth values keep their types.
"""

import contextlib
import datetime
import functools
import gzip
import importlib.util
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Container, Iterator, Sequence
from math import isfinite
from typing import Any, BinaryIO

from histocc.data.binary import NULL, Cell, text_of
from histocc.data.rows import csv_text
from histocc.formatter import PROBABILITIES
from histocc.runtime.errors import UserError

MAX_COLUMNS, MAX_CELL = 1 << 14, 32_767  # columns of an .xlsx sheet, and characters of a cell
# Ending of the name → the extra that it needs, and its packages
ENDINGS: dict[str, tuple[str, ...]] = {
    ".csv": ("",),
    ".csv.gz": ("",),
    ".xlsx": ("excel", "xlsxwriter"),
    ".parquet": ("parquet", "pyarrow"),
    ".dta": ("stata", "pyreadstat", "pandas"),
    ".sav": ("stata", "pyreadstat", "pandas"),
}
# Bytes and patterns of valid column names in Stata and SPSS, except reserved words
_STATA = r"_(all|[bnN]|coef|cons|pi|pred|rc|skip)|byte|double|float|if|in|int|long|str(\d+|L)|using|with"
_SPSS = "ALL|AND|BY|EQ|GE|GT|LE|LT|NE|NOT|OR|TO|WITH"
_NAMES = {".dta": (32, rf"(?!({_STATA})\Z)[^\W\d]\w*"), ".sav": (64, rf"(?!({_SPSS})\Z)[^\W\d_][\w.$#@]*")}
# Characters that XML does not allow, and a text that xlsxwriter takes for its own markup
_NO_CELL = re.compile("[\ud800-\udfff\ufffe\uffff]|^<r>.*</r>\\Z", re.DOTALL)


def ending_of(path: str) -> str:
    """Return which of ENDINGS a name has, .csv by default."""
    return next((ending for ending in ENDINGS if path.lower().endswith(ending)), ".csv")


def missing_package(path: str) -> list[str]:
    """Return a line on the packages missing to write a table of this name, or []."""
    extra, *packages = ENDINGS[ending_of(path)]
    lacking = " and ".join(name for name in packages if importlib.util.find_spec(name) is None)
    return [f"--output {path} needs {lacking}: pip install 'histocc[{extra}]'"] if lacking else []


def check_names(path: str, names: Sequence[str]) -> None:
    """Raise UserError if a table of this name cannot have these columns."""
    ending, why = ending_of(path), ""
    if ending == ".xlsx" and len(names) > MAX_COLUMNS:
        why = f"a sheet has {MAX_COLUMNS:,} columns, but there are {len(names):,} to write"
    if ending in _NAMES:
        most, fits = _NAMES[ending]
        fit = {name for name in names if len(name.encode()) <= most and re.fullmatch(fits, name)}
        if odd := [repr(name) for name in names if name not in fit or names.count(name) > 1]:
            what = f"names of at most {most} letters, digits and _, each once and not reserved"
            why = f"columns there must have {what}, not {', '.join(odd[:5])}"
    if why:
        raise UserError(f"--output {path}: {why}: name it .csv or .parquet")


@contextlib.contextmanager
def table_writer(
    file: BinaryIO,
    name: str,
    header: list[str],
    numbers: Container[str],
    types: dict[str, tuple] | None = None,
) -> Iterator[Callable[[list], Any]]:
    """Yield a function that writes rows, below the column names, in the format of `name`'s ending. Equal rows
    make equal bytes, except in .dta and .sav, which hold the time. Columns in `numbers` are numbers, except
    in .csv. types: types of copied columns, as in `Binary`. Raises UserError if a cell does not fit the
    format.
    """
    check_names(name, header)
    ending, are_numbers = ending_of(name), [column in numbers for column in header]
    kept = {name: how for name, (end, *how) in (types or {}).items() if end == ending and name in header}
    if ending.startswith(".csv"):
        packed = gzip.GzipFile("", "wb", 6, file, mtime=0) if ending == ".csv.gz" else None
        with packed or contextlib.nullcontext(file) as out:
            out.write(csv_text([header]))
            yield lambda rows: out.write(csv_text(rows))
    elif ending == ".parquet":
        import pyarrow
        from pyarrow import parquet

        text, new = pyarrow.string(), (pyarrow.string(), pyarrow.float64())
        kinds = [kept.get(name, [new[is_number]])[0] for name, is_number in zip(header, are_numbers)]
        schema = pyarrow.schema(list(zip(header, kinds)))

        def array(cells: Sequence[str], kind: Any) -> Any:
            held = [None if cell is NULL or not cell and kind != text else cell for cell in cells]
            return pyarrow.array(held, text).cast(kind)

        def write_parquet(rows: list) -> None:
            if rows:
                arrays = list(map(array, zip(*rows), kinds))
                writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))

        with parquet.ParquetWriter(file, schema) as writer:
            yield write_parquet
    else:
        write = _write_xlsx if ending == ".xlsx" else functools.partial(_write_statistics, kept=kept)
        with write(file, name, header, are_numbers) as write_rows:
            yield write_rows


def write_rows_of(source: str, rows: list, write: Callable[[list], Any]) -> None:
    """Write rows of the table `source`. Raises UserError with its name if a cell does not fit the format."""
    try:
        write(rows)
    except ValueError as error:
        raise UserError(f"{source}: {error}; an output named .csv keeps such cells") from None


def _value(cell: str, is_number: bool) -> Any:
    if is_number:
        return float(cell) if cell else None
    return cell.value if isinstance(cell, Cell) else cell or None


class _Exact(float):
    """A float that xlsxwriter writes with all its digits."""

    def __format__(self, _: str) -> str:
        return text_of(float(self))


@contextlib.contextmanager
def _write_xlsx(file: BinaryIO, name: str, header: list[str], are_numbers: list[bool]) -> Any:
    import xlsxwriter
    from xlsxwriter.exceptions import FileCreateError
    from xlsxwriter.utility import xl_col_to_name, xl_range

    with tempfile.TemporaryDirectory() as folder:  # holds the rows until the file is complete
        book = xlsxwriter.Workbook(file, {"constant_memory": True, "tmpdir": folder})
        book.set_properties({"created": datetime.datetime(2000, 1, 1)})
        sheet, places, widths = book.add_worksheet(), itertools.count(1), []
        bold, doubtful = book.add_format({"bold": True}), book.add_format({"bg_color": "#FFEB9C"})
        formats = {"date": "yyyy-mm-dd", "time": "hh:mm:ss", "timedelta": "[h]:mm:ss"}
        formats["datetime"] = "yyyy-mm-dd hh:mm:ss"
        dated = {name: book.add_format({"num_format": look}) for name, look in formats.items()}
        percent = book.add_format({"num_format": "0.0%"})
        looks = [percent if re.fullmatch(PROBABILITIES, x) else None for x in header]

        def write_text(place: int, column: int, text: str, look: Any = None) -> None:
            if _NO_CELL.search(text) or sheet.write_string(place, column, str(text), look):
                what = f"{text[:40]!r} … has {len(text):,} characters, but a cell of .xlsx holds at most"
                raise UserError(f"{name}: {what} {MAX_CELL:,} that XML allows: name the output .csv")

        def write_cell(place: int, column: int, cell: str) -> None:
            value = _value(cell, are_numbers[column])
            if (kind := type(value).__name__) in dated and getattr(value, "year", 1900) >= 1900:
                sheet.write_datetime(place, column, value, dated[kind])
            elif isinstance(value, bool):
                sheet.write_boolean(place, column, value)
            elif isinstance(value, (int, float)) and isfinite(value):
                look = looks[column] if are_numbers[column] else None
                sheet.write_number(place, column, _Exact(value), look)
            else:
                write_text(place, column, cell)

        def write(rows: list) -> None:
            if not widths:
                lengths = (max(map(len, cells)) for cells in zip(header, *rows))
                widths.extend(min(max(length, 6), 48) + 3 for length in lengths)  # for the filter's button
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
            raise error.args[0] from None  # an error of the disk


@contextlib.contextmanager
def _write_statistics(
    file: BinaryIO, name: str, header: list[str], are_numbers: list[bool], kept: dict[str, list]
) -> Any:
    """Write a whole table of Stata or SPSS from memory. kept: `Binary.types` by column."""
    table: list[list[Any]] = [[] for _ in header]
    formats = {column: form for column, (form, _) in kept.items() if form}
    ranges = {column: each for column, (_, each) in kept.items() if each}

    def write(rows: list) -> None:
        for column, values, cells, is_number in zip(header, table, zip(*rows), are_numbers):
            keeps = column in formats
            values += (getattr(x, "stored", None) if keeps else _value(x, is_number) for x in cells)

    yield write
    import pandas
    import pyreadstat

    columns = {}
    for column, values, is_number in zip(header, table, are_numbers):
        kinds = {type(value) for value in values if value is not None}
        if is_number or column in formats or kinds and kinds <= {int, float, bool}:
            columns[column] = pandas.Series(values, dtype=object if str in kinds else float)
        else:
            is_time = len(kinds) == 1 and kinds <= {datetime.date, datetime.datetime, datetime.time}
            columns[column] = pandas.Series(values if is_time else list(map(text_of, values)), dtype=object)
    frame: Any = pandas.DataFrame(columns)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "table")
        try:
            if ending_of(name) == ".dta":
                how = {"variable_format": formats, "version": 14}  # later versions: only Stata/MP
                tags = dict.fromkeys(formats, list("abcdefghijklmnopqrstuvwxyz"))
                pyreadstat.write_dta(frame, path, missing_user_values=tags, **how)
            else:
                pyreadstat.write_sav(frame, path, variable_format=formats, missing_ranges=ranges)
        except (pyreadstat.PyreadstatError, pyreadstat.ReadstatError) as error:
            raise UserError(f"{name}: cannot be written ({error}); name the output .csv") from None
        with open(path, "rb") as written:
            shutil.copyfileobj(written, file)
