"""Learning rate: linear warm-up and decay, as a function of the step alone."""

import pytest
import torch

from histocc.trainer.config import ScriptConfig
from histocc.trainer.schedule import (
    Schedule,
    linear_factor,
    set_learning_rate,
)

RATE = 1e-3


@pytest.mark.parametrize(
    "warmup_steps, total_steps, factors",
    [
        (0, 4, [1, 3 / 4, 2 / 4, 1 / 4, 0, 0]),
        (1, 5, [1 / 2, 1, 3 / 4, 2 / 4, 1 / 4, 0]),
        (3, 8, [1 / 4, 2 / 4, 3 / 4, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5, 0, 0]),
        (0, 1, [1, 0]),
        (4, 4, [1 / 5, 2 / 5, 3 / 5, 4 / 5, 0]),
        (9, 3, [1 / 10, 2 / 10, 3 / 10, 0]),
    ],
)
def test_table(warmup_steps, total_steps, factors):
    assert [linear_factor(step, warmup_steps, total_steps) for step in range(len(factors))] == pytest.approx(
        factors, abs=1e-12
    )


def test_published_proportions():
    """5 % warm-up of 1,000 steps: the peak is at step 50, half of it at about 525, and no step is wasted at
    rate 0.
    """
    factors = [linear_factor(step, 50, 1000) for step in range(1000)]
    assert max(factors) == factors[50] == 1 and factors[525] == 0.5 and min(factors) > 0
    assert factors[:51] == sorted(factors[:51]) and factors[50:] == sorted(factors[50:], reverse=True)


def test_each_group_gets_its_share_of_its_peak():
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "initial_lr": rate} for rate in (RATE, 5 * RATE)
    ]
    optimizer = torch.optim.AdamW(groups, lr=7.0)
    for step in range(9):
        set_learning_rate(optimizer, linear_factor(step, 3, 8))
        expected = [rate * linear_factor(step, 3, 8) for rate in (RATE, 5 * RATE)]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    "asked, length, warmup, stop, rate",
    [
        ({}, 20, 1, 20, RATE),
        ({"schedule_steps": 30, "warmup_pct": 0.5}, 30, 15, 20, RATE),
        ({"warmup_steps": 3, "max_steps": 4, "lr_scaling": "sqrt"}, 20, 3, 4, 2 * RATE),
        ({"max_steps": 99, "lr_scaling": "linear"}, 20, 1, 20, 4 * RATE),
    ],
)
def test_the_schedule_of_a_run(asked, length, warmup, stop, rate):
    asked = ScriptConfig(num_epochs=2, learning_rate=RATE, **asked)
    assert Schedule.of(asked, 10, 4) == Schedule(20, length, warmup, stop, rate)
    assert Schedule.of(asked, 10, 4, 0.5).rate == 0.5  # of a run that is resumed
