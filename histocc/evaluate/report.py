"""What an evaluation reports: as text, tables and plots."""

import json
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from histocc.runtime.errors import UserError

JSON, MARKDOWN, REJECTED = "report.json", "report.md", "rejected_rows.csv"
PLOTS = ("digits.png", "calibration.png", "coverage.png")
NAMES = {
    "seq2seq": "Seq2seq decoder (greedy)",
    "linear": "Linear decoder (probability above its threshold)",
    "both": "Both decoders together",
}
GROUPS = {"digits": "by_digits", "language": "by_language", "major_group": "by_major_group"}

METHOD = """\
## How it is counted

- A row is right (accuracy) if the set of predicted codes is the set of its codes, in any order. Precision,
  recall and F1 count codes, summed over rows. At fewer digits codes are cut to their first digits, and those
  of a row that become equal count once; -1, -2, -3 and ? are never cut.
- Over distinct texts, each text (case and blanks aside) weighs the same however many rows have it. In
  brackets: 95 % intervals of {resamples:,} bootstrap draws of texts with all their rows (seed {seed}).
- Major group: the first digit. Accuracy is that of rows with a true code of the group; precision and recall
  are those of the group's codes in all rows.
- Top k: the k most probable codes of the linear decoder, or of the search over the key (--decoder topk), hold
  one, or all, of the true codes.
- Confidence: the probability that exactly these codes are right{fitted}. Expected calibration error: the mean
  distance between confidence and accuracy of their bin. Few texts alone make it some points even if
  confidence is what it says.
- To be right in so many percent: only answers from some confidence on are given. It is chosen on one half of
  the texts, and the rows of the other half are counted with it; the one that is named is chosen on all.
- Best threshold: the one of 0.02, 0.04 … 0.98 with the highest F1, and with the highest accuracy, on these
  very rows: test it on others. Languages with fewer than 100 rows get none.
"""


class Report(dict):
    """What report.json holds, with tables of it: DataFrames, or lists of dicts if pandas is not installed.

    Attributes:
        text: report.md, as a notebook shows it.
    """

    def __init__(self, content: dict, text: str):
        super().__init__(content)
        self.text = text

    @classmethod
    def read(cls, folder: str | os.PathLike) -> "Report":
        """Of a folder into which an evaluation was written. Raises UserError."""
        try:
            with open(os.path.join(folder, JSON), encoding="utf-8") as file:
                content = json.load(file)
            with open(os.path.join(folder, MARKDOWN), encoding="utf-8") as file:
                return cls(content, file.read())
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: no report there ({error})") from None

    def accuracy(self, by: str = "digits", decoder: str | None = None, over: str = "texts") -> Any:
        """Accuracy and its 95 % interval, as fractions.

        Args:
            by: "digits", "language" or "major_group".
            decoder: "seq2seq", "linear" or "both"; None: the last one that the report has.
            over: distinct "texts", or "rows".

        Raises:
            UserError: the report has no such figures.
        """
        if by not in GROUPS or over not in ("texts", "rows"):
            raise UserError(f"by {by!r} over {over!r}: choose by from {list(GROUPS)}, over from texts, rows")
        groups = self._decoder(decoder)[GROUPS[by]]
        pairs = groups.items() if isinstance(groups, dict) else ((each["digits"], each) for each in groups)
        names = (by, "rows", "texts", "accuracy", "low", "high")
        return as_table(
            names,
            [(name, each["rows"], each["texts"], *each[f"over_{over}"]["accuracy"]) for name, each in pairs],
        )

    def coverage(self, decoder: str | None = None) -> Any:
        """How many of the distinct texts keep an answer if 90, 95, 98 and 99 % of the answers are to be
        right, and how many then are, as fractions. Raises UserError.
        """
        names = ["accuracy", "confidence", *(a + b for a in ("stay", "right") for b in ("", "_low", "_high"))]
        return as_table(
            names,
            [
                (
                    each["accuracy"],
                    math.nan if each["threshold"] is None else each["threshold"],
                    *(each["stay"]["over_texts"] or [math.nan] * 3),
                    *(each["right"]["over_texts"] or [math.nan] * 3),
                )
                for each in self._decoder(decoder)["coverage"]["targets"]
            ],
        )

    def confusions(self, decoder: str | None = None) -> Any:
        """The most frequent mistakes, with texts. Raises UserError."""
        names = ("true", "predicted", "texts", "examples")
        return as_table(
            names, [[each[name] for name in names] for each in self._decoder(decoder)["confusions"]]
        )

    def figures(self) -> tuple[Any, Any]:
        """Figures of matplotlib: accuracy by number of digits, and by confidence. Raises UserError if
        matplotlib is not installed.
        """
        try:
            return figures_of(self)[:2]
        except ImportError:
            raise UserError("figures need matplotlib: pip install matplotlib") from None

    def _decoder(self, name: str | None) -> dict:
        decoders = self["decoders"]
        if name is not None and name not in decoders:
            raise UserError(f"decoder {name!r}: the report has {', '.join(decoders)}")
        return decoders[name or list(decoders)[-1]]

    def _repr_markdown_(self) -> str:
        return self.text


def as_table(names: Sequence[str], rows: list) -> Any:
    try:
        import pandas
    except ImportError:
        return [dict(zip(names, row)) for row in rows]
    return pandas.DataFrame(rows, columns=list(names))


# ---- in words


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def cell(values: list[float] | None) -> str:
    """A value and its interval, as percentages."""
    return "" if not values else f"{percent(values[0])} ({percent(values[1])}–{percent(values[2])})"


def table(header: list[str], rows: list[list]) -> list[str]:
    """The lines of a Markdown table; bars in cells would end them."""

    def line(cells: list) -> str:
        return "| " + " | ".join(str(each).replace("|", "\\|").replace("\n", " ") for each in cells) + " |"

    return [line(header), "|" + "---|" * len(header), *map(line, rows), ""]


def decoder_lines(decoder: str, figures: dict) -> list[str]:
    """The section on a decoder."""
    lines = [
        f"## {NAMES[decoder]}",
        "",
        f"{figures['right_rows']:,} rows right, {percent(figures['accuracy'])} %;"
        f" {percent(figures['accuracy_with_rows_outside_key'])} % if rows with codes outside the key count"
        " as wrong.",
        "",
    ]
    if figures["codes_outside_key"]:
        lines += [f"{figures['codes_outside_key']:,} of the codes that it wrote are not in the key.", ""]
    if "codes_above" in figures:
        lines += [f"Thresholds: {figures['codes_above']}.", ""]
    measures = ("accuracy", "precision", "recall", "f1")
    header = [
        "rows",
        "texts",
        *(f"{name}, %" for name in measures),
        "accuracy over texts, %",
        "F1 over texts, %",
    ]
    for name, groups in (
        ("digits", [(each["digits"], each) for each in figures["by_digits"]]),
        ("language", figures["by_language"].items()),
        ("major group", figures["by_major_group"].items()),
    ):
        rows = [
            [label, f"{each['rows']:,}", f"{each['texts']:,}"]
            + [cell(each["over_rows"].get(measure)) for measure in measures]
            + [cell(each["over_texts"].get(measure)) for measure in ("accuracy", "f1")]
            for label, each in groups
        ]
        lines += table([name, *header], rows)
    if "top_k" in figures:
        rows = [[each["k"], percent(each["one"]), percent(each["all"])] for each in figures["top_k"]]
        lines += table(["k", "one true code among the k most probable, %", "all, %"], rows)
    if "thresholds" in figures:
        rows = [
            [language, f"{each['rows']:,}", each["threshold_f1"], percent(each["f1"])]
            + [each["threshold_accuracy"], percent(each["right"] / each["rows"])]
            for language, each in figures["thresholds"].items()
        ]
        header = ["language", "rows", "threshold for F1", "F1, %", "threshold for accuracy", "accuracy, %"]
        lines += table(header, rows)
    calibration, coverage = figures["calibration"], figures["coverage"]
    errors = (calibration[f"expected_calibration_error{over}"] for over in ("", "_over_texts"))
    lines += [
        "Expected calibration error: {} percentage points over rows, {} over distinct texts.".format(
            *map(percent, errors)
        ),
        "",
    ]
    rows = [
        [f"{each['from']:.1f}–{each['to']:.1f}", f"{each['rows']:,}"]
        + [percent(each["confidence"]), percent(each["accuracy"])]
        for each in calibration["bins"]
    ]
    lines += table(["confidence", "rows", "mean confidence, %", "accuracy, %"], rows)
    rows = [
        [f"{100 * each['accuracy']:g}", "none" if each["threshold"] is None else f"{each['threshold']:.3f}"]
        + [cell(each[what][over]) for what in ("stay", "right") for over in ("over_rows", "over_texts")]
        for each in coverage["targets"]
    ]
    header = [
        "to be right in, %",
        "confidence from",
        "rows that stay, %",
        "texts, %",
        "right of these rows, %",
    ]
    lines += table([*header, "texts, %"], rows)

    if not figures["confusions"]:
        return [*lines, "No row is wrong.", ""]
    rows = [
        [each["true"], each["predicted"] or "(no code)", f"{each['rows']:,}", f"{each['texts']:,}"]
        + ["; ".join(each["examples"])]
        for each in figures["confusions"]
    ]
    header = ["true", "predicted", "rows", "texts", "examples"]
    return [*lines, "Most frequent confusions:", "", *table(header, rows)]


