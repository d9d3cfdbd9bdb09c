"""Each kind of fault at seeded random moments of a job's life, from its first import to its end: `tests/run
--faults [N]`.

Whatever happens to a job of two processes, the same command afterwards ends with the very bits of a run
without faults.
"""

import os
import random
import signal
import time

import pytest
from harness import Job, assert_gone, assert_same_end, kill_all, workers

pytestmark = pytest.mark.processes
EPOCHS = 12  # enough for a good part of the moments to lie between the first step and the last
KINDS = ("SIGTERM", "SIGUSR1", "SIGINT", "kill one", "kill all", "stop one")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without faults, and how long it took."""
    job = Job(tmp_path_factory.mktemp("faults") / "whole", processes=2, epochs=EPOCHS)
    started = time.monotonic()
    job.run()
    return job, time.monotonic() - started


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_a_random_moment(whole, kind, fault_seed):
    reference, lasts = whole
    dice = random.Random(f"{kind} {fault_seed}")
    job = Job(
        reference.folder.parent / f"{kind.replace(' ', '_')}_{fault_seed}",
        processes=2,
        epochs=EPOCHS,
        launcher=["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"],
    )
    process = job.start("--timeout-minutes", 0.2)
    moment = dice.uniform(0.5, lasts)
    time.sleep(moment)
    ranks = workers(process)
    if process.poll() is None:
        if kind == "kill all":
            kill_all(process)
        elif kind.startswith("SIG"):
            process.send_signal(getattr(signal, kind))
        elif ranks:
            os.kill(dice.choice(ranks), signal.SIGKILL if kind == "kill one" else signal.SIGSTOP)
    code, output = job.end(process, 120)
    assert_gone(ranks)  # torchrun has ended them, a stopped one too; or the system
    left = job.last()["step"] if (job.folder / "last.bin").exists() else None
    job.run()
    assert_same_end(job, reference)
    print(
        f"\n{kind} after {moment:.1f} s of {lasts:.1f}: exit code {code}, continued from step {left}: same"
        " bits"
    )
