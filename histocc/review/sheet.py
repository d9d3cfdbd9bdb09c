"""The texts of a table, and sheets of them for a person: CSV files for spreadsheets, with the decisions that
the person writes there.
"""

import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from histocc.data.config import column_flags, column_of_languages
from histocc.data.records import DECIDED, MODEL, Table, is_name
from histocc.data.rows import MISSING_WORDS, NUMBER, code_of_cell, escape_formula, language_name, unescape
from histocc.data.tables import column_problems, table_format, table_rows, unique_names
from histocc.formatter import (
    CLASSES,
    NUMBERS,
    OF_DRAWS,
    OF_LEVEL,
    BlockyFormatter,
    coded_columns,
    hisco_key,
    make_formatter,
    split_codes,
)
from histocc.runtime.errors import UserError, raise_if_any
from histocc.text import UNKNOWN_LANGUAGE, text_key

OFFERED = 5  # codes shown for a text
CONFIDENCE = ("conf", "needs_review")
MAX_LISTED = 20  # lines of a sheet that a message names
DECISION, ID = "decision", "id"
UNNAMED = "not known"  # the language of texts without one, in messages
OF_KNOWN_FILE = "known"  # who has decided, for another file that does not say it
UNDO = "undo"  # a decision that withdraws the earlier one on its text
ID_DIGITS = 16
# The prefix of an id says how the text came into the sheet. s3: three of its rows were drawn.
CHOSEN, DRAWN = "t", "s"
Pair = tuple[str, str]  # a text and its language, as `pair_of` gives them


def pair_of(text: str, language: str) -> Pair:
    """Return a key, equal for texts of one language that differ only in case and blanks."""
    return text_key(text), language_name(language) or UNKNOWN_LANGUAGE


