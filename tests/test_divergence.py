"""A run whose loss is no longer finite: what is not saved, where it ends, and what to start again from."""

import itertools
import math
import os

import pytest
import torch
from helpers import FINETUNE, TINY, read_logs, run, write_rows
from torch import nn

from histocc.runtime.checkpoint import Saver
from histocc.runtime.errors import TrainingError
from histocc.runtime.files import OwnFiles
from histocc.runtime.world import World
from histocc.trainer import loop
from histocc.trainer.run import way_back

NAN = math.nan


class Line:
    """One weight; `loss` is that of the validation."""

    columns = ("loss",)
    loss = NAN

    def losses(self, model, batch):
        return {"loss": model(batch["x"])[:, 0] * batch["factor"]}

    def metrics(self, model, batch):
        return {"loss": torch.full((1,), self.loss)}


class Training:
    """A run of the loop with a real saver.

    Args:
        losses: of validations, by step.
        bad: steps without a finite gradient.
        position: (step, position) that the run is resumed from.
        stopped_in: the step in whose validation it is asked to stop.
    """

    def __init__(self, folder, losses=None, bad=(), *, position=None, stopped_in=None, stop_step=20, **more):
        self.said, self.bad, self.losses, self.task = [], bad, losses, Line()
        self.state = loop.State.resumed(*position, World()) if position else loop.State()
        self.model = nn.Linear(1, 1)
        self.saver = Saver(OwnFiles(str(folder)), 9, World(), self.content, self.said.append)
        self.run = loop.Run(
            self.model,
            self.task,
            torch.optim.SGD(self.model.parameters(), lr=0.0),
            World(),
            stop_step=stop_step,
            steps_per_epoch=1000,
            save=self.saver,
            say=self.said.append,
            stop=lambda: self.state.unfinished and self.state.step == stopped_in,
            **more,
        )

    def content(self, step, position):
        self.position = step, position
        return {"step": step, "model": self.model.state_dict(), "position": position}

    def at(self, epoch, first_batch):
        for step in itertools.count(first_batch + 1):
            factor = NAN if step in self.bad else 1.0
            yield {"x": torch.ones(1, 1), "factor": torch.tensor([factor])}

    def __iter__(self):  # of a validation
        self.task.loss = self.losses[self.state.step]
        yield {"x": torch.ones(1, 1)}

    def take(self):
        """Trains to the end; a run that diverges says the way back."""
        try:
            loop.train(self.run, {"train": self, "val": self if self.losses else None}, self.state)
        except loop.Diverged as error:
            raise TrainingError(f"{error} {way_back(self.saver, World(), error.good_step)}") from None
        return self


def files(folder):
    """Names of the checkpoints and the steps that they are of."""
    names = [name for name in sorted(os.listdir(folder)) if name.endswith(".bin")]
    return {name: torch.load(folder / name, weights_only=True)["step"] for name in names}


def test_two_validations_in_a_row_end_the_run(tmp_path):
    losses = {3: 5.0, 6: NAN, 9: 4.0, 12: math.inf, 15: NAN}
    training = Training(tmp_path, losses, eval_interval=3, save_interval=2)
    words = (
        "step 15: the loss is nan in 2 validations in a row: the run has diverged. The last checkpoint that"
    )
    words += f" is known to be good is {tmp_path}/best.bin, of step 9. Give it as --initial-checkpoint"
    with pytest.raises(TrainingError) as error:
        training.take()
    assert words in str(error.value)
    assert files(tmp_path) == {"10.bin": 10, "2.bin": 2, "4.bin": 4, "best.bin": 9, "last.bin": 10}
    why = "not written: the loss of the last validation was not finite"
    assert [text for text in training.said if "WARNING" in text] == [
        f"WARNING: step {step}: {step}.bin, last.bin {why}" for step in (6, 8, 12, 14)
    ]


