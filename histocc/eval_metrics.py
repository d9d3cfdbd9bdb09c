"""The evaluation engine of the published package (histocc of Dahl, Johansen and Vedel, 2024, arXiv
2402.13604). `histocc evaluate` reports more.
"""

from functools import partialmethod
from typing import Any

from histocc.data.rows import code_of_cell
from histocc.formatter import cut, is_missing
from histocc.occ_canine import columns_of_frame

MEASURES = {
    "accuracy": lambda pred, true: float(pred == true),
    "precision": lambda pred, true: len(pred & true) / max(1, len(pred)),
    "recall": lambda pred, true: len(pred & true) / max(1, len(true)),
    "f1": lambda pred, true: 2 * len(pred & true) / max(1, len(pred) + len(true)),
}


class EvalEngine:
    """The comparison of predicted with true codes, row by row: `accuracy`, `precision`, `recall` and `f1`.
    Each returns the mean, or with return_per_obs a number per row. A row is right if its set of codes is.
    Raises ValueError for tables without such columns or of different lengths.

    Args:
        model: an OccCANINE. Its formatter reads the codes, so that 41025 and 41025.0 are the same.
        ground_truth, predicitons: (published spelling) DataFrames, dicts of columns or lists
            of dicts with the same rows.
        pred_col: prefix of the code columns in both.
        digits: number of leading digits to compare.
    """

    def __init__(self, model, ground_truth, predicitons, pred_col: str, digits: int | None = None):
        self.formatter, self.codes = model.formatter, frozenset(getattr(model, "codes", ()))
        self.pred_col, self.digits = pred_col, digits
        self.true = self._sets("ground truth", ground_truth)
        self.pred = self._sets("predictions", predicitons)
        if len(self.true) != len(self.pred):
            raise ValueError(f"rows of truth: {len(self.true)}, but of predictions: {len(self.pred)}")

    def _sets(self, what: str, table: Any) -> list[set[str]]:
        """Return the codes of each row. what: the table's name in messages."""
        columns = [cells for name, cells in columns_of_frame(table).items() if name.startswith(self.pred_col)]
        if len(set(map(len, columns))) != 1:
            raise ValueError(f"{what}: needs columns of the same length that begin with {self.pred_col!r}")
        return [set(filter(None, map(self._code, cells))) for cells in zip(*columns)]

    def _code(self, cell: Any) -> str:
        """Return a cell as a code, cut to `digits`, or "" for an empty cell."""
        if is_missing(cell) or str(cell).strip() in ("", "nan", "None", "<NA>"):
            return ""
        text = str(int(cell)) if isinstance(cell, float) and cell == int(cell) else str(cell)
        code = code_of_cell(text, self.formatter, self.codes)  # tables of numbers lose leading zeros
        return code if self.digits is None else cut(code, self.digits, self.formatter.within_block_sep)

    def _measured(self, measure: str, return_per_obs: bool = False) -> float | list[float]:
        values = [MEASURES[measure](pred, true) for pred, true in zip(self.pred, self.true)]
        return values if return_per_obs else sum(values) / max(1, len(values))

    accuracy, precision = partialmethod(_measured, "accuracy"), partialmethod(_measured, "precision")
    recall, f1 = partialmethod(_measured, "recall"), partialmethod(_measured, "f1")
