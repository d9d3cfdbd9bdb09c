"""Writes the sample as CSV files that are whole or not there at all, and splits it by a hash of the text."""

import contextlib
import csv
import hashlib
import os
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import islice

from histocc.runtime import outputs
from histocc.sample.generate import Row

HEADER = ("occ1", "lang", "hisco_1", "hisco_2", "hisco_3")
VAL_SHARE = 0.1  # of the texts, in val.csv
CHUNK = 512  # rows that are written at once
REMEMBERED = 1 << 16  # texts whose side of the split is not computed again


def in_validation(text: str, share: float = VAL_SHARE) -> bool:
    """Which side of the split a text is on; capital letters make no difference."""
    digest = hashlib.blake2b(text.casefold().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def write(
    rows: Iterable[Row], output: str | None = None, split_dir: str | None = None, overwrite: bool = False
) -> dict[str, int]:
    """Writes all rows to `output`, and to train.csv and val.csv in `split_dir`; missing folders are made. A
    file that is there with the same content stays, with another one it is replaced only with `overwrite`.

    Returns the number of rows of each file. Raises OSError if one cannot be written.
    """
    counts: dict[str, int] = {}
    with ExitStack() as stack:

        def start(path: str):
            counts[path] = 0
            writer = stack.enter_context(_whole(path, overwrite))

            def put(some: list[Row]) -> None:
                writer.writerows(some)
                counts[path] += len(some)

            return put

        everything = start(output) if output else None
        sides = (
            [start(os.path.join(split_dir, name)) for name in ("train.csv", "val.csv")] if split_dir else []
        )
        # half of the rows are texts that many rows have
        is_val = lru_cache(maxsize=REMEMBERED)(in_validation)
        remaining = iter(rows)
        while chunk := list(islice(remaining, CHUNK)):
            if everything:
                everything(chunk)
            if sides:
                of_sides: tuple[list[Row], list[Row]] = ([], [])
                for row in chunk:
                    of_sides[is_val(row[0])].append(row)
                for put, some in zip(sides, of_sides):
                    put(some)
    return counts


@contextmanager
def _whole(path: str, overwrite: bool):
    """A CSV writer whose file gets its name only when everything is written and synced. Raises OSError where
    another one has it.
    """
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{path} is not a regular file")
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=os.path.basename(path) + ".", suffix=".tmp", dir=folder)
    except FileExistsError:
        raise OSError(f"{folder} is not a folder") from None
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}") from error
    try:
        with open(handle, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(HEADER)
            yield writer
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        if os.path.lexists(path) and not overwrite:
            if not outputs.same_content(temporary, path):
                raise OSError(
                    f"{path} exists, with other content; --overwrite replaces it, or choose another name"
                )
            return
        placed = outputs.put(temporary, path, lambda _: overwrite)
        if placed != path:
            raise OSError(f"{path} was made by somebody else meanwhile; the sample is {placed}")
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
