"""Transformer decoder that writes a token sequence while looking at the encoder's memory.

The layers of Vaswani et al., 2017 (arXiv 1706.03762, sections 3.1–3.5), post-norm with relu, and the
parameter names of `torch.nn.TransformerDecoder`. Whole sequences go through `forward` (training); one token
at a time goes through `start` and `step`, which keep the keys and values of what is written already
(decoding). Both give the same logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocc.model import packed_attention
from histocc.model.layers import Dropout, Linear, attend, for_attention, product
from histocc.model.packed_attention import Group
from histocc.model.width_groups import joined, parted

LAYERS, HEADS = 3, 8  # as published


@dataclass
class DecoderCache:
    """What `step` needs to continue: projected memory, and the keys and values of the tokens so far.

    memory_keys, memory_values: [B, heads, S, H / heads] per layer; memory_visible: bool [B, 1, 1, S] or None
    (all);
    keys, values: [B, heads, max_steps, H / heads] per layer, filled up to `length`; visible: bool [B,
    max_steps].
    """

    memory_keys: list[Tensor]
    memory_values: list[Tensor]
    memory_visible: Tensor | None
    keys: list[Tensor]
    values: list[Tensor]
    visible: Tensor
    length: int = 0

    def select(self, index: Tensor) -> "DecoderCache":
        """A new cache with the rows of `index` (int64 [N], repeats allowed) in that order; this one stays as
        it is.
        """

        def rows(tensors: list[Tensor]) -> list[Tensor]:
            return [tensor.index_select(0, index) for tensor in tensors]

        memory_visible = None if self.memory_visible is None else self.memory_visible.index_select(0, index)
        return DecoderCache(
            rows(self.memory_keys),
            rows(self.memory_values),
            memory_visible,
            rows(self.keys),
            rows(self.values),
            self.visible.index_select(0, index),
            self.length,
        )


class TokenEmbedding(nn.Module):
    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)


class PositionalEncoding(nn.Module):
    """Adds sine (even columns) and cosine (odd columns) of the position (section 3.5), then dropout."""

    pos_embedding: Tensor

    def __init__(self, width: int, dropout: float, max_positions: int):
        super().__init__()
        rate = torch.exp(-torch.arange(0, width, 2) * math.log(10000) / width)  # [H / 2]
        angle = torch.arange(max_positions)[:, None] * rate  # [max_positions, H / 2]
        table = torch.stack([angle.sin(), angle.cos()], dim=2).reshape(max_positions, 1, width)
        self.register_buffer("pos_embedding", table)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x [B, T, H], its first token at position `start` → [B, T, H]."""
        return self.dropout(x + self.pos_embedding[start : start + x.shape[1], 0])


