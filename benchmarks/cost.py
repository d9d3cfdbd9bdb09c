#!/usr/bin/env python3
"""What training and coding cost by the length of the texts, or by the samples of a step, beside the plain
reference model, which pads every text to 128 positions:

    python benchmarks/cost.py length                       # texts of 8 to 120 characters, batch 64
    python benchmarks/cost.py batch --values 16 64 256     # real texts

Both sides take turns in one run, each warm (reference.py). Prints a table and one JSON line.
"""

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from random import Random

import torch
from reference import Bench, ceilings

from histocc.sample.files import write
from histocc.sample.generate import rows

VALUES = {"length": [8, 16, 32, 64, 120], "batch": [16, 32, 64, 128, 256]}
DISTINCT = 1_000  # texts of a length


def texts_of_length(length: int, path: str) -> list[str]:
    """Writes rows whose texts have `length` characters exactly, joined and cut from those of the sample;
    returns the flags that name them.
    """
    random, made = Random(length), list(rows(DISTINCT, 1))
    texts = []
    for row in made:
        text = row[0] or "x"
        while len(text) < length:
            text += " " + random.choice(made)[0]
        texts.append(text[: length - 1].strip().ljust(length, "x"))
    write(((text, *row[1:]) for row, text in zip(made, texts)), path)
    return [path, "--target-cols", "hisco_1", "hisco_2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("by", choices=list(VALUES))
    parser.add_argument("--values", nargs="+", type=int, help="characters of a text, or samples of a step")
    parser.add_argument("--size", default="small", choices=("tiny", "small", "base"))
    parser.add_argument("--batch", type=int, default=64, help="samples of a step")
    parser.add_argument("--rows", type=int, default=128, help="distinct texts to code, in batches of 64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--learn", type=int, default=60, help="steps before coding: models stop after a code")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--precisions", nargs="+", default=["float32", "bf16"], choices=("float32", "bf16", "fp16")
    )
    args = parser.parse_args()
    args.flags, args.no_reference, args.decode_batch = ["--share-val", "0.3"], False, 64
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    ceilings(args.precisions, device)
    found = {"by": args.by, "size": args.size, "threads": args.threads, "device": args.device, "rates": {}}
    sides = ["reference", *args.precisions]
    print(f"size {args.size}, samples/s of training and texts/s of coding by {args.by}")
    kinds = ("train", "flat", "greedy") if args.by == "length" else ("train",)
    names = [f"{kind} {side}" for kind in kinds for side in sides]
    print(f"{args.by:>8}" + "".join(f"{name:>18}" for name in names), flush=True)
    for value in args.values or VALUES[args.by]:
        with tempfile.TemporaryDirectory() as folder:
            source = None
            if args.by == "length":
                source = texts_of_length(value, str(Path(folder) / "rows.csv"))
            else:
                args.batch = value
            args.steps = max(1, 128 // args.batch)
            with contextlib.redirect_stdout(None):
                bench = Bench(args, folder, source)
                rates = {f"train {name}": rate for name, rate in bench.rates(args.precisions).items()}
                if args.by == "length":
                    bench.use_rate(1e-3, warmup=10)
                    bench.step = 0
                    bench.train(min(args.learn, bench.plan.steps_per_epoch - 1))
                    rates |= bench.decode(args.precisions)
        found["rates"][value] = {name: rates[name] for name in names}
        print(f"{value:>8}" + "".join(f"{rates[name]:18.1f}" for name in names), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
