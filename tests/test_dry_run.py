"""--dry-run says what a run would cost and leaves nothing but the prepared data."""

import os
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import TINY, TRAIN_MIXER, run, run_inside, write_rows

import train_mixer


@pytest.fixture
def flags(tmp_path):
    return [
        "--train-data",
        write_rows(tmp_path / "train.csv", 40),
        "--val-data",
        write_rows(tmp_path / "val.csv", 9, 100),
        *TINY,
        "--language-col",
        "lang",
        "--batch-size",
        8,
        "--num-epochs",
        4,
        "--eval-interval",
        6,
        "--save-interval",
        5,
        "--save-dir",
        tmp_path / "run",
    ]


def test_what_it_says_and_leaves(flags, tmp_path):
    code, output = run_inside(train_mixer.main, *flags, "--dry-run")
    assert code == 0 and "Everything checks out: without --dry-run it starts the run." in output
    assert re.search(r"Steps:       20 of [\d.e-]+ s", output) and re.search(
        r"Validations: 4 of [\d.e-]+ s", output
    )
    assert "up to 5 files" in output and re.search(
        r"Memory:      \d+\.\d GB at most per process \(CPU\)", output
    )
    assert os.listdir(tmp_path / "run") == ["prepared"]
    run_inside(train_mixer.main, *flags, "--max-steps", 2)
    size = float(re.search(r"Checkpoints: ([\d.]+) GB", output)[1])
    assert abs(os.path.getsize(tmp_path / "run" / "last.bin") / 1e9 - size) < 0.01
    before = torch.load(tmp_path / "run" / "last.bin", weights_only=True)
    code, output = run_inside(train_mixer.main, *flags, "--dry-run")
    assert code == 0 and "Steps:       18 of" in output and "it continues from step 2." in output
    after = torch.load(tmp_path / "run" / "last.bin", weights_only=True)
    assert before["step"] == after["step"] == 2 and all(
        torch.equal(before["model"][name], after["model"][name]) for name in before["model"]
    )


def test_little_room_on_the_disk_is_said(flags, monkeypatch):
    monkeypatch.setattr(
        "histocc.trainer.estimate.shutil.disk_usage", lambda _: SimpleNamespace(free=10_000_000)
    )
    assert (
        "WARNING: not enough disk space for 5 checkpoints"
        in run_inside(train_mixer.main, *flags, "--dry-run")[1]
    )


def test_what_is_wrong_is_said_as_by_the_run(flags, tmp_path):
    code, output = run_inside(train_mixer.main, *flags, "--dry-run", "--target-cols", "nothing")
    assert code == 2 and "nothing" in output and not (tmp_path / "run").exists()
    assert run_inside(train_mixer.main, *flags, "--dry-run", "--eval-only")[0] == 2


@pytest.mark.processes
@pytest.mark.full
def test_two_processes(flags, tmp_path):
    output = run(TRAIN_MIXER, *flags, "--dry-run", processes=2)
    assert output.count("Everything checks out") == 1 and os.listdir(tmp_path / "run") == ["prepared"]
