"""What the decoders answer to rows with known codes, and how right that is: the figures of a report.

Sets of codes are pairs (row, code): a row has as many pairs as codes, in any order, or none. COLUMNS are
counted of each row; all measures are ratios of their sums.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from histocc.data.arrays import PreparedData, RowSet
from histocc.data.rows import OUTSIDE_KEY
from histocc.formatter import PAD_IDX, BlockyFormatter, cut
from histocc.model.confidence import (
    BINS,
    Outputs,
    Thresholds,
    bin_of,
    calibration_error,
    curve,
    features,
    places,
)
from histocc.model.decoding import upcast_half
from histocc.runtime.world import World

COLUMNS = ("counted", "right", "tp", "fp", "fn")
MEASURES = ("accuracy", "precision", "recall", "f1")
PERCENTILES = (2.5, 97.5)  # of the bootstrap: 95 % intervals
GRID = np.arange(1, 50) / 50  # thresholds that are compared: 0.02, 0.04 … 0.98
SHARES = np.arange(11) / 10  # of the linear decoder in the ranking by both that are compared
TARGETS = (0.90, 0.95, 0.98, 0.99)  # accuracies that answers are kept for
RANKED = 5  # codes of a row that are searched for, for the top-k accuracy
CANDIDATES = 20  # codes of a row that each decoder proposes for the ranking by both
MAX_FLAT_CODES = 50  # of one row, the most probable ones; a row with more is wrong in any case
MIN_ROWS = 100  # of a language, below which no threshold is chosen for it
MAX_CONFUSIONS, MAX_EXAMPLES = 20, 3


# ---- what is answered


class Outcomes:
    """What both decoders answer to the rows of one rank, batch by batch.

    Args:
        language: number of each row's language, int [rows of all ranks].
        languages: their names.
        thresholds: which codes of the linear decoder count.
        outputs: how its confidence is fitted; None: its outputs are taken as independent.

    Attributes:
        parts: name → arrays, one of each batch; `gathered` says which.
        counts: number of a language → `_count_thresholds` of its rows, int64 [T, 4].
    """

    def __init__(
        self,
        language: np.ndarray,
        languages: list[str],
        thresholds: Thresholds,
        outputs: Outputs | None = None,
    ):
        self.language, self.thresholds, self.outputs = language, thresholds, outputs
        self.least = np.array([thresholds.least(name) for name in languages], dtype=np.float64)
        self.parts: dict[str, list[np.ndarray]] = {}
        self.counts: dict[int, np.ndarray] = {}

    def add(
        self,
        batch: dict,
        blocks: Tensor,
        set_probs: Tensor,
        ranking: Tensor,
        linear_logits: Tensor,
        both: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        """Keeps a batch of the engine's evaluation, but rows of weight 0.

        Args:
            batch: with weights, rows and targets_linear.
            blocks: int64 [B, M, block_size], what the seq2seq decoder writes, as `decoding.sets_of` gives it.
            set_probs: float [B], the probability of that set of codes in any order.
            ranking: int64 [B, RANKED], numbers of the most probable codes by the search.
            linear_logits: float [B, C].
            both: of the ranking by both decoders, None without one: log-probability of writing each code
                [B, C], the best code by both int64 [B], its probability [B].
        """
        kept = batch["weights"] > 0
        logits, codes = upcast_half(linear_logits)[kept], batch["targets_linear"][kept]  # [B, C], [B, K]
        rows, has = batch["rows"][kept], codes >= 0
        language = self.language[rows.cpu().numpy()]
        place = places(logits)  # [B, C]
        of_true = place.gather(1, codes.clamp(min=0))
        least = torch.from_numpy(self.least[language]).logit().to(logits)
        on = self.thresholds.answered(logits, place, least)  # [B, C]
        alone = -softplus(torch.where(on, -logits, logits).double()).sum(1)
        row, code = (on & (place < MAX_FLAT_CODES)).nonzero(as_tuple=True)
        hit = ranking[kept][:, None] == codes[..., None]  # [B, K, RANKED]
        ranked = torch.where(hit.any(-1), hit.int().argmax(-1), hit.shape[-1])  # [B, K]
        found = {
            "rows": rows,
            "seq_blocks": blocks[kept].short(),
            "seq_confidence": set_probs[kept].double(),
            "seq_best": ranked.masked_fill(~has, hit.shape[-1]).amin(1),
            "seq_worst": ranked.masked_fill(~has, -1).amax(1),
            "flat_confidence": alone.exp()
            if self.outputs is None
            else self.outputs.conf(features(logits, on)),
            "best": of_true.masked_fill(~has, logits.shape[1]).amin(1),
            "worst": of_true.masked_fill(~has, -1).amax(1),
            "flat_rows": rows[row],
            "flat_codes": code,
        }
        if both is not None:
            written, best, probability = (values[kept] for values in both)
            linear, most = logits.log_softmax(1), min(CANDIDATES, logits.shape[1])
            proposed = torch.cat([written.topk(most).indices, linear.topk(most).indices], 1).sort(1).values
            again = pad(proposed[:, 1:] == proposed[:, :-1], (1, 0))
            found |= {
                "both_best_right": (best[:, None] == codes).any(1),
                "both_confidence": probability.double(),
                "both_codes": proposed.masked_fill(again, -1).int(),
                "both_written": written.gather(1, proposed),
                "both_linear": linear.gather(1, proposed),
                "both_number": on.sum(1),
            }
        for name, value in found.items():
            self.parts.setdefault(name, []).append(value.cpu().numpy())
        self._count_thresholds(logits.sigmoid(), codes, language, place)

    def _count_thresholds(self, probs: Tensor, codes: Tensor, language: np.ndarray, place: Tensor) -> None:
        """Adds, for each threshold of GRID: rows right, codes right, codes answered, true codes.

        Args:
            probs: float [B, C].
            codes: int64 [B, K], −1 for none.
            language: int [B].
            place: of each code in its row, 0 for the most probable one, int64 [B, C].
        """
        grid = torch.from_numpy(GRID).to(probs)
        above = torch.bucketize(probs, grid)  # [B, C], how many thresholds
        counts = torch.zeros(len(probs), len(grid) + 1, dtype=torch.long, device=probs.device)
        counts.scatter_add_(1, above, torch.ones_like(above))
        answered = self.thresholds.number(counts.flip(1).cumsum(1).flip(1)[:, 1:])  # [B, T]
        has = codes >= 0
        true = place.gather(1, codes.clamp(min=0)).masked_fill(~has, probs.shape[1])  # [B, K]
        hits = (true[..., None] < answered[:, None]).sum(1)  # [B, T]
        number = has.sum(1)[:, None].expand_as(hits)
        right = (answered == hits) & (hits == number)
        found = torch.stack([right, hits, answered, number], dim=2).cpu().numpy()  # [B, T, 4]
        for each in np.unique(language).tolist():
            self.counts[each] = self.counts.get(each, 0) + found[language == each].sum(0)

    def merge(self, parts: dict[str, list[np.ndarray]], counts: dict[int, np.ndarray]) -> None:
        """Adds what was collected of other rows."""
        for name, values in parts.items():
            self.parts.setdefault(name, []).extend(values)
        for language, values in counts.items():
            self.counts[language] = self.counts.get(language, 0) + values

    def gathered(self, world: World) -> dict | None:
        """Everything of all ranks, on rank 0; None on the others. All ranks.

        Returns:
            Arrays in order of the rows: seq_blocks int16 [N, M, block_size], seq_confidence and
            flat_confidence float64 [N], best and worst int64 [N] (how many codes are more probable than the
            most and the least probable true one), seq_best and seq_worst the same by the search, at most
            RANKED; flat_rows and flat_codes int64 [P], the answers of the linear decoder; thresholds: as
            `counts`. With `both`: both_best_right bool [N], both_confidence float64 [N]; both_codes int32
            [N, M], the CANDIDATES most probable codes of either decoder in their order, −1 instead of a
            second time; both_written, both_linear float [N, M], their log-probabilities; both_number int64
            [N], codes of the linear decoder's answer.
        """
        parts = {name: np.concatenate(values) for name, values in self.parts.items()}
        shares = world.gather_on_main((parts, self.counts))
        if shares is None:
            return None
        shares = [(parts, counts) for parts, counts in shares if parts]
        found: dict[str, Any] = {
            name: np.concatenate([parts[name] for parts, _ in shares]) for name in shares[0][0]
        }
        order = np.argsort(found.pop("rows"), kind="stable")
        found = {
            name: value if name in ("flat_rows", "flat_codes") else value[order]
            for name, value in found.items()
        }
        languages = sorted({language for _, counts in shares for language in counts})
        found["thresholds"] = {
            each: sum(counts[each] for _, counts in shares if each in counts) for each in languages
        }
        return found


def written_codes(
    blocks: np.ndarray, formatter: BlockyFormatter, key: list[str]
) -> tuple[list[str], tuple[np.ndarray, np.ndarray]]:
    """Codes of canonical blocks [N, M, block_size]: (the key and behind it what else was written, (rows,
    numbers of these codes)); the seq2seq decoder writes digits, so a code need not be in the key.
    """
    row, column = np.nonzero((blocks != PAD_IDX).any(-1))
    kinds, number = np.unique(blocks[row, column], axis=0, return_inverse=True)
    codes, place = list(key), {code: i for i, code in enumerate(key)}
    of_kind = np.zeros(len(kinds), dtype=np.int64)
    for i, kind in enumerate(kinds):
        code = formatter.decode_block(kind)
        assert code is not None  # canonical blocks without a code are PAD
        if code not in place:
            place[code] = len(codes)
            codes.append(code)
        of_kind[i] = place[code]
    return codes, (row, of_kind[number.reshape(-1)])


# ---- counts and measures


def distinct_pairs(rows: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Pairs as one number each, sorted, each once: row · 2³² + item. Two codes of a row that were cut to the
    same are one.
    """
    return np.unique((rows.astype(np.int64) << 32) | items.astype(np.int64))


