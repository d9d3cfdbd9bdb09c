"""How sure a model is: the maps from what its decoders put out to the probability that their answers are
right, fitted on texts that it was not trained on (`job/confidence.py`), and kept in its checkpoint.

Codes never depend on them, only probabilities do. In a checkpoint they are {"texts": how many they were
fitted on, "written", "outputs", "ranking": parameters of the three decoders, "both": those of the ranking of
candidates by two of them, "curves": per decoder, how many answers are right from which confidence on,
"accuracy": of greedy, flat and both, the share of the texts whose whole set of codes is right}; a part that
the model does not have is left out.

Temperatures are those of Guo et al., 2017 (arXiv 1706.04599, section 4.2), one for the first code of a text
and one for the codes behind it; maps a · log-odds + b those of Platt, 1999.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from histocc.formatter import PAD_IDX
from histocc.runtime.errors import UserError

GREATEST = 30.0  # of log-odds: e^-30 from 0 and from 1
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
    """log p → log p − log (1 − p), at most GREATEST from 0; in float64."""
    least = torch.tensor(-1e-13, dtype=torch.float64, device=log_prob.device)
    log_prob = torch.minimum(log_prob.double(), least)
    return (log_prob - torch.log(-torch.expm1(log_prob))).clamp(-GREATEST, GREATEST)


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
        found: dict[str, Any] = {"texts": self.texts}
        if self.written is not None:
            temperatures, end, of_set = map(list, self.written)
            found["written"] = {"temperatures": temperatures, "end": end, "set": of_set}
        if self.outputs is not None:
            found["outputs"] = {"each": list(self.outputs.each), "set": list(self.outputs.set)}
        if self.ranking is not None:
            found["ranking"] = {"temperature": self.ranking.temperature, "best": list(self.ranking.best)}
        if self.both is not None:
            temperature, best, sets = self.both
            found["both"] = {"temperature": temperature, "best": list(best), "sets": list(sets)}
        curves = {name: [list(point) for point in each] for name, each in self.curves.items()}
        return found | {"curves": curves, "accuracy": self.accuracy}

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
