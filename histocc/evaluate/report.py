"""The figures of a report on rows with known codes, and the report in words.

Sets of codes are pairs (row, code): a row has as many pairs as codes, in any order, or none. COLUMNS are
counted for each row; all measures are ratios of their sums.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from histocc.data.arrays import PreparedData, RowSet, SomeRows
from histocc.data.rows import OUTSIDE_KEY
from histocc.figure import ENTRY, Figure, percent, wilson
from histocc.formatter import BlockyFormatter, cut, hisco_classes
from histocc.model.confidence import BINS, Thresholds, bin_of, calibration_error, curve
from histocc.predict.coder import Coded
from histocc.predict.decoders import DECODERS
from histocc.runtime.log import highlighted

JSON, MARKDOWN, REJECTED, BY_CODE = "report.json", "report.md", "rejected_rows.csv", "by_code.csv"
TITLES = {decoder.in_report: decoder.title for decoder in DECODERS.values()}
COLUMNS = ("counted", "right", "tp", "fp", "fn")
MEASURES = ("accuracy", "precision", "recall", "f1")
ERRORS = (0.05, 0.1)  # shares of wrong answers at which the share that is coded automatically is given
GRID = np.arange(1, 50) / 50  # thresholds that are compared: 0.02, 0.04 … 0.98
MIN_ROWS = 100  # a language with fewer rows gets no threshold of its own
MAX_CONFUSIONS, MAX_EXAMPLES = 20, 3
MAX_SHOWN, MAX_COSTLY = 10, 8  # lines of a table of groups; of one of codes or confusions
NO_CODE, OTHERS = "(no code)", "all others"
Groups = dict[str, tuple[np.ndarray, Sequence]]  # by name: the number of each row's group, and their labels

METHOD = """\
## How it is counted

A row is right if the set of predicted codes is the set of its codes, in any order. Each text (case and blanks
aside) weighs the same, however many rows have it. In brackets: 95 % intervals of as many independent texts
(Wilson). At a level codes are cut to their first digits or parts; -1, -2, -3 and ? are never cut. Of groups
the ten with most rows are shown. Expected: the mean confidence, the probability that exactly these codes are
right{fitted}.
"""


def distinct_pairs(rows: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Return pairs as one number each, sorted, each once: row · 2³² + item."""
    return np.unique((rows.astype(np.int64) << 32) | items.astype(np.int64))


