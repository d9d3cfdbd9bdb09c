"""A coded file text by text, and sheets of its texts for a person: CSV that spreadsheets open as it is, and
what the person has decided.
"""

import contextlib
import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from histocc.data.tables import (
    Chunk,
    column_problems,
    csv_rows,
    read_chunks,
    read_header,
    table_format,
)
from histocc.formatter import CLASSES
from histocc.predict.output import csv_text
from histocc.runtime.errors import UserError, raise_if_any
from histocc.text import text_key

DECIDED = "decided_by"  # column of the file with decisions
MODEL = "model"  # in it: nobody has decided
MAX_CODES = 5  # shown of a text
MAX_LISTED = 20  # lines of a sheet that a message names
DECISION, ID = "decision", "id"
CHOSEN, DRAWN = "t", "s"  # what the id of a line begins with: how its text came into the sheet
SAMPLED = ("quarter", "quarter_rows", "drawn")
_RISKY = ("=", "+", "-", "@", "\t", "\r", "'")
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
Key = tuple[str, str]  # a text and its language, as `key_of` gives them


def key_of(text: str, language: str) -> Key:
    """Equal for texts that differ only in case and blanks, in the same language."""
    return text_key(text), language.strip()


@dataclass
class CodedText:
    """A text with what the model says of it: text and language as they stand in its first row; rows: how many
    it has; doubt: how many of them are expected to be wrong; decided: who has decided, "" for nobody.
    """

    text: str
    language: str
    rows: int = 0
    doubt: float = 0.0
    codes: list[str] = field(default_factory=list)
    probs: list[str] = field(default_factory=list)
    decided: str = ""

    @property
    def id(self) -> str:
        """The same for the same text, language and codes."""
        content = "\0".join([*key_of(self.text, self.language), *self.codes])
        return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class CodedFile:
    """All texts of a file as `python -m histocc.predict` writes it, but blank ones. Raises UserError where it
    is none, or lacks a column.

    Attributes:
        header: its columns; text, language (or None), conf, review, decided (or None): places among them;
            codes, probs, words, more: lists of places, the last of what is about the code that was replaced;
            classes: places of titles and classes of HISCO, by name.
        system: in the names of the columns of codes.
        texts: by `key_of`.
        rows: of the file.
        descriptions: code → words, as far as the file has some.
        alternatives: whether the codes behind the first one are other possible answers (decoders topk and
            full), and not further codes of the same answer.
    """

    def __init__(
        self,
        path: str,
        column: str = "occ1",
        language_column: str | None = None,
        delimiter: str | None = None,
    ):
        self.path, self.delimiter = path, delimiter
        header = self.header = read_header(path, delimiter)[0]
        missing = [name for name in ("prob_1", "conf", "needs_review") if header.count(name) != 1]
        first = header.index("prob_1") - 1 if not missing else -1
        if missing or first < 0 or not header[first].endswith("_1"):
            raise UserError(
                f"{path}: is no coded file: it has no column {(missing or ['of codes before prob_1'])[0]!r}"
                f" as python -m histocc.predict writes it; it has {', '.join(map(repr, header))}"
            )
        if language_column is None and "lang" in header:
            language_column = "lang"
        wanted = [column] + ([language_column] if language_column else [])
        flags = {column: "--column", language_column or "": "--language-column"}
        raise_if_any(column_problems(path, header, wanted, flags))
        if DECIDED in header[:first]:
            raise UserError(
                f"{path}: has a column {DECIDED!r} of its own, which is the name of the one that review adds:"
                " rename it"
            )
        # what predict writes stands together; columns of the same names elsewhere are the user's own
        places = {header[i]: i for i in range(first, header.index("conf"))}
        system = self.system = header[first].removesuffix("_1")
        numbers = [i for i in range(1, len(places)) if {f"{system}_{i}", f"prob_{i}"} <= places.keys()]
        self.codes, self.probs, self.words, *classes = (
            [places[f"{name}_{i}"] for i in numbers if f"{name}_{i}" in places]
            for name in (system, "prob", "desc", "title", *CLASSES)
        )
        self.classes = dict(zip(("title", *CLASSES), classes))
        self.more = [places[name] for name in (f"{system}_prefix", "prob_prefix") if name in places]
        self.text = header.index(column)
        self.language = header.index(language_column) if language_column else None
        self.conf, self.review = header.index("conf"), header.index("needs_review")
        self.decided = header.index(DECIDED) if DECIDED in header else None
        self.texts: dict[Key, CodedText] = {}
        self.descriptions: dict[str, str] = {}
        self.rows = several = same = 0
        for chunk in self.chunks():
            for row in zip(*chunk.columns):
                self.rows += 1
                codes, probs = self.codes_of(row), [row[i] for i in self.probs if row[i]]
                by, key = self.decider(row), self.key(row)
                several += len(codes) > 1 and not by
                same += len(codes) > 1 and not by and row[self.conf] in probs[:1]
                if not key[0]:
                    continue
                found = self.texts.get(key)
                if found is None:
                    found = self.texts[key] = CodedText(row[self.text], key[1], 0, 0.0, codes, probs)
                    self.descriptions |= {code: row[i] for code, i in zip(codes, self.words) if row[i]}
                found.rows += 1
                found.doubt += 1 - confidence(row[self.conf], bool(codes))
                if by:
                    found.decided, found.doubt = by, 0.0
        self.alternatives = 0 < several == same

    def chunks(self) -> Iterator[Chunk]:
        """Raises UserError where a row cannot be read."""
        for chunk in read_chunks(self.path, None, self.delimiter):
            if chunk.faults:
                line, _, reason = chunk.faults[0]
                raise UserError(f"{self.path}, line {line:,}: cannot be read ({reason})")
            yield chunk

    def key(self, row) -> Key:
        return key_of(row[self.text], row[self.language] if self.language is not None else "")

    def codes_of(self, row) -> list[str]:
        return [row[i] for i in self.codes if row[i]]

    def decider(self, row) -> str:
        """Who has decided on a row, "" for nobody."""
        found = row[self.decided] if self.decided is not None else ""
        return "" if found == MODEL else found

    def answer(self, codes: list[str], by: str) -> list[str]:
        """Those of the codes of a row that are its answer; by: who has decided, "" for the model."""
        return codes[:1] if self.alternatives and not by else codes