def row_counts(n: int, pred: np.ndarray, true: np.ndarray) -> np.ndarray:
    """COLUMNS of each of `n` rows, float64 [n, 5], for `distinct_pairs` of predicted and true codes. A row is
    right where its sets are equal (two empty ones are).
    """
    hit = np.isin(pred, true, assume_unique=True)
    tp, all_pred, all_true = (np.bincount(pairs >> 32, minlength=n)[:n] for pairs in (pred[hit], pred, true))
    fp, fn = all_pred - tp, all_true - tp
    return np.stack([np.ones(n), (fp + fn == 0), tp, fp, fn], axis=1).astype(np.float64)


def ratios(sums: np.ndarray) -> np.ndarray:
    """MEASURES [..., 4] of summed COLUMNS [..., 5]: right/counted (nan without rows), tp/(tp+fp), tp/(tp+fn),
    2tp/(2tp+fp+fn), 0 where the denominator is 0.
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


def calibration(confidence: np.ndarray, right: np.ndarray, weight: np.ndarray) -> dict:
    """How often answers of so much confidence are right, in bins of from < confidence ≤ to (the first also
    0), over rows and, where rows weigh so much, over texts. All float or bool [N].
    """
    place, errors, bins, sums = bin_of(confidence), {}, [], {}
    for name, each in (("", np.ones(len(confidence))), ("_over_texts", weight)):
        sums[name] = [
            np.bincount(place, each * values, BINS) for values in (np.ones(len(place)), confidence, right)
        ]
        errors[f"expected_calibration_error{name}"] = calibration_error(confidence, right, each)
    for i in np.flatnonzero(sums[""][0]):
        one = {"from": i / BINS, "to": (i + 1) / BINS}
        one |= {"rows": int(sums[""][0][i]), "texts": float(sums["_over_texts"][0][i])}
        for name, (total, sure, good) in sums.items():
            one |= {
                f"confidence{name}": float(sure[i] / total[i]),
                f"accuracy{name}": float(good[i] / total[i]),
            }
        bins.append(one)
    return {"bins": bins, **errors}


def top_k(best: np.ndarray, worst: np.ndarray) -> list[dict]:
    """Share of rows with one, and with all, of their true codes among the k most probable, k = 1 … RANKED.

    best, worst: int [N], how many codes are more probable than the row's most and least probable true code.
    """
    return [
        {"k": k, "one": float((best < k).mean()), "all": float((worst < k).mean())}
        for k in range(1, RANKED + 1)
    ]


def best_threshold(counts: np.ndarray) -> dict:
    """The thresholds of GRID with the highest F1 (over all codes) and with the highest accuracy (set of
    codes), of several the one nearest to 0.5. counts: as of `Outcomes`, int64 [T, 4].
    """
    right, tp, answered, true = counts.astype(np.float64).T
    f1 = 2 * tp / np.maximum(answered + true, 1)
    order = np.argsort(np.abs(GRID - 0.5), kind="stable")
    by_f1, by_accuracy = (int(order[np.argmax(values[order])]) for values in (f1, right))
    return {
        "threshold_f1": float(GRID[by_f1]),
        "f1": float(f1[by_f1]),
        "threshold_accuracy": float(GRID[by_accuracy]),
        "right": int(right[by_accuracy]),
    }


def coverage(confidence: np.ndarray, right: np.ndarray, text_hash: np.ndarray, groups: dict, measure) -> dict:
    """How many answers stay where so many of these are to be right, and no others are given.

    The threshold of a target is chosen on one half of the texts, by their hash, and the rows of the other
    half are counted with it, since on the texts that it was chosen on it flatters itself.

    Args:
        confidence: float [N].
        right: bool [N].
        text_hash: uint64 [N].
        groups: name → {name of a group: its rows, bool [N]}.
        measure: columns [N, 5] → `measured`.

    Returns:
        {"curve": [(confidence, share of the texts with at least so much, share of these that is right)],
        "targets": of each, with its thresholds (None: no answers are that right), and the names of `groups`}.
    """
    _, place, rows = np.unique(text_hash, return_inverse=True, return_counts=True)
    weight = 1 / rows[place.reshape(-1)]
    half = ((text_hash >> np.uint64(18)) & np.uint64(1)).astype(np.int64)

    def least(target: float, part: np.ndarray) -> float:
        """Of the confidences from which on so many are right the one that most answers have."""
        points = curve(confidence[part], right[part], weight[part], 10_000)
        reached = [(share, conf) for conf, share, accuracy in points if accuracy >= target]
        return max(reached, default=(0.0, np.inf))[1]

    def share(part: np.ndarray, of: np.ndarray) -> dict:
        columns = np.zeros((len(of), len(COLUMNS)))
        columns[:, 0], columns[:, 1] = of, part
        found = measure(columns)
        return {name: found[name].get("accuracy") for name in ("over_rows", "over_texts")}

    everyone, targets, kept = np.ones(len(right), dtype=bool), [], {}

    def shares(target: float, rows: np.ndarray) -> dict:
        stay = kept[target] & rows
        return {"accuracy": target, "stay": share(stay, rows), "right": share(right & stay, stay)}

    for target in TARGETS:
        halves = [least(target, half == each) for each in (0, 1)]
        kept[target] = confidence >= np.array(halves)[1 - half]
        of_all, *of_halves = (
            value if np.isfinite(value) else None for value in (least(target, everyone), *halves)
        )
        thresholds = {"accuracy": target, "threshold": of_all, "threshold_of_halves": of_halves}
        targets.append(thresholds | shares(target, everyone))
    return {
        "curve": [list(point) for point in curve(confidence, right, weight, 100)],
        "targets": targets,
        **{
            name: {group: [shares(target, rows) for target in TARGETS] for group, rows in parts.items()}
            for name, parts in groups.items()
        },
    }


def confusions(wrong: np.ndarray, codes: list[str], true: tuple, pred: tuple, rows: RowSet) -> list[dict]:
    """The most frequent pairs of a true set of codes and another that was answered instead, as text: those of
    the most distinct texts first, then of the most rows, then by name.

    wrong: numbers of the wrong rows, int64, ascending; true, pred: (rows, numbers of `codes`).
    """
    place = {row: i for i, row in enumerate(wrong.tolist())}
    sets: tuple[list, list] = ([set() for _ in wrong], [set() for _ in wrong])
    for found, pairs in zip(sets, (true, pred)):
        for row, code in zip(*(values.tolist() for values in pairs)):
            if row in place:
                found[place[row]].add(codes[code])
    number, seen = Counter(), {}
    for row, *pair in zip(wrong.tolist(), *(["&".join(sorted(each)) for each in found] for found in sets)):
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


# ---- the report


def ranked_by_both(found: dict, rows: RowSet) -> tuple[tuple[np.ndarray, np.ndarray], dict]:
    """What both decoders answer together, and with which share of the linear one: that with the highest
    accuracy over distinct texts, of several the one nearest to 0.5. It is fitted on each half of the texts,
    by their hash, of which the rows of the other half are counted.

    Args:
        found: as of `Outcomes.gathered`, with candidates. A row gets as many codes as the linear decoder's
            answer has, at least one.

    Returns:
        ((rows, codes) of the answers, what the report says of them).
    """
    true = np.sort(np.asarray(rows.codes), axis=1)
    true[:, 1:][true[:, 1:] == true[:, :-1]] = -1  # [N, K], each code once
    codes, number = found["both_codes"], np.maximum(found["both_number"], 1)
    is_true = (codes[:, :, None] == true[:, None]).any(2) & (codes >= 0)  # [N, M]

    def ranking(share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places of the candidates, the best first and equal ones in the order of the codes, and which of
        these are answered, [N, M] each; share: float [N].
        """
        written, linear = (found[name].astype(np.float64) for name in ("both_written", "both_linear"))
        scores = (1 - share[:, None]) * written + share[:, None] * linear
        scores[codes < 0] = -np.inf
        order = np.argsort(-scores, axis=1, kind="stable")
        there = np.take_along_axis(scores, order, axis=1) > -np.inf
        return order, there & (np.arange(codes.shape[1]) < number[:, None])

    right = np.zeros((len(true), len(SHARES)), dtype=bool)
    for i, share in enumerate(SHARES):
        order, answered = ranking(np.full(len(true), share))
        hits = (np.take_along_axis(is_true, order, axis=1) & answered).sum(1)
        right[:, i] = (hits == number) & (hits == (true >= 0).sum(1))
    text_hash = np.asarray(rows.text_hash)
    _, place, times = np.unique(text_hash, return_inverse=True, return_counts=True)
    weight, half = (
        1 / times[place.reshape(-1)],
        ((text_hash >> np.uint64(17)) & np.uint64(1)).astype(np.int64),
    )
    nearest = np.argsort(np.abs(2 * np.arange(len(SHARES)) - len(SHARES) + 1), kind="stable")
    best, *halves = (
        int(nearest[np.argmax(np.round(weight[part] @ right[part], 9)[nearest])])
        for part in (half >= 0, half == 0, half == 1)
    )
    order, answered = ranking(SHARES[np.array(halves)[1 - half]])
    codes = np.take_along_axis(codes, order, axis=1)
    hit = (true[..., None] == codes[:, None, :RANKED]) & (true >= 0)[..., None]  # [N, K, RANKED]
    ranked = np.where(hit.any(2), hit.argmax(2), RANKED)
    row, column = np.nonzero(answered)
    return (row, codes[row, column].astype(np.int64)), {
        "linear_share": float(SHARES[best]),
        "linear_share_of_halves": [float(SHARES[each]) for each in halves],
        "candidates": CANDIDATES,
        "top_k": top_k(np.where(true >= 0, ranked, RANKED).min(1), np.where(true >= 0, ranked, -1).max(1)),
    }


