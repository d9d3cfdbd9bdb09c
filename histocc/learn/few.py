"""Learning from few texts: the model of a run in closed form, its figure, thresholds and confidence."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from histocc.data.arrays import PreparedData, text_keys, thinned
from histocc.data.learned import sets_of_codes
from histocc.data.prepare import nothing
from histocc.data.report import titles_alone
from histocc.figure import ENTRY, LEFT_OUT, Figure
from histocc.learn import closed_form
from histocc.learn.prior import Prior
from histocc.learn.texts import count_ngrams, describe, distinct, encoded_rows
from histocc.model import confidence
from histocc.model.confidence import OUTPUTS, USUAL, Confidence, probability_of_set
from histocc.model.levels import Levels, map_of
from histocc.model.ngrams import ALL_CASES
from histocc.model.ridge import MIDDLE, SHARPNESS
from histocc.text import COLUMN_SEPARATOR, text_hashes

MAX_HALF = 64.0  # smaller coefficients are kept in half precision, as greater ones cancel each other
MIN_LEFT_OUT = 20  # least number of texts for a confidence
MAX_NGRAMS = 1 << 18
TEXT_WIDTH = 128  # width of the vectors of texts
THRESHOLDS = (0.5, 0.02, 0.05, 0.1, 0.2, 0.3, 0.7, 0.8)  # for further codes, the default first


class FewTexts:
    """The distinct texts that a run learns from, in the order of their first rows. The same text in two
    languages counts as two. `texts` describes them for the closed form.

    The codes of the data may be followed by the codes of the prior. The prior's answers to its own training
    texts say nothing about new texts, so these are neither left out nor used for choices. Without a prior,
    a listed title whose code no other text has is not left out either.
    """

    def __init__(
        self,
        data: PreparedData,
        patterns: list[str],
        max_len: int,
        prior: Prior | None = None,
        check: Callable[[], None] = nothing,
        dtype: torch.dtype = torch.float32,
    ):
        self.data, train = data, data.train
        # int64 [n], the first row of each text and the number of its rows. int64 [N], text of each row
        self.first, self.count, self.text_of_row = distinct(text_keys(train.text_hash, train.language))
        hashes, idf = count_ngrams(data, max_len, MAX_NGRAMS, patterns, check)
        self.config = {"rows": len(hashes), "width": TEXT_WIDTH, "patterns": patterns, "case": ALL_CASES}
        self.hashes, self.idf = torch.from_numpy(hashes), torch.from_numpy(idf)
        found = describe(
            encoded_rows(data, train, self.first, max_len, check), self.hashes, self.idf, patterns
        )
        texts = train.strings(self.first)
        self.text_hash = np.asarray(train.text_hash)[self.first]
        self.first_column = text_hashes([text.partition(COLUMN_SEPARATOR)[0].strip() for text in texts])
        languages = [data.languages[i] for i in np.asarray(train.language)[self.first]]
        weight = torch.from_numpy(self.count).to(dtype).sqrt()
        self.texts = closed_form.Texts(found.to(dtype), self._target().to(dtype), weight)
        self.is_new = self.is_left_out = np.full(len(texts), True)
        if prior:
            answers, places = prior.answers(texts, languages).to(dtype), prior.places(data.codes)
            self.texts = self.texts._replace(answers=answers, places=places)
            self.is_new = self.is_left_out = ~prior.seen(texts)
        elif titles_alone(data.report):  # fits without a title cannot give a code that only it has
            has = self.texts.target > 0
            self.is_left_out = (has & (has.sum(0) > 1)).any(1).numpy()

    def _target(self) -> Tensor:
        """Return the share of each text's rows with each code, float32 [n, codes]."""
        target = np.zeros((len(self.first), len(self.data.codes)), dtype=np.float32)
        for codes in np.asarray(self.data.train.codes).T:
            has = codes >= 0
            np.add.at(target, (self.text_of_row[has], codes[has]), 1.0)
        return torch.from_numpy(target / self.count[:, None].astype(np.float32))

    def sets_of(self, texts: np.ndarray) -> list[dict[frozenset[int], float]]:
        """Return, for some texts (int64 [m]), the share of their rows with each set of codes."""
        rows = self.data.train
        text, row, number = sets_of_codes(rows, self.text_of_row)
        begins = np.searchsorted(text, [texts, texts + 1])
        found = []
        for i, first, last in zip(texts.tolist(), *begins.tolist()):
            each = np.asarray(rows.codes)[row[first:last]].tolist()
            sets = [frozenset(code for code in codes if code >= 0) for codes in each]
            found.append(dict(zip(sets, (number[first:last] / self.count[i]).tolist())))
        return found

    def known_share(self, texts: Tensor) -> float:
        """Return the mean share of some texts' n-grams that other texts also have, weighted by idf."""
        begins, columns = self.texts.ngrams.crow_indices(), self.texts.ngrams.col_indices()
        others = (1 + len(self.texts.weight)) / (self.idf - 1).exp() - 1 > 1.5
        known = torch.where(others, self.idf, 0.0)[columns].double()
        unknown = torch.where(others, 0.0, self.idf.max())[columns].double()
        sums = [torch.nn.functional.pad(each.cumsum(0), (1, 0)) for each in (known, unknown)]
        of_known, of_unknown = (each[begins[texts + 1]] - each[begins[texts]] for each in sums)
        return float((of_known / (of_known + of_unknown).clamp(min=1e-9)).mean())

    def seconds(self) -> float:
        """Estimate the time of `learn`, from the time of some texts and the cube of their number."""
        began, some = time.perf_counter(), torch.arange(min(closed_form.MAX_CHOOSING, len(self.texts.weight)))
        few = self.texts.take(some)
        closed_form.solve(few, closed_form.choose(few), [some[:1]])
        return (time.perf_counter() - began) * (1 + (len(self.texts.weight) / len(some)) ** 3 / 10)

    def groups(self) -> list[Tensor]:
        """Return the texts to leave out together, about MAX_LEFT_OUT in all: those of one first column, with
        all languages and further columns, as no part of a split shares it with another.
        """
        _, times, group = distinct(self.first_column)
        may_stay = np.bincount(group, self.is_left_out) == times
        most = closed_form.MAX_LEFT_OUT * len(times) // len(np.unique(self.text_hash))
        members = np.split(np.argsort(group, kind="stable"), np.cumsum(times)[:-1])
        return [torch.from_numpy(members[i]) for i in thinned(np.flatnonzero(may_stay), most)]


