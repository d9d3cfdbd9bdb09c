"""Logistic regression, which turns scores into probabilities, for the confidence of models and the guesses on
the review page.
"""

from collections.abc import Sequence

import numpy as np

MAX_OFF = 0.02  # share of the rows (plus one row) by which the sums of probabilities and hits may differ


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -30, 30)))


def fit_logistic(
    x: np.ndarray, right: np.ndarray, weight: np.ndarray, mean: Sequence[float], deviation: Sequence[float]
) -> np.ndarray:
    """Return the likeliest weights, float64 [K], of features in the log-odds of being right. If the
    probabilities do not sum to the number of hits, print a note and return `mean`.

    Args:
        x, right: features [N, K], one of them 1 in all rows, and outcomes, bool [N].
        weight: how much each row counts, float [N].
        mean, deviation: parameters of the weights' normal prior, K each.
    """
    precision = np.array(deviation) ** -2.0
    at = np.array(mean)

    def loss(at: np.ndarray) -> float:
        misses = np.logaddexp(0, np.where(right, -1, 1) * (x @ at))
        return float(weight @ misses + (precision * (at - mean) ** 2).sum() / 2)

    for _ in range(100 if np.isfinite(x).all() else 0):
        p = logistic(x @ at)
        slope = x.T @ (weight * (p - right)) + precision * (at - mean)
        step = np.linalg.solve((x.T * (weight * p * (1 - p))) @ x + np.diag(precision), slope)
        while loss(at - step) > loss(at) and np.abs(step).max() > 1e-12:  # Newton's step may be too long
            step /= 2
        at -= step
        if np.abs(step).max() < 1e-10:
            break
    found, hits = weight @ logistic(x @ at), weight @ right
    if abs(found - hits) <= MAX_OFF * weight.sum() + 1:  # False if it is not a number
        return at
    print(f"Note: fitted probabilities are not used (hits: {hits:.0f}, expected: {found:.0f})", flush=True)
    return np.array(mean)
