"""What an evaluation reports: as text, tables and plots."""

import json
import os
from typing import Any

import numpy as np

from histocc.predict.tables import as_table
from histocc.runtime.errors import UserError

JSON, MARKDOWN, REJECTED = "report.json", "report.md", "rejected_rows.csv"
PLOTS = ("digits.png", "calibration.png", "coverage.png")
NAMES = {
    "seq2seq": "Seq2seq decoder (greedy)",
    "linear": "Linear decoder (probability above its threshold)",
    "both": "Both decoders together (linear share {linear_share:g})",
}
GROUPS = {"digits": "by_digits", "language": "by_language", "major_group": "by_major_group"}

METHOD = """\
## How it is counted

- A row is right (accuracy) if the set of predicted codes is the set of its codes, in any order; one code too
  many or too few is wrong.
- Precision, recall and F1 count codes: tp / (tp + fp), tp / (tp + fn), 2 tp / (2 tp + fp + fn), summed over
  rows; 0 where there is nothing to divide by.
- At fewer digits every code is cut to its first digits, and codes of a row that become equal count once. -1,
  -2, -3 and ? are never cut and match nothing but themselves; so are codes that are shorter than that.
- Over distinct texts, each text (case and blanks aside) weighs the same however many rows have it; its rows
  share that weight.
- In brackets: 95 % intervals, the percentiles 2.5 and 97.5 of {resamples:,} bootstrap draws of texts with all
  their rows (seed {seed}).
- Major group: the first digit. Accuracy is that of rows with a true code of the group; precision and recall
  are those of the group's codes in all rows.
- Top k: the k most probable codes of the linear decoder, or of the search over the key with the seq2seq
  decoder{or_both}, hold one, or all, of the true codes. With more than k codes a row cannot have all.
- Confidence of the seq2seq decoder: the probability that it writes this set of codes, in any order, and no
  other; of the linear decoder: the probability of exactly its set of codes{fitted}. Expected
  calibration error: the mean over rows, or over distinct texts, of the distance between confidence and
  accuracy of their bin. Few texts alone make it some points even where confidence is what it says.
- To be right in so many percent: only answers from some confidence on are given. The confidence is chosen on
  one half of the texts, and the rows of the other half are counted with it. The one that is named was chosen
  on all of them.
- Best threshold: the one of 0.02, 0.04 … 0.98 with the highest F1, and with the highest accuracy, on these
  very rows: test it on others. Languages with fewer than 100 rows get none.
"""

METHOD_OF_BOTH = """\
- Both decoders together rank the codes by (1 - share) times the log-probability of the seq2seq decoder plus
  share times that of the softmax of the linear one, among the {candidates} best codes of each. A row gets the
  best ones, as many as the linear decoder has above its threshold, at least one. Confidence, and what stays
  of the answers, are about the best code alone, with the share that the model holds: whether it is one of the
  true codes. The share is the one of 0, 0.1 … 1 with the highest accuracy over distinct
  texts, chosen on these texts; the figures are those of two halves of the texts, each counted with the share
  chosen on the other.
"""


class Report(dict):
    """What report.json holds, with tables and figures of it. text: report.md, as a notebook shows it."""

    def __init__(self, found: dict, text: str):
        super().__init__(found)
        self.text = text

    @classmethod
    def read(cls, folder: str | os.PathLike) -> "Report":
        """Of a folder into which an evaluation was written. Raises UserError."""
        try:
            with open(os.path.join(folder, JSON), encoding="utf-8") as file:
                found = json.load(file)
            with open(os.path.join(folder, MARKDOWN), encoding="utf-8") as file:
                return cls(found, file.read())
        except OSError as error:
            raise UserError(f"{folder}: no report there ({error})") from None
        except ValueError as error:
            raise UserError(f"{os.path.join(folder, JSON)}: is damaged ({error})") from None

    def accuracy(self, by: str = "digits", decoder: str | None = None, over: str = "texts") -> Any:
        """Accuracy and its 95 % interval by "digits", "language" or "major_group", over distinct "texts" or
        over "rows", as fractions.

        decoder: "seq2seq", "linear" or "both"; None: the last one that the report has. Returns a DataFrame,
        or a list of dicts where pandas is not installed. Raises UserError.
        """
        found = self._decoder(decoder)
        if by not in GROUPS or over not in ("texts", "rows"):
            raise UserError(f"by {by!r} over {over!r}: choose by from {list(GROUPS)}, over from texts, rows")
        groups = found[GROUPS[by]]
        pairs = groups.items() if isinstance(groups, dict) else ((each["digits"], each) for each in groups)
        rows = [
            (name, each["rows"], each["texts"], *each[f"over_{over}"]["accuracy"]) for name, each in pairs
        ]
        return _table((by, "rows", "texts", "accuracy", "low", "high"), rows)

    def coverage(self, decoder: str | None = None) -> Any:
        """How many of the distinct texts keep an answer where 90, 95, 98 and 99 % of the answers are to be
        right, and how many then are, as fractions; a DataFrame or a list of dicts. Raises UserError.
        """
        nothing = [float("nan")] * 3
        rows = [
            (
                each["accuracy"],
                float("nan") if each["threshold"] is None else each["threshold"],
                *(each["stay"]["over_texts"] or nothing),
                *(each["right"]["over_texts"] or nothing),
            )
            for each in self._decoder(decoder)["coverage"]["targets"]
        ]
        shares = (name + part for name in ("stay", "right") for part in ("", "_low", "_high"))
        return _table(("accuracy", "confidence", *shares), rows)

    def confusions(self, decoder: str | None = None) -> Any:
        """The most frequent mistakes, with texts; a DataFrame or a list of dicts. Raises UserError."""
        names = ("true", "predicted", "texts", "examples")
        return _table(
            names, [[each[name] for name in names] for each in self._decoder(decoder)["confusions"]]
        )

    def figures(self) -> tuple[Any, Any]:
        """Figures of matplotlib: accuracy by number of digits, and accuracy by confidence. Raises UserError
        where matplotlib is not installed.
        """
        try:
            return figures_of(self)[:2]
        except ImportError:
            raise UserError("figures need matplotlib: pip install matplotlib") from None

    def _decoder(self, name: str | None) -> dict:
        found = self["decoders"]
        if name is not None and name not in found:
            raise UserError(f"decoder {name!r}: the report has {', '.join(found)}")
        return found[name or list(found)[-1]]

    def _repr_markdown_(self) -> str:
        return self.text


