"""Read the rows of a table of descriptions with the same rules for all commands: texts, repeated texts
(ditto), languages, codes, weights, and who has decided.
"""

import copy
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from histocc.data.binary import present
from histocc.data.rows import MISSING_WORDS, csv_text, folded
from histocc.data.tables import Chunk, Path, read_chunks, str_of, table_format, unique_names
from histocc.runtime.errors import UserError
from histocc.runtime.files import atomic_write
from histocc.runtime.log import counted
from histocc.text import UNKNOWN_LANGUAGE, as_is, cleaner, is_composed, join_columns, repaired_cells, strip

DECIDED = "decided_by"  # column of a reviewed file that says who has decided on a row
MODEL = "model"  # value of DECIDED if nobody has decided
GUESS = "guess"  # value if review has learned the codes from other decisions
KNOWN = "known"  # value of predict's column source if a person has decided, or --known gave the codes
LONGEST_DECIDER = 200  # characters of a person's name
ALL, LEAVE = "all", "none"  # values of --ditto
# Cells that only repeat the one above: words, or marks that may be spaced, doubled or between dashes.
_WORDS = (
    r"d[:./'’´]?o\s?[.:]?|d[.:]?[º°ᵒ⁰][.:]?|d[ie]?tt?o\.?|[ií]dem\.?|id\.|ib\.|ibid(em|\.)?"
    r"|de?sgl\.?|desgleichen|dgl\.?|ders\.|d(er|ie)selbe|wie oben|((the )?same )?as above|the same|lo stesso"
    r"|l[ea] m[êe]me|comme (ci-)?dessus|samm[ea]|som (ovenfor|ovan)|als ?boven|(de)?zelfde|come sopra"
)
_MARKS = "[\"„”“‟″‶〃»«＂](\\s*[\"„”“‟″‶〃»«＂,'’´`‚])*|[,'’´`‚](\\s*[,'’´`‚])+|//"
_DASH = r"[-‐-―−]*"
_BEGINS = "(?=[\\Wdiíwtlcsaz])"  # the only first letters: a fast check
_DITTO = re.compile(
    rf"(?i){_BEGINS}(?:\(?({_WORDS})([\s,]*({_WORDS}))*\)?|{_DASH}\s*({_MARKS})\s*{_DASH})"
).fullmatch
LONGEST_DITTO = 17
FILLED, NO_ROW_ABOVE = "with the text of the row above", "left, because no row is above"
ORDERED, IN_ORDER = 5, 0.95  # least number of changes of text, and least share of ascending ones
MAX_WEIGHT = 1_000_000
_ODD = "\0\ue000\ue001\ue002\ue003\ue004"  # end marks of texts in hashes and in the model's inputs


def nothing(*_) -> None:
    """Do nothing: the default for callbacks that report or check."""


def is_ditto(text: str) -> bool:
    """Return whether a text only repeats the one above, as do., ditto and 〃 do."""
    text = text.strip()
    return len(text) <= LONGEST_DITTO and _DITTO(text if text.isascii() else as_is(text)) is not None


def fill(cells: list[str], rows: Iterable[int], above: str) -> None:
    """Fill the cells of some rows (ascending) from the cell above. above: the cell above the first row."""
    for i in rows:
        cells[i] = cells[i - 1] if i else above


def is_sorted(texts: list[str]) -> bool:
    """Return whether texts are sorted, so that dittos are no longer below the text that they repeat."""
    changes = [pair for pair in pairwise(map(str.casefold, texts)) if pair[0] != pair[1]]
    dittos = [text for _, text in changes if is_ditto(text)]
    rises = sum(one < other for one, other in changes)
    in_order = max(rises, len(changes) - rises)
    return len(changes) >= ORDERED and in_order >= IN_ORDER * len(changes) and len({*dittos}) == len(dittos)


@lru_cache(1 << 16)
def weight_of(cell: str) -> float:
    """Return a row's weight from its cell, or 0 if it is ambiguous (1,000) or not in (0, MAX_WEIGHT]."""
    cell = re.sub(r"(?<=\d)['‘’\s](?=\d{3}\b)", "", cell.strip())  # 1'000
    if re.fullmatch(r"[1-9]\d*,\d{3}|\d+[.,]000", cell):  # 1 or a thousand
        return 0
    if found := re.fullmatch(r"\d{1,3}([.,])\d{3}(?=[.,])(\1\d{3})*((?!\1)[.,]\d+)?", cell):
        cell = cell.replace(found[1], "")  # 1.234,5
    try:
        weight = float(cell.replace(",", "."))
    except ValueError:
        return 0
    return (int(weight) if weight.is_integer() else weight) if 0 < weight <= MAX_WEIGHT else 0


