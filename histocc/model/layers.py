"""Parts of both halves of the model: dropout, attention and linear layers that are fast on CPUs too."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocc.runtime.device import linear

_STEPS = 1 << 16  # a probability of dropout is rounded to so many steps on CPUs


def upcast_half(x: Tensor) -> Tensor:
    """Return half precision as float32, other types as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# ---- dropout and linear layers


def dropout(x: Tensor, p: float) -> Tensor:
    """Apply `F.dropout` in training. On CPUs 16 bits decide: torch draws a number per value in one thread."""
    if p == 0.0:
        return x
    if x.device.type != "cpu" or p == 1.0 or torch.compiler.is_compiling():
        return F.dropout(x, p)
    below = min(round(p * _STEPS), _STEPS - 1)
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    wide = torch.promote_types(x.dtype, torch.float32)  # half precision cannot hold every number of 16 bits
    factors = bits.view(torch.int16)[: x.numel()].view(x.shape).to(wide)
    torch.ge(factors, below - _STEPS // 2, out=factors)  # in floats: torch.where takes six times as long
    return (x * factors.mul_(_STEPS / (_STEPS - below))).to(x.dtype)


class Dropout(nn.Module):
    """Layer that applies `dropout` in training and nothing in evaluation. p: probability 0…1."""

    def __init__(self, p: float):
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"dropout must be between 0 and 1, not {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x


def product(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """Multiply x [..., inputs] by a weight [outputs, inputs], tensor or `Int8Weight`; add bias [outputs]."""
    return linear(x, weight, bias) if isinstance(weight, Tensor) else weight.product(x, bias)


class Linear(nn.Linear):
    """A `torch.nn.Linear` that multiplies by `product`, which is faster on some CPUs."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


# ---- attention


def for_attention(x: Tensor) -> Tensor:
    """Return x as `attend` takes it: float32 in training on CPUs, where small bfloat16 products are slow."""
    slow = x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.requires_grad
    return x.float() if slow else x


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, dropout_p: float) -> Tensor:
    """Compute scaled dot-product attention of q, k, v [B, heads, positions, H / heads]; visible: bool, or
    float that is added to the scores, broadcast to [B, heads, queries, keys], None for all.

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
    if visible is not None and visible.dtype == torch.bool:
        visible = torch.zeros_like(visible, dtype=scores.dtype).masked_fill_(~visible, -torch.inf)
    if visible is not None:
        scores = scores + visible.to(scores.dtype)
    return dropout(scores.softmax(-1), dropout_p) @ v
