"""How often two people agree who have decided on the same texts."""

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from histocc.data.rows import csv_text
from histocc.formatter import cut
from histocc.review.sheet import (
    BY,
    DECISION,
    ID,
    MAX_CODES,
    MAX_LISTED,
    NOTE,
    UNDO,
    UNSURE,
    CodedText,
    Codes,
    Key,
    escape_formula,
    sheet_rows,
    unescape,
)
from histocc.runtime.errors import UserError, raise_if_any

LEVELS = {None: "all codes", 3: "the first 3 digits", 2: "the first 2 digits", 1: "the first digit"}
DRAWS = 20_000  # from the distribution of a share
Pair = tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]  # row of the first file, both answers


class Answer(NamedTuple):
    """The last decision of a person on a text."""

    codes: tuple[str, ...] | None  # None: skipped
    row: dict[str, str]  # of the sheet


def answers_of(path: str, codes: Codes) -> dict[Key, Answer]:
    """Return the answers in a sheet or a file of decisions. Raises UserError."""
    found: dict[Key, Answer] = {}
    problems = []
    for line, row in sheet_rows(path, ["text", "language", DECISION, ID]):
        text = CodedText(unescape(row["text"]), unescape(row["language"]))
        text.codes = [code for i in range(1, MAX_CODES + 1) if (code := row.get(f"code_{i}"))]
        if row[DECISION] == UNDO:
            found.pop(text.key, None)
        elif row[DECISION]:
            try:
                found[text.key] = Answer(codes.decision(row[DECISION], text, MAX_CODES), row)
            except ValueError as error:
                problems.append(f"line {line:,}: {error}")
    raise_if_any(problems, path, MAX_LISTED)
    return found


def share(part: int, total: int) -> str:
    """Return a share with its 95 % interval, by Jeffreys' prior (Brown, Cai, DasGupta, 2001, Interval
    estimation for a binomial proportion).
    """
    draws = np.random.default_rng(1).beta(part + 0.5, total - part + 0.5, DRAWS)
    low, high = np.percentile(draws, (2.5, 97.5))
    found = part / total
    return f"{found:.1%} (95 % interval {min(low, found):.1%} to {max(high, found):.1%})"


def kappa(one: Sequence[Hashable], other: Sequence[Hashable]) -> tuple[float, float]:
    """Return Cohen's kappa of two people's answers on the same texts and its standard error (Fleiss, Cohen,
    Everitt, 1969, Large sample standard errors of kappa and weighted kappa); (nan, nan) if both have given
    all texts the same answer.
    """
    number = {answer: i for i, answer in enumerate(dict.fromkeys([*one, *other]))}
    if len(number) == 1:
        return float("nan"), float("nan")
    table = np.zeros((len(number), len(number)))  # [answers of the one, of the other], shares of texts
    np.add.at(table, ([number[answer] for answer in one], [number[answer] for answer in other]), 1 / len(one))
    agreed, mine, theirs = table.diagonal(), table.sum(1), table.sum(0)
    by_chance = mine @ theirs
    found = (agreed.sum() - by_chance) / (1 - by_chance)
    both = theirs[:, None] + mine  # of cell (i, j): how often the other gives i, and the one j
    variance = agreed @ (1 - both.diagonal() * (1 - found)) ** 2
    variance += (1 - found) ** 2 * ((table * both**2).sum() - agreed @ both.diagonal() ** 2)
    variance -= (found - by_chance * (1 - found)) ** 2
    return found, max(variance / len(one), 0) ** 0.5 / (1 - by_chance)


def compare(paths: Sequence[str], codes: Codes) -> tuple[list[str], bytes]:
    """Return (lines that say how often the decisions in two files agree, a sheet of the texts on which they
    differ; b"" if they differ on none). Raises UserError.
    """
    one, other = (answers_of(path, codes) for path in paths)
    pairs: list[Pair] = []
    for key, (mine, row) in one.items():
        theirs = other[key].codes if key in other else None
        if mine is not None and theirs is not None:
            pairs.append((row, mine, theirs))
    if not pairs:
        raise UserError(f"{' and '.join(paths)}: no text has a decision other than skip in both")
    lines = [f"{len(pairs):,} texts are decided in both files. They agree on"]
    for digits, what in LEVELS.items():
        mine, theirs = ([_cut(answer, digits, codes) for answer in each] for each in list(zip(*pairs))[1:])
        found, error = kappa(mine, theirs)
        low, high = max(found - 1.96 * error, -1), min(found + 1.96 * error, 1)
        of_chance = f"Cohen's kappa {found:.3f} (95 % interval {low:.3f} to {high:.3f})"
        if math.isnan(found):
            of_chance = "no kappa, since all answers are the same"
        lines.append(f"  {what}: {share(sum(map(frozenset.__eq__, mine, theirs)), len(pairs))}; {of_chance}")
    return lines, _differences(pairs, codes)


def _cut(answer: Iterable[str], digits: int | None, codes: Codes) -> frozenset[str]:
    if digits is None:
        return frozenset(answer)
    return frozenset(cut(code, digits, codes.formatter.within_block_sep) for code in answer)


def _differences(pairs: Iterable[Pair], codes: Codes) -> bytes:
    """Return the rows of the first file on which the answers differ, with both answers and no decision; b""
    if there are none.
    """
    rows: list[dict[str, str]] = []
    for row, *answers in pairs:
        if set(answers[0]) != set(answers[1]):
            named = ([f"{code} {codes.words.get(code, '')}".strip() for code in answer] for answer in answers)
            first, second = (escape_formula(" & ".join(each) or "none") for each in named)
            kept = {name: cell for name, cell in row.items() if name not in (UNSURE, NOTE, BY, DECISION, ID)}
            rows.append(kept | {"first": first, "second": second, DECISION: "", ID: row[ID]})
    table = [list(row.values()) for row in rows]
    return "\ufeff".encode() + csv_text([list(rows[0]), *table]) if rows else b""
