"""Running out of memory in mid-run: what did not fit is taken again in two, with the same result."""

import csv

import pytest
import test_toy_task as toy
import torch
from helpers import TINY, greatest_difference, run, write_rows
from torch import nn

from histocc.runtime.errors import TrainingError
from histocc.runtime.world import World
from histocc.trainer import loop
from histocc.trainer.hooks import Callbacks, Intervals, Steps
from histocc.trainer.memory_limits import MemoryLimits

SHORT = torch.OutOfMemoryError("not enough memory: you tried to allocate 123 bytes")


class _Fails(torch.autograd.Function):
    """The identity, whose backward pass finds no memory."""

    @staticmethod
    def forward(ctx, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return x

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise SHORT


class Short(toy.Toy):
    """Takes at most `most` samples at once from its call number `since` on, in its forward pass or in the
    middle of its backward pass.
    """

    def __init__(self, most=12, since=0, backward=False):
        self.most, self.since, self.backward, self.calls, self.sizes = most, since, backward, 0, []

    def losses(self, model, batch):
        self.calls += 1
        fits = self.calls <= self.since or len(batch["x"]) <= self.most
        self.sizes.append(len(batch["x"]))
        if not fits and not self.backward:
            raise SHORT
        hidden = model[0](batch["x"])
        hidden = hidden if fits else _Fails.apply(hidden)
        error = model[2](hidden)[:, 0] - batch["y"]
        return {"loss": error**2, "loss_absolute": error.abs()}


def trained(task, parts=1, optimizer_fails=0):
    """(rows of the log, weights) after 24 steps of 12 samples, in so many micro-batches."""
    model, _, _ = toy.model_and_optimizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 48)
    take, calls = optimizer.step, iter(range(1000))

    def step(*args):
        if next(calls) + 1 == optimizer_fails:
            raise SHORT
        return take(*args)

    optimizer.step = step
    size, found = 12 // parts, []
    batches = [
        {
            "x": whole["x"][i : i + size],
            "y": whole["y"][i : i + size],
            "global_count": 12,
            "last_micro_batch": i + size == 12,
        }
        for whole in toy.batches()
        for i in range(0, 12, size)
    ]
    run = loop.Run(model, task, optimizer, scheduler, World(), seed=3)
    steps = Steps(24, per_epoch=4)
    loop.train(run, {"train": batches}, steps, Intervals(log=4), Callbacks(log=found.append))
    return found, model.state_dict()


