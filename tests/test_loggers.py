"""TensorBoard and W&B get every row, through their own libraries, and a resumed run continues the same
curves.
"""

import importlib.util
import json
import struct
from dataclasses import replace

import pytest
from helpers import TINY, read_logs, run_inside, write_rows

import train_mixer
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.files import OwnFiles
from histocc.trainer import flags as trainer_flags
from histocc.trainer import loggers
from histocc.trainer.curves import panels
from histocc.trainer.run_log import OWN_COLUMNS

RUN = loggers.LoggedRun("folder", "name", 0, {})


def fails(error):
    """A function that raises `error`, whatever it gets."""

    def function(*_, **__):
        raise error

    return function


@pytest.fixture
def flags(tmp_path):
    train, val = write_rows(tmp_path / "train.csv", 24), write_rows(tmp_path / "val.csv", 6, 100)
    files = ["--train-data", train, "--val-data", val, "--save-dir", tmp_path / "run"]
    return [*files, *TINY, "--batch-size", 8, "--num-epochs", 2, "--eval-interval", 3, "--log-interval", 1]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.full
def test_tensorboard_holds_what_the_log_holds(flags, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run_inside(train_mixer.main, *flags, "--tensorboard", "--max-steps", 4)[0] == 0
    assert run_inside(train_mixer.main, *flags, "--tensorboard")[0] == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name in ("train_loss", "val_loss", "seq_acc", "lr"):
        logged = {int(row["step"]): row[name] for row in read_logs(tmp_path / "run") if row[name] is not None}
        found = {event.step: pytest.approx(event.value, rel=1e-5) for event in events.Scalars(name)}
        assert found == logged, name


def leveldb_records(content, block=32768):
    """The records of W&B's file: a head of 7 bytes, then LevelDB's log format, pieces with (checksum, length,
    kind) in front in blocks.
    """
    place, pieces = 7, b""
    while place + 7 <= len(content):
        if block - place % block < 7:  # no head fits into the rest of a block
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        pieces += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield pieces
            pieces = b""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.full
def test_wandb_writes_offline_and_goes_on_with_the_same_run(flags, tmp_path, monkeypatch):
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    flags += ["--log-wandb", "--wandb-project-name", "codes"]
    assert run_inside(train_mixer.main, *flags, "--max-steps", 4)[0] == 0
    assert run_inside(train_mixer.main, *flags)[0] == 0
    losses, names = {}, set()
    for file in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")):
        for data in leveldb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.run.run_id:
                names.add((record.run.run_id, record.run.project))
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if "train_loss" in items:
                losses[items["_step"]] = pytest.approx(items["train_loss"], rel=1e-9)
    assert len(names) == 1 and {project for _, project in names} == {"codes"}
    logged = {int(row["step"]): row["train_loss"] for row in read_logs(tmp_path / "run")}
    assert losses == {step: loss for step, loss in logged.items() if loss is not None}


@pytest.mark.parametrize("flag, package", [("--tensorboard", "tensorboard"), ("--log-wandb", "wandb")])
def test_what_is_not_installed_is_said(flags, tmp_path, monkeypatch, flag, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        trainer_flags.importlib.util, "find_spec", lambda name: None if name == package else found(name)
    )
    code, output = run_inside(train_mixer.main, *flags, flag)
    assert code == 2 and f"{flag} needs the package {package}: pip install {package}" in output
    assert not (tmp_path / "run").exists()


def test_a_logger_that_cannot_be_opened_is_said_before_anything_is_cleared(flags, tmp_path, monkeypatch):
    assert run_inside(train_mixer.main, *flags, "--max-steps", 2)[0] == 0
    monkeypatch.setattr(loggers.TensorBoard, "__init__", fails(RuntimeError("no space")))
    code, output = run_inside(train_mixer.main, *flags, "--overwrite", "--tensorboard")
    assert code == 2 and "--tensorboard: no space" in output and (tmp_path / "run" / "last.bin").exists()


@pytest.mark.parametrize(
    "broken, said",
    [
        ("TensorBoard", "--tensorboard: AssertionError"),
        ("WandB", "--log-wandb: 7; WANDB_MODE=offline needs no network"),
    ],
)
def test_each_library_speaks_for_itself_even_without_words(monkeypatch, broken, said, capsys):
    for name in ("TensorBoard", "WandB"):
        error = AssertionError() if name == "TensorBoard" else SystemExit(7)
        monkeypatch.setattr(
            getattr(loggers, name), "__init__", fails(error) if name == broken else lambda *_: None
        )
        monkeypatch.setattr(getattr(loggers, name), "close", lambda self: None)
        monkeypatch.setattr(getattr(loggers, name), "row", lambda *_: None)
    both = loggers.LoggerSettings(tensorboard=True, log_wandb=True)
    with pytest.raises(UserError) as error:
        loggers.Loggers(both, RUN)
    assert str(error.value) == said
    made = loggers.Loggers(both, replace(RUN, step=5))  # a run that is resumed continues without it
    made.row({"step": 6, "train_loss": 1.0})
    made.close()
    assert capsys.readouterr().out.count("The run continues without it; logs.csv has every row.") == 1


def test_a_plot_that_cannot_be_drawn_is_said_once_and_ends_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(loggers.curves, "available", lambda: True)
    monkeypatch.setattr(loggers.curves, "draw", fails(AttributeError("no such backend")))
    made = loggers.Loggers(loggers.LoggerSettings(), RUN, OwnFiles(str(tmp_path)))
    made.row({"step": 1, "val_loss": 1.0})
    made.close()
    assert capsys.readouterr().out.count("WARNING: curves.png: no such backend.") == 1


def test_a_run_that_ends_by_an_error_says_so(flags, tmp_path, monkeypatch):
    monkeypatch.setattr("histocc.trainer.loop.optimizer_step", fails(TrainingError("broken")))
    code, output = run_inside(train_mixer.main, *flags)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert code == 1 and "broken" in output and status["state"] == "ended by an error"


def test_figures_of_any_task_have_a_panel():
    of_ours = (*OWN_COLUMNS, "train_loss", "val_loss", "val_loss_linear", "seq_acc", "flat_acc")
    assert [title for title, _ in panels(of_ours)] == ["loss", "accuracy, %", "learning rate", "samples/s"]
    found = dict(panels((*OWN_COLUMNS, "val_loss", "dice", "iou", "answer_acc")))
    assert found["dice, iou"] == ["dice", "iou"] and found["accuracy, %"] == ["answer_acc"]
    assert "bits_per_byte" in dict(panels(["step", "bits_per_byte"]))
