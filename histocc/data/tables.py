"""Read tables in chunks of rows: CSV in any encoding and with any delimiter, JSON lines, both also in gzip,
and the tables of `histocc.data.binary`.

Values keep their text: "NA", "null" and "0123" are never turned into anything else. Memory holds one chunk,
however long the file is. Only a workbook is held whole. A folder of tables, as written by Spark and Dask, is
one table.
"""

import codecs
import contextlib
import csv
import difflib
import glob
import gzip
import io
import itertools
import json
import os
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import islice
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import unquote

import numpy as np

from histocc.data.binary import (
    CHUNK,
    OF_DOCUMENT,
    RANGE,
    Binary,
    RowBlock,
    composed,
    open_table,
    table_kind,
    unique_names,
)
from histocc.formatter import SEP_VALUE
from histocc.runtime.errors import UserError
from histocc.runtime.files import TABLE_NAME, opened
from histocc.runtime.log import counted

DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"  # written by Hive, Spark and pyarrow
_HIDDEN = r"(\A|[/\\])[._~]"  # in names of files that are not parts
_NOTED = 3  # most notes on the parts of a table
_BEGIN = 1 << 16  # bytes from which the kind of a file is detected
_LINE_BREAK = re.compile("\r\n|\r|\n")
_QUOTES = "a cell that begins with a quotation mark must end with one, and those inside it must be doubled"
_NO_QUOTES = "; use --no-quotes if they are ordinary characters"
_JSON_LINES = rb'(\xef\xbb\xbf)?\s*\{[ \t]*["}]'
_HALF = re.compile("[\ud800-\udfff]")  # half of a character (\\ud800 in JSON), not valid text
# Patterns of the first bytes of other kinds of files, and their names. IN is the file, OUT the name without
# its ending.
_OTHERS = {
    rb"(RD[ABX][23]\n)?X\n\0\0\0": "an R data file; save its table x from R: arrow::write_parquet(x,"
    ' "x.parquet"), or write.csv(x, "x.csv", row.names = FALSE, na = "")',
    rb".{0,200}ASCII SPSS PORT FILE": "a portable SPSS file; save it as .sav",
    rb"\xfd7zXZ": "compressed with xz; unpack it with: xz --decompress --keep IN",
    rb"BZh[1-9]1AY": "compressed with bzip2; unpack it with: bunzip2 --keep IN",
    rb"(ARROW1|FEA1)\0": 'a Feather file; save it as Parquet:\n  python -c "import pandas, sys;'
    ' pandas.read_feather(sys.argv[1]).to_parquet(sys.argv[2])" IN OUT.parquet',
    rb"\x89PNG\r|\xff\xd8\xff|II\*\0|MM\0\*": "a PNG, JPEG or TIFF picture; transcribe its text into a table",
    rb"%PDF-|\{\\rtf": f"a PDF or RTF document; {OF_DOCUMENT}",
    rb"(?i:(\xef\xbb\xbf)?\s*<(!doctype|html|head|body|meta|style|table|\?xml)\b)": "HTML or XML; open it"
    " in a spreadsheet program and save it as .xlsx",
    rb'(\xef\xbb\xbf)?\s*\[\s*\{.*"annotations"\s*:': "an export of Label Studio; write its texts, with the"
    " codes in column choices, as JSON lines by\n"
    "  python -c \"import json, sys; print(*(json.dumps(r['data'] | {'choices': [c for a in r['annotations']"
    " for x in a['result'] for c in x['value'].get('choices', [])]}) for r in json.load(open(sys.argv[1],"
    " 'rb'))), sep='\\n', file=open(sys.argv[2], 'x'))\" IN OUT.jsonl",
    rb"(\xef\xbb\xbf)?\s*\[\s*\{": "JSON; write its rows as JSON lines by\n"
    "  python -c \"import json, sys; print(*map(json.dumps, json.load(open(sys.argv[1], 'rb'))), sep='\\n',"
    " file=open(sys.argv[2], 'x'))\" IN OUT.jsonl",
    rb'(\xef\xbb\xbf)?\s*(\{[ \t]*[\r\n]\s*"|\[[ \t]*"[^\r\n]*\][ \t]*[\r\n])': "JSON; write each row as an"
    ' object with the names of its columns, {"occ1": "smith"}, on a line of a .jsonl file',
    rb"\xff\xfe\0\0|\0\0\xfe\xff|[ -~\xa0-\xff]\0\0\0|\0\0\0[ -~\xa0-\xff]": "UTF-32; save it as UTF-8",
    rb'\xff\xfe\{\0[ "\t]|\xfe\xff\0\{\0[ "\t]': "JSON lines in UTF-16; save them in UTF-8",
}

