"""What torch has under private names, beside those of number formats in `precision`: each in one function.

A test looks each of them up, so that a version of torch without it is noticed by name.
"""

from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch


def loading_processes(batches: Iterator[Any]) -> Sequence[BaseProcess]:
    """The processes behind an iteration over a DataLoader. Who knows them can kill one that hangs, and say
    how one has ended; none are known where torch keeps them elsewhere, and its own limits remain.
    """
    return getattr(batches, "_workers", ())


def int8_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """int8 [N, K] times int8 [K, M] → int32 [N, M]: exact sums on CPUs of which `has_int8` is true."""
    return torch.ops.aten._int_mm(left, right)


def has_onednn_product() -> bool:
    """Whether `onednn_product` is there."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` on the CPU, in float32 or bfloat16, by oneDNN, without a gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def softmax_backward(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Gradient of a softmax over the last dimension with respect to what went in, where `output` came out."""
    return torch.ops.aten._softmax_backward_data(gradient, output, -1, output.dtype)
