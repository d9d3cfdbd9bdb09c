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
QUIET_SECONDS = 30.0  # of fitting, after which it is said how long all of it will take

Codes = frozenset[str]


class KnownRows(NamedTuple):
    """Training rows; those with the same text and the same codes are one, the most frequent first.

    texts [P], with the language in front if `languages`; codes [P]; times int64 [P], how many rows are so;
    total: number of training rows, of which `times` may count a sample.
    """

    texts: list[str]
    codes: list[Codes]
    times: np.ndarray
    total: int
    languages: bool


def sklearn_parts() -> tuple:
    """(hstack, TfidfVectorizer, LinearSVC). Raises UserError where scikit-learn is not installed."""
    try:
        from scipy.sparse import hstack
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.svm import LinearSVC
    except ImportError as error:
        raise UserError(
            f"The baseline needs scikit-learn ({error}): pip install 'histocc[baseline]', or pip"
            " install scikit-learn"
        ) from None
    return hstack, TfidfVectorizer, LinearSVC


def texts_of(rows: RowSet, languages: list[str] | None = None, index: np.ndarray | None = None) -> list[str]:
    """The texts of the rows `index` (None: of all), with the names of their languages in front if given."""
    index = np.arange(len(rows)) if index is None else index
    texts = rows.strings(index)
    if languages is None:
        return texts
    return [f"{languages[number]} {text}" for number, text in zip(rows.language[index].tolist(), texts)]


def codes_of(rows: RowSet, codes: list[str], index: np.ndarray | None = None) -> list[Codes]:
    """The set of codes of the rows `index` (None: of all). codes: the names."""
    numbers = np.asarray(rows.codes if index is None else rows.codes[index])  # [B, K]
    return [frozenset(codes[number] for number in row if number >= 0) for row in numbers.tolist()]


def known_rows(data: PreparedData, seed: int = 1, most: int = MAX_ROWS) -> KnownRows:
    """The training rows of a prepared folder, or a sample of `most` of them that `seed` decides."""
    rows, index = data.train, None
    if len(rows) > most:
        index = np.sort(np.random.default_rng(seed).choice(len(rows), most, replace=False))
    languages = len(np.unique(rows.language)) > 1
    texts = texts_of(rows, data.languages if languages else None, index)
    found = Counter(zip(texts, codes_of(rows, data.codes, index))).most_common()
    times = np.array([times for _, times in found], dtype=np.int64)
    return KnownRows(
        [text for (text, _), _ in found], [codes for (_, codes), _ in found], times, len(rows), languages
    )


def look_up(known: KnownRows, texts: list[str], same_text: bool = True) -> list[Codes]:
    """The most frequent codes of the same text (case and blanks aside), else of all rows; without `same_text`
    those of all rows.
    """
    times: dict[str, Counter] = {"": Counter()}
    for text, codes, number in zip(known.texts, known.codes, known.times.tolist()):
        times[""][codes] += number
        times.setdefault(" ".join(text.casefold().split()) or " ", Counter())[codes] += number
    best = {text: found.most_common(1)[0][0] for text, found in times.items()}
    return [best.get(" ".join(text.casefold().split()) if same_text else "", best[""]) for text in texts]


def svm(
    known: KnownRows,
    texts: list[str],
    check: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[list[Codes], float]:
    """A linear support vector machine for each code: (the codes of each text, seconds of predicting).

    Rows that are alike weigh as many as they are, which has the same solution as repeating them. One
    classifier is held at a time, and each distinct text is asked for once, so memory grows with the texts
    and not with the codes. One thread: liblinear draws from one sequence of random numbers, so the answers
    are the same each time.

    Args:
        check: called before each code; an exception of it ends the work.
        say: takes a line with the time that all of it will take, once, after QUIET_SECONDS.

    Raises:
        UserError: scikit-learn is not installed.
    """
    started, (hstack, Vectorizer, LinearSVC), tables = time.perf_counter(), sklearn_parts(), []
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
    rows_of: dict[str, list[int]] = {}
    for row, codes in enumerate(known.codes):
        for code in codes:
            rows_of.setdefault(code, []).append(row)
    several = any(len(codes) > 1 for codes in known.codes)
    best, best_value = np.zeros(len(distinct), dtype=np.int64), np.full(len(distinct), -np.inf)
    further: list[set[int]] = [set() for _ in distinct]
    names, is_said = sorted(rows_of), False
    for number, code in enumerate(names):
        check()
        seconds = time.perf_counter() - started
        if number and seconds > QUIET_SECONDS and not is_said:
            minutes, is_said = seconds / number * len(names) / 60, True
            say(
                f"Baseline: {number:,} of {len(names):,} codes in {seconds:,.0f} s, about {minutes:,.0f}"
                " minutes in all"
            )
        is_code = np.zeros(len(known.texts), dtype=bool)
        is_code[rows_of[code]] = True
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


def accuracies(
    predicted: list[Codes], true: list[Codes], text_hash: np.ndarray, resamples: int, seed: int
) -> dict:
    """How many rows have exactly their codes, see `figures.measured`.

    Returns:
        {"rows", "texts": how many; "over_rows", "over_texts": [accuracy, low, high], fractions; "several":
        the same for rows with two or more codes alone, or None where there are none}.
    """
    text = np.unique(text_hash, return_inverse=True)[1]
    columns = np.zeros((len(true), len(COLUMNS)))
    columns[:, 0], columns[:, 1] = 1, [one == other for one, other in zip(predicted, true)]
    several = np.array([len(codes) > 1 for codes in true])
    parts = []
    for part in (np.ones_like(several), several):
        found = measured(columns * part[:, None], text, resamples, seed)
        over = {name: found[name].get("accuracy") for name in ("over_rows", "over_texts")}
        parts.append({"rows": found["rows"], "texts": found["texts"], **over})
    return parts[0] | {"several": parts[1] if several.any() else None}


def compared(
    trained: PreparedData,
    data: PreparedData,
    rows: RowSet,
    resamples: int,
    seed: int,
    check: Callable[[], None],
    say: Callable[[str], None],
) -> dict:
    """The figures of baselines fitted to the training rows of a run, on the rows of `data` that are
    evaluated; check, say: see `svm`. Raises UserError.
    """
    known = known_rows(trained, seed)
    say(
        f"Baseline: a linear support vector machine for each of {len(trained.codes):,} codes, on"
        f" {sum(known.times):,} training rows"
    )
    texts = texts_of(rows, data.languages if known.languages else None)
    true, found = codes_of(rows, data.codes), {}
    for name in ("svm", "look-up", "majority"):
        started, predicting = time.perf_counter(), 0.0
        if name == "svm":
            codes, predicting = svm(known, texts, check, say)
        else:
            codes = look_up(known, texts, name == "look-up")
        fitting = time.perf_counter() - started - predicting
        found[name] = accuracies(codes, true, np.asarray(rows.text_hash), resamples, seed) | {
            "fit_seconds": fitting,
            "predict_seconds": predicting,
        }
    return {
        "rows": int(known.times.sum()),
        "rows_of_training": known.total,
        "language_in_front": known.languages,
        "baselines": found,
    }