@dataclass
class CodedText:
    """A text with the model's answer."""

    text: str  # as in its first row
    language: str
    rows: float = 0
    doubt: float = 0.0  # the expected number of wrong rows
    codes: list[str] = field(default_factory=list)  # to choose from
    probs: list[str] = field(default_factory=list)
    answer: list[str] = field(default_factory=list)  # the codes of its rows
    decided: str = ""  # by whom
    is_given: bool = False  # whether a person has given the codes of a row
    similar: list[tuple[str, str]] = field(default_factory=list)  # (known text, codes), of predict --explain
    shown: list[str] = field(default_factory=list)  # further cells of its first row, for a person
    varies: bool = False  # whether they differ in other rows

    @property
    def pair(self) -> Pair:
        return pair_of(self.text, self.language)

    @property
    def id(self) -> str:
        """A hash of the text and its language. An empty language stays empty, while in `pair` it is unk."""
        return self._hash()

    @property
    def sheet_id(self) -> str:
        """A hash of the text, its language and the codes that a sheet offers as 1 … 5."""
        return self._hash(*self.codes)

    def _hash(self, *codes: str) -> str:
        content = "\0".join([self.pair[0], language_name(self.language), *codes])
        return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class CodedFile:
    """All texts except blank ones of a file that `histocc predict` has written, or of another table. Raises
    UserError if it is not coded or lacks a column.

    language_column: None means lang, if there is one. asked: the flags of review, if they describe this file.
    Without them, a row that cannot be read is an error. system: the name of the code columns of a table
    without a model's answers. None: hisco if review has written them, else refuse such a table. key: the
    codes that it may hold. The codes of asked.target_cols, if given, count as decided.

    header: all columns, also added ones. Attributes for columns hold places. unfitted: why conf does not
    predict accuracy, "" if it does, None without conf. alternatives: whether codes after the first are other
    possible answers (topk and full).
    """

    def __init__(
        self,
        path: str,
        input_cols: Sequence[str] = ("occ1",),
        language_column: str | None = None,
        asked: Any = None,
        system: str | None = None,
        key: list[str] | None = None,
    ):
        wanted, weight_column = [*input_cols, *filter(None, [language_column])], asked and asked.weight_col
        lists = (getattr(asked, name, None) or [] for name in ("show", "fill_down", "target_cols"))
        show, fill_down, given = lists
        reading: tuple[Any, ...] = asked.how(wanted) if asked else (None, None, False, None, wanted)
        self.path, self.key, header = path, key or [], table_format(path, *reading).names
        language = (asked and asked.language) or ""
        language_column = column_of_languages(language, language_column, input_cols, header)
        wanted[len(input_cols) :] = filter(None, [language_column])
        first, places, new, written = self._columns(header, asked, system, given)
        columns = list(dict.fromkeys([*wanted, *filter(None, [weight_column]), *show, *fill_down, *given]))
        raise_if_any(column_problems(path, header, columns, column_flags(asked) if asked else None))
        if both := [name for name in input_cols if name in places]:
            what = f"column {both[0]} has the texts, but review writes a column of this name"
            raise UserError(f"{path}: {what}: choose another column, or rename it")
        self.header, self.formatter = header + new, formatter_of(self.system)
        self.added = [MODEL if name == DECIDED and self.is_coded else "" for name in new]
        self.decided = self.header.index(DECIDED, first)
        self.known: dict[Pair, CodedText] = {}
        self.are_decided = bool(given)
        self.table = Table(
            *(path, reading, input_cols, (), None),
            language=language,
            language_col=language_column,
            weight_col=weight_column,
            ditto=asked and asked.ditto,
            fill_down=fill_down,
        )
        self.show = list(map(self.table.names.index, show))
        self._find_places(places, written)
        self.table.codes = [place for place in self.codes if place < len(header)]
        if DECIDED in new:  # such a column is the user's
            self.table.decided = None
        if not self.is_coded:
            self.table.read_code = functools.partial(code_of_cell, formatter=self.formatter, key={*self.key})
        self.types = self.table.format.types_but(places)
        self._read_texts(places.get("conf_fitted"))
        if asked is None:
            self.table.raise_faults()

    def _columns(
        self, header: list[str], asked: Any, system: str | None, given: list[str]
    ) -> tuple[int, dict[str, int], list[str], list[str]]:
        """Return (place of the first column of codes, places of all columns of answers by name, names of the
        new ones, code columns of a table without a model's answers). given: target_cols. Raises UserError.
        """
        missing = [name for name in ("prob_1", "conf", "needs_review") if header.count(name) != 1]
        first = header.index("prob_1") - 1 if not missing else -1
        if first > 0 and header[first] == "title_1" and header[first - 1].endswith("_1"):
            first -= 1
        self.is_coded = first >= 0 and header[first].endswith("_1")
        if self.is_coded:
            self.system = header[first].removesuffix("_1")
            # predict's columns are adjacent. Columns of the same names elsewhere are the user's
            places = {header[i]: i for i in coded_columns(header, first)}
            return first, places, [] if DECIDED in header[first:] else [DECIDED], []
        if system is None and {"hisco_1", DECIDED} <= {*header}:  # written by review
            system, self.key = "hisco", [*hisco_key()]
        if system is None:
            lacks = (missing or ["of codes before prob_1"])[0]
            raise UserError(
                f"{self.path}: was not coded by histocc predict: it has no column {lacks!r}, only"
                f" {', '.join(header)}. To review it anyway, add --key hisco, or --key KEY.csv"
            )
        self.system, written = system, [f"{system}_{i}" for i in range(1, OFFERED + 1)]
        written = [*given, *written[len(given) :]]
        before = header[: header.index(written[0])] if written[0] in header else header
        has_titles = system == "hisco" and "title_1" not in before  # an earlier one is the user's
        beside = [*["title"] * has_titles, *(getattr(asked, "classes", None) or [])]
        names = [each for i, code in enumerate(written, 1) for each in (code, *(f"{x}_{i}" for x in beside))]
        filled = CONFIDENCE * bool(asked and asked.fill)
        names += [*filled, DECIDED]
        filling = filled or CONFIDENCE * bool(asked and asked.action == "serve")
        if own := [name for name in filling if name in before]:  # not from an earlier --fill
            what = f"guesses fill columns {', '.join(own)} of the coded table (--fill)"
            raise UserError(f"{self.path}: {what}: rename yours")
        by_name = unique_names(header)
        new = [name for name in names if name not in by_name]
        return 0, {name: [*by_name, *new].index(name) for name in names}, new, written

    def _find_places(self, places: dict[str, int], written: list[str]) -> None:
        """Find the columns of each kind in what `_columns` returns."""

        def numbered(*names: str) -> list[tuple[int, ...]]:
            """Return the places of name_1, name_2 … up to the last number that all names have."""
            columns = ([f"{name}_{i}" for name in names] for i in range(1, len(places)))
            return [tuple(places[name] for name in each) for each in columns if {*each} <= places.keys()]

        # a code column written by a model is followed by its probability
        of_codes = numbered(self.system, "prob") if self.is_coded else [(places[name],) for name in written]
        self.codes = [each[0] for each in of_codes]
        self.probs = [each[-1] for each in of_codes if self.is_coded]
        beside = [*OF_LEVEL] if {*OF_LEVEL} <= {*places} else []
        if "draw_1" in places:
            beside += filter(re.compile(OF_DRAWS).fullmatch, places)
        self.beside = [places[name] for name in beside]  # columns of predict --level and --draws
        self.words = [place for (place,) in numbered("desc")]
        self.classes = {name: [place for (place,) in numbered(name)] for name in ("title", *CLASSES)}
        self.similar = numbered("similar_text", "similar_codes")
        self.choices = numbered("choice", "choice_prob")  # of predict --choices
        self.choice_words = numbered("choice", "choice_desc")
        self.conf, self.review = places.get("conf"), places.get("needs_review")
        self.source = places.get("source")
        self.numbers = {*filter(re.compile(NUMBERS).fullmatch, places)}  # if the table has numbers

    def _read_texts(self, fitted: int | None) -> None:
        """Read the texts of all rows. fitted: place of conf_fitted, or None. Raises UserError."""
        self.texts: dict[Pair, CodedText] = {}
        self.descriptions: dict[str, str] = {}
        marks: set[str | None] = set()
        self.rows: float = 0
        several = same = 0
        for record in self.table:
            row, codes = [*record.cells, *self.added], record.codes
            decider, times = record.decider, record.weight
            self.rows += times
            marks.add(None if fitted is None else row[fitted])
            probs, pair = [row[i] for i in self.probs if row[i]], pair_of(record.text, record.language)
            if len(codes) > 1 and not decider:
                several, same = several + 1, same + (self.conf is not None and row[self.conf] in probs[:1])
            if not pair[0]:
                continue
            text = self.texts.get(pair)
            if text is None:
                similar = [(row[i], row[j]) for i, j in self.similar if row[i]]
                offered = codes
                self.descriptions |= {code: row[i] for code, i in zip(codes, self.words) if row[i]}
                if not decider and (choices := {row[i]: row[j] for i, j in self.choices if row[i]}):
                    self.descriptions |= {row[i]: row[j] for i, j in self.choice_words if row[j]}
                    choices |= {code: "" for code in codes if code not in choices}
                    offered, probs = list(choices), list(choices.values())
                for prob in probs:
                    confidence(prob, self.path)
                text = CodedText(record.text, record.language, codes=offered, probs=probs)
                text.answer, text.similar = codes, similar
                text.shown = [row[i] for i in self.show]
                self.texts[pair] = text
            text.rows += times
            text.varies |= text.shown != [row[i] for i in self.show]
            if record.is_ditto and decider:  # somebody has decided only on this row
                continue
            if self.are_decided and codes and not record.is_guess:
                decider = decider or OF_KNOWN_FILE
            text.is_given |= bool(decider or codes and not (self.is_coded or record.is_guess))
            is_right = confidence(row[self.conf], self.path) if codes and self.conf is not None else 0.0
            text.doubt += times * (1 - is_right)
            if decider:
                text.decided, text.codes, text.answer, text.doubt = decider, codes, codes, 0.0
        self.alternatives = 0 < several == same
        unfitted = f"conf is not {'known to be ' if fitted is None else ''}fitted"
        self.unfitted = None if self.conf is None else "" if marks == {"1"} else unfitted

    def know(self, other: "CodedFile") -> None:
        """Count the texts that are decided in another file. A text is decided there if a person is named or,
        in a table that no model has coded, if it has codes. Those that this file lacks are added without
        rows. A text without a language counts for all languages.
        """
        languages: dict[str, list[str]] = {}  # languages of each text of this file
        for words, language in self.texts:
            languages.setdefault(words, []).append(language)
        # a text with a language takes precedence
        for (words, language), text in sorted(other.texts.items(), key=lambda x: x[0][1] == UNKNOWN_LANGUAGE):
            if not text.is_given:
                continue
            for own in languages.get(words, [language]):
                if own == language or UNKNOWN_LANGUAGE in (own, language):
                    each = self.texts.setdefault((words, own), CodedText(text.text, text.language))
                    if not each.decided:
                        # sheets offer the same codes as without this file
                        each.decided, each.answer = text.decided or OF_KNOWN_FILE, text.answer
                        each.doubt = 0.0
                        self.known[words, own] = each

    @property
    def unread(self) -> list[str]:
        """Return a line on the rows that cannot be read, if there are any."""
        what = f"{self.path}: rows left out, as they cannot be read: {len(self.table.faults):,}; the first is"
        return [f"{what} line {line:,}: {why}" for line, _, why in self.table.faults[:1]]

    def answer(self, codes: list[str], decider: str) -> list[str]:
        """Return the codes of a row's answer. decider: "" for the model."""
        return codes[:1] if self.alternatives and not decider else codes