# Characters of a cell: an open quotation mark must not swallow the memory with the file.
csv.field_size_limit(1 << 24)


@dataclass
class Chunk:
    """Some rows of a file, below the header."""

    # int64 [n], line where each row begins, from 1, or the row's number in a binary table
    lines: np.ndarray
    columns: list[list[str]]  # the cells of each wanted column, n texts each
    faults: list[tuple[int, str, str]] = field(default_factory=list)  # unreadable rows: line, kind, reason
    share: float = 0.0  # share of the file read so far, 0…1


class Format(NamedTuple):
    """The format of a file."""

    names: list[str]  # names of the columns
    delimiter: str  # "" for a binary table
    encoding: str  # "" for a binary table
    above: int = 0  # lines before the names
    notes: tuple[str, ...] = ()  # for the user
    quoting: Any = csv.QUOTE_MINIMAL  # or another of csv's constants
    binary: Binary | None = None  # the table, if it is binary
    flags: bool = False  # whether messages may name flags of reading
    ranges: int = 1  # ranges of rows that can be read independently

    def types_but(self, written: Container[str]) -> dict[str, Any]:
        """Return the `types` of a binary table, except those of the columns in `written`."""
        types = self.binary.types if self.binary else {}
        return {name: types[name] for name in types if name not in written}


class Part(NamedTuple):
    """A file of a table that consists of several files."""

    path: str
    name: str  # relative to the table's folder
    keys: dict[str, str] = {}  # columns from the names of its folders: year=1881

    def __str__(self) -> str:
        return self.path


Path = str | Sequence[Part]  # a table: a file, a folder, a pattern, or the files themselves


