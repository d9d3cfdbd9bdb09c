"""Split texts into parts for training, for validation, and for a test that chooses nothing.

A text is in one part with all its rows: in the test if any of them is assigned to it, else in the validation
if any is, else in the training. Only separate validation files may share texts with the training. No share
draws a text with over half of the share's rows (`too_frequent` in `data/prepare.py`).
"""

from collections import Counter
from collections.abc import Callable

import numpy as np

from histocc.data.config import PrepareSettings
from histocc.data.rows import EXAMPLES
from histocc.runtime.errors import raise_if_any
from histocc.text import text_hashes

SPLIT_PARTS = ("train", "val", "test")  # the words of --split-col
OFTEN = "often"  # the name of texts that no share draws


def split_values(hashes: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1] from hashes of texts. The lowest are for validation, the highest for test."""
    return hashes / 2.0**64


def named_parts(settings: PrepareSettings, check: Callable) -> dict[str, np.ndarray]:
    """Return part → hashes of the texts that --split-col and --leave-out assign to it, uint64 [T]. check:
    called often. Its exception ends the work. Raises UserError for other words in the column, and for a value
    that does not occur.
    """
    wanted = [(part, settings.split_col, part) for part in SPLIT_PARTS if settings.split_col]
    wanted += [("test", *each.split("=", 1)) for each in settings.leave_out or []]
    counts = {column: Counter[str]() for column in settings.split_columns}
    found: dict[str, list[np.ndarray]] = {}
    for _, path in settings.files if counts else ():
        table = settings.table(path, list(counts))
        for records in table.records(check):
            # texts rejected for their characters are in no part
            keep = [i for i in range(len(records.texts)) if i not in records.forbidden]
            hashes = text_hashes([records.parts[0][i].strip() for i in keep])
            for column in counts:
                cells = [cell.strip() for cell in records.filled[table.names.index(column)]]
                counts[column].update(cell for i, cell in enumerate(cells) if i not in records.headers)
                folded = np.array([cells[i].casefold() for i in keep])
                for part, of, value in wanted:
                    if of == column:
                        found.setdefault(part, []).append(hashes[folded == value.strip().casefold()])
    problems = []
    words = counts.get(settings.split_col or "", ())
    if wrong := [word for word in words if word.casefold() not in SPLIT_PARTS]:
        shown = ", ".join(map(repr, wrong[:EXAMPLES])) + " …" * (len(wrong) > EXAMPLES)
        what = f"column {settings.split_col!r} holds {shown}; write train, val or test in every row"
        problems.append(f"--split-col: {what}")
    for each in settings.leave_out or ():
        column, value = each.split("=", 1)
        if value.strip().casefold() not in map(str.casefold, counts[column]):
            often = ", ".join(repr(cell) for cell, _ in counts[column].most_common(EXAMPLES))
            problems.append(f"--leave-out: {value!r} is not in column {column!r}; most frequent: {often}")
    raise_if_any(problems)
    return {part: np.unique(np.concatenate(some)) for part, some in found.items() if any(map(len, some))}


def parts_of_rows(
    settings: PrepareSettings, named: dict[str, np.ndarray], part: str, hashes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each text is for validation, and whether for the test, bool [n] each. named: the result
    of `named_parts`. part: the part that their file is for.
    """
    values, is_test = split_values(hashes), np.isin(hashes, named.get("test", ()))
    is_free = ~np.isin(hashes, named.get(OFTEN, ()))
    if not (settings.split_col and "test" in named):  # shares are for parts that the column lacks
        is_test |= is_free & (1 - values < settings.share_test)
    is_val = np.isin(hashes, named.get("val", ())) | (part == "val")
    if part == "train" and "val" not in named and settings.share_val is not None:
        is_val = is_free & (values < settings.share_val)
    return is_val & ~is_test, is_test
