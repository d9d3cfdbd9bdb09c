"""The trainer with another model: a linear map of ten numbers, trained, resumed, stopped, evaluated."""

import contextlib
import copy
import json

import pytest
import torch
from helpers import REPO, examples, run
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from histocc.runtime import checkpoint
from histocc.runtime.errors import TrainingError
from histocc.runtime.world import World
from histocc.trainer import loop
from histocc.trainer.log import log_columns

ROWS, STEPS = 48, 24
INTERVALS = {"log_interval": 5, "eval_interval": 8, "save_interval": 6}
BEST_EARLY = 0.1  # validated on smaller numbers the loss is least at step 10 and grows from there


class Toy:
    """Numbers [B, 10] → one number: squared and absolute error, and how often the sign is right."""

    columns = ("loss", "loss_absolute", "sign_acc", "size")

    def losses(self, model, batch):
        error = model(batch["x"])[:, 0] - batch["y"]
        return {"loss": error**2, "loss_absolute": error.abs()}

    def metrics(self, model, batch):
        right = (model(batch["x"])[:, 0] > 0) == (batch["y"] > 0)
        positive = (batch["y"] > 0).double()
        return {
            **self.losses(model, batch),
            "sign_acc": (right.double() * positive, positive),
            "size": batch["y"],
        }


def batches(world=None, size=12, scale=1.0):
    """Every rank's share of batches that are the same on any number of processes."""
    world = world or World()
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, 10, generator=generator, dtype=torch.float64)
    y = x @ torch.arange(10, dtype=torch.float64) / 10 * scale
    for first in range(0, ROWS, size):
        own = slice(first + world.rank, first + size, world.size)
        yield {"x": x[own], "y": y[own], "global_count": size}


class Loader:
    def __init__(self, world, scale=1.0):
        self.world, self.scale = world, scale

    def __len__(self):
        return ROWS // 12

    def __iter__(self):
        return batches(self.world, scale=self.scale)

    def at(self, epoch, first_batch):
        return iter(list(batches(self.world, scale=self.scale))[first_batch:])


def model_and_optimizer(saved=None):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 4), nn.Dropout(0.2), nn.Linear(4, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS))
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    return model, optimizer, scheduler


def train(
    world,
    saved=None,
    stop=None,
    dropout=True,
    rows=None,
    intervals=INTERVALS,
    val_scale=1.0,
):
    """(rows of the log, what was saved last); the rows also stand in `rows`, the latter in `saved`, as they
    come.
    """
    from histocc.runtime.parallel import wrap

    kept, rows = {} if saved is None else saved, [] if rows is None else rows
    saved = copy.deepcopy(kept)  # an optimizer changes what it is given
    raw_model, optimizer, scheduler = model_and_optimizer(saved)
    if not dropout:
        raw_model[1].p = 0.0
    model = wrap(raw_model, world)

    def save(step, names, position):
        state = {"model": raw_model, "optimizer": optimizer, "scheduler": scheduler}
        kept.update({name: copy.deepcopy(part.state_dict()) for name, part in state.items()})
        kept.update(step=step, position=position, names=names)
        if checkpoint.BEST in names:
            kept["best"] = step

    run = loop.Run(
        model,
        Toy(),
        optimizer,
        world,
        seed=3,
        scheduler=scheduler,
        flops=lambda batch: 3.0 * len(batch["x"]),
        total_steps=STEPS,
        save=save,
        log=rows.append,
        stop=stop,
        **intervals,
    )
    state = loop.State.resumed(saved["step"], saved["position"], world) if saved else None
    loop.train(run, {"train": Loader(world), "val": Loader(world, val_scale)}, state)
    return rows, kept


def same(a, b):
    return all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])


def test_columns_come_from_the_task():
    names = "step,epoch,samples,train_loss,train_loss_absolute,grad_norm,lr,samples_per_sec,seconds_data,"
    names += "val_loss,val_loss_absolute,sign_acc,size,skipped_steps,model_flops_per_sec,mfu"
    assert ",".join(log_columns(Toy.columns)) == names
    rows, _ = train(World())
    assert [row["step"] for row in rows] == [5, 8, 10, 15, 16, 20, 24]
    last = rows[-1]
    assert set(log_columns(Toy.columns)) <= set(last) and last["samples"] == 12 * STEPS
    assert last["val_loss"] < rows[1]["val_loss"] and 0.5 < last["sign_acc"] <= 1


