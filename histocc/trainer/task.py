"""What is trained: the interface between the loop and a model.

A task is any object with

    columns: names of what it computes, in the order of logs.csv. Names that begin with "loss" are losses:
        they are trained and validated (train_loss, val_loss); the others are figures of validation.
    losses(model, batch) -> {name: [B]}: "loss" is the one that is trained. The model is the one that was
        wrapped (DDP, FSDP), under autocast.
    metrics(model, batch) -> {name: [B] or (sums [B], counts [B])}: one value for each column, in
        validation: the bare model, in evaluation mode, without gradients, under autocast. The losses are
        among them, so that one forward pass serves both. A pair stands for a ratio: the figure is the sum
        of all sums divided by that of all counts.

Values are per sample, never means: that is what makes the mean exact on any number of processes.

A batch is a dict of what the model needs, with tensors of B samples, and three entries of the loop, each
with a default for plain loaders:

    weights [B]: of the samples (1); 0 for one that only fills a batch up.
    global_count: sum of the weights of the whole optimizer step, on all ranks (B × ranks); needed where a
        step has several micro-batches.
    last_micro_batch: whether the optimizer's step comes after this batch (True).
"""

from collections.abc import Sized
from typing import Any, Protocol

from torch import Tensor, nn

from histocc.runtime.world import World
from histocc.trainer.log import OWN_COLUMNS


class Task(Protocol):
    """What is trained; see the module's docstring."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]: ...

    def metrics(
        self, model: nn.Module, batch: dict[str, Any]
    ) -> dict[str, Tensor | tuple[Tensor, Tensor]]: ...


def global_count(batch: dict[str, Any], default: int) -> float:
    """The samples of the whole optimizer step. Raises ValueError."""
    count = batch.get("global_count")
    if count is None:
        if not batch.get("last_micro_batch", True):
            raise ValueError("a batch with last_micro_batch=False needs global_count, that of its whole step")
        count = default
    count = count.item() if isinstance(count, Tensor) else count
    if not count > 0:
        raise ValueError(f"global_count must be above 0, not {count}: a step without samples")
    return count


def steps_of_loader(loader: Any, world: World) -> int:
    """Batches of an epoch, the same on every rank. All ranks. Raises ValueError."""
    if not isinstance(loader, Sized):
        raise ValueError(
            'loaders["train"] has no length, and steps_per_epoch is not given; iterators are read once'
        )
    lengths = world.gather(len(loader))
    if len(set(lengths)) > 1 or not lengths[0]:
        raise ValueError(
            'loaders["train"] must have the same number of batches on every rank, and at least one; found '
            + ", ".join(map(str, lengths))
        )
    return lengths[0]


def check_columns(task: Task) -> None:
    """Raises ValueError for columns that are no names, or that are the loop's own."""
    columns: Any = getattr(task, "columns", None)
    who = f"{type(task).__name__}.columns"
    if not isinstance(columns, tuple | list) or not all(isinstance(name, str) for name in columns):
        raise ValueError(f'{who} must be a tuple of names, "loss" among them; found {columns!r}')
    losses = [name for name in columns if name.startswith("loss")]
    reserved = {*OWN_COLUMNS, *(f"{part}_{name}" for part in ("train", "val") for name in losses)}
    wrong = [name for name in columns if name in reserved]
    if wrong or len(set(columns)) < len(columns):
        why = f"{', '.join(wrong)}: the loop's own" if wrong else "a name is listed twice"
        raise ValueError(f"{who} is {columns!r}; {why}")


def checked_samples(task: Task, values: dict[str, Any], batch: dict[str, Any], of: str = "losses") -> int:
    """How many samples the batch has, by what the task computed of it. Raises ValueError, by name, if that
    is not what the task's interface says.
    """
    who = f"{type(task).__name__}.{of}"
    if not isinstance(values, dict) or "loss" not in values:
        returned = ", ".join(map(repr, values)) if isinstance(values, dict) else type(values).__name__
        raise ValueError(
            f'{who} must return a dict with "loss", the loss that is trained; it returned {returned}'
        )
    declared = [name for name in task.columns if of == "metrics" or name.startswith("loss")]
    if set(values) != set(declared):
        raise ValueError(
            f"{who} returned {', '.join(values)}; {type(task).__name__}.columns names {', '.join(declared)}"
        )
    weights = batch.get("weights")
    tensors = batch.values() if weights is None else [weights]
    sizes = {len(value) for value in tensors if isinstance(value, Tensor) and value.dim()}
    loss = values["loss"][0] if isinstance(values["loss"], tuple) else values["loss"]
    samples = len(loss) if isinstance(loss, Tensor) and loss.dim() == 1 else -1
    for name, value in values.items():
        parts = value if isinstance(value, tuple) and of == "metrics" else (value,)
        if len(parts) > 2:
            raise ValueError(f"{who}: {name!r} must be [B], or a pair of sums [B] and counts [B]")
        for part in parts:
            shape = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            if shape != [samples] or sizes and samples not in sizes:
                expected = f"[{', '.join(map(str, sorted(sizes)))}]" if len(sizes) == 1 else "[B]"
                raise ValueError(
                    f"{who} must return one value per sample: {name!r} has shape {shape}, expected {expected}"
                )
    return samples
