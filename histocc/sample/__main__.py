"""Writes sample data as CSV:

python -m histocc.sample --rows 12000 --seed 1 --output sample.csv
python -m histocc.sample --rows 12000 --seed 1 --split-dir sample/        # train.csv and val.csv
"""

import argparse
import os
import sys

from histocc.runtime.entrypoint import run_command
from histocc.sample.files import VAL_SHARE, write
from histocc.sample.generate import rows


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"histocc.sample: {message}\n")


def whole_number(least: int):
    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = None
        if number is None or number < least:
            raise argparse.ArgumentTypeError(f"{value!r} is not a whole number of at least {least}")
        return number

    return parse


def get_args_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m histocc.sample",
        description=(
            "Writes made-up register rows with HISCO codes, columns "
            "occ1, lang, hisco_1, hisco_2, hisco_3. The same rows and seed give the same bytes everywhere."
        ),
    )
    parser.add_argument("--rows", type=whole_number(1), default=12000, help="how many rows (default 12000)")
    parser.add_argument(
        "--seed", type=whole_number(0), default=1, help="another seed makes other rows (default 1)"
    )
    parser.add_argument("--output", metavar="FILE", help="CSV file for all rows")
    parser.add_argument(
        "--split-dir",
        "--split_dir",
        metavar="DIR",
        help=f"folder for train.csv and val.csv; {VAL_SHARE:.0%}% of the texts are in val.csv",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that exist with other content"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    return run_command(lambda: run(arguments))


def run(arguments: list[str] | None) -> None:
    parser = get_args_parser()
    args = parser.parse_args(arguments)
    if not args.output and not args.split_dir:
        parser.error("say where to write: --output FILE, --split-dir DIR, or both")
    split = (
        [os.path.join(args.split_dir, name) for name in ("train.csv", "val.csv")] if args.split_dir else []
    )
    if args.output and os.path.realpath(args.output) in map(os.path.realpath, split):
        parser.error(f"--output {args.output} is also a file of --split-dir")
    try:
        counts = write(rows(args.rows, args.seed), args.output, args.split_dir, args.overwrite)
    except OSError as error:
        parser.error(f"cannot write: {error}")
    for path, count in counts.items():
        print(f"{path}: {count:,} rows")


if __name__ == "__main__":
    sys.exit(main())
