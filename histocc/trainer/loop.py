"""The training loop, for any model: `train`, `train_one_epoch`, `evaluate`.

What is trained is a task: any object with

    columns: names of what it computes, in the order of logs.csv. Names that begin with "loss" are losses:
        they are trained and validated (train_loss, val_loss); the others are figures of validation.
    losses(model, batch) -> {name: [B]}: "loss" is the one that is trained. The model is the one that was
        wrapped (DDP, FSDP), under autocast.
    metrics(model, batch) -> {name: [B] or (sums [B], counts [B])}: one value for each column, in
        validation: the bare model, in evaluation mode, without gradients, under autocast. The losses are
        among them, so that one forward pass serves both. A pair stands for a ratio: the figure is the sum
        of all sums divided by that of all counts.

Values are per sample, never means: that is what makes the mean exact on any number of processes.

A batch is a dict of what the model needs, with tensors of B samples, and three entries of the trainer, each
with a default for plain loaders:

    weights [B]: of the samples (1); 0 for one that only fills a batch up.
    global_count: sum of the weights of the whole optimizer step, on all ranks (B × ranks); needed where a
        step has several micro-batches.
    last_micro_batch: whether the optimizer's step comes after this batch (True).
"""

import math
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from histocc.runtime.errors import TrainingError
from histocc.runtime.parallel import (
    StragglerTimer,
    evaluating,
    full_tensor,
    is_sharded,
    is_wrapped,
    no_sync,
    unwrap,
    whole_weights,
)
from histocc.runtime.precision import Precision
from histocc.runtime.progress import Stage
from histocc.runtime.rng import derived_seed
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World
from histocc.trainer.hooks import Callbacks, Intervals, StepHooks, Steps, StopPoll
from histocc.trainer.meter import Meter
from histocc.trainer.profiling import phase
from histocc.trainer.run_log import OWN_COLUMNS

CLIP_NORM = 1.0
COUNT = " count"  # behind the name of a figure: what its sum is divided by


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
        optimizer, scheduler: the scheduler's `step` is called after each optimizer step.
        world: the processes; a single one by default.
        precision: float32 where it is None.
        seed: makes dropout a function of (seed, step, rank), so that nothing but the step has to be known to
            resume; None leaves torch's generators alone.
        clip_norm: largest norm of the gradient of a step.
        max_bad_steps: steps in a row without a finite gradient after which the run ends.
    """

    model: nn.Module
    task: Task
    optimizer: torch.optim.Optimizer
    scheduler: Any
    world: World
    precision: Precision | None = None
    seed: int | None = None
    clip_norm: float = CLIP_NORM
    max_bad_steps: int = 20

    @property
    def number_format(self) -> Precision:
        return self.precision or Precision("float32", self.world.device)


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on `device`; pinned memory is copied while the device works. Raises
    ValueError for what is no batch.
    """
    if not isinstance(batch, dict):
        raise ValueError(f"a batch must be a dict, see histocc.trainer.loop; found {type(batch).__name__}")
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def train(
    run: Run,
    loaders: dict[str, Any],
    steps: Steps,
    intervals: Intervals = Intervals(),
    callbacks: Callbacks = Callbacks(),
    position: dict[str, Any] | None = None,
) -> int:
    """Trains from `steps.start` to `steps.last`. All ranks.

    Args:
        loaders: "train" and, where there is something to validate on, "val": iterables of batches. One with a
            method `at(epoch, first_batch)` starts in the middle of an epoch.
        position: what `callbacks.save` was given by an earlier run, to continue where that stopped.

    Returns:
        The last optimizer step. There is a validation after it. A run that was asked to stop saves last.bin
        between two steps.

    Raises:
        TrainingError: on all ranks alike, for a run that has diverged; see `histocc.trainer.hooks`.
        ValueError: for a task or batches that do not keep to their interface, by name.
    """
    last = steps.last
    if last is None:
        raise ValueError("steps say neither how many there are in total nor where to stop")
    world, position = run.world, position or {}
    check_columns(run.task)
    stop = callbacks.stop or StopPoll(None)
    step, per_epoch = steps.start, steps.per_epoch or steps_of_loader(loaders["train"], world)
    steps = replace(steps, per_epoch=per_epoch)
    peers = StragglerTimer(run.model, world.device)
    running = _own_share(position.get("running") or [], world)
    meter = Meter(position.get("samples", 0), running, peers, world.device)

    def validate() -> dict[str, Any] | None:
        return evaluate(run.model, loaders["val"], run.task, world, run.number_format, stop)

    hooks = StepHooks(
        world,
        meter,
        steps,
        intervals,
        callbacks,
        evaluate=validate if loaders.get("val") is not None else None,
        checksum=None if is_sharded(run.model) else lambda: checksum(unwrap(run.model)),
        position=position,
    )
    if position.get("unfinished"):
        hooks(**position["unfinished"])
    while step < last:
        epoch, first_batch = divmod(step, per_epoch)
        loader, before = loaders["train"], step
        batches = loader.at(epoch, first_batch) if hasattr(loader, "at") else loader
        step = train_one_epoch(run, batches, hooks, step, epoch)
        if stop():
            hooks.save_stopped(step)
            break
        if step == before:
            raise TrainingError("the data loader gave no batch")
    peers.close()
    return step


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


