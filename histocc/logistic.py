"""Logistic regression, which turns scores into probabilities: the confidence of a model, and the guesses on
the review page.
"""

from collections.abc import Sequence

import numpy as np

MAX_OFF = 0.02  # share of the rows, beside one row, by which the sums of probabilities and hits may differ


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -30, 30)))


def fit_logistic(
    x: np.ndarray, right: np.ndarray, weight: np.ndarray, mean: Sequence[float], deviation: Sequence[float]
) -> np.ndarray | None:
    """Return the likeliest weights, float64 [K], of features in the log-odds of being right. Newton's steps
    are halved while they would increase the loss. One feature is 1 in all rows.

    Args:
        x: features [N, K].
        right: outcomes, bool [N].
        weight: how much each row counts, float [N].
        mean, deviation: those of the weights' normal prior, K each.

    Returns:
        None if the mean probability of these rows is not their share of hits: the map must not be used.
    """
    center, precision = np.array(mean), np.array(deviation) ** -2.0
    at = center.copy()

    def loss(at: np.ndarray) -> float:
        misses = np.logaddexp(0, np.where(right, -1, 1) * (x @ at))
        return float(weight @ misses + (precision * (at - center) ** 2).sum() / 2)

    for _ in range(100):
        p = logistic(x @ at)
        slope = x.T @ (weight * (p - right)) + precision * (at - center)
        step = np.linalg.solve((x.T * (weight * p * (1 - p))) @ x + np.diag(precision), slope)
        while loss(at - step) > loss(at) and np.abs(step).max() > 1e-12:
            step /= 2
        at -= step
        if np.abs(step).max() < 1e-10:
            break
    off = abs(weight @ (logistic(x @ at) - right))
    return at if off <= MAX_OFF * weight.sum() + 1 else None  # not a number is off, too
