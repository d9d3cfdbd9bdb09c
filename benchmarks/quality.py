#!/usr/bin/env python3
"""How well a model codes after so many minutes of training from scratch: accuracy on held-out texts, of both
decoders.

    python benchmarks/quality.py                           # both data sets, 2 and 10 minutes, three seeds
    python benchmarks/quality.py --data real --budgets 2 --seeds 1 2
    python benchmarks/quality.py --data sample --budgets 2 --flags="" --flags="--empty-blocks first"
    python benchmarks/quality.py --data real --steps 350 1750 --threads 1    # where the machine is shared
    python benchmarks/quality.py --baseline --noise --budgets                # baselines alone
    python benchmarks/quality.py --rows 500 2000 8000 --budgets 2            # by number of training rows
    python benchmarks/quality.py --confidence --picture reliability.png      # see benchmarks/confidence.py

Trains with finetune.py and counts with histocc.evaluate, each in its own process. A tenth of the texts
is held out (a row is on the side of its text); a row is right if its set of codes is. A cell is: % of
distinct held-out texts ± half the range over the seeds | % of held-out rows | % of those with two or more
codes, if there are any | with --noise, % of distinct texts of which one random letter was replaced. Top 1:
the most probable code of the linear decoder, in rows. The learning rate's schedule is as long as the budget:
the steps that fit follow from the rate of some steps before. Data: rows of the sample, and real ones where
they are. Prints a table and one JSON line. Seconds are those of the fit of the n-grams and of the training;
where the whole fit would take more than 0.85 of a budget it gets fewer passes with both decoders.

--baseline adds those of histocc.evaluate.baseline, on the same rows: the linear support vector machine (one
thread), the most frequent codes, and those of the same text (a held-out text has none, so they are the most
frequent). --rows takes so many training rows, each time those before and more, and at most ten minutes for
each training, where it is not given in steps; the held-out rows stay.

For comparison, the trainer that the published models were made with, on the real rows, split by text, in 450
s on two cores (281 steps; size small, learning rate 3e-4, batch 64): 21.3 % by the seq2seq decoder; the
linear decoder 7.3 %, which is the most frequent code.
"""

import argparse
import csv
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

import confidence
import numpy as np
import rows as rows_as_files
from processes import launcher

from histocc.evaluate import baseline
from histocc.sample.files import write
from histocc.sample.generate import rows
from histocc.text import text_hashes

REAL = REPO.parent / "shared" / "data" / "occupations_en.csv"
SAMPLE_ROWS, HELD_OUT = 12_000, 1_200  # of the sample, unless --rows asks for more
FLAGS = ""  # the defaults of a start from scratch
FIT_SHARE = 0.85  # of a budget, at most, for the fit of n-grams
FIRST_SHARE = 1 / 6  # of the fit's seconds, which --ngram-passes does not change
PASSES = 10  # of the fit of n-grams, the default of --ngram-passes
COLUMNS = ["--formatter", "hisco", "--language-col", "lang"]
COMMON = ["--device", "cpu", "--overwrite", "--eval-interval", "1000000", "--save-interval", "1000000"]
MOST_MINUTES = 10  # of a training with --rows
DECODERS = ("seq2seq", "linear", "both")  # columns; those that the report lacks stay empty


