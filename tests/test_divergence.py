"""A run whose loss is no longer finite: what is not saved, where it ends, and what to start again from."""

import math
import os
from contextlib import suppress

import pytest
import torch
from helpers import FINETUNE, TINY, read_logs, run, write_rows

from histocc.runtime.errors import TrainingError
from histocc.runtime.outputs import OwnFiles
from histocc.runtime.world import World
from histocc.trainer.batch_size import BatchSettings, memory_advice, model_memory_advice
from histocc.trainer.hooks import Callbacks, Intervals, StepHooks, Steps
from histocc.trainer.meter import Meter
from histocc.trainer.saver import Saver

NAN = math.nan


class Run:
    """Steps of a boundary with a real saver. losses: of validations, by step; bad: steps without finite
    gradient.
    """

    def __init__(
        self,
        folder,
        losses=None,
        bad=(),
        *,
        eval_interval=None,
        save_interval=None,
        stop_step=None,
        position=None,
        keep=9,
    ):
        self.said, self.step, self.losses, self.bad, self.interrupted = [], 0, losses, bad, ()
        self.position = position or {}
        self.saver = Saver(OwnFiles(str(folder)), keep, World(), self.state, self.said.append)
        self.boundary = StepHooks(
            World(),
            Meter(),
            Steps(stop=stop_step),
            Intervals(log=None, validate=eval_interval, save=save_interval),
            Callbacks(save=self.saver),
            evaluate=self.evaluate if losses else None,
            position=self.position,
        )

    def state(self, step, position):
        self.position = position
        return {"model": {"w": torch.zeros(1)}, "step": step}

    def evaluate(self):
        return None if self.step in self.interrupted else {"val_loss": self.losses[self.step]}

    def take(self, *steps, most=20):
        for self.step in steps:
            self.boundary.count_bad_steps(torch.tensor(self.step in self.bad), most, self.step)
            self.boundary(self.step, 0, 0.1)
        return self


def files(folder):
    """Names of the checkpoints and the steps that they are of."""
    names = [name for name in sorted(os.listdir(folder)) if name.endswith(".bin")]
    return {name: torch.load(folder / name, weights_only=True)["step"] for name in names}


def test_two_validations_in_a_row_end_the_run(tmp_path):
    run = Run(tmp_path, {3: 5.0, 6: NAN, 9: 4.0, 12: math.inf, 15: NAN}, eval_interval=3, save_interval=2)
    run.take(*range(1, 15))
    kept = {"10.bin": 10, "12.bin": None, "2.bin": 2, "4.bin": 4, "best.bin": 9, "last.bin": 10}
    assert files(tmp_path) == {name: step for name, step in kept.items() if step}
    assert [text for text in run.said if "WARNING" in text] == [
        f"WARNING: step {step}: {step}.bin, last.bin not written: the loss of the last validation was not "
        "finite"
        for step in (6, 8, 12, 14)
    ]
    with pytest.raises(
        TrainingError,
        match=r"step 15: the loss is nan in 2 validations in a row: the run "
        r"has diverged\. The last checkpoint that is "
        rf"known to be good is {tmp_path}/best\.bin, of step 9\. Give "
        rf"it as --initial-checkpoint",
    ):
        run.take(15)
    assert files(tmp_path)["last.bin"] == 10


def test_no_finite_loss_at_all(tmp_path):
    run = Run(tmp_path, {2: NAN, 4: NAN}, eval_interval=2)
    with pytest.raises(TrainingError, match="No checkpoint is known to be good. Start over: --overwrite"):
        run.take(1, 2, 3, 4)
    assert files(tmp_path) == {} and run.boundary.best_val_loss is None


def test_the_last_validation_alone_is_enough(tmp_path):
    run = Run(tmp_path, {4: 1.0, 6: NAN}, eval_interval=4, save_interval=3, stop_step=6)
    with pytest.raises(
        TrainingError, match="step 6: the loss is nan in the last validation.*best.bin, of step 4"
    ):
        run.take(*range(1, 7))
    assert files(tmp_path) == {"3.bin": 3, "best.bin": 4, "last.bin": 3}


def test_the_count_survives_a_stop_even_in_a_validation(tmp_path):
    losses = {2: 1.0, 4: NAN, 6: NAN}
    first = Run(tmp_path, losses, eval_interval=2, save_interval=1).take(1, 2, 3, 4)
    first.interrupted = (6,)
    first.take(5, 6)
    first.boundary.save_stopped(6)
    assert first.position["val_not_finite"] == 1 and first.position["finite_step"] == 2
    assert first.position["unfinished"]["step"] == 6
    then = Run(tmp_path, losses, eval_interval=2, save_interval=1, position=first.position)
    then.step = 6
    with pytest.raises(
        TrainingError, match=r"step 6: the loss is nan in 2 validations in a row.*of step " r"2\."
    ):
        then.boundary(**first.position["unfinished"])


def test_without_validation_gradients_tell(tmp_path):
    run = Run(tmp_path, bad=(5, 6, 7, 8, 9, 10), save_interval=2)
    with pytest.raises(
        TrainingError,
        match=rf"step 10: the gradient was not finite in 6 steps in a row "
        rf".*{tmp_path}/2\.bin, of step 2\.",
    ):
        run.take(*range(1, 12), most=6)  # a finite gradient in step 4 speaks for weights before it
    assert files(tmp_path) == {"2.bin": 2, "4.bin": 4, "last.bin": 4}
    assert "WARNING: step 6: 6.bin, last.bin not written: the last 2 steps had no finite gradient" in run.said


def test_one_bad_step_does_not_keep_from_saving_nor_any_at_the_end(tmp_path):
    run = Run(tmp_path, bad=(2, 5, 6), save_interval=2, stop_step=6).take(*range(1, 7))
    assert files(tmp_path)["2.bin"] == 2 and files(tmp_path)["last.bin"] == 6
    assert "may be of no use: the last 2 steps had no finite gradient" in run.said[-2] + run.said[-1]


@pytest.mark.processes
@pytest.mark.full
def test_a_learning_rate_that_is_far_too_high(tmp_path):
    data = write_rows(tmp_path / "rows.csv", 40)
    flags = [
        "--dataset",
        data,
        *TINY,
        "--formatter",
        "hisco",
        "--save-path",
        tmp_path / "run",
        "--batch-size",
        4,
        "--log-interval",
        2,
        "--eval-interval",
        2,
        "--save-interval",
        1,
        "--warmup-pct",
        0,
    ]
    output = run(FINETUNE, *flags, "--learning-rate", 1e9, processes=2, code=1)
    assert (
        output.count(
            "error: step 4: the loss is nan in 2 validations in a row: the run has diverged. No checkpoint is"
            " known to be good"
        )
        == 1  # and once more in torchrun's report, which does not begin so
    )
    assert not (tmp_path / "run" / "best.bin").exists()
    assert [row["step"] for row in read_logs(tmp_path / "run")] == [2, 4]


def test_batch_advice_is_for_steps_alone():
    batch, world = BatchSettings(8), World()
    for advice, expected in (
        (lambda: model_memory_advice("ddp", False, world), "not enough memory for the model itself"),
        (lambda: memory_advice(batch, world), "Give --batch-size 4 --accumulate-steps 2"),
    ):
        with pytest.raises(TrainingError, match=expected) as said, advice():
            raise MemoryError
        assert ("--batch-size" in expected) == ("--batch-size" in str(said.value)) and said.value.said_by_all
        with suppress(KeyError), advice():
            raise KeyError
