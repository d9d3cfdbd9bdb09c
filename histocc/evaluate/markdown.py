"""An evaluation report for people: Markdown, and plots where matplotlib is installed."""

import importlib.util
import io
from collections.abc import Callable
from typing import Any

NAMES = {
    "seq2seq": "Seq2seq decoder (greedy)",
    "linear": "Linear decoder (probability above its threshold)",
    "both": "Both decoders together (linear share {linear_share:g})",
}
MEASURES = ("accuracy", "precision", "recall", "f1")
PLOTS = ("digits.png", "calibration.png", "coverage.png")

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


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def name_of(decoder: str, found: dict) -> str:
    """The name of a decoder with these figures, for people."""
    return NAMES[decoder].format(**found)


def cell(values: list[float] | None) -> str:
    return "" if not values else f"{percent(values[0])} ({percent(values[1])}–{percent(values[2])})"


def table(header: list[str], rows: list[list]) -> list[str]:
    """A Markdown table; bars in cells would end them."""

    def line(cells: list) -> str:
        return "| " + " | ".join(str(each).replace("|", "\\|").replace("\n", " ") for each in cells) + " |"

    return [line(header), "|" + "---|" * len(header), *map(line, rows), ""]


def _measures(name: str, groups: list[tuple[str, dict]]) -> list[str]:
    header = [
        name,
        "rows",
        "texts",
        *(f"{measure}, %" for measure in MEASURES),
        "accuracy over texts, %",
        "F1 over texts, %",
    ]
    return table(
        header,
        [
            [
                label,
                f"{found['rows']:,}",
                f"{found['texts']:,}",
                *(cell(found["over_rows"].get(measure)) for measure in MEASURES),
                cell(found["over_texts"].get("accuracy")),
                cell(found["over_texts"].get("f1")),
            ]
            for label, found in groups
        ],
    )


def _decoder(name: str, found: dict) -> list[str]:
    """The section on a decoder."""
    lines = _what_it_got_right(name, found)
    lines += _measures("digits", [(str(each["digits"]), each) for each in found["by_digits"]])
    lines += _measures("language", list(found["by_language"].items()))
    lines += _measures("major group", list(found["by_major_group"].items()))
    if "top_k" in found:
        lines += table(
            ["k", "one true code among the k most probable, %", "all, %"],
            [[each["k"], percent(each["one"]), percent(each["all"])] for each in found["top_k"]],
        )
    if "thresholds" in found:
        lines += _thresholds(found["thresholds"])
    lines += _calibration(found["calibration"]) + _coverage(found["coverage"])
    return lines + _confusions(found["confusions"])


def _what_it_got_right(name: str, found: dict) -> list[str]:
    """The beginning of the section, with what was decided by."""
    lines = [
        f"## {name_of(name, found)}",
        "",
        (
            f"{found['right_rows']:,} rows right, {percent(found['accuracy'])} %;"
            f" {percent(found['accuracy_with_rows_outside_key'])} % if rows with codes outside the key count"
            " as wrong."
        ),
        "",
    ]
    if found.get("codes_outside_key"):
        lines += [f"{found['codes_outside_key']:,} of the codes that it wrote are not in the key.", ""]
    if found.get("codes_above"):
        lines += [f"Thresholds: {found['codes_above']}.", ""]
    if "linear_share_of_halves" in found:
        lines += [
            (
                f"Linear share: {found['linear_share']:g} on all texts;"
                f" {' and '.join(f'{each:g}' for each in found['linear_share_of_halves'])} on halves of them,"
                " each of which is used for the other."
            ),
            "",
        ]
    return lines


def _thresholds(found: dict[str, dict]) -> list[str]:
    """The best thresholds by language."""
    return table(
        ["language", "rows", "threshold for F1", "F1, %", "threshold for accuracy", "accuracy, %"],
        [
            [
                language,
                f"{each['rows']:,}",
                each["threshold_f1"],
                percent(each["f1"]),
                each["threshold_accuracy"],
                percent(each["right"] / each["rows"]),
            ]
            for language, each in found.items()
        ],
    )


