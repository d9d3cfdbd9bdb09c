"""The figure of a model: the share of unseen texts that get exactly their codes. It is measured on the test
part of its data (`histocc.evaluate`), otherwise on validation texts, otherwise on training texts that are
each left out of the fit in turn. Every screen and page shows this figure, in these words.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from histocc.runtime.files import OwnFiles, atomic_write

ENTRY = "figure"  # its entry in checkpoints, report.json and a run's STATUS
STATUS = "status.json"
TEST, VALIDATION, LEFT_OUT = "test texts", "validation texts", "training texts, each left out of the fit"
OTHER = "texts of other data"
NOT_EVALUATED = "It has not been evaluated."
Z = 1.959964  # for 95 % intervals
MAX_GROUPS, OTHERS = 10, "all others"  # most groups in a table or plot, and the name of the last one


def percent(share: float, sign: str = " %") -> str:
    """Return a share in the form of all screens and pages: "65.5 %"."""
    return f"{100 * share:.1f}{sign}"


def wilson(share: float, number: float) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson, 1927, Probable inference)."""
    middle = share + Z**2 / (2 * number)
    reach = Z * math.sqrt(share * (1 - share) / number + (Z / (2 * number)) ** 2)
    of = 1 + Z**2 / number
    return max(0.0, (middle - reach) / of), min(1.0, (middle + reach) / of)


def is_right(answer: Sequence[str], true: Collection[str], ranked: bool = False) -> bool:
    """Return whether an answer is right: it has exactly the true codes, in any order. A ranking is right
    if its best code is one of them.
    """
    return {*answer} == {*true} or ranked and any(code in true for code in answer[:1])


class Figure(NamedTuple):
    """The figure. In a checkpoint and in report.json it is a dict of plain types."""

    share: float  # of right distinct texts, each counted with its share of right rows
    texts: int  # number of distinct texts
    share_of_rows: float
    rows: int  # number of rows with these texts
    source: str  # TEST, VALIDATION, LEFT_OUT or OTHER
    decoder: str  # the decoder that gave the answers
    unsure: str = ""  # what may have seen the texts: "model", "prior" or "" (nothing)

    @classmethod
    def of(cls, state: dict[str, Any], folder: str | None = None) -> "Figure | None":
        """Return the figure of a checkpoint: that of the test part, if evaluate kept one of this step in the
        folder, otherwise the checkpoint's own, or None. Raises TypeError for an invalid one.
        """
        if folder is not None and (of_folder := cls.of_run(folder, state.get("step"))):
            return of_folder
        held = state.get(ENTRY)
        return cls(**held) if held else None

    @classmethod
    def measured(
        cls,
        right: np.ndarray,
        text: np.ndarray,
        source: str,
        decoder: str,
        unsure: str = "",
        times: np.ndarray | None = None,
    ) -> "Figure | None":
        """Return the figure of answers to rows, or None without rows.

        Args:
            right: whether each answer is right (bool [N]), or its right share (float [N]).
            text: a number for each distinct text, [N].
            times: number of all rows with the row's text, if only some rows are given, int64 [N].
        """
        _, number, count = np.unique(text, return_inverse=True, return_counts=True)
        if not len(count):
            return None
        count = count[number.reshape(-1)]
        of_text, of_rows = 1 / count, (count if times is None else times) / count
        share, of_row = (float(weight @ right / weight.sum()) for weight in (of_text, of_rows))
        return cls(share, round(of_text.sum()), of_row, round(of_rows.sum()), source, decoder, unsure)

    @classmethod
    def of_run(cls, folder: str, step: int | None = None) -> "Figure | None":
        """Return the figure of the run in a folder, or None if there is none or it is of another step."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            with open(os.path.join(folder, STATUS), encoding="utf-8") as file:
                held = json.load(file)[ENTRY]
            if held.pop("step") == step or step is None:
                return cls(**held)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the share of texts."""
        return wilson(self.share, self.texts)

    def __str__(self) -> str:
        low, high = (percent(bound, "") for bound in self.interval)
        unseen = "" if self.unsure == "model" else " that the model has not seen"
        more, its = [f"95 % interval {low} to {high}"], "their" if self.texts != 1 else "its"
        if self.rows > self.texts:
            more.append(f"{percent(self.share_of_rows)} of {its} {self.rows:,} rows")
        more.append(self.source)
        if self.unsure:
            more.append(f"whether the {self.unsure} has seen them is not known")
        texts = f"{percent(self.share)} of {self.texts:,} text{'s' * (self.texts != 1)}{unseen}"
        return f"{texts} got exactly {its} codes ({'; '.join(more)})"


def may_have_seen(state: dict[str, Any]) -> str:
    """Return "model", "prior" or "": which may have seen the texts. Published weights do not name theirs."""
    of_both = {"model": state, "prior": state.get("prior") or {}}
    return next((name for name, of in of_both.items() if {"source", "origin"} & {*of}), "")


def keep(folder: str, figure: Figure, step: int) -> None:
    """Write the figure of a step's checkpoint into its run folder, if there is one. Rank 0 only."""
    own = OwnFiles(folder)
    path = own.path(STATUS)
    with contextlib.suppress(OSError, ValueError):
        if own.holds(path):
            with open(path, encoding="utf-8") as file:
                status = {**json.load(file), ENTRY: {**figure._asdict(), "step": step}}
            with atomic_write(path, durable=False) as target:
                target.write(json.dumps(status).encode())


def largest(groups: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return a report's groups of rows with the most texts, and their figures. OTHERS come last."""
    order = sorted(groups.items(), key=lambda group: (group[0] == OTHERS, -group[1]["texts"]))
    return order[:MAX_GROUPS]


def names_of(paths: list[str]) -> list[str]:
    """Return the name of each model: the last folder of its path, unless another model has the same."""
    names = [os.path.basename(re.sub(r"[/\\](best|last)\.bin$", "", os.path.abspath(x))) for x in paths]
    return names if len({*names}) == len({*paths}) else paths
