"""What a run says and logs: banner, console, logs.csv, status.json, TensorBoard, W&B; its learning rate."""

import importlib.util
import json
import os
import re
import signal
import threading
import time
from unittest.mock import Mock

import pytest
import torch
from helpers import TINY, read, read_logs, run_here, write_csv, write_rows

import train_mixer
from histocc.runtime import signals
from histocc.runtime.files import OwnFiles
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import COLUMNS
from histocc.trainer import trackers
from histocc.trainer.banner import banner
from histocc.trainer.batches import BatchPlan
from histocc.trainer.config import ScriptConfig
from histocc.trainer.log import RunLog
from histocc.trainer.loop import State
from histocc.trainer.schedule import Schedule, linear_factor, set_learning_rate
from histocc.trainer.script import place_of

VALUES = {
    "step": 1200,
    "epoch": 1,
    "samples": 153600,
    "train_loss": 1 / 3,
    "train_loss_linear": 2 / 3,
    "train_loss_seq2seq": 1e-9 / 3,
    "grad_norm": 1.23456789,
    "lr": 2e-5 / 3,
    "samples_per_sec": 1234.5678,
    "seconds_data": 0.0123456789,
    "data_share": 0.034,
    "model_flops_per_sec": 41.26e9 + 1 / 3,
    "mfu": 0.23123456789,
}
VALIDATION = {
    "val_loss": 1 / 7,
    "val_loss_linear": 2 / 7,
    "val_loss_seq2seq": 3 / 7,
    "seq_acc": 0.5,
    "token_acc": 2 / 3,
    "flat_acc": 1 / 3,
}


def log_of(folder, start=0, *steps, **options):
    """A log in `folder` of a run that continues from step `start`, with rows of these steps."""
    log = RunLog(OwnFiles(str(folder), overwrite=True), COLUMNS, 5000, start, **options)
    for step in steps:
        log.row({**VALUES, **VALIDATION, "step": step})
    return log


def rows(folder):
    return read(folder / "logs.csv")


def steps(folder):
    return [int(row["step"]) for row in rows(folder)]


def test_columns_and_a_row(tmp_path):
    log = log_of(tmp_path)
    assert (tmp_path / "logs.csv").read_bytes() == (
        b"step,epoch,samples,train_loss,train_loss_linear,train_loss_seq2seq,grad_norm,lr,samples_per_sec,"
        b"seconds_data,val_loss,val_loss_linear,val_loss_seq2seq,seq_acc,token_acc,flat_acc,skipped_steps,"
        b"model_flops_per_sec,mfu\n"
    )
    log.row(VALUES)
    log.row({"step": 1300, "epoch": 2, **VALIDATION})
    assert (tmp_path / "logs.csv").read_text().splitlines()[1:] == [
        "1200,1,153600,0.333333333333,0.666666666667,3.33333333333e-10,1.23457,6.66667e-06,1234.57,0.0123457,"
        ",,,,,,,4.126e+10,0.231235",
        "1300,2,,,,,,,,,0.142857142857,0.285714285714,0.428571428571,0.5,0.666666666667,0.333333333333,,,",
    ]


def test_a_run_that_is_resumed_drops_later_rows_and_a_new_one_all(tmp_path):
    log_of(tmp_path, 0, 100, 200, 300)
    before = rows(tmp_path)
    log_of(tmp_path, 200, 250)
    assert steps(tmp_path) == [100, 200, 250] and rows(tmp_path)[:2] == before[:2]
    log_of(tmp_path, 200, again=True)  # the row of step 200 is to be written again
    assert steps(tmp_path) == [100]
    log_of(tmp_path)
    assert steps(tmp_path) == []
    os.remove(tmp_path / "logs.csv")
    log_of(tmp_path, 200, 300)
    assert steps(tmp_path) == [300]


def test_a_validation_is_written_again_and_the_row_of_a_fit_stays(tmp_path):
    log = log_of(tmp_path)
    for row in (VALUES, VALIDATION):
        log.row({"epoch": 0, **row, "step": 0})
    log_of(tmp_path, 0, again=True)
    assert [row["train_loss"] for row in rows(tmp_path)] == ["0.333333333333"]


