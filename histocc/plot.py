"""Plots of runs or of evaluations, as PNG and SVG (extra `plots`):

    histocc plot ./output ./other --output curves.png
    histocc plot ./output/evaluation

For a run: losses and accuracies by step, and its learning curve if it was learned in closed form. For an
evaluation: accuracy by the share coded automatically, reliability, accuracy by level and by group. `curves`
and `evaluation` return the figure, for notebooks.
"""

import csv
import importlib.util
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from typing import Any

import numpy as np

from histocc.figure import ENTRY, Figure, largest, names_of, wilson
from histocc.runtime.config import Config, Parser, flag
from histocc.runtime.errors import UserError, in_words, raise_if_any, run_command
from histocc.runtime.files import OwnFiles, atomic_write, problems
from histocc.runtime.log import counted
from histocc.trainer.log import FIT_PARTS, LOG, OWN_COLUMNS, read_numbers

CURVES, EVALUATION, REPORT, IMAGE_KINDS = "curves.png", "evaluation.png", "report.json", ("svg", "png")
LEARNING, LEARNING_COLUMNS = "learning_curve.csv", ("texts", "accuracy", "low", "high", "measured_on")
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
MARKERS, LINES = "os^DvPX", ("-", "--", ":", "-.")
WIDTH, HEIGHT = 6.3, 2.4  # of a figure and a panel, inches. Fonts have these sizes when printed 16 cm wide
STYLE: dict[Any, Any] = {"font.size": 8, "axes.titlesize": 8, "figure.titlesize": 8, "legend.fontsize": 7.5}
STYLE |= {"lines.linewidth": 1.2, "lines.markersize": 4, "legend.frameon": False, "axes.grid": True}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "grid.alpha": 0.3, "axes.axisbelow": True}
STYLE |= {"text.parse_math": False}  # dollar signs in names and values do not mark formulas
CURVE_NAMES = {"train_loss": "training", "val_loss": "validation", "token_acc": "characters, digit by digit"}
CURVE_NAMES |= {"seq_acc": "codes, digit by digit", "flat_acc": "codes, linear decoder"}
FIRST_POINT = 20  # size of a curve's first point
ACCURACY, STEP = "accuracy, %", "step"
Points = Sequence[tuple[Any, ...]]  # x, y and, if known, the interval of y


def new_figure(
    paths: list[str],
    figures: Sequence[Figure | str | None],
    parts: list[tuple[float, Callable[[Any, Any], Any]]],
) -> Any:
    """Return a matplotlib figure of panels, two in a row. A single model's name and figure are the title,
    those of several models form a legend. Raises UserError.

    Args:
        paths, figures: one for each model.
        parts: (height in inches, function that draws the panel at a place of a figure's grid).
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("plots need matplotlib: pip install matplotlib")
    import matplotlib
    from matplotlib.figure import Figure as Empty
    from matplotlib.lines import Line2D

    rows = [parts[i : i + 2] for i in range(0, len(parts), 2)]
    heights = [max(height for height, _ in row) for row in rows]
    captions = [f"{name}: {figure}" if figure else name for name, figure in zip(names_of(paths), figures)]
    unbroken = (re.sub(r"(?<=[\d.]) (?=%|to|texts)|(?<= to) ", "\u00a0", each) for each in captions)
    captions = [textwrap.fill(each, 105) for each in unbroken]
    with matplotlib.rc_context(STYLE):
        figure = Empty(figsize=(WIDTH, sum(heights) + 0.4 * len(captions)), dpi=150, layout="constrained")
        if len(captions) == 1:
            figure.suptitle(captions[0])
        else:
            lines = [Line2D([], [], **look(number)) for number in range(len(captions))]
            figure.legend(lines, captions, loc="outside upper left")
        places = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
        for place, row in zip(places, rows):
            for (_, fill), cell in zip(row, place.add_gridspec(1, len(row))):
                fill(place, cell)
    return figure


def look(number: int) -> dict[str, Any]:
    """Return the color and the marker of a curve."""
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}


def draw_curve(axes: Any, points: Points, number: int, line: str = "-", label: str | None = None) -> None:
    """Draw a curve, with a band if its points have intervals. number: selects color and marker."""
    x, y, *bounds = zip(*points)
    axes.plot(x, y, line, markevery=max(1, len(x) // 12), label=label, **look(number))
    if bounds:
        axes.fill_between(x, *bounds, color=look(number)["color"], alpha=0.15, linewidth=0)


def legend_below(axes: Any, columns: int) -> None:
    """Put a panel's legend below it, where it hides nothing."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=columns, columnspacing=1)


