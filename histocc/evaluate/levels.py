"""Figures of answers at levels: how often they are right, and how often their confidence expects it."""

import numpy as np

from histocc.model.confidence import calibration_error
from histocc.predict.coder import Coded, Coder


def level_figures(
    coder: Coder, coded: list[Coded], of_row: np.ndarray, true: list[list[str]], text: np.ndarray
) -> list[dict]:
    """Return {"level", "rows", "texts", "over_rows", "over_texts"} for each level whose confidence is fitted,
    the last two {"right", "expected", "expected_calibration_error"}, over the rows whose codes and answers
    have groups there.

    Args:
        coded: answers of the coder at these levels; of_row: the one of each row, int64 [N].
        true: the codes of each row.
        text: number of each row's text, int64 [N]; over texts each weighs 1, shared by its rows.
    """
    found, pairs = [], [(coded[j].codes, codes) for j, codes in zip(of_row.tolist(), true, strict=True)]
    weights = {"over_rows": np.ones(len(text)), "over_texts": 1 / np.bincount(text)[text]}
    for place, level in enumerate(coder.fitted_levels):
        agree = [coder.levels.agree(level, *pair) for pair in pairs]
        known, right = np.array([each is not None for each in agree]), np.array(agree, dtype=bool)
        conf = np.array([one.levels[place] if one.levels else 0.0 for one in coded])[of_row]
        if not known.any():
            continue
        found.append({"level": level, "rows": int(known.sum()), "texts": len(np.unique(text[known]))})
        for over, weight in weights.items():
            weight = weight * known
            found[-1][over] = {
                "right": float(np.average(right, weights=weight)),
                "expected": float(np.average(conf, weights=weight)),
                "expected_calibration_error": calibration_error(conf, right, weight),
            }
    return found
