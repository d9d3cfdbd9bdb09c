"""What both halves of the model are built of: dropout, attention and linear layers that are fast on CPUs too.

In training on a CPU most time goes into the many small steps around products, and into padding. So the rows
of a batch are cut into groups of similar width (`width_groups`), whose positions follow each other in one
tensor [N, H] (`pack`); attention goes group by group, all else once over the positions of all groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from histocc.runtime.device import linear
from histocc.text import best_cuts, padded_width

MAX_GROUPS = 4
MIN_GROUP_ROWS = 12  # of a batch, for each group that it is cut into
_STEPS = 1 << 16  # a probability of dropout is rounded to so many steps on CPUs


def upcast_half(x: Tensor) -> Tensor:
    """Half precision as float32, the rest as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# ---- dropout and linear layers


def dropout(x: Tensor, p: float) -> Tensor:
    """`F.dropout` in training. On CPUs 16 bits decide: torch draws a number per value, in one thread."""
    if p == 0.0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    return (x * dropout_factors(x, p)).to(x.dtype)


def dropout_factors(x: Tensor, p: float) -> Tensor:
    """What dropout multiplies x by, on a CPU: 0 with probability `p` (above 0), else 1 / (1 − p). In float32
    or wider: bfloat16 and float16 cannot hold every number of 16 bits.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if p == 1.0:
        return torch.zeros(x.shape, dtype=dtype)
    below = min(round(p * _STEPS), _STEPS - 1)
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    factors = bits.view(torch.int16)[: x.numel()].view(x.shape).to(dtype)
    torch.ge(factors, below - _STEPS // 2, out=factors)  # floats: torch.where takes six times as long
    return factors.mul_(_STEPS / (_STEPS - below))


class _DropoutAdd(torch.autograd.Function):
    """Dropout plus a residual as one step of autograd: each value is converted between dtypes once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, p: float) -> Tensor:
        factors = dropout_factors(x, p)
        ctx.save_for_backward(factors)
        ctx.dtypes = (x.dtype, residual.dtype)
        dropped = x * factors if x.dtype == factors.dtype else x.to(factors.dtype).mul_(factors)
        total = dropped.add_(residual) if residual.dtype != torch.float64 else dropped + residual
        return total.to(torch.promote_types(x.dtype, residual.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore
        (factors,), (x_dtype, residual_dtype) = ctx.saved_tensors, ctx.dtypes
        return (gradient * factors).to(x_dtype), gradient.to(residual_dtype), None


class Dropout(nn.Module):
    """`dropout` in training, nothing in evaluation. p: probability 0…1."""

    def __init__(self, p: float):
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"dropout must be between 0 and 1, not {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`forward` of x, plus `residual` of the same shape."""
        if not self.training or self.p == 0.0 or x.device.type != "cpu" or torch.compiler.is_compiling():
            return self(x) + residual
        return _DropoutAdd.apply(x, residual, self.p)  # pyright: ignore[reportReturnType]


def product(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """x [..., inputs] times a weight [outputs, inputs], a tensor or `Int8Weight`, plus bias [outputs]."""
    return linear(x, weight, bias) if isinstance(weight, Tensor) else weight.product(x, bias)


class Linear(nn.Linear):
    """`torch.nn.Linear` by `product`, which is faster on some CPUs."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


# ---- attention


def for_attention(x: Tensor) -> Tensor:
    """What `attend` takes: float32 in training on CPUs, which multiply small matrices slowly in bfloat16."""
    slow = x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.requires_grad
    return x.float() if slow else x


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, dropout_p: float) -> Tensor:
    """Scaled dot-product attention of q, k, v [B, heads, positions, H / heads]; visible: bool, or float that
    is added to the scores, broadcast to [B, heads, queries, keys], None for all.

    torch's fused kernel for CPUs knows no dropout, and is slow in training and with one query.
    """
    if visible is not None and visible.is_floating_point():
        visible = visible.to(q.dtype)
    if q.device.type != "cpu" or not (dropout_p or q.requires_grad or q.shape[-2] == 1):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout_p)
    if q.requires_grad and q.dtype == k.dtype == torch.float32 and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):  # see `for_attention`
            return attend(q, k, v, visible, dropout_p)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if visible is not None:
        scores = scores + _added_to_scores(visible, scores.dtype)
    return dropout(scores.softmax(-1), dropout_p) @ v


def _added_to_scores(visible: Tensor, dtype: torch.dtype) -> Tensor:
    if visible.is_floating_point():
        return visible.to(dtype)
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)


@dataclass(frozen=True)
class Group:
    """Rows of one width, whose positions attend within their row."""

    rows: int
    queries: int  # positions of a row
    keys: int
    visible: Tensor | None = None  # as for `attend`, broadcast to [rows, heads, queries, keys]
    query_scale: Tensor | None = None  # factor of the queries, float [rows]


def is_packed(projected: Tensor) -> bool:
    """Whether `packed_attention` is for these projections: in training on a CPU, not in compiled layers."""
    return projected.device.type == "cpu" and projected.requires_grad and not torch.compiler.is_compiling()


def packed_attention(
    queries: Tensor, keys_values: Tensor | None, groups: Sequence[Group], heads: int, dropout_p: float
) -> Tensor:
    """Attention of packed groups as one step of autograd → [N, H], 0 for other positions.

    queries: [N, H] of the positions of all groups, others after them; keys_values: [M, 2 H] alike; without it
    queries are [N, 3 H]: queries, keys and values.
    """
    return _Attention.apply(queries, keys_values, tuple(groups), heads, dropout_p)  # pyright: ignore


def _by_head(x: Tensor, rows: int, heads: int) -> Tensor:
    """A view of positions [rows · T, H] as [rows, heads, T, H / heads]."""
    return x.view(rows, len(x) // rows, heads, x.shape[1] // heads).transpose(1, 2)


def _gather(x: Tensor, rows: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Positions [rows · T, H] as a new float [rows · heads, T, H / heads]."""
    view = _by_head(x, rows, heads)
    copied = torch.empty(view.shape, dtype=dtype).copy_(view)
    return copied.view(rows * heads, *view.shape[2:])


def _scatter(x: Tensor, into: Tensor, rows: int, heads: int) -> None:
    """The opposite: writes [rows · heads, T, H / heads] into positions [rows · T, H]."""
    _by_head(into, rows, heads).copy_(x.view(rows, heads, *x.shape[1:]))


def _split(queries: Tensor, keys_values: Tensor | None) -> tuple[Tensor, ...]:
    """Views of the queries, keys and values, [N, H] each."""
    return queries.chunk(3, dim=1) if keys_values is None else (queries, *keys_values.chunk(2, dim=1))


class _Attention(torch.autograd.Function):
    """Its inputs and outputs are those of the linear layers around it, so that each value is moved once."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys_values: Tensor | None, groups: Any, heads: int, dropout_p: float
    ) -> Tensor:
        q, k, v = _split(queries, keys_values)
        dtype = torch.promote_types(queries.dtype, torch.float32)
        scale = (q.shape[1] // heads) ** -0.5
        out, saved, slices = q.new_empty(q.shape), [], []
        start = key_start = 0
        with torch.autocast("cpu", enabled=False):
            for group in groups:
                at = slice(start, start + group.rows * group.queries)
                at_keys = slice(key_start, key_start + group.rows * group.keys)
                slices.append((at, at_keys))
                start, key_start = at.stop, at_keys.stop
                query = _gather(q[at], group.rows, heads, dtype).mul_(scale)
                if group.query_scale is not None:
                    query.view(group.rows, -1).mul_(group.query_scale.to(dtype)[:, None])
                key = _gather(k[at_keys], group.rows, heads, dtype)
                value = _gather(v[at_keys], group.rows, heads, dtype)
                scores = query @ key.transpose(1, 2)  # [rows · heads, queries, keys]
                if group.visible is not None:
                    by_row = scores.view(group.rows, heads, *scores.shape[1:])
                    by_row.add_(_added_to_scores(group.visible, dtype))
                weights = probs = scores.softmax(-1)
                factors = None
                if dropout_p:
                    factors = dropout_factors(probs, dropout_p)
                    weights = torch.mul(probs, factors, out=scores)
                _scatter(weights @ value, out[at], group.rows, heads)
                saved += [query, key, value, probs, factors]
        out[start:] = 0
        ctx.save_for_backward(*saved)
        ctx.groups, ctx.slices, ctx.heads, ctx.scale = groups, slices, heads, scale
        ctx.like = (queries.shape, None if keys_values is None else keys_values.shape, queries.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        saved, heads = ctx.saved_tensors, ctx.heads
        shape, key_shape, dtype = ctx.like
        d_queries = gradient.new_empty(shape, dtype=dtype)
        d_keys_values = None if key_shape is None else d_queries.new_empty(key_shape)
        dq, dk, dv = _split(d_queries, d_keys_values)
        with torch.autocast("cpu", enabled=False):
            for i, (group, (at, at_keys)) in enumerate(zip(ctx.groups, ctx.slices)):
                query, key, value, probs, factors = saved[5 * i : 5 * i + 5]
                d_out = _gather(gradient[at], group.rows, heads, query.dtype)
                weights = probs if factors is None else probs * factors
                _scatter(weights.transpose(1, 2) @ d_out, dv[at_keys], group.rows, heads)
                d_weights = d_out @ value.transpose(1, 2)
                if factors is not None:
                    d_weights.mul_(factors)
                d_scores = torch.ops.aten._softmax_backward_data(d_weights, probs, -1, probs.dtype)
                _scatter(d_scores.transpose(1, 2) @ query, dk[at_keys], group.rows, heads)
                d_query = (d_scores @ key).mul_(ctx.scale)
                if group.query_scale is not None:
                    d_query.view(group.rows, -1).mul_(group.query_scale.to(d_query)[:, None])
                _scatter(d_query, dq[at], group.rows, heads)
        d_queries[at.stop :] = 0
        if d_keys_values is not None:
            d_keys_values[at_keys.stop :] = 0
        return d_queries, d_keys_values, None, None, None


# ---- groups of rows of similar width


def width_groups(attention_mask: Tensor) -> tuple[Tensor, list[tuple[int, int]]] | None:
    """(order in which rows go into groups, int64 [B]; rows and positions of each group, the narrowest first)
    with the fewest positions in sum, or None if one group is all. attention_mask: bool or 0/1 [B, S].
    """
    rows, width = attention_mask.shape
    last = (attention_mask != 0) * torch.arange(1, width + 1)
    widths = torch.tensor([min(padded_width(max(0, n - 2), width), width) for n in last.amax(1).tolist()])
    distinct, counts = widths.unique(return_counts=True)
    edges, widest = [0, *counts.cumsum(0).tolist()], distinct.tolist()
    cuts = best_cuts(widest, edges, max(1, min(MAX_GROUPS, rows // MIN_GROUP_ROWS)))
    if len(cuts) < 3 and widest[-1] == width:
        return None
    groups = [(edges[end] - edges[begin], widest[end - 1]) for begin, end in zip(cuts, cuts[1:])]
    return widths.argsort(stable=True), groups


def pack(groups: Sequence[Tensor], length: int | None = None) -> Tensor:
    """The positions of groups [B, S, …] one after the other, [N, …]. If there are several, zeros follow up to
    `length`, or a round number: matrix products of a new shape are slow.
    """
    if len(groups) == 1:
        return groups[0].flatten(0, 1)
    flat = [group.flatten(0, 1) for group in groups]
    used = sum(map(len, flat))
    if length is None:  # the next of 16 numbers between one power of two and the next
        step = 1 << max(3, used.bit_length() - 5)
        length = -(-used // step) * step
    return torch.cat([*flat, flat[0].new_zeros(length - used, *flat[0].shape[1:])])


def unpack(x: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The opposite of `pack`: x [N, …] as groups, with `shapes` that begin with their (B, S)."""
    if len(shapes) == 1:
        return [x.unflatten(0, shapes[0][:2])]
    sizes = [shape[0] * shape[1] for shape in shapes]
    parts = x.split([*sizes, len(x) - sum(sizes)])
    return [part.unflatten(0, shape[:2]) for part, shape in zip(parts, shapes)]


def product_of_groups(groups: Sequence[Tensor], weight: Any, bias: Tensor | None = None) -> list[Tensor]:
    """`product` of groups [B, S, inputs] each with one weight → [B, S, outputs] each."""
    return unpack(product(pack(groups), weight, bias), [group.shape for group in groups])
