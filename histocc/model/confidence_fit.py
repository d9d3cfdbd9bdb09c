"""Fits how sure a model is to answers whose truth is known: the parameters of `confidence`.

Each is the likeliest, of whether the answers are right, under a normal prior with mean at what changes
nothing: 1 for the logarithm of a temperature or factor, 3 for a bias. Every distinct text weighs the same.
What depends on a temperature is kept at those of GRID, so that nothing is as long as a vocabulary or a key.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from histocc.formatter import PAD_IDX
from histocc.model.confidence import Confidence, Outputs, Ranking, Writing, curve, log_odds, mapped

LEAST_TEXTS = 200
GRID = np.exp(np.linspace(np.log(0.2), np.log(5.0), 61))  # temperatures
STRIDE = 6
_BIAS = 3.0  # of the prior: standard deviation of a bias
_ROUNDS = 20  # of the search for two temperatures, at most; it ends when neither moves
BINS = 10


class Places(NamedTuple):
    """What was written, in every order of a row's codes. row int64 [S], the row of each sequence; first,
    later float64 [S, len(GRID)]: log-probability of the tokens of the first block, and of those of later ones
    behind the choice to go on; odds float64 [S, E]: log-odds of no further block at each end, NaN for none;
    ends bool [S, E]: whether it ended there.
    """

    row: Tensor
    first: Tensor
    later: Tensor
    odds: Tensor
    ends: Tensor

    @classmethod
    def of(cls, row: Tensor, logits: Tensor, tokens: Tensor, block_size: int) -> "Places":
        """row int64 [S]; logits [S, T, V] and tokens int64 [S, T] as `decoding.code_logits` gives them."""
        logits = logits.double()
        places = torch.arange(tokens.shape[1], device=tokens.device)
        ends = (places % block_size == 0) & (places > 0)
        none = torch.arange(logits.shape[2], device=logits.device) == PAD_IDX
        codes = logits[:, ends].masked_fill(none, float("-inf"))
        odds = logits[:, ends, PAD_IDX] - codes.logsumexp(-1)
        ended = tokens[:, ends] == PAD_IDX
        sums = []
        for temperature in GRID.tolist():
            scaled = (logits / temperature).log_softmax(-1)
            scaled[:, ends] = (codes / temperature).log_softmax(-1)
            found = scaled.gather(2, tokens[..., None])[..., 0]
            found[:, ends] = found[:, ends].masked_fill(ended, 0.0)
            sums.append((found[:, :block_size].sum(1), found[:, block_size:].sum(1)))
        first, later = (torch.stack(each, dim=1).cpu() for each in zip(*sums))
        return cls(row.cpu(), first, later, odds.cpu(), ended.cpu())

    def log_prob(self, rows: int, first: int, later: int, end: Tensor) -> Tensor:
        """Log-probability, [rows], of each row's codes in any order, for numbers of temperatures of GRID and
        (factor, bias) of the end.
        """
        odds = end[0] * self.odds.nan_to_num(0.0) + end[1]
        of_ends = logsigmoid(torch.where(self.ends, odds, -odds)).masked_fill(self.odds.isnan(), 0.0).sum(1)
        each = self.first[:, first] + self.later[:, later] + of_ends
        most = torch.full((rows,), float("-inf"), dtype=each.dtype)
        most = most.scatter_reduce(0, self.row, each.detach(), "amax")
        sums = torch.zeros(rows, dtype=each.dtype).index_add(0, self.row, (each - most[self.row]).exp())
        return sums.log() + most


class Ranked(NamedTuple):
    """score float64 [N]: of the best code; norms float64 [N, len(GRID)]: logarithm of what all codes sum to
    behind each temperature.
    """

    score: Tensor
    norms: Tensor

    @classmethod
    def of(cls, scores: Tensor) -> "Ranked":
        """scores [N, C], log-probabilities."""
        scores = scores.double()
        norms = [(scores / temperature).logsumexp(1) for temperature in GRID.tolist()]
        return cls(scores.max(1).values.cpu(), torch.stack(norms, dim=1).cpu())

    def log_prob(self, temperature: int) -> Tensor:
        """Log-probability of the best code, [N]."""
        return self.score / float(GRID[temperature]) - self.norms[:, temperature]


def miss(odds: Tensor, right: Tensor) -> Tensor:
    """Minus the log-likelihood of being right or not, for log-odds of it; of any shape."""
    return -logsigmoid(torch.where(right, odds, -odds))


class Weighed(NamedTuple):
    """right bool [N]; weight float64 [N], of each row."""

    right: Tensor
    weight: Tensor

    def loss(self, log_prob: Tensor) -> Tensor:
        """Sum over the rows of minus the log-likelihood of being right with these log-probabilities."""
        return self.loss_of_odds(log_odds(log_prob))

    def loss_of_odds(self, odds: Tensor) -> Tensor:
        """The same with these log-odds."""
        return (self.weight * miss(odds, self.right)).sum()


def minimum(loss: Callable[[Tensor], Tensor], start: list[float]) -> tuple[Tensor, float]:
    """(parameters, loss) where it is lowest, from `start` on, float64."""
    at = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([at], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def closure() -> Tensor:
        search.zero_grad()
        found = loss(at)
        found.backward()
        return found

    with torch.enable_grad():
        search.step(closure)
    return at.detach(), float(loss(at.detach()))


def nearest(temperature: float) -> int:
    """The number of a temperature in GRID."""
    return int(np.abs(GRID - temperature).argmin())


def prior(logarithms: Tensor, biases: Tensor) -> Tensor:
    """Minus the logarithm of the prior of logarithms of temperatures and factors, and of biases."""
    return (logarithms**2).sum() / 2 + (biases**2).sum() / (2 * _BIAS**2)


def fit_written(places: Places, known: Weighed) -> Writing:
    """Temperatures by turns along GRID, each time with the rest fitted anew."""
    rows, logs = len(known.right), torch.from_numpy(np.log(GRID))

    def loss_of(first: int, later: int, at: Tensor) -> Tensor:
        """at: logarithm of the factor of the end, its bias, the same of the set."""
        factors = at.exp()
        log_prob = places.log_prob(rows, first, later, torch.stack([factors[0], at[1]]))
        found = known.loss(mapped(log_prob, (factors[2], at[3]))) + prior(at[[0, 2]], at[[1, 3]])
        return found + prior(logs[[first, later]], at[:0])

    middle = len(GRID) // 2
    first, later, rest = middle, middle, [0.0] * 4
    for _ in range(_ROUNDS):
        at, _ = minimum(partial(loss_of, first, later), rest)
        before, rest = (first, later), at.tolist()
        first = min(range(len(GRID)), key=lambda i: float(loss_of(i, later, at)))
        later = min(range(len(GRID)), key=lambda i: float(loss_of(first, i, at)))
        if (first, later) == before:
            break
    end, of_set = [float(np.exp(rest[0])), rest[1]], [float(np.exp(rest[2])), rest[3]]
    return Writing([float(GRID[first]), float(GRID[later])], end, of_set)


def fit_outputs(logits: Tensor, hits: Tensor, of_sets: Tensor, known: Weighed) -> Outputs:
    """logits float64 [N, K] of the most probable outputs, hits bool [N, K]: those that are true; of_sets
    float64 [N, 4], `confidence.features` of the answers.
    """

    def loss_of_each(at: Tensor) -> Tensor:
        odds = logits * at[0].exp() + at[1]
        each = miss(odds, hits).sum(1)
        return (known.weight * each).sum() + prior(at[:1], at[1:])

    def loss_of_sets(at: Tensor) -> Tensor:
        return known.loss_of_odds(of_sets @ at) + prior(at[:2] - 0.5, at[2:])

    each, of_set = minimum(loss_of_each, [0.0, 0.0])[0], minimum(loss_of_sets, [0.5, 0.5, 0.0, 0.0])[0]
    return Outputs([float(each[0].exp()), float(each[1])], of_set.tolist())


def fit_ranking(ranked: Ranked, known: Weighed) -> Ranking:
    """The best temperature of every STRIDE-th of GRID, then of those around it."""
    start: list[float] = [0.0, 0.0]
    found: dict[int, tuple[float, Tensor]] = {}

    def fitted(i: int) -> float:
        odds = log_odds(ranked.log_prob(i))

        def loss(at: Tensor) -> Tensor:
            return known.loss_of_odds(at[0].exp() * odds + at[1]) + prior(at[:1], at[1:])

        at, least = minimum(loss, start)
        found[i] = least + float(np.log(GRID[i])) ** 2 / 2, at
        return found[i][0]

    middle = min(range(0, len(GRID), STRIDE), key=fitted)
    start = found[middle][1].tolist()
    around = range(max(0, middle - STRIDE + 1), min(len(GRID), middle + STRIDE))
    best = min((i for i in around if i != middle), key=fitted)
    best = min(best, middle, key=lambda i: found[i][0])
    at = found[best][1]
    return Ranking(float(GRID[best]), [float(at[0].exp()), float(at[1])])


def fit_sets(log_best: Tensor, several: Tensor, known: Weighed) -> list[float]:
    """`Ranking.sets`; log_best float64 [N], several bool [N]; known: whether exactly the answered codes are
    right.
    """
    odds = log_odds(log_best)

    def loss(at: Tensor) -> Tensor:
        return known.loss_of_odds(at[0].exp() * odds + at[1] + at[2] * several) + prior(at[:1], at[1:])

    at, _ = minimum(loss, [0.0, 0.0, 0.0])
    return [float(at[0].exp()), *at[1:].tolist()]


class Answers(NamedTuple):
    """What the decoders answered to N rows, each None where there is no such decoder. written: its sequences,
    right bool [N], and there bool [N], whether a row has any; outputs: logits and hits [N, K], features [N,
    4], right [N]; ranked: scores, and whether the best code is true [N]; both: the same of candidates,
    several bool [N], whether the answer is of several codes, and right [N].
    """

    written: tuple[Places, Tensor, Tensor] | None
    outputs: tuple[Tensor, Tensor, Tensor, Tensor] | None
    ranked: tuple[Ranked, Tensor] | None
    both: tuple[Ranked, Tensor, Tensor, Tensor] | None = None


def fit(answers: Answers, texts: np.ndarray) -> tuple[Confidence, dict[str, tuple[float, float]]]:
    """(what is fitted, expected calibration error of these answers before and after, by name of the curve).

    texts: hash of each row's text, uint64 [N].
    """
    _, place, rows = np.unique(texts, return_inverse=True, return_counts=True)
    weight = torch.from_numpy(1.0 / rows[place.reshape(-1)])
    parts: dict[str, Any] = {}
    found: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}  # raw, fitted, right, weight
    if answers.written is not None:
        places, right, there = answers.written
        known = Weighed(right, weight * there)
        writing = parts["written"] = fit_written(places, known)
        one, first, later = (nearest(each) for each in (1.0, *writing.temperatures))
        raw = places.log_prob(len(right), one, one, torch.tensor([1.0, 0.0], dtype=torch.float64))
        end = torch.tensor(writing.end, dtype=torch.float64)
        new = writing.log_set(places.log_prob(len(right), first, later, end))
        found["greedy"] = raw[there].exp(), new[there].exp(), right[there], weight[there]
    if answers.outputs is not None:
        logits, hits, of_sets, right = answers.outputs
        outputs = parts["outputs"] = fit_outputs(logits, hits, of_sets, Weighed(right, weight))
        found["flat"] = of_sets[:, 0].sigmoid(), outputs.conf(of_sets), right, weight
    if answers.ranked is not None:
        ranked, right = answers.ranked
        ranking = parts["ranking"] = fit_ranking(ranked, Weighed(right, weight))
        middle, at = nearest(1.0), nearest(ranking.temperature)
        raw, new = ranked.log_prob(middle).exp(), ranking.log_best(ranked.log_prob(at)).exp()
        found["topk"] = raw, new, right, weight
    if answers.both is not None:
        ranked, best_right, several, right = answers.both
        ranking = fit_ranking(ranked, Weighed(best_right, weight))
        raw, log_best = (ranked.log_prob(nearest(each)) for each in (1.0, ranking.temperature))
        ranking = ranking._replace(sets=fit_sets(log_best, several, Weighed(right, weight)))
        parts["both"] = ranking
        found["both"] = raw.exp(), ranking.conf(log_best, several), right, weight
    arrays = {name: tuple(part.numpy() for part in each) for name, each in found.items()}
    curves = {name: curve(new, right, w) for name, (_, new, right, w) in arrays.items()}
    errors = {
        name: (calibration_error(raw, right, w), calibration_error(new, right, w))
        for name, (raw, new, right, w) in arrays.items()
    }
    of_sets = {
        "greedy": answers.written and answers.written[1],
        "flat": answers.outputs and answers.outputs[3],
        "both": answers.both and answers.both[3],
    }
    accuracy = {
        name: float((weight * right).sum() / weight.sum())
        for name, right in of_sets.items()
        if right is not None
    }
    return Confidence(len(rows), **parts, curves=curves, accuracy=accuracy), errors


def bin_of(confidence: np.ndarray) -> np.ndarray:
    """The bin of each confidence, of BINS equally wide ones: from < confidence ≤ to; the first also 0."""
    return np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)


def calibration_error(confidence: np.ndarray, right: np.ndarray, weight: np.ndarray) -> float:
    """Expected calibration error: Σ weight of a bin / Σ weight · |accuracy − mean confidence| (Guo et al.,
    2017, arXiv 1706.04599, section 2). All float or bool [N].
    """
    sums = [
        np.bincount(bin_of(confidence), weights=weight * each, minlength=BINS) for each in (right, confidence)
    ]
    return float(np.abs(sums[0] - sums[1]).sum() / max(weight.sum(), 1e-300))