def steps_of_loader(loader: Any, world: World) -> int:
    """Batches of an epoch, the same on every rank. All ranks. Raises ValueError."""
    if not isinstance(loader, Sized):
        raise ValueError(
            'loaders["train"] has no length, and Steps.per_epoch does not say it; iterators are read once'
        )
    lengths = world.gather(len(loader))
    if len(set(lengths)) > 1 or not lengths[0]:
        raise ValueError(
            'loaders["train"] must have the same number of batches on every rank, and at least one; found '
            + ", ".join(map(str, lengths))
        )
    return lengths[0]


def train_one_epoch(
    run: Run, batches: Iterable[dict[str, Any]], hooks: StepHooks, step: int = 0, epoch: int = 0
) -> int:
    """Trains on `batches`. All ranks.

    The loss of a step is the mean over all its samples, whichever rank holds them: each rank's sum is divided
    by their number everywhere, and multiplied by the number of ranks, since DDP averages over ranks. A step
    whose gradient is not finite changes nothing and is counted.

    Args:
        hooks: called after each step; says where to stop.
        step: optimizer steps done before.

    Returns:
        The number of optimizer steps done so far. A step that was not finished when the run was asked to stop
        is discarded.

    Raises:
        TrainingError: on all ranks alike, after `run.max_bad_steps` steps in a row without a finite gradient.
    """
    world, meter, stop, precision = run.world, hooks.meter, hooks.callbacks.stop, run.number_format
    run.model.train()
    unread, opens_step = iter(batches), True
    while hooks.steps.last is None or step < hooks.steps.last:
        if stop is not None and stop():
            meter.pending = {}
            run.optimizer.zero_grad(set_to_none=True)
            break
        world.note(f"step {step + 1:,}: waiting for data")
        with phase("data"):
            batch = meter.time_data(lambda: next_batch(unread, stop))
        if batch is None:
            break
        if opens_step and run.seed is not None:
            torch.manual_seed(derived_seed(run.seed, step, world.rank))
        world.note(f"step {step + 1:,}: forward and backward pass")
        batch = to_device(batch, world.device)
        opens_step = batch.get("last_micro_batch", True)
        with no_sync(run.model, sync=opens_step):
            sums, count = forward_backward(run.model, run.task, batch, precision, world.size)
        meter.add(sums)
        if not opens_step:
            continue
        meter.peers.backward_done()
        with phase("optimizer"):
            norm, done, bad = optimizer_step(run)
        meter.add_step(count, norm, done, bad)
        hooks.count_bad_steps(bad, run.max_bad_steps, step + 1)
        learning_rate = run.optimizer.param_groups[0]["lr"]
        run.scheduler.step()
        step += 1
        if hooks.callbacks.step_done is not None:
            meter.untimed(hooks.callbacks.step_done)
        with phase("log, validation, saving"):
            hooks(step, epoch, learning_rate)
    return step


def next_batch(batches: Iterator[dict[str, Any]], stop: StopPoll | None) -> dict[str, Any] | None:
    """The next one; None at the end, and where this process alone was asked to stop while its loader did not
    answer (`stop` knows).
    """
    try:
        return next(batches, None)
    except Stopped:
        if stop is None:
            raise
        stop.agreed = True  # nobody else has to
        return None


def forward_backward(
    model: nn.Module, task: Task, batch: dict[str, Any], precision: Precision, ranks: int = 1
) -> tuple[dict[str, Tensor], float]:
    """Forward and backward pass of a micro-batch: the gradients of its share of the step's mean loss are
    added to those that are there.

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


def checksum(model: nn.Module) -> int:
    """A number that any changed bit of the weights changes, but for rare accidents."""
    whole = {4: torch.int32, 8: torch.int64, 2: torch.int16}
    sums = [
        p.detach().contiguous().view(whole[p.element_size()]).sum(dtype=torch.int64)
        for p in model.parameters()
    ]
    return hash(tuple(torch.stack(sums).tolist()))


def optimizer_step(run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Clips the gradients and takes the step, unless their norm is not finite. All ranks.

    Returns:
        The norm before clipping, whether the step was taken, and whether it was bad: not finite, and not
        because the scaler of fp16 is still looking for its scale. All 0-d, on the device: nothing here waits
        for it where the optimizer can skip by itself (torch's fused ones). After DDP and FSDP the norm is the
        same on all ranks, so all of them skip together.
    """
    precision, trained = run.number_format, [p for p in run.model.parameters() if p.grad is not None]
    precision.unscale(run.optimizer)
    norm = full_tensor(nn.utils.clip_grad_norm_(trained, run.clip_norm))
    done = torch.isfinite(norm)
    bad = precision.optimizer_step(run.optimizer, done)
    run.optimizer.zero_grad(set_to_none=True)
    return norm, done, bad


