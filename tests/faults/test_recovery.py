"""What a failure costs: who is left ends at once, the launcher starts all again, and they continue where the
checkpoint is.
"""

import os
import signal

import pytest
from harness import Job, assert_gone, assert_same_end, workers
from helpers import REPO, run

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recovery")


@pytest.fixture(scope="module")
def whole(folder):
    job = Job(folder / "whole", processes=2, epochs=3)
    run(job.script, *job.flags, processes=2)
    return job


def test_a_killed_process_is_replaced_and_the_result_is_that_of_a_whole_run(folder, whole):
    job = Job(folder / "killed", processes=2, epochs=3, launcher=["--max-restarts=1"])
    process = job.start()
    job.wait_for(process, "step 9/18")
    first = workers(process)
    os.kill(first[0], signal.SIGKILL)
    code, output = job.end(process)
    assert code == 0 and output.count("Resuming from step") == 1, output
    assert "failed (exitcode: -9)" in output and f"(pid: {first[0]})" in output
    assert_gone(first)
    assert_same_end(job, whole)


REPLACED = """
import os, sys
sys.path.insert(0, {repo!r})
import torch, train_mixer
from histocc.published import models
from histocc.runtime.world import World
read, broadcast = models.load_resumable, World.broadcast

def load_resumable(path):
    if {replaced} and os.environ["RANK"] == "1":
        torch.save({{"model": {{}}, "optimizer": {{}}}}, path + ".new")
        os.replace(path + ".new", path)
    return read(path)

def send(world, value, source):
    if isinstance(value, dict) and "optimizer" in value:
        print("rank", world.rank, "sends it", flush=True)
    return broadcast(world, value, source)

models.load_resumable, World.broadcast = load_resumable, send
train_mixer.main()
"""


@pytest.mark.parametrize("replaced", [pytest.param(False, marks=pytest.mark.full), True])
def test_every_process_reads_the_checkpoint_or_is_sent_it(folder, whole, replaced):
    """Where the file is no longer that which rank 0 has read, rank 0 sends what it holds."""
    script = folder / f"replaced_{replaced}.py"
    script.write_text(REPLACED.format(repo=str(REPO), replaced=replaced))
    job = Job(folder / f"read_{replaced}", processes=2, epochs=3)
    run(job.script, *job.flags, "--max-steps", 10, processes=2)
    output = run(script, *job.flags, processes=2)
    assert ("rank 0 sends it" in output) == replaced and "Resuming from step 10" in output, output
    assert_same_end(job, whole)
