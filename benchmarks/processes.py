#!/usr/bin/env python3
"""How much training gains from processes: one process with one core, and one with all cores, against
processes with a core each.

    python benchmarks/processes.py                     # size small, 64 samples a step, on two cores
    python benchmarks/processes.py --processes 4 --size base

Whole runs of train_mixer.py take turns; what counts is the median rate of their logs after the first row.
Prints a table and one JSON line.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from histocc.sample.files import write
from histocc.sample.generate import rows

EVERY = 5  # steps a row of the log
# micro-batches, flags
WAYS = {
    "ddp": (1, ["--parallel", "ddp"]),
    "accumulation": (4, ["--parallel", "ddp"]),
    "fsdp": (1, ["--parallel", "fsdp"]),
}


def launcher(processes: int) -> list[str]:
    """What stands between the interpreter and the script: nothing for one process."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return torchrun if processes > 1 else []


def rate(folder: Path, processes: int, threads: int, flags: list) -> float:
    """Samples per second over all processes."""
    run = folder / "run"
    command = [
        sys.executable,
        *launcher(processes),
        str(REPO / "train_mixer.py"),
        *["--distributed"] * (processes > 1),
        "--train-data",
        folder / "train.csv",
        "--val-data",
        folder / "val.csv",
        "--formatter",
        "hisco",
        "--language-col",
        "lang",
        "--device",
        "cpu",
        "--save-dir",
        run,
        "--log-interval",
        EVERY,
        "--eval-interval",
        10**9,
        "--save-interval",
        10**9,
        "--ngrams",
        "none",
        "--overwrite",
        *flags,
    ]
    done = subprocess.run(
        list(map(str, command)),
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    with open(run / "logs.csv", encoding="utf-8", newline="") as file:
        rates = [float(row["samples_per_sec"]) for row in csv.DictReader(file)]
    return statistics.median(rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", default="small", choices=("tiny", "small", "base"))
    parser.add_argument(
        "--batch", type=int, default=64, help="samples over all processes, before accumulation"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument(
        "--steps", type=int, default=25, help="of each run; a quarter of them with accumulation"
    )
    args = parser.parse_args()
    ways = {name: WAYS[name] for name in args.ways}
    found = {name: {"one core": [], "one": [], "many": []} for name in ways}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(rows(12_000, 1), str(folder / "train.csv"))
        write(rows(16, 2), str(folder / "val.csv"))
        for _ in range(args.rounds):
            for way, (accumulation, flags) in ways.items():
                common = [
                    *flags,
                    "--model-size",
                    args.size,
                    "--accumulate-steps",
                    accumulation,
                    "--max-steps",
                    max(3 * EVERY, args.steps // accumulation),
                ]
                share = ["--batch-size", args.batch // args.processes]
                found[way]["one core"].append(rate(folder, 1, 1, [*common, *share]))
                found[way]["one"].append(
                    rate(folder, 1, args.processes, [*common, "--batch-size", args.batch])
                )
                found[way]["many"].append(rate(folder, args.processes, 1, [*common, *share]))
    print(
        f"size {args.size}, {args.batch} samples over all processes, {args.processes} cores; samples/s,"
        f" median of {args.rounds} runs each"
    )
    print(
        f"{'':22} {'1 process':>16} {'1 process':>16} {f'{args.processes} processes':>16}"
        f" {'speed-up over':>14} {'ratio to':>10}"
    )
    print(
        f"{'':22} {'1 core':>16} {f'{args.processes} cores':>16} {'1 core each':>16} {'1 core':>14}"
        f" {'all cores':>10}"
    )
    for way, rates in found.items():
        core, one, many = (statistics.median(values) for values in rates.values())
        print(f"{way:22} {core:16.1f} {one:16.1f} {many:16.1f} {many / core:14.2f} {many / one:10.2f}")
    print(
        json.dumps(
            {"size": args.size, "batch": args.batch, "processes": args.processes, "samples_per_sec": found}
        )
    )


if __name__ == "__main__":
    main()
