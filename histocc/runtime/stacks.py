"""The stacks of all threads of this process, for a run that hangs: at SIGUSR2, and before its time limit ends
it.

`faulthandler` writes them, in C, whatever the main thread hangs in, and the run continues. Those of a run are
appended to a file for each rank in its folder. Before a run has its folder, and in other commands, SIGUSR2
prints them.
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
# Of the time limit: so long no wait has begun or ended when stacks are written; and how much earlier they may
# be written, since setting the timer starts a thread (0.2 ms).
SHARE, EARLIER = 0.9, 0.05

_sigusr2_files: list[int] = []  # descriptors; the last one counts


class _Timer:
    """The timer of this process: `faulthandler` has one. Times are those of time.monotonic()."""

    limit: float | None = None  # seconds; None: no run has its folder
    file, names = STDERR, ""
    set_at, ends = -math.inf, math.inf
    waits = 0  # that this process is in, one inside the other


@contextlib.contextmanager
def at_sigusr2(file: int = STDERR) -> Generator[None]:
    """SIGUSR2 writes the stacks into this descriptor, and stops nothing."""
    _sigusr2_files.append(file)
    _register()
    try:
        yield
    finally:
        _sigusr2_files.pop()
        _register()


def _register() -> None:
    if not hasattr(faulthandler, "register"):  # Windows
        return
    if _sigusr2_files:
        faulthandler.register(signal.SIGUSR2, _sigusr2_files[-1], all_threads=True)
    else:
        faulthandler.unregister(signal.SIGUSR2)


@contextlib.contextmanager
def in_folder(paths: Sequence[str], rank: int, limit: float) -> Generator[None]:
    """Stacks go into the one of `paths` that is the rank's; an empty file is removed at the end.

    limit: seconds that a process waits for another one (--timeout-minutes).
    """
    try:
        file = os.open(paths[rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:  # a node without the folder of the run
        file = os.dup(STDERR)
    _Timer.limit, _Timer.file, _Timer.ends = limit, file, math.inf
    _Timer.names = " to ".join([paths[0], *map(os.path.basename, paths[1:][-1:])])
    try:
        with at_sigusr2(file):
            yield
    finally:
        stop_timer()
        _Timer.limit = None
        os.close(file)
        with contextlib.suppress(OSError):
            if os.path.getsize(paths[rank]) == 0:
                os.remove(paths[rank])


@contextlib.contextmanager
def waiting() -> Generator[None]:
    """Around each wait with a time limit. Of waits inside each other the outermost has the timer: its limit
    ends first.
    """
    _Timer.waits += 1
    set_timer()
    try:
        yield
    finally:
        _Timer.waits -= 1
        if not _Timer.waits and not _has_ended():
            set_timer()  # from now on the others may wait for this process


def set_timer() -> None:
    """Stacks are written unless this is called again soon enough."""
    now = time.monotonic()
    if _Timer.limit is None or _Timer.waits > 1 or now - _Timer.set_at < EARLIER * _Timer.limit:
        return
    seconds = min(SHARE * _Timer.limit, threading.TIMEOUT_MAX)
    with contextlib.suppress(RuntimeError):  # no thread can be started
        faulthandler.dump_traceback_later(seconds, file=_Timer.file)
        _Timer.set_at, _Timer.ends = now, now + seconds


def stop_timer() -> None:
    """Before work that no time limit ends."""
    if _Timer.limit is not None:
        faulthandler.cancel_dump_traceback_later()
        _Timer.set_at, _Timer.ends = -math.inf, _Timer.ends if _has_ended() else math.inf


def _has_ended() -> bool:
    return time.monotonic() >= _Timer.ends


def written() -> str:
    """Names the files, where the time limit has had the stacks written; else ""."""
    return f"the stacks of all threads: {_Timer.names}" if _has_ended() else ""
