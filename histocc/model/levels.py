"""Answers at levels of a classification: codes cut to their first digits or parts, or the classes of HISCO
codes.

At a level, an answer is the set of the groups of its codes. The probability that exactly these are right is
computed as for codes (`probability_of_set`). A group's probability is the sum over its codes, at most 1. Each
level has its own map to how often such answers are right, `map_of(level)` in `histocc.model.confidence`.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from histocc.formatter import (
    CLASSES,
    DEEPEST,
    NEVER_SHORT,
    SEP_VALUE,
    BlockyFormatter,
    cut,
    hisco_classes,
    levels_of,
)
from histocc.runtime.errors import UserError

ALMOST_1 = 1 - 1e-6


def map_of(level: str) -> str:
    return f"level {level}"


class Levels:
    """The levels of a model's codes, by name: numbers of digits or parts, the whole code first, and for
    HISCO also the names of CLASSES.
    """

    def __init__(self, codes: Sequence[str], formatter: BlockyFormatter):
        self.codes = codes
        self.separator, numbers = levels_of(codes, formatter.within_block_sep, [])
        self.numbers = [str(number) for number in reversed(numbers)]
        self.whole = self.numbers[0]
        self.names = [*self.numbers, *(CLASSES if formatter.kind == "hisco" else ())]
        self._groups: dict[str, Tensor] = {}

    def asked(self, level: str) -> list[str]:
        """Return the levels to try for an answer, the deepest first. Raises UserError."""
        if level == DEEPEST and len(self.numbers) > 1:
            return self.numbers
        if level not in self.names or self.names == [self.whole]:
            unit = f"parts between {self.separator!r}" if self.separator else "digits"
            known = f"has {', '.join([*self.names, DEEPEST])} (numbers: {unit})"
            known = "has no levels" if self.names == [self.whole] else known
            raise UserError(f"--level {level}: the classification of this model {known}")
        return [level]

    def group(self, code: str, level: str) -> str:
        """Return the group of a code, or "" if it has none. −1, −2 and −3 are separate groups."""
        if level not in CLASSES:
            return cut(code, int(level), self.separator)
        return code if code in NEVER_SHORT else hisco_classes()[level].get(code, "")

    def agree(self, level: str, codes: Iterable[str], others: Iterable[str]) -> bool | None:
        """Return whether two answers are the same at a level, None if a code has no group there."""
        one, other = ({self.group(code, level) for code in some} for some in (codes, others))
        return None if "" in one | other else one == other

    def probability(self, level: str, logits: Tensor, best: Tensor, counts: Tensor, conf: Tensor) -> Tensor:
        """Return the probability [B] that exactly the groups of the first `counts` [B] of the codes `best`
        [B, K] are right, from the linear decoder's outputs [B, N], but at least the codes' own `conf` [B].
        """
        if level not in self._groups:
            names = [self.group(code, level) for code in self.codes]
            numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
            self._groups[level] = torch.tensor([numbers[name] for name in names])
        group = self._groups[level].to(logits.device)
        sums = logits.new_zeros(len(logits), int(group.max()) + 1)
        answered = torch.zeros_like(sums)
        sums = sums.index_add(1, group, logits.sigmoid()).clamp(max=ALMOST_1)
        on = torch.arange(best.shape[1], device=best.device) < counts[:, None]
        answered = answered.scatter_add(1, group[best], on.to(sums)) > 0
        found = torch.where(answered, sums, 1 - sums).log().sum(1).exp()
        return torch.maximum(found, conf.to(found))

    def answer(
        self, codes: Sequence[str], levels: Sequence[str], confs: Sequence[float], least: float
    ) -> tuple[str, str, float] | None:
        """Return (groups joined by &, level, conf) of the first level with a conf of at least `least` and a
        group for every code.
        """
        for level, conf in zip(levels, confs):
            groups = dict.fromkeys(self.group(code, level) for code in codes)
            if groups and "" not in groups and conf >= least:
                return SEP_VALUE.join(groups), level, conf
        return None
