"""Unequal parts of a step for unequal processes: other shares, the same rows and the same losses."""

import argparse
import re

import numpy as np
import pytest
from helpers import TINY, examples, greatest_difference, read_logs, run, write_rows
from hypothesis import given
from hypothesis import strategies as st

from histocc.trainer.plan import BatchPlan, share_sizes
from histocc.trainer.shares import (
    AUTO,
    EQUAL,
    FIRST,
    LATER,
    SKIPPED,
    Shares,
    given_weights,
    problem,
    shares,
)

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=9)


@examples(200)
@given(rows=st.integers(0, 300), weights=WEIGHTS)
def test_sizes_add_up_and_follow_the_weights(rows, weights):
    sizes = share_sizes(rows, weights)
    assert sizes.sum() == rows and (sizes >= 0).all()
    if rows >= len(weights):
        assert sizes.min() >= 1
    exact = rows * np.array(weights) / sum(weights)
    if exact.min() >= 1:
        assert np.abs(sizes - exact).max() < 1
    assert share_sizes(rows, [1.0] * 4).tolist() == [len(range(rank, rows, 4)) for rank in range(4)]


@examples(200)
@given(rows=st.integers(1, 400), total=st.integers(1, 70), weights=WEIGHTS, data=st.data())
def test_every_row_goes_to_one_rank_evenly(rows, total, weights, data):
    plan = BatchPlan(rows, total, len(weights), micro_batch_size=5, groups=3)
    batch = data.draw(st.integers(0, plan.steps_per_epoch - 1))
    parts = [plan.rank_positions(batch, rank, weights) for rank in range(len(weights))]
    assert sorted(np.concatenate(parts).tolist()) == list(range(plan.batch_rows(batch)))
    for rank, part in enumerate(parts):
        assert plan.own_micro_batches(batch, rank, weights) * 5 >= len(part)
        if len(part) > 1:  # long and short rows alike
            gaps = np.diff(part)
            assert gaps.max() <= 2 * plan.batch_rows(batch) / len(part) + len(weights)


def test_equal_weights_are_the_equal_shares():
    plan = BatchPlan(103, 20, 3)
    for batch in range(plan.steps_per_epoch):
        for rank in range(3):
            assert (plan.rank_positions(batch, rank, (1, 1, 1)) == plan.rank_positions(batch, rank)).all()


def heard(found: Shares, per_row, steps):
    """Tells it what ranks that need so many seconds for a row have measured in `steps` steps."""
    for _ in range(steps):
        sizes = share_sizes(found.rows, found.at(found.step) or (1.0,) * found.ranks)
        figures = [part for size, seconds in zip(sizes, per_row) for part in (size * seconds, float(size))]
        found.step += 1
        found.heard(figures)


def test_shares_follow_the_measured_speed():
    said = []
    found = Shares(AUTO, 2, 60, ahead=3, say=said.append)
    heard(found, (0.01, 0.02), SKIPPED + FIRST)
    assert found.at(9) is None and share_sizes(60, found.at(10)).tolist() == [40, 20] and len(said) == 1
    assert "from step 11 on: rank 0 40 (100 samples/s), rank 1 20 (50 samples/s)" in said[0]
    heard(found, (0.01, 0.02), 5 * LATER)
    assert len(said) == 1  # nothing to gain
    heard(found, (0.01, 0.0205), 5 * LATER)
    assert len(said) == 1  # too little
    heard(found, (0.02, 0.01), LATER + SKIPPED)
    assert len(said) == 1  # not for long enough
    heard(found, (0.02, 0.01), 2 * LATER)
    assert len(said) == 2 and share_sizes(60, found.at(10**6)).tolist() == [20, 40]
    again = Shares(AUTO, 2, 60, changes=found.state())
    assert [again.at(step) for step in range(0, 400, 7)] == [found.at(step) for step in range(0, 400, 7)]
    assert Shares(AUTO, 3, 60, changes=found.state()).at(10**6) is None  # on another number of processes


def test_a_rank_that_stands_still_keeps_a_row():
    found = Shares(AUTO, 3, 9, say=lambda text: None)
    heard(found, (0.01, 0.01, 10.0), SKIPPED + FIRST)
    assert share_sizes(9, found.at(100)).tolist() == [4, 4, 1]


@pytest.mark.parametrize("text", ["", "2,", "1,0", "1,-1", "fast", "nan,1", "1;2", "inf,1"])
def test_values_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="numbers above 0"):
        shares(text)