class Learned(NamedTuple):
    """The result of learning from few texts."""

    settings: closed_form.Settings
    weights: dict[str, Tensor]  # of the model
    config: dict[str, Any]  # entries of its config: n-grams, ridge
    # the answers to training texts from fits without them
    logits: Tensor  # [m, codes]
    left_out: Tensor  # int64 [m], which texts these are
    weight: np.ndarray  # float64 [m], a text counts 1 with all its languages


def learn(few: FewTexts) -> Learned:
    """Choose the settings and solve, in one thread, in double precision if single is too low."""
    texts, new, groups = few.texts, torch.from_numpy(np.flatnonzero(few.is_new)), few.groups()
    try:
        settings = closed_form.choose(texts.take(new))
        solved = closed_form.solve(texts, settings, groups)
    except closed_form.LinAlgError:
        texts = texts.double()
        settings = closed_form.choose(texts.take(new))
        solved = closed_form.solve(texts, settings, groups)
    described = closed_form.joined_features(texts, settings)
    has_prior = described is not texts.ngrams
    places = texts.places if has_prior and texts.places is not None else torch.zeros(0, dtype=torch.int64)
    sizes = {"texts": len(texts.weight), "entries": len(described.values()), "prior": len(places)}
    sizes |= {"outputs": len(solved.outputs), "similarity": settings.similarity, "share": settings.share}
    kept = torch.float16 if solved.coefficients.abs().max() < MAX_HALF else torch.float32
    weights = {
        "ngrams.hashes": few.hashes,
        "ngrams.idf": few.idf.float(),
        "ridge.offsets": described.crow_indices(),
        "ridge.columns": described.col_indices().int(),
        "ridge.values": described.values().to(kept),
        "ridge.coefficients": solved.coefficients.to(kept),
        "ridge.outputs": solved.outputs,
        "ridge.places": places,
    }
    members = torch.cat([*groups, torch.zeros(0, dtype=torch.int64)])
    _, times, text = distinct(few.text_hash[members.numpy()])
    logits = SHARPNESS * (solved.left_out.float() - MIDDLE)
    config = {"ngrams": few.config, "ridge": sizes}
    return Learned(settings, weights, config, logits, members, 1 / times[text])


