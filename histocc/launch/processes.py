"""Becoming a command, or running one and passing signals on to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

from histocc.launch.output import say, say_error

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def become(command: list[str]) -> None:
    """Replaces this process by a command, which keeps its number and hears its signals."""
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and what is ignored stays so
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execvp(command[0], command)


def run_and_wait(command: list[str]) -> int:
    """Runs a command, for what follows it, and passes the signals of this process on to it.

    Returns:
        Its exit code, 128 and the number of the signal where one ended it.
    """
    child = None
    early = []  # a signal that comes before the child is there waits for it

    def pass_on(number: int, frame) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    with handling(dict.fromkeys(PASSED_ON, pass_on)):
        child = _start(command)
        for number in early:
            child.send_signal(number)
        return _exit_code(child)


def run_job(command: list[str], job: str) -> int:
    """Runs the srun of a SLURM job; where the time limit is near, the job goes back into the queue.

    Args:
        job: the number of the job, or of the task of an array.

    Returns:
        The exit code of srun.
    """
    limit_is_near = False

    def save_and_end(number: int, frame) -> None:
        nonlocal limit_is_near
        limit_is_near = True
        say("The time limit is near: asking the training to save and end")
        _call(["scancel", "--signal=USR1", job])

    def wait(number: int, frame) -> None:
        """SLURM tells the training itself; this process waits for it."""

    with handling({signal.SIGUSR1: save_and_end, signal.SIGTERM: wait}):
        status = _exit_code(_start(command))
        if limit_is_near and status != 0:  # torchrun ends with 1 after a signal
            say(f"Job {job} goes back into the queue; the same command continues from the last checkpoint")
            requeued = _call(["scontrol", "requeue", job])
            if requeued != 0:
                return requeued
            time.sleep(60)  # SLURM ends this process
    return status


@contextlib.contextmanager
def handling(handlers: dict[signal.Signals, Callable]) -> Iterator[None]:
    """Handles signals while it is open, but for those that this process ignores, as under nohup."""
    before = {number: signal.getsignal(number) for number in handlers}
    try:
        for number, handler in handlers.items():
            if before[number] != signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(command: list[str]) -> subprocess.Popen:
    """Starts a command without input. Raises SystemExit where it is not there."""
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False)
    except OSError as error:
        say_error(f"{command[0]}: {error.strerror}")
        raise SystemExit(127) from None


def _exit_code(child: subprocess.Popen) -> int:
    """Waits for a child; its exit code as a shell has it."""
    code = child.wait()
    return code if code >= 0 else 128 - code


def _call(command: list[str]) -> int:
    """The exit code of a short command, 127 where it is not there."""
    try:
        return subprocess.call(command)
    except OSError as error:
        say_error(f"{command[0]}: {error.strerror}")
        return 127
