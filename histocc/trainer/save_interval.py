"""When to save, from what a save costs and how often a job fails.

A checkpoint too often holds the training up, one too seldom loses more steps to each failure. With δ seconds
that a save holds the training up, and M seconds from failure to failure, the least is lost with about √(2 δ
M) seconds of training between two saves (Young, 1974, "A first order approximation to the optimum checkpoint
interval", doi:10.1145/361147.361115); the terms of higher order, and the model of the time that is lost, are
those of Daly (2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
doi:10.1016/j.future.2004.11.016).

Here a save is written while the training continues, so δ is not what it takes: it is what it keeps the
training from its steps, in the copy and by slower steps during the writing, measured. That a checkpoint
counts only once it is written loses the same to each failure, however often one saves; but a save must be
written before the next begins.
"""

import math
import statistics
import time
from collections import deque
from typing import Any

from histocc.runtime.console import duration
from histocc.runtime.world import World

AUTO = "auto"
FIRST_STEPS = 10  # after which a run saves for the first time, to measure it
KEPT_STEPS, KEPT_SAVES = 50, 5  # of which the medians count
LOOK_AGAIN_SECONDS = 1.0  # while the checkpoint before is still being written
SAY_AGAIN = 1.5  # by how much an interval must have changed
LEAST_COST = 1e-3  # seconds


def best_seconds(cost: float, mean_between_failures: float) -> float:
    """Seconds of training between two saves, of which each holds it up for `cost` seconds, that lose the
    least: Daly's estimate of higher order.
    """
    ratio = cost / (2 * mean_between_failures)
    if ratio >= 1:
        return mean_between_failures
    root = math.sqrt(ratio)
    return math.sqrt(2 * cost * mean_between_failures) * (1 + root / 3 + ratio / 9) - cost


def effective_share(interval: float, cost: float, recovery: float, mean_between_failures: float) -> float:
    """The share of the time that is training whose results are kept, with saves after each `interval` seconds
    of it and failures at random times (exponentially distributed): Daly's complete model.

    recovery: seconds that a failure costs beside the steps that are taken again.
    """
    mean = mean_between_failures
    return interval / (mean * math.exp(recovery / mean) * math.expm1((interval + cost) / mean))


class AutoInterval:
    """After which steps a run saves: first soon after its start, to measure what that costs, then as often as
    loses the least. Rank 0 measures and decides, and all ranks are told when a save may be due (`due`).

    Args:
        mean_between_failures: seconds, of the whole job.
        start: the step that the run starts or continues from.
        save: what writes checkpoints. Where it has `is_writing` and `seconds`, as that of
            `histocc.trainer.saver`, they count; so does `say`, for the interval in words.
    """

    def __init__(self, mean_between_failures: float, start: int, save: Any):
        self.mean, self.save = mean_between_failures, save
        self.saved_at, self.next_look = start, start + FIRST_STEPS
        self.costs: deque[float] = deque(maxlen=KEPT_SAVES)
        self.steps: deque[float] = deque(maxlen=KEPT_STEPS)  # seconds of each, while nothing was written
        self._cost: float | None = None  # of the last save, whose writing has not ended
        self._since, self._writes = time.perf_counter(), False
        self._said = 0

    @property
    def is_writing(self) -> bool:
        return bool(getattr(self.save, "is_writing", False))

    def stepped(self, steps: int) -> None:
        """After so many steps since `restart_clock`, before anything else is done."""
        seconds = time.perf_counter() - self._since
        if steps < 1:
            return
        if self._cost is None or not self._writes:
            self.steps.append(seconds / steps)
        elif self.steps:
            self._cost += max(0.0, seconds - steps * statistics.median(self.steps))
        if self._cost is not None and not self.is_writing:
            self.costs.append(max(self._cost, LEAST_COST))
            self._cost = None

    def restart_clock(self) -> None:
        """What comes now are steps."""
        self._since, self._writes = time.perf_counter(), self.is_writing

    def saved(self, step: int, seconds: float) -> None:
        """A checkpoint of this step has held the training up for so long. All ranks."""
        if self._cost is not None:  # the one before was waited for
            self.costs.append(max(self._cost, LEAST_COST))
        self.saved_at, self._cost = step, seconds

    def due(self, step: int, world: World) -> bool:
        """Whether to save after this step: the same answer on all ranks, which ask after the same steps. All
        ranks.
        """
        if step < self.next_look:
            return False
        now, self.next_look = world.broadcast(self._decided(step) if world.is_main else None, 0)
        return now

    def _decided(self, step: int) -> tuple[bool, int]:
        """(whether to save, the step at which to ask again)"""
        if self.is_writing:
            return False, step + self._steps_of(LOOK_AGAIN_SECONDS)
        if not self.costs:
            return True, step + FIRST_STEPS
        every = self._interval()
        if step < self.saved_at + every:
            return False, self.saved_at + every
        return True, step + every

    def _steps_of(self, seconds: float) -> int:
        return max(1, round(seconds / max(statistics.median(self.steps or [0.0]), 1e-6)))

    def _interval(self) -> int:
        """Steps between two saves, by what was measured last."""
        cost = statistics.median(self.costs)
        best = max(best_seconds(cost, self.mean), float(getattr(self.save, "seconds", 0.0)))
        every = self._steps_of(best)
        changed = max(every, self._said) / max(1, min(every, self._said))
        if changed >= SAY_AGAIN and hasattr(self.save, "say"):
            self._said = every
            self.save.say(
                f"Saving: checkpoints every {every:,} step{'s' * (every > 1)} ({duration(best)}), since each"
                f" holds the training up for {cost:.2g} s, and the job fails every {self.mean / 3600:.3g} h"
                " (--mtbf-hours)"
            )
        return every