def judge(few: FewTexts, learned: Learned, most_codes: int, levels: Levels) -> dict[str, Any]:
    """Return "thresholds", "figure" and "confidence" of a checkpoint, from left-out texts."""
    logits, left_out, weight = learned.logits, learned.left_out, learned.weight
    best, places = logits.topk(min(len(OUTPUTS), logits.shape[1]))
    sets = few.sets_of(left_out.numpy())
    counts, right = {}, {}
    for least in THRESHOLDS if most_codes > 1 else THRESHOLDS[:1]:
        counts[least], right[least] = _right(best, places, sets, least, most_codes)
    chosen = max(right, key=lambda least: float(weight @ right[least]))
    ahead = weight * (right[chosen] - right[USUAL])
    chosen = chosen if ahead.sum() > np.sqrt(ahead @ ahead) else USUAL
    entries: dict[str, Any] = {
        "thresholds": {
            "default": chosen,
            "by_language": {},
            "source": "usual" if chosen == USUAL else "fitted",
            "at_least_one": True,
            "at_most": most_codes,
        }
    }
    number, rows = round(weight.sum()), few.count[left_out.numpy()]
    if not number:
        return entries
    accuracy, of_rows = (float(each @ right[chosen] / each.sum()) for each in (weight, rows))
    entries[ENTRY] = Figure(accuracy, number, of_rows, int(rows.sum()), LEFT_OUT, "flat")._asdict()
    if number < MIN_LEFT_OUT:
        return entries
    of_set = probability_of_set(logits, best, counts[chosen])
    conf = of_set.double().numpy()
    several, single = (counts[chosen] > 1).numpy(), np.zeros(len(conf), dtype=bool)
    hits = few.texts.target[left_out].gather(1, places).double().numpy()
    maps = {"flat": _map(conf, several, right[chosen], weight)}
    probs = best.double().sigmoid().numpy()
    for i, name in enumerate(OUTPUTS):
        place = min(i, probs.shape[1] - 1)
        maps[name] = _map(probs[:, place], single, hits[:, place], weight)
    answered = [row[:n] for row, n in zip(places.tolist(), counts[chosen].tolist())]
    for level in levels.names[1:]:
        of_level = levels.probability(level, logits, places, counts[chosen], of_set).double().numpy()
        known, agreeing = _agreement(levels, level, answered, sets)
        maps[map_of(level)] = _map(of_level, several, agreeing / np.maximum(known, 1e-9), weight * known)
    fitted = Confidence(number, maps, accuracy={"flat": accuracy}, best="flat", several=most_codes > 1)
    mapped = fitted.mapped("flat", torch.from_numpy(conf), torch.from_numpy(several)).numpy()
    curve = confidence.curve(mapped, right[chosen], weight)
    known = few.known_share(left_out)
    entries["confidence"] = fitted._replace(curves={"flat": curve}, known=known, left_out=True)._asdict()
    return entries


def _right(best: Tensor, places: Tensor, sets: list, least: float, most: int) -> tuple[Tensor, np.ndarray]:
    """Return (number of codes of each answer, share of its text's rows with exactly these codes), [m]."""
    counts = (best.sigmoid() > least).sum(1).clamp(1, most)
    answers = [frozenset(row[:n]) for row, n in zip(places.tolist(), counts.tolist())]
    return counts, np.array([of_text.get(answer, 0.0) for of_text, answer in zip(sets, answers)])


def learning_curve(
    few: FewTexts, settings: closed_form.Settings, judged: dict[str, Any], most_codes: int
) -> list[tuple[int, float, int]]:
    """Return the learning curve: (texts learned from, accuracy, texts measured on) for 10, 20, … 100 % of the
    texts that may be left out (at most MAX_CHOOSING) and for all texts, or [] for few. judged: from `judge`.
    """
    groups, points, fitted = few.groups(), [], judged.get("confidence")
    drawn = np.random.default_rng(0).permutation(len(groups))[: closed_form.MAX_CHOOSING]
    if not fitted:
        return []
    index = torch.stack([groups[i][0] for i in drawn])
    sets, least = few.sets_of(index.numpy()), judged["thresholds"]["default"]
    sizes = [round(len(index) * tenth / 10) for tenth in range(1, 11)]
    with contextlib.suppress(closed_form.LinAlgError):  # single precision is too low
        for size, scores in closed_form.nested(few.texts.take(index), settings, sizes):
            best, places = (SHARPNESS * (scores - MIDDLE)).topk(min(len(OUTPUTS), scores.shape[1]))
            right = _right(best, places, sets, least, most_codes)[1]
            points.append((size, float(right.mean()), len(index)))
    if len(few.texts.weight) > len(index):
        points.append((len(few.texts.weight), fitted["accuracy"]["flat"], fitted["texts"]))
    return points


def _agreement(
    levels: Levels, level: str, answered: list[list[int]], sets: list[dict[frozenset[int], float]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each text, the share of rows where all codes of the row and the answer have groups at a
    level, and the share where these groups are equal. sets: from `FewTexts.sets_of`.
    """
    found, codes = np.zeros((2, len(sets))), levels.codes
    for i, (answer, of_text) in enumerate(zip(answered, sets)):
        for true, share in of_text.items():
            is_same = levels.agree(level, [codes[j] for j in answer], [codes[j] for j in true])
            found[:, i] += 0.0 if is_same is None else share, share if is_same else 0.0
    return found[0], found[1]


def _map(probs: np.ndarray, several: np.ndarray, right: np.ndarray, weight: np.ndarray) -> list[float]:
    """Fit the weights of a map to answers that are right in a share of their rows, float [m]."""
    outcomes = np.repeat([True, False], len(probs))
    counts = np.concatenate([weight * right, weight * (1 - right)])
    return confidence.fit(np.tile(probs, 2), np.tile(several, 2), outcomes, counts)