def _table(names: tuple, rows: list) -> Any:
    """A DataFrame, or a list of dicts where pandas is not installed; numbers as such."""
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    return as_table(
        {
            name: np.array(values) if all(isinstance(each, int | float) for each in values) else values
            for name, values in columns.items()
        }
    )


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


def decoder_lines(decoder: str, found: dict) -> list[str]:
    """The section on a decoder."""
    lines = [
        f"## {NAMES[decoder].format(**found)}",
        "",
        f"{found['right_rows']:,} rows right, {percent(found['accuracy'])} %;"
        f" {percent(found['accuracy_with_rows_outside_key'])} % if rows with codes outside the key count"
        " as wrong.",
        "",
    ]
    if found.get("codes_outside_key"):
        lines += [f"{found['codes_outside_key']:,} of the codes that it wrote are not in the key.", ""]
    if found.get("codes_above"):
        lines += [f"Thresholds: {found['codes_above']}.", ""]
    if "linear_share_of_halves" in found:
        halves = " and ".join(f"{each:g}" for each in found["linear_share_of_halves"])
        lines += [
            f"Linear share: {found['linear_share']:g} on all texts; {halves} on halves of them,"
            " each of which is used for the other.",
            "",
        ]
    measures = ("accuracy", "precision", "recall", "f1")
    header = [
        "rows",
        "texts",
        *(f"{name}, %" for name in measures),
        "accuracy over texts, %",
        "F1 over texts, %",
    ]
    for name, groups in (
        ("digits", [(each["digits"], each) for each in found["by_digits"]]),
        ("language", found["by_language"].items()),
        ("major group", found["by_major_group"].items()),
    ):
        rows = [
            [label, f"{each['rows']:,}", f"{each['texts']:,}"]
            + [cell(each["over_rows"].get(measure)) for measure in measures]
            + [cell(each["over_texts"].get(measure)) for measure in ("accuracy", "f1")]
            for label, each in groups
        ]
        lines += table([name, *header], rows)
    lines += table(
        ["k", "one true code among the k most probable, %", "all, %"],
        [[each["k"], percent(each["one"]), percent(each["all"])] for each in found["top_k"]],
    )
    if "thresholds" in found:
        rows = [
            [language, f"{each['rows']:,}", each["threshold_f1"], percent(each["f1"])]
            + [each["threshold_accuracy"], percent(each["right"] / each["rows"])]
            for language, each in found["thresholds"].items()
        ]
        header = ["language", "rows", "threshold for F1", "F1, %", "threshold for accuracy", "accuracy, %"]
        lines += table(header, rows)
    errors = (found["calibration"][f"expected_calibration_error{over}"] for over in ("", "_over_texts"))
    lines += [
        "Expected calibration error: {} percentage points over rows, {} over distinct texts.".format(
            *map(percent, errors)
        ),
        "",
    ]
    rows = [
        [f"{each['from']:.1f}–{each['to']:.1f}", f"{each['rows']:,}"]
        + [percent(each["confidence"]), percent(each["accuracy"])]
        for each in found["calibration"]["bins"]
    ]
    lines += table(["confidence", "rows", "mean confidence, %", "accuracy, %"], rows)
    targets = found["coverage"]["targets"]
    header = [
        "to be right in, %",
        "confidence from",
        "rows that stay, %",
        "texts, %",
        "right of these rows, %",
    ]
    rows = [
        [
            f"{100 * each['accuracy']:g}",
            "none" if each["threshold"] is None else f"{each['threshold']:.3f}",
            *(cell(each[what][over]) for what in ("stay", "right") for over in ("over_rows", "over_texts")),
        ]
        for each in targets
    ]
    lines += table([*header, "texts, %"], rows)

    def stay_and_right(each: dict) -> str:
        stay, right = (each[what]["over_texts"] for what in ("stay", "right"))
        return f"{percent(stay[0]) if stay else ''}: {cell(right) or 'none'}"

    header = [f"texts that stay: right, %, at {100 * each['accuracy']:g}" for each in targets]
    for name, groups in (("language", "by_language"), ("major group", "by_major_group")):
        rows = [[label, *map(stay_and_right, each)] for label, each in found["coverage"][groups].items()]
        lines += table([name, *header], rows)
    if not found["confusions"]:
        return [*lines, "No row is wrong.", ""]
    rows = [
        [each["true"], each["predicted"] or "(no code)", f"{each['rows']:,}", f"{each['texts']:,}"]
        + ["; ".join(each["examples"])]
        for each in found["confusions"]
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
    found = report["baseline"]["baselines"]["svm"]
    seconds, least = found["fit_seconds"] + found["predict_seconds"], round(100 * found["over_texts"][0], 1)
    parts = []
    for name, each in report["decoders"].items():
        value = round(100 * each["by_digits"][-1]["over_texts"]["accuracy"][0], 1)
        more = f"{abs(value - least):.1f} points {'more' if value >= least else 'fewer'}"
        by = "both decoders together" if name == "both" else f"the {name} decoder"
        parts.append(f"{value:.1f}% by {by}, {more}")
    model = "; ".join(parts)
    return f"Baseline (linear SVM on n-grams, {seconds:,.0f} s): {least:.1f}% of texts; the model: {model}"


def baseline_lines(report: dict) -> list[str]:
    """The section on the baselines."""
    found, known = report["baseline"], report["data"]["texts_trained_on"]
    fitted = f"{found['rows']:,} training rows of the run"
    if found["rows"] < found["rows_of_training"]:
        fitted = (
            f"a sample of {found['rows']:,} of the {found['rows_of_training']:,} training rows of the"
            f" run (seed {report['seed']})"
        )
    method = (
        f"Fitted to {fitted}, counted on the same rows as the model"
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
    for name, found in report["decoders"].items():
        lines += decoder_lines(name, found)
    if "baseline" in report:
        lines += baseline_lines(report)
    if report["plots"]:
        lines += ["## Plots", "", *(f"![{name}]({name})" for name in report["plots"]), ""]
    both, texts = report["decoders"].get("both"), model["confidence_texts"]
    return (
        "\n".join(lines)
        + "\n"
        + METHOD.format(
            resamples=report["resamples"],
            seed=report["seed"],
            or_both=", or of both" if both else "",
            fitted=f", both\n  as they were fitted on {texts:,} texts" if texts else "",
        )
        + (METHOD_OF_BOTH.format(**both) if both else "")
    )


def figures_of(report: dict) -> tuple[Any, Any, Any]:
    """Figures of matplotlib as PLOTS names them: accuracy by digits, by confidence, and by the share of texts
    that stay. Raises ImportError without matplotlib, the extra `plots`.
    """
    from matplotlib.figure import Figure

    digits, bins, stay = (Figure(figsize=(6, 4), layout="constrained") for _ in PLOTS)
    left, right, last = (figure.subplots() for figure in (digits, bins, stay))
    for name, found in report["decoders"].items():
        label, places = NAMES[name].format(**found), [each["digits"] for each in found["by_digits"]]
        values = [[100 * value for value in each["over_texts"]["accuracy"]] for each in found["by_digits"]]
        left.errorbar(
            places,
            [value for value, _, _ in values],
            capsize=3,
            marker="o",
            label=label,
            yerr=[
                [max(value - low, 0) for value, low, _ in values],
                [max(high - value, 0) for value, _, high in values],
            ],
        )
        bars = [(each["confidence"], each["accuracy"]) for each in found["calibration"]["bins"]]
        right.plot(*zip(*bars), marker="o", label=label)
        points = [point for point in found["coverage"]["curve"] if point[1] >= 0.02]
        last.plot(*zip(*((point[1], point[2]) for point in points)), label=label)
    last.set(xlabel="share of texts, the surest first", ylabel="accuracy", xlim=(0, 1), ylim=(0.5, 1.01))
    last.legend()
    left.set(xlabel="digits", ylabel="accuracy over distinct texts, %", ylim=(0, 100), xticks=places)
    right.plot([0, 1], [0, 1], color="grey", linewidth=1)
    right.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    left.legend()
    right.legend()
    return digits, bins, stay