def confidence(cell: str, coded: bool) -> float:
    """How sure the model was, 0 … 1; 0 without a code, or where it does not say."""
    try:
        value = float(cell)
    except ValueError:
        return 0.0
    return min(max(value, 0.0), 1.0) if coded and math.isfinite(value) else 0.0


# ---- sheets


def escape_formula(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula: an apostrophe in front of what could be one. Numbers
    stay.
    """
    return "'" + cell if cell.startswith(_RISKY) and not _NUMBER.fullmatch(cell) else cell


def unescape(cell: str) -> str:
    """What `escape_formula` was given."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(_RISKY) else cell


@dataclass
class Drawn:
    """A text of a sheet: times: how often it was drawn for a sample, 0 for one that was chosen; quarter: of
    the file's rows, 1 the least sure; quarter_rows: rows of the file in that quarter.
    """

    text: CodedText
    times: int = 0
    quarter: int = 0
    quarter_rows: int = 0


def sheet_text(texts: Iterable[Drawn], codes: int, words: dict[str, str], sample: bool, bom: bool) -> bytes:
    """A sheet as CSV. codes: shown of each text; words: code → description, used where there are some."""
    shown = range(1, min(codes, MAX_CODES) + 1)
    of_code = ["code", "words", "prob"] if words else ["code", "prob"]
    header = ["text", "language", "rows", *(f"{name}_{i}" for i in shown for name in of_code), DECISION, ID]
    rows = [header + (list(SAMPLED) if sample else [])]
    for drawn in texts:
        text, line = drawn.text, [drawn.text.text, drawn.text.language, str(drawn.text.rows)]
        for i in range(len(shown)):
            code, prob = (each[i] if i < len(each) else "" for each in (text.codes, text.probs))
            with contextlib.suppress(ValueError):  # empty, or what somebody has written there
                prob = f"{float(prob):.3f}"
            line += [code, words.get(code, ""), prob] if words else [code, prob]
        line += ["", (DRAWN if sample else CHOSEN) + text.id]
        line += [str(drawn.quarter), str(drawn.quarter_rows), str(drawn.times)] if sample else []
        rows.append([escape_formula(cell) for cell in line])
    return ("\ufeff".encode() if bom else b"") + csv_text(rows)


@dataclass(frozen=True)
class Decision:
    """codes: those that are right, none for a text that gets none; None where the person has skipped it;
    where: file and line.
    """

    codes: tuple[str, ...] | None
    where: str


class Codes:
    """The codes that a person may write."""

    def __init__(self, codes: Iterable[str]):
        self.codes = set(codes)
        self.short: dict[str, list[str]] = {}  # by what a spreadsheet leaves of them
        for code in self.codes:
            self.short.setdefault(code.lstrip("0"), []).append(code)

    def read(self, written: str) -> str:
        """The code that is meant: a spreadsheet takes zeros in front, or puts .0 behind. Raises
        ValueError.
        """
        if written in self.codes:
            return written
        if not written:
            raise ValueError("there is nothing beside a separator")
        meant = self.short.get(written.removesuffix(".0").lstrip("0"), [])
        if len(meant) != 1:
            raise ValueError(f"{written!r} is no code of the key")
        return meant[0]


def decided(cell: str, text: CodedText, codes: Codes, room: int) -> tuple[str, ...] | None:
    """What a person has written: 1 … 5, a code, several of these with & between, and, where that is no code
    of the key, other separators; none; skip. room: codes of a row at most. Raises ValueError.
    """
    if cell.lower().split() in (["skip"], ["none"]):
        return None if cell.lower().strip() == "skip" else ()
    parts: list[str] = []
    for part in map(str.strip, cell.split("&")):
        words = re.sub(r"(?i)\bcode\s+", "code\0", part)  # stays together
        if part in codes.codes or unescape(part) in codes.codes or words.startswith("code\0"):
            parts.append(part)
        else:
            parts += [each.replace("\0", " ") for each in re.split(r"[;,/\s]+", words) if each]
    found: list[str] = []
    for part in parts or [""]:
        place, named = part.removesuffix(".0"), re.fullmatch(r"(?i)code\s+(.+)", part)
        if named:
            code = codes.read(named[1].strip())
        elif place.isdecimal() and len(place) == 1 and 1 <= int(place) <= MAX_CODES:
            if int(place) > len(text.codes):
                raise ValueError(f"there is no code {place} for this text; it has {len(text.codes)}")
            code = codes.read(text.codes[int(place) - 1])
        else:
            code = codes.read(unescape(part))
        found.append(code)
    found = list(dict.fromkeys(found))
    if len(found) > room:
        raise ValueError(f"{len(found)} codes, and the file has room for {room}")
    return tuple(found)


class Sheets:
    """The decisions of one sheet or several. by_text: the last one of each text; sample: the texts that were
    drawn; chosen: those that are decided because they were chosen; notes: what to tell; undecided: lines
    without a decision. Raises UserError with all lines that cannot be used.
    """

    def __init__(self, paths: list[str], coded: CodedFile, codes: Codes, delimiter: str | None = None):
        self.coded, self.codes = coded, codes
        self.key_of_id = {text.id: key for key, text in coded.texts.items()}
        self.by_text: dict[Key, Decision] = {}
        self.notes: list[str] = []
        self.sample: dict[Key, Drawn] = {}
        self.chosen: set[Key] = set()
        self.undecided = 0
        for path in paths:
            self._read(path, delimiter)

    def _read(self, path: str, delimiter: str | None) -> None:
        try:
            table = table_format(path, delimiter)
        except UserError:  # whatever its code page: what counts is ASCII in all of them
            table = table_format(path, delimiter, "latin-1")
        header, width = table.names, len(table.names)
        if wrong := column_problems(path, header, [DECISION, ID]):
            raise UserError(
                "\n  ".join(wrong)
                + f"\n  {path} is no sheet of python -m histocc.review make, or not with all its columns"
            )
        if 0 < len(sampled := set(SAMPLED) & set(header)) < len(SAMPLED):
            raise UserError(
                f"{path}: has the column {' and '.join(sorted(sampled))} of a sheet of drawn rows, and lacks"
                f" {' and '.join(sorted(set(SAMPLED) - sampled))}"
            )
        problems, strangers, lines = [], [], 0
        for line, cells in csv_rows(path, table):  # spreadsheets leave empty cells at the end out
            if any(cells[width:]):
                raise UserError(f"{path}, line {line:,}: has {len(cells)} cells, and the header {width}")
            if not any(cells):
                continue
            row = dict(zip(header, map(str.strip, cells + [""] * width)))
            lines += 1
            key = self.key_of_id.get(row[ID][1:])
            if key is None:
                strangers += [line] if row[DECISION] or row[ID] else []
                continue
            try:
                self._add(f"{path}, line {line:,}", key, row)
            except ValueError as error:
                problems.append(f"line {line:,}: {error}")
        if strangers:
            raise UserError(
                f"{path}: {len(strangers):,} of its {lines:,} lines (the first is line {strangers[0]:,}) are"
                f" about texts that {self.coded.path} does not have, or has with other codes, or that are"
                " decided there: it is a sheet of another coded file, or one that was applied already. Apply"
                " it to the file that it was made of"
            )
        if problems:
            rest = [f"and {len(problems) - MAX_LISTED:,} lines more"] if len(problems) > MAX_LISTED else []
            raise UserError("\n  ".join([f"{path}:", *problems[:MAX_LISTED], *rest]))

    def _add(self, where: str, key: Key, row: dict[str, str]) -> None:
        """A line of a sheet. Raises ValueError."""
        text = self.coded.texts[key]
        shown = key_of(unescape(row.get("text", text.text)), text.language)
        if shown != key and shown in self.coded.texts and not _NUMBER.fullmatch(text.text.strip()):
            raise ValueError(
                f"the id is that of {text.text!r}, and the text is {row['text']!r}: was the sheet sorted"
                " without all its columns?"
            )
        is_drawn = row[ID].startswith(DRAWN)
        if is_drawn and SAMPLED[0] in row:
            numbers = [row[name].removesuffix(".0") for name in SAMPLED]
            for number in numbers:
                if not number.isdecimal() or not int(number):
                    raise ValueError(
                        f"{number!r} is no whole number, as the columns {', '.join(SAMPLED)} have them"
                    )
            quarter, rows, times = map(int, numbers)
            self.sample.setdefault(key, Drawn(text, times, quarter, rows))
        if not row[DECISION]:
            self.undecided += 1
            return
        codes = decided(row[DECISION], text, self.codes, len(self.coded.codes))
        before = self.by_text.get(key)
        if before is not None and before.codes != codes:
            self.notes.append(f"{where}: decides otherwise than {before.where}; the later one counts")
        self.by_text[key] = Decision(codes, where)
        if not is_drawn and codes is not None:
            self.chosen.add(key)
