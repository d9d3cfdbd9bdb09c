"""Printing that never raises, and how far a stage of the work has come.

A stream that cannot be written any more (a pipe whose reader has ended, a full disk, a terminal that is gone)
is dropped, which is said once on the other stream.
"""

import contextlib
import importlib.util
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Generator
from typing import Any

from histocc.runtime.signals import occupy_closed_descriptors, stop_asked

PATIENCE_SECONDS = 60.0  # for a reader that does not read
PIECE = 1024  # characters; a pipe that is writable takes 4,096 bytes
PROGRESS_SECONDS = 10.0

_streams: list["_Stream"] = []  # of this process, inside `opened`
_progress_shown = False


class _Stream:
    """In the place of sys.stdout or sys.stderr."""

    def __init__(self, name: str, stream: Any):
        self.name, self.stream = name, stream
        self.line = threading.local()
        self.lost, self.number, self.poll = False, None, None
        with contextlib.suppress(OSError, ValueError, AttributeError):  # not a file, or closed
            self.number = stream.fileno()
            self.poll = select.poll()  # not on Windows
            self.poll.register(self.number, select.POLLOUT)

    def write(self, text: str) -> int:
        """Lines of several threads are not mixed: what has no end yet waits for it, or for `flush`."""
        self.line.text = getattr(self.line, "text", "") + text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        text, self.line.text = getattr(self.line, "text", ""), ""
        if self.lost:
            return
        try:
            for start in range(0, max(len(text), 1), PIECE):
                until = time.monotonic() + PATIENCE_SECONDS
                while self.poll is not None and not self.poll.poll(200):
                    if stop_asked() or time.monotonic() > until:
                        raise OSError("nobody reads it")
                self.stream.write(text[start : start + PIECE])
                self.stream.flush()
        except BlockingIOError:  # a terminal that is slow for the moment
            pass
        except (OSError, ValueError) as error:  # ValueError: closed
            self.lose(getattr(error, "strerror", None) or str(error))

    def lose(self, reason: str) -> None:
        self.lost = True
        if self.number in (1, 2):  # what lies in a buffer has a place to go when the interpreter ends
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.number)
        for other in _streams:
            if not other.lost:
                other.write(f"Note: standard {self.name} cannot be written any more ({reason})\n")

    def isatty(self) -> bool:
        return not self.lost and self.stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def opened() -> Generator[None]:
    """From here on printing never raises, and letters that the terminal does not have become ?."""
    if _streams:
        yield
        return
    occupy_closed_descriptors()
    before = sys.stdout, sys.stderr
    for stream in before:
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    _streams[:] = [_Stream("output", sys.stdout), _Stream("error", sys.stderr)]
    for stream in _streams:
        if stream.stream is None:
            stream.lose("it is closed")
    sys.stdout, sys.stderr = _streams
    try:
        yield
    finally:
        for stream in _streams:
            stream.flush()
        sys.stdout, sys.stderr = before
        _streams.clear()


def output_is_lost() -> bool:
    """Whether nobody reads standard output any more."""
    return bool(_streams) and _streams[0].lost


def duration(seconds: float) -> str:
    """Seconds as people write them: 42s, 3m10s, 2h05m, 3d04h."""
    seconds = int(seconds)
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // part:02d}{below}"
    return f"{seconds}s"


def show_progress(shown: bool) -> None:
    """Whether stages are shown in this process from now on: commands ask for it on rank 0 unless --quiet is
    given; calls from Python are quiet.
    """
    global _progress_shown
    _progress_shown = shown


class Stage:
    """A part of the work, in a with statement: on stderr a bar, if that is a terminal and tqdm is installed,
    else a line every few seconds.

    Args:
        what: its name.
        total: how many units there are; None: nobody knows.
        unit: its plural, "rows".
        first: units that were done before.
        lines: whether it is worth lines if there is no bar.
    """

    def __init__(self, what: str, total: float | None, unit: str, first: float = 0, *, lines: bool = True):
        self.what, self.total, self.unit, self.first, self.lines = what, total, unit, first, lines
        self.done, self.started = first, time.monotonic()
        self.shown_at = self.started
        self.bar: Any = None
        if _progress_shown and sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
            from tqdm import tqdm

            columns = shutil.get_terminal_size().columns  # 80 if the terminal does not say
            self.bar = tqdm(
                desc=what, total=total, initial=first, unit=f" {unit}", leave=False, ncols=columns, nrows=24
            )

    def is_due(self) -> bool:
        """Whether `at` would show something now."""
        waited = time.monotonic() - self.shown_at
        return self.bar is not None or _progress_shown and self.lines and waited >= PROGRESS_SECONDS

    def at(self, done: float) -> None:
        """So many units are done."""
        done = done if self.total is None else min(done, self.total)
        if self.bar is not None:
            self.bar.update(done - self.done)
        self.done = done
        if self.bar is None and self.is_due():
            self.shown_at = time.monotonic()
            print(self.line(self.shown_at - self.started), file=sys.stderr, flush=True)

    def add(self, units: float = 1) -> None:
        self.at(self.done + units)

    def line(self, seconds: float) -> str:
        """How far it is after so many seconds."""
        rate = (self.done - self.first) / max(seconds, 1e-9)
        of = left = ""
        if self.total is not None:
            of = f" of {self.total:,.0f}"
            left = f", {duration((self.total - self.done) / rate)} left" if rate > 0 else ""
        return f"{self.what}: {self.done:,.0f}{of} {self.unit}, {rate:,.{0 if rate >= 10 else 1}f}/s{left}"

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
