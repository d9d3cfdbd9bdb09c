"""Writes sample data as CSV:

python -m histocc.sample --rows 12000 --seed 1 --output sample.csv
python -m histocc.sample --rows 12000 --seed 1 --split-dir sample/        # train.csv and val.csv
"""

import sys
from dataclasses import dataclass

from histocc.runtime.config import Config, Count, CountOrZero, Parser, flag
from histocc.runtime.entrypoint import run_command
from histocc.runtime.errors import UserError
from histocc.sample.files import VAL_SHARE, write
from histocc.sample.generate import rows


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Config):
    """What sample takes."""

    rows: Count = flag(12000, "how many rows")
    seed: CountOrZero = flag(1, "another seed makes other rows")
    output: str | None = flag(None, "CSV file for all rows", metavar="FILE")
    split_dir: str | None = flag(
        None, f"folder for train.csv and val.csv; {VAL_SHARE:.0%}% of the texts are in val.csv", metavar="DIR"
    )
    overwrite: bool = flag(False, "replace files with other content")


DESCRIPTION = (
    "Writes made-up register rows with HISCO codes, columns occ1, lang, hisco_1, hisco_2, hisco_3. The same"
    " rows and seed give the same bytes everywhere."
)


def get_args_parser() -> Parser:
    return Parser(SampleConfig, "python -m histocc.sample", DESCRIPTION)


def main(arguments: list[str] | None = None) -> int:
    return run_command(lambda: run(get_args_parser().parse_args(arguments)))


def run(args: SampleConfig) -> None:
    if not args.output and not args.split_dir:
        raise UserError("say where to write: --output FILE, --split-dir DIR, or both")
    counts = write(rows(args.rows, args.seed), args.output, args.split_dir, args.overwrite)
    for path, number in counts.items():
        print(f"{path}: {number:,} rows")


if __name__ == "__main__":
    sys.exit(main())
