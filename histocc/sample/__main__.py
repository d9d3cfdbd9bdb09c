"""Write sample data as CSV, and split it by a hash of the text:

histocc sample --rows 12000 --seed 1 --output sample.csv
histocc sample --rows 12000 --seed 1 --split-dir sample/        # train.csv and val.csv
histocc sample --built-in --split-dir lists/     # data of the built-in model
histocc sample --demo demo                                 # every file that the pages name
"""

import hashlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from histocc.data.written import missing_package, table_writer
from histocc.runtime import files
from histocc.runtime.config import Config, Count, CountOrZero, Parser, flag
from histocc.runtime.errors import UserError, raise_if_any, run_command
from histocc.runtime.log import counted
from histocc.sample import demo
from histocc.sample.generate import HEADER, rows

VAL_SHARE = 0.1  # share of the texts in val.csv


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Config):
    """The flags of sample."""

    rows: Count = flag(12000, "number of rows")
    seed: CountOrZero = flag(1, "another seed makes other rows")
    output: str | None = flag(None, "table for all rows", metavar="FILE.csv")
    split_dir: str | None = flag(
        None, "folder for train.csv and val.csv (a tenth of the texts)", metavar="FOLDER"
    )
    demo: str | None = flag(
        None, "folder for the files that the pages name, without other flags", metavar="FOLDER"
    )
    built_in: bool = flag(
        False,
        "write the rows that the built-in model learns from (24,000 and the lists of titles);"
        " --rows and --seed have no effect",
    )
    overwrite: bool = flag(False, "replace files with other content")


def in_validation(text: str) -> bool:
    """Return whether a text is for validation, ignoring case."""
    digest = hashlib.blake2b(text.casefold().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < VAL_SHARE * 2**64


def write_rows(
    rows: Iterable[tuple[str, ...]],
    output: str | None = None,
    split_dir: str | None = None,
    overwrite: bool = False,
    left_out: set[tuple[str, ...]] | None = None,
) -> dict[str, int]:
    """Write all rows to `output`, and to train.csv and val.csv in `split_dir`. Return the number of rows in
    each file. left_out: texts with their languages for validation, instead of a tenth by hash. A file with
    other content is replaced only with `overwrite`. Raises UserError.
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
        of_side = [row for is_val, row in sided if side in (None, is_val)]
        write_table(path, [HEADER, *of_side], overwrite)
        counts[path] = len(of_side)
    return counts


def write_table(path: str, lines: list[tuple[str, ...]], overwrite: bool) -> None:
    """Write a table with a first line of column names, and create its folder."""
    folder = os.path.dirname(os.path.realpath(path))
    raise_if_any(files.save_path_problems(folder))
    os.makedirs(folder, exist_ok=True)
    files.remove_leftovers(path)
    header, numbers = list(lines[0]), {"id", "year"}
    with (
        files.atomic_write(os.path.realpath(path), overwrite) as file,
        table_writer(file, path, header, numbers) as write_rows,
    ):
        write_rows(lines[1:])


def write_demo(folder: str, overwrite: bool) -> dict[str, int]:
    """Write the files that the pages name and return the rows of each. A workbook needs xlsxwriter."""
    tables = {os.path.join(folder, *name.split("/")): lines for name, lines in demo.demo_tables().items()}
    for path in [path for path in tables if missing_package(path)]:
        print(f"{path} was not written: it needs xlsxwriter (pip install 'histocc[excel]')")
        del tables[path]
    for path, lines in tables.items():
        write_table(path, lines, overwrite)
    return {path: len(lines) - 1 for path, lines in tables.items()}


def run(args: SampleConfig) -> None:
    if args.demo and (args.output or args.split_dir or args.built_in):
        raise UserError("--demo DIR writes its own files: leave out --output, --split-dir and --built-in")
    if not args.output and not args.split_dir and not args.demo:
        raise UserError("no output is named: add --output FILE, --split-dir DIR, both, or --demo DIR")
    made: Iterable[tuple[str, ...]] = rows(args.rows, args.seed)
    left_out = None
    if args.built_in:
        from histocc.sample.built_in import tables  # loads torch, which takes seconds

        train, val = tables().values()
        made, left_out = [*train, *val], {row[:2] for row in val}
    try:
        if args.demo:
            counts = write_demo(args.demo, args.overwrite)
        else:
            counts = write_rows(made, args.output, args.split_dir, args.overwrite, left_out)
    except FileExistsError as error:
        raise UserError(f"{error.filename} exists with other content; --overwrite replaces it") from None
    for path, number in counts.items():
        print(f"{path}: {counted(number, 'row')}")


def get_args_parser() -> Parser:
    what = f"Write made-up rows of a register with HISCO codes (columns {', '.join(HEADER)}). The same --rows"
    what += " and --seed give the same bytes everywhere."
    examples = "--rows 2000 --output data.csv", "--rows 2000 --split-dir ./sample"
    return Parser(SampleConfig, "python -m histocc.sample", what, *examples)


def main(arguments: list[str] | None = None) -> int:
    return run_command(lambda: run(get_args_parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
