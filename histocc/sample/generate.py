"""Rows like those of historical registers: spellings, slips, abbreviations, widows, ranks, places, several
occupations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from struct import Struct

from histocc.sample.demo import DEMO
from histocc.sample.places import EMPLOYED, EMPLOYER, IN_TOWN, PEOPLE, TOWNS
from histocc.sample.slips import STRAY, STRAY_OF_THE_LAND
from histocc.sample.status import Wrapping, wrappings
from histocc.sample.table import Forms, forms
from histocc.sample.words import AND, TAGS, WOMEN

Row = tuple[str, str, str, str, str]

# Shares of rows, in thousandths. What remains is the plain title of one occupation.
SHARES = {
    "nothing": 60,
    "three": 10,
    "two": 100,
    "status": 140,
    "place": 80,
    "spelling": 105,
    "short": 50,
    "slip": 45,
    "careless": 20,
}
THOUSAND = 1000
# Shares of the three ways of having no occupation: of "nothing" rows, in quarters.
NOTHING = {"-1": 2, "-2": 1, "-3": 1}
# In hundredths: of all rows; of titles beside other words; of rows of the kind
CAPITALISED, TITLE_CASE, CAPITALS = 20, 2, 3
SPELLED, ABBREVIATED = 15, 4
SLIPS_OF_NOTHING, STATUS_IN_TOWN, TWO_IN_TOWN, SIDE_FIRST, EMPLOYED_SHARE = 15, 20, 10, 40, 40
# How often an occupation is drawn, by its place in the table, as few occupations make up most of a register.
FREQUENT = ((20, 60), (40, 36), (80, 12), (120, 7), (195, 3), (270, 2))
SLOTS = 12  # places in the draw of one of an occupation's titles; half are any title's
# Second occupations that go with any trade.
SIDE_CODES = ("61110", "61115", "99910", "99920", "64100", "41030", "51020")
AT_ONCE = 1024  # rows for which random numbers are made at a time
_NUMBERS = Struct("<8I")  # those of one row
_DEMO = frozenset(text.casefold() for text, *_ in DEMO)
_DEMO_CODES = frozenset(code for _, _, *codes in DEMO for code in codes if code)


@dataclass(frozen=True, slots=True)
class Entry:
    """One title, ready to be drawn: its plain row, the row's columns after the text, and what can stand for
    the title.
    """

    form: Forms
    code: str
    plain: Row
    columns: tuple[str, str, str, str]
    spellings: tuple[str, ...]
    slips: tuple[str, ...]
    written: tuple[str, ...]  # beside other words: mostly plain, now and then spelled otherwise or cut short
    status: tuple[tuple[str, tuple[tuple[Wrapping, ...], ...]], ...]
    employers: tuple[str, ...]


@dataclass(frozen=True)
class Language:
    """What rows of one language are drawn from: occupations as often as they are to be drawn, each a tuple of
    its titles as often as these are. (Drawing twice from short tuples is faster than once from a long one
    that no cache can hold.)
    """

    tag: str
    common: tuple[tuple[Entry, ...], ...]
    trades: tuple[tuple[Entry, ...], ...]
    sides: tuple[tuple[Entry, ...], ...]
    nothing: tuple[tuple[Entry, ...], ...]
    towns: tuple[str, ...]
    joiners: tuple[str, ...]
    strays: tuple[tuple[str, str], ...]


def rows(n: int, seed: int) -> Iterator[Row]:
    """n rows (occ1, lang, hisco_1, hisco_2, hisco_3), the last two mostly "". The same seed gives the same
    rows on every machine, and fewer rows are the first of more. Raises ValueError for n < 0 or seed < 0.
    """
    if n < 0 or seed < 0:
        raise ValueError(f"rows and seed cannot be negative, but are {n} and {seed}")
    return _rows(n, Random(seed).getrandbits)


def _rows(n: int, bits) -> Iterator[Row]:
    draw = kinds()
    size, cased, shown = len(draw), CAPITALISED + TITLE_CASE + CAPITALS, _DEMO
    length = _NUMBERS.size * AT_ONCE
    while True:
        for which, case, a, b, c, d, e, f in _NUMBERS.iter_unpack(
            bits(8 * length).to_bytes(length, "little")
        ):
            if n <= 0:
                return
            kind, language, composed = draw[which % size]
            row = kind(language, a, b, c, d, e, f)
            case %= 100
            if case < cased:
                row = (_cased(row[0], case), *row[1:])
            if not composed or row[0].casefold() not in shown:
                n -= 1
                yield row


def _cased(text: str, case: int) -> str:
    if case < CAPITALISED:
        return text[0].upper() + text[1:]
    return text.title() if case < CAPITALISED + TITLE_CASE else text.upper()


@lru_cache(maxsize=1)
def kinds() -> tuple[tuple, ...]:
    """(kind of row, language, whether such a row can be one of the demonstration), each as often as it is to
    be drawn.

    Raises ValueError if a form of a title alone is a text of the demonstration.
    """
    makers = {
        "nothing": _nothing,
        "three": _three,
        "two": _two,
        "status": _status,
        "place": _place,
        "spelling": _spelling,
        "short": _short,
        "slip": _slip,
        "careless": _careless,
    }
    share = {
        **{makers[name]: times for name, times in SHARES.items()},
        _plain: THOUSAND - sum(SHARES.values()),
    }
    alone = (_plain, _spelling, _short, _slip, _careless)
    for language in languages():
        for entry in {id(entry): entry for titles in language.common for entry in titles}.values():
            if entry.code in _DEMO_CODES and not _DEMO.isdisjoint(map(str.casefold, entry.form.all())):
                raise ValueError(
                    f"occupations.csv: {entry.plain[0]!r} is written like a text of the demonstration"
                )
    return tuple(
        drawn
        for language in languages()
        for kind, times in share.items()
        for drawn in ((kind, language, kind not in alone),) * times
    )


# Ready to draw from


@lru_cache(maxsize=1)
def languages() -> tuple[Language, ...]:
    """The languages of the table, each ready to draw from."""
    return tuple(_language(column, tag) for column, tag in TAGS.items())


def _language(column: str, tag: str) -> Language:
    employers = {kind: _employers(kind, column) for kind in EMPLOYER}
    occupations = [[_entry(form, column, tag, employers) for form in each] for each in forms()[tag] if each]
    working = [each for each in occupations if each[0].code[0] != "-"]
    common = [slots for at, each in enumerate(working) for slots in (_slots(each),) * _times(at)]
    codes = {each[0].code: tuple(each) for each in occupations}
    towns = [name for town in TOWNS[column] for name in (town, town.title())]
    return Language(
        tag,
        tuple(common),
        tuple(slots for slots in common if is_trade(slots[0].code)),
        tuple(_slots(each) for each in working if each[0].code in SIDE_CODES),
        tuple(codes[code] for code, times in NOTHING.items() for _ in range(times)),
        tuple(form.removeprefix("{}").replace("@", town) for town in towns for form in IN_TOWN[column]),
        tuple(f" {word} " for word in AND[column]),
        STRAY + STRAY_OF_THE_LAND[column],
    )


def _entry(form: Forms, column: str, tag: str, employers: dict[str, tuple[str, ...]]) -> Entry:
    columns = (tag, form.code, "", "")
    spelled = _mixed(form.title, form.spellings, SPELLED)
    places = next((kinds for codes, kinds in EMPLOYED if form.code.startswith(codes)), ())
    return Entry(
        form,
        form.code,
        (form.title, *columns),
        columns,
        form.spellings,
        form.slips,
        (*spelled, *_mixed(form.title, form.short[:4], ABBREVIATED)) if form.short else spelled,
        (
            tuple((text, wrappings(form, text, column)) for text in dict.fromkeys(spelled))
            if form.code[0] != "-"
            else ()
        ),
        tuple(tail for kind in places for tail in employers[kind]),
    )


def _mixed(title: str, others: tuple[str, ...], share: float) -> tuple[str, ...]:
    """The title as often as makes the others this share of the whole."""
    return (title,) * max(1, round(len(others) * (100 - share) / share)) + others


def _slots(each: list[Entry]) -> tuple[Entry, ...]:
    """The titles of an occupation, the first of them more often."""
    any_title = SLOTS // 2 // len(each)
    return (each[0],) * (SLOTS - any_title * len(each)) + tuple(each) * any_title


def _times(at: int) -> int:
    return next((times for end, times in FREQUENT if at < end), 1)


def is_trade(code: str) -> bool:
    """Whether people of this occupation had another one beside it: trades, crafts and farming, not soldiers
    or servants.
    """
    return "41" <= code < "97" and not code.startswith("58") and code not in WOMEN


def _employers(kind: str, column: str) -> tuple[str, ...]:
    tails = [form.removeprefix("{}") for form in EMPLOYER[kind][column]]
    return tuple(
        tail.replace("@", person) for tail in tails for person in (PEOPLE[column] if "@" in tail else ("",))
    )


# Kinds of rows, in lower case. `a` to `f` are random numbers far above the length of what they pick from.


def _plain(language: Language, a: int, b: int, c: int, d: int, e: int, f: int) -> Row:
    return language.common[a % len(language.common)][b % SLOTS].plain


def _spelling(language: Language, a: int, b: int, c: int, d: int, e: int, f: int) -> Row:
    entry = language.common[a % len(language.common)][b % SLOTS]
    texts = entry.spellings
    return (texts[c % len(texts)], *entry.columns) if texts else entry.plain


def _slip(language: Language, a: int, b: int, c: int, d: int, e: int, f: int) -> Row:
    entry = language.common[a % len(language.common)][b % SLOTS]
    texts = entry.slips
    return (texts[c % len(texts)], *entry.columns) if texts else entry.plain


def _careless(language: Language, a: int, b: int, c: int, d: int, e: int, f: int) -> Row:
    entry = language.common[a % len(language.common)][b % SLOTS]
    texts = entry.form.careless
    if texts and d % 2:
        return (texts[c % len(texts)], *entry.columns)
    before, after = language.strays[c % len(language.strays)]
    return (before + entry.plain[0] + after, *entry.columns)


def _short(language: Language, a: int, b: int, c: int, d: int, e: int, f: int) -> Row:
    entry = language.common[a % len(language.common)][b % SLOTS]
    texts = entry.form.short
    return (texts[c % len(texts)], *entry.columns) if texts else entry.plain


def _nothing(language: Language, a: int, b: int, c: int, d: int, e: int, f: int) -> Row:
    entries = language.nothing[a % len(language.nothing)]
    entry = entries[b % len(entries)]
    texts = entry.slips
    return (texts[d % len(texts)], *entry.columns) if texts and c % 100 < SLIPS_OF_NOTHING else entry.plain


def _status(language: Language, a: int, b: int, c: int, d: int, e: int, f: int) -> Row:
    """A widow, a former holder, or a rank of a craft; now and then of a town."""
    entry = language.common[a % len(language.common)][b % SLOTS]
    title, statuses = entry.status[d % len(entry.status) if c % 100 < SPELLED else 0]
    statuses = statuses[e % len(statuses)]
    before, end, after = statuses[f % len(statuses)]
    text = before + title[:end] + after
    if (c >> 8) % 100 < STATUS_IN_TOWN:
        text += language.towns[(f >> 8) % len(language.towns)]
    return (text, *entry.columns)


def _place(language: Language, a: int, b: int, c: int, d: int, e: int, f: int) -> Row:
    """A title with an employer or a town."""
    entry = language.common[a % len(language.common)][b % SLOTS]
    where = entry.employers if entry.employers and c % 100 < EMPLOYED_SHARE else language.towns
    return (entry.written[d % len(entry.written)] + where[e % len(where)], *entry.columns)


def _two(language: Language, a: int, b: int, c: int, d: int, e: int, f: int) -> Row:
    """Two occupations joined by "and", one of them from those that people had beside a trade."""
    sides = language.sides
    first = language.trades[a % len(language.trades)][b % SLOTS]
    second = sides[c % len(sides)][d % SLOTS]
    if second.code == first.code:
        second = sides[(c + 1) % len(sides)][d % SLOTS]
    if e % 100 < SIDE_FIRST:
        first, second = second, first
    text = (
        first.written[(d >> 4) % len(first.written)]
        + language.joiners[f % len(language.joiners)]
        + second.written[(e >> 8) % len(second.written)]
    )
    if (f >> 2) % 100 < TWO_IN_TOWN:
        text += language.towns[(f >> 8) % len(language.towns)]
    return text, language.tag, first.code, second.code, ""


def _three(language: Language, a: int, b: int, c: int, d: int, e: int, f: int) -> Row:
    """A trade and two occupations beside it, in any order: "farmer, innkeeper and carpenter"."""
    trade = language.trades[a % len(language.trades)][b % SLOTS]
    sides = [titles for titles in language.sides if titles[0].code != trade.code]
    at = c % len(sides)
    another = (at + 1 + (c >> 8) % (len(sides) - 1)) % len(sides)
    found = [trade, sides[at][d % SLOTS], sides[another][(d >> 8) % SLOTS]] * 2
    first, second, third = found[e % 3 : e % 3 + 3]
    words = [
        entry.written[(f >> shift) % len(entry.written)]
        for entry, shift in ((first, 0), (second, 8), (third, 16))
    ]
    text = f"{words[0]}, {words[1]}{language.joiners[(e >> 8) % len(language.joiners)]}{words[2]}"
    return text, language.tag, first.code, second.code, third.code
