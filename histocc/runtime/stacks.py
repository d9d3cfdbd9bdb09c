"""The stacks of all threads of a process that hangs: at SIGUSR2, and before its time limit ends it.

`faulthandler` writes them, in C, whatever the main thread hangs in, and the run continues. Those of a run are
appended to a file for each rank in its folder; before it has one, and in other commands, they go to stderr.
"""

import contextlib
import faulthandler
import math
import os
import signal
import threading
import time
from collections.abc import Generator, Sequence

NAME = "stacks-rank{}.txt"
STDERR = 2
SHARE = 0.9  # of the time limit: so long no wait has begun or ended when stacks are written
EARLIER = 0.05  # of it: so much earlier they may be written, since setting the timer starts a thread (0.2 ms)


class _Timer:
    """Of this process: `faulthandler` has one. Times are those of time.monotonic()."""

    limit: float | None = None  # seconds; None: no run has its folder
    file, names = STDERR, ""
    set_at, ends = -math.inf, math.inf


def _register(file: int) -> None:
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR2, file)


@contextlib.contextmanager
def at_sigusr2() -> Generator[None]:
    """SIGUSR2 writes the stacks, and stops nothing."""
    _register(STDERR)
    try:
        yield
    finally:
        if hasattr(faulthandler, "unregister"):
            faulthandler.unregister(signal.SIGUSR2)


@contextlib.contextmanager
def in_folder(paths: Sequence[str], rank: int, limit: float) -> Generator[None]:
    """Stacks go into the one of `paths` that is the rank's; an empty file is removed at the end.

    limit: seconds that a process waits for another one (--timeout-minutes).
    """
    try:
        file = open(paths[rank], "ab")
    except OSError:  # a node without the folder of the run
        file = open(os.dup(STDERR), "ab")
    _Timer.limit, _Timer.file, _Timer.set_at, _Timer.ends = limit, file.fileno(), -math.inf, math.inf
    _Timer.names = " to ".join([paths[0], *map(os.path.basename, paths[1:][-1:])])
    _register(_Timer.file)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        _Timer.limit = None
        _register(STDERR)
        file.close()
        with contextlib.suppress(OSError):
            if os.path.getsize(paths[rank]) == 0:
                os.remove(paths[rank])


@contextlib.contextmanager
def waiting() -> Generator[None]:
    """Around a wait with the time limit."""
    set_timer()
    yield
    set_timer()  # from now on the others may wait for this process


def set_timer() -> None:
    """Stacks are written unless this is called again soon enough."""
    now = time.monotonic()
    if _Timer.limit is not None and now - _Timer.set_at >= EARLIER * _Timer.limit:
        seconds = min(SHARE * _Timer.limit, threading.TIMEOUT_MAX)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            faulthandler.dump_traceback_later(seconds, file=_Timer.file)
            _Timer.set_at, _Timer.ends = now, now + seconds


def stop_timer() -> None:
    """Before work that no time limit ends."""
    if _Timer.limit is not None:
        faulthandler.cancel_dump_traceback_later()
        _Timer.set_at, _Timer.ends = -math.inf, math.inf


def written() -> str:
    """Names the files, if the time limit has had the stacks written; else ""."""
    return f"the stacks of all threads: {_Timer.names}" if time.monotonic() >= _Timer.ends else ""
