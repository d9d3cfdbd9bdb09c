"""A run whose loss is no longer finite: what is not saved, where it ends, and what to start again from."""

import math
import os
from contextlib import suppress

import pytest
import torch
from helpers import FINETUNE, TINY, read_logs, run, write_rows
from torch import nn

from histocc.runtime import checkpoint
from histocc.runtime.checkpoint import Saver
from histocc.runtime.errors import TrainingError
from histocc.runtime.files import OwnFiles
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World
from histocc.trainer import loop
from histocc.trainer.run import way_back

NAN = math.nan


class Line:
    """One weight; the loss of a validation is what `losses` says of the step."""

    columns = ("loss",)

    def __init__(self, losses):
        self.losses_of_step, self.step = losses or {}, 0

    def losses(self, model, batch):
        return {"loss": model(batch["x"])[:, 0] * batch["factor"]}

    def metrics(self, model, batch):
        return {"loss": torch.full((1,), self.losses_of_step[self.step])}


class Run:
    """Steps of the loop with a real saver. losses: of validations, by step; bad: steps without a finite
    gradient; interrupted: the step in whose validation the run is asked to stop.
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
        state=None,
        interrupted=None,
        max_bad_steps=20,
    ):
        self.said, self.bad, self.interrupted = [], bad, interrupted
        self.task, self.state, self.position = Line(losses), state or loop.State(), {}
        self.model = nn.Linear(1, 1)
        self.saver = Saver(OwnFiles(str(folder)), 9, World(), self.content, self.said.append)
        self.run = loop.Run(
            self.model,
            self.task,
            torch.optim.SGD(self.model.parameters(), lr=0.0),
            World(),
            max_bad_steps=max_bad_steps,
            stop_step=stop_step or 1000,
            steps_per_epoch=1000,
            log_interval=None,
            eval_interval=eval_interval,
            save_interval=save_interval,
            save=self.saver,
            say=self.said.append,
            stop=self.stop,
        )

    def content(self, step, position):
        self.position = position
        return {"step": step, "model": self.model.state_dict(), "position": position}

    def stop(self):
        return self.state.step == self.interrupted if self.state.unfinished else self.state.step >= self.until

    def batches(self):
        while True:
            factor = NAN if self.state.step + 1 in self.bad else 1.0
            yield {"x": torch.ones(1, 1), "factor": torch.tensor([factor])}

    def validation(self):
        self.task.step = self.state.step
        yield {"x": torch.ones(1, 1)}

    def take(self, until):
        """Steps until `until` and what is due after it."""
        self.until = until
        self.state.stopped = False
        loaders = {"train": self, "val": Validation(self) if self.task.losses_of_step else None}
        try:
            with suppress(Stopped):
                while self.state.step < until:
                    if self.state.unfinished:
                        loop.between_steps(self.run, self.state, 0, loaders["val"])
                    loop.train_one_epoch(self.run, self.batches(), self.state, 0, loaders["val"])
        except loop.Diverged as error:
            raise TrainingError(f"{error} {way_back(self.saver, World(), error.good_step)}") from None
        return self


class Validation:
    def __init__(self, run):
        self.run = run

    def __iter__(self):
        return self.run.validation()


def files(folder):
    """Names of the checkpoints and the steps that they are of."""
    names = [name for name in sorted(os.listdir(folder)) if name.endswith(".bin")]
    return {name: torch.load(folder / name, weights_only=True)["step"] for name in names}


def test_two_validations_in_a_row_end_the_run(tmp_path):
    run = Run(tmp_path, {3: 5.0, 6: NAN, 9: 4.0, 12: math.inf, 15: NAN}, eval_interval=3, save_interval=2)
    run.take(14)
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


@pytest.mark.parametrize(
    "losses, best",
    [([3.0, NAN, 2.0, 2.5], 3), ([NAN, 3.0, math.inf], 2), ([NAN, 2.0, NAN, 3.0], 2)],
)
def test_a_loss_that_is_no_number_is_never_the_best(tmp_path, losses, best):
    run = Run(tmp_path, dict(enumerate(losses, 1)), eval_interval=1).take(len(losses))
    assert files(tmp_path)["best.bin"] == best and run.state.best_val_loss == losses[best - 1]


def test_a_best_checkpoint_that_could_not_be_written_is_no_measure(tmp_path, monkeypatch):
    run, write = Run(tmp_path, {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5}, eval_interval=1), checkpoint.save

    def full(own, names, state):
        if state["step"] == 2:
            raise OSError(28, "No space left on device")
        return write(own, names, state)

    monkeypatch.setattr(checkpoint, "save", full)
    run.take(4)
    assert "WARNING: the checkpoint of step 2 could not be saved: " in run.said[1]
    assert "best.bin: no space left on the device, " in run.said[1]
    assert files(tmp_path)["best.bin"] == 3 and run.state.best_val_loss == 2.0


def test_no_finite_loss_at_all(tmp_path):
    run = Run(tmp_path, {2: NAN, 4: NAN}, eval_interval=2)
    with pytest.raises(TrainingError, match="No checkpoint is known to be good. Start over: --overwrite"):
        run.take(4)
    assert files(tmp_path) == {} and run.state.best_val_loss is None


def test_the_last_validation_alone_is_enough(tmp_path):
    run = Run(tmp_path, {4: 1.0, 6: NAN}, eval_interval=4, save_interval=3, stop_step=6)
    with pytest.raises(
        TrainingError, match="step 6: the loss is nan in the last validation.*best.bin, of step 4"
    ):
        run.take(6)
    assert files(tmp_path) == {"3.bin": 3, "best.bin": 4, "last.bin": 3}


def test_the_count_survives_a_stop_even_in_a_validation(tmp_path):
    losses = {2: 1.0, 4: NAN, 6: NAN}
    first = Run(tmp_path, losses, eval_interval=2, save_interval=1, interrupted=6).take(7)
    loop.save(first.run, first.state, ["last.bin"])
    assert first.position["bad_validations"] == 1 and first.position["finite_step"] == 2
    assert first.position["unfinished"] and first.state.step == 6
    state = loop.State.resumed(6, first.position, World())
    then = Run(tmp_path, losses, eval_interval=2, save_interval=1, state=state)
    with pytest.raises(
        TrainingError, match=r"step 6: the loss is nan in 2 validations in a row.*of step 2\."
    ):
        then.take(7)


def test_without_validation_gradients_tell(tmp_path):
    run = Run(tmp_path, bad=(5, 6, 7, 8, 9, 10), save_interval=2, max_bad_steps=6)
    with pytest.raises(
        TrainingError,
        match=rf"step 10: the gradient was not finite in 6 steps in a row "
        rf".*{tmp_path}/2\.bin, of step 2\.",
    ):
        run.take(11)  # a finite gradient in step 4 speaks for weights before it
    assert files(tmp_path) == {"2.bin": 2, "4.bin": 4, "last.bin": 4}
    assert "WARNING: step 6: 6.bin, last.bin not written: the last 2 steps had no finite gradient" in run.said


def test_one_bad_step_does_not_keep_from_saving_nor_any_at_the_end(tmp_path):
    run = Run(tmp_path, bad=(2, 5, 6), save_interval=2, stop_step=6).take(6)
    assert files(tmp_path)["2.bin"] == 2 and files(tmp_path)["last.bin"] == 6
    assert "may be unusable: the last 2 steps had no finite gradient" in run.said[-2] + run.said[-1]


@pytest.mark.processes
@pytest.mark.full
def test_a_learning_rate_that_is_far_too_high(tmp_path):
    data = write_rows(tmp_path / "rows.csv", 40)
    flags = ["--dataset", data, *TINY, "--formatter", "hisco", "--save-path", tmp_path / "run"]
    flags += ["--batch-size", 4, "--log-interval", 2, "--eval-interval", 2, "--save-interval", 1]
    flags += ["--warmup-pct", 0]
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
