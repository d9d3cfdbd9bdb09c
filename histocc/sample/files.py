"""Writes the sample as CSV files that appear complete or not at all, and splits it by a hash of the text."""

import contextlib
import csv
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice

from histocc.runtime import files
from histocc.sample.generate import Row

HEADER = ("occ1", "lang", "hisco_1", "hisco_2", "hisco_3")
VAL_SHARE = 0.1  # of the texts, in val.csv
CHUNK = 512  # rows that are written at once


@lru_cache(maxsize=1 << 16)  # half of the rows repeat a text
def in_validation(text: str) -> bool:
    """Which side of the split a text is on; capital letters make no difference."""
    digest = hashlib.blake2b(text.casefold().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < VAL_SHARE * 2**64


def write(
    rows: Iterable[Row], output: str | None = None, split_dir: str | None = None, overwrite: bool = False
) -> dict[str, int]:
    """Writes all rows to `output`, and to train.csv and val.csv in `split_dir`; missing folders are made. A
    file that is there with the same content stays, with another one it is replaced only with `overwrite`.

    Returns the number of rows of each file. Raises OSError if one cannot be written.
    """
    sides = [os.path.join(split_dir, name) for name in ("train.csv", "val.csv")] if split_dir else []
    if output and any(files.is_same(output, path) for path in sides):
        raise OSError(f"--output {output} is also a file of --split-dir")
    counts = dict.fromkeys([output, *sides] if output else sides, 0)
    remaining = iter(rows)
    with contextlib.ExitStack() as stack:
        writers = {path: stack.enter_context(_writer(path, overwrite)) for path in counts}
        while chunk := list(islice(remaining, CHUNK)):
            parts = {output: chunk}
            for path, is_val in zip(sides, (False, True)):
                parts[path] = [row for row in chunk if in_validation(row[0]) == is_val]
            for path, writer in writers.items():
                writer.writerows(parts[path])
                counts[path] += len(parts[path])
    return counts


@contextlib.contextmanager
def _writer(path: str, overwrite: bool) -> Iterator:
    """A CSV writer, whose file gets its name when it is complete. Raises OSError if another one has it."""
    path = os.path.realpath(path)
    for problem in [
        *files.problems([path], {}, overwrite=True),
        files.save_path_problem(os.path.dirname(path)),
    ]:
        if problem:
            raise OSError(problem)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with files.atomic_write(path, overwrite) as file:
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(HEADER)
            yield writer
            text.detach()  # written, and `file` left open
    except FileExistsError:
        raise OSError(f"{path} exists, with other content; --overwrite replaces it") from None
