"""Steps which groups of processes take on their own, and the exchange that follows each few of them.

After every `every` steps a group's weights have moved away from those that all had in common. What they have
moved by, averaged over the groups, is the gradient of an outer step: SGD with Nesterov momentum on the common
weights (Douillard et al., 2023, arXiv 2311.08105, "DiLoCo"). A rate of 1 without momentum is plain averaging
of the weights (Lin et al., 2018, arXiv 1808.07217, "Post-local SGD", from which the synchronous start is,
too). The states of the groups' own optimizers stay where they are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from histocc.runtime.groups import Groups
from histocc.runtime.reduction import GradientReducer


@dataclass(frozen=True)
class SyncSettings:
    """How far the groups go on their own; see the flags."""

    sync_every: int = 1
    sync_group: str = "node"
    sync_start: int | None = None
    sync_compression: str = "bf16"
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9


def steps_together(settings: SyncSettings, warmup: int, position: dict[str, Any]) -> int:
    """Steps that all processes take together at the start. warmup: steps of the schedule's; position: of the
    run that is resumed, which keeps its own.
    """
    return position.get("sync_start", warmup if settings.sync_start is None else settings.sync_start)


@dataclass(frozen=True)
class Exchanges:
    """After which optimizer steps (numbered from 1) groups exchange: none up to `start`, since all processes
    take those together; then after each `every` of them, and after the last, `total`.
    """

    start: int
    every: int
    total: int

    def alone(self, step: int) -> bool:
        """Whether each group takes step `step` on its own."""
        return step > self.start

    def due(self, step: int) -> bool:
        """Whether an exchange follows step `step`."""
        return step > self.start and ((step - self.start) % self.every == 0 or step == self.total)

    def together(self, step: int) -> bool:
        """Whether all processes have the same weights after step `step`, and may speak to each other."""
        return step <= self.start or self.due(step)

    def next(self, step: int) -> int:
        """The first of steps `step`, `step` + 1, … after which they are together."""
        while not self.together(step):
            step += 1
        return step


class GroupExchange:
    """The weights that all groups have in common, and the outer optimizer. Made when all ranks hold the same
    weights; called on all ranks when an exchange is due.

    Args:
        parameters: those that are trained, in the same order on every rank.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], groups: Groups, exchanges: Exchanges, settings: SyncSettings
    ):
        self.groups, self.exchanges, self.settings = groups, exchanges, settings
        self.reducer: GradientReducer | None = None  # of the group
        self.by_format: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            self.by_format.setdefault(parameter.dtype, []).append(parameter)
        self.common = [nn.Parameter(_flat(own)) for own in self.by_format.values()]
        self.outer = torch.optim.SGD(
            self.common,
            lr=settings.outer_learning_rate,
            momentum=settings.outer_momentum,
            nesterov=settings.outer_momentum > 0,
        )
        self.rows = self.all_rows = 0.0  # of this group, and of all, since the last exchange
        self.together = True  # whether all ranks have the same weights now, and may speak to each other

    @torch.no_grad()
    def __call__(self) -> None:
        """Every rank has the same weights afterwards. All ranks."""
        for common, own in zip(self.common, self.by_format.values()):
            moved = (common - _flat(own)).mul_(self.rows / max(self.all_rows, 1.0))
            common.grad = self._sum(moved)
        self.outer.step()
        for common, own in zip(self.common, self.by_format.values()):
            for piece, parameter in zip(common.split([p.numel() for p in own]), own):
                parameter.copy_(piece.view_as(parameter))
            common.grad = None
        self.rows = self.all_rows = 0.0

    def after_step(self, step: int, own_rows: float, all_rows: float) -> bool:
        """What is due after step `step`, whose samples are those of this group, and of all. Returns
        `together`.
        """
        if not self.exchanges.alone(step):
            if step == self.exchanges.start:
                self._start_here()
            return self.together
        self.rows, self.all_rows = self.rows + own_rows, self.all_rows + all_rows
        self.together = self.exchanges.due(step)
        if self.together:
            self()
        return self.together

    @torch.no_grad()
    def _start_here(self) -> None:
        """The weights of this moment, which all ranks hold, are those in common."""
        for common, own in zip(self.common, self.by_format.values()):
            common.copy_(_flat(own))

    def _sum(self, moved: Tensor) -> Tensor:
        """Over the groups."""
        sent = moved.to(torch.bfloat16) if self.settings.sync_compression == "bf16" else moved
        self.groups.sum_over_groups(sent)
        return sent.to(moved.dtype)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the momentum of the outer optimizer, one tensor for each number format of the
        weights, in the order of the parameters; {} before its first step."""
        held = [self.outer.state[common].get("momentum_buffer") for common in self.common]
        return {} if any(momentum is None for momentum in held) else {"momentum": held}

    def load(self, state: dict[str, Any]) -> None:
        """Raises ValueError where it is that of other weights."""
        for common, momentum in zip(self.common, state.get("momentum", []), strict=bool(state)):
            if momentum.shape != common.shape:
                raise ValueError(f"found {list(momentum.shape)} numbers, expected {list(common.shape)}")
            self.outer.state[common]["momentum_buffer"] = momentum.to(common)


def _flat(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in parameters])
