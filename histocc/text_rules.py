"""What happens to a description before a model reads it: the rule that a model was trained with, by name.

`as-is`: letters of several characters are composed (Unicode's NFC), invisible characters (category Cf) and
blanks around the text go, nothing else. `ascii-lower`: lower case, then transliterated to ASCII (æ →
ae, ß → ss, é → e), blanks stay; the published OccCANINE models were trained on such texts, and their program
codes no others (Dahl, Johansen, Vedel, 2024, arXiv 2402.13604, and their package).

The transliteration is that of the package Unidecode. Latin, Greek and Cyrillic letters, punctuation and
symbols need no package: what Unicode's compatibility decomposition does not say stands in
`transliteration.csv`. Other scripts are handed to the package.
"""

import csv
import re
import unicodedata
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from histocc.runtime.errors import UserError

AS_IS, ASCII_LOWER = "as-is", "ascii-lower"
TEXT_RULES = (AS_IS, ASCII_LOWER)

# Characters of Unicode's category Cf: soft hyphens, zero-width joiners, marks of direction, byte order marks.
_INVISIBLE = re.compile(
    "[\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064"
    "\u2066-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)

# Code points that are transliterated here, [first, last]: Latin, Greek, Cyrillic, punctuation, symbols,
# private use.
_COVERED = (
    (0x80, 0x52F),
    (0x1AB0, 0x1AFF),
    (0x1C80, 0x1C8F),
    (0x1D00, 0x27FF),
    (0x2C60, 0x2C7F),
    (0x2DE0, 0x2E7F),
    (0xA640, 0xA69F),
    (0xA700, 0xA7FF),
    (0xAB30, 0xAB6F),
    (0xD800, 0xF8FF),
    (0xFB00, 0xFB06),
    (0xFE00, 0xFE2F),
    (0xFE50, 0xFE6F),
    (0xFF00, 0xFF5E),
    (0xFFF0, 0xFFFF),
    (0x10140, 0x101A0),
    (0x10780, 0x107BF),
    (0x1D400, 0x1D7FF),
    (0x1DF00, 0x1DF2F),
    (0x1F000, 0x1FAFF),
)


def cleaner(rule: str) -> Callable[[str], str]:
    """The function that applies the text rule `rule` to one text. Raises UserError for a rule that is not
    known here."""
    if rule not in TEXT_RULES:
        raise UserError(
            f"text rule {rule!r} is not known to this version, which has {' and '.join(TEXT_RULES)}; "
            "the model was made by a newer one"
        )
    return as_is if rule == AS_IS else ascii_lower


def is_composed(text: str) -> bool:
    """Whether all letters are composed and no character is invisible."""
    return text.isascii() or not _INVISIBLE.search(text) and unicodedata.is_normalized("NFC", text)


def as_is(text: str) -> str:
    """`text` composed, without invisible characters and without blanks around it."""
    if is_composed(text):
        return text.strip()
    return unicodedata.normalize("NFC", _INVISIBLE.sub("", text)).strip()


def text_key(text: str) -> str:
    """Equal for texts that differ only in case and blanks."""
    return unicodedata.normalize("NFC", " ".join(text.split()).casefold())


def ascii_lower(text: str) -> str:
    """`text` in lower case, transliterated to ASCII. Raises UserError for a script that needs the package
    Unidecode where it is missing.

    Some characters become several ones, a few become capitals (№ is No.), and those without a counterpart
    vanish.
    """
    text = text.lower()
    return text if text.isascii() else text.translate(_table())


class _Transliteration(dict):
    """Code point → ASCII, each worked out when it is first met; for `str.translate`."""

    def __missing__(self, code_point: int) -> str:
        char = chr(code_point)
        if code_point < 0x80:
            found = char
        elif any(first <= code_point <= last for first, last in _COVERED):
            found = "".join(part for part in unicodedata.normalize("NFKD", char) if part < "\x80")
        else:
            found = _by_package(char)
        self[code_point] = found
        return found


@cache
def _table() -> _Transliteration:
    with files("histocc").joinpath("transliteration.csv").open(encoding="utf-8") as file:
        return _Transliteration((int(row["code_point"], 16), row["ascii"]) for row in csv.DictReader(file))


def _by_package(char: str) -> str:
    try:
        from unidecode import unidecode
    except ImportError:
        raise UserError(
            f"a text holds {char!r} ({unicodedata.name(char, f'U+{ord(char):04X}')}), and the model reads "
            "texts that are "
            "transliterated to ASCII: for other scripts than Latin, Greek and Cyrillic, pip install unidecode"
        ) from None
    return unidecode(char)
