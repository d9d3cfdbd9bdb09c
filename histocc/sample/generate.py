"""Rows like those of historical registers: spellings, slips, abbreviations, widows, ranks, places, two occupations."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from histocc.sample.demo import DEMO
from histocc.sample.table import Forms, forms
from histocc.sample.words import (AND, CRAFT, CRAFT_ENDING, EMPLOYER, FORMER, FORMER_WOMEN, IN_TOWN, NO_WIDOWS, NOT_A_CRAFT,
                                  TAGS, TOWNS, WIDOW, WOMEN)

Row = tuple[str, str, str, str]

# Shares of rows. What remains after those of one occupation is the plain title.
NO_OCCUPATION, TWO_OCCUPATIONS = 0.04, 0.11
STATUS, PLACE, SHORT, SPELLING, SLIP = 0.18, 0.10, 0.06, 0.20, 0.05
FIRST_TITLE = 0.5                          # how often the usual title is taken outright; else any of them
CAPITALISED, CAPITALS = 0.20, 0.03
# How often an occupation is drawn, by its place in the table, as few occupations make up most of a register.
FREQUENT = ((20, 12), (40, 8), (80, 3), (120, 2))
# Second occupations that go with any trade.
SIDE_CODES = ("61110", "61115", "99910", "99920", "64100", "41030", "51020")
GENITIVE_ELSE = {"da": "enke efter {}", "sv": "änka efter {}", "de": "{} witwe"}
_VOWELS = "aeiouyhàâéèêëîïôœù"
_DEMO = frozenset((text.casefold(), tag) for text, tag, *_ in DEMO)


@dataclass(frozen=True)
class Language:
    """What rows of one language are drawn from: occupations as often as they are frequent, and the words around them."""
    tag: str
    column: str
    common: tuple[tuple[Forms, ...], ...]
    trades: tuple[tuple[Forms, ...], ...]
    sides: tuple[tuple[Forms, ...], ...]
    none: tuple[Forms, ...]


def rows(n: int, seed: int) -> Iterator[Row]:
    """n rows (occ1, lang, hisco_1, hisco_2), hisco_2 mostly "". The same seed gives the same rows on every machine, and
    fewer rows are the first of more. Raises ValueError for n < 0 or seed < 0."""
    if n < 0 or seed < 0:
        raise ValueError(f"rows and seed cannot be negative, but are {n} and {seed}")
    return _rows(n, Random(seed).random)


def _rows(n: int, rand) -> Iterator[Row]:
    known = languages()
    for _ in range(n):
        while True:
            language = known[int(rand() * len(known))]
            text, first, second = _row(language, rand)
            chance = rand()
            if chance < CAPITALISED:
                text = text[0].upper() + text[1:]
            elif chance < CAPITALISED + CAPITALS:
                text = text.upper()
            if (text.casefold(), language.tag) not in _DEMO:
                break
        yield text, language.tag, first, second


@lru_cache(maxsize=1)
def languages() -> tuple[Language, ...]:
    """The languages of the table, each ready to draw from."""
    found = []
    for column, tag in TAGS.items():
        occupations = [tuple(each) for each in forms()[tag] if each]
        working = [each for each in occupations if each[0].code[0] != "-"]
        common = [each for at, each in enumerate(working) for _ in range(_times(at))]
        trades = [each for each in common if _is_trade(each[0].code)]
        sides = [each for each in working if each[0].code in SIDE_CODES]
        none = [form for each in occupations if each[0].code[0] == "-" for form in each]
        found.append(Language(tag, column, tuple(common), tuple(trades), tuple(sides), tuple(none)))
    return tuple(found)


def _is_trade(code: str) -> bool:
    """Whether people of this occupation had another one beside it: trades, crafts and farming, not soldiers or servants."""
    return "41" <= code < "97" and not code.startswith("58") and code not in WOMEN


def _times(at: int) -> int:
    return next((times for end, times in FREQUENT if at < end), 1)


def _row(language: Language, rand) -> tuple[str, str, str]:
    """One row in lower case: (text, first code, second code)."""
    chance = rand()
    if chance < NO_OCCUPATION:
        form = _pick(language.none, rand)
        return (_pick(form.slips, rand) if form.slips and rand() < 0.15 else form.title), form.code, ""
    if chance < NO_OCCUPATION + TWO_OCCUPATIONS:
        return _two(language, rand)
    form = _title(_pick(language.common, rand), rand)
    return _one(language, form, rand), form.code, ""


def _one(language: Language, form: Forms, rand) -> str:
    """One occupation as a register has it."""
    chance = rand()
    if chance < STATUS:
        text = _status(language.column, form, rand)
        return _in_town(language.column, text, rand) if rand() < 0.2 else text
    chance -= STATUS
    if chance < PLACE:
        return _placed(language.column, _spelled(form, rand), form.code, rand)
    chance -= PLACE
    if chance < SHORT:
        return _pick(form.short, rand) if form.short else form.title
    chance -= SHORT
    if chance < SPELLING:
        return _pick(form.spellings, rand) if form.spellings else form.title
    if chance - SPELLING < SLIP:
        return _pick(form.slips, rand) if form.slips else form.title
    return form.title


def _two(language: Language, rand) -> tuple[str, str, str]:
    """Two occupations joined by "and", one of them from those that people had beside a trade."""
    first = second = _title(_pick(language.trades, rand), rand)
    while second.code == first.code:
        second = _title(_pick(language.sides, rand), rand)
    if rand() < 0.4:
        first, second = second, first
    text = f"{_spelled(first, rand)} {_pick(AND[language.column], rand)} {_spelled(second, rand)}"
    if rand() < 0.1:
        text = _in_town(language.column, text, rand)
    return text, first.code, second.code


def _status(column: str, form: Forms, rand) -> str:
    """A widow, a former holder, or a rank of a craft."""
    title, kind = _spelled(form, rand), rand()
    if form.code in WOMEN:
        return _fill(_pick(FORMER_WOMEN[column], rand), title, column)
    if kind < 0.35 and form.code not in NO_WIDOWS:
        return _fill(_pick(WIDOW[column], rand), title, column)
    if kind < 0.65 and is_craft(form):
        ending, stays, ranks = CRAFT_ENDING.get(column, ("", "", ()))
        if ranks and title.endswith(ending) and " " not in title:
            return title.removesuffix(ending) + stays + _pick(ranks, rand)
        if CRAFT[column]:
            return _fill(_pick(CRAFT[column], rand), title, column)
    return _fill(_pick(FORMER[column], rand), title, column)


def is_craft(form: Forms) -> bool:
    """Whether masters, journeymen and apprentices of this title are what the title says."""
    return "75" <= form.code < "96" and form.code not in WOMEN and not any(part in form.title for part in NOT_A_CRAFT)


def _fill(template: str, title: str, column: str) -> str:
    if column == "fr" and "de {}" in template and title[0] in _VOWELS:
        template = template.replace("de {}", "d'{}")
    elif column == "en" and " a {}" in template and title[0] in "aeiou":
        template = template.replace(" a {}", " an {}")
    elif column == "de" and title.endswith("mädchen"):
        template = template.replace("e {}", "es {}")
    if "{}s" in template and not _takes_s(title, column):
        template = GENITIVE_ELSE[column]
    return template.replace("{}", title)


def _takes_s(title: str, column: str) -> bool:
    """Whether "of the title" is the title and an s; in German that is sure for one word in -er or -mann only."""
    if column == "de":
        return title.endswith(("er", "mann")) and " " not in title
    return title[-1] not in "sxz"


def _placed(column: str, title: str, code: str, rand) -> str:
    if "75" <= code < "96" and rand() < 0.4:
        return _pick(EMPLOYER[column], rand).replace("{}", title)
    return _in_town(column, title, rand)


def _in_town(column: str, text: str, rand) -> str:
    town = _pick(TOWNS[column], rand)
    if rand() < 0.5:
        town = town.title()
    return _pick(IN_TOWN[column], rand).replace("{}", text).replace("@", town)


def _spelled(form: Forms, rand) -> str:
    return _pick(form.spellings, rand) if form.spellings and rand() < 0.15 else form.title


def _title(occupation: tuple[Forms, ...], rand) -> Forms:
    return occupation[0] if rand() < FIRST_TITLE else _pick(occupation, rand)


def _pick(things, rand):
    return things[int(rand() * len(things))]