def test_rows_of_other_columns_stay(tmp_path):
    log_of(tmp_path, 0, 100, 200)
    before = rows(tmp_path)
    others = [{"gone": "7", **{name: row[name] for name in row if name != "mfu"}} for row in before]
    write_csv(tmp_path / "logs.csv", [*others[0]], [row.values() for row in others])
    log_of(tmp_path, 200, 300)
    assert rows(tmp_path)[:2] == [{**row, "mfu": ""} for row in before]


def test_half_written_and_damaged_rows_are_left_out(tmp_path):
    log_of(tmp_path, 0, 100, 1200)
    content, before = (tmp_path / "logs.csv").read_bytes(), rows(tmp_path)
    last_row = content.rindex(b"\n", 0, -1) + 1
    for size in range(last_row, len(content)):
        (tmp_path / "logs.csv").write_bytes(content[:size])
        log_of(tmp_path, 1200, 1300)
        assert rows(tmp_path)[:-1] == before[:1] and steps(tmp_path)[-1] == 1300
    log_of(tmp_path, 0, 1, 2, 3)
    (tmp_path / "logs.csv").write_text((tmp_path / "logs.csv").read_text().replace("\n2,", '\n"x,')[:-4])
    log_of(tmp_path, 3)
    assert steps(tmp_path) == [1]


def test_rows_that_cannot_be_written_wait(tmp_path, capsys):
    log, path = log_of(tmp_path), tmp_path / "logs.csv"
    path.unlink()
    path.mkdir()
    log.row({"step": 1, "epoch": 0})
    path.rmdir()
    assert "WARNING" in capsys.readouterr().out
    log.close()
    assert steps(tmp_path) == [1]  # below the columns, which were gone too


def test_lines(tmp_path, capsys):
    log = log_of(tmp_path, 1100)
    log.started = time.monotonic() - 50.0  # 100 steps in 50 s: 3,800 more take 1,900 s
    log.row({**VALUES, "skipped_steps": 2})
    log.row({**VALUES, "mfu": None})
    log.row({"step": 1300, "epoch": 2, **VALIDATION, "seconds_val": 20.0})
    skipped, first, second, validation = capsys.readouterr().out.splitlines()
    assert skipped.startswith("step 1,200: steps ") and "skipped" in skipped and skipped.endswith(": 2")
    for figure in ("1,200/5,000", "epoch 2", "0.3333", "6.67e-06", "1,235 samples", "data 3%", "31m40s left"):
        assert figure in first and figure in second
    assert "41 GFLOP/s (23%" in first and "FLOP" not in second
    for figure in ("step 1,300", "loss 0.1429", "20s"):
        assert figure in validation
    assert "seq_acc 50.0 % · token_acc 66.7 % · flat_acc 33.3 %" in validation


def test_the_state_of_the_run(tmp_path):
    log = log_of(tmp_path, 0, 100)
    log.say("Note: something to look at")
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "running" and status["step"] == 100 and status["stop_step"] == 5000
    assert status["warning"].endswith("Note: something to look at")
    log.close("finished", 250)
    log.close("ended by an error")
    log_of(tmp_path, is_main=False).row(VALUES)  # rank 0 alone writes
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "finished" and status["step"] == 250


