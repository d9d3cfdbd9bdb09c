"""Noise on descriptions, for training: slips of the pen and of the keyboard, on arrays of code points.

The noise of a row is a function of (seed, epoch, row), from a counter-based generator. It does not depend on
batch, order or number of processes. A whole batch is changed at once: a transformation assembles each text
from five pieces of a pool of texts, drawn letters and words. The new texts are one gather from that pool.
"""

import unicodedata
from collections.abc import Sequence
from itertools import compress

import numpy as np

from histocc.runtime.rng import below, chance, draw, streams
from histocc.text import ascii_lower, code_points, texts_of_pieces

CHANGES = ("delete", "keyboard", "insert", "substitute", "swap", "swap_words", "edges", "insert_word")
MAX_EDGE = 20  # most characters that "edges" puts on one side

# Draws of one row, by number: two for the row, then a block for each transformation.
_ALTERED, _LANGUAGE, _BLOCK = 0, 1, 64
_KIND, _WHERE, _WHAT, _LEADING, _TRAILING, _LETTERS = range(6)  # letters: 2 · MAX_EDGE draws from here

# ---- characters

_LATIN = "abcdefghijklmnopqrstuvwxyz"
_NATIONAL = "àáâãäåæçèéêëìíîïðñòóôõöøùúûüýþßœ"  # da se nl ca fr no is pt ge es it
_GREEK = "αβγδεζηθικλμνξοπρσςτυφχψωάέήίόύώ"
# Rows of keys from the digits down, from the left. Each key is between the two keys above it.
_KEYBOARDS = {
    "en": ("1234567890-=", "qwertyuiop[]", "asdfghjkl;'", "zxcvbnm,./"),
    "da": ("1234567890+´", "qwertyuiopå¨", "asdfghjklæø'", "zxcvbnm,.-"),
    "no": ("1234567890+\\", "qwertyuiopå¨", "asdfghjkløæ'", "zxcvbnm,.-"),
    "se": ("1234567890+´", "qwertyuiopå¨", "asdfghjklöä'", "zxcvbnm,.-"),
    "ge": ("1234567890ß´", "qwertzuiopü+", "asdfghjklöä#", "yxcvbnm,.-"),
    "fr": ("&é\"'(-è_çà)=", "azertyuiop^$", "qsdfghjklmù*", "wxcvbn,;:!"),
    "es": ("1234567890'¡", "qwertyuiop`+", "asdfghjklñ´ç", "zxcvbnm,.-"),
    "pt": ("1234567890'«", "qwertyuiop+´", "asdfghjklçº~", "zxcvbnm,.-"),
    "it": ("1234567890'ì", "qwertyuiopè+", "asdfghjklòàù", "zxcvbnm,.-"),
    "is": ("1234567890ö-", "qwertyuiopð'", "asdfghjklæ´+", "zxcvbnm,.þ"),
    "gr": ("1234567890-=", ";ςερτυθιοπ[]", "ασδφγηξκλ΄'", "ζχψωβνμ,./"),
}
_TABLE = 0x2000  # code points with an entry in the tables: Latin, Greek, …
_UPPER, _LOWER, _IS_GREEK, _BLANK = 1, 2, 4, 8


def _capital(letter: str) -> str:
    return letter.upper() if len(letter.upper()) == 1 else letter  # ß stays


def _keyboard_neighbors() -> dict[str, str]:
    """Return letter → its neighboring letters: a–z on the English keyboard, others on every keyboard that
    has them. An accented letter without a key gets its bare letter, and that letter with other accents.
    """
    near: dict[str, set[str]] = {}
    letters = set(_LATIN + _NATIONAL + _GREEK)
    for name, rows in _KEYBOARDS.items():
        key = {(r, c): char for r, row in enumerate(rows) for c, char in enumerate(row)}
        for (r, c), char in key.items():
            if char in (_LATIN if name == "en" else _GREEK if name == "gr" else _NATIONAL):
                around = [(r, c - 1), (r, c + 1), (r - 1, c), (r - 1, c + 1), (r + 1, c - 1), (r + 1, c)]
                near.setdefault(char, set()).update(key[p] for p in around if key.get(p) in letters)
    bare = {char: unicodedata.normalize("NFD", char)[0] for char in _NATIONAL + _GREEK}
    for char in bare:
        if char not in near:
            near[char] = {bare[char]} | {c for c in bare if bare[c] == bare[char]}
    near["œ"] = {"o", "e"}
    lower = {char: "".join(sorted(others - {char})) for char, others in near.items()}
    return lower | {
        _capital(char): "".join(map(_capital, others)) for char, others in lower.items() if char != "ß"
    }


