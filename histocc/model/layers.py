"""Parts that both halves of the model are built of, written so that they are fast on CPUs too."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from histocc.runtime.device import linear

_STEPS = 1 << 16  # a probability of dropout is rounded to so many steps on CPUs


def dropout(x: Tensor, p: float) -> Tensor:
    """Sets each value to 0 with probability `p` and scales the others by 1 / (1 − p), as `F.dropout` in
    training does.

    torch's own draws one number per value, in one thread on CPUs that are not Intel's. Here 16 bits decide.
    """
    if p == 0.0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    # bfloat16 and float16 cannot hold every number of 16 bits
    return (x * dropout_factors(x, p)).to(x.dtype)


def dropout_factors(x: Tensor, p: float) -> Tensor:
    """What dropout multiplies x, on a CPU, by: 0 with probability `p`, else 1 / (1 − p); float32, or x's
    number format if that is wider, of x's shape. p: above 0, at most 1.
    """
    if p == 1.0:
        return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    below = min(round(p * _STEPS), _STEPS - 1)
    bits = (
        torch.empty((x.numel() + 3) // 4, dtype=torch.int64)
        .random_(-(2**63), None)
        .view(torch.int16)[: x.numel()]
        .view(x.shape)
    )
    factors = bits.to(torch.promote_types(x.dtype, torch.float32))
    torch.ge(factors, below - _STEPS // 2, out=factors)  # floats: torch.where takes six times as long
    return factors.mul_(_STEPS / (_STEPS - below))


def dropout_add(x: Tensor, residual: Tensor, p: float) -> Tensor:
    """`dropout` of x, plus `residual` of the same shape."""
    if p == 0.0 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return dropout(x, p) + residual
    return _DropoutAdd.apply(x, residual, p)  # pyright: ignore[reportReturnType]


class _DropoutAdd(torch.autograd.Function):
    """In one step of autograd: each value is moved between number formats once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, p: float) -> Tensor:
        factors = dropout_factors(x, p)
        ctx.save_for_backward(factors)
        ctx.dtypes = (x.dtype, residual.dtype)
        wide = factors.dtype
        found = x * factors if x.dtype == wide else x.to(wide).mul_(factors)
        found = found.add_(residual) if residual.dtype != torch.float64 else found + residual
        return found.to(torch.promote_types(x.dtype, residual.dtype))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,), (factors,) = gradients, ctx.saved_tensors
        of_x, of_residual = ctx.dtypes
        return (gradient * factors).to(of_x), gradient.to(of_residual), None


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
        """`forward` of x, plus `residual`."""
        return dropout_add(x, residual, self.p) if self.training else x + residual

    def extra_repr(self) -> str:
        return f"p={self.p}"


def for_attention(x: Tensor) -> Tensor:
    """What attention takes, in the number format in which it is fast: on CPUs, where torch multiplies many
    small matrices slowly in bfloat16, float32 in training.
    """
    slow = x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.requires_grad
    return x.float() if slow else x


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, dropout_p: float, causal: bool = False
) -> Tensor:
    """Scaled dot-product attention; q, k, v [B, heads, positions, size]; visible bool, or float that is added
    to the scores, broadcast to [B, heads, queries, keys], or None; causal: each query sees the keys up to its
    own position (without `visible`).

    torch's fused kernel for CPUs knows no dropout and is slow backwards where sequences are short, and
    forwards with one query, so for one query, and in training on a CPU where `packed_attention` does not
    apply, the steps are taken here.
    """
    if visible is not None and visible.is_floating_point():
        visible = visible.to(q.dtype)
    if q.device.type != "cpu" or not (dropout_p or q.requires_grad or q.shape[-2] == 1):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=causal, dropout_p=dropout_p
        )
    if q.requires_grad and q.dtype == k.dtype == torch.float32 and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):  # see `for_attention`
            return attend(q, k, v, visible, dropout_p, causal)
    if causal:
        if visible is not None:
            raise ValueError("causal attention takes no further mask")
        visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if visible is not None:
        added = (
            visible
            if visible.is_floating_point()
            else torch.zeros_like(visible, dtype=scores.dtype).masked_fill_(~visible, -torch.inf)
        )
        scores = scores + added
    return dropout(scores.softmax(-1), dropout_p) @ v


def product(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """x [..., inputs] times a weight [outputs, inputs], a tensor or an `Int8Weight`, plus bias [outputs] →
    [..., outputs].
    """
    return linear(x, weight, bias) if isinstance(weight, Tensor) else weight.product(x, bias)


class Linear(nn.Linear):
    """`torch.nn.Linear` by `product`, which is faster on some CPUs."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)
