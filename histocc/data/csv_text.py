"""The text of a CSV file: its encoding, and its lines as csv.reader takes them."""

import codecs
import csv
import io
import os
import re
import shlex
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO, Literal

import numpy as np

from histocc.runtime.errors import UserError
from histocc.runtime.files import opened
from histocc.text import code_points

BEGIN = 1 << 18  # bytes in which the kind of line end and the delimiter are looked for
LONGEST_LINE = 1 << 24  # characters, without a line end
_BLOCK = 1 << 22  # bytes
_TEXT_BLOCK = 1 << 16  # bytes that are parted into lines at a time
# In Windows-1252 signs such as ¢ and ¿, elsewhere letters.
_SYMBOL_IN_WORD = re.compile(rb"[A-Za-z][\xa0-\xbf](?=[a-z])")
_NOT_IN_WINDOWS_1252 = (0x81, 0x8D, 0x8F, 0x90, 0x9D)
_LONE_RETURN = re.compile("\r(?!\n)")
_LONE_FEED = re.compile("(?<=[^\r])\n")  # one that begins a text belongs to the carriage return before
_MACINTOSH_LINE = re.compile("[^\r]*\r|[^\r]+")

# Characters of a cell: an open quotation mark must not swallow the memory with the file.
csv.field_size_limit(1 << 24)


def unquoted(text: str) -> str:
    """What stands outside of quotation marks."""
    return "".join(text.split('"')[::2])


def is_torn(error: csv.Error) -> bool:
    """Whether csv.reader has met a line break inside of an unquoted cell."""
    return str(error).startswith("new-line character")


