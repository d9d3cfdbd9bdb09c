"""Curves of one run or several in one plot (extra `plots`):

    python -m histocc.plot ./output ./other --output curves.png

Losses, accuracies, learning rate and speed by step; `curves` gives the figure, for notebooks.
"""

import os
import sys
from dataclasses import MISSING, dataclass
from typing import Any

from histocc.runtime.config import Config, Parser, flag
from histocc.runtime.entrypoint import run_command
from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.files import OwnFiles, problems
from histocc.trainer.log import LOG, read_numbers
from histocc.trainer.plot import CURVES, available, figure_of, save_figure


def curves(*runs: str | os.PathLike[str]) -> Any:
    """The curves of one run or several as a figure of matplotlib. Raises UserError."""
    if not available():
        raise UserError("plots need matplotlib: pip install matplotlib")
    rows: dict[str, list[dict[str, float | None]]] = {}
    for folder in [os.fspath(run) for run in runs]:
        if not os.path.isfile(os.path.join(folder, LOG)):
            raise UserError(f"{folder}: no run there (no {LOG})")
        if found := read_numbers(os.path.join(folder, LOG)):
            rows[folder.rstrip("/")] = found
        else:
            print(f"Note: {folder}: left out, the log has no rows yet", file=sys.stderr)
    if not rows:
        raise UserError("no run has rows in its log yet")
    return figure_of(rows)


@dataclass(frozen=True, kw_only=True)
class PlotConfig(Config):
    """What plot takes."""

    runs: list[str] = flag(MISSING, "folders of runs", metavar="RUN", positional=True)
    output: str | None = flag(
        None, f"default: {CURVES} in the folder of the run, if it is one alone", metavar="FILE.png"
    )
    overwrite: bool = flag(False, "replace a file that exists")


def get_args_parser() -> Parser:
    return Parser(PlotConfig, "python -m histocc.plot", "Curves of one run or several in one plot.")


def run(argv: list[str] | None) -> str:
    args = get_args_parser().parse_args(argv)
    if args.output is None and len(args.runs) > 1:
        raise UserError("several runs in one plot: --output names its file")
    path = args.output or os.path.join(args.runs[0], CURVES)
    logs = [os.path.join(folder, LOG) for folder in args.runs]
    own = OwnFiles(os.path.dirname(path) or ".", args.overwrite)
    raise_if_any(problems([path], dict.fromkeys(logs, "the log of a run"), args.overwrite, own))
    return save_figure(curves(*args.runs), own, os.path.basename(path))


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: print(run(argv)))


if __name__ == "__main__":
    sys.exit(main())
