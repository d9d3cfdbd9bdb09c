"""Figures of an evaluation report, in numpy: codes cut to fewer digits, counts of sets, bootstrap,
calibration, thresholds, confusions.

Sets of codes are pairs (row, code), int64 [P] each: a row has as many pairs as codes, in any order, or none.
Nothing here knows models or files.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from histocc.model.confidence_fit import BINS, bin_of, calibration_error

COLUMNS = ("counted", "right", "tp", "fp", "fn")  # of the counts of a row, float64 [N, 5]
MEASURES = ("accuracy", "precision", "recall", "f1")
LOWER, UPPER = 2.5, 97.5  # percentiles of the bootstrap: 95 % intervals
EXAMPLES = 3  # texts shown of a confusion
SHARES = np.arange(11) / 10  # of the linear decoder in the ranking by both that are compared
ROWS_AT_ONCE = 1 << 16


def numbered(names: list[str]) -> tuple[np.ndarray, list[str]]:
    """A number for each name, equal for equal names, in the order of the names: (int64 [n], the distinct
    names).
    """
    distinct = sorted(set(names))
    place = {name: i for i, name in enumerate(distinct)}
    return np.array([place[name] for name in names], dtype=np.int64), distinct


def distinct_pairs(rows: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Pairs as one number each, sorted, each once: row · 2³² + item. Two codes of a row that were cut to the
    same are one.
    """
    return np.unique((rows.astype(np.int64) << 32) | items.astype(np.int64))


def row_counts(n: int, pred: np.ndarray, true: np.ndarray) -> np.ndarray:
    """COLUMNS of each of `n` rows, float64 [n, 5], for `distinct_pairs` of predicted and true codes.

    tp: predicted codes that are true, fp: that are not, fn: true codes that were not predicted. A row is
    right where its sets are equal (two empty ones are).
    """

    def per_row(pairs: np.ndarray) -> np.ndarray:
        return np.bincount(pairs >> 32, minlength=n)[:n]

    hit = np.isin(pred, true, assume_unique=True)
    tp, all_pred, all_true = per_row(pred[hit]), per_row(pred), per_row(true)
    fp, fn = all_pred - tp, all_true - tp
    return np.stack([np.ones(n), (fp + fn == 0), tp, fp, fn], axis=1).astype(np.float64)


def group_counts(
    n: int, pred: np.ndarray, true: np.ndarray, group_of: np.ndarray, group: int, right: np.ndarray
) -> np.ndarray:
    """COLUMNS of each row with regard to one group of codes: `group_of` int64 [codes] is the group of each.

    A row is counted if one of its true codes is in the group, and right if its whole set is (`right`, bool
    [n]); tp, fp and fn are those of the group's codes, in all rows.
    """
    pred, true = (pairs[group_of[pairs & 0xFFFFFFFF] == group] for pairs in (pred, true))
    columns = row_counts(n, pred, true)
    columns[:, 0] = columns[:, 2] + columns[:, 4] > 0
    columns[:, 1] = columns[:, 0] * right
    return columns


def ratios(sums: np.ndarray) -> np.ndarray:
    """MEASURES [..., 4] of summed COLUMNS [..., 5]: right/counted (nan without rows), tp/(tp+fp), tp/(tp+fn),
    2tp/(2tp+fp+fn), 0 where the denominator is 0.
    """
    counted, right, tp, fp, fn = np.moveaxis(sums, -1, 0)

    def fraction(part: np.ndarray, whole: np.ndarray, empty: float = 0.0) -> np.ndarray:
        return np.divide(part, whole, out=np.full(np.shape(part), empty), where=whole > 0)

    return np.stack(
        [
            fraction(right, counted, np.nan),
            fraction(tp, tp + fp),
            fraction(tp, tp + fn),
            fraction(2 * tp, 2 * tp + fp + fn),
        ],
        axis=-1,
    )


