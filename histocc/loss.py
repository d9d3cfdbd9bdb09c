"""Losses: order-invariant cross entropy over blocks of tokens, and its mix with a linear layer's loss.

An observation has as many codes as its target has blocks that are not PAD. The order of its codes carries no meaning, so
each target block is held against several predicted blocks and only the best fit counts (Dahl, Johansen, Vedel, 2024,
arXiv 2402.13604). Every loss here is computed per observation first: the gradient of one row does not depend on how many
codes another row of the batch has, and a batch may be cut into micro-batches and shares at will.
"""

import copy

import torch
from torch import Tensor, nn


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class _BlockLoss(nn.Module):
    """What both block losses share: shapes, token losses, reduction."""

    def __init__(self, pad_idx: int, nb_blocks: int = 5, block_size: int = 5):
        super().__init__()
        self.pad_idx, self.nb_blocks, self.block_size = pad_idx, nb_blocks, block_size

    def forward(self, logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Loss of logits [B, S-1, V] (any float) against targets [B, S] (integer): BOS, blocks, EOS.

        S is nb_blocks * block_size + 2, or less by whole blocks; a block that is in neither adds nothing. The EOS behind
        the blocks is not trained. Returns a scalar, the mean over observations, or [B] with reduction "none"; in float32
        for half-precision logits, else in their type. Raises ValueError for another reduction or shapes that do not fit.
        """
        if reduction not in ("mean", "none"):
            raise ValueError(f"reduction is 'mean' or 'none', not {reduction!r}")
        loss = self._per_observation(*self._split(logits, targets))
        return loss.mean() if reduction == "mean" else loss

    def _split(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the predicted blocks [B, P, bs, V] and target blocks [B, P, bs], int64."""
        rows, length = targets.shape
        blocks, rest = divmod(length - 2, self.block_size)
        if logits.shape[:2] != (rows, length - 1) or rest or not 1 <= blocks <= self.nb_blocks:
            raise ValueError(
                f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} do not fit: with blocks of "
                f"{self.block_size}, targets are [B, 1 + blocks * {self.block_size} + 1] with one to {self.nb_blocks} blocks "
                "and logits one token shorter")
        log_probs = _at_least_float32(logits[:, :-1]).log_softmax(-1)
        return (log_probs.reshape(rows, blocks, self.block_size, -1),
                targets[:, 1:-1].long().reshape(rows, blocks, self.block_size))

    def _best_fit(self, token_losses: Tensor, has_code: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Mean over a row's target blocks of the smallest mean token loss: [B], 0 for a row without a code.

        token_losses : [B, P, bs, T] of each predicted block against each target block
        has_code : bool [B, T], target blocks that count; allowed : bool [B, P], predicted blocks to choose from (None: all)
        """
        fit = token_losses.mean(2)                                                    # [B, P, T]
        if allowed is not None:
            fit = fit.masked_fill(~allowed[..., None], torch.inf)
        best = fit.amin(1)                                                            # [B, T]
        return torch.where(has_code, best, 0).sum(1) / has_code.sum(1).clamp(min=1)   # where: inf of other rows has no gradient

    def _per_observation(self, log_probs: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError


def _token_losses(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of every predicted block [B, P, bs, V] against every target block [B, T, bs]: [B, P, bs, T]."""
    index = targets.transpose(1, 2)[:, None].expand(-1, log_probs.shape[1], -1, -1)
    return -log_probs.gather(-1, index)


class BlockOrderInvariantLoss(_BlockLoss):
    """Order-invariant loss that writes an observation's n codes into its first n blocks, and PAD into the others.

    Per observation: the mean over its n target blocks of the smallest mean token cross entropy over its first n predicted
    blocks, plus the sum over the blocks beyond n of the mean cross entropy towards PAD, divided by ``nb_blocks``. The EOS
    that fill up a short code are trained like its other tokens. The n target blocks must be the first ones; a row without
    any has the PAD part alone. With one code in every row this is the published loss; with more, that one divides by the
    largest number of codes in the batch.

    Parameters: pad_idx, the token id of PAD; nb_blocks, blocks of a full sequence; block_size, tokens in a block;
    empty_blocks, which blocks beyond n are trained: "all", as published, or the "first" alone, behind which decoding stops and
    nothing needs to be computed. Calls and errors: see ``forward``.
    """

    def __init__(self, pad_idx: int, nb_blocks: int = 5, block_size: int = 5, empty_blocks: str = "all"):
        super().__init__(pad_idx, nb_blocks, block_size)
        if empty_blocks not in ("all", "first"):
            raise ValueError(f"empty_blocks is 'all' or 'first', not {empty_blocks!r}")
        self.empty_blocks = empty_blocks

    def _per_observation(self, log_probs: Tensor, targets: Tensor) -> Tensor:
        has_code = targets[..., 0] != self.pad_idx                                    # [B, P], true for the first n
        best = self._best_fit(_token_losses(log_probs, targets), has_code, allowed=has_code)
        towards_pad = -log_probs[..., self.pad_idx].mean(-1)                          # [B, P]
        empty = ~has_code
        if self.empty_blocks == "first":
            empty = empty & (empty.cumsum(1) == 1)
        return best + torch.where(empty, towards_pad, 0).sum(1) / self.nb_blocks


class OrderInvariantSeq2SeqCrossEntropy(_BlockLoss):
    """The older order-invariant loss, whose n codes may stand in any of the blocks.

    Per observation: the mean over its n target blocks of the smallest mean token cross entropy over all predicted blocks
    (PAD tokens count 0), plus ``push_to_pad_scale_factor`` times the cross entropy of all blocks towards PAD. Under teacher
    forcing a model can cheat it: a code that is written one block late can be copied from the decoder's input.

    Parameters: as ``BlockOrderInvariantLoss``; push_to_pad_scale_factor, weight of the PAD part;
    push_to_pad_label_smoothing (0...1), share of its target that is spread evenly over the vocabulary.
    """

    def __init__(self, pad_idx: int, nb_blocks: int = 5, block_size: int = 5,
                 push_to_pad_scale_factor: float = 0.05, push_to_pad_label_smoothing: float = 0.0):
        super().__init__(pad_idx, nb_blocks, block_size)
        self.push_to_pad_scale_factor = push_to_pad_scale_factor
        self.push_to_pad_label_smoothing = push_to_pad_label_smoothing

    def _per_observation(self, log_probs: Tensor, targets: Tensor) -> Tensor:
        is_pad = targets == self.pad_idx                                              # [B, T, bs]
        token_losses = _token_losses(log_probs, targets).masked_fill(is_pad.transpose(1, 2)[:, None], 0)
        best = self._best_fit(token_losses, has_code=~is_pad.all(-1))
        smooth = self.push_to_pad_label_smoothing
        towards_pad = -(1 - smooth) * log_probs[..., self.pad_idx]                    # [B, P, bs]
        if smooth:
            towards_pad = towards_pad - smooth * log_probs.mean(-1)
        return best + self.push_to_pad_scale_factor * towards_pad.mean(-1).sum(1) / self.nb_blocks


class LossMixer(nn.Module):
    """Weighted mean of the seq2seq decoder's loss and the linear layer's: w * seq2seq + (1 - w) * linear.

    Parameters
    ----------
    loss_fn_seq2seq : a block loss of this module.
    loss_fn_linear : for example nn.BCEWithLogitsLoss(), with or without weights.
    seq2seq_weight : w, 0...1; ValueError otherwise.

    Another module in either place must average over what it is given and obey an attribute ``reduction`` = "none", as
    torch's own losses do; it is asked for one row's values, whose mean is the loss of the row.
    """

    def __init__(self, loss_fn_seq2seq: nn.Module, loss_fn_linear: nn.Module, seq2seq_weight: float = 0.5):
        super().__init__()
        if not 0 <= seq2seq_weight <= 1:
            raise ValueError(f"seq2seq weight must be between 0 and 1, not {seq2seq_weight}")
        self.loss_fn_seq2seq, self.loss_fn_linear = loss_fn_seq2seq, loss_fn_linear
        self.seq2seq_weight = seq2seq_weight

    def forward(self, out_seq2seq: Tensor, out_linear: Tensor, target_seq2seq: Tensor, target_linear: Tensor) -> Tensor:
        """Scalar: the mean over observations of ``per_observation``'s "loss"; arguments as there."""
        return self.per_observation(out_seq2seq, out_linear, target_seq2seq, target_linear)["loss"].mean()

    def per_observation(self, out_seq2seq: Tensor, out_linear: Tensor, target_seq2seq: Tensor,
                        target_linear: Tensor) -> dict[str, Tensor]:
        """The parts of each observation's loss, [B] each: "loss", "loss_linear", "loss_seq2seq".

        out_seq2seq : [B, S-1, V] logits; target_seq2seq : integer [B, S]
        out_linear : [B, C] logits; target_linear : float [B, C], 1 for the observation's codes
        """
        seq2seq = _row_losses(self.loss_fn_seq2seq, out_seq2seq, target_seq2seq)
        linear = _row_losses(self.loss_fn_linear, out_linear, target_linear)
        w = self.seq2seq_weight
        return {"loss": w * seq2seq + (1 - w) * linear, "loss_linear": linear, "loss_seq2seq": seq2seq}


def _row_losses(loss_fn: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    """Loss of each row, [B], without touching ``loss_fn``."""
    if isinstance(loss_fn, _BlockLoss):
        return loss_fn(output, target, reduction="none")
    per_element = copy.copy(loss_fn)                         # shares weights and buffers, not its settings
    per_element.reduction = "none"
    return per_element(_at_least_float32(output), target).reshape(len(output), -1).mean(1)
