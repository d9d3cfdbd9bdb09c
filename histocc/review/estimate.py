"""How accurate a coded file is, from rows that were drawn at random."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from histocc.review.coded import CodedText
from histocc.review.sheet import Drawn

QUARTERS = 4
DRAWS = 100_000  # of the distribution of the accuracy
PERCENTILES = (2.5, 97.5)


def drawn_texts(texts: list[CodedText], rows: int, seed: int) -> list[Drawn]:
    """The texts of `rows` rows drawn with replacement, as many from each quarter of the file's rows by
    confidence, in no order. A row is drawn, not a text: one with many rows comes more often.
    """
    texts = sorted(texts, key=lambda text: (-text.doubt / text.rows, text.id))
    counts = np.array([text.rows for text in texts])
    middle = np.cumsum(counts) - counts / 2
    quarter = np.minimum((QUARTERS * middle / max(counts.sum(), 1)).astype(np.int64), QUARTERS - 1)
    draw = np.random.default_rng(seed)
    there = np.unique(quarter).tolist()
    times: Counter[int] = Counter()
    for i, each in enumerate(there):
        at = np.flatnonzero(quarter == each)
        number = rows // len(there) + (i < rows % len(there))
        times.update(draw.choice(at, number, p=counts[at] / counts[at].sum()).tolist())
    found = [
        Drawn(texts[i], times[i], int(quarter[i]) + 1, int(counts[quarter == quarter[i]].sum()))
        for i in times
    ]
    return [found[i] for i in draw.permutation(len(found))]


class Quarter(NamedTuple):
    """number: 1 is the least sure; rows of the file; drawn: rows that were drawn and decided; right: those of
    them that are.
    """

    number: int
    rows: int
    drawn: int
    right: int


class Estimate(NamedTuple):
    """accuracy of the file's rows with its 95 % interval, fractions."""

    accuracy: float
    low: float
    high: float
    quarters: list[Quarter]

    @classmethod
    def of(cls, quarters: list[Quarter]) -> "Estimate":
        """Quarters weigh as many rows as they have. The interval is that of Jeffreys' prior for each quarter
        (Brown, Cai, DasGupta, 2001, Interval estimation for a binomial proportion), so that a quarter in
        which nothing is decided is anything from 0 to 1.
        """
        weight = np.array([each.rows for each in quarters], dtype=np.float64)
        weight /= weight.sum()
        right, drawn = (np.array([getattr(each, name) for each in quarters]) for name in ("right", "drawn"))
        draw = np.random.default_rng(1)
        sums = draw.beta(right + 0.5, drawn - right + 0.5, size=(DRAWS, len(quarters))) @ weight
        low, high = np.percentile(sums, PERCENTILES)
        accuracy = float(np.where(drawn > 0, right / np.maximum(drawn, 1), 0.5) @ weight)
        return cls(accuracy, float(min(low, accuracy)), float(max(high, accuracy)), quarters)
