"""Every wait has an end, and a signal ends it: joining the others, batches from other processes. A process
that hangs leaves its stacks in the run's folder.
"""

import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from helpers import (
    FINETUNE,
    PIPED,
    TINY,
    command,
    ended,
    environment,
    start_forked,
    wait_until,
    wait_until_handled,
    write_rows,
)

from histocc.runtime import checkpoint, signals
from histocc.runtime.errors import SHARED_MEMORY_IS_FULL, TrainingError
from histocc.runtime.world import World
from histocc.trainer.batches import BatchLoader, BatchPlan, MicroBatches, Rows

CODE = "from histocc.runtime import signals; signals.start_listening(); "
CODE += "from histocc.runtime import config, frame; "
CODE += "p = config.Parser(config.ProcessFlags, 'x', 'x'); "
CODE += "frame.start(p, lambda args, world: print('joined', world.rank))"


@pytest.fixture
def joining(tmp_path):
    """Starts a process that joins another one, which takes connections and never answers."""
    (tmp_path / "joins.py").write_text(CODE)
    with socket.create_server(("127.0.0.1", 0), backlog=8) as server:
        port = str(server.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "1", "WORLD_SIZE": "2"}
        yield lambda *flags: start_forked(tmp_path / "joins.py", flags, tmp_path / "log", **place)[0]


@pytest.mark.full
def test_joining_has_the_limit_of_the_job(joining, tmp_path):
    codes = ended([joining("--timeout-minutes", "0.02")], 90)
    output = (tmp_path / "log").read_text()
    assert codes == [2] and output.startswith("error: ") and output.count("\n") <= 2, output
    assert "MASTER_PORT=" in output and "frame #" not in output


def test_a_signal_ends_joining(joining, tmp_path):
    process = joining()
    wait_until_handled(signal.SIGTERM, process.pid)
    process.terminate()
    codes, output = ended([process]), (tmp_path / "log").read_text()
    assert codes == [0] and output.startswith("Stopped by SIGTERM"), output


def test_handlers_that_cannot_be_given_back_stay(monkeypatch):
    """Those of a program that embeds Python, such as R, are None to it."""
    before, asked = signal.getsignal(signal.SIGTERM), signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with signals.listening():
        assert asked(signal.SIGTERM) is before


class EightRows(Rows):
    def __init__(self, what):
        self.what = what

    def __len__(self):
        return 8

    def batch(self, numbers, epoch):
        if numbers[0] == 3 and self.what == "raises":
            raise IndexError("row 3 of 2")
        if numbers[0] == 3 and self.what == "exits":
            os._exit(7)
        if numbers[0] == 3 and self.what == "hangs":
            time.sleep(20)
        return {"x": torch.from_numpy(numbers)}


