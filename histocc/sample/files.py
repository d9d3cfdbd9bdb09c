"""Writes the sample as CSV files that are whole or not there at all, and splits it by a hash of the text."""

import csv
import hashlib
import os
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager

from histocc.sample.generate import Row

HEADER = ("occ1", "lang", "hisco_1", "hisco_2")
VAL_SHARE = 0.1                            # of the texts, in val.csv


def in_validation(text: str, share: float = VAL_SHARE) -> bool:
    """Which side of the split a text is on; capital letters make no difference."""
    digest = hashlib.blake2b(text.casefold().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def write(rows: Iterable[Row], output: str | None = None, split_dir: str | None = None) -> dict[str, int]:
    """Writes all rows to `output`, and to train.csv and val.csv in `split_dir`; missing folders are made.

    Returns the number of rows of each file. Raises OSError if one cannot be written."""
    counts: dict[str, int] = {}
    with ExitStack() as stack:
        def start(path: str):
            counts[path] = 0
            return path, stack.enter_context(_whole(path))

        everything = start(output) if output else None
        sides = [start(os.path.join(split_dir, name)) for name in ("train.csv", "val.csv")] if split_dir else []
        for row in rows:
            for path, writer in (*([everything] if everything else ()), *([sides[in_validation(row[0])]] if sides else ())):
                writer.writerow(row)
                counts[path] += 1
    return counts


@contextmanager
def _whole(path: str):
    """A CSV writer whose file gets its name only when everything is written and synced."""
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
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
