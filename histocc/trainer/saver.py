"""Saving while the training continues: the steps wait for a copy in memory, and a thread of rank 0 writes
it.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from histocc.runtime import checkpoint
from histocc.runtime.machine_errors import in_words, is_out_of_memory, size_words
from histocc.runtime.outputs import OwnFiles
from histocc.runtime.world import World


class Saver:
    """The engine's `save(step, names, position)`: rank 0 writes a checkpoint that is enough to predict and to
    continue.

    The others do not wait at all, and rank 0 waits for the disk only where the save before has not ended. A
    save that fails is
    said loudly and does not end the run: the next one may succeed. So is one whose weights or optimizer are
    not
    finite: the files from before stay. `close` waits for the last save; call it however the training ends.

    state: makes what to save out of (step, position), a nested dict with tensors, on rank 0; called on all
    ranks. Its dicts under "model" and "optimizer" are emptied: tensors that were put together from shares are
    nobody else's, and so lie in memory once. failed: the error of the last save, "" where it succeeded;
    waited: seconds that the last save kept the training, for the copy and for the save before it; seconds:
    what it took altogether.
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
        self.failed, self.waited, self.seconds = "", 0.0, 0.0
        self.lost_best = False  # the best checkpoint so far could not be written; whoever asks sets it back
        self._writing: threading.Thread | None = None
        if world.heartbeat is not None:
            world.heartbeat.before_leaving = self.close

    def __call__(self, step: int, names: list[str], position: dict[str, Any]) -> None:
        self.world.note(f"saving at step {step:,}")
        started = time.monotonic()
        self.close()
        state = self.state(step, position)
        if not self.world.is_main:
            return
        size = _bytes(state)
        try:
            copy = {
                name: checkpoint.to_cpu(part, copy=True, drop=name in ("model", "optimizer"))
                for name, part in state.items()
            }
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._has_failed(step, names, f"{in_words(error)}; its copy in memory takes {size_words(size)}")
            return
        self.waited = time.monotonic() - started
        self._writing = threading.Thread(target=self._write, args=(step, names, copy, started), name="saving")
        self._writing.start()

    def close(self, seconds: float | None = None) -> None:
        """Waits until nothing is being written, no longer than that where `seconds` are given."""
        if self._writing is not None:
            self._writing.join(seconds)

    def finish(self) -> str:
        """Waits for the last save, on all ranks by polling; its error, "" where it succeeded. Once, after the
        last step. All ranks.
        """

        def last() -> list[Any]:
            self.close()
            return [self.failed, self.seconds]

        self.failed, self.seconds = self.world.run_on_main("last save", last)
        return self.failed

    def newest_until(self, step: int) -> tuple[str, int] | None:
        """(path, step) of the newest checkpoint of `step` or of one before, or None. Rank 0 only."""
        self.close()
        found = {path: checkpoint.step_of(path) for path in checkpoint.newest_first(self.own.folder)}
        until = {path: of_step for path, of_step in found.items() if of_step is not None and of_step <= step}
        return max(until.items(), key=lambda item: item[1], default=None)

    def _write(self, step: int, names: list[str], state: dict[str, Any], started: float) -> None:
        self.failed, failed = "", ""
        paths: dict[str, str] = {}
        size = 0
        try:
            if not all(
                map(
                    _is_finite,
                    tensors({name: state[name] for name in ("model", "optimizer") if name in state}),
                )
            ):
                failed = "its weights are no longer finite; lower --learning-rate, or raise --warmup-pct"
            else:
                os.makedirs(self.own.folder, exist_ok=True)
                paths = checkpoint.save(self.own, names, state)
                size = os.path.getsize(paths[names[-1]])
                checkpoint.prune(self.own, self.keep)
        except Exception as error:  # OSError, and torch's writer turns a full disk into a RuntimeError
            first = checkpoint.LAST if checkpoint.LAST in names else names[0]
            failed = in_words(error, os.path.join(self.own.folder, first), _bytes(state))
        self.seconds = time.monotonic() - started
        if failed:
            self._has_failed(step, names, failed)
            return
        for name, path in paths.items():
            if os.path.basename(path) != name:
                self.say(
                    f"Note: {name} was not written by this run and stays as it is; the checkpoint is "
                    f"in {path}"
                )
        self.say(
            f"Saved {', '.join(names)} of step {step:,}: {size / 1e6:,.0f} MB, blocked training for"
            f" {self.waited:.2f} s, written in {self.seconds:.2f} s"
        )

    def _has_failed(self, step: int, names: list[str], why: str) -> None:
        self.failed, self.lost_best = why, self.lost_best or checkpoint.BEST in names
        self.say(
            f"WARNING: the checkpoint of step {step:,} could not be saved: {why}. Training continues, "
            "and the next save is tried "
            "all the same."
        )


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        parts: Any = value.values() if isinstance(value, dict) else value
        for part in parts:
            yield from tensors(part)


def _bytes(state: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors(state))


def _is_finite(tensor: Tensor) -> bool:
    """Whether no number is inf or nan; without a second tensor of that size."""
    return (
        not tensor.is_floating_point()
        or not tensor.numel()
        or all(map(torch.isfinite, torch.aminmax(tensor)))
    )
