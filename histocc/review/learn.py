"""Guesses for the texts of a table, learned from a person's decisions.

The learner is the one of models in closed form (`histocc.learn.closed_form`): ridge regression on the n-grams
of the decided texts, with the model's answers in the file as its prior. Logistic maps give the probabilities
of each code and of whole answers. They are fitted to the scores of decided texts, each scored without itself,
and to whether these were right.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, takewhile
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from histocc.data.arrays import thinned
from histocc.figure import wilson
from histocc.learn.closed_form import MAX_LEFT_OUT, Settings, Texts, choose, joined_features, solve, take
from histocc.learn.few import MAX_NGRAMS
from histocc.learn.texts import describe, most_frequent, pieces
from histocc.logistic import fit_logistic, logistic
from histocc.model.ngrams import LONGEST, PATTERNS, WORDS
from histocc.review.sheet import CodedText, confidence
from histocc.text import encode

MAX_TAUGHT = 5_000  # most texts that guesses are learned from (time N³)
LANGUAGE = "-"  # one for all texts: people code alike in all languages
GUESSES = 5  # guesses for a text
NEAREST, MIN_SIMILARITY = 3, 0.15  # known texts shown as similar, and their least similarity
SCORED_AT_ONCE = 1024  # texts scored at once
SCORED_TEXTS, POOL, BATCH = 400, 20_000, 50  # texts scored, compared with and chosen
# Logistic maps before any decision: weights of the score, its lead over the best other score, and 1
PRIOR_OF_GUESS = {"mean": (3.0, 3.0, -2.0), "deviation": (10**0.5,) * 3}
# from the cosine of two texts: what one teaches about the other, relative to its own rows
POWER, TAUGHT_SHARE = 4, 0.5
BIAS = 0.3  # deviation of the log-odds of open texts from decided texts with the same scores
RANK_GROUPS = slice(0, 1), slice(1, GUESSES)  # of the best codes
Shares = tuple[float, float, float]


def encoded_texts(texts: Sequence[str]) -> Iterator[Tensor]:
    """Yield the character ids of texts, int64 [B, S] each."""
    for part in pieces(np.array(list(map(len, texts)))) if texts else ():
        yield torch.from_numpy(encode(texts[part], [LANGUAGE] * len(texts[part]), LONGEST)[0])


def narrowed(rows: Tensor, columns: Tensor) -> Tensor:
    """Return some columns of a sparse CSR matrix, int64 [m]."""
    place = torch.full((rows.shape[1],), -1)
    place[columns] = torch.arange(len(columns))
    at = place[rows.col_indices()]
    begins = F.pad((at >= 0).cumsum(0), (1, 0))[rows.crow_indices()]
    parts = begins, at[at >= 0], rows.values()[at >= 0]
    return torch.sparse_csr_tensor(*parts, (len(rows), len(columns)), check_invariants=False)


def weighed(rows: Tensor, weights: Tensor) -> Tensor:
    """Return sparse CSR rows with weighted columns, [m], each row scaled to length 1."""
    begins, columns = rows.crow_indices(), rows.col_indices()
    values, row = rows.values() * weights[columns], torch.repeat_interleave(begins.diff())
    lengths = torch.zeros(len(rows)).index_add_(0, row, values**2).sqrt().clamp(min=1e-9)
    parts = begins, columns, values / lengths[row]
    return torch.sparse_csr_tensor(*parts, rows.shape, check_invariants=False)


def score_features(scores: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the best columns of each row of scores [n, C], int64 [n, GUESSES], and for each its score, its
    lead over the best other one, and 1, [n, GUESSES, 3].
    """
    found, best = (each.numpy() for each in scores.topk(GUESSES + 1, dim=1))
    lead = found[:, :GUESSES] - found[:, :1]
    lead[:, 0] = found[:, 0] - found[:, 1]
    return best[:, :GUESSES], np.stack([found[:, :GUESSES], lead, np.ones_like(lead)], axis=2)


def width_of(x: np.ndarray) -> np.ndarray:
    """Return how many of the best codes form the answer, from their features [n, GUESSES, 3]."""
    return np.maximum((x[:, :, 0] > 0.5).sum(axis=1), 1)


