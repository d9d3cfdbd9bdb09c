"""`--save-interval auto`: how often to save, by what it costs and how often a job fails."""

import math
import random
import re

import pytest
from helpers import FINETUNE, TINY, run, run_inside, write_rows

import finetune
from histocc.runtime.world import World
from histocc.trainer import save_interval
from histocc.trainer.hooks import Callbacks, Intervals, StepHooks, Steps
from histocc.trainer.meter import Meter
from histocc.trainer.save_interval import AutoInterval, best_seconds, effective_share


@pytest.mark.parametrize("cost", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("mean", [60.0, 3600.0, 1e6])
def test_no_other_interval_loses_much_less(cost, mean):
    found = effective_share(best_seconds(cost, mean), cost, 10.0, mean)
    others = [mean * 10 ** (power / 50) for power in range(-300, 50)]
    assert found >= (1 - 1e-3) * max(effective_share(each, cost, 10.0, mean) for each in others)


def test_rare_failures_give_youngs_interval():
    assert best_seconds(1.0, 1e9) == pytest.approx(math.sqrt(2e9), rel=1e-3)
    assert best_seconds(100.0, 20.0) == 20.0


def test_the_share_is_that_of_a_simulation():
    """Failures at random times, while training, saving or recovering."""
    interval, cost, recovery, mean = 20.0, 2.0, 5.0, 60.0
    dice, now, kept = random.Random(1), 0.0, 0.0
    failure = dice.expovariate(1 / mean)
    while now < 1e6:
        if failure > now + interval + cost:
            now, kept = now + interval + cost, kept + interval
            continue
        while True:  # what fails meanwhile, begins anew
            now = failure
            failure = now + dice.expovariate(1 / mean)
            if failure > now + recovery:
                now += recovery
                break
    assert kept / now == pytest.approx(effective_share(interval, cost, recovery, mean), rel=0.02)


class Clocked:
    """A run on a clock of its own. A step takes a second, and two while a checkpoint is being written."""

    def __init__(self, monkeypatch, mean, blocked=0.5, written=3.0, start=0, calls_every=1):
        self.now = self.until = 0.0
        self.saved, self.said, self.blocked, self.seconds = [], [], blocked, written
        monkeypatch.setattr(save_interval.time, "perf_counter", lambda: self.now)
        self.say = self.said.append
        self.step, self.calls_every = start, calls_every
        intervals = Intervals(log=None, mean_between_failures=mean)
        self.hooks = StepHooks(World(), Meter(), Steps(10**6, start), intervals, Callbacks(self))

    @property
    def is_writing(self):
        return self.now < self.until

    def __call__(self, step, names, position):
        assert not self.is_writing
        self.saved.append(step)
        self.now += self.blocked
        self.until = self.now + self.seconds

    def take(self, steps):
        for _ in range(steps):
            self.step += 1
            self.now += 2.0 if self.is_writing else 1.0
            if self.step % self.calls_every == 0:
                self.hooks(self.step, 0, 0.1)
        return self


def test_it_saves_soon_and_then_as_often_as_is_best(monkeypatch):
    job = Clocked(monkeypatch, mean=200.0).take(200)
    every = round(best_seconds(0.5 + 2.0, 200.0))  # two of its steps take a second longer
    assert job.saved == [10 + every * number for number in range((200 - 10) // every + 1)]
    assert len(job.said) == 1 and f"checkpoints every {every} steps" in job.said[0]
    assert "0.0556 h (--mtbf-hours)" in job.said[0] and "for 2.5 s" in job.said[0]


def test_a_resumed_run_measures_anew(monkeypatch):
    assert Clocked(monkeypatch, mean=200.0, start=1000).take(30).saved == [1010]


def test_no_save_begins_before_the_last_one_is_written(monkeypatch):
    job = Clocked(monkeypatch, mean=1.0, written=40.0).take(200)
    assert len(job.saved) > 2 and job.saved[1] - job.saved[0] >= 20


def test_a_save_that_is_due_for_another_reason_counts(monkeypatch):
    job = Clocked(monkeypatch, mean=200.0).take(30)
    job.hooks.save_stopped(job.step)
    job.take(25)
    assert job.saved[:2] == [10, 30] and len(job.saved) == 2


def test_what_has_changed_much_is_said_again(monkeypatch):
    job = Clocked(monkeypatch, mean=200.0).take(100)
    job.blocked = 30.0
    job.take(2000)
    assert len(job.said) == 2 and "for 32 s" in job.said[1], job.said


def test_with_exchanges_it_saves_after_these(monkeypatch):
    job = Clocked(monkeypatch, mean=50.0, calls_every=7).take(300)
    assert len(job.saved) > 3 and all(step % 7 == 0 for step in job.saved)


def test_the_other_ranks_do_as_rank_0_says(monkeypatch):
    heard = []

    class Second(World):
        def broadcast(self, value, source):
            assert value is None and source == 0
            heard.append(value)
            return True, 25

    saves = AutoInterval(100.0, 0, None)
    asked = [saves.due(step, Second(rank=1, size=2)) for step in range(1, 26)]
    assert [step for step, due in enumerate(asked, 1) if due] == [10, 25] and len(heard) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--save-interval", "auto"], "--save-interval auto needs --mtbf-hours"),
        (["--mtbf-hours", "8"], "--mtbf-hours needs --save-interval auto"),
        (["--mtbf-hours", "0", "--save-interval", "auto"], "'0' is not a number above 0"),
        (["--save-interval", "often"], "'often' is not a whole number of at least 1"),
    ],
)
def test_flags_that_do_not_fit(tmp_path, flags, message):
    rows = write_rows(tmp_path / "rows.csv", 12)
    code, output = run_inside(
        finetune.main, "--dataset", rows, "--target-cols", "hisco_1", "--save-path", tmp_path / "run", *flags
    )
    assert code == 2 and message in output, output


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], marks=pytest.mark.full),
        ["--sync-every", 3, "--sync-group", "process", "--sync-start", 4],
    ],
)
def test_two_processes_save_together(tmp_path, flags):
    """With exchanges, after these alone."""
    rows, folder = write_rows(tmp_path / "rows.csv", 48), tmp_path / "run"
    args = ["--dataset", rows, "--target-cols", "hisco_1", *TINY, "--formatter", "hisco", "--batch-size", 4]
    args += ["--save-interval", "auto", "--mtbf-hours", 1e-5, "--num-epochs", 8, "--keep-checkpoints", 99]
    args += ["--save-path", folder, *flags]
    output = run(FINETUNE, *args, processes=2)
    steps = sorted(int(file.stem) for file in folder.glob("*.bin") if file.stem.isdecimal())
    assert steps[0] == 10
    last = f"Finished at step {steps[-1]}." in output  # an exchange follows the last step, too
    assert not flags or all((step - 4) % 3 == 0 for step in (steps[:-1] if last else steps))
    assert len(steps) < 2 or re.search(r"Saving: checkpoints every [0-9,]+ step", output), output
    assert "Finished at step" in output
