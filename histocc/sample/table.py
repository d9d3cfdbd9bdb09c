"""The table of occupations and, for each title, the ways in which registers write it that belong to no other
code.
"""

import csv
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from histocc.sample.short import abbreviations
from histocc.sample.slips import careless, slips
from histocc.sample.words import AND, SPELLING, TAGS


@dataclass(frozen=True, slots=True)
class Forms:
    """How one title is written: as it is, in other spellings, misread, carelessly, and cut short."""

    title: str
    code: str
    spellings: tuple[str, ...]
    slips: tuple[str, ...]
    careless: tuple[str, ...]
    short: tuple[str, ...]

    def all(self) -> tuple[str, ...]:
        return (self.title, *self.spellings, *self.slips, *self.careless, *self.short)


def read_table() -> list[dict[str, str]]:
    """The rows of occupations.csv: the code in `hisco`, and a column of titles for each language, joined by
    `|`.
    """
    text = resources.files("histocc.sample").joinpath("occupations.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@lru_cache(maxsize=1)
def forms() -> dict[str, list[list[Forms]]]:
    """For each language tag, the forms of each occupation's titles, in the order of the table.

    A way of writing that two codes of a language could share is left out. Raises ValueError if a title itself
    is shared, or holds the word that joins two occupations.
    """
    rows = read_table()
    found = {}
    for column, tag in TAGS.items():
        titles = [(title, row["hisco"]) for row in rows for title in row[column].split("|") if title]
        _check(titles, column)
        short = abbreviations(titles, column)
        written = {
            title: (_spellings(title, code, column), slips(title), careless(title), short.get(title, ()))
            for title, code in titles
        }
        shared = _shared(titles, written)
        found[tag] = [
            [
                Forms(title, row["hisco"], *(_kept(kind, shared) for kind in written[title]))
                for title in row[column].split("|")
                if title
            ]
            for row in rows
        ]
    return found


def _check(titles: list[tuple[str, str]], column: str) -> None:
    code_of: dict[str, str] = {}
    for title, code in titles:
        if code_of.setdefault(title, code) != code:
            raise ValueError(
                f"occupations.csv: {title!r} ({column}) has the codes {code_of[title]} and {code}"
            )
        if set(title.split()) & set(AND[column]):
            raise ValueError(f"occupations.csv: {title!r} ({column}) reads like two occupations")


@lru_cache(maxsize=len(TAGS))
def _rules(column: str) -> tuple:
    """The spelling rules of a language: (substitution, what stands instead)."""
    return tuple((re.compile(pattern).sub, instead) for pattern, instead in SPELLING[column])


def _spellings(title: str, code: str, column: str) -> list[str]:
    """The spellings with one rule applied throughout, and up to as many with two. No occupation has its one
    spelling.
    """
    if code.startswith("-"):
        return []
    rules = _rules(column)
    one = [
        (at, new)
        for at, (substitute, instead) in enumerate(rules)
        if (new := substitute(instead, title)) != title
    ]
    two: list[str] = []
    for at, old in one:
        two += [new for substitute, instead in rules[at + 1 :] if (new := substitute(instead, old)) != old]
        if len(two) >= len(one):
            break
    return [new for new in dict.fromkeys([new for _, new in one] + two[: len(one)]) if new != title]


def _shared(titles: list[tuple[str, str]], written: dict[str, tuple]) -> set[str]:
    """The ways of writing, casefolded, that stand for more than one code, or for another code's plain
    title.
    """
    of_code: dict[str, set[str]] = {}
    for title, code in titles:
        texts = of_code.setdefault(code, set())
        texts.add(title.casefold())
        for kind in written[title]:
            texts.update(map(str.casefold, kind))
    shared: set[str] = set()
    seen: set[str] = set()
    for texts in of_code.values():
        shared |= seen & texts
        seen |= texts
    return shared


def _kept(texts, shared: set[str]) -> tuple[str, ...]:
    if not shared.isdisjoint(map(str.casefold, texts)):
        texts = [text for text in texts if text.casefold() not in shared]
    return tuple(dict.fromkeys(texts))
