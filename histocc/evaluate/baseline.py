"""The baseline of a model: a linear support vector machine on n-grams (extra `baseline`: scikit-learn).

Features are TF-IDF of n-grams of 2 to 5 characters (with a space at both ends) and of 1 and 2 words, with the
logarithm of the counts, concatenated and scaled to length 1, for each column of texts. Each code has its own
linear classifier, LinearSVC with C=1, against all others. A text gets the code with the highest decision
value and, if some training row has several codes, every other code with a value above 0. If the training rows
have several languages, the language is put before the text.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from histocc.data.arrays import PreparedData, RowSet
from histocc.text import COLUMN_SEPARATOR

BASELINE_ROWS = 500_000  # training rows. A sample is drawn if there are more


def texts_and_codes(
    rows: RowSet, data: PreparedData, index: np.ndarray, with_language: bool
) -> tuple[list[str], list[frozenset[str]]]:
    """Return the texts and codes of some rows. The texts begin with their languages if asked for."""
    texts, numbers = rows.strings(index), np.asarray(rows.codes[index]).tolist()
    if with_language:
        names = [data.languages[number] for number in rows.language[index].tolist()]
        texts = [f"{name} {text}" for name, text in zip(names, texts)]
    return texts, [frozenset(data.codes[number] for number in row if number >= 0) for row in numbers]


def _cells(text: str) -> list[str]:
    """Return the texts of a text's columns, in lower case."""
    return [cell.strip() for cell in text.lower().split(COLUMN_SEPARATOR)]


def svm(
    known_texts: list[str],
    known_codes: list[frozenset[str]],
    texts: list[str],
    check: Callable[[], None] = lambda: None,
) -> list[frozenset[str]]:
    """Return the codes of each text, learned from training rows (known). Equal training rows become one with
    their total weight, which has the same solution. Only one classifier is held at a time, so memory grows
    with the texts but not with the codes. check: called before each code. Its exception ends the work.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline, make_union
    from sklearn.preprocessing import Normalizer
    from sklearn.svm import LinearSVC

    def features(column: int):
        same: dict[str, Any] = {"sublinear_tf": True, "norm": None}
        same["preprocessor"] = lambda text: f" {''.join(_cells(text)[column : column + 1])} "
        chars = TfidfVectorizer(analyzer="char", ngram_range=(2, 5), **same)
        words = TfidfVectorizer(token_pattern=r"\S+", ngram_range=(1, 2), **same)
        return make_pipeline(make_union(chars, words), Normalizer())

    filled = {column for text in known_texts for column, cell in enumerate(_cells(text)) if cell}
    table = make_union(*map(features, sorted(filled))).fit(known_texts)
    counts = Counter(zip(known_texts, known_codes)).most_common()
    known_texts, known_codes = map(list, zip(*(row for row, _ in counts)))
    times, distinct = np.array([count for _, count in counts]), list(dict.fromkeys(texts))
    rows, asked = table.transform(known_texts), table.transform(distinct)  # [P, F], [D, F]
    several = any(len(codes) > 1 for codes in known_codes)
    best, best_value = np.zeros(len(distinct), dtype=np.int64), np.full(len(distinct), -np.inf)
    further: list[set[int]] = [set() for _ in distinct]
    names = sorted({code for codes in known_codes for code in codes})
    for number, name in enumerate(names):
        check()
        is_code, values = np.array([name in codes for codes in known_codes]), np.full(len(distinct), np.inf)
        if not is_code.all():
            model = LinearSVC(C=1.0, random_state=0).fit(rows, is_code, times)
            values = model.decision_function(asked)
        better = values > best_value
        best[better], best_value[better] = number, values[better]
        for text in np.flatnonzero(values > 0).tolist() if several else ():
            further[text].add(number)
    sets = [frozenset(names[i] for i in {one, *more}) for one, more in zip(best.tolist(), further)]
    return list(map(dict(zip(distinct, sets)).__getitem__, texts))


def compared(
    trained: PreparedData, data: PreparedData, rows: RowSet, seed: int, check: Callable
) -> tuple[dict, list[frozenset[str]]]:
    """Fit the machine to the training rows of a run. Return {"rows", "rows_of_training", "seconds"} and its
    answers to the rows of `data` to evaluate. seed: for the sample of training rows.
    """
    started, index = time.perf_counter(), np.arange(len(trained.train))
    if len(index) > BASELINE_ROWS:
        index = np.sort(np.random.default_rng(seed).choice(len(index), BASELINE_ROWS, replace=False))
    with_language = len(np.unique(trained.train.language)) > 1
    known = texts_and_codes(trained.train, trained, index, with_language)
    answers = svm(*known, texts_and_codes(rows, data, np.arange(len(rows)), with_language)[0], check)
    facts = {"rows": len(index), "rows_of_training": len(trained.train)}
    return facts | {"seconds": time.perf_counter() - started}, answers
