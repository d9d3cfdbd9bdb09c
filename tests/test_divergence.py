"""A run whose loss is no longer finite: what is not saved, where it ends, and what to start again from."""

import itertools
import math
import os

import pytest
import torch
from helpers import state_of
from torch import nn

from histocc.runtime.checkpoint import Saver
from histocc.runtime.errors import TrainingError
from histocc.runtime.files import OwnFiles
from histocc.runtime.world import World
from histocc.trainer import loop

NAN = math.nan


class Line:
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
    """

    def __init__(self, folder, losses=None, bad=(), **options):
        self.lines, self.bad, self.losses, self.task = [], bad, losses, Line()
        self.state, self.model = loop.State(), nn.Linear(1, 1)
        self.saver = Saver(OwnFiles(str(folder)), 9, World(), self.content, self.lines.append)
        self.run = loop.Run(
            self.model,
            self.task,
            torch.optim.SGD(self.model.parameters(), lr=0.0),
            World(),
            steps_per_epoch=1000,
            save=self.saver,
            **{"stop_step": 20, **options},
        )

    def content(self, step, position):
        return {"step": step, "model": self.model.state_dict(), "position": position}

    def at(self, epoch, first_batch):
        for step in itertools.count(first_batch + 1):
            factor = NAN if step in self.bad else 1.0
            yield {"x": torch.ones(1, 1), "factor": torch.tensor([factor])}

    def __iter__(self):  # of a validation
        self.task.loss = self.losses[self.state.step]
        yield {"x": torch.ones(1, 1)}

    def to_the_end(self):
        loop.train(self.run, {"train": self, "val": self if self.losses else None}, self.state)
        return self


def files(folder):
    names = [name for name in sorted(os.listdir(folder)) if name.endswith(".bin")]
    return {name: state_of(folder, name)["step"] for name in names}


@pytest.mark.parametrize(
    "losses, options, words, kept",
    [
        (
            {3: 5.0, 6: NAN},
            {"eval_interval": 3, "save_interval": 2},
            "step 6: .*validation is nan.* up to step 3 .*--initial-checkpoint",
            {"2.bin": 2, "4.bin": 4, "best.bin": 3, "last.bin": 4},
        ),
        ({2: math.inf}, {"eval_interval": 2}, "good: no checkpoint", {}),
        (  # without validation gradients tell: a finite one in step 4 speaks for weights before it
            None,
            {"bad": [2, 3, *range(5, 11)], "save_interval": 2, "max_bad_steps": 6},
            "step 10: the gradient .* 6 steps.* up to step 3 ",
            {"2.bin": 2, "4.bin": 4, "6.bin": 6, "8.bin": 8, "last.bin": 8},
        ),
    ],
)
def test_what_ends_a_run_and_what_stays(tmp_path, losses, options, words, kept):
    with pytest.raises(TrainingError, match=words):
        Training(tmp_path, losses, **options).to_the_end()
    assert files(tmp_path) == kept


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
    training.to_the_end()
    assert any(line.startswith("WARNING: the checkpoint of step 2") for line in training.lines)
    assert files(tmp_path)["best.bin"] == 3 and training.state.best_val_loss == 2.0
