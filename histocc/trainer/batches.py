"""Rows → micro-batches: each rank's share of every optimizer step, from any position on."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from histocc.runtime.device import by_kind
from histocc.runtime.errors import UserError, too_few_open_files
from histocc.runtime.rng import derived_seed
from histocc.runtime.world import World
from histocc.trainer.config import TrainConfig
from histocc.trainer.loading import Loader
from histocc.trainer.plan import BatchPlan, BatchSampler, EpochOrder, WindowOrder, cut_by_width

# Streams of random numbers of any run, numbered for `derived_seed`; the other numbers are for what is
# trained.
WEIGHTS, ORDER, DROPOUT = 0, 1, 3

LENGTH_GROUPS = 4
LENGTH_GROUP_ROWS = {"cpu": 24, "cuda": 64}  # smaller ones cost more than padding does


class Rows:
    """What is trained or validated on: `len(rows)` rows, and tensors of any of them. The base of such
    classes; `__len__` and `batch` are theirs.

    fingerprint: a text that other rows do not have; a run is resumed on the same rows alone. has_lengths:
    whether `lengths` and `widths` say something. groups_in_model: kinds of device on which the model itself
    computes little for padding, so that samples of similar width need no micro-batches of their own.
    """

    fingerprint = ""
    has_lengths = False
    groups_in_model: tuple[str, ...] = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, Tensor]:
        """Tensors [B, …] by name, of rows `numbers` int64 [B] in `epoch` (0-based). A pure function of these:
        whatever is drawn for a row comes of a seed, the epoch and its number (`histocc.runtime.rng`), never
        of the order or the process in which it is asked for.
        """
        raise NotImplementedError

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Lengths [B] of rows `numbers` int64 [B], by which those of a step are sorted before they are shared
        out.
        """
        return np.zeros(len(numbers), dtype=np.int64)

    def widths(self, batch: dict[str, Tensor]) -> np.ndarray:
        """Positions that each row of a batch needs, int64 [B], few different values: those of similar width
        go into one micro-batch.
        """
        return np.zeros(len(next(iter(batch.values()))), dtype=np.int64)

    def piece(self, batch: dict[str, Tensor], kept: np.ndarray) -> dict[str, Tensor]:
        """The rows `kept` int64 [b] of a batch, no wider than these need."""
        return {name: value[torch.from_numpy(kept)] for name, value in batch.items()}

    def widest(self, numbers: np.ndarray, limit: bool) -> dict[str, Tensor]:
        """Tensors of rows `numbers` int64 [B], as wide as the longest row asks for, or (`limit`) as any could
        ever be: to see whether they fit into memory.
        """
        return self.batch(numbers, 0)


class MicroBatches(Dataset[list[dict[str, Any]]]):
    """One rank's share of each global batch, asked for by (epoch, batch): a pure function of these and the
    arguments.

    shuffle_seed: None is for validation, where order does not matter.
    """

    def __init__(
        self,
        rows: Rows,
        plan: BatchPlan,
        rank: int,
        shuffle_seed: int | None = None,
    ):
        self.rows, self.plan, self.rank = rows, plan, rank
        lengths = rows.lengths if rows.has_lengths else None
        self.order = (
            WindowOrder(plan, lengths) if shuffle_seed is None else EpochOrder(plan, shuffle_seed, lengths)
        )

    def __len__(self) -> int:
        return self.plan.steps_per_epoch

    def __getitem__(self, index: tuple[int, int]) -> list[dict[str, Any]]:
        """Micro-batches of similar width: what `Rows.batch` gives, and weights float32 [B], rows int64 [B]
        (which ones they are), and the plain numbers global_count (rows of the whole optimizer step, over all
        ranks) and last_micro_batch.

        A micro-batch without rows gets one of weight 0, so that the rank takes part in every collective.
        """
        epoch, batch = index
        rows, plan = self.order.batch(epoch, batch), self.plan
        share = rows[plan.rank_positions(batch, self.rank)]
        weight = 1.0 if len(share) else 0.0
        share = share if len(share) else rows[:1]
        whole = self.rows.batch(share, epoch)
        parts = plan.micro_batches(batch)
        pieces = cut_by_width(self.rows.widths(whole), parts, plan.micro_batch_size)
        return [
            {
                **self.rows.piece(whole, kept),
                "weights": torch.full((len(kept),), weight if len(piece) else 0.0),
                "rows": torch.from_numpy(share[kept]),
                "global_count": plan.batch_rows(batch),
                "last_micro_batch": number == parts - 1,
            }
            for number, piece in enumerate(pieces)
            for kept in [piece if len(piece) else np.zeros(1, dtype=np.int64)]
        ]


