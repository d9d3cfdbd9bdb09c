"""Saving while the training goes on: the steps wait for a copy in memory, and a thread of rank 0 writes it."""

import os
import threading
import time
from collections.abc import Callable

from histocc import checkpoint
from histocc.distributed import World


class Saver:
    """The engine's `save(step, names, position)`: rank 0 writes a checkpoint that is enough to predict and to go on.

    The others do not wait at all, and rank 0 waits for the disk only where the save before has not ended. A save that fails is
    said loudly and does not end the run: the next one may succeed. `close` waits for the last one; call it however the training ends.

    state: makes what to save out of (step, position), a nested dict with tensors, on rank 0; called on all ranks. failed: the error of the last save, "" where it succeeded; waited: seconds
    that the last save kept the training, for the copy and for the save before it; seconds: what it took altogether.
    """

    def __init__(self, folder: str, keep: int, world: World, state: Callable[[int, dict], dict], say: Callable[[str], None]):
        self.folder, self.keep, self.world, self.state, self.say = folder, keep, world, state, say
        self.failed, self.waited, self.seconds = "", 0.0, 0.0
        self.lost_best = False                       # the best checkpoint so far could not be written; whoever asks sets it back
        self._writing: threading.Thread | None = None

    def __call__(self, step: int, names: list[str], position: dict) -> None:
        self.world.did(f"saving at step {step:,}")
        started = time.monotonic()
        self.close()
        state = self.state(step, position)
        if not self.world.is_main:
            return
        copy = checkpoint.to_cpu(state, copy=True)
        self.waited = time.monotonic() - started
        self._writing = threading.Thread(target=self._write, args=(step, names, copy, started), name="saving")
        self._writing.start()

    def close(self) -> None:
        """Waits until nothing is being written."""
        if self._writing is not None:
            self._writing.join()

    def finish(self) -> str:
        """Waits for the last save, on all ranks by polling; its error, "" where it succeeded. Once, after the last step. All ranks."""
        def last() -> list:
            self.close()
            return [self.failed, self.seconds]
        self.failed, self.seconds = self.world.main_first("last save", last)
        return self.failed

    def _write(self, step: int, names: list[str], state: dict, started: float) -> None:
        self.failed = ""
        try:
            os.makedirs(self.folder, exist_ok=True)
            checkpoint.save(self.folder, names, state)
            size = os.path.getsize(os.path.join(self.folder, names[-1]))
            checkpoint.prune(self.folder, self.keep)
        except Exception as error:                   # OSError, and torch's writer turns a full disk into a RuntimeError
            self.failed = str(error) or type(error).__name__
        self.seconds = time.monotonic() - started
        if self.failed:
            self.lost_best = self.lost_best or checkpoint.BEST in names
            self.say(f"WARNING: the checkpoint of step {step:,} could not be saved: {self.failed}. Training goes on, and "
                             "the next save is tried all the same.")
        else:
            self.say(f"Saved {', '.join(names)} of step {step:,}: {size / 1e6:,.0f} MB, training waited {self.waited:.2f} s of "
                             f"{self.seconds:.2f} s")
