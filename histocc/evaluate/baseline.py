"""What a model has to beat: a linear support vector machine on n-grams, and three simpler baselines.

The support vector machine needs scikit-learn (extra `baseline`). Features are two TF-IDF tables side by
side, of characters (n-grams of 2 to 5 within words) and of words (1 and 2), each row of length 1, counts as
they are. Each code has its own linear classifier (LinearSVC, C=1: code against all others). A text gets the
code with the highest decision value and, where some training row has several codes, every other one with a
value above 0. Where the training rows have several languages, the language is in front of the text.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from histocc.data.arrays import PreparedData, RowSet
from histocc.evaluate import measures as report_metrics
from histocc.runtime.errors import UserError

MOST_ROWS = 500_000  # of training; a sample is taken of more
SAY_AFTER = 30.0  # seconds of fitting, after which it is said how long all of it will take
NEAREST_AT_ONCE = 64  # texts that are compared with all training texts at once

Codes = frozenset[str]


@dataclass(frozen=True)
class KnownRows:
    """Training rows; those with the same text and the same codes are one, the most frequent first.

    Attributes:
        texts: str [P], with the language in front where there are several.
        codes: frozenset of str [P].
        times: int64 [P], how many rows are so.
        total: number of training rows, of which `times` may count a sample.
        languages: whether the language is in front.
    """

    texts: list[str]
    codes: list[Codes]
    times: np.ndarray
    total: int
    languages: bool

    @property
    def rows(self) -> int:
        return int(self.times.sum())

    @property
    def several(self) -> bool:
        """Whether a row has more than one code."""
        return any(len(codes) > 1 for codes in self.codes)


@dataclass(frozen=True)
class Answers:
    """Predicted codes of each text (frozenset of str [N]); seconds of fitting and of predicting."""

    codes: list[Codes]
    fit_seconds: float
    predict_seconds: float


def nothing(*_) -> None:
    """Checks nothing, says nothing."""


def _sklearn() -> SimpleNamespace:
    """The parts of scikit-learn that are used here. Raises UserError where it is not installed."""
    try:
        import scipy.sparse
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.svm import LinearSVC
    except ImportError as error:
        raise UserError(
            f"The baseline needs scikit-learn ({error}): pip install 'histocc[baseline]', or pip"
            " install scikit-learn"
        ) from None
    return SimpleNamespace(hstack=scipy.sparse.hstack, TfidfVectorizer=TfidfVectorizer, LinearSVC=LinearSVC)


def check_installed() -> None:
    """Raises UserError where scikit-learn is not installed."""
    _sklearn()


# ---- rows


def texts_of(rows: RowSet, languages: list[str] | None = None, index: np.ndarray | None = None) -> list[str]:
    """The texts of rows as they are stored.

    Args:
        rows: a part of a prepared folder.
        languages: names of the languages; each text then has its own in front. None: texts alone.
        index: int64 [B], which rows; None: all.
    """
    index = np.arange(len(rows)) if index is None else index
    texts = rows.strings(index)
    if languages is None:
        return texts
    return [f"{languages[number]} {text}" for number, text in zip(rows.language[index].tolist(), texts)]


def codes_of(rows: RowSet, codes: list[str], index: np.ndarray | None = None) -> list[Codes]:
    """The set of codes of each row. codes: the names; index: int64 [B], which rows, or None for all."""
    numbers = np.asarray(rows.codes if index is None else rows.codes[index])  # [B, K]
    return [frozenset(codes[number] for number in row if number >= 0) for row in numbers.tolist()]


def known_rows(data: PreparedData, seed: int = 1, most: int = MOST_ROWS) -> KnownRows:
    """The training rows of a prepared folder, or a sample of `most` of them that `seed` decides."""
    rows, index = data.train, None
    if len(rows) > most:
        index = np.sort(np.random.default_rng(seed).choice(len(rows), most, replace=False))
    languages = len(np.unique(rows.language)) > 1
    texts = texts_of(rows, data.languages if languages else None, index)
    found = Counter(zip(texts, codes_of(rows, data.codes, index))).most_common()
    return KnownRows(
        [text for (text, _), _ in found],
        [codes for (_, codes), _ in found],
        np.array([times for _, times in found], dtype=np.int64),
        len(rows),
        languages,
    )


# ---- baselines: (training rows, texts [N], check) → Answers


def majority(known: KnownRows, texts: list[str], check: Callable[[], None] = nothing) -> Answers:
    """The most frequent set of codes, for every text."""
    started = time.perf_counter()
    times = Counter()
    for codes, number in zip(known.codes, known.times.tolist()):
        times[codes] += number
    best = times.most_common(1)[0][0]
    fitted = time.perf_counter()
    return Answers([best] * len(texts), fitted - started, time.perf_counter() - fitted)


def look_up(known: KnownRows, texts: list[str], check: Callable[[], None] = nothing) -> Answers:
    """The most frequent set of codes of the same text (case and blanks aside), else that of all rows."""
    started = time.perf_counter()
    best = majority(known, [""]).codes[0]
    times: dict[str, Counter] = {}
    for text, codes, number in zip(known.texts, known.codes, known.times.tolist()):
        times.setdefault(_plain(text), Counter())[codes] += number
    of_text = {text: found.most_common(1)[0][0] for text, found in times.items()}
    fitted = time.perf_counter()
    answers = [of_text.get(_plain(text), best) for text in texts]
    return Answers(answers, fitted - started, time.perf_counter() - fitted)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def nearest(known: KnownRows, texts: list[str], check: Callable[[], None] = nothing) -> Answers:
    """The set of codes of the training text whose TF-IDF vector has the highest cosine with that of the text.

    Raises:
        UserError: scikit-learn is not installed.
    """
    started = time.perf_counter()
    features = _Features(known)
    rows = features.of(known.texts).T.tocsr()  # [F, P]
    fitted = time.perf_counter()
    asked = features.of(texts)
    best = []
    for first in range(0, len(texts), NEAREST_AT_ONCE):
        check()
        best += (asked[first : first + NEAREST_AT_ONCE] @ rows).toarray().argmax(1).tolist()
    return Answers([known.codes[i] for i in best], fitted - started, time.perf_counter() - fitted)


def svm(
    known: KnownRows,
    texts: list[str],
    check: Callable[[], None] = nothing,
    say: Callable[[str], None] = nothing,
) -> Answers:
    """A linear support vector machine for each code.

    Rows that are alike weigh as many as they are, which has the same solution as repeating them. One
    classifier is held at a time, and each distinct text is asked for once, so memory grows with the texts
    and not with the codes. One thread: liblinear draws from one sequence of random numbers, so the answers
    are the same each time.

    Args:
        known: training rows.
        texts: str [N], with the language in front where `known.languages`.
        check: called before each code; an exception of it ends the work.
        say: takes a line with the time that all of it will take, once, after SAY_AFTER seconds.

    Raises:
        UserError: scikit-learn is not installed.
    """
    started = time.perf_counter()
    sklearn, features = _sklearn(), _Features(known)
    rows = features.of(known.texts)  # [P, F]
    rows_of: dict[str, list[int]] = {}
    for row, codes in enumerate(known.codes):
        for code in codes:
            rows_of.setdefault(code, []).append(row)
    before = time.perf_counter()
    distinct = list(dict.fromkeys(texts))
    asked = features.of(distinct)  # [D, F]
    predicting = time.perf_counter() - before
    best, best_value = np.zeros(len(distinct), dtype=np.int64), np.full(len(distinct), -np.inf)
    further: list[set[int]] = [set() for _ in distinct]
    names = sorted(rows_of)
    for number, code in enumerate(names):
        check()
        if say is not nothing and number and (seconds := time.perf_counter() - started) > SAY_AFTER:
            say(
                f"Baseline: {number:,} of {len(names):,} codes in {seconds:,.0f} s, about"
                f" {seconds / number * len(names) / 60:,.0f} minutes in all"
            )
            say = nothing
        is_code = np.zeros(len(known.texts), dtype=bool)
        is_code[rows_of[code]] = True
        machine = sklearn.LinearSVC(C=1.0, random_state=0)
        model = None if is_code.all() else machine.fit(rows, is_code, known.times)
        before = time.perf_counter()
        values = np.full(len(distinct), np.inf) if model is None else model.decision_function(asked)
        better = values > best_value
        best[better], best_value[better] = number, values[better]
        for text in np.flatnonzero(values > 0).tolist() if known.several else ():
            further[text].add(number)
        predicting += time.perf_counter() - before
    before = time.perf_counter()
    sets = [frozenset(names[i] for i in {one, *more}) for one, more in zip(best.tolist(), further)]
    answers = list(map(dict(zip(distinct, sets)).__getitem__, texts))
    predicting += time.perf_counter() - before
    return Answers(answers, time.perf_counter() - started - predicting, predicting)


class _Features:
    """TF-IDF of character n-grams and of words, with the weights of the training rows."""

    def __init__(self, known: KnownRows):
        sklearn = _sklearn()
        self.hstack = sklearn.hstack
        repeated = [text for text, times in zip(known.texts, known.times.tolist()) for _ in range(times)]
        kinds = [{"analyzer": "char_wb", "ngram_range": (2, 5)}, {"analyzer": "word", "ngram_range": (1, 2)}]
        self.tables = []
        for kind in kinds:
            table = sklearn.TfidfVectorizer(**kind)
            try:
                self.tables.append(table.fit(repeated))
            except ValueError:  # no training text has a word of two letters
                continue

    def of(self, texts: list[str]):
        """Features of texts [N], sparse float64 [N, F]."""
        return self.hstack([table.transform(texts) for table in self.tables], format="csr")


BASELINES: dict[str, Callable[..., Answers]] = {
    "svm": svm,
    "majority": majority,
    "look-up": look_up,
    "nearest": nearest,
}


# ---- figures


def accuracies(
    predicted: list[Codes], true: list[Codes], text_hash: np.ndarray, resamples: int, seed: int
) -> dict:
    """How many rows are right: the set of predicted codes is the set of true codes.

    Args:
        predicted, true: sets of codes [N].
        text_hash: uint64 [N], equal for rows with the same text.
        resamples, seed: of the bootstrap, see `report_metrics.measured`.

    Returns:
        {"rows", "texts": how many; "over_rows", "over_texts": [accuracy, low, high], fractions; "several":
        the same for rows with two or more codes alone, or None where there are none}.
    """
    text = np.unique(text_hash, return_inverse=True)[1]
    right = np.array([one == other for one, other in zip(predicted, true)], dtype=np.float64)
    columns = np.zeros((len(true), len(report_metrics.COLUMNS)))
    columns[:, 0], columns[:, 1] = 1, right

    def figures(columns: np.ndarray) -> dict:
        found = report_metrics.measured(columns, text, resamples, seed)
        return {
            "rows": found["rows"],
            "texts": found["texts"],
            **{name: found[name]["accuracy"] for name in ("over_rows", "over_texts")},
        }

    several = np.array([len(codes) > 1 for codes in true])
    of_several = figures(columns * several[:, None]) if several.any() else None
    return figures(columns) | {"several": of_several}


def compared(
    trained: PreparedData,
    data: PreparedData,
    rows: RowSet,
    resamples: int,
    seed: int,
    check: Callable[[], None] = nothing,
    say: Callable[[str], None] = nothing,
) -> dict:
    """The figures of baselines fitted to the training rows of a run, on the rows that are evaluated.

    Args:
        trained: the prepared data of the run.
        data, rows: those that are evaluated.
        resamples, seed: of the bootstrap; the seed also decides which training rows make up the sample.
        check: called often; an exception of it ends the work.
        say: see `svm`.

    Returns:
        {"rows", "rows_of_training", "language_in_front", "baselines": {"svm", "look-up", "majority":
        `accuracies` and "fit_seconds", "predict_seconds"}}, plain types.

    Raises:
        UserError: scikit-learn is not installed.
    """
    known = known_rows(trained, seed)
    texts = texts_of(rows, data.languages if known.languages else None)
    true, text_hash, found = codes_of(rows, data.codes), np.asarray(rows.text_hash), {}
    for name in ("svm", "look-up", "majority"):
        answers = svm(known, texts, check, say) if name == "svm" else BASELINES[name](known, texts, check)
        found[name] = accuracies(answers.codes, true, text_hash, resamples, seed) | {
            "fit_seconds": answers.fit_seconds,
            "predict_seconds": answers.predict_seconds,
        }
    return {
        "rows": known.rows,
        "rows_of_training": known.total,
        "language_in_front": known.languages,
        "baselines": found,
    }