def decoder_report(
    codes: list[str],
    pred: tuple[np.ndarray, np.ndarray],
    confidence: np.ndarray,
    sure: np.ndarray | None,
    formatter: BlockyFormatter,
    data: PreparedData,
    rows: RowSet,
    resamples: int,
    seed: int,
) -> dict:
    """The figures of one decoder.

    Args:
        codes: the key, and behind it what else was written.
        pred: (rows, numbers of `codes`) of the answers, int64 [P] each.
        confidence: float [N], the probability of `sure`.
        sure: bool [N], what is right of each row; None: that its whole set of codes is.
        data, rows: those that were evaluated.
        resamples, seed: of the bootstrap.
    """
    n, separator = len(rows), formatter.within_block_sep
    true = np.nonzero(rows.codes >= 0)
    true = true[0], np.asarray(rows.codes)[true].astype(np.int64)
    text_hash, language = np.asarray(rows.text_hash), np.asarray(rows.language)
    text = np.unique(text_hash, return_inverse=True)[1]
    weight = 1 / np.bincount(text)[text]

    def measure(columns: np.ndarray) -> dict:
        return measured(columns, text, resamples, seed)

    by_digits = []
    for digits in range(1, formatter.block_size + 1):
        number = np.unique([cut(code, digits, separator) for code in codes], return_inverse=True)[1]
        pairs = (distinct_pairs(row, number[code]) for row, code in (pred, true))
        by_digits.append({"digits": digits, **measure(row_counts(n, *pairs))})
    pairs = [distinct_pairs(*each) for each in (pred, true)]
    columns = row_counts(n, *pairs)
    right = columns[:, 1] > 0
    sure = right if sure is None else sure
    first, group_of = np.unique([cut(code, 1, separator) for code in codes], return_inverse=True)
    by_language = {data.languages[each]: language == each for each in np.unique(language)}
    by_group, rows_of_group = {}, {}
    for group in np.unique(group_of[true[1]]):  # counted are rows with such a code, tp, fp and fn in all rows
        of_group = row_counts(n, *(each[group_of[each & 0xFFFFFFFF] == group] for each in pairs))
        of_group[:, 0] = of_group[:, 2] + of_group[:, 4] > 0
        of_group[:, 1] = of_group[:, 0] * right
        by_group[str(first[group])] = measure(of_group)
        rows_of_group[str(first[group])] = of_group[:, 0] > 0
    return {
        "right_rows": int(right.sum()),
        "accuracy": float(right.mean()),
        "accuracy_with_rows_outside_key": float(
            right.sum() / (n + data.report["rejected"].get(OUTSIDE_KEY, 0))
        ),
        "by_digits": by_digits,
        "by_language": {name: measure(columns * part[:, None]) for name, part in by_language.items()},
        "by_major_group": by_group,
        "calibration": calibration(confidence, sure, weight),
        "coverage": coverage(
            confidence,
            sure,
            text_hash,
            {"by_language": by_language, "by_major_group": rows_of_group},
            measure,
        ),
        "confusions": confusions(np.flatnonzero(~right), codes, true, pred, rows),
    }