# ---- runs


def panels(folder: str) -> dict[tuple[str, str], dict[str, Points]]:
    """Return the points of each column of a run by (title of the panel, title of its x axis). Each part of a
    fit, which counts samples from 0 and steps up to 0, has a panel. A panel has at least two points. Raises
    UserError.
    """
    if not os.path.isfile(os.path.join(folder, LOG)):
        what = f"{folder}: is neither a run (no {LOG}) nor an evaluation (no {REPORT})"
        raise UserError(f"{what}. Name the folder of a run that has started, or of an evaluation")
    phases: list[list[dict[str, Any]]] = []
    for row in read_numbers(os.path.join(folder, LOG)):
        if not phases or (row["samples"] or 0) < (phases[-1][-1]["samples"] or 0):
            phases.append([])
        phases[-1].append(row)
    found, begin = {}, 0.0
    for number, phase in enumerate(phases):
        begin = min(begin, phase[0]["step"])
        loss = f"loss, n-grams and {FIT_PARTS[min(number, 1)]}" if phase[0]["step"] < 0 else "loss"
        for name in phase[0]:
            is_loss, scale = name in ("train_loss", "val_loss"), 100 if name.endswith("_acc") else 1
            if name in OWN_COLUMNS or name.startswith(("train_", "val_")) and not is_loss:
                continue
            title = loss if is_loss else f"{ACCURACY} of validation rows" if scale > 1 else name
            if points := [(row["step"] - begin, scale * row[name]) for row in phase if row[name] is not None]:
                found.setdefault((title, STEP), {})[name] = points
        begin = phase[-1]["step"]
    found = {title: columns for title, columns in found.items() if max(map(len, columns.values())) > 1}
    if not found and os.path.isfile(path := os.path.join(folder, LEARNING)):
        with open(path, encoding="utf-8", newline="") as file:
            values = [[float(row[name]) for name in LEARNING_COLUMNS] for row in csv.DictReader(file)]
        number = " and ".join(f"{n:,.0f}" for n in sorted({n for *_, n in values}))
        points = [(texts, *(100 * share for share in shares)) for texts, *shares, _ in values]
        what = f"{ACCURACY} of texts that are left out", "texts learned from"
        found[what] = {f"measured on {number} texts; 95 % intervals": points}
    return found


def curves(*runs: str | os.PathLike[str]) -> Any:
    """Return the curves of one or several runs as a matplotlib figure. Raises UserError.

    Example:
        >>> from histocc.plot import curves
        >>> figure = curves("./output")  # of a model learned from few labels: its learning curve
        >>> figure.axes[0].get_xlabel()
        'texts learned from'
    """
    folders = [os.fspath(run) for run in runs]
    drawn, columns = [panels(folder) for folder in folders], {}
    for folder, each in zip(folders, drawn):
        if not each:
            what = f"{folder}: nothing to draw: no curve has two points (yet, or there are too few texts)"
            raise UserError(f"{what}. histocc watch {shlex.quote(folder)} shows how far the run is")
        for title, points in each.items():
            columns.setdefault(title, {}).update(dict.fromkeys(points))

    def fill(figure: Any, place: Any, title: tuple[str, str]) -> None:
        axes, several = figure.add_subplot(place, title=title[0], xlabel=title[1]), len(drawn) > 1
        for i, name in enumerate(columns[title]):
            line, label = LINES[i % len(LINES)], CURVE_NAMES.get(name, name)
            if several and title[1] == STEP:  # colors mark runs, line styles mark columns
                axes.plot([], [], line, color="black", label=label)
                label = None
            for number, each in enumerate(drawn):
                if points := each.get(title, {}).get(name):
                    draw_curve(axes, points, number if several else i, line, label)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", integer=True, nbins=6)
        if len(columns[title]) > 1 or title[1] != STEP:
            legend_below(axes, 2 if title[1] == STEP else 1)

    parts = [(HEIGHT, partial(fill, title=title)) for title in columns]
    return new_figure(folders, [Figure.of_run(folder) for folder in folders], parts)


