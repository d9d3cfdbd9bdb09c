"""Curves of one run or several in one plot (extra `plots`):

    python -m histocc.plot ./output ./other --output curves.png

Losses, accuracies, learning rate and speed by step. A run draws its own `curves.png` after each validation,
where matplotlib is installed.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from histocc.runtime.arguments import make_parser
from histocc.runtime.entrypoint import run_command
from histocc.runtime.errors import UserError, in_words, raise_if_any
from histocc.runtime.files import OwnFiles, problems
from histocc.trainer.curves import CURVES, available, draw, figure_of
from histocc.trainer.run_log import LOG, numbers

NEEDED = "plots need matplotlib: pip install matplotlib"


def get_args_parser():
    parser = make_parser("python -m histocc.plot", "Curves of one run or several in one plot.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument(
        "--output",
        default=None,
        metavar="FILE.png",
        help=f"default: {CURVES} in the folder of the run, if it is one alone",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a file that exists")
    return parser


def logs_of(folders: Sequence[str]) -> list[str]:
    return [os.path.join(folder, LOG) for folder in folders]


def rows_of(folders: Sequence[str]) -> dict[str, list[dict]]:
    """Name of each run → rows of its log. Raises UserError."""
    missing = [path for path in logs_of(folders) if not os.path.isfile(path)]
    if missing:
        raise UserError(f"{', '.join(map(os.path.dirname, missing))}: no run there (no logs.csv)")
    found = {folder.rstrip("/"): numbers(path) for folder, path in zip(folders, logs_of(folders))}
    empty = [name for name, rows in found.items() if not rows]
    if len(empty) == len(found):
        raise UserError(f"{', '.join(empty)}: the log has no rows yet")
    if empty:
        print(f"Note: {', '.join(empty)}: left out, the log has no rows yet", file=sys.stderr)
    return {name: rows for name, rows in found.items() if rows}


def curves(*runs: str | os.PathLike) -> Any:
    """The curves of one run or several as a figure of matplotlib, for notebooks. Raises UserError."""
    if not available():
        raise UserError(NEEDED)
    return figure_of(rows_of([os.fspath(folder) for folder in runs]))


def run(argv: list[str] | None) -> str:
    args = get_args_parser().parse_args(argv)
    if not available():
        raise UserError(NEEDED)
    if args.output is None and len(args.runs) > 1:
        raise UserError("several runs in one plot: --output names its file")
    logs = logs_of(args.runs)
    path = os.path.join(args.runs[0], CURVES) if args.output is None else args.output
    own = OwnFiles(os.path.dirname(path) or ".", args.overwrite)
    raise_if_any(problems([path], dict.fromkeys(logs, "the log of a run"), args.overwrite, own))
    found = rows_of(args.runs)
    try:
        return draw(found, path, own)
    except OSError as error:
        raise UserError(in_words(error, path)) from None


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: print(run(argv)))


if __name__ == "__main__":
    sys.exit(main())
