"""Training rows with one code each, joined into rows with two: `farmer` and `smith` make `farmer and smith`.

Descriptions with several codes are few in most data. A joined row is one row whose text and codes are
those of both rows; noise on the text comes afterwards. Only training rows are joined, and which ones is a
pure function of (seed, epoch, row): the same on any number of processes, in any batch, and after a restart.
"""

from functools import cached_property

import numpy as np

from histocc.data.arrays import PreparedData
from histocc.data.augment import piece_ranges
from histocc.runtime.rng import below, chance, draw, streams
from histocc.text import UNKNOWN_LANGUAGE, code_points, join_texts, language_table
from histocc.text_rules import ASCII_LOWER, ascii_lower

# The word between two descriptions, by language; other languages have that of `unk`.
AND = {
    "en": "and",
    "da": "og",
    "no": "og",
    "is": "og",
    "se": "och",
    "nl": "en",
    "ge": "und",
    "fr": "et",
    "es": "y",
    "it": "e",
    "pt": "e",
    "ca": "i",
    "gr": "και",
    UNKNOWN_LANGUAGE: "and",
}

_JOINED, _OTHER = range(2)  # draws of one row, by number
_CHUNK = 1 << 18  # rows


class JoinedRows:
    """Joins some of the training rows that have one code with another such row of the same language.

    A row stays alone where both have the same code, where the joined text would not fit into `max_len`
    positions (also with its language hidden), or where the row itself is drawn, as where its language has no
    other. Needs 8 bytes for each row with one code, in every process; what is sent to a loading process is
    small.

    Args:
        data: prepared rows; their training part is joined.
        seed: of all draws.
        probability: that a row is to be joined, 0…1.
        max_len: most positions of an input.

    Raises:
        ValueError: for a probability out of range, and for data whose rows have room for one code alone.
    """

    def __init__(self, data: PreparedData, seed: int, probability: float, max_len: int = 128):
        if not 0 <= probability <= 1:
            raise ValueError(f"the probability of joining must be between 0 and 1, not {probability}")
        if data.max_codes < 2:
            raise ValueError("rows of this data have room for one code, joined ones have two")
        self.rows, self.languages = data.train, len(data.languages)
        self.seed, self.probability = seed, probability
        cleaned = ascii_lower if data.clean_text == ASCII_LOWER else str
        words = [code_points(cleaned(f" {AND.get(name, AND[UNKNOWN_LANGUAGE])} ")) for name in data.languages]
        self.words, self.word_offsets = join_texts(words)
        before = language_table(data.languages)[1]  # positions, int64 [L]
        self.room = max_len - 1 - np.maximum(before, before[data.languages.index(UNKNOWN_LANGUAGE)])

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_by_language"}

    @cached_property
    def _by_language(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows with one code, language by language, int64 [M]; where each language begins, int64 [L + 1])"""
        alone = [
            start + np.flatnonzero(_one_code(self.rows.codes[start : start + _CHUNK]))
            for start in range(0, len(self.rows), _CHUNK)
        ]
        rows = np.concatenate(alone) if alone else np.zeros(0, dtype=np.int64)
        language = np.asarray(self.rows.language)[rows]
        starts = np.concatenate([[0], np.cumsum(np.bincount(language, minlength=self.languages))])
        return rows[np.argsort(language, kind="stable")], starts

    def characters(self) -> np.ndarray:
        """Code points that joining puts into texts, uint32."""
        return np.unique(self.words)

    def apply(
        self,
        flat: np.ndarray,
        offsets: np.ndarray,
        codes: np.ndarray,
        language: np.ndarray,
        rows: np.ndarray,
        epoch: int,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """B training rows, some of them joined with another one.

        Args:
            flat: uint32 [N], code points of all texts.
            offsets: int64 [B + 1], text i is flat[offsets[i]:offsets[i + 1]].
            codes: int64 [B, K], numbers of each row's codes, −1 behind the last.
            language: int64 [B], their numbers.
            rows: int64 [B], row numbers in the training part.
            epoch: from 0.

        Returns:
            Texts (flat uint32, offsets int64 [B + 1], from 0) and codes int64 [B, K]. The arguments stay as
            they are.
        """
        stream = streams(self.seed, epoch, rows)
        joined = np.flatnonzero(chance(draw(stream, _JOINED), self.probability) & _one_code(codes))
        of_language, starts = self._by_language
        kind = language[joined]
        choice = below(draw(stream[joined], _OTHER), starts[kind + 1] - starts[kind])
        others = of_language[starts[kind] + choice]
        second = self.rows.codes[others, 0].astype(np.int64)
        own, between = np.diff(offsets), np.diff(self.word_offsets)
        fits = own[joined] + between[kind] + self.rows.lengths(others) <= self.room[kind]
        kept = fits & (second != codes[joined, 0])
        joined, kind, others = joined[kept], kind[kept], others[kept]
        texts, text_offsets = self.rows.texts(others)
        begins, sizes = np.zeros((len(rows), 3), dtype=np.int64), np.zeros((len(rows), 3), dtype=np.int64)
        begins[:, 0], sizes[:, 0] = offsets[:-1], own
        begins[joined, 1], sizes[joined, 1] = len(flat) + self.word_offsets[kind], between[kind]
        begins[joined, 2] = len(flat) + len(self.words) + text_offsets[:-1]
        sizes[joined, 2] = np.diff(text_offsets)
        codes = codes.copy()
        codes[joined, 1] = second[kept]
        pool = np.concatenate([flat, self.words, texts])
        ends = np.cumsum(sizes.sum(axis=1))
        return pool[piece_ranges(begins.ravel(), sizes.ravel())], np.concatenate([[0], ends]), codes


def _one_code(codes: np.ndarray) -> np.ndarray:
    """Which rows of `codes` int [B, K] have exactly one; bool [B]."""
    return (codes[:, 0] >= 0) & (codes[:, 1] < 0)
