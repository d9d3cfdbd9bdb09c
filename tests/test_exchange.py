"""Groups of processes that take steps on their own, and exchange: --sync-every."""

import json

import pytest
import torch
from helpers import REPO, TINY, read_logs, run, write_rows

from histocc.trainer import loop
from histocc.trainer.exchange import Exchanges
from histocc.trainer.hooks import Callbacks, Intervals, StepHooks, Steps
from histocc.trainer.meter import Meter

CODE = """
import copy, json, sys
sys.path[:0] = ["{repo}", "{repo}/tests"]
import torch
from histocc.runtime.arguments import make_parser
from histocc.runtime.entrypoint import add_process_arguments, start
from histocc.runtime.groups import make_groups
from histocc.runtime.reduction import GradientReducer
from histocc.runtime.world import World
from histocc.trainer import loop
from histocc.trainer.exchange import Exchanges, GroupExchange, SyncSettings
from histocc.trainer.hooks import Callbacks, Intervals, Steps
import test_toy_task as toy

START, EVERY, TOTAL = 3, 4, 24
LAST, RATE, MOMENTUM = {last}, {rate}, {momentum}

def make():
    model, optimizer, scheduler = toy.model_and_optimizer()
    model[1].p = 0.0
    return model, optimizer, scheduler

def work(args, world):
    model, optimizer, scheduler = make()
    groups = make_groups(world, "process")
    settings = SyncSettings(EVERY, "process", START, "none", RATE, MOMENTUM)
    reducer = GradientReducer(model.parameters(), world.size)
    exchange = GroupExchange(model.parameters(), groups, Exchanges(START, EVERY, LAST), settings)
    exchange.reducer = reducer.within(groups.inside, 1)
    run = loop.Run(model, toy.Toy(), optimizer, scheduler, world, reducer=reducer, exchange=exchange)
    rows = []
    loop.train(run, {{"train": toy.Loader(world)}}, Steps(LAST), Intervals(log=1), Callbacks(log=rows.append))
    weights = [p.tolist() for p in model.parameters()]
    if world.is_main:
        print("FOUND", json.dumps([weights, [[row["step"], row["train_loss"]] for row in rows]]))

def alone(ranks=2):
    "The same by plain loops: in each step both models, or that of each, and the formulas of the paper."
    models = [make() for _ in range(ranks)]
    shares = [list(toy.batches(World(rank=rank, size=ranks))) for rank in range(ranks)]
    common = [p.detach().clone() for p in models[0][0].parameters()]
    momentum, losses = [torch.zeros_like(p) for p in common], []
    for step in range(1, LAST + 1):
        total = 0.0
        for rank, (model, optimizer, _) in enumerate(models):
            parts = range(ranks) if step <= START else [rank]
            batches = [shares[part][(step - 1) % 4] for part in parts]
            error = torch.cat([model(b["x"])[:, 0] - b["y"] for b in batches])
            optimizer.zero_grad()
            (error**2).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += float((error**2).sum()) / (ranks if step <= START else 1)
        losses.append(total / 12)
        for _, _, scheduler in models:
            scheduler.step()
        if step == START:
            common = [p.detach().clone() for p in models[0][0].parameters()]
        if step > START and ((step - START) % EVERY == 0 or step == LAST):
            with torch.no_grad():
                for i, before in enumerate(common):
                    now = [list(model.parameters())[i] for model, _, _ in models]
                    moved = before - sum(now) / ranks
                    momentum[i] = MOMENTUM * momentum[i] + moved
                    before -= RATE * (moved + MOMENTUM * momentum[i])
                    for p in now:
                        p.copy_(before)
    print("FOUND", json.dumps([[p.tolist() for p in common], losses]))

parser = make_parser("toy", "")
add_process_arguments(parser)
start(parser, lambda args, world: work(args, world) if world.size > 1 else alone(), ["--device", "cpu"])
"""


def found(output):
    line = next(line for line in output.splitlines() if line.startswith("FOUND"))
    return json.loads(line.removeprefix("FOUND"))


