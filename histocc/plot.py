"""Curves of one run or several in one picture (extra `plots`):

    python -m histocc.plot ./output ./other --output curves.png

Losses, accuracies, learning rate and speed by step. A run draws its own `curves.png` after each validation, where matplotlib is installed.
"""

import importlib.util
import os
import sys

from histocc.checkpoint import write_atomic
from histocc.cli import make_parser, speak_any_encoding
from histocc.errors import UserError
from histocc.run_log import numbers

PICTURE = "curves.png"
PANELS = (("loss", ("train_loss", "val_loss")), ("accuracy, %", ("seq_acc", "token_acc", "flat_acc")), ("learning rate", ("lr",)),
          ("samples/s", ("samples_per_sec",)))
STYLES = ("-", "--", ":")     # of the columns of a panel; colours are runs


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(runs: dict[str, list[dict]], path: str) -> None:
    """runs: name → rows of its logs.csv as `run_log.numbers` gives them. Writes a PNG, whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, columns) in zip(figure.subplots(2, 2).flat, PANELS):
        for number, (name, rows) in enumerate(runs.items()):
            for style, column in zip(STYLES, columns):
                points = [(row["step"], row[column] * (100 if "%" in title else 1)) for row in rows if row[column] is not None]
                label = ", ".join(([name] if len(runs) > 1 else []) + ([column] if len(columns) > 1 else []))
                if points:
                    axes.plot(*zip(*points), style, color=f"C{number % 10}", label=label or name, marker="." if len(points) < 30 else None)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=100))


def get_args_parser():
    parser = make_parser("python -m histocc.plot", "Curves of one run or several in one picture.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--output", default=None, metavar="FILE.png", help=f"default: {PICTURE} in the folder of the run, if it is one alone")
    return parser


def run(argv: list[str] | None) -> str:
    args = get_args_parser().parse_args(argv)
    if not available():
        raise UserError("pictures need matplotlib: pip install matplotlib")
    if args.output is None and len(args.runs) > 1:
        raise UserError("several runs in one picture: --output names its file")
    logs = [os.path.join(folder, "logs.csv") for folder in args.runs]
    missing = [path for path in logs if not os.path.isfile(path)]
    if missing:
        raise UserError(f"{', '.join(map(os.path.dirname, missing))}: no run there (no logs.csv)")
    found = {folder.rstrip("/"): numbers(path) for folder, path in zip(args.runs, logs)}
    empty = [name for name, rows in found.items() if not rows]
    if len(empty) == len(found):
        raise UserError(f"{', '.join(empty)}: the log has no rows yet")
    if empty:
        print(f"Note: {', '.join(empty)}: left out, the log has no rows yet", file=sys.stderr)
    path = args.output or os.path.join(args.runs[0], PICTURE)
    try:
        draw(found, path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    return path


def main(argv: list[str] | None = None) -> int:
    speak_any_encoding()
    try:
        print(run(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