def _ragged(texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all characters, uint32, and the start and length of each text, int64."""
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    return code_points("".join(texts)), np.cumsum(lengths) - lengths, lengths


_CHARS = [chr(i) for i in range(_TABLE)]
# Class bits of each code point, [_TABLE].
_CLASS = np.array([_UPPER * c.isupper() + _LOWER * c.islower() + _BLANK * c.isspace() for c in _CHARS])
_CLASS[0x370:0x400] |= [_IS_GREEK * c.isalpha() for c in _CHARS[0x370:0x400]]
_CLASS = _CLASS.astype(np.uint8)
_NEAR = _keyboard_neighbors()
_NEAR_FLAT, _NEAR_START, _NEAR_COUNT = _ragged([_NEAR.get(char, "") for char in _CHARS])
# Four alphabets, by style: Latin, Latin capitals, Greek, Greek capitals. Each has a–z nine times and national
# letters once. Only "edges" draws the blanks at the end, about 1 in 27.
_ALPHABETS = [
    "".join(map(case, letters)) for letters in (_LATIN * 9 + _NATIONAL, _GREEK) for case in (str, _capital)
]
_BLANKS = [len(alphabet) // 26 for alphabet in _ALPHABETS]
_ALPHABET_FLAT, _ALPHABET_START, _ALPHABET_SIZE = _ragged([a + " " * n for a, n in zip(_ALPHABETS, _BLANKS)])
_LETTER_COUNT = _ALPHABET_SIZE - np.array(_BLANKS)


# The letter of a–z that replaces each inserted letter. Other characters of the table stay.
_IN_ASCII = np.arange(_TABLE, dtype=np.uint32)
for _letter in _NATIONAL:
    _IN_ASCII[ord(_letter)] = ord(ascii_lower(_letter)[0])


def noise_characters() -> np.ndarray:
    """Return every character that noise can insert, except in words, as uint32."""
    return np.unique(np.concatenate([_ALPHABET_FLAT, _NEAR_FLAT, np.full(1, 32, dtype=np.uint32)]))


def _class_of(characters: np.ndarray) -> np.ndarray:
    return _CLASS[np.minimum(characters, _TABLE - 1)]


def _style(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return which alphabet suits the case and script of two characters, int64."""
    both = _class_of(before) | _class_of(after)
    return ((both & (_UPPER | _LOWER)) == _UPPER) + 2 * ((both & _IS_GREEK) > 0).astype(np.int64)


# ---- one transformation of many texts


class _Transformation:
    """The five pieces that make up each of M texts. An unchanged text is its first piece. A method named
    after a kind of noise applies it to the texts `k` (indices, int64). first: number of its first draw.
    words: the words to insert, as `_ragged` returns them, and their cumulative weights.
    """

    def __init__(self, text: np.ndarray, length: np.ndarray, stream: np.ndarray, first: int, words: tuple):
        self.text, self.length, self.stream, self.first, self.words = text, length, stream, first, words
        self.end = np.cumsum(length)
        self.base = self.end - length
        self.bits = draw(stream[:, None], np.arange(first, first + _LETTERS))  # [M, 5]
        self.start, self.size = np.zeros((2, len(length), 5), dtype=np.int64)
        self.start[:, 0], self.size[:, 0] = self.base, length
        self.pool, self.pool_size = [text, np.full(1, 32, dtype=np.uint32)], len(text) + 1
        self.blank = len(text)  # place of a space in the pool
        self.ink = (_class_of(text) & _BLANK) == 0
        begins = np.zeros(len(text), dtype=bool)
        begins[self.base] = True  # a text begins here
        inside = self.ink[1:] & self.ink[:-1] & ~begins[1:]  # continues from its left
        self.word_start = np.flatnonzero(self.ink & ~np.concatenate([[False], inside]))
        self.word_end = np.flatnonzero(self.ink & ~np.concatenate([inside, [False]])) + 1

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (the new texts uint32, their lengths int64 [M])."""
        return texts_of_pieces(np.concatenate(self.pool), self.start, self.size)[0], self.size.sum(axis=1)

    def add(self, characters: np.ndarray) -> int:
        """Put characters into the pool and return where they begin."""
        self.pool.append(characters)
        self.pool_size += len(characters)
        return self.pool_size - len(characters)

    def splice(self, k: np.ndarray, at: np.ndarray, cut: int | np.ndarray, *pieces) -> None:
        """Replace `cut` characters at `at` in texts k by up to three pieces (start, size)."""
        self.size[k, 0] = at - self.base[k]
        for number, (start, size) in enumerate(pieces, 1):
            self.start[k, number], self.size[k, number] = start, size
        self.start[k, 4], self.size[k, 4] = at + cut, self.end[k] - at - cut

    def place(self, k: np.ndarray, shorter: int = 0) -> np.ndarray:
        """Draw evenly among the characters of each text k, except the last `shorter`."""
        return self.base[k] + below(self.bits[k, _WHERE], self.length[k] - shorter)

    def letters(self, k: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Put a letter per text into the pool, in the style of two places, and return their positions."""
        before, after = np.maximum(before, self.base[k]), np.minimum(after, self.end[k] - 1)
        style = _style(self.text[before], self.text[after])
        choice = _ALPHABET_START[style] + below(self.bits[k, _WHAT], _LETTER_COUNT[style])
        return self.add(_ALPHABET_FLAT[choice]) + np.arange(len(k))

    def delete(self, k: np.ndarray) -> None:
        at = self.place(k)
        visible = np.concatenate([[0], np.cumsum(self.ink)])
        visible = visible[self.end[k]] - visible[self.base[k]]
        ok = (self.length[k] > 1) & ~((visible == 1) & self.ink[at])
        self.splice(k[ok], at[ok], 1)

    def keyboard(self, k: np.ndarray) -> None:
        at = self.place(k)
        char = np.minimum(self.text[at], _TABLE - 1)
        ok = _NEAR_COUNT[char] > 0
        k, at, char = k[ok], at[ok], char[ok]
        choice = _NEAR_START[char] + below(self.bits[k, _WHAT], _NEAR_COUNT[char])
        self.splice(k, at, 1, (self.add(_NEAR_FLAT[choice]) + np.arange(len(k)), 1))

    def insert(self, k: np.ndarray) -> None:
        at = self.place(k, shorter=-1)  # also after the last
        self.splice(k, at, 0, (self.letters(k, at - 1, at), 1))

    def substitute(self, k: np.ndarray) -> None:
        at = self.place(k)
        # other characters take the style of their neighbors
        other = ((_class_of(self.text[at]) & (_UPPER | _LOWER)) == 0).astype(np.int64)
        self.splice(k, at, 1, (self.letters(k, at - other, at + other), 1))

    def swap(self, k: np.ndarray) -> None:
        k = k[self.length[k] > 1]
        at = self.place(k, shorter=1)
        self.splice(k, at, 2, (at + 1, 1), (at, 1))

    def words_of(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the first word of texts k among all words, and their word count, int64."""
        number = np.searchsorted(self.word_start, self.base[k])
        return number, np.searchsorted(self.word_start, self.end[k]) - number

    def swap_words(self, k: np.ndarray) -> None:
        number, count = self.words_of(k)
        ok = count > 1
        k, left = k[ok], number[ok] + below(self.bits[k[ok], _WHERE], count[ok] - 1)
        a, b = self.word_start[left], self.word_end[left]
        c, d = self.word_start[left + 1], self.word_end[left + 1]
        self.splice(k, a, d - a, (c, d - c), (b, c - b), (a, b - a))

    def insert_word(self, k: np.ndarray) -> None:
        number, count = self.words_of(k)
        slot = below(self.bits[k, _WHERE], count + 1)
        last = slot == count  # the word goes to the end
        at = np.where(last, self.end[k], np.append(self.word_start, 0)[number + slot])
        flat, starts, sizes, cumulative = self.words
        point = (self.bits[k, _WHAT] >> np.uint64(11)) * 2.0**-53 * cumulative[-1]
        word = np.minimum(np.searchsorted(cumulative, point, side="right"), len(sizes) - 1)
        size = sizes[word]
        characters, offsets = texts_of_pieces(flat, starts[word, None], size[:, None])
        start = self.add(characters) + offsets[:-1]
        pieces = [(self.blank, 1), (start, size)]  # reversed if it is not the last
        pairs = zip(pieces, pieces[::-1])
        self.splice(k, at, 0, *((np.where(last, a, c), np.where(last, b, d)) for (a, b), (c, d) in pairs))

    def edges(self, k: np.ndarray) -> None:
        side = below(self.bits[k, _WHAT], 4)  # 0 left, 1 right, 2 and 3 both
        leading = np.where(side == 1, 0, 1 + below(self.bits[k, _LEADING], MAX_EDGE))
        trailing = np.where(side == 0, 0, 1 + below(self.bits[k, _TRAILING], MAX_EDGE))
        style = _style(self.text[self.base[k]], self.text[np.minimum(self.base[k] + 1, self.end[k] - 1)])
        numbers = np.arange(self.first + _LETTERS, self.first + _LETTERS + 2 * MAX_EDGE)
        choice = below(draw(self.stream[k][:, None], numbers), _ALPHABET_SIZE[style][:, None])
        choice += _ALPHABET_START[style][:, None]  # [m, 2 · MAX_EDGE]
        start = self.add(_ALPHABET_FLAT[choice].ravel()) + 2 * MAX_EDGE * np.arange(len(k))
        blank = np.full(len(k), self.blank)
        self.start[k] = np.stack([start, blank, self.base[k], blank, start + MAX_EDGE], axis=1)
        self.size[k] = np.stack([leading, side != 1, self.length[k], side != 0, trailing], axis=1)


class Augmenter:
    """Noise on descriptions and their language, with the rules and defaults used for the published OccCANINE
    models (Dahl, Johansen, Vedel, 2024, arXiv 2402.13604, and their package).

    With probability `augmentation_prob` a row goes through `num_transformations` transformations, each drawn
    evenly from the kinds below. One with nothing to act on changes nothing. Independently, the row's language
    is hidden with probability `unk_lang_prob`.

    - delete: a character, but never the last visible one. swap, swap_words: two neighbors.
    - keyboard: a character becomes a neighboring one: a–z on the English keyboard, other letters on theirs.
    - insert, substitute: a letter a–z, or in 32 of 266 draws a Latin letter of another language (æ, ß, …).
      Published noise has only a–z. Next to a Greek letter a Greek one, between capitals a capital.
    - edges: up to 20 letters and blanks before the text (1 in 4), after it (1 in 4) or both (2 in 4).
    - insert_word: one of `words` before or after another, in proportion to `word_weights`.
    With `only_ascii`, for texts in ASCII, a letter of another language becomes one of a–z.
    """

    def __init__(
        self,
        seed: int,
        num_transformations: int = 3,
        augmentation_prob: float = 0.3,
        unk_lang_prob: float = 0.25,
        words: Sequence[str] = (),
        word_weights: np.ndarray | Sequence[float] | None = None,
        only_ascii: bool = False,
    ):
        weights = np.ones(len(words)) if word_weights is None else np.asarray(word_weights, dtype=np.float64)
        self.words = (*_ragged(list(compress(words, weights > 0))), np.cumsum(weights[weights > 0]))
        self.kinds = CHANGES if len(self.words[-1]) else CHANGES[:-1]  # without insert_word
        self.seed, self.num_transformations = seed, num_transformations
        self.augmentation_prob, self.unk_lang_prob = augmentation_prob, unk_lang_prob
        self.only_ascii = only_ascii

    def hide_language(self, rows: np.ndarray, epoch: int) -> np.ndarray:
        """Return whether each row's language becomes `unk` in this epoch, bool [B]. rows: int64 [B]."""
        return chance(draw(streams(self.seed, epoch, rows), _LANGUAGE), self.unk_lang_prob)

    def apply(
        self, flat: np.ndarray, offsets: np.ndarray, rows: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return noisy copies of B texts (flat, offsets), none empty. rows: their numbers, int64 [B]."""
        offsets = np.asarray(offsets, dtype=np.int64)
        flat = np.asarray(flat[offsets[0] : offsets[-1]], dtype=np.uint32)
        starts, lengths = offsets[:-1] - offsets[0], np.diff(offsets)
        stream = streams(self.seed, epoch, rows)
        altered = np.flatnonzero(chance(draw(stream, _ALTERED), self.augmentation_prob) & (lengths > 0))
        if self.num_transformations == 0 or len(altered) == 0:
            return flat.copy(), offsets - offsets[0]
        length = lengths[altered]
        text, _ = texts_of_pieces(flat, starts[altered, None], length[:, None])
        for number in range(1, self.num_transformations + 1):
            change = _Transformation(text, length, stream[altered], _BLOCK * number, self.words)
            kind_of = below(change.bits[:, _KIND], len(self.kinds))
            for index, kind in enumerate(self.kinds):
                if len(k := np.flatnonzero(kind_of == index)):
                    getattr(change, kind)(k)
            text, length = change.result()
        if self.only_ascii:
            text = _IN_ASCII[np.minimum(text, _TABLE - 1)]
        starts[altered], lengths[altered] = len(flat) + np.cumsum(length) - length, length
        return texts_of_pieces(np.concatenate([flat, text]), starts[:, None], lengths[:, None])
