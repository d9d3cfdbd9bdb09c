"""Right answers, counted per row, as tensors on the device of the input: weight, sum and divide at the very
end, since the mean of batch means is not the mean. No call waits for the device.
"""

import torch
from torch import Tensor


def same_code_sets(pred_blocks: Tensor, target_blocks: Tensor, pad_idx: int) -> Tensor:
    """bool [B]: the set of predicted codes is the set of target codes. Blocks integer [B, P, bs] and [B, T,
    bs] in canonical form: equal if and only if they hold the same code, all PAD if they hold none.
    """
    equal = (pred_blocks[:, :, None] == target_blocks[:, None]).all(-1)  # [B, P, T]
    wrong = (pred_blocks != pad_idx).any(-1) & ~equal.any(2)
    missing = (target_blocks != pad_idx).any(-1) & ~equal.any(1)
    return ~(wrong.any(1) | missing.any(1))


def token_counts(logits: Tensor, targets: Tensor, pad_idx: int) -> tuple[Tensor, Tensor]:
    """(target tokens whose most likely prediction, teacher-forced, is right; how many there are), int64 [B]
    each.

    logits [B, S − 1, V]; targets integer [B, S], BOS first. PAD does not count, nor does the last position,
    an EOS that is not trained; the EOS that fill up a short code do.
    """
    targets = targets[:, 1:-1]  # [B, S − 2]
    counted = targets != pad_idx
    right = (logits[:, :-1].argmax(-1) == targets) & counted
    return right.sum(1), counted.sum(1)


def flat_sets_equal(
    linear_logits: Tensor, target: Tensor, at_least_one: bool = False, at_most: int | None = None
) -> Tensor:
    """bool [B]: the classes with probability above 0.5, `at_most` the most probable ones, and with
    `at_least_one` the most probable in any case, are those of the target, 0/1 or bool [B, C].
    """
    logits, classes = linear_logits.topk(min(at_most or linear_logits.shape[1], linear_logits.shape[1]))
    counted = logits > 0
    counted[:, 0] |= at_least_one
    chosen = torch.zeros_like(linear_logits, dtype=torch.bool).scatter(1, classes, counted)
    return (chosen == (target > 0)).all(1)
