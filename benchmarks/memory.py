#!/usr/bin/env python3
"""What each process holds in memory where `--parallel fsdp` shares out a model, on one process and several.

    python benchmarks/memory.py --size 1024 24 16            # width, layers, heads of examples/train_llada.py
    python benchmarks/memory.py --size 1024 24 16 --processes 2

Each process is looked at several times a second, in /proc: what it holds while steps are taken, and the most
that it has held at all, from building the model to writing the checkpoint. Prints a table and one JSON line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from processes import launcher

from examples import train_llada
from examples.transformer import SIZES, Transformer

NAME = "measured"  # of the size
WINDOW = 64


def held(pid: int) -> tuple[float, float]:
    """(what a process holds now, the most that it has held), in GB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Vm")}
    return kilobytes["VmRSS"] / 1e6, kilobytes["VmHWM"] / 1e6


def ranks(pid: int) -> list[int]:
    """The processes of the ranks below a launcher, or the process itself where there is none."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] or [pid]


def measure(size: list[int], processes: int, steps: int) -> dict:
    """The memory of each process, GB: `steps`, while steps are taken, and `most`; and the size of the
    checkpoint.
    """
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/out", "w+") as out:
        flags = f"--parallel fsdp --global-batch-size 4 --window {WINDOW} --val-windows 1 --max-steps {steps}"
        flags += (
            f" --log-interval 1 --eval-interval 1000000 --no-save-each-epoch --device cpu --model-name {NAME}"
        )
        done = subprocess.Popen(
            [sys.executable, *launcher(processes), __file__, "--size", *map(str, size)]
            + ["--flags", f"{flags} --save-dir {folder}/run" + " --distributed" * (processes > 1)],
            env=os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))},
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
        at_steps, most = {}, {}
        while done.poll() is None:
            time.sleep(0.1)
            said = Path(f"{folder}/out").read_text()
            taken = said.count("\nstep ")
            for pid in ranks(done.pid) if taken else []:
                try:
                    now, peak = held(pid)
                except (OSError, KeyError):
                    continue  # it has ended
                most[pid] = max(peak, most.get(pid, 0))
                if taken < steps:
                    at_steps[pid] = max(now, at_steps.get(pid, 0))
        out.seek(0)
        if done.returncode:
            raise SystemExit(out.read())
        size_of_file = os.path.getsize(f"{folder}/run/last.bin") / 1e9
    return {
        "steps": [round(gb, 2) for _, gb in sorted(at_steps.items())],
        "most": [round(most[pid], 2) for pid in sorted(at_steps)],
        "checkpoint": round(size_of_file, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--size", type=int, nargs=3, default=[1024, 24, 16], metavar=("WIDTH", "LAYERS", "HEADS")
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--flags", help=argparse.SUPPRESS)  # of one process of a measurement
    args = parser.parse_args()
    if args.flags:
        SIZES[NAME] = tuple(args.size)
        return train_llada.main(args.flags.split())
    import torch

    with torch.device("meta"):
        number = sum(p.numel() for p in Transformer(*args.size).parameters())
    print(f"{number / 1e6:,.0f} million parameters, 16 bytes each: {number * 16 / 1e9:.1f} GB")
    found = {}
    for processes in args.processes:
        found[processes] = one = measure(args.size, processes, args.steps)
        for what in ("steps", "most"):
            print(
                f"{processes} processes, {what:>5}: {', '.join(f'{gb:.2f}' for gb in one[what])} GB",
                flush=True,
            )
    print(json.dumps({"size": args.size, "parameters": number, "gb": found}))


if __name__ == "__main__":
    main()
