"""What happens to a text before a model reads it: parity with the package Unidecode, and its absence."""

import sys
import unicodedata
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from histocc import text as rules
from histocc.runtime.errors import UserError
from histocc.text import ascii_lower, cleaner

unidecode = pytest.importorskip("unidecode").unidecode
LETTERS = [
    char
    for char in map(chr, range(0x80, sys.maxunicode + 1))
    if unicodedata.name(char, "").startswith(("LATIN", "GREEK", "CYRILLIC"))
    and unicodedata.category(char)[0] in "LM"
]
OTHERS = [*range(0x80, 0xC0), *range(0x2000, 0x2800), *range(0x300, 0x370), *range(0xFF00, 0xFF5F)]


def by_the_package(text: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of surrogates
        return unidecode(text.lower())


EXPECTED = {char: by_the_package(char) for char in [*LETTERS, *map(chr, OTHERS)]}


@pytest.fixture
def without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "unidecode", None)
    rules._table.cache_clear()
    yield
    rules._table.cache_clear()


def test_letters_punctuation_and_symbols_are_as_the_package_has_them(without_the_package):
    assert len(LETTERS) > 1800
    assert [char for char, expected in EXPECTED.items() if ascii_lower(char) != expected] == []


def test_texts():
    for text, expected in {
        "Væver og Smed": "vaever og smed",
        "STRASSENKEHRER IN GROẞ-MÜNSTER": "strassenkehrer in gross-munster",
        "  ouvrière — « lingère »": "  ouvriere -- << lingere >>",
        "γεωργός, Þjónn": "georgos, thjonn",
        "№ 3": "No.  3",
        "農夫": "Nong Fu ",
    }.items():
        assert ascii_lower(text) == cleaner("ascii-lower")(text) == expected == by_the_package(text)
        assert cleaner("as-is")(text) == text.strip()


@given(st.text(st.characters(max_codepoint=0x24F), max_size=60))
def test_any_western_text(text):
    assert ascii_lower(text) == by_the_package(text) and ascii_lower(text).isascii()


def test_other_scripts_need_the_package_and_other_rules_a_newer_version(without_the_package):
    with pytest.raises(UserError, match=r"'農' \(CJK UNIFIED IDEOGRAPH-8FB2\).*pip install unidecode"):
        ascii_lower("農夫")
    with pytest.raises(
        UserError, match="'rot13' is not known to this version, which has as-is and ascii-lower"
    ):
        cleaner("rot13")
