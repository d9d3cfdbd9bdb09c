"""The figures of a report on rows with known codes, and its text.

Sets of codes are pairs (row, code). A row has as many pairs as codes, in any order, or none. PAIR_COUNTS are
counted for each row. All measures are ratios of their sums.
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
from histocc.data.rows import OUTSIDE_KEY, csv_text, escape_formula
from histocc.figure import ENTRY, Figure, largest, percent, wilson
from histocc.formatter import CLASSES, SEP_VALUE, cut, hisco_classes
from histocc.model.confidence import BINS, Thresholds, bin_of, calibration_error, curve
from histocc.predict.coder import Coded, Coder
from histocc.predict.decoders import DECODERS
from histocc.runtime.files import OwnFiles, atomic_write
from histocc.runtime.log import at_step, counted
from histocc.text import in_markdown

JSON, MARKDOWN, REJECTED, BY_CODE = "report.json", "report.md", "rejected_rows.csv", "by_code.csv"
ANSWERS, ANSWER_COLUMNS = "answers.csv", ["text", "language", "codes", "predicted", "conf", "rows", "learned"]
BY_COLUMN = "column "  # prefix of the names of groups of --by
REPORT_FILES = (REJECTED, MARKDOWN, ANSWERS, BY_CODE, JSON)  # the last one completes the report
DIGITS, PARTS_BETWEEN = "digits", "parts between "  # units of levels
TITLES = {decoder.in_report: decoder.title for decoder in DECODERS.values()}
PAIR_COUNTS = ("counted", "right", "tp", "fp", "fn")
SET_MEASURES = ("accuracy", "precision", "recall", "f1")
ERRORS = (0.05, 0.1)  # shares of wrong answers for which the automatically coded share is given
GRID = np.arange(1, 50) / 50  # thresholds to compare: 0.02, 0.04 … 0.98
MIN_ROWS = 100  # a language with fewer rows gets no threshold
MAX_CONFUSIONS, MAX_EXAMPLES = 20, 3
MAX_COSTLY = 8  # lines of a table of codes or confusions
NO_CODE = "(no code)"
Groups = dict[str, tuple[np.ndarray, Sequence]]  # name → (the number of each row's group, the labels)
Cuts = tuple[str | None, list[int]]  # levels, as `levels_of` returns them

METHOD = """\
## How it is counted