def fitted(x: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights (and covariance) of a map from features [n, 3] to whether answers were right."""
    weights = fit_logistic(x, right, np.ones(len(right)), **PRIOR_OF_GUESS)
    probs = logistic(x @ weights)
    information = (x.T * (probs * (1 - probs))) @ x + np.diag(np.array(PRIOR_OF_GUESS["deviation"]) ** -2.0)
    return weights, np.linalg.inv(information)


def probabilities(x: np.ndarray, maps: Sequence[np.ndarray]) -> np.ndarray:
    """Return the probability of each code, [n, GUESSES], from a map for the first and one for the others."""
    logits = np.concatenate([x[:, each] @ weights for each, weights in zip(RANK_GROUPS, maps)], axis=1)
    return logistic(logits) * (x[:, :, 0] > 0)


def of_answers(x: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Return features of the answers, [n, 3], from the features of the best codes: the score of each answer's
    last code, its lead over the best code outside the answer, and 1.
    """
    index, scores = np.arange(len(x)), x[:, :, 0]
    last, outside = scores[index, width - 1], scores[index, np.minimum(width, GUESSES - 1)]
    return np.stack([last, last - outside, np.ones_like(last)], axis=1)


class Guesses(NamedTuple):
    """Guesses for all texts, from the decisions of one moment."""

    codes: np.ndarray  # int32 [T, GUESSES], places among the names of `Learner`, the best first
    probs: np.ndarray  # float32 [T, GUESSES], of each code, 0 without a guess
    width: np.ndarray  # int64 [T], how many of them form the answer
    sure: np.ndarray  # [T], the probability that the answer is right, 0 without one
    taught: int  # number of decided texts
    right: Shares  # share of right rows, decided or guessed, with its interval
    order: list[int]  # texts to ask for next


class Learner:
    """The texts of a file, and the learner of their codes in a key."""

    def __init__(self, texts: Sequence[CodedText], codes: Iterable[str]):
        self.texts = texts
        patterns = [*PATTERNS, *WORDS]
        strings = [text.pair[0] for text in texts]
        hashes, idf = map(torch.from_numpy, most_frequent(encoded_texts(strings), MAX_NGRAMS, patterns))
        of_language = torch.from_numpy(most_frequent(encoded_texts([""]), MAX_NGRAMS, patterns)[0])
        idf[torch.isin(hashes, of_language)] = 0  # sharing a language does not make texts similar
        self.ngrams = describe(encoded_texts(strings), hashes, idf, patterns)
        self.rare = weighed(self.ngrams, idf)  # weighted twice: frequent n-grams do not make texts similar
        self.rows = np.array([text.rows for text in texts], np.float64)
        # an answer outside the five choices has no probability
        model = [dict(zip(text.codes, map(confidence, text.probs))) for text in texts]
        first = ["", *sorted({*chain(*model)} - {""})]  # "": none
        others = {*codes, *(code for text in texts for code in text.codes)}
        self.names = [*first, *sorted(others.difference(first))]
        self.place = {name: i for i, name in enumerate(self.names)}
        begins = torch.tensor([0, *map(len, model)]).cumsum(0)
        columns = torch.tensor([self.place[code] for code in chain(*model)], dtype=torch.int64)
        probs = torch.tensor([prob for each in model for prob in each.values()], dtype=torch.float32)
        size = len(texts), len(first)
        self.model = torch.sparse_csr_tensor(begins, columns, probs, size, check_invariants=False)
        uniform = np.array([(int(text.id, 16) + 0.5) / 2**64 for text in texts])
        # texts drawn in proportion to their rows, without replacement (Efraimidis and Spirakis 2006)
        draws = np.argsort(-np.log(uniform) / np.maximum(self.rows, 1e-9), kind="stable").tolist()
        self.draws = [text for text in draws if not texts[text].decided]

    def learn(self, decisions: Mapping[int, tuple[str, ...] | None]) -> Guesses:
        """Return guesses learned from the decisions on texts, in order. A decision None teaches nothing."""
        known = {i: tuple(text.answer) for i, text in enumerate(self.texts) if text.decided}
        mine = {text: codes for text, codes in decisions.items() if codes is not None}
        older = sorted(known, key=lambda i: (-self.rows[i], i))[: max(MAX_TAUGHT - len(mine), 0)]
        taught = [*older, *mine][-MAX_TAUGHT:]
        answers = [[self.place[code] for code in (known | mine)[i] or ("",)] for i in taught]
        # places of the codes that the model or a person gave. "" fills up the choices
        places = np.unique([*range(self.model.shape[1]), *chain(*answers)])
        column = {place: i for i, place in enumerate(places.tolist())}
        places = np.pad(places, (0, max(GUESSES + 1 - len(places), 0)))
        target = torch.zeros(len(taught), len(places))
        for row, codes in zip(target, answers):
            row[[column[code] for code in codes]] = 1

        of_taught = self._texts(np.array(taught, np.int64))
        used = of_taught.ngrams.col_indices().unique()
        texts = of_taught._replace(ngrams=narrowed(of_taught.ngrams, used), target=target)
        settings = choose(texts)
        # draws before the first open text
        drawn = {*takewhile(decisions.__contains__, self.draws)}
        is_drawn = np.array([False] * len(older) + [text in drawn for text in mine], bool)[-MAX_TAUGHT:]
        left = np.union1d(thinned(np.arange(len(taught)), MAX_LEFT_OUT), np.flatnonzero(is_drawn))
        solved = solve(texts, settings, [*torch.from_numpy(left)[:, None]])
        best, x = score_features(solved.left_out)
        hits = target.numpy()[left[:, None], best] > 0
        width, known_codes = width_of(x), target.numpy()[left].sum(1)
        is_right = (hits.cumsum(1)[np.arange(len(x)), width - 1] == known_codes) & (known_codes == width)
        maps = [fitted(x[:, each].reshape(-1, 3), hits[:, each].ravel())[0] for each in RANK_GROUPS]
        answers_left, checked = of_answers(x, width), is_drawn[left]
        of_answer, covariance = fitted(answers_left, is_right)
        # drawn texts move the share's log-odds, with a Newton step from a normal prior of BIAS
        expected = logistic(answers_left[checked] @ of_answer)
        information = BIAS**-2 + (expected * (1 - expected)).sum()
        offset = (is_right[checked] - expected).sum() / information
        covariance[2, 2] += 1 / information
        weights = torch.sparse.mm(joined_features(texts, settings).to_sparse_coo().t(), solved.coefficients)
        codes, x_of_all = self._guess(weights, settings, used, solved.outputs, len(places))
        probs, width = probabilities(x_of_all, maps).astype(np.float32), width_of(x_of_all)

        answered, is_guess = of_answers(x_of_all, width), x_of_all[:, 0, 0] > 0
        sure, moved = (logistic(answered @ of_answer + each) * is_guess for each in (0, offset))
        is_open = np.array([not text.decided for text in self.texts])
        is_open[list(mine)] = False
        right = self._share_right(moved, is_open, answered, covariance)
        is_open[list(decisions)] = False  # including skipped texts
        order = self._order(1 - sure, is_open)
        return Guesses(places[codes].astype(np.int32), probs, width, sure, len(taught), right, order)

    def answer(self, guesses: Guesses, text: int) -> list[str]:
        """Return the codes of the answer, [] for none."""
        codes = guesses.codes[text, : guesses.width[text]]
        return [self.names[code] for code in codes if code]

    def codes_of(self, guesses: Guesses, text: int) -> list[tuple[str, float]]:
        """Return the guessed codes with their probabilities, the best first."""
        pairs = zip(guesses.codes[text], guesses.probs[text].tolist())
        return [(self.names[code], round(prob, 4)) for code, prob in pairs if code and prob]

    def nearest(self, text: int, known: Sequence[int]) -> list[int]:
        """Return the most similar of known texts, according to the cosine of rare n-grams."""
        own = take(self.rare, torch.tensor([text])).to_dense()[0]
        similar = (take(self.rare, torch.tensor(known, dtype=torch.int64)) @ own).numpy()
        best = np.argsort(-similar, kind="stable")[: NEAREST + 1]
        return [known[i] for i in best if known[i] != text and similar[i] >= MIN_SIMILARITY][:NEAREST]

    def _share_right(
        self, sure: np.ndarray, is_open: np.ndarray, answered: np.ndarray, covariance: np.ndarray
    ) -> Shares:
        """Return the share of right rows, decided or guessed, with its 95 % interval: (low,
        share, high), from chance and from the covariance of the weights behind `sure`.
        """
        rows, spread = self.rows * is_open, sure * (1 - sure)
        of_open = rows / max(float(rows.sum()), 1e-9)
        share, slope = float(of_open @ sure), (of_open * spread) @ answered
        variance = float(slope @ covariance @ slope + of_open**2 @ spread)
        number = share * (1 - share) / variance if variance else math.inf  # texts with the same information
        left = float(rows.sum()) / max(float(self.rows.sum()), 1e-9)
        low, share, high = (1 - left * (1 - each) for each in sorted([*wilson(share, number), share]))
        return low, share, high

    def _texts(self, index: np.ndarray) -> Texts:
        """Return some texts, int64 [m], to learn from or to guess, without codes."""
        at = torch.from_numpy(index)
        answers = take(self.model, at).to_dense() if self.model.shape[1] > 1 else None
        parts = take(self.ngrams, at), torch.zeros(len(at), 0), torch.ones(len(at))
        return Texts(*parts, answers, torch.arange(self.model.shape[1]))

    def _guess(
        self, weights: Tensor, settings: Settings, used: Tensor, outputs: Tensor, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `score_features` of all texts' scores [T, width] from weights of the n-grams `used` and of
        the model's answers, [used (+ codes of the model), K], for the columns `outputs` of scores, int64 [K].
        """
        total = len(self.texts)
        best, x = np.empty((total, GUESSES), np.int64), np.empty((total, GUESSES, 3), np.float32)
        for start in range(0, total, SCORED_AT_ONCE):
            part = np.arange(start, min(start + SCORED_AT_ONCE, total))
            texts = self._texts(part)
            scores = torch.zeros(len(part), width)
            if texts.answers is not None:
                scores[:, : self.model.shape[1]] = settings.share * texts.answers
            texts = texts._replace(ngrams=narrowed(texts.ngrams, used))
            scores[:, outputs] += joined_features(texts, settings) @ weights
            best[part], x[part] = score_features(scores)
        return best, x

    def _order(self, doubt: np.ndarray, is_open: np.ndarray) -> list[int]:
        """Return the texts that teach most, each given that those before it are decided."""
        texts = np.flatnonzero(is_open)
        if not len(texts):
            return []
        draw = np.random.default_rng(len(texts))
        wrong = self.rows[texts] * doubt[texts] + 1e-9
        order = np.argsort(-wrong, kind="stable")[: SCORED_TEXTS // 2]
        some = draw.choice(len(texts), min(SCORED_TEXTS // 2, len(texts)), False, wrong / wrong.sum())
        candidates = texts[np.union1d(order, some)]
        pool = np.union1d(candidates, draw.choice(texts, min(POOL, len(texts)), False))
        some, others = (take(self.ngrams, torch.from_numpy(each)) for each in (pool, candidates))
        columns = others.col_indices().unique()
        products = narrowed(some, columns) @ narrowed(others, columns).to_dense().t()
        near = products.numpy() ** POWER  # [pool, candidates]
        place, scale = np.searchsorted(pool, candidates), len(texts) / len(pool)
        near[place, np.arange(len(candidates))] = 0  # its own rows count in full
        rows, doubt, order = self.rows[pool].astype(np.float32), doubt[pool].astype(np.float32), []
        for _ in range(min(BATCH, len(candidates))):
            score = doubt[place] * (rows[place] + TAUGHT_SHARE * scale * (rows * doubt) @ near)
            chosen = int(score.argmax())
            order.append(int(candidates[chosen]))
            doubt = doubt * (1 - np.minimum(near[:, chosen], 1))
            doubt[place[chosen]] = -1e-9
        return order
