"""How right the answers to rows with known codes are: the figures of a report.

Sets of codes are pairs (row, code): a row has as many pairs as codes, in any order, or none. COLUMNS are
counted of each row; all measures are ratios of their sums.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from histocc.data.arrays import PreparedData, RowSet
from histocc.data.rows import OUTSIDE_KEY
from histocc.formatter import BlockyFormatter, cut
from histocc.model.confidence import BINS, Thresholds, bin_of, calibration_error, curve

COLUMNS = ("counted", "right", "tp", "fp", "fn")
MEASURES = ("accuracy", "precision", "recall", "f1")
PERCENTILES = (2.5, 97.5)  # of the bootstrap: 95 % intervals
GRID = np.arange(1, 50) / 50  # thresholds that are compared: 0.02, 0.04 … 0.98
SHARES = np.arange(11) / 10  # of the linear decoder in the ranking by both that are compared
TARGETS = (0.90, 0.95, 0.98, 0.99)  # accuracies that answers are kept for
RANKED = 5  # for the top-k accuracy
OUTPUTS = 50  # of the linear decoder for a text, the most probable ones; more codes are wrong in any case
MIN_ROWS = 100  # of a language, below which no threshold is chosen for it
MAX_CONFUSIONS, MAX_EXAMPLES = 20, 3


class Answers(NamedTuple):
    """What one decoder answers to N rows.

    Args:
        rows, codes: int64 [P], a pair for each code: its row, and its number in `names`.
        names: the key, and behind it what else was written.
        conf: float64 [N], the probability that the set of codes is right.
    """

    rows: np.ndarray
    codes: np.ndarray
    names: list[str]
    conf: np.ndarray

    @classmethod
    def of(cls, coded: list, of_row: np.ndarray, key: list[str]) -> "Answers":
        """From `Coded`s of distinct texts; of_row int64 [N]: the text of each row."""
        numbers = {code: i for i, code in enumerate(key)}
        sets = [[numbers.setdefault(code, len(numbers)) for code in one.codes] for one in coded]
        counts = np.array([len(codes) for codes in sets], dtype=np.int64)[of_row]
        codes = np.array([code for text in of_row.tolist() for code in sets[text]], dtype=np.int64)
        conf = np.array([one.conf or 0.0 for one in coded], dtype=np.float64)
        return cls(np.repeat(np.arange(len(of_row)), counts), codes, list(numbers), conf[of_row])


def true_places(rows: RowSet, ranking: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places in a ranking [N, M] of code numbers, −1 for none, of the true codes of each row, int64 [N, K]; M
    if it is not among them; and whether there is such a code, bool [N, K].
    """
    true = np.sort(np.asarray(rows.codes), axis=1)
    true[:, 1:][true[:, 1:] == true[:, :-1]] = -1  # each code once
    hit = (true[:, :, None] == ranking[:, None]) & (true >= 0)[:, :, None]  # [N, K, M]
    return np.where(hit.any(2), hit.argmax(2), ranking.shape[1]), true >= 0


# ---- counts and measures


