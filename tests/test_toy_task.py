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
from histocc.runtime.device import Precision
from histocc.runtime.errors import TrainingError
from histocc.runtime.parallel import wrap
from histocc.runtime.world import World
from histocc.trainer import loop, script
from histocc.trainer.batches import BatchPlan, Rows, make_loader
from histocc.trainer.config import ScriptConfig
from histocc.trainer.schedule import Schedule

ROWS, STEPS, SIZE = 48, 24, 12
ALONE = World()
FIGURES = ("step", "samples", "train_loss", "val_loss", "sign_acc", "size", "lr", "skipped_steps")


class Toy:
    """Numbers [B, 10] → one number: squared and absolute error, and how often the sign is right."""

    columns = ("loss", "loss_absolute", "sign_acc", "size")

    def losses(self, model, batch):
        error = model(batch["x"])[:, 0] - batch["y"]
        return {"loss": error**2, "loss_absolute": error.abs()}

    def metrics(self, model, batch):
        right = (model(batch["x"])[:, 0] > 0) == (batch["y"] > 0)
        positive = (batch["y"] > 0).double()
        ratio = (right.double() * positive, positive)
        return {**self.losses(model, batch), "sign_acc": ratio, "size": batch["y"]}


class Loader:
    """Every rank's share of batches that are the same on any number of processes. bad: steps, from 0, whose
    loss is no number.
    """

    def __init__(self, world=ALONE, scale=1.0, bad=()):
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(ROWS, 10, generator=generator, dtype=torch.float64)
        y = x @ torch.arange(10, dtype=torch.float64) / 10 * scale
        shares = [slice(first + world.rank, first + SIZE, world.size) for first in range(0, ROWS, SIZE)]
        self.batches = [{"x": x[share], "y": y[share], "global_count": SIZE} for share in shares]
        self.bad = bad

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)

    def at(self, epoch, first_batch):
        for number, batch in enumerate(self.batches[first_batch:], epoch * len(self) + first_batch):
            yield batch | {"y": batch["y"] * float("nan")} if number in self.bad else batch


def train(world=ALONE, saved=None, *, rows=None, dropout=0.2, scale=1.0, bad=(), **options):
    """(rows of the log, what was saved last); the rows also stand in `rows`, the latter in `saved`, as they
    come.
    """
    kept, rows = {} if saved is None else saved, [] if rows is None else rows
    saved = copy.deepcopy(kept)  # an optimizer changes what it is given
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 4), nn.Dropout(dropout), nn.Linear(4, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)  # as in a run
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for name, part in parts.items() if saved else ():
        part.load_state_dict(saved[name])

    def save(step, names, position):
        kept.update({name: copy.deepcopy(part.state_dict()) for name, part in parts.items()})
        kept.update(step=step, position=position)
        if checkpoint.BEST in names:
            kept["best"] = step

    defaults = {"log_interval": 5, "eval_interval": 8, "save_interval": 6}
    defaults["flops"] = lambda batch: 3.0 * len(batch["x"])
    run = loop.Run(
        wrap(model, world),
        Toy(),
        optimizer,
        world,
        seed=3,
        scheduler=scheduler,
        save=save,
        log=rows.append,
        **{"stop_step": STEPS, **defaults, **options},
    )
    state = loop.State.resumed(saved["step"], saved["position"], world) if saved else None
    loop.train(run, {"train": Loader(world, bad=bad), "val": Loader(world, scale)}, state)
    return rows, kept


def same(a, b):
    return all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])


def figures(rows):
    return [{name: row.get(name) for name in FIGURES} for row in rows]


def test_bad_steps_change_nothing_and_are_counted():
    assert same(train(stop_step=2)[1], train(stop_step=3, bad={2})[1])
    rows, rates = train(bad={1, 6, 7, 8, 9})[0], [row["lr"] for row in train()[0]]
    assert [row["skipped_steps"] for row in rows[:4]] == [1, 2, 2, 0] and rows[-1]["samples"] == SIZE * STEPS
    assert "train_loss" not in rows[2] and rows[3]["train_loss"] > 0
    assert [row["lr"] for row in rows] == rates  # it goes by steps, skipped or not