def _calibration(found: dict) -> list[str]:
    lines = [
        f"Expected calibration error: {percent(found['expected_calibration_error'])} percentage points over"
        f" rows, {percent(found['expected_calibration_error_over_texts'])} over distinct texts.",
        "",
    ]
    return lines + table(
        ["confidence", "rows", "mean confidence, %", "accuracy, %"],
        [
            [
                f"{each['from']:.1f}–{each['to']:.1f}",
                f"{each['rows']:,}",
                percent(each["confidence"]),
                percent(each["accuracy"]),
            ]
            for each in found["bins"]
        ],
    )


def _coverage(found: dict) -> list[str]:
    """How many answers stay where so many are to be right, of all rows and by group."""

    def threshold(value: float | None) -> str:
        return "none" if value is None else f"{value:.3f}"

    lines = table(
        [
            "to be right in, %",
            "confidence from",
            "rows that stay, %",
            "texts, %",
            "right of these rows, %",
            "texts, %",
        ],
        [
            [
                f"{100 * each['accuracy']:g}",
                threshold(each["threshold"]),
                *(
                    cell(each[what][over])
                    for what in ("stay", "right")
                    for over in ("over_rows", "over_texts")
                ),
            ]
            for each in found["targets"]
        ],
    )
    for name, groups in (("language", found["by_language"]), ("major group", found["by_major_group"])):
        lines += table(
            [
                name,
                *(f"texts that stay: right, %, at {100 * each['accuracy']:g}" for each in found["targets"]),
            ],
            [[label, *(_stay_and_right(each) for each in targets)] for label, targets in groups.items()],
        )
    return lines


def _stay_and_right(found: dict) -> str:
    stay, right = (found[what]["over_texts"] for what in ("stay", "right"))
    return f"{percent(stay[0]) if stay else ''}: {cell(right) or 'none'}"


def _confusions(found: list[dict]) -> list[str]:
    if not found:
        return ["No row is wrong.", ""]
    return ["Most frequent confusions:", ""] + table(
        ["true", "predicted", "rows", "texts", "examples"],
        [
            [
                each["true"],
                each["predicted"] or "(no code)",
                f"{each['rows']:,}",
                f"{each['texts']:,}",
                "; ".join(each["examples"]),
            ]
            for each in found
        ],
    )


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


def fitted_line(report: dict) -> str:
    """Whether the figures of confidence are about texts that it was fitted on; "" where they are not."""
    known = report["data"]["texts_validated_on"]
    if not (known and report["model"]["confidence_texts"]):
        return ""
    return (
        f"{known:,} of the distinct texts are among those that the run was validated on, and its confidence"
        " fitted on: that flatters what is said of it"
    )


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
    return (
        f"Baseline (linear SVM on n-grams, {seconds:,.0f} s): {least:.1f}% of texts; the model: "
        + "; ".join(parts)
    )


def _baseline(report: dict) -> list[str]:
    """The section on the baselines."""
    found, data = report["baseline"], report["data"]
    fitted = f"{found['rows']:,} training rows of the run"
    if found["rows"] < found["rows_of_training"]:
        fitted = (
            f"a sample of {found['rows']:,} of the {found['rows_of_training']:,} training rows of the"
            f" run (seed {report['seed']})"
        )
    known = data["texts_trained_on"]
    method = (
        f"Fitted to {fitted}, counted on the same rows as the model"
        + (f", {known:,} of whose distinct texts both were trained on" if known else "")
        + ". SVM: a linear support vector machine for each code on TF-IDF n-grams of characters (2 to"
        " 5, within words) and words (1 and 2)"
        + (", the language in front of the text" if found["language_in_front"] else "")
        + "; look-up: the most frequent codes of the same text, else of all rows; majority: the most"
        " frequent codes."
    )
    header = [
        "baseline",
        "accuracy over texts, %",
        "over rows, %",
        "over rows with several codes, %",
        "seconds",
    ]
    lines = ["## Baseline", "", f"{baseline_line(report)}.", "", method, ""]
    return lines + table(
        header,
        [
            [
                {"svm": "SVM"}.get(name, name),
                cell(each["over_texts"]),
                cell(each["over_rows"]),
                cell(each["several"] and each["several"]["over_rows"]),
                f"{each['fit_seconds'] + each['predict_seconds']:.1f}",
            ]
            for name, each in found["baselines"].items()
        ],
    )