def confidence(cell: str, path: str = "") -> float:
    """Return the model's confidence, 0 … 1, or 0 for an empty cell. A decimal comma is accepted. Raises
    UserError for words, and for numbers above 1, which spreadsheets make when they lose the decimal point.
    """
    try:
        found = float(cell.replace(",", ".").strip() or 0)
    except ValueError:
        found = 0.0 if cell.strip().casefold() in MISSING_WORDS else math.inf
    if found > 1:
        what = f"{path}: {cell!r} is not a probability (columns conf, prob_1 …)"
        raise UserError(f"{what}: did a spreadsheet change it? Use the file from before")
    return max(found, 0.0) if math.isfinite(found) else 0.0


# ---- sheets


def most_wrong_first(texts: Iterable[CodedText]) -> list[CodedText]:
    """Return the undecided texts, most expected mistakes first."""
    undecided = [text for text in texts if not text.decided]
    return sorted(undecided, key=lambda text: (-text.doubt, -text.rows, text.text))


def sheet_rows(
    texts: Iterable[CodedText], titles: dict[str, str], drawn: dict[str, int] | None = None
) -> list[list[str]]:
    """Return the rows of a sheet, names first. titles: by code. drawn: number of draws, by the text's id."""
    of_codes = [f"{name}_{i}" for i in range(1, OFFERED + 1) for name in ("code", "title", "prob")]
    rows = [["text", "language", "rows", *of_codes, DECISION, ID]]
    for text in texts:
        line = [text.text, text.language, f"{text.rows:.10g}"]
        for i in range(OFFERED):
            code, prob = (values[i] if i < len(values) else "" for values in (text.codes, text.probs))
            line += [code, titles.get(code, ""), prob]
        line += ["", (f"{DRAWN}{drawn[text.id]}-" if drawn else f"{CHOSEN}-") + text.sheet_id]
        rows.append([escape_formula(cell) for cell in line])
    return rows


