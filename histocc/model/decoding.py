"""The way from an encoded text to token sequences, and the probabilities of the codes in them."""

from functools import reduce
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from histocc.formatter import BOS_IDX, EOS_IDX, PAD_IDX, BlockyFormatter
from histocc.model.layers import upcast_half
from histocc.model.metrics import canonical_blocks
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.runtime.parallel import evaluating

SEQUENCES_AT_ONCE = 256  # orders of codes that `set_probs` computes together
MAX_IN_ANY_ORDER = 6  # codes: 720 orders


class GreedyResult(NamedTuple):
    """The written tokens, and their probabilities, which are products over the tokens."""

    tokens: Tensor  # int64 [B, max_codes · block_size + 2], BOS first, EOS last, PAD in unused blocks
    block_probs: Tensor  # float [B, max_codes], 0 for unwritten blocks
    end_probs: Tensor  # float [B], of the first PAD that began a block, 1 if none did
    sequence_probs: Tensor  # float [B], of all chosen tokens


def greedy_from_memory(
    model: Seq2SeqMixerOccCANINE,
    memory: Tensor,
    memory_padding_mask: Tensor | None,
    *,
    max_codes: int,
    block_size: int,
) -> GreedyResult:
    """Write the most probable token at each position, given those before it. memory: [B, S, H] from `encode`.

    A row is finished when a block starts with PAD. A model without `target_mask` writes all blocks, then a
    token in the place of EOS, as the published program does. A row depends only on its own text.
    """
    batch, written = len(memory), max_codes * block_size
    steps = written if model.target_mask else written + 1
    tokens = torch.full((batch, written + 2), PAD_IDX, device=memory.device)
    tokens[:, 0] = BOS_IDX
    tokens[:, -1] = EOS_IDX
    log_probs = torch.zeros(batch, steps, dtype=upcast_half(memory).dtype, device=memory.device)
    rows = torch.arange(batch, device=memory.device)  # unfinished rows
    with evaluating(model):
        cache = model.decoder.start(memory, memory_padding_mask, max_steps=steps)
        for position in range(steps):
            logits = upcast_half(model.decoder.step(tokens[rows, position], cache))  # [b, V]
            token = logits.argmax(-1)
            log_probs[rows, position] = logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
            if model.target_mask and position % block_size == 0:
                on = (token != PAD_IDX).nonzero()[:, 0]  # this waits for the device, so once per block
                if not len(on):
                    break
                if len(on) < len(rows):
                    rows, token, cache = rows[on], token[on], cache.select(on)
            if position < written:
                tokens[rows, position + 1] = token
    blocks = tokens[:, 1:-1].unflatten(1, (-1, block_size))  # [B, max_codes, block_size]
    of_blocks = log_probs[:, :written].unflatten(1, (-1, block_size))
    begins_empty = blocks[..., 0] == PAD_IDX  # [B, max_codes]
    is_end = begins_empty & (begins_empty.cumsum(1) == 1)
    ends = of_blocks[..., 0].masked_fill(~is_end, 0.0).sum(1)
    is_written = (blocks != PAD_IDX).any(-1)
    # the order of summation affects the last digits of probabilities
    sums = reduce(torch.add, of_blocks.unbind(-1)) if model.target_mask else of_blocks.sum(-1)
    whole = sums.masked_fill(~is_written, 0.0).sum(1) + ends if model.target_mask else log_probs.sum(1)
    return GreedyResult(tokens, sums.masked_fill(~is_written, -torch.inf).exp(), ends.exp(), whole.exp())


