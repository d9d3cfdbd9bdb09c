"""Curves of one run or several in one plot, or the plots of an evaluation (extra `plots`):

    python -m histocc.plot ./output ./other --output curves.png
    python -m histocc.plot ./output/evaluation

Losses, accuracies, learning rate and speed by step; or accuracy by the share that is coded automatically, by
language and level, and reliability. `curves` and `evaluation` return the figure, for notebooks.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import MISSING, dataclass
from typing import Any

import numpy as np

from histocc.runtime.config import Config, Parser, flag
from histocc.runtime.errors import UserError, in_words, raise_if_any, run_command
from histocc.runtime.files import OwnFiles, atomic_write, problems
from histocc.trainer.log import LOG, OWN_COLUMNS, read_numbers

CURVES, EVALUATION, REPORT = "curves.png", "evaluation.png", "report.json"
STYLES = ("-", "--", ":", "-.")  # lines of a panel's columns; colours stand for runs


def panels(columns: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return (title, columns) of each panel, for the columns of logs.csv: one panel has a task's accuracies
    (…_acc), one its other figures of validation.
    """
    of_task = [x for x in columns if x not in OWN_COLUMNS and not x.startswith(("train_", "val_"))]
    others = [name for name in of_task if not name.endswith("_acc")]
    shown = [("loss", ["train_loss", "val_loss"]), ("accuracy, %", [x for x in of_task if x not in others])]
    shown += [(", ".join(others[: len(STYLES)]), others), ("learning rate", ["lr"])]
    return [(title, names) for title, names in [*shown, ("samples/s", ["samples_per_sec"])] if names]


def new_figure() -> Any:
    """Return an empty matplotlib figure. Raises UserError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("plots need matplotlib: pip install matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(12, 8), layout="constrained")


def evaluation(folder: str | os.PathLike[str]) -> Any:
    """Return the plots of an evaluation, of the first decoder, as a matplotlib figure. Raises UserError."""
    figure = new_figure()
    with open(os.path.join(folder, REPORT), encoding="utf-8") as file:
        report = json.load(file)
    of_decoder = next(iter(report["decoders"].values()))
    (share, reliability), (by_language, by_level) = figure.subplots(2, 2)
    _, shares, accuracies = zip(*of_decoder["coverage"])
    share.plot(100 * np.array(shares), 100 * np.array(accuracies))
    share.set(xlabel="coded automatically, the most confident first, %", ylabel="accuracy of these, %")
    bins = of_decoder["calibration"]["bins"]
    points = ([100 * each[name] for each in bins] for name in ("confidence", "accuracy"))
    reliability.plot([0, 100], [0, 100], ":", *points, "o-")
    reliability.set(xlabel="confidence, %", ylabel="accuracy, %")
    levels = [(str(each["digits"]), each) for each in of_decoder["by_digits"]]
    for axes, groups, label in (
        (by_language, list(of_decoder["by_language"].items()), "language"),
        (by_level, levels, report["levels"]),
    ):
        values = 100 * np.array([each["over_texts"]["accuracy"] for _, each in groups])  # [G, 3]
        distance = np.abs(values[:, 1:] - values[:, :1]).T
        axes.errorbar([name for name, _ in groups], values[:, 0], distance, fmt="o", capsize=3)
        axes.set(xlabel=label, ylabel="accuracy, %")
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    return figure


def curves(*runs: str | os.PathLike[str]) -> Any:
    """Return the curves of one run or several as a matplotlib figure. Raises UserError."""
    logs: dict[str, list[dict[str, float | None]]] = {}  # rows by the name of the run
    for folder in [os.fspath(run) for run in runs]:
        if not os.path.isfile(os.path.join(folder, LOG)):
            raise UserError(f"{folder}: no run there (no {LOG})")
        if numbers := read_numbers(os.path.join(folder, LOG)):
            logs[folder.rstrip("/")] = numbers
        else:
            print(f"Note: {folder}: left out, the log has no rows yet", file=sys.stderr)
    if not logs:
        raise UserError("no run has rows in its log yet")
    figure, shown = new_figure(), panels(dict.fromkeys(name for rows in logs.values() for name in rows[0]))
    all_axes = list(figure.subplots(2, (len(shown) + 1) // 2).flat)
    for axes in all_axes[len(shown) :]:
        axes.remove()
    for axes, (title, columns) in zip(all_axes, shown):
        for i, (run, rows) in enumerate(logs.items()):
            for style, column in zip(STYLES, columns):
                scale = 100 if "%" in title else 1
                values = [(row["step"], row.get(column)) for row in rows]
                points = [(step, value * scale) for step, value in values if value is not None]
                label = ", ".join([run] * (len(logs) > 1) + [column] * (len(columns) > 1)) or run
                if points:
                    marker = "." if len(points) < 30 else None
                    axes.plot(*zip(*points), style, color=f"C{i % 10}", label=label, marker=marker)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    return figure


def save_figure(figure: Any, own: OwnFiles, name: str) -> str:
    """Write a PNG into a folder, and return its path. Raises OSError."""
    (path,) = own.claim(name)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100)
    return path


def draw_run(folder: str) -> None:
    """Draw the curves of a run at its end into its folder, if matplotlib is there and they are not drawn
    already. A failure is a warning.
    """
    log, drawn = os.path.join(folder, LOG), os.path.join(folder, CURVES)
    if importlib.util.find_spec("matplotlib") is None or not read_numbers(log):
        return
    if not os.path.isfile(drawn) or os.path.getmtime(drawn) < os.path.getmtime(log):
        try:
            save_figure(curves(folder), OwnFiles(folder), CURVES)
        except Exception as error:  # an error of matplotlib or of the disk
            print(f"WARNING: {CURVES}: {in_words(error)}; python -m histocc.plot draws it", flush=True)


@dataclass(frozen=True, kw_only=True)
class PlotConfig(Config):
    """The flags of plot."""

    runs: list[str] = flag(
        MISSING, "folders of runs, or of one evaluation", metavar="FOLDER", positional=True
    )
    output: str | None = flag(
        None, f"default, of one folder: {CURVES} or {EVALUATION} in it", metavar="FILE.png"
    )
    overwrite: bool = flag(False, "replace a file that exists")


def run(args: PlotConfig) -> None:
    if args.output is None and len(args.runs) > 1:
        raise UserError("several runs in one plot: --output names its file")
    is_evaluation = len(args.runs) == 1 and os.path.isfile(os.path.join(args.runs[0], REPORT))
    path = args.output or os.path.join(args.runs[0], EVALUATION if is_evaluation else CURVES)
    logs = [os.path.join(folder, REPORT if is_evaluation else LOG) for folder in args.runs]
    own = OwnFiles(os.path.dirname(path) or ".", args.overwrite)
    raise_if_any(problems([path], dict.fromkeys(logs, "the input"), args.overwrite, own))
    figure = evaluation(args.runs[0]) if is_evaluation else curves(*args.runs)
    print(save_figure(figure, own, os.path.basename(path)))


def get_args_parser() -> Parser:
    return Parser(PlotConfig, "python -m histocc.plot", "Curves of runs, or plots of an evaluation.")


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(get_args_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
