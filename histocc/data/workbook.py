"""Facts about a workbook that python-calamine does not report, from its XML: dates before 1900, errors such
as #N/A, merged cells of OpenDocument, and formulas without their values.
"""

import datetime
import functools
import posixpath
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from xml.etree import ElementTree

# Merged cells as python-calamine gives them: (row, column) of the first, (row, column) of the last, from 0.
# Dates and errors are cells of this kind in one row, with their text as a third item.
Cells = list[tuple]
_DATES = {*map(str, range(14, 18)), "22"}  # number formats built into all workbooks
# Literal parts of a number format
_SHOWN = re.compile(r'"[^"]*"|\[[^]]*\]|\\.|_.')
# A cell of Excel with an error or a number below 1, which is a date before 1900 if its format shows dates
_SPECIAL = re.compile(
    rb'<c r="([A-Z]+)(\d+)"(?: s="(\d+)")?(?: t="[ne]"[^<>]*)?>(?:<f[^<>]*/>|<f[^<>]*>[^<]*</f>)?'
    rb"<v>((?:-[1-5]?\d{1,5}|0)(?:\.\d+)?)?(#[^<]{1,20})?</v>"
)
# A cell with a formula but without the value computed by a spreadsheet program. No part crosses a "<", so
# it takes linear time for any text.
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
                    block = block[-(1 << 14) :] + more  # a formula has at most 8,192 characters
                    yield name, block


def scanned(path: str) -> tuple[dict[str, Cells], bool]:
    """Return the cells of each Excel sheet with dates before 1900 or errors, and whether there are formulas
    without their values. python-calamine reads such dates as times of day, and leaves errors empty.
    """
    files = "xl/workbook.xml", "xl/_rels/workbook.xml.rels", "xl/styles.xml"
    with zipfile.ZipFile(path) as parts:
        texts = [parts.read(name) if name in parts.namelist() else b"<none/>" for name in files]
    book, links, styles = map(ElementTree.fromstring, texts)
    codes = {
        each.get("numFmtId"): each.get("formatCode", "") for each in styles.iterfind("{*}numFmts/{*}numFmt")
    }
    used = [each.get("numFmtId") for each in styles.iterfind("{*}cellXfs/{*}xf")]
    are_dates = [
        number in _DATES or bool(re.search("[yd]", _SHOWN.sub("", codes.get(number, "")).lower()))
        for number in used
    ]
    is_1904 = any(each.get("date1904") in ("1", "true") for each in book.iterfind("{*}workbookPr"))
    first = datetime.datetime(1904, 1, 1) if is_1904 else datetime.datetime(1899, 12, 30)
    special: dict[str, Cells] = defaultdict(list)  # by part of the workbook
    is_unstored = False
    for part, block in _blocks(path, r"xl/worksheets/[^/]*\.xml"):
        is_unstored = is_unstored or b"<f" in block and bool(_UNSTORED.search(block))
        for letters, row, style, days, error in _SPECIAL.findall(block):
            if error or days and style and are_dates[int(style)]:
                column = functools.reduce(lambda place, letter: 26 * place + letter - 64, letters, 0) - 1
                place = int(row) - 1, column
                time = first + datetime.timedelta(seconds=round(float(days or 0) * 86_400))
                text = error.decode() or str(time).removesuffix(" 00:00:00")
                special[part].append((place, place, text))
    part_of = {each.get("Id"): posixpath.join("/xl", each.get("Target", ""))[1:] for each in links}
    sheets = {each.get("name", ""): each.attrib.values() for each in book.iterfind("{*}sheets/{*}sheet")}
    return {
        name: special[part_of[id]] for name, ids in sheets.items() for id in ids if id in part_of
    }, is_unstored


def has_merged(path: str) -> bool:
    """Return whether an OpenDocument workbook has cells that span several rows."""
    is_merged = re.compile(rb'number-rows-spanned="(?!1")').search
    return any(is_merged(block) for _, block in _blocks(path, r"content\.xml"))