def parts_of(path: str) -> list[Part]:
    """Return the files of a table, sorted by name with numbers in numerical order. They are the tables in and
    below a folder, the files that match a pattern, or the one named. A folder or pattern leaves out hidden
    and empty files. Raises UserError if there are none.
    """
    found, root = [path], path
    if not os.path.isdir(path):
        if os.path.lexists(path) or not glob.has_magic(path):
            return [Part(path, os.path.basename(path))]
        found, root = glob.glob(path, recursive=True), os.path.dirname(re.split(r"[*?[]", path)[0])
    walked = {os.path.join(at, name) for each in found for at, _, names in os.walk(each) for name in names}
    below = [part_of(file, root) for file in {*walked, *filter(os.path.isfile, found)}]
    below = [part for part in below if not re.search(_HIDDEN, part.name)]
    # a pattern may match files with any ending
    parts = [part for part in below if part.path not in walked or TABLE_NAME.fullmatch(part.name)]
    parts = [part for part in parts if os.path.getsize(part.path)]
    if not parts:
        kind = "is a folder" if os.path.isdir(path) else "is a pattern"
        others = f"; it has {min(below).name}: use a pattern, such as '*', for such files" if below else ""
        raise UserError(f"{path}: {kind} with no table (.csv, .parquet, .xlsx …){others}")
    return sorted(
        parts, key=lambda part: [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", part.name)]
    )


def files_left_out(path: str) -> str:
    """Return a note on files in a folder that are not read, or "" if there are none."""
    walked = (part_of(os.path.join(at, name), path).name for at, _, names in os.walk(path) for name in names)
    others = sorted(name for name in walked if not (re.search(_HIDDEN, name) or TABLE_NAME.fullmatch(name)))
    named = f"{', '.join(others[:3])}{' …' * (len(others) > 3)}"
    return f"{path}: files not read, because of their names: {len(others):,} ({named})" if others else ""


def part_of(file: str, root: str) -> Part:
    """Return a file of a table's folder, with the columns from the names of its subfolders."""
    name = os.path.relpath(file, root)
    pairs = (each.partition("=") for each in name.split(os.sep)[:-1] if "=" in each)
    return Part(file, name, {key: "" if value == _HIVE_NULL else unquote(value) for key, _, value in pairs})


def str_of(path: Path) -> str:
    """Return the name of a table for messages."""
    return path if isinstance(path, str) else ", ".join(map(str, path[:3])) + " …" * (len(path) > 3)


def files_of(path: Path) -> Sequence[Part]:
    """Return the files of a table. Raises UserError if there are none."""
    return parts_of(path) if isinstance(path, str) else path


def _format_of_parts(parts: Sequence[Part], how: tuple) -> Format:
    """Return how several files are read as one table. Raises UserError if their columns differ."""
    formats = [table_format(part.path, *how) for part in parts]
    first, keys = formats[0], [*parts[0].keys]
    names = unique_names(first.names)
    for part, other in zip(parts, formats):
        if odd := {*unique_names(other.names), *part.keys}.symmetric_difference({*names, *keys}):
            what = f"the parts of a table must have the same columns, but only one of these has {min(odd)!r}"
            raise UserError(f"{parts[0]} and {part}: {what}")

    def read(places: Sequence[int], span: int | None = None) -> Iterator[tuple]:
        wanted = [names[place] for place in places if place < len(names)]
        for part in parts:
            for chunk in read_chunks(part.path, wanted, *how, span=span):
                cells, given = iter(chunk.columns), [*part.keys.values()]
                columns = [
                    next(cells) if place < len(names) else [given[place - len(names)]] * len(chunk.lines)
                    for place in places
                ]
                faults = [(line, kind, f"{part}: {reason}") for line, kind, reason in chunk.faults]
                yield chunk.lines, columns, faults

    types = first.types_but(()) if all(first.types_but(()) == each.types_but(()) for each in formats) else {}
    notes = [f"({part}) {note}" for part, each in zip(parts, formats) for note in each.notes]
    more = [f"has more notes of this kind on its parts: {len(notes) - _NOTED:,}"] * (len(notes) > _NOTED)
    binary = Binary("several files", [*first.names, *keys], read, types=types)
    notes = (f"has {counted(len(parts), 'part')}", *notes[:_NOTED], *more)
    return Format(binary.names, "", "", 0, notes, binary=binary, flags=first.flags, ranges=first.ranges)


def table_format(
    path: Path,
    delimiter: str | None = None,
    encoding: str | None = None,
    no_quotes: bool = False,
    sheet: str | None = None,
    texts: Sequence[str] = (),
    flags: bool = False,
) -> Format:
    """Return the format of a table, detecting what is not given. Raises UserError for other files."""
    parts, how = files_of(path), (delimiter, encoding, no_quotes, sheet, texts, flags)
    if len(parts) > 1 or parts[0].keys:
        return _format_of_parts(parts, how)
    path = parts[0].path
    quoting = csv.QUOTE_NONE if no_quotes else csv.QUOTE_MINIMAL
    with _unpacked(path) as (file, raw):
        begin, is_packed = file.read(_BEGIN), file is not raw
    kind = table_kind(begin)
    _refuse_others(path, begin, kind, is_packed)
    state = os.stat(path)
    version = state.st_ino, state.st_size, state.st_mtime_ns
    if kind or re.match(_JSON_LINES, begin):
        if kind:
            binary = open_table(path, kind, encoding, sheet, texts, flags)
        else:
            binary = _json_lines(path, encoding or "utf-8-sig", *version)
        names, notes = _names(binary.names, binary.notes)
        return Format(names, "", "", 0, notes, binary=binary, ranges=binary.ranges)
    notes: tuple[str, ...] = ()
    if encoding is None:
        encoding, notes = _detected(path, flags, *version)
    with _unpacked(path) as (file, _), _decodes(path, encoding, flags):
        text = io.TextIOWrapper(file, encoding=encoding, newline="")
        first = [text.readline(), *islice(text, 20)]
    above = 0
    if named := re.fullmatch('"?sep=(.)"?\\s*', first[0]):  # Excel reads and writes this line
        delimiter, above, first = delimiter or named[1], 1, [*first[1:], ""]
    if not first[0].strip():
        what = "the first line, with the column names, is blank" if first[0] else "is empty"
        raise UserError(f"{path}: {what}")
    delimiter = delimiter or max(DELIMITERS.values(), key=lambda each: _fits(each, first, quoting))
    rows, below = csv.reader(first, delimiter=delimiter, strict=True, quoting=quoting), []
    try:
        names, notes = _names(next(rows), notes)
    except csv.Error as error:
        raise UserError(f"{path}: the column names cannot be read as CSV ({error})") from None
    with contextlib.suppress(csv.Error):
        below.extend(row for row in rows if row)
    ids = [row[0] for row in below]
    if {len(row) for row in below} == {len(names) + 1} and (len(set(ids)) == len(ids) > 1 or ids == ["1"]):
        names = ["row.names", *names]  # R's write.table omits the first name
        notes += ("has rows with one cell more than names: the first was taken for R's row names",)
    # ranges begin at line breaks, which other encodings write differently
    can_be_cut = not is_packed and b'\n"'.decode(encoding) == '\n"'
    ranges = state.st_size // RANGE if can_be_cut else 1
    return Format(names, delimiter, encoding, above, notes, quoting, flags=flags, ranges=max(1, ranges))


def _refuse_others(path: str, begin: bytes, kind: str, is_packed: bool) -> None:
    """Raise UserError if a file's first bytes are those of no table, or of a binary table in gzip."""
    other = next((other for magic, other in _OTHERS.items() if re.match(magic, begin, re.DOTALL)), "")
    if is_packed and (kind or "IN OUT" in other):
        what = f"is not CSV but {kind or other.partition(';')[0]} in gzip"
        raise UserError(f"{path}: {what}; unpack it with: gunzip --keep {shlex.quote(path)}")
    if other:
        names = {"IN": shlex.quote(path), "OUT": shlex.quote(os.path.splitext(path)[0])}
        other = re.sub(r"\b(IN|OUT)\b", lambda found: names[found[0]], other)
        raise UserError(f"{path}: is not a CSV file but {other}")


def _fits(delimiter: str, lines: list[str], quoting: Any) -> tuple[int, int]:
    """Return how many rows have as many cells as the header or one more (0 if it has one), and its width."""
    rows, sizes = csv.reader(lines, delimiter=delimiter, strict=True, quoting=quoting), []
    with contextlib.suppress(csv.Error):
        sizes.extend(map(len, rows))
    width = sizes[0] if sizes else 0
    return (width > 1) * sum(width <= size <= width + 1 for size in sizes[1:]), width


def _names(written: list[str], notes: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
    """Return the column names, and the given notes with more on the names."""
    if any(name != " ".join(name.split()) for name in written):
        notes += ("has blanks around column names, or line breaks in them, which are ignored",)
    names = list(map(composed, written))
    if later := [repr(new) for name, new in zip(names, unique_names(names)) if name != new]:
        notes += (f"has several columns of one name; flags call the later ones {', '.join(later[:10])}",)
    return names, notes


def column_problems(
    path: Path, header: list[str], wanted: list[str], flags: dict[str, str] | None = None
) -> list[str]:
    """Return the problems of a file's columns, one per line. flags: column name → the flag that names it."""
    problems, by_flags = [], flags is not None
    for name in dict.fromkeys(wanted):
        if header.count(name) > 1 and name not in (flags or ()):
            problems.append(f"{path}: column {name!r} is listed {header.count(name)} times")
        if name in header or flags and name in flags and name in unique_names(header):
            continue
        folded = {other.casefold(): other for other in header}
        near = difflib.get_close_matches(name.casefold(), folded, 1)
        flag = f"{flags[name]} " if flags and name in flags else ""
        hints = [
            f". Did you mean {flag}{folded[near[0]]!r}?"
            if near
            else f". Name it with {flag.strip()}" * bool(flag),
            " (separate several columns by spaces)" if "," in name else "",
            " (one column only: name the delimiter with --delimiter)" * (len(header) == 1 and by_flags),
        ]
        with _unpacked(files_of(path)[0].path) as (file, _):
            begin = file.read(_BEGIN)
        if begin.startswith((b"PK", b"\xd0\xcf")):  # a workbook
            other = "; choose another sheet with --sheet" * by_flags
            hints.append(f". Column names must be in the first 20 rows{other}")
        lines = [] if re.match(_JSON_LINES, begin) else begin.splitlines()[1:20]
        if below := [i for i, line in enumerate(lines, 2) if all(name.encode() in line for name in wanted)]:
            hints.append(f". The column names seem to be in line {below[0]}: remove the lines above")
        has = ", ".join(map(repr, unique_names(header))) or "none"
        problems.append(f"{path}: has no column {name!r}; it has {has}{''.join(hints)}")
    return problems


def read_chunks(
    path: Path, columns: Sequence[str] | Sequence[int] | None, *how: Any, span: int | None = None
) -> Iterator[Chunk]:
    """Yield all rows below the header. columns: names or places, None for all. how: see `table_format`. span:
    number of the only one of its `ranges` to read. Raises UserError if the file cannot be read to its end.
    """
    table = table_format(path, *how)
    width = len(table.names)
    wanted = range(width) if columns is None else columns
    places = [each if isinstance(each, int) else unique_names(table.names).index(each) for each in wanted]
    if table.binary:
        ranged = (span,) * (span is not None and table.ranges > 1)
        yield from itertools.starmap(Chunk, table.binary.read(places, *ranged))
        return
    path, quotes = files_of(path)[0].path, _QUOTES + _NO_QUOTES * table.flags
    with _csv_reader(path, table, span) as (reader, file, before):
        size, more = max(1, os.path.getsize(path)), True
        while more:
            rows, lines, faults = [], [], []
            for _ in range(CHUNK):
                line = before + reader.line_num + 1
                try:
                    row = next(reader)
                except StopIteration:
                    more = False
                    break
                except csv.Error as error:
                    if (last := before + reader.line_num) > line:
                        lost = f"is not closed before line {last:,}, which swallows rows"
                        what = f"{path}, line {line:,}: a quotation mark {lost}: {quotes} ({error})"
                        raise UserError(what) from None
                    faults.append((line, "broken quotation marks", f"{quotes} ({error})"))
                    continue
                if width == 1:  # an empty line is a row with an empty cell
                    row = row or [""]
                if len(row) != width:
                    reason = f"cells in the row: {len(row)}, columns in the header: {width}"
                    # otherwise a blank line between rows of several cells
                    faults += [(line, "wrong number of cells", reason)] * bool(row)
                elif (last := before + reader.line_num) > line and any(_holds_rows(x, table) for x in row):
                    reason = f"a cell extends over rows down to line {last:,}: is a quotation mark unclosed?"
                    faults.append((line, "rows inside a cell", reason))
                else:
                    rows.append(row)
                    lines.append(line)
            if rows or faults:
                cells = [[row[place] for row in rows] for place in places]
                yield Chunk(np.array(lines, dtype=np.int64), cells, faults, file.tell() / size)


def _holds_rows(cell: str, table: Format) -> bool:
    """Return whether a cell looks like rows: line breaks, and delimiters that no blank follows."""
    least = (len(table.names) - 1) * len(_LINE_BREAK.findall(cell))
    return cell.count(table.delimiter) - cell.count(table.delimiter + " ") >= least > 0


def table_rows(path: str, table: Format) -> Iterator[tuple[int, list[str]]]:
    """Yield (its last line, cells) of each row below the header, of any length. Raises UserError."""
    if table.binary:
        for lines, columns in table.binary.read(range(len(table.names))):
            yield from zip(lines.tolist(), map(list, zip(*columns)))
        return
    with _csv_reader(path, table) as (reader, _, _):
        try:
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num:,}: cannot be read as CSV ({error})") from None


@lru_cache(maxsize=4)
def _json_lines(path: str, encoding: str, *_state: int) -> Binary:
    """Return a table of JSON objects, one per line. Its columns are the names in any object."""
    as_written = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), str)

    def scalar(value: Any) -> str:
        return value if isinstance(value, str) else {None: "", True: "TRUE", False: "FALSE"}[value]

    def cells(text: str) -> Iterator[tuple[str, str]]:
        for name, value in json.loads(text, **as_written).items():
            try:
                # Label Studio's JSON-MIN has several choices in a record
                value = value["choices"] if isinstance(value, dict) and [*value] == ["choices"] else value
                several = value if isinstance(value, list) else [value]
                yield name, SEP_VALUE.join(filter(None, map(scalar, several)))
            except TypeError:  # an object, or nested lists
                yield name, json.dumps(json.loads(text)[name], ensure_ascii=False)

    def rows() -> Iterator[tuple[int, dict[str, str]]]:
        with _unpacked(path) as (file, _):
            for number, line in enumerate(file, 1):
                try:
                    some = cells(line.decode(encoding)) if line.strip() else ()
                    row = {_HALF.sub("\ufffd", name): _HALF.sub("\ufffd", cell) for name, cell in some}
                except (ValueError, AttributeError, RecursionError) as error:
                    what = f"is not a JSON object in {encoding.removesuffix('-sig')} ({error})"
                    raise UserError(f"{path}, line {number:,}: {what}") from None
                if line.strip():
                    yield number, row

    def read(places: Sequence[int]) -> Iterator[RowBlock]:
        some, wanted = rows(), [names[place] for place in places]
        while piece := list(islice(some, CHUNK)):
            lines = np.array([line for line, _ in piece], dtype=np.int64)
            yield lines, [[row.get(name, "") for _, row in piece] for name in wanted]

    names = list(dict.fromkeys(name for _, row in rows() for name in row))
    return Binary("JSON lines", names, read)


