"""A process that hangs leaves its stacks in the run's folder: at SIGUSR2, and before the time limit."""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import REPO, _as_script, environment, fork_server, free_port

JOB = '''
"""A linear map of ten numbers, of which a rank hangs in its third pass."""
import ctypes, os, time
from pathlib import Path
from histocc.runtime import signals
signals.start_listening()
import torch
from dataclasses import dataclass
from histocc.runtime.config import Parser
from histocc.runtime.entrypoint import start
from histocc.trainer import script
from histocc.trainer.config import ScriptConfig
from histocc.trainer.batches import Rows
from histocc.trainer.script import Training

class Numbers(Rows):
    fingerprint = "numbers"
    def __len__(self):
        return 16
    def batch(self, numbers, epoch):
        return {"x": torch.ones(len(numbers), 10), "y": torch.from_numpy(numbers).float()}

class Toy:
    columns, passes = ("loss",), 0
    def losses(self, model, batch):
        self.passes += 1
        if self.passes == 3 and os.environ["RANK"] == os.environ["HANGS"]:
            Path(__file__).with_name("hangs").touch()
            hang()
        return {"loss": (model(batch["x"])[:, 0] - batch["y"]) ** 2}
    metrics = losses

def hang():
    if "IN_C" in os.environ:
        ctypes.PyDLL(None).pause()  # until a signal is handled, in C, and no other thread runs
    else:
        time.sleep(600)

@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    num_epochs: int = 3
    batch_size: int = 4

parser = Parser(Config, "hangs.py", "Hangs.")
start(parser, lambda args, world: script.train(
    parser, args, world, lambda: Training(torch.nn.Linear(10, 1), Toy(), Numbers())))
'''


@pytest.fixture
def ranks(tmp_path):
    """Starts the job on two processes, and returns them when one hangs."""
    started = []

    def start(*flags, **variables):
        (tmp_path / "hangs.py").write_text(JOB)
        (tmp_path / "log").touch()
        port = str(free_port())
        for rank in ("0", "1"):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **place, **variables)
            args = ["--save-dir", str(tmp_path / "run"), "--device", "cpu", "--distributed", *flags]
            arguments = (str(tmp_path / "hangs.py"), args, str(tmp_path / "log"), env)
            started.append(fork_server().Process(target=_as_script, args=arguments))
            started[-1].start()
        until = time.monotonic() + 60
        while not (tmp_path / "hangs").exists():
            assert time.monotonic() < until and started[0].is_alive(), (tmp_path / "log").read_text()
            time.sleep(0.05)
        return started

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.mark.processes
def test_a_rank_that_hangs_writes_its_stacks_when_asked_and_the_run_continues(ranks, tmp_path):
    first, second = ranks(HANGS="1", IN_C="1")
    until = time.monotonic() + 60
    while second.is_alive() and time.monotonic() < until:
        os.kill(second.pid, signal.SIGUSR2)
        second.join(0.2)
    first.join(60)
    said = (tmp_path / "log").read_text()
    assert (first.exitcode, second.exitcode) == (0, 0) and "Finished at step 6" in said, said
    written = {path.name: path.read_text() for path in (tmp_path / "run").glob("stacks-*")}
    assert written.keys() == {"stacks-rank1.txt"} and "in hang\n" in written["stacks-rank1.txt"]


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("hangs, in_c", [(0, {}), (1, {}), (1, {"IN_C": "1"})])
def test_at_the_time_limit_every_rank_has_written_its_stacks(ranks, tmp_path, hangs, in_c):
    processes = ranks("--timeout-minutes", "0.1", HANGS=str(hangs), **in_c)
    processes[1 - hangs].join(60)
    said = (tmp_path / "log").read_text()
    assert processes[1 - hangs].exitcode == 1 and said.count("error: ") == 1, said
    assert f"rank {hangs} did not come within the time limit (--timeout-minutes)." in said
    assert f"the stacks of all threads: {tmp_path}/run/stacks-rank0.txt to stacks-rank1.txt\n" in said
    assert "in hang\n" in (tmp_path / "run" / f"stacks-rank{hangs}.txt").read_text()
    assert "in _engine_run_backward\n" in (tmp_path / "run" / f"stacks-rank{1 - hangs}.txt").read_text()


@pytest.mark.full
def test_a_command_without_a_folder_prints_its_stacks_and_continues():
    code = "import time; from histocc.runtime import entrypoint\n"
    code += "def work(): print('ready', flush=True); time.sleep(1.5); print('goes on')\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code + "entrypoint.run_command(work)"],
        env=environment(),
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR2)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 0 and output == "goes on\n" and " in work\n" in said
