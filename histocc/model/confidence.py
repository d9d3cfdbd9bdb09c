"""Thresholds decide which outputs of the linear decoder count as codes. Confidence maps a decoder's own
probability to how often its answers are right. Both are fitted on texts that the model was not trained on,
and kept in its checkpoint.

Probabilities depend on the confidence, and so do the codes of split texts. The map of a decoder is
logistic (Platt, 1999): the log-odds of being right are a weighted sum of the log-odds of its own probability,
their square root (with their sign), whether it gives several codes, and 1. The weights are the likeliest
under PRIOR_OF_MAP, a normal prior around the identity map. Every distinct text counts the same.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from histocc.figure import percent
from histocc.logistic import fit_logistic, logistic

MAX_LOG_ODDS = 16.0  # about the limit at which float32 still tells probabilities from 0 and 1
MIN_TEXTS = 200  # least number of texts for a fit
BINS = 10  # number of bins of the calibration error
PRIOR_OF_MAP = {"mean": (1.0, 0.0, 0.0, 0.0), "deviation": (1.0, 1.0, 3.0, 3.0)}
USUAL = 0.5

# Thresholds of the published models, from their program (Dahl, Johansen, Vedel, 2024, arXiv 2402.13604).
_OF_LANGUAGES = {"unk": 0.31, "ca": 0.30, "da": 0.24, "ge": 0.21, "en": 0.26, "es": 0.30, "fr": 0.21}
_OF_LANGUAGES |= {"gr": 0.19, "is": 0.17, "it": 0.20, "nl": 0.22, "no": 0.34, "pt": 0.27, "se": 0.26}
PUBLISHED = {"default": 0.31, "source": "published", "by_language": _OF_LANGUAGES}


class Thresholds(NamedTuple):
    """Thresholds of the linear decoder, in a checkpoint as {"default": p, "by_language": {language: p},
    "source": "published" or "fitted"}, optionally with "at_least_one" and "at_most".
    """

    by_language: dict[str | None, float]  # language → probability, None for all others
    source: str  # also "given" or "usual"
    at_least_one: bool = False  # whether a row's most probable code always counts
    at_most: int | None = None  # largest number of codes that a row can get, None for all

    @classmethod
    def of(cls, state: dict) -> "Thresholds":
        """Return a checkpoint's thresholds, or the default. Raises ValueError and others for bad ones."""
        held = state.get("thresholds")
        if held is None:
            return cls({None: USUAL}, "usual")
        numbers = {None: held["default"], **held["by_language"]}
        most = held.get("at_most")
        if not all(0 <= number <= 1 for number in numbers.values()) or most is not None and int(most) < 1:
            raise ValueError(f"thresholds: found {held!r:.200}, expected probabilities by language")
        return cls(numbers, str(held["source"]), bool(held.get("at_least_one")), most and int(most))

    def with_given(self, given: float | dict[str | None, float] | None) -> "Thresholds":
        """Return a copy with the user's thresholds: one number for all, or numbers by language, with None for
        all other languages. `at_least_one` and `at_most` stay the same.
        """
        if given is None:
            return self
        given = given if isinstance(given, dict) else {None: given}
        numbers = given if None in given else {**self.by_language, **given}
        return self._replace(by_language=numbers, source="given")

    def least(self, language: str) -> float:
        return self.by_language.get(language, self.by_language[None])

    def number(self, above: Tensor) -> Tensor:
        """Return how many codes of a row count, the most probable first, when `above` codes exceed the
        threshold. above: integers of any shape.
        """
        return above.clamp(int(self.at_least_one), self.at_most)

    def __str__(self) -> str:
        if self.at_least_one and self.at_most == 1:
            return "none; each text gets its most probable code"
        named = {name: value for name, value in self.by_language.items() if name is not None}
        numbers = [f"{name} {value:g}" for name, value in sorted(named.items())]
        numbers.append("others " * bool(named) + f"{self.by_language[None]:g}")
        source = {"usual": "the default; evaluate --fit-thresholds finds better ones", "given": "as given"}
        more = ", and in any case the most probable code" * self.at_least_one
        more += f", at most {self.at_most} of a text" if self.at_most else ""
        return f"{', '.join(numbers)} ({source.get(self.source, self.source)}){more}"


# ---- confidence

# Names of the maps for the most probable outputs of the linear decoder, by rank. The last one is for all
# further outputs.
OUTPUTS = ("output", *(f"output {place}" for place in range(2, 6)))


