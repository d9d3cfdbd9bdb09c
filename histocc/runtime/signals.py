"""Signals that ask a run to stop: seen at once, acted on between two steps. And SIGUSR2, which writes stacks
and stops nothing.

Python runs a signal's handler only when the main thread comes back to it, and a thread that waits in a
collective does not. So the handler does nothing: the interpreter writes the signal's number into a pipe, and
a thread reads it there.

What follows stands in `histocc.trainer.loop`: before each step and each batch of a validation all ranks ask
each other whether one was asked (`World.stop_agreed`); `raise_if_stopped` raises Stopped on all of them, and
`train` saves last.bin.
"""

import contextlib
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Generator
from typing import Any

from histocc.runtime import stacks

# Windows has only the first two.
NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
SECOND_AFTER = 1.0  # seconds: a launcher may send the same signal twice, a person who repeats it means it


class Stopped(BaseException):
    """Raised where work is given up because the run is to stop. Not an error: nothing that catches errors
    catches it.
    """


class StopRequest:
    """Whether this process was asked to stop, and by what."""

    def __init__(self):
        self.signal: int | None = None
        self.acted = False  # whether the run was stopped, rather than ended by itself
        self.deadline: float | None = None  # time.monotonic() of --stop-after
        self._started, self._since = time.monotonic(), 0.0

    def limit(self, minutes: float | None) -> None:
        """Asks to stop by itself so long after this request was made."""
        self.deadline = None if minutes is None else self._started + 60 * minutes

    def __bool__(self) -> bool:
        return self.signal is not None or (self.deadline is not None and time.monotonic() >= self.deadline)

    @property
    def reason(self) -> str:
        """The signal's name or the flag; "" where this process was not asked."""
        return signal.Signals(self.signal).name if self.signal is not None else "--stop-after" if self else ""

    @property
    def exit_code(self) -> int:
        """0, or 130 after Ctrl-C, as shells expect."""
        return 130 if self.signal == signal.SIGINT else 0

    def take(self, number: int) -> None:
        """A signal has come."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
        elif now - self._since >= SECOND_AFTER:
            os._exit(128 + number)  # files are replaced by renames: none is half-written


_current: list[StopRequest] = []  # of this process; empty where nobody listens


def stop_request() -> StopRequest:
    """That of `listening`; outside of it one that nobody makes."""
    return _current[0] if _current else StopRequest()


def stop_asked() -> bool:
    """Whether this process was asked to stop."""
    return bool(stop_request())


@contextlib.contextmanager
def listening() -> Generator[StopRequest]:
    """Takes the signals, where this is the main thread, and gives them back at the end. Inside of another
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
    before = {number: signal.signal(number, _nothing) for number in SIGNALS if not _is_left_alone(number)}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    arguments = (reader, request, os.getpid())
    threading.Thread(target=_read, args=arguments, name="stop signals", daemon=True).start()
    try:
        with stacks.at_sigusr2():
            yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()


def _read(reader: socket.socket, request: StopRequest, owner: int) -> None:
    with reader:
        while numbers := reader.recv(64):
            for number in numbers:
                if number in SIGNALS and os.getpid() == owner:
                    request.take(number)


def _is_left_alone(number: int) -> bool:
    """nohup has SIGHUP ignored: what it starts outlives its terminal."""
    return signal.Signals(number).name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN


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


def _nothing(number: int, frame: object) -> None:
    pass


def leave_to_parent(*_: object) -> None:
    """In a forked helper process: its parent decides when it ends, so Ctrl-C, SIGUSR1, SIGHUP and SIGUSR2 are
    not for it.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in ("SIGINT", "SIGUSR1", "SIGHUP", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