def test_shares_that_do_not_fit():
    assert problem(EQUAL, 4, 2) is None and problem("3,1", 2, 8) is None and problem(AUTO, 4, 8) is None
    assert "gives 3 numbers, and there are 2 processes" in (problem("1,2,3", 2, 8) or "")
    assert "leaves rank 1 without rows of a step, which has 8" in (problem("99,1", 2, 8) or "")
    assert "a step has 2 rows" in (problem(AUTO, 4, 2) or "")
    assert problem("1e308,1e308", 2, 8) is None  # though their sum is no number
    assert share_sizes(8, given_weights("1e308,1e308")).tolist() == [4, 4]
    assert "leaves rank 1 without rows" in (problem("1e308,1e-308", 2, 8) or "")


def arguments(folder, name, *more):
    train = write_rows(folder / "train.csv", 150)
    val = write_rows(folder / "val.csv", 10, start=150)
    return [
        *("--train-data", train, "--val-data", val, "--formatter", "hisco", "--save-dir", folder / name),
        *("--target-cols", "hisco_1", "hisco_2", *TINY, "--float64", "--dropout", 0, "--encoder-dropout", 0),
        *("--global-batch-size", 10, "--batch-size", 4, "--log-interval", 1, *more),
    ]


SLOW = """
import os, sys, time
sys.path[:0] = ["{repo}"]
from histocc.seq2seq_mixer_engine import MixerTask

losses = MixerTask.losses

def slow(self, model, batch):
    if os.environ.get("RANK") == "1":
        time.sleep(0.03 * len(batch["weights"]))
    return losses(self, model, batch)

MixerTask.losses = slow
from train_mixer import main
main()
"""


@pytest.mark.processes
@pytest.mark.slow
def test_losses_are_those_of_equal_shares(tmp_path):
    """A process that is slower, whose shares are measured; and shares that were given, on a resumed run."""
    from helpers import REPO

    script = tmp_path / "slow.py"
    script.write_text(SLOW.format(repo=REPO))
    run("train_mixer.py", *arguments(tmp_path, "one", "--max-steps", 10))
    output = run(script, *arguments(tmp_path, "auto", "--max-steps", 10, "--shares", "auto"), processes=2)
    assert "Shares of a step: auto" in output and "Rows of a step from step 8 on: rank 0 " in output
    line = next(line for line in output.splitlines() if "Rows of a step" in line)
    first, second = map(int, re.findall(r"rank \d (\d+) \(", line))
    assert first + second == 10 and first > second
    assert greatest_difference(tmp_path / "one", tmp_path / "auto", ["train_loss"]) < 1e-9


@pytest.mark.full
@pytest.mark.processes
def test_a_run_goes_on_with_other_shares(tmp_path):
    run("train_mixer.py", *arguments(tmp_path, "one", "--max-steps", 12, "--eval-interval", 6))
    run("train_mixer.py", *arguments(tmp_path, "two", "--max-steps", 6, "--shares", "3,1"), processes=2)
    more = ("--max-steps", 12, "--shares", "1,4", "--num-workers", 1)
    run("train_mixer.py", *arguments(tmp_path, "two", *more), processes=2)
    assert len(read_logs(tmp_path / "two")) == 12
    assert greatest_difference(tmp_path / "one", tmp_path / "two", ["train_loss", "val_loss"]) < 1e-9


@pytest.mark.full
@pytest.mark.processes
def test_fsdp_takes_given_shares(tmp_path):
    run("train_mixer.py", *arguments(tmp_path, "one", "--max-steps", 5))
    more = ("--max-steps", 5, "--shares", "4,1", "--parallel", "fsdp")
    run("train_mixer.py", *arguments(tmp_path, "two", *more), processes=2)
    assert greatest_difference(tmp_path / "one", tmp_path / "two", ["train_loss", "val_loss"]) < 1e-9


@pytest.mark.full
def test_shares_are_refused_with_their_reason(tmp_path):
    said = run("train_mixer.py", *arguments(tmp_path, "no", "--shares", "99,1"), processes=2, code=1)
    assert "leaves rank 1 without rows of a step, which has 10" in said
    said = run("train_mixer.py", *arguments(tmp_path, "no", "--shares", "auto", "--parallel", "fsdp"), code=2)
    assert "--shares auto needs --parallel ddp" in said
