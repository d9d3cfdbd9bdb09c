"""Curves of runs as a picture: losses, accuracies, learning rate and speed by step (extra `plots`)."""

import importlib.util
import os
from collections.abc import Iterable
from typing import Any

from histocc.runtime.files import OwnFiles, atomic_write
from histocc.trainer.run_log import OWN_COLUMNS

CURVES = "curves.png"
STYLES = ("-", "--", ":", "-.")  # of the columns of a panel; colours are runs


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def panels(columns: Iterable[str]) -> list[tuple[str, list[str]]]:
    """(title, columns) of each panel, for the columns of logs.csv: a task's accuracies (…_acc) in one, its
    other figures of validation in one.
    """
    of_task = [
        name for name in columns if name not in OWN_COLUMNS and not name.startswith(("train_", "val_"))
    ]
    accuracies = [name for name in of_task if name.endswith("_acc")]
    others = [name for name in of_task if name not in accuracies]
    found = [
        ("loss", ["train_loss", "val_loss"]),
        ("accuracy, %", accuracies),
        (", ".join(others[: len(STYLES)]), others),
        ("learning rate", ["lr"]),
        ("samples/s", ["samples_per_sec"]),
    ]
    return [(title, names) for title, names in found if names]


def draw(runs: dict[str, list[dict[str, Any]]], path: str, own: OwnFiles) -> str:
    """runs: as of `figure_of`; own: files of the folder of `path`. Writes a PNG, whole or not at all, and
    returns its path.
    """
    figure = figure_of(runs)
    own.claim(os.path.basename(path))
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100)
    return path


def figure_of(runs: dict[str, list[dict[str, Any]]]) -> Any:
    """A figure of matplotlib. runs: name → rows of its logs.csv as `run_log.numbers` gives them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown_panels = panels(dict.fromkeys(column for rows in runs.values() for column in rows[0]))
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    places = list(figure.subplots(2, (len(shown_panels) + 1) // 2).flat)
    for axes in places[len(shown_panels) :]:
        axes.remove()
    for axes, (title, shown) in zip(places, shown_panels):
        for number, (name, rows) in enumerate(runs.items()):
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