@contextlib.contextmanager
def _csv_reader(path: str, table: Format, span: int | None = None) -> Iterator[tuple[Any, BinaryIO, int]]:
    """Open a CSV file. Yield csv's reader past the header, the stored file, and the number of lines before
    its first line. span: number of the only one of its `ranges` to read.
    """
    begin = end = before = 0
    if span is not None and table.ranges > 1:
        state = os.stat(path)
        form = table.delimiter, table.encoding, table.quoting
        marks = _begins(path, *form, table.ranges, state.st_size, state.st_mtime_ns)
        (begin, before), (end, _) = marks[span : span + 2]
    with _unpacked(path) as (file, raw):
        if end:
            raw.seek(begin)
            file = raw = io.BytesIO(raw.read(end - begin))
        text = io.TextIOWrapper(file, encoding=table.encoding, newline="")
        reader = csv.reader(text, delimiter=table.delimiter, strict=True, quoting=table.quoting)
        with _decodes(path, table.encoding, table.flags, reader, before):
            for _ in range(0 if begin else table.above + 1):
                next(reader)
            yield reader, raw, before


@lru_cache(maxsize=4)
def _begins(
    path: str, delimiter: str, encoding: str, quoting: Any, ranges: int, size: int, *_state: int
) -> list[tuple[int, int]]:
    """Return (byte, lines before it) for the beginning of each range of a CSV file, and for the file's end. A
    range begins with the first row that begins in it.
    """
    marks, at, lines = [(0, 0)], 0, 0
    with opened(path) as file:

        def texts() -> Iterator[str]:
            """Yield the line, and the lines on which its cells continue."""
            nonlocal at, lines
            for part in itertools.chain([line], block, file):
                at, lines = at + len(part), lines + 1
                yield part.decode(encoding, "replace")

        limit = size // ranges
        while content := file.read(_BEGIN) + file.readline():
            if content.count(b"\r") != content.count(b"\r\n"):  # csv also ends rows there: use one range
                return [(0, 0)] + [(size, 0)] * ranges
            if b'"' not in content and at + len(content) < limit:
                at, lines = at + len(content), lines + content.count(b"\n")
                continue
            block = io.BytesIO(content)
            for line in block:
                if at >= limit:
                    marks.append((at, lines))
                    limit = size * len(marks) // ranges
                if b'"' in line and quoting == csv.QUOTE_MINIMAL:
                    with contextlib.suppress(csv.Error):  # reading reports broken quotation marks
                        next(csv.reader(texts(), delimiter=delimiter, strict=True, quoting=quoting))
                else:
                    at, lines = at + len(line), lines + 1
    marks += [(at, lines)] * (ranges + 1 - len(marks))  # a row may be longer than a range
    return marks


