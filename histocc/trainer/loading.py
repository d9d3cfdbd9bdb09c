"""Batches from loading processes: every wait for them has an end, and what became of one that died is
said."""

import errno
import multiprocessing.connection
import multiprocessing.queues
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from histocc.runtime import stacks
from histocc.runtime.errors import SHARED_MEMORY_IS_FULL, TrainingError, as_user_error
from histocc.runtime.signals import Stopped, leave_to_parent, stop_asked

LOOK_SECONDS = 2.0  # how often a wait for a batch looks whether the run is to stop
_CANNOT_HAND_OVER = 75  # exit code of a loading process that has no shared memory for its batch


class Loader:
    """torch's DataLoader whose workers are waited for no longer than `limit_seconds`.

    A request to stop ends a wait, too. In a process that is `alone` the iteration then raises Stopped, and
    everything can be saved; others of the job already wait for this step, so the process ends with
    TrainingError, as it does for a worker that fails, dies or never answers. arguments: those of DataLoader.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: Iterable[Any],
        limit_seconds: float,
        alone: bool,
        **arguments: Any,
    ):
        self.workers = arguments.get("num_workers", 0)
        self.limit_seconds = limit_seconds
        self.alone = alone
        if self.workers:
            arguments["timeout"] = min(LOOK_SECONDS, limit_seconds)
        self.loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            generator=torch.Generator(),
            worker_init_fn=_begin_worker,
            **arguments,
        )

    def __iter__(self) -> Iterator[Any]:
        try:
            batches = iter(self.loader)
        except (OSError, RuntimeError) as error:  # no more processes, or open files
            raise self._fault(error) from error
        if not self.workers:
            yield from batches
            return
        # torch's handler of SIGCHLD raises wherever the main thread happens to be; the wait for a batch sees
        # a dead worker by itself.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        waiting_since = time.monotonic()
        stacks.set_timer()
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:
                if "timed out after" not in str(error):
                    raise self._fault(error, getattr(batches, "_workers", ())) from None
                self._waited(time.monotonic() - waiting_since)
            else:
                stacks.set_timer()
                yield batch
                stacks.set_timer()
                waiting_since = time.monotonic()

    def _waited(self, seconds: float) -> None:
        if stop_asked():
            if self.alone:
                raise Stopped
            raise _own_error(
                "asked to stop while the processes that load data do not answer. Nothing was saved since the "
                "last checkpoint, from which the same command continues"
            )
        if seconds > self.limit_seconds:
            files = stacks.written()
            raise _own_error(
                f"the processes that load data have not answered for {seconds:,.0f} s (--timeout-minutes); "
                "--num-workers 0 loads in the training process itself" + (files and f"; {files}")
            )

    def _fault(self, error: Exception, processes: Sequence[BaseProcess] = ()) -> TrainingError:
        """What became of a worker, by its exit code or its exception."""
        if isinstance(error, ConnectionError | EOFError):  # one ended while it handed over a batch
            multiprocessing.connection.wait([process.sentinel for process in processes], timeout=1.0)
        ended = [process.exitcode for process in processes if process.exitcode]
        text = str(error)
        out_of_space = isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename
        if out_of_space or _CANNOT_HAND_OVER in ended or -signal.SIGBUS in ended or "Bus error" in text:
            return _own_error(SHARED_MEMORY_IS_FULL)
        if -signal.SIGKILL in ended or "Killed" in text:
            return _own_error(
                "a process that loads data was killed, perhaps for want of memory; fewer "
                "--num-workers need less"
            )
        if ended:
            return _own_error(
                f"a process that loads data ended (exit code {ended[0]}); --num-workers 0 shows why"
            )
        known = as_user_error(error)
        if known is not None:
            return _own_error(str(known))
        said = [line for line in text.strip().splitlines() if line.strip()]
        last = said[-1][:300] if said else type(error).__name__
        return _own_error(f"a process that loads data failed: {last}; --num-workers 0 shows where")


def _own_error(message: str) -> TrainingError:
    return TrainingError(message, said_by_all=True)


def _begin_worker(_) -> None:
    leave_to_parent()
    queue: Any = multiprocessing.queues.Queue
    queue._on_queue_feeder_error = staticmethod(_not_handed_over)


def _not_handed_over(error: Exception, _) -> None:
    """A batch could not be put into shared memory. Python would say so and lose it, and the training would
    wait for it for ever."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    print(f"error: a process that loads data: {reason}", file=sys.stderr, flush=True)
    os._exit(_CANNOT_HAND_OVER)
