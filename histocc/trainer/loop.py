"""The training loop, for any model: `train`, `train_one_epoch`, `evaluate`.

What is trained is a task, and what a batch is: see `histocc.trainer.task`.
"""

import math
from collections.abc import Iterable, Iterator, Sized
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from histocc.runtime.device import matmul_rate
from histocc.runtime.errors import TrainingError
from histocc.runtime.parallel import (
    StragglerTimer,
    evaluating,
    full_tensor,
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
from histocc.trainer.schedule import set_learning_rate
from histocc.trainer.task import Run, Task, check_columns, checked_samples, forward_backward, to_device

COUNT = " count"  # behind the name of a figure: what its sum is divided by


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
    products = partial(matmul_rate, world.device, run.number_format.matmul_dtype)
    meter = Meter(position.get("samples", 0), running, peers, world.device, products)

    def validate() -> dict[str, Any] | None:
        return evaluate(run.model, loaders["val"], run.task, world, run.number_format, stop)

    hooks = StepHooks(
        world,
        meter,
        steps,
        intervals,
        callbacks,
        evaluate=validate if loaders.get("val") is not None else None,
        position=position,
    )
    if position.get("unfinished"):
        hooks(**position["unfinished"])
    while step < last:
        epoch, first_batch = divmod(step, per_epoch)
        loader, before = loaders["train"], step
        batches = loader.at(epoch, first_batch) if hasattr(loader, "at") else loader
        step = train_one_epoch(run, batches, hooks, step, epoch)
        if stop.agreed:
            hooks.save_stopped(step)
            break
        if step == before:
            raise TrainingError("the data loader gave no batch")
    peers.close()
    return step


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
    by their number everywhere. A step whose gradient is not finite changes nothing and is counted.

    Args:
        hooks: called after each step; says where to stop.
        step: optimizer steps done before.

    Returns:
        The number of optimizer steps done so far.

    Raises:
        TrainingError: on all ranks alike, after `run.max_bad_steps` steps in a row without a finite gradient.
        ValueError: for batches that end inside a step.
    """
    meter, stop = hooks.meter, hooks.callbacks.stop or StopPoll(None)
    run.model.train()
    unread = iter(batches)
    while hooks.steps.last is None or step < hooks.steps.last:
        if stop():
            break
        samples = accumulate_gradients(run, unread, meter, stop, step)
        if samples is None:
            break
        if run.schedule is not None:
            set_learning_rate(run.optimizer, run.schedule(step))
        with phase("optimizer"):
            norm, done, bad = optimizer_step(run)
        meter.add_step(samples, norm, done, bad)
        learning_rate = run.optimizer.param_groups[0]["lr"]
        if run.scheduler is not None:
            run.scheduler.step()
        step += 1
        hooks.count_bad_steps(bad, run.max_bad_steps, step)
        if hooks.callbacks.step_done is not None:
            meter.untimed(hooks.callbacks.step_done)
        with phase("log, validation, saving"):
            hooks(step, epoch, learning_rate)
    return step


def accumulate_gradients(
    run: Run, batches: Iterator[dict[str, Any]], meter: Meter, stop: StopPoll, step: int
) -> float | None:
    """Forward and backward passes of a step's micro-batches; the last one averages the gradients over the
    processes. All ranks.

    Args:
        step: optimizer steps done before.

    Returns:
        The number of samples of the step on all ranks; None at the end of the batches, and where this process
        was asked to stop while its loader did not answer.

    Raises:
        ValueError: for batches that end inside a step.
    """
    if run.seed is not None:
        torch.manual_seed(derived_seed(run.seed, step, run.world.rank))
    first, is_last, samples = True, False, 0.0
    while not is_last:
        with phase("data"):
            batch = meter.time_data(lambda: next_batch(batches, stop))
        if batch is None:
            if not first and not stop.agreed:
                raise ValueError("the batches end inside a step: the last one has last_micro_batch=False")
            meter.discard_step()
            run.optimizer.zero_grad(set_to_none=True)
            return None
        moved = to_device(batch, run.world.device)
        first, is_last = False, batch.get("last_micro_batch", True)
        with no_sync(run.model, sync=is_last):
            sums, samples = forward_backward(run.model, run.task, moved, run.number_format, run.world.size)
        meter.add(sums)
        meter.add_flops(run.task, batch)
    meter.peers.backward_done()
    return samples


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


def optimizer_step(run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Clips the gradients and takes the step, unless their norm is not finite. All ranks.

    Returns:
        The norm before clipping, whether the step was taken, and whether it was bad: not finite, and not
        because the scaler of fp16 is still looking for its scale. All 0-d, on the device: nothing here waits
        for it where the optimizer can skip by itself (torch's fused ones). After DDP and FSDP the norm is the
        same on all ranks, so all of them skip together.
    """
    precision, optimizer = run.number_format, run.optimizer
    precision.unscale(optimizer)
    parameters = list(run.model.parameters())  # those without a gradient do not count
    total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, run.clip_norm, total)
    norm = full_tensor(total)
    done = torch.isfinite(norm)
    bad = precision.optimizer_step(optimizer, done)
    optimizer.zero_grad(set_to_none=True)
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
    totals = own_totals(model, batches, task, world, precision, stop)
    return None if totals is None else figures_of(totals, world)


def own_totals(
    model: nn.Module,
    batches: Iterable[dict[str, Any]],
    task: Task,
    world: World,
    precision: Precision | None = None,
    stop: StopPoll | None = None,
) -> dict[str, Tensor | float] | None:
    """This rank's part of `evaluate`, for `figures_of`; parts of a rank's batches may be added up. All ranks,
    which ask each other whether to stop.
    """
    raw_model, number_format = unwrap(model), precision or Precision("float32", world.device)
    totals: dict[str, Tensor | float] = {}
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
    return None if stop is not None and stop.agreed else totals  # its loader was stopped


def figures_of(totals: dict[str, Tensor | float], world: World) -> dict[str, float]:
    """What `evaluate` returns, from the totals of all ranks. All ranks. Raises ValueError where there is no
    sample.
    """
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
    if not running:
        return None
    if len(running) == world.size:
        return running[world.rank]
    first = running[0]  # what all ranks count alike
    return {
        "sums": {
            name: sum(part["sums"].get(name, 0.0) for part in running) if world.is_main else 0.0
            for name in first["sums"]
        },
        "count": first["count"],
        "skipped": first["skipped"],
        "seconds_data": 0.0,
    }