def is_name(text: str) -> bool:
    """Return whether a person's name is valid: one line, not like a flag, not a word for nobody."""
    odd = re.search(r"^-|[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", text)
    return not (is_undecided(text) or odd or len(text) > LONGEST_DECIDER)


def is_undecided(cell: str) -> bool:
    """Return whether a cell of DECIDED names no person, as blank cells and words such as NA do."""
    return cell.strip() in ("", MODEL, GUESS) or cell.strip().casefold() in MISSING_WORDS


@dataclass
class Records(Chunk):
    """Some rows of a table, with lists of one value for each row."""

    filled: list[list[str]] = field(default_factory=list)  # the columns after --fill-down
    last: list[str] = field(default_factory=list)  # what it fills into the rows below
    parts: list[list[str]] = field(default_factory=list)  # the texts of each column of descriptions
    texts: list[str] = field(default_factory=list)  # texts of all columns, the first column first
    languages: list[str] = field(default_factory=list)  # as written in the file
    weights: list[float] = field(default_factory=list)  # 0: see `weight_of`
    deciders: list[str] = field(default_factory=list)  # "" for nobody
    # Numbers of rows, from 0:
    noted: dict[str, list[int]] = field(default_factory=dict)  # kind in NOTES of data/rows.py → rows
    dittos: list[int] = field(default_factory=list)  # rows filled with the text above (do., ditto)
    left: list[int] = field(default_factory=list)  # rows left although they repeat it: see `why`
    why: str = ""  # why they are left, or "" for NO_ROW_ABOVE
    forbidden: dict[int, int] = field(default_factory=dict)  # rows with a character of _ODD → its column
    headers: list[int] = field(default_factory=list)  # rows that repeat the column names
    guesses: list[int] = field(default_factory=list)  # rows coded by a model, without a person's decision


class Record(NamedTuple):
    """A row of a table."""

    line: int
    text: str
    language: str
    weight: float
    decider: str  # "" for nobody
    codes: list[str]  # without blank cells
    is_guess: bool  # a model has given the codes, and nobody has decided
    is_ditto: bool  # filled with the text above
    cells: tuple[str, ...]  # cells of the columns read