def decoders_report(
    found: dict,
    formatter: BlockyFormatter,
    data: PreparedData,
    rows: RowSet,
    resamples: int,
    seed: int,
    kind: str = "mixer",
) -> dict:
    """{"seq2seq": …, "linear": …, "both": …}: figures of the decoders that a model of this kind has, from
    `Outcomes.gathered` and the rows of `data` that were evaluated. Rank 0 only.
    """
    key, language = data.codes, np.asarray(rows.language)
    common = formatter, data, rows, resamples, seed
    decoders = {}
    if kind != "flat":
        codes, written = written_codes(found["seq_blocks"], formatter, key)
        decoders["seq2seq"] = decoder_report(codes, written, found["seq_confidence"], None, *common) | {
            "codes_outside_key": int((written[1] >= len(key)).sum()),
            "top_k": top_k(found["seq_best"], found["seq_worst"]),
        }
    if kind != "seq2seq":
        answered = found["flat_rows"], found["flat_codes"]
        linear = decoders["linear"] = decoder_report(key, answered, found["flat_confidence"], None, *common)
        counts, total = found["thresholds"], np.bincount(language, minlength=len(data.languages))
        groups = {"all": (np.sum(list(counts.values()), axis=0), len(language))}
        groups |= {
            data.languages[each]: (counts[each], int(total[each]))
            for each in counts
            if total[each] >= MIN_ROWS
        }
        linear["top_k"] = top_k(found["best"], found["worst"])
        linear["thresholds"] = {
            name: {"rows": number, **best_threshold(values)} for name, (values, number) in groups.items()
        }
    if kind == "mixer" and "both_codes" in found:
        answered, more = ranked_by_both(found, rows)
        certain = found["both_best_right"]
        decoders["both"] = decoder_report(key, answered, found["both_confidence"], certain, *common) | more
    return decoders
