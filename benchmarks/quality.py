#!/usr/bin/env python3
"""How well a model codes after so many minutes of training from scratch: accuracy on held-out texts, of both decoders.

    python benchmarks/quality.py                                                  # both data sets, 2 and 10 minutes, three seeds
    python benchmarks/quality.py --data real --budgets 2 --seeds 1 2
    python benchmarks/quality.py --data sample --budgets 2 --flags="" --flags="--empty-blocks first"        # compares
    python benchmarks/quality.py --data real --steps 350 1750 --threads 1         # by steps, where the machine is shared

Trains with finetune.py and counts with histocc.evaluate, each in a process of its own. A tenth of the texts is held out (a row is on the side
of its text); seq2seq and linear count every distinct text once, seq_acc, flat_acc and top 1 (the most probable code of the linear decoder) count
rows. The learning rate's schedule is as long as the budget: the steps that fit follow from the rate of some steps before. Data: rows of the
sample, and real ones where they are. Prints a table and one JSON line.

For comparison, the trainer that the published models were made with, on the real rows, split by text, in 450 s on two cores (281 steps; size small, learning rate
3e-4, batch 64): 21.3 % by the seq2seq decoder; the linear decoder 7.3 %, which is the most frequent code.
"""

import argparse
import csv
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from histocc.sample.files import write
from histocc.sample.generate import rows

REAL = REPO.parent / "shared" / "data" / "occupations_en.csv"
SAMPLE_ROWS = 12_000
SHARE_VAL = "0.1"
FLAGS = "--seq2seq-weight 0.03"                # for models from scratch, both decoders
COMMON = ["--formatter", "hisco", "--language-col", "lang", "--share-val", SHARE_VAL, "--device", "cpu", "--overwrite",
          "--eval-interval", "1000000", "--save-interval", "1000000"]


def data_flags(name: str, folder: str) -> list[str] | None:
    """--dataset and --target-cols of a data set; None where it is not there."""
    if name == "real":
        return ["--dataset", str(REAL), "--target-cols", "hisco_1"] if REAL.exists() else None
    path = os.path.join(folder, "sample.csv")
    if not os.path.exists(path):
        write(rows(SAMPLE_ROWS, 1), path)
    return ["--dataset", path, "--target-cols", "hisco_1", "hisco_2", "hisco_3"]


def started(arguments: list[str], threads: int) -> float:
    """Runs a command of the repository to its end; seconds. Ends this one with its output where it fails."""
    before = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=REPO, env={**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(arguments)} ended with {done.returncode}:\n{done.stdout}")
    return time.perf_counter() - before


