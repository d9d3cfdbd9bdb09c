#!/usr/bin/env python3
"""How much training gains from shares of its rows where processes are not equally fast: two processes with a
core each, the second of which is stopped half of the time, 20 ms by 20 ms.

    python benchmarks/shares.py                        # size small, 64 samples a step; Linux
    python benchmarks/shares.py --size tiny --rounds 1

Runs of train_mixer.py with --shares equal and --shares auto take turns, and such where no process is stopped;
what counts is the median rate of the last half of their logs. Prints a table and one JSON line.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from histocc.sample.files import write
from histocc.sample.generate import rows
from histocc.trainer.run_log import numbers

WAYS = ("equal", "auto")
STOPPED_SECONDS = 0.02


@contextlib.contextmanager
def half_as_fast(process: int) -> Generator[None]:
    """Stops it half of the time."""
    ended = threading.Event()

    def stop_and_go() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not ended.wait(STOPPED_SECONDS):
                os.kill(process, signal.SIGSTOP)
                ended.wait(STOPPED_SECONDS)
                os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def rate(folder: Path, cores: list[int], slowed: bool, flags: list) -> tuple[float, str]:
    """Samples per second over both processes, and the last rows of a step that were chosen for each. slowed:
    whether the second is stopped half of the time.
    """
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": ""}
    command = ["train_mixer.py", "--distributed", "--save-dir", folder / "run", "--overwrite", *flags]
    nodes = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=REPO,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda core=core: os.sched_setaffinity(0, {core}),
        )
        for rank, core in enumerate(cores)
    ]
    try:
        with half_as_fast(nodes[1].pid) if slowed else contextlib.nullcontext():
            outputs = [node.communicate()[0] for node in nodes]
    finally:
        for node in nodes:
            node.send_signal(signal.SIGKILL)
            node.wait()
    if any(node.returncode for node in nodes):
        raise SystemExit("\n".join(outputs))
    rates = [row["samples_per_sec"] for row in numbers(str(folder / "run" / "logs.csv"))]
    chosen = re.findall(r"Rows of a step from step .* on: rank 0 (\d+) .*, rank 1 (\d+) ", outputs[0])
    return statistics.median(rates[len(rates) // 2 :]), ":".join(chosen[-1]) if chosen else "equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", default="small", choices=("tiny", "small", "base"))
    parser.add_argument("--batch", type=int, default=64, help="samples of a step over both processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("error: two cores are needed, and this process may use one alone")
    found = {f"{way}, {speed}": [] for speed in ("one slowed", "equally fast") for way in WAYS}
    chosen: dict[str, list[str]] = {name: [] for name in found}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(rows(12_000, 1), str(folder / "train.csv"))
        write(rows(16, 2), str(folder / "val.csv"))
        flags = ["--train-data", folder / "train.csv", "--val-data", folder / "val.csv"]
        flags += ["--formatter", "hisco", "--language-col", "lang", "--device", "cpu", "--ngrams", "none"]
        flags += [
            "--model-size",
            args.size,
            "--global-batch-size",
            args.batch,
            "--batch-size",
            args.batch // 2,
        ]
        flags += ["--max-steps", args.steps, "--log-interval", 5]
        flags += ["--eval-interval", 10**9, "--save-interval", 10**9]
        for _ in range(args.rounds):
            for key in found:
                way, _, speed = key.partition(", ")
                found_rate, shares = rate(folder, cores, speed == "one slowed", [*flags, "--shares", way])
                found[key].append(found_rate)
                chosen[key].append(shares)
    print(
        f"size {args.size}, {args.batch} samples a step, two cores; samples/s, median of {args.rounds} runs"
    )
    for speed in ("one slowed", "equally fast"):
        equal, auto = (statistics.median(found[f"{way}, {speed}"]) for way in WAYS)
        shares = ", ".join(chosen[f"auto, {speed}"])
        rates = f"equal shares {equal:8.1f}  auto {auto:8.1f}  {auto / equal:5.2f} times"
        print(f"{speed:14} {rates}  rows {shares}")
    print(json.dumps({"size": args.size, "batch": args.batch, "samples_per_sec": found, "rows": chosen}))


if __name__ == "__main__":
    main()
