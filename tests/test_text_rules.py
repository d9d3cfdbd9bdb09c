"""What happens to a text before a model reads it: parity with the package Unidecode, and what is said where
that is needed.
"""

import sys
import unicodedata
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from histocc import text
from histocc.runtime.errors import UserError
from histocc.text import ascii_lower, cleaner

unidecode = pytest.importorskip("unidecode").unidecode
LETTERS = [
    char
    for char in map(chr, range(0x80, sys.maxunicode + 1))
    if unicodedata.name(char, "").startswith(("LATIN", "GREEK", "CYRILLIC"))
    and unicodedata.category(char)[0] in "LM"
]
OTHERS = [
    chr(i) for i in (*range(0x80, 0xC0), *range(0x2000, 0x2800), *range(0x300, 0x370), *range(0xFF00, 0xFF5F))
]


def by_the_package(text: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of surrogates
        return unidecode(text.lower())


EXPECTED = {char: by_the_package(char) for char in LETTERS + OTHERS}


@pytest.fixture
def without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "unidecode", None)
    text._table.cache_clear()
    yield
    text._table.cache_clear()


def test_every_latin_greek_and_cyrillic_letter_is_as_the_package_has_it(without_the_package):
    assert len(LETTERS) > 1800
    assert [char for char in LETTERS if ascii_lower(char) != EXPECTED[char]] == []


def test_punctuation_and_symbols_too(without_the_package):
    assert [char for char in OTHERS if ascii_lower(char) != EXPECTED[char]] == []


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Væver og Smed", "vaever og smed"),
        ("STRASSENKEHRER IN GROẞ-MÜNSTER", "strassenkehrer in gross-munster"),
        ("Ålesund", "alesund"),
        ("  ouvrière — « lingère »", "  ouvriere -- << lingere >>"),
        ("Þjónn", "thjonn"),
        ("γεωργός", "georgos"),
        ("№ 3", "No.  3"),
        ("farmer", "farmer"),
    ],
)
def test_texts(text, expected):
    assert ascii_lower(text) == cleaner("ascii-lower")(text) == expected == by_the_package(text)
    assert cleaner("as-is")(text) == text.strip()


@given(st.text(st.characters(max_codepoint=0x24F), max_size=60))
def test_any_western_text(text):
    assert ascii_lower(text) == by_the_package(text) and ascii_lower(text).isascii()


def test_other_scripts_need_the_package(without_the_package):
    with pytest.raises(UserError, match=r"'農' \(CJK UNIFIED IDEOGRAPH-8FB2\).*pip install unidecode"):
        ascii_lower("農夫")


def test_other_scripts_with_the_package():
    assert ascii_lower("農夫") == by_the_package("農夫") == "Nong Fu "


def test_an_unknown_rule_is_refused():
    with pytest.raises(
        UserError, match="'rot13' is not known to this version, which has as-is and ascii-lower"
    ):
        cleaner("rot13")
