"""Work shared among processes forked from this one. They begin with its memory, so a model's weights are
held once for any number of processes. This works only on CPUs: a GPU does not survive a fork.
"""

import contextlib
import itertools
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.log import show_progress
from histocc.runtime.signals import Stopped, leave_to_parent
from histocc.runtime.world import World, die_with

LOOK_SECONDS, JOIN_SECONDS = 0.05, 10.0
CGROUPS, OWN_CGROUPS = "/sys/fs/cgroup", "/proc/self/cgroup"
# A group's microseconds of CPU per period, in versions 2 and 1 ("max" or -1: no limit)
CPU_LIMITS = ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]

T = TypeVar("T")


def usable_cores() -> int:
    """Return the number of cores that this process may use within the limits of its cgroups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError):
        for line in Path(OWN_CGROUPS).read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)  # version 2 names no controllers
            group = Path(CGROUPS, controllers, path.lstrip("/"))
            for folder, names in itertools.product([group, *group.parents], CPU_LIMITS):
                with contextlib.suppress(OSError, ValueError):
                    texts = (Path(folder, name).read_text("utf-8") for name in names)
                    quota, period = map(int, " ".join(texts).split())
                    cores = min(cores, max(1, round(quota / period))) if quota > 0 else cores
    return cores


def choose_processes(asked: int | None, world: World, pieces: int) -> int:
    """Return how many processes share pieces of work. asked: the value of --processes, or None for one on
    each core that torch would use. Raises UserError if several are asked for where only one is possible.
    """
    alone = ""
    if world.size > 1:
        alone = "the launcher has started some already"
    elif world.device.type != "cpu":
        alone = f"it is for CPUs, and this process computes on {world.device.type}"
    elif sys.platform == "darwin" or not hasattr(os, "fork"):
        alone = "this system does not let forked processes compute"
    if alone:
        if (asked or 1) > 1:
            raise UserError(f"--processes {asked}: {alone}; leave it out")
        return 1
    if asked is not None:
        return max(1, min(asked, pieces))
    cores = min(usable_cores(), torch.get_num_threads())
    # a process that shares work has one thread, and few of them would leave most cores idle
    return min(cores, pieces) if 2 * pieces > cores else 1


class Forked:
    """`number` processes, this one first, that share work with one thread each. The threads of OpenMP do not
    survive a fork, and a process that asks for several then waits for them forever.

    stop: raises if the work is to be given up. limit_seconds: longest time without a call of `check`.
    """

    def __init__(self, number: int, stop: Callable[[], None], limit_seconds: float = 1800.0):
        self.number, self.stop, self.limit_seconds = number, stop, limit_seconds
        self._own, self._calls = 0, mmap.mmap(-1, number)  # calls of `check` by each process, modulo 256
        self._children: list[tuple[BaseProcess, Connection]] = []

    def each(self, work: Callable[[int], T]) -> list[T]:
        """Run work(0) here and work(1), … in forked processes, whose results must fit through a pipe. Return
        the results in this order. If one raises, raise the same and end the others.
        """
        if self.number == 1:
            return [work(0)]
        threads, context = torch.get_num_threads(), multiprocessing.get_context("fork")
        torch.set_num_threads(1)
        try:
            for number in range(1, self.number):
                pipe, theirs = context.Pipe(duplex=False)
                arguments = (theirs, work, number, os.getpid())
                process = context.Process(target=self._serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._children.append((process, pipe))
            return [work(0), *(self._result(i, *child) for i, child in enumerate(self._children, 1))]
        finally:
            for process, pipe in self._children:
                process.kill()  # files are written whole or not at all
                process.join(JOIN_SECONDS)
                pipe.close()
            self._children = []
            torch.set_num_threads(threads)

    def _serve(self, pipe: Connection, work: Callable[[int], Any], number: int, parent: int) -> None:
        """Run `work` in a forked process, and send (its result, its exception)."""
        leave_to_parent()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all get it: the parent reports it, and ends this one
        die_with(parent)
        show_progress(False)
        self._own, self._children, value, error = number, [], None, None
        try:
            value = work(number)
        except (Exception, Stopped) as raised:
            error = raised
        with contextlib.suppress(OSError), open(pipe.fileno(), "wb", closefd=False) as file:
            pickle.dump((value, error), file, protocol=-1)
        os._exit(1 if error else 0)  # exit functions and open files are the parent's

    def _result(self, number: int, process: BaseProcess, pipe: Connection) -> Any:
        """Return a process's result, or raise its work's exception, or TrainingError if it died or hangs."""
        content, part, idle = bytearray(), b"first", 0.0
        while part:
            calls = self._calls[number]
            if pipe.poll(LOOK_SECONDS):
                content += (part := os.read(pipe.fileno(), 1 << 20))
                continue
            self.check()
            idle = idle + LOOK_SECONDS if self._calls[number] == calls else 0.0
            if idle > self.limit_seconds:
                what = f"process {process.pid}, which shares the work, did nothing for {idle:.0f} s"
                raise TrainingError(f"{what} (--timeout-minutes): it hangs or is stopped; start again")
        try:
            value, error = pickle.loads(content)
        except (EOFError, pickle.UnpicklingError):
            process.join(JOIN_SECONDS)
            end = f"exit code {process.exitcode}"
            if process.exitcode == -signal.SIGKILL:
                end = "SIGKILL: the system does so if memory runs out; fewer --processes need less"
            raise TrainingError(f"a process that shares the work has died ({end})") from None
        if error is not None:
            raise error
        return value

    def check(self) -> None:
        """Raise if the work is to be given up or another process failed. `work` calls it now and then."""
        self._calls[self._own] = (self._calls[self._own] + 1) % 256
        self.stop()
        for number, (process, pipe) in enumerate(self._children, 1):
            if not process.is_alive() and process.exitcode:
                self._result(number, process, pipe)
