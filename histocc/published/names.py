"""Names of the published package (histocc of Dahl, Johansen and Vedel, 2024, arXiv 2402.13604) that are not
ours, as thin calls of what is. They are imported from where that package has them: `histocc`,
`histocc.formatter`, `histocc.eval_metrics`, `histocc.prediction_assets`.
"""

import math
import string
from collections.abc import Sequence
from functools import partialmethod
from typing import Any, Literal

from histocc.formatter import BlockyFormatter, cut, hisco_key, is_missing
from histocc.predict.tables import as_table, column_of, names_of
from histocc.sample.generate import rows

PredType = Literal["flat", "greedy", "full", "greedy-topk", "embeddings"]
SystemType = Literal["hisco"] | str
BehaviorType = Literal["good", "fast"]
ModelType = Literal["flat", "seq2seq", "mix"]
ModelName = Literal["OccCANINE", "OccCANINE_s2s", "OccCANINE_s2s_mix"]
TOY_ROWS = 10_000


# ---- data sets


def load_keys():
    """The HISCO key: columns code (number of the linear output) and hisco, without the published titles."""
    return as_table({"code": list(range(len(hisco_key()))), "hisco": list(hisco_key())})


def toydata():
    """Made-up rows of registers in six languages; other rows than the published ones."""
    columns = zip(("occ1", "lang", "hisco_1", "hisco_2", "hisco_3"), zip(*rows(TOY_ROWS, seed=1)))
    return as_table({name: [cell or None for cell in column] for name, column in columns})


DATASETS = {"keys": load_keys, "toydata": toydata}


# ---- formatters


class BlockyHISCOFormatter(BlockyFormatter):
    """The formatter "hisco". Raises ValueError for other settings, which no published model has."""

    def __init__(self, max_num_codes: int = 5, map_char_idx=None, map_idx_char=None, sep_value: str = "&"):
        super().__init__("hisco")
        own = (5, self.map_char_idx, self.map_idx_char, self.sep_value)
        if (max_num_codes, map_char_idx or own[1], map_idx_char or own[2], sep_value) != own:
            raise ValueError("HISCO models write up to five codes with the tokens -3 … 9, separated by '&'")


class BlockyOCC1950Formatter(BlockyFormatter):
    """The formatter "occ1950" with one code or two. Raises ValueError for another number."""

    def __init__(self, max_num_codes: int = 2):
        super().__init__("occ1950", [f"OCC1950_{i + 1}" for i in range(max_num_codes)])
        self.max_num_codes, self.max_seq_len = max_num_codes, max_num_codes * self.block_size + 2
        self.num_classes = self.num_classes[: self.max_seq_len]


def occ1950_blocky1() -> BlockyFormatter:
    """OCC1950 with one code."""
    return BlockyOCC1950Formatter(1)


def construct_finetune_formatter(
    block_size: int, target_cols: Sequence[str], chars: Sequence[str | int] | None = None
) -> BlockyFormatter:
    """A general-purpose formatter of `chars`, digits and the hyphen by default. A code that is shorter than
    its block is filled with EOS, not with PAD as published, which lost such a code when it was read back.
    """
    tokens = [*string.digits, "-"] if chars is None else list(chars)
    columns = [target_cols] if isinstance(target_cols, str) else list(target_cols)
    return BlockyFormatter("gpf", columns, block_size, allow_short=True, chars=tokens)


# ---- evaluation

MEASURES = {
    "accuracy": lambda pred, true: float(pred == true),
    "precision": lambda pred, true: len(pred & true) / len(pred) if pred else 0.0,
    "recall": lambda pred, true: len(pred & true) / len(true) if true else 0.0,
    "f1": lambda pred, true: 2 * len(pred & true) / (len(pred) + len(true)) if pred or true else 0.0,
}


