"""Which rows go into which batch: a pure function of (seed, epoch, batch number, total batch).

Nothing here knows about processes until the last step, where a rank takes its share of a global batch. So the
same rows meet in the same optimizer step on any number of processes and after any number of restarts, every
row comes exactly once in an epoch, and starting in the middle of an epoch costs nothing.

Padding is saved within a step, not by choosing which rows meet in it: a share is cut into micro-batches of
similar length, whose gradients add up to that of the whole, unless the model itself computes little for
padding (`Rows.groups_in_model`). Batches of one length each would save as much, but cost accuracy (measured).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from histocc.runtime.rng import derived_seed, mix

_ROUNDS = 6


def permuted(positions: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Where a seeded permutation of 0 … n−1 sends `positions` (int64 [k], each < n); int64 [k].

    A Feistel network over the next power of four, walked until the value falls below n (Black and Rogaway,
    2002, "Ciphers with arbitrary finite domains"). Any part of the permutation is computed alone: no array of
    n.
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
        while len(outside):  # fewer than four rounds on average
            result[outside] = scramble(result[outside])
            outside = outside[result[outside] >= n]
    return result.astype(np.int64)


@dataclass(frozen=True)
class BatchPlan:
    """The batch arithmetic of a run.

    rows: samples of an epoch; global_batch_size: samples of an optimizer step over all processes; processes;
    micro_batch_size: most samples that one process takes through the model at once; groups: most
    micro-batches of similar length into which a share is cut for the sake of less padding: two from
    `group_rows` samples on, and as many as `group_rows` goes into the share where that is more.
    """

    rows: int
    global_batch_size: int
    processes: int = 1
    micro_batch_size: int = 0
    groups: int = 1
    group_rows: int = 8

    def __post_init__(self):
        if self.micro_batch_size <= 0:
            object.__setattr__(self, "micro_batch_size", -(-self.global_batch_size // self.processes))

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; no row is dropped, so it is rounded up."""
        return -(-self.rows // self.global_batch_size)

    def batch_rows(self, batch: int) -> int:
        """Samples in global batch `batch` (0-based); fewer than `global_batch_size` in the last one."""
        return min(self.global_batch_size, self.rows - batch * self.global_batch_size)

    def _largest_share(self, batch: int) -> int:
        return -(-self.batch_rows(batch) // self.processes)

    def accumulation(self, batch: int) -> int:
        """Micro-batches of at most `micro_batch_size` that the largest share of a batch needs."""
        return max(1, -(-self._largest_share(batch) // self.micro_batch_size))

    def micro_batches(self, batch: int) -> int:
        """Micro-batches of global batch `batch`: the same number on every rank, by the largest share."""
        share = self._largest_share(batch)
        # the first cut saves most
        groups = 1 if share < self.group_rows else max(2, share // self.group_rows)
        return self.accumulation(batch) + min(self.groups, groups) - 1

    def rank_positions(self, batch: int, rank: int) -> np.ndarray:
        """Which places of a global batch `rank` takes; int64, possibly empty. Rows are sorted by length:
        every n-th, so that each rank has its part of the long ones.
        """
        return np.arange(rank, self.batch_rows(batch), self.processes, dtype=np.int64)


def epoch_rows(positions: np.ndarray, rows: int, seed: int, epoch: int) -> np.ndarray:
    """Row numbers that stand at `positions` of the shuffled order of `epoch` (int64)."""
    return permuted(positions, rows, derived_seed(seed, epoch))


class EpochOrder:
    """Rows of each global batch of an epoch: shuffled; within the batch sorted by length, the shortest first.

    lengths: row numbers int64 [k] → their lengths [k]; None leaves the order within the batch as it comes.
    """

    def __init__(self, plan: BatchPlan, seed: int, lengths: Callable[[np.ndarray], np.ndarray] | None = None):
        self.plan, self.seed, self.lengths = plan, seed, lengths

    def batch(self, epoch: int, batch: int) -> np.ndarray:
        """Row numbers of global batch `batch` (0-based); int64 [batch_rows]."""
        start = batch * self.plan.global_batch_size
        rows = epoch_rows(
            np.arange(start, start + self.plan.batch_rows(batch)), self.plan.rows, self.seed, epoch
        )
        return rows if self.lengths is None else rows[np.argsort(self.lengths(rows), kind="stable")]


class WindowOrder:
    """Rows of each batch where their order does not matter, as in validation: in the order of the file,
    sorted by length (None: as they come) within windows of `WINDOW` batches, so that a batch holds rows of
    similar length. Every epoch is the same.
    """

    WINDOW = 64

    def __init__(self, plan: BatchPlan, lengths: Callable[[np.ndarray], np.ndarray] | None = None):
        self.plan, self.lengths = plan, lengths
        self._window, self._rows = -1, np.zeros(0, dtype=np.int64)

    def batch(self, epoch: int, batch: int) -> np.ndarray:
        """Row numbers of global batch `batch` (0-based); int64 [batch_rows]."""
        window, place = divmod(batch, self.WINDOW)
        if window != self._window:
            start = window * self.WINDOW * self.plan.global_batch_size
            rows = np.arange(start, min(start + self.WINDOW * self.plan.global_batch_size, self.plan.rows))
            rows = rows if self.lengths is None else rows[np.argsort(self.lengths(rows), kind="stable")]
            self._rows, self._window = rows, window
        return self._rows[place * self.plan.global_batch_size : (place + 1) * self.plan.global_batch_size]


def cut_by_width(widths: np.ndarray, parts: int, micro: int) -> list[np.ndarray]:
    """Cuts a share into exactly `parts` micro-batches with as little padding as may be.

    widths: positions that each of n samples needs, int64 [n], few different values; micro: most
    samples in one. Returns indices int64 [k] each, narrow ones first, together each of 0 … n−1 once;
    empty where there are too few. A pure function of its arguments.
    """
    order = np.argsort(widths, kind="stable")
    distinct, counts = np.unique(widths, return_counts=True)
    groups = max(1, parts + 1 - max(1, -(-len(widths) // micro)))
    edges = [0, *np.cumsum(counts).tolist()]
    bounds = [edges[i] for i in best_cuts(distinct.tolist(), edges, groups)]
    pieces = [
        piece
        for begin, end in zip(bounds, bounds[1:])
        for piece in np.array_split(order[begin:end], -(-(end - begin) // micro))
    ]
    while len(pieces) < parts:  # a cut more than padding asks for: where it costs least
        largest = max(range(len(pieces)), key=lambda i: len(pieces[i]))
        pieces[largest : largest + 1] = np.array_split(pieces[largest], 2)
    return pieces


class BatchSampler:
    """Yields (epoch, batch): what a data loader asks the dataset for. The same on every rank."""

    def __init__(self, plan: BatchPlan, epoch: int = 0, first_batch: int = 0):
        self.plan, self.epoch, self.first_batch = plan, epoch, first_batch

    def __iter__(self):
        for batch in range(self.first_batch, self.plan.steps_per_epoch):
            yield self.epoch, batch

    def __len__(self) -> int:
        return max(0, self.plan.steps_per_epoch - self.first_batch)


def best_cuts(widths: list[int], edges: list[int], groups: int) -> list[int]:
    """Samples of different widths in groups with little padding: which of the edges between widths bound at
    most `groups` groups with the fewest positions, padding and all.

    widths: ascending; edges[i]: samples narrower than widths[i]. A group is as wide as its widest.
    """
    best = {0: (0, [0])}  # widths covered → (positions, cuts)
    for _ in range(groups):
        more = dict(best)
        for begin, (positions, cuts) in best.items():
            for end in range(begin + 1, len(widths) + 1):
                cost = positions + (edges[end] - edges[begin]) * widths[end - 1]
                if end not in more or cost < more[end][0]:
                    more[end] = (cost, [*cuts, end])
        best = more
    return best[len(widths)][1]
