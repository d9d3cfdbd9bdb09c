"""Matrix products in int8, for coding on CPUs.

Weights are rounded once, with a scale for each output (Wu et al., 2020, arXiv 2004.09602, section 3). Their
inputs are rounded at each product, with a scale for each row, so that a text's result depends only on that
text. Sums are exact (int32). The rest stays float32: embeddings, norms, attention, n-grams, and the output
layers of both decoders, which cost little.
"""

from functools import partial

import torch
from torch import Tensor, nn

MAX_INT8 = 127
QUANTIZED_ROWS = 256  # rows rounded and scaled together, so that they stay in a core's cache
MIN_ROW_SCALE = 1e-12  # for rows of zeros
IN_FLOAT32 = ("linear_decoder", "decoder.head", "ngrams")


class Int8Weight:
    """A matrix [outputs, inputs] as int8, with a scale for each output."""

    def __init__(self, weight: Tensor):
        weight = weight.detach().float()
        self.scale = weight.abs().amax(1).clamp_(min=MIN_ROW_SCALE) / MAX_INT8  # float32 [outputs]
        self.values = (weight / self.scale[:, None]).round_().to(torch.int8)

    def __getitem__(self, outputs: slice) -> "Int8Weight":
        part = Int8Weight.__new__(Int8Weight)
        part.scale, part.values = self.scale[outputs], self.values[outputs]
        return part

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x float32 [..., inputs] to float32 [..., outputs], as `torch.nn.functional.linear` does."""
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(len(rows), len(self.scale))
        for part, into in zip(rows.split(QUANTIZED_ROWS), out.split(QUANTIZED_ROWS)):
            largest = part.abs().amax(1, keepdim=True).clamp_(min=MIN_ROW_SCALE)  # [R, 1]
            rounded = (part * (MAX_INT8 / largest)).round_().to(torch.int8)
            sums = torch.ops.aten._int_mm(rounded, self.values.t())  # int32 [R, outputs]
            torch.mul(sums, largest / MAX_INT8, out=into)
            into.mul_(self.scale)
            if bias is not None:
                into.add_(bias)
        return out.view(*x.shape[:-1], -1)


def to_int8(model: nn.Module) -> None:
    """Convert `model` (on the CPU, in float32) in place to multiply in int8. It can then code, but neither be
    trained nor saved.

    Linear layers get an `Int8Weight`. A module that multiplies several weights at once has `fused`: the names
    of its methods that return (weight, bias), each with the attributes that these are made of.
    """
    named = dict(model.named_modules())
    float32 = {part for name in IN_FLOAT32 if name in named for part in named[name].modules()}
    for module in [module for module in named.values() if module not in float32]:
        fused: dict[str, tuple[str, ...]] = getattr(module, "fused", {})
        for method, (weight, bias) in {name: getattr(module, name)() for name in fused}.items():
            pair = Int8Weight(weight), None if bias is None else bias.detach()
            setattr(module, method, partial(tuple, pair))  # this returns the pair, and can be pickled
        for part in {part for parts in fused.values() for part in parts}:
            setattr(module, part, None)
        for child in module.children():
            if isinstance(child, nn.Linear) and child not in float32:
                weight = Int8Weight(child.weight)
                del child.weight  # a parameter
                setattr(child, "weight", weight)  # noqa: B010