class Confidence(NamedTuple):
    """The fitted confidence, a dict of plain types in a checkpoint, or empty if not fitted."""

    texts: int = 0  # number of texts in the fit
    maps: dict[str, list[float]] = {}  # results of `fit`, by decoder and by OUTPUTS
    curves: dict[str, list[list[float]]] = {}  # `curve` of the answers to these texts, under the same names
    accuracy: dict[str, float] = {}  # share of the texts with the right set of codes, by decoder
    best: str = ""  # the `most_accurate` of these, "" in models without this entry
    known: float = 0.0  # mean share of a validation text's n-grams that the model knows, 0 if not recorded
    several: bool = True  # whether a text may have several codes, so that probabilities sum to more than 1
    left_out: bool = False  # whether these are training texts, each answered by a fit without it

    @classmethod
    def of(cls, state: dict) -> "Confidence":
        """Return the confidence that a checkpoint holds. Raises ValueError and others for an invalid one."""
        held, kinds = state.get("confidence") or {}, cls._field_defaults.items()
        found = cls(**{name: type(usual)(held[name]) for name, usual in kinds if name in held})
        points = [point for points in found.curves.values() for point in points]
        # rows of another length raise ValueError
        fours = [row[i : i + 4] for row in found.maps.values() for i in range(0, max(len(row), 1), 4)]
        for rows in ([[0.0] * 4, *fours], [[0.0] * 3, *points], [*found.accuracy.values()]):
            if not np.isfinite(np.array(rows, dtype=np.float64)).all():
                raise ValueError("confidence: found numbers that are not finite")
        return found

    def outputs(self, probs: Tensor, conf: Tensor, codes: int) -> Tensor:
        """Return the probabilities [B, N] that the most probable of all `codes` outputs of the linear decoder
        are codes of their texts, from the decoder's own. Each rank has its map. If texts have only one code,
        the first output gets `conf` [B], and the sum is at most 1. Outputs ranked after OUTPUTS share the
        rest in proportion to 1 / rank, which is about how often they are right in registers.
        """
        if OUTPUTS[0] not in self.maps:
            return probs
        probs, order = probs.sort(dim=1, descending=True)
        last = len(OUTPUTS) - 1
        parts = [
            self.mapped(name, probs[:, i : None if i == last else i + 1]) for i, name in enumerate(OUTPUTS)
        ]
        probs = torch.cat(parts, dim=1)[:, : probs.shape[1]].cummin(1).values
        if not self.several and probs.shape[1] == 1:
            probs = conf.to(probs)[:, None]
        elif not self.several:
            first = conf.to(probs)[:, None]
            others = torch.minimum(probs[:, 1 : last + 1], first)
            others = others * ((1 - first) / others.sum(1, keepdim=True).clamp(min=1e-12)).clamp(max=1)
            left = (1 - first - others.sum(1, keepdim=True)).clamp(min=0)
            share = 1 / torch.arange(last + 2, max(codes, last + 1) + 1, device=probs.device).to(probs)
            further = left * (share / share.sum())[: max(0, probs.shape[1] - last - 1)]
            probs = torch.cat([first, others, torch.minimum(further, others[:, -1:])], dim=1)
        return torch.empty_like(probs).scatter(1, order, probs)

    def mapped(self, name: str, probs: Tensor, several: Tensor | float = 0.0) -> Tensor:
        """Return how often answers with the probabilities `probs` of decoder `name` are right, same shape.
        several: whether they are several codes. Without a fit, return `probs` unchanged.
        """
        weights = self.maps.get(name)
        if weights is None:
            return probs
        odds = log_odds(probs)
        bent = odds.sign() * odds.abs().sqrt()
        return (weights[0] * odds + weights[1] * bent + weights[2] * several + weights[3]).sigmoid().to(probs)

    def redrawn(self, name: str, conf: np.ndarray, normal: np.ndarray) -> np.ndarray:
        """Return confidences [B, D] of answers under D other maps of the decoder, about as likely as its own,
        drawn with standard normal numbers [D, 2]. Older models have only their own map.
        """
        drawn = normal @ np.reshape(self.maps[name][4:] or [0.0] * 4, (2, 2)).T
        return logistic(log_odds(torch.from_numpy(conf)).numpy()[:, None] * (1 + drawn[:, 0]) + drawn[:, 1])

    def ranked(self, probs: Tensor) -> Tensor:
        """Return probabilities [B, K] of codes: the best gets its own, the others keep their proportions, and
        the sum is at most 1.
        """
        if "topk" not in self.maps:
            return probs
        best, at = probs.max(1, keepdim=True)
        fitted = self.mapped("topk", best)
        rest = (1 - fitted) / (1 - best).clamp(min=1e-12)
        return (probs * torch.minimum(fitted / best.clamp(min=1e-30), rest)).scatter(1, at, fitted)

    def best_decoder(self, kind: str, has_ngrams: bool = False) -> tuple[str, str]:
        """Return (the decoder chosen by `auto`, the reason). If the fit does not tell, it is greedy, as
        published, but flat for a model with n-grams, whose linear decoder was ahead on all measured data.
        kind: of the model.
        """
        if kind == "flat":
            return "flat", "the model has no other"
        if not self.accuracy:
            unknown = "the model does not say how often each of its decoders is right"
            return "flat" if has_ngrams and kind == "mixer" else "greedy", unknown
        first = max(self.accuracy, key=lambda name: (self.accuracy[name], name == "flat"))
        best = self.best if self.best in self.accuracy else first
        shares = ", ".join(f"{name} {percent(share)}" for name, share in self.accuracy.items())
        chance = f"; {best} is the fastest, and the difference is within chance" * (best != first)
        return best, f"share of {self.texts:,} texts coded completely right: {shares}{chance}"

    def limit(self, name: str, accuracy: float) -> tuple[float, float]:
        """Return (the least confidence above which this share of answers is right, the share of fitted texts
        above it), or (inf, 0) if there is none.
        """
        reached = [(share, conf) for conf, share, right in self.curves[name] if right >= accuracy]
        share, conf = max(reached, default=(0.0, float("inf")))
        return conf, share


