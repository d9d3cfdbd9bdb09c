"""Attention in training on CPUs, for groups of rows whose positions lie one after the other.

What takes time there is less the products than the many small steps around them: heads that are put side by
side, copies between number formats, masks, dropout, and the same backwards. Here all of it is one step of
autograd, whose inputs and outputs are those of the linear layers around it, so that each value is moved once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from histocc.model.layers import dropout_factors


@dataclass(frozen=True)
class Group:
    """Rows that attend together. rows, queries, keys: how many rows, and positions of each; visible: bool, or
    float that is added to the scores, broadcast to [rows, heads, queries, keys], or None for all; weight:
    float [rows], of the queries, or None for 1.
    """

    rows: int
    queries: int
    keys: int
    visible: Tensor | None = None
    weight: Tensor | None = None


def applies(projected: Tensor) -> bool:
    """Whether what follows is for these projections: in training, on a CPU, outside of compiled layers."""
    return projected.device.type == "cpu" and projected.requires_grad and not torch.compiler.is_compiling()


def self_attention(projected: Tensor, groups: Sequence[Group], heads: int, dropout_p: float) -> Tensor:
    """projected [N, 3 H]: queries, keys and values of the positions of all groups, others behind them → [N,
    H], 0 for the others, in the number format of `projected`.
    """
    return _Attention.apply(projected, None, tuple(groups), heads, dropout_p)  # pyright: ignore


def cross_attention(
    queries: Tensor, keys_values: Tensor, groups: Sequence[Group], heads: int, dropout_p: float
) -> Tensor:
    """queries [N, H], keys_values [M, 2 H] of the positions of all groups, others behind them → [N, H]."""
    return _Attention.apply(queries, keys_values, tuple(groups), heads, dropout_p)  # pyright: ignore


def _by_head(x: Tensor, rows: int, heads: int) -> Tensor:
    """A view of positions [rows · T, H] as [rows, heads, T, H / heads]."""
    return x.view(rows, len(x) // rows, heads, x.shape[1] // heads).transpose(1, 2)


def _gathered(x: Tensor, rows: int, heads: int, number: torch.dtype) -> Tensor:
    """Positions [rows · T, H] as a new float [rows · heads, T, H / heads]."""
    view = _by_head(x, rows, heads)
    found = torch.empty(view.shape, dtype=number).copy_(view)
    return found.view(rows * heads, *view.shape[2:])


def _scatter(x: Tensor, into: Tensor, rows: int, heads: int) -> None:
    """The opposite: writes [rows · heads, T, H / heads] into positions [rows · T, H]."""
    _by_head(into, rows, heads).copy_(x.view(rows, heads, *x.shape[1:]))


def _parts(queries: Tensor, keys_values: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the queries, keys and values, [N, H] each."""
    if keys_values is None:
        q, k, v = queries.chunk(3, dim=1)
    else:
        q, (k, v) = queries, keys_values.chunk(2, dim=1)
    return q, k, v


def _places(groups: Sequence[Group]) -> list[tuple[Group, slice, slice]]:
    """Each group with the positions of its queries and of its keys."""
    found, at, at_key = [], 0, 0
    for group in groups:
        end, end_key = at + group.rows * group.queries, at_key + group.rows * group.keys
        found.append((group, slice(at, end), slice(at_key, end_key)))
        at, at_key = end, end_key
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys_values: Tensor | None,
        groups: tuple[Group, ...],
        heads: int,
        dropout_p: float,
    ) -> Tensor:
        q, k, v = _parts(queries, keys_values)
        number = torch.promote_types(queries.dtype, torch.float32)
        scale = (q.shape[1] // heads) ** -0.5
        found, kept = q.new_empty(q.shape), []
        places = _places(groups)
        with torch.autocast("cpu", enabled=False):
            for group, of, of_keys in places:
                one = _gathered(q[of], group.rows, heads, number).mul_(scale)
                if group.weight is not None:
                    one.view(group.rows, -1).mul_(group.weight.to(number)[:, None])
                key = _gathered(k[of_keys], group.rows, heads, number)
                value = _gathered(v[of_keys], group.rows, heads, number)
                scores = one @ key.transpose(1, 2)  # [rows · heads, queries, keys]
                if group.visible is not None:
                    scores.view(group.rows, heads, *scores.shape[1:]).add_(_added(group.visible, number))
                probs = scores.softmax(-1)
                factors = None
                shares = probs
                if dropout_p:
                    factors = dropout_factors(probs, dropout_p)
                    shares = torch.mul(probs, factors, out=scores)
                _scatter(shares @ value, found[of], group.rows, heads)
                kept += [one, key, value, probs, factors]
        found[places[-1][1].stop :] = 0
        ctx.save_for_backward(*kept)
        ctx.places, ctx.heads, ctx.scale = places, heads, scale
        ctx.like = (queries.shape, None if keys_values is None else keys_values.shape, queries.dtype)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (gradient,), kept, heads = gradients, ctx.saved_tensors, ctx.heads
        shape, shape_of_keys, number_format = ctx.like
        of_queries = gradient.new_empty(shape, dtype=number_format)
        of_keys_values = None if shape_of_keys is None else of_queries.new_empty(shape_of_keys)
        dq, dk, dv = _parts(of_queries, of_keys_values)
        with torch.autocast("cpu", enabled=False):
            for i, (group, of, of_keys) in enumerate(ctx.places):
                one, key, value, probs, factors = kept[5 * i : 5 * i + 5]
                own = _gathered(gradient[of], group.rows, heads, one.dtype)
                shares = probs if factors is None else probs * factors
                _scatter(shares.transpose(1, 2) @ own, dv[of_keys], group.rows, heads)
                of_shares = own @ value.transpose(1, 2)
                if factors is not None:
                    of_shares.mul_(factors)
                of_scores = torch.ops.aten._softmax_backward_data(of_shares, probs, -1, probs.dtype)
                _scatter(of_scores.transpose(1, 2) @ one, dk[of_keys], group.rows, heads)
                of_one = (of_scores @ key).mul_(ctx.scale)
                if group.weight is not None:
                    of_one.view(group.rows, -1).mul_(group.weight.to(of_one)[:, None])
                _scatter(of_one, dq[of], group.rows, heads)
        _, of, of_keys = ctx.places[-1]
        of_queries[of.stop :] = 0
        if of_keys_values is not None:
            of_keys_values[of_keys.stop :] = 0
        return of_queries, of_keys_values, None, None, None


def _added(visible: Tensor, number: torch.dtype) -> Tensor:
    """What is added to the scores."""
    if visible.is_floating_point():
        assert not visible.requires_grad  # inside a group autograd does not see it
        return visible.to(number)
    return torch.zeros(visible.shape, dtype=number).masked_fill_(~visible, -torch.inf)