def encoding_of_header(path: str, begin: bytes) -> str:
    """From the first line alone: what follows is looked at as a whole later. Raises UserError for what is no
    text."""
    if begin[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    first = begin.partition(b"\n" if b"\n" in begin else b"\r")[0]  # "\r": old Macintosh line ends
    if b"\0" in first:
        raise UserError(f"{path}: {_with_nul_bytes(path, begin)}")
    for encoding in ("utf-8-sig", "windows-1252"):
        try:
            first.decode(encoding)
            return encoding
        except UnicodeError:
            continue
    return "latin-1"


def _with_nul_bytes(path: str, begin: bytes) -> str:
    """What a file is whose first line holds NUL bytes."""
    found = name = None
    for encoding in ("UTF-32LE", "UTF-32BE"):
        text = begin[: len(begin) // 4 * 4].decode(encoding, "replace")
        if text and not {"\0", "\ufffd"} & set(text):  # bytes that mean something else decode to no text
            found, name = "UTF-32", encoding
            break
    nul = np.flatnonzero(np.frombuffer(begin[:4096], np.uint8) == 0)
    if not found and len(nul) > 3 and len(set((nul % 2).tolist())) == 1:  # half of each ASCII character
        found, name = "UTF-16", "UTF-16LE" if nul[0] % 2 else "UTF-16BE"
    if not found:
        return "is not a text file (a NUL byte in the first line)"
    return (
        f"looks like {found} without a byte order mark; save it as UTF-8, for example with\n"
        f"  iconv -f {name} -t UTF-8 {shlex.quote(path)} > utf8.csv"
    )


def detect_encoding(path: str) -> str:
    """utf-8-sig (with or without byte order mark), utf-16 (with one) or windows-1252, from all bytes of a CSV
    file.

    Raises UserError for what is none of them, since guessing would spoil letters: a file that is UTF-8 for
    the most part, one whose bytes are those of an old DOS or Mac code page.
    """
    with opened(path) as file:
        begin = file.read(3)
    if begin[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    if _is_utf8(path):
        return "utf-8-sig"
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    good = bad = lines = odd = 0
    first = (0, 0)  # line and byte
    bytes_seen = np.zeros(256, dtype=np.int64)
    with opened(path) as file:
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
                    before = text.count("\n", 0, at) or text.count("\r", 0, at)
                    first = (lines + before + 1, int(points[at]) - 0xDC00)
                bad += found
                bytes_seen += np.bincount(np.frombuffer(block, np.uint8), minlength=256)
                odd += len(_SYMBOL_IN_WORD.findall(block))
            lines += text.count("\n") or text.count("\r")
    where = f"{path}: is not UTF-8 (byte 0x{first[1]:02x} in line {first[0]:,}"
    if good * 100 > bad or begin == codecs.BOM_UTF8:
        raise UserError(
            f"{where}; {bad:,} such bytes beside {good:,} letters that are UTF-8). Parts of "
            "different encodings were put together: save each as UTF-8 first, or mend them"
        )
    signs = bytes_seen[0x80:0xA0].sum() + odd
    if bytes_seen[list(_NOT_IN_WINDOWS_1252)].any() or signs > bytes_seen[0xC0:].sum():
        raise UserError(
            f"{where}) and not Windows-1252, but looks like an old DOS or Mac code page. Save it "
            "as UTF-8, for example with\n"
            f"  iconv -f CP850 -t UTF-8 {shlex.quote(path)} > utf8.csv\n"
            "  (or -f MACINTOSH; look at the letters afterwards)"
        )
    return "windows-1252"


def _is_utf8(path: str) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with opened(path) as file:
        try:
            while block := file.read(_BLOCK):
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def _has_lone_return(text: str) -> bool:
    """Whether a carriage return stands before something else than a line feed: what the regular expression
    finds, in a quarter of the time for Latin letters."""
    if "\r" not in text:
        return False
    try:
        letters = np.frombuffer(text.encode("latin-1"), np.uint8)
    except UnicodeEncodeError:
        return _LONE_RETURN.search(text) is not None
    return bool(((letters[:-1] == 13) & (letters[1:] != 10)).any())


class CsvLines:
    """The lines of a CSV file, with their ends, as csv.reader takes them.

    A line ends with a line feed, with or without carriage returns before it. Where the beginning of the file
    has carriage returns alone (outside of quotation marks), it ends with one of these, as on old Macintoshes.
    csv.reader refuses the other one inside an unquoted cell. In messages lines are counted as editors count
    them: a carriage return, a line feed and a pair of both each begin a new one.

    begin: the first text, in which `end`, the last character of a line, is found.
    """

    def __init__(self, path: str, file: BinaryIO, encoding: str, errors: str = "strict"):
        self.path, self.file, self.encoding = path, file, encoding
        self.reader: Any = None  # csv's, from `rows` on
        self.size = os.fstat(file.fileno()).st_size
        self.end = "\n"
        self.further: list[int] = []  # the line handed out, for each further line break in one
        self.passed = 0  # how many of them were forgotten
        self.decoder = codecs.getincrementaldecoder(encoding)(errors)
        self.begin = self._decoded(file.read(BEGIN), "")
        outside = unquoted(self.begin)
        if "\r" in outside and "\n" not in outside:
            self.end = "\r"

    def rows(self, delimiter: str):
        """The csv.reader of the file, from its first line on."""
        self.reader = csv.reader(chain.from_iterable(self._blocks()), delimiter=delimiter, strict=True)
        return self.reader

    def numbers(self, lines, side: Literal["left", "right"] = "left"):
        """The numbers for messages of lines as reader.line_num counts them (int or int64 [n]): of where they
        begin ("left") or end ("right")."""
        further = np.searchsorted(self.further, lines, side) if self.further else 0
        return lines + self.passed + further

    def forget(self) -> None:
        """Forgets what `numbers` needs for the lines read so far."""
        if self.further:
            past = int(np.searchsorted(self.further, self.reader.line_num, "right"))
            self.passed += past
            del self.further[:past]

    def last_line(self) -> str:
        """The line that was read last."""
        text, lines, before = self.block
        if isinstance(lines, list):
            return lines[self.reader.line_num - before - 1]
        end = lines.tell()
        return text[text.rfind("\n", 0, end - 1) + 1 : end]

    def _blocks(self) -> Iterator:
        """The lines, some at a time, as what can be iterated fast."""
        text, more = self.begin, True
        while more:
            data = self.file.read(_TEXT_BLOCK)
            more = len(data) > 0
            text += self._decoded(data, text)
            cut = text.rfind(self.end) + 1 if more else len(text)
            whole, text = text[:cut], text[cut:]
            self._note_further(whole)
            if len(text) > LONGEST_LINE:
                line = self.numbers(self.reader.line_num + whole.count(self.end) + 1)
                raise UserError(
                    f"{self.path}, line {line:,}: more than {LONGEST_LINE:,} characters without "
                    "a line end. Is this a table of rows, in lines?"
                )
            lines = io.StringIO(whole, newline="\n") if self.end == "\n" else _MACINTOSH_LINE.findall(whole)
            self.block = (whole, lines, self.reader.line_num)
            yield lines
        if (read := self.file.tell()) != self.size:
            raise UserError(
                f"{self.path}: was changed while it was read ({self.size:,} bytes at first, "
                f"{read:,} at the end)"
            )

    def _decoded(self, data: bytes, before: str) -> str:
        """before: what was decoded and not yet handed out. Raises UserError with the line."""
        state = self.decoder.getstate()
        try:
            return self.decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            again = codecs.getincrementaldecoder(self.encoding)("replace")
            again.setstate(state)
            before += again.decode(data[: max(0, error.start - len(state[0]))])
            line = (self.reader.line_num if self.reader else 0) + before.count(self.end) + 1
            raise UserError(
                f"{self.path}, line {self.numbers(line):,}: cannot be read as "
                f"{self.encoding.upper()} ({error.reason}). Save the file as UTF-8, or mend "
                "the line"
            ) from None

    def _note_further(self, text: str) -> None:
        """Notes the line breaks that end no line as it is handed out."""
        lone = _LONE_RETURN if self.end == "\n" else _LONE_FEED
        if not (_has_lone_return(text) if self.end == "\n" else "\n" in text):
            return
        line, last = self.reader.line_num + 1, 0
        for found in lone.finditer(text):
            line += text.count(self.end, last, found.start())
            last = found.start()
            self.further.append(line)
