"""Which part of each step's rows a process takes: equal parts, parts that were given, or in proportion to the
measured speed of the processes. It changes who computes what, not what is computed.
"""

import argparse
from collections.abc import Callable
from typing import Any

from histocc.trainer.plan import Weights, share_sizes

EQUAL, AUTO = "equal", "auto"
SKIPPED = 2  # steps after the start that are not measured
EARLY = 3  # looks at the start: what a row costs depends on how many a process has, so one is not enough
FIRST, LATER = 5, 20  # measured steps before each of them, and before each later look
FIRST_GAIN, GAIN = 1.05, 1.10  # how much faster the steps must become for a change
KEPT = 8  # changes in a checkpoint
LOOKS = 2  # one after the other that must find it, but for the early ones


def shares(text: str) -> str:
    """The value of --shares, for argparse: auto, equal, or a number above 0 for each process."""
    if text not in (EQUAL, AUTO):
        try:
            fits = all(0 < float(part) < float("inf") for part in text.split(","))
        except ValueError:
            fits = False
        if not fits:
            raise argparse.ArgumentTypeError(
                f"{text[:60]!r} is neither auto nor equal, nor numbers above 0 with commas between, one for"
                " each process"
            )
    return text


def given_weights(text: str) -> tuple[float, ...] | None:
    """Of a value of --shares that gives them."""
    if text in (EQUAL, AUTO):
        return None
    given = [float(part) for part in text.split(",")]
    return tuple(weight / max(given) for weight in given)  # their sum is finite


def problem(text: str, processes: int, rows: int) -> str | None:
    """What is wrong with a value of --shares for so many processes and rows of a step."""
    weights = given_weights(text)
    if text == EQUAL:
        return None
    if weights is not None and len(weights) != processes:
        return (
            f"--shares {text} gives {len(weights)} numbers, and there are {processes} processes: one for each"
        )
    if rows < processes:
        return (
            f"--shares {text}: a step has {rows} rows, so that some of the {processes} processes would have"
            " none: a larger --batch-size or --global-batch-size, or --shares equal"
        )
    exact = [rows * weight / sum(weights) for weight in weights] if weights else []
    without = [str(rank) for rank, part in enumerate(exact) if part < 0.5]
    if without:
        several = len(without) > 1
        return (
            f"--shares {text} leaves rank{'s' * several} {', '.join(without)} without rows of a step, which"
            f" has {rows}: start fewer processes, or give {'them' if several else 'it'} more"
        )
    return None


class Shares:
    """The weights of the processes' shares, step by step.

    Args:
        asked: the value of --shares.
        ranks: how many processes.
        rows: of a step.
        ahead: steps whose rows may be loaded already when a change is decided.
        changes: those of an earlier run with as many processes, as `state` gave them.
        say: is told of each change.
    """

    def __init__(
        self,
        asked: str,
        ranks: int,
        rows: int,
        ahead: int = 0,
        changes: list[Any] | None = None,
        say: Callable[[str], None] = print,
    ):
        self.measures = asked == AUTO and ranks > 1
        self.ranks, self.rows, self.ahead, self.say = ranks, rows, ahead, say
        given = given_weights(asked)
        self.changes: list[tuple[int, Weights]] = [(0, given)]  # from which step (numbered from 0) on
        if self.measures:
            held = [(change["step"], tuple(change["weights"])) for change in changes or []]
            self.changes += [(step, weights) for step, weights in held if len(weights) == ranks]
        self.seen = self.looks = 0  # measured steps since the last look; looks that found a gain
        self.step, self._heard_at = 0, 0  # that comes next (numbered from 0); at the last call of `heard`
        self.early = EARLY * (len(self.changes) == 1)  # such looks that are still to come
        self.seconds, self.taken = [0.0] * ranks, [0.0] * ranks

    def at(self, step: int) -> Weights:
        """Weights of the ranks in step `step` (numbered from 0); None where they are equal."""
        return next(weights for first, weights in reversed(self.changes) if first <= step)

    def state(self) -> list[Any]:
        """For a checkpoint: the last changes. Some may be of steps whose rows are loaded already."""
        last = self.changes[-KEPT:] if self.measures else []
        return [{"step": step, "weights": list(weights)} for step, weights in last if weights]

    def heard(self, figures: list[float]) -> None:
        """Takes what all ranks have measured since the last call, the same on all of them: seconds and rows
        of each. Decides, the same everywhere.
        """
        if not any(figures):
            return
        self.seen, self._heard_at = self.seen + max(1, self.step - self._heard_at), self.step
        if self.seen <= SKIPPED:
            return
        for rank in range(self.ranks):
            self.seconds[rank] += figures[2 * rank]
            self.taken[rank] += figures[2 * rank + 1]
        if self.seen - SKIPPED < (FIRST if self.early else LATER):
            return
        per_row = [seconds / max(rows, 1.0) for seconds, rows in zip(self.seconds, self.taken)]
        self.seen, self.seconds, self.taken = SKIPPED, [0.0] * self.ranks, [0.0] * self.ranks
        if min(per_row) > 0:
            self._decide(self.step, per_row)
        if self.early == 1 and len(self.changes) == 1:
            self.say("Rows of a step: equal parts stay, since no others would be faster by a twentieth")
        self.early = max(0, self.early - 1)

    def _decide(self, step: int, per_row: list[float]) -> None:
        """per_row: seconds of a row on each rank."""
        now = share_sizes(self.rows, self.at(step + self.ahead) or (1.0,) * self.ranks)
        speeds = [1 / seconds for seconds in per_row]
        then = share_sizes(self.rows, speeds)
        gain = max(now * per_row) / max(then * per_row)
        self.looks = self.looks + 1 if gain > (FIRST_GAIN if self.early else GAIN) else 0
        if not self.looks or not self.early and self.looks < LOOKS:
            return
        weights = tuple(round(speed / sum(speeds), 4) for speed in speeds)
        self.looks, self.seen = 0, 0
        self.changes.append((step + self.ahead, weights))
        self.say(
            f"Rows of a step from step {step + self.ahead + 1:,} on: "
            + ", ".join(
                f"rank {rank} {size} ({speed:,.0f} samples/s)"
                for rank, (size, speed) in enumerate(zip(then, speeds))
            )
            + "; the results stay"
        )
