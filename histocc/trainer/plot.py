"""Curves of runs as a picture: losses, accuracies, learning rate and speed by step (extra `plots`). A run
draws its own `curves.png` at its end, if matplotlib is installed.
"""

import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from histocc.runtime.config import Config, Parser, flag
from histocc.runtime.entrypoint import run_command
from histocc.runtime.errors import UserError, in_words, raise_if_any
from histocc.runtime.files import OwnFiles, atomic_write, problems
from histocc.trainer.log import LOG, OWN_COLUMNS, read_numbers

CURVES = "curves.png"
NEEDED = "plots need matplotlib: pip install matplotlib"
STYLES = ("-", "--", ":", "-.")  # of the columns of a panel; colours are runs


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def rows_of(folders: Sequence[str]) -> dict[str, list[dict[str, float | None]]]:
    """Name of each run → rows of its log. Raises UserError."""
    if missing := [folder for folder in folders if not os.path.isfile(os.path.join(folder, LOG))]:
        raise UserError(f"{', '.join(missing)}: no run there (no {LOG})")
    runs = {folder.rstrip("/"): read_numbers(os.path.join(folder, LOG)) for folder in folders}
    empty = [name for name, rows in runs.items() if not rows]
    if len(empty) == len(runs):
        raise UserError(f"{', '.join(empty)}: the log has no rows yet")
    if empty:
        print(f"Note: {', '.join(empty)}: left out, the log has no rows yet", file=sys.stderr)
    return {name: rows for name, rows in runs.items() if rows}


def panels(columns: Iterable[str]) -> list[tuple[str, list[str]]]:
    """(title, columns) of each panel, for the columns of logs.csv: a task's accuracies (…_acc) in one, its
    other figures of validation in one.
    """
    of_task = [
        name for name in columns if name not in OWN_COLUMNS and not name.startswith(("train_", "val_"))
    ]
    others = [name for name in of_task if not name.endswith("_acc")]
    all_panels = [
        ("loss", ["train_loss", "val_loss"]),
        ("accuracy, %", [name for name in of_task if name.endswith("_acc")]),
        (", ".join(others[: len(STYLES)]), others),
        ("learning rate", ["lr"]),
        ("samples/s", ["samples_per_sec"]),
    ]
    return [(title, names) for title, names in all_panels if names]


def figure_of(runs: dict[str, list[dict[str, float | None]]]) -> Any:
    """A figure of matplotlib. runs: name → rows of its log."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = panels(dict.fromkeys(column for rows in runs.values() for column in rows[0]))
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = list(figure.subplots(2, (len(shown) + 1) // 2).flat)
    for axes in all_axes[len(shown) :]:
        axes.remove()
    for axes, (title, columns) in zip(all_axes, shown):
        for i, (run, rows) in enumerate(runs.items()):
            for style, column in zip(STYLES, columns):
                points = [
                    (row["step"], value * (100 if "%" in title else 1))
                    for row in rows
                    if (value := row.get(column)) is not None
                ]
                label = ", ".join([run] * (len(runs) > 1) + [column] * (len(columns) > 1)) or run
                marker = "." if len(points) < 30 else None
                if points:
                    axes.plot(*zip(*points), style, color=f"C{i % 10}", label=label, marker=marker)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    return figure


def draw(folders: Sequence[str], path: str, own: OwnFiles) -> str:
    """Writes a PNG, and returns its path. own: files of the folder of `path`. Raises UserError, OSError."""
    figure = figure_of(rows_of(folders))
    own.claim(os.path.basename(path))
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100)
    return path


def draw_run(own: OwnFiles) -> None:
    """The curves of a run at its end, if matplotlib is installed. What fails is a warning."""
    if not available():
        return
    try:
        draw([own.folder], own.path(CURVES), own)
    except Exception as error:  # of matplotlib, or of the disk
        print(f"WARNING: {CURVES}: {in_words(error)}; python -m histocc.plot draws it", flush=True)


def curves(*runs: str | os.PathLike[str]) -> Any:
    """The curves of one run or several as a figure of matplotlib, for notebooks. Raises UserError."""
    if not available():
        raise UserError(NEEDED)
    return figure_of(rows_of([os.fspath(folder) for folder in runs]))


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
    if not available():
        raise UserError(NEEDED)
    if args.output is None and len(args.runs) > 1:
        raise UserError("several runs in one plot: --output names its file")
    logs = [os.path.join(folder, LOG) for folder in args.runs]
    path = os.path.join(args.runs[0], CURVES) if args.output is None else args.output
    own = OwnFiles(os.path.dirname(path) or ".", args.overwrite)
    raise_if_any(problems([path], dict.fromkeys(logs, "the log of a run"), args.overwrite, own))
    try:
        return draw(args.runs, path, own)
    except OSError as error:
        raise UserError(in_words(error, path)) from None


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: print(run(argv)))
