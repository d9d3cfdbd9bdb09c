"""What a notebook gives and gets: texts in any form, and codes as a table in the shapes of the published
package."""

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Number
from typing import Any

import numpy as np

from histocc.formatter import is_missing
from histocc.predict.coder import Coded
from histocc.runtime.config import shown

Words = dict[str, dict[str, str]]  # name of a column beside each code → code → text


def is_text_or_number(value: Any) -> bool:
    return isinstance(value, str) or isinstance(value, Number) and not isinstance(value, bool | complex)


def cells_of(name: str, given: Any, fits: Callable[[Any], bool]) -> tuple[list, bool]:
    """(the cells of an argument, whether it was a list, array or column of them). Raises ValueError."""
    if is_missing(given) or fits(given):
        return [given], False
    if (
        isinstance(given, Mapping | set | bytes | type)
        or hasattr(given, "columns")
        or not isinstance(given, Iterable)
        or getattr(given, "ndim", 1) != 1
    ):
        raise ValueError(
            f"{name}: found {type(given).__name__}, expected a text, or a list, array or column of texts; of"
            " a table give a column, predict(table['occ1'], lang=table['lang'])"
        )
    cells = list(given)
    for i, cell in enumerate(cells):
        if not is_missing(cell) and not fits(cell):
            raise ValueError(f"{name}: row {i} (counted from 0): {cell!r:.60} is not a text")
    return cells, True


def texts_and_languages(occ1: Any, lang: Any, unknown: str) -> tuple[list, list[str], list[str]]:
    """(texts as they were given, as texts, the language of each) of one text or several and one language or
    as many, paired by position. A number counts as its digits, None and NaN as empty, or as the language
    `unknown`. Raises ValueError.
    """
    cells, _ = cells_of("occ1", occ1, is_text_or_number)
    languages, are_several = cells_of("lang", lang, lambda value: isinstance(value, str))
    languages = [unknown if is_missing(language) else language or unknown for language in languages]
    if are_several and len(languages) != len(cells):
        raise ValueError(f"lang: found {len(cells)} texts, but {len(languages)} languages")
    texts = ["" if is_missing(cell) else str(cell) for cell in cells]
    return cells, texts, languages if are_several else languages * len(texts)


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


def a_row_per_text(
    cells: list, languages: list[str], coded: list[Coded], k: int, system: str, words: Words
) -> dict:
    """Columns occ1, lang, up to `k` of SYSTEM_i, prob_i and NAME_i of the words, and conf."""
    columns: dict[str, Any] = {"occ1": cells, "lang": languages}
    for i in range(k):
        codes = [one.codes[i] if i < len(one.codes) else None for one in coded]
        columns[f"{system}_{i + 1}"] = codes
        columns[f"prob_{i + 1}"] = numbers([one.probs[i] if i < len(one.codes) else None for one in coded])
        for name, texts in words.items():
            columns[f"{name}_{i + 1}"] = [code and texts.get(code) or None for code in codes]
    return {**columns, "conf": numbers([one.conf for one in coded])}


def a_row_per_code(
    cells: list, languages: list[str], coded: list[Coded], k: int, system: str, words: Words
) -> dict:
    """`k` rows per text, the most probable code first; top-k-pos counts from 0, conf is the probability of
    the code."""
    pairs = [
        (one.codes[i], one.probs[i]) if i < len(one.codes) else (None, None)
        for one in coded
        for i in range(k)
    ]
    codes = [code for code, _ in pairs]
    return {
        "occ1": [cell for cell in cells for _ in range(k)],
        "lang": [language for language in languages for _ in range(k)],
        f"{system}_1": codes,
        **{
            f"{name}_1": [code and texts.get(code) or None for code in codes] for name, texts in words.items()
        },
        "conf": numbers([prob for _, prob in pairs]),
        "top-k-pos": np.tile(np.arange(k), len(coded)),
    }


def binary(coded: list[Coded], codes: list[str], system: str) -> dict:
    """A column of 0 and 1 for each code of the key, SYSTEM_CODE."""
    sets = [set(one.codes) for one in coded]
    return {f"{system}_{code}": np.array([float(code in given) for given in sets]) for code in codes}


def numbers(values: list[float | None]) -> np.ndarray:
    """float64 [n], NaN for None."""
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def as_table(columns: dict[Any, Any], get_dict: bool = False):
    """Columns of equal length as a DataFrame, those of texts with dtype object; as a list of dicts if pandas
    is not installed, or get_dict asks for it, with None in place of NaN."""
    try:
        if get_dict:
            raise ImportError
        import pandas

        objects = {name: object for name, values in columns.items() if not isinstance(values, np.ndarray)}
        return pandas.DataFrame(
            {name: pandas.Series(v, dtype=objects.get(name)) for name, v in columns.items()}
        )
    except ImportError:
        lists = [list(v) if not isinstance(v, np.ndarray) else v.tolist() for v in columns.values()]
    return [
        {
            name: None if name != "occ1" and isinstance(value, float) and math.isnan(value) else value
            for name, value in zip(columns, row)
        }
        for row in zip(*lists)
    ]