# ---- evaluations


def interval_of(x: float, share: float, number: float) -> tuple[float, ...]:
    """Return the point of a share of these texts, with its interval, in percent."""
    return x, *(100 * each for each in (share, *wilson(share, number)))


def error_bars(axes: Any, points: Points, number: int, way: str = "y") -> None:
    """Draw points with intervals of y, on swapped axes if `way` is x."""
    if points:
        x, y, low, high = map(np.array, zip(*points))
        reach = {f"{way}err": np.maximum([y - low, high - y], 0)}  # rounding may put an end beyond y
        axes.errorbar(*((x, y) if way == "y" else (y, x)), **reach, capsize=2, linestyle="", **look(number))


def accuracies(names: list[str], parts: dict[str, Any], offset: float = 0.0) -> Points:
    """Return the points of named parts of an evaluation, placed as in `names`, in percent."""
    shares = [(i, parts[name]["over_texts"]["accuracy"]) for i, name in enumerate(names) if name in parts]
    return [(i + offset, *(100 * each for each in share)) for i, share in shares]


def coverage(figure: Any, place: Any, decoders: list[dict[str, Any]]) -> None:
    """Draw accuracy by the share of automatically coded texts, with the limits of confidence above
    which few of these are wrong.
    """
    axes = figure.add_subplot(place, xlabel="coded automatically, % of texts", ylabel=ACCURACY)
    for number, each in enumerate(decoders):
        texts = each["by_digits"][-1]["texts"]
        found = [(share, right) for _, share, right in each["coverage"] if share * texts >= FIRST_POINT]
        if len(found) < 2:
            continue
        shares, right = zip(*found)
        draw_curve(axes, [interval_of(100 * x, y, x * texts) for x, y in found], number)
        for marker, limit in zip("Ds", each["automatic"]):
            if (conf := limit["conf"]) is not None:
                how = {"mfc": "white", "mec": look(number)["color"], "ms": 7, "mew": 1.5, "zorder": 5}
                x, y = 100 * limit["texts"], 100 * np.interp(limit["texts"], shares, right)
                label = f"{100 * limit['errors']:.0f} % wrong: {x:.0f} % of texts (conf from {conf:.2f})"
                axes.plot(x, y, marker, linestyle="none", label=label, **how)
    legend_below(axes, 1)


def reliability(figure: Any, place: Any, decoders: list[dict[str, Any]]) -> None:
    """Draw how often answers of each confidence are right, and below it their number."""
    above, beneath = place.subgridspec(2, 1, height_ratios=[3, 1]).subplots(sharex=True)
    above.plot([0, 100], [0, 100], ":", color="black", linewidth=0.8)
    for number, each in enumerate(decoders):
        bins, width = each["calibration"]["bins"], 9 / len(decoders)
        kinds = ("confidence_over_texts", "accuracy_over_texts")
        points = [(100 * one[kinds[0]], one[kinds[1]], one["texts"]) for one in bins]
        error_bars(above, [interval_of(*point) for point in points], number)
        left = [100 * one["from"] + 0.5 + number * width for one in bins]
        heights = [one["texts"] for one in bins]
        beneath.bar(left, heights, width, align="edge", color=look(number)["color"])
    above.set(ylabel="right, %", xlim=(0, 100), ylim=(0, 100))
    beneath.set(xlabel="confidence, %", ylabel="texts")