@dataclass(frozen=True)
class Decision:
    codes: tuple[str, ...] | None  # the right codes, None if the text was skipped
    place: str  # file and line
    unsure: bool = False
    note: str = ""
    by: str = ""  # who decided, if the sheet says it


def cell_of(codes: tuple[str, ...] | None) -> str:
    """Return a decision in the form of a sheet, for `Codes.decision`."""
    if not codes:
        return "skip" if codes is None else "none"
    words = re.compile(f"[1-{OFFERED}]|none|skip|NA|{UNDO}", re.IGNORECASE)
    return " & ".join(f"code {code}" if words.fullmatch(code) else code for code in codes)


def formatter_of(system: str) -> BlockyFormatter:
    """Return the formatter that reads the codes of a system: hisco, occ1950 or another."""
    kind = system.lower() if system.lower() in ("hisco", "occ1950") else "gpf"
    return make_formatter(kind, [f"{system}_1"])


class Codes:
    """The codes of a key, as people may write them. words: code → title."""

    def __init__(self, codes: Iterable[str], system: str, words: dict[str, str]):
        self.codes, self.formatter, self.words = set(codes), formatter_of(system), words
        self.of_title: dict[str, list[str]] = {}
        for code in sorted(code for code in self.codes if words.get(code, "").strip()):
            self.of_title.setdefault(text_key(words[code]), []).append(code)

    def decision(self, cell: str, text: CodedText, most: int) -> tuple[str, ...] | None:
        """Return the codes that a person has written: 1 … 5, a code in any form that training data may have,
        a title, or several of these joined with &. () is no code, None is skip. most: most codes of a row.
        Raises ValueError.
        """
        if cell.strip().lower() in ("skip", "none"):
            return None if cell.strip().lower() == "skip" else ()
        codes: dict[str, None] = {}
        for part in [cell.strip()] if text_key(cell) in self.of_title else split_codes(cell, self.codes):
            place, named = part.removesuffix(".0"), re.fullmatch(r"(?i)code\s+(.+)", part)
            if re.fullmatch(f"[1-{OFFERED}]", place):
                if int(place) > len(text.codes):
                    has = f"this text has no code number {place}; it has {len(text.codes)}"
                    raise ValueError(f"{has}: write none, skip or a code of the key")
                part = text.codes[int(place) - 1]
            code = named[1] if named and part not in self.codes else unescape(part)
            if code not in self.codes:
                code = code_of_cell(code, self.formatter, self.codes)
            if code not in self.codes:
                titled = self.of_title.get(text_key(unescape(part)))
                if not titled:
                    raise ValueError(f"{part!r} is no code or title of the key; put & between several")
                if len(titled) > 1:
                    raise ValueError(f"{part!r} is the title of {' and '.join(titled)}: write the code")
                code = titled[0]
            codes[code] = None
        if len(codes) > most:
            what = f"{len(codes)} codes, but the file has room for {most}"
            raise ValueError(f"{what}: code it with predict --k {len(codes)}, or write the others as a note")
        return tuple(codes)


