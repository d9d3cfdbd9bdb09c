"""Nodes that come and go while a job runs: a rendezvous of one to two nodes (c10d), two agents on this
machine. `tests/run --faults`.
"""

import time

import pytest
from harness import Job, assert_same_losses, kill_all
from helpers import free_port

pytestmark = pytest.mark.processes
STEPS = 150


def test_a_node_joins_and_another_time_leaves(tmp_path, monkeypatch, fault_seed):
    """Whoever takes part, the total batch and the rows of every step stay: the losses are those of one
    process.
    """
    # otherwise torch 2.13's own rendezvous hangs when a node joins
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    flags = ["--dropout", 0, "--encoder-dropout", 0, "--float64", "--log-interval", 1]
    flags += ["--eval-interval", 1000, "--save-interval", 20, "--max-steps", STEPS]
    launcher = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    launcher += ["--rdzv-id=members", "--max-restarts=3"]
    launcher += ["--rdzv-conf=last_call_timeout=1,keep_alive_interval=1"]
    whole = Job(tmp_path / "whole", flags=flags, epochs=100)
    whole.run()
    first, second = (
        Job(tmp_path / "run", flags=flags, epochs=100, processes=1, launcher=launcher) for _ in range(2)
    )
    one = first.start("--overwrite")
    first.wait_for(one, "step 3/")
    other = second.start("--overwrite", log="joining")
    first.wait_for(one, "Nodes: 2", 60)
    until = time.monotonic() + 60
    while " · loss " not in first.said().partition("Nodes: 2")[2]:
        assert one.poll() is None and other.poll() is None and time.monotonic() < until, (
            first.said() + second.said()
        )
        time.sleep(0.05)
    kill_all(other)
    code, output = first.end(one, 120)
    assert code == 0 and output.count("Resuming from step") == 2 and "Stopped by SIGTERM at step" in output, (
        output
    )
    print(
        f"\na node joined at step {output.split('Resuming from step ')[1].split()[0]}, left again before "
        f"{output.split('Resuming from step ')[2].split()[0]} of {STEPS} steps: same losses"
    )
    assert_same_losses(first, whole)
