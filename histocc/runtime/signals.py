"""Signals that ask a run to stop: seen at once, acted on between two steps. And SIGUSR2, which writes stacks
and stops nothing.

Python runs a signal's handler only when the main thread comes back to it, and a thread that waits in a
collective does not. So the handler does nothing: the interpreter writes the signal's number into a pipe, and
a thread reads it there. Before each step and each batch of a validation all ranks then ask each other whether
one was asked (`World.stop_agreed`), and save together (`histocc.trainer.loop`).

The stacks of all threads of a process that hangs are written by `faulthandler`, in C, whatever the main
thread hangs in: at SIGUSR2, and before the time limit ends it. Those of a run are appended to a file for each
rank in its folder; before it has one, and in other commands, they go to stderr.
"""

import contextlib
import faulthandler
import gc
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Generator, Sequence
from typing import Any

# Windows has only the first two.
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)
SECOND_AFTER = 1.0  # seconds: a launcher may send the same signal twice, a person who repeats it means it
STACKS = "stacks-rank{}.txt"
SHARE = 0.9  # of the time limit: so long no wait has begun or ended when stacks are written
EARLIER = 0.05  # of it: so much earlier they may be written, since setting the timer starts a thread (0.2 ms)
STDERR = 2


class Stopped(BaseException):
    """Raised if work is given up because the run is to stop. Not an error: nothing that catches errors
    catches it.
    """


class StopRequest:
    """Whether this process was asked to stop, and by what."""

    def __init__(self):
        self.signal: int | None = None
        self.acted = False  # whether the run was stopped, rather than ended by itself
        self.deadline = math.inf  # time.monotonic() of --stop-after
        self._started, self._since = time.monotonic(), 0.0

    def limit(self, minutes: float | None) -> None:
        """Asks to stop by itself so long after this request was made."""
        self.deadline = math.inf if minutes is None else self._started + 60 * minutes

    def __bool__(self) -> bool:
        return self.signal is not None or time.monotonic() >= self.deadline

    @property
    def reason(self) -> str:
        """The signal's name or the flag; "" if this process was not asked."""
        return signal.Signals(self.signal).name if self.signal is not None else "--stop-after" if self else ""

    @property
    def exit_code(self) -> int:
        """0, or 130 after Ctrl-C, as shells expect."""
        return 130 if self.signal == signal.SIGINT else 0

    def receive(self, number: int) -> None:
        """A signal has come."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
        elif now - self._since >= SECOND_AFTER:
            os._exit(128 + number)  # files are replaced by renames: none is half-written


_current: list[StopRequest] = []  # of this process; empty if nobody listens


def stop_request() -> StopRequest:
    """That of `listening`; outside of it one that nobody makes."""
    return _current[0] if _current else StopRequest()


def stop_asked() -> bool:
    """Whether this process was asked to stop."""
    return bool(stop_request())


@contextlib.contextmanager
def listening() -> Generator[StopRequest]:
    """Takes the signals, if this is the main thread, and gives them back at the end. Inside of another
    `listening`, that one's request.
    """
    if _current:
        yield _current[0]
        return
    request, current = StopRequest(), _current  # whose name is gone when the interpreter itself ends this
    current.append(request)
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        with _signals_to(request) if in_main_thread else contextlib.nullcontext():
            yield request
    finally:
        current.clear()


@contextlib.contextmanager
def _signals_to(request: StopRequest) -> Generator[None]:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # nohup has SIGHUP ignored: what it starts outlives its terminal
    before = {
        number: signal.signal(number, _nothing)
        for number in SIGNALS
        if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN
    }
    wakeup, owner = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False), os.getpid()

    def read() -> None:
        with reader:
            while numbers := reader.recv(64):
                for number in numbers:
                    if number in SIGNALS and os.getpid() == owner:
                        request.receive(number)

    threading.Thread(target=read, name="stop signals", daemon=True).start()
    try:
        with stacks_at_sigusr2():
            yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()  # ends the thread


def _nothing(number: int, frame: object) -> None:
    pass


def occupy_closed_descriptors() -> None:
    """If a shell has closed stdin, stdout or stderr (`>&-`), the next file that is opened would take its
    place, and get what is written to the stream by number.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


_for_good: list[Any] = []  # keeps `start_listening` from being undone


def start_listening() -> None:
    """Takes signals from now on, until the process ends: for scripts, before they import torch, which takes
    seconds. Puts off garbage collection until `entrypoint.start`: it is a sixth of the time of the imports.
    """
    gc.disable()
    occupy_closed_descriptors()
    _for_good.append(listening())
    _for_good[0].__enter__()


def leave_to_parent(*_: object) -> None:
    """In a forked helper process: its parent decides when it ends, so Ctrl-C, SIGUSR1, SIGHUP and SIGUSR2 are
    not for it.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in ("SIGINT", "SIGUSR1", "SIGHUP", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


# ---- stacks of a process that hangs


class _Timer:
    """Of this process: `faulthandler` has one. Times are those of time.monotonic()."""

    limit: float | None = None  # seconds; None: no run has its folder
    file, names = STDERR, ""
    set_at, ends = -math.inf, math.inf


def _register(file: int) -> None:
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR2, file)


@contextlib.contextmanager
def stacks_at_sigusr2() -> Generator[None]:
    """SIGUSR2 writes the stacks, and stops nothing."""
    _register(STDERR)
    try:
        yield
    finally:
        if hasattr(faulthandler, "unregister"):
            faulthandler.unregister(signal.SIGUSR2)


@contextlib.contextmanager
def stacks_in(paths: Sequence[str], rank: int, limit: float) -> Generator[None]:
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


def stacks_written() -> str:
    """Names the files, if the time limit has had the stacks written; else ""."""
    return f"the stacks of all threads: {_Timer.names}" if time.monotonic() >= _Timer.ends else ""
