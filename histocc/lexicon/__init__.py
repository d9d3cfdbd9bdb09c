"""The titles of occupations that come with histocc, each with its HISCO code: LANGUAGE.csv (columns hisco and
titles, joined by `|`) and sample/occupations.csv, from which samples are made. A title has one code in a
language.
"""

import csv
from functools import cache
from importlib.resources import files

LANGUAGES = ("en", "da", "se", "nl", "ge", "fr")


def _lines(name: str) -> str:
    return files("histocc").joinpath(*name.split("/")).read_text(encoding="utf-8")


@cache
def titles(language: str) -> dict[str, str]:
    """Return the code of each title of one of LANGUAGES."""
    found: dict[str, str] = {}
    for name, column in (("sample/occupations.csv", language), (f"lexicon/{language}.csv", "titles")):
        for row in csv.DictReader(_lines(name).splitlines()):
            for title in row[column].split("|"):
                found.setdefault(title, row["hisco"])
    return found


def codes() -> list[str]:
    """Return the codes of all lists, sorted."""
    return sorted({code for language in LANGUAGES for code in titles(language).values()})
