#!/usr/bin/env python3
"""Learn the next byte of a text: a model, a task and flags on the trainer, as a pattern to copy.

    python examples/next_byte.py --save-dir ./bytes
    torchrun --nproc_per_node=2 examples/next_byte.py --distributed --save-dir ./bytes2

docs/your-own-model.md explains it. The same command, given again, continues.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from histocc.runtime.config import Count, Parser, flag
from histocc.runtime.errors import UserError
from histocc.runtime.frame import start
from histocc.runtime.rng import below, chance, draw, streams
from histocc.trainer import script
from histocc.trainer.batches import Rows
from histocc.trainer.config import ScriptConfig
from histocc.trainer.script import Training

SEEN = 8  # bytes from which the next one is learned
DATA_FLAG = "--text"  # the launchers pass DATA here


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.first, self.last = nn.Linear(SEEN * width, 4 * width), nn.Linear(4 * width, 256)

    def forward(self, before):
        return self.last(self.first(self.bytes(before).flatten(1)).relu())


class Windows(Rows):
    def __init__(self, text, seed=None):
        self.windows, self.seed = text.unfold(0, SEEN + 1, 1), seed

    def __len__(self):
        return len(self.windows)

    def batch(self, numbers, epoch):
        window = self.windows[numbers]
        if self.seed is not None:  # noise: one input byte in twenty is replaced
            stream = streams(self.seed, epoch, numbers)[:, None]
            other = torch.from_numpy(below(draw(stream, np.arange(SEEN)), 256))
            changed = torch.from_numpy(chance(draw(stream, np.arange(SEEN, 2 * SEEN)), 0.05))
            window[:, :-1] = torch.where(changed, other, window[:, :-1])
        return {"window": window}


class NextByte:
    columns = ("loss", "acc")

    def losses(self, model, batch):
        window = batch["window"]
        return {"loss": cross_entropy(model(window[:, :-1]), window[:, -1], reduction="none")}

    def metrics(self, model, batch):
        right = model(batch["window"][:, :-1]).argmax(1) == batch["window"][:, -1]
        return {**self.losses(model, batch), "acc": right}


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    num_epochs: int = 3
    batch_size: int = 64
    learning_rate: float | None = 2e-3
    text: str = flag("README.md", "the file to learn")
    width: Count = flag(32, "width of the model")


parser = Parser(Config, "next_byte.py", "Learn the next byte of a text.")


def get_args_parser():
    return parser


def run(args, world):
    def make():
        if not Path(args.text).is_file():
            raise UserError(f"--text {args.text}: no such file")
        text = torch.tensor(list(Path(args.text).read_bytes()))
        cut = len(text) * 9 // 10
        train, val = Windows(text[:cut], args.seed), Windows(text[cut:])
        return Training(Net(args.width), NextByte(), train, val)

    script.train(parser, args, world, make)


def main(argv=None):
    start(parser, run, argv)


if __name__ == "__main__":
    main()
