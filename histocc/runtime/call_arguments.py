"""What the arguments of a call from Python may be: one kind each, and one message for all that are wrong.

A kind says in words what it expects, whether a value fits, and how the value is read.
"""

import numbers
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
MOST_DIGITS = 40  # of a number in a message


class Kind(NamedTuple):
    """expected: in words, for messages; fits: whether a value is one (TypeError and ValueError count as no);
    read: gives a value that fits as it is used."""

    expected: str
    fits: Callable[[Any], bool]
    read: Callable[[Any], Any] = lambda value: value


def checked(table: Mapping[str, Kind], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` as the kinds of `table` read it, by name. Raises one ValueError that names every argument that
    is wrong, what it was and what is expected."""
    values = {name: plain(given[name]) for name in table}
    wrong = [
        f"{name}: found {shown(values[name])}, expected {kind.expected}"
        for name, kind in table.items()
        if not fits(kind, values[name])
    ]
    if wrong:
        raise ValueError("\n  ".join(wrong))
    return {name: kind.read(values[name]) for name, kind in table.items()}


def fits(kind: Kind, value: Any) -> bool:
    try:
        return bool(kind.fits(value))
    except (TypeError, ValueError):
        return False


def plain(value: Any) -> Any:
    """A number, a bool or a text of numpy or torch, also an array of no dimensions, as Python's own."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def shown(value: Any) -> str:
    """A value in a message: short, on one line, with its type where that is not plain to see."""
    if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
        return f"a whole number of more than {MOST_DIGITS} digits"
    if hasattr(value, "columns"):
        return f"a table ({type(value).__name__})"
    text = " ".join(_SHORT.repr(value).split())
    known = value is None or isinstance(value, (bool, int, float, str, bytes, list, tuple, dict, type))
    return text if known else f"{text} ({type(value).__name__})"


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def is_count(value: Any) -> bool:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and value >= 1  # pyright: ignore[reportOperatorIssue]


def is_probability(value: Any) -> bool:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and 0 <= value <= 1  # pyright: ignore[reportOperatorIssue]


def is_table(value: Any) -> bool:
    """A DataFrame, a dict of columns, or a list of one dict per row."""
    rows = isinstance(value, (list, tuple)) and all(isinstance(row, Mapping) for row in value)
    return rows or isinstance(value, Mapping) or hasattr(value, "columns")


def is_no_list(value: Any) -> bool:
    """Whether it is a table, has no order, or is bytes, whose parts are numbers."""
    return isinstance(value, (Mapping, set, frozenset, bytes, bytearray, memoryview, type)) or hasattr(
        value, "columns"
    )


def column_names(value: Any) -> list[str]:
    """Of a column's name or several. Raises TypeError for what is neither."""
    value = plain(value)
    if is_no_list(value) or not isinstance(value, Iterable):
        raise TypeError
    names = [value] if isinstance(value, str) else [plain(name) for name in value]
    if not all(is_text(name) or isinstance(name, int) and not isinstance(name, bool) for name in names):
        raise TypeError
    return [str(name) for name in names]


FLAG = Kind("True or False", lambda value: isinstance(value, int) and value in (0, 1), bool)
TEXT = Kind("a text that is not blank", is_text, str)
COUNT = Kind("a whole number of at least 1", is_count, int)
PATH = Kind("a text or path that is not blank", lambda value: is_text(os.fspath(value)), os.fspath)
TABLE = Kind("a DataFrame, a dict of columns or a list of dicts, one per row", is_table)
COLUMNS = Kind(
    "the name of a column, or a list of different ones",
    lambda value: 0 < len(column_names(value)) == len(set(column_names(value))),
    column_names,
)


def one_of(*choices: str) -> Kind:
    return Kind(
        f"one of {', '.join(map(repr, choices))}", lambda value: isinstance(value, str) and value in choices
    )


def either(*kinds: Kind) -> Kind:
    """What fits one of the kinds; the first that it fits reads it."""
    return Kind(
        ", or ".join(kind.expected for kind in kinds),
        lambda value: any(fits(kind, value) for kind in kinds),
        lambda value: next(kind for kind in kinds if fits(kind, value)).read(value),
    )


def optional(kind: Kind) -> Kind:
    return either(kind, Kind("None", lambda value: value is None))


def thresholds(languages: Iterable[str]) -> Kind:
    """A probability, or a dict of them by language, None for all others; an empty dict is None."""
    known = frozenset(languages)

    def is_by_language(value: Any) -> bool:
        return isinstance(value, Mapping) and all(
            (name is None or name in known) and is_probability(plain(each)) for name, each in value.items()
        )

    named = ", ".join(languages)
    return either(
        Kind("a probability from 0 to 1", is_probability, float),
        Kind(
            f"a dict of probabilities by language (those that the model knows: {named}; None stands for the "
            "others)",
            is_by_language,
            lambda value: {name: float(plain(each)) for name, each in value.items()} or None,
        ),
        Kind("None", lambda value: value is None),
    )
