"""What a notebook gives and gets: texts in any form, and codes as a table in the shapes of the published
package."""

import math
import numbers
from typing import Any

import numpy as np

from histocc.coder import Coded
from histocc.formatter import is_missing
from histocc.text import UNKNOWN_LANGUAGE


def text_of(row: int, given) -> str:
    """A text as it is, a number as its digits; none and NaN, as pandas has them, are empty. Raises ValueError
    for anything else."""
    if is_missing(given):
        return ""
    if not isinstance(given, (str, numbers.Number)):
        raise ValueError(f"row {row} (counted from 0): {given!r} is not a text")
    return str(given)


def texts_and_languages(occ1: Any, lang: Any) -> tuple[list, list[str], list[str]]:
    """(texts as they were given, as texts, the language of each) of one text or several and one language or as
    many. Raises ValueError."""
    if hasattr(occ1, "columns") or isinstance(occ1, dict):
        raise ValueError("a table: give its column of texts, predict(table['occ1'], lang=table['lang'])")
    shown = [occ1] if occ1 is None or isinstance(occ1, (str, numbers.Number)) else list(occ1)
    texts = [text_of(i, text) for i, text in enumerate(shown)]
    languages = [lang] * len(texts) if isinstance(lang, str) or is_missing(lang) else list(lang)
    if len(languages) != len(texts):
        raise ValueError(f"{len(texts)} texts, but {len(languages)} languages")
    return shown, texts, [text_of(i, language) or UNKNOWN_LANGUAGE for i, language in enumerate(languages)]


def a_row_per_text(
    shown: list, languages: list[str], coded: list[Coded], most: int, system: str, words: dict[str, str]
) -> dict:
    """Columns occ1, lang, up to `most` of SYSTEM_i, prob_i and, where there are words, desc_i, and conf."""
    columns: dict[str, Any] = {"occ1": shown, "lang": languages}
    for i in range(most):
        codes = [each.codes[i] if i < len(each.codes) else None for each in coded]
        columns[f"{system}_{i + 1}"] = codes
        columns[f"prob_{i + 1}"] = probabilities(
            [each.probs[i] if i < len(each.codes) else None for each in coded]
        )
        if words:
            columns[f"desc_{i + 1}"] = [words.get(code) for code in codes]
    return {**columns, "conf": probabilities([each.conf for each in coded])}


def a_row_per_code(
    shown: list, languages: list[str], coded: list[Coded], most: int, system: str, words: dict[str, str]
) -> dict:
    """`most` rows per text, the most probable code first; top-k-pos counts from 0, conf is the probability of
    the code."""
    pairs = [
        pair
        for each in coded
        for pair in [*zip(each.codes[:most], each.probs), *[(None, None)] * (most - len(each.codes))]
    ]
    codes, probs = zip(*pairs) if pairs else ((), ())
    return {
        "occ1": [text for text in shown for _ in range(most)],
        "lang": [language for language in languages for _ in range(most)],
        f"{system}_1": list(codes),
        **({"desc_1": [words.get(code) for code in codes]} if words else {}),
        "conf": probabilities(list(probs)),
        "top-k-pos": np.tile(np.arange(most), len(coded)),
    }


def binary(coded: list[Coded], codes: list[str], system: str) -> dict:
    """A column of 0 and 1 for each code of the key, SYSTEM_CODE."""
    place = {code: i for i, code in enumerate(codes)}
    found = np.zeros((len(coded), len(codes)))
    for row, each in enumerate(coded):
        found[row, [place[code] for code in each.codes if code in place]] = 1
    return {f"{system}_{code}": found[:, i] for i, code in enumerate(codes)}


def probabilities(values: list[float | None]) -> np.ndarray:
    """float64 [n], NaN for None."""
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def as_table(columns: dict[Any, Any], get_dict: bool = False):
    """Columns of equal length as a DataFrame, those of texts with dtype object; as a list of dicts where
    pandas is not installed, or get_dict asks for it, with None in place of NaN."""
    if not get_dict:
        try:
            import pandas

            return pandas.DataFrame(
                {
                    name: pandas.Series(values, dtype=None if isinstance(values, np.ndarray) else object)
                    for name, values in columns.items()
                }
            )
        except ImportError:
            pass
    rows = zip(
        *(values.tolist() if isinstance(values, np.ndarray) else values for values in columns.values())
    )
    return [
        {
            name: None if isinstance(value, float) and math.isnan(value) and name != "occ1" else value
            for name, value in zip(columns, row)
        }
        for row in rows
    ]