@pytest.mark.processes
@pytest.mark.parametrize(
    "rate, momentum, last", [(0.7, 0.9, 13), pytest.param(1.0, 0.0, 24, marks=pytest.mark.full)]
)
def test_weights_are_those_of_plain_loops(tmp_path, rate, momentum, last):
    """SGD with Nesterov momentum on what the groups have moved by; and the mean of their weights."""
    script = tmp_path / "toy.py"
    script.write_text(CODE.format(repo=str(REPO), rate=rate, momentum=momentum, last=last))
    weights, rows = found(run(script, processes=2))
    expected, losses = found(run(script))
    for own, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(torch.tensor(own), torch.tensor(other), rtol=1e-9, atol=1e-12)
    exchanges = Exchanges(3, 4, last)
    assert [step for step, _ in rows] == [step for step in range(1, last + 1) if exchanges.together(step)]
    before = 0
    for step, loss in rows:  # the mean over all samples of all groups since the row before
        assert loss == pytest.approx(sum(losses[before:step]) / (step - before), rel=1e-9)
        before = step


def test_when_they_are_together():
    exchanges = Exchanges(start=5, every=4, total=16)
    assert [step for step in range(1, 17) if exchanges.together(step)] == [1, 2, 3, 4, 5, 9, 13, 16]
    assert [step for step in range(1, 17) if exchanges.due(step)] == [9, 13, 16]
    assert [exchanges.next(step) for step in (4, 6, 9, 10, 14)] == [4, 9, 9, 13, 16]


def arguments(folder, name, *more):
    train = write_rows(folder / "train.csv", 96)
    val = write_rows(folder / "val.csv", 10, start=96)
    return [
        *("--train-data", train, "--val-data", val, "--formatter", "hisco", "--save-dir", folder / name),
        *("--target-cols", "hisco_1", "hisco_2", *TINY, "--global-batch-size", 12, "--batch-size", 6),
        *("--num-epochs", 3, "--log-interval", 5, "--eval-interval", 9, "--save-interval", 7),
        *("--sync-every", 4, "--sync-group", "process", "--sync-start", 3, "--learning-rate", 1e-3, *more),
    ]


def state(folder):
    return torch.load(folder / "last.bin", weights_only=True)


