"""What each process holds in memory if `--parallel fsdp` shares out a model, on one process and several.

    python -m benchmarks.memory --size 1024 24 16            # width, layers, heads of examples/train_llada.py
    python -m benchmarks.memory --size 1024 24 16 --processes 2

Each process is looked at several times a second, in /proc: what it holds while steps are taken, and the most
that it has held at all, from building the model to writing the checkpoint.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from examples import train_llada
from examples.transformer import SIZES, Transformer

from .common import NEVER, REPO, arguments, command, environment, finish, script, table

NAME = "measured"  # name of the size


def held(pid: int) -> tuple[float, float]:
    """Return (memory that a process holds now, the most that it has held), in GB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Vm")}
    return kilobytes["VmRSS"] / 1e6, kilobytes["VmHWM"] / 1e6


def ranks(pid: int) -> list[int]:
    """Return the processes of the ranks below a launcher, or the process itself."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] or [pid]


def measure(size: list[int], processes: int, steps: int) -> dict:
    """Return the memory of each process, GB: `steps`, while steps are taken, and `most`; and the size of the
    checkpoint.
    """
    at_steps: dict[int, float] = {}
    most: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/out", "w+") as out:
        flags = f"--parallel fsdp --global-batch-size 4 --window 64 --val-windows 1 --max-steps {steps}"
        flags += f" --log-interval 1 --eval-interval {NEVER} --no-save-each-epoch --device cpu"
        flags += f" --model-name {NAME} --save-dir {folder}/run"
        line = f"{script('-m benchmarks.memory', processes)} --size {' '.join(map(str, size))} --run {flags}"
        env = environment(max(1, (os.cpu_count() or 1) // processes))
        job = subprocess.Popen(command(line), cwd=REPO, env=env, stdout=out, stderr=subprocess.STDOUT)
        while job.poll() is None:
            time.sleep(0.1)
            taken = Path(f"{folder}/out").read_text().count("\nstep ")
            for pid in ranks(job.pid) if taken else []:
                with contextlib.suppress(OSError, KeyError):  # the process has ended
                    now, peak = held(pid)
                    most[pid] = max(peak, most.get(pid, 0))
                    if taken < steps:
                        at_steps[pid] = max(now, at_steps.get(pid, 0))
        if job.returncode:
            sys.exit(Path(f"{folder}/out").read_text())
        checkpoint = os.path.getsize(f"{folder}/run/last.bin") / 1e9
    parts, pids = {"steps": at_steps, "most": most}, sorted(at_steps)
    found = {name: [each[pid] for pid in pids] for name, each in parts.items()}
    return found | {"checkpoint": checkpoint}


def main() -> None:
    parser = arguments(__doc__)
    size = {"type": int, "nargs": 3, "metavar": ("WIDTH", "LAYERS", "HEADS")}
    parser.add_argument("--size", default=[1024, 24, 16], **size)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--run", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # one measured process
    args, more = parser.parse_known_args()
    if args.run is not None:
        SIZES[NAME] = tuple(args.size)
        return train_llada.main(more + args.run)
    with torch.device("meta"):
        number = sum(each.numel() for each in Transformer(*args.size).parameters())
    found = {processes: measure(args.size, processes, args.steps) for processes in args.processes}
    rows = [
        [processes, *(", ".join(f"{gb:.2f}" for gb in each[what]) for what in ("steps", "most"))]
        for processes, each in found.items()
    ]
    words = f"{number / 1e6:,.0f} million parameters, 16 bytes each: {number * 16 / 1e9:.1f} GB"
    heads = ("processes", "in steps, GB of each", "at most")
    finish({"size": args.size, "parameters": number, "gb": found}, f"{words}\n\n{table(heads, rows)}")


if __name__ == "__main__":
    main()
