"""From an encoded text to token sequences."""

from contextlib import contextmanager
from typing import Iterable, Iterator, NamedTuple

import torch
from torch import Tensor, nn

from histocc.formatter import BOS_IDX, EOS_IDX, PAD_IDX
from histocc.mixer import Seq2SeqMixerOccCANINE
from histocc.text import padded_width


class GreedyResult(NamedTuple):
    """tokens int64 [B, max_codes · block_size + 2], BOS first, EOS last, PAD in unused blocks; block_probs float
    [B, max_codes], product of the probabilities of a block's tokens, 0 for a block that is not written;
    linear_logits float [B, classes] of the linear decoder, None where only the memory was there."""

    tokens: Tensor
    block_probs: Tensor
    linear_logits: Tensor | None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every submodule is in the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def greedy(model: Seq2SeqMixerOccCANINE, input_ids: Tensor, attention_mask: Tensor, *, max_codes: int,
           block_size: int) -> GreedyResult:
    """The most probable token at each position, given those before it.

    input_ids int64 [B, S], attention_mask bool or 0/1 [B, S]; max_codes and block_size are the formatter's. A row is
    finished when a block starts with PAD; what it gets depends on its own text alone. Raises ValueError where
    max_codes · block_size is more than the decoder's positions.
    """
    with evaluating(model):
        memory, pooled = model.encode(input_ids, attention_mask)
        result = greedy_from_memory(model, memory, model.memory_padding_mask(attention_mask),
                                    max_codes=max_codes, block_size=block_size)
        return result._replace(linear_logits=model.classify(pooled))


def greedy_sorted(model: Seq2SeqMixerOccCANINE, input_ids: Tensor, attention_mask: Tensor, batch_size: int, *, max_codes: int,
                  block_size: int) -> GreedyResult:
    """As `greedy`, in batches of rows of similar length, each as wide as its longest row asks for; results in the given order."""
    order = order_by_length(attention_mask)
    parts = [greedy(model, ids, mask, max_codes=max_codes, block_size=block_size)
             for ids, mask in in_order(model, input_ids, attention_mask, order.split(batch_size))]
    back = torch.argsort(order)
    return GreedyResult(*(torch.cat(values)[back] for values in zip(*parts)))


def flat_sorted(model: Seq2SeqMixerOccCANINE, input_ids: Tensor, attention_mask: Tensor, batch_size: int) -> Tensor:
    """Probabilities of the linear decoder, float [B, classes], worked out in batches of rows of similar length."""
    order = order_by_length(attention_mask)
    with evaluating(model):
        parts = [widened(model.classify(model.encode(ids, mask)[1])).sigmoid()
                 for ids, mask in in_order(model, input_ids, attention_mask, order.split(batch_size))]
    return torch.cat(parts)[torch.argsort(order)]


def order_by_length(attention_mask: Tensor) -> Tensor:
    """Rows from the shortest to the longest, int64 [B]."""
    return torch.argsort(attention_mask.sum(1), stable=True)


def in_order(model: Seq2SeqMixerOccCANINE, input_ids: Tensor, attention_mask: Tensor, batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, mask) of batches of rows that `order_by_length` gave, cut to the width that their last, longest row asks for."""
    for rows in batches:
        width = input_ids.shape[1]
        if model.memory_mask:
            width = min(width, padded_width(int(attention_mask[rows[-1]].sum()) - 2, width))
        yield input_ids[rows, :width], attention_mask[rows, :width]


def greedy_from_memory(model: Seq2SeqMixerOccCANINE, memory: Tensor, memory_padding_mask: Tensor | None, *,
                       max_codes: int, block_size: int) -> GreedyResult:
    """As `greedy`, from an encoding that is already there; `linear_logits` is None.

    memory [B, S, H] from `model.encode` in evaluation mode; memory_padding_mask from `model.memory_padding_mask`.
    """
    batch = len(memory)
    tokens = torch.full((batch, max_codes * block_size + 2), PAD_IDX, device=memory.device)
    tokens[:, 0] = BOS_IDX
    tokens[:, -1] = EOS_IDX
    finished = torch.zeros(batch, dtype=torch.bool, device=memory.device)
    block_log_probs = []                                                           # [B] per block begun
    with evaluating(model):
        cache = model.decoder.start(memory, memory_padding_mask, max_steps=max_codes * block_size)
        for position in range(1, max_codes * block_size + 1):
            logits = model.decoder.step(tokens[:, position - 1], cache)            # [B, V]
            log_prob, token = widened(logits).log_softmax(dim=-1).max(dim=-1)      # [B], [B]
            if (position - 1) % block_size == 0:
                finished = finished | (token == PAD_IDX)
                if finished.all():         # waits for the device, so only once per block
                    break
                block_log_probs.append(torch.zeros_like(log_prob))
            tokens[:, position] = token.masked_fill(finished, PAD_IDX)
            block_log_probs[-1] += log_prob.masked_fill(finished, float("-inf"))   # exp gives 0
    block_probs = torch.zeros(batch, max_codes, dtype=widened(memory).dtype, device=memory.device)
    for i, log_prob in enumerate(block_log_probs):
        block_probs[:, i] = log_prob.exp()
    return GreedyResult(tokens, block_probs, None)


def widened(x: Tensor) -> Tensor:
    """Half precision as float32, the rest as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
