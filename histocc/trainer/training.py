"""What a run trains, on what, and with which batches, loaders and optimizer: for any model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from histocc.runtime import checkpoint
from histocc.runtime.device import by_kind
from histocc.runtime.errors import UserError
from histocc.runtime.machine_errors import too_few_open_files
from histocc.runtime.precision import Precision
from histocc.runtime.rng import derived_seed
from histocc.runtime.world import World
from histocc.trainer import loop
from histocc.trainer.batch_size import BatchSettings, find_batch_size
from histocc.trainer.batches import BatchLoader, MicroBatches, Rows, widest
from histocc.trainer.plan import BatchPlan
from histocc.trainer.settings import LoaderSettings, RunSettings

# Streams of random numbers of any run, numbered for `derived_seed`; the other numbers are for what is
# trained.
WEIGHTS, ORDER, DROPOUT = 0, 1, 3

LENGTH_GROUPS = 4
LENGTH_GROUP_ROWS = {"cpu": 24, "cuda": 64}  # smaller ones cost more than padding does


@dataclass(frozen=True)
class Training:
    """What a run trains, and on what.

    Args:
        model: bare, on its device, with the weights that it starts or continues from.
        task: what is computed of a batch; see `histocc.trainer.task`.
        train, val: rows; None for a run that is not validated.
        entries: what its checkpoints hold beside what those of any run do: enough to use the model.
        fingerprint: of the rows; a run is resumed on the same alone.
        files: checksum of each file beside the rows that decides the result, by flag.
        fast: names of the parameters that have a learning rate of their own, and its factor on that of the
            rest. Names, since sharding replaces the parameters.
        flops: of a micro-batch; see `histocc.trainer.loop.Run`.
        about: lines of what is said before the start, on data and model; about_rate: on its learning rates.
        lists: folder of small files that are copied for the user to look at; "" for none.
        epoch_name: of the checkpoint of an epoch, {} for its number.
        fitted_before: what was fitted before the first step, "" for nothing.
        smaller_model: what to take where memory is short.
        finish: called on all ranks after the last step, and where none is left to take, with the model in
            evaluation mode, without gradients, its weights whole.
    """

    model: nn.Module
    task: loop.Task
    train: Rows
    val: Rows | None = None
    entries: dict[str, Any] = field(default_factory=dict[str, Any])
    fingerprint: str = ""
    files: dict[str, int] = field(default_factory=dict[str, int])
    fast: tuple[Sequence[str], float] = ((), 1.0)
    flops: Callable[[dict[str, Any]], float] | None = None
    about: list[str] = field(default_factory=list[str])
    about_rate: str = ""
    lists: str = ""
    epoch_name: str = checkpoint.EPOCH
    fitted_before: str = ""
    smaller_model: str = "a smaller model"
    finish: Callable[[nn.Module], object] | None = None


def batch_plan(batch: BatchSettings, rows: Rows, world: World) -> BatchPlan:
    """The batch arithmetic of the training rows."""
    cut = rows.has_lengths and world.device.type not in rows.groups_in_model
    return BatchPlan(
        len(rows),
        batch.total(world.size),
        world.size,
        batch.batch_size,
        LENGTH_GROUPS if cut else 1,
        by_kind(LENGTH_GROUP_ROWS, world.device),
    )


def make_loaders(
    settings: RunSettings,
    world: World,
    training: Training,
    plan: BatchPlan,
) -> dict[str, BatchLoader]:
    """Loaders of this rank's share of training and validation rows. All ranks. Raises UserError."""
    loader, order = settings.loader, derived_seed(settings.seed, ORDER)
    train = MicroBatches(training.train, plan, world.rank, order)
    loaders = {"train": BatchLoader(train, world, **worker_arguments(loader))}
    if training.val is not None:
        loaders["val"] = validation_loader(settings, world, training.val)
    if loader.num_workers:
        tensors = sum(isinstance(value, torch.Tensor) for batch in train[0, 0] for value in batch.values())
        on_their_way = (loader.prefetch_factor or 2) * tensors
        if short := list(filter(None, world.gather(too_few_open_files(loader.num_workers, on_their_way)))):
            raise UserError(short[0])
    return loaders


def validation_loader(settings: RunSettings, world: World, rows: Rows) -> BatchLoader:
    """The loader of this rank's share of validation rows."""
    at_once = int(settings.batch.batch_size)
    plan = BatchPlan(len(rows), at_once * world.size, world.size, at_once)
    return BatchLoader(MicroBatches(rows, plan, world.rank), world, **worker_arguments(settings.loader))


def worker_arguments(loader: LoaderSettings) -> dict[str, Any]:
    """As torch's DataLoader takes them."""
    found: dict[str, Any] = {"num_workers": loader.num_workers, "pin_memory": loader.pin_memory}
    if loader.num_workers:
        found |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    return found


def make_optimizer(
    model: nn.Module, weight_decay: float, rate: float, fast: tuple[Sequence[str], float] = ((), 1.0)
) -> torch.optim.Optimizer:
    """AdamW over what is trained, all tensors in one pass; "initial_lr" of a group is its peak rate.

    Args:
        rate: the peak.
        fast: names of parameters that are a group of their own, and the factor on their rate.
    """
    names, factor = fast
    rest = [p for name, p in model.named_parameters() if p.requires_grad and name not in names]
    groups: list[dict[str, Any]] = [{"params": rest}]
    if names:
        groups.append({"params": [model.get_parameter(name) for name in names], "lr": rate * factor})
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=weight_decay, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def choose_batch_size(
    settings: RunSettings, world: World, training: Training, precision: Precision
) -> BatchSettings:
    """--batch-size auto: a size that was tried; the total batch stays that of the default. All ranks."""
    model = training.model.train()

    def take(rows: int) -> None:  # a GPU must hold the widest
        if world.device.type == "cuda":
            batch = widest(training.train, rows, limit=True)
        else:
            batch = MicroBatches(training.train, BatchPlan(len(training.train), rows), 0, 0)[0, 0][0]
        loop.forward_backward(model, training.task, loop.to_device(batch, world.device), precision)

    total = settings.batch.total(world.size)
    most = min(-(-total // world.size), len(training.train))
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    # AdamW's two means, DDP's buckets
    found = find_batch_size(take, most, world, still_to_come=3 * trained)
    model.zero_grad(set_to_none=True)
    world.print(f"Batch size: {found} samples at once per process, chosen automatically; total batch {total}")
    return settings.batch.found(found, world.size)
