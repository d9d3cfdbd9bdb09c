"""The training loop, for any model: `train`, `train_one_epoch`, `evaluate`.

It trains a task, which is any object with

    columns: names of its values, in the order of logs.csv. Names that begin with "loss" are losses, which
        are trained and validated (train_loss, val_loss). The others are figures of validation.
    losses(model, batch) -> {name: [B]}: "loss" is the one to be trained. The model is wrapped (DDP, FSDP),
        under autocast.
    metrics(model, batch) -> {name: [B] or (sums [B], counts [B])}: one value for each column, in
        validation: the bare model, in evaluation mode, without gradients, under autocast. They include the
        losses, so that one forward pass serves both. A pair means a ratio: the figure is the sum of all
        sums divided by the sum of all counts.

Values are per sample, never means, so that the mean is exact on any number of processes.

A batch is a dict with the tensors of B samples that the model needs, and three entries for the loop, each
with a default for plain loaders:

    weights [B]: weights of the samples (1), or 0 for samples that only fill up a batch.
    global_count: sum of the weights of the whole optimizer step, on all ranks (B × ranks). It is needed if a
        step has several micro-batches.
    last_micro_batch: whether the optimizer's step comes after this batch (True).
"""

import math
import time
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from histocc.runtime import checkpoint
from histocc.runtime.device import Precision, matmul_rate, synchronize
from histocc.runtime.errors import TrainingError
from histocc.runtime.log import Stage
from histocc.runtime.parallel import evaluating, full_tensor, no_sync, unsharded, unwrap
from histocc.runtime.rng import derived_seed
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World
from histocc.trainer.log import SUMMED_COLUMNS, log_columns
from histocc.trainer.schedule import set_learning_rate

COUNT = " count"  # appended to the name of a figure: the divisor of its sum
GPU_CHECK_INTERVAL = 10  # steps, since reading a value waits for the device
Task = Any  # an object as described above: no class to inherit, nothing to register


@dataclass(frozen=True)
class Run:
    """The parts of a training, its length, and the work between two steps."""

    model: nn.Module  # from `histocc.runtime.parallel.wrap`
    task: Task
    optimizer: torch.optim.Optimizer  # its groups have an "initial_lr" if there is a `rate_factor`
    world: World
    precision: Precision = field(default_factory=lambda: Precision("float32"))
    seed: int | None = None  # makes dropout a function of (seed, step, rank), else torch's generators decide
    rate_factor: Callable[[int], float] | None = None  # step, from 0 on → factor on the peak learning rate
    scheduler: Any = None  # a torch scheduler instead, stepped after each step, for callers of the engine
    clip_norm: float | None = 1.0  # largest norm of a step's gradient, without sparse ones (None: any)
    max_bad_steps: int = 20  # steps in a row without a finite gradient after which the run ends
    flops: Callable[[dict[str, Any]], float] | None = None  # operations of a batch, forward and backward
    stop_step: int | None = None  # the optimizer step at which the run ends (None: the end of the batches)
    steps_per_epoch: int | None = None
    log_interval: int | None = 100  # in optimizer steps, as the next two (None: never)
    eval_interval: int | None = None
    save_interval: int | None = None
    # a measure of a validation's figures, of which best.bin has the highest (None: the lowest loss)
    best_by: Callable[[dict[str, Any]], float] | None = None
    patience: int | None = None  # validations in a row without a new best after which the run ends
    validate_first: bool = False  # whether to validate and save a checkpoint before the first step
    epoch_name: str = ""  # name of the checkpoint of each epoch, with {} for its number, or "" for none
    # called on all ranks with the step, the names of the files due, and the position to resume from. It
    # returns the error, the same on all ranks, or "" or None.
    save: Callable[[int, list[str], dict[str, Any]], str | None] | None = None
    log: Callable[[dict[str, Any]], None] | None = None  # called on all ranks with a row of the log
    step_done: Callable[[], object] | None = None  # called on all ranks after each step
    stop: Callable[[], bool] | None = None  # a collective before each step and batch: whether to stop