class Killed(Exception):
    """In place of SIGKILL: nothing is saved, nothing is said."""


def interrupted(ends, intervals):
    """The rows of a run that ends as many times as `ends` has entries, (how, after how many questions whether
    to stop), and is resumed from what was saved last; and its last checkpoint. A step that was logged before
    a kill and taken again is logged twice with the same figures, of which the later row counts.
    """
    rows, kept = {}, {}
    for how, number in [*ends, (None, 0)]:
        asked = iter(range(10**6))

        def ask(how=how, number=number, asked=asked):
            if next(asked) != number or how is None:
                return False
            if how == "killed":
                raise Killed
            return True

        logged = []
        with contextlib.suppress(Killed):
            train(World(), kept, ask, rows=logged, intervals=intervals, val_scale=BEST_EARLY)
        for row in logged:
            if row["step"] in rows:
                assert figures(rows[row["step"]]) == figures(row)
            rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)], kept


def figures(row):
    return {name: row.get(name) for name in ("step", "samples", "train_loss", "val_loss", "sign_acc", "size")}


@examples(200)
@given(
    ends=st.lists(st.tuples(st.sampled_from(["stopped", "killed"]), st.integers(0, 60)), max_size=5),
    log=st.integers(1, 7),
    validate=st.integers(1, 9),
    save=st.integers(1, 9),
)
def test_whenever_it_ends_the_resumed_run_is_the_whole_one(ends, log, validate, save):
    intervals = {"log_interval": log, "eval_interval": validate, "save_interval": save}
    rows, whole = train(World(), intervals=intervals, val_scale=BEST_EARLY)
    again, resumed = interrupted(ends, intervals)
    assert same(whole, resumed) and resumed["step"] == STEPS and resumed["best"] == whole["best"]
    assert [figures(row) for row in again] == [figures(row) for row in rows]


@pytest.mark.parametrize("polls, step", [(10, 8), (15, 9)])  # inside the validation at step 8; behind it
def test_stopped_and_resumed_equals_uninterrupted(polls, step):
    rows, whole = train(World())
    asked = iter(range(100))
    first, saved = train(World(), stop=lambda: next(asked) == polls)
    assert saved["names"] == ["last.bin"] and saved["step"] == step
    assert saved["position"]["unfinished"] == (step == 8)
    second, resumed = train(World(), saved=saved)
    assert same(whole, resumed)
    assert list(map(figures, rows)) == list(map(figures, [*first, *second]))


CODE = """
import json, sys
sys.path[:0] = ["{repo}", "{repo}/tests"]
from histocc.runtime.config import Parser, Processes
from histocc.runtime.entrypoint import start
import test_toy_task as toy

def work(args, world):
    rows, kept = toy.train(world, dropout=False)
    if world.is_main:
        kept = ("train_loss", "val_loss", "sign_acc", "samples", "skipped_steps")
        found = [{{name: row[name] for name in kept if name in row}} for row in rows]
        print("ROWS", json.dumps(found))

start(Parser(Processes, "toy", ""), work, ["--device", "cpu"])
"""


@pytest.mark.processes
def test_one_and_two_processes_agree(tmp_path):
    script, found = tmp_path / "toy.py", []
    script.write_text(CODE.format(repo=str(REPO)))
    for processes in (None, 2):
        output = run(script, processes=processes)
        line = next(line for line in output.splitlines() if line.startswith("ROWS"))
        found.append(json.loads(line.removeprefix("ROWS")))
    assert len(found[0]) == len(found[1]) == 7
    for one, two in zip(*found):
        assert two == pytest.approx(one, rel=1e-9)


# ---- tasks that do not keep to the interface


def told(**changes):
    class Wrong(Toy):
        pass

    for name, value in changes.items():
        setattr(Wrong, name, value)
    model, optimizer, scheduler = model_and_optimizer()
    run = loop.Run(model, Wrong(), optimizer, World(), scheduler=scheduler, total_steps=1)
    with pytest.raises(ValueError) as error:
        loop.train(run, {"train": Loader(World()), "val": Loader(World())})
    return str(error.value)


