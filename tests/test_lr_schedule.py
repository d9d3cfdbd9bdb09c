"""Learning rate: linear warm-up and decay, as a function of the step alone."""

import pytest
import torch

from histocc.trainer.config import ScriptConfig
from histocc.trainer.schedule import (
    Schedule,
    linear_factor,
    scaled_learning_rate,
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


@pytest.mark.parametrize("rule, factor", [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_scaling_with_the_processes(rule, factor):
    assert scaled_learning_rate(2e-5, rule, 4) == pytest.approx(2e-5 * factor, rel=1e-12)
    assert scaled_learning_rate(2e-5, rule, 1) == 2e-5


def test_unknown_scaling_is_an_error():
    with pytest.raises(KeyError):
        scaled_learning_rate(2e-5, "cubic", 4)


@pytest.mark.parametrize(
    "asked, words",
    [
        ({}, None),
        ({"schedule_steps": 30}, None),
        ({"schedule_steps": 20}, None),
        ({"schedule_steps": 3}, "ends at step 3: steps 4 to 20 have learning rate 0"),
        ({"schedule_steps": 3, "max_steps": 3}, None),
        ({"warmup_steps": 100}, "takes 100 steps, and the run has 20: the learning rate never reaches 0.001"),
        ({"warmup_steps": 19}, None),
    ],
)
def test_a_schedule_that_is_likely_not_meant_is_said(asked, words):
    schedule = Schedule.of(ScriptConfig(num_epochs=2, learning_rate=RATE, **asked), 10, 1)
    said = schedule.warnings()
    assert said == [] if words is None else len(said) == 1 and words in said[0]