def data_lines(data: dict) -> list[str]:
    """What was evaluated and what was not: also for the console."""
    lines = [
        f"Rows: {data['rows_read']:,} read, {data['rows']:,} evaluated, {data['texts']:,} distinct texts"
    ]
    if data["other_part_rows"]:
        lines.append(
            f"Not evaluated: {data['other_part_rows']:,} rows whose texts --share-val {data['share_val']:g}"
            " leaves to training"
        )
    lines += [
        f"Rejected: {rows:,} × {kind}, listed in rejected_rows.csv" for kind, rows in data["rejected"].items()
    ]
    if data["rows_outside_key"]:
        lines.append(
            f"Codes that the model does not know: {data['rows_outside_key']:,} rows with such a code are not"
            " in the figures; one figure counts them as wrong"
        )
    lines += [
        f"Language {name!r} is not one of the model's: {rows:,} rows were coded as unk"
        for name, rows in data["unknown_languages"].items()
    ]
    if data["texts_trained_on"]:
        lines.append(
            f"{data['texts_trained_on']:,} of the distinct texts are among those that the model was trained"
            " on: that flatters it"
        )
    return lines


def baseline_line(report: dict) -> str:
    """What the decoders add to the linear support vector machine: also for the console."""
    svm = report["baseline"]["baselines"]["svm"]
    seconds, least = svm["fit_seconds"] + svm["predict_seconds"], round(100 * svm["over_texts"][0], 1)
    parts = []
    for name, figures in report["decoders"].items():
        value = round(100 * figures["by_digits"][-1]["over_texts"]["accuracy"][0], 1)
        more = f"{abs(value - least):.1f} points {'more' if value >= least else 'fewer'}"
        by = "both decoders together" if name == "both" else f"the {name} decoder"
        parts.append(f"{value:.1f}% by {by}, {more}")
    model = "; ".join(parts)
    return f"Baseline (linear SVM on n-grams, {seconds:,.0f} s): {least:.1f}% of texts; the model: {model}"