def losses(function):
    return lambda self, model, batch: function(model(batch["x"])[:, 0] - batch["y"])


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"losses": losses(lambda e: {"loss": e.mean(), "loss_absolute": e})},
            "'loss' has shape [], expected a value a sample: [12]",
        ),
        ({"losses": losses(lambda e: {"loss": e, "loss_absolute": e[:3]})}, "'loss_absolute' has shape [3]"),
        ({"losses": losses(lambda e: {"loss": e[:, None], "loss_absolute": e})}, "'loss' has shape [12, 1]"),
        (
            {"losses": losses(lambda e: {"loss": e[:5], "loss_absolute": e[:5]})},
            "expected a value a sample: [12]",
        ),
        ({"losses": losses(lambda e: {"loss": 1.0, "loss_absolute": e})}, "'loss' has shape float"),
        ({"losses": losses(lambda e: {"loss_absolute": e})}, "Wrong.losses returned loss_absolute; it must"),
        ({"losses": losses(lambda e: e)}, "Wrong.losses returned Tensor"),
        ({"metrics": losses(lambda e: {"loss": e})}, "must return a dict of loss, loss_absolute, sign_acc"),
        ({"columns": ("loss", "sign_acc", "size")}, "Wrong.losses returned loss, loss_absolute"),
        ({"columns": ("loss", "lr")}, "listed twice or the loop's own"),
        ({"columns": ("loss", "val_loss")}, "listed twice or the loop's own"),
        ({"columns": ("loss", "loss")}, "listed twice or the loop's own"),
    ],
)
def test_a_task_that_returns_something_else_is_told_so(changes, words):
    assert words in told(**changes)


# ---- batches


class Plain:
    """Mean of the batch's values as loss, its part as a ratio; weights and counts of any size."""

    columns = ("loss", "part")

    def losses(self, model, batch):
        return {"loss": model(batch["x"])[:, 0] ** 2}

    def metrics(self, model, batch):
        ones = torch.full_like(batch["x"][:, 0], 0.01)
        return {"loss": batch["x"][:, 0], "part": (ones, 2 * ones)}


def plain_run(train, val=None, steps=2):
    """(rows of the log, names of saved files)"""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
    rows, names = [], []
    run = loop.Run(
        model,
        Plain(),
        optimizer,
        World(),
        scheduler=scheduler,
        total_steps=steps,
        log_interval=1,
        epoch_name=checkpoint.EPOCH,
        save=lambda step, due, position: names.extend(due),
        log=rows.append,
    )
    loop.train(run, {"train": train, "val": val})
    return rows, names


def batch(n=4, **more):
    return {"x": torch.arange(3.0 * n).reshape(n, 3), **more}


def test_weights_and_counts_below_one_are_weights_and_counts():
    rows, _ = plain_run([batch()], [batch(weights=torch.full((4,), 0.01))])
    assert rows[-1]["val_loss"] == pytest.approx(4.5) and rows[-1]["part"] == pytest.approx(0.5)


def test_a_count_may_be_a_tensor():
    rows, _ = plain_run([batch(global_count=torch.tensor(4))], steps=2)
    assert [row["samples"] for row in rows] == [4, 8] and rows[0]["train_loss"] is not None


def test_epochs_are_those_of_the_loader():
    assert plain_run([batch()] * 2, steps=5)[1] == [
        "epoch_1.bin",
        "last.bin",
        "epoch_2.bin",
        "last.bin",
        "last.bin",
    ]


@pytest.mark.parametrize(
    "train, val, words",
    [
        ([], None, "the data loader gave no batch"),
        ([batch()], [], "the validation has no sample"),
        ([batch()], [batch(0)], "the validation has no sample"),
        ([(torch.ones(4, 3),)], None, "a batch must be a dict"),
        ([batch(last_micro_batch=False), batch()], None, "needs global_count"),
        ([batch(global_count=0)], None, "global_count is 0"),
        ([batch(0)], None, "global_count is 0"),
    ],
)
def test_batches_that_do_not_keep_to_the_interface_are_told_so(train, val, words):
    with pytest.raises((ValueError, TrainingError), match=words):
        plain_run(train, val)
