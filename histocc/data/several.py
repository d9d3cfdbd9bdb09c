"""Texts that name several occupations: where to split them, and whether the training codes each."""

import re
from functools import cache

import numpy as np

from histocc import lexicon
from histocc.data.arrays import PreparedData
from histocc.data.learned import hashes_of

_WORDS = r"(?:and|und|u\.|en|och|o\.|o|og|et|e|y)\s+"
SEPARATOR = re.compile(rf"(\s*[,;/+&]\s*(?:{_WORDS})?|\s+{_WORDS})", re.IGNORECASE)
MAX_PARTS = 5  # texts with more parts are not split
# least number of distinct training texts, and of those with known parts
TEXTS_LOOKED_AT, MIN_WITH_PARTS = 50_000, 10


@cache
def listed_hashes(rule: str) -> np.ndarray:
    """Return the hashes of all listed titles, as a model with this text rule reads them."""
    titles = [title for language in lexicon.LEXICON_LANGUAGES for title in lexicon.titles(language)]
    return hashes_of(titles, rule)


def parts_of_texts(texts: list[str], known: np.ndarray, rule: str) -> list[list[str]]:
    """Return the parts of each text, the first ones as long as possible. The hashes (`hashes_of`) of all are
    in `known`. A text that is known itself or has no such parts gives [].
    """
    rows = [row if 1 < len(row) < 2 * MAX_PARTS else [] for row in map(SEPARATOR.split, texts)]
    places = ((row, i, j) for row in rows for j in range(1, len(row) + 1, 2) for i in range(0, j, 2))
    runs = ["".join(row[i:j]) for row, i, j in places]
    are_known = {runs[i] for i in np.flatnonzero(np.isin(hashes_of(runs, rule), known))}

    def cut(row: list[str]) -> list[str]:
        for end in range(len(row), 0, -2):
            run, rest = "".join(row[:end]), row[end + 1 :]
            if run in are_known and (not rest or cut(rest)):
                return [run, *cut(rest)]
        return []

    return [parts if len(parts) > 1 else [] for parts in map(cut, rows)]


def splits(data: PreparedData) -> bool:
    """Return whether the training codes each occupation: most texts with known parts have several codes."""
    rows = np.unique(data.train.text_hash, return_index=True)[1][:TEXTS_LOOKED_AT]
    texts, rule = data.train.strings(rows), data.clean_text
    whole = [text for text in texts if not SEPARATOR.search(text)]
    if len(texts) - len(whole) < MIN_WITH_PARTS:  # the lists take a second to hash
        return False
    known = np.append(listed_hashes(rule), hashes_of(whole, rule))
    found = [bool(parts) for parts in parts_of_texts(texts, known, rule)]
    several = (data.train.codes[rows[found]] >= 0).sum(axis=1) > 1
    return len(several) >= MIN_WITH_PARTS and bool(several.mean() > 0.5)
