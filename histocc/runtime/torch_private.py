"""What torch has under private names, beside those of number formats in `precision`: each in one function.

A test looks each of them up, so that a version of torch without it is noticed by name.
"""

from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any


def loading_processes(batches: Iterator[Any]) -> Sequence[BaseProcess]:
    """The processes behind an iteration over a DataLoader. Who knows them can kill one that hangs, and say
    how one has ended; none are known where torch keeps them elsewhere, and its own limits remain.
    """
    return getattr(batches, "_workers", ())
