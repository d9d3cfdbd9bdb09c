"""Texts that name several occupations: where they are split, and whether a training codes each of them."""

import re

import numpy as np

from histocc import lexicon
from histocc.data.arrays import PreparedData
from histocc.data.learned import hashes_of

_WORDS = r"(?:and|und|u\.|en|och|o\.|o|og|et|e|y)\s+"
SEPARATOR = re.compile(rf"(\s*[,;/+&]\s*(?:{_WORDS})?|\s+{_WORDS})", re.IGNORECASE)
MOST = 5  # texts with more parts stay whole
MAX_TEXTS, MIN_TEXTS = 50_000, 10  # distinct texts of a training, and those of them with known parts


def listed(rule: str) -> np.ndarray:
    """Return the hashes of all titles in the lists, as a model with this text rule reads them."""
    titles = [title for language in lexicon.LANGUAGES for title in lexicon.titles(language)]
    return hashes_of([*titles, ""], rule)[:-1]


def parts_of(texts: list[str], known: np.ndarray, rule: str) -> list[list[str]]:
    """Return the parts of each text, the longest first of which all are known (by `hashes_of`); [] for a text
    that is known itself or has no such parts.
    """
    rows = [row if 1 < len(row) < 2 * MOST else [] for row in map(SEPARATOR.split, texts)]
    places = ((row, i, j) for row in rows for j in range(1, len(row) + 1, 2) for i in range(0, j, 2))
    runs = ["".join(row[i:j]) for row, i, j in places]
    are_known = {runs[i] for i in np.flatnonzero(np.isin(hashes_of([*runs, ""], rule)[:-1], known))}

    def cut(row: list[str]) -> list[str]:
        for end in range(len(row), 0, -2):
            run, rest = "".join(row[:end]), row[end + 1 :]
            if run in are_known and (not rest or cut(rest)):
                return [run, *cut(rest)]
        return []

    return [parts if len(parts) > 1 else [] for parts in map(cut, rows)]


def splits(data: PreparedData) -> bool:
    """Return whether a training codes each occupation of a text: most texts with known parts have several."""
    rows = np.unique(data.train.text_hash, return_index=True)[1][:MAX_TEXTS]
    texts, rule = data.train.strings(rows), data.clean_text
    single = hashes_of([*(text for text in texts if not SEPARATOR.search(text)), ""], rule)[:-1]
    found = [bool(parts) for parts in parts_of(texts, np.append(listed(rule), single), rule)]
    several = (data.train.codes[rows[found]] >= 0).sum(axis=1) > 1
    return len(several) >= MIN_TEXTS and bool(several.mean() > 0.5)
