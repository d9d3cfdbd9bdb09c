"""Printing that never raises, and the progress of a stage of the work.

A stream that can no longer be written is dropped, and the other stream reports this once. Such a stream is a
pipe without reader, a file on a full disk or a closed terminal.
"""

import atexit
import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Generator
from typing import Any

PROGRESS_SECONDS = 10.0

_progress_shown = False
_with_bar: list["Stage"] = []  # the stage whose bar is on the terminal


class _Stream:
    """The stream that replaces sys.stdout or sys.stderr. of_bar: whether the bar is drawn on it."""

    def __init__(self, name: str, stream: Any, of_bar: bool = False):
        self.name, self.stream, self.lost = name, stream or open(os.devnull, "w"), stream is None
        self.of_bar = of_bar

    def write(self, text: str) -> int:
        for stage in () if self.of_bar else _with_bar:  # the bar comes back below the text
            stage.bar.clear()
        if text.startswith("WARNING") and not self.lost:
            text = highlighted(text, "33", self.stream)
        self._try(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, work: Any, *arguments: str) -> None:
        if self.lost:
            return
        try:
            work(*arguments)
        except BlockingIOError:  # the terminal is slow for the moment
            pass
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self.lost = True
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                if self.stream.fileno() in (1, 2):  # its buffer now has a place to go
                    os.dup2(nowhere.fileno(), self.stream.fileno())
            why = getattr(error, "strerror", None) or error
            for other in (sys.stdout, sys.stderr):
                if isinstance(other, _Stream):  # itself also lost by now, it prints nothing
                    other.write(f"Note: standard {self.name} cannot be written any more ({why})\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def safe_output() -> Generator[None]:
    """Keep printing inside from raising. Letters that the terminal lacks become ?."""
    if isinstance(sys.stdout, _Stream):
        yield
        return
    before = sys.stdout, sys.stderr
    for stream in before:
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout, sys.stderr = streams = _Stream("output", sys.stdout), _Stream("error", sys.stderr)
    try:
        yield
    finally:
        for stream in streams:
            stream.flush()
        sys.stdout, sys.stderr = before


def output_is_lost() -> bool:
    """Return whether standard output has lost its reader."""
    return isinstance(sys.stdout, _Stream) and sys.stdout.lost


def highlighted(text: str, style: str = "1", stream: Any = None) -> str:
    """Return text in bold, or another style, if the stream (default: standard output) is a terminal and
    NO_COLOR is not set.
    """
    stream = stream or sys.stdout  # None: nothing is printed
    is_shown = stream is not None and stream.isatty() and not os.environ.get("NO_COLOR")
    return f"\x1b[{style}m{text}\x1b[0m" if is_shown else text


def counted(number: float, noun: str) -> str:
    """Return a number with its noun: "1 row", "2,000 rows"."""
    return f"{number:,.0f} {noun}{'s' * (number != 1)}"


def at_step(step: int | None) -> str:
    """Return ", step 2,000" for a model that was trained in steps, and "" for one in closed form."""
    return f", step {step:,}" if step else ""


def duration(seconds: float) -> str:
    """Return seconds as people write them: 42s, 3m10s, 2h05m, 3d04h."""
    seconds = int(seconds)
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // part:02d}{below}"
    return f"{seconds}s"


def show_progress(shown: bool) -> None:
    """Set whether this process shows stages. Commands show them on rank 0, unless --quiet is given."""
    global _progress_shown
    _progress_shown = shown


@atexit.register
def _end_bar() -> None:
    while _with_bar:
        _with_bar.pop().bar.close()


class Stage:
    """A part of the work. It shows a bar if stderr is a terminal and tqdm is installed, else a line every few
    seconds. The bar ends with the stage, and when the next one begins.

    Args:
        total: number of units, or None if unknown.
        unit: name of the units in the plural, "rows".
        first: units done earlier.
    """

    def __init__(self, what: str, total: float | None, unit: str, first: float = 0):
        self.what, self.total, self.unit, self.first = what, total, unit, first
        self.done = first
        self.started = self.shown_at = time.monotonic()
        self._show_bar()

    def _show_bar(self) -> bool:
        """Show the bar instead of another stage's. Return whether it can be shown."""
        if not (_progress_shown and sys.stderr.isatty() and importlib.util.find_spec("tqdm")):
            return False
        from tqdm import tqdm

        _end_bar()
        tqdm.monitor_interval = 0  # no thread may run: processes are forked from this one
        terminal = _Stream("error", getattr(sys.stderr, "stream", sys.stderr), of_bar=True)
        options: dict[str, Any] = {"unit": f" {self.unit}", "miniters": 0, "leave": False}
        self.bar = tqdm(desc=self.what, total=self.total, initial=self.done, file=terminal, **options)
        _with_bar.append(self)
        return True

    def is_due(self) -> bool:
        """Return whether `at` would now show something."""
        is_time = self in _with_bar or time.monotonic() - self.shown_at >= PROGRESS_SECONDS
        return _progress_shown and is_time

    def at(self, done: float) -> None:
        """Record the number of units done."""
        self.done = done if self.total is None else min(done, self.total)
        is_due = self.is_due()
        if is_due and (self in _with_bar or self._show_bar()):  # a stage in between has taken the bar
            self.bar.n = self.done
            self.bar.update(0)
            if self.done == self.total:
                _end_bar()
        elif is_due:
            self.shown_at = time.monotonic()
            print(self.line(self.shown_at - self.started), file=sys.stderr, flush=True)

    def add(self, units: float = 1) -> None:
        self.at(self.done + units)

    def line(self, seconds: float) -> str:
        """Return the line of progress after this many seconds."""
        rate = (self.done - self.first) / max(seconds, 1e-9)
        of = left = ""
        if self.total is not None:
            of = f" of {self.total:,.0f}"
            left = f", {duration((self.total - self.done) / rate)} left" if rate > 0 else ""
        per_second = f", {rate:,.{0 if rate >= 10 else 1}f}/s" if self.unit != "seconds" else ""
        return f"{self.what}: {self.done:,.0f}{of} {self.unit}{per_second}{left}"
