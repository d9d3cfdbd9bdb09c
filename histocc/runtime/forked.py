"""Work that is shared out among processes forked from this one. They begin with its memory, so the weights of
a model are there once, however many they are. CPUs alone: a GPU does not outlive a fork.
"""

import contextlib
import fcntl
import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import torch

from histocc.runtime.errors import TrainingError, UserError, how_it_ended
from histocc.runtime.log import show_progress
from histocc.runtime.signals import Stopped, leave_to_parent
from histocc.runtime.world import World, die_with

LOOK_SECONDS, JOIN_SECONDS = 0.05, 10.0

T = TypeVar("T")


CPU_LIMIT = "/sys/fs/cgroup/cpu.max"  # of a container: microseconds of each so many, or "max"


def usable_cores() -> int:
    """Those that this process may use, and a container's limit allows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open(CPU_LIMIT, encoding="utf-8") as file:
            quota, period = map(int, file.read().split())
        cores = min(cores, max(1, round(quota / period)))
    except (OSError, ValueError, ZeroDivisionError):  # there is none
        pass
    return cores


def choose_processes(asked: int | None, world: World, pieces: int) -> int:
    """How many processes share work of so many pieces. asked: the value of --processes; None: one for each
    core that torch would use (OMP_NUM_THREADS), where there are pieces enough. Raises UserError where there
    can be no others.
    """
    alone = world.size > 1 or world.device.type != "cpu" or not hasattr(os, "fork")
    if asked is not None and asked > 1 and alone:
        why = (
            "the launcher has started some already"
            if world.size > 1
            else f"it is for CPUs, and this process computes on {world.device.type}"
            if world.device.type != "cpu"
            else "this system has no fork"
        )
        raise UserError(f"--processes {asked}: {why}; leave it out")
    if alone:
        return 1
    if asked is not None:
        return max(1, min(asked, pieces))
    cores = min(usable_cores(), torch.get_num_threads())
    # a process that shares work has one thread, and few of them would leave most cores idle
    return min(cores, pieces) if 2 * pieces > cores else 1


class _Child(Generic[T]):
    """A process that does `work(number)`, and what it sends at its end."""

    def __init__(self, work: Callable[[int], T], number: int):
        context = multiprocessing.get_context("fork")
        self.end, theirs = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, work, number, os.getpid()), daemon=True
        )
        self.process.start()
        theirs.close()

    def result(self) -> T:
        """Raises what the work raised, and TrainingError where the process has died."""
        try:
            kind, value = pickle.loads(self.end.recv_bytes())
        except (EOFError, OSError):
            self.process.join(JOIN_SECONDS)
            end = how_it_ended(self.process.exitcode)
            less = "; fewer --processes need less" * (self.process.exitcode == -signal.SIGKILL)
            raise TrainingError(f"a process that shares the work has died{end}{less}") from None
        if kind == "done":
            return value
        if kind == "stopped":
            raise Stopped
        raise value

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill()  # files are written whole or not at all
        self.process.join(JOIN_SECONDS)
        self.end.close()


def _serve(pipe: Connection, work: Callable[[int], Any], number: int, parent: int) -> None:
    leave_to_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all: the parent says that it stops, and ends this
    die_with(parent)
    show_progress(False)
    code = 1
    try:
        answer = pickle.dumps(("done", work(number)), protocol=-1)
        code = 0
    except Stopped:
        answer = pickle.dumps(("stopped", None))
    except Exception as error:
        answer = pickle.dumps(("failed", _portable(error)))
    with contextlib.suppress(OSError):  # nobody reads it any more
        pipe.send_bytes(answer)
    os._exit(code)  # exit functions and open files are the parent's


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same, where it does not come through a pipe."""
    for kind in (UserError, TrainingError):
        if isinstance(error, kind):
            return kind(str(error))
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


class Forked:
    """`number` processes, of which this is the first, share what follows, with a thread each: the threads of
    OpenMP do not come through a fork, and a process that asks for more than one then waits for them forever.
    """

    def __init__(self, number: int, stop: Callable[[], None], rank: int = 0, ranks: int = 1):
        """stop: raises where the work is to be given up; rank, ranks: of a launcher's processes, each of
        which is alone then.
        """
        self.number, self.stop, self.rank, self.ranks = number, stop, rank, ranks
        self._children: list[_Child] = []

    def each(self, work: Callable[[int], T]) -> list[T]:
        """What work(0), here, and work(1), … in forked processes return, in this order; the latter must come
        through a pipe. Raises what any of them raises, and ends the others then.
        """
        if self.number == 1:
            return [work(0)]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._children = [_Child(work, number) for number in range(1, self.number)]
            found = [work(0)]
            for child in list(self._children):
                while not child.end.poll(LOOK_SECONDS):
                    self.check()
                found.append(child.result())
            return found
        finally:
            for child in self._children:
                child.close()
            self._children = []
            torch.set_num_threads(threads)

    def pieces(self) -> "Pieces | OwnPieces":
        """For work of `each`: made before its processes are."""
        return Pieces() if self.number > 1 else OwnPieces(self.rank, self.ranks)

    def check(self) -> None:
        """For the work that is done here, now and then: raises where it is to be given up, or another process
        has failed.
        """
        self.stop()
        for child in self._children:
            if not child.process.is_alive() and child.process.exitcode:
                child.result()


class OwnPieces:
    """Pieces of work with the numbers 0, 1, …, of which each of a launcher's processes has its own."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks

    def is_mine(self, number: int) -> bool:
        """Whether this process takes the piece."""
        return number % self.ranks == self.rank


class Pieces:
    """Pieces of work with the numbers 0, 1, …, which all forked processes go through in this order; each is
    taken by the first that asks for it, so that none waits while there are some left.
    """

    def __init__(self):
        self._file = tempfile.TemporaryFile()  # all below the number in it are taken

    def is_mine(self, number: int) -> bool:
        """Whether this process takes the piece."""
        file = self._file.fileno()
        fcntl.lockf(file, fcntl.LOCK_EX)  # the system gives it back where a process dies
        try:
            if number < int.from_bytes(os.pread(file, 8, 0)):
                return False
            os.pwrite(file, (number + 1).to_bytes(8), 0)
            return True
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN)
