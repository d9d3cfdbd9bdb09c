"""Learning rate of a step: linear warm-up, then linear decay."""

import argparse
from dataclasses import dataclass

import torch

# Of the linear decoder and its n-grams, before the first step.
NEW, FITTED, TRAINED = "new", "fitted", "trained"
# In benchmarks/LOG.md: with a mean over the classes, a new linear decoder learns next to nothing at the rate
# of the rest, and what was fitted already becomes worse at it.
NEW_LINEAR_LR_FACTOR = {"mean": 30.0, "rows": 5.0}
FITTED_LINEAR_LR_FACTOR = 0.1


def linear_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """Factor on the peak learning rate for optimizer step `step` (0-based).

    Rises from 1/(warmup_steps + 1), reaches 1 at step `warmup_steps`, and falls to 1/(total_steps −
    warmup_steps) at
    the last step: no step is wasted at rate 0. 0 from `total_steps` on.
    """
    if step >= total_steps:
        return 0.0
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return (total_steps - step) / (total_steps - warmup_steps)


def linear_schedule(optimizer: torch.optim.Optimizer, warmup_steps: int, total_steps: int):
    """`linear_factor` as a torch scheduler. Its state is the peak rate and the step, so it can continue with
    another number of total steps.
    """
    return _LinearSchedule(optimizer, lambda step: linear_factor(step, warmup_steps, total_steps))


class _LinearSchedule(torch.optim.lr_scheduler.LambdaLR):
    """Sets the rate of the step that it continues from: the optimizer's state holds that of the schedule
    before.
    """

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        for group, base, factor in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas):
            group["lr"] = base * factor(self.last_epoch)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def scaled_learning_rate(rate: float, rule: str, processes: int) -> float:
    """Learning rate for `processes` with the rule none, linear (× processes) or sqrt (× √processes)."""
    factors = {"none": 1.0, "linear": float(processes), "sqrt": processes**0.5}
    return rate * factors[rule]


@dataclass(frozen=True)
class Schedule:
    """Steps and learning rate of a run. total: steps of all epochs; length: of the schedule; stop: where this
    start ends; rate: the peak; linear_factor: the rate of the linear decoder and the n-grams, or of these
    alone (ngrams_alone), as a multiple of it;
    fitted: whether they were fitted before the first step.
    """

    total: int
    length: int
    warmup: int
    stop: int
    rate: float
    linear_factor: float
    ngrams_alone: bool = False
    fitted: bool = False

    @classmethod
    def of(
        cls,
        args: argparse.Namespace,
        steps_per_epoch: int,
        processes: int,
        resumed: dict | None,
        linear_decoder: str = TRAINED,
        ngrams_alone: bool = False,
    ) -> "Schedule":
        """linear_decoder: NEW, FITTED or TRAINED; ngrams_alone: whether its n-grams alone are new."""
        total = args.num_epochs * steps_per_epoch
        length = args.schedule_steps or total
        warmup = args.warmup_steps if args.warmup_steps is not None else round(args.warmup_pct * length)
        rate = scaled_learning_rate(args.learning_rate, args.lr_scaling, processes)
        usual = {NEW: NEW_LINEAR_LR_FACTOR[args.linear_loss], FITTED: FITTED_LINEAR_LR_FACTOR, TRAINED: 1.0}
        factor = args.linear_lr_factor or usual[linear_decoder]
        if resumed:  # keeps the factors of the first start
            rates = resumed["scheduler"]["base_lrs"]
            rate, factor = rates[0], rates[-1] / rates[0]
        alone = ngrams_alone and (bool(resumed) or args.linear_lr_factor is None)
        return cls(
            total,
            length,
            warmup,
            min(total, args.max_steps or total),
            rate,
            factor,
            alone,
            linear_decoder == FITTED,
        )
