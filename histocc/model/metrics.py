"""Right answers, counted per row, as tensors on the device of the input. Callers weight and sum, and divide
only at the end, since the mean of batch means is not the mean. No call waits for the device.
"""

import torch
from torch import Tensor

from histocc.formatter import EOS_IDX, PAD_IDX, SEP_IDX, BlockyFormatter


def canonical_blocks(formatter: BlockyFormatter, tokens: Tensor) -> Tensor:
    """Return one row of tokens per code, int64 [B, max_num_codes, block_size], all PAD for a block
    without a code. Rows are equal if and only if `decode_block` gives the same, except that for gpf without a
    separator 12, 3 differs from 1, 2, 3. tokens: integer [B, L], BOS first, with all blocks.
    """
    blocks = tokens[:, 1 : 1 + formatter.max_num_codes * formatter.block_size].long()
    blocks = blocks.reshape(-1, formatter.max_num_codes, formatter.block_size)
    kinds = map(torch.from_numpy, formatter.id_kinds)
    in_codes, whole = (kind.to(tokens.device, non_blocking=True) for kind in kinds)
    last = in_codes.shape[0] - 1
    ids = torch.where((blocks < 0) | (blocks > last), last, blocks)  # [B, M, bs]
    is_token = in_codes[ids]
    if formatter.kind == "gpf":
        passed_over = (blocks >= PAD_IDX) & (blocks <= SEP_IDX)
        valid = is_token.any(-1) & (is_token | passed_over).all(-1)
        front = torch.argsort((~is_token).long(), dim=-1, stable=True)  # tokens come first, in their order
        canonical = torch.where(is_token, blocks, EOS_IDX).gather(-1, front)
    else:
        first_is_whole = whole[ids[..., :1]]  # [B, M, 1]
        canonical = torch.where(first_is_whole, blocks[..., :1], blocks)
        valid = (is_token | first_is_whole).all(-1) & (blocks != PAD_IDX).all(-1)
    return torch.where(valid[..., None], canonical, PAD_IDX)


def same_code_sets(pred_blocks: Tensor, target_blocks: Tensor, pad_idx: int) -> Tensor:
    """Return bool [B], whether predicted and target codes are the same set. Blocks are integer [B, P, bs] and
    [B, T, bs] in canonical form: equal if and only if they hold the same code, all PAD if they hold none.
    """
    equal = (pred_blocks[:, :, None] == target_blocks[:, None]).all(-1)  # [B, P, T]
    wrong = (pred_blocks != pad_idx).any(-1) & ~equal.any(2)
    missing = (target_blocks != pad_idx).any(-1) & ~equal.any(1)
    return ~(wrong.any(1) | missing.any(1))


def token_counts(logits: Tensor, targets: Tensor, pad_idx: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of target tokens (predicted right with teacher forcing, in all), int64 [B] each.

    logits are [B, S − 1, V], targets integer [B, S], BOS first. PAD and the last position, an untrained EOS,
    do not count. EOS tokens that fill up a short code do.
    """
    targets = targets[:, 1:-1]  # [B, S − 2]
    counted = targets != pad_idx
    right = (logits[:, :-1].argmax(-1) == targets) & counted
    return right.sum(1), counted.sum(1)


def flat_sets_equal(
    linear_logits: Tensor, target: Tensor, at_least_one: bool = False, at_most: int | None = None
) -> Tensor:
    """Return bool [B], whether the target, 0/1 or bool [B, C], has exactly the predicted classes: those
    with probability above 0.5 among the `at_most` most probable, and with `at_least_one` always the best.
    """
    logits, classes = linear_logits.topk(min(at_most or linear_logits.shape[1], linear_logits.shape[1]))
    counted = logits > 0
    counted[:, 0] |= at_least_one
    chosen = torch.zeros_like(linear_logits, dtype=torch.bool).scatter(1, classes, counted)
    return (chosen == (target > 0)).all(1)