@pytest.mark.parametrize(
    "losses, best", [([3.0, NAN, 2.0, 2.5], 3), ([NAN, 3.0, math.inf, 4.0], 2), ([NAN, 2.0, NAN, 3.0], 2)]
)
def test_a_loss_that_is_no_number_is_never_the_best(tmp_path, losses, best):
    training = Training(tmp_path, dict(enumerate(losses, 1)), eval_interval=1, stop_step=4).take()
    assert files(tmp_path)["best.bin"] == best and training.state.best_val_loss == losses[best - 1]


def test_a_best_checkpoint_that_could_not_be_written_is_no_measure(tmp_path):
    training = Training(tmp_path, {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5}, eval_interval=1, stop_step=4)
    content = training.saver.state

    def in_the_way(step, position):  # a folder of that name at step 2 alone
        if step == 2:
            os.remove(tmp_path / "best.bin")
            (tmp_path / "best.bin").mkdir()
        elif (tmp_path / "best.bin").is_dir():
            (tmp_path / "best.bin").rmdir()
        return content(step, position)

    training.saver.state = in_the_way
    training.take()
    assert any("WARNING: the checkpoint of step 2 could not be saved: " in text for text in training.said)
    assert files(tmp_path)["best.bin"] == 3 and training.state.best_val_loss == 2.0


@pytest.mark.parametrize(
    "losses, options, words, kept",
    [
        ({2: NAN, 4: NAN}, {"eval_interval": 2}, "No checkpoint is known to be good. Start over: --over", {}),
        (
            {4: 1.0, 6: NAN},
            {"eval_interval": 4, "save_interval": 3, "stop_step": 6},
            "step 6: the loss is nan in the last validation.*best.bin, of step 4",
            {"3.bin": 3, "best.bin": 4, "last.bin": 3},
        ),
        (  # without validation gradients tell: a finite one in step 4 speaks for weights before it
            None,
            {"bad": range(5, 11), "save_interval": 2, "max_bad_steps": 6},
            r"step 10: the gradient was not finite in 6 steps in a row .*/2\.bin, of step 2\.",
            {"2.bin": 2, "4.bin": 4, "last.bin": 4},
        ),
    ],
)
def test_what_ends_a_run_and_what_stays(tmp_path, losses, options, words, kept):
    training = Training(tmp_path, losses, **options)
    with pytest.raises(TrainingError, match=words):
        training.take()
    assert files(tmp_path) == kept


def test_the_count_survives_a_stop_even_in_a_validation(tmp_path):
    losses = {2: 1.0, 4: NAN, 6: NAN}
    first = Training(tmp_path, losses, eval_interval=2, save_interval=1, stopped_in=6).take()
    assert first.state.stopped and first.position[0] == 6 and first.position[1]["unfinished"]
    then = Training(tmp_path, losses, eval_interval=2, save_interval=1, position=first.position)
    with pytest.raises(
        TrainingError, match=r"step 6: the loss is nan in 2 validations in a row.*of step 2\."
    ):
        then.take()


def test_one_bad_step_does_not_keep_from_saving_nor_any_at_the_end(tmp_path):
    training = Training(tmp_path, bad=(2, 5, 6), save_interval=2, stop_step=6).take()
    assert files(tmp_path)["2.bin"] == 2 and files(tmp_path)["last.bin"] == 6
    assert "may be unusable: the last 2 steps had no finite gradient" in " ".join(training.said[-2:])


@pytest.mark.processes
@pytest.mark.full
def test_a_learning_rate_that_is_far_too_high(tmp_path):
    data = write_rows(tmp_path / "rows.csv", 40)
    flags = ["--dataset", data, *TINY, "--formatter", "hisco", "--save-path", tmp_path / "run"]
    flags += ["--batch-size", 4, "--log-interval", 2, "--eval-interval", 2, "--save-interval", 1]
    output = run(FINETUNE, *flags, "--warmup-pct", 0, "--learning-rate", 1e9, processes=2, code=1)
    words = "error: step 4: the loss is nan in 2 validations in a row: the run has diverged. No checkpoint is"
    assert output.count(f"{words} known to be good") == 1  # and in torchrun's report, which begins otherwise
    assert not (tmp_path / "run" / "best.bin").exists()
    assert [row["step"] for row in read_logs(tmp_path / "run")] == [2, 4]