class EvalEngine:
    """Compares predicted with true codes, row by row: `accuracy`, `precision`, `recall` and `f1`, each called
    with return_per_obs for a number per row instead of their mean. `python -m histocc.evaluate` says more.

    A row is right if its set of codes is the true set; the published accuracy gives a row with one of two
    codes right a half. F1 is that of each row. If the truth has no such columns everything is NaN.

    Args:
        model: an OccCANINE, whose formatter says how codes are written: 41025 and 41025.0 are one, a lost
            leading zero comes back.
        ground_truth, predicitons: (spelled so in the published package) DataFrames, dicts of columns or lists
            of dicts with the same rows.
        pred_col: beginning of the names of the columns that hold codes in both.
        digits: compares the first digits alone.

    Raises ValueError for tables without columns, or of different lengths.
    """

    per_row = False

    def __init__(self, model, ground_truth, predicitons, pred_col: str, digits: int | None = None):
        self.formatter, self.pred_col, self.digits = model.formatter, pred_col, digits
        self.codes = frozenset(getattr(model, "codes", ()))
        self.update_data(ground_truth, predicitons)

    def update_data(self, ground_truth: Any, predicitons: Any) -> None:
        """Other rows of the same columns."""
        self.true, self.pred = self.sets("ground truth", ground_truth), self.sets("predictions", predicitons)
        if self.true is not None and self.pred is None and len(predicitons):
            raise ValueError(
                f"predictions: no column begins with {self.pred_col!r}, as in the ground truth; they have "
                f"{', '.join(map(repr, names_of(predicitons))) or 'none'}"
            )
        if self.true is not None and len(self.true) != len(self.pred or []):
            raise ValueError(f"{len(self.true)} rows of truth, but {len(self.pred or [])} of predictions")

    def sets(self, what: str, table: Any) -> list[set[str]] | None:
        """The codes of each row, None without such columns; what: the table, in messages."""
        names = [name for name in names_of(table) if name.startswith(self.pred_col)]
        columns = [column_of(what, table, name) for name in names]
        if len(set(map(len, columns))) > 1:
            raise ValueError(f"{what}: has columns of different lengths")
        return (
            [{code for code in map(self.code, cells) if code} for cells in zip(*columns)] if names else None
        )

    def code(self, cell: Any) -> str | None:
        """A cell as a code, cut to `digits`; or None."""
        if is_missing(cell) or str(cell).strip() in ("", "nan", "None", "<NA>"):
            return None
        code = self.formatter.repair(
            str(int(cell)) if isinstance(cell, float) and cell == int(cell) else str(cell)
        )[0]
        filled = code.zfill(self.formatter.block_size)  # a zero is lost in a table of numbers
        code = filled if code not in self.codes and filled in self.codes else code
        return code if self.digits is None else cut(code, self.digits, self.formatter.within_block_sep)

    def _measured(self, measure: str, return_per_obs: bool | None = None) -> float | list[float]:
        if self.true is None:
            values = [math.nan] * len(self.pred or [])
        else:
            values = [MEASURES[measure](pred, true) for pred, true in zip(self.pred or [], self.true)]
        if self.per_row if return_per_obs is None else return_per_obs:
            return values
        return sum(values) / len(values) if values else math.nan

    accuracy, precision = partialmethod(_measured, "accuracy"), partialmethod(_measured, "precision")
    recall, f1 = partialmethod(_measured, "recall"), partialmethod(_measured, "f1")


class TopKEvalEngine(EvalEngine):
    """The same for `predict(…, prediction_type="greedy-topk")`, which has several rows per text: each is
    compared, by itself, with the true codes of the row of the same `group_col`, and has a value of its own
    unless return_per_obs is False. Raises ValueError if a group has no truth or several rows of it.
    """

    per_row = True

    def __init__(
        self,
        model,
        ground_truth,
        predicitons,
        pred_col: str,
        group_col: str = "rowid",
        digits: int | None = None,
    ):
        self.group_col = group_col
        self.k = int(max(column_of("predictions", predicitons, "top-k-pos"), default=-1)) + 1
        super().__init__(model, ground_truth, predicitons, pred_col, digits)

    def update_data(self, ground_truth: Any, predicitons: Any) -> None:
        groups = column_of("ground truth", ground_truth, self.group_col)
        wanted = column_of("predictions", predicitons, self.group_col)
        if len(set(groups)) < len(groups) or not set(wanted) <= set(groups):
            raise ValueError(f"column {self.group_col!r}: each value must have one row of the ground truth")
        row = {group: i for i, group in enumerate(groups)}
        names = [name for name in names_of(ground_truth) if name.startswith(self.pred_col)]
        truth = {name: column_of("ground truth", ground_truth, name) for name in names}
        shown = {name: [cells[row[group]] for group in wanted] for name, cells in truth.items()}
        super().update_data(shown, predicitons)