def test_dropout_is_drawn_for_each_step_and_rank_anew():
    draws, losses = [], Toy.losses
    task = type("Task", (Toy,), {"losses": lambda *x: draws.append(float(torch.rand(()))) or losses(*x)})
    for rank, seed in ((0, 3), (1, 3), (0, 4), (0, 3)):
        model = nn.Linear(10, 1).double()
        optimizer, more = torch.optim.SGD(model.parameters()), {"seed": seed, "steps_per_epoch": 4}
        run = loop.Run(model, task(), optimizer, World(rank), **more)
        loop.train_one_epoch(run, Loader().at(0, 0), loop.State(), 0)
    assert len({*draws}) == 12 and draws[:4] == draws[12:]


def test_the_seed_decides_the_order_and_dropout_of_a_run():
    seeds = set()
    for seed in (1, 2, 1):
        args, rows = ScriptConfig(seed=seed), Rows()
        training, schedule = script.Training(nn.Linear(2, 1), Toy(), rows), Schedule.of(args, 3, 1)
        loader = make_loader(args, ALONE, rows, BatchPlan(9, 3))
        run = script.make_run(args, ALONE, Precision("float32"), training, schedule, loader, None)
        seeds |= {run.seed, loader.dataset.seed}
    assert len(seeds) == 4


def test_fp16_clips_and_logs_the_gradient_without_the_scale_of_the_loss():
    found = []
    for name in ("float32", "fp16"):
        torch.manual_seed(1)
        model, rows = nn.Linear(3, 1, bias=False), []
        optimizer, precision = torch.optim.SGD(model.parameters(), lr=1.0), Precision(name)
        more = {"clip_norm": 0.001, "stop_step": 3, "log": rows.append, "log_interval": 1}
        run = loop.Run(model, Plain(), optimizer, ALONE, precision, **more)
        loop.train(run, {"train": [{"x": batch()["x"] / 50}] * 3})
        found.append([*(row["grad_norm"] for row in rows), *model.weight[0].tolist()])
    assert found[1] == pytest.approx(found[0], rel=0.01) and found[0][0] > 0.005


class Killed(Exception):
    """In place of SIGKILL: nothing is saved, nothing is said."""


@examples(200)
@given(
    ends=st.lists(st.tuples(st.sampled_from(["stopped", "killed"]), st.integers(0, 60)), max_size=5),
    bad=st.sets(st.integers(0, STEPS - 2), max_size=4),
    log=st.integers(1, 7),
    validate=st.integers(1, 9),
    save=st.integers(1, 9),
    patience=st.none() | st.integers(1, 4),
)
def test_whenever_it_ends_the_resumed_run_is_the_whole_one(ends, bad, log, validate, save, patience):
    """ends: how, and after how many questions whether to stop, which are asked in a validation, too. A step
    that was logged before a kill is logged again with the same figures.
    """
    options = {"log_interval": log, "eval_interval": validate, "save_interval": save, "bad": bad}
    options["flops"] = None  # the speed of the device, which takes longer to measure than the run
    options |= {"scale": 0.1, "patience": patience}  # the loss is least at step 10 and grows from there
    rows, whole = train(**options)
    logged, kept = {}, {}
    for how, number in [*ends, (None, 0)]:
        asked, new = iter(range(10**6)), []

        def stop(how=how, number=number, asked=asked):
            if next(asked) != number or how is None:
                return False
            if how == "killed":
                raise Killed
            return True

        with contextlib.suppress(Killed):
            train(saved=kept, stop=stop, rows=new, **options)
        for row in new:
            assert figures([logged.get(row["step"], row)]) == figures([row])
            logged[row["step"]] = row
    assert same(whole, kept) and kept["step"] == whole["step"] and kept["best"] == whole["best"]
    assert figures(logged[step] for step in sorted(logged)) == figures(rows)


@pytest.mark.parametrize("best_by, best, last", [(None, 10, 14), (lambda figures: 1.0, 2, 6)])
def test_it_ends_when_validations_in_a_row_are_no_better(best_by, best, last):
    options = {"scale": 0.1, "eval_interval": 2, "best_by": best_by}
    (rows, kept), whole = train(patience=2, **options), train(**options)[1]
    assert (rows[-1]["step"], kept["step"], kept["best"]) == (last, last, best)
    assert train(saved=kept, patience=2, **options)[0] == []  # finished
    assert same(train(saved=kept, **options)[1], whole)


