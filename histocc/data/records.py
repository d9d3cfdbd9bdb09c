"""The rows of a table of descriptions, by one set of rules for all commands: its texts and those that only
repeat the one above, languages, codes, weights, and who has decided.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from histocc.data.rows import MISSING_WORDS
from histocc.data.tables import Chunk, read_chunks, table_format
from histocc.runtime.errors import UserError
from histocc.text import AS_IS, UNKNOWN_LANGUAGE, cleaner, is_composed, join_columns, strip

DECIDED = "decided_by"  # column of a reviewed file that says who has decided on a row
MODEL = "model"  # its value if nobody has decided
GUESS = "guess"  # or if review has learned the codes from decisions on other rows
DITTOS = frozenset(("do", "do.", "dto", "dto.", "ditto", "ditto.", "dito", "dito.", "idem", "idem.", "id."))
DITTOS |= {"ib.", "ibid.", '"', '""', "''", ",,", "„", "”", "″", "〃", '-"-'}
MAX_WEIGHT = 1_000_000
_ODD = re.compile("[\0\ue000-\ue004]")  # ends of texts in hashes, and marks of the model's inputs


def nothing(*_) -> None:
    """Do nothing: the default for callbacks that report or check."""


def fill_dittos(texts: list[str], above: str, fill: bool) -> list[int]:
    """Return which texts only repeat the one above; with `fill` they become it, the first of them `above`."""
    dittos = [i for i, text in enumerate(texts) if len(text) < 8 and text.strip().casefold() in DITTOS]
    for i in dittos if fill else ():
        texts[i] = texts[i - 1] if i else above
    return dittos


def weight_of(cell: str) -> int:
    """Return how often a row counts by its cell; 0 if that is no whole number from 1 to MAX_WEIGHT."""
    whole = re.fullmatch(r"\s*(\d{1,9})([.,](?!000\s*$)0*)?\s*", cell)  # 1,000 may be 1 or a thousand
    return int(whole[1]) if whole and int(whole[1]) <= MAX_WEIGHT else 0


def is_undecided(cell: str) -> bool:
    """Return whether a cell of DECIDED, blank or a word such as NA included, names nobody who has decided."""
    return cell.strip() in ("", MODEL, GUESS) or cell.strip().casefold() in MISSING_WORDS


@dataclass
class Records(Chunk):
    """Some rows of a table, with lists of one value for each row."""

    first: list[str] = field(default_factory=list)  # texts of the first column
    texts: list[str] = field(default_factory=list)  # with those of further columns behind them
    languages: list[str] = field(default_factory=list)  # as they are written
    weights: list[int] = field(default_factory=list)  # 0: see `weight_of`
    deciders: list[str] = field(default_factory=list)  # "" for nobody
    # Rows by their numbers, from 0:
    composed: list[int] = field(default_factory=list)  # invisible characters are gone, or letters composed
    dittos: list[int] = field(default_factory=list)  # the text only repeats the one above (do., ditto)
    forbidden: dict[int, int] = field(default_factory=dict)  # those with a character of _ODD → its column
    guesses: list[int] = field(default_factory=list)  # a model has given the codes, and nobody has decided


class Record(NamedTuple):
    """A row of a table."""

    line: int
    text: str
    language: str
    weight: int
    decider: str  # "" for nobody
    codes: list[str]  # without blank cells
    is_guess: bool  # a model has given the codes, and nobody has decided
    cells: tuple[str, ...]  # of the columns that are read


class Table:
    """A table of descriptions, and which of its columns hold what.

    texts: the column of descriptions, and further ones that belong to them; others: further columns that are
    read, None for all; language: that of all rows if there is no column; rule: by which texts are cleaned, if
    any; ditto: whether a text that only repeats the one above becomes it.
    """

    def __init__(
        self,
        path: str,
        how: Sequence[Any],
        texts: Sequence[str],
        codes: Sequence[str] = (),
        others: Sequence[str] | None = (),
        *,
        language: str = UNKNOWN_LANGUAGE,
        language_col: str | None = None,
        weight_col: str | None = None,
        rule: str | None = None,
        ditto: bool = False,
    ):
        self.path, self.how, self.format = path, how, table_format(path, *how)
        self.rule, self.clean = rule, cleaner(rule) if rule else str
        self.ditto, self.language = ditto, language
        self.read_code: Callable[[str], str] = str  # returns the code that a cell holds, or ""
        header = self.format.names
        self.has_answers = "prob_1" in header  # a model's
        named = [*texts, *codes, *filter(None, [language_col, weight_col]), *(others or ())]
        # the last column of this name, since a table may have had its own before it was coded
        decided = [place for place, name in enumerate(header) if name == DECIDED][-1:]
        chosen = [*map(header.index, named), *decided]
        self.places = list(range(len(header))) if others is None else chosen
        self.names = [header[place] for place in self.places]
        self.decided = self.places.index(decided[0]) if decided else None
        self.texts, self.codes = list(map(self.names.index, texts)), list(map(self.names.index, codes))
        self.languages = self.names.index(language_col) if language_col else None
        self.weights = self.names.index(weight_col) if weight_col else None

    def records(self, check: Callable[[], Any] = nothing) -> Iterator[Records]:
        """Yield all rows, many at a time. `check` is called before each yield. Raises UserError."""
        above = ""
        for chunk in read_chunks(self.path, self.places, *self.how):
            check()
            some = self._checked(chunk, above)
            above = some.first[-1] if some.first else above
            yield some

    def _checked(self, chunk: Chunk, above: str) -> Records:
        """Return rows with what their cells say. above: the text of the row before."""
        first, *further = (chunk.columns[place] for place in self.texts)
        some = Records(**vars(chunk))
        is_plain = self.rule == AS_IS and is_composed("".join(first))  # all at once: faster
        some.first = list(map(strip if is_plain else self.clean, first))
        if self.rule == AS_IS and not is_plain:
            some.composed = [i for i, text in enumerate(some.first) if text != strip(first[i])]
        some.dittos = fill_dittos(some.first, above, self.ditto)
        some.texts = join_columns(some.first, [list(map(self.clean, column)) for column in further])
        for place in reversed(self.texts):
            if _ODD.search("".join(column := chunk.columns[place])):
                odd = (i for i, cell in enumerate(column) if _ODD.search(cell))
                some.forbidden |= dict.fromkeys(odd, place)
        rows = len(first)
        some.languages = [self.language] * rows if self.languages is None else chunk.columns[self.languages]
        some.weights, some.deciders = [1] * rows, [""] * rows
        if self.weights is not None:
            some.weights = list(map(weight_of, chunk.columns[self.weights]))
        if self.decided is not None:
            cells = list(map(str.strip, chunk.columns[self.decided]))
            some.deciders = ["" if is_undecided(cell) else cell for cell in cells]
            # in a table that no model has coded, a blank cell says that the codes were there before
            is_guess = is_undecided if self.has_answers else (MODEL, GUESS).__contains__
            some.guesses = [i for i, cell in enumerate(cells) if is_guess(cell)]
        return some

    def __iter__(self) -> Iterator[Record]:
        """Yield all rows, one at a time. Raises UserError if one of them cannot be read."""
        for some in self.records():
            if some.faults:
                line, _, reason = some.faults[0]
                raise UserError(f"{self.path}, line {line:,}: cannot be read ({reason})")
            guesses, columns = set(some.guesses), some.columns
            codes = [list(map(self.read_code, columns[place])) for place in self.codes]
            values = some.lines.tolist(), some.texts, some.languages, some.weights, some.deciders
            for i, (row, cells) in enumerate(zip(zip(*values), zip(*columns))):
                yield Record(*row, [code for column in codes if (code := column[i])], i in guesses, cells)
