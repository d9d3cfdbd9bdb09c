"""Shows what a data set holds, without training:

    python -m histocc.prepare data.csv --formatter hisco --target-cols hisco_1 hisco_2 --language-col lang \\
        --save-path ./report
"""

import argparse
import contextlib
import os
import sys

from histocc.data import arguments as table_arguments
from histocc.data.arrays import PreparedData
from histocc.data.prepare import LISTS, UnusableData, prepare
from histocc.data.report import report_lines
from histocc.data.settings import columns_of, settings_from
from histocc.runtime import arguments, entrypoint, files, log


def get_args_parser() -> arguments.Parser:
    parser = arguments.make_parser(
        "python -m histocc.prepare", "Shows what a data set holds, without training."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="CSV or Parquet files")
    parser.add_argument(
        "--save-path",
        "--save-dir",
        required=True,
        metavar="DIR",
        help="folder for data_report.json, rejected_rows.csv, conflicts.csv, key.csv and the prepared data",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace such lists that were not written here"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars and lines of progress")
    table_arguments.add_table_arguments(parser, formatter="gpf", use_val_share=True)
    return parser


def run(args: argparse.Namespace) -> None:
    """Raises UserError, and then leaves no folder behind that was not there."""
    problems = table_arguments.table_problems(args) + [
        problem for problem in [files.save_path_problem(args.save_path)] if problem
    ]
    own = files.OwnFiles(args.save_path, args.overwrite)
    inputs = dict.fromkeys(args.files, "a file of the data")
    inputs |= {args.key: "the file of --key", args.all_codes_file: "the file of --all-codes-file"}
    problems += files.problems(map(own.path, LISTS), inputs, args.overwrite, own)
    columns = columns_of(args, args.files[0], problems)
    settings = settings_from(args, columns, args.files, [], problems)
    if columns.said:
        print(columns.said)
    log.show_progress(not args.quiet)
    made = None if os.path.isdir(args.save_path) else args.save_path
    try:
        os.makedirs(args.save_path, exist_ok=True)
        try:
            report = PreparedData.open(prepare(settings, args.save_path, reports=own)).report
        except UnusableData as error:
            print("\n".join(report_lines(error.report)))
            print(f"Report: {own.path('data_report.json')}", flush=True)
            raise
        print("\n".join(report_lines(report)))
        print(f"Report: {own.path('data_report.json')}")
    except BaseException:
        if made:
            with contextlib.suppress(OSError):  # something came into it
                os.rmdir(made)
        raise


def main(argv: list[str] | None = None) -> int:
    return entrypoint.run_command(lambda: run(get_args_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
