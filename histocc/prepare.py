"""Show what a data set holds, without training:

    python -m histocc.prepare data.csv --formatter hisco --target-cols hisco_1 hisco_2 --language-col lang \\
        --save-path ./report
"""

import sys
from dataclasses import MISSING, dataclass

from histocc.data.arrays import PreparedData
from histocc.data.config import FEW_TEXTS, Split, Tables, columns_of, settings_from
from histocc.data.prepare import LISTS, UnusableData, prepare
from histocc.data.report import report_lines
from histocc.runtime import files, log
from histocc.runtime.config import Parser, flag
from histocc.runtime.errors import run_command


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Tables, Split):
    """The flags of prepare."""

    files: list[str] = flag(
        MISSING, "tables: CSV, .xlsx, .ods, .dta, .sav, Parquet", metavar="FILE", positional=True
    )
    save_path: str = flag(
        MISSING, f"folder for {', '.join(LISTS)} and the prepared data", "--save-dir", metavar="DIR"
    )
    overwrite: bool = flag(False, "replace such lists that were not written here")
    quiet: bool = flag(False, "no lines of progress")


def run(args: PrepareConfig) -> None:
    """Prepare and print the report. Raises UserError, and then leaves no folder that was not there before."""
    problems = [*args.problems(), *files.save_path_problems(args.save_path)]
    own = files.OwnFiles(args.save_path, args.overwrite)
    inputs = dict.fromkeys(args.files, "a file of the data")
    inputs |= {args.key: "the file of --key", args.all_codes_file: "the file of --all-codes-file"}
    problems += files.problems(map(own.path, LISTS), inputs, args.overwrite, own)
    decided, note = columns_of(args, args.files[0], problems)
    settings = settings_from(decided, args.files, [], problems, few_texts=FEW_TEXTS)
    if note:
        print(note)
    log.show_progress(not args.quiet)
    unusable = None
    try:
        report = PreparedData.open(prepare(settings, args.save_path, reports=own)).report
    except UnusableData as error:
        report, unusable = error.report, error
    print(*report_lines(report), f"Report: {own.path('data_report.json')}", sep="\n", flush=True)
    if unusable:
        raise unusable


def get_args_parser() -> Parser:
    return Parser(PrepareConfig, "python -m histocc.prepare", "Shows what a table holds, without training.")


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(get_args_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