def same(found, expected):
    for row, other in zip(found[0], expected[0], strict=True):
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-12)
        assert row["samples"] == other["samples"]
    for name, weights in expected[1].items():
        torch.testing.assert_close(found[1][name], weights, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_result_is_that_of_enough_memory(backward, parts, capsys):
    """From the sixth call on, so in the second micro-batch of a step where there are three."""
    whole = trained(Short(), parts)
    task = Short(2, since=5, backward=backward)
    found = trained(task, parts)
    same(found, whole)
    cuts = 1 if parts == 3 else 3  # 4 → 2; 12 → 6 → 3 → 2 pieces of at most 2
    assert sum(row["memory_cuts"] for row in found[0]) == (1 if parts == 3 else 3) == cuts
    said = capsys.readouterr().out
    assert said.count("taken again") == cuts and "step 6" in said or parts == 3 and "step 2" in said


def test_what_was_found_out_is_remembered():
    task = Short(6)
    trained(task)
    assert task.sizes[:3] == [12, 6, 6] and set(task.sizes[3:]) == {6}


def test_the_optimizer_takes_its_step_again(capsys):
    same(trained(Short(), optimizer_fails=1), trained(Short()))
    same(trained(Short(), optimizer_fails=9), trained(Short()))
    assert capsys.readouterr().out.count("in the step of the optimizer") == 2


def test_one_sample_that_does_not_fit_ends_the_run():
    with pytest.raises(torch.OutOfMemoryError):
        trained(Short(0))


def test_limits_hold_for_what_is_as_wide():
    limits = MemoryLimits()

    def batch(samples, width):
        return {"ids": torch.zeros(samples, width), "weights": torch.ones(samples), "names": ["x"] * samples}

    assert limits.learn(batch(8, 64)) == 4
    assert [len(part["ids"]) for part in limits.pieces(batch(8, 64))] == [4, 4]
    assert [len(part["names"]) for part in limits.pieces(batch(6, 128))] == [3, 3]
    assert [len(part["ids"]) for part in limits.pieces(batch(64, 32))] == [64]
    assert (
        limits.learn(batch(1, 64)) == 0 and limits.learn({"ids": torch.zeros(2, 3), "y": torch.zeros(5)}) == 0
    )
    last = [part["last_micro_batch"] for part in limits.pieces(batch(9, 64))]
    assert last == [False, False, True]
    again = MemoryLimits()
    again.load(limits.state())
    assert [len(part["ids"]) for part in again.pieces(batch(8, 64))] == [4, 4]


def test_a_wider_sample_does_not_come_back_from_a_cut_batch():
    """Every sample is in one piece, in order."""
    limits = MemoryLimits()
    whole = {"x": torch.arange(7.0), "global_count": 7}
    limits.learn(whole)
    parts = limits.pieces(whole)
    assert torch.cat([part["x"] for part in parts]).tolist() == list(range(7))
    assert all(part["global_count"] == 7 for part in parts)


SHORT_ON_ONE = """
import os, sys
sys.path[:0] = ["{repo}"]
import torch
from histocc.seq2seq_mixer_engine import MixerTask

losses, calls = MixerTask.losses, []

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("not enough memory: you tried to allocate 123 bytes")

def short(self, model, batch):
    calls.append(len(batch["weights"]))
    found = losses(self, model, batch)
    if os.environ.get("RANK") in {ranks} and len(calls) > 2 and calls[-1] > 3:
        found["loss"] = Fails.apply(found["loss"])
    return found

MixerTask.losses = short
from train_mixer import main
main()
"""


def arguments(folder, name):
    train = write_rows(folder / "train.csv", 48)
    val = write_rows(folder / "val.csv", 6, start=48)
    return [
        *("--train-data", train, "--val-data", val, "--formatter", "hisco", "--save-dir", folder / name),
        *("--target-cols", "hisco_1", "hisco_2", *TINY, "--float64", "--dropout", 0, "--encoder-dropout", 0),
        *("--global-batch-size", 16, "--batch-size", 8, "--num-epochs", 2),
        *("--log-interval", 1, "--learning-rate", 1e-3),
    ]


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [("1",), pytest.param(("0", "1"), marks=pytest.mark.full)])
def test_one_of_two_processes_or_both_run_out_of_memory(tmp_path, ranks):
    """In the backward pass, of micro-batches of 8; the losses are those of a run with enough."""
    from helpers import REPO

    script = tmp_path / "short.py"
    script.write_text(SHORT_ON_ONE.format(repo=REPO, ranks=ranks))
    run("train_mixer.py", *arguments(tmp_path, "whole"))
    output = run(script, *arguments(tmp_path, "cut"), processes=2)
    for rank in "01":
        assert (f"rank {rank}: Note: step 3: out of memory" in output) == (rank in ranks), output
    assert greatest_difference(tmp_path / "whole", tmp_path / "cut", ["train_loss", "val_loss"]) < 1e-12
    with open(tmp_path / "cut" / "logs.csv", newline="") as file:
        cuts = [int(row["memory_cuts"]) for row in csv.DictReader(file)]
    assert cuts[:3] == [0, 0, 2 * len(ranks)]  # 8 → 4 → 2


def test_a_run_that_is_resumed_remembers(tmp_path):
    model, _, _ = toy.model_and_optimizer()
    state = {
        "sums": {},
        "count": 0,
        "seconds_data": 0.0,
        "memory": [{"width": 10, "samples": 6}],
    }
    task = Short(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    run = loop.Run(model, task, optimizer, scheduler, World())
    loop.train(
        run,
        {"train": list(toy.batches())},
        Steps(4, per_epoch=4),
        position={"running": [state], "samples": 0},
    )
    assert set(task.sizes) == {6}


def test_a_wrapped_model_raises_as_before():
    """DDP and FSDP send messages within their passes, which cannot be taken again by one process."""

    class Sharded(nn.Sequential):
        def set_requires_gradient_sync(self, *args):
            pass

    model, _, _ = toy.model_and_optimizer()
    wrapped = Sharded(*model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    run = loop.Run(wrapped, Short(6), optimizer, scheduler, World())
    with pytest.raises((torch.OutOfMemoryError, TrainingError)):
        loop.train(run, {"train": list(toy.batches())}, Steps(4, per_epoch=4))