class MultiheadAttention(nn.Module):
    """Attention whose query, key and value projections lie in one matrix, as in
    `torch.nn.MultiheadAttention`.
    """

    joined = {"in_proj": ("in_proj_weight", "in_proj_bias")}

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.width, self.heads, self.dropout = width, heads, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def in_proj(self) -> tuple[Tensor, Tensor]:
        """(weight [3 H, H], bias [3 H]) of the projections, one below the other."""
        return self.in_proj_weight, self.in_proj_bias

    def project(self, x: Tensor, parts: slice) -> tuple[Tensor, ...]:
        """The projections `parts` of query 0, key 1, value 2, each [B, heads, T, H / heads], in one
        product.
        """
        return self._by_head(for_attention(self.projected(x, parts)))

    def _by_head(self, y: Tensor) -> tuple[Tensor, ...]:
        """y [B, T, parts · H] → [B, heads, T, H / heads] of each part."""
        return y.unflatten(-1, (-1, self.heads, self.width // self.heads)).permute(2, 0, 3, 1, 4).unbind(0)

    def projected(self, x: Tensor, parts: slice) -> Tensor:
        """The projections `parts` side by side: x [..., H] → [..., parts · H]."""
        rows = slice(parts.start * self.width, parts.stop * self.width)
        weight, bias = self.in_proj()
        return product(x, weight[rows], bias[rows])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool = False) -> Tensor:
        """visible: bool, or float that is added to the scores, broadcast to [B, heads, T, keys], or None →
        [B, T, H].
        """
        mixed = attend(q, k, v, visible, self.own_dropout(), causal)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def attend_to_self(self, x: Tensor, visible: Tensor | None) -> Tensor:
        """Of each position of x [B, T, H] to those of its row; visible: as for `attend`, None means causal
        and nothing else, with fewer keys than T only where `packed_attention` applies → [B, T, H].
        """
        rows, length, _ = x.shape
        keys = length if visible is None else visible.shape[-1]
        if keys < length:
            q, y = self.projected(x, QUERY), self.projected(x[:, :keys], KEY_VALUE)
            mixed = packed_attention.cross_attention(
                q.flatten(0, 1),
                y.flatten(0, 1),
                [Group(rows, length, keys, visible)],
                self.heads,
                self.own_dropout(),
            )
            return self.out_proj(mixed.view_as(x))
        y = self.projected(x, ALL)
        if not packed_attention.applies(y):
            q, k, v = self._by_head(for_attention(y))
            return self.attend(q, k, v, visible, causal=visible is None)
        if visible is None:
            visible = torch.ones(length, length, dtype=torch.bool).tril()
        groups = [Group(rows, length, length, visible)]
        mixed = packed_attention.self_attention(y.flatten(0, 1), groups, self.heads, self.own_dropout())
        return self.out_proj(mixed.view_as(x))

    def attend_to_groups(
        self,
        x: Tensor,
        memory: Tensor,
        shapes: Sequence[Sequence[int]],
        visible: Sequence[Tensor | None],
    ) -> Tensor:
        """Of each position of x [B, T, H] to those of its row in memory [N, H], the positions of groups of
        rows with these shapes (rows, positions, …), together the rows of x → [B, T, H].
        """
        q, y = self.projected(x, QUERY), self.projected(memory, KEY_VALUE)
        if packed_attention.applies(y) and packed_attention.applies(q):
            groups = [
                Group(shape[0], x.shape[1], shape[1], seen)
                for shape, seen in zip(shapes, visible, strict=True)
            ]
            mixed = packed_attention.cross_attention(
                q.flatten(0, 1), y, groups, self.heads, self.own_dropout()
            )
            return self.out_proj(mixed.view_as(x))
        (q,) = self._by_head(for_attention(q))
        mixed = []
        queries, parts = q.split([shape[0] for shape in shapes]), parted(for_attention(y), shapes)
        for one, part, seen in zip(queries, parts, visible, strict=True):
            k, v = self._by_head(part)
            mixed.append(attend(one, k, v, seen, self.own_dropout()).transpose(1, 2).flatten(2))
        return self.out_proj(mixed[0] if len(mixed) == 1 else torch.cat(mixed))

    def own_dropout(self) -> float:
        return self.dropout if self.training else 0.0


QUERY, KEY_VALUE, ALL = slice(0, 1), slice(1, 3), slice(0, 3)


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, dim_feedforward: int, dropout: float):
        super().__init__()
        self.self_attn = MultiheadAttention(width, heads, dropout)
        self.multihead_attn = MultiheadAttention(width, heads, dropout)
        self.linear1 = Linear(width, dim_feedforward)
        self.linear2 = Linear(dim_feedforward, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.norm3 = nn.LayerNorm(width)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        groups: Sequence[Sequence[int]],
        visible: Tensor | None,
        memory_visible: Sequence[Tensor | None],
    ) -> Tensor:
        """x [B, T, H]; memory [N, H], the positions of groups of rows, with the shapes `groups` (rows,
        positions, …) and together the rows of x; visible None means causal and nothing else → [B, T, H].
        """
        x = self.norm1(self.dropout.add(self.self_attn.attend_to_self(x, visible), x))
        mixed = self.multihead_attn.attend_to_groups(x, memory, groups, memory_visible)
        return self.feed_forward(self.norm2(self.dropout.add(mixed, x)))

    def cross_attend_and_feed_forward(
        self,
        x: Tensor,
        memory_k: Tensor,
        memory_v: Tensor,
        memory_visible: Tensor | None,
        q: Tensor | None = None,
    ) -> Tensor:
        """Attention over the memory, then the feed-forward network. q: the query [B, heads, T, H / heads]
        where it is known already.
        """
        if q is None:
            (q,) = self.multihead_attn.project(x, QUERY)
        mixed = self.multihead_attn.attend(q, memory_k, memory_v, memory_visible)
        return self.feed_forward(self.norm2(self.dropout.add(mixed, x)))

    def feed_forward(self, x: Tensor) -> Tensor:
        """[B, T, H] → [B, T, H]."""
        hidden = self.dropout(F.relu(self.linear1(x)))
        return self.norm3(self.dropout.add(self.linear2(hidden), x))