def distinct_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of whole numbers [n, m] and how often each stands there. Column by column: far faster
    than comparing rows.
    """
    number = np.zeros(len(table), dtype=np.int64)
    for column in table.T:
        number = np.unique(number * (column.max() + 1) + column, return_inverse=True)[1]
    _, first, times = np.unique(number, return_index=True, return_counts=True)
    return table[first], times


def measured(columns: np.ndarray, text: np.ndarray, resamples: int, seed: int) -> dict:
    """Accuracy, precision, recall and F1 with 95 % intervals, over rows and over distinct texts.

    columns: COLUMNS of each row, float64 [N, 5]; rows of zeros take no part. text: number of each row's text,
    int64 [N], from 0 on. Over texts, each text weighs 1, shared evenly by its rows. Rows with the same text
    are not independent, so the bootstrap draws
    texts, with all their rows: percentiles 2.5 and 97.5 over `resamples` draws of as many texts as there are.
    Texts with the same sums are interchangeable, so a draw is one multinomial over the distinct sums,
    whatever the number of texts. Returns {"rows", "texts", "over_rows", "over_texts"}, the last two {measure:
    [value, low, high]}.
    """
    part = np.asarray(columns.any(axis=1))
    if not part.any():
        return {"rows": 0, "texts": 0, "over_rows": {}, "over_texts": {}}
    sums = np.stack(
        [np.bincount(text[part], weights=column[part]) for column in (*columns.T, part)], axis=1
    ).astype(np.int64)
    kinds, times = distinct_rows(sums[sums[:, 5] > 0])  # [P, 6], [P]
    texts = int(times.sum())
    both = np.concatenate([kinds[:, :5], kinds[:, :5] / kinds[:, 5:]], axis=1)  # [P, 10]
    drawn = np.random.default_rng(seed).multinomial(texts, times / texts, size=resamples) @ both  # [R, 10]
    found: dict[str, Any] = {"rows": int(columns[:, 0].sum()), "texts": int(times[kinds[:, 0] > 0].sum())}
    for name, place in (("over_rows", slice(0, 5)), ("over_texts", slice(5, 10))):
        value, draws = ratios(times @ both[:, place]), ratios(drawn[:, place])
        draws = np.where(np.isnan(draws).all(axis=0), value, draws)  # no draw has a row that is counted
        low, high = np.nanpercentile(draws, (LOWER, UPPER), axis=0)
        found[name] = {
            measure: [float(value[i]), float(low[i]), float(high[i])] for i, measure in enumerate(MEASURES)
        }
    return found


def calibration(confidence: np.ndarray, right: np.ndarray, weight: np.ndarray | None = None) -> dict:
    """How often predictions of so much confidence are right.

    confidence: float [N], 0…1; right: bool [N]; weight: float [N], of each row where each text weighs the
    same; None: each row is a text. Returns {"bins": [{"from", "to", "rows", "confidence", "accuracy",
    "texts", "confidence_over_texts", "accuracy_over_texts"}] for the bins that have rows,
    "expected_calibration_error", and the same "_over_texts": Σ rows/N · |accuracy − mean confidence| (Guo et
    al., 2017, arXiv 1706.04599, section 2)}. A bin holds from < confidence ≤ to; the first also 0.
    """
    place, everyone = bin_of(confidence), np.ones(len(confidence))
    ways = {"": everyone, "_over_texts": everyone if weight is None else weight}
    sums = {
        name: [
            np.bincount(place, weights=each * values, minlength=BINS)
            for values in (everyone, confidence, right)
        ]
        for name, each in ways.items()
    }
    bins = [
        {
            "from": i / BINS,
            "to": (i + 1) / BINS,
            "rows": int(sums[""][0][i]),
            "texts": float(sums["_over_texts"][0][i]),
            **{
                f"{what}{name}": float(values[i] / total[i])
                for name, (total, *of_values) in sums.items()
                for what, values in zip(("confidence", "accuracy"), of_values)
            },
        }
        for i in np.flatnonzero(sums[""][0])
    ]
    errors = {
        f"expected_calibration_error{name}": calibration_error(confidence, right, each)
        for name, each in ways.items()
    }
    return {"bins": bins, **errors}


def top_k(best: np.ndarray, worst: np.ndarray, most: int = 5) -> list[dict]:
    """Share of rows with one, and with all, of their true codes among the k most probable, for k = 1 …
    `most`.

    best, worst: int [N], how many codes are more probable than the row's most and least probable true code.
    """
    return [
        {"k": k, "one": float((best < k).mean()), "all": float((worst < k).mean())}
        for k in range(1, most + 1)
    ]


class Candidates(NamedTuple):
    """Codes of N rows that both decoders together may answer. codes int [N, M], in their order, -1 for none;
    written, linear float [N, M]: log-probability by the seq2seq and by the linear decoder; number int [N], at
    least 1: how many are answered.
    """

    codes: np.ndarray
    written: np.ndarray
    linear: np.ndarray
    number: np.ndarray

    def ranking(self, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(places of the candidates, int [N, M], the best by both decoders first; their weighted mean
        log-probability, float64 [N, M], −inf for none), for `shares` float [N] of the linear decoder. Equal
        ones stand in the order of the codes.
        """
        share = shares[:, None]
        scores = (1 - share) * self.written.astype(np.float64) + share * self.linear.astype(np.float64)
        scores[self.codes < 0] = -np.inf
        order = np.argsort(-scores, axis=1, kind="stable")
        return order, np.take_along_axis(scores, order, axis=1)

    def answered(self, scores: np.ndarray) -> np.ndarray:
        """Which places of `ranking` are answered, bool [N, M]."""
        return (np.arange(scores.shape[1]) < self.number[:, None]) & (scores > -np.inf)

    def rows(self, part: slice) -> "Candidates":
        return Candidates(*(values[part] for values in self))