def markdown(report: dict) -> str:
    model, figures = report["model"], report["validation"]
    lines = [
        "# Evaluation",
        "",
        (
            f"Model: {model['file']}, step {model['step'] or 0:,}, {model['codes']:,} codes of"
            f" {model['system']}{', computed in int8' if 'number_format' in model else ''}."
            f" Data: {', '.join(report['data']['files'])}."
        ),
        "",
        *(f"- {line}" for line in data_lines(report["data"])),
        *(f"- {line}" for line in [fitted_line(report)] if line),
        "",
        "As validation during training counts:",
        "",
        *table(list(figures), [[f"{value:.6g}" for value in figures.values()]]),
    ]
    for name, found in report["decoders"].items():
        lines += _decoder(name, found)
    if "baseline" in report:
        lines += _baseline(report)
    if report["plots"]:
        lines += ["## Plots", "", *(f"![{name}]({name})" for name in report["plots"]), ""]
    or_both = ", or of both" if "both" in report["decoders"] else ""
    texts = model.get("confidence_texts")
    fitted = f", both\n  as they were fitted on {texts:,} texts" if texts else ""
    method = METHOD.format(resamples=report["resamples"], seed=report["seed"], or_both=or_both, fitted=fitted)
    if "both" in report["decoders"]:
        method += METHOD_OF_BOTH.format(**report["decoders"]["both"])
    return "\n".join(lines) + "\n" + method


def plots(report: dict) -> dict[str, Callable] | None:
    """{name: what writes it to an open file}; None where matplotlib, the extra `plots`, is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    return dict(zip(PLOTS, map(_writer, figures_of(report))))


def figures_of(report: dict) -> tuple[Any, Any, Any]:
    """Figures of matplotlib: accuracy by digits, by confidence, and by the share of texts that stay."""
    from matplotlib.figure import Figure

    digits, bins, stay = (Figure(figsize=(6, 4), layout="constrained") for _ in PLOTS)
    left, right, last = (figure.subplots() for figure in (digits, bins, stay))
    for name, found in report["decoders"].items():
        places = [each["digits"] for each in found["by_digits"]]
        values = [[100 * value for value in each["over_texts"]["accuracy"]] for each in found["by_digits"]]
        left.errorbar(
            places,
            [value for value, _, _ in values],
            capsize=3,
            marker="o",
            label=name_of(name, found),
            yerr=[
                [max(value - low, 0) for value, low, _ in values],
                [max(high - value, 0) for value, _, high in values],
            ],
        )
        right.plot(
            *zip(*((each["confidence"], each["accuracy"]) for each in found["calibration"]["bins"])),
            marker="o",
            label=name_of(name, found),
        )
        points = [point for point in found["coverage"]["curve"] if point[1] >= 0.02]
        last.plot(*zip(*((point[1], point[2]) for point in points)), label=name_of(name, found))
    last.set(xlabel="share of texts, the surest first", ylabel="accuracy", xlim=(0, 1), ylim=(0.5, 1.01))
    last.legend()
    left.set(xlabel="digits", ylabel="accuracy over distinct texts, %", ylim=(0, 100), xticks=places)
    right.plot([0, 1], [0, 1], color="grey", linewidth=1)
    right.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    left.legend()
    right.legend()
    return digits, bins, stay


def _writer(figure) -> Callable:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return lambda file: file.write(buffer.getvalue())
