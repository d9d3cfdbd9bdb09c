"""Accuracy, precision, recall and F1 of predicted tables by the published calls. `python -m histocc.evaluate`
says more, with intervals."""

import math
from typing import Any

from histocc.report_metrics import cut

MEASURES = {
    "accuracy": lambda pred, true: float(pred == true),
    "precision": lambda pred, true: len(pred & true) / len(pred) if pred else 0.0,
    "recall": lambda pred, true: len(pred & true) / len(true) if true else 0.0,
    "f1": lambda pred, true: 2 * len(pred & true) / (len(pred) + len(true)) if pred or true else 0.0,
}


def column_names(table: Any) -> list[str]:
    return [str(name) for name in (table.columns if hasattr(table, "columns") else table[0] if table else [])]


def column(table: Any, name: str) -> list:
    return list(table[name]) if hasattr(table, "columns") else [row[name] for row in table]


class EvalEngine:
    """Compares predicted with true codes, row by row.

    model: an OccCANINE, whose formatter says how codes are written (41025 and 41025.0 are one; a lost leading
    zero comes back). ground_truth, predicitons (spelled so in the published package): DataFrames or lists of
    dicts with the same rows. pred_col: beginning of the names of the columns that hold codes in both. digits:
    compare the first digits alone.

    A row is right if its set of codes is the true set; the published accuracy gives a row with one of two
    codes right a half. F1 is that of each row. Where the truth has no such column everything is NaN. Raises
    ValueError for tables of different lengths.
    """

    def __init__(
        self, model: Any, ground_truth: Any, predicitons: Any, pred_col: str, digits: int | None = None
    ):
        self.formatter, self.pred_col, self.digits = model.formatter, pred_col, digits
        self.codes = frozenset(getattr(model, "codes", ()))
        self.update_data(ground_truth, predicitons)

    def update_data(self, ground_truth: Any, predicitons: Any) -> None:
        """Other rows of the same columns."""
        self.no_label = not any(name.startswith(self.pred_col) for name in column_names(ground_truth))
        self.true, self.pred = self.sets(ground_truth), self.sets(predicitons)
        if not self.no_label and len(self.true) != len(self.pred):
            raise ValueError(f"{len(self.true)} rows of truth, but {len(self.pred)} of predictions")

    def sets(self, table: Any) -> list[set[str]]:
        """The codes of each row."""
        columns = [column(table, name) for name in column_names(table) if name.startswith(self.pred_col)]
        return (
            [{code for code in map(self.code, cells) if code} for cells in zip(*columns)]
            if columns
            else [set()] * len(table)
        )

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
        for name, table, needed in (
            ("predictions", predicitons, (group_col, "top-k-pos")),
            ("ground truth", ground_truth, (group_col,)),
        ):
            missing = [column for column in needed if column not in column_names(table)]
            if missing:
                raise ValueError(f"the {name} need a column {missing[0]!r}")
        self.group_col = group_col
        self.k = max(column(predicitons, "top-k-pos"), default=-1) + 1
        super().__init__(model, ground_truth, predicitons, pred_col, digits)

    def update_data(self, ground_truth: Any, predicitons: Any) -> None:
        self.no_label = not any(name.startswith(self.pred_col) for name in column_names(ground_truth))
        self.pred, groups = self.sets(predicitons), column(ground_truth, self.group_col)
        truth = dict(zip(groups, self.sets(ground_truth)))
        wanted = column(predicitons, self.group_col)
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
