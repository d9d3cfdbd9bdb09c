"""Work that is shared out among processes forked from this one. They begin with its memory, so the weights of
a model are there once, however many they are. CPUs alone: a GPU does not outlive a fork.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.log import show_progress
from histocc.runtime.signals import Stopped, leave_to_parent
from histocc.runtime.world import World, die_with

LOOK_SECONDS, JOIN_SECONDS = 0.05, 10.0
CPU_LIMIT = "/sys/fs/cgroup/cpu.max"  # of a container: microseconds of each so many, or "max"

T = TypeVar("T")


def usable_cores() -> int:
    """Those that this process may use, and a container's limit allows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open(CPU_LIMIT, encoding="utf-8") as file:
        quota, period = map(int, file.read().split())
        return min(cores, max(1, round(quota / period)))
    return cores


def choose_processes(asked: int | None, world: World, pieces: int) -> int:
    """How many processes share work of so many pieces.

    asked: by --processes; None: one for each core that torch would use, if there are pieces enough. Raises
    UserError if there can be no others.
    """
    alone = "" if hasattr(os, "fork") else "this system has no fork"
    if world.size > 1:
        alone = "the launcher has started some already"
    elif world.device.type != "cpu":
        alone = f"it is for CPUs, and this process computes on {world.device.type}"
    if alone:
        if (asked or 1) > 1:
            raise UserError(f"--processes {asked}: {alone}; leave it out")
        return 1
    if asked is not None:
        return max(1, min(asked, pieces))
    cores = min(usable_cores(), torch.get_num_threads())
    # a process that shares work has one thread, and few of them would leave most cores idle
    return min(cores, pieces) if 2 * pieces > cores else 1


def _serve(pipe: Connection, work: Callable[[int], Any], number: int, parent: int) -> None:
    """A forked process: sends (what `work` returns, what it raises)."""
    leave_to_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all: the parent says that it stops, and ends this
    die_with(parent)
    show_progress(False)
    value, error = None, None
    try:
        value = work(number)
    except (Exception, Stopped) as raised:
        error = raised
    with contextlib.suppress(OSError):  # nobody reads it any more
        pipe.send_bytes(pickle.dumps((value, error), protocol=-1))
    os._exit(1 if error else 0)  # exit functions and open files are the parent's


def _result(process: BaseProcess, pipe: Connection) -> Any:
    """Raises what the work raised, and TrainingError if the process has died."""
    try:
        value, error = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        process.join(JOIN_SECONDS)
        end = f"exit code {process.exitcode}"
        if process.exitcode == -signal.SIGKILL:
            end = "SIGKILL: the system does so if memory runs out; fewer --processes need less"
        raise TrainingError(f"a process that shares the work has died ({end})") from None
    if error is not None:
        raise error
    return value


class Forked:
    """`number` processes, of which this is the first, share what follows, with a thread each: the threads of
    OpenMP do not come through a fork, and a process that asks for more than one then waits for them forever.

    stop: raises if the work is to be given up.
    """

    def __init__(self, number: int, stop: Callable[[], None]):
        self.number, self.stop = number, stop
        self._children: list[tuple[BaseProcess, Connection]] = []

    def each(self, work: Callable[[int], T]) -> list[T]:
        """What work(0), here, and work(1), … in forked processes return, in this order; the latter must come
        through a pipe. Raises what any of them raises, and ends the others then.
        """
        if self.number == 1:
            return [work(0)]
        threads, context = torch.get_num_threads(), multiprocessing.get_context("fork")
        torch.set_num_threads(1)
        children: list[tuple[BaseProcess, Connection]] = []
        try:
            for number in range(1, self.number):
                pipe, theirs = context.Pipe(duplex=False)
                arguments = (theirs, work, number, os.getpid())
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                children.append((process, pipe))
            self._children = children  # not of one another
            results = [work(0)]
            for process, pipe in children:
                while not pipe.poll(LOOK_SECONDS):
                    self.check()
                results.append(_result(process, pipe))
            return results
        finally:
            for process, pipe in children:
                process.kill()  # files are written whole or not at all
                process.join(JOIN_SECONDS)
                pipe.close()
            self._children = []
            torch.set_num_threads(threads)

    def check(self) -> None:
        """For work(0), now and then: raises if it is to be given up, or another process has failed."""
        self.stop()
        for process, pipe in self._children:
            if not process.is_alive() and process.exitcode:
                _result(process, pipe)
