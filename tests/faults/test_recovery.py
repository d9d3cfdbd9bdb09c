"""What a failure costs: who is left ends at once, the launcher starts all again, and they continue where the
checkpoint is.
"""

import os
import signal

import pytest
import torch
from harness import Job, assert_gone, assert_same_end, workers
from helpers import REPO, run

from histocc.runtime import checkpoint, run_checkpoint
from histocc.runtime.checksums import sums_of
from histocc.runtime.errors import UserError

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
from histocc.runtime import checkpoint
read = checkpoint.load_same

def load_same(path, sums):
    if {replaced}:
        torch.save({{"model": {{}}, "optimizer": {{}}}}, path + ".new")
        os.replace(path + ".new", path)
    found = read(path, sums)
    print("rank", os.environ["RANK"], "has found", found and sorted(found), flush=True)
    return found

checkpoint.load_same = load_same
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
    found = None if replaced else ["model", "optimizer"]
    assert f"rank 1 has found {found}" in output and "Resuming from step 10" in output, output
    assert_same_end(job, whole)


def test_what_another_process_has_read_is_recognized_by_its_checksums(tmp_path):
    path = str(tmp_path / "last.bin")
    model = {"weight": torch.arange(6.0)}
    torch.save({"model": model, "optimizer": {"lr": 1.0}, "step": 3}, path)
    sums = sums_of({"model": model, "optimizer": {"lr": 1.0}})
    found = checkpoint.load_same(path, sums)
    assert found is not None and torch.equal(found["model"]["weight"], model["weight"])
    for other in ({"model": {"weight": torch.zeros(6)}, "optimizer": {"lr": 1.0}}, {"model": model}, {}):
        torch.save(other, path)
        assert checkpoint.load_same(path, sums) is None
    os.truncate(path, 10)
    assert checkpoint.load_same(path, sums) is None
    os.remove(path)
    assert checkpoint.load_same(path, sums) is None


def test_a_checkpoint_that_was_looked_at_is_not_read_again_unless_it_was_replaced(tmp_path):
    reads = []
    newest = run_checkpoint.Newest(lambda file: reads.append(file) or {"number": len(reads)})
    path = tmp_path / checkpoint.LAST
    path.write_bytes(b"one")
    folder = str(tmp_path)
    assert newest(folder, keep=True)[1] == newest(folder)[1] == {"number": 1}
    assert newest(folder, keep=True)[1] == {"number": 2}
    path.unlink()
    path.write_bytes(b"two")
    assert newest(folder)[1] == {"number": 3}


def test_damaged_files_are_passed_over(tmp_path):
    def read(file):
        if file.endswith(checkpoint.LAST):
            raise UserError(f"{file}: is damaged")
        return {"step": 4}

    for name in (checkpoint.LAST, "4.bin"):
        torch.save({"step": 4}, tmp_path / name)
    path, state, wrong = run_checkpoint.Newest(read)(str(tmp_path), keep=True)
    assert path.endswith("4.bin") and state == {"step": 4} and len(wrong) == 1
