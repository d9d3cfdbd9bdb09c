"""Rows → micro-batches: which rows an optimizer step takes, each rank's share of them, and their loading.

The rows of a step are a pure function of (seed, epoch, batch number, total batch), and each rank takes its
share. They are the same on any number of processes and after any restart. An epoch has every row once.

The rows of a step are not chosen to save padding. Instead each share is cut into micro-batches of similar
length, whose gradients add up to the gradient of the whole. This is not done if the model itself computes
little for padding (`Rows.groups_in_model`). Batches of one length each save as much, but were less accurate.
"""

import contextlib
import multiprocessing.queues
import os
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from errno import ENOSPC
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from histocc.runtime.device import by_kind
from histocc.runtime.errors import SHARED_MEMORY_IS_FULL, TrainingError, allow_open_files, errno_of
from histocc.runtime.rng import ORDER, derived_seed, mix
from histocc.runtime.signals import leave_to_parent, stop_asked
from histocc.runtime.world import World
from histocc.text import best_cuts
from histocc.trainer.config import StepFlags, TrainConfig

LENGTH_GROUPS = 4
LENGTH_GROUP_ROWS = {"cpu": 24, "cuda": 64}  # smaller groups cost more than padding
SPAN = 1 << 15  # rows whose lengths are read at once
POLL_SECONDS = 2.0  # how often a wait for a worker's batch checks whether the run is to stop


# ---- which rows


