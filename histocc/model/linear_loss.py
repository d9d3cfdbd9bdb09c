"""Losses of the linear decoder, one value for each row."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN, ROWS = "mean", "rows"
LINEAR_LOSSES = (MEAN, ROWS)


class LinearLoss(nn.Module):
    """How far the logits [B, C] of the linear decoder are from the codes of each row, float 0/1 [B, C] →
    [B].

    kind: "mean", the binary cross entropy averaged over the C classes, as published (Dahl, Johansen,
    Vedel, 2024, arXiv 2402.13604): a row of hundreds of classes that are all rare moves little. "rows":
    the binary cross entropies of a row added up, which makes each output a probability, and the cross
    entropy of the softmax towards the row's codes, in equal parts, which ranks them. Raises ValueError
    for another kind.
    """

    per_row = True

    def __init__(self, kind: str = MEAN):
        super().__init__()
        if kind not in LINEAR_LOSSES:
            raise ValueError(f"linear loss {kind!r} is not one of {', '.join(LINEAR_LOSSES)}")
        self.kind = kind

    def forward(self, logits: Tensor, target: Tensor, share: Tensor | None = None) -> Tensor:
        """target: 0…1, probability of each code. share: of each code in the softmax, sums to 1 (default: even
        among the codes of `target`).
        """
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        target = target.to(logits.dtype)
        single = F.binary_cross_entropy_with_logits(logits, target, reduction="none")  # [B, C]
        if self.kind == MEAN:
            return single.mean(1)
        if share is None:
            share = target / target.sum(1, keepdim=True).clamp(min=1)
        return single.sum(1) - (share * logits.log_softmax(1)).sum(1)