@dataclass
class State:
    """The progress of a run. Checkpoints keep its `position`."""

    step: int = 0  # optimizer steps done
    samples: float = 0  # trained on, by all ranks
    # since the last row of the log, on this rank. Values equal on all ranks count on rank 0.
    sums: dict[str, Tensor | float] = field(default_factory=dict[str, Tensor | float])
    grad_norm: Tensor | float | None = None  # before clipping, of the last step that was not skipped
    best_val_loss: float | None = None  # or minus the value of the run's `best_by`
    since_best: int = 0  # validations in a row that were not better
    bad_steps: Tensor | int = 0  # in a row, without a finite gradient
    finite_step: int | None = None  # step of the last validation with a finite loss
    unfinished: bool = False  # the run was stopped inside the validation of this step
    stopped: bool = False
    waited: float = 0.0  # seconds spent waiting for batches, while the clock runs
    started: float | None = field(default_factory=time.perf_counter)  # None while nothing is trained
    matmul_rate: float = 0.0  # sum over all ranks, once it is measured

    KEPT = ("samples", "grad_norm", "best_val_loss", "since_best", "bad_steps", "finite_step", "unfinished")

    @classmethod
    def resumed(cls, step: int, position: dict[str, Any], world: World) -> "State":
        """Return the state of a resumed run. If the number of ranks has changed, rank 0 has all sums."""
        sums: list[dict[str, float]] = position["sums"]
        if len(sums) != world.size:
            total = {name: sum(of_rank[name] for of_rank in sums) for name in sums[0]}
            sums = [total] + [dict.fromkeys(total, 0.0)] * (world.size - 1)
        return cls(step, sums=dict(sums[world.rank]), **{name: position[name] for name in cls.KEPT})

    def position(self, world: World) -> dict[str, Any]:
        """Return the position for `resumed`, in plain Python types. All ranks."""
        self.stop_clock(world)
        values = {name: getattr(self, name) for name in self.KEPT}
        return {
            "sums": world.gather({name: float(value) for name, value in self.sums.items()}),
            **{name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()},
        }

    def add(self, name: str, value: Tensor | float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def add_step(
        self, sums: dict[str, Tensor | float], count: float, norm: Tensor, bad: Tensor, is_main: bool
    ) -> None:
        """Count a step: its samples, sums of this rank, the gradient's norm, and whether it was bad (0-d)."""
        self.step += 1
        self.samples += count
        taken = torch.isfinite(norm)
        for name, value in sums.items():
            self.add(name, torch.where(taken, value, 0.0))  # a skipped step does not count
        of_all_ranks = {"count": count * taken.double(), "samples": count}
        of_all_ranks |= {name: of_step(norm, taken, bad).double() for name, of_step in SUMMED_COLUMNS.items()}
        for name, value in of_all_ranks.items():  # only rank 0 counts values equal on all ranks
            self.add(name, value if is_main else 0.0)
        self.grad_norm = norm if self.grad_norm is None else torch.where(taken, norm, self.grad_norm)
        self.bad_steps = (self.bad_steps + 1) * bad.long()

    def is_out_of(self, patience: int | None) -> bool:
        return self.since_best >= (patience or math.inf)

    def stop_clock(self, world: World) -> None:
        """Stop the clock of training. The time so far counts as a mean over the ranks."""
        if self.started is not None:
            synchronize(world.device)
            self.add("seconds", (time.perf_counter() - self.started) / world.size)
            self.add("seconds_data", self.waited / world.size)
            self.waited, self.started = 0.0, None


def train(run: Run, loaders: dict[str, Any], state: State | None = None) -> int:
    """Train from `state.step` to `run.stop_step`, or to the end of `run.patience`, and validate. Return the
    last step. A run that was asked to stop saves last.bin and sets `state.stopped`. All ranks.

    Args:
        loaders: "train" and, to validate, "val": iterables of batches. One with a method `at(epoch,
            first_batch)` can start in the middle of an epoch.
        state: the state of a resumed run, which is updated.

    Raises:
        TrainingError: on all ranks alike, if loss or gradients are no longer finite.
        ValueError: if a task or batches violate their interface. The message names the cause.
    """
    state, last = state or State(), run.stop_step or 0
    columns = log_columns(run.task.columns)
    if len(set(columns)) < len(columns):
        raise ValueError(f"the task's columns {run.task.columns!r}: a name is listed twice or the loop's own")
    train_loader, val_loader = loaders["train"], loaders.get("val")
    per_epoch = run.steps_per_epoch or max(1, len(train_loader))
    run = replace(run, steps_per_epoch=per_epoch)
    state.started = time.perf_counter()
    try:
        if state.unfinished or run.validate_first and not state.step:
            between_steps(run, state, max(0, state.step - 1) // per_epoch, val_loader)
        while state.step < last and not state.is_out_of(run.patience):
            before, (epoch, first_batch) = state.step, divmod(state.step, per_epoch)
            batches = train_loader.at(epoch, first_batch) if hasattr(train_loader, "at") else train_loader
            train_one_epoch(run, batches, state, epoch, val_loader)
            if state.step == before:
                raise TrainingError("the data loader gave no batch")
    except Stopped:
        state.stopped = True
        save_checkpoint(run, state, [checkpoint.LAST])
    return state.step


def train_one_epoch(
    run: Run, batches: Iterable[dict[str, Any]], state: State, epoch: int, val_loader: Any = None
) -> None:
    """Take optimizer steps until the batches end, or as `train` does. All ranks. Raises as `train` does, and
    Stopped. The loss of a step is the mean over all its samples on all ranks. A step whose gradient is not
    finite changes nothing and is counted.
    """
    optimizer, precision, world = run.optimizer, run.precision, run.world
    run.model.train()
    batches = iter(batches)
    last = math.inf if run.stop_step is None else run.stop_step
    while state.step < last and not state.is_out_of(run.patience):
        if run.stop is not None and run.stop():
            raise Stopped
        if run.seed is not None:
            torch.manual_seed(derived_seed(run.seed, state.step, world.rank))

        # The micro-batches of the step, forward and backward. The last one averages the gradients over the
        # ranks. Sums are of this rank, float64 and on the device: no wait, no growing rounding error.
        sums: dict[str, Tensor | float] = {}
        global_count, is_last = 0.0, False
        while not is_last:
            started = time.perf_counter()
            batch = next(batches, None)
            state.waited += time.perf_counter() - started
            if batch is None:
                if sums:
                    raise ValueError("the batches end inside a step: the last one has last_micro_batch=False")
                return
            moved = to_device(batch, world.device)
            is_last = batch.get("last_micro_batch", True)
            with no_sync(run.model, sync=is_last):
                added, global_count = forward_backward(run.model, run.task, moved, precision, world.size)
            for name, value in added.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double()
            if run.flops is not None:
                state.add("flops", run.flops(batch))

        # Clipping, and the step, unless the norm is not finite. The norm is equal on all ranks, so all skip
        # together. Optimizers that can skip a step by themselves (torch's fused ones) avoid waiting here.
        if run.rate_factor is not None:
            set_learning_rate(optimizer, run.rate_factor(state.step))
        precision.scaler.unscale_(optimizer)
        parameters = [p for p in run.model.parameters() if p.grad is not None and not p.grad.is_sparse]
        total_norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if run.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, run.clip_norm, total_norm)
        norm = full_tensor(total_norm)
        bad = precision.optimizer_step(optimizer, torch.isfinite(norm))
        optimizer.zero_grad(set_to_none=True)
        if run.scheduler is not None:
            run.scheduler.step()

        # The figures of the step, then log, validation and checkpoint, if due.
        state.add_step(sums, global_count, norm, bad, world.is_main)
        if run.step_done is not None:
            run.step_done()
        between_steps(run, state, epoch, val_loader)


def forward_backward(
    model: nn.Module, task: Task, batch: dict[str, Any], precision: Precision, ranks: int = 1
) -> tuple[dict[str, Tensor], float]:
    """Run a micro-batch forward and backward: add the gradients of its share of the step's mean loss, times
    the number of ranks, since DDP and FSDP divide by it. Return the weighted sums of its losses, and the
    number of samples of the whole optimizer step.
    """
    with precision.autocast():
        losses = task.losses(model, batch)
    batch_size = check_values(task, losses, batch)
    weights = batch.get("weights")
    if weights is not None:
        losses = {name: values * weights.to(values.dtype) for name, values in losses.items()}
    sums = {name: values.sum() for name, values in losses.items()}
    if "global_count" not in batch and not batch.get("last_micro_batch", True):
        raise ValueError("a step of several micro-batches needs global_count, the samples of the whole step")
    global_count = float(batch.get("global_count", batch_size * ranks))
    precision.scaler.scale(sums["loss"] * (ranks / global_count)).backward()
    return sums, global_count


def warm_up(model: nn.Module, task: Task, loader: Any, world: World, precision: Precision) -> None:
    """Run two throw-away passes before a run. DDP rearranges its buckets after its first step, so without
    them a resumed run with more than two ranks would sum gradients in another order than an uninterrupted
    one. FSDP finds the outermost module in its first pass. torch.compile's output depends on the shapes that
    it sees first. All ranks.
    """
    batch = to_device(loader.dataset[0, 0][0], world.device)
    for _ in range(2):
        forward_backward(model, task, batch, precision)
    model.zero_grad(set_to_none=True)


def between_steps(run: Run, state: State, epoch: int, val_loader: Any) -> None:
    """Log, validate and save if they are due after `state.step`. All ranks. Raises Stopped inside the
    validation, which a resumed run repeats, and TrainingError if loss or gradients are no longer finite.
    """
    step, at_end = state.step, state.step in (0, run.stop_step)

    def due(interval: int | None) -> bool:
        return bool(interval and step and step % interval == 0)

    if due(GPU_CHECK_INTERVAL) or run.world.device.type == "cpu":
        bad = int(state.bad_steps)
        if bad >= run.max_bad_steps:
            what = f"the gradient was not finite in {bad} steps in a row, which changed nothing"
            raise diverged(step, what, max(step - bad - 1, state.finite_step or 0))
    validation: dict[str, Any] = {}
    if val_loader is not None and (at_end or due(run.eval_interval)):
        state.stop_clock(run.world)
        state.unfinished, started = True, time.perf_counter()
        validation = evaluate(run.model, val_loader, run.task, run.world, run.precision, run.stop)
        validation["seconds_val"], state.unfinished = time.perf_counter() - started, False
    if validation or at_end or due(run.log_interval):
        row = log_row(run, state, epoch) | validation
        if run.log is not None:
            run.log(row)
    best_before, is_best = state.best_val_loss, False
    if validation:
        loss = validation["val_loss"]
        if not math.isfinite(loss):
            raise diverged(step, f"the loss of the validation is {loss:g}", state.finite_step)
        state.finite_step = step
        measure = loss if run.best_by is None else -run.best_by(validation)
        is_best = best_before is None or measure < best_before
        if is_best:
            state.best_val_loss = measure
        state.since_best = 0 if is_best else state.since_best + 1
    names = [f"{step}.bin"] if due(run.save_interval) else []
    if run.epoch_name and due(run.steps_per_epoch):
        names.append(run.epoch_name.format(step // (run.steps_per_epoch or 1)))
    if names or at_end or state.is_out_of(run.patience):
        names.append(checkpoint.LAST)
    names += [checkpoint.BEST] * is_best
    if names:
        error = save_checkpoint(run, state, names)
        if error and is_best:  # later checkpoints are not compared with one that was not written
            state.best_val_loss = best_before
    if state.started is None:
        state.started = time.perf_counter()


def diverged(step: int, what: str, good_step: int | None) -> TrainingError:
    """Return the error of a diverged run. good_step: the last step known to be good."""
    good = f"checkpoints up to step {good_step:,} (--initial-checkpoint)" if good_step else "no checkpoint"
    return TrainingError(
        f"step {step:,}: {what}: the run has diverged. Known to be good: {good}. Start again in another"
        " folder, with a lower --learning-rate (a third) or more --warmup-pct; with --fp16, try --bf16"
    )


def save_checkpoint(run: Run, state: State, names: list[str]) -> str | None:
    """Save a checkpoint under these names. Return the error if it failed. All ranks."""
    position = state.position(run.world)
    return None if run.save is None else run.save(state.step, names, position)


def log_row(run: Run, state: State, epoch: int) -> dict[str, Any]:
    """Return the log's values since the last row, over all ranks, and start the next row. All ranks."""
    world = run.world
    state.stop_clock(world)
    total = world.sum_over_ranks(state.sums)
    count, seconds = total.get("count", 0.0), max(total["seconds"], 1e-9)
    row = {f"train_{name}": total[name] / count for name in total if name.startswith("loss") and count}
    row |= {
        "step": state.step,
        "epoch": epoch,
        "samples": state.samples,
        "lr": run.optimizer.param_groups[0]["lr"],
        "grad_norm": None if state.grad_norm is None or not count else float(state.grad_norm),
        "samples_per_sec": total.get("samples", 0.0) / seconds,
        "seconds_data": total["seconds_data"],
        "data_share": min(1.0, total["seconds_data"] / seconds),
        **{name: total.get(name, 0.0) for name in SUMMED_COLUMNS},
    }
    if 0 < (flops := total.get("flops", 0.0)) < math.inf:
        if not state.matmul_rate:
            rate = matmul_rate(world.device, run.precision.half or run.precision.dtype)
            state.matmul_rate = world.sum_over_ranks({"rate": rate})["rate"]
        row["model_flops_per_sec"] = flops / seconds
        row["mfu"] = row["model_flops_per_sec"] / state.matmul_rate
    state.sums, state.started = {}, time.perf_counter()
    return row


def evaluate(
    model: nn.Module,
    batches: Iterable[dict[str, Any]],
    task: Task,
    world: World,
    precision: Precision | None = None,
    stop: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """Return the task's figures over all samples of all ranks' `batches`: {"val_loss": …} for losses and
    {name: …} for the others, nan if nothing was counted. All ranks. Raises Stopped if `stop` returned True,
    ValueError if no rank has a sample.
    """
    raw_model, precision = unwrap(model), precision or Precision("float32")
    totals: dict[str, Tensor | float] = {}  # name + COUNT: the denominator of a ratio
    stage = Stage("validation", len(batches) if isinstance(batches, Sized) else None, "batches")
    with evaluating(raw_model), unsharded(raw_model):
        for batch in batches:
            if stop is not None and stop():
                raise Stopped
            batch = to_device(batch, world.device)
            with precision.autocast():
                values: dict[str, Any] = dict(task.metrics(raw_model, batch))
            batch_size = check_values(task, values, batch, "metrics")
            weights = batch.get("weights", torch.ones(batch_size, device=world.device))
            for name, value in list(values.items()):
                if isinstance(value, tuple):
                    values[name], values[name + COUNT] = value
            values[COUNT] = torch.ones_like(weights)
            for name, value in values.items():
                totals[name] = totals.get(name, 0.0) + (value.double() * weights.double()).sum()
            stage.add()
    names = next(filter(None, world.gather(list(totals))), [COUNT])
    total = world.sum_over_ranks({name: totals.get(name, 0.0) for name in names})  # a rank may have no batch
    samples = total.pop(COUNT)
    if not samples:
        raise ValueError("the validation has no sample with a weight above 0")
    figures: dict[str, float] = {}
    for name, value in total.items():
        if not name.endswith(COUNT):
            count = total.get(name + COUNT, samples)
            figures[f"val_{name}" if name.startswith("loss") else name] = value / count if count else math.nan
    return figures


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the batch with its tensors on `device`. Pinned memory is copied while the device computes."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def check_values(task: Task, values: Any, batch: dict[str, Any], method: str = "losses") -> int:
    """Return the number of samples of a batch. Raises ValueError if the task lacks a value for a sample."""
    who = f"{type(task).__name__}.{method}"
    expected = {"loss", *(name for name in task.columns if method == "metrics" or name.startswith("loss"))}
    if not isinstance(values, dict) or set(values) != expected:
        returned = ", ".join(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"{who} returned {returned}; it must return a dict of {', '.join(sorted(expected))}")
    batch_size = len(batch["weights"]) if "weights" in batch else values["loss"].numel()
    for name, value in values.items():
        for part in value if isinstance(value, tuple) else (value,):
            if list(part.shape) != [batch_size]:
                shape = f"has shape {list(part.shape)}, expected [{batch_size}]"
                raise ValueError(f"{who}: {name!r} {shape}: a value for each sample")
    return batch_size
