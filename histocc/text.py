"""Text as the character ids that CANINE reads (Clark et al., 2021, arXiv 2103.06874, section 3.1).

One input is `[CLS] LANG[SEP]DESCRIPTION [SEP]`: the inner `[SEP]` is the five literal characters, the outer
two are CANINE's own code points. The texts of a batch are flat: code points uint32 [N] and offsets int64
[B + 1], where text i is flat[offsets[i]:offsets[i + 1]].
"""

import csv
import html
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from html.entities import html5
from importlib.resources import files

import numpy as np

from histocc.runtime.errors import UserError
from histocc.runtime.rng import GOLDEN_STEP, mix

CLS_ID = 0xE000
SEP_ID = 0xE001
LANGUAGE_SEPARATOR = "[SEP]"
COLUMN_SEPARATOR = "\u241f"  # ␟, between the texts of several columns
UNKNOWN_LANGUAGE = "unk"

# Languages of the published models. The last one is for unknown languages.
LANGUAGES = ("en", "da", "se", "nl", "ca", "fr", "no", "is", "pt", "ge", "es", "it", "gr", "unk")

# Few widths, for allocator and compiler. Wider inputs are whole chunks of CANINE's local attention: a chunk
# of padding only has values that depend on its length, and convolutions carry them into the chunk before.
_WIDTHS = (*range(16, 64, 4), *range(64, 129, 8))


