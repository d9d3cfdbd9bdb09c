"""Matrix products of linear layers on CPUs, by whichever of torch's two libraries is the fast one there.

torch multiplies float32 matrices with MKL, which takes AVX-512 on Intel's CPUs alone; on others that have it,
oneDNN is twice as fast (measured: benchmarks/LOG.md). What is computed is the same, up to rounding.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from histocc.runtime.precision import has_bfloat16
from histocc.runtime.torch_private import has_onednn_product, onednn_product

LEAST_PRODUCT = 1 << 21  # multiplications: below, a call of oneDNN costs more than it gains
CPU_INFO = "/proc/cpuinfo"


@cache
def onednn_pays() -> bool:
    """Whether oneDNN multiplies faster than MKL on this CPU: it has AVX-512, and is not Intel's."""
    try:
        with open(CPU_INFO, encoding="utf-8", errors="replace") as file:
            vendors = {line.partition(":")[2].strip() for line in file if line.startswith("vendor_id")}
    except OSError:
        return False
    wide = torch.cpu._is_avx512_supported()
    return bool(vendors) and "GenuineIntel" not in vendors and wide and has_onednn_product()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: x [..., inputs], weight [outputs, inputs], bias [outputs] → [...,
    outputs].
    """
    if (
        torch.compiler.is_compiling()
        or x.device.type != "cpu"
        or weight.dtype != torch.float32
        or x.dim() < 2
        or x.numel() * len(weight) < LEAST_PRODUCT
    ):
        return F.linear(x, weight, bias)
    if torch.is_autocast_enabled("cpu"):
        trained = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        if trained and torch.get_autocast_dtype("cpu") == torch.bfloat16 and has_bfloat16_product():
            return _LinearInBfloat16.apply(x, weight, bias)  # pyright: ignore[reportReturnType]
    elif x.dtype == torch.float32 and onednn_pays():
        return _Linear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]
    return F.linear(x, weight, bias)


@cache
def has_bfloat16_product() -> bool:
    """Whether this CPU multiplies in bfloat16, and oneDNN is there to do so."""
    return has_bfloat16("cpu") and has_onednn_product()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # oneDNN multiplies what has gaps between its rows without its fast kernels
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        *gradients: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x = onednn_product(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        rows = gradient.flatten(0, -2)  # [N, outputs]
        of_weight = onednn_product(rows.t(), x.flatten(0, -2).t()) if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias


class _LinearInBfloat16(torch.autograd.Function):
    """What autocast makes of a linear layer in bfloat16, as one step of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        half, half_weight = x.to(torch.bfloat16).contiguous(), weight.to(torch.bfloat16).contiguous()
        ctx.save_for_backward(half, half_weight)
        ctx.dtype = x.dtype
        return onednn_product(half, half_weight, None if bias is None else bias.to(torch.bfloat16))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        *gradients: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        rows = gradient.flatten(0, -2)  # [N, outputs]
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = (rows @ weight).to(ctx.dtype).view(x.shape)
        of_weight = (rows.t() @ x.flatten(0, -2)).float() if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0).float() if ctx.needs_input_grad[2] else None  # summed in float32 inside
        return of_x, of_weight, of_bias
