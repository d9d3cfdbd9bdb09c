"""Transformer decoder, which writes a token sequence while attending to the encoder's memory.

It has the layers of Vaswani et al., 2017 (arXiv 1706.03762, sections 3.1–3.5), post-norm with relu, and the
parameter names of `torch.nn.TransformerDecoder`. `forward` takes whole sequences. `start` and `step` take one
token at a time and keep keys and values. Both give the same logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from histocc.formatter import PAD_IDX
from histocc.model.layers import Dropout, Linear, attend, for_attention, pack, product, unpack

LAYERS, HEADS = 3, 8  # as published
# parts of `MultiheadAttention`'s projection
QUERY, KEY_VALUE, QUERY_KEY_VALUE = slice(0, 1), slice(1, 3), slice(0, 3)


@dataclass
class DecoderCache:
    """State from which `step` continues: keys and values are [B, heads, positions, H / heads] per layer."""

    memory_keys: list[Tensor]
    memory_values: list[Tensor]
    memory_visible: Tensor | None  # bool [B, 1, 1, S], None for all
    keys: list[Tensor]  # of the tokens so far, filled up to `length`
    values: list[Tensor]
    visible: Tensor  # which tokens are seen, bool [B, max_steps]
    length: int = 0

    def select(self, index: Tensor) -> "DecoderCache":
        """Return a new cache with the rows of `index`, int64 [N], repeats allowed."""
        return DecoderCache(**tree_map_only(Tensor, lambda x: x.index_select(0, index), vars(self)))


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
        """Map x [B, T, H], its first token at position `start`, to [B, T, H]."""
        return self.dropout(x + self.pos_embedding[start : start + x.shape[1], 0])


class MultiheadAttention(nn.Module):
    """Attention with query, key and value projections in one matrix, as in `torch.nn.MultiheadAttention`."""

    fused = {"in_proj": ("in_proj_weight", "in_proj_bias")}  # see `int8.to_int8`

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.width, self.heads, self.dropout = width, heads, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def in_proj(self) -> tuple[Tensor, Tensor]:  # [3 H, H], [3 H]
        return self.in_proj_weight, self.in_proj_bias

    def project(self, x: Tensor, parts: slice) -> Tensor:
        """Project x [..., H] to the `parts` of query 0, key 1, value 2 side by side, [..., parts · H]."""
        rows = slice(parts.start * self.width, parts.stop * self.width)
        weight, bias = self.in_proj()
        return product(x, weight[rows], bias[rows])

    def by_head(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Split [B, T, parts · H] into [B, heads, T, H / heads] of each part."""
        parts = for_attention(projected).unflatten(-1, (-1, self.heads, self.width // self.heads))
        return parts.permute(2, 0, 3, 1, 4).unbind(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """Compute `layers.attend` and the output projection → [B, T, H]."""
        mixed = attend(q, k, v, visible, self.dropout_p())
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def attend_to_groups(
        self, x: Tensor, memory: Tensor, shapes: Sequence[Sequence[int]], visible: Sequence[Any]
    ) -> Tensor:
        """Attend from each position of x [B, T, H] to its row in memory [N, H] → [B, T, H]. The memory is
        packed groups of `shapes` (rows, positions, …), which together have the rows of x.
        """
        (q,) = self.by_head(self.project(x, QUERY))
        mixed = []
        parts = q.split([shape[0] for shape in shapes]), unpack(self.project(memory, KEY_VALUE), shapes)
        for query, part, mask in zip(*parts, visible, strict=True):
            k, v = self.by_head(part)
            mixed.append(attend(query, k, v, mask, self.dropout_p()).transpose(1, 2).flatten(2))
        return self.out_proj(mixed[0] if len(mixed) == 1 else torch.cat(mixed))

    def dropout_p(self) -> float:
        return self.dropout if self.training else 0.0


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

    def forward(self, x: Tensor, memory: Tensor, shapes: Any, visible: Tensor, memory_visible: Any) -> Tensor:
        """Map x [B, T, H] to [B, T, H]. visible: as in `attend`. Others: as in `attend_to_groups`."""
        q, k, v = self.self_attn.by_head(self.self_attn.project(x, QUERY_KEY_VALUE))
        x = self.norm1(x + self.dropout(self.self_attn.attend(q, k, v, visible)))
        mixed = self.multihead_attn.attend_to_groups(x, memory, shapes, memory_visible)
        return self.feed_forward(self.norm2(x + self.dropout(mixed)))

    def cross_attend_and_feed_forward(
        self, x: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, q: Tensor | None = None
    ) -> Tensor:
        """Map x [B, T, H] to [B, T, H]. k, v: from the memory. q: the query, if known. All [B, heads, …]."""
        if q is None:
            (q,) = self.multihead_attn.by_head(self.multihead_attn.project(x, QUERY))
        mixed = self.multihead_attn.attend(q, k, v, visible)
        return self.feed_forward(self.norm2(x + self.dropout(mixed)))

    def feed_forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(F.relu(self.linear1(x)))
        return self.norm3(x + self.dropout(self.linear2(hidden)))


class DecoderStack(nn.Module):
    def __init__(self, layers: list[DecoderLayer]):
        super().__init__()
        self.layers = cast(Sequence[DecoderLayer], nn.ModuleList(layers))


class TransformerDecoder(nn.Module):
    """Token embedding · √H plus positions, post-norm decoder layers, linear head over the vocabulary.

    Args:
        vocab_size, width, dim_feedforward: V, H, and the width between the linear layers.
        dropout: probability 0…1, of the embedding and inside the layers, never of the logits.
        target_mask: True: PAD tokens are masked. False, as published: `step` does not mask them, and
            `forward` adds 1 to the scores of positions in the mask, as the published training does.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        dim_feedforward: int,
        *,
        dropout: float = 0.0,
        max_positions: int = 128,
        target_mask: bool = True,
    ):
        super().__init__()
        if width % HEADS:
            raise ValueError(f"the decoder's width {width} is not a multiple of its {HEADS} heads")
        self.target_mask, self.max_positions = target_mask, max_positions
        self.token_emb = TokenEmbedding(vocab_size, width)
        self.positional_encoding = PositionalEncoding(width, dropout, max_positions)
        layers = [DecoderLayer(width, HEADS, dim_feedforward, dropout) for _ in range(LAYERS)]
        self.decoder = DecoderStack(layers)
        self.head = Linear(width, vocab_size)

    def forward(
        self,
        memory: Tensor,
        target: Tensor,
        memory_padding_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, T, V] of the token after each position, given those up to it (teacher forcing).

        Always causal. Position 0 of the target and memory that is all padding are never masked.

        Args:
            memory, target: [B, S, H], and int64 [B, T], beginning with BOS, at most `max_positions`.
            memory_padding_mask, target_padding_mask: [B, S] and [B, T], True (or not 0) at masked positions.
                None masks nothing.
        """
        visible = visible_memory(memory_padding_mask)
        return self.forward_groups([memory], target, [visible], target_padding_mask)

    def forward_groups(
        self,
        memory: Sequence[Tensor],
        target: Tensor,
        memory_visible: Sequence[Tensor | None],
        target_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute `forward` of groups of rows, each with memory [B, S, H] and memory_visible for `attend`."""
        length = target.shape[1]
        self.check_length(length)
        no_padding = torch.zeros_like(target, dtype=torch.bool)
        padding = no_padding if target_padding_mask is None else target_padding_mask.bool()
        if self.target_mask:
            keys = torch.cat([torch.ones_like(padding[:, :1]), ~padding[:, 1:]], dim=1)
            visible = keys[:, None, None].expand(-1, 1, length, -1).tril()  # bool [B, 1, T, T]
        else:  # scores
            later = torch.ones(length, length, dtype=torch.bool, device=padding.device).triu(1)
            visible = padding.to(self.head.weight.dtype)[:, None, None].masked_fill(later, float("-inf"))
        x, positions = self.positional_encoding(self.token_emb(target)), pack(memory)  # [B, T, H], [N, H]
        shapes = [group.shape for group in memory]
        for layer in self.decoder.layers:
            x = layer(x, positions, shapes, visible, memory_visible)
        return self.head(x)

    @torch.no_grad()
    def start(
        self, memory: Tensor, memory_padding_mask: Tensor | None = None, max_steps: int | None = None
    ) -> DecoderCache:
        """Return a cache for `max_steps` calls of `step` (default: all positions), with projected memory."""
        max_steps = self.max_positions if max_steps is None else max_steps
        self.check_length(max_steps)
        layers = [layer.multihead_attn for layer in self.decoder.layers]
        projected = [layer.by_head(layer.project(memory, KEY_VALUE)) for layer in layers]
        keys, values = ([part.contiguous() for part in parts] for parts in zip(*projected))
        batch, heads, _, size = keys[0].shape
        own_keys, own_values = ([k.new_zeros(batch, heads, max_steps, size) for k in keys] for _ in range(2))
        memory_visible, visible = visible_memory(memory_padding_mask), memory.new_zeros(batch, max_steps)
        return DecoderCache(keys, values, memory_visible, own_keys, own_values, visible.bool())

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """Append `tokens` (int64 [B]) to the cache and return logits [B, V] of the next token: the last
        position of `forward` over all tokens so far, with PAD masked unless `target_mask` is False.
        """
        t = cache.length
        cache.visible[:, t] = tokens != PAD_IDX if t and self.target_mask else True
        visible = cache.visible[:, None, None, : t + 1]  # [B, 1, 1, t + 1]
        x = self.positional_encoding(self.token_emb(tokens[:, None]), start=t)  # [B, 1, H]
        for i, layer in enumerate(self.decoder.layers):
            attention, keys, values = layer.self_attn, cache.keys[i], cache.values[i]
            q, keys[:, :, t : t + 1], values[:, :, t : t + 1] = attention.by_head(
                attention.project(x, QUERY_KEY_VALUE)
            )
            mixed = attention.attend(q, keys[:, :, : t + 1], values[:, :, : t + 1], visible)
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
    """Map a padding mask [B, S] to the visible memory, bool [B, 1, 1, S]. Rows of padding see everything."""
    if padding_mask is None:
        return None
    padding = padding_mask.bool()
    return (~padding | padding.all(dim=1, keepdim=True))[:, None, None]
