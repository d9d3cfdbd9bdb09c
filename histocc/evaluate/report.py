"""The figures of a report on rows with known codes, and the report in words.

Sets of codes are pairs (row, code): a row has as many pairs as codes, in any order, or none. COLUMNS are
counted for each row; all measures are ratios of their sums.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from histocc.data.arrays import PreparedData, RowSet, SomeRows
from histocc.data.rows import OUTSIDE_KEY
from histocc.formatter import BlockyFormatter, cut, hisco_classes
from histocc.model.confidence import BINS, Thresholds, bin_of, calibration_error, curve
from histocc.predict.coder import Coded
from histocc.predict.decoders import DECODERS

JSON, MARKDOWN, REJECTED, BY_CODE = "report.json", "report.md", "rejected_rows.csv", "by_code.csv"
TITLES = {decoder.in_report: decoder.title for decoder in DECODERS.values()}
SHOWN = [(over, what) for what in ("accuracy", "macro_f1") for over in ("over_texts", "over_rows")]
COLUMNS = ("counted", "right", "tp", "fp", "fn")
MEASURES = ("accuracy", "precision", "recall", "f1")
GROUPS = {
    "by_codes": "number of codes",
    "by_major_group": "major group",
    "by_training": "text and codes in training",
}
GROUPS |= {"by_frequency": "rows of the code in training"}
PERCENTILES = (2.5, 97.5)  # 95 % intervals of the bootstrap
GRID = np.arange(1, 50) / 50  # thresholds that are compared: 0.02, 0.04 … 0.98
MIN_ROWS = 100  # a language with fewer rows gets no threshold of its own
MAX_CONFUSIONS, MAX_EXAMPLES = 20, 3
NO_CODE = "(no code)"
Groups = dict[str, tuple[np.ndarray, Sequence]]  # by name: the number of each row's group, and their labels

METHOD = """\
## How it is counted

- A row is right (accuracy) if the set of predicted codes is the set of its codes, in any order. Precision,
  recall and F1 count codes, summed over rows. Macro-F1 is the mean of the F1 of each code that is true or
  predicted; a draw of the bootstrap that lacks a code keeps its F1, and its interval is corrected for bias.
  At a level codes are cut to their first digits or parts, and those of a row that become equal count once;
  -1, -2, -3 and ? are never cut.
- Over distinct texts, each text (case and blanks aside) weighs the same however many rows have it. In
  brackets: 95 % intervals of {resamples:,} bootstrap draws of texts with all their rows (seed {seed}).
- Confidence: the probability that exactly these codes are right{fitted}. Expected calibration error: the mean
  distance between confidence and accuracy of their bin. With few texts it is some points even
  if confidence is exactly right.
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


def ratios(sums: np.ndarray) -> np.ndarray:
    """Return MEASURES [..., 4] of summed COLUMNS [..., 5]; 0 if the denominator is 0."""
    counted, right, tp, fp, fn = np.moveaxis(sums, -1, 0)
    pairs = [(right, counted), (tp, tp + fp), (tp, tp + fn), (2 * tp, 2 * tp + fp + fn)]
    parts = [np.divide(part, of, out=np.zeros(np.shape(part)), where=of > 0) for part, of in pairs]
    return np.stack(parts, axis=-1)


