#!/usr/bin/env python3
"""What failures cost: a job whose processes are killed one after the other.

    python benchmarks/recovery.py                             # a process is killed every 60 s, 15 minutes
    python benchmarks/recovery.py --every 30 --minutes 15
    python benchmarks/recovery.py --save-interval 100         # for comparison

Starts finetune.py on two processes under torchrun --max-restarts, on the real rows where they are there and
the sample elsewhere, and kills a random rank with SIGKILL so often, without warning. The clock is that of
this program, and a step is there once its row is in logs.csv. Prints a line for each failure, a table and one
JSON line.

- seconds: from the kill to the first step that was taken after it.
- repeated: steps that were lost, since they came after the checkpoint, and are taken again.
- ETTR (effective training time ratio): the share of the time that was training whose results were kept: steps
  that the run has come on by × the median seconds of a step, over the seconds from the first step to the end.
"""

import argparse
import csv
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

from quality import COLUMNS, data_flags

LOOK = 0.02  # seconds between two looks at the log


class Job:
    """A run under torchrun. `output` are its lines, each with the time at which it came."""

    def __init__(self, args: argparse.Namespace, folder: str):
        self.run = os.path.join(folder, "run")
        data = data_flags("real", folder)
        self.data = "real" if data else "sample"
        command = [
            *[sys.executable, "-m", "torch.distributed.run", "--standalone"],
            *[f"--nproc_per_node={args.processes}", "--max-restarts=1000", str(REPO / "finetune.py")],
            *["--distributed", *(data or data_flags("sample", folder) or []), *COLUMNS],
            *["--device", "cpu", "--model-size", args.size, "--batch-size", str(args.batch)],
            *["--num-epochs", "1000", "--log-interval", "1", "--eval-interval", "1000000000"],
            *["--save-interval", str(args.save_interval)],
            *["--save-path", self.run, *shlex.split(args.flags)],
        ]
        self.process = subprocess.Popen(
            command,
            cwd=REPO,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output: list[tuple[float, str]] = []
        self.reading = threading.Thread(target=self._read, args=(args.show, time.monotonic()), daemon=True)
        self.reading.start()
        self._file: tuple[int, int] | None = None  # number and size of the log that was read last
        self.steps: list[
            tuple[int, float, int]
        ] = []  # step, when it was there, which start of the job took it
        self.start, self.resumed_at = 0, 0

    def _read(self, show: bool, began: float) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.output.append((time.monotonic(), line.rstrip()))
            if show:
                print(f"{time.monotonic() - began:8.2f}  {line.rstrip()}", flush=True)

    def look(self) -> None:
        """Notes the steps that have come. A job that starts again writes its log anew, up to where it goes
        on.
        """
        path, now = os.path.join(self.run, "logs.csv"), time.monotonic()
        try:
            with open(path, encoding="utf-8", newline="") as file:
                state = os.fstat(file.fileno())
                found = state.st_ino, state.st_size
                if found == self._file:
                    return
                rows = [int(row["step"]) for row in csv.DictReader(file) if row["samples"]]
        except (OSError, ValueError, TypeError):  # not there yet, or a row half written
            return
        if self._file is None or found[0] != self._file[0]:
            self.start, self.resumed_at = self.start + 1, max(rows, default=0)
        self._file = found
        last = max((step for step, _, start in self.steps if start == self.start), default=self.resumed_at)
        self.steps += [(step, now, self.start) for step in rows if step > last]

    def ranks(self) -> dict[int, int]:
        """rank → process, of those that run."""
        found = {}
        for name in os.listdir("/proc"):
            if not name.isdecimal():
                continue
            try:
                state = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
                if int(state[1]) != self.process.pid or state[0] in "ZX":
                    continue
                variables = Path("/proc", name, "environ").read_bytes().split(b"\0")
            except (OSError, IndexError):
                continue
            for variable in variables:
                if variable.startswith(b"RANK="):
                    found[int(variable[5:])] = int(name)
        return found

    def wait(self, until: float, step: bool = False) -> None:
        """Until then, or with `step` until one has come."""
        before = len(self.steps)
        while time.monotonic() < until and not (step and len(self.steps) > before):
            if self.process.poll() is not None:
                sys.exit("the job has ended:\n" + "\n".join(line for _, line in self.output[-40:]))
            self.look()
            time.sleep(LOOK)

    def end(self) -> None:
        """As a user stops it: it saves."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.reading.join(5)


def killed_at(job: Job, every: float, seconds: float, chance: random.Random) -> list[dict]:
    """Kills a rank every so many seconds after the first step, until so many have passed; the failures."""
    job.wait(time.monotonic() + 600, step=True)
    if not job.steps:
        sys.exit("no step within ten minutes:\n" + "\n".join(line for _, line in job.output[-40:]))
    began = time.monotonic()
    failures: list[dict] = []
    number = 1
    while number * every < seconds:
        job.wait(began + number * every)
        while not (ranks := job.ranks()):
            job.wait(time.monotonic() + LOOK)
        rank = chance.choice(sorted(ranks))
        os.kill(ranks[rank], signal.SIGKILL)
        failures.append({"rank": rank, "at": time.monotonic(), "start": job.start})
        number += 1
    job.wait(began + seconds)
    job.look()
    return failures


def recovered(job: Job, failures: list[dict]) -> list[dict]:
    """With seconds and repeated steps; a process that is killed before a step has come after the kill before
    adds to that one."""
    found: list[dict] = []
    for failure in failures:
        after = [
            (step, at) for step, at, start in job.steps if start > failure["start"] and at > failure["at"]
        ]
        if found and found[-1]["start"] == failure["start"]:
            found[-1]["kills"] += 1
            continue
        before = max((step for step, at, start in job.steps if start <= failure["start"]), default=0)
        if after:
            step, at = min(after, key=lambda each: each[1])
            found.append(
                {**failure, "kills": 1, "seconds": at - failure["at"], "repeated": before - step + 1}
            )
    return found


def measure(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(args, folder)
        try:
            failures = killed_at(job, args.every, 60 * args.minutes, random.Random(args.seed))
            ended = time.monotonic()
        finally:
            job.end()
    first, last = job.steps[0], job.steps[-1]
    seconds = statistics.median(
        (at - before) / (step - earlier)
        for (earlier, before, start), (step, at, same) in zip(job.steps, job.steps[1:])
        if start == same
    )
    found = recovered(job, failures)
    for failure in found:
        print(
            f"rank {failure['rank']} killed {failure['at'] - first[1]:6.1f} s after the first step:"
            f" {failure['seconds']:5.1f} s to the next one, {failure['repeated']} steps repeated"
            + f", killed {failure['kills']} times"
            * (failure["kills"] > 1)
        )
    saved = [re.search(r"^Saved .* MB in ([0-9.]+) s", line) for _, line in job.output]
    saves = [float(match[1]) for match in saved if match]
    result = {
        "data": job.data,
        "size": args.size,
        "processes": args.processes,
        "every": args.every,
        "minutes": args.minutes,
        "save_interval": args.save_interval,
        "failures": len(failures),
        "seconds": [round(failure["seconds"], 2) for failure in found],
        "seconds_median": round(statistics.median(each["seconds"] for each in found), 2) if found else None,
        "seconds_max": round(max(each["seconds"] for each in found), 2) if found else None,
        "repeated": [failure["repeated"] for failure in found],
        "step_seconds": round(seconds, 3),
        "steps": last[0],
        "saves": len(saves),
        "written": round(statistics.median(saves), 3) if saves else None,
        "ettr": round((last[0] - first[0]) * seconds / (ended - first[1]), 3),
    }
    titles = ("failures", "median s", "max s", "repeated", "s a step", "save s", "ETTR")
    print(" ".join(f"{title:>9}" for title in titles))
    repeated = statistics.mean(result["repeated"]) if found else 0.0
    print(
        f"{len(failures):9} {result['seconds_median'] or 0:9.1f} {result['seconds_max'] or 0:9.1f}"
        f" {repeated:9.1f} {seconds:9.2f} {result['written'] or 0:9.2f} {result['ettr']:9.2f}"
    )
    print(json.dumps(result))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--size", default="small", choices=("tiny", "small", "base"))
    parser.add_argument("--seed", type=int, default=1, help="of which rank is killed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="samples per process and step")
    parser.add_argument("--save-interval", type=int, default=7, help="optimizer steps between checkpoints")
    parser.add_argument("--flags", default="--ngrams none", help="more flags of finetune.py")
    parser.add_argument("--show", action="store_true", help="also show what the job prints, and when")
    measure(parser.parse_args(argv))


if __name__ == "__main__":
    main()
