"""Sheets: texts for a person, as CSV that spreadsheets open as it is, and what the person has decided."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from histocc.data.tables import column_problems, csv_rows, table_format
from histocc.predict.output import csv_text
from histocc.review.coded import CodedFile, CodedText, Key, key_of
from histocc.runtime.errors import UserError

MOST_CODES = 5  # shown of a text
DECISION, ID = "decision", "id"
CHOSEN, DRAWN = "t", "s"  # what the id of a line begins with: how its text came into the sheet
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
            code, prob = (each[i] if i < len(each) else "" for each in (text.codes, text.probs))
            cells += [code, *([words.get(code, "")] if words else []), shorter(prob)]
        line = [text.text, text.language, str(text.rows), *cells, "", (DRAWN if sample else CHOSEN) + text.id]
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

    @property
    def where(self) -> str:
        return f"{self.sheet}, line {self.line:,}"


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
    for part in parts_of(cell, codes):
        place, named = part.removesuffix(".0"), re.fullmatch(r"(?i)code\s+(.+)", part)
        if named:
            code = codes.read(named[1].strip())
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


def parts_of(cell: str, codes: Codes) -> list[str]:
    """What a person has written, one by one: what stands between &, and, where that is no code of the key,
    between other separators.
    """
    parts: list[str] = []
    for part in map(str.strip, cell.split("&")):
        words = re.sub(r"(?i)\bcode\s+", "code\0", part)  # stays together
        whole = part in codes.codes or restored(part) in codes.codes or words.startswith("code\0")
        parts += (
            [part] if whole else [each.replace("\0", " ") for each in re.split(r"[;,/\s]+", words) if each]
        )
    return parts or [""]


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
        header = table_format(path, delimiter).names
        if wrong := column_problems(path, header, [DECISION, ID]):
            raise UserError(
                "\n  ".join(wrong)
                + f"\n  {path} is no sheet of python -m histocc.review make, or not with all"
                " its columns"
            )
        if 0 < len(sampled := set(SAMPLED) & set(header)) < len(SAMPLED):
            raise UserError(
                f"{path}: has the column {' and '.join(sorted(sampled))} of a sheet of drawn rows, and lacks"
                f" {' and '.join(sorted(set(SAMPLED) - sampled))}"
            )
        problems, strangers, lines = [], [], 0
        for line, cells in sheet_rows(path, delimiter):
            row = dict(zip(header, map(str.strip, cells)))
            lines += 1
            key = self.key_of_id.get(row[ID][1:])
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
        if shown != key and shown in self.coded.texts and not _NUMBER.fullmatch(text.text.strip()):
            raise ValueError(
                f"the id is that of {text.text!r}, and the text is {row['text']!r}: was the sheet sorted"
                " without all its columns?"
            )
        drawn = row[ID].startswith(DRAWN)
        if drawn and SAMPLED[0] in row:
            quarter, rows, times = (number(row[name]) for name in SAMPLED)
            self.sample.setdefault(key, Drawn(text, times, quarter, rows))
        if not row[DECISION]:
            self.undecided += 1
            return
        codes = decided(row[DECISION], text, self.codes, len(self.coded.layout.codes))
        new, before = Decision(codes, path, line), self.by_text.get(key)
        if before is not None and before.codes != codes:
            self.notes.append(f"{new.where}: decides otherwise than {before.where}; the later one counts")
        self.by_text[key] = new
        if not drawn and codes is not None:
            self.chosen.add(key)


def sheet_rows(path: str, delimiter: str | None) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each row below the header; spreadsheets leave empty cells at the end out. Raises
    UserError.
    """
    table = table_format(path, delimiter)
    width = len(table.names)
    for line, row in csv_rows(path, table):
        if any(row[width:]):
            raise UserError(f"{path}, line {line:,}: has {len(row)} cells, and the header {width}")
        if any(row):
            yield line, row[:width] + [""] * (width - len(row))


def number(cell: str) -> int:
    """A whole number above 0 of a sheet. Raises ValueError."""
    found = cell.removesuffix(".0")
    if not found.isdecimal() or not int(found):
        raise ValueError(f"{cell!r} is no whole number, as the columns {', '.join(SAMPLED)} have them")
    return int(found)
