"""The last collectives of this process: which, and since when it waits in one."""

import functools
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

KEPT = 20

P = ParamSpec("P")
R = TypeVar("R")


class Collective:
    """One collective, in a with statement. Times are those of time.monotonic(); `ended` is None as long as it
    waits, and where it has `failed` by an exception.

    name: what follows on "this rank waits": "in a barrier".
    """

    __slots__ = ("ended", "failed", "holder", "name", "number", "started")

    def __init__(self, holder: "Collectives", number: int, name: str):
        self.holder, self.number, self.name = holder, number, name
        self.started = holder.changed = time.monotonic()
        self.ended: float | None = None
        self.failed = False

    def __enter__(self) -> "Collective":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.failed = True
        else:
            self.ended = self.holder.changed = time.monotonic()


class Collectives:
    """The last collectives of this process, numbered from 1: the same number is the same collective on every
    rank. `of` is for one thread; any thread may read.

    changed: when one has begun or ended last.
    """

    def __init__(self):
        self.count = 0
        self.changed = time.monotonic()
        self._kept: list[Collective | None] = [None] * KEPT

    def of(self, name: str) -> Collective:
        """The next one, in a with statement; see `Collective`."""
        self.count += 1
        entry = self._kept[self.count % KEPT] = Collective(self, self.count, name)
        return entry

    def last(self) -> list[Collective]:
        """The last ones, the newest last."""
        kept = [entry for entry in self._kept[:] if entry is not None]
        return sorted(kept, key=lambda entry: entry.number)

    def current(self) -> Collective | None:
        """The one that this process waits in, or that the newest exception came from; of one inside another
        the inner one.
        """
        last = self.last()
        waiting = [entry for entry in last if entry.ended is None and (not entry.failed or entry is last[-1])]
        return waiting[-1] if waiting else None


class Holder(Protocol):
    """What has collectives: a `World`. backend: None where there is one process."""

    @property
    def backend(self) -> str | None: ...

    @property
    def collectives(self) -> Collectives: ...


H = TypeVar("H", bound=Holder)


def recorded(name: str) -> Callable[[Callable[Concatenate[H, P], R]], Callable[Concatenate[H, P], R]]:
    """Makes each call of a method one of `collectives`, where there are several processes."""

    def decorate(method: Callable[Concatenate[H, P], R]) -> Callable[Concatenate[H, P], R]:
        @functools.wraps(method)
        def call(self: H, *args: P.args, **kwargs: P.kwargs) -> R:
            if not self.backend:
                return method(self, *args, **kwargs)
            with self.collectives.of(name):
                return method(self, *args, **kwargs)

        return call

    return decorate
