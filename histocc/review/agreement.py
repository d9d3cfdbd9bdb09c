"""How often two people agree who have decided on the same texts."""

from collections.abc import Hashable, Sequence

import numpy as np

from histocc.data.rows import csv_text, escape_formula
from histocc.figure import percent
from histocc.formatter import cut, levels_of
from histocc.review.serve import cell_of
from histocc.review.sheet import CHOSEN, DECISION, ID, Codes, answers_of
from histocc.runtime.errors import UserError
from histocc.runtime.files import is_same

LEVELS = (3, 2, 1)  # digits of a code, or its parts, as far as codes have them
DRAWS = 20_000  # from the distribution of a share


def share(part: int, total: int) -> str:
    """Return a share with its 95 % interval, by Jeffreys' prior (Brown, Cai, DasGupta, 2001, Interval
    estimation for a binomial proportion).
    """
    draws = np.random.default_rng(1).beta(part + 0.5, total - part + 0.5, DRAWS)
    low, high = np.percentile(draws, (2.5, 97.5))
    found = part / total
    low, high = (percent(bound, "") for bound in (min(low, found), max(high, found)))
    return f"{percent(found)} (95 % interval {low} to {high})"


def kappa(one: Sequence[Hashable], other: Sequence[Hashable]) -> tuple[float, float]:
    """Return Cohen's kappa of two people's answers on the same texts and its standard error (Fleiss, Cohen,
    Everitt, 1969, Large sample standard errors of kappa and weighted kappa). Both vary their answers.
    """
    number = {answer: i for i, answer in enumerate(dict.fromkeys([*one, *other]))}
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
    """Return (lines on how often two files agree, a sheet of their differences). Raises UserError."""
    if is_same(*paths):
        raise UserError(
            f"{paths[0]} is named twice: each person decides in a file of their own (--decisions)"
        )
    one, other = (answers_of(path, codes) for path in paths)
    pairs = [(text, mine, other[key][1]) for key, (text, mine) in one.items() if key in other]
    if not pairs:
        raise UserError(f"{' and '.join(paths)}: no text has a decision other than skip in both")
    lines = [f"{len(pairs):,} texts are decided in both files. They agree on"]
    separator, levels = levels_of(sorted(codes.codes), codes.formatter.within_block_sep, [])
    unit = "part" if separator else "digit"
    for number in (levels[-1], *(level for level in LEVELS if level in levels[:-1])):
        of_first = f"the first {number} {unit}s" if number > 1 else f"the first {unit}"
        what = "all codes" if number == levels[-1] else of_first
        mine, theirs = [], []
        for _, *answers in pairs:
            for side, answer in zip((mine, theirs), answers):
                side.append(frozenset(cut(code, number, separator) for code in answer))
        agreed = share(sum(map(frozenset.__eq__, mine, theirs)), len(pairs))
        constant = [path for path, answers in zip(paths, (mine, theirs)) if len({*answers}) == 1]
        if constant:
            said = f"is not defined, as all answers of {' and '.join(constant)} are the same"
        else:
            found, error = kappa(mine, theirs)
            interval = f"{max(found - 1.96 * error, -1):.3f} to {min(found + 1.96 * error, 1):.3f}"
            said = f"{found:.3f} (95 % interval {interval})"
        lines.append(f"  {what}: {agreed}; Cohen's kappa {said}")
    rows = [["text", "language", "first", "words of first", "second", "words of second", DECISION, ID]]
    for text, one_has, other_has in pairs:
        if set(one_has) != set(other_has):
            cells = [text.text, text.language]
            for answer in (one_has, other_has):
                cells += [cell_of(answer), "; ".join(codes.words.get(code, "") for code in answer)]
            rows.append([escape_formula(cell) for cell in (*cells, "", f"{CHOSEN}-{text.id}")])
    return lines, "\ufeff".encode() + csv_text(rows)