@contextlib.contextmanager
def _unpacked(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file and yield its content, unpacked from gzip, and the file as stored. Raises UserError."""
    with opened(path) as raw:
        is_packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        try:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_packed else raw, raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path}: is a damaged gzip file ({error}); copy or make it again") from None


@contextlib.contextmanager
def _decodes(path: str, encoding: str, flags: bool, reader: Any = None, before: int = 0) -> Iterator[None]:
    try:
        yield
    except UnicodeError as error:
        line = 1 + before + (reader.line_num if reader is not None else 0)
        remedy = "Save it as UTF-8" + ", or name its encoding with --encoding" * flags
        what = f"cannot be read as {encoding.upper()} ({error}). {remedy}"
        raise UserError(f"{path}, line {line:,} or below: {what}") from None


# ---- encodings

# Letters besides a–z, by language, for each code page: Windows-1252, and pages that have other letters in the
# same places.
_LETTERS = {
    "cp1252": "äöüßéà àâæçéèêëîïôùûüÿœ áéíóúüñç àáâãçéêíóôõúü àèéìíîòóùú àçèéíïòóúü· æøåéèêôöäü åäöéèàüæø"
    " áðéíóúýþæö éèêëïîöüóáíúàâôûçĳ",
    "cp1250": "áčďéěíňóřšťúůýž áäčďéíĺľňóôŕšťúýž ąćęłńóśźż áéíóöőúüű čćđšž ăâîşţ",
    "cp1254": "çğıöşüâîû\u0307",
}
_CODE_PAGES = ["cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp850", "mac_roman"]  # for guesses
_SIGNS = "‘’‚“”„´`'–—…°£€½¼¾«»§ºª·†‡©®\xa0\xad"  # occur next to words in any language
# matched only at beginnings: from every character it would take quadratic time in a long cell
_HIGH_WORD = re.compile(rb"(?<![A-Za-z\x80-\xff])[A-Za-z]*+[\x80-\xff][A-Za-z\x80-\xff]*")
_HIGH_CELL = re.compile(rb'(?<![^,;\t|"\r\n])[^,;\t|"\r\n\x80-\xff]*+[\x80-\xff][^,;\t|"\r\n]*')
_MAX_ODD_LINES = 20_000  # lines to examine
_MIN_SHARE = 0.95  # share of the words that a language must explain


@cache
def _detected(path: str, flags: bool, *_state: int) -> tuple[str, tuple[str, ...]]:
    """Return the encoding of a CSV file, and notes on it for the user."""
    with _unpacked(path) as (file, _):
        begin = file.read(4096)
        if begin[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return "utf-16", ("was read as UTF-16",)
        if b"\0" in begin.partition(b"\n")[0]:
            remedy = "if it is UTF-16, use --encoding utf-16-le (or -be)" if flags else "save it as UTF-8"
            raise UserError(f"{path}: is not a text file (a NUL byte in the first line); {remedy}")
        blocks = itertools.chain([begin], iter(lambda: file.read(1 << 22), b""))
        with contextlib.suppress(UnicodeDecodeError):
            for _ in codecs.iterdecode(blocks, "utf-8"):
                pass
            return "utf-8-sig", ()
    return _code_page(path, flags)


def _code_page(path: str, flags: bool) -> tuple[str, tuple[str, ...]]:
    """Return the result of `_detected` for a file that is not UTF-8: Windows-1252, or a guess."""
    odd, utf8, first, number = [], 0, 0, 0  # lines
    with _unpacked(path) as (file, _):
        for number, line in enumerate(file, 1):
            if not line.isascii() and len(odd) < _MAX_ODD_LINES:
                try:
                    line.decode("utf-8")
                    utf8 += 1
                except UnicodeDecodeError:
                    first = first or number
                    odd.append(line)
    if utf8 * 100 > len(odd):
        remedy = "It mixes encodings: save each part as UTF-8, or correct the lines"
        raise UserError(f"{path}: line {first:,} is not UTF-8; lines that are: {utf8:,}. {remedy}")
    words = {word for line in odd for word in _HIGH_WORD.findall(line)}
    samples = list(dict.fromkeys(cell.strip()[:40] for line in odd for cell in _HIGH_CELL.findall(line)))[:3]
    explained = {page: _explained(words, page) for page in _LETTERS}
    page: str | None = "cp1252"
    of_best, of_any = explained["cp1252"]
    # A few broken words among ASCII words do not reveal the page. They are neither Cyrillic nor Greek.
    few = number >= 20 * len(odd) and of_any == max(share for _, share in explained.values())
    if not few and (of_any < _MIN_SHARE or max(explained.values())[0] > of_best):
        try:
            from charset_normalizer import from_bytes

            guess = from_bytes(b"".join(odd), cp_isolation=_CODE_PAGES).best()
            page = guess and guess.encoding
        except ImportError:
            page = None
        if page in _LETTERS and explained[page][1] < _MIN_SHARE:  # signs in place of letters
            page = None
    shown = {name: ", ".join(repr(text.decode(name, "replace")) for text in samples) for name in _CODE_PAGES}
    if page is None:
        what = f"{path}: is not UTF-8 (line {first:,}), and its code page is unclear"
        remedy = "Name it with --encoding NAME" if flags else "Save it as UTF-8"
        names = [f"{name}: {texts}" for name, texts in shown.items()]
        raise UserError("\n    ".join([f"{what}. {remedy}; the same texts in each encoding:", *names]))
    name = "Windows-1252" if page == "cp1252" else page
    other = "; choose another with --encoding NAME" * flags
    return page, (f"was read as {name}, because it is not UTF-8: {shown[page]}{other}",)


def _explained(words: set[bytes], page: str) -> tuple[float, float]:
    """Return the shares of words that the best language of a code page, and any of them, explains."""
    of_language: Counter[int] = Counter()
    explained = 0
    for word in words:
        odd = {c for c in word.decode(page, "replace").strip(_SIGNS).lower() if c >= "\x80"} - {"’"}
        fits = [i for i, letters in enumerate(_LETTERS[page].split()) if odd.issubset(letters)]
        of_language.update(fits)
        explained += bool(fits)
    return max(of_language.values(), default=0) / len(words), explained / len(words)