class DecoderStack(nn.Module):
    def __init__(self, layers: list[DecoderLayer]):
        super().__init__()
        self.layers = cast(Sequence[DecoderLayer], nn.ModuleList(layers))


class TransformerDecoder(nn.Module):
    """Token embedding · √H plus positions, post-norm decoder layers, linear head over the vocabulary.

    target_mask: True: nothing looks at tokens `pad_idx`. False, as published: `step` looks at them as at any
    other, and in `forward` those of the mask that is given count 1 more in the scores, since the published
    training adds its float mask. `dropout` is a probability 0…1, applied to the embedding and inside the
    layers, never to the logits. Starts like `torch.nn.TransformerDecoderLayer`, each layer with its own draw.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        dim_feedforward: int,
        *,
        dropout: float = 0.0,
        max_positions: int = 128,
        pad_idx: int = 1,
        target_mask: bool = True,
    ):
        super().__init__()
        if width % HEADS:
            raise ValueError(f"the decoder's width {width} is not a multiple of its {HEADS} heads")
        self.pad_idx, self.target_mask = pad_idx, target_mask
        self.max_positions = max_positions
        self.token_emb = TokenEmbedding(vocab_size, width)
        self.positional_encoding = PositionalEncoding(width, dropout, max_positions)
        self.decoder = DecoderStack(
            [DecoderLayer(width, HEADS, dim_feedforward, dropout) for _ in range(LAYERS)]
        )
        self.head = Linear(width, vocab_size)

    def forward(
        self,
        memory: Tensor,
        target: Tensor,
        memory_padding_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
        memory_scores: Tensor | None = None,
    ) -> Tensor:
        """Logits of the token after each position, from the tokens up to it (teacher forcing).

        memory [B, S, H]; target int64 [B, T], beginning with BOS; memory_padding_mask [B, S] and
        target_padding_mask [B, T]: True (or not 0) at positions that nothing may look at, None for none.
        Always causal. Position 0 of the target can always be looked at, and a row whose memory is all padding
        looks at all of it, so that no row looks at nothing. memory_scores [B, S], instead of a padding mask:
        added to the scores of each position. Returns [B, T, vocabulary]. Raises ValueError where T is more
        than `max_positions`.
        """
        memory_visible = (
            visible_memory(memory_padding_mask) if memory_scores is None else memory_scores[:, None, None]
        )
        return self.of_groups([memory], target, [memory_visible], target_padding_mask)

    def of_groups(
        self,
        memory: Sequence[Tensor],
        target: Tensor,
        memory_visible: Sequence[Tensor | None],
        target_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """`forward` with the memory of groups of rows, [B, S, H] each, together the rows of the target.
        memory_visible: as `visible_memory` gives it, of each.
        """
        self.check_length(target.shape[1])
        visible = None
        if target_padding_mask is not None:
            visible = self._visible_targets(target_padding_mask.bool())  # [B, 1, T, T]
        x, positions = self.positional_encoding(self.token_emb(target)), joined(memory)  # [B, T, H], [N, H]
        if visible is not None and self.target_mask and packed_attention.applies(x):
            looked_at = int(visible.flatten(0, -2).any(0).nonzero().max()) + 1
            visible = visible[..., :looked_at]  # behind them is PAD alone: those keys are not computed
        shapes = [each.shape for each in memory]
        for layer in self.decoder.layers:
            x = layer(x, positions, shapes, visible, memory_visible)
        return self.head(x)

    def _visible_targets(self, padding: Tensor) -> Tensor:
        """What each position of the target sees, or what is added to its scores: [B, 1, T, T] for padding
        bool [B, T].
        """
        if self.target_mask:
            keys = torch.cat([torch.ones_like(padding[:, :1]), ~padding[:, 1:]], dim=1)
            return keys[:, None, None, :].expand(-1, 1, padding.shape[1], -1).tril()
        later = torch.ones(padding.shape[1], padding.shape[1], dtype=torch.bool, device=padding.device).triu(
            1
        )
        return padding.to(self.head.weight.dtype)[:, None, None, :].masked_fill(later, float("-inf"))

    @torch.no_grad()
    def start(
        self, memory: Tensor, memory_padding_mask: Tensor | None = None, max_steps: int | None = None
    ) -> DecoderCache:
        """A cache for up to `max_steps` calls of `step` (default `max_positions`); projects the memory, once.

        Arguments as in `forward`. Raises ValueError where max_steps is more than `max_positions`.
        """
        max_steps = self.max_positions if max_steps is None else max_steps
        self.check_length(max_steps)
        projected = [
            [part.contiguous() for part in layer.multihead_attn.project(memory, KEY_VALUE)]
            for layer in self.decoder.layers
        ]
        batch, heads, _, size = projected[0][0].shape

        def buffers() -> list[Tensor]:
            return [k.new_zeros(batch, heads, max_steps, size) for k, _ in projected]

        return DecoderCache(
            [k for k, _ in projected],
            [v for _, v in projected],
            visible_memory(memory_padding_mask),
            buffers(),
            buffers(),
            memory.new_zeros(batch, max_steps, dtype=torch.bool),
        )

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """Logits [B, vocabulary] of the token after `tokens` (int64 [B]), which are appended to the cache.

        Equal to the last position of `forward` over all tokens so far with PAD masked, or, without
        `target_mask`, with no mask. Raises ValueError where the cache is full.
        """
        t = cache.length
        if t >= cache.visible.shape[1]:
            raise ValueError(f"the cache is full after {t} steps")
        cache.visible[:, t] = tokens != self.pad_idx if t and self.target_mask else True
        visible = cache.visible[:, None, None, : t + 1]  # [B, 1, 1, t + 1]
        x = self.positional_encoding(self.token_emb(tokens[:, None]), start=t)  # [B, 1, H]
        for i, layer in enumerate(self.decoder.layers):
            q, k, v = layer.self_attn.project(x, ALL)  # [B, heads, 1, H / heads]
            cache.keys[i][:, :, t : t + 1] = k
            cache.values[i][:, :, t : t + 1] = v
            mixed = layer.self_attn.attend(
                q, cache.keys[i][:, :, : t + 1], cache.values[i][:, :, : t + 1], visible
            )
            x = layer.norm1(x + layer.dropout(mixed))
            x = layer.cross_attend_and_feed_forward(
                x, cache.memory_keys[i], cache.memory_values[i], cache.memory_visible
            )
        cache.length = t + 1
        return self.head(x)[:, 0]

    def check_length(self, length: int) -> None:
        if length > self.max_positions:
            raise ValueError(f"{length} tokens, but the decoder has only {self.max_positions} positions")


def visible_memory(padding_mask: Tensor | None) -> Tensor | None:
    """Padding mask [B, S] → bool [B, 1, 1, S], True where memory may be looked at; everywhere in rows of
    padding.
    """
    if padding_mask is None:
        return None
    padding = padding_mask.bool()
    return (~padding | padding.all(dim=1, keepdim=True))[:, None, None]