def permuted(positions: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Return the images of `positions` (int64 [k], each < n) in a seeded permutation of 0 … n−1, int64 [k].

    A Feistel network over the next power of four, walked until the value falls below n (Black and Rogaway,
    2002, "Ciphers with arbitrary finite domains"), needs no array of n values.
    """
    half_bits = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    keys = [np.uint64(derived_seed(seed, i)) for i in range(6)]

    def scramble(values: np.ndarray) -> np.ndarray:
        left, right = values >> shift, values & mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & mask)
        return (left << shift) | right

    with np.errstate(over="ignore"):
        result = scramble(np.asarray(positions).astype(np.uint64))
        while len(outside := np.flatnonzero(result >= n)):
            result[outside] = scramble(result[outside])
    return result.astype(np.int64)


@dataclass(frozen=True)
class BatchPlan:
    """The batch arithmetic of a run."""

    rows: int  # samples of an epoch
    global_batch_size: int  # samples of an optimizer step over all processes
    processes: int = 1
    micro_batch_size: int = 0  # most samples that a process takes through the model at once (0: its share)
    groups: int = 1  # most micro-batches of similar length into which a share is cut for less padding
    group_rows: int = 8  # samples of a group: a share this large is cut in two, or share // group_rows

    def __post_init__(self):
        if self.micro_batch_size <= 0:
            object.__setattr__(self, "micro_batch_size", -(-self.global_batch_size // self.processes))

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch, rounded up: no row is dropped."""
        return -(-self.rows // self.global_batch_size)

    def batch_rows(self, batch: int) -> int:
        """Samples in global batch `batch` (0-based)."""
        return min(self.global_batch_size, self.rows - batch * self.global_batch_size)

    def largest_share(self, batch: int) -> int:
        return -(-self.batch_rows(batch) // self.processes)

    def accumulation(self, batch: int) -> int:
        """Micro-batches that the largest share of a batch needs."""
        return max(1, -(-self.largest_share(batch) // self.micro_batch_size))

    def micro_batches(self, batch: int) -> int:
        """Micro-batches of global batch `batch`: the number for the largest share, used on every rank."""
        share = self.largest_share(batch)
        groups = 1 if share < self.group_rows else max(2, share // self.group_rows)
        return self.accumulation(batch) + min(self.groups, groups) - 1


def cut_by_width(widths: np.ndarray, parts: int, micro: int) -> list[np.ndarray]:
    """Cut a share into `parts` micro-batches of at most `micro` samples with the least padding, given the
    positions that each sample needs, int64 [n]. Return the samples of each micro-batch, narrow ones first.
    With too few samples some are empty.
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
    while len(pieces) < parts:  # more cuts than padding asks for: where they cost least
        largest = max(range(len(pieces)), key=lambda i: len(pieces[i]))
        pieces[largest : largest + 1] = np.array_split(pieces[largest], 2)
    return pieces


# ---- their tensors


class Rows:
    """Base of the rows that a run trains or validates on. Subclasses define `__len__` and `batch`."""

    fingerprint = ""  # a text that differs for other rows, since a run can only resume on the same
    has_lengths = False  # whether `lengths` and `widths` are meaningful
    groups_in_model: tuple[str, ...] = ()  # kinds of device on which the model computes little for padding

    def __len__(self) -> int:
        raise NotImplementedError

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, Tensor]:
        """Return tensors [B, …] by name, for rows `numbers` int64 [B] in `epoch` (0-based). It is a pure
        function: draws for a row depend on a seed, the epoch and its number (`histocc.runtime.rng`).
        """
        raise NotImplementedError

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Return lengths [B] of rows `numbers` int64 [B]. A step is sorted by them, then shared out."""
        return np.zeros(len(numbers), dtype=np.int64)

    def widths(self, batch: dict[str, Tensor]) -> np.ndarray:
        """Return the positions that each row needs, int64 [B]. Similar ones go into one micro-batch."""
        return np.zeros(len(next(iter(batch.values()))), dtype=np.int64)

    def piece(self, batch: dict[str, Tensor], kept: np.ndarray) -> dict[str, Tensor]:
        """Return the rows `kept` int64 [b] of a batch, only as wide as they need."""
        return {name: value[torch.from_numpy(kept)] for name, value in batch.items()}


class MicroBatches(Dataset[list[dict[str, Any]]]):
    """One rank's share of each global batch, indexed by (epoch, batch), a pure function of these and the
    arguments. shuffle_seed: seed of an epoch's order, or None, for validation, to order by length.
    """

    def __init__(self, rows: Rows, plan: BatchPlan, rank: int = 0, shuffle_seed: int | None = None):
        self.rows, self.plan, self.rank, self.seed = rows, plan, rank, shuffle_seed
        if shuffle_seed is None and rows.has_lengths and plan.rows:
            # End of the rows of one length in one block, in the order of validation
            blocks = (np.arange(start, min(start + SPAN, plan.rows)) for start in range(0, plan.rows, SPAN))
            found = [np.unique(rows.lengths(block), return_counts=True) for block in blocks]
            lengths, counts = map(np.concatenate, zip(*found))
            starts = np.repeat(np.arange(0, plan.rows, SPAN), [len(some) for some, _ in found])
            order = np.argsort(lengths, kind="stable")
            self.lengths, self.starts, self.ends = lengths[order], starts[order], np.cumsum(counts[order])

    def __len__(self) -> int:
        return self.plan.steps_per_epoch

    def global_batch(self, epoch: int, batch: int) -> np.ndarray:
        """Return the row numbers of global batch `batch` (0-based), sorted by length, int64 [batch_rows]."""
        first, size = batch * self.plan.global_batch_size, self.plan.batch_rows(batch)
        rows = np.arange(first, first + size)
        if self.seed is not None:
            rows = permuted(rows, self.plan.rows, derived_seed(self.seed, epoch))
        elif self.rows.has_lengths:
            found, (low, high) = [], np.searchsorted(self.ends, rows[[0, -1]], side="right").tolist()
            for length, start in zip(self.lengths[low : high + 1], self.starts[low : high + 1]):
                block = np.arange(start, min(start + SPAN, self.plan.rows))
                found.append(block[self.rows.lengths(block) == length])
            rows = np.concatenate(found)[first - self.ends[high] :][:size]
        return rows[np.argsort(self.rows.lengths(rows), kind="stable")] if self.rows.has_lengths else rows

    def __getitem__(self, index: tuple[int, int]) -> list[dict[str, Any]]:
        """Return micro-batches of similar width: the entries of `Rows.batch`, weights float32 [B], rows int64
        [B], global_count (rows of the optimizer step, on all ranks) and last_micro_batch.

        An empty micro-batch gets a row of weight 0, so that the rank takes part in every collective.
        """
        epoch, batch = index
        rows, plan = self.global_batch(epoch, batch), self.plan
        share = rows[self.rank :: plan.processes]  # every n-th, possibly none
        weight, share = (1.0, share) if len(share) else (0.0, rows[:1])
        tensors, parts = self.rows.batch(share, epoch), plan.micro_batches(batch)
        micro_batches = []
        for piece in cut_by_width(self.rows.widths(tensors), parts, plan.micro_batch_size):
            kept = piece if len(piece) else np.zeros(1, dtype=np.int64)
            micro_batches.append(
                {
                    **self.rows.piece(tensors, kept),
                    "weights": torch.full((len(kept),), weight if len(piece) else 0.0),
                    "rows": torch.from_numpy(share[kept]),
                    "global_count": plan.batch_rows(batch),
                    "last_micro_batch": len(micro_batches) == parts - 1,
                }
            )
        return micro_batches


def widest(rows: Rows, number: int) -> dict[str, Any]:
    """Return a micro-batch of the `number` longest rows, to see whether they fit into memory."""
    numbers = np.arange(0)
    for start in range(0, len(rows), SPAN):
        both = np.append(numbers, np.arange(start, min(start + SPAN, len(rows))))
        numbers = both[np.argsort(-rows.lengths(both), kind="stable")[:number]]
    return rows.batch(numbers, 0) | {"weights": torch.ones(len(numbers)), "rows": torch.from_numpy(numbers)}


# ---- their loading


@dataclass
class Upcoming:
    """The batches of an epoch that are still to come, as (epoch, batch)."""

    epoch: int = 0
    batches: range = range(0)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(repeat(self.epoch), self.batches)


class BatchLoader:
    """A loader of one rank's micro-batches from a position on: `for batch in loader.at(epoch, first_batch)`.

    A wait for loading processes ends at the time limit of `world`, or at a request to stop. A process that
    fails, dies or does not answer raises TrainingError. loading: arguments of torch's DataLoader.
    """

    def __init__(self, dataset: MicroBatches, world: World | None = None, **loading: Any):
        self.dataset, self.plan, self.world = dataset, dataset.plan, world or World()
        self.upcoming = Upcoming()
        if loading.get("num_workers"):
            allow_open_files()
            loading["timeout"] = min(POLL_SECONDS, self.world.time_limit)
            if self.world.device.type == "cuda" and hasattr(os, "fork"):  # CUDA's threads survive no fork
                context: Any = multiprocessing.get_context("forkserver")
                context.set_forkserver_preload([__name__])
                loading["multiprocessing_context"] = context
        loading |= {"generator": torch.Generator(), "worker_init_fn": begin_worker}
        self.loader = DataLoader(dataset, batch_size=None, sampler=self.at(0).upcoming, **loading)

    def at(self, epoch: int, first_batch: int = 0) -> "BatchLoader":
        """Set where the next iteration starts. All workers receive this with each index."""
        self.upcoming.epoch, self.upcoming.batches = epoch, range(first_batch, self.plan.steps_per_epoch)
        return self

    def __len__(self) -> int:
        """Optimizer steps from the position on."""
        return len(self.upcoming.batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.loader.num_workers:
            for share in self.loader:
                yield from share
            return
        try:
            shares: Any = iter(self.loader)
        except OSError as error:  # from the workers' semaphores
            raise TrainingError(SHARED_MEMORY_IS_FULL) if error.errno == ENOSPC else error from None
        with contextlib.suppress(ValueError, AttributeError):  # not the main thread, or Windows
            # torch's handler raises wherever the main thread is, and the wait for a batch sees a dead worker
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        waiting_since = time.monotonic()
        while True:
            try:
                share = next(shares)
            except StopIteration:
                return
            except Exception as error:
                waited, reason = time.monotonic() - waiting_since, str(error).strip() or type(error).__name__
                if any(worker.exitcode == ENOSPC for worker in shares._workers):
                    raise TrainingError(SHARED_MEMORY_IS_FULL) from None
                if isinstance(error, ConnectionError | EOFError):  # it died while it sent a batch
                    reason = "a worker exited unexpectedly"
                if "timed out after" in reason:
                    if waited < self.world.time_limit and not stop_asked():
                        continue
                    reason = f"no answer for {waited:,.0f} s (--timeout-minutes)"
                raise TrainingError(
                    f"a process that loads data failed: {reason.splitlines()[-1][:300]}; --num-workers 0"
                    " shows why; in a container /dev/shm may be too small (docker run --shm-size=8g)"
                ) from None
            yield from share
            waiting_since = time.monotonic()


def begin_worker(_: int) -> None:
    """Have a worker end if it cannot share a batch in memory. Python would print that and lose it."""

    def not_handed_over(error: Exception, _: object) -> None:
        traceback.print_exception(error)
        os._exit(errno_of(error) or 1)

    leave_to_parent()
    queue: Any = multiprocessing.queues.Queue
    queue._on_queue_feeder_error = staticmethod(not_handed_over)


def batch_plan(flags: StepFlags, rows: Rows, world: World) -> BatchPlan:
    """Return the batch arithmetic of the training rows."""
    size, group_rows = world.size, by_kind(LENGTH_GROUP_ROWS, world.device)
    groups = LENGTH_GROUPS if rows.has_lengths and world.device.type not in rows.groups_in_model else 1
    return BatchPlan(len(rows), flags.total_batch(size), size, flags.samples_at_once, groups, group_rows)


def make_loader(args: TrainConfig, world: World, rows: Rows, plan: BatchPlan | None = None) -> BatchLoader:
    """Return the loader of this rank's share of rows, to train on with `plan`, or without it to validate."""
    shuffle_seed, at_once = None if plan is None else derived_seed(args.seed, ORDER), args.samples_at_once
    plan = plan or BatchPlan(len(rows), at_once * world.size, world.size, at_once)
    loading = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
    options = {name: getattr(args, name) for name in loading}
    if args.pin_memory is None:
        options["pin_memory"] = world.device.type == "cuda"
    return BatchLoader(MicroBatches(rows, plan, world.rank, shuffle_seed), world, **options)