class Table:
    """A table of descriptions, and the meaning of its columns.

    texts: the column of descriptions, and further ones that belong to them. others: further columns to read,
    None for all. language: the language of all rows if there is no column. rule: the rule to clean texts, if
    any. ditto: whether a text that only repeats the one above becomes it: ALL, LEAVE, or None to fill it
    unless the file's first rows show that it should not be. fill_down: columns in which a blank cell repeats
    the one above. repair: whether broken letters and escapes in texts become letters. The columns do not
    change. before: the tables that this one continues.
    """

    def __init__(
        self,
        path: Path,
        how: Sequence[Any],
        texts: Sequence[str],
        codes: Sequence[str] = (),
        others: Sequence[str] | None = (),
        *,
        language: str = UNKNOWN_LANGUAGE,
        language_col: str | None = None,
        weight_col: str | None = None,
        rule: str | None = None,
        ditto: str | None = None,
        fill_down: Sequence[str] | None = None,
        repair: bool = False,
        before: Sequence[Path] = (),
    ):
        self.name = str_of(path)  # for messages
        self.path, self.before = path, before
        self.how, self.format = how, table_format(path, *how)
        self.clean = cleaner(rule) if rule else str
        self.ditto, self.repair, self.language = ditto, repair, language
        self.read_code: Callable[[str], str] = str  # cell → its code, or ""
        header = self.format.names
        self.has_answers = "prob_1" in header  # a model's
        named = [*texts, *codes, *filter(None, [language_col, weight_col]), *(others or ())]
        # the last column of this name: the table may have had one before it was coded
        decided = [place for place, name in enumerate(header) if name == DECIDED][-1:]
        by_name = unique_names(header)
        self.places = [*range(len(header))] if others is None else [*map(by_name.index, named), *decided]
        self.names = [by_name[place] for place in self.places]
        self.decided = self.places.index(decided[0]) if decided else None
        self.texts, self.codes = list(map(self.names.index, texts)), list(map(self.names.index, codes))
        self.languages = self.names.index(language_col) if language_col else None
        self.weights = self.names.index(weight_col) if weight_col else None
        self.fill_down = [self.names.index(name) for name in fill_down or () if name in self.names]
        self.counts: Counter[str] = Counter()  # dittos, by what was done with them
        self.faults: list[tuple[int, str, str]] = []  # as in `Chunk`, of all rows read so far

    def records(
        self, check: Callable[[], Any] = nothing, span: int | None = None, above: Records | None = None
    ) -> Iterator[Records]:
        """Yield all rows, many at a time, or the rows of the range `span`. `check` is called before each
        yield. above: the rows before, if they are known. Raises UserError.
        """
        self.counts.clear()
        self.faults.clear()
        for chunk in read_chunks(self.path, self.places, *self.how, span=span):
            check()
            if above is None and len(chunk.lines):
                above = self._above(chunk, span or 0)
            self.faults += chunk.faults
            some = self._checked(chunk, above)
            above = some if some.texts else above
            yield some

    def _above(self, chunk: Chunk, span: int) -> Records | None:
        """Return the rows before a range of the table if its first row repeats something of them, else the
        first rows of the table, which show whether texts are repeated. None: the range holds these itself.
        """
        if not (span or self.before):
            return None
        paths, needed = [*self.before, self.path], []

        def earlier() -> Iterator[tuple[Path, int]]:
            for path in reversed(paths):
                ranges = span if path is self.path else table_format(path, *self.how).ranges
                yield from ((path, i) for i in reversed(range(ranges)))

        def rows_of(path: Path, i: int) -> Iterator[Records]:
            table = copy.copy(self)
            table.path, table.before, table.counts, table.faults = path, (), Counter(), []
            return (some for some in table.records(nothing, i, above) if some.texts)

        for path, i in earlier():
            if not self._repeats(chunk):
                break
            chunks = read_chunks(path, self.places, *self.how, span=i)
            if first := next((each for each in chunks if len(each.lines)), None):
                needed.append((path, i))
                chunk = first
        above = None
        if not self._repeats(chunk):
            above = next(rows_of(paths[0], 0), None)
        for place in reversed(needed):
            [above] = deque(rows_of(*place), 1)
        return above

    def _repeats(self, chunk: Chunk) -> bool:
        """Return whether the first row repeats something of the rows above."""
        first = [column[0] for column in chunk.columns]
        is_blank = any(not first[place].strip() for place in self.fill_down)
        return is_blank or any(is_ditto(self.clean(first[place])) for place in self.texts)

    def _checked(self, chunk: Chunk, above: Records | None) -> Records:
        """Return rows with the content of their cells and of the rows above that they repeat."""
        some = Records(**vars(chunk), filled=[*chunk.columns])
        self._fill_down(some, above)
        first, *further = (present(some.filled[place]) for place in self.texts)
        names, [joined] = folded(self.names), folded(["\0".join(["", *first, ""])])
        if len(names) > 1 and f"\0{names[self.texts[0]]}\0" in joined:
            some.headers = [i for i, row in enumerate(zip(*chunk.columns)) if folded(row) == names]
            for i in some.headers:
                first[i] = ""
        whole, broken = repaired_cells(first)
        mended = [i for i in broken if self.repair and whole[i] != first[i]]
        some.noted = {"letters_broken": sorted({*broken}.difference(mended)), "letters_repaired": mended}
        if self.repair:
            first, further = whole, [repaired_cells(column)[0] for column in further]
        is_plain = self.clean is as_is and is_composed("".join(first))  # checking all at once is faster
        some.parts = [list(map(strip if is_plain else self.clean, first))]
        if self.clean is as_is and not is_plain:
            pairs = enumerate(zip(some.parts[0], map(strip, first)))
            some.noted["texts_composed"] = [i for i, (text, old) in pairs if text != old]
        some.parts += [list(map(self.clean, column)) for column in further]
        rows = len(first)
        some.languages = [self.language] * rows
        if self.languages is not None:
            some.languages = present(some.filled[self.languages])
        self._resolve_dittos(some, above)
        some.texts = join_columns(some.parts[0], some.parts[1:])
        some.last = [column[-1] for column in some.filled if column]
        for place in {*self.fill_down}.intersection(self.codes):  # for rows with a text
            cells = zip(some.texts, some.filled[place], some.columns[place])
            some.filled[place] = [filled if strip(text) else own for text, filled, own in cells]
        for place, texts in reversed([*zip(self.texts, some.parts)]):
            joined = "".join([*(column := some.filled[place]), *texts])
            if any(mark in joined for mark in _ODD):
                odd = (i for i, cells in enumerate(zip(column, texts)) if {*_ODD} & {*"".join(cells)})
                some.forbidden |= dict.fromkeys(odd, place)
        some.weights, some.deciders = [1] * rows, [""] * rows
        if self.weights is not None:
            some.weights = list(map(weight_of, some.filled[self.weights]))
        if self.decided is not None:
            cells = list(map(str.strip, some.filled[self.decided]))
            some.deciders = ["" if is_undecided(cell) else cell for cell in cells]
            # in a table that no model has coded, a blank cell means that its codes were given earlier
            is_guess = is_undecided if self.has_answers else (MODEL, GUESS).__contains__
            some.guesses = [i for i, cell in enumerate(cells) if is_guess(cell)]
        return some

    def _fill_down(self, some: Records, above: Records | None) -> None:
        """Fill blank cells of `fill_down`. A row keeps its code columns if any of them has a code."""
        codes = [place for place in self.fill_down if place in self.codes]
        for places in filter(None, [codes, *([place] for place in self.fill_down if place not in codes)]):
            cells = zip(*(some.columns[place] for place in places))
            blank = [i for i, row in enumerate(cells) if not "".join(row).strip()]
            for place in places:
                some.filled[place] = [*some.columns[place]]
                fill(some.filled[place], blank, above.last[place] if above else "")

    def _resolve_dittos(self, some: Records, above: Records | None) -> None:
        """Fill rows that only repeat the one above with its texts, and blank languages with its language."""
        some.why = above.why if above else self._why_left(list(filter(str.strip, some.filled[self.texts[0]])))
        dittos = [[i for i, text in enumerate(column) if is_ditto(text)] for column in some.parts]
        leading = [] if above else [i for place, i in enumerate(dittos[0]) if i == place]
        some.left = dittos[0] if some.why else leading
        for i in some.left if self.ditto != LEAVE else ():
            some.parts[0][i] = ""
        if not some.why:
            some.dittos = sorted({i for rows in dittos for i in rows}.difference(some.left))
            before = [*above.parts, above.languages] if above else [[""]] * (len(dittos) + 1)
            for cells, rows, column in zip([*some.parts, some.languages], [*dittos, []], before):
                blank = (i for i in dittos[0] if not cells[i].strip())
                fill(cells, sorted({*rows, *blank}), column[-1])
        some.noted |= {"dittos_filled": some.dittos, "dittos": some.left if self.ditto == LEAVE else []}
        self.counts.update({some.why or NO_ROW_ABOVE: len(some.left), FILLED: len(some.dittos)})

    def _why_left(self, texts: list[str]) -> str:
        """Return why rows that only repeat the one above are left, from the first texts, or "" if filled."""
        if self.ditto:
            return "left, because of --ditto none" if self.ditto == LEAVE else ""
        of_sheet = {"rows", "decision", "id"} <= {*self.format.names}
        whys = {"rows have weights": self.weights is not None, "rows were chosen from others": of_sheet}
        whys["the texts are sorted"] = is_sorted(texts)
        return next((f"left, because {why} (--ditto fills them)" for why, is_so in whys.items() if is_so), "")

    def about_dittos(self) -> str:
        """Return a line on the rows whose text only repeats the one above, or "" if there are none."""
        said = "; ".join(f"{rows:,} {what}" for what, rows in self.counts.items() if rows)
        return said and f"do., ditto or 〃 in {counted(self.counts.total(), 'row')}: {said}"

    def raise_faults(self) -> None:
        """Raise UserError if a row could not be read."""
        for line, _, reason in self.faults:
            raise UserError(f"{self.name}, line {line:,}: cannot be read ({reason})")

    def list_faults(self, path: str, overwrite: bool) -> None:
        """Write a table of the rows that could not be read, if there are any."""
        if self.faults:
            with atomic_write(path, overwrite) as file:
                file.write(csv_text([["line", "kind", "reason"], *self.faults]))

    def __iter__(self) -> Iterator[Record]:
        """Yield all rows that can be read, one at a time. `faults` has the others."""
        for some in self.records():
            guesses, dittos, columns = set(some.guesses), set(some.dittos), some.filled
            codes = [list(map(self.read_code, columns[place])) for place in self.codes]
            values = some.lines.tolist(), some.texts, some.languages, some.weights, some.deciders
            for i, (row, cells) in enumerate(zip(zip(*values), zip(*some.columns))):
                has = [code for column in codes if (code := column[i])]
                yield Record(*row, has, i in guesses, i in dittos, cells)
