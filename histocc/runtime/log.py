"""Printing that never raises, and how far a stage of the work has come.

A stream that cannot be written any more (a pipe whose reader has ended, a full disk, a terminal that is gone)
is dropped, which is said once on the other stream.
"""

import contextlib
import os
import sys
import time
from collections.abc import Generator
from typing import Any

PROGRESS_SECONDS = 10.0

_streams: list["_Stream"] = []  # of this process, inside `opened`
_progress_shown = False


class _Stream:
    """In the place of sys.stdout or sys.stderr."""

    def __init__(self, name: str, stream: Any):
        self.name, self.stream, self.lost = name, stream or open(os.devnull, "w"), stream is None

    def write(self, text: str) -> int:
        self._try(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, work: Any, *arguments: str) -> None:
        if self.lost:
            return
        try:
            work(*arguments)
        except BlockingIOError:  # a terminal that is slow for the moment
            pass
        except (OSError, ValueError) as error:  # ValueError: closed
            self.lost = True
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                if self.stream.fileno() in (1, 2):  # what is in its buffer has a place to go
                    os.dup2(nowhere.fileno(), self.stream.fileno())
            for other in _streams:
                why = getattr(error, "strerror", None) or error
                other.write(f"Note: standard {self.name} cannot be written any more ({why})\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def opened() -> Generator[None]:
    """From here on printing never raises, and letters that the terminal does not have become ?."""
    if _streams:
        yield
        return
    before = sys.stdout, sys.stderr
    for stream in before:
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    _streams[:] = [_Stream("output", sys.stdout), _Stream("error", sys.stderr)]
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
    """A part of the work: on stderr a line every few seconds.

    Args:
        what: its name.
        total: how many units there are; None: nobody knows.
        unit: its plural, "rows".
        first: units that were done before.
    """

    def __init__(self, what: str, total: float | None, unit: str, first: float = 0):
        self.what, self.total, self.unit, self.first = what, total, unit, first
        self.done = first
        self.started = self.shown_at = time.monotonic()

    def is_due(self) -> bool:
        """Whether `at` would show something now."""
        return _progress_shown and time.monotonic() - self.shown_at >= PROGRESS_SECONDS

    def at(self, done: float) -> None:
        """So many units are done."""
        self.done = done if self.total is None else min(done, self.total)
        if self.is_due():
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