def right_by_share(candidates: Candidates, true: np.ndarray) -> np.ndarray:
    """Whether the set of codes that both decoders answer is the true one, bool [N, S], for each of SHARES;
    true: int [N, K], the different codes of a row, -1 for none.
    """
    found = np.zeros((len(true), len(SHARES)), dtype=bool)
    for start in range(0, len(true), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        own, codes = candidates.rows(part), true[part]
        is_true = (own.codes[:, :, None] == codes[:, None]).any(2) & (own.codes >= 0)
        for i, share in enumerate(SHARES):
            order, scores = own.ranking(np.full(len(codes), share))
            hits = (np.take_along_axis(is_true, order, axis=1) & own.answered(scores)).sum(1)
            found[part, i] = (hits == own.number) & (hits == (codes >= 0).sum(1))
    return found


def best_share(right: np.ndarray, weight: np.ndarray) -> int:
    """Which of SHARES is right most often, its number; of several the one nearest to 0.5, the lower of two.
    right: bool [N, S];
    weight: float [N].
    """
    accuracy = np.round(weight @ right, 9)
    order = np.argsort(np.abs(2 * np.arange(len(SHARES)) - (len(SHARES) - 1)), kind="stable")
    return int(order[np.argmax(accuracy[order])])


def fitted_shares(right: np.ndarray, texts: np.ndarray) -> tuple[int, list[int], np.ndarray]:
    """(the best share over the distinct texts; those of either half of them, with which the other is counted;
    of which half each row is, int [N]), shares as numbers of SHARES. right: bool [N, S]; texts: hash of each
    row's text, uint64 [N].
    """
    _, place, rows = np.unique(texts, return_inverse=True, return_counts=True)
    weight, half = 1 / rows[place.reshape(-1)], ((texts >> np.uint64(17)) & np.uint64(1)).astype(np.int64)
    return (
        best_share(right, weight),
        [best_share(right[half == each], weight[half == each]) for each in (0, 1)],
        half,
    )


def threshold_counts(predicted: np.ndarray, hits: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Sums over rows for each threshold, int64 [T, 4]: rows right, tp, codes predicted, true codes.

    predicted, hits: int [N, T], codes above the threshold, and how many of them are true; true: int [N], true
    codes of the row.
    """
    right = (predicted == hits) & (hits == true[:, None])
    return np.stack(
        [right.sum(0), hits.sum(0), predicted.sum(0), np.full(predicted.shape[1], true.sum())], axis=1
    ).astype(np.int64)


def best_threshold(counts: np.ndarray, grid: np.ndarray) -> dict:
    """The thresholds of `grid` [T] with the highest F1 (over all codes) and with the highest accuracy (set of
    codes), from `threshold_counts` [T, 4] of `rows` rows; of several the one nearest to 0.5.
    """
    right, tp, predicted, true = counts.astype(np.float64).T
    f1 = 2 * tp / np.maximum(predicted + true, 1)
    order = np.argsort(np.abs(grid - 0.5), kind="stable")
    by_f1, by_accuracy = (int(order[np.argmax(values[order])]) for values in (f1, right))
    return {
        "threshold_f1": float(grid[by_f1]),
        "f1": float(f1[by_f1]),
        "threshold_accuracy": float(grid[by_accuracy]),
        "right": int(right[by_accuracy]),
    }


def confusions(
    true: list[str], pred: list[str], texts: np.ndarray, example: Callable[[int], str], most: int = 20
) -> list[dict]:
    """The most frequent pairs of a true set of codes and another that was predicted instead, as text, over
    the wrong rows.

    true, pred: of each wrong row; texts: numbers of their texts; example: the text of the wrong row i.
    Returns dicts of "true", "predicted", "rows", "texts" (distinct) and "examples", the most distinct texts
    first, then rows, then by name.
    """
    rows, seen = Counter(zip(true, pred)), {}
    for i, pair in enumerate(zip(true, pred)):
        seen.setdefault(pair, {}).setdefault(int(texts[i]), i)
    order = sorted(rows, key=lambda pair: (-len(seen[pair]), -rows[pair], pair))[:most]
    return [
        {
            "true": pair[0],
            "predicted": pair[1],
            "rows": rows[pair],
            "texts": len(seen[pair]),
            "examples": [example(i) for i in list(seen[pair].values())[:EXAMPLES]],
        }
        for pair in order
    ]
