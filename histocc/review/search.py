"""The search for codes by words: of titles, of word lists in six languages, and of decided texts."""

import math
import re
from collections import Counter
from functools import cache
from itertools import chain

from histocc import lexicon
from histocc.formatter import NO_WORK, hisco_classes
from histocc.review.sheet import Codes, Pair
from histocc.text import text_key

FOUND = 20  # codes for a query
WHOLE, BEGINNING, INSIDE, MISSPELLED = range(4)  # how a word of a title fits a word of the query


@cache
def word_lists() -> dict[str, tuple[str, ...]]:
    """Return the HISCO codes of each title in histocc's lists, except places and dates (-1)."""
    found: dict[str, dict[str, None]] = {}
    for language in lexicon.LEXICON_LANGUAGES:
        for title, code in lexicon.titles(language).items():
            if code != "-1":
                found.setdefault(text_key(title), {})[code] = None
    return {title: tuple(codes) for title, codes in found.items()}


class Search:
    """The page's search for codes, and the codes offered for a text's words. lists: more titles."""

    def __init__(self, codes: Codes, lists: dict[str, tuple[str, ...]]):
        self.titles = codes.words
        self.digits = {code: _digits(code) for code in sorted(codes.codes)}
        classes = hisco_classes()["hisclass"]  # HISCO's headings have none
        self.headings = {code for code in self.digits if code.endswith("00") and not classes.get(code, "x")}
        self.headings |= NO_WORK  # also last: relatives and pupils are listed with trades
        self.codes_of: dict[Pair, tuple[str, ...]] = {}  # titles have no language
        self.with_word: dict[str, list[Pair]] = {}
        self.used: Counter[str] = Counter()  # how many texts have each code
        for title, of_title in chain(codes.of_title.items(), lists.items()):
            known = tuple(code for code in of_title if code in codes.codes)
            self._add((title, ""), (*self.codes_of.get((title, ""), ()), *known))

    def _add(self, pair: Pair, codes: tuple[str, ...]) -> None:
        if pair not in self.codes_of:
            for word in words_of(pair[0]):
                self.with_word.setdefault(word, []).append(pair)
        self.codes_of[pair] = codes

    def decide(self, pair: Pair, codes: tuple[str, ...]) -> None:
        """Let the search find a decided text under these codes. () forgets it."""
        self.used.subtract(self.codes_of.get(pair, ()))
        self.used.update(codes)
        self._add(pair, codes)

    def like(self, text: str, most: int) -> list[str]:
        """Return codes of titles and decided texts that share words with a text, the most similar first."""
        words = {word: self._weight(word) for word in words_of(text) if word in self.with_word}
        shared: Counter[Pair] = Counter()
        for word, weight in words.items():
            shared.update(dict.fromkeys(self.with_word[word], weight))
        near: dict[str, float] = {}
        for pair, weight in shared.items():
            of_title = weight / math.sqrt(sum(map(self._weight, words_of(pair[0]))))
            for code in self.codes_of[pair]:
                near[code] = max(near.get(code, 0.0), of_title)
        order = {code: (-near[code], code in self.headings, -self.used[code], code) for code in near}
        return sorted(order, key=order.__getitem__)[:most]

    def _weight(self, word: str) -> float:
        return math.log((1 + len(self.codes_of)) / len(self.with_word[word])) ** 2

    def find(self, query: str) -> list[tuple[str, str]]:
        """Return the codes that fit best, each with the title or text that fits. All words of the query must
        occur in it: whole, as a part of a word, in the plural, or with one wrong letter. A query may also be
        a part of the code, such as 6-11.10.
        """
        query, digits = text_key(query), _digits(query)
        fits = [self._fitting(word) for word in words_of(query)]
        best: dict[str, tuple[int, int, int, str]] = {}  # the best title of each code
        titles: Counter[tuple[str, int]] = Counter()
        for title, language in set.intersection(*map(set, fits)) if fits else ():
            # 0 is the query, 1 its plural or without an accent, 2 a title with other words or letters
            is_near = len(words_of(title)) == len(fits) and abs(len(title) - len(query)) <= 2
            differs = 0 if title == query else 2 - is_near
            place = differs, max(each[title, language] for each in fits), len(title), title
            for code in self.codes_of[title, language]:
                best[code] = min(best.get(code, place), place)
                titles[code, place[1]] += 1
        ranks: dict[str, tuple] = {}  # the code's rank, which ends with its title
        for code, (differs, fit, _, title) in best.items():
            known = code in self.headings, differs, fit == MISSPELLED, not self.used[code]
            ranks[code] = (*known, fit, -titles[code, fit], code, title)
        for code, own in self.digits.items() if digits else ():
            if digits in own:
                place = False, 2 * (own != digits), False, False, not own.startswith(digits), 0
                ranks[code] = (*place, code, self.titles.get(code, ""))
        return [(code, ranks[code][-1]) for code in sorted(ranks, key=ranks.__getitem__)[:FOUND]]

    def _fitting(self, word: str) -> dict[Pair, int]:
        """Return the titles with a fitting word, and how it fits."""
        fitting = {}
        if len(word) > 1:
            within = [other for other in self.with_word if word in other]
            fitting = {other: BEGINNING for other in within if other.startswith(word)}
            if len(word) > 2:
                fitting = dict.fromkeys(within, INSIDE) | fitting
        fitting |= {other: BEGINNING for other in _without(word, "r", "er", "n", "en", "e")}
        fitting |= dict.fromkeys([word, re.sub("ies$", "y", word), *_without(word, "s", "es")], WHOLE)
        if fitting.keys().isdisjoint(self.with_word) and len(word) > 3:
            half = len(word) // 2
            near = (o for o in self.with_word if o.startswith(word[:half]) or o.endswith(word[half:]))
            fitting = {other: MISSPELLED for other in near if _one_letter_off(word, other)}
        found: dict[Pair, int] = {}
        for other, fit in fitting.items():
            for pair in self.with_word.get(other, ()):
                found[pair] = min(fit, found.get(pair, fit))
        return found


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _digits(code: str) -> str:
    return re.sub(r"[-.\s]", "", code.casefold())


def _without(word: str, *endings: str) -> list[str]:
    """Return a word without each of these endings, if more than three letters remain."""
    stems = (word.removesuffix(ending) for ending in endings)
    return [stem for stem in stems if stem != word and len(stem) > 3]


def _one_letter_off(one: str, other: str) -> bool:
    at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return one[at + 1 :] in (other[at:], other[at + 1 :]) or one[at:] == other[at + 1 :]
