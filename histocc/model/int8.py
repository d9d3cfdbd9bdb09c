"""Matrix products in int8, for coding on CPUs.

Weights are rounded once, with a scale for each output (Wu et al., 2020, arXiv 2004.09602, section 3). What
they are multiplied with is rounded as it comes, with a scale for each row, so that what a text gets depends
on that text alone, whatever else is in its batch. Sums are exact (int32), and all else stays float32:
embeddings, norms, attention, n-grams, and the layers whose outputs are the answer (the linear decoder and the
head of the other one), which cost little.
"""

from functools import partial

import torch
from torch import Tensor, nn

LARGEST = 127
ROWS_AT_ONCE = 256  # what is rounded and scaled stays in a core's cache
LEAST = 1e-12  # of what a scale is made of, for rows of zeros
STAYS = ("linear_decoder", "decoder.head", "ngrams")  # float32, by name


class Int8Weight:
    """A matrix [outputs, inputs] as int8, with a scale for each output."""

    def __init__(self, weight: Tensor):
        weight = weight.detach().float()
        self.scale = weight.abs().amax(1).clamp_(min=LEAST) / LARGEST  # float32 [outputs]
        self.values = (weight / self.scale[:, None]).round_().to(torch.int8)

    def __getitem__(self, outputs: slice) -> "Int8Weight":
        found = Int8Weight.__new__(Int8Weight)
        found.scale, found.values = self.scale[outputs], self.values[outputs]
        return found

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x float32 [..., inputs] → float32 [..., outputs], as `torch.nn.functional.linear` with it."""
        rows = x.reshape(-1, x.shape[-1])
        found = rows.new_empty(len(rows), len(self.scale))
        for part, into in zip(rows.split(ROWS_AT_ONCE), found.split(ROWS_AT_ONCE)):
            largest = part.abs().amax(1, keepdim=True).clamp_(min=LEAST)  # [R, 1]
            rounded = (part * (LARGEST / largest)).round_().to(torch.int8)
            sums = torch.ops.aten._int_mm(rounded, self.values.t())  # int32 [R, outputs]
            torch.mul(sums, largest / LARGEST, out=into)
            into.mul_(self.scale)
            if bias is not None:
                into.add_(bias)
        return found.view(*x.shape[:-1], -1)


class Int8Linear(nn.Module):
    """A linear layer with an `Int8Weight`."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = Int8Weight(layer.weight), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.product(x, self.bias)


def to_int8(model: nn.Module) -> None:
    """From now on `model`, which is on the CPU in float32, multiplies in int8. In place: it can code, and
    neither be trained nor saved.

    Linear layers are replaced. A module that makes one product of several weights has `joined`: the names of
    its methods that return (weight, bias), and of what they are made of.
    """
    stays = {inside for name in STAYS for inside in _submodules(model, name)}
    for module in [each for each in model.modules() if each not in stays]:
        joined: dict[str, tuple[str, ...]] = getattr(module, "joined", {})
        held = {name: getattr(module, name)() for name in joined}
        for name, (weight, bias) in held.items():
            setattr(
                module, name, partial(_same, (Int8Weight(weight), None if bias is None else bias.detach()))
            )
        for part in {part for parts in joined.values() for part in parts}:
            setattr(module, part, None)
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and child not in stays:
                setattr(module, name, Int8Linear(child))


def _submodules(model: nn.Module, name: str) -> list[nn.Module]:
    """With itself; none where there is no such part."""
    for part in name.split("."):
        model = getattr(model, part, None)  # pyright: ignore[reportAssignmentType]
        if model is None:
            return []
    return list(model.modules())


def _same(value: tuple[Int8Weight, Tensor | None]) -> tuple[Int8Weight, Tensor | None]:
    return value
