#!/usr/bin/env python3
"""What n-grams beside the encoder cost: rates of training and coding with them and without, in turns in one
run.

    python benchmarks/ngrams.py                        # size small, batch 64, two threads
    python benchmarks/ngrams.py --size base --device cuda

Rows, batches, threads and sizes are the same; the n-grams are not fitted, which changes weights, not speed.
A ratio is the median over the rounds of seconds without n-grams / seconds with them.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from dataclasses import replace

import torch
from quality import COLUMNS, data_flags
from reference import seconds

import finetune
from histocc.evaluate.baseline import texts_of
from histocc.job import data as job_data
from histocc.job import train as job
from histocc.predict.coder import Coder
from histocc.runtime.world import World
from histocc.trainer import loop
from histocc.trainer.hooks import Intervals, StepHooks, Steps
from histocc.trainer.meter import Meter

WAYS = ("none", "auto")


class Side:
    """A model from scratch with n-grams or without, and the trainer of it."""

    def __init__(self, args: argparse.Namespace, flags: list[str], ngrams: str, folder: str):
        self.world, self.steps, self.coder = World(device=torch.device(args.device)), 0, None
        given = [*flags, "--model-size", args.size, "--batch-size", str(args.batch), "--device", args.device]
        given += ["--ngrams", ngrams, "--ngram-passes", "0", "--max-steps", "1000000", "--save-path", folder]
        self.args = finetune.get_args_parser().parse_args(given)
        with contextlib.redirect_stdout(None):
            self.data, self.formatter = job_data.prepared(self.args, self.world, [flags[1]], [])
            self.run = job.set_up(self.args, self.world, self.data, self.formatter, [flags[1]])

    def train(self, steps: int) -> None:
        setup, step = self.run, self.steps
        batches = setup.loaders["train"].at(0, step % (setup.plan.steps_per_epoch - steps))
        hooks = StepHooks(self.world, Meter(), Steps(stop=step + steps), Intervals(log=None))
        self.steps = loop.train_one_epoch(replace(setup.run, seed=1), batches, hooks, step)

    def code(self, texts: list[str], decoder: str) -> None:
        if self.coder is None:
            state = {
                "key": job.code_numbers(self.data),
                "languages": self.data.languages,
                "config": self.run.config,
            }
            self.coder = Coder(self.run.raw_model.eval(), self.formatter, state)
        self.coder.code(texts, ["en"] * len(texts), decoder)


def ratios(sides: dict[str, Side], work, rounds: int) -> dict:
    """Seconds of each side and how many times as fast the one with n-grams is; the first round warms up."""
    found = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, side in sides.items():
            found[name].append(seconds(lambda: work(side), side.world.device))
    pairs = list(zip(*(found[name][1:] for name in WAYS)))
    middle = {name: statistics.median(values[1:]) for name, values in found.items()}
    return {**middle, "ratio": statistics.median(without / with_them for without, with_them in pairs)}


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", default="real", choices=("real", "sample"))
    parser.add_argument("--size", default="small", choices=("tiny", "small", "base"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rows", type=int, default=512, help="distinct texts to code")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="of training in a round")
    parser.add_argument(
        "--learn", type=int, default=60, help="steps before coding, so that both stop after a code"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    return parser


def main() -> None:
    args = get_args_parser().parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        flags = data_flags(args.data, folder) or data_flags("sample", folder)
        flags = [*flags, *COLUMNS]
        sides = {name: Side(args, flags, name, os.path.join(folder, name)) for name in WAYS}
        found = {"train": ratios(sides, lambda side: side.train(args.steps), args.rounds)}
        print(line("train", args.steps * args.batch, found["train"]), flush=True)
        for side in sides.values():
            side.train(max(1, args.learn - side.steps))
        train = sides[WAYS[0]].data.train
        texts = list(dict.fromkeys(texts_of(train)))[: args.rows]
        for decoder in ("flat", "greedy"):
            found[decoder] = ratios(sides, lambda side: side.code(texts, decoder), args.rounds)
            print(line(decoder, len(texts), found[decoder]), flush=True)
    print(json.dumps({**vars(args), "torch": torch.__version__, "found": found}))


def line(what: str, rows: int, found: dict) -> str:
    rates = " and ".join(f"{rows / found[name]:,.1f} rows/s with --ngrams {name}" for name in WAYS)
    return f"{what:7} {rates}: {found['ratio']:.2f} times as fast"


if __name__ == "__main__":
    main()
