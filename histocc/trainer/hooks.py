"""Between two optimizer steps: what is summed up, logged, evaluated and saved, and whether to stop."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from histocc.runtime.device_clock import DeviceClock
from histocc.runtime.errors import TrainingError
from histocc.runtime.parallel import PeerWait
from histocc.runtime.world import World
from histocc.trainer.profiling import phase

GPU_LOOKS_EVERY = 10  # steps
MOST_NOT_FINITE = 2  # validations in a row without a finite loss, that end the run
IN_DOUBT = 2  # steps in a row without a finite gradient: one may be due to a damaged row


class Meter:
    """Sums since the last row of the log, on this rank; and what the run has seen so far, over all ranks."""

    def __init__(
        self,
        samples: int = 0,
        state: dict | None = None,
        peers: PeerWait | None = None,
        device: torch.device | None = None,
    ):
        self.samples = samples  # observations of all ranks since the run began
        self.sums: dict[str, Tensor | float] = dict(state["sums"]) if state else {}
        # observations of all ranks since the last row
        self.count: Tensor | float = state["count"] if state else 0
        self.grad_norm: Tensor | float | None = state.get("grad_norm") if state else None
        self.skipped: Tensor | float = state.get("skipped", 0) if state else 0  # steps since the last row
        self.open: dict[str, Tensor | float] = {}  # sums of the step that is not finished
        # waits for other ranks, and for data since the last row
        self.peers = peers or PeerWait()
        self.data = DeviceClock(device)
        self.data.seconds = state["seconds_data"] if state else 0.0
        self.restart_clock()

    def restart_clock(self) -> None:
        self.timed_from = time.perf_counter()
        self.timed_samples = self.samples
        self.timed_data = self.data.seconds
        self.timed_peers = self.peers.seconds

    def state(self) -> dict:
        return {
            "sums": {name: float(value) for name, value in self.sums.items()},
            "count": int(self.count),
            "seconds_data": self.data.seconds,
            "skipped": int(self.skipped),
            "grad_norm": None if self.grad_norm is None else float(self.grad_norm),
        }

    def snapshot(self) -> tuple:
        return dict(self.sums), self.count, self.data.seconds, self.grad_norm, self.skipped

    def restore(self, snapshot: tuple) -> None:
        self.sums, self.count, self.data.seconds, self.grad_norm, self.skipped = snapshot

    def time_data(self, fetch: Callable[[], Any]) -> Any:
        """What `fetch` returns; its time counts as waiting for data, on a GPU where that had nothing else to
        do.
        """
        started = self.data.now()
        found = fetch()
        self.data.add(started, self.data.now())
        return found

    def leave_out(self, work: Callable[[], None]) -> None:
        """Does what is no part of the training: its time does not count."""
        started = time.perf_counter()
        work()
        self.timed_from += time.perf_counter() - started

    def add(self, sums: dict[str, Tensor]) -> None:
        for name, value in sums.items():  # float64 and on the device: no host wait, no rounding that grows
            self.open[name] = self.open.get(name, 0.0) + value.detach().double()

    def add_step(self, observations: int, grad_norm: Tensor, done: Tensor, bad: Tensor) -> None:
        """Takes the open sums in, unless the step was not `done`: its sums are no figures. No wait for the
        device.
        """
        self.samples += observations
        self.count = self.count + observations * done.double()
        self.skipped = self.skipped + bad.double()
        self.grad_norm = grad_norm if self.grad_norm is None else torch.where(done, grad_norm, self.grad_norm)
        for name, value in self.open.items():
            self.sums[name] = self.sums.get(name, 0.0) + torch.where(done, value, 0.0)
        self.open = {}

    def row(self, world: World) -> dict:
        """Values for the log since the last row, over all ranks; starts the next row. All ranks."""
        self.data.settle()
        self.peers.settle()
        elapsed = time.perf_counter() - self.timed_from
        waited = self.data.seconds - self.timed_data
        total = world.sum_over_ranks({**self.sums, "_data": self.data.seconds, "_waited": waited})
        count = int(self.count)
        peers = (
            world.gather((self.peers.seconds - self.timed_peers) / max(elapsed, 1e-9))
            if self.peers.measures
            else None
        )
        row = {f"train_{name}": total[name] / count for name in self.sums if count}
        row |= {
            "samples": self.samples,
            "seconds_data": total["_data"] / world.size,
            "samples_per_sec": (self.samples - self.timed_samples) / max(elapsed, 1e-9),
            "data_share": min(1.0, total["_waited"] / world.size / max(elapsed, 1e-9)),
            "peer_share": min(1.0, sum(peers) / world.size) if peers else None,
            "peer_shares": peers,
            "grad_norm": None if self.grad_norm is None or not count else float(self.grad_norm),
            "skipped_steps": int(self.skipped),
        }
        self.sums, self.count, self.data.seconds, self.skipped = {}, 0, 0.0, 0
        self.restart_clock()
        return row


class Boundary:
    """What happens between two optimizer steps: log, evaluate, save. Every rank calls it at every step.

    save(step, names, position) is called on all ranks with the names of the files due; log(values) likewise.
    Where `save` also has `say(text)` and `newest_until(step)`, as that of `histocc.trainer.saver`, they are
    used on rank 0.
    val_not_finite: validations in a row without a finite loss; finite_step: that of the last one with a
    finite loss.

    Raises TrainingError for a run that has diverged.
    """

    def __init__(
        self,
        world: World,
        meter: Meter,
        *,
        log_interval: int | None = 100,
        eval_interval: int | None = None,
        save_interval: int | None = None,
        stop_step: int | None = None,
        steps_per_epoch: int | None = None,
        evaluate: Callable[[], dict] | None = None,
        save: Callable[[int, list[str], dict], None] | None = None,
        log: Callable[[dict], None] | None = None,
        save_each_epoch: bool = False,
        best_val_loss: float | None = None,
        bad_in_row: int = 0,
        val_not_finite: int = 0,
        finite_step: int | None = None,
        check_interval: int | None = None,
        checksum: Callable[[], int] | None = None,
        started: tuple[int, float] | None = None,
    ):
        self.world, self.meter = world, meter
        self.log_interval, self.eval_interval, self.save_interval = log_interval, eval_interval, save_interval
        self.stop_step = stop_step
        self.steps_per_epoch = steps_per_epoch
        self.save_each_epoch = save_each_epoch
        self.evaluate, self.save, self.log = evaluate, save, log
        self.best_val_loss = best_val_loss
        self.best_before = best_val_loss
        self.bad_in_row = bad_in_row
        self.worst_in_row = 0
        self.val_not_finite, self.finite_step = val_not_finite, finite_step
        self.check_interval, self.checksum = check_interval, checksum
        self.validated = started or (0, time.perf_counter())  # step and end of the last validation, or start
        self.unfinished: dict | None = None  # a boundary in whose evaluation the run was stopped

    def __call__(self, step: int, epoch: int, learning_rate: float) -> None:
        self.unfinished = None
        if self.checksum is not None and _due(step, self.check_interval):
            self._check_replicas(step)
        last = step == self.stop_step
        names = [f"{step}.bin"] if _due(step, self.save_interval) else []
        if self.save_each_epoch and self.steps_per_epoch and step % self.steps_per_epoch == 0:
            names.append(f"epoch_{step // self.steps_per_epoch}.bin")
        evaluates = self.evaluate is not None and (last or _due(step, self.eval_interval))
        if evaluates or last or _due(step, self.log_interval):
            open_row = self.meter.snapshot()
            row = {"step": step, "epoch": epoch, "lr": learning_rate, **self.meter.row(self.world)}
            found = self._validate(step) if evaluates else {}
            if found is None:  # stopped: whoever goes on evaluates again, and then writes this row
                self.meter.restore(open_row)
                self.unfinished = {"step": step, "epoch": epoch, "learning_rate": learning_rate}
                return
            row |= found
            if evaluates:
                self._note(step, row["val_loss"])
            if evaluates and self._is_best(row["val_loss"]):
                names.append("best.bin")
            if self.log is not None:
                self.log(row)
        if evaluates and self.val_not_finite >= (1 if last else MOST_NOT_FINITE):
            self._raise_diverged(step, row["val_loss"])
        if names or last:
            names += ["last.bin"] if last or names != ["best.bin"] else []
            doubt = "" if evaluates and not self.val_not_finite else self._doubt()
            if not doubt or last:
                self._save(step, names)
            if doubt:
                self._say(
                    f"WARNING: step {step:,}: {', '.join(names)} "
                    f"{'may be of no use' if last else 'not written'}: {doubt}"
                )
        if names or evaluates:
            self.meter.restart_clock()  # evaluating and saving are not training time

    def _validate(self, step: int) -> dict | None:
        """What `evaluate` gives, how long it took, and, where it was due, the share of the time since the one
        before that this is.
        """
        started = time.perf_counter()
        found = self.evaluate()
        now = time.perf_counter()
        if found is None:
            return None
        found = {**found, "seconds_val": now - started}
        before, since = self.validated
        if _due(step, self.eval_interval) and before < step:
            found |= {"val_share": (now - started) / (now - since), "val_steps": step - before}
        self.validated = step, now
        return found

    def _is_best(self, val_loss: float) -> bool:
        """Whether no checkpoint that was written has a lower loss. All ranks."""
        if self.world.gather(getattr(self.save, "lost_best", False))[0]:
            self.best_val_loss, self.save.lost_best = self.best_before, False
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
        bad = int(self.bad_in_row)
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
        find = getattr(self.save, "newest_until", None)
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

    def _check_replicas(self, step: int) -> None:
        """All ranks take the same steps from the same weights, so these are equal to the bit. Raises
        TrainingError.
        """
        others = self.world.differing(self.checksum())
        if others:
            raise TrainingError(
                f"step {step:,}: the weights of rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
                " are no longer those of rank 0. A device or its memory is damaged, or something changed"
                " weights on one process alone. The last checkpoint is that of rank 0."
            )

    def count_bad_steps(self, bad: Tensor, most: int, step: int) -> None:
        """Raises TrainingError after `most` steps in a row that were skipped. All ranks. On a GPU it looks
        only now and then, since
        looking waits for the device: such steps change nothing, so nothing is lost.
        """
        self.bad_in_row = (self.bad_in_row + 1) * bad.double()
        self.worst_in_row = self.bad_in_row.clamp(min=self.worst_in_row)
        if (bad.device.type == "cpu" or _due(step, GPU_LOOKS_EVERY)) and int(self.worst_in_row) >= most:
            # after so many steps, a gradient or a loss was finite
            good = max(step - int(self.bad_in_row) - 1, self.finite_step or 0)
            raise TrainingError(
                f"step {step:,}: the gradient was not finite in {int(self.worst_in_row)} "
                "steps in a row (--max-bad-steps), "
                f"which changed nothing. {self._way_back(good)}"
            )

    def save_stopped(self, step: int) -> None:
        """Saves where a run was stopped. All ranks."""
        self._save(step, ["last.bin"])

    def _save(self, step: int, names: list[str]) -> None:
        if self.save is None:
            return
        running = self.world.gather(self.meter.state())
        self.save(
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
            },
        )

    def _say(self, text: str) -> None:
        if self.world.is_main and hasattr(self.save, "say"):
            self.save.say(text)


class StopPoll:
    """Asks, on all ranks together, whether to stop; once the answer was yes it stays so. asked: a collective;
    None: never.

    asked_by_loader: whether a wait for batches ended, in a process that is alone, because it was asked to
    stop.
    """

    def __init__(self, asked: Callable[[], bool] | None):
        self.asked, self.agreed, self.asked_by_loader = asked, False, False

    def __call__(self) -> bool:
        with phase("asking to stop"):
            self.agreed = self.agreed or (self.asked is not None and self.asked())
        return self.agreed


def _due(step: int, interval: int | None) -> bool:
    return bool(interval) and step % interval == 0
