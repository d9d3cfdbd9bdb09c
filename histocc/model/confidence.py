"""Which outputs of the linear decoder count as codes, and how sure a model is of its answers: thresholds, and
the maps from what its decoders put out to the probability that their answers are right. Both are fitted on
texts that it was not trained on, and kept in its checkpoint.

Codes never depend on the confidence, only probabilities do. In a checkpoint it is {"texts": how many it was
fitted on, "written", "outputs", "ranking": parameters of the three decoders, "both": those of the ranking of
candidates by two of them, "curves": per decoder, how many answers are right from which confidence on,
"accuracy": of greedy, flat and both, the share of the texts whose whole set of codes is right}; a part that
the model does not have is left out. Thresholds are
{"default": p, "by_language": {language: p}, "source": "published" or "fitted"}; without them 0.5 counts. With
"at_least_one": true the most probable code of a row always counts, and further ones above the threshold. With
"at_most": n only the n most probable ones can: no training row had more codes.

Temperatures are those of Guo et al., 2017 (arXiv 1706.04599, section 4.2), one for the first code of a text
and one for the codes behind it; maps a · log-odds + b those of Platt, 1999. Each parameter is the likeliest,
of whether the answers are right, under a normal prior with mean at what changes nothing: standard deviation 1
for the logarithm of a temperature or factor, 3 for a bias. Every distinct text weighs the same. What depends
on a temperature is kept at those of GRID, so that nothing is as long as a vocabulary or a key.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from histocc.formatter import PAD_IDX
from histocc.runtime.errors import UserError

MAX_LOG_ODDS = 30.0  # e^-30 from 0 and from 1
MIN_TEXTS = 200  # to fit on
GRID = np.exp(np.linspace(np.log(0.2), np.log(5.0), 61))  # temperatures
STRIDE = 6
BINS = 10  # of calibration
BIAS_DEVIATION = 3.0  # of the prior
MAX_ROUNDS = 20  # of the search for two temperatures; it ends when neither moves
USUAL = 0.5

# Of the published models, by their program (Dahl, Johansen, Vedel, 2024, arXiv 2402.13604, and their
# package).
PUBLISHED = {
    "default": 0.31,
    "source": "published",
    "by_language": {
        "unk": 0.31,
        "ca": 0.30,
        "da": 0.24,
        "ge": 0.21,
        "en": 0.26,
        "es": 0.30,
        "fr": 0.21,
        "gr": 0.19,
        "is": 0.17,
        "it": 0.20,
        "nl": 0.22,
        "no": 0.34,
        "pt": 0.27,
        "se": 0.26,
    },
}


class Thresholds(NamedTuple):
    """by_language: language → probability, None for all others; source: "published", "fitted", "given" or
    "usual"; at_least_one: whether the most probable code of a row counts in any case; at_most: how many
    of the most probable codes of a row can count, None for all."""

    by_language: dict[str | None, float]
    source: str
    at_least_one: bool = False
    at_most: int | None = None

    @classmethod
    def of(cls, state: dict) -> "Thresholds":
        """Those that a checkpoint holds, else the usual one. Raises ValueError for what are none, and
        whatever else values of other types make it raise.
        """
        held = state.get("thresholds")
        if held is None:
            return cls({None: USUAL}, "usual")
        numbers = {None: held["default"], **held["by_language"]}
        most = held.get("at_most")
        if not all(0 <= number <= 1 for number in numbers.values()) or most is not None and int(most) < 1:
            raise ValueError(f"thresholds: found {held!r:.200}, expected probabilities by language")
        return cls(numbers, str(held["source"]), bool(held.get("at_least_one")), most and int(most))

    def with_given(self, given: float | dict[str | None, float] | None) -> "Thresholds":
        """The same with those that a user names: one number for all, or by language, where None stands for
        all others. `at_least_one` and `at_most` stay what they are."""
        if given is None:
            return self
        if not isinstance(given, dict):
            return self._replace(by_language={None: given}, source="given")
        numbers = given if None in given else {**self.by_language, **given}
        return self._replace(by_language=numbers, source="given")

    def least(self, language: str) -> float:
        """The threshold of a language."""
        return self.by_language.get(language, self.by_language[None])

    def number(self, above: Tensor) -> Tensor:
        """How many codes of a row count, the most probable first, where `above` of them are above the
        threshold; integers of any shape."""
        return above.clamp(int(self.at_least_one), self.at_most)

    def answered(self, logits: Tensor, place: Tensor, least: Tensor) -> Tensor:
        """Which outputs are answered, bool [B, C]: those of the `number` most probable. logits [B, C]; place:
        as `places` gives it; least [B]: log-odds of the threshold of each row.
        """
        return place < self.number((logits > least[:, None]).sum(1))[:, None]

    def __str__(self) -> str:
        others = self.by_language[None]
        named = [
            f"{language} {value:g}"
            for language, value in sorted(self.by_language.items(), key=str)
            if language is not None
        ]
        source = {
            "usual": "the usual one; evaluate --fit-thresholds finds better ones",
            "given": "as given",
        }.get(self.source, self.source)
        numbers = f"{', '.join(named)}, others {others:g}" if named else f"{others:g}"
        always = ", and in any case the most probable code" if self.at_least_one else ""
        most = f", at most {self.at_most} of a text" if self.at_most else ""
        return f"{numbers} ({source}){always}{most}"


def places(logits: Tensor) -> Tensor:
    """How many outputs of its row are more probable than each, int64 [B, C]; equal ones in their order."""
    return logits.sort(dim=1, descending=True, stable=True).indices.argsort(1)


# ---- confidence

# How many numbers a checkpoint holds of each part; None for one that is no list.
_NUMBERS = {
    "written": {"temperatures": 2, "end": 2, "set": 2},
    "outputs": {"each": 2, "set": 4},
    "ranking": {"temperature": None, "best": 2},
    "both": {"temperature": None, "best": 2, "sets": 3},
}
# The curve that a decoder of `python -m histocc.predict` has.
CURVES = {"greedy": "greedy", "flat": "flat", "both": "both", "topk": "topk", "full": "topk"}


def _numbers(value: Any, count: int | None) -> Any:
    """A finite number, or a list of `count`. Raises ValueError."""
    numbers = [float(number) for number in ([value] if count is None else value)]
    if len(numbers) != (count or 1) or not np.isfinite(numbers).all():
        raise ValueError(f"confidence: found {value!r:.100}, expected {count or 1} numbers")
    return numbers[0] if count is None else numbers


def log_odds(log_prob: Tensor) -> Tensor:
    """log p → log p − log (1 − p), at most MAX_LOG_ODDS from 0; in float64."""
    least = torch.tensor(-1e-13, dtype=torch.float64, device=log_prob.device)
    log_prob = torch.minimum(log_prob.double(), least)
    return (log_prob - torch.log(-torch.expm1(log_prob))).clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)


def mapped(log_prob: Tensor, line: Sequence[Any]) -> Tensor:
    """Log-probability whose log-odds are factor · those of `log_prob` + bias; line: (factor, bias)."""
    return logsigmoid(line[0] * log_odds(log_prob) + line[1])


class Writing(NamedTuple):
    """Of the decoder that writes codes. temperatures: of the tokens of the first block and of later ones;
    end: (factor, bias) of the log-odds that a block after the first is not written, all tokens beside PAD
    together against PAD; set: (factor, bias) of the log-odds of the set of codes. Tensors or numbers.
    """

    temperatures: Sequence[Any]
    end: Sequence[Any]
    set: Sequence[Any] = (1.0, 0.0)

    def log_set(self, log_prob: Tensor) -> Tensor:
        """Log-probability that a set of codes is right, from that of writing it behind temperatures and
        end.
        """
        return mapped(log_prob, self.set)

    def log_softmax(self, logits: Tensor, block_size: int, begin: int = 0) -> Tensor:
        """Log-probability of each token, [B, T, V], from logits [B, T, V] of the places `begin`, … behind
        BOS.
        """
        places = torch.arange(begin, begin + logits.shape[1], device=logits.device)
        first, later = (logits / each for each in self.temperatures)
        scaled = torch.where((places < block_size)[:, None], first, later)
        found = scaled.log_softmax(-1)
        ends = (places % block_size == 0) & (places > 0)
        if not ends.any():
            return found
        none = torch.arange(logits.shape[-1], device=logits.device) == PAD_IDX
        codes = logits[:, ends].masked_fill(none, float("-inf"))  # [B, E, V]
        odds = self.end[0] * (logits[:, ends, PAD_IDX] - codes.logsumexp(-1)) + self.end[1]  # [B, E]
        token = (
            scaled[:, ends].masked_fill(none, float("-inf")).log_softmax(-1) + logsigmoid(-odds)[..., None]
        )
        at_ends = torch.where(none, logsigmoid(odds)[..., None], token)
        return found.index_copy(1, ends.nonzero()[:, 0], at_ends)


class Outputs(NamedTuple):
    """Of the linear decoder. each: (factor, bias) of the log-odds of an output; set: factors of `features`,
    which give the log-odds that exactly the answered codes are right. Tensors or numbers.
    """

    each: Sequence[Any]
    set: Sequence[Any]

    def probs(self, logits: Tensor) -> Tensor:
        """Probability of each output."""
        return (logits * self.each[0] + self.each[1]).sigmoid()

    def conf(self, features: Tensor) -> Tensor:
        """Probability, float64 [B], that the answered codes and no others are right."""
        return (
            (features * torch.as_tensor(self.set, dtype=features.dtype, device=features.device))
            .sum(1)
            .sigmoid()
        )


def features(logits: Tensor, on: Tensor) -> Tensor:
    """What `Outputs.set` weighs, float64 [B, 4]: log-odds of exactly the outputs `on` (bool [B, C]) with
    outputs taken as independent; log-odds of their share in the softmax; whether they are several; 1.
    """
    alone = -softplus(torch.where(on, -logits, logits).double()).sum(1)
    share = logits.double().log_softmax(1).masked_fill(~on, float("-inf")).logsumexp(1)
    several = (on.sum(1) > 1).double()
    return torch.stack([log_odds(alone), log_odds(share), several, torch.ones_like(several)], dim=1)


class Ranking(NamedTuple):
    """Of the ranking of all codes, or of candidates. temperature: of their scores, log-probabilities; best:
    (factor, bias) of the log-odds of the best code; sets, of candidates: the same for the log-odds that the
    answered codes and no others are right, and what is added if they are several.
    """

    temperature: Any
    best: Sequence[Any]
    sets: Sequence[Any] = (1.0, 0.0, 0.0)

    def conf(self, log_best: Tensor, several: Tensor) -> Tensor:
        """Probability, float64 [B], that the answered codes and no others are right; log_best: of the best
        one behind the temperature; several: bool [B], whether they are several.
        """
        return (self.sets[0] * log_odds(log_best) + self.sets[1] + self.sets[2] * several).sigmoid()

    def log_best(self, log_probs: Tensor) -> Tensor:
        """Log-probability that the best code is right, [B], from its log-probability behind the
        temperature.
        """
        return mapped(log_probs, self.best)

    def probs(self, log_probs: Tensor) -> Tensor:
        """Probabilities [B, K] of codes, the best among them, from their log-probabilities behind the
        temperature: the best gets its own, the others keep their proportions, and all together are at most 1.
        """
        log_best, at = log_probs.double().max(1, keepdim=True)
        raw, fitted = log_best.exp(), self.log_best(log_best).exp()
        least = torch.tensor(1e-300, dtype=torch.float64, device=raw.device)
        factor = torch.minimum(fitted / raw.maximum(least), (1 - fitted) / (1 - raw).maximum(least))
        return (log_probs.double().exp() * factor).scatter(1, at, fitted).clamp(0, 1).to(log_probs.dtype)


class Confidence(NamedTuple):
    """All that a checkpoint holds of it. Parts are None where it has none: probabilities are then those of
    the decoder itself.
    """

    texts: int = 0
    written: Writing | None = None
    outputs: Outputs | None = None
    ranking: Ranking | None = None
    both: Ranking | None = None
    curves: dict[str, list[tuple[float, float, float]]] = {}  # noqa: RUF012
    accuracy: dict[str, float] = {}  # noqa: RUF012

    @classmethod
    def of(cls, state: dict) -> "Confidence":
        """What a checkpoint holds. Raises ValueError for numbers that are none, and whatever else values of
        other types make it raise.
        """
        held = state.get("confidence")
        if held is None:
            return cls()
        parts: dict[str, Any] = {}
        kinds = {"written": Writing, "outputs": Outputs, "ranking": Ranking, "both": Ranking}
        for part, kind in kinds.items():
            if part in held:
                numbers = {name: _numbers(held[part][name], count) for name, count in _NUMBERS[part].items()}
                parts[part] = kind(**numbers)
        temperatures = [*parts["written"].temperatures] if "written" in parts else []
        temperatures += [parts[name].temperature for name in ("ranking", "both") if name in parts]
        if min(temperatures, default=1.0) <= 0:
            raise ValueError(f"confidence: found {temperatures}, expected temperatures above 0")
        curves = {
            name: [(a, b, c) for a, b, c in (_numbers(point, 3) for point in points)]
            for name, points in held.get("curves", {}).items()
        }
        shares = held.get("accuracy", {})
        names = [name for name in ("greedy", "flat", "both") if name in shares]
        accuracy = {name: _numbers(shares[name], None) for name in names}
        return cls(int(held["texts"]), **parts, curves=curves, accuracy=accuracy)

    def to_dict(self) -> dict:
        """For a checkpoint, as plain types."""
        parts = {name: getattr(self, name) for name in _NUMBERS if getattr(self, name) is not None}
        written = {
            name: {entry: getattr(part, entry) for entry in _NUMBERS[name]} for name, part in parts.items()
        }
        curves = {name: [list(point) for point in points] for name, points in self.curves.items()}
        return {"texts": self.texts, **written, "curves": curves, "accuracy": self.accuracy}

    def best_decoder(self, kind: str) -> tuple[str, str]:
        """(the decoder that was right most often on the texts that this was fitted on, why it); greedy if
        that is not known. kind: of the model.
        """
        if kind == "flat":
            return "flat", "the model has no other"
        if not self.accuracy:
            return "greedy", "the model does not say how often each of its decoders is right"
        best = max(self.accuracy, key=lambda name: (self.accuracy[name], name == "flat"))  # flat is faster
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.accuracy.items())
        return best, f"whole sets of codes right on {self.texts:,} texts that it was not trained on: {shares}"

    def limit(self, decoder: str, accuracy: float) -> tuple[float, float]:
        """(least confidence of the answers of which this share is right, share of the fitted texts that have
        it), (inf, 0) where no answers are that right. Raises UserError where that is not known.
        """
        curve = self.curves.get(CURVES[decoder])
        if not curve:
            raise UserError(
                "the model does not say how often its answers are right: its confidence was not fitted, for"
                " which finetune.py needs 200 texts to validate on, or python -m histocc.evaluate"
                " --fit-confidence rows that it was not trained on"
            )
        reached = [(share, conf) for conf, share, right in curve if right >= accuracy]
        share, conf = max(reached, default=(0.0, float("inf")))
        return conf, share


def curve(
    conf: np.ndarray, right: np.ndarray, weight: np.ndarray, most: int = 200
) -> list[tuple[float, float, float]]:
    """(confidence, share of the texts with at least so much, share of these that is right), at most `most`
    points, the least sure last.

    conf float [N], right bool [N], weight float [N] of each row.
    """
    if not len(conf):
        return []
    order = np.argsort(-conf, kind="stable")
    conf, right, weight = conf[order], right[order], weight[order]
    last = np.append(conf[1:] < conf[:-1], True)  # equal ones are taken together
    total, good = np.cumsum(weight)[last], np.cumsum(weight * right)[last]
    conf = conf[last]
    at = np.unique(np.linspace(0, len(conf) - 1, most).round().astype(np.int64))
    return [(float(conf[i]), float(min(total[i] / total[-1], 1.0)), float(good[i] / total[i])) for i in at]


# ---- the fit


class Sequences(NamedTuple):
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
    def of(cls, row: Tensor, logits: Tensor, tokens: Tensor, block_size: int) -> "Sequences":
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


def misses(odds: Tensor, right: Tensor) -> Tensor:
    """Minus the log-likelihood of being right or not, for log-odds of it; of any shape."""
    return -logsigmoid(torch.where(right, odds, -odds))


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


def prior(logarithms: Tensor, biases: Tensor) -> Tensor:
    """Minus the logarithm of the prior of logarithms of temperatures and factors, and of biases."""
    return (logarithms**2).sum() / 2 + (biases**2).sum() / (2 * BIAS_DEVIATION**2)


def fit_written(sequences: Sequences, right: Tensor, weight: Tensor) -> Writing:
    """Temperatures by turns along GRID, each time with the rest fitted anew. right bool, weight float64 [N]:
    of each row.
    """
    rows, logs = len(right), torch.from_numpy(np.log(GRID))

    def loss_of(first: int, later: int, at: Tensor) -> Tensor:
        """at: logarithm of the factor of the end, its bias, the same of the set."""
        factors = at.exp()
        log_prob = sequences.log_prob(rows, first, later, torch.stack([factors[0], at[1]]))
        odds = log_odds(mapped(log_prob, (factors[2], at[3])))
        found = (weight * misses(odds, right)).sum() + prior(at[[0, 2]], at[[1, 3]])
        return found + prior(logs[[first, later]], at[:0])

    middle = len(GRID) // 2
    first, later, rest = middle, middle, [0.0] * 4
    for _ in range(MAX_ROUNDS):
        at, _ = minimum(partial(loss_of, first, later), rest)
        before, rest = (first, later), at.tolist()
        first = min(range(len(GRID)), key=lambda i: float(loss_of(i, later, at)))
        later = min(range(len(GRID)), key=lambda i: float(loss_of(first, i, at)))
        if (first, later) == before:
            break
    end, of_set = [float(np.exp(rest[0])), rest[1]], [float(np.exp(rest[2])), rest[3]]
    return Writing([float(GRID[first]), float(GRID[later])], end, of_set)


def fit_outputs(logits: Tensor, hits: Tensor, of_sets: Tensor, right: Tensor, weight: Tensor) -> Outputs:
    """logits float64 [N, K] of the most probable outputs, hits bool [N, K]: those that are true; of_sets
    float64 [N, 4], `features` of the answers.
    """

    def loss_of_each(at: Tensor) -> Tensor:
        odds = logits * at[0].exp() + at[1]
        return (weight * misses(odds, hits).sum(1)).sum() + prior(at[:1], at[1:])

    def loss_of_sets(at: Tensor) -> Tensor:
        return (weight * misses(of_sets @ at, right)).sum() + prior(at[:2] - 0.5, at[2:])

    each, of_set = minimum(loss_of_each, [0.0, 0.0])[0], minimum(loss_of_sets, [0.5, 0.5, 0.0, 0.0])[0]
    return Outputs([float(each[0].exp()), float(each[1])], of_set.tolist())


def fit_ranking(ranked: Ranked, right: Tensor, weight: Tensor) -> Ranking:
    """The best temperature of every STRIDE-th of GRID, then of those around it."""
    start: list[float] = [0.0, 0.0]
    found: dict[int, tuple[float, Tensor]] = {}

    def fitted(i: int) -> float:
        odds = log_odds(ranked.log_prob(i))

        def loss(at: Tensor) -> Tensor:
            return (weight * misses(at[0].exp() * odds + at[1], right)).sum() + prior(at[:1], at[1:])

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


def fit_sets(log_best: Tensor, several: Tensor, right: Tensor, weight: Tensor) -> list[float]:
    """`Ranking.sets`; log_best float64 [N], several bool [N]; right: whether exactly the answered codes are
    right.
    """
    odds = log_odds(log_best)

    def loss(at: Tensor) -> Tensor:
        found = misses(at[0].exp() * odds + at[1] + at[2] * several, right)
        return (weight * found).sum() + prior(at[:1], at[1:])

    at, _ = minimum(loss, [0.0, 0.0, 0.0])
    return [float(at[0].exp()), *at[1:].tolist()]


def fit(
    written: tuple[Sequences, Tensor, Tensor] | None,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    ranked: tuple[Ranked, Tensor] | None,
    both: tuple[Ranked, Tensor, Tensor, Tensor] | None,
    texts: np.ndarray,
) -> tuple[Confidence, dict[str, tuple[float, float]]]:
    """Fits all decoders that there are to their answers to N rows.

    Args:
        written: sequences, right bool [N], and there bool [N], whether a row has any.
        outputs: logits and hits [N, K], features [N, 4], right [N].
        ranked: scores, and whether the best code is true [N].
        both: the same of candidates, several bool [N], whether the answer is of several codes, and right [N].
        texts: hash of each row's text, uint64 [N].

    Returns:
        (what is fitted, expected calibration error of these answers before and after, by name of the curve).
    """
    _, place, rows = np.unique(texts, return_inverse=True, return_counts=True)
    weight = torch.from_numpy(1.0 / rows[place.reshape(-1)])
    parts: dict[str, Any] = {}
    found: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}  # raw, fitted, right, weight

    def nearest(temperature: float) -> int:
        return int(np.abs(GRID - temperature).argmin())

    if written is not None:
        sequences, right, there = written
        writing = parts["written"] = fit_written(sequences, right, weight * there)
        one, first, later = (nearest(each) for each in (1.0, *writing.temperatures))
        raw = sequences.log_prob(len(right), one, one, torch.tensor([1.0, 0.0], dtype=torch.float64))
        end = torch.tensor(writing.end, dtype=torch.float64)
        new = writing.log_set(sequences.log_prob(len(right), first, later, end))
        found["greedy"] = raw[there].exp(), new[there].exp(), right[there], weight[there]
    if outputs is not None:
        logits, hits, of_sets, right = outputs
        fitted = parts["outputs"] = fit_outputs(logits, hits, of_sets, right, weight)
        found["flat"] = of_sets[:, 0].sigmoid(), fitted.conf(of_sets), right, weight
    if ranked is not None:
        scores, right = ranked
        ranking = parts["ranking"] = fit_ranking(scores, right, weight)
        raw = scores.log_prob(nearest(1.0)).exp()
        new = ranking.log_best(scores.log_prob(nearest(ranking.temperature))).exp()
        found["topk"] = raw, new, right, weight
    if both is not None:
        scores, best_right, several, right = both
        ranking = fit_ranking(scores, best_right, weight)
        raw, log_best = (scores.log_prob(nearest(each)) for each in (1.0, ranking.temperature))
        ranking = parts["both"] = ranking._replace(sets=fit_sets(log_best, several, right, weight))
        found["both"] = raw.exp(), ranking.conf(log_best, several), right, weight
    arrays = {name: [part.numpy() for part in each] for name, each in found.items()}
    curves = {name: curve(new, right, w) for name, (_, new, right, w) in arrays.items()}
    errors = {
        name: (calibration_error(raw, right, w), calibration_error(new, right, w))
        for name, (raw, new, right, w) in arrays.items()
    }
    of_sets = {
        "greedy": written and written[1],
        "flat": outputs and outputs[3],
        "both": both and both[3],
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
