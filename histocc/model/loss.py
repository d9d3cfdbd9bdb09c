"""Losses: order-invariant cross entropy over blocks of tokens, the loss of the linear decoder, and their mix.

The order of a row's codes has no meaning. Each target block is therefore compared with several predicted
blocks, and the loss takes the best fit (Dahl, Johansen, Vedel, 2024, arXiv 2402.13604) or the cheapest
assignment of one predicted block to each. Every loss is first computed per row, so its gradient does not
depend on other rows, and a batch may be cut into any micro-batches.
"""

import copy
from functools import cache
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocc.model.layers import upcast_half

BEST_FIT, ONE_TO_ONE = BLOCK_LOSSES = ("best-fit", "one-to-one")
MEAN, ROWS = LINEAR_LOSSES = ("mean", "rows")
MAX_ALL_ORDERS = 5  # codes of a row for which every order is tried (120 of them)


# ---- losses of the seq2seq decoder


def _token_losses(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Return losses of each predicted block [B, P, bs, V] for each target block [B, T, bs]: [B, P, bs, T]."""
    index = targets.transpose(1, 2)[:, None].expand(-1, log_probs.shape[1], -1, -1)
    return -log_probs.gather(-1, index)


def _mean_of_codes(losses: Tensor, has_code: Tensor) -> Tensor:
    """Return the mean over the blocks [B, T] that have a code, [B], or 0 for a row without one."""
    # torch.where: an inf in other rows has no gradient
    return torch.where(has_code, losses, 0).sum(1) / has_code.sum(1).clamp(min=1)


class BlockOrderInvariantLoss(nn.Module):
    """Order-invariant loss that writes a row's n codes into its first n blocks, and PAD into the others.

    Per row: the mean over its n target blocks of the smallest mean token cross entropy over its first n
    predicted blocks, plus the sum over the blocks beyond n of the mean cross entropy towards PAD, divided by
    `nb_blocks`. EOS that fill up a short code are trained like other tokens. With one code in every row this
    is the published loss. With more, the published one divides by the largest number of codes in the batch.

    Args:
        pad_idx, nb_blocks, block_size: token id of PAD, blocks of a full sequence, tokens in a block.
        empty_blocks: which blocks beyond n are trained: "all", as published, or only the "first", at which
            decoding stops.
        matching: "best-fit", as published: two target blocks may choose the same predicted block.
            "one-to-one": each of the first n predicted blocks gets one target block, and only the
            assignment with the smallest mean is trained. Codes after a row's first five keep their order.
    """

    def __init__(
        self,
        pad_idx: int,
        nb_blocks: int = 5,
        block_size: int = 5,
        empty_blocks: str = "all",
        matching: str = BEST_FIT,
    ):
        super().__init__()
        if empty_blocks not in ("all", "first"):
            raise ValueError(f"empty_blocks is 'all' or 'first', not {empty_blocks!r}")
        if matching not in BLOCK_LOSSES:
            raise ValueError(f"matching is {BEST_FIT!r} or {ONE_TO_ONE!r}, not {matching!r}")
        self.pad_idx, self.nb_blocks, self.block_size = pad_idx, nb_blocks, block_size
        self.empty_blocks, self.matching = empty_blocks, matching

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.per_row(logits, targets).mean()

    def per_row(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each row, [B], in float32 for half-precision logits, else in their dtype.

        Args:
            logits: [B, S − 1, V].
            targets: integer [B, S]: BOS, nb_blocks blocks or fewer, EOS (not trained).

        Raises:
            ValueError: if shapes do not fit.
        """
        rows, length = targets.shape
        blocks, rest = divmod(length - 2, self.block_size)
        if logits.shape[:2] != (rows, length - 1) or rest or not 1 <= blocks <= self.nb_blocks:
            raise ValueError(
                f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} do not fit: targets are"
                f" [B, 2 + blocks * {self.block_size}], blocks 1 to {self.nb_blocks}, logits a token shorter"
            )
        log_probs = upcast_half(logits[:, :-1]).log_softmax(-1).unflatten(1, (blocks, self.block_size))
        return self._of_blocks(log_probs, targets[:, 1:-1].long().unflatten(1, (blocks, self.block_size)))

    def _of_blocks(self, log_probs: Tensor, targets: Tensor) -> Tensor:
        """Return `per_row` of the predicted log-probabilities [B, P, bs, V]. targets: int64 [B, P, bs]."""
        has_code = targets[..., 0] != self.pad_idx  # [B, P], true for the first n
        costs = _token_losses(log_probs, targets).mean(2)  # [B, P, P], cost of a predicted for a target block
        if self.matching == ONE_TO_ONE:
            target = cheapest_assignment(costs.detach(), has_code.sum(1))  # [B, P]
            chosen = costs.gather(2, target[..., None])[..., 0]
        else:
            chosen = costs.masked_fill(~has_code[..., None], torch.inf).amin(1)
        towards_pad = -log_probs[..., self.pad_idx].mean(-1)  # [B, P]
        empty = ~has_code
        if self.empty_blocks == "first":
            empty = empty & (empty.cumsum(1) == 1)
        return _mean_of_codes(chosen, has_code) + torch.where(empty, towards_pad, 0).sum(1) / self.nb_blocks


