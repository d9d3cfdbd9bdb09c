"""Every wait has an end, and a signal ends it: joining the others, batches from other processes."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from helpers import FINETUNE, REPO, TINY, environment, write_rows

from histocc.runtime import signals
from histocc.runtime.errors import TrainingError
from histocc.runtime.world import World
from histocc.trainer.batches import BatchLoader, BatchPlan, MicroBatches, Rows

CODE = "from histocc.runtime import signals; signals.start_listening(); "
CODE += "from histocc.runtime import config, entrypoint; "
CODE += "p = config.Parser(config.Processes, 'x', 'x'); "
CODE += "import os, time; entrypoint.start(p, lambda args, world: print('joined', world.rank) or "
CODE += "time.sleep(float(os.environ.get('STAYS', '0'))))"


def joining(port, *flags, **variables):
    """A process that joins the others and does nothing else."""
    variables = {name: str(value) for name, value in variables.items()}
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *flags],
        env=environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **variables),
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def silent_port():
    """The port of a program that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        yield server.getsockname()[1]


@pytest.mark.full
def test_a_rank_that_two_processes_have_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = [
        joining(port, "--timeout-minutes", "1", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, STAYS=6)
        for rank in (0, 1, 1)
    ]
    said = [process.communicate(timeout=100)[0] for process in job]
    assert sorted(process.returncode for process in job) == [0, 0, 2], said
    assert (
        sum("RANK=1 was given to two processes of this job" in words for words in said) == 1
        and said[0] == "joined 0\n"
    )


@pytest.mark.full
def test_joining_has_the_limit_of_the_job(silent_port):
    process = joining(silent_port, "--timeout-minutes", "0.02", RANK=1, LOCAL_RANK=1, WORLD_SIZE=2)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 2 and output.startswith("error: ") and output.count("\n") <= 2, output
    assert f"MASTER_PORT={silent_port}" in output and "frame #" not in output


def test_a_signal_ends_joining(silent_port):
    process = joining(silent_port, RANK=1, LOCAL_RANK=1, WORLD_SIZE=2)
    caught, until = 0, time.monotonic() + 60
    while not caught >> (signal.SIGTERM - 1) & 1 and time.monotonic() < until:
        caught = int(open(f"/proc/{process.pid}/status").read().partition("SigCgt:")[2].split()[0], 16)
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and output.startswith("Stopped by SIGTERM"), output


# ---- batches


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
            time.sleep(1000)
        return {"x": torch.from_numpy(numbers)}


@pytest.fixture(autouse=True)
def no_wait_for_workers_at_the_end(monkeypatch):
    """torch waits for each worker as long as this, when its iterator is collected: in a later test's time."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()


def loader(what, *, limit=60.0, workers=2):
    dataset = MicroBatches(EightRows(what), BatchPlan(8, 1))
    return BatchLoader(dataset, World(time_limit=limit), num_workers=workers)


def test_batches_come_in_order():
    for workers in (0, 2):
        assert [int(batch["x"][0]) for batch in loader("works", workers=workers)] == list(range(8))


@pytest.mark.parametrize(
    "what, words",
    [
        ("raises", "failed: IndexError: row 3 of 2; --num-workers 0 shows why"),
        ("exits", "exited unexpectedly"),
        ("hangs", r"failed: no answer for .* s \(--timeout-minutes\); --num-workers 0"),
    ],
)
def test_a_worker_that_fails_ends_the_run_with_its_reason(what, words, monkeypatch):
    monkeypatch.setattr("histocc.trainer.batches.POLL_SECONDS", 0.2)
    with pytest.raises(TrainingError, match=words) as error:
        list(loader(what, limit=0.5 if what == "hangs" else 60.0))
    assert error.value.said_by_all


def test_a_request_to_stop_ends_the_wait_for_a_worker(monkeypatch):
    monkeypatch.setattr("histocc.trainer.batches.POLL_SECONDS", 0.2)
    with signals.listening() as stop:
        stop.limit(0.0)
        with pytest.raises(TrainingError, match="no answer for"):
            list(loader("hangs"))


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a small /dev/shm")
@pytest.mark.full
def test_a_shared_memory_that_is_too_small_ends_the_run(tmp_path):
    data = ["--dataset", write_rows(tmp_path / "data.csv", 60), "--target-cols", "hisco_1", *TINY]
    data += ["--formatter", "hisco", "--batch-size", 16, "--save-path", tmp_path / "run", "--num-workers", 2]
    small = 'mount -t tmpfs -o size=64k tmpfs /dev/shm || exit 99; exec "$@"'
    inside = ["unshare", "-m", "bash", "-c", small, "bash"]
    done = subprocess.run(
        [*inside, sys.executable, "-W", "ignore", FINETUNE, *map(str, data)],
        text=True,
        cwd=REPO,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    if done.returncode == 99 or "unshare" in done.stdout:
        pytest.skip("this system lets nobody mount")
    assert done.returncode == 1, done.stdout
    last = done.stdout.splitlines()[-1]
    assert "--num-workers 0" in last and "docker run --shm-size" in last
