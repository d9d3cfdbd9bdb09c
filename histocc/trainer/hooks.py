"""Between two optimizer steps: what is logged, evaluated and saved, and whether to stop."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from histocc.runtime import checkpoint
from histocc.runtime.errors import TrainingError
from histocc.runtime.world import World
from histocc.trainer.meter import Meter
from histocc.trainer.profiling import phase

GPU_LOOKS_EVERY = 10  # steps
MOST_NOT_FINITE = 2  # validations in a row without a finite loss, that end the run
IN_DOUBT = 2  # steps in a row without a finite gradient: one may be due to a damaged row


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of a run: total of its schedule, those done at the `start`, where to `stop` before the
    total, and those of an epoch; None where there is no limit, or it is not known.
    """

    total: int | None = None
    start: int = 0
    stop: int | None = None
    per_epoch: int | None = None

    @property
    def last(self) -> int | None:
        """The step after which the run ends."""
        return min((step for step in (self.total, self.stop) if step is not None), default=None)


@dataclass(frozen=True)
class Intervals:
    """Optimizer steps between rows of the log, validations and checkpoints; None: never. epochs: name of a
    checkpoint of each epoch, {} for its number; "": none.
    """

    log: int | None = 100
    validate: int | None = None
    save: int | None = None
    epochs: str = ""


@dataclass(frozen=True)
class Callbacks:
    """What a run calls, all of it optional.

    save(step, names, position): on all ranks, with the names of the files due; returns what went wrong, the
    same on all ranks, nothing or "" where all is well. Where it also has `say(text)` and
    `newest_until(step)`, as that of `histocc.trainer.saver`, they are used on rank 0.
    log(values): on all ranks, with a row of the log.
    step_done(): after each step; its time does not count.
    stop: asked before each step whether to stop.
    """

    save: Callable[[int, list[str], dict[str, Any]], str | None] | None = None
    log: Callable[[dict[str, Any]], None] | None = None
    step_done: Callable[[], object] | None = None
    stop: "StopPoll | None" = None


class StopPoll:
    """Asks, on all ranks together, whether to stop; once the answer was yes it stays so (`agreed`).

    asked: a collective; None: never.
    """

    def __init__(self, asked: Callable[[], bool] | None):
        self.asked, self.agreed = asked, False

    def __call__(self) -> bool:
        with phase("asking to stop"):
            self.agreed = self.agreed or (self.asked is not None and self.asked())
        return self.agreed