def padded_width(n: int, max_len: int = 128) -> int:
    """Return the smallest fixed width at which `n` characters, besides [CLS] and [SEP], are encoded as at any
    greater width, at most `max_len`, rounded up to four. CANINE's upsampling convolution looks two positions
    ahead. From 128 positions on, the model omits the last block, as published.
    """
    need, most = 4 * ((n + 3) // 4) + 4, -(-max_len // 4) * 4
    if need > 124:
        need = -(-(need + 4) // 128) * 128
    return min(next((width for width in _WIDTHS if width >= need), need), most)


def best_cuts(widths: list[int], edges: list[int], groups: int) -> list[int]:
    """Return the bounds of at most `groups` groups of ascending `widths`, each as wide as its widest sample,
    with the fewest positions. edges[i] samples are narrower than widths[i].
    """
    best = {0: (0, [0])}  # widths covered → (positions, cuts)
    for _ in range(groups):
        more = dict(best)
        for begin, (positions, cuts) in best.items():
            for end in range(begin + 1, len(widths) + 1):
                cost = positions + (edges[end] - edges[begin]) * widths[end - 1]
                if end not in more or cost < more[end][0]:
                    more[end] = (cost, [*cuts, end])
        best = more
    return best[len(widths)][1]


def code_points(text: str) -> np.ndarray:
    """Return `text` as uint32 code points [n]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


# White space (`str.isspace`) of code points below the table's end. Above it there is none.
_SPACE = np.array([chr(i).isspace() for i in range(0x3001)] + [False])


def text_hashes(texts: list[str]) -> np.ndarray:
    """Return uint64 [n], equal on every machine for texts that differ only in case, blanks and composition of
    letters. The texts begin and end without white space and hold no NUL.
    """
    joined = "\0".join(texts).casefold() + "\0"
    points = code_points(unicodedata.normalize("NFC", joined))
    space = _SPACE[np.minimum(points, len(_SPACE) - 1)]
    doubled = space[1:] & space[:-1]
    if doubled.any():
        keep = np.concatenate([[True], ~doubled])
        points, space = points[keep], space[keep]
    values = np.where(space, np.uint32(32), points).astype(np.uint64)
    ends = np.flatnonzero(points == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    place = np.arange(len(values)) - np.repeat(starts, ends + 1 - starts)  # within the text
    return mix(
        np.add.reduceat(mix(values + (place.astype(np.uint64) << np.uint64(32)) + GOLDEN_STEP), starts)
    )


@cache
def small_letters() -> np.ndarray:
    """Return a letter that is the same for all cases of each code point, int32 [N]. Others stay.

    A letter becomes the small letter of its case folding (Σ and ς become σ, ſ becomes s), or stays if that
    has more than one letter. So İ, ŉ, ǰ and ligatures stay, ẞ becomes ß, and a ß that capitals write as SS is
    not found again. Greek letters lose their accents, which capitals are written without.
    """
    table = np.arange(1 << 17, dtype=np.int32)
    for code_point in range(0x1E944):  # letters with case end there
        character = chr(code_point)
        folded = next((x for x in (character.casefold(), character.lower()) if len(x) == 1), character)
        if 0x370 <= code_point < 0x400 or 0x1F00 <= code_point < 0x2000:  # Greek
            folded = unicodedata.normalize("NFD", folded)[0]
        table[code_point] = ord(folded)
    return table


@cache
def letters() -> np.ndarray:
    """Return whether each code point is a letter, bool [N]. Above N there are none."""
    return np.array([chr(code_point).isalpha() for code_point in range(0x32400)])


# ---- flat texts → ids


def join_texts(arrays: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Join arrays of code points as (flat uint32 [N], offsets int64 [B + 1])."""
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    return np.concatenate([np.zeros(0, np.uint32), *arrays]).astype(np.uint32, copy=False), offsets


def texts_of_pieces(pool: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return B texts, each of P pieces of `pool` (starts, sizes: int64 [B, P]), as (flat, offsets)."""
    offsets = np.concatenate([[0], np.cumsum(sizes.sum(axis=1))])
    starts, sizes = starts.ravel(), sizes.ravel()
    return pool[np.arange(offsets[-1]) + np.repeat(starts - np.cumsum(sizes) + sizes, sizes)], offsets


def language_table(languages: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the prefix of a description by language: (0-padded ids int64 [L, W], lengths int64 [L])."""
    rows = [np.concatenate([[CLS_ID], code_points(lang + LANGUAGE_SEPARATOR)]) for lang in languages]
    lengths = np.array(list(map(len, rows)))
    return np.stack([np.pad(row, (0, lengths.max() - len(row))) for row in rows]).astype(np.int64), lengths


def encode_batch(
    flat: np.ndarray,
    offsets: np.ndarray,
    language: np.ndarray,
    table: tuple[np.ndarray, np.ndarray],
    max_len: int = 128,
    width: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (character ids int64 [B, S], attention_mask bool [B, S]) of a batch. Descriptions that do not
    fit in `max_len` positions are cut. language: int [B], rows of `table` (from `language_table`). width: S.
    None: `padded_width` of the longest input.
    """
    prefixes, prefix_lengths = table
    start = np.minimum(prefix_lengths[language], max_len - 1)  # [B]
    total = np.minimum(start + np.diff(offsets) + 1, max_len)  # [B], [CLS] … [SEP]
    if width is None:
        width = padded_width(int(total.max()) - 2, max_len)
    position = np.arange(width)  # [S]
    mask = position < total[:, None]  # [B, S]
    ids = np.zeros(mask.shape, dtype=np.int64)
    head = min(prefixes.shape[1], width)
    ids[:, :head] = prefixes[language, :head]
    in_text = (position >= start[:, None]) & (position < (total - 1)[:, None])  # [B, S]
    source = (offsets[:-1] - start)[:, None] + position  # [B, S], index into flat
    ids[in_text] = flat[source[in_text]]
    ids[np.arange(len(total)), total - 1] = SEP_ID
    return ids, mask


def encode(
    texts: Sequence[str], languages: Sequence[str], max_len: int = 128, width: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return character ids of descriptions with their languages. Shapes as in `encode_batch`."""
    known = sorted(set(languages))
    flat, offsets = join_texts([code_points(text) for text in texts])
    language = np.array([known.index(lang) for lang in languages], dtype=np.int64)
    return encode_batch(flat, offsets, language, language_table(known), max_len, width)


# ---- letters that were broken, or replaced by escapes, before a table was made

_MARKS = [r"&#?\w{2,30};", r"\\u[0-9A-Fa-f]{4}", "%[2-9A-Fa-f][0-9A-Fa-f]", "=[2-9A-F][0-9A-F]"]
_FINDERS = list(map(re.compile, _MARKS))  # a text with escapes holds one of these: a fast check
# UTF-8 that was read as Windows-1252 (and made lower case), without common pairs such as Å”
_MISREAD = "(?:[ÂÃ]|[ãÄÅ](?![\xa0»–—”])|â€)[\x80-\xbf\u0152-\u2122]"
_BROKEN = re.compile(rf"\ufffd|{_MISREAD}|(?<=[a-z])[À-ÖØ-Þ]")  # or lost letters, or a capital inside a word
_ODD = re.compile("[\ufffdÀ-ÖØ-Þãâ]")  # first characters of _BROKEN: a fast check
_MENDED = re.compile(
    rf"{_MISREAD}|&(?:#\d{{2,7}}|#[xX][0-9A-Fa-f]{{2,5}}|[A-Za-z]\w{{1,30}});"  # and escapes of HTML,
    r"|\\u[0-9A-Fa-f]{4}"  # of JSON,
    r"|(?<!\d)(?:%[0-9A-Fa-f]{2})*%[89A-Fa-f][0-9A-Fa-f](?:%[0-9A-Fa-f]{2})*"  # of addresses,
    r"|(?:=[0-9A-F]{2})*=[89A-F][0-9A-F](?:=[0-9A-F]{2})*"  # quoted-printable,
    r"|(?<=[^\d\s(])(?:%2[0-9A-F]|=2[0-9A-F])+"  # and escaped blanks and signs of both, within a text
)
_BYTES = {bytes([i]).decode("cp1252", "replace"): i for i in range(128, 256)}
_BYTES |= {chr(i): i for i in range(160)}
_NO_LETTER = re.compile("[\0-\x08\x0e-\x1f\ufffd\ud800-\udfff\ue000-\uf8ff]")


def repaired_cells(cells: list[str]) -> tuple[list[str], list[int]]:
    """Return the cells with broken letters and escapes repaired, and the indices of those that held some."""
    joined = "\n".join(cells)  # joining is faster
    is_broken = any(_BROKEN.match(joined, odd.start()) for odd in _ODD.finditer(joined))
    if not (is_broken or any(one.search(joined) for one in _FINDERS)):
        return cells, []
    whole = cells
    for _ in range(3):  # an escape may be escaped (&amp;oslash;)
        whole = [_MENDED.sub(_letters, text) for text in whole]
    return whole, [i for i, cell in enumerate(cells) if whole[i] != cell or _BROKEN.search(cell)]


def _letters(found: re.Match) -> str:
    """Return the broken or escaped text repaired, or unchanged if that is not possible."""
    text = found[0]
    if text[0] == "&":
        letters = html.unescape(text) if text[1] == "#" or text[1:] in html5 else text
    elif text[0] == "\\":
        letters = chr(int(text[2:], 16))
    else:
        digits = re.sub("[%=]", "", text)
        misread = bytes(_BYTES.get(sign, 0) for sign in text.replace("ã", "Ã"))
        held = bytes.fromhex(digits) if text[0] in "%=" else misread
        try:
            letters = held.decode()
        except UnicodeDecodeError:  # letters of Windows, but 50%af is not an escape
            letters = held.decode("cp1252", "replace")
            letters = letters if letters.isalpha() and digits.isupper() else text
    return text if _NO_LETTER.search(letters) else letters


# ---- text rules: how descriptions are changed before a model reads them, named as in the model
#
# `as-is`: letters are composed (NFC), invisible characters (category Cf) and blanks around the text go.
# `ascii-lower`: lower case, then transliterated to ASCII (æ → ae, é → e) as in the package Unidecode and the
# published models. Characters in _COVERED need no package: those that Unicode does not decompose are in
# `transliteration.csv`.

AS_IS, ASCII_LOWER = "as-is", "ascii-lower"
TEXT_RULES = (AS_IS, ASCII_LOWER)

# Words for a missing value in statistical programs, spreadsheets and databases (MySQL: a backslash and n), in
# lower case: both rules read them as an empty text. "none" and "-" may occur in a register.
MISSING_TEXTS = frozenset(("na", "n/a", "nan", "null", "<na>", "#n/a", "#null!", "\\n"))
MISSING_TEXTS |= {"#ref!", "#value!", "#name?", "#div/0!", "#num!"}  # errors of workbooks

# Characters of Unicode's category Cf: soft hyphens, zero-width joiners, marks of direction, byte order marks.
_INVISIBLE = re.compile(
    "[\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064"
    "\u2066-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)

# Characters transliterated here: Latin, Greek, Cyrillic, punctuation, symbols, private use.
_COVERED = re.compile(
    "[\0-\u052f\u1ab0-\u1aff\u1c80-\u1c8f\u1d00-\u27ff\u2c60-\u2c7f\u2de0-\u2e7f\ua640-\ua69f\ua700-\ua7ff"
    "\uab30-\uab6f\ud800-\uf8ff\ufb00-\ufb06\ufe00-\ufe2f\ufe50-\ufe6f\uff00-\uff5e\ufff0-\uffff"
    "\U00010140-\U000101a0\U00010780-\U000107bf\U0001d400-\U0001d7ff\U0001df00-\U0001df2f"
    "\U0001f000-\U0001faff]"
)


def cleaner(rule: str) -> Callable[[str], str]:
    """Return the function that applies a text rule to one text. Raises UserError for an unknown rule."""
    if rule not in TEXT_RULES:
        raise UserError(f"text rule {rule!r} is not known; this version has {' and '.join(TEXT_RULES)}")
    return as_is if rule == AS_IS else _ascii_or_missing


def is_composed(text: str) -> bool:
    """Return whether all letters are composed and all characters are visible."""
    return (
        text.isascii() or not _INVISIBLE.search("".join({*text})) and unicodedata.is_normalized("NFC", text)
    )


def strip(text: str) -> str:
    """Return `text` without blanks around it, or "" for one of MISSING_TEXTS."""
    text = text.strip()
    return "" if text.casefold() in MISSING_TEXTS else text


def in_markdown(text: str) -> str:
    """Return `text` as one line of Markdown with its special signs escaped."""
    return re.sub(r"[\\`*<|\[\]]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", " ".join(text.split()))


def as_is(text: str) -> str:
    """Return `text` composed, without invisible characters, and stripped with `strip`."""
    return strip(text if is_composed(text) else unicodedata.normalize("NFC", _INVISIBLE.sub("", text)))


def join_columns(texts: list[str], further: Sequence[Sequence[str]]) -> list[str]:
    """Return texts joined with those of further columns by COLUMN_SEPARATOR, or "" if the first is empty.

    Example:
        >>> from histocc import join_columns
        >>> join_columns(["ale", "coat", ""], [["public house", "tailor", "tailor"]])
        ['ale ␟ public house', 'coat ␟ tailor', '']
    """
    if not further:
        return texts
    between = f" {COLUMN_SEPARATOR} "
    rows = (list(map(strip, row)) for row in zip(texts, *further))
    return [between.join(row).rstrip(between) if row[0] else "" for row in rows]


def text_key(text: str) -> str:
    """Return a key that ignores case, blanks, invisible characters and composition of letters."""
    return unicodedata.normalize("NFC", " ".join(as_is(text).split()).casefold())


def ascii_lower(text: str) -> str:
    """Return `text` in lower case, transliterated to ASCII. Raises UserError if Unidecode is missing."""
    text = text.lower()
    return text if text.isascii() else text.translate(_table())


def _ascii_or_missing(text: str) -> str:
    return ascii_lower(text) if strip(text) == text.strip() else ""


class _Transliteration(dict):
    """The table code point → ASCII for `str.translate`, filled on demand."""

    def __missing__(self, code_point: int) -> str:
        char = chr(code_point)
        if _COVERED.match(char):
            ascii_parts = filter(str.isascii, unicodedata.normalize("NFKD", char))
            return self.setdefault(code_point, "".join(ascii_parts))
        try:
            from unidecode import unidecode
        except ImportError:
            name = unicodedata.name(char, f"U+{code_point:04X}")
            remedy = "to transliterate scripts other than Latin, Greek and Cyrillic, pip install unidecode"
            raise UserError(f"a text holds {char!r} ({name}): {remedy}") from None
        return self.setdefault(code_point, unidecode(char))


@cache
def _table() -> _Transliteration:
    with files("histocc").joinpath("transliteration.csv").open(encoding="utf-8") as file:
        return _Transliteration((int(row["code_point"], 16), row["ascii"]) for row in csv.DictReader(file))