def measured(columns: np.ndarray, text: np.ndarray, resamples: int, seed: int) -> dict:
    """Return accuracy, precision, recall and F1 with 95 % intervals, over rows and over distinct texts.

    Rows with the same text are not independent, so the bootstrap draws texts, with all their rows. Texts with
    the same sums are interchangeable, so a draw is one multinomial over the distinct sums, whatever the
    number of texts.

    Args:
        columns: COLUMNS of each row, float64 [N, 5]; rows of zeros take no part.
        text: number of each row's text, int64 [N], from 0 on; over texts each weighs 1, shared by its rows.
        resamples, seed: number of draws and seed of the bootstrap.

    Returns:
        {"rows", "texts", "over_rows", "over_texts"}, the last two {measure: [value, low, high]}.
    """
    sums = np.stack([np.bincount(text, weights=column) for column in columns.T], axis=1).astype(np.int64)
    sums = sums[sums[:, 0] > 0]  # [T, 5]
    number = np.zeros(len(sums), dtype=np.int64)  # the same for equal sums; going by columns is faster
    for column in sums.T:
        number = np.unique(number * (column.max() + 1) + column, return_inverse=True)[1]
    _, first, times = np.unique(number, return_index=True, return_counts=True)
    kinds, texts = sums[first], len(sums)  # [P, 5]
    both = np.concatenate([kinds, kinds / kinds[:, :1]], axis=1)  # [P, 10]
    drawn = np.random.default_rng(seed).multinomial(texts, times / texts, size=resamples) @ both  # [R, 10]
    figures: dict[str, Any] = {"rows": int(columns[:, 0].sum()), "texts": texts}
    for name, place in (("over_rows", slice(0, 5)), ("over_texts", slice(5, 10))):
        value, draws = ratios(times @ both[:, place]), ratios(drawn[:, place])
        intervals = np.stack([value, *np.percentile(draws, PERCENTILES, axis=0)], axis=1)
        figures[name] = dict(zip(MEASURES, intervals.tolist()))
    return figures


def interval(of: Callable[[np.ndarray], float], texts: int, resamples: int, seed: int) -> list[float]:
    """Return [value, low, high] of any figure by the same bootstrap, text by text, which is slower than
    `measured`. The interval is corrected for bias: draws are moved by as much as their mean is off the value.
    of: returns the figure by how often each text is drawn, int64 [texts].
    """
    rng, value = np.random.default_rng(seed), of(np.ones(texts, dtype=np.int64))
    draws = [of(np.bincount(rng.integers(texts, size=texts), minlength=texts)) for _ in range(resamples)]
    return [value, *(np.percentile(draws, PERCENTILES) + value - np.mean(draws)).tolist()]


def mean_of(values: np.ndarray, weight: np.ndarray, text: np.ndarray, *how: int) -> list[float]:
    """Return the weighted mean of the values of rows (float or bool [N]), with its interval."""
    sums = weight * values
    return interval(lambda times: float(times[text] @ sums / (times[text] @ weight)), text.max() + 1, *how)


def macro_f1(
    kinds: list[np.ndarray], codes: int, weight: np.ndarray, text: np.ndarray, *how: int
) -> list[float]:
    """Return macro-F1 with its interval. A code that a draw lacks keeps its F1, since rare codes are often
    wrong, and draws without them would be too good. Draws are lower on average, as they repeat texts.

    Args:
        kinds: pairs of rows and codes that are right, only predicted, and only true.
        codes: number of codes.
        weight, text: float [N], int64 [N], of each row.
    """
    pairs = np.concatenate(kinds)
    place = (pairs & 0xFFFFFFFF) + codes * np.repeat(range(3), list(map(len, kinds)))
    of_text, weights = text[pairs >> 32], weight[pairs >> 32]

    def f1(times: np.ndarray, lacking: np.ndarray) -> np.ndarray:
        tp, fp, fn = np.bincount(place, weights * times[of_text], 3 * codes).reshape(3, codes)
        total = 2 * tp + fp + fn
        return np.divide(2 * tp, total, out=lacking.copy(), where=total > 0)

    whole = f1(np.ones(text.max() + 1), np.full(codes, np.nan))  # NaN: neither true nor predicted
    found = interval(lambda times: float(np.nanmean(f1(times, whole))), text.max() + 1, *how)
    return [min(max(figure, 0.0), 1.0) for figure in found]


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
        values = ratios(np.array([1, 0, tp[code], fp[code], fn[code]])).tolist()
        first = {"code": names[code], "title": titles.get(names[code], ""), "rows": int(rows[code])}
        often = mistakes.get(code, Counter([""])).most_common(1)[0][0]
        found.append(first | dict(zip(MEASURES[1:], values[1:])) | {"most_frequent_mistake": often})
    return found


