"""What a process says on stdout and stderr, as long as they take it: printing never raises.

A stream that cannot be written any more (a pipe whose reader has ended, a terminal that is gone, a full
disk) is dropped. That is said once on the other stream, and what would be said is written to the file of
the run, `console.log`, as soon as the run has named it.
"""

import contextlib
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from typing import Any

FILE = "console.log"
PATIENCE_SECONDS = 60.0  # for a reader that does not read
_LOOK_MILLISECONDS = 200
_PIECE = 1024  # characters; a pipe that is writable takes 4,096 bytes
_MOST_KEPT = 1 << 18  # characters that wait until the run has named its file
_NAMES = {"stdout": 1, "stderr": 2}


class _Stream:
    """In the place of sys.stdout or sys.stderr."""

    def __init__(self, console: "_Console", name: str, stream: Any):
        self.console, self.name, self.stream = console, name, stream
        self.lost = stream is None  # closed by who started the process
        self.unsent = ""  # since the last flush: it may be in a buffer that never empties
        self.begun = threading.local()

    def write(self, text: str) -> int:
        """Lines of several threads stay whole: what has no end yet waits for it, or for `flush`."""
        self.begun.text = getattr(self.begun, "text", "") + text
        if "\n" in text:
            self._pass_on()
        return len(text)

    def flush(self) -> None:
        self._pass_on()
        if not self.lost:
            self._try(self.stream.flush)
            self.unsent = ""

    def _pass_on(self) -> None:
        text, self.begun.text = getattr(self.begun, "text", ""), ""
        if self.lost:
            self.console.keep(text)
        elif text:
            self.unsent = (self.unsent + text)[-_MOST_KEPT:]
            self._try(lambda: self._write(text))
            if not self.lost:
                self._try(self.stream.flush)
                self.unsent = ""

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BlockingIOError:  # a terminal that is slow for the moment
            pass
        except (OSError, ValueError) as error:  # ValueError: closed
            self.lost = True
            self._discard_what_is_buffered()
            self.console.has_lost(self, getattr(error, "strerror", None) or str(error))

    def _discard_what_is_buffered(self) -> None:
        """What is written to the file descriptor itself, or lies in a buffer, has a place to go: the
        interpreter's end raises nothing."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            number = self.stream.fileno()
            if number == _NAMES[self.name]:
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), number)

    def _write(self, text: str) -> None:
        """In pieces that a pipe takes at once, as soon as it takes them: a reader that does not read must not
        keep the run waiting without end."""
        try:
            number = self.stream.fileno()
        except (OSError, ValueError, AttributeError):
            self.stream.write(text)
            return
        for start in range(0, len(text), _PIECE):
            self._wait_until_writable(number)
            self.stream.write(text[start : start + _PIECE])
            self.stream.flush()

    def _wait_until_writable(self, number: int) -> None:
        poll, until = select.poll(), time.monotonic() + PATIENCE_SECONDS
        poll.register(number, select.POLLOUT)
        while not poll.poll(_LOOK_MILLISECONDS):
            if time.monotonic() > until or self.console.hurries():
                raise OSError(
                    f"nobody has read it for {PATIENCE_SECONDS:g} s"
                    if time.monotonic() > until
                    else "nobody reads it"
                )

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str):
        if self.stream is None:
            raise AttributeError(name)
        return getattr(self.stream, name)

    def isatty(self) -> bool:
        return not self.lost and self.stream.isatty()


class _Console:
    def __init__(self):
        self.path: str | None = None
        self.kept = ""
        self.streams: list[_Stream] = []
        self._lock = threading.RLock()
        self.hurries: Callable[[], bool] = lambda: False

    def keep(self, text: str) -> None:
        with self._lock:
            if self.path is None:
                self.kept = (self.kept + text)[-_MOST_KEPT:]
                return
            with (
                contextlib.suppress(OSError, ValueError),
                open(self.path, "a", encoding="utf-8", errors="replace") as file,
            ):
                file.write(self.kept + text)
                self.kept = ""

    def has_lost(self, stream: _Stream, reason: str) -> None:
        where = f"; what it would say is written to {self.path}" if self.path else ""
        what = "output" if stream.name == "stdout" else "error"
        words = f"Note: standard {what} cannot be written any more ({reason}){where}\n"
        self.keep(words + stream.unsent)
        stream.unsent = ""
        for other in self.streams:
            if other is not stream and not other.lost:
                other.write(words)


_current: list[_Console] = []


@contextlib.contextmanager
def opened() -> Generator[None]:
    """From here on printing never raises, and letters that the terminal does not have become ?."""
    if _current:
        yield
        return
    occupy_closed_descriptors()
    console, before = _Console(), (sys.stdout, sys.stderr)
    for stream in before:
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            with contextlib.suppress(ValueError, OSError):
                reconfigure(errors="replace")
    console.streams = [_Stream(console, "stdout", sys.stdout), _Stream(console, "stderr", sys.stderr)]
    for stream in console.streams:
        if stream.lost:
            console.has_lost(stream, "it is closed")
    sys.stdout, sys.stderr = console.streams
    _current.append(console)
    try:
        yield
    except Exception:
        if console.streams[1].lost:  # where the interpreter would show it
            console.keep(traceback.format_exc())
        raise
    finally:
        for stream in console.streams:
            stream.flush()
        sys.stdout, sys.stderr = before
        _current.clear()


def write_into(path: str) -> None:
    """Names the file that takes what lost streams would say; it is made when it is needed."""
    for console in _current:
        lost = [stream for stream in console.streams if stream.lost]
        if lost and console.path != path:
            console.path = path
            console.keep("")
            for stream in console.streams:
                if not stream.lost:
                    stream.write(f"Note: what is not shown is written to {path}\n")
        console.path = path


def give_up_when(asked: Callable[[], bool]) -> None:
    """From when on nothing waits for a reader that does not read: the run is to stop."""
    for console in _current:
        console.hurries = asked


def put_back() -> None:
    """Undoes that a library has put streams of its own in the place of stdout and stderr."""
    for console in _current:
        sys.stdout, sys.stderr = console.streams


def output_is_lost() -> bool:
    """Whether nobody reads standard output any more."""
    return any(console.streams[0].lost for console in _current)


def occupy_closed_descriptors() -> None:
    """Where a shell has closed stdin, stdout or stderr (`>&-`), the next file that is opened would take its
    place, and get what is written to the stream by number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def duration(seconds: float) -> str:
    """Seconds as people write them: 42s, 3m10s, 2h05m, 3d04h."""
    seconds = int(seconds)
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // part:02d}{below}"
    return f"{seconds}s"
