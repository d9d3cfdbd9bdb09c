"""The table of occupations and, for each title, the ways in which registers write it that belong to no other code."""

import csv
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from histocc.sample.words import AND, SHORT, SPELLING, TAGS

# A letter and what a hasty reader of old handwriting takes it for.
MISREAD = {"n": "u", "u": "n", "e": "c", "c": "e", "a": "o", "o": "a", "t": "l", "l": "t", "h": "k", "r": "v", "m": "n",
           "f": "s", "b": "h", "v": "r", "ö": "o", "ä": "a", "å": "a"}
SHORTEST_SLIP = 6                          # letters a title needs before it is misread or cut short
_CONSONANTS = frozenset("bcçdfghjklmnpqrsßtvwxz")


@dataclass(frozen=True)
class Forms:
    """How one title is written: as it is, in other spellings, misread, and cut short with a dot."""
    title: str
    code: str
    spellings: tuple[str, ...]
    slips: tuple[str, ...]
    short: tuple[str, ...]


def read_table() -> list[dict[str, str]]:
    """The rows of occupations.csv: the code in `hisco`, and a column of titles for each language, joined by `|`."""
    text = resources.files("histocc.sample").joinpath("occupations.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@lru_cache(maxsize=1)
def forms() -> dict[str, list[list[Forms]]]:
    """For each language tag, the forms of each occupation's titles, in the order of the table.

    A way of writing that two codes of a language could share is left out. Raises ValueError if a title itself is shared,
    or holds the word that joins two occupations."""
    rows = read_table()
    found = {}
    for column, tag in TAGS.items():
        titles = [(title, row["hisco"]) for row in rows for title in row[column].split("|") if title]
        _check(titles, column)
        written = {title: _written(title, code, column) for title, code in titles}
        for title, short in _cut_short(titles).items():
            written[title][2].extend(short)
        shared = _shared(titles, written)
        kept = {title: [tuple(t for t in dict.fromkeys(kind) if t not in shared) for kind in kinds]
                for title, kinds in written.items()}
        found[tag] = [[Forms(title, row["hisco"], *kept[title]) for title in row[column].split("|") if title]
                      for row in rows]
    return found


def _check(titles: list[tuple[str, str]], column: str) -> None:
    code_of: dict[str, str] = {}
    for title, code in titles:
        if code_of.setdefault(title, code) != code:
            raise ValueError(f"occupations.csv: {title!r} ({column}) has the codes {code_of[title]} and {code}")
        if set(title.split()) & set(AND[column]):
            raise ValueError(f"occupations.csv: {title!r} ({column}) reads like two occupations")


def _written(title: str, code: str, column: str) -> list[list[str]]:
    """[spellings, slips, abbreviations] of a title; no occupation at all is only misread."""
    spellings = [] if code.startswith("-") else _respelled(title, SPELLING[column])
    return [spellings, _slips(title), list(SHORT[column].get(title, ()))]


def _respelled(title: str, rules) -> list[str]:
    """The spellings with one rule applied throughout, and up to as many with two."""
    def apply(text, some_rules):
        return [(at, new) for at, (pattern, repl) in some_rules if (new := re.sub(pattern, repl, text)) != text]

    numbered = list(enumerate(rules))
    one = apply(title, numbered)
    two = [new for at, old in one for _, new in apply(old, numbered[at + 1:])]
    return [new for new in dict.fromkeys([new for _, new in one] + two[: len(one)]) if new != title]


def _slips(title: str) -> list[str]:
    """The title with one letter left out, doubled, misread or swapped with the next; never at the start of a word."""
    if len(title) < SHORTEST_SLIP:
        return []
    slips = []
    for at in range(1, len(title)):
        before, letter, after = title[:at], title[at], title[at + 1:]
        if not letter.isalpha() or before[-1] == " ":
            continue
        slips += [before + after, before + letter * 2 + after]
        if letter in MISREAD:
            slips.append(before + MISREAD[letter] + after)
        if after and after[0].isalpha():
            slips.append(before + after[0] + letter + after[1:])
    return [slip for slip in slips if slip != title]


def _cut_short(titles: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Titles of eight letters or more, cut after a consonant, where no title with another code begins in that way."""
    codes: dict[str, set[str]] = {}
    for title, code in titles:
        for length in range(SHORTEST_SLIP, len(title)):
            codes.setdefault(title[:length], set()).add(code)
    return {title: [title[:length] + "." for length in range(SHORTEST_SLIP, len(title) - 2)
                    if title[length - 1] in _CONSONANTS and len(codes[title[:length]]) == 1]
            for title, code in titles if not code.startswith("-")}


def _shared(titles: list[tuple[str, str]], written: dict[str, list[list[str]]]) -> set[str]:
    """The ways of writing that stand for more than one code, or for another code's plain title."""
    codes: dict[str, set[str]] = {}
    for title, code in titles:
        for text in (title, *(t for kind in written[title] for t in kind)):
            codes.setdefault(text, set()).add(code)
    return {text for text, its in codes.items() if len(its) > 1}
