"""Dropout, attention and linear layers of both halves of the model, also fast on CPUs.

In training on a CPU most time goes into the many small steps around products, and into padding. So the rows
of a batch are cut into groups of similar width (`width_groups`), whose positions follow each other in one
tensor [N, H] (`pack`). Attention runs group by group, the rest once over the positions of all groups.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocc.runtime.device import linear
from histocc.text import best_cuts, padded_width

MAX_WIDTH_GROUPS = 4
MIN_GROUP_ROWS = 12  # least rows of a batch per group
_STEPS = 1 << 16  # on CPUs the probability of dropout is a multiple of 1 / _STEPS


def upcast_half(x: Tensor) -> Tensor:
    """Return half precision as float32, other values unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# ---- dropout and linear layers


def dropout(x: Tensor, p: float) -> Tensor:
    """Return `F.dropout` in training. On CPUs it draws 16 bits, as torch draws numbers in one thread."""
    if p == 0.0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    if p == 1.0:
        return x * 0.0
    dtype = torch.promote_types(x.dtype, torch.float32)  # bfloat16 cannot hold every number of 16 bits
    below = min(round(p * _STEPS), _STEPS - 1)
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    factors = bits.view(torch.int16)[: x.numel()].view(x.shape).to(dtype)
    torch.ge(factors, below - _STEPS // 2, out=factors)  # floats: torch.where takes six times as long
    return (x * factors.mul_(_STEPS / (_STEPS - below))).to(x.dtype)  # 0 or x / (1 − p)


class Dropout(nn.Module):
    """Apply `dropout` in training, nothing in evaluation. p: probability 0…1."""

    def __init__(self, p: float):
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"dropout must be between 0 and 1, not {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x


def product(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """Return x [..., inputs] times weight [outputs, inputs], tensor or `Int8Weight`, plus bias [outputs]."""
    return linear(x, weight, bias) if isinstance(weight, Tensor) else weight.product(x, bias)


class Linear(nn.Linear):
    """`torch.nn.Linear` with `product`, which is faster on some CPUs."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


# ---- attention


def for_attention(x: Tensor) -> Tensor:
    """Return x for `attend`: float32 in training on CPUs, where small bfloat16 matrices are slow."""
    slow = x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.requires_grad
    return x.float() if slow else x


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, dropout_p: float) -> Tensor:
    """Compute scaled dot-product attention of q, k, v [B, heads, positions, H / heads]. visible: bool, or
    float to add to the scores, broadcast to [B, heads, queries, keys], or None for all.

    torch's fused kernel for CPUs has no dropout, and is slow in training and with one query.
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
        if not visible.is_floating_point():
            visible = torch.zeros_like(visible, dtype=scores.dtype).masked_fill_(~visible, -torch.inf)
        scores = scores + visible.to(scores.dtype)
    return dropout(scores.softmax(-1), dropout_p) @ v


# ---- groups of rows of similar width


def width_groups(attention_mask: Tensor) -> tuple[Tensor, list[tuple[int, int]]] | None:
    """Return the grouping with the fewest positions in total: (order in which rows go into groups, int64 [B],
    rows and positions of each group, narrowest first), or None for one group. attention_mask: bool or 0/1
    [B, S].
    """
    rows, width = attention_mask.shape
    last = (attention_mask != 0) * torch.arange(1, width + 1)
    widths = torch.tensor([min(padded_width(max(0, n - 2), width), width) for n in last.amax(1).tolist()])
    distinct, counts = widths.unique(return_counts=True)
    edges, widest = [0, *counts.cumsum(0).tolist()], distinct.tolist()
    cuts = best_cuts(widest, edges, max(1, min(MAX_WIDTH_GROUPS, rows // MIN_GROUP_ROWS)))
    if len(cuts) < 3 and widest[-1] == width:
        return None
    groups = [(edges[end] - edges[begin], widest[end - 1]) for begin, end in zip(cuts, cuts[1:])]
    return widths.argsort(stable=True), groups


def pack(groups: Sequence[Tensor], length: int | None = None) -> Tensor:
    """Join the positions of groups [B, S, …] one after the other, [N, …]. Several groups are padded with
    zeros to `length` or a round number: matrix products of a new shape are slow.
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
    """Return x [N, …] from `pack` as groups. Each of `shapes` begins with (B, S)."""
    if len(shapes) == 1:
        return [x.unflatten(0, shapes[0][:2])]
    sizes = [shape[0] * shape[1] for shape in shapes]
    parts = x.split([*sizes, len(x) - sum(sizes)])
    return [part.unflatten(0, shape[:2]) for part, shape in zip(parts, shapes)]


def product_of_groups(groups: Sequence[Tensor], weight: Any, bias: Tensor | None = None) -> list[Tensor]:
    """Return `product` of several groups [B, S, inputs] with one weight, [B, S, outputs] each."""
    return unpack(product(pack(groups), weight, bias), [group.shape for group in groups])
