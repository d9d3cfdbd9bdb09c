"""Sheets: texts for a person, as CSV that spreadsheets open as it is, and what the person has decided."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from histocc.data.tables import column_problems, read_chunks, read_header
from histocc.predict.output import csv_text
from histocc.review.coded import CodedFile, CodedText, Key, key_of
from histocc.runtime.errors import UserError

MOST_CODES = 5  # shown of a text
DECISION, ID = "decision", "id"
SAMPLED = ("quarter", "quarter_rows", "drawn")
MOST_LISTED = 20  # lines of a sheet that a message names
_RISKY = ("=", "+", "-", "@", "\t", "\r", "'")
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")


def harmless(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula: an apostrophe in front of what could be one. Numbers
    stay.
    """
    return "'" + cell if cell.startswith(_RISKY) and not _NUMBER.fullmatch(cell) else cell


def restored(cell: str) -> str:
    """What `harmless` was given."""
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
    shown = range(1, min(codes, MOST_CODES) + 1)
    of_code = ["code", "words", "prob"] if words else ["code", "prob"]
    header = ["text", "language", "rows", *(f"{name}_{i}" for i in shown for name in of_code), DECISION, ID]
    rows = [header + (list(SAMPLED) if sample else [])]
    for drawn in texts:
        text, cells = drawn.text, []
        for i in range(len(shown)):
            code, prob = (text.codes[i], text.probs[i]) if i < len(text.codes) else ("", "")
            cells += [code, *([words.get(code, "")] if words else []), shorter(prob)]
        line = [text.text, text.language, str(text.rows), *cells, "", text.id]
        line += [str(drawn.quarter), str(drawn.quarter_rows), str(drawn.times)] if sample else []
        rows.append([harmless(cell) for cell in line])
    return ("\ufeff".encode() if bom else b"") + csv_text(rows)


def shorter(prob: str) -> str:
    try:
        return f"{float(prob):.3f}"
    except ValueError:
        return prob


@dataclass(frozen=True)
class Decision:
    """codes: those that are right, none for a text that gets none; None where the person has skipped it."""

    codes: tuple[str, ...] | None
    sheet: str
    line: int
    drawn: Drawn

    @property
    def where(self) -> str:
        return f"{self.sheet}, line {self.line:,}"


class Codes:
    """The codes that a person may write. Raises CodeError, a ValueError, for others."""

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
        number = written[:-2] if written.endswith(".0") else written
        meant = self.short.get(number.lstrip("0"), [])
        if len(meant) != 1:
            raise ValueError(f"{written!r} is no code of the key")
        return meant[0]


def decided(cell: str, text: CodedText, codes: Codes, room: int) -> tuple[str, ...] | None:
    """What a person has written: 1 … 5, a code, or several of these; none; skip. room: codes of a row at
    most. Raises ValueError.
    """
    words = cell.lower().split()
    if words == ["skip"]:
        return None
    if words == ["none"]:
        return ()
    found: list[str] = []
    parts = re.sub(r"(?i)\bcode\s+", "code:", cell)
    for part in re.split(r"[&;,/\s]+", parts.strip("&;,/ \t")):
        place = part.removesuffix(".0")
        if part.lower().startswith("code:"):
            code = codes.read(part[5:])
        elif place.isdecimal() and len(place) == 1 and 1 <= int(place) <= MOST_CODES:
            if int(place) > len(text.codes):
                raise ValueError(f"there is no code {place} for this text; it has {len(text.codes)}")
            code = codes.read(text.codes[int(place) - 1])
        else:
            code = codes.read(restored(part))
        found.append(code)
    found = list(dict.fromkeys(found))
    if len(found) > room:
        raise ValueError(f"{len(found)} codes, and the file has room for {room}")
    return tuple(found)


class Sheets:
    """The decisions of one sheet or several. by_text: the last one of each text; sample: the texts
    that were drawn; notes: what to tell; undecided: lines without a decision. Raises UserError with all lines
    that cannot be used.
    """

    def __init__(self, paths: list[str], coded: CodedFile, codes: Codes, delimiter: str | None = None):
        self.coded, self.codes = coded, codes
        self.key_of_id = {text.id: key for key, text in coded.texts.items() if not text.decided}
        self.by_text: dict[Key, Decision] = {}
        self.notes: list[str] = []
        self.sample: dict[Key, Drawn] = {}
        self.undecided = 0
        for path in paths:
            self._read(path, delimiter)

    def _read(self, path: str, delimiter: str | None) -> None:
        header = read_header(path, delimiter)[0]
        if wrong := column_problems(path, header, [DECISION, ID]):
            raise UserError(
                "\n  ".join(wrong)
                + f"\n  {path} is no sheet of python -m histocc.review make, or not with all"
                " its columns"
            )
        names = [DECISION, ID, *(name for name in ("text", *SAMPLED) if name in header)]
        problems, strangers, lines = [], [], 0
        for chunk in read_chunks(path, names, delimiter):
            problems += [f"line {line:,}: cannot be read ({reason})" for line, _, reason in chunk.faults]
            for line, *cells in zip(chunk.lines.tolist(), *chunk.columns):
                row = {name: cell.strip() for name, cell in zip(names, cells)}
                lines += 1
                key = self.key_of_id.get(row[ID])
                if key is None:
                    strangers += [line] if row[DECISION] or row[ID] else []
                    continue
                try:
                    self._take(path, line, key, row)
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
            rest = [f"and {len(problems) - MOST_LISTED:,} lines more"] if len(problems) > MOST_LISTED else []
            raise UserError("\n  ".join([f"{path}:", *problems[:MOST_LISTED], *rest]))

    def _take(self, path: str, line: int, key: Key, row: dict[str, str]) -> None:
        """Raises ValueError."""
        text = self.coded.texts[key]
        shown = key_of(restored(row.get("text", text.text)), text.language)
        if shown != key and shown in self.coded.texts:
            raise ValueError(
                f"the id is that of {text.text!r}, and the text is {row['text']!r}: was the sheet sorted"
                " without all its columns?"
            )
        quarter, rows, times = (number(row.get(name, "")) for name in SAMPLED)
        drawn = Drawn(text, times, quarter, rows)
        if times:
            self.sample.setdefault(key, drawn)
        if not row[DECISION]:
            self.undecided += 1
            return
        room = len(self.coded.layout.codes)
        codes = decided(row[DECISION], text, self.codes, room)
        new = Decision(codes, path, line, drawn)
        before = self.by_text.get(key)
        if before is not None and before.codes != codes:
            self.notes.append(f"{new.where}: decides otherwise than {before.where}; the later one counts")
        if before is not None and (before.drawn.times == 0) != (times == 0):
            new = Decision(codes, path, line, Drawn(text))  # chosen as well as drawn
        self.by_text[key] = new


def number(cell: str) -> int:
    """A whole number of a sheet, 0 for an empty cell. Raises ValueError."""
    found = cell.removesuffix(".0")
    if found and not found.isdecimal():
        raise ValueError(f"{cell!r} is not a whole number, as the columns {', '.join(SAMPLED)} have them")
    return int(found or 0)