def read_sheet(
    path: str, columns: list[str], take: Callable[[str, dict[str, str]], None], sheet: str | None = None
) -> Sequence[str]:
    """Pass each row of a sheet to `take`, with its place, and return notes on the sheet of a workbook. Raises
    one UserError for all its ValueErrors. Cells with NA, which R writes for empty cells, count as empty.
    """
    try:
        table = table_format(path, sheet=sheet, texts=columns)
    except UserError:  # any code page: the cells that matter are ASCII in all of them
        table = table_format(path, encoding="latin-1", sheet=sheet, texts=columns)
    if wrong := column_problems(path, table.names, columns):
        what = f"{path} is neither a sheet of review make nor a file of decisions: it needs all of"
        raise UserError("\n  ".join([*wrong[:3], f"{what} {', '.join(columns)}"]))
    problems = []
    for line, cells in table_rows(path, table):  # spreadsheets omit empty cells at the end
        stripped = ("" if cell.strip() == "NA" else cell.strip() for cell in cells + [""] * len(table.names))
        row = dict(zip(table.names, stripped))
        if row[DECISION] or row[ID]:
            try:
                take(f"{path}, line {line:,}", row)
            except ValueError as error:
                problems.append(f"line {line:,}: {error}")
    raise_if_any(problems, path, MAX_LISTED)
    return table.notes if table.binary else ()


def answers_of(path: str, codes: Codes) -> dict[Pair, tuple[CodedText, tuple[str, ...]]]:
    """Return the last decision on each text in a sheet or a file of decisions. Raises UserError."""
    found: dict[Pair, tuple[CodedText, tuple[str, ...]]] = {}

    def take(_: str, row: dict[str, str]) -> None:
        offered = [code for i in range(1, OFFERED + 1) if (code := row.get(f"code_{i}"))]
        text = CodedText(unescape(row["text"]), unescape(row["language"]), codes=offered)
        answer = None if row[DECISION] in ("", UNDO) else codes.decision(row[DECISION], text, OFFERED)
        if row[DECISION]:
            found.pop(text.pair, None)
        if answer is not None:
            found[text.pair] = text, answer

    read_sheet(path, ["text", "language", DECISION, ID], take)
    return found