class Run:
    """Trainings with the same flags on the same data, one after the other in one folder."""

    def __init__(self, args: argparse.Namespace, data: list[str], flags: str, folder: str):
        self.args, self.folder = args, os.path.join(folder, "run")
        self.data = data[1]
        self.flags = [*data, *COMMON, "--model-size", args.size, "--batch-size", str(args.batch), "--learning-rate", str(args.learning_rate),
                      *shlex.split(flags), "--save-path", self.folder]
        self.steps_per_epoch = 0

    def train(self, steps: int, schedule: int, seed: int, log_interval: int) -> float:
        epochs = -(-schedule // self.steps_per_epoch) if self.steps_per_epoch else 1000
        return started(["finetune.py", *self.flags, "--seed", str(seed), "--max-steps", str(steps), "--schedule-steps", str(schedule),
                        "--num-epochs", str(epochs), "--log-interval", str(log_interval)], self.args.threads)

    def log(self) -> list[dict]:
        with open(os.path.join(self.folder, "logs.csv"), encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def rate(self) -> float:
        """Steps per second, from the second half of some steps of a throw-away training."""
        self.train(self.args.probe, 10**6, 0, self.args.probe // 2)
        first, second = (row for row in self.log() if row["samples_per_sec"])
        seen = int(second["samples"]) - int(first["samples"])
        with open(os.path.join(self.folder, "data_report.json"), encoding="utf-8") as file:
            self.steps_per_epoch = -(-json.load(file)["train_rows"] * (self.args.probe // 2) // seen)
        return float(second["samples_per_sec"]) * (self.args.probe // 2) / seen

    def accuracy(self, steps: int, seed: int) -> dict:
        """Trains `steps` and returns what the last checkpoint gets right, fractions of distinct held-out texts."""
        self.train(steps, steps, seed, steps)
        trained = sum((int(row["samples"]) - before) / float(row["samples_per_sec"]) for row, before in
                      zip(self.log(), [0, *(int(row["samples"]) for row in self.log())]) if row["samples_per_sec"])
        report = os.path.join(self.folder, "evaluation")
        started(["-m", "histocc.evaluate", "--model", os.path.join(self.folder, "last.bin"), "--data", self.data, "--share-val", SHARE_VAL,
                 "--output", report, "--overwrite", "--device", "cpu", "--resamples", "10"], self.args.threads)
        with open(os.path.join(report, "report.json"), encoding="utf-8") as file:
            found = json.load(file)
        top = found["decoders"]["linear"]["top_k"][0]["one"]
        return {"seed": seed, "steps": steps, "seconds": trained, "texts": found["data"]["texts"], "linear_top_1": top,
                "val_loss": found["validation"]["val_loss"], "seq_acc": found["validation"]["seq_acc"], "flat_acc": found["validation"]["flat_acc"],
                **{name: each["by_digits"][-1]["over_texts"]["accuracy"][0] for name, each in found["decoders"].items()}}


def spread(values: list[float]) -> str:
    """Mean, and half the way from the lowest to the highest."""
    return f"{100 * statistics.mean(values):5.1f} ± {50 * (max(values) - min(values)):.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", nargs="+", default=["sample", "real"], choices=("sample", "real"))
    parser.add_argument("--budgets", nargs="+", type=float, default=[2, 10], metavar="MINUTES", help="of training")
    parser.add_argument("--steps", nargs="+", type=int, default=None, help="optimizer steps, instead of --budgets")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--size", default="tiny", choices=("tiny", "small", "base"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--probe", type=int, default=20, help="steps that measure the rate")
    parser.add_argument("--flags", action="append", default=None, metavar="TEXT",
                        help=f"more flags of finetune.py in one argument; several compare (default: {FLAGS})")
    args = parser.parse_args()
    found = []
    print(f"{'data':7} {'budget':>9} {'steps':>6} {'seconds':>8}  {'seq2seq':>14}  {'linear':>14}  {'seq_acc':>14}  {'flat_acc':>14}  {'linear, top 1':>14}  flags")
    for name in args.data:
        for flags in args.flags or [FLAGS]:
            with tempfile.TemporaryDirectory() as folder:
                data = data_flags(name, folder)
                if data is None:
                    print(f"{name:7} left out: {REAL.name} is not there")
                    break
                run = Run(args, data, flags, folder)
                rate = run.rate()
                for budget in args.steps or args.budgets:
                    steps = budget if args.steps else max(1, round(60 * budget * rate))
                    results = [run.accuracy(steps, seed) for seed in args.seeds]
                    values = {key: [each[key] for each in results] for key in ("seq2seq", "linear", "seq_acc", "flat_acc", "linear_top_1", "seconds")}
                    label = f"{budget} steps" if args.steps else f"{budget:g} min"
                    print(f"{name:7} {label:>9} {steps:6} {statistics.mean(values['seconds']):8.0f}  {spread(values['seq2seq']):>14}  "
                          f"{spread(values['linear']):>14}  " + "  ".join(f"{spread(values[key]):>14}" for key in ("seq_acc", "flat_acc", "linear_top_1"))
                          + f"  {flags}", flush=True)
                    found.append({"data": name, "flags": flags, "budget": label, "results": results})
    print(json.dumps({"size": args.size, "batch": args.batch, "learning_rate": args.learning_rate, "threads": args.threads, "runs": found}))


if __name__ == "__main__":
    main()
