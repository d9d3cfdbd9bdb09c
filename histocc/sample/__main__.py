"""Write sample data as CSV, and split it by a hash of the text:

python -m histocc.sample --rows 12000 --seed 1 --output sample.csv
python -m histocc.sample --rows 12000 --seed 1 --split-dir sample/        # train.csv and val.csv
python -m histocc.sample --built-in --split-dir lists/     # what the built-in model is made of
"""

import hashlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from histocc.data.rows import csv_text
from histocc.runtime import files
from histocc.runtime.config import Config, Count, CountOrZero, Parser, flag
from histocc.runtime.errors import UserError, raise_if_any, run_command
from histocc.sample.generate import HEADER, rows

VAL_SHARE = 0.1  # share of the texts in val.csv


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Config):
    """The flags of sample."""

    rows: Count = flag(12000, "how many rows")
    seed: CountOrZero = flag(1, "another seed makes other rows")
    output: str | None = flag(None, "CSV file for all rows", metavar="FILE")
    split_dir: str | None = flag(None, "folder for train.csv and val.csv (a tenth)", metavar="DIR")
    built_in: bool = flag(
        False,
        "the rows of the built-in model: 24,000 and the lists of titles, whatever --rows and --seed say",
    )
    overwrite: bool = flag(False, "replace files with other content")


def in_validation(text: str) -> bool:
    """Return whether a text is for validation; capital letters make no difference."""
    digest = hashlib.blake2b(text.casefold().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < VAL_SHARE * 2**64


def write(
    rows: Iterable[tuple[str, ...]],
    output: str | None = None,
    split_dir: str | None = None,
    overwrite: bool = False,
    left_out: set[tuple[str, ...]] | None = None,
) -> dict[str, int]:
    """Write all rows to `output`, and to train.csv and val.csv in `split_dir`; return how many went into each
    file. left_out: texts with their languages that are for validation, if not a tenth by their hash. A file
    with other content is replaced only with `overwrite`. Raises UserError.
    """
    names = [os.path.join(split_dir, name) for name in ("train.csv", "val.csv")] if split_dir else []
    if output and any(files.is_same(output, path) for path in names):
        raise UserError(f"--output {output} is also a file of --split-dir")
    sides: dict[str, bool | None] = dict(zip(names, (False, True)))
    sides |= {output: None} if output else {}
    raise_if_any(files.problems(sides, {}, overwrite=True))
    sided = [(in_validation(row[0]) if left_out is None else row[:2] in left_out, row) for row in rows]
    counts = {}
    for path, side in sides.items():
        folder = os.path.dirname(os.path.realpath(path))
        raise_if_any(files.save_path_problems(folder))
        os.makedirs(folder, exist_ok=True)
        files.remove_leftovers(path)
        of_side = [row for is_val, row in sided if side in (None, is_val)]
        with files.atomic_write(os.path.realpath(path), overwrite) as file:
            file.write(csv_text([HEADER, *of_side]))
        counts[path] = len(of_side)
    return counts


def run(args: SampleConfig) -> None:
    if not args.output and not args.split_dir:
        raise UserError("no output is named: give --output FILE, --split-dir DIR, or both")
    made: Iterable[tuple[str, ...]] = rows(args.rows, args.seed)
    left_out = None
    if args.built_in:
        from histocc.sample.built_in import tables  # loads torch, which takes seconds

        train, val = tables().values()
        made, left_out = [*train, *val], {row[:2] for row in val}
    try:
        counts = write(made, args.output, args.split_dir, args.overwrite, left_out)
    except FileExistsError as error:
        raise UserError(f"{error.filename} exists with other content; --overwrite replaces it") from None
    for path, number in counts.items():
        print(f"{path}: {number:,} rows")


def get_args_parser() -> Parser:
    what = f"Write made-up register rows with HISCO codes, columns {', '.join(HEADER)}."
    what += " The same rows and seed give the same bytes everywhere."
    return Parser(SampleConfig, "python -m histocc.sample", what)


def main(arguments: list[str] | None = None) -> int:
    return run_command(lambda: run(get_args_parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
