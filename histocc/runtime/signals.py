"""Signals that ask a run to stop, seen at once and obeyed between two steps. SIGUSR2 writes stacks.

Python runs a signal's handler only when the main thread returns to the interpreter, and a thread that waits
in a collective does not. So the handler does nothing: the interpreter writes the signal's number into a pipe,
where a thread reads it. Before each step and each batch of a validation all ranks agree on whether one of
them was asked to stop (`World.stop_agreed`), and save together (`histocc.trainer.loop`).

`faulthandler` writes the stacks of all threads, in C, wherever the main thread hangs: at SIGUSR2, before the
time limit, and at a signal that kills the process, such as SIGSEGV. Each rank has a file for them in the
run's folder. Until that exists they go to stderr.
"""

import contextlib
import faulthandler
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace

# Windows has only the first two.
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)
SECOND_AFTER = 1.0  # seconds, within which a repeat may come from a launcher, a later one from a person
STACKS = "stacks-rank{}.txt"
STACKS_SHARE = 0.9  # share of the time limit after which stacks are written
EARLIER = 0.05  # share of it by which they may come early: setting the timer starts a thread (0.2 ms)


class Stopped(BaseException):
    """The exception that ends work when the run must stop. `except Exception` does not catch it."""


class StopRequest:
    """The request to stop this process, if there is one, and the signal that made it."""

    def __init__(self):
        self.signal: int | None = None
        self.acted = False  # whether the run was stopped, rather than ended by itself
        self._since = 0.0

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def reason(self) -> str:
        """The signal's name, or "" if this process was not asked."""
        return "" if self.signal is None else signal.Signals(self.signal).name

    @property
    def exit_code(self) -> int:
        """The exit code: 0, or 130 after Ctrl-C, as shells expect."""
        return 130 if self.signal == signal.SIGINT else 0

    def receive(self, number: int) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
        elif now - self._since >= SECOND_AFTER:
            os._exit(128 + number)  # renames replace files, so none is half-written


_current: list[StopRequest] = []  # the request of this process, or empty if nobody listens


def stop_request() -> StopRequest:
    """Return the request of `listening`, or outside of it a request that no signal makes."""
    return _current[0] if _current else StopRequest()


def stop_asked() -> bool:
    return bool(stop_request())


@contextlib.contextmanager
def listening() -> Generator[StopRequest]:
    """Handle signals in the main thread until the end, or inside another `listening` yield its request."""
    if _current:
        yield _current[0]
        return
    request = StopRequest()
    give_back = _take_signals(request)
    _current.append(request)
    try:
        yield request
    finally:
        give_back()
        _current.clear()


def start_listening() -> None:
    """Handle signals until the process ends. Scripts call it before importing torch, which takes seconds."""
    for number in (0, 1, 2):  # a shell may have closed it (`>&-`): the next file opened would take its place
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it takes the lowest free number
    _current.append(StopRequest())
    _take_signals(_current[0])


def _take_signals(request: StopRequest) -> Callable[[], None]:
    """Have signals make `request` if this is the main thread. Return a function that restores handlers."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    pipe = writer.detach()
    # nohup ignores SIGHUP, so that its command outlives the terminal. The handlers of a program that embeds
    # Python, such as R, are None here and could not be restored.
    before = {
        number: signal.signal(number, lambda number, frame: None)
        for number in SIGNALS
        if (kept := signal.getsignal(number)) is not None
        and (number.name != "SIGHUP" or kept != signal.SIG_IGN)
    }
    wakeup, owner = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False), os.getpid()

    def read() -> None:
        with reader:
            while numbers := reader.recv(64):
                for number in numbers:
                    if number in SIGNALS and os.getpid() == owner:
                        request.receive(number)

    def give_back() -> None:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        if hasattr(faulthandler, "unregister"):
            faulthandler.unregister(signal.SIGUSR2)
        socket.close(pipe)  # this ends the thread

    threading.Thread(target=read, name="stop signals", daemon=True).start()
    _write_stacks_to(2)
    return give_back


def leave_to_parent() -> None:
    """Leave signals to the parent of this forked process, which decides when this process ends."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in ("SIGINT", "SIGUSR1", "SIGHUP", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


# ---- stacks of a process that hangs


# The timer of this process, as `faulthandler` has only one. limit is in seconds, or None while no run has its
# folder. set_at is in time.monotonic().
_timer = SimpleNamespace(limit=None, file=2, names="", set_at=-math.inf)


def _write_stacks_to(file: int) -> None:
    """Let SIGUSR2 and fatal signals write stacks to `file`, a descriptor."""
    _timer.file = file
    faulthandler.enable(file)
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR2, file)


@contextlib.contextmanager
def stacks_in(paths: Sequence[str], rank: int, limit: float) -> Generator[None]:
    """Write stacks into `paths[rank]`, which is removed if empty. limit: seconds of a wait for others."""
    try:
        file = open(paths[rank], "ab")
    except OSError:  # this node lacks the folder of the run
        file = open(os.dup(2), "ab")
    _write_stacks_to(file.fileno())
    _timer.limit, _timer.names = limit, " to ".join([paths[0], *map(os.path.basename, paths[1:][-1:])])
    try:
        yield
    finally:
        stop_timer()
        _timer.limit = None
        _write_stacks_to(2)
        file.close()
        with contextlib.suppress(OSError):
            if os.path.getsize(paths[rank]) == 0:
                os.remove(paths[rank])


def set_timer() -> None:
    """Write stacks later, unless this is called again soon enough. All ranks call it before each step."""
    now = time.monotonic()
    if _timer.limit is not None and now - _timer.set_at >= EARLIER * _timer.limit:
        seconds = min(STACKS_SHARE * _timer.limit, threading.TIMEOUT_MAX)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            faulthandler.dump_traceback_later(seconds, file=_timer.file)
            _timer.set_at = now


def stop_timer() -> None:
    """Stop the timer before work that no time limit ends."""
    faulthandler.cancel_dump_traceback_later()
    _timer.set_at = -math.inf


def stacks_written() -> str:
    """Return a phrase that names the files written at the time limit, or "" if there are none."""
    return _timer.names and f"the stacks of all threads: {_timer.names}"
