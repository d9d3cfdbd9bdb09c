"""Writes sample data as CSV:

python -m histocc.sample --rows 12000 --seed 1 --output sample.csv
python -m histocc.sample --rows 12000 --seed 1 --split-dir sample/        # train.csv and val.csv
"""

import argparse
import sys

from histocc.runtime.arguments import Parser, count, count_or_zero, make_parser
from histocc.runtime.entrypoint import run_command
from histocc.runtime.errors import UserError
from histocc.sample.files import VAL_SHARE, write
from histocc.sample.generate import rows


def get_args_parser() -> Parser:
    parser = make_parser(
        "python -m histocc.sample",
        "Writes made-up register rows with HISCO codes, columns occ1, lang, hisco_1, hisco_2, hisco_3. The"
        " same rows and seed give the same bytes everywhere.",
    )
    split = f"folder for train.csv and val.csv; {VAL_SHARE:.0%}% of the texts are in val.csv"
    parser.add_argument("--rows", type=count, default=12000, help="how many rows")
    parser.add_argument("--seed", type=count_or_zero, default=1, help="another seed makes other rows")
    parser.add_argument("--output", metavar="FILE", help="CSV file for all rows")
    parser.add_argument("--split-dir", metavar="DIR", help=split)
    parser.add_argument("--overwrite", action="store_true", help="replace files with other content")
    return parser


def main(arguments: list[str] | None = None) -> int:
    return run_command(lambda: run(get_args_parser().parse_args(arguments)))


def run(args: argparse.Namespace) -> None:
    if not args.output and not args.split_dir:
        raise UserError("say where to write: --output FILE, --split-dir DIR, or both")
    counts = write(rows(args.rows, args.seed), args.output, args.split_dir, args.overwrite)
    for path, number in counts.items():
        print(f"{path}: {number:,} rows")


if __name__ == "__main__":
    sys.exit(main())