def levels(figure: Any, place: Any, decoders: list[dict[str, Any]], unit: str) -> None:
    """Draw accuracy at each level as a staircase, with the accuracy of classes next to it."""
    axes = figure.add_subplot(place, xlabel=f"level, {unit}", ylabel=ACCURACY)
    names = [str(each["digits"]) for each in decoders[0]["by_digits"]]
    stairs, names = len(names), [*names, *decoders[0]["by_class"]]
    for number, each in enumerate(decoders):
        digits = {str(part["digits"]): part for part in each["by_digits"]}
        points = accuracies(names, digits | each["by_class"])
        error_bars(axes, points, number)
        steps = [(x, y) for x, y, *_ in points if x < stairs]
        axes.step(*np.transpose(steps), where="mid", color=look(number)["color"])
        for x, value, *_ in points if len(decoders) == 1 else ():
            axes.annotate(f"{value:.1f}", (x, value), (3, 2), textcoords="offset points", size=6)
    axes.set_xticks(range(len(names)), names)
    for label in axes.get_xticklabels()[stairs:]:
        label.set(rotation=30, ha="right", rotation_mode="anchor")


def groups(figure: Any, place: Any, decoders: list[dict[str, Any]], name: str) -> None:
    """Draw accuracy by group, the group with the most texts first."""
    axes, shown = figure.add_subplot(place), largest(decoders[0][name])
    for number, each in enumerate(decoders):
        offset = 0.25 * (number - (len(decoders) - 1) / 2)
        error_bars(axes, accuracies([*dict(shown)], each.get(name, {}), offset), number, "x")
    labels = [group if len(group) < 24 else f"{group[:22]}…" for group, _ in shown]
    labels = [f"{label} (n = {one['texts']:,})" for label, (_, one) in zip(labels, shown)]
    axes.set_yticks(range(len(shown)), labels)
    axes.set_ylim(len(shown) - 0.3, -0.7)
    number = len(decoders[0][name])
    left_out = f": {len(shown)} of {number:,} groups" * (number > len(shown))
    axes.set(xlabel=ACCURACY, title=name[3:].removeprefix("column ") + left_out)


def in_title(report: dict[str, Any]) -> str:
    """Return the figure of an evaluation, and whether its panels include learned texts."""
    data, words = report["data"], [str(Figure(**report[ENTRY]))] if report[ENTRY] else []
    if learned := data["texts_trained_on"]:
        words.append(f"of {counted(data['texts'], 'text')} shown, the model was trained on {learned:,}")
    return "; ".join(words)


def evaluation(*folders: str | os.PathLike[str]) -> Any:
    """Return the plots of one or several evaluations, for the first decoder, as a matplotlib figure. Raises
    UserError.

    Example:
        >>> from histocc.plot import evaluation
        >>> figure = evaluation("./output/evaluation")
        >>> figure.axes[0].get_xlabel()
        'coded automatically, % of texts'
    """
    reports, paths = [], [os.path.join(folder, REPORT) for folder in folders]
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                reports.append(json.load(file))
            decoders = [next(iter(report["decoders"].values())) for report in reports]
            figures = [in_title(report) for report in reports]
            models = [report["model"]["name"] for report in reports]
            first, unit, _ = decoders[0], reports[0]["levels"], decoders[-1]["by_class"]
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration):
            raise UserError(f"{path}: is damaged, or from another version: evaluate again") from None
    parts: list[tuple[float, Callable[..., Any]]] = []
    if first["by_digits"][-1]["texts"] > FIRST_POINT:
        parts += [(HEIGHT + 0.8, coverage), (HEIGHT + 0.8, reliability)]
    if len(first["by_digits"]) > 1:
        parts.append((HEIGHT, partial(levels, unit=unit)))
    for name, found in first.items():
        if (name == "by_language" or name.startswith("by_column ")) and len(found) > 1:
            parts.append((0.8 + 0.16 * len(largest(found)), partial(groups, name=name)))
    if not parts:
        raise UserError(f"{paths[0]}: too few texts for a plot; see the figures in its report")
    panels = [(height, partial(fill, decoders=decoders)) for height, fill in parts]
    figure = new_figure(models, figures, panels)
    figure.supxlabel("Bands and bars: 95 % intervals", x=0.99, ha="right", fontsize=7)
    for way in "xy":  # compared panels share one range
        same = [axes for axes in figure.axes if getattr(axes, f"get_{way}label")() == ACCURACY]
        low = min((getattr(axes, f"get_{way}lim")()[0] for axes in same), default=0)
        for axes in same:
            axes.set(**{f"{way}ticks": range(0, 101, 10 if low > 50 else 20), f"{way}lim": (low, 101)})
    return figure


