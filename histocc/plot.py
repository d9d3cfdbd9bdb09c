"""Curves of one run or several in one picture (extra `plots`):

    python -m histocc.plot ./output ./other --output curves.png

Losses, accuracies, learning rate and speed by step. A run draws its own `curves.png` after each validation,
where matplotlib is installed.
"""

import importlib.util
import os
import sys

from histocc import outputs, run_files
from histocc.cli import make_parser, run_command
from histocc.errors import UserError
from histocc.machine_errors import in_words
from histocc.outputs import OwnFiles
from histocc.run_files import CURVES
from histocc.run_log import LOG, numbers

PANELS = (
    ("loss", ("train_loss", "val_loss")),
    ("accuracy, %", ("seq_acc", "token_acc", "flat_acc")),
    ("learning rate", ("lr",)),
    ("samples/s", ("samples_per_sec",)),
)
STYLES = ("-", "--", ":")  # of the columns of a panel; colours are runs


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(runs: dict[str, list[dict]], path: str, own: OwnFiles) -> str:
    """runs: name → rows of its logs.csv as `run_log.numbers` gives them; own: files of the folder of `path`.
    Writes a PNG, whole or not at all, and returns its path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, columns) in zip(figure.subplots(2, 2).flat, PANELS):
        for number, (name, rows) in enumerate(runs.items()):
            for style, column in zip(STYLES, columns):
                points = [
                    (row["step"], row[column] * (100 if "%" in title else 1))
                    for row in rows
                    if row[column] is not None
                ]
                label = ", ".join(([name] if len(runs) > 1 else []) + ([column] if len(columns) > 1 else []))
                if points:
                    axes.plot(
                        *zip(*points),
                        style,
                        color=f"C{number % 10}",
                        label=label or name,
                        marker="." if len(points) < 30 else None,
                    )
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    return own.write(os.path.basename(path), lambda file: figure.savefig(file, format="png", dpi=100))


def get_args_parser():
    parser = make_parser("python -m histocc.plot", "Curves of one run or several in one picture.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument(
        "--output",
        default=None,
        metavar="FILE.png",
        help=f"default: {CURVES} in the folder of the run, if it is one alone",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a file that exists")
    return parser


def run(argv: list[str] | None) -> str:
    args = get_args_parser().parse_args(argv)
    if not available():
        raise UserError("pictures need matplotlib: pip install matplotlib")
    if args.output is None and len(args.runs) > 1:
        raise UserError("several runs in one picture: --output names its file")
    logs = [os.path.join(folder, LOG) for folder in args.runs]
    path = os.path.join(args.runs[0], CURVES) if args.output is None else args.output
    own = run_files.own_files(os.path.dirname(path), args.overwrite)
    problems = outputs.problems([path], dict.fromkeys(logs, "the log of a run"), args.overwrite, own.holds)
    if problems:
        raise UserError(problems[0])
    missing = [path for path in logs if not os.path.isfile(path)]
    if missing:
        raise UserError(f"{', '.join(map(os.path.dirname, missing))}: no run there (no logs.csv)")
    found = {folder.rstrip("/"): numbers(path) for folder, path in zip(args.runs, logs)}
    empty = [name for name, rows in found.items() if not rows]
    if len(empty) == len(found):
        raise UserError(f"{', '.join(empty)}: the log has no rows yet")
    if empty:
        print(f"Note: {', '.join(empty)}: left out, the log has no rows yet", file=sys.stderr)
    try:
        return draw(found, path, own)
    except OSError as error:
        raise UserError(in_words(error, path)) from None


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: print(run(argv)))


if __name__ == "__main__":
    sys.exit(main())