A row is right if the set of predicted codes is the set of its codes, in any order. Each text (ignoring case
and blanks) weighs the same, however many rows have it. In brackets: 95 % intervals for as many independent
texts (Wilson). At a level, codes are cut to their first digits or parts, or replaced by their class; only -1,
-2, -3 and ? stay. Only the ten groups with the most texts are shown. Expected: the mean confidence, which is
the probability that exactly these codes are right{fitted}.
"""


def kinds_of(*pred_and_true: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    """Return the right, only predicted and only true pairs of rows and codes, each as one number,
    row · 2³² + code, unique and sorted. pred_and_true: rows and codes of both, int64, in any order.
    """
    pred, true = (np.unique((rows << 32) | codes) for rows, codes in pred_and_true)
    hit = np.isin(pred, true, assume_unique=True)
    return [pred[hit], pred[~hit], true[~np.isin(true, pred, assume_unique=True)]]


def row_counts(n: int, kinds: list[np.ndarray]) -> np.ndarray:
    """Return PAIR_COUNTS of each of `n` rows, float64 [n, 5]. kinds: as `kinds_of` returns them."""
    tp, fp, fn = (np.bincount(pairs >> 32, minlength=n) for pairs in kinds)
    return np.stack([np.ones(n), fp + fn == 0, tp, fp, fn], axis=1).astype(np.float64)


def ratios(sums: np.ndarray) -> list[float]:
    """Return SET_MEASURES of summed PAIR_COUNTS, float64 [5]. A measure is 0 if its denominator is 0."""
    counted, right, tp, fp, fn = sums.tolist()
    pairs = [(right, counted), (tp, tp + fp), (tp, tp + fn), (2 * tp, 2 * tp + fp + fn)]
    return [part / of if of else 0.0 for part, of in pairs]


def measured(
    columns: np.ndarray, text: np.ndarray, seen: np.ndarray | None = None, conf: np.ndarray | None = None
) -> dict:
    """Return accuracy, precision, recall and F1 over rows and over distinct texts. The accuracy over texts
    has the 95 % interval of a share of independent texts, as in the figure of the model.

    Args:
        columns: PAIR_COUNTS of each row, float64 [N, 5]. Rows of zeros take no part.
        text: number of each row's text, int64 [N], from 0. Each text weighs 1, which its rows share.
        seen: whether the model was trained on the row's text, bool [N], if that is known.
        conf: the confidence of each row's answer, float64 [N], if there is one.

    Returns:
        {"texts_trained_on", "rows", "texts", "over_texts", "over_rows"}, the last two {measure: value}. The
        accuracy over texts is [value, low, high]. With conf also "expected" and "expected_calibration_error".
    """
    sums = np.stack([np.bincount(text, weights=column) for column in columns.T], axis=1)
    sums = sums[sums[:, 0] > 0]  # [T, 5]
    over_texts, over_rows = (
        dict[str, Any](zip(SET_MEASURES, ratios(each.sum(0)))) for each in (sums / sums[:, :1], sums)
    )
    over_texts["accuracy"] = [share := over_texts["accuracy"], *wilson(share, len(sums))]
    learned = None if seen is None else len(np.unique(text[(columns[:, 0] > 0) & seen]))
    found = {"texts_trained_on": learned, "rows": int(sums[:, 0].sum()), "texts": len(sums)}
    found |= {"over_texts": over_texts, "over_rows": over_rows}
    if conf is not None:
        each = columns[:, 0] / np.maximum(np.bincount(text, columns[:, 0]), 1)[text]
        found["expected"] = float(each @ conf / each.sum())
        found["expected_calibration_error"] = calibration_error(conf, columns[:, 1], each)
    return found


def macro_f1(kinds: list[np.ndarray], codes: int, weight: np.ndarray) -> float:
    """Return the mean F1 of true or predicted codes.

    Args:
        kinds: as `kinds_of` returns them.
        codes: number of codes.
        weight: weight of each row, float [N].
    """
    tp, fp, fn = (np.bincount(pairs & 0xFFFFFFFF, weight[pairs >> 32], codes) for pairs in kinds)
    total = 2 * tp + fp + fn
    return float((2 * tp[total > 0] / total[total > 0]).mean())


def figures_of_codes(kinds: list[np.ndarray], names: list[str], titles: dict[str, str]) -> list[dict]:
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
        found.append(first | dict(zip(SET_MEASURES[1:], values[1:])) | last)
    return found


def hiscam_errors(true: list[str], pred: list[str]) -> dict[str, float]:
    """Return the mean and the mean absolute error of HISCAM over the rows whose codes both have one. true,
    pred: the first code of each row, "" for none.
    """
    of_code = hisco_classes()["hiscam"]
    pairs = ((of_code.get(one), of_code.get(other)) for one, other in zip(true, pred))
    gaps = np.array([float(predicted) - float(right) for right, predicted in pairs if right and predicted])
    return {"error": float(gaps.mean()), "absolute_error": float(np.abs(gaps).mean())} if len(gaps) else {}


def calibration(conf: np.ndarray, right: np.ndarray, weight: np.ndarray) -> dict:
    """Return how often answers of each confidence are right, in bins (`bin_of`), and the expected calibration
    error over rows, and over texts with the weight of each row. All arguments are float or bool [N].
    """
    place, bins = bin_of(conf), []
    weights = {"": np.ones(len(conf)), "_over_texts": weight}
    for i in np.unique(place).tolist():
        inside = place == i
        found = {"from": i / BINS, "to": (i + 1) / BINS, "rows": int(inside.sum())}
        found |= {"texts": float(weight[inside].sum())}
        for over, each in weights.items():
            for name, values in (("confidence", conf), ("accuracy", right)):
                found[name + over] = float(np.average(values[inside], weights=each[inside]))
        bins.append(found)
    errors = {over: calibration_error(conf, right, each) for over, each in weights.items()}
    return {"bins": bins, **{f"expected_calibration_error{over}": error for over, error in errors.items()}}


def automatic(conf: np.ndarray, right: np.ndarray, weight: np.ndarray) -> list[dict]:
    """Return for each of ERRORS the least confidence from which no larger share of answers is wrong ("conf"),
    or None if no value shows it, and the shares of texts and rows reaching it. Arguments: float or bool [N].
    """
    points, found = curve(conf, right, weight, len(conf)), []
    for error in ERRORS:
        least = 1 / (error * weight.sum())  # fewer texts show nothing
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
    """Return for each group the threshold of GRID with the highest F1 over all codes, and of several such
    thresholds the nearest to 0.5.

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
    """Return the most frequent pairs of a true set of codes and a wrong answer, as text: sorted by rows, then
    by distinct texts, then by name.

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


def figures_of_levels(
    coder: Coder, names: list[str], pairs: tuple, levels: Cuts, conf: dict[str, np.ndarray], **how: Any
) -> tuple[list[dict], dict[str, dict]]:
    """Return the figures at each number of digits (or parts), and those by class of HISCO codes. names: the
    codes of `pairs`, which `kinds_of` takes. conf: each row's confidence, by level. how: as in `measured`.
    """

    def at_level(level: str, of_codes: list[str]) -> dict:
        """Return the figures of a level, at which codes of the same group count as one, or {} if no row has
        groups for its true and answered codes. of_codes: the group of each code, or "".
        """
        found, number = np.unique(of_codes, return_inverse=True)
        columns = row_counts(len(how["text"]), kinds_of(*((row, number[code]) for row, code in pairs)))
        for row, code in pairs if found[0] == "" else ():
            columns[row[number[code] == 0]] = 0
        return measured(columns, conf=conf.get(level), **how) if columns.any() else {}

    separator, sizes = levels
    by_digits = [
        {"digits": each, **at_level(str(each), [cut(code, each, separator) for code in names])}
        for each in sizes
    ]
    classes = CLASSES if coder.formatter.kind == "hisco" else ()
    by_class = {name: at_level(name, [coder.levels.group(code, name) for code in names]) for name in classes}
    return by_digits, {name: each for name, each in by_class.items() if each}


def decoder_report(
    coder: Coder,
    coded: list[Coded],
    of_row: np.ndarray,
    data: PreparedData,
    rows: SomeRows,
    groups: Groups,
    levels: Cuts,
    titles: dict[str, str],
) -> dict:
    """Return the figures of one decoder.

    Args:
        coded: its answers to distinct texts. of_row: the text of each row, int64 [N].
        groups: groups that get an accuracy each.
    """
    answers = [coded[text].codes for text in of_row.tolist()]
    numbers = {code: i for i, code in enumerate(data.codes)}  # other codes follow those of the key
    answered = [numbers.setdefault(code, len(numbers)) for codes in answers for code in codes]
    pred = np.repeat(np.arange(len(rows)), list(map(len, answers))), np.array(answered, dtype=np.int64)
    true = np.nonzero(rows.codes >= 0)
    pairs = pred, (true[0], np.asarray(rows.codes)[true].astype(np.int64))
    _, text, times = np.unique(rows.text_hash, return_inverse=True, return_counts=True)
    weight = 1 / times[text]
    conf = np.array([one.conf or 0.0 for one in coded], dtype=np.float64)[of_row]
    of_levels = {str(levels[1][-1]): conf}  # confidence of each row's answer at a level, where it is fitted
    if any(one.levels for one in coded) and levels[0] == coder.levels.separator:
        of_coded = np.array([one.levels or [0.0] * len(coder.fitted_levels) for one in coded])
        of_levels |= zip(coder.fitted_levels, of_coded[of_row].T)
    how = {"text": text, "seen": groups["training"][0] == 0 if "training" in groups else None}
    kinds = kinds_of(*pairs)
    columns = row_counts(len(rows), kinds)
    right = columns[:, 1] > 0
    by_digits, by_class = figures_of_levels(coder, [*numbers], pairs, levels, of_levels, **how)
    by_digits[-1]["over_texts"]["macro_f1"] = macro_f1(kinds, len(numbers), weight)
    hiscam = {}
    if coder.formatter.kind == "hisco":
        first = [data.codes[i] for i in rows.codes[:, 0].tolist()]
        # codes of a row have no order: equal sets of codes have equal classes
        given = [one if same else (*codes, "")[0] for one, codes, same in zip(first, answers, right)]
        hiscam = hiscam_errors(first, given)
    outside = data.report["rows_outside_key"][rows.rows.part]  # more rows of this part
    by_group: dict[str, dict] = {}
    for name, (of_group, labels) in groups.items():
        parts = {str(labels[i]): (of_group == i)[:, None] for i in np.unique(of_group)}
        by_group[f"by_{name}"] = {x: measured(columns * part, conf=conf, **how) for x, part in parts.items()}
    return {
        "right_rows": int(right.sum()),
        "accuracy": float(right.mean()),
        "accuracy_with_rows_outside_key": float(right.sum() / (len(rows) + outside)),
        **by_group,
        "by_digits": by_digits,
        "by_class": by_class,
        "hiscam": hiscam,
        "by_code": figures_of_codes(kinds, [*numbers], titles),
        "automatic": automatic(conf, right, weight),
        "calibration": calibration(conf, right, weight),
        "coverage": curve(conf, right, weight),
        "confusions": confusions(np.flatnonzero(~right), answers, data.codes, rows, titles),
    }


def answers_csv(
    coded: list[Coded], of_row: np.ndarray, data: PreparedData, rows: SomeRows, groups: Groups
) -> str:
    """Return the text of answers.csv: each text, its language and codes, the answer, and its number of rows.
    Column learned is 1 if the model was trained on the text. The arguments are those of `decoder_report`.
    """
    names = [name for name in groups if name.startswith(BY_COLUMN)]
    columns = [[str(labels[i]) for i in of_group] for of_group, labels in map(groups.__getitem__, names)]
    learned = [""] * len(rows)
    if "training" in groups:
        learned = [str(int(i == 0)) for i in groups["training"][0]]
    true = [SEP_VALUE.join(sorted(data.codes[i] for i in row if i >= 0)) for row in rows.codes.tolist()]
    texts = [text.encode("utf-8", "backslashreplace").decode() for text in rows.strings(np.arange(len(rows)))]
    number = Counter(zip(texts, rows.language.tolist(), true, of_row.tolist(), learned, *columns))
    lines: list[list] = [[*ANSWER_COLUMNS, *names]]
    for (text, language, codes, i, is_learned, *cells), count in number.most_common():
        answer = SEP_VALUE.join(sorted(coded[i].codes)), f"{coded[i].conf or 0:.4f}"
        lines.append([text, data.languages[language], codes, *answer, count, is_learned, *cells])
    return csv_text(lines).decode()


# ---- the text of the report


class Report(dict):
    """The content of report.json in a folder. Notebooks show it as report.md."""

    def __init__(self, folder: str | os.PathLike):
        with open(os.path.join(folder, JSON), encoding="utf-8") as file:
            super().__init__(json.load(file))

    def table(self, what: str = ENTRY, decoder: str | None = None) -> Any:
        """Return figures of a decoder: a DataFrame, or a list of dicts without pandas.

        Args:
            what: "figure" (share of new texts that is right, its 95 % interval and source), "confusions" or
                "by_code". Else the accuracy over distinct texts with its 95 % interval, as fractions, and
                the texts that were trained on, by "digits" (levels), "class", "language", "codes" (how many a
                row has), "major_group", "frequency", "training", or "column NAME" for a column of --by.
            decoder: "seq2seq", "linear" or "both", or None for the decoder that the model codes with.

        Example:
            >>> report = Report("./output/evaluation")
            >>> len(report.table()), len(report.table("language"))  # one row; one for each language
            (1, 3)
        """
        figures = self["decoders"][decoder or self["model"].get("decoder", list(self["decoders"])[-1])]
        if what == ENTRY:
            held = Figure.of(self)
            rows = [held._asdict() | dict(zip(("low", "high"), held.interval))] if held else []
        elif what in ("confusions", "by_code"):
            rows = figures[what]
        else:
            if f"by_{what}" not in figures:
                names = (name[3:] for name in figures if name.startswith("by_") and name != "by_code")
                expected = ", ".join([ENTRY, "confusions", "by_code", *names])
                raise ValueError(f"what: found {what!r}, expected one of {expected}")
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
    """Return the lines of a Markdown table. Column names are Markdown, cells are plain."""
    texts = [[f"{x:,}" if isinstance(x, int) else in_markdown(str(x)) for x in row] for row in rows]
    head, *lines = ("| " + " | ".join(cells) + " |" for cells in [header, *texts])
    return [head, "|" + "---|" * len(header), *lines, ""]


def right_lines(unit: str, figures: dict, has_rows: bool, several: bool) -> list[str]:
    """Return the section on levels, classes and, if there are several, groups of rows. Columns that repeat
    others are left out.

    Args:
        unit: unit of the levels.
        has_rows: whether some text has several rows.
        several: whether some row has several codes. If none has, precision and recall are the accuracy.
    """
    parts, rows = [(f"{unit}: {each['digits']}", each) for each in figures["by_digits"]], []
    by = [name for name in figures if name == "by_language" or name.startswith("by_column ")]
    for name in ("by_class", "by_training", *by):
        title, groups = f"{name[3:]}: " * (name in by), figures.get(name, {})
        parts += [(title + label, each) for label, each in largest(groups) if len(groups) > 1]
    for label, each in parts:
        over_texts, over_rows = each["over_texts"], each["over_rows"]
        expected = percent(each["expected"], "") if "expected" in each else ""
        rows.append(
            [label, each["texts"], *[each["rows"]] * has_rows, cell(over_texts["accuracy"]), expected]
        )
        shares = [over_rows["accuracy"]] * has_rows + [over_texts[x] for x in SET_MEASURES[1:3]] * several
        rows[-1] += [percent(share, "") for share in shares]
    header = ["", "texts", *["rows"] * has_rows, "right, % of texts", "expected, %"]
    header += [*["right, % of rows"] * has_rows, *["precision, %", "recall, %"] * several]
    lines = ["## Levels and groups", "", *table(header, rows)]
    if off := figures["hiscam"]:
        text = "HISCAM is off by {absolute_error:.2f} points on average (mean error {error:.2f})."
        lines += [text.format(**off), ""]
    return lines


def automatic_lines(figures: dict, has_rows: bool) -> list[str]:
    """Return the section on what can be coded automatically."""
    rows, shares = [], ["texts", *["rows"] * has_rows]
    for each in figures["automatic"]:
        limit = "none" if each["conf"] is None else f"{math.floor(1e3 * each['conf']) / 1e3:.3f}"
        rows.append([f"{100 * each['errors']:.0f} %", limit, *(percent(each[of], "") for of in shares)])
    header = ["wrong at most", "`conf` at least", *(f"{of} coded, %" for of in shares)]
    lines = ["## Coded automatically", "", *table(header, rows)]
    return [*lines, "Use such a limit as `histocc predict --min-prob`.", ""]


def costly_lines(figures: dict) -> list[str]:
    """Return the tables of the codes and confusions that cost the most rows."""
    rows = []
    for each in sorted(figures["by_code"], key=lambda each: -each["missed"])[:MAX_COSTLY]:
        if each["missed"]:
            counts = [each[name] for name in ("rows", "missed", "wrongly_given")]
            instead = f"{each['most_frequent_mistake']} {each['title_of_mistake']}"
            rows.append([f"{each['code']} {each['title']}", *counts, instead])
    lines = ["## Codes that cost most rows", ""]
    lines += table(["code", "rows", "missed", "wrongly given", "most often answered instead"], rows)
    lines += [f"`{BY_CODE}` lists all codes.", ""]
    rows = []
    for each in figures["confusions"][:MAX_COSTLY]:
        pair = zip((each["true"], each["predicted"] or NO_CODE), each["titles"])
        codes = [" ".join(code_and_title) for code_and_title in pair]
        rows.append([*codes, each["rows"], each["texts"], "; ".join(each["examples"])])
    header = ["true", "answered", "rows", "texts", "examples"]
    return [*lines, "## Confusions that cost most rows", "", *table(header, rows)]


def data_lines(data: dict) -> list[str]:
    """Return lines on the rows that were and were not evaluated, for the report and the console."""
    rows, others, share = data["rows"], data["other_part_rows"], data["share_val"]
    lines = [
        f"Rows: {data['rows_read']:,} read, {rows:,} evaluated, {counted(data['texts'], 'distinct text')}"
    ]
    if data["test_part"]:
        lines.append("They are the test part of the training: nothing was trained or chosen on their texts")
    if others:
        whose = "are not in the test part" if share is None else f"--share-val {share:g} leaves to training"
        lines.append(f"Not evaluated: {counted(others, 'row')} whose texts {whose}")
    if learned := data["learned_rows"]:
        what = f"{counted(learned, 'row')} whose texts the model was trained on (--share-val 1 evaluates all)"
        lines.append(f"Not evaluated: {what}")
    outside = data["rows_outside_key"]
    for kind, rows in data["rejected"].items():
        if not (outside and kind == OUTSIDE_KEY):
            lines.append(f"Rejected: {rows:,} × {kind}, listed in {REJECTED}")
    if outside:
        what = f"{counted(outside, 'row')} ({REJECTED}), left out of the figures"
        lines.append(f"Codes that the model does not know: {what}")
    for name, rows in data["unknown_languages"].items():
        lines.append(f"Language {name!r} is not one of the model's: {counted(rows, 'row')} coded as unk")
    learned = [f"{verb} on {n:,}" for verb in ("trained", "validated") if (n := data[f"texts_{verb}_on"])]
    if learned:
        of = f"{' and '.join(learned)} of {counted(data['texts'], 'text')} evaluated"
        lines.append(f"Figures may be too good: the model was {of}")
    return lines


def figure_line(report: dict) -> str:
    """Return the figure in words, with the rows that it leaves out."""
    figure = Figure.of(report) or "The model was trained on all of these texts, so they measure nothing"
    return " ".join([f"{figure}.", *unknown_codes(report)])


def unknown_codes(report: dict) -> list[str]:
    """Return a sentence on rows with codes that the model does not know, if there are any."""
    if not report["data"]["rows_outside_key"]:
        return []
    share = percent(next(iter(report["decoders"].values()))["accuracy_with_rows_outside_key"])
    return [f"With codes that the model does not know counted as wrong, {share} of rows are right."]


def decoder_lines(report: dict) -> list[str]:
    """Return a line on each of several decoders, the one of `predict` first, and on the baseline."""
    coders = {TITLES[name]: figures for name, figures in report["decoders"].items()}
    if svm := report.get("baseline"):
        of = f"{svm['rows']:,} of {svm['rows_of_training']:,} training rows, {svm['seconds']:,.0f} s"
        coders[f"Baseline: linear support vector machine on n-grams ({of})"] = svm
    lines = []
    for title, figures in coders.items():
        texts = figures["by_digits"][-1]["over_texts"]
        shares = percent(texts["accuracy"][0]), percent(texts["macro_f1"])
        lines.append("{}: {} of texts, macro-F1 {}".format(title, *shares))
    return lines * (len(lines) > 1)


def remarks(report: dict) -> list[str]:
    """Return the sentences after the figure, on the decoder that `predict` uses."""
    first, lines = next(iter(report["decoders"].values())), []
    texts, off = first["by_digits"][-1], first["calibration"]["expected_calibration_error_over_texts"]
    expected = f"`conf` expects {percent(texts['expected'])} of the texts to be right, and is off by"
    lines.append(f"{expected} {percent(off, '')} points on average (expected calibration error).")
    macro = percent(texts["over_texts"]["macro_f1"])
    lines.append(f"Macro-F1 (each code counts the same) is {macro}.")
    if five := report["decoders"].get("linear", {}).get("first_five"):
        share = percent(five["over_texts"])
        lines.append(
            f"The true codes are among the linear decoder's five most probable for {share} of texts."
        )
    return lines


def card_figures(report: dict) -> list[str]:
    """Return the sentences on an evaluation for the model card."""
    levels = next(iter(report["decoders"].values()))["by_digits"]
    of_levels = ", ".join(f"{each['digits']}: {cell(each['over_texts']['accuracy'])}" for each in levels)
    right = f"Right at each level ({report['levels']}), % of texts with 95 % interval: {of_levels}."
    return [*unknown_codes(report), *remarks(report), right]


def markdown(report: dict) -> str:
    """Return the text of report.md, on the decoder that `predict` uses. The others get a line each."""
    model, data = report["model"], report["data"]
    first = next(iter(report["decoders"].values()))
    what = f"{model['file']}{at_step(model['step'])}, codes of {model['system']}: {model['codes']:,}"
    made_by = ", ".join(map(" ".join, report["made_by"].items()))
    how = data["rows"] > data["texts"], any(int(number) > 1 for number in first["by_codes"])
    lines = ["# Evaluation", "", f"**{figure_line(report)}**", ""]
    source = in_markdown(f"Model: {what}. Data: {', '.join(data['files'])}")
    lines += [f"{source}. Made by {made_by}.", ""]
    lines += [f"- {line.rstrip('.')}" for line in (*map(in_markdown, data_lines(data)), *remarks(report))]
    lines += ["", *automatic_lines(first, how[0]), *right_lines(report["levels"], first, *how)]
    lines += costly_lines(first)
    if decoders := decoder_lines(report):
        lines += ["## Decoders", "", *(f"- {line}" for line in decoders), ""]
    texts = model["confidence_texts"]
    fitted = f", fitted on {counted(texts, 'text')}" if texts else ""
    return "\n".join(lines) + "\n" + METHOD.format(fitted=fitted)


def write_report(report: dict, answers: str, folder: str, own: OwnFiles) -> None:
    """Write the files of a report. answers: a table. folder: holds the prepared rows. Raises OSError."""
    with open(os.path.join(folder, REJECTED), encoding="utf-8", newline="") as source:
        rejected = source.read()
    table = next(iter(report["decoders"].values()))["by_code"]
    cells = (list(map(escape_formula, each.values())) for each in table)
    by_code = csv_text([list(table[0]), *cells]).decode()
    content = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    paths = own.claim(*REPORT_FILES)
    own.remove_leftovers()
    for path, text in zip(paths, (rejected, markdown(report), answers, by_code, content)):
        with atomic_write(path) as target:
            target.write(text.encode("utf-8", "backslashreplace"))
