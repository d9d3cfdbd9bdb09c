"""Curves of runs as a picture: losses, accuracies, learning rate and speed by step (extra `plots`)."""

import importlib.util
from collections.abc import Iterable
from typing import Any

from histocc.runtime.errors import in_words
from histocc.runtime.files import OwnFiles, atomic_write
from histocc.trainer.log import LOG, OWN_COLUMNS, read_numbers

CURVES = "curves.png"
STYLES = ("-", "--", ":", "-.")  # of the columns of a panel; colours are runs


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def panels(columns: Iterable[str]) -> list[tuple[str, list[str]]]:
    """(title, columns) of each panel, for the columns of logs.csv: a task's accuracies (…_acc) in one, its
    other figures of validation in one.
    """
    of_task = [x for x in columns if x not in OWN_COLUMNS and not x.startswith(("train_", "val_"))]
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
                scale = 100 if "%" in title else 1
                values = [(row["step"], row.get(column)) for row in rows]
                points = [(step, value * scale) for step, value in values if value is not None]
                label = ", ".join([run] * (len(runs) > 1) + [column] * (len(columns) > 1)) or run
                marker = "." if len(points) < 30 else None
                if points:
                    axes.plot(*zip(*points), style, color=f"C{i % 10}", label=label, marker=marker)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    return figure


def save_figure(figure: Any, own: OwnFiles, name: str) -> str:
    """Writes a PNG into a folder, and returns its path. Raises OSError."""
    (path,) = own.claim(name)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100)
    return path


def draw_run(own: OwnFiles) -> None:
    """The curves of a run at its end, if matplotlib is installed. What fails is a warning."""
    rows = read_numbers(own.path(LOG))
    if not available() or not rows:
        return
    try:
        save_figure(figure_of({own.folder: rows}), own, CURVES)
    except Exception as error:  # of matplotlib, or of the disk
        print(f"WARNING: {CURVES}: {in_words(error)}; python -m histocc.plot draws it", flush=True)