def warm_up_wrapped_model(
    model: nn.Module,
    task: Task,
    batch: dict[str, Any],
    world: World,
    precision: Precision | None = None,
    compiled: bool = False,
) -> None:
    """Two throw-away passes through DDP, FSDP or layers to be compiled (`compiled`), before optimizer and
    random state are set. All ranks.

    DDP lays its buckets out again after its first step, so a run that is resumed would sum the gradients of
    more than two ranks in another order than one that was never interrupted. After this the layout no longer
    depends on when the process started. It costs two micro-batches at every start. FSDP finds out in its
    first pass which module is the outermost. What torch.compile makes depends on the shapes that it sees
    first.
    """
    if not is_wrapped(model) and not compiled:
        return
    batch, precision = to_device(batch, world.device), precision or Precision("float32", world.device)
    for _ in range(2):
        forward_backward(model, task, batch, precision)
    model.zero_grad(set_to_none=True)


def evaluate(
    model: nn.Module,
    batches: Iterable[dict[str, Any]],
    task: Task,
    world: World,
    precision: Precision | None = None,
    stop: StopPoll | None = None,
) -> dict[str, float] | None:
    """The task's figures over all samples of all ranks' `batches`. All ranks.

    Returns:
        {"val_loss": …} for losses and {name: …} for the others, nan where nothing was counted; None where
        `stop` said so on the way.

    Raises:
        ValueError: where no rank has a sample, and for a task that does not keep to its interface.
    """
    raw_model, number_format = unwrap(model), precision or Precision("float32", world.device)
    totals: dict[str, Tensor | float] = {}
    world.note("validation")
    count = len(batches) if isinstance(batches, Sized) else None
    with evaluating(raw_model), whole_weights(raw_model), Stage("validation", count, "batches") as stage:
        unread = iter(batches)
        while (batch := next_batch(unread, stop)) is not None:
            if stop is not None and stop():
                return None
            batch = to_device(batch, world.device)
            with number_format.autocast():
                found = task.metrics(raw_model, batch)
            for name, value in _weighted(task, found, batch).items():
                totals[name] = totals.get(name, 0.0) + value
            stage.add()
    if stop is not None and stop.agreed:  # its loader was stopped
        return None
    names = next(filter(None, world.gather(list(totals))), None)
    if names is None:
        raise ValueError("the loader of validation rows gave no batch on any rank")
    total = world.sum_over_ranks({name: totals.get(name, 0.0) for name in names})  # a rank may have no batch
    samples = total.pop(COUNT)
    if not samples:
        raise ValueError("the validation has no sample with a weight above 0")
    found = {name: value for name, value in total.items() if not name.endswith(COUNT)}
    counts = {name: total.get(name + COUNT, samples) for name in found}
    return {
        ("val_" if name.startswith("loss") else "") + name: value / counts[name] if counts[name] else math.nan
        for name, value in found.items()
    }


def _weighted(task: Task, found: dict[str, Any], batch: dict[str, Any]) -> dict[str, Tensor]:
    """Weighted sums over a batch, under the names of the figures; COUNT: of samples; name + COUNT: the
    denominator of a ratio."""
    samples = checked_samples(task, found, batch, "metrics")
    weights = batch.get("weights")
    weights = torch.ones(samples, device=found["loss"].device) if weights is None else weights
    values = {COUNT: torch.ones_like(weights)}
    for name, value in found.items():
        if isinstance(value, tuple):
            value, values[name + COUNT] = value
        values[name] = value
    return {name: (value.double() * weights.double()).sum() for name, value in values.items()}


def _own_share(running: list[dict[str, Any]], world: World) -> dict[str, Any] | None:
    """This rank's sums of the log row that was open when the checkpoint was written; on another number of
    ranks the first takes them all.
    """
    if len(running) == world.size:
        return running[world.rank]
    if not running:
        return None
    names = running[0]["sums"].keys()
    sums = {
        name: sum(part["sums"].get(name, 0.0) for part in running) if world.is_main else 0.0 for name in names
    }
    return {
        "sums": sums,
        "count": running[0]["count"],
        "skipped": running[0].get("skipped", 0),
        "seconds_data": 0.0,
    }
