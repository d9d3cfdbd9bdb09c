"""How far a stage of a command has come: a bar on a terminal where tqdm is installed, else a line every few
seconds, both on stderr.

Nothing is shown until `show` asks for it, which commands do for rank 0 unless --quiet is given, so that calls
from Python are quiet.
"""

import importlib.util
import os
import sys
import time
from typing import Any

from histocc.runtime.console import duration

EVERY_SECONDS = 10.0
_shown = False


def show(shown: bool) -> None:
    """Whether stages are shown in this process from now on."""
    global _shown
    _shown = shown


def _columns() -> int:
    """Of the terminal, 0 where it does not say."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0


class Stage:
    """A part of the work, in a with statement.

    Args:
        what: its name.
        total: how many units there are; None: nobody knows.
        unit: its plural, "rows".
        first: units that were done before.
        lines: whether it is worth lines where there is no bar.
    """

    def __init__(self, what: str, total: float | None, unit: str, first: float = 0, *, lines: bool = True):
        self.what, self.total, self.unit, self.first, self.lines = what, total, unit, first, lines
        self.done, self.started = first, time.monotonic()
        self.said = self.started
        self.bar: Any = None
        if _shown and sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
            from tqdm import tqdm

            # tqdm shows nothing on a terminal without a size
            size: dict[str, Any] = {"dynamic_ncols": True} if _columns() else {"ncols": 80, "nrows": 24}
            self.bar = tqdm(desc=what, total=total, initial=first, unit=f" {unit}", leave=False, **size)

    def is_due(self) -> bool:
        """Whether `at` would show something now."""
        return self.bar is not None or _shown and self.lines and time.monotonic() - self.said >= EVERY_SECONDS

    def at(self, done: float) -> None:
        """So many units are done."""
        done = done if self.total is None else min(done, self.total)
        if self.bar is not None:
            self.bar.update(done - self.done)
        self.done = done
        if self.bar is None and self.is_due():
            self.said = time.monotonic()
            print(self.line(self.said - self.started), file=sys.stderr, flush=True)

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
