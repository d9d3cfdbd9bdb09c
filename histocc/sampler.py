"""Which rows go into which batch: a pure function of (seed, epoch, batch number, total batch).

Nothing here knows about processes until the last step, where a rank takes its share of a global batch. So the same
rows meet in the same optimizer step on any number of processes and after any number of restarts, every row comes
exactly once in an epoch, and starting in the middle of an epoch costs nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from histocc.counter_rng import derived_seed, mix

_ROUNDS = 6


def permuted(positions: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Where a seeded permutation of 0 … n−1 sends `positions` (int64 [k], each < n); int64 [k].

    A Feistel network over the next power of four, walked until the value falls below n (Black and Rogaway, 2002,
    "Ciphers with arbitrary finite domains"). Any part of the permutation is computed alone: no array of n.
    """
    half_bits = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    keys = [np.uint64(derived_seed(seed, i)) for i in range(_ROUNDS)]

    def scramble(values: np.ndarray) -> np.ndarray:
        left, right = values >> shift, values & mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & mask)
        return (left << shift) | right

    result = np.asarray(positions).astype(np.uint64)
    with np.errstate(over="ignore"):
        result = scramble(result)
        outside = np.flatnonzero(result >= n)
        while len(outside):                                       # fewer than four rounds on average
            result[outside] = scramble(result[outside])
            outside = outside[result[outside] >= n]
    return result.astype(np.int64)


@dataclass(frozen=True)
class BatchPlan:
    """The batch arithmetic of a run.

    rows: observations of an epoch; total: observations of an optimizer step over all processes; processes;
    micro: most observations that one process takes through the model at once.
    """

    rows: int
    total: int
    processes: int = 1
    micro: int = 0

    def __post_init__(self):
        if self.micro <= 0:
            object.__setattr__(self, "micro", -(-self.total // self.processes))

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; no row is dropped, so it is rounded up."""
        return -(-self.rows // self.total)

    def batch_rows(self, batch: int) -> int:
        """Observations in global batch `batch` (0-based); fewer than `total` in the last one."""
        return min(self.total, self.rows - batch * self.total)

    def micro_batches(self, batch: int) -> int:
        """Micro-batches of global batch `batch`: the same number on every rank, by the largest share."""
        return max(1, -(-(-(-self.batch_rows(batch) // self.processes)) // self.micro))

    def positions(self, batch: int, rank: int, micro_batch: int) -> np.ndarray:
        """Positions in the epoch's order that `rank` takes in this micro-batch; int64, possibly empty."""
        start = batch * self.total
        share = np.arange(start + rank, start + self.batch_rows(batch), self.processes, dtype=np.int64)
        parts = self.micro_batches(batch)
        return share[len(share) * micro_batch // parts:len(share) * (micro_batch + 1) // parts]


def epoch_rows(positions: np.ndarray, rows: int, seed: int, epoch: int) -> np.ndarray:
    """Row numbers that stand at `positions` of the shuffled order of `epoch` (int64)."""
    return permuted(positions, rows, derived_seed(seed, epoch))


class EpochOrder:
    """Rows of each global batch of an epoch: shuffled, then batches of similar length within large windows.

    A window is `WINDOW` batches of the shuffled order, or an eighth of the epoch where that is less, so that rows of one
    length meet others in the next epoch. Its rows are sorted by length, cut into batches, and the batches
    shuffled, so that a batch has little padding and the order stays a pure function of (seed, epoch, batch, total).
    The rows of an incomplete last batch stay apart. lengths: row numbers int64 [k] → their lengths [k]; None shuffles only.
    """

    WINDOW = 64

    def __init__(self, plan: BatchPlan, seed: int, lengths: Callable[[np.ndarray], np.ndarray] | None = None):
        self.plan, self.seed, self.lengths = plan, seed, lengths
        self.window = max(1, min(self.WINDOW, plan.rows // plan.total // 8))      # batches
        self._window: tuple[int, int] | None = None
        self._rows = np.zeros(0, dtype=np.int64)

    def batch(self, epoch: int, batch: int) -> np.ndarray:
        """Row numbers of global batch `batch` (0-based); int64 [batch_rows]."""
        total, full = self.plan.total, self.plan.rows // self.plan.total
        if self.lengths is None or batch >= full:
            start = batch * total
            return epoch_rows(np.arange(start, start + self.plan.batch_rows(batch)), self.plan.rows, self.seed, epoch)
        window, place = divmod(batch, self.window)
        if self._window != (epoch, window):
            self._rows, self._window = self._sorted(epoch, window, full), (epoch, window)
        return self._rows[place * total:(place + 1) * total]

    def _sorted(self, epoch: int, window: int, full: int) -> np.ndarray:
        first, last = window * self.window, min((window + 1) * self.window, full)
        rows = epoch_rows(np.arange(first * self.plan.total, last * self.plan.total), self.plan.rows, self.seed, epoch)
        rows = rows[np.argsort(self.lengths(rows), kind="stable")].reshape(last - first, self.plan.total)
        order = permuted(np.arange(last - first), last - first, derived_seed(self.seed, epoch, window))
        return rows[order].reshape(-1)


class MicroBatchSampler:
    """Yields (epoch, batch, micro-batch) triples: what a data loader asks the dataset for. The same on every rank."""

    def __init__(self, plan: BatchPlan, epoch: int = 0, first_batch: int = 0):
        self.plan, self.epoch, self.first_batch = plan, epoch, first_batch

    def __iter__(self):
        for batch in range(self.first_batch, self.plan.steps_per_epoch):
            for micro_batch in range(self.plan.micro_batches(batch)):
                yield self.epoch, batch, micro_batch

    def __len__(self) -> int:
        return sum(self.plan.micro_batches(b) for b in range(self.first_batch, self.plan.steps_per_epoch))
