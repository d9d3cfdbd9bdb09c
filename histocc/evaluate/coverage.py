"""How many answers a model can give if so many of them are to be right, and no others are given."""

from collections.abc import Callable

import numpy as np

from histocc.model.confidence import curve

TARGETS = (0.90, 0.95, 0.98, 0.99)


def least_confidence(conf: np.ndarray, right: np.ndarray, weight: np.ndarray, target: float) -> float:
    """The confidence from which on this share is right, of several the one that most answers have; inf where
    none is. conf float [N], right bool [N], weight float [N].
    """
    reached = [
        (share, least) for least, share, accuracy in curve(conf, right, weight, 10_000) if accuracy >= target
    ]
    return max(reached, default=(0.0, float("inf")))[1]


class Coverage:
    """confidence float [N], right bool [N]; texts: hash of each row's text, uint64 [N]; measured: columns
    [N, 5] as of `measures.row_counts` → `measures.measured`.

    The threshold of a target is chosen on one half of the texts, by their hash, and the rows of the other
    half are counted with it, since on the texts that it was chosen on it flatters itself.
    """

    def __init__(
        self,
        confidence: np.ndarray,
        right: np.ndarray,
        texts: np.ndarray,
        measured: Callable[[np.ndarray], dict],
    ):
        self.confidence, self.right, self.measured = confidence, right, measured
        _, place, rows = np.unique(texts, return_inverse=True, return_counts=True)
        self.weight, half = (
            1 / rows[place.reshape(-1)],
            ((texts >> np.uint64(18)) & np.uint64(1)).astype(np.int64),
        )
        self.least = {}
        self.kept = {}
        for target in TARGETS:
            halves = [self._least(target, half == each) for each in (0, 1)]
            self.least[target] = self._least(target, half >= 0), halves
            self.kept[target] = confidence >= np.array(halves)[1 - half]

    def _least(self, target: float, part: np.ndarray) -> float:
        return least_confidence(self.confidence[part], self.right[part], self.weight[part], target)

    def curve(self) -> list[list[float]]:
        """(confidence, share of the texts with at least so much, share of these that is right)."""
        return [list(point) for point in curve(self.confidence, self.right, self.weight, 100)]

    def targets(self) -> list[dict]:
        """Of each target: "threshold" on all texts and on the halves (None: no answers are that right), and
        what `of` gives.
        """
        everyone = np.ones(len(self.right), dtype=bool)
        return [
            {
                "accuracy": target,
                "threshold": finite(self.least[target][0]),
                "threshold_of_halves": list(map(finite, self.least[target][1])),
                **self.of(target, everyone),
            }
            for target in TARGETS
        ]

    def by(self, groups: dict[str, np.ndarray]) -> dict[str, list[dict]]:
        """The same of groups of rows, bool [N] each, with the thresholds of all."""
        return {
            name: [{"accuracy": target, **self.of(target, rows)} for target in TARGETS]
            for name, rows in groups.items()
        }

    def of(self, target: float, rows: np.ndarray) -> dict:
        """Of these rows: "stay", the share that is answered, and "right", the share of those that is right,
        each {"over_rows", "over_texts"}: [value, low, high], None where there is none.
        """
        kept = self.kept[target] & rows
        return {"stay": self._share(kept, rows), "right": self._share(self.right & kept, kept)}

    def _share(self, part: np.ndarray, whole: np.ndarray) -> dict:
        columns = np.zeros((len(whole), 5))
        columns[:, 0], columns[:, 1] = whole, part
        found = self.measured(columns)
        return {name: found[name].get("accuracy") for name in ("over_rows", "over_texts")}


def finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