def data_flags(name: str, folder: str, training_rows: int = 0) -> list[str] | None:
    """Flags of a data set; None where it is not there. training_rows: at least so many in the sample."""
    if name == "real":
        flags = ["--dataset", str(REAL), "--target-cols", "hisco_1", "--share-val", "0.1"]
        return flags if REAL.exists() else None
    path, number = os.path.join(folder, "sample.csv"), max(SAMPLE_ROWS, training_rows * 102 // 100 + HELD_OUT)
    if not os.path.exists(path):
        write(rows(number, 1), path)
    share = f"{HELD_OUT / number:.4g}"
    return ["--dataset", path, "--target-cols", "hisco_1", "hisco_2", "hisco_3", "--share-val", share]


class DataSet:
    """Training rows and held-out rows: prepared data, the flags that give it, files of the held-out rows."""

    def __init__(self, flags: list[str], folder: str, noise: bool):
        """flags: --dataset and what else decides the data. folder: for files; it is there."""
        self.flags = [*flags, *COLUMNS]
        self.prepared = rows_as_files.prepared(self.flags, os.path.join(folder, "prepared"))
        val = self.prepared.val
        self.noisy = rows_as_files.with_a_letter_changed(baseline.texts_of(val), 1) if noise else None
        several = rows_as_files.several_codes(val, self.prepared)
        parts = {
            "all": {},
            **({"several": {"index": several}} if len(several) else {}),
            **({"noise": {"texts": self.noisy}} if noise else {}),
        }
        self.files = {}
        for part, what in parts.items():
            path = os.path.join(folder, f"{part}.csv")
            self.files[part] = rows_as_files.write(path, val, self.prepared, **what)

    def fewer(self, number: int, folder: str, noise: bool) -> "DataSet":
        """The same held-out rows, and `number` of the training rows."""
        os.makedirs(os.path.join(folder, "data"))
        data = self.prepared
        rows_as_files.write(
            os.path.join(folder, "data", "train.csv"),
            data.train,
            data,
            rows_as_files.nested(data.train, number),
        )
        rows_as_files.write(os.path.join(folder, "data", "val.csv"), data.val, data)
        targets = [f"hisco_{place + 1}" for place in range(data.max_codes)]
        return DataSet(["--dataset", os.path.join(folder, "data"), "--target-cols", *targets], folder, noise)

    def baselines(self, names: list[str]) -> dict[str, dict]:
        """Results of the baselines in `names`, in the form of `Run.accuracy`, the decoder being "answer"."""
        data, val = self.prepared, self.prepared.val
        known, true = baseline.known_rows(data), baseline.codes_of(val, data.codes)
        in_front = [f"{data.languages[number]} " if known.languages else "" for number in val.language]
        texts = [
            front + text
            for version in (baseline.texts_of(val), self.noisy or [])
            for front, text in zip(in_front, version)
        ]
        found = {}
        for name in names:
            started = time.perf_counter()
            if name == "svm":
                answers = baseline.svm(known, texts)[0]
            else:
                answers = baseline.look_up(known, texts, name == "look-up")
            seconds = time.perf_counter() - started
            counted = baseline.accuracies(answers[: len(true)], true, np.asarray(val.text_hash), 10, 1)
            right = {"all": counted["over_texts"][0], "rows": counted["over_rows"][0]}
            if counted["several"]:
                right["several"] = counted["several"]["over_rows"][0]
            if self.noisy:
                noisy = baseline.accuracies(answers[len(true) :], true, text_hashes(self.noisy), 10, 1)
                right["noise"] = noisy["over_texts"][0]
            found[name] = {"seconds": seconds, "texts": counted["texts"], "answer": right}
        return found


def started(arguments: list[str], threads: int) -> str:
    """Runs a command of the repository to its end; what it printed. Ends this one with its output where it
    fails.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{shlex.join(arguments)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


class Run:
    """Trainings with the same flags on the same data, one after the other in one folder."""

    def __init__(self, args: argparse.Namespace, data: DataSet, flags: str, folder: str, processes: int = 1):
        self.args, self.folder, self.data = args, os.path.join(folder, "run"), data
        self.script = [*launcher(processes), "finetune.py", *["--distributed"] * (processes > 1)]
        self.flags = [
            *data.flags,
            *COMMON,
            "--model-size",
            args.size,
            "--batch-size",
            str(args.batch),
            *shlex.split(flags),
            "--save-path",
            self.folder,
        ]
        self.steps_per_epoch, self.fit_seconds, self.passes = 0, 0.0, PASSES

    def train(self, steps: int, schedule: int, seed: int, log_interval: int) -> float:
        """Seconds that the fit of the n-grams took."""
        epochs = -(-schedule // self.steps_per_epoch) if self.steps_per_epoch else 1000
        passes = ["--ngram-passes", str(self.passes)] if self.passes != PASSES else []
        said = started(
            [
                *self.script,
                *self.flags,
                *passes,
                "--seed",
                str(seed),
                "--max-steps",
                str(steps),
                "--schedule-steps",
                str(schedule),
                "--num-epochs",
                str(epochs),
                "--log-interval",
                str(log_interval),
            ],
            self.args.threads,
        )
        fitted = re.search(r"^Fitted in ([0-9.]+) s$", said, re.MULTILINE)
        return float(fitted.group(1)) if fitted else 0.0

    def log(self) -> list[dict]:
        with open(os.path.join(self.folder, "logs.csv"), encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def rate(self) -> float:
        """Steps per second, from the second half of some steps of a throw-away training."""
        self.fit_seconds = self.train(self.args.probe, 10**6, 0, self.args.probe // 2)
        first, second = (row for row in self.log() if row["samples_per_sec"])
        seen = int(second["samples"]) - int(first["samples"])
        with open(os.path.join(self.folder, "data_report.json"), encoding="utf-8") as file:
            self.steps_per_epoch = -(-json.load(file)["train_rows"] * (self.args.probe // 2) // seen)
        return float(second["samples_per_sec"]) * (self.args.probe // 2) / seen

    def steps_of(self, seconds: float, rate: float) -> int:
        """How many steps fit into a budget, behind the fit of the n-grams, whose passes are chosen here."""
        self.passes = PASSES
        if self.fit_seconds > FIT_SHARE * seconds:
            share = (FIT_SHARE * seconds / self.fit_seconds - FIRST_SHARE) / (1 - FIRST_SHARE)
            self.passes = max(1, int(PASSES * share))
        fit = self.fit_seconds * (FIRST_SHARE + (1 - FIRST_SHARE) * self.passes / PASSES)
        return max(1, round((seconds - fit) * rate))

    def evaluated(self, part: str) -> dict:
        """The report on a file of the held-out rows."""
        report = os.path.join(self.folder, f"evaluation_{part}")
        started(
            [
                "-m",
                "histocc.evaluate",
                "--model",
                os.path.join(self.folder, "last.bin"),
                "--data",
                self.data.files[part],
                "--output",
                report,
                "--overwrite",
                "--device",
                "cpu",
                "--resamples",
                "10",
            ],
            self.args.threads,
        )
        with open(os.path.join(report, "report.json"), encoding="utf-8") as file:
            return json.load(file)

    def accuracy(self, steps: int, seed: int) -> dict:
        """Trains `steps` and returns what the last checkpoint gets right: for each decoder fractions of
        distinct held-out texts ("all"), of their rows, of rows with several codes, and of noisy texts
        ("noise").
        """
        fitted = self.train(steps, steps, seed, steps)
        return self.result(seed, fitted)

    def result(self, seed: int, fitted: float = 0.0) -> dict:
        """As `accuracy`, of the training that is in the folder. fitted: seconds of the fit of its n-grams."""
        log = self.log()
        trained = fitted + sum(
            (int(row["samples"]) - before) / float(row["samples_per_sec"])
            for row, before in zip(log, [0, *(int(row["samples"]) for row in log)])
            if row["samples_per_sec"]
        )
        reports = {part: self.evaluated(part) for part in self.data.files}
        found, decoders = reports["all"], {}
        for name, each in found["decoders"].items():
            decoders[name] = {"rows": each["accuracy"]}
            for part, report in reports.items():
                over = "over_rows" if part == "several" else "over_texts"
                decoders[name][part] = report["decoders"][name]["by_digits"][-1][over]["accuracy"][0]
        return {
            "seed": seed,
            "steps": int(log[-1]["step"]),
            "seconds": trained,
            "fit_passes": self.passes,
            "texts": found["data"]["texts"],
            "linear_top_1": found["decoders"]["linear"]["top_k"][0]["one"],
            **found["validation"],
            **decoders,
        }


def spread(values: list[float]) -> str:
    """Mean, and half the way from the lowest to the highest, in %."""
    return f"{100 * statistics.mean(values):5.1f} ± {50 * (max(values) - min(values)):.1f}"


def cell(results: list[dict], name: str) -> str:
    """What a decoder, or a baseline as "answer", gets right; empty where the results lack it."""
    if any(name not in each for each in results):
        return ""
    found = [each[name] for each in results]
    parts = [
        f"{100 * statistics.mean(each[part] for each in found):.1f}"
        for part in ("rows", "several", "noise")
        if part in found[0]
    ]
    first = spread([each["all"] for each in found]) if len(found) > 1 else f"{100 * found[0]['all']:5.1f}"
    return " | ".join([first, *parts])


def line(
    data: str, rows: object, what: str, steps: object, seconds: object, cells: list[str], top: str, flags: str
) -> str:
    """A line of the table. cells: of the baseline and of each of DECODERS."""
    columns = "  ".join(f"{each:>31}" for each in cells)
    return f"{data:7} {rows:>7} {what:>10} {steps:>6} {seconds:>8}  {columns}  {top:>13}  {flags}".rstrip()


def baseline_lines(name: str, data: DataSet, names: list[str]) -> list[dict]:
    """Prints what the baselines in `names` get right, and returns it for the JSON line."""
    number, found = len(data.prepared.train), []
    for each, result in data.baselines(names).items():
        cells = [cell([result], "answer"), "", "", ""]
        print(line(name, number, each, "", f"{result['seconds']:.1f}", cells, "", ""), flush=True)
        found.append({"data": name, "rows": number, "baseline": each, "results": [result]})
    return found


def model_lines(name: str, data: DataSet, args: argparse.Namespace, flags: str, folder: str) -> list[dict]:
    """Trains for each budget, prints what the models get right, and returns it for the JSON line."""
    if not (args.steps or args.budgets):
        return []
    run, number, found = Run(args, data, flags, folder), len(data.prepared.train), []
    rate = 0.0 if args.steps else run.rate()
    most = MOST_MINUTES if args.rows else float("inf")
    for budget in args.steps or sorted({min(budget, most) for budget in args.budgets}):
        steps = budget if args.steps else run.steps_of(60 * budget, rate)
        results = [run.accuracy(steps, seed) for seed in args.seeds]
        label = f"{budget} steps" if args.steps else f"{budget:g} min"
        seconds = f"{statistics.mean(each['seconds'] for each in results):.0f}"
        print(
            line(
                name,
                number,
                label,
                steps,
                seconds,
                ["", *(cell(results, each) for each in DECODERS)],
                spread([each["linear_top_1"] for each in results]),
                flags,
            ),
            flush=True,
        )
        found.append({"data": name, "rows": number, "flags": flags, "budget": label, "results": results})
    return found


def data_sets(name: str, args: argparse.Namespace, folder: str):
    """The data set, or with --rows one for each number of training rows; none where it is not there."""
    flags = data_flags(name, folder, max(args.rows or [0]))
    if flags is None:
        print(f"{name:7} left out: {REAL.name} is not there")
        return
    os.makedirs(os.path.join(folder, "whole"))
    whole = DataSet(flags, os.path.join(folder, "whole"), args.noise)
    if not args.rows:
        yield whole
    for number in sorted({min(number, len(whole.prepared.train)) for number in args.rows or ()}):
        yield whole.fewer(number, os.path.join(folder, f"rows_{number}"), args.noise)


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", nargs="+", default=["sample", "real"], choices=("sample", "real"))
    parser.add_argument(
        "--budgets",
        nargs="*",
        type=float,
        default=[2, 10],
        metavar="MINUTES",
        help="of training; without a value no model is trained",
    )
    parser.add_argument(
        "--steps", nargs="+", type=int, default=None, help="optimizer steps, instead of --budgets"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--size", default="tiny", choices=("tiny", "small", "base"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--probe", type=int, default=20, help="steps that measure the rate")
    parser.add_argument(
        "--flags",
        action="append",
        default=None,
        metavar="TEXT",
        help=f"more flags of finetune.py in one argument; several compare (default: {FLAGS})",
    )
    parser.add_argument("--baseline", action="store_true", help="the baselines, too (needs scikit-learn)")
    parser.add_argument(
        "--noise", action="store_true", help="also count held-out texts with one random letter replaced"
    )
    parser.add_argument(
        "--confidence",
        action="store_true",
        help="instead: how far confidence can be trusted, before and after it is fitted, after --steps (one"
        " number, default 304)",
    )
    parser.add_argument("--picture", default=None, metavar="FILE.png", help="with --confidence: reliability")
    parser.add_argument(
        "--rows",
        nargs="+",
        type=int,
        default=None,
        help=(
            f"numbers of training rows; models train for at most {MOST_MINUTES} minutes, and"
            " the support vector machine is added"
        ),
    )
    return parser


def main() -> None:
    args = get_args_parser().parse_args()
    if args.confidence:
        with tempfile.TemporaryDirectory() as folder:
            sets = {name: data_flags(name, folder) for name in args.data}
            return confidence.compare(args, {name: each for name, each in sets.items() if each}, folder)
    found = []
    print(line("data", "rows", "", "steps", "seconds", ["baseline", *DECODERS], "linear, top 1", "flags"))
    for name in args.data:
        with tempfile.TemporaryDirectory() as folder:
            for data in data_sets(name, args, folder):
                names = ["svm", "majority", "look-up"] if args.baseline else ["svm"] if args.rows else []
                found += baseline_lines(name, data, names) if names else []
                for flags in args.flags or [FLAGS]:
                    found += model_lines(name, data, args, flags, folder)
    print(json.dumps({"size": args.size, "batch": args.batch, "threads": args.threads, "runs": found}))


if __name__ == "__main__":
    main()