# ---- files


def files(name: str) -> list[str]:
    """Return the file names of a plot, from one of them."""
    return [f"{os.path.splitext(name)[0]}.{kind}" for kind in IMAGE_KINDS]


def save_figure(figure: Any, own: OwnFiles, name: str) -> list[str]:
    """Write a figure into a folder, as PNG and as SVG, and return the paths. Raises OSError."""
    paths = own.claim(*files(name))
    for path, kind in zip(paths, IMAGE_KINDS):
        with atomic_write(path) as file:
            figure.savefig(file, format=kind)
    return paths


def draw_run(folder: str) -> None:
    """Draw the curves of a finished run into its folder, if matplotlib is there and they are not drawn yet. A
    failure is a warning.
    """
    log, drawn = os.path.join(folder, LOG), os.path.join(folder, CURVES)
    if importlib.util.find_spec("matplotlib") is None or not os.path.isfile(log) or not panels(folder):
        return
    if not os.path.isfile(drawn) or os.path.getmtime(drawn) < os.path.getmtime(log):
        try:
            save_figure(curves(folder), OwnFiles(folder), CURVES)
        except Exception as error:  # an error of matplotlib or of the disk
            print(f"WARNING: {CURVES}: {in_words(error)}; draw it with histocc plot", flush=True)


@dataclass(frozen=True, kw_only=True)
class PlotConfig(Config):
    """The flags of plot."""

    runs: list[str] = flag(MISSING, "run folders, or folders of evaluations", metavar="RUN", positional=True)
    output: str | None = flag(
        None,
        f"name of the PNG; an SVG is written next to it (default: {CURVES} or {EVALUATION} in the folder)",
        metavar="FILE.png",
    )
    overwrite: bool = flag(False, "replace files that exist")


def run(args: PlotConfig) -> None:
    if args.output is None and len(args.runs) > 1:
        raise UserError("several runs in one plot: name its file with --output")
    are_reports = [os.path.isfile(os.path.join(folder, REPORT)) for folder in args.runs]
    if any(are_reports) and not all(are_reports):
        raise UserError("runs and evaluations have different plots: draw them separately")
    path = args.output or os.path.join(args.runs[0], EVALUATION if all(are_reports) else CURVES)
    if os.path.splitext(path)[1] not in ("", *(f".{kind}" for kind in IMAGE_KINDS)):
        raise UserError(f"--output {path}: plots are PNG and SVG files: choose a name that ends in .png")
    own = OwnFiles(os.path.dirname(path) or ".", args.overwrite)
    raise_if_any(problems(files(path), {}, args.overwrite, own))
    figure = evaluation(*args.runs) if all(are_reports) else curves(*args.runs)
    print(*save_figure(figure, own, os.path.basename(path)), sep="\n")


def get_args_parser() -> Parser:
    what = "Draw the curves of runs, or the results of evaluations, as PNG and SVG."
    return Parser(PlotConfig, "python -m histocc.plot", what, "./output", "./output/evaluation")


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(get_args_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
