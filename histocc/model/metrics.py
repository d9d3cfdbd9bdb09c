"""Counts behind the accuracies, precision, recall and F1.

Everything comes per row, as tensors on the device of the input: weight, sum and divide at the very end, since
the mean of batch means is not the mean. No call waits for the device. Sets of codes are compared as rows of
tokens in canonical form: two blocks hold the same code if and only if their rows are equal, and a block that
holds none is all PAD.
"""

import torch
from torch import Tensor


def _equal_blocks(a: Tensor, b: Tensor) -> Tensor:
    """bool [B, P, T] for blocks [B, P, bs] and [B, T, bs]."""
    return (a[:, :, None] == b[:, None]).all(-1)


def _distinct(blocks: Tensor, pad_idx: int) -> Tensor:
    """bool [B, P]: blocks that hold a code which none before them holds."""
    seen_before = _equal_blocks(blocks, blocks).tril(-1).any(-1)
    return (blocks != pad_idx).any(-1) & ~seen_before


def set_counts(pred_blocks: Tensor, target_blocks: Tensor, pad_idx: int) -> dict[str, Tensor]:
    """Codes of each row's predicted set that are right (tp) and wrong (fp), and target codes that are missing
    (fn).

    pred_blocks : integer [B, P, bs]; target_blocks : integer [B, T, bs], both canonical; a code counts once,
    in any order. Returns {"tp", "fp", "fn"}, each int64 [B].
    """
    equal = _equal_blocks(pred_blocks, target_blocks)  # [B, P, T]
    pred, target = _distinct(pred_blocks, pad_idx), _distinct(target_blocks, pad_idx)
    return {
        "tp": (pred & equal.any(2)).sum(1),
        "fp": (pred & ~equal.any(2)).sum(1),
        "fn": (target & ~equal.any(1)).sum(1),
    }


def same_code_sets(pred_blocks: Tensor, target_blocks: Tensor, pad_idx: int) -> Tensor:
    """bool [B]: the set of predicted codes is the set of target codes (two empty sets are equal). Arguments:
    ``set_counts``.
    """
    counts = set_counts(pred_blocks, target_blocks, pad_idx)
    return counts["fp"] + counts["fn"] == 0


def precision_recall_f1(tp: Tensor, fp: Tensor, fn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Precision tp/(tp+fp), recall tp/(tp+fn) and F1 2tp/(2tp+fp+fn), elementwise; 0 where the denominator is
    0.

    tp, fp, fn : integer or float tensors of one shape: totals for micro averages, rows [B] for averages over
    rows.
    """

    def fraction(part: Tensor, whole: Tensor) -> Tensor:
        return torch.where(whole > 0, part / whole, 0.0)

    return fraction(tp, tp + fp), fraction(tp, tp + fn), fraction(2 * tp, 2 * tp + fp + fn)


def token_counts(logits: Tensor, targets: Tensor, pad_idx: int) -> tuple[Tensor, Tensor]:
    """Target tokens whose most likely prediction, teacher-forced and position by position, is right; and how
    many there are.

    logits : [B, S-1, V]; targets : integer [B, S], BOS first. PAD does not count, nor does the last position,
    an EOS that is not trained; the EOS that fill up a short code do. Returns (right, total), each int64 [B].
    """
    targets = targets[:, 1:-1]  # [B, S-2]
    counted = targets != pad_idx
    right = (logits[:, :-1].argmax(-1) == targets) & counted
    return right.sum(1), counted.sum(1)


def flat_sets_equal(linear_logits: Tensor, target: Tensor) -> Tensor:
    """bool [B]: the classes with probability above 0.5 (logit above 0) are those of the target, 0/1 or bool
    [B, C].
    """
    return ((linear_logits > 0) == (target > 0)).all(1)
