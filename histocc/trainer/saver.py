"""Checkpoints of a run, written by rank 0 between two steps."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from histocc.runtime import checkpoint
from histocc.runtime.errors import in_words
from histocc.runtime.files import OwnFiles
from histocc.runtime.world import World


class Saver:
    """The engine's `save(step, names, position)`: rank 0 writes a checkpoint that is enough to predict and to
    continue, and the others wait. All ranks.

    A save that fails is a warning and does not end the run: the next one may succeed. So is one whose weights
    or optimizer are not finite: the files from before stay.

    Args:
        own: files of the run, in whose folder the checkpoints lie.
        keep: how many {step}.bin stay.
        world: the processes.
        state: makes what to save out of (step, position), a nested dict with tensors, on rank 0; called on
            all ranks.
        say: prints a line, on rank 0.

    Attributes:
        failed: the error of the last save, "" where it succeeded; the same on all ranks.
        seconds: what it took.
    """

    def __init__(
        self,
        own: OwnFiles,
        keep: int,
        world: World,
        state: Callable[[int, dict[str, Any]], dict[str, Any]],
        say: Callable[[str], None],
    ):
        self.own, self.keep, self.world, self.state, self.say = own, keep, world, state, say
        self.failed, self.seconds = "", 0.0

    def __call__(self, step: int, names: list[str], position: dict[str, Any]) -> str:
        """Returns the error, "" where there is none."""
        started = time.monotonic()
        state = self.state(step, position)
        self.failed = self.world.run_on_main("saving", lambda: self._write(step, names, state, started))
        self.seconds = time.monotonic() - started
        return self.failed

    def newest_until(self, step: int) -> tuple[str, int] | None:
        """(path, step) of the newest checkpoint of `step` or of one before, or None. Rank 0 only."""
        found = {path: checkpoint.step_of(path) for path in checkpoint.newest_first(self.own.folder)}
        until = {path: of_step for path, of_step in found.items() if of_step is not None and of_step <= step}
        return max(until.items(), key=lambda item: item[1], default=None)

    def _write(self, step: int, names: list[str], state: dict[str, Any], started: float) -> str:
        try:
            trained = {name: state[name] for name in ("model", "optimizer") if name in state}
            if not all(map(_is_finite, tensors(trained))):
                return self._failure(
                    step, "its weights are no longer finite; lower --learning-rate, or raise --warmup-pct"
                )
            os.makedirs(self.own.folder, exist_ok=True)
            checkpoint.save(self.own, names, state)
            size = os.path.getsize(self.own.path(names[-1]))
            checkpoint.prune(self.own, self.keep)
        except Exception as error:  # OSError, and torch's writer turns a full disk into a RuntimeError
            first = checkpoint.LAST if checkpoint.LAST in names else names[0]
            path, size = os.path.join(self.own.folder, first), sum(x.nbytes for x in tensors(state))
            return self._failure(step, in_words(error, path, size))
        self.say(
            f"Saved {', '.join(names)} of step {step:,}: {size / 1e6:,.0f} MB in"
            f" {time.monotonic() - started:.2f} s"
        )
        return ""

    def _failure(self, step: int, why: str) -> str:
        self.say(
            f"WARNING: the checkpoint of step {step:,} could not be saved: {why}. Training continues, "
            "and the next save is tried all the same."
        )
        return why


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        parts: Any = value.values() if isinstance(value, dict) else value
        for part in parts:
            yield from tensors(part)


def _is_finite(tensor: Tensor) -> bool:
    """Whether no number is inf or nan; without a second tensor of that size."""
    return (
        not tensor.is_floating_point()
        or not tensor.numel()
        or all(map(torch.isfinite, torch.aminmax(tensor)))
    )