CODE = f"""
import json, sys
sys.path[:0] = ["{REPO}", "{REPO}/tests"]
from histocc.runtime.config import Parser, ProcessFlags
from histocc.runtime.frame import start
import test_toy_task as toy

def work(args, world):
    options = {{"dropout": 0.0, "scale": 0.1, "eval_interval": 3, "patience": 2}}
    (rows, whole), asked = toy.train(world, **options), iter(range(10**6))
    parts = toy.train(world, stop=lambda: next(asked) == 32, **options)[1]
    assert parts["step"] == 13 and parts["position"]["since_best"] == 1
    toy.train(world, parts, **options)
    assert parts["step"] == whole["step"] == 15 and toy.same(parts, whole)
    world.print("ROWS", json.dumps(toy.figures(rows)))

start(Parser(ProcessFlags, "toy", ""), work, ["--device", "cpu"])
"""


@pytest.mark.processes
def test_one_and_two_processes_agree(tmp_path):
    script, of_runs = tmp_path / "toy.py", []
    script.write_text(CODE)
    for processes in (None, 2):
        output = run(script, processes=processes)
        of_runs.append(json.loads(output.partition("ROWS ")[2].partition("\n")[0]))
    assert len(of_runs[0]) == len(of_runs[1]) == 7
    for one, two in zip(*of_runs):
        assert two == {name: value and pytest.approx(value, rel=1e-9) for name, value in one.items()}


# ---- tasks and batches that do, and do not, keep to the interface


def of_errors(function):
    return lambda self, model, batch: function(model(batch["x"])[:, 0] - batch["y"])


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"losses": lambda e: {"loss": e.mean(), "loss_absolute": e}}, "'loss' has shape []"),
        ({"losses": lambda e: {"loss": e, "loss_absolute": e[:3]}}, "'loss_absolute' has shape [3]"),
        ({"losses": lambda e: {"loss_absolute": e}}, "Wrong.losses returned loss_absolute; it must"),
        ({"losses": lambda e: e}, "Wrong.losses returned Tensor"),
        ({"metrics": lambda e: {"loss": e}}, "must return a dict of loss, loss_absolute, sign_acc"),
        ({"columns": ("loss", "lr")}, "listed twice or the loop's own"),
        ({"columns": ("loss", "loss")}, "listed twice or the loop's own"),
    ],
)
def test_a_task_that_returns_something_else_is_told_so(changes, said):
    model = nn.Linear(10, 1).double()
    changes = {name: of_errors(each) if callable(each) else each for name, each in changes.items()}
    task = type("Wrong", (Toy,), changes)()
    run = loop.Run(model, task, torch.optim.SGD(model.parameters()), World(), stop_step=1)
    with pytest.raises(ValueError) as error:
        loop.train(run, {"train": Loader(), "val": Loader()})
    assert said in str(error.value)


class Plain:
    """Mean of the batch's values as loss, its part as a ratio; weights and counts of any size."""

    columns = ("loss", "part")

    def losses(self, model, batch):
        return {"loss": model(batch["x"])[:, 0].float() ** 2}

    def metrics(self, model, batch):
        ones = torch.full_like(batch["x"][:, 0], 0.01)
        return {"loss": batch["x"][:, 0], "part": (ones, 2 * ones)}


def plain_run(batches, val=None, steps=2):
    model, rows, names = nn.Linear(3, 1), [], []
    run = loop.Run(
        model,
        Plain(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        World(),
        stop_step=steps,
        log_interval=1,
        epoch_name=checkpoint.EPOCH,
        save=lambda step, due, position: names.extend(due),
        log=rows.append,
    )
    loop.train(run, {"train": batches, "val": val})
    return rows, names


def batch(n=4, **more):
    return {"x": torch.arange(3.0 * n).reshape(n, 3), **more}


def test_counts_and_weights_are_of_any_size_and_epochs_those_of_the_loader():
    count = torch.tensor(4)
    rows, names = plain_run([batch(global_count=count)] * 2, [batch(weights=torch.full((4,), 0.01))], steps=5)
    assert rows[-1]["val_loss"] == pytest.approx(4.5) and rows[-1]["part"] == pytest.approx(0.5)
    assert [row["samples"] for row in rows] == [4, 8, 12, 16, 20] and rows[0]["train_loss"] is not None
    assert names == ["epoch_1.bin", "last.bin", "epoch_2.bin", "last.bin", "last.bin", "best.bin"]


@pytest.mark.parametrize(
    "batches, val, said",
    [
        ([], None, "the data loader gave no batch"),
        ([batch()], [], "the validation has no sample"),
        ([batch()], [batch(0)], "the validation has no sample"),
        ([batch(last_micro_batch=False), batch()], None, "needs global_count"),
    ],
)
def test_batches_that_do_not_keep_to_the_interface_are_told_so(batches, val, said):
    with pytest.raises((ValueError, TrainingError), match=said):
        plain_run(batches, val)
