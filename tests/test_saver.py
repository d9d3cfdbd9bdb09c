"""Checkpoints between two steps, what is left where one fails, and who may use a folder."""

import math
import os
import signal
import time

import pytest
import torch
from helpers import REPO, TINY, run, write_rows

from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles, run_lock
from histocc.runtime.world import World
from histocc.trainer import loop
from histocc.trainer.saver import Saver


@pytest.fixture
def said():
    return []


@pytest.fixture
def saver(tmp_path, said):
    weights = torch.zeros(3)
    made = Saver(
        OwnFiles(str(tmp_path / "run")),
        3,
        World(),
        lambda step, position: {"model": {"w": weights}, "step": step, **position},
        said.append,
    )
    made.weights = weights
    return made


def test_what_is_written_and_what_is_said(saver, said):
    assert saver(4, ["4.bin", "last.bin"], {}) == "" and saver.seconds > 0
    saver.weights += 1
    state = torch.load(os.path.join(saver.own.folder, "4.bin"), weights_only=True)
    assert state["step"] == 4 and state["model"]["w"].tolist() == [0, 0, 0]
    assert len(said) == 1 and said[0].startswith("Saved 4.bin, last.bin of step 4: 0 MB in ")


def test_last_comes_first(saver, monkeypatch):
    """So that a kill in the middle of a save leaves something to continue from under its name."""

    def killed(source, path):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "atomic_copy", killed)
    with pytest.raises(KeyboardInterrupt):
        os.makedirs(saver.own.folder)
        checkpoint.save(saver.own, ["4.bin", "best.bin", "last.bin"], {"model": {}})
    assert sorted(os.listdir(saver.own.folder)) == ["histocc.json", "last.bin"]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_not_written(saver, said, wrong):
    saver(1, ["1.bin", "last.bin"], {})
    saver.weights[1] = wrong
    assert "no longer finite" in saver(2, ["2.bin", "best.bin", "last.bin"], {})
    assert "WARNING: the checkpoint of step 2 could not be saved" in said[-1]
    assert (
        sorted(os.listdir(saver.own.folder)) == ["1.bin", "histocc.json", "last.bin"]
        and saver.newest_until(9)[1] == 1
    )


def test_the_newest_checkpoint_until_a_step(saver):
    assert saver.newest_until(5) is None
    for step, names in ((2, ["2.bin", "best.bin"]), (4, ["4.bin", "last.bin"]), (6, ["last.bin"])):
        saver(step, names, {})
    assert saver.newest_until(1) is None and saver.newest_until(3)[1] == 2
    assert (
        saver.newest_until(5) == (os.path.join(saver.own.folder, "4.bin"), 4)
        and saver.newest_until(9)[1] == 6
    )


def test_a_process_that_loads_data_does_not_keep_a_dead_jobs_folder(tmp_path):
    reader, writer = os.pipe()
    owner = os.fork()
    if owner == 0:
        with run_lock(str(tmp_path)):
            worker = os.fork()
            if worker == 0:
                time.sleep(60)
                os._exit(0)
            os.write(writer, str(worker).encode())
            time.sleep(60)
        os._exit(0)
    worker = int(os.read(reader, 20))
    try:
        with (
            pytest.raises(UserError, match=f"in use by another job: .* process {owner}, since"),
            run_lock(str(tmp_path)),
        ):
            pass
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        with run_lock(str(tmp_path)):
            pass
        assert not (tmp_path / "run.lock").exists()
    finally:
        os.kill(worker, signal.SIGKILL)
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(UserError, match="found a folder, expected a file"), run_lock(str(tmp_path)):
        pass


SLOW_DISK = """
import sys, time
sys.path.insert(0, {repo!r})
import train_mixer
from histocc.runtime import checkpoint

write = checkpoint.save

def slowly(*args):
    time.sleep(9)
    return write(*args)

checkpoint.save = slowly
sys.exit(train_mixer.main())
"""


@pytest.mark.processes
@pytest.mark.full
def test_every_checkpoint_may_take_longer_than_the_time_limit(tmp_path):
    write_rows(tmp_path / "train.csv", 24)
    write_rows(tmp_path / "val.csv", 6, 500)
    (tmp_path / "slow.py").write_text(SLOW_DISK.format(repo=str(REPO)))
    flags = ["--train-data", tmp_path / "train.csv", "--val-data", tmp_path / "val.csv", *TINY]
    flags += ["--batch-size", 4, "--save-dir", tmp_path / "run", "--save-interval", 1, "--max-steps", 2]
    output = run(tmp_path / "slow.py", *flags, "--timeout-minutes", 0.1, processes=2)
    assert output.count("Saved ") == 2 and checkpoint.step_of(str(tmp_path / "run" / "last.bin")) == 2


def test_what_is_no_training_does_not_count_as_its_time(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def work(seconds):
        clock[0] += seconds

    state = loop.State()
    work(2.0)
    state.stop_clock()
    work(50.0)
    state.start_clock()
    work(1.0)
    state.stop_clock()
    assert state.sums["seconds"] == 3.0
