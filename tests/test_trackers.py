"""TensorBoard and W&B get every row, through their own libraries, and a resumed run continues the same
curves.
"""

import importlib.util
import json

import pytest
from helpers import TINY, read_logs, run_inside, write_rows

import train_mixer
from histocc.runtime.errors import TrainingError
from histocc.trainer import config as trainer_config
from histocc.trainer import trackers
from histocc.trainer.config import ScriptConfig


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
        shown = {event.step: pytest.approx(event.value, rel=1e-5) for event in events.Scalars(name)}
        assert shown == logged, name


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.full
def test_wandb_writes_offline_and_a_resumed_run_has_the_same_id(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    flags += ["--log-wandb", "--wandb-project-name", "codes"]
    assert run_inside(train_mixer.main, *flags, "--max-steps", 4)[0] == 0
    assert run_inside(train_mixer.main, *flags)[0] == 0
    written = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 2 and len({file.name for file in written}) == 1
    assert all(b"train_loss" in file.read_bytes() and b"codes" in file.read_bytes() for file in written)


@pytest.mark.parametrize("flag, package", [("--tensorboard", "tensorboard"), ("--log-wandb", "wandb")])
def test_what_is_not_installed_is_said(flags, tmp_path, monkeypatch, flag, package):
    spec = importlib.util.find_spec
    monkeypatch.setattr(
        trainer_config.importlib.util, "find_spec", lambda name: None if name == package else spec(name)
    )
    code, output = run_inside(train_mixer.main, *flags, flag)
    assert code == 2 and f"{flag} needs the package {package}: pip install {package}" in output
    assert not (tmp_path / "run").exists()


def test_a_library_that_cannot_be_opened_is_said_before_anything_is_cleared(
    flags, tmp_path, monkeypatch, capsys
):
    assert run_inside(train_mixer.main, *flags, "--max-steps", 2)[0] == 0
    monkeypatch.setattr(trackers, "open_tensorboard", fails(RuntimeError("no space")))
    code, output = run_inside(train_mixer.main, *flags, "--overwrite", "--tensorboard")
    assert code == 2 and "--tensorboard cannot be opened: no space" in output
    assert (tmp_path / "run" / "last.bin").exists()
    (opened,) = trackers.open_trackers(ScriptConfig(tensorboard=True), "name", 5)  # of a run that is resumed
    opened.row({"step": 6})
    opened.close()
    assert capsys.readouterr().out == "WARNING: --tensorboard: no space; logs.csv has every row\n"


@pytest.mark.parametrize(
    "does, words",
    [
        ({"opened": fails(SystemExit(7))}, ": 7;"),
        ({"write": fails(RuntimeError("service is gone\nmore"))}, ": service is gone;"),
        ({"close": fails(SystemExit())}, ": SystemExit;"),
    ],
)
def test_a_library_that_raises_or_exits_costs_a_line(does, words, capsys):
    opened, write, close = (does.get(name, lambda *_: None) for name in ("opened", "write", "close"))
    tracker = trackers.Tracker("--log-wandb", lambda: (opened(), (write, close))[1])
    for step in range(3):
        tracker.row({"step": step})
    tracker.close()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith("WARNING: --log-wandb: ") and words in lines[0]


def test_a_run_that_ends_by_an_error_says_so(flags, tmp_path, monkeypatch):
    monkeypatch.setattr("histocc.trainer.loop.forward_backward", fails(TrainingError("broken")))
    code, output = run_inside(train_mixer.main, *flags)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert code == 1 and "broken" in output and status["state"] == "ended by an error"
