"""Guesses for the texts of a table, learned from the decisions of a person.

Ridge regression of the codes Y on the n-grams of the decided texts, solved in its dual: with their kernel K,
K + PENALTY = L Lᵀ, Z = L⁻¹ Y and W = L⁻ᵀ Z, the scores of a text are its similarities times W. Row i of
Y − Z ⋅ diag(L) has the scores of text i by those decided before it, and row i of Y − W / diag(L⁻ᵀ L⁻¹) those
by all others. A logistic map from both to how often they were right gives the probabilities: the first were
made when less was known than today, and the second have more similar texts than an open text has.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, takewhile
from typing import NamedTuple
from zlib import crc32

import numpy as np

from histocc.logistic import fit_logistic, logistic
from histocc.review.sheet import CodedText, confidence

SIZES = (2, 3, 4)  # characters of an n-gram, within a word and the blanks around it
BUCKETS = 1 << 18  # n-grams that share one count as the same
PENALTY = 0.5
MAX_TAUGHT = 5_000  # texts that guesses are learned from, in time N³
CHOICES = 5  # guesses for a text
NEAREST, MIN_SIMILARITY = 3, 0.15  # similar texts that are known
BLOCK = 256  # columns of a matrix that are computed at once
CANDIDATES, POOL, BATCH = 400, 20_000, 50  # texts that are scored, beside so many, for the next so many
SHARES = np.array([0.0, 0.25, 0.5, 0.75, 1.0])  # of a model's probabilities in the scores
# Logistic map before a decision: weights of the score, of its lead over the best other one, and of 1
PRIOR = {"mean": (3.0, 3.0, -2.0), "deviation": (10**0.5,) * 3}
POWER, PART = 3, 0.5  # of the cosine of two texts; what one teaches the other, of what its own rows count
BIAS, FULL = 0.035, 200  # deviation of the probabilities' mean, which is larger before so many decisions
RANKS = slice(0, 1), slice(1, CHOICES)  # of the best codes
Shares = tuple[float, float, float]


class Rows(NamedTuple):
    """A sparse matrix: row i holds values[starts[i]:starts[i + 1]] in these columns."""

    starts: np.ndarray
    columns: np.ndarray
    values: np.ndarray

    def take(self, rows: np.ndarray) -> "Rows":
        sizes = np.diff(self.starts)[rows]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        at = np.arange(starts[-1]) + np.repeat(self.starts[rows] - starts[:-1], sizes)
        return Rows(starts, self.columns[at], self.values[at])

    def dot(self, dense: np.ndarray) -> np.ndarray:
        """Return the product with [columns, C], float32 [rows, C]."""
        product = np.empty((len(self.starts) - 1, dense.shape[1]), np.float32)
        for i, (start, end) in enumerate(zip(self.starts, self.starts[1:])):
            product[i] = self.values[start:end] @ dense[self.columns[start:end]]
        return product


def ngrams_of(texts: Iterable[str]) -> Rows:
    """Return the n-grams and words of texts by inverse document frequency; each row has the length
    1. N-grams of one text alone are left out.
    """
    of_word = lru_cache(1 << 14)(_buckets)
    found, sizes = array("i"), []
    for text in texts:
        buckets = set[int]().union(*map(of_word, text.split()))
        sizes.append(len(buckets))
        found.extend(sorted(buckets))
    count, columns = len(sizes), np.frombuffer(found, np.int32)
    frequency = np.bincount(columns, minlength=BUCKETS)
    values = np.log((1 + count) / np.maximum(frequency, 1)).astype(np.float32)[columns]
    row = np.repeat(np.arange(count), sizes)
    values /= np.sqrt(np.bincount(row, values * values, count)).astype(np.float32)[row]
    shared = frequency[columns] > 1
    starts = np.concatenate([[0], np.cumsum(np.bincount(row[shared], minlength=count))])
    return Rows(starts, columns[shared], values[shared])


def _buckets(word: str) -> set[int]:
    padded = f" {word} "
    parts = [padded[i : i + size] for size in SIZES for i in range(len(padded) - size + 1)]
    return {crc32(part.encode("utf-8", "surrogatepass")) % BUCKETS for part in [padded, *parts]}


def similarities(some: Rows, others: Rows) -> np.ndarray:
    """Return the cosines of all pairs, float32 [some, others]."""
    local, count, lookup = _own_columns(others)
    dense = np.zeros((count + 1, len(others.starts) - 1), np.float32)
    dense[local.columns, np.repeat(np.arange(dense.shape[1]), np.diff(local.starts))] = local.values
    return Rows(some.starts, lookup[some.columns], some.values).dot(dense)


def _own_columns(rows: Rows) -> tuple[Rows, int, np.ndarray]:
    """Return (the rows by number of those columns that occur in them, this number, the number of every
    column; those that do not occur come last).
    """
    used, local = np.unique(rows.columns, return_inverse=True)
    lookup = np.full(BUCKETS, len(used), np.int32)
    lookup[used] = np.arange(len(used))
    return Rows(rows.starts, local, rows.values), len(used), lookup


def invert_lower(matrix: np.ndarray) -> None:
    """Invert a matrix with nothing above its diagonal in its own memory, a block of rows after the other."""
    for start in range(0, len(matrix), BLOCK):
        rows = slice(start, start + BLOCK)
        own = np.linalg.inv(matrix[rows, rows])
        matrix[rows, :start] = -own @ (matrix[rows, :start] @ matrix[:start, :start])
        matrix[rows, rows] = own


def features(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the best columns of each row of scores [n, C], int64 [n, CHOICES]; and of each its score, its
    lead over the best other one, and 1, [n, CHOICES, 3].
    """
    best = np.argpartition(-scores, CHOICES, axis=1)[:, : CHOICES + 1]
    found = np.take_along_axis(scores, best, axis=1)
    order = np.argsort(-found, axis=1, kind="stable")
    best, found = np.take_along_axis(best, order, axis=1), np.take_along_axis(found, order, axis=1)
    lead = found[:, :CHOICES] - found[:, :1]
    lead[:, 0] = found[:, 0] - found[:, 1]
    return best[:, :CHOICES], np.stack([found[:, :CHOICES], lead, np.ones_like(lead)], axis=2)