def widest(rows: Rows, number: int, limit: bool) -> dict[str, Any]:
    """A micro-batch of `number` rows as wide as any; see `Rows.widest`."""
    numbers = np.arange(min(number, len(rows)))
    batch = rows.widest(numbers, limit)
    return {
        **rows.piece(batch, numbers),
        "weights": torch.ones(len(numbers)),
        "rows": torch.from_numpy(numbers),
    }


class BatchLoader:
    """Iterates one rank's micro-batches from a position on: `for batch in loader.at(epoch, first_batch)`.

    world: whose limit and signals end a wait for loading processes. Keyword arguments go to torch's
    DataLoader (num_workers, prefetch_factor, pin_memory, persistent_workers).
    """

    def __init__(self, dataset: MicroBatches, world: World | None = None, **loader_arguments: Any):
        self.dataset, self.plan, world = dataset, dataset.plan, world or World()
        self.sampler = BatchSampler(self.plan)
        self.loader = Loader(dataset, self.sampler, world.time_limit, world.size == 1, **loader_arguments)

    def at(self, epoch: int, first_batch: int = 0) -> "BatchLoader":
        """Sets where the next iteration starts. Workers, persistent or not, are told with each index."""
        self.sampler.epoch, self.sampler.first_batch = epoch, first_batch
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for share in self.loader:
            yield from share

    def __len__(self) -> int:
        """Optimizer steps from the position on."""
        return len(self.sampler)


def batch_plan(args: TrainConfig, rows: Rows, world: World) -> BatchPlan:
    """The batch arithmetic of the training rows."""
    cut = rows.has_lengths and world.device.type not in rows.groups_in_model
    return BatchPlan(
        len(rows),
        args.total_batch(world.size),
        world.size,
        args.samples_at_once,
        LENGTH_GROUPS if cut else 1,
        by_kind(LENGTH_GROUP_ROWS, world.device),
    )


def make_loaders(
    args: TrainConfig, world: World, train_rows: Rows, val_rows: Rows | None, plan: BatchPlan
) -> dict[str, BatchLoader]:
    """Loaders of this rank's share of training and validation rows. All ranks. Raises UserError."""
    order = derived_seed(args.seed, ORDER)
    train = MicroBatches(train_rows, plan, world.rank, order)
    loaders = {"train": BatchLoader(train, world, **worker_arguments(args))}
    if val_rows is not None:
        loaders["val"] = validation_loader(args, world, val_rows)
    if args.num_workers:
        tensors = sum(isinstance(value, torch.Tensor) for batch in train[0, 0] for value in batch.values())
        on_their_way = (args.prefetch_factor or 2) * tensors
        if short := list(filter(None, world.gather(too_few_open_files(args.num_workers, on_their_way)))):
            raise UserError(short[0])
    return loaders


def validation_loader(args: TrainConfig, world: World, rows: Rows) -> BatchLoader:
    """The loader of this rank's share of validation rows."""
    at_once = args.samples_at_once
    plan = BatchPlan(len(rows), at_once * world.size, world.size, at_once)
    return BatchLoader(MicroBatches(rows, plan, world.rank), world, **worker_arguments(args))


def worker_arguments(args: TrainConfig) -> dict[str, Any]:
    """As torch's DataLoader takes them."""
    found: dict[str, Any] = {"num_workers": args.num_workers, "pin_memory": args.pin_memory}
    if args.num_workers:
        found |= {"prefetch_factor": args.prefetch_factor, "persistent_workers": args.persistent_workers}
    return found
