"""What is trained, and one pass through it.

What is trained is a task: any object with

    columns: names of what it computes, in the order of logs.csv. Names that begin with "loss" are losses:
        they are trained and validated (train_loss, val_loss); the others are figures of validation.
    losses(model, batch) -> {name: [B]}: "loss" is the one that is trained. The model is the one that was
        wrapped (DDP, FSDP), under autocast.
    metrics(model, batch) -> {name: [B] or (sums [B], counts [B])}: one value for each column, in
        validation: the bare model, in evaluation mode, without gradients, under autocast. The losses are
        among them, so that one forward pass serves both. A pair stands for a ratio: the figure is the sum
        of all sums divided by that of all counts.

and, where it can tell,

    flops(batch) -> float: floating point operations of the model's forward and backward pass on what is real
        in a micro-batch, as the loader gave it: samples of weight 0 count nothing, nor does padding. A
        multiplication and an addition are two. nan where that is not known. The log then has the rate of
        them (model_flops_per_sec), and its share of the device's rate of matrix products (mfu). Called once
        for each micro-batch, while the device works: it should take microseconds, and never ask the device.

Values are per sample, never means: that is what makes the mean exact on any number of processes.

A batch is a dict of what the model needs, with tensors of B samples, and three entries of the trainer, each
with a default for plain loaders:

    weights [B]: of the samples (1); 0 for one that only fills a batch up.
    global_count: sum of the weights of the whole optimizer step, on all ranks (B × ranks); needed where a
        step has several micro-batches.
    last_micro_batch: whether the optimizer's step comes after this batch (True).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from histocc.runtime.precision import Precision
from histocc.runtime.world import World
from histocc.trainer.profiling import phase
from histocc.trainer.run_log import OWN_COLUMNS

CLIP_NORM = 1.0


class Task(Protocol):
    """What is trained; see the module's docstring."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]: ...

    def metrics(
        self, model: nn.Module, batch: dict[str, Any]
    ) -> dict[str, Tensor | tuple[Tensor, Tensor]]: ...


@dataclass(frozen=True)
class Run:
    """What is trained, and with what.

    Args:
        model: as `histocc.runtime.parallel.wrap` returns it.
        task: what is computed of a batch; see `Task`.
        optimizer: whose groups have an "initial_lr" where there is a `schedule`.
        world: the processes; a single one by default.
        precision: float32 where it is None.
        seed: makes dropout a function of (seed, step, rank), so that nothing but the step has to be known to
            resume; None leaves torch's generators alone.
        clip_norm: largest norm of the gradient of a step.
        schedule: the factor on the peak learning rate of an optimizer step, numbered from 0.
        scheduler: any torch scheduler, for callers of the engine; its `step` is called after each optimizer
            step.
        max_bad_steps: steps in a row without a finite gradient after which the run ends.
    """

    model: nn.Module
    task: Task
    optimizer: torch.optim.Optimizer
    world: World
    precision: Precision | None = None
    seed: int | None = None
    schedule: Callable[[int], float] | None = None
    scheduler: Any = None
    clip_norm: float = CLIP_NORM
    max_bad_steps: int = 20

    @property
    def number_format(self) -> Precision:
        return self.precision or Precision("float32", self.world.device)


def check_batch(batch: Any) -> None:
    """Raises ValueError for what is no batch."""
    if not isinstance(batch, dict):
        raise ValueError(f"a batch must be a dict, see histocc.trainer.task; found {type(batch).__name__}")


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on `device`; pinned memory is copied while the device works. Raises
    ValueError for what is no batch.
    """
    check_batch(batch)
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def check_columns(task: Task) -> None:
    """Raises ValueError for columns that are no names, or that are the trainer's own."""
    columns: Any = getattr(task, "columns", None)
    who = f"{type(task).__name__}.columns"
    if not isinstance(columns, tuple | list) or not all(isinstance(name, str) for name in columns):
        raise ValueError(f'{who} must be a tuple of names, "loss" among them; found {columns!r}')
    losses = tuple(name for name in columns if name.startswith("loss"))
    taken = {*OWN_COLUMNS, *(f"{part}_{name}" for part in ("train", "val") for name in losses)}
    wrong = [name for name in columns if name in taken]
    if wrong or len(set(columns)) < len(columns):
        why = f"{', '.join(wrong)}: the trainer's own" if wrong else "a name stands twice"
        raise ValueError(f"{who} is {columns!r}; {why}")


def forward_backward(
    model: nn.Module,
    task: Task,
    batch: dict[str, Any],
    precision: Precision,
    ranks: int = 1,
) -> tuple[dict[str, Tensor], float]:
    """Forward and backward pass of a micro-batch: the gradients of its share of the step's mean loss are
    added to those that are there.

    ranks: that take part in the step. DDP and FSDP divide the gradients by their number, which is made good
    here.

    Returns:
        The weighted sums of its losses, and the number of samples of the whole optimizer step.
    """
    with phase("forward"):
        with precision.autocast():
            losses = task.losses(model, batch)
        samples = checked_samples(task, losses, batch)
        weights = batch.get("weights")
        sums = {
            name: (values if weights is None else values * weights.to(values.dtype)).sum()
            for name, values in losses.items()
        }
    count = global_count(batch, samples * ranks)
    with phase("backward"):
        precision.scale(sums["loss"] * (ranks / count)).backward()
    return sums, count


def global_count(batch: dict[str, Any], usual: int) -> float:
    """Of the batch, or the usual one. Raises ValueError."""
    count = batch.get("global_count")
    if count is None:
        if not batch.get("last_micro_batch", True):
            raise ValueError("a batch with last_micro_batch=False needs global_count, that of its whole step")
        count = usual
    count = count.item() if isinstance(count, Tensor) else count
    if not count > 0:
        raise ValueError(f"global_count must be above 0, not {count}: a step without samples")
    return count


def checked_samples(task: Task, losses: dict[str, Tensor], batch: dict[str, Any], of: str = "losses") -> int:
    """How many samples the batch has, by what the task computed of it.

    Raises:
        ValueError: what the task returned is not what its interface says, by name.
    """
    who = f"{type(task).__name__}.{of}"
    if not isinstance(losses, dict) or "loss" not in losses:
        found = ", ".join(map(repr, losses)) if isinstance(losses, dict) else type(losses).__name__
        raise ValueError(
            f'{who} must return a dict with "loss", the loss that is trained; it returned {found}'
        )
    declared = [name for name in task.columns if of == "metrics" or name.startswith("loss")]
    if set(losses) != set(declared):
        raise ValueError(
            f"{who} returned {', '.join(losses)}; {type(task).__name__}.columns names {', '.join(declared)}"
        )
    sizes = {len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()}
    if batch.get("weights") is not None:
        sizes = {len(batch["weights"])}
    wrong = [name for name, value in losses.items() if isinstance(value, tuple) and len(value) != 2]
    if wrong:
        raise ValueError(f"{who}: {wrong[0]!r} must be [B], or a pair of sums [B] and counts [B]")
    loss = losses["loss"][0] if isinstance(losses["loss"], tuple) else losses["loss"]
    samples = len(loss) if isinstance(loss, Tensor) and loss.dim() == 1 else -1
    for name, value in losses.items():
        for part in value if isinstance(value, tuple) and of == "metrics" else (value,):
            shape = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            if shape != [samples] or sizes and samples not in sizes:
                expected = f"[{', '.join(map(str, sorted(sizes)))}]" if len(sizes) == 1 else "[B]"
                raise ValueError(
                    f"{who} must return one value per sample: {name!r} has shape {shape}, expected {expected}"
                )
    return samples