@pytest.mark.processes
@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_same(tmp_path):
    """Also when its number of steps ends between two exchanges: it goes on to the next one."""
    said = run("train_mixer.py", *arguments(tmp_path, "whole"), processes=2)
    assert "2 groups take 4 steps each on their own between two exchanges" in said
    said = run("train_mixer.py", *arguments(tmp_path, "parts", "--max-steps", 9), processes=2)
    assert "Stopped at step 11 of 24" in said
    parts = state(tmp_path / "parts")
    assert parts["step"] == 11 and len(parts["groups"]) == 1 and parts["outer"]["momentum"][0].abs().sum() > 0
    run("train_mixer.py", *arguments(tmp_path, "parts"), processes=2)
    a, b = state(tmp_path / "whole"), state(tmp_path / "parts")
    for name in a["model"]:
        assert torch.equal(a["model"][name], b["model"][name]), name
    for own, other in zip(
        [a["optimizer"], a["groups"][0]["optimizer"]], [b["optimizer"], b["groups"][0]["optimizer"]]
    ):
        for number, entry in own["state"].items():
            assert all(torch.equal(entry[name], other["state"][number][name]) for name in entry)
    assert torch.equal(a["outer"]["momentum"][0], b["outer"]["momentum"][0])
    one, two = (
        [(row["step"], row["train_loss"], row["val_loss"]) for row in read_logs(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert [row for row in two if row in one] == [row for row in one if row[0] != 11] or one == two
    groups = [
        part["optimizer"]["state"][0]["exp_avg"] for part in ({"optimizer": a["optimizer"]}, a["groups"][0])
    ]
    assert not torch.equal(*groups)  # each has its own


STOPS = """
import os, signal, sys, time
sys.path[:0] = ["{repo}"]
from histocc.trainer.exchange import GroupExchange

after_step = GroupExchange.after_step

def asked_to_stop(self, step, *samples):
    found = after_step(self, step, *samples)
    if step == {step} and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
    return found

GroupExchange.after_step = asked_to_stop
from train_mixer import main
main()
"""


@pytest.mark.processes
@pytest.mark.full
def test_a_stop_at_an_epochs_end_comes_at_the_next_exchange(tmp_path):
    """An epoch has 8 steps, and exchanges come after steps 7 and 11."""
    script = tmp_path / "stops.py"
    script.write_text(STOPS.format(repo=str(REPO), step=8))
    run("train_mixer.py", *arguments(tmp_path, "whole"), processes=2)
    said = run(script, *arguments(tmp_path, "parts"), processes=2)
    assert "Stopped by SIGTERM at step 11 of 24" in said
    run("train_mixer.py", *arguments(tmp_path, "parts"), processes=2)
    a, b = state(tmp_path / "whole"), state(tmp_path / "parts")
    assert all(torch.equal(value, b["model"][name]) for name, value in a["model"].items())
    assert read_logs(tmp_path / "parts")[-1]["train_loss"] == read_logs(tmp_path / "whole")[-1]["train_loss"]


class Ranks:
    """The world of one rank, to which the others say `others`."""

    def __init__(self, rank, size, others=()):
        self.rank, self.size, self.is_main, self.others = rank, size, rank == 0, others

    def gather(self, value):
        return [value, *self.others]


def test_the_open_row_of_the_log_counts_each_sample_once():
    """Of two groups of a process each, with 40 and 24 samples, and of two processes together with 64."""

    def parts(counts, ranks):
        own = {} if ranks is None else {"ranks_of_group": ranks}
        return [{"sums": {"loss": count / 2}, "count": count, "seconds_data": 0.0, **own} for count in counts]

    def found(running, size, group):
        return [
            loop._own_share(running, Ranks(rank, size, [group] * (size - 1)), group) for rank in range(size)
        ]

    alone, together = parts([40, 24], 1), parts([64, 64], None)
    assert found(alone, 2, 1) == alone and found(together, 2, None) == together
    (one,) = found(alone, 1, None)
    assert (one["count"], one["sums"]["loss"]) == (64, 32)
    for running in (alone, together):
        for size, group in ((4, 1), (4, 2), (2, 2)):
            shares = found(running, size, group)
            assert sum(each["count"] / group for each in shares) == 64
            assert sum(each["sums"]["loss"] for each in shares) == sum(each["count"] / 2 for each in running)


def test_groups_agree_whether_the_weights_are_in_doubt():
    """One had two steps without a finite gradient at the end, the other none: both save, or neither does."""
    doubts = []
    for own, other in ((True, (0, 0)), (False, (2, 2))):
        meter = Meter(ranks_of_group=1)
        hooks = StepHooks(Ranks(0, 2, [other]), meter, Steps(10), Intervals(), Callbacks())
        for step in (1, 2):
            hooks.count_bad_steps(torch.tensor(own), 20, step, together=step == 2)
        doubts.append(hooks._doubt())
    assert doubts == ["the last 2 steps had no finite gradient"] * 2


@pytest.mark.full
@pytest.mark.processes
def test_on_another_number_of_groups_moments_are_averaged(tmp_path):
    run("train_mixer.py", *arguments(tmp_path, "run", "--max-steps", 11), processes=2)
    before = state(tmp_path / "run")
    said = run("train_mixer.py", *arguments(tmp_path, "run", "--max-steps", 12))
    assert "2 groups of processes took steps on their own before, and now there is 1" in said
    assert "groups" not in state(tmp_path / "run")
    said = run("train_mixer.py", *arguments(tmp_path, "run"), processes=3)
    assert "3 groups take 4 steps each" in said and state(tmp_path / "run")["step"] == 24
    assert len(state(tmp_path / "run")["groups"]) == 2 and before["step"] == 11


@pytest.mark.full
@pytest.mark.processes
def test_nodes_are_groups(tmp_path):
    """Two nodes of two processes, which share the rows of their node."""
    more = ("--sync-group", "node", "--max-steps", 12)
    said = run("train_mixer.py", *arguments(tmp_path, "nodes", *more), processes=4, nodes=2)
    assert "2 groups take 4 steps each" in said and "Nodes: 2" in said
    found = state(tmp_path / "nodes")
    assert len(found["groups"]) == 1 and found["step"] == 15
    run("train_mixer.py", *arguments(tmp_path, "two", *more[2:]), processes=2)
    for row, other in zip(read_logs(tmp_path / "nodes"), read_logs(tmp_path / "two")):
        assert row["step"] == other["step"] and row["train_loss"] == pytest.approx(
            other["train_loss"], rel=0.2
        )


@pytest.mark.full
def test_what_cannot_be_is_said(tmp_path):
    said = run("train_mixer.py", *arguments(tmp_path, "no", "--parallel", "fsdp"), code=2)
    assert "--sync-every with --parallel fsdp" in said
    said = run("train_mixer.py", *arguments(tmp_path, "no", "--reduce", "during"), code=2)
    assert "--sync-every needs --reduce after" in said
    said = run("train_mixer.py", *arguments(tmp_path, "one", "--max-steps", 1))
    assert "there is one group of processes" in said