class StepHooks:
    """What happens between two optimizer steps: log, validate, save. Every rank calls it at every step.

    Args:
        evaluate: what a validation gives, over all ranks; None where there is nothing to validate on.
        position: that of an earlier run, from its checkpoint: the lowest validation loss, steps without a
            finite gradient, validations without a finite loss, and the step of the last one with one.

    Raises:
        TrainingError: for a run that has diverged.
    """

    def __init__(
        self,
        world: World,
        meter: Meter,
        steps: Steps = Steps(),
        intervals: Intervals = Intervals(),
        callbacks: Callbacks = Callbacks(),
        *,
        evaluate: Callable[[], dict[str, Any] | None] | None = None,
        position: dict[str, Any] | None = None,
    ):
        position = position or {}
        self.world, self.meter = world, meter
        self.steps, self.intervals, self.callbacks = steps, intervals, callbacks
        self.evaluate = evaluate
        self.best_val_loss = self.best_before = position.get("best_val_loss")
        self.bad_in_row: Tensor | int = position.get("bad_in_row", 0)
        self.worst_in_row: Tensor | int = 0
        self.val_not_finite: int = position.get("val_not_finite", 0)  # in a row
        self.finite_step: int | None = position.get("finite_step")
        # the last call's step
        self.before: int = position.get("before", max(0, steps.start - bool(position.get("unfinished"))))
        self.unfinished: dict[str, Any] | None = (
            None  # arguments of the call in whose validation the run was stopped
        )

    def __call__(self, step: int, epoch: int, learning_rate: float) -> None:
        self.unfinished = None
        last, val_loss = step == self.steps.last, math.nan
        names = [checkpoint.name_of_step(step)] if self._due(step, self.intervals.save) else []
        if self.intervals.epochs and self._due(step, self.steps.per_epoch):
            assert self.steps.per_epoch
            names.append(self.intervals.epochs.format(step // self.steps.per_epoch))
        evaluates = self.evaluate is not None and (last or self._due(step, self.intervals.validate))
        if evaluates or last or self._due(step, self.intervals.log):
            open_row = self.meter.snapshot()
            row = {"step": step, "epoch": epoch, "lr": learning_rate, **self.meter.row(self.world)}
            found = self._validate() if evaluates else {}
            if found is None:  # stopped: whoever continues evaluates again, and then writes this row
                self.meter.restore(open_row)
                self.unfinished = {"step": step, "epoch": epoch, "learning_rate": learning_rate}
                return  # `before` stays: what was due still is
            row |= found
            val_loss = found.get("val_loss", math.nan)
            if evaluates:
                self._note(step, val_loss)
            if evaluates and self._is_best(val_loss):
                names.append(checkpoint.BEST)
            if self.callbacks.log is not None:
                self.callbacks.log(row)
        if evaluates and self.val_not_finite >= (1 if last else MOST_NOT_FINITE):
            self._raise_diverged(step, val_loss)
        if names or last:
            names += [checkpoint.LAST] if last or names != [checkpoint.BEST] else []
            doubt = "" if evaluates and not self.val_not_finite else self._doubt()
            if not doubt or last:
                self._save(step, names)
            if doubt:
                self._say(
                    f"WARNING: step {step:,}: {', '.join(names)} "
                    f"{'may be of no use' if last else 'not written'}: {doubt}"
                )
        self.before = step
        if names or evaluates:
            self.meter.restart_clock()  # evaluating and saving are not training time

    def _validate(self) -> dict[str, Any] | None:
        """What `evaluate` gives, and how long it took; None where it was stopped."""
        assert self.evaluate is not None
        started = time.perf_counter()
        found = self.evaluate()
        return None if found is None else {**found, "seconds_val": time.perf_counter() - started}

    def _is_best(self, val_loss: float) -> bool:
        """Whether no checkpoint that was written has a lower loss."""
        if not math.isfinite(val_loss):
            return False
        if (
            self.best_val_loss is not None
            and math.isfinite(self.best_val_loss)
            and not val_loss < self.best_val_loss
        ):
            return False
        self.best_before, self.best_val_loss = self.best_val_loss, val_loss
        return True

    def _note(self, step: int, val_loss: float) -> None:
        """Counts validations in a row without a finite loss. The loss is that of all ranks: so is the
        count.
        """
        if math.isfinite(val_loss):
            self.val_not_finite, self.finite_step = 0, step
        else:
            self.val_not_finite += 1

    def _doubt(self) -> str:
        """What speaks against weights that would take the place of earlier ones; "" where nothing does."""
        if self.val_not_finite:
            return "the loss of the last validation was not finite"
        bad = int(self.bad_in_row)  # the same on all ranks
        return f"the last {bad} steps had no finite gradient" if bad >= IN_DOUBT else ""

    def _raise_diverged(self, step: int, val_loss: float) -> None:
        """All ranks. Raises TrainingError."""
        count = self.val_not_finite
        where = f"{count} validations in a row" if count > 1 else "the last validation"
        raise TrainingError(
            f"step {step:,}: the loss is {val_loss:g} in {where}: the run has diverged. "
            f"{self._way_back(self.finite_step)}"
        )

    def _way_back(self, step: int | None) -> str:
        """From where to start again: the newest checkpoint of `step` or of one before. All ranks."""
        find = getattr(self.callbacks.save, "newest_until", None)
        found = self.world.gather(find(step) if find and step is not None and self.world.is_main else None)[0]
        remedy = "a lower --learning-rate (a third), or more --warmup-pct; with --fp16, --bf16 instead"
        if found:
            return (
                f"The last checkpoint that is known to be good is {found[0]}, of step {found[1]:,}. "
                "Give it as --initial-checkpoint, with "
                f"another --save-path and {remedy}. Where that does not help, look for damaged rows in "
                "the data."
            )
        return (
            f"No checkpoint is known to be good. Start over: --overwrite and {remedy}. Where that does "
            "not help, look for damaged rows in "
            "the data, or weights in --initial-checkpoint."
        )

    def count_bad_steps(self, bad: Tensor, most: int, step: int) -> None:
        """Raises TrainingError after `most` steps in a row that were skipped. All ranks. On a GPU it looks
        only now and then, since looking waits for the device: such steps change nothing, so nothing is lost.
        """
        self.bad_in_row = (self.bad_in_row + 1) * bad.double()
        self.worst_in_row = self.bad_in_row.clamp(min=self.worst_in_row)
        looks = bad.device.type == "cpu" or _due(step, GPU_LOOKS_EVERY)
        if looks and int(self.worst_in_row) >= most:
            # after so many steps, a gradient or a loss was finite
            good = max(step - int(self.bad_in_row) - 1, self.finite_step or 0)
            raise TrainingError(
                f"step {step:,}: the gradient was not finite in {int(self.worst_in_row)} "
                "steps in a row (--max-bad-steps), "
                f"which changed nothing. {self._way_back(good)}"
            )

    def _due(self, step: int, interval: int | None) -> bool:
        """Whether a multiple of the interval was reached since the last call."""
        return bool(interval) and step // interval > self.before // interval

    def save_stopped(self, step: int) -> None:
        """Saves where a run was stopped. All ranks."""
        self._save(step, [checkpoint.LAST])

    def _save(self, step: int, names: list[str]) -> None:
        if self.callbacks.save is None:
            return
        running = self.world.gather(self.meter.state())
        failed = self.callbacks.save(
            step,
            names,
            {
                "samples": self.meter.samples,
                "running": running,
                "best_val_loss": self.best_val_loss,
                "bad_in_row": int(self.bad_in_row),
                "val_not_finite": self.val_not_finite,
                "finite_step": self.finite_step,
                "unfinished": self.unfinished,
                "before": self.before if self.unfinished else step,
            },
        )
        if failed and checkpoint.BEST in names:
            self.best_val_loss = self.best_before

    def _say(self, text: str) -> None:
        save: Any = self.callbacks.save
        if self.world.is_main and hasattr(save, "say"):
            save.say(text)


def _due(step: int, interval: int | None) -> bool:
    return bool(interval) and step % interval == 0
