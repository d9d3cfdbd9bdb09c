"""Gradients summed over processes by one message after the backward passes of a step.

Until then no process needs another: each may take as many micro-batches as it likes, or take one again.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from histocc.runtime import stacks

COMPRESSIONS = ("none", "bf16")


class GradientReducer:
    """Called after the backward passes of a step on all ranks: every gradient is then the sum of
    those of all its ranks. Bitwise the same on all of them, and from start to start.

    A parameter without a gradient on a rank counts as zeros there; without one on any it stays without.

    Args:
        parameters: those that may get a gradient, in the same order on every rank.
        ranks: how many there are; where it is one alone, nothing is done.
        compression: one of COMPRESSIONS; "bf16" sends half the bytes of float32 and rounds what is sent, and
            each sum, to eight bits.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        ranks: int,
        compression: str = "none",
    ):
        self.ranks, self.compression = ranks, compression
        by_format: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_format.setdefault(parameter.dtype, []).append(parameter)
        self.parts = [_Part(own) for own in by_format.values()]

    def __call__(self, given_up: bool = False) -> Tensor | None:
        """Sums. given_up: this rank has left its part of the step out, so that the sums are of no use.

        Returns:
            The number of ranks that have given up, 0-d, on the device; None for one process alone.
        """
        count: Tensor | None = None
        for part in self.parts if self.ranks > 1 else []:
            part.fill(given_up)
            self._sum(part)
            count = part.take()
        return count

    def _sum(self, part: "_Part") -> None:
        sent = part.flat if self.compression == "none" else part.flat.to(torch.bfloat16)
        with stacks.waiting():
            dist.all_reduce(sent)
        if sent is not part.flat:
            part.flat.copy_(sent)


class _Part:
    """Parameters of one number format, and their gradients one behind the other in `flat`; behind them a
    number for each, of the ranks that have it, and that of the ranks that have given up.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = parameters
        self.views: list[Tensor] = []
        self.complete = True

    def _take_memory(self) -> None:
        """Kept from the first step on: taking memory anew costs more than the copy."""
        sizes = [p.numel() for p in self.parameters]
        first = self.parameters[0]
        self.flat = torch.zeros(sum(sizes) + len(sizes) + 1, dtype=first.dtype, device=first.device)
        *pieces, self.present = self.flat.split([*sizes, len(sizes) + 1])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, self.parameters)]

    def fill(self, given_up: bool) -> None:
        if not self.views:
            self._take_memory()
        here = [p.grad is not None for p in self.parameters]
        self.complete = all(here)
        for parameter, view in zip(self.parameters, self.views):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
        self.present.copy_(torch.tensor([*map(float, here), float(given_up)]))

    def take(self) -> Tensor:
        """Gives the parameters their sums."""
        here = [True] * len(self.parameters) if self.complete else (self.present[:-1] > 0).tolist()
        for parameter, view, present in zip(self.parameters, self.views, here):
            parameter.grad = view if present else None
        return self.present[-1]
