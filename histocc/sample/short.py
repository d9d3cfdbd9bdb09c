"""Abbreviations: clerks' usual ones, and those that any title may get: cut after a consonant, contracted, or
with only the beginning of its first words. Every hand shortens in its own way, so a title has several.
"""

import re

from histocc.sample.words import USUAL_SHORT

SHORTEST = 6  # letters a title needs to be cut short, and letters that are left
LEAST_BEFORE_END = 4  # letters before the end in "carpr"
MOST_CONTRACTIONS = 3
_VOWELS = "aeiouyæøåäöüàâéèêëîïôœù"
_CONSONANTS = frozenset("bcçdfghjklmnpqrsßtvwxz")
_HEAD = re.compile(rf"[^{_VOWELS} ]*[{_VOWELS}]+[^{_VOWELS} ]")
_VOWEL = re.compile(rf"[{_VOWELS}]")
_TWICE = re.compile(r"(\w)\1")


def abbreviations(titles: list[tuple[str, str]], column: str) -> dict[str, list[str]]:
    """For each (title, code) of a language its abbreviations. None of those that are made stands for a
    beginning, or a beginning and an end, that a title of another code has too; no occupation at all is not
    abbreviated.
    """
    working = [(title, code) for title, code in titles if not code.startswith("-")]
    beginnings = _ambiguous(
        (title[:length], code) for title, code in working for length in range(SHORTEST, len(title) + 1)
    )
    ends = _ambiguous(
        ((title[:length], title[-1]), code) for title, code in working for length in range(2, len(title))
    )
    words = _ambiguous((key, code) for title, code in working for key in _word_keys(title))
    return {
        title: [
            *USUAL_SHORT[column].get(title, ()),
            *_cut(title, beginnings),
            *_contracted(title, ends),
            *_first_letters(title, words),
        ]
        for title, _ in working
    }


def _ambiguous(keys) -> set:
    """What stands for more than one code."""
    code_of: dict = {}
    return {key for key, code in keys if code_of.setdefault(key, code) != code}


def _cut(title: str, beginnings: set) -> list[str]:
    """Eight letters or more cut after a consonant: "blacksm."."""
    return [
        title[:length] + "."
        for length in range(SHORTEST, len(title) - 2)
        if title[length - 1] in _CONSONANTS and title[:length] not in beginnings
    ]


def _contracted(title: str, ends: set) -> list[str]:
    """One word without the vowels of its middle ("carpntr"), or with nothing but its end after its beginning
    ("carpr").
    """
    head = _HEAD.match(title)
    if len(title) < SHORTEST + 1 or " " in title or not head or title[-1] in _VOWELS:
        return []
    stem = head[0]
    middle = _TWICE.sub(r"\1", _VOWEL.sub("", title[len(stem) : -1]))
    found = []
    if len(middle) < len(title) - len(stem) - 2 and (stem, title[-1]) not in ends:
        found.append(stem + middle + title[-1])
    for length in range(max(len(stem), LEAST_BEFORE_END), len(title) - 3):
        if title[length - 1] in _CONSONANTS and (title[:length], title[-1]) not in ends:
            found += [title[:length] + title[-1], title[:length] + title[-1] + "."]
    return found[:MOST_CONTRACTIONS]


def _word_keys(title: str) -> list[tuple[str, ...]]:
    """What is left of the words of a title when the first ones, or all of them, are shortened."""
    words = title.split()
    if len(words) < 2:
        return []
    return [(*(word[0] for word in words[:-1]), words[-1]), tuple(word[0] for word in words)]


def _first_letters(title: str, ambiguous: set) -> list[str]:
    """Several words by their first letters: "f. labourer"; if that is one code's alone, also "f.l."."""
    found = []
    words = title.split()
    keys = _word_keys(title)
    if keys and keys[0] not in ambiguous:
        start = "".join(f"{word[0]}. " for word in words[:-1])
        found += [start + words[-1], start.replace(" ", "") + words[-1]]
        found += [
            " ".join(f"{word[:3]}." if len(word) > 4 else word for word in words[:-1]) + f" {words[-1]}"
        ]
    if len(keys) > 1 and keys[1] not in ambiguous and len(words) < 4:
        found.append("".join(f"{word[0]}." for word in words))
    return found
