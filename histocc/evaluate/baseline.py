"""What a model has to beat: a linear support vector machine on n-grams, and two simpler baselines.

The support vector machine needs scikit-learn (extra `baseline`). Features are two TF-IDF tables side by
side, of characters (n-grams of 2 to 5 within words) and of words (1 and 2). Each code has its own linear
classifier (LinearSVC, C=1: code against all others). A text gets the code with the highest decision value
and, where some training row has several codes, every other one with a value above 0. Where the training rows
have several languages, the language is in front of the text.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from histocc.data.arrays import PreparedData, RowSet
from histocc.evaluate.figures import COLUMNS, measured
from histocc.runtime.errors import UserError

MAX_ROWS = 500_000  # of training; a sample is taken of more

Codes = frozenset[str]


class KnownRows(NamedTuple):
    """Training rows; those with the same text and the same codes are one, the most frequent first.

    Args:
        texts: with the language in front if `languages`.
        times: how many rows each stands for, int64.
        total: number of training rows, of which `times` may count a sample.
    """

    texts: list[str]
    codes: list[Codes]
    times: np.ndarray
    total: int
    languages: bool


def sklearn_parts() -> tuple:
    """(hstack, TfidfVectorizer, LinearSVC). Raises UserError if scikit-learn is not installed."""
    try:
        from scipy.sparse import hstack
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.svm import LinearSVC
    except ImportError as error:
        raise UserError(f"--baseline needs scikit-learn ({error}): pip install 'histocc[baseline]'") from None
    return hstack, TfidfVectorizer, LinearSVC


def texts_and_codes(
    rows: RowSet, data: PreparedData, index: np.ndarray, languages: bool
) -> tuple[list, list]:
    """(the texts of some rows, with their languages in front if `languages`; the set of codes of each)."""
    texts, numbers = rows.strings(index), np.asarray(rows.codes[index]).tolist()
    if languages:
        names = [data.languages[number] for number in rows.language[index].tolist()]
        texts = [f"{name} {text}" for name, text in zip(names, texts)]
    return texts, [frozenset(data.codes[number] for number in row if number >= 0) for row in numbers]


def known_rows(data: PreparedData, seed: int = 1, most: int = MAX_ROWS) -> KnownRows:
    """The training rows of a prepared folder, or a sample of `most` of them that `seed` decides."""
    rows, index = data.train, np.arange(len(data.train))
    if len(rows) > most:
        index = np.sort(np.random.default_rng(seed).choice(len(rows), most, replace=False))
    languages = len(np.unique(rows.language)) > 1
    counts = Counter(zip(*texts_and_codes(rows, data, index, languages))).most_common()
    texts, codes = map(list, zip(*(pair for pair, _ in counts)))
    return KnownRows(texts, codes, np.array([count for _, count in counts]), len(rows), languages)


def look_up(known: KnownRows, texts: list[str], same_text: bool = True) -> list[Codes]:
    """The most frequent codes of the same text (case and blanks aside), else of all rows; without `same_text`
    those of all rows.
    """

    def key(text: str) -> str:
        return " ".join(text.casefold().split())

    every: Counter = Counter()
    by_text: dict[str, Counter] = {}
    for text, codes, times in zip(known.texts, known.codes, known.times.tolist()):
        every[codes] += times
        by_text.setdefault(key(text), Counter())[codes] += times
    usual = every.most_common(1)[0][0]
    best = {text: counts.most_common(1)[0][0] for text, counts in by_text.items() if same_text}
    return [best.get(key(text), usual) for text in texts]


def svm(
    known: KnownRows, texts: list[str], check: Callable[[], None] = lambda: None
) -> tuple[list[Codes], float]:
    """A linear support vector machine for each code: (the codes of each text, seconds of predicting).

    Rows that are alike weigh as many as they are, which has the same solution as repeating them. One
    classifier is held at a time, so memory grows with the texts and not with the codes.

    Args:
        check: called before each code; an exception of it ends the work.

    Raises:
        UserError: scikit-learn is not installed.
    """
    (hstack, Vectorizer, LinearSVC), tables = sklearn_parts(), []
    repeated = [text for text, times in zip(known.texts, known.times.tolist()) for _ in range(times)]
    for analyzer, sizes in (("char_wb", (2, 5)), ("word", (1, 2))):
        try:
            tables.append(Vectorizer(analyzer=analyzer, ngram_range=sizes).fit(repeated))
        except ValueError:  # no training text has a word of two letters
            continue
    distinct = list(dict.fromkeys(texts))
    rows = hstack([table.transform(known.texts) for table in tables], format="csr")  # [P, F]
    before = time.perf_counter()
    asked = hstack([table.transform(distinct) for table in tables], format="csr")  # [D, F]
    predicting = time.perf_counter() - before
    several = any(len(codes) > 1 for codes in known.codes)
    best, best_value = np.zeros(len(distinct), dtype=np.int64), np.full(len(distinct), -np.inf)
    further: list[set[int]] = [set() for _ in distinct]
    names = sorted({code for codes in known.codes for code in codes})
    for number, name in enumerate(names):
        check()
        is_code = np.array([name in codes for codes in known.codes])
        model = None if is_code.all() else LinearSVC(C=1.0, random_state=0).fit(rows, is_code, known.times)
        before = time.perf_counter()
        values = np.full(len(distinct), np.inf) if model is None else model.decision_function(asked)
        better = values > best_value
        best[better], best_value[better] = number, values[better]
        for text in np.flatnonzero(values > 0).tolist() if several else ():
            further[text].add(number)
        predicting += time.perf_counter() - before
    sets = [frozenset(names[i] for i in {one, *more}) for one, more in zip(best.tolist(), further)]
    return list(map(dict(zip(distinct, sets)).__getitem__, texts)), predicting


def compared(
    trained: PreparedData,
    data: PreparedData,
    rows: RowSet,
    resamples: int,
    seed: int,
    check: Callable[[], None],
) -> dict:
    """The figures of baselines fitted to the training rows of a run, on the rows of `data` that are
    evaluated.

    Returns:
        {"rows", "rows_of_training", "language_in_front", "baselines": {name: {"over_rows", "over_texts":
        [accuracy, low, high], fractions; "several": the same for rows with two or more codes alone, or None;
        "fit_seconds", "predict_seconds"}}}.
    """
    known = known_rows(trained, seed)
    texts, true = texts_and_codes(rows, data, np.arange(len(rows)), known.languages)
    text = np.unique(rows.text_hash, return_inverse=True)[1]
    several, found = np.array([len(codes) > 1 for codes in true]), {}

    def accuracy(columns: np.ndarray) -> dict:
        figures = measured(columns, text, resamples, seed)
        over = {name: figures[name].get("accuracy") for name in ("over_rows", "over_texts")}
        return {"rows": figures["rows"], "texts": figures["texts"], **over}

    for name in ("svm", "look-up", "majority"):
        started, predicting = time.perf_counter(), 0.0
        if name == "svm":
            codes, predicting = svm(known, texts, check)
        else:
            codes = look_up(known, texts, name == "look-up")
        columns = np.zeros((len(true), len(COLUMNS)))
        columns[:, 0], columns[:, 1] = 1, [one == other for one, other in zip(codes, true)]
        found[name] = accuracy(columns) | {
            "several": accuracy(columns * several[:, None]) if several.any() else None,
            "fit_seconds": time.perf_counter() - started - predicting,
            "predict_seconds": predicting,
        }
    return {
        "rows": int(known.times.sum()),
        "rows_of_training": known.total,
        "language_in_front": known.languages,
        "baselines": found,
    }
