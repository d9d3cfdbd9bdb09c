"""The learning rate of a step, with linear warm-up and linear decay, and the optimizer that uses it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from histocc.trainer.config import StepFlags


def linear_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return the factor on the peak learning rate for optimizer step `step` (0-based).

    It rises from 1/(warmup_steps + 1), reaches 1 at step `warmup_steps`, and falls to 1/(total_steps −
    warmup_steps) at the last step. From step `total_steps` on it is 0.
    """
    if step >= total_steps:
        return 0.0
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return (total_steps - step) / (total_steps - warmup_steps)


@dataclass(frozen=True)
class Schedule:
    """Optimizer steps and learning rate of a run."""

    total: int  # steps of all epochs
    length: int  # steps of the schedule
    warmup: int  # steps of warm-up in it
    stop: int  # the step at which this start ends
    rate: float  # the peak

    @classmethod
    def of(
        cls, flags: StepFlags, steps_per_epoch: int, processes: int, rate: float | None = None
    ) -> "Schedule":
        """Return the schedule of a run. rate: the peak of the first start, which a resumed run keeps."""
        total = flags.num_epochs * steps_per_epoch
        length = flags.schedule_steps or total
        warmup = round(flags.warmup_pct * length) if flags.warmup_steps is None else flags.warmup_steps
        if rate is None:
            assert flags.learning_rate is not None, "still open"
            power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[flags.lr_scaling]
            rate = float(flags.learning_rate * processes**power)
        return cls(total, length, warmup, min(total, flags.max_steps or total), rate)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of each group to `factor` times its peak, "initial_lr"."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["initial_lr"]


def make_optimizer(
    model: nn.Module, weight_decay: float, rate: float, fast: tuple[Sequence[str], float] = ((), 1.0)
) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters. fast: names of a separate group, and its factor."""
    names, factor = fast
    rest = [p for name, p in model.named_parameters() if p.requires_grad and name not in names]
    groups: list[dict[str, Any]] = [{"params": rest}]
    if names:
        groups.append({"params": [model.get_parameter(name) for name in names], "lr": rate * factor})
    # eps: after a fit gradients are small, and 1e-8 would amplify their rounding a hundred times more
    optimizer = torch.optim.AdamW(groups, lr=rate, eps=1e-6, weight_decay=weight_decay, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer
