"""What python-calamine does not tell of a workbook, from its XML: dates before March 1900, merged cells of
OpenDocument, formulas without their values, and number formats.
"""

import contextlib
import datetime
import functools
import posixpath
import re
import zipfile
from collections.abc import Iterator
from itertools import islice
from typing import Any
from xml.etree import ElementTree

# Merged cells as python-calamine gives them: (row, column) of the first, (row, column) of the last, from 0.
# Dates are such cells of one row, with their text as a third part.
Cells = list[tuple]
_TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
_LOOKED_AT = 100  # rows whose cells say how the columns of a workbook look
_DATES, _TIMES = {*range(14, 18), 22}, {*range(14, 23), *range(45, 48)}  # formats that all workbooks have
# Parts of a number format that stand for themselves
_SHOWN = re.compile(r'"[^"]*"|\[(?!(?:h+|m+|s+)\])[^]]*\]|\\.|_.')
# A cell of Excel with a number below 61, which is a date before March 1900 if its format shows dates
_EARLY = re.compile(
    rb'<c r="([A-Z]+)(\d+)" s="(\d+)"(?: t="n")?>(?:<f[^<>]*/>|<f[^<>]*>[^<]*</f>)?'
    rb"<v>((?:-[1-5]?\d{1,5}|[0-5]?\d|60)(?:\.\d+)?)</v>"
)
# A cell with a formula but without the value that it had in a spreadsheet program. No part crosses a "<", so
# that it takes time in proportion to the text, whatever that is.
_UNSTORED = re.compile(
    rb'<c (?![^<>]*t="str")[^<>]*>(?:<f[^<>]*/>|<f[^<>]*>[^<]*</f>)(?:<v ?/>|<v></v>)?</c>'
)


def _blocks(path: str, names: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the parts of a workbook whose names match, in pieces that overlap."""
    with zipfile.ZipFile(path) as parts:
        for name in filter(re.compile(names).fullmatch, parts.namelist()):
            with parts.open(name) as part:
                block = b""
                while more := part.read(1 << 20):
                    block = block[-(1 << 14) :] + more  # a formula has 8,192 characters at most
                    yield name, block


def _place(letters: str) -> int:
    """Return the place of a column that a sheet names by letters, from 0."""
    return functools.reduce(lambda place, letter: 26 * place + ord(letter) - 64, letters, 0) - 1


def _described(parts: zipfile.ZipFile) -> tuple[Any, dict[str, str], list[str | int]]:
    """Return (content of workbook.xml, part of each sheet by its name, number format of each style: its code,
    or its number if all workbooks have it).
    """
    files = "xl/workbook.xml", "xl/_rels/workbook.xml.rels", "xl/styles.xml"
    texts = [parts.read(name) if name in parts.namelist() else b"<none/>" for name in files]
    book, links, styles = map(ElementTree.fromstring, texts)
    targets = {each.get("Id"): posixpath.join("/xl", each.get("Target", ""))[1:] for each in links}
    sheets = [(each.get("name", ""), each.attrib.values()) for each in book.iterfind("{*}sheets/{*}sheet")]
    part_of = {name: targets[id] for name, ids in sheets for id in ids if id in targets}
    codes = {each.get("numFmtId"): each.get("formatCode") for each in styles.iterfind("{*}numFmts/{*}numFmt")}
    used = [each.get("numFmtId", "0") for each in styles.iterfind("{*}cellXfs/{*}xf")]
    return book, part_of, [codes.get(number) or int(number) for number in used]


def _has(look: str | int, letters: str, numbers: set[int]) -> bool:
    """Return whether a number format has one of the letters, or one of the numbers."""
    return (
        look in numbers if isinstance(look, int) else bool(re.search(letters, _SHOWN.sub("", look).lower()))
    )


def scanned(path: str) -> tuple[dict[str, Cells], bool]:
    """Return (dates before March 1900 in each sheet of Excel, which python-calamine takes for times of day or
    for other dates; whether there are formulas without their values).
    """
    with zipfile.ZipFile(path) as parts:
        book, part_of, looks = _described(parts)
        made_by = parts.read("docProps/app.xml") if "docProps/app.xml" in parts.namelist() else b""
    is_1904 = any(each.get("date1904") in ("1", "true") for each in book.iterfind("{*}workbookPr"))
    first = datetime.datetime(1904, 1, 1) if is_1904 else datetime.datetime(1899, 12, 30)
    has_gap = not is_1904 and b"<Application>LibreOffice" not in made_by
    are_dates = [_has(look, "[yd]", _DATES) for look in looks]
    special: dict[str, Cells] = {name: [] for name in part_of}
    of_part = {part: special[name] for name, part in part_of.items()}
    is_unstored = False
    for part, block in _blocks(path, r"xl/worksheets/[^/]*\.xml"):
        is_unstored = is_unstored or b"<f" in block and bool(_UNSTORED.search(block))
        for letters, row, style, number in _EARLY.findall(block) if any(are_dates) else ():
            if are_dates[int(style)]:
                place = int(row) - 1, _place(letters.decode())
                serial = float(number)  # days from `first`; Excel's year 1900 has a 29 February
                seconds = round((serial + (has_gap and 1 <= serial < 60)) * 86_400)
                text = str(first + datetime.timedelta(seconds=seconds)).removesuffix(" 00:00:00")
                text = "1900-02-29" if has_gap and serial >= 60 else text
                of_part.get(part, []).append((place, place, text))
    return special, is_unstored


def looks_of(path: str, sheet: str, above: int) -> dict[tuple[int, bool], str | int]:
    """Return the number formats of the columns of a sheet of .xlsx, by place and whether the format is one of
    times: that of the first cell with one in the top rows. above: rows down to the names of the columns.
    """
    looks: dict[tuple[int, bool], str | int] = {}
    # where something is missing, cells have the usual look
    with zipfile.ZipFile(path) as parts, contextlib.suppress(LookupError, ValueError, SyntaxError):
        _, part_of, of_style = _described(parts)
        with parts.open(part_of[sheet]) as part:
            elements = (element for _, element in ElementTree.iterparse(part))
            rows = (element for element in elements if element.tag.endswith("}row"))
            for cell in (x for row in islice(rows, above, above + _LOOKED_AT) for x in row):
                place, look = _place(cell.get("r", "").rstrip("0123456789")), of_style[int(cell.get("s", 0))]
                if look:
                    looks.setdefault((place, _has(look, "[dmyhs]", _TIMES)), look)
    return looks


def merged_in_document(path: str) -> dict[str, Cells]:
    """Return the merged cells in each sheet of OpenDocument."""
    special: dict[str, Cells] = {}
    is_merged = re.compile(rb'number-rows-spanned="(?!1")').search
    if not any(is_merged(block) for _, block in _blocks(path, r"content\.xml")):
        return special
    with zipfile.ZipFile(path) as parts, parts.open("content.xml") as content:
        row, cells = 0, []
        for _, element in ElementTree.iterparse(content):
            if element.tag == f"{_TABLE}table-row":
                column = 0
                for cell in element:
                    last = row + int(cell.get(f"{_TABLE}number-rows-spanned", 1)) - 1
                    cells += [((row, column), (last, column))] * (last > row)
                    column += int(cell.get(f"{_TABLE}number-columns-repeated", 1))
                row += int(element.get(f"{_TABLE}number-rows-repeated", 1))
                element.clear()
            elif element.tag == f"{_TABLE}table":
                special[element.get(f"{_TABLE}name", "")], row, cells = cells, 0, []
    return special
