"""What a notebook gives and gets: texts in any form, and codes as a table in the shapes of the published
package."""

import decimal
import math
import numbers
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from histocc.formatter import is_missing
from histocc.predict.coder import Coded
from histocc.runtime.config import shown
from histocc.runtime.errors import UserError
from histocc.text import UNKNOWN_LANGUAGE

Words = dict[str, dict[str, str]]  # name of a column beside each code → code → text


def require(holds: bool, name: str, value: Any, expected: str) -> None:
    """Raises ValueError if an argument is not as it `holds`: its name, what it is and what is expected."""
    if not holds:
        raise ValueError(f"{name}: found {shown(value)}, expected {expected}")


def is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def is_threshold(value: Any, languages: list[str]) -> bool:
    """Whether it is None, a probability, or a dict of them by language, None for all others."""
    by_language = value if isinstance(value, Mapping) else {None: 0.5 if value is None else value}
    return all(
        (name is None or name in languages) and is_number(number) and 0 <= number <= 1
        for name, number in by_language.items()
    )


def text_of(name: str, row: int | None, given: Any, kind: str = "text") -> str:
    """A text as it is, of kind "text" also a number as its digits; None and NaN, as pandas has them, are
    empty. row: None where it is the only one. Raises ValueError for anything else."""
    if is_missing(given):
        return ""
    if isinstance(given, str) or kind == "text" and is_number(given):
        return str(given)
    at = "" if row is None else f"row {row} (counted from 0): "
    raise ValueError(f"{name}: {at}{shown(given)} is not a {kind}")


def is_number(value: Any) -> bool:
    return isinstance(value, (numbers.Real, decimal.Decimal)) and not isinstance(value, bool)


def rows_of(name: str, given: Any, kind: str) -> list | None:
    """The rows of an argument; None where it is a single value. Raises ValueError for what has no rows in an
    order of its own: a table, a set, bytes, an array of two dimensions."""
    if is_missing(given) or isinstance(given, str) or is_number(given):
        return None
    if hasattr(given, "columns") or isinstance(given, Mapping):
        raise ValueError(
            f"{name}: found a table ({type(given).__name__}), expected a {kind} or a column of them: of a"
            " table give a column, predict(table['occ1'], lang=table['lang'])"
        )
    unordered = isinstance(given, (set, frozenset, bytes, bytearray, memoryview, type))
    if unordered or not isinstance(given, Iterable) or getattr(given, "ndim", 1) != 1:
        shape = getattr(given, "shape", None)
        size = "" if shape is None else f" of shape {tuple(shape)}"
        raise ValueError(
            f"{name}: found {shown(given)}{size}, expected a {kind}, or a list, array or column of them"
        )
    return [row for row in given]  # not list(given), which makes room for as many as __len__ promises


def texts_and_languages(occ1: Any, lang: Any) -> tuple[list, list[str], list[str]]:
    """(texts as they were given, as texts, the language of each) of one text or several and one language or
    as many. They are paired by position. Raises ValueError."""
    occ1, lang = (
        given.item() if getattr(given, "ndim", None) == 0 and hasattr(given, "item") else given
        for given in (occ1, lang)
    )
    shown_as = rows_of("occ1", occ1, "text")
    shown_as = [occ1] if shown_as is None else shown_as
    texts = [text_of("occ1", i, text) for i, text in enumerate(shown_as)]
    each = rows_of("lang", lang, "language")
    if each is None:
        return shown_as, texts, [text_of("lang", None, lang, "language") or UNKNOWN_LANGUAGE] * len(texts)
    if len(each) != len(texts):
        raise ValueError(f"lang: found {len(texts)} texts, but {len(each)} languages")
    return (
        shown_as,
        texts,
        [text_of("lang", i, language, "language") or UNKNOWN_LANGUAGE for i, language in enumerate(each)],
    )


def indexes_differ(occ1: Any, lang: Any) -> bool:
    """Whether both are columns of pandas whose rows have other names."""
    own, other = getattr(occ1, "index", None), getattr(lang, "index", None)
    return own is not None and hasattr(own, "equals") and hasattr(other, "equals") and not own.equals(other)


def names_of(table: Any) -> list[str]:
    """The columns of a DataFrame, a dict of columns or a list of dicts, whose first row names them. Raises
    ValueError for anything else.
    """
    if isinstance(table, (list, tuple)):
        table = table[0] if table else {}
    if not isinstance(table, Mapping) and not hasattr(table, "columns"):
        raise ValueError(f"found {shown(table)}, expected a DataFrame, a dict of columns or a list of dicts")
    names: Any = getattr(table, "columns", table)
    return [str(name) for name in names]


def column_of(what: str, table: Any, name: str) -> list:
    """The cells of a column, by its name as text; what: the table, in messages. Raises ValueError where the
    table does not have it, or twice, or a row is without it."""
    names = names_of(table)
    if names.count(name) != 1:
        raise ValueError(
            f"{what}: has {'no' if name not in names else 'more than one'} column {name!r}; it has "
            f"{', '.join(map(repr, names)) or 'none'}"
        )
    if isinstance(table, (list, tuple)):
        short = next((i for i, row in enumerate(table) if name not in row), None)
        if short is not None:
            raise ValueError(f"{what}: row {short} (counted from 0) has no {name!r}")
        return [row[name] for row in table]
    own = next(each for each in (table.columns if hasattr(table, "columns") else table) if str(each) == name)
    cells = table[own]
    if isinstance(cells, str) or not isinstance(cells, Iterable):
        raise ValueError(f"{what}: column {name!r} is no column of cells, but {shown(cells)}")
    return list(cells)


def described(given: Any) -> list[tuple[str, str]] | str | None:
    """The argument descriptions: a file, or (code, words) of a table's rows that have both. Raises UserError
    where a column is missing, ValueError for cells that cannot be paired."""
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        return os.fspath(given)
    missing = [name for name in ("system_code", "desc") if name not in names_of(given)]
    if missing:
        raise UserError(f"descriptions: need columns system_code and desc; {' and '.join(missing)} missing")
    codes, words = (column_of("descriptions", given, name) for name in ("system_code", "desc"))
    if len(codes) != len(words):
        raise ValueError(f"descriptions: found {len(codes)} cells of system_code, but {len(words)} of desc")
    return [
        (str(code), str(text))
        for code, text in zip(codes, words)
        if not is_missing(code) and not is_missing(text)
    ]


def a_row_per_text(
    shown: list, languages: list[str], coded: list[Coded], most: int, system: str, words: Words
) -> dict:
    """Columns occ1, lang, up to `most` of SYSTEM_i, prob_i and NAME_i of the words (name → code → text), and
    conf.
    """
    columns: dict[str, Any] = {"occ1": shown, "lang": languages}
    for i in range(most):
        codes = [each.codes[i] if i < len(each.codes) else None for each in coded]
        columns[f"{system}_{i + 1}"] = codes
        columns[f"prob_{i + 1}"] = probabilities(
            [each.probs[i] if i < len(each.codes) else None for each in coded]
        )
        for name, texts in words.items():
            columns[f"{name}_{i + 1}"] = [None if code is None else texts.get(code) or None for code in codes]
    return {**columns, "conf": probabilities([each.conf for each in coded])}


def a_row_per_code(
    shown: list, languages: list[str], coded: list[Coded], most: int, system: str, words: Words
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
        **{f"{name}_1": [texts.get(code) or None for code in codes] for name, texts in words.items()},
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