class OrderInvariantSeq2SeqCrossEntropy(BlockOrderInvariantLoss):
    """The older published loss, in which the n codes may be in any of the blocks. A code written late can be
    copied from the decoder's input, which defeats the loss.

    Per row: the mean over its n target blocks of the smallest mean token cross entropy over all predicted
    blocks (PAD tokens count 0), plus `push_to_pad_scale_factor` times the cross entropy of all blocks towards
    PAD, of which `push_to_pad_label_smoothing` (0…1) is spread evenly over the vocabulary.
    """

    def __init__(
        self,
        pad_idx: int,
        nb_blocks: int = 5,
        block_size: int = 5,
        push_to_pad_scale_factor: float = 0.05,
        push_to_pad_label_smoothing: float = 0.0,
    ):
        super().__init__(pad_idx, nb_blocks, block_size)
        self.push_to_pad_scale_factor = push_to_pad_scale_factor
        self.push_to_pad_label_smoothing = push_to_pad_label_smoothing

    def _of_blocks(self, log_probs: Tensor, targets: Tensor) -> Tensor:
        is_pad = targets == self.pad_idx  # [B, T, bs]
        token_losses = _token_losses(log_probs, targets).masked_fill(is_pad.transpose(1, 2)[:, None], 0)
        best = _mean_of_codes(token_losses.mean(2).amin(1), ~is_pad.all(-1))
        smooth = self.push_to_pad_label_smoothing
        towards_pad = -(1 - smooth) * log_probs[..., self.pad_idx]  # [B, P, bs]
        if smooth:
            towards_pad = towards_pad - smooth * log_probs.mean(-1)
        return best + self.push_to_pad_scale_factor * towards_pad.mean(-1).sum(1) / self.nb_blocks


@cache
def _orders(blocks: int, device: torch.device) -> Tensor:
    """Return every order of `blocks` blocks, int64 [blocks!, blocks], the identity first."""
    return torch.tensor(list(permutations(range(blocks))), device=device)


def cheapest_assignment(costs: Tensor, counts: Tensor) -> Tensor:
    """Assign each of a row's first n predicted blocks a different one of its n target blocks, with the
    smallest sum of costs over all orders. Codes after the first `MAX_ALL_ORDERS`, which occur only with more
    columns, keep their places.

    Args:
        costs: float [B, P, P], cost of each predicted block (second dimension) for each target block.
        counts: int64 [B], n of each row, 0 … P.

    Returns:
        int64 [B, P], the target block of each predicted block. Blocks beyond n keep their places.
    """
    blocks, few = costs.shape[1], min(costs.shape[1], MAX_ALL_ORDERS)
    orders = _orders(few, costs.device)  # [K, few]
    position = torch.arange(few, device=costs.device)
    inside = position < counts[:, None]  # [B, few]
    both, one = inside[:, :, None] & inside[:, None], inside[:, :, None] ^ inside[:, None]
    allowed = torch.where(both, costs[:, :few, :few], 0).masked_fill(one, torch.inf)  # 0 beyond n
    chosen = allowed.flatten(1)[:, (position * few + orders).flatten()]  # [B, K * few]
    cheapest = orders[chosen.unflatten(1, orders.shape).sum(-1).argmin(1)]  # [B, few]
    others = torch.arange(few, blocks, device=costs.device).expand(len(costs), -1)
    return torch.cat([cheapest, others], dim=1)


