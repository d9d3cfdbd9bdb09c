"""What failures cost: a job whose processes are killed one after the other.

    python -m benchmarks.recovery                             # a process is killed every 60 s, 15 minutes
    python -m benchmarks.recovery --every 30 --minutes 15

Starts finetune.py on two processes under torchrun --max-restarts and kills a random rank with SIGKILL so
often, without warning. A step is there once its row is in logs.csv.

- seconds: from the kill to the first step that was taken after it.
- repeated: steps that were lost, since they came after the checkpoint, and are taken again.
- ETTR (effective training time ratio): the share of the time that was training whose results were kept: steps
  that the run has come on by × the median seconds of a step, over the seconds from the first step to the end.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .common import NEVER, REPO, arguments, command, data_flags, environment, finish, read_csv, script

LOOK = 0.02  # seconds between two looks at the log


class Job:
    """A run under torchrun. steps: (step, when it was there, which start of the job took it)."""

    def __init__(self, args, folder: str):
        self.log, self.output = f"{folder}/run/logs.csv", f"{folder}/output"
        launch = script("finetune.py", args.processes)
        launch = launch.replace("--standalone", "--standalone --max-restarts 999")
        flags = f"{data_flags('english', folder)} --device cpu --model-size {args.size} --ngrams none"
        flags += f" --batch-size {args.batch} --num-epochs 1000 --log-interval 1 --eval-interval {NEVER}"
        flags += f" --save-interval {args.save_interval} --save-path {folder}/run"
        with open(self.output, "w") as file:
            both = {"stdout": file, "stderr": subprocess.STDOUT}
            line = command(f"{launch} {flags}")
            self.process = subprocess.Popen(line, cwd=REPO, env=environment(1), **both)
        self.steps: list[tuple[int, float, int]] = []
        self.start, self.inode = 0, 0

    def look(self) -> None:
        """Note the steps that have come. A job that starts again writes its log anew."""
        now = time.monotonic()
        try:
            inode = os.stat(self.log).st_ino
            rows = [int(row["step"]) for row in read_csv(self.log) if row["samples"]]
        except (OSError, ValueError, TypeError):  # it is not there yet, or a row is half written
            return
        if inode != self.inode:
            self.inode, self.start, self.last = inode, self.start + 1, max(rows, default=0)
            return
        self.steps += [(step, now, self.start) for step in rows if step > self.last]
        self.last = max(rows, default=self.last)

    def ranks(self) -> dict[int, int]:
        """Return rank → process, for those that run."""
        found = {}
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            try:
                variables = Path("/proc", pid, "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found |= {int(each[5:]): int(pid) for each in variables if each.startswith(b"RANK=")}
        return found

    def wait(self, until: float, step: bool = False) -> None:
        """Wait until then, or with `step` until one has come."""
        while time.monotonic() < until and not (step and self.steps):
            if self.process.poll() is not None:
                sys.exit(f"the job has ended:\n{Path(self.output).read_text()[-4000:]}")
            self.look()
            time.sleep(LOOK)

    def end(self) -> None:
        """End the job as a user stops it: it saves."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def kill_ranks(job: Job, every: float, duration: float, chance: random.Random) -> list[tuple[float, int]]:
    """Kill a rank every so many seconds after the first step, until so many have passed; return (when, which
    start of the job).
    """
    job.wait(time.monotonic() + 600, step=True)
    began, failures = time.monotonic(), []
    while (len(failures) + 1) * every < duration:
        job.wait(began + (len(failures) + 1) * every)
        while not (ranks := job.ranks()):
            job.wait(time.monotonic() + LOOK)
        os.kill(ranks[chance.choice(sorted(ranks))], signal.SIGKILL)
        failures.append((time.monotonic(), job.start))
    job.wait(began + duration)
    return failures


def measure(args) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(args, folder)
        try:
            failures = kill_ranks(job, args.every, 60 * args.minutes, random.Random(1))
            ended = time.monotonic()
        finally:
            job.end()
    seconds, repeated = [], []
    for killed, start in failures:
        before = max((step for step, _, number in job.steps if number <= start), default=0)
        after = [(at, step) for step, at, number in job.steps if number > start and at > killed]
        if after:
            at, step = min(after)
            seconds.append(at - killed)
            repeated.append(before - step + 1)
    (first, began, _), (last, _, _) = job.steps[0], job.steps[-1]
    step_seconds = statistics.median(
        (at - before) / (step - earlier)
        for (earlier, before, start), (step, at, same) in zip(job.steps, job.steps[1:])
        if start == same
    )
    found = {name: getattr(args, name) for name in ("size", "processes", "every", "minutes", "save_interval")}
    return found | {
        "failures": len(failures),
        "seconds_median": statistics.median(seconds),
        "seconds_max": max(seconds),
        "repeated": repeated,
        "step_seconds": step_seconds,
        "ettr": (last - first) * step_seconds / (ended - began),
    }


def words(parts: list[dict]) -> str:
    """Return a text on the costs of the failures of measured jobs."""
    first = parts[0]
    each = [
        f"With a failure every {part['every']:.0f} s ({part['failures']} in {part['minutes']:.0f} minutes)"
        f" and a checkpoint every {part['save_interval']} steps the first new step came"
        f" {part['seconds_median']:.1f} s after the death in the median and {part['seconds_max']:.1f} s at"
        f" most, {statistics.mean(part['repeated']):.1f} steps were repeated, and {100 * part['ettr']:.0f} %"
        " of the time was training whose results were kept."
        for part in parts
    ]
    return (
        f"A job of {first['processes']} processes with a core each, size {first['size']}, under `torchrun"
        " --max-restarts`; a process that is drawn by chance is killed without warning."
        f" {' '.join(each)} A step takes {first['step_seconds']:.2f} s.{first.get('note', '')}"
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--size", default="small", choices=("tiny", "small", "base"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="samples per process and step")
    parser.add_argument("--save-interval", type=int, default=7, help="optimizer steps between checkpoints")
    found = measure(parser.parse_args())
    finish(found, words([found]))


if __name__ == "__main__":
    main()
