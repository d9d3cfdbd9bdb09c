"""Parquet files as columns of texts, through pyarrow, which may be missing.

What cannot be seen: where the writer has stored no checksums of pages (most do not unless asked to), a
changed byte may give another text or number without any error; the names and kinds of columns never have any.
"""

from collections.abc import Iterator
from typing import Any

from histocc.runtime.errors import UserError
from histocc.runtime.files import opened

MAGIC = b"PAR1"
_WHOLE_UP_TO = 1 << 53  # beyond it a float no longer tells neighbouring whole numbers apart


def is_parquet(path: str) -> bool:
    """Whether the file begins as Parquet does. Raises UserError for what is no regular file."""
    with opened(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def column_names(path: str) -> list[str]:
    """Names of the columns, in order. Raises UserError."""
    return _opened(path)[1].names


def read_columns(path: str, columns: list[str] | None, size: int) -> Iterator[list[list[str]]]:
    """Up to `size` rows at a time: the texts of each column, in the order of `columns` (None: all).

    Numbers and dates become text; none and NaN become the empty text. Raises UserError.
    """
    import pyarrow

    file, schema = _opened(path)
    places = range(len(schema)) if columns is None else [schema.get_field_index(name) for name in columns]
    for place in places:
        if pyarrow.types.is_nested(schema.field(place).type):
            column = schema.field(place)
            raise UserError(
                f"{path}: column {column.name!r} holds {column.type}, not texts or numbers; "
                "write the file without it, or with one text in each row"
            )
    row = 0
    batches = file.iter_batches(size, columns=columns)
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                break
            # By place where all are read, since names may repeat.
            place_of = batch.schema.get_field_index
            found = range(batch.num_columns) if columns is None else map(place_of, columns)
            cells = [_texts(batch.column(place)) for place in found]
        except _errors() as error:
            where = f"{path}, row {row + 1:,} or below"
            raise UserError(f"{where}: cannot be read as text ({_line(error)})") from None
        if not cells:
            break  # no column at all: rows of nothing
        yield cells
        row += len(batch)
    if places and row != file.metadata.num_rows:
        raise UserError(
            f"{path}: is a damaged Parquet file ({row:,} rows are there, "
            f"{file.metadata.num_rows:,} are announced)"
        )


def _errors() -> tuple[type[Exception], ...]:
    """What pyarrow raises for damaged files. The cell that is not UTF-8 is a ValueError."""
    from pyarrow import lib  # pyright: ignore[reportAttributeAccessIssue]  compiled

    return lib.ArrowException, OSError, ValueError, MemoryError, OverflowError


def _line(error: Exception) -> str:
    """The message of an error on one line, of bounded length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _opened(path: str):
    """(file, schema). Raises UserError."""
    with opened(path):  # a regular file that can be read
        pass
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(
            f"{path}: reading Parquet needs pyarrow: pip install pyarrow (or histocc with the extra parquet)"
        ) from None
    try:
        # Never mapped into memory: a file that is shortened meanwhile would end the process with a signal.
        # Nothing is read ahead: that would hold all row groups in memory.
        file = parquet.ParquetFile(pyarrow.OSFile(path), pre_buffer=False, page_checksum_verification=True)
        schema = file.schema_arrow
        _ = schema.names  # are decoded here, where an error is caught
        return file, schema
    except _errors() as error:
        raise UserError(f"{path}: is a damaged Parquet file ({_line(error)})") from None


def _texts(values) -> list[str]:
    """A column as texts; floats that are whole (in pandas, whole numbers with gaps) without a fraction."""
    import pyarrow.compute

    compute: Any = pyarrow.compute  # its functions are made when it is imported
    if isinstance(values, pyarrow.ExtensionArray):
        values = values.storage
    if pyarrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    texts = values.cast(pyarrow.string())
    if pyarrow.types.is_floating(values.type):
        wide = values.cast(pyarrow.float64())
        small = compute.less(compute.abs(wide), _WHOLE_UP_TO)
        whole = compute.and_(compute.equal(compute.floor(wide), wide), small)
        numbers = compute.if_else(whole, wide, 0.0).cast(pyarrow.int64()).cast(pyarrow.string())
        texts = compute.if_else(compute.is_nan(wide), None, compute.if_else(whole, numbers, texts))
    return [text or "" for text in texts.to_pylist()]
