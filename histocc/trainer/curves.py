"""Curves of runs as a picture: losses, accuracies, learning rate and speed by step (extra `plots`)."""

import importlib.util
import os
from typing import Any

from histocc.runtime.outputs import OwnFiles

PANELS = (
    ("loss", ("train_loss", "val_loss")),
    ("accuracy, %", None),  # all columns …_acc
    ("learning rate", ("lr",)),
    ("samples/s", ("samples_per_sec",)),
)


STYLES = ("-", "--", ":")  # of the columns of a panel; colours are runs


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(runs: dict[str, list[dict[str, Any]]], path: str, own: OwnFiles) -> str:
    """runs: as of `figure_of`; own: files of the folder of `path`. Writes a PNG, whole or not at all, and
    returns its path.
    """
    figure = figure_of(runs)
    return own.write(os.path.basename(path), lambda file: figure.savefig(file, format="png", dpi=100))


def figure_of(runs: dict[str, list[dict[str, Any]]]) -> Any:
    """A figure of matplotlib. runs: name → rows of its logs.csv as `run_log.numbers` gives them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, columns) in zip(figure.subplots(2, 2).flat, PANELS):
        for number, (name, rows) in enumerate(runs.items()):
            shown = columns or [name for name in rows[0] if name.endswith("_acc")]
            for style, column in zip(STYLES, shown):
                points = [
                    (row["step"], row[column] * (100 if "%" in title else 1))
                    for row in rows
                    if row.get(column) is not None
                ]
                label = ", ".join(([name] if len(runs) > 1 else []) + ([column] if len(shown) > 1 else []))
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
    return figure
