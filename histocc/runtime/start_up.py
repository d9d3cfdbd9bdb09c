"""What a process does before it trains, and how long each part of it takes: what a job that is restarted
after a failure pays each time.
"""

import contextlib
import gc
import os
import time
from collections.abc import Generator

LEAST_SECONDS = 0.05  # of a part that is named

_began: list[float] = []  # time.monotonic() of the start of this process, where it is a script


def begin() -> None:
    """For scripts, before they import torch: puts off garbage collection, which costs a fifth of the time of
    imports, until `imported`.
    """
    _began[:] = [time.monotonic() - _age()]
    gc.disable()


def imported() -> None:
    """All that a script imports at its start is there: it stays, so no later collection looks at it."""
    if _began and not gc.isenabled():
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def collecting_later() -> Generator[None]:
    """No garbage collection inside: for what makes many objects that stay, as imports do."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _age() -> float:
    """Seconds since this process was started, so far as the system says it."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):  # another system
        return 0.0


class StartUp:
    """The seconds of each part of a start, in order: `done(part)` after it. The first part begins with the
    process, where that is a script.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = _began[0] if _began else time.monotonic()

    def done(self, part: str) -> None:
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    def __str__(self) -> str:
        parts = [
            f"{part} {seconds:.1f} s" for part, seconds in self.seconds.items() if seconds >= LEAST_SECONDS
        ]
        return f"Ready after {sum(self.seconds.values()):.1f} s" + f": {', '.join(parts)}" * bool(parts)