def class_errors(true: list[str], pred: list[str], text: np.ndarray, *how: int) -> dict[str, list[float]]:
    """Return how often the HISCLASS of the first code is right, and how far its HISCAM is off, over the rows
    whose codes have one. true, pred: the first code of each row, "" for none.
    """

    def classes(name: str) -> list[np.ndarray]:
        of_code = hisco_classes()[name]
        return [np.array([of_code.get(code, "") for code in codes]) for codes in (true, pred)]

    def mean(values: np.ndarray, known: np.ndarray) -> list[float]:
        of_text = np.unique(text[known], return_inverse=True)[1]
        return mean_of(values, np.ones(len(values)), of_text, *how)

    (true_class, pred_class), (true_cam, pred_cam) = classes("hisclass"), classes("hiscam")
    found, both = {}, (true_cam != "") & (pred_cam != "")
    if (known := true_class != "").any():
        found["hisclass_right"] = mean((true_class == pred_class)[known], known)
    if both.any():
        gap = pred_cam[both].astype(float) - true_cam[both].astype(float)
        found |= {"hiscam_error": mean(gap, both), "hiscam_absolute_error": mean(np.abs(gap), both)}
    return found


def calibration(conf: np.ndarray, right: np.ndarray, weight: np.ndarray) -> dict:
    """Return how often answers of each confidence are right, in bins (`bin_of`), and the expected calibration
    error over rows and, by the weight of each, over texts. All arguments are float or bool [N].
    """
    place = bin_of(conf)
    rows, sure, good = (np.bincount(place, values, BINS) for values in (np.ones(len(conf)), conf, right))
    return {
        "bins": [
            {
                "from": i / BINS,
                "to": (i + 1) / BINS,
                "rows": int(rows[i]),
                "confidence": float(sure[i] / rows[i]),
                "accuracy": float(good[i] / rows[i]),
            }
            for i in np.flatnonzero(rows)
        ],
        "expected_calibration_error": calibration_error(conf, right, np.ones(len(conf))),
        "expected_calibration_error_over_texts": calibration_error(conf, right, weight),
    }


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
    first the pairs of the most distinct texts, then those of the most rows, then by name.

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
    order = sorted(number, key=lambda pair: (-len(seen[pair]), -number[pair], pair))[:MAX_CONFUSIONS]
    return [
        {
            "true": pair[0],
            "predicted": pair[1],
            "titles": ["; ".join(titles.get(code, "") for code in some.split("&")) for some in pair],
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
    resamples: int,
    seed: int,
) -> dict:
    """Return the figures of one decoder.

    Args:
        coded: its answers to distinct texts; of_row: the text of each row, int64 [N].
        groups: accuracy is also given for each of these; levels: as `levels_of` returns them.
        titles: of codes.
        resamples, seed: number of draws and seed of the bootstrap.
    """
    n, how = len(rows), (resamples, seed)
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
        """Return `measured` figures, marked by how many of their texts the model was trained on, if known."""
        seen = columns[:, 0] * (groups["training"][0] == 0) > 0 if "training" in groups else None
        mark = {"texts_trained_on": None if seen is None else len(np.unique(text[seen]))}
        return mark | measured(columns, text, *how)

    by_digits = []
    for digits in levels[1]:
        number = np.unique([cut(code, digits, levels[0]) for code in names], return_inverse=True)[1]
        pairs = (distinct_pairs(row, number[code]) for row, code in (pred, true))
        by_digits.append({"digits": digits, **figures(row_counts(n, *pairs))})
    pairs = [distinct_pairs(*each) for each in (pred, true)]
    columns = row_counts(n, *pairs)
    right, hit = columns[:, 1] > 0, np.isin(*pairs, assume_unique=True)
    kinds = [pairs[0][hit], pairs[0][~hit], pairs[1][~np.isin(*pairs[::-1], assume_unique=True)]]
    for over, each in (("over_rows", np.ones(n)), ("over_texts", 1 / weight[text])):
        by_digits[-1][over]["macro_f1"] = macro_f1(kinds, len(names), each, text, *how)
    outside = data.report["rows_outside_key"][rows.rows.part]  # further rows of this part
    of_classes = {}
    if formatter.kind == "hisco":
        true_first = [data.codes[i] for i in rows.codes[:, 0].tolist()]
        first = [(*codes, "")[0] for codes in answers]
        # codes of a row have no order: where they are the same, their classes are
        first = [one if is_right else other for one, other, is_right in zip(true_first, first, right)]
        of_classes = class_errors(true_first, first, text, *how)
    return {
        "right_rows": int(right.sum()),
        "accuracy": float(right.mean()),
        "accuracy_with_rows_outside_key": float(right.sum() / (n + outside)),
        "codes_outside_key": int((pred[1] >= len(data.codes)).sum()),
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

    def table(self, what: str, decoder: str | None = None) -> Any:
        """Return figures of a decoder: a DataFrame, or a list of dicts if pandas is not installed.

        Args:
            what: "confusions" or "by_code"; or "digits" (levels), "language", "codes" (how many a row has),
                "major_group", "frequency", "training", or "column NAME" for a column of --by: accuracy over
                distinct texts with its 95 % interval, as fractions, and the texts that were trained on.
            decoder: "seq2seq", "linear" or "both"; None: the one that the model codes with.
        """
        figures = self["decoders"][decoder or self["model"].get("decoder", list(self["decoders"])[-1])]
        if what in ("confusions", "by_code"):
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


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def cell(values: list[float]) -> str:
    """Return a value and its interval, as percentages."""
    return f"{percent(values[0])} ({percent(values[1])}–{percent(values[2])})"


def table(header: list[str], rows: list[list]) -> list[str]:
    """Return the lines of a Markdown table; bars in cells, which would end them, are escaped."""

    def line(cells: list) -> str:
        texts = (f"{each:,}" if isinstance(each, int) else str(each) for each in cells)
        return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"

    return [line(header), "|" + "---|" * len(header), *map(line, rows), ""]


def decoder_lines(decoder: str, figures: dict, unit: str) -> list[str]:
    """Return the section on a decoder. unit: of a level of the classification."""
    all_rows = f"{percent(figures['accuracy_with_rows_outside_key'])} % if rows with codes outside the key"
    lines = [
        f"## {TITLES[decoder]}\n",
        f"{figures['right_rows']:,} rows right, {percent(figures['accuracy'])} %; {all_rows} count as wrong."
        f" {figures['codes_outside_key']:,} of the codes that it wrote are not in the key.\n",
    ]
    if "hiscam_error" in (classes := figures.get("classes", {})):
        high, off = (f"{classes[f'hiscam_{x}'][0]:.2f}" for x in ("error", "absolute_error"))
        text = f"HISCLASS is right for {cell(classes['hisclass_right'])} % of the rows whose code has one;"
        lines += [f"{text} HISCAM is off by {off} points in the mean (mean error {high}).", ""]
    if "codes_above" in figures:
        lines += [f"Thresholds: {figures['codes_above']}.", ""]
    header = ["rows", "texts", *(f"{name}, %" for name in MEASURES)]
    header += ["accuracy over texts, %", "F1 over texts, %"]
    shown = [("over_rows", name) for name in MEASURES] + [("over_texts", name) for name in ("accuracy", "f1")]
    groups: dict[str, Any] = {unit: [(each["digits"], each) for each in figures["by_digits"]]}
    for key, of_key in figures.items():
        if key.startswith("by_") and isinstance(of_key, dict):
            groups[GROUPS.get(key) or key.removeprefix("by_")] = of_key.items()
    for name, parts in groups.items():
        rows = [
            [label, each["rows"], each["texts"], *(cell(each[over][measure]) for over, measure in shown)]
            for label, each in parts
        ]
        lines += table([name, *header], rows)
    if "thresholds" in figures:
        lines += ["Thresholds that were fitted to these very rows: test them on others.", ""]
        best = figures["thresholds"].items()
        rows = [[name, each["rows"], each["threshold_f1"], percent(each["f1"])] for name, each in best]
        lines += table(["language", "rows", "threshold", "F1, %"], rows)
    bins = figures["calibration"]["bins"]
    names = (f"expected_calibration_error{over}" for over in ("", "_over_texts"))
    of_rows, of_texts = (percent(figures["calibration"][name]) for name in names)
    errors = f"{of_rows} percentage points over rows, {of_texts} over distinct texts"
    lines += [f"Expected calibration error: {errors}.", ""]
    rows, number = [], sum(each["rows"] for each in bins)
    for i, each in enumerate(bins):
        above = sum(one["rows"] for one in bins[i:])
        right = sum(one["rows"] * one["accuracy"] for one in bins[i:])
        shares = each["confidence"], each["accuracy"], above / number, right / above
        rows.append([f"{each['from']:.1f}–{each['to']:.1f}", each["rows"], *map(percent, shares)])
    header = ["mean confidence, %", "accuracy, %", "rows at least this confident, %", "accuracy of these, %"]
    lines += table(["confidence", "rows", *header], rows)
    header, rows = ["true", "predicted", "rows", "texts", "examples"], []
    for each in figures["confusions"]:
        pair = (each["true"], each["predicted"] or NO_CODE)
        codes = [f"{code} {title}".strip() for code, title in zip(pair, each["titles"])]
        rows.append([*codes, each["rows"], each["texts"], "; ".join(each["examples"])])
    return [*lines, "Most frequent confusions:", "", *table(header, rows)]


def learned_from(data: dict) -> str:
    """Return from how many of the texts the model has learned, a mark beside figures; "" for none."""
    if data["texts_trained_on"] is None:
        return "whether the model was trained on these texts is not known"
    verbs = [f"{verb} on {n:,}" for verb in ("trained", "validated") if (n := data[f"texts_{verb}_on"])]
    return f"the model was {' and '.join(verbs)} of these {data['texts']:,} texts" if verbs else ""


def data_lines(data: dict) -> list[str]:
    """Return lines on the rows that were evaluated and those that were not, also for the console."""
    rows, others, share = data["rows"], data["other_part_rows"], data["share_val"]
    lines = [f"Rows: {data['rows_read']:,} read, {rows:,} evaluated, {data['texts']:,} distinct texts"]
    if data["test_part"]:
        lines.append("These are the test part of the training: nothing was trained or chosen on their texts")
    if others:
        whose = "are not in the test part" if share is None else f"--share-val {share:g} leaves to training"
        lines.append(f"Not evaluated: {others:,} rows whose texts {whose}")
    outside = data["rows_outside_key"]
    for kind, rows in data["rejected"].items():
        if not (outside and kind == OUTSIDE_KEY):
            lines.append(f"Rejected: {rows:,} × {kind}, listed in {REJECTED}")
    if outside:
        what = f"{outside:,} rows with such a code ({REJECTED}) are not in the figures"
        lines.append(f"Codes that the model does not know: {what}, unless these say that they count as wrong")
    for name, rows in data["unknown_languages"].items():
        lines.append(f"Language {name!r} is not one of the model's: {rows:,} rows were coded as unk")
    if mark := learned_from(data):
        lines.append(f"Figures may be too good: {mark}")
    return lines


def coders_of(report: dict) -> dict[str, dict]:
    """Return the figures of the decoders, and of the baseline if there is one, by their titles."""
    coders = {TITLES[name]: figures for name, figures in report["decoders"].items()}
    if svm := report.get("baseline"):
        of = f"{svm['rows']:,} of {svm['rows_of_training']:,} training rows, {svm['seconds']:,.0f} s"
        coders[f"Baseline: linear support vector machine on n-grams ({of})"] = svm
    return coders


def summary_lines(report: dict) -> list[str]:
    """Return a line on each decoder, and on the baseline, for the console."""
    lines, mark = [], learned_from(report["data"])
    for title, figures in coders_of(report).items():
        rows, texts = (figures["by_digits"][-1][over] for over in ("over_rows", "over_texts"))
        values = f"{rows['accuracy'][0]:.1%} of rows, {texts['accuracy'][0]:.1%} of distinct texts"
        values += f", macro-F1 {texts['macro_f1'][0]:.1%}"
        if report["data"]["rows_outside_key"] and "accuracy_with_rows_outside_key" in figures:
            share = figures["accuracy_with_rows_outside_key"]
            values = f"{share:.1%} of all rows; of those with codes that the model knows: {values}"
        lines.append(f"{title}: {values}{f' ({mark})' * bool(mark)}")
    return lines


def card_figures(report: dict) -> list[str]:
    """Return sentences on the decoder that `predict` takes, for the model card and for papers."""
    data, first = report["data"], next(iter(report["decoders"].values()))
    last = first["by_digits"][-1]
    where = "the test part of the data, by which nothing was chosen" if data["test_part"] else "other data"
    texts, rows = (cell(last[over]["accuracy"]) for over in ("over_texts", "over_rows"))
    lines, some = [], f"{data['texts']:,} distinct texts ({data['rows']:,} rows) of {where}"
    if outside := data["rows_outside_key"]:
        share = percent(first["accuracy_with_rows_outside_key"])
        lines.append(
            f"Of {data['rows'] + outside:,} rows of {where} {share} % got exactly their codes; {outside:,}"
            " have codes that the model does not know and count as wrong. The other figures leave these out."
        )
        some = f"the other {data['texts']:,} distinct texts ({data['rows']:,} rows)"
    lines.append(
        f"Of {some}, {texts} % of texts and {rows} % of rows got exactly their codes; macro-F1 is"
        f" {cell(last['over_texts']['macro_f1'])} %."
    )
    levels = [f"{each['digits']}: {cell(each['over_texts']['accuracy'])}" for each in first["by_digits"][:-1]]
    lines += [f"By level ({report['levels']}), of texts: {', '.join(levels)} %."] if levels else []
    if five := report["decoders"].get("linear", {}).get("first_five"):
        lines.append(
            f"The true codes are among the five most probable for {cell(five['over_texts'])} % of texts."
        )
    error = percent(first["calibration"]["expected_calibration_error_over_texts"])
    draws = f"{report['resamples']:,} bootstrap draws of texts with all their rows"
    lines.append(f"The expected calibration error is {error} points. In brackets: 95 % intervals of {draws}.")
    return lines


def markdown(report: dict) -> str:
    """Return the text of report.md."""
    model, data = report["model"], report["data"]
    what = f"{model['file']}, step {model['step'] or 0:,}, {model['codes']:,} codes of {model['system']}"
    made_by = ", ".join(map(" ".join, report["made_by"].items()))
    lines = ["# Evaluation", "", f"Model: {what}. Data: {', '.join(data['files'])}. Made by {made_by}.", ""]
    lines += [f"- {line}" for line in data_lines(data)]
    rows = [
        [title, *(cell(figures["by_digits"][-1][over][what]) for over, what in SHOWN)]
        for title, figures in coders_of(report).items()
    ]
    header = [f"{what.replace('_f1', '-F1')} {over.replace('_', ' ')}, %" for over, what in SHOWN]
    lines += ["", "The first decoder is the one that `predict` takes.", ""]
    lines += table([learned_from(data), *header], rows)
    if five := report["decoders"].get("linear", {}).get("first_five"):
        what = f"for {cell(five['over_texts'])} % of texts, {cell(five['over_rows'])} % of rows"
        lines += [f"The true codes are among the linear decoder's five most probable {what}.", ""]
    for name, of_decoder in report["decoders"].items():
        lines += decoder_lines(name, of_decoder, report["levels"])
    texts = model["confidence_texts"]
    fitted = f", as it was fitted on {texts:,} texts" if texts else ""
    method = METHOD.format(resamples=report["resamples"], seed=report["seed"], fitted=fitted)
    return "\n".join(lines) + "\n" + method
