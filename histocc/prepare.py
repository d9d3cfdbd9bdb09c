"""Show what a data set holds, without training:

histocc prepare data.csv --output ./report
"""

import sys
from dataclasses import MISSING, dataclass

from histocc.data.arrays import PreparedData
from histocc.data.config import FEW_TEXTS, SplitFlags, TableFlags, columns_of, settings_from
from histocc.data.prepare import LISTS, UnusableData, prepare
from histocc.data.report import report_lines
from histocc.runtime import files, log
from histocc.runtime.config import Parser, flag
from histocc.runtime.errors import run_command


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(TableFlags, SplitFlags):
    """The flags of prepare."""

    usual = (
        *("files", "output", "overwrite", "target_cols", "formatter", "input_col", "language_col"),
        *("language", "weight_col", "code_separator", "drop_bad_labels", "sheet", "delimiter"),
    )
    files: list[str] = flag(
        MISSING,
        "your coded table, or several: CSV, .xlsx, .ods, .dta, .sav, Parquet",
        *("--dataset", "--data"),
        metavar="FILE.csv",
        positional=True,
    )
    output: str = flag(
        MISSING,
        f"folder for {', '.join(LISTS)}",
        *("--save-path", "--save-dir"),
        metavar="FOLDER",
    )
    overwrite: bool = flag(False, "replace files of these names that histocc did not write")
    quiet: bool = flag(False, "no progress bars")


def run(args: PrepareConfig) -> None:
    """Prepare and print the report. Raises UserError. New folders are then removed."""
    problems = [*args.problems(), *files.save_path_problems(args.output)]
    own = files.OwnFiles(args.output, args.overwrite)
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
        report = PreparedData.open(prepare(settings, args.output, reports=own)).report
    except UnusableData as error:
        report, unusable = error.report, error
    print(*report_lines(report), f"Report: {own.path('data_report.json')}", sep="\n", flush=True)
    if unusable:
        raise unusable


def get_args_parser() -> Parser:
    what = "Report what a coded table holds and what is wrong with it, without training."
    examples = "data.csv --output ./report", "data.xlsx --target-cols code --formatter auto --output ./report"
    return Parser(PrepareConfig, "python -m histocc.prepare", what, *examples)


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(get_args_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
