"""Flags that say what files of rows hold, and what can be wrong with them."""

import argparse

from histocc.data.tables import DELIMITERS
from histocc.runtime.arguments import Parser, count, not_shares
from histocc.text import UNKNOWN_LANGUAGE
from histocc.text_rules import TEXT_RULES


def delimiter(text: str) -> str:
    """A character or the name of one, for argparse."""
    found = {**DELIMITERS, "\\t": "\t"}.get(text, text)
    if len(found) != 1 or found in '"\r\n':
        raise argparse.ArgumentTypeError(f"{text!r} is not one character, nor comma, semicolon, tab or pipe")
    return found


def add_table_arguments(parser: Parser, formatter: str, use_val_share: bool) -> None:
    """What files of rows hold, and how they are read: for the scripts and for `python -m histocc.prepare`.
    formatter: of codes in columns whose names tell no system.
    """
    group = parser.add_argument_group("data")
    group.add_argument("--input-col", default="occ1", help="column with the descriptions", resumable=True)
    group.add_argument(
        "--target-cols",
        nargs="+",
        default=None,
        metavar="COL",
        help=(
            "columns with the codes; default: the first of code1 … code5 (numbers, with --key), hisco_1 …"
            " hisco_5, OCC1950_1/2 that the file has; without --formatter and --key, hisco_1 … and OCC1950_1"
            " … bring their formatter, and a column lang the language"
        ),
    )
    group.add_argument(
        "--language",
        default=None,
        help=f"language of all descriptions, where no column has it (default: {UNKNOWN_LANGUAGE})",
    )
    group.add_argument(
        "--language-col",
        default=None,
        metavar="COL",
        help=(
            "column with the language of each description (default: see --target-cols; else all have that of"
            " --language)"
        ),
        resumable=True,
    )
    group.add_argument(
        "--delimiter",
        type=delimiter,
        default=None,
        metavar="CHAR",
        help=(
            "column delimiter of CSV files: a character, or comma, semicolon, tab, pipe (default: found"
            " in the first line)"
        ),
        resumable=True,
    )
    group.add_argument(
        "--formatter",
        choices=("gpf", "hisco", "occ1950"),
        default=None,
        help=(
            "system of the codes; gpf, general purpose: as many codes as target columns (default: that of the"
            f" columns, see --target-cols, else {formatter})"
        ),
    )
    group.add_argument("--block-size", type=count, default=5, help="gpf: tokens of a code")
    group.add_argument(
        "--use-within-block-sep", action="store_true", help="gpf: the tokens of a code are separated by ','"
    )
    group.add_argument(
        "--allow-codes-shorter-than-block-size", action="store_true", help="gpf: accept shorter codes"
    )
    group.add_argument(
        "--drop-bad-labels", action="store_true", help="leave out, and list, rows whose code does not fit"
    )
    group.add_argument(
        "--missing-code",
        default=None,
        metavar="CODE",
        help="code of rows whose first code is missing; without it they are left out, and listed",
    )
    group.add_argument(
        "--key",
        metavar="FILE",
        default=None,
        help=(
            "fixes the codes and their order: columns code and system_code (or hisco), or the word hisco for"
            " the 1,919 codes of the published models; without it the codes are those of --all-codes-file,"
            " else those of --initial-checkpoint, then those of the data, in sorted order"
        ),
        resumable=True,
    )
    group.add_argument(
        "--all-codes-file",
        metavar="FILE",
        default=None,
        help="fixes the set of codes: a CSV that lists them",
        resumable=True,
    )
    group.add_argument(
        "--all-codes-col",
        default=None,
        help="column of --all-codes-file (default: the first target column)",
        resumable=True,
    )
    group.add_argument(
        "--clean-text",
        choices=TEXT_RULES,
        default=None,
        help=(
            "what happens to texts before a model sees them; ascii-lower: lower case, transliterated to"
            " ASCII, as the published models have them (default: as in --initial-checkpoint, else as-is)"
        ),
        resumable=True,
    )
    if use_val_share:
        group.add_argument(
            "--share-val", type=float, default=0.1, help="share of texts set aside for validation, 0…1"
        )
    group.add_argument(
        "--max-len", type=count, default=128, help="most positions of an input; longer descriptions are cut"
    )


def table_problems(args: argparse.Namespace) -> list[str]:
    """All that is wrong with the arguments of `add_table_arguments`, a line each."""
    together = [
        (
            args.language not in (None, UNKNOWN_LANGUAGE) and args.language_col,
            "--language and --language-col are mutually exclusive",
        ),
        (args.key and args.all_codes_file, "--key and --all-codes-file are mutually exclusive"),
        (args.all_codes_col and not args.all_codes_file, "--all-codes-col needs --all-codes-file"),
        (
            len(set(args.target_cols or [])) < len(args.target_cols or []),
            "--target-cols: a column is named twice",
        ),
        (
            args.input_col in (args.target_cols or []),
            f"--input-col and --target-cols both name {args.input_col!r}",
        ),
        (args.max_len < 16, f"--max-len must be at least 16, not {args.max_len}"),
        (args.max_len > 2048, f"--max-len must be at most 2048, not {args.max_len}"),
        (args.block_size > 100, f"--block-size must be at most 100, not {args.block_size}"),
        (
            args.language_col in (args.input_col, *(args.target_cols or [])),
            f"--language-col {args.language_col} is also the column of the descriptions or of codes",
        ),
        (args.language_col is not None and not args.language_col.strip(), "--language-col is empty"),
        (
            len(args.language or "") > max(args.max_len, 16) // 2,
            f"--language {(args.language or '')[:30]}: is it a language?",
        ),
    ]
    return not_shares(args, ["share_val"]) + [text for wrong, text in together if wrong]