def row_counts(n: int, pred: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Return COLUMNS of each of `n` rows, float64 [n, 5], by `distinct_pairs` of predicted and true codes."""
    hit = np.isin(pred, true, assume_unique=True)
    tp, all_pred, all_true = (np.bincount(pairs >> 32, minlength=n)[:n] for pairs in (pred[hit], pred, true))
    fp, fn = all_pred - tp, all_true - tp
    return np.stack([np.ones(n), (fp + fn == 0), tp, fp, fn], axis=1).astype(np.float64)


def ratios(sums: np.ndarray) -> list[float]:
    """Return MEASURES of summed COLUMNS, float64 [5]; 0 if the denominator is 0."""
    counted, right, tp, fp, fn = sums.tolist()
    pairs = [(right, counted), (tp, tp + fp), (tp, tp + fn), (2 * tp, 2 * tp + fp + fn)]
    return [part / of if of else 0.0 for part, of in pairs]


def measured(columns: np.ndarray, text: np.ndarray) -> dict:
    """Return accuracy, precision, recall and F1 over rows and over distinct texts. The accuracy over texts
    has the 95 % interval of a share of independent texts, as the figure of the model has it.

    Args:
        columns: COLUMNS of each row, float64 [N, 5]; rows of zeros take no part.
        text: number of each row's text, int64 [N], from 0 on; over texts each weighs 1, shared by its rows.

    Returns:
        {"rows", "texts", "over_texts", "over_rows"}, the last two {measure: value}, but for the accuracy over
        texts, which is [value, low, high].
    """
    sums = np.stack([np.bincount(text, weights=column) for column in columns.T], axis=1)
    sums = sums[sums[:, 0] > 0]  # [T, 5]
    over_texts, over_rows = (
        dict[str, Any](zip(MEASURES, ratios(each.sum(0)))) for each in (sums / sums[:, :1], sums)
    )
    over_texts["accuracy"] = [share := over_texts["accuracy"], *wilson(share, len(sums))]
    counts = {"rows": int(sums[:, 0].sum()), "texts": len(sums)}
    return counts | {"over_texts": over_texts, "over_rows": over_rows}


def macro_f1(kinds: list[np.ndarray], codes: int, weight: np.ndarray) -> float:
    """Return the mean F1 of the codes that are true or predicted.

    Args:
        kinds: pairs of rows and codes that are right, only predicted, and only true.
        codes: number of codes.
        weight: float [N], of each row.
    """
    tp, fp, fn = (np.bincount(pairs & 0xFFFFFFFF, weight[pairs >> 32], codes) for pairs in kinds)
    total = 2 * tp + fp + fn
    return float((2 * tp[total > 0] / total[total > 0]).mean())


def code_table(kinds: list[np.ndarray], names: list[str], titles: dict[str, str]) -> list[dict]:
    """Return the figures of each true code, the most frequent first. kinds: as for `macro_f1`."""
    tp, fp, fn = (np.bincount(pairs & 0xFFFFFFFF, minlength=len(names)) for pairs in kinds)
    instead: dict[int, list[str]] = {}  # codes that were only predicted, by row
    for pair in kinds[1].tolist():
        instead.setdefault(pair >> 32, []).append(names[pair & 0xFFFFFFFF])
    mistakes: dict[int, Counter[str]] = {}
    for pair in kinds[2].tolist():
        mistakes.setdefault(pair & 0xFFFFFFFF, Counter()).update(instead.get(pair >> 32, [NO_CODE]))
    found, rows = [], tp + fn
    for code in np.argsort(-rows, kind="stable")[: np.count_nonzero(rows)].tolist():
        values = ratios(np.array([1, 0, tp[code], fp[code], fn[code]]))
        first = {"code": names[code], "title": titles.get(names[code], ""), "rows": int(rows[code])}
        first |= {"missed": int(fn[code]), "wrongly_given": int(fp[code])}
        often = mistakes.get(code, Counter([""])).most_common(1)[0][0]
        last = {"most_frequent_mistake": often, "title_of_mistake": titles.get(often, "")}
        found.append(first | dict(zip(MEASURES[1:], values[1:])) | last)
    return found


def class_errors(true: list[str], pred: list[str]) -> dict[str, float]:
    """Return how often the HISCLASS of the first code is right, and how far its HISCAM is off, over the rows
    whose codes have one. true, pred: the first code of each row, "" for none.
    """

    def classes(name: str) -> list[np.ndarray]:
        of_code = hisco_classes()[name]
        return [np.array([of_code.get(code, "") for code in codes]) for codes in (true, pred)]

    (true_class, pred_class), (true_cam, pred_cam) = classes("hisclass"), classes("hiscam")
    found, both = {}, (true_cam != "") & (pred_cam != "")
    if (known := true_class != "").any():
        found["hisclass_right"] = float((true_class == pred_class)[known].mean())
    if both.any():
        gap = pred_cam[both].astype(float) - true_cam[both].astype(float)
        found |= {"hiscam_error": float(gap.mean()), "hiscam_absolute_error": float(np.abs(gap).mean())}
    return found


def calibration(conf: np.ndarray, right: np.ndarray, weight: np.ndarray) -> dict:
    """Return how often answers of each confidence are right, in bins (`bin_of`), and the expected calibration
    error over rows and, by the weight of each, over texts. All arguments are float or bool [N].
    """
    place, bins = bin_of(conf), []
    for i in np.unique(place).tolist():
        inside = place == i
        found = {"from": i / BINS, "to": (i + 1) / BINS, "rows": int(inside.sum())}
        found |= {"confidence": float(conf[inside].mean()), "accuracy": float(right[inside].mean())}
        for name, values in (("confidence", conf), ("accuracy", right)):
            found[f"{name}_over_texts"] = float(np.average(values[inside], weights=weight[inside]))
        bins.append(found | {"texts": float(weight[inside].sum())})
    errors = [calibration_error(conf, right, each) for each in (np.ones(len(conf)), weight)]
    names = "expected_calibration_error", "expected_calibration_error_over_texts"
    return {"bins": bins} | dict(zip(names, errors))


def automatic(conf: np.ndarray, right: np.ndarray, weight: np.ndarray) -> list[dict]:
    """Return for each of ERRORS the least confidence from which on no more answers are wrong ("conf", None if
    none shows it) and the share of texts and of rows that have it. All arguments: float or bool [N].
    """
    points, found = curve(conf, right, weight, len(conf)), []
    for error in ERRORS:
        least = 1 / (error * weight.sum())  # fewer texts cannot show it
        reached = [(share, limit) for limit, share, good in points if good >= 1 - error and share >= least]
        share, limit = max(reached, default=(0.0, None))
        rows = 0.0 if limit is None else float((conf >= limit).mean())
        found.append({"errors": error, "conf": limit, "texts": share, "rows": rows})
    return found


def best_thresholds(
    numbers: np.ndarray,
    probs: np.ndarray,
    codes: np.ndarray,
    thresholds: Thresholds,
    groups: dict[str, np.ndarray],
) -> dict[str, dict]:
    """Return for each group the threshold of GRID with the highest F1 (over all codes); of several, the one
    nearest to 0.5.

    Args:
        numbers, probs: [N, M], the most probable outputs of each row, their probabilities, the highest first.
        codes: true codes of each row, int64 [N, K], −1 for none.
        thresholds: the model's, which may bound how many codes a row has.
        groups: name → its rows, bool [N].
    """
    is_true = (numbers[:, :, None] == codes[:, None]).any(2)
    among_first = np.pad(is_true.cumsum(1), ((0, 0), (1, 0)))  # true codes among the first 0, 1 … M
    answered = np.stack([(probs > threshold).sum(1) for threshold in GRID], axis=1)  # [N, T]
    answered = thresholds.number(torch.from_numpy(answered)).numpy()
    hits = np.take_along_axis(among_first, answered, axis=1)
    ordered = np.sort(codes, axis=1)
    true = (np.diff(ordered, axis=1, prepend=-1) > 0).sum(1)[:, None]  # distinct codes
    order, best = np.argsort(np.abs(GRID - 0.5), kind="stable"), {}
    for name, part in groups.items():
        f1 = 2 * hits[part].sum(0) / np.maximum((answered[part] + true[part]).sum(0), 1)
        at = order[np.argmax(f1[order])]
        best[name] = {"rows": int(part.sum()), "threshold_f1": float(GRID[at]), "f1": float(f1[at])}
    return best


def confusions(
    wrong: np.ndarray, answers: list[list[str]], codes: list[str], rows: RowSet, titles: dict[str, str]
) -> list[dict]:
    """Return the most frequent pairs of a true set of codes and another that was answered instead, as text:
    first the pairs of the most rows, then those of the most distinct texts, then by name.

    Args:
        wrong: numbers of the wrong rows, int64, ascending.
        answers: the codes that each row got.
        codes: the codes of the key.
    """
    number, seen = Counter(), {}
    for row in wrong.tolist():
        true = {codes[code] for code in rows.codes[row].tolist() if code >= 0}
        pair = tuple("&".join(sorted(some)) for some in (true, set(answers[row])))
        number[pair] += 1
        seen.setdefault(pair, {}).setdefault(int(rows.text_hash[row]), row)
    order = sorted(number, key=lambda pair: (-number[pair], -len(seen[pair]), pair))[:MAX_CONFUSIONS]
    return [
        {
            "true": pair[0],
            "predicted": pair[1],
            "titles": ["; ".join(filter(None, map(titles.get, some.split("&")))) for some in pair],
            "rows": number[pair],
            "texts": len(seen[pair]),
            "examples": rows.strings(np.array(list(seen[pair].values())[:MAX_EXAMPLES])),
        }
        for pair in order
    ]


def decoder_report(
    coded: list[Coded],
    of_row: np.ndarray,
    formatter: BlockyFormatter,
    data: PreparedData,
    rows: SomeRows,
    groups: Groups,
    levels: tuple[str | None, list[int]],
    titles: dict[str, str],
) -> dict:
    """Return the figures of one decoder.

    Args:
        coded: its answers to distinct texts; of_row: the text of each row, int64 [N].
        groups: accuracy is also given for each of these; levels: as `levels_of` returns them.
        titles: of codes.
    """
    n = len(rows)
    numbers = {code: i for i, code in enumerate(data.codes)}  # other codes follow those of the key
    answers = [coded[text].codes for text in of_row.tolist()]
    answered = [numbers.setdefault(code, len(numbers)) for codes in answers for code in codes]
    conf = np.array([one.conf or 0.0 for one in coded], dtype=np.float64)[of_row]
    pred = np.repeat(np.arange(n), list(map(len, answers))), np.array(answered, dtype=np.int64)
    names = list(numbers)
    true = np.nonzero(rows.codes >= 0)
    true = true[0], np.asarray(rows.codes)[true].astype(np.int64)
    _, text, weight = np.unique(rows.text_hash, return_inverse=True, return_counts=True)

    def figures(columns: np.ndarray) -> dict:
        """Return `measured` figures, how many of their texts the model was trained on, if that is known, and
        the share of texts that their confidence expects to be right.
        """
        seen = columns[:, 0] * (groups["training"][0] == 0) > 0 if "training" in groups else None
        mark = {"texts_trained_on": None if seen is None else len(np.unique(text[seen]))}
        each = columns[:, 0] / np.maximum(np.bincount(text, columns[:, 0]), 1)[text]
        return mark | measured(columns, text) | {"expected": float(each @ conf / each.sum())}

    by_digits = []
    for digits in levels[1]:
        number = np.unique([cut(code, digits, levels[0]) for code in names], return_inverse=True)[1]
        pairs = (distinct_pairs(row, number[code]) for row, code in (pred, true))
        by_digits.append({"digits": digits, **figures(row_counts(n, *pairs))})
        if digits < levels[1][-1]:
            del by_digits[-1]["expected"]
    pairs = [distinct_pairs(*each) for each in (pred, true)]
    columns = row_counts(n, *pairs)
    right, hit = columns[:, 1] > 0, np.isin(*pairs, assume_unique=True)
    kinds = [pairs[0][hit], pairs[0][~hit], pairs[1][~np.isin(*pairs[::-1], assume_unique=True)]]
    by_digits[-1]["over_texts"]["macro_f1"] = macro_f1(kinds, len(names), 1 / weight[text])
    outside = data.report["rows_outside_key"][rows.rows.part]  # further rows of this part
    of_classes = {}
    if formatter.kind == "hisco":
        true_first = [data.codes[i] for i in rows.codes[:, 0].tolist()]
        first = [(*codes, "")[0] for codes in answers]
        # codes of a row have no order: where they are the same, their classes are
        first = [one if is_right else other for one, other, is_right in zip(true_first, first, right)]
        of_classes = class_errors(true_first, first)
    return {
        "right_rows": int(right.sum()),
        "accuracy": float(right.mean()),
        "accuracy_with_rows_outside_key": float(right.sum() / (n + outside)),
        **{
            f"by_{name}": {
                str(labels[group]): figures(columns * (of_group == group)[:, None])
                for group in np.unique(of_group)
            }
            for name, (of_group, labels) in groups.items()
        },
        "by_digits": by_digits,
        "by_code": code_table(kinds, names, titles),
        "classes": of_classes,
        "automatic": automatic(conf, right, 1 / weight[text]),
        "calibration": calibration(conf, right, 1 / weight[text]),
        "coverage": curve(conf, right, 1 / weight[text]),
        "confusions": confusions(np.flatnonzero(~right), answers, data.codes, rows, titles),
    }


# ---- the report in words


class Report(dict):
    """The content of report.json in a folder. A notebook shows it as report.md."""

    def __init__(self, folder: str | os.PathLike):
        with open(os.path.join(folder, JSON), encoding="utf-8") as file:
            super().__init__(json.load(file))

    def table(self, what: str = ENTRY, decoder: str | None = None) -> Any:
        """Return figures of a decoder: a DataFrame, or a list of dicts if pandas is not installed.

        Args:
            what: "figure", the share of new texts that is right, with its 95 % interval and its source;
                "confusions" or "by_code"; or "digits" (levels), "language", "codes" (how many a row has),
                "major_group", "frequency", "training", or "column NAME" for a column of --by: accuracy over
                distinct texts with its 95 % interval, as fractions, and the texts that were trained on.
            decoder: "seq2seq", "linear" or "both"; None: the one that the model codes with.
        """
        figures = self["decoders"][decoder or self["model"].get("decoder", list(self["decoders"])[-1])]
        if what == ENTRY:
            held = Figure.of(self)
            rows = [held._asdict() | dict(zip(("low", "high"), held.interval))] if held else []
        elif what in ("confusions", "by_code"):
            rows = figures[what]
        else:
            groups = figures[f"by_{what}"]
            pairs = groups.items() if isinstance(groups, dict) else [(each[what], each) for each in groups]
            counts = "rows", "texts", "texts_trained_on"
            rows = [{what: name} | {count: each[count] for count in counts} for name, each in pairs]
            for row, (_, each) in zip(rows, pairs):
                row |= zip(("accuracy", "low", "high"), each["over_texts"]["accuracy"])
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    def _repr_markdown_(self) -> str:
        return markdown(self)


def cell(values: list[float]) -> str:
    """Return a value and its interval, as percentages."""
    value, low, high = (percent(each, "") for each in values)
    return f"{value} ({low}–{high})"


def table(header: list[str], rows: list[list]) -> list[str]:
    """Return the lines of a Markdown table; bars in cells, which would end them, are escaped."""

    def line(cells: list) -> str:
        texts = (f"{each:,}" if isinstance(each, int) else str(each).strip() for each in cells)
        return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"

    return [line(header), "|" + "---|" * len(header), *map(line, rows), ""]


def parts_of(unit: str, figures: dict) -> list[tuple[str, dict]]:
    """Return (label, figures) of each level, with what its confidence expects if it is fitted; of each class;
    and of groups of rows, if there are several, the largest ones. unit: of levels.
    """
    fitted, parts = {each["level"]: each for each in figures.get("levels", [])}, []
    for each in figures["by_digits"]:
        of_level = fitted.pop(str(each["digits"]), None)
        expected = {"expected": of_level["over_texts"]["expected"]} if of_level else {}
        parts.append((f"{unit}: {each['digits']}", each | expected))
    for name, each in fitted.items():
        share, expected = (each["over_texts"][of] for of in ("right", "expected"))
        over_texts = {"accuracy": [share, *wilson(share, each["texts"])]}
        over_rows = {"accuracy": each["over_rows"]["right"]}
        parts.append((name, {**each, "over_texts": over_texts, "over_rows": over_rows, "expected": expected}))
    for name in ("by_training", "by_language", *(name for name in figures if name.startswith("by_column "))):
        groups = sorted(
            figures.get(name, {}).items(), key=lambda group: (group[0] == OTHERS, -group[1]["rows"])
        )
        title = f"{name[3:]}: " * (name != "by_training")  # whose labels need none
        parts += [(title + label, each) for label, each in groups[:MAX_SHOWN] if len(groups) > 1]
    return parts


def right_lines(unit: str, figures: dict, has_rows: bool, several: bool) -> list[str]:
    """Return the section on levels and groups. Columns that repeat others are left out.

    Args:
        unit: of levels.
        has_rows: whether some text has several rows.
        several: whether some row has several codes; else precision and recall are the accuracy.
    """
    rows, of_classes = [], figures["classes"]
    for label, each in parts_of(unit, figures):
        over_texts, over_rows = each["over_texts"], each["over_rows"]
        shares = [each.get("expected"), *[over_rows["accuracy"]] * has_rows]
        shares += [over_texts.get("precision"), over_texts.get("recall")] * several  # not of classes
        line = [label, each["texts"], *[each["rows"]] * has_rows, cell(over_texts["accuracy"])]
        rows.append([*line, *("" if share is None else percent(share, "") for share in shares)])
    header = ["", "texts", *["rows"] * has_rows, "right, % of texts", "expected, %"]
    header += [*["right, % of rows"] * has_rows, *["precision, %", "recall, %"] * several]
    lines = ["## Levels and groups", "", *table(header, rows)]
    if "hiscam_error" in of_classes:
        high, off = (f"{of_classes[f'hiscam_{x}']:.2f}" for x in ("error", "absolute_error"))
        text = (
            f"HISCLASS is right for {percent(of_classes['hisclass_right'])} of the rows whose code has one."
        )
        lines += [f"{text} HISCAM is off by {off} points in the mean (mean error {high}).", ""]
    return lines


def automatic_lines(figures: dict, has_rows: bool) -> list[str]:
    """Return the section on what can be coded automatically."""
    rows, shares = [], ["texts", *["rows"] * has_rows]
    for each in figures["automatic"]:
        limit = "none" if each["conf"] is None else f"{math.floor(1e3 * each['conf']) / 1e3:.3f}"
        rows.append([f"{100 * each['errors']:.0f} %", limit, *(percent(each[of], "") for of in shares)])
    off = percent(figures["calibration"]["expected_calibration_error_over_texts"], "")
    share = percent(figures["by_digits"][-1]["expected"])
    expected = f"`conf` expects {share} of the texts to be right, and is off by {off} points"
    return [
        "## Coded automatically",
        "",
        *table(["wrong at most", "`conf` at least", *(f"{of} coded, %" for of in shares)], rows),
        f"`predict --min-prob` takes such a limit. {expected} in the mean (expected calibration error).",
        "",
    ]


def costly_lines(figures: dict) -> list[str]:
    """Return the tables of the codes and confusions that cost most rows."""
    costly = sorted(figures["by_code"], key=lambda each: -each["missed"])[:MAX_COSTLY]
    rows = [
        [
            f"{each['code']} {each['title']}",
            *(each[name] for name in ("rows", "missed", "wrongly_given")),
            f"{each['most_frequent_mistake']} {each['title_of_mistake']}",
        ]
        for each in costly
        if each["missed"]
    ]
    macro = percent(figures["by_digits"][-1]["over_texts"]["macro_f1"])
    lines = ["## Codes that cost most rows", ""]
    lines += table(["code", "rows", "missed", "wrongly given", "most often answered instead"], rows)
    lines += [f"Macro-F1, in which each code counts the same: {macro}. `{BY_CODE}` has all codes.", ""]
    rows = []
    for each in figures["confusions"][:MAX_COSTLY]:
        pair = zip((each["true"], each["predicted"] or NO_CODE), each["titles"])
        codes = [" ".join(code_and_title) for code_and_title in pair]
        rows.append([*codes, each["rows"], each["texts"], "; ".join(each["examples"])])
    header = ["true", "answered", "rows", "texts", "examples"]
    return [*lines, "## Confusions that cost most rows", "", *table(header, rows)]


def data_lines(data: dict) -> list[str]:
    """Return lines on the rows that were evaluated and those that were not, also for the console."""
    rows, others, share = data["rows"], data["other_part_rows"], data["share_val"]
    lines = [f"Rows: {data['rows_read']:,} read, {rows:,} evaluated, {data['texts']:,} distinct texts"]
    if data["test_part"]:
        lines.append("These are the test part of the training: nothing was trained or chosen on their texts")
    if others:
        whose = "are not in the test part" if share is None else f"--share-val {share:g} leaves to training"
        lines.append(f"Not evaluated: {others:,} rows whose texts {whose}")
    if learned := data["learned_rows"]:
        what = f"{learned:,} rows whose texts the model was trained on (--share-val 1 evaluates all)"
        lines.append(f"Not evaluated: {what}")
    outside = data["rows_outside_key"]
    for kind, rows in data["rejected"].items():
        if not (outside and kind == OUTSIDE_KEY):
            lines.append(f"Rejected: {rows:,} × {kind}, listed in {REJECTED}")
    if outside:
        what = f"{outside:,} rows with such a code ({REJECTED}) are not in the figures"
        lines.append(f"Codes that the model does not know: {what}")
    for name, rows in data["unknown_languages"].items():
        lines.append(f"Language {name!r} is not one of the model's: {rows:,} rows were coded as unk")
    learned = [f"{verb} on {n:,}" for verb in ("trained", "validated") if (n := data[f"texts_{verb}_on"])]
    if learned:
        of = f"{' and '.join(learned)} of these {data['texts']:,} texts"
        lines.append(f"Figures may be too good: the model was {of}")
    return lines


def coders_of(report: dict) -> dict[str, dict]:
    """Return the figures of the decoders, and of the baseline if there is one, by their titles."""
    coders = {TITLES[name]: figures for name, figures in report["decoders"].items()}
    if svm := report.get("baseline"):
        of = f"{svm['rows']:,} of {svm['rows_of_training']:,} training rows, {svm['seconds']:,.0f} s"
        coders[f"Baseline: linear support vector machine on n-grams ({of})"] = svm
    return coders


def figure_line(report: dict) -> str:
    """Return the figure in words."""
    return f"{Figure.of(report) or 'The model was trained on all of these texts, so they measure nothing'}."


def summary_lines(report: dict) -> list[str]:
    """Return the figure and, of several decoders or beside a baseline, a line on each, for the console."""
    lines, coders = [highlighted(figure_line(report))], coders_of(report)
    for title, figures in coders.items() if len(coders) > 1 else ():
        texts = figures["by_digits"][-1]["over_texts"]
        shares = percent(texts["accuracy"][0]), percent(texts["macro_f1"])
        lines.append("{}: {} of texts, macro-F1 {}".format(title, *shares))
    return lines


def card_figures(report: dict) -> list[str]:
    """Return sentences for the model card on the decoder that `predict` takes, which follow the figure."""
    data, first = report["data"], next(iter(report["decoders"].values()))
    lines, levels = [], first["by_digits"]
    if outside := data["rows_outside_key"]:
        share = percent(first["accuracy_with_rows_outside_key"])
        lines.append(
            f"{outside:,} further rows have codes that the model does not know; if they count as wrong,"
            f" {share} of all {data['rows'] + outside:,} rows got exactly their codes."
        )
    of_levels = ", ".join(f"{each['digits']}: {cell(each['over_texts']['accuracy'])}" for each in levels)
    lines.append(f"By level ({report['levels']}), of texts: {of_levels} %.")
    lines.append(f"Macro-F1 is {percent(levels[-1]['over_texts']['macro_f1'])}.")
    if five := report["decoders"].get("linear", {}).get("first_five"):
        lines.append(
            f"The true codes are among the five most probable for {percent(five['over_texts'])} of texts."
        )
    error = percent(first["calibration"]["expected_calibration_error_over_texts"], "")
    lines.append(f"The expected calibration error is {error} points. In brackets: 95 % intervals.")
    return lines


def markdown(report: dict) -> str:
    """Return the text of report.md: of the decoder that `predict` takes, the others have a line each."""
    model, data = report["model"], report["data"]
    first = next(iter(report["decoders"].values()))
    what = f"{model['file']}, step {model['step'] or 0:,}, {model['codes']:,} codes of {model['system']}"
    made_by = ", ".join(map(" ".join, report["made_by"].items()))
    how = data["rows"] > data["texts"], any(int(number) > 1 for number in first["by_codes"])
    lines = ["# Evaluation", "", f"**{figure_line(report)}**", ""]
    lines += [f"Model: {what}. Data: {', '.join(data['files'])}. Made by {made_by}.", ""]
    lines += [f"- {line}" for line in data_lines(data)]
    if data["rows_outside_key"]:
        share = percent(first["accuracy_with_rows_outside_key"])
        lines.append(f"- With codes that the model does not know as wrong, {share} of rows are right")
    lines += ["", *automatic_lines(first, how[0]), *right_lines(report["levels"], first, *how)]
    lines += costly_lines(first)
    if len(coders := coders_of(report)) > 1:
        ends = [(title, figures["by_digits"][-1]) for title, figures in coders.items()]
        rows = [
            [title, cell(x["over_texts"]["accuracy"])]
            + [percent(share, "") for share in (x["over_rows"]["accuracy"], x["over_texts"]["macro_f1"])]
            for title, x in ends
        ]
        lines += [
            "## Decoders",
            "",
            "The first is the one that `predict` takes, and that is described above.",
            "",
        ]
        lines += table(["decoder", "right, % of texts", "right, % of rows", "macro-F1, %"], rows)
    texts = model["confidence_texts"]
    if five := report["decoders"].get("linear", {}).get("first_five"):
        what = f"for {percent(five['over_texts'])} of texts"
        lines += [f"The true codes are among the linear decoder's five most probable {what}.", ""]
    fitted = f", as it was fitted on {texts:,} texts" if texts else ""
    return "\n".join(lines) + "\n" + METHOD.format(fitted=fitted)