@pytest.fixture
def short_waits(monkeypatch):
    """torch waits for each worker as long as this, when its iterator is collected: in a later test's time."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    monkeypatch.setattr("histocc.trainer.batches.POLL_SECONDS", 0.2)
    yield
    gc.collect()


def loader(what, limit=60.0):
    dataset = MicroBatches(EightRows(what), BatchPlan(8, 1))
    return BatchLoader(dataset, World(time_limit=limit), num_workers=2)


@pytest.mark.parametrize(
    "what, words",
    [
        ("raises", "IndexError: row 3 of 2; --num-workers 0"),
        ("exits", "exited unexpectedly"),
        ("hangs", r"no answer for .* s \(--timeout-minutes\); --num-workers 0"),
    ],
)
def test_a_worker_that_fails_ends_the_run_with_its_reason(what, words, short_waits):
    with pytest.raises(TrainingError, match=words):
        list(loader(what, limit=0.5 if what == "hangs" else 60.0))


def test_a_request_to_stop_ends_the_wait_for_a_worker(short_waits):
    with signals.listening() as stop:
        stop.receive(signal.SIGTERM)
        with pytest.raises(TrainingError, match="no answer for"):
            list(loader("hangs", limit=float("inf")))


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a small /dev/shm")
@pytest.mark.full
def test_a_shared_memory_that_is_too_small_ends_the_run(tmp_path):
    data = ["--dataset", write_rows(tmp_path / "data.csv", 60), "--target-cols", "hisco_1", *TINY]
    data += ["--formatter", "hisco", "--batch-size", 16, "--save-path", tmp_path / "run", "--num-workers", 2]
    small = "mount -t tmpfs -o size=64k tmpfs /dev/shm || exit 99; "
    full = small + "dd if=/dev/zero of=/dev/shm/x bs=1k count=64 2>/dev/null; "
    for shell, processes in itertools.product((small, full), (None, 2)):
        line = command(FINETUNE, *data, "--overwrite", processes=processes)
        inside = ["unshare", "-m", "bash", "-c", shell + 'exec "$@"', "bash", *line]
        done = subprocess.run(inside, env=environment(), timeout=120, **PIPED)
        if done.returncode == 99 or "unshare" in done.stdout:
            pytest.skip("this system lets nobody mount")
        assert done.returncode == 1, done.stdout
        assert f"error: {SHARED_MEMORY_IS_FULL}" in done.stdout and done.stdout.count("error: ") == 1


JOB = '''
"""A linear map of ten numbers; a fault of one rank in a call of a function, by default its third pass."""
import ctypes, errno, os, signal, time
from pathlib import Path
from histocc.runtime import signals
signals.start_listening()
import torch
from histocc.runtime.config import Parser
from histocc.runtime.frame import start
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
    columns = ("loss",)
    def losses(self, model, batch):
        return {"loss": (model(batch["x"])[:, 0] - batch["y"]) ** 2}
    def metrics(self, model, batch):
        return self.losses(model, batch)

def hang():
    Path(__file__).with_name("hangs").touch()
    if os.environ.get("FAULT", "").isdigit():
        os.kill(os.getpid(), int(os.environ["FAULT"]))
    elif "FAULT" in os.environ:
        raises = {"full": OSError(errno.ENOSPC, "full"), "stale": OSError(errno.ESTALE, "stale")}
        raise raises.get(os.environ["FAULT"], RuntimeError("a fault"))
    elif "IN_C" in os.environ:
        ctypes.PyDLL(None).pause()  # until a signal is handled, in C, and no other thread runs
    else:
        time.sleep(600)

if os.environ["RANK"] == os.environ["HANGS"]:
    places = {"pass": (Toy, "losses", 3), "content": (script, "checkpoint_content", 2)}
    places |= {"save": (torch, "save", 2), "last save": (torch, "save", 3), "read": (torch, "load", 1)}
    owner, name, number = places[os.environ.get("WHERE", "pass")]
    calls, original = [], getattr(owner, name)
    def called(*args, **named):
        calls.append(name)
        is_full = os.environ.get("FAULT") == "full" and not Path(__file__).with_name("space").exists()
        if len(calls) == number or len(calls) > number and is_full:
            hang()
        return original(*args, **named)
    setattr(owner, name, called)

parser = Parser(ScriptConfig, "hangs.py", "Hangs.")
start(parser, lambda args, world: script.train(
    parser, args, world, lambda: Training(torch.nn.Linear(10, 1), Toy(), Numbers())))
'''


@pytest.fixture
def ranks(tmp_path):
    """Starts the job on two processes, and returns them when one hangs."""
    started = []

    def start(*flags, waits=True, **variables):
        (tmp_path / "hangs.py").write_text(JOB)
        args = ["--save-dir", tmp_path / "run", "--device", "cpu", "--distributed", *flags]
        args += ["--num-epochs", 3, "--batch-size", 4]
        started.extend(start_forked(tmp_path / "hangs.py", args, tmp_path / "log", 2, **variables))
        if waits:
            wait_until((tmp_path / "hangs").exists, (tmp_path / "log").read_text, 60)
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
    codes, said = ended([first, second]), (tmp_path / "log").read_text()
    assert codes == [0, 0] and "Finished at step 6" in said, said
    written = {path.name: path.read_text() for path in (tmp_path / "run").glob("stacks-*")}
    assert written.keys() == {"stacks-rank1.txt"} and "in hang\n" in written["stacks-rank1.txt"]


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("hangs, in_c", [(0, {}), (1, {}), (1, {"IN_C": "1"})])
def test_at_the_time_limit_every_rank_has_written_its_stacks(ranks, tmp_path, hangs, in_c):
    processes = ranks("--timeout-minutes", "0.1", HANGS=str(hangs), **in_c)
    codes, said = ended([processes[1 - hangs]]), (tmp_path / "log").read_text()
    assert codes == [1] and said.count("error: ") == 1, said
    assert f"rank {hangs} did not come" in said and f"{tmp_path}/run/stacks-rank0.txt" in said
    assert "in hang\n" in (tmp_path / "run" / f"stacks-rank{hangs}.txt").read_text()
    assert "in _engine_run_backward\n" in (tmp_path / "run" / f"stacks-rank{1 - hangs}.txt").read_text()


# ---- faults while a run saves or is resumed


def steps_in(folder):
    """The steps of the checkpoints in a folder, all of which can be read."""
    paths = [*folder.glob("*.bin"), *folder.glob("*.pt")]
    return {path.name: checkpoint.load(str(path))["step"] for path in paths}


@pytest.mark.processes
@pytest.mark.full
def test_a_save_that_hangs_ends_the_job_at_the_time_limit(ranks, tmp_path):
    codes = ended(ranks("--timeout-minutes", "0.1", HANGS="0", WHERE="save")[1:])
    said = (tmp_path / "log").read_text()
    assert codes == [1] and said.count("error: ") == 1 and "rank 0 did not come within" in said, said
    for rank, function in enumerate(["hang", "run_on"]):
        assert f"in {function}\n" in (tmp_path / "run" / f"stacks-rank{rank}.txt").read_text()
    assert set(steps_in(tmp_path / "run").values()) == {2}


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fatal_signal_leaves_a_stack_in_the_folder_of_the_run(ranks, tmp_path, rank):
    codes = ended(ranks(HANGS=str(rank), FAULT=str(int(signal.SIGSEGV))))
    assert codes == ([-signal.SIGSEGV, 1] if rank == 0 else [1, -signal.SIGSEGV])
    written = (tmp_path / "run" / f"stacks-rank{rank}.txt").read_text()
    assert "Segmentation fault" in written and "in losses\n" not in written and "in hang\n" in written


@pytest.mark.processes
@pytest.mark.full
def test_a_rank_that_fails_in_a_save_costs_no_checkpoint(ranks, tmp_path):
    codes = ended(ranks(HANGS="1", WHERE="content", FAULT="raises"))
    said = (tmp_path / "log").read_text()
    assert codes == [1, 1] and "a fault" in said and "WARNING" not in said, said
    assert steps_in(tmp_path / "run")["last.bin"] in (2, 4)


@pytest.mark.processes
@pytest.mark.full
def test_a_fault_of_a_rank_while_all_resume_calls_no_checkpoint_damaged(ranks, tmp_path):
    ended(ranks("--max-steps", 2, HANGS="none", waits=False))
    before = steps_in(tmp_path / "run")
    for fault, codes in (("9", [1, -9]), ("stale", [0, 0])):  # the latter is read again
        (tmp_path / "hangs").unlink(missing_ok=True)
        found = ended(ranks(HANGS="1", WHERE="read", FAULT=fault)[-2:])
        said = (tmp_path / "log").read_text()
        assert found == codes and "damaged" not in said, said
        assert fault == "stale" or steps_in(tmp_path / "run") == before
    assert "Resuming from step 2" in said and "Finished at step 6" in said


@pytest.mark.processes
@pytest.mark.full
def test_the_last_save_waits_for_space(ranks, tmp_path):
    processes, said_so_far = ranks(HANGS="0", WHERE="last save", FAULT="full"), (tmp_path / "log").read_text
    wait_until(lambda: "Note: the run waits for up to 30 minutes" in said_so_far(), said_so_far, 60)
    (tmp_path / "space").touch()
    codes, said = ended(processes), said_so_far()
    assert codes == [0, 0] and "Finished at step 6" in said, said
    assert said.count("WARNING") == said.count("Note: ") == 1 and said.count("of step 6: ") == 1, said
    assert steps_in(tmp_path / "run")["last.bin"] == 6


@pytest.mark.processes
@pytest.mark.full
def test_the_code_of_a_run_without_space_for_its_last_save_tells(ranks, tmp_path):
    codes = ended(ranks("--timeout-minutes", "0.02", HANGS="0", WHERE="last save", FAULT="full"))
    said = (tmp_path / "log").read_text()
    assert codes == [1, 1] and said.count("error: the last checkpoint, of step 6, could not be") == 1, said
    assert steps_in(tmp_path / "run")["last.bin"] == 4 and "Traceback" not in said