def width_of(x: np.ndarray) -> np.ndarray:
    """Return how many of the best codes are the answer together, by their features [n, CHOICES, 3]."""
    return np.maximum((x[:, :, 0] > 0.5).sum(axis=1), 1)


def probabilities(x: np.ndarray, maps: Sequence[np.ndarray]) -> np.ndarray:
    """Return the probability of each code, [n, CHOICES], by the map of the first one and of the others."""
    logits = np.concatenate([x[:, each] @ weights for each, weights in zip(RANKS, maps)], axis=1)
    return logistic(logits) * (x[:, :, 0] > 0)


def least_likely(probs: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Return the probability of the least likely code of each answer, which is taken for that of the answer:
    too high where texts have further codes that nobody has decided on yet.
    """
    return np.take_along_axis(probs, width[:, None] - 1, axis=1)[:, 0]


class Guesses(NamedTuple):
    """Guesses for all texts, from the decisions of one moment."""

    codes: np.ndarray  # int32 [T, CHOICES], places among the names of `Learner`, the best first
    probs: np.ndarray  # float32 [T, CHOICES], that each is right; 0 where there is no guess
    width: np.ndarray  # int64 [T], how many of them are the answer together
    sure: np.ndarray  # [T], the probability that the answer is right; 0 where there is none
    taught: int  # number of decided texts
    right: Shares  # share of all rows that are decided or guessed right, in its interval
    order: list[int]  # texts to ask for next


class Learner:
    """The texts of a file, and what can be learned for them.

    Args:
        texts: all texts of the file.
        codes: the codes of the key.
    """

    def __init__(self, texts: Sequence[CodedText], codes: Iterable[str]):
        self.texts = texts
        self.ngrams = ngrams_of(text.key[0] for text in texts)
        self.rows = np.array([text.rows for text in texts], np.float64)
        self.names = ["", *sorted({*codes, *(code for text in texts for code in text.codes)})]  # "": none
        self.place = {name: i for i, name in enumerate(self.names)}
        self.model = [
            {self.place[code]: confidence(prob) for code, prob in zip(text.codes, text.probs)}
            for text in texts  # an answer beside five choices has no probability
        ]
        uniform = np.array([(int(text.id, 16) + 0.5) / 2**64 for text in texts])
        # rows drawn one after the other, texts as often as they have rows (Efraimidis and Spirakis 2006)
        draws = np.argsort(-np.log(uniform) / np.maximum(self.rows, 1e-9), kind="stable").tolist()
        self.draws = [text for text in draws if not texts[text].decided]

    def learn(self, decisions: Mapping[int, tuple[str, ...] | None]) -> Guesses:
        """Return guesses from the decisions on texts, in their order. A decision None teaches nothing."""
        known = {i: tuple(text.codes) for i, text in enumerate(self.texts) if text.decided}
        mine = {text: codes for text, codes in decisions.items() if codes is not None}
        older = sorted(known, key=lambda i: (-self.rows[i], i))[: max(MAX_TAUGHT - len(mine), 0)]
        taught = [*older, *mine][-MAX_TAUGHT:]
        answers = [[self.place[code] for code in (known | mine)[i] or ("",)] for i in taught]
        columns = {name: i for i, name in enumerate(sorted({*chain(*answers, *self.model)}))}
        names = np.array([*columns, *[0] * (CHOICES + 1 - len(columns))])
        truth = np.zeros((len(taught), len(names)), np.float32)
        for row, codes in zip(truth, answers):
            row[[columns[code] for code in codes]] = 1
        model = self._model_scores(taught, columns, len(names) if any(self.model) else 1)

        rows = self.ngrams.take(np.array(taught, np.int64))
        kernel = np.empty((len(taught), len(taught)), np.float32)
        for start in range(0, len(taught), BLOCK):
            block = np.arange(start, min(start + BLOCK, len(taught)))
            kernel[:, block] = similarities(rows, rows.take(block))
        kernel[np.diag_indices(len(taught))] += PENALTY
        inverse = np.linalg.cholesky(kernel)
        del kernel
        invert_lower(inverse)
        by_earlier = np.diagonal(inverse)[:, None]
        by_others = np.einsum("ij,ij->j", inverse, inverse)[:, None]
        twice, fits = np.concatenate([truth, truth]), []
        white = [inverse @ each for each in (truth, model)]
        weights = [inverse.T @ each for each in white]
        for share in SHARES if any(self.model) else SHARES[:1]:
            earlier, others = ((of_truth - share * of_model) for of_truth, of_model in (white, weights))
            best, x = features(twice - np.concatenate([earlier / by_earlier, others / by_others]))
            hits = np.take_along_axis(twice, best, axis=1) > 0
            fits.append((hits[:, 0].sum(), share, others, x, hits))
        _, share, learned, x, hits = max(fits, key=lambda fit: fit[:2])
        del inverse, white, weights, fits
        found = [(x[:, each].reshape(-1, 3), hits[:, each].ravel()) for each in RANKS]
        maps = [fit_logistic(*of_rank, np.ones(len(of_rank[1])), **PRIOR) for of_rank in found]
        codes, x_of_all = self._guess(rows, learned, columns, names, share)
        probs, width = probabilities(x_of_all, maps).astype(np.float32), width_of(x_of_all)

        # of the draws before the first open one: whether the others' answer is right, less its probability
        drawn = {*takewhile(decisions.__contains__, self.draws)}
        is_drawn = np.array([False] * len(taught) + [text in drawn for text in taught], bool)
        x, hits, twice = x[is_drawn], hits[is_drawn], twice[is_drawn]
        is_right = hits.cumsum(1)[np.arange(len(x)), width_of(x) - 1] == twice.sum(1)
        is_right &= twice.sum(1) == width_of(x)
        errors = is_right - least_likely(probabilities(x, maps), width_of(x))
        sure, is_open = least_likely(probs, width), np.array([not text.decided for text in self.texts])
        is_open[list(mine)] = False
        right = self._share_right(sure, is_open, errors, len(taught))
        is_open[list(decisions)] = False  # skipped ones, too
        return Guesses(codes, probs, width, sure, len(taught), right, self._order(1 - sure, is_open))

    def answer(self, guesses: Guesses, text: int) -> list[str]:
        """Return the codes that are the answer together, [] for none."""
        codes = guesses.codes[text, : guesses.width[text]]
        return [self.names[code] for code in codes if code]

    def codes_of(self, guesses: Guesses, text: int) -> list[tuple[str, float]]:
        """Return the codes that are guessed, the best first, with their probabilities."""
        pairs = zip(guesses.codes[text], guesses.probs[text].tolist())
        return [(self.names[code], round(prob, 4)) for code, prob in pairs if code and prob]

    def nearest(self, text: int, known: Sequence[int]) -> list[int]:
        """Return the most similar of known texts, by the cosine of their n-grams."""
        own, others = (self.ngrams.take(np.array(rows, np.int64)) for rows in ([text], known))
        weights = np.zeros(BUCKETS, np.float32)
        weights[own.columns] = own.values
        row = np.repeat(np.arange(len(known)), np.diff(others.starts))
        similar = np.bincount(row, others.values * weights[others.columns], len(known))
        best = np.argsort(-similar, kind="stable")[: NEAREST + 1]
        return [known[i] for i in best if known[i] != text and similar[i] >= MIN_SIMILARITY][:NEAREST]

    def _share_right(self, sure: np.ndarray, is_open: np.ndarray, errors: np.ndarray, taught: int) -> Shares:
        """Return the share of all rows that are right, decided or guessed, within its 95 % interval: (low,
        share, high). errors: 1 or 0, as the answer to a drawn text is right, less its probability.
        """
        deviation = BIAS * max(FULL / max(taught, 1), 1) ** 0.5
        variance = (float((errors**2).sum()) + 1) / (len(errors) + 4) / max(len(errors), 1)
        error = float(errors.sum()) / max(len(errors), 1) * deviation**2 / (deviation**2 + variance)
        rows = self.rows * is_open
        total, left = max(float(self.rows.sum()), 1e-9), float(rows.sum())
        guessed = (float(rows @ sure) + left * (error + times * deviation) for times in (-1.96, 0, 1.96))
        low, share, high = (1 - left / total + min(max(each, 0), left) / total for each in guessed)
        return low, share, high

    def _model_scores(self, texts: Sequence[int], columns: dict[int, int], width: int) -> np.ndarray:
        """Return the model's probabilities, float32 [texts, width]."""
        scores = np.zeros((len(texts), width), np.float32)
        for row, text in zip(scores, texts):
            row[[columns[code] for code in self.model[text]]] = list(self.model[text].values())
        return scores

    def _guess(self, rows: Rows, weights: np.ndarray, columns: dict[int, int], names, share: float):
        """Return `codes` of Guesses and their `features`. weights: of the decided rows, [rows, names]."""
        local, count, lookup = _own_columns(rows)
        table = np.zeros((count + 1, len(names)), np.float32)  # the last row stands for all other n-grams
        for start, end, weight in zip(local.starts, local.starts[1:], weights):
            table[local.columns[start:end]] += local.values[start:end, None] * weight
        places, total = lookup[self.ngrams.columns], len(self.texts)
        codes, x = np.empty((total, CHOICES), np.int32), np.empty((total, CHOICES, 3), np.float32)
        for start in range(0, total, BLOCK):
            part = range(start, min(start + BLOCK, total))
            scores = Rows(self.ngrams.starts[start : part.stop + 1], places, self.ngrams.values).dot(table)
            best, x[part] = features(scores + share * self._model_scores(part, columns, len(names)))
            codes[part] = names[best]
        return codes, x

    def _order(self, doubt: np.ndarray, is_open: np.ndarray) -> list[int]:
        """Return the texts that teach most, each after the texts before it have been decided."""
        texts = np.flatnonzero(is_open)
        if not len(texts):
            return []
        draw = np.random.default_rng(len(texts))
        wrong = self.rows[texts] * doubt[texts] + 1e-9
        order = np.argsort(-wrong, kind="stable")[: CANDIDATES // 2]
        some = draw.choice(len(texts), min(CANDIDATES // 2, len(texts)), False, wrong / wrong.sum())
        candidates = texts[np.union1d(order, some)]
        pool = np.union1d(candidates, draw.choice(texts, min(POOL, len(texts)), False))
        near = similarities(self.ngrams.take(pool), self.ngrams.take(candidates)) ** POWER
        place, scale = np.searchsorted(pool, candidates), len(texts) / len(pool)
        near[place, np.arange(len(candidates))] = 0  # its own rows count in full
        rows, doubt, order = self.rows[pool].astype(np.float32), doubt[pool].astype(np.float32), []
        for _ in range(min(BATCH, len(candidates))):
            score = doubt[place] * (rows[place] + PART * scale * (rows * doubt) @ near)
            chosen = int(score.argmax())
            order.append(int(candidates[chosen]))
            doubt = doubt * (1 - np.minimum(near[:, chosen], 1))
            doubt[place[chosen]] = -1e-9
        return order
