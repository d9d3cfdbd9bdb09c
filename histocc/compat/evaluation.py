"""Accuracy, precision, recall and F1 of predicted tables by the published calls. `python -m histocc.evaluate`
says more, with intervals."""

import math
import numbers
from collections.abc import Hashable
from typing import Any

from histocc.formatter import cut
from histocc.predict.tables import column_of, is_count, names_of, require
from histocc.runtime.config import shown

MEASURES = {
    "accuracy": lambda pred, true: float(pred == true),
    "precision": lambda pred, true: len(pred & true) / len(pred) if pred else 0.0,
    "recall": lambda pred, true: len(pred & true) / len(true) if true else 0.0,
    "f1": lambda pred, true: 2 * len(pred & true) / (len(pred) + len(true)) if pred or true else 0.0,
}


class EvalEngine:
    """Compares predicted with true codes, row by row.

    model: an OccCANINE, whose formatter says how codes are written (41025 and 41025.0 are one; a lost leading
    zero comes back). ground_truth, predicitons (spelled so in the published package): DataFrames or lists of
    dicts with the same rows. pred_col: beginning of the names of the columns that hold codes in both. digits:
    compare the first digits alone.

    A row is right if its set of codes is the true set; the published accuracy gives a row with one of two
    codes right a half. F1 is that of each row. Where the truth has no such column everything is NaN. Raises
    ValueError for arguments of another kind, predictions without such a column where the truth has one, and
    tables of different lengths.
    """

    def __init__(
        self, model: Any, ground_truth: Any, predicitons: Any, pred_col: str, digits: int | None = None
    ):
        require(hasattr(model, "formatter"), "model", model, "an OccCANINE")
        require(
            isinstance(pred_col, str) and pred_col != "", "pred_col", pred_col, "how names of columns begin"
        )
        require(digits is None or is_count(digits), "digits", digits, "None or a number of digits")
        self.formatter, self.pred_col, self.digits = model.formatter, pred_col, digits
        self.codes = frozenset(getattr(model, "codes", ()))
        self.update_data(ground_truth, predicitons)

    def update_data(self, ground_truth: Any, predicitons: Any) -> None:
        """Other rows of the same columns."""
        self.check(ground_truth, predicitons)
        self.true, self.pred = self.sets("ground truth", ground_truth), self.sets("predictions", predicitons)
        if not self.no_label and len(self.true) != len(self.pred):
            raise ValueError(f"{len(self.true)} rows of truth, but {len(self.pred)} of predictions")

    def check(self, ground_truth: Any, predicitons: Any) -> None:
        self.no_label = not self.columns(ground_truth)
        if not self.no_label and not self.columns(predicitons) and len(predicitons):
            raise ValueError(
                f"predictions: no column begins with {self.pred_col!r}, as in the ground truth; they have "
                f"{', '.join(map(repr, names_of(predicitons))) or 'none'}"
            )

    def columns(self, table: Any) -> list[str]:
        return [name for name in names_of(table) if name.startswith(self.pred_col)]

    def sets(self, what: str, table: Any) -> list[set[str]]:
        """The codes of each row; what: the table, in messages."""
        columns = [column_of(what, table, name) for name in self.columns(table) or names_of(table)[:1]]
        if len(set(map(len, columns))) > 1:
            raise ValueError(f"{what}: has columns of different lengths")
        if not self.columns(table):
            return [set() for _ in columns[0]] if columns else []
        return [{code for code in map(self.code, cells) if code} for cells in zip(*columns)]

    def code(self, cell: Any) -> str | None:
        """A cell as a code, cut to `digits`; or None."""
        if (
            cell is None
            or isinstance(cell, float)
            and math.isnan(cell)
            or not str(cell).strip()
            or str(cell) in ("nan", "None", "<NA>")
        ):
            return None
        code = str(int(cell)) if isinstance(cell, float) and cell == int(cell) else str(cell)
        code = self.formatter.repair(code)[0]
        if code not in self.codes and code.zfill(self.formatter.block_size) in self.codes:
            code = code.zfill(self.formatter.block_size)  # a zero that a table has taken for a number
        return code if self.digits is None else cut(code, self.digits, self.formatter.within_block_sep)

    def measured(self, measure: str, return_per_obs: bool) -> float | list[float]:
        if self.no_label:
            return [math.nan] * len(self.pred) if return_per_obs else math.nan
        values = [MEASURES[measure](pred, true) for pred, true in zip(self.pred, self.true)]
        return values if return_per_obs else sum(values) / len(values) if values else math.nan

    def accuracy(self, return_per_obs: bool = False) -> float | list[float]:
        """Share of rows whose set of codes is right, or 0 and 1 per row."""
        return self.measured("accuracy", return_per_obs)

    def precision(self, return_per_obs: bool = False) -> float | list[float]:
        """Mean over rows of the share of predicted codes that are true."""
        return self.measured("precision", return_per_obs)

    def recall(self, return_per_obs: bool = False) -> float | list[float]:
        """Mean over rows of the share of true codes that are predicted."""
        return self.measured("recall", return_per_obs)

    def f1(self, return_per_obs: bool = False) -> float | list[float]:
        """Mean over rows of 2 tp / (2 tp + fp + fn)."""
        return self.measured("f1", return_per_obs)


class TopKEvalEngine(EvalEngine):
    """The same for `predict(…, prediction_type="greedy-topk")`, which has several rows per text: each is
    compared, by itself, with the true codes of the row of the same `group_col`. One value per row of the
    predictions, unless return_per_obs is False.

    Raises ValueError where a column is missing, or a group has no truth or more than one.
    """

    def __init__(
        self,
        model: Any,
        ground_truth: Any,
        predicitons: Any,
        pred_col: str,
        group_col: str = "rowid",
        digits: int | None = None,
    ):
        self.group_col = group_col
        positions = column_of("predictions", predicitons, "top-k-pos")
        if not all(isinstance(position, numbers.Real) and float(position) >= 0 for position in positions):
            raise ValueError("predictions: column 'top-k-pos' holds no positions from 0")
        self.k = int(max(positions, default=-1)) + 1
        super().__init__(model, ground_truth, predicitons, pred_col, digits)

    def update_data(self, ground_truth: Any, predicitons: Any) -> None:
        self.check(ground_truth, predicitons)
        self.pred = self.sets("predictions", predicitons)
        groups = column_of("ground truth", ground_truth, self.group_col)
        wanted = column_of("predictions", predicitons, self.group_col)
        odd = next((group for group in [*groups, *wanted] if not isinstance(group, Hashable)), None)
        if odd is not None:
            raise ValueError(f"column {self.group_col!r}: found {shown(odd)}, expected a number or a text")
        truth = dict(zip(groups, self.sets("ground truth", ground_truth)))
        unknown = next((group for group in wanted if group not in truth), None)
        if len(truth) < len(groups) or unknown is not None:
            raise ValueError(
                f"column {self.group_col!r}: "
                + (
                    f"{unknown!r} has no true codes"
                    if len(truth) == len(groups)
                    else "a value occurs in several rows of the ground truth"
                )
            )
        self.true = [truth[group] for group in wanted]

    def accuracy(self, return_per_obs: bool = True) -> float | list[float]:
        return super().accuracy(return_per_obs)

    def precision(self, return_per_obs: bool = True) -> float | list[float]:
        return super().precision(return_per_obs)

    def recall(self, return_per_obs: bool = True) -> float | list[float]:
        return super().recall(return_per_obs)

    def f1(self, return_per_obs: bool = True) -> float | list[float]:
        return super().f1(return_per_obs)