# ---- losses of the linear decoder, and of both


class LinearLoss(nn.Module):
    """Loss of each row of the linear decoder, [B].

    kind: "mean" averages the binary cross entropy over the classes, as published. With hundreds of rare
    classes, a row changes little. "rows" adds two parts with equal weight: the sum of the row's binary cross
    entropies, which makes each output a probability, and the cross entropy of the softmax towards the row's
    codes, which ranks them.
    """

    def __init__(self, kind: str = MEAN):
        super().__init__()
        if kind not in LINEAR_LOSSES:
            raise ValueError(f"linear loss {kind!r} is not one of {', '.join(LINEAR_LOSSES)}")
        self.kind = kind

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each row, [B], for logits [B, C] and target [B, C], 1 for its codes, else 0."""
        logits = upcast_half(logits)
        target = target.to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")  # [B, C]
        if self.kind == MEAN:
            return losses.mean(1)
        share = target / target.sum(1, keepdim=True).clamp(min=1)  # of each code in the softmax
        return losses.sum(1) - (share * logits.log_softmax(1)).sum(1)


class LossMixer(nn.Module):
    """Weighted mean of the losses of the seq2seq decoder and linear layer: w · seq2seq + (1 − w) · linear.

    Either may be any module that averages over its input and obeys an attribute `reduction` = "none", as
    torch's own losses do. A row's loss is the mean of its values.
    """

    def __init__(self, loss_fn_seq2seq: nn.Module, loss_fn_linear: nn.Module, seq2seq_weight: float = 0.5):
        super().__init__()
        if not 0 <= seq2seq_weight <= 1:
            raise ValueError(f"seq2seq weight must be between 0 and 1, not {seq2seq_weight}")
        self.loss_fn_seq2seq, self.loss_fn_linear = loss_fn_seq2seq, loss_fn_linear
        self.seq2seq_weight = seq2seq_weight

    def forward(
        self, out_seq2seq: Tensor, out_linear: Tensor, target_seq2seq: Tensor, target_linear: Tensor
    ) -> Tensor:
        return self.per_sample(out_seq2seq, out_linear, target_seq2seq, target_linear)["loss"].mean()

    def per_sample(
        self, out_seq2seq: Tensor, out_linear: Tensor, target_seq2seq: Tensor, target_linear: Tensor
    ) -> dict[str, Tensor]:
        """Return the parts of each row's loss: "loss", "loss_linear", "loss_seq2seq", [B] each.

        Args:
            out_seq2seq, target_seq2seq: logits [B, S − 1, V], integer [B, S].
            out_linear, target_linear: logits [B, C], float [B, C], 1 for the row's codes.
        """
        seq2seq = loss_of_rows(self.loss_fn_seq2seq, out_seq2seq, target_seq2seq)
        linear, w = loss_of_rows(self.loss_fn_linear, out_linear, target_linear), self.seq2seq_weight
        return {"loss": w * seq2seq + (1 - w) * linear, "loss_linear": linear, "loss_seq2seq": seq2seq}


def loss_of_rows(loss_fn: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of each row, [B], without touching `loss_fn`."""
    if isinstance(loss_fn, BlockOrderInvariantLoss):
        return loss_fn.per_row(output, target)
    if isinstance(loss_fn, LinearLoss):
        return loss_fn(output, target)
    per_element: Any = copy.copy(loss_fn)  # shares weights and buffers, but not settings
    per_element.reduction = "none"
    return per_element(upcast_half(output), target).reshape(len(output), -1).mean(1)