@pytest.mark.parametrize(
    "args, processes, expected",
    [
        ({}, 1, ["^=+\nDevice: CPU, ", "32 × 1 CPU process × 1", "Steps per epoch: 32\nEpochs"]),
        ({"accumulate_steps": 3}, 4, ["MULTI_CPU", "32 × 4 CPU processes × 3", "batch size: 384"]),
        ({"global_batch_size": 50}, 4, ["32 × 4 CPU", "batch size: 50"]),
        ({"lr_scaling": "linear", "learning_rate": 0.5}, 4, [r"rate: 2 \(0.5 with linear scaling"]),
        ({"num_epochs": 2, "max_steps": 5}, 1, [r"Epochs: 2 \(64 steps; .* step 5"]),
        ({}, 2, ["1 +2 +4 +8\n.* 32 +16 +8 +4\n"]),  # processes, and their steps per epoch
        ({"global_batch_size": 50}, 2, ["Steps per epoch: 20\n"]),
        ({"device": "cpu"}, 1, ["NO GPU IS USED: --device cpu\n"]),
        ({}, 1, ["NO GPU IS USED: no driver, CUDA_VISIBLE_DEVICES=7\n"]),
        ({"wandb_project_name": "x"}, 1, ["--wandb-project-name has no effect without --log-wandb"]),
    ],
)
def test_what_is_said_before_the_start(args, processes, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError("no driver\nmore")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    asked, world = ScriptConfig(**args), World(size=processes)
    plan = BatchPlan(1000, asked.total_batch(processes), processes, asked.samples_at_once)
    schedule = Schedule.of(asked, plan.steps_per_epoch, processes)
    text = banner(asked, world, ["Model: a line"], "", plan, schedule)
    for words in [*expected, "NO GPU IS USED: ", "\nModel: a line\n", "Precision: float32"]:
        assert re.search(words, text), text


# ---- TensorBoard and W&B get every row, and a resumed run continues the same curves


@pytest.fixture
def flags(tmp_path):
    train, val = write_rows(tmp_path / "train.csv", 24), write_rows(tmp_path / "val.csv", 6, 100)
    files = ["--train-data", train, "--val-data", val, "--save-dir", tmp_path / "run"]
    return [*files, *TINY, "--batch-size", 8, "--num-epochs", 2, "--eval-interval", 3, "--log-interval", 1]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.full
def test_tensorboard_holds_what_the_log_holds(flags, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for more in (["--max-steps", 4], []):
        run_here(train_mixer.main, *flags, "--tensorboard", *more)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name in ("train_loss", "val_loss", "seq_acc", "lr"):
        logged = {int(row["step"]): row[name] for row in read_logs(tmp_path / "run") if row[name] is not None}
        shown = {event.step: pytest.approx(event.value, rel=1e-5) for event in events.Scalars(name)}
        assert shown == logged, name


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.full
def test_wandb_writes_offline_and_a_resumed_run_has_the_same_id(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    flags += ["--log-wandb", "--wandb-project-name", "codes"]
    for more in (["--max-steps", 4], []):
        run_here(train_mixer.main, *flags, *more)
    written = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 2 and len({file.name for file in written}) == 1
    assert all(b"train_loss" in file.read_bytes() and b"codes" in file.read_bytes() for file in written)


def test_what_is_not_installed_is_said(flags, tmp_path, monkeypatch):
    spec, lacking = importlib.util.find_spec, ("tensorboard", "wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in lacking else spec(name))
    said = run_here(train_mixer.main, *flags, "--tensorboard", "--log-wandb", code=2)
    assert all(f"pip install {name}" in said for name in lacking) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("login, said", [("raise Error('no key.')", 1), ("raise TypeError", 0), ("0", 0)])
def test_a_login_that_wandb_lacks_is_said_before_anything_is_written(tmp_path, monkeypatch, login, said):
    """An older one raises for an unknown argument. A run that is resumed goes without W&B."""
    (tmp_path / "wandb.py").write_text(f"class Error(Exception): ...\ndef login(verify): {login}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    args = ScriptConfig(log_wandb=True, save_path=str(tmp_path))
    assert [problem.partition(". ")[0] for problem in args.problems()] == ["--log-wandb: no key"] * said
    (tmp_path / "last.bin").touch()
    assert not [*args.problems()]


def test_a_login_that_hangs_has_an_end(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("import time\ndef login(verify): time.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("histocc.trainer.config.LOGIN_SECONDS", 0.5)
    (problem,) = ScriptConfig(log_wandb=True, save_path=str(tmp_path)).problems()
    assert problem.startswith("--log-wandb: no answer within 0.5 s.")


def test_a_signal_ends_the_wait_for_a_library(capsys, monkeypatch):
    monkeypatch.setattr(trackers, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(trackers, "MAX_SECONDS", 600.0)
    with signals.listening() as stop:
        threading.Timer(0.3, stop.receive, [signal.SIGTERM]).start()
        trackers.Tracker("--log-wandb", threading.Event().wait)
    assert capsys.readouterr().out.startswith("WARNING: --log-wandb: no answer; logs.csv")


def test_a_library_that_cannot_be_opened_is_said_before_anything_is_cleared(
    flags, tmp_path, monkeypatch, capsys
):
    run_here(train_mixer.main, *flags, "--max-steps", 2)
    monkeypatch.setattr(trackers, "open_tensorboard", Mock(side_effect=RuntimeError("no space")))
    output = run_here(train_mixer.main, *flags, "--overwrite", "--tensorboard", code=2)
    assert "--tensorboard" in output and "no space" in output and (tmp_path / "run" / "last.bin").exists()
    resumed = ScriptConfig(tensorboard=True), {}, "name", 5
    (opened,) = trackers.open_trackers(*resumed)
    opened.row({"step": 6})
    opened.close()
    assert capsys.readouterr().out.startswith("WARNING: --tensorboard: no space")


@pytest.mark.parametrize(
    "does, words",
    [
        ({"opened": Mock(side_effect=SystemExit(7))}, ": 7;"),
        ({"write": Mock(side_effect=RuntimeError("service is gone\nmore"))}, ": service is gone;"),
        ({"close": Mock(side_effect=SystemExit())}, ": SystemExit;"),
        ({"write": lambda _: threading.Event().wait()}, ": no answer within 0.2 s;"),
    ],
)
def test_a_library_that_raises_exits_or_hangs_costs_a_line(does, words, capsys, monkeypatch):
    monkeypatch.setattr(trackers, "MAX_SECONDS", 0.2)
    opened, write, close = (does.get(name, lambda *_: None) for name in ("opened", "write", "close"))
    tracker = trackers.Tracker("--log-wandb", lambda: (opened(), (write, close))[1])
    for step in range(3):
        tracker.row({"step": step})
    tracker.close()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith("WARNING: --log-wandb: ") and words in lines[0]


# ---- the learning rate: linear warm-up and decay, as a function of the step alone

RATE = 1e-3


@pytest.mark.parametrize(
    "warmup_steps, total_steps, factors",
    [
        (0, 4, [1, 3 / 4, 2 / 4, 1 / 4, 0, 0]),
        (3, 8, [1 / 4, 2 / 4, 3 / 4, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5, 0, 0]),
        (4, 4, [1 / 5, 2 / 5, 3 / 5, 4 / 5, 0]),
    ],
)
def test_each_group_gets_its_share_of_its_peak(warmup_steps, total_steps, factors):
    groups = [{"params": [torch.zeros(1)], "initial_lr": rate} for rate in (RATE, 5 * RATE)]
    optimizer = torch.optim.AdamW(groups, lr=7.0)
    for step, factor in enumerate(factors):
        set_learning_rate(optimizer, linear_factor(step, warmup_steps, total_steps))
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([factor * RATE, factor * 5 * RATE], abs=1e-15)


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


def test_a_resumed_run_keeps_the_rate_of_its_first_start():
    """Which --lr-scaling has multiplied by the number of processes of that time."""
    position = State().position(World()) | {"total_batch": 8, "files": {}, "run": "a name"}
    resumed = {"path": "last.bin", "step": 3, "position": position, "scheduler": {"base_lrs": [0.5, 2.5]}}
    state, rate, _ = place_of(ScriptConfig(lr_scaling="linear"), World(), Mock(files={}), 8, resumed)
    assert (state.step, rate) == (3, 0.5)


@pytest.mark.parametrize("step, factor", [(0, 1 / 5), (3, 4 / 5), (4, 1.0), (9, 1 / 6), (10, 0.0)])
def test_the_rate_rises_from_the_first_step_and_falls_to_none(step, factor):
    assert linear_factor(step, 4, 10) == pytest.approx(factor)
