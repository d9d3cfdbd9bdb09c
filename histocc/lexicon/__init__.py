"""The titles of occupations that come with histocc, each with its HISCO code. They are in LANGUAGE.csv
(columns hisco and titles, joined by `|`) and in sample/occupations.csv, from which samples are made. A title
has one code per language. -1 marks other entries of registers: a place, a date, an age. abbreviations.csv
holds abbreviated words, word ends (-word) and word beginnings (word-).
"""

import csv
from functools import cache
from importlib.resources import files

LEXICON_LANGUAGES = ("en", "da", "se", "nl", "ge", "fr")


def _lines(name: str) -> str:
    return files("histocc").joinpath(*name.split("/")).read_text(encoding="utf-8")


@cache
def titles(language: str) -> dict[str, str]:
    """Return the code of each title in one of LEXICON_LANGUAGES."""
    found: dict[str, str] = {}
    for name, column in (("sample/occupations.csv", language), (f"lexicon/{language}.csv", "titles")):
        for row in csv.DictReader(_lines(name).splitlines()):
            for title in row[column].split("|"):
                found.setdefault(title, row["hisco"])
    return found


def abbreviations(language: str) -> list[tuple[str, str]]:
    """Return the words (between blanks) that a language abbreviates, each with its short form."""
    found: list[tuple[str, str]] = []
    for row in csv.DictReader(_lines("lexicon/abbreviations.csv").splitlines()):
        old = f" {row['word']} ".replace(" -", "").replace("- ", "")
        new = [old.replace(row["word"].strip("-"), short) for short in row["short"].split("|")]
        found += [(old, short) for short in new if row["lang"] == language]
    return found


def codes() -> list[str]:
    """Return the codes of all lists, sorted."""
    return sorted({code for language in LEXICON_LANGUAGES for code in titles(language).values()})
