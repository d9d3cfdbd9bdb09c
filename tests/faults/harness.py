"""Runs that are interrupted, and what must be left of them."""

import os
import signal
import subprocess
import time
from pathlib import Path

import torch
from helpers import TINY, TRAIN_MIXER, command, environment, read_logs, write_rows

SPEEDS = ("samples_per_sec", "seconds_data", "model_flops_per_sec", "mfu")


class Job:
    """A small run of train_mixer.py, dropout and noise on, that can be started, interrupted and continued
    with.
    """

    def __init__(
        self,
        folder: Path,
        *,
        epochs: int = 4,
        processes: int | None = None,
        total: int = 4,
        rows: int = 24,
        flags=(),
        launcher=(),
        script: Path = TRAIN_MIXER,
        logs: Path | None = None,
    ):
        self.folder, self.processes, self.launcher, self.script = folder, processes, launcher, script
        self.logs = logs or folder.parent
        data = self.logs / f"data_{rows}"
        data.mkdir(exist_ok=True)
        train, val = data / "train.csv", data / "val.csv"
        if not val.exists():
            write_rows(train, rows)
            write_rows(val, 24, 500)
        self.flags = ["--train-data", train, "--val-data", val, *TINY, "--language-col", "lang"]
        self.flags += ["--dropout", 0.1, "--num-epochs", epochs, "--global-batch-size", total]
        self.flags += ["--log-interval", 3, "--eval-interval", 5, "--save-interval", 4]
        self.flags += ["--learning-rate", 1e-3, "--save-dir", folder, *flags]
        self.output = ""

    def start(self, *more, log: str | None = None, before=(), launcher=()) -> subprocess.Popen:
        self.log = open(self.logs / f"{log or self.folder.name}.log", "w+", encoding="utf-8")
        line = command(self.script, *self.flags, *more, processes=self.processes)
        launcher = launcher or self.launcher
        if launcher:
            at = line.index("--standalone")
            line[at : at + any(option.startswith("--rdzv") for option in launcher)] = launcher
        return subprocess.Popen(
            [*before, *line],
            env=environment(),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def said(self) -> str:
        return Path(self.log.name).read_text(encoding="utf-8")

    def wait_for(self, process: subprocess.Popen, words: str, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while words not in self.said():
            assert process.poll() is None and time.monotonic() < until, (
                f"never said {words!r}:\n{self.said()}"
            )
            time.sleep(0.02)

    def start_and_wait(self, *more) -> subprocess.Popen:
        """Starts the job, or continues with it, and waits for its next row of the log."""
        step = self.last()["step"] if (self.folder / "last.bin").exists() else 0
        process = self.start(*more)
        self.wait_for(process, f"step {step - step % 3 + 3}/")
        return process

    def end(self, process: subprocess.Popen, seconds: float = 60) -> tuple[int, str]:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            kill_all(process)
            raise AssertionError(f"did not end:\n{self.said()}") from None
        return code, self.said()

    def run(self, *more, code: int = 0) -> str:
        found, output = self.end(self.start(*more), 120)
        assert found == code, output
        return output

    def last(self) -> dict:
        return torch.load(self.folder / "last.bin", weights_only=True)

    def rows(self) -> list[dict]:
        return [
            {name: value for name, value in row.items() if name not in SPEEDS}
            for row in read_logs(self.folder)
        ]


def workers(process: subprocess.Popen) -> list[int]:
    """Process numbers of the ranks that a launcher has started, in order."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def assert_gone(pids: list[int], seconds: float = 10) -> None:
    """No process is left, after the moment that the system needs to take one down."""
    until = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, pids)), f"still alive: {list(filter(alive, pids))}"


def kill_all(process: subprocess.Popen) -> None:
    """SIGKILL for the launcher and everything it started, as when a machine loses power."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def assert_same_end(job: Job, whole: Job) -> None:
    """The very bits of a run that was never interrupted: weights, optimizer, schedule, log."""
    one, other = job.last(), whole.last()
    assert one["step"] == other["step"]
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in other["model"])
    for index, values in other["optimizer"]["state"].items():
        assert all(torch.equal(values[name], one["optimizer"]["state"][index][name]) for name in values)
    assert one["scheduler"] == other["scheduler"]
    assert job.rows() == whole.rows()
    assert not [name for name in os.listdir(job.folder) if ".tmp" in name or name == "run.lock"]


def assert_same_losses(job: Job, whole: Job) -> None:
    """Every step was logged once, with the rows and the loss of a run in double precision that was never
    interrupted.
    """
    rows, others = job.rows(), whole.rows()
    assert [row["step"] for row in rows] == [row["step"] for row in others] == list(range(1, len(others) + 1))
    for row, other in zip(rows, others):
        assert row["samples"] == other["samples"]
        assert abs(row["train_loss"] - other["train_loss"]) <= 1e-9 * abs(other["train_loss"])
