"""The codes of a key by words: of their titles, of word lists in six languages, of texts that are decided."""

import math
import re
from collections import Counter
from functools import cache
from itertools import chain

from histocc import lexicon
from histocc.formatter import NO_WORK, hisco_classes
from histocc.review.sheet import Codes, Key
from histocc.text import text_key

FOUND = 20  # codes for a query
WHOLE, BEGINNING, PART, MISSPELLED = range(4)  # how a word of a title fits a word of the query


@cache
def word_lists() -> dict[str, tuple[str, ...]]:
    """Return the HISCO codes of each title in the lists that come with histocc, but places and dates (-1)."""
    found: dict[str, dict[str, None]] = {}
    for language in lexicon.LANGUAGES:
        for title, code in lexicon.titles(language).items():
            if code != "-1":
                found.setdefault(text_key(title), {})[code] = None
    return {title: tuple(codes) for title, codes in found.items()}


class Search:
    """The search of the page, and the codes offered for the words of a text. lists: further titles."""

    def __init__(self, codes: Codes, lists: dict[str, tuple[str, ...]]):
        self.titles = codes.words
        self.digits = {code: _digits(code) for code in sorted(codes.codes)}
        classes = hisco_classes()["hisclass"]  # headings of HISCO have none
        self.headings = {code for code in self.digits if code.endswith("00") and not classes.get(code, "x")}
        self.headings |= NO_WORK  # come last, too: relatives and pupils are listed with trades
        self.codes_of: dict[Key, tuple[str, ...]] = {}  # titles have no language
        self.with_word: dict[str, list[Key]] = {}
        self.used: Counter[str] = Counter()  # how many texts each code was given to
        for title, of_title in chain(codes.of_title.items(), lists.items()):
            known = tuple(code for code in of_title if code in codes.codes)
            self._add((title, ""), (*self.codes_of.get((title, ""), ()), *known))

    def _add(self, key: Key, codes: tuple[str, ...]) -> None:
        if key not in self.codes_of:
            for word in words_of(key[0]):
                self.with_word.setdefault(word, []).append(key)
        self.codes_of[key] = codes

    def decide(self, key: Key, codes: tuple[str, ...]) -> None:
        """Find a text that is decided under these codes; () for none of them any more."""
        self.used.subtract(self.codes_of.get(key, ()))
        self.used.update(codes)
        self._add(key, codes)

    def like(self, text: str, most: int) -> list[str]:
        """Return codes of titles and decided texts that share words with a text, the most similar first."""
        words = {word: self._weight(word) for word in words_of(text) if word in self.with_word}
        shared: Counter[Key] = Counter()
        for word, weight in words.items():
            shared.update(dict.fromkeys(self.with_word[word], weight))
        near: dict[str, float] = {}
        for key, weight in shared.items():
            of_title = weight / math.sqrt(sum(map(self._weight, words_of(key[0]))))
            for code in self.codes_of[key]:
                near[code] = max(near.get(code, 0.0), of_title)
        order = {code: (-near[code], code in self.headings, -self.used[code], code) for code in near}
        return sorted(order, key=order.__getitem__)[:most]

    def _weight(self, word: str) -> float:
        return math.log((1 + len(self.codes_of)) / len(self.with_word[word])) ** 2

    def find(self, query: str) -> list[tuple[str, str]]:
        """Return the codes that fit best, each with the title or text that fits. All words of the query must
        stand in it, perhaps as a part of a word, in the plural, or with one wrong letter; or the query is a
        part of the code, such as 6-11.10.
        """
        query, digits = text_key(query), _digits(query)
        fits = [self._fitting(word) for word in words_of(query)]
        best: dict[str, tuple[int, int, int, str]] = {}  # title of each code that fits best
        titles: Counter[tuple[str, int]] = Counter()
        for title, language in set.intersection(*map(set, fits)) if fits else ():
            # 0: the query; 1: its plural, or without an accent; 2: a title with other words or letters
            is_near = len(words_of(title)) == len(fits) and abs(len(title) - len(query)) <= 2
            differs = 0 if title == query else 2 - is_near
            place = differs, max(each[title, language] for each in fits), len(title), title
            for code in self.codes_of[title, language]:
                best[code] = min(best.get(code, place), place)
                titles[code, place[1]] += 1
        ranks: dict[str, tuple] = {}  # its rank, which ends with its title
        for code, (differs, fit, _, title) in best.items():
            known = code in self.headings, differs, fit == MISSPELLED, not self.used[code]
            ranks[code] = (*known, fit, -titles[code, fit], code, title)
        for code, own in self.digits.items() if digits else ():
            if digits in own:
                place = False, 2 * (own != digits), False, False, not own.startswith(digits), 0
                ranks[code] = (*place, code, self.titles.get(code, ""))
        return [(code, ranks[code][-1]) for code in sorted(ranks, key=ranks.__getitem__)[:FOUND]]

    def _fitting(self, word: str) -> dict[Key, int]:
        """Return the titles with a word that fits, and how it does."""
        fitting = {}
        if len(word) > 1:
            within = [other for other in self.with_word if word in other]
            fitting = {other: BEGINNING for other in within if other.startswith(word)}
            if len(word) > 2:
                fitting = dict.fromkeys(within, PART) | fitting
        fitting |= {other: BEGINNING for other in _without(word, "r", "er", "n", "en", "e")}
        fitting |= dict.fromkeys([word, re.sub("ies$", "y", word), *_without(word, "s", "es")], WHOLE)
        if fitting.keys().isdisjoint(self.with_word) and len(word) > 3:
            half = len(word) // 2
            near = (o for o in self.with_word if o.startswith(word[:half]) or o.endswith(word[half:]))
            fitting = {other: MISSPELLED for other in near if _one_letter_off(word, other)}
        found: dict[Key, int] = {}
        for other, fit in fitting.items():
            for key in self.with_word.get(other, ()):
                found[key] = min(fit, found.get(key, fit))
        return found


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _digits(code: str) -> str:
    return re.sub(r"[-.\s]", "", code.casefold())


def _without(word: str, *endings: str) -> list[str]:
    """Return what is left of a word without endings of the plural."""
    stems = (word.removesuffix(ending) for ending in endings)
    return [stem for stem in stems if stem != word and len(stem) > 3]


def _one_letter_off(one: str, other: str) -> bool:
    at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return one[at + 1 :] in (other[at:], other[at + 1 :]) or one[at:] == other[at + 1 :]