def greedy_sets(
    model: Seq2SeqMixerOccCANINE,
    input_ids: Tensor,
    attention_mask: Tensor,
    formatter: BlockyFormatter,
    in_any_order: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of `greedy_from_memory` for texts: (blocks int64 [B, max_codes, block_size], their
    probabilities float [B, max_codes], probability float [B] of the set of codes or, without in_any_order, of
    the tokens as written). Blocks without a code and, with `target_mask`, repeated codes are all PAD.
    """
    sizes = {"max_codes": formatter.max_num_codes, "block_size": formatter.block_size}
    with evaluating(model):
        memory, _ = model.encode(input_ids, attention_mask)
        padding = model.memory_padding_mask(attention_mask)
        written = greedy_from_memory(model, memory, padding, **sizes)
        blocks = canonical_blocks(formatter, written.tokens)
        again = (blocks[:, :, None] == blocks[:, None]).all(-1).tril(-1).any(-1)  # [B, max_codes]
        distinct = blocks.masked_fill(again[..., None], PAD_IDX)
        probs = written.sequence_probs
        if in_any_order:
            first_alone = torch.full_like(distinct, PAD_IDX)
            first_alone[:, 0] = distinct[:, 0]
            # at most one code was written, unchanged: it has one order, with a known probability
            known = (first_alone.flatten(1) == written.tokens[:, 1:-1]).all(1)
            of_first = written.block_probs[:, 0]
            probs = torch.where(known, written.end_probs * torch.where(of_first > 0, of_first, 1.0), 0.0)
            rows = (~known).nonzero()[:, 0]
            if len(rows):
                padding = None if padding is None else padding[rows]
                probs[rows] = set_probs(model, memory[rows], padding, distinct[rows])
    return distinct if model.target_mask else blocks, written.block_probs, probs


def set_probs(
    model: Seq2SeqMixerOccCANINE, memory: Tensor, memory_padding_mask: Tensor | None, blocks: Tensor
) -> Tensor:
    """Return the probability, float [B], that the model writes the codes of `blocks` and then stops: the sum
    over all orders of the codes or, with more than MAX_IN_ANY_ORDER codes, only for the given order.

    blocks: int64 [B, max_codes, block_size], distinct, all PAD without a code.
    """
    batch, longest = len(blocks), blocks.shape[1:].numel()
    exist = (blocks != PAD_IDX).any(-1)  # [B, max_codes]
    counts = exist.sum(1)
    probs = torch.zeros(batch, dtype=upcast_half(memory).dtype, device=memory.device)
    front = blocks.gather(1, torch.argsort((~exist).long(), dim=1, stable=True)[..., None].expand_as(blocks))

    def log_probs(rows: Tensor, orders: Tensor) -> Tensor:
        """Return log-probabilities of writing codes of rows int64 [R] in these orders [orders, codes], summed
        over the orders: [R].
        """
        repeated = rows.repeat_interleave(len(orders))
        padding = None if memory_padding_mask is None else memory_padding_mask[repeated]
        codes = front[rows][:, orders].flatten(0, 1).flatten(1)  # [R · orders, codes · block_size]
        begin, end = (codes.new_full((len(codes), 1), token) for token in (BOS_IDX, PAD_IDX))
        follows = torch.cat([codes, end], dim=1)[:, :longest]  # a sequence with all its codes has no end
        written = torch.cat([begin, codes], dim=1)[:, :longest]
        logits = upcast_half(model.decode(memory[repeated], written, padding))  # [R · orders, T, V]
        of_tokens = logits.log_softmax(-1).gather(2, follows[..., None])[..., 0]
        return of_tokens.sum(1).view(len(rows), len(orders)).logsumexp(1)

    with evaluating(model):
        for count in counts.unique().tolist():
            every = permutations(range(count)) if count <= MAX_IN_ANY_ORDER else [range(count)]
            orders = torch.tensor(list(map(list, every)), dtype=torch.int64, device=blocks.device)
            for rows in (counts == count).nonzero()[:, 0].split(max(1, SEQUENCES_AT_ONCE // len(orders))):
                parts = [log_probs(rows, some) for some in orders.split(SEQUENCES_AT_ONCE)]
                probs[rows] = torch.stack(parts).logsumexp(0).exp()
    return probs