def baseline_lines(report: dict) -> list[str]:
    """The section on the baselines."""
    found, known = report["baseline"], report["data"]["texts_trained_on"]
    method = (
        f"Fitted to {found['rows']:,} of the {found['rows_of_training']:,} training rows of the run (seed"
        f" {report['seed']}), counted on the same rows as the model"
        + (f", {known:,} of whose distinct texts both were trained on" if known else "")
        + ". SVM: a linear support vector machine for each code on TF-IDF n-grams of characters (2 to"
        " 5, within words) and words (1 and 2)"
        + (", the language in front of the text" if found["language_in_front"] else "")
        + "; look-up: the most frequent codes of the same text, else of all rows; majority: the most"
        " frequent codes."
    )
    rows = [
        [{"svm": "SVM"}.get(name, name), cell(each["over_texts"]), cell(each["over_rows"])]
        + [cell(each["several"] and each["several"]["over_rows"])]
        + [f"{each['fit_seconds'] + each['predict_seconds']:.1f}"]
        for name, each in found["baselines"].items()
    ]
    header = ["accuracy over texts, %", "over rows, %", "over rows with several codes, %", "seconds"]
    return [
        "## Baseline",
        "",
        f"{baseline_line(report)}.",
        "",
        method,
        "",
        *table(["baseline", *header], rows),
    ]


def markdown(report: dict) -> str:
    """report.md."""
    model, data, figures = report["model"], report["data"], report["validation"]
    lines = [
        "# Evaluation",
        "",
        f"Model: {model['file']}, step {model['step'] or 0:,}, {model['codes']:,} codes of"
        f" {model['system']}{', computed in int8' if 'number_format' in model else ''}."
        f" Data: {', '.join(data['files'])}.",
        "",
        *(f"- {line}" for line in data_lines(data)),
    ]
    if data["texts_validated_on"] and model["confidence_texts"]:
        lines.append(
            f"- {data['texts_validated_on']:,} of the distinct texts are among those that the run was"
            " validated on, and its confidence fitted on: that flatters what is said of it"
        )
    lines += ["", "As validation during training counts:", ""]
    lines += table(list(figures), [[f"{value:.6g}" for value in figures.values()]])
    for name, of_decoder in report["decoders"].items():
        lines += decoder_lines(name, of_decoder)
    if "baseline" in report:
        lines += baseline_lines(report)
    if report["plots"]:
        lines += ["## Plots", "", *(f"![{name}]({name})" for name in report["plots"]), ""]
    texts = model["confidence_texts"]
    fitted = f", as it was fitted on {texts:,} texts" if texts else ""
    return (
        "\n".join(lines)
        + "\n"
        + METHOD.format(resamples=report["resamples"], seed=report["seed"], fitted=fitted)
    )


def figures_of(report: dict) -> tuple[Any, Any, Any]:
    """Figures of matplotlib as PLOTS names them: accuracy by digits, by confidence, and by the share of texts
    that stay. Raises ImportError without matplotlib, the extra `plots`.
    """
    from matplotlib.figure import Figure

    figures = [Figure(figsize=(6, 4), layout="constrained") for _ in PLOTS]
    by_digits, by_conf, by_share = (figure.subplots() for figure in figures)
    for name, figures_of_decoder in report["decoders"].items():
        label = NAMES[name]
        digits = [each["digits"] for each in figures_of_decoder["by_digits"]]
        value, low, high = (
            100 * np.array([each["over_texts"]["accuracy"] for each in figures_of_decoder["by_digits"]]).T
        )
        errors = np.maximum([value - low, high - value], 0)
        by_digits.errorbar(digits, value, errors, capsize=3, marker="o", label=label)
        bins = [(each["confidence"], each["accuracy"]) for each in figures_of_decoder["calibration"]["bins"]]
        by_conf.plot(*zip(*bins), marker="o", label=label)
        points = [point[1:] for point in figures_of_decoder["coverage"]["curve"] if point[1] >= 0.02]
        by_share.plot(*zip(*points), label=label)
        by_digits.set_xticks(digits)
    by_conf.plot([0, 1], [0, 1], color="grey", linewidth=1)
    by_digits.set(xlabel="digits", ylabel="accuracy over distinct texts, %", ylim=(0, 100))
    by_conf.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    by_share.set(xlabel="share of texts, the surest first", ylabel="accuracy", xlim=(0, 1), ylim=(0.5, 1.01))
    for axes in (by_digits, by_conf, by_share):
        axes.legend()
    return figures[0], figures[1], figures[2]