class Sheets:
    """The decisions of one or several sheets. Raises UserError with the lines that cannot be used. sheet: the
    one to read of workbooks.
    """

    def __init__(self, paths: list[str], coded: CodedFile, codes: Codes, sheet: str | None = None):
        self.coded, self.codes = coded, codes
        self.pair_of_id = {text.sheet_id: pair for pair, text in coded.texts.items()}
        self.pair_of_id |= {text.id: pair for pair, text in coded.texts.items()}
        self.words = {words for words, _ in coded.texts}
        self.by_text: dict[Pair, Decision] = {}  # the last one of each text
        self.drawn: dict[Pair, int] = {}  # number of times that a text was drawn
        self.chosen: set[Pair] = set()  # texts decided because they were chosen, not drawn
        self.notes: list[str] = []  # for the user
        self.undecided = 0  # lines without a decision
        self.unused: list[str] = []  # for the user: decisions on missing texts
        for path in paths:
            self.gone: dict[str, str] = {}  # missing texts of this sheet, by id, "" without a decision
            self.spoken: set[str] = set()  # languages of texts that exist in another language
            self.found = 0  # lines of this sheet whose texts exist
            notes = read_sheet(path, [DECISION, ID], self._add, sheet)
            self.notes += [f"{path}: {note}" for note in notes]
            what = f"whose texts are missing from {coded.path}, or were offered other codes:"
            if self.spoken and not self.found:
                then = " and ".join(sorted(self.spoken))
                what = f"{path}: these decisions were made with language {then}, not with the present one"
                flags = "no --language and --language-col" if then == UNNAMED else f"--language {then}"
                raise UserError(f"{what}: choose {then} (in commands: {flags})")
            if self.gone and not self.found:
                what += " name its own file, or other --decisions, and the same text columns"
                raise UserError(f"{path}: has only rows {what} (--input-col) as for the sheet")
            if unused := [*filter(None, self.gone.values())]:
                what += f" {'; '.join(unused[:3])}{'; …' * (len(unused) > 3)}"
                self.unused.append(f"{path}: decisions that are not used ({len(unused):,}), {what}")

    def _add(self, place: str, row: dict[str, str]) -> None:
        """Add a row of a sheet. Raises ValueError."""
        pair = self.pair_of_id.get(row[ID][-ID_DIGITS:])
        if pair is None:
            shown = f"{place.rpartition(', ')[2]}: {unescape(row.get('text', ''))!r:.60}"
            self.gone[row[ID]] = shown * (row[DECISION] not in ("", UNDO))
            words, language = (unescape(row.get(name, "")) for name in ("text", "language"))
            if text_key(words) in self.words and pair_of(words, language) not in self.coded.texts:
                self.spoken.add(language or UNNAMED)
            return
        self.found += 1
        text = self.coded.texts[pair]
        shown = pair_of(unescape(row.get("text", text.text)), text.language)
        if shown != pair and shown in self.coded.texts and not NUMBER.fullmatch(text.text.strip()):
            what = f"the id belongs to {text.text!r}, but the text is {row['text']!r}"
            raise ValueError(f"{what}: was the sheet sorted without all its columns?")
        times = re.match(rf"{DRAWN}(\d+)-", row[ID])
        if times:
            self.drawn.setdefault(pair, int(times[1]))
        if not row[DECISION]:
            self.undecided += 1
            return
        if row[DECISION] == UNDO:
            self.by_text.pop(pair, None)
            self.chosen.discard(pair)
            return
        offered = text if row[ID].endswith(text.sheet_id) else replace(text, codes=[])
        codes = self.codes.decision(row[DECISION], offered, len(self.coded.codes))
        before = self.by_text.get(pair)
        note, by = (unescape(row.get(name, "")) for name in ("note", "by"))
        in_file = place.rpartition(" ")[0]
        is_own = before and before.by == by != "" and before.place.startswith(in_file)
        if before and before.codes != codes and not is_own:  # people may replace their own decisions
            self.notes.append(f"{place}: differs from {before.place}; the later one counts")
        self.by_text[pair] = Decision(codes, place, bool(row.get("unsure")), note, by * is_name(by))
        if not times and codes is not None:
            self.chosen.add(pair)