def distinct_pairs(rows: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Pairs as one number each, sorted, each once: row · 2³² + item. Two codes of a row that were cut to the
    same are one.
    """
    return np.unique((rows.astype(np.int64) << 32) | items.astype(np.int64))


def row_counts(n: int, pred: np.ndarray, true: np.ndarray) -> np.ndarray:
    """COLUMNS of each of `n` rows, float64 [n, 5], for `distinct_pairs` of predicted and true codes. A row is
    right if its sets are equal (two empty ones are).
    """
    hit = np.isin(pred, true, assume_unique=True)
    tp, all_pred, all_true = (np.bincount(pairs >> 32, minlength=n)[:n] for pairs in (pred[hit], pred, true))
    fp, fn = all_pred - tp, all_true - tp
    return np.stack([np.ones(n), (fp + fn == 0), tp, fp, fn], axis=1).astype(np.float64)


def ratios(sums: np.ndarray) -> np.ndarray:
    """MEASURES [..., 4] of summed COLUMNS [..., 5]: right/counted (nan without rows), tp/(tp+fp), tp/(tp+fn),
    2tp/(2tp+fp+fn), 0 if the denominator is 0.
    """
    counted, right, tp, fp, fn = np.moveaxis(sums, -1, 0)
    pairs = [(right, counted), (tp, tp + fp), (tp, tp + fn), (2 * tp, 2 * tp + fp + fn)]
    empty = (np.nan, 0.0, 0.0, 0.0)
    return np.stack(
        [
            np.divide(part, of, out=np.full(np.shape(part), none), where=of > 0)
            for (part, of), none in zip(pairs, empty)
        ],
        axis=-1,
    )


def measured(columns: np.ndarray, text: np.ndarray, resamples: int, seed: int) -> dict:
    """Accuracy, precision, recall and F1 with 95 % intervals, over rows and over distinct texts.

    Rows with the same text are not independent, so the bootstrap draws texts, with all their rows. Texts with
    the same sums are interchangeable, so a draw is one multinomial over the distinct sums, whatever the
    number of texts.

    Args:
        columns: COLUMNS of each row, float64 [N, 5]; rows of zeros take no part.
        text: number of each row's text, int64 [N], from 0 on; over texts each weighs 1, shared by its rows.
        resamples, seed: of the bootstrap.

    Returns:
        {"rows", "texts", "over_rows", "over_texts"}, the last two {measure: [value, low, high]}.
    """
    part = np.asarray(columns.any(axis=1))
    if not part.any():
        return {"rows": 0, "texts": 0, "over_rows": {}, "over_texts": {}}
    sums = np.stack(
        [np.bincount(text[part], weights=column[part]) for column in (*columns.T, part)], axis=1
    ).astype(np.int64)
    sums = sums[sums[:, 5] > 0]
    number = np.zeros(len(sums), dtype=np.int64)  # of equal sums; column by column is faster than by rows
    for column in sums.T:
        number = np.unique(number * (column.max() + 1) + column, return_inverse=True)[1]
    _, first, times = np.unique(number, return_index=True, return_counts=True)
    kinds, texts = sums[first], len(sums)  # [P, 6]
    both = np.concatenate([kinds[:, :5], kinds[:, :5] / kinds[:, 5:]], axis=1)  # [P, 10]
    drawn = np.random.default_rng(seed).multinomial(texts, times / texts, size=resamples) @ both  # [R, 10]
    found: dict[str, Any] = {"rows": int(columns[:, 0].sum()), "texts": int(times[kinds[:, 0] > 0].sum())}
    for name, place in (("over_rows", slice(0, 5)), ("over_texts", slice(5, 10))):
        value, draws = ratios(times @ both[:, place]), ratios(drawn[:, place])
        draws = np.where(np.isnan(draws).all(axis=0), value, draws)  # no draw has a row that is counted
        low, high = np.nanpercentile(draws, PERCENTILES, axis=0)
        found[name] = {
            measure: [float(value[i]), float(low[i]), float(high[i])] for i, measure in enumerate(MEASURES)
        }
    return found


def calibration(conf: np.ndarray, right: np.ndarray, weight: np.ndarray) -> dict:
    """How often answers of so much confidence are right, in bins of from < confidence ≤ to (the first also
    0), and the expected calibration error over rows and, if rows weigh so much, over texts. All float or bool
    [N].
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


def top_k(places: np.ndarray, there: np.ndarray) -> list[dict]:
    """Share of rows with one, and with all, of their true codes among the k first, k = 1 … RANKED; arguments
    as `true_places` gives them.
    """
    best = np.where(there, places, places.max() + 1).min(1)
    worst = np.where(there, places, -1).max(1)
    return [
        {"k": k, "one": float((best < k).mean()), "all": float((worst < k).mean())}
        for k in range(1, RANKED + 1)
    ]


def best_thresholds(
    probs: np.ndarray,
    places: np.ndarray,
    there: np.ndarray,
    thresholds: Thresholds,
    groups: dict[str, np.ndarray],
) -> dict[str, dict]:
    """For each group, the thresholds of GRID with the highest F1 (over all codes) and with the highest
    accuracy (sets of codes), of several the one nearest to 0.5.

    Args:
        probs: float [N, OUTPUTS], the highest first.
        places, there: of the true codes among them, see `true_places`.
        thresholds: of the model, which may bound how many codes a row has.
        groups: name → its rows, bool [N].
    """
    order = np.argsort(np.abs(GRID - 0.5), kind="stable")
    answered = np.stack([(probs > threshold).sum(1) for threshold in GRID], axis=1)  # [N, T]
    answered = thresholds.number(torch.from_numpy(answered)).numpy()
    hits = ((places[:, :, None] < answered[:, None]) & there[:, :, None]).sum(1)  # [N, T]
    true = there.sum(1)[:, None]
    right = (hits == true) & (answered == true)
    best = {}
    for name, part in groups.items():
        f1 = 2 * hits[part].sum(0) / np.maximum((answered[part] + true[part]).sum(0), 1)
        by_f1, by_accuracy = (
            int(order[np.argmax(values[order])]) for values in (f1, right[part].sum(0).astype(float))
        )
        best[name] = {
            "rows": int(part.sum()),
            "threshold_f1": float(GRID[by_f1]),
            "f1": float(f1[by_f1]),
            "threshold_accuracy": float(GRID[by_accuracy]),
            "right": int(right[part].sum(0)[by_accuracy]),
        }
    return best


def best_linear_share(
    candidates: np.ndarray, written: np.ndarray, linear: np.ndarray, number: np.ndarray, rows: RowSet
) -> float:
    """The share of the linear decoder, of SHARES, with the highest accuracy over distinct texts where both
    decoders rank the codes together; of several the one nearest to 0.5.

    Args:
        candidates: code numbers int64 [N, M].
        written, linear: their log-probabilities by either decoder, float [N, M].
        number: of codes that each row gets, int64 [N].
    """
    weight = weights(np.asarray(rows.text_hash))
    accuracy = []
    for share in SHARES:
        order = np.argsort(-((1 - share) * written + share * linear), axis=1, kind="stable")
        places, there = true_places(rows, np.take_along_axis(candidates, order, axis=1))
        hits = ((places < number[:, None]) & there).sum(1)
        right = (hits == number) & (hits == there.sum(1))
        accuracy.append(round(float(weight @ right), 9))
    return float(max(SHARES, key=lambda share: (accuracy[round(10 * share)], -abs(share - 0.5))))


def weights(text_hash: np.ndarray) -> np.ndarray:
    """Of each row, so that all rows of a text weigh 1 together, float64 [N]."""
    _, place, rows = np.unique(text_hash, return_inverse=True, return_counts=True)
    return 1 / rows[place.reshape(-1)]


def coverage(
    conf: np.ndarray,
    right: np.ndarray,
    text_hash: np.ndarray,
    measure: Callable[[np.ndarray], dict],
) -> dict:
    """How many answers stay if so many of these are to be right, and no others are given.

    The threshold of a target is chosen on one half of the texts, by their hash, and the rows of the other
    half are counted with it, since on the texts that it was chosen on it flatters itself.

    Args:
        conf: float [N].
        right: bool [N].
        text_hash: uint64 [N].
        measure: columns [N, 5] → `measured`.

    Returns:
        {"curve": [(confidence, share of the texts with at least so much, share of these that is right)],
        "targets": of each, with its threshold (None: no answers are that right)}.
    """
    weight = weights(text_hash)
    half = ((text_hash >> np.uint64(18)) & np.uint64(1)).astype(np.int64)

    def limit(target: float, part: np.ndarray) -> float:
        """Of the confidences from which on so many are right the one that most answers have."""
        points = curve(conf[part], right[part], weight[part], 10_000)
        reached = [(share, conf) for conf, share, accuracy in points if accuracy >= target]
        return max(reached, default=(0.0, np.inf))[1]

    def share(part: np.ndarray, of: np.ndarray) -> dict:
        columns = np.zeros((len(of), len(COLUMNS)))
        columns[:, 0], columns[:, 1] = of, part
        found = measure(columns)
        return {name: found[name].get("accuracy") for name in ("over_rows", "over_texts")}

    everyone, targets = np.ones(len(right), dtype=bool), []
    for target in TARGETS:
        of_halves = np.array([limit(target, half == 1), limit(target, half == 0)])
        threshold, stay = limit(target, everyone), conf >= of_halves[half]
        targets.append(
            {
                "accuracy": target,
                "threshold": threshold if np.isfinite(threshold) else None,
                "stay": share(stay, everyone),
                "right": share(right & stay, stay),
            }
        )
    return {"curve": [list(point) for point in curve(conf, right, weight, 100)], "targets": targets}


def confusions(wrong: np.ndarray, names: list[str], true: tuple, pred: tuple, rows: RowSet) -> list[dict]:
    """The most frequent pairs of a true set of codes and another that was answered instead, as text: those of
    the most distinct texts first, then of the most rows, then by name.

    Args:
        wrong: numbers of the wrong rows, int64, ascending.
        true, pred: (rows, numbers of `names`).
    """
    place = {row: i for i, row in enumerate(wrong.tolist())}
    sets: tuple[list, list] = ([set() for _ in wrong], [set() for _ in wrong])
    for found, pairs in zip(sets, (true, pred)):
        for row, code in zip(*(values.tolist() for values in pairs)):
            if row in place:
                found[place[row]].add(names[code])
    number, seen = Counter(), {}
    for row, *pair in zip(wrong.tolist(), *(["&".join(sorted(codes)) for codes in found] for found in sets)):
        number[tuple(pair)] += 1
        seen.setdefault(tuple(pair), {}).setdefault(int(rows.text_hash[row]), row)
    order = sorted(number, key=lambda pair: (-len(seen[pair]), -number[pair], pair))[:MAX_CONFUSIONS]
    return [
        {
            "true": pair[0],
            "predicted": pair[1],
            "rows": number[pair],
            "texts": len(seen[pair]),
            "examples": rows.strings(np.array(list(seen[pair].values())[:MAX_EXAMPLES])),
        }
        for pair in order
    ]


def decoder_report(
    answers: Answers, formatter: BlockyFormatter, data: PreparedData, rows: RowSet, resamples: int, seed: int
) -> dict:
    """The figures of one decoder.

    Args:
        data, rows: those that were evaluated.
        resamples, seed: of the bootstrap.
    """
    n, separator, names = len(rows), formatter.within_block_sep, answers.names
    pred, true = (answers.rows, answers.codes), np.nonzero(rows.codes >= 0)
    true = true[0], np.asarray(rows.codes)[true].astype(np.int64)
    text_hash, language = np.asarray(rows.text_hash), np.asarray(rows.language)
    text = np.unique(text_hash, return_inverse=True)[1]

    def measure(columns: np.ndarray) -> dict:
        return measured(columns, text, resamples, seed)

    by_digits = []
    for digits in range(1, formatter.block_size + 1):
        number = np.unique([cut(code, digits, separator) for code in names], return_inverse=True)[1]
        pairs = (distinct_pairs(row, number[code]) for row, code in (pred, true))
        by_digits.append({"digits": digits, **measure(row_counts(n, *pairs))})
    pairs = [distinct_pairs(*each) for each in (pred, true)]
    columns = row_counts(n, *pairs)
    right = columns[:, 1] > 0
    first, group_of = np.unique([cut(code, 1, separator) for code in names], return_inverse=True)
    by_language = {data.languages[number]: language == number for number in np.unique(language)}
    by_group = {}
    for group in np.unique(group_of[true[1]]):  # counted are rows with such a code, tp, fp and fn in all rows
        of_group = row_counts(n, *(part[group_of[part & 0xFFFFFFFF] == group] for part in pairs))
        of_group[:, 0] = of_group[:, 2] + of_group[:, 4] > 0
        of_group[:, 1] = of_group[:, 0] * right
        by_group[str(first[group])] = measure(of_group)
    outside = data.report["rejected"].get(OUTSIDE_KEY, 0)
    return {
        "right_rows": int(right.sum()),
        "accuracy": float(right.mean()),
        "accuracy_with_rows_outside_key": float(right.sum() / (n + outside)),
        "codes_outside_key": int((answers.codes >= len(data.codes)).sum()),
        "by_digits": by_digits,
        "by_language": {name: measure(columns * part[:, None]) for name, part in by_language.items()},
        "by_major_group": by_group,
        "calibration": calibration(answers.conf, right, weights(text_hash)),
        "coverage": coverage(answers.conf, right, text_hash, measure),
        "confusions": confusions(np.flatnonzero(~right), names, true, pred, rows),
    }
