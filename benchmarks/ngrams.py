#!/usr/bin/env python3
"""What n-grams beside the encoder cost: rates of training and coding with them and without, in turns in one
run.

    python benchmarks/ngrams.py                        # size small, batch 64, two threads
    python benchmarks/ngrams.py --size base --device cuda

Rows, batches, threads and sizes are the same; the n-grams are not fitted, which changes weights, not speed.
A ratio is the median over the rounds of seconds without n-grams / seconds with them.
"""

import argparse
import json
import os
import statistics
import tempfile

import torch
from quality import COLUMNS, data_flags
from reference import seconds
from training import Training

from histocc.evaluate.baseline import texts_of
from histocc.predict.coder import Coder

WAYS = ("none", "auto")


class Side(Training):
    """A model from scratch with n-grams or without, and the trainer of it."""

    def __init__(self, args: argparse.Namespace, flags: list[str], ngrams: str, folder: str):
        given = [*flags, "--model-size", args.size, "--batch-size", str(args.batch)]
        given += ["--ngrams", ngrams, "--ngram-passes", "0", "--save-path", folder]
        super().__init__(given, torch.device(args.device))
        self.train_seen_rows()
        self.coder: Coder | None = None

    def code(self, texts: list[str], decoder: str) -> None:
        if self.coder is None:
            key = {code: i for i, code in enumerate(self.data.codes)}
            state = {"key": key, "languages": self.data.languages, "config": self.config}
            self.coder = Coder(self.model.eval(), self.formatter, state)
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
            side.train(max(1, args.learn - side.step))
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