def most_accurate(right: dict[str, np.ndarray]) -> str:
    """Return the most accurate decoder, or flat, the fastest, if the best one leads it by at most a standard
    error of their difference. right: the weight of each row if it is right, else 0, float [N] each.
    """
    best = max(right, key=lambda name: right[name].sum())
    ahead = right[best] - right.get("flat", 0.0)
    return "flat" if "flat" in right and ahead.sum() <= math.sqrt(ahead @ ahead) else best


def probability_of_set(logits: Tensor, best: Tensor, counts: Tensor) -> Tensor:
    """Return the probability [B] that the codes of a text are exactly the first `counts` [B] of its highest
    logits `best` [B, K], out of all outputs [B, N], assuming independence.
    """
    on = torch.arange(best.shape[1], device=best.device) < counts[:, None]
    none = logsigmoid(-logits).sum(1)  # log-probability that no output is on
    return (none + torch.where(on, best, 0.0).sum(1)).exp()  # log p − log (1 − p) is the logit


def log_odds(probs: Tensor) -> Tensor:
    """Return log p − log (1 − p) in float64, limited to ±MAX_LOG_ODDS."""
    return probs.double().logit().clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)


def curve(conf: np.ndarray, right: np.ndarray, weight: np.ndarray, most: int = 200) -> list[list[float]]:
    """Return at most `most` points [confidence, share of texts with at least this confidence, accuracy on
    these], the lowest confidence last. conf float [N], right bool [N], weight float [N] of each row.
    """
    if not len(conf):
        return []
    order = np.argsort(-conf, kind="stable")
    conf, right, weight = conf[order], right[order], weight[order]
    last = np.append(conf[1:] < conf[:-1], True)  # equal confidences are taken together
    total, good = np.cumsum(weight)[last], np.cumsum(weight * right)[last]
    conf = conf[last]
    at = np.unique(np.linspace(0, len(conf) - 1, most).round().astype(np.int64))
    return [[float(conf[i]), float(min(total[i] / total[-1], 1.0)), float(good[i] / total[i])] for i in at]


def fit(probs: np.ndarray, several: np.ndarray, right: np.ndarray, weight: np.ndarray) -> list[float]:
    """Return the weights of a map, followed by a matrix R [2, 2] for its uncertainty: its log-odds L vary as
    L (1 + a) + b with (a, b) = R z, z standard normal (Laplace's approximation). The arguments describe N
    answers: a decoder's own probabilities, whether they are several codes, whether they are right, and how
    much they count.
    """
    odds = log_odds(torch.from_numpy(np.asarray(probs, dtype=np.float64))).numpy()
    x = np.stack([odds, np.sign(odds) * np.sqrt(np.abs(odds)), several, np.ones(len(odds))], axis=1)
    weights = fit_logistic(x, right, weight, **PRIOR_OF_MAP)
    p = logistic(x @ weights)
    x = np.stack([x @ weights, np.ones(len(odds))], axis=1)
    curvature = (x.T * (weight * p * (1 - p))) @ x + np.diag(1 / np.square(PRIOR_OF_MAP["deviation"][::3]))
    return [*weights.tolist(), *np.linalg.inv(np.linalg.cholesky(curvature)).T.flatten().tolist()]


def bin_of(confidence: np.ndarray) -> np.ndarray:
    """Return each confidence's bin among BINS equal ones. A bin excludes its lower end, unless that is 0."""
    return np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)


def calibration_error(confidence: np.ndarray, right: np.ndarray, weight: np.ndarray) -> float:
    """Return the expected calibration error: Σ weight of a bin / Σ weight · |accuracy − mean confidence| (Guo
    et al., 2017, arXiv 1706.04599, section 2). All float or bool [N].
    """
    off = np.bincount(bin_of(confidence), weights=weight * (right - confidence), minlength=BINS)
    return float(np.abs(off).sum() / max(weight.sum(), 1e-300))
