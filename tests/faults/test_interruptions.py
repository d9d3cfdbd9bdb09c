"""Signals, kills, damaged files and full disks, with real processes: nothing lost, nothing repeated."""

import os
import random
import shutil
import signal
import subprocess
import time

import pytest
from harness import Job, alive, assert_gone, assert_same_end, assert_same_losses, kill_all, workers
from helpers import REPO, TITLES, write_csv

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def whole(folder):
    """36 steps in one process, never interrupted."""
    job = Job(folder / "whole", epochs=6)
    job.run()
    return job


@pytest.fixture(scope="module")
def whole_of_two(folder):
    job = Job(folder / "whole_of_two", processes=2, epochs=6)
    job.run()
    return job


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.unlink()  # not the file that it may be a link to
    path.write_bytes(content)


@pytest.mark.full
def test_one_process_is_interrupted_in_every_way_and_the_same_command_goes_on(folder, whole):
    """One run: four signals, kills, two damaged files."""
    job, dice = Job(folder / "one", epochs=6), random.Random(1)
    for name, expected in (("SIGUSR1", 0), ("SIGHUP", 0), ("SIGINT", 130), ("SIGTERM", 0)):
        process = job.start_and_wait()
        time.sleep(dice.uniform(0, 0.2))
        process.send_signal(getattr(signal, name))
        code, output = job.end(process)
        assert code == expected and f"Stopped by {name} at step " in output, output
        assert "The same command continues." in output
        assert "Traceback" not in output and f"at step {job.last()['step']} of 36, saved in " in output
    process = job.start_and_wait()
    time.sleep(dice.uniform(0, 0.4))
    kill_all(process)
    last = job.folder / "last.bin"
    flip_a_bit(last)
    process = job.start()
    job.wait_for(process, "Continuing the training")
    output = job.said()
    assert "WARNING: a newer checkpoint cannot be used" in output and "not what its checksum says" in output
    assert "Resuming from step" in output
    kill_all(process)
    content = last.read_bytes()
    last.unlink()
    last.write_bytes(content[: len(content) // 2])
    output = job.run()
    assert "WARNING: a newer checkpoint cannot be used" in output and "may be damaged" in output
    assert "Resuming from step" in output
    assert_same_end(job, whole)


@pytest.mark.full
def test_two_processes_are_interrupted_in_every_way_and_the_same_command_goes_on(folder, whole_of_two):
    """One run: a signal to the launcher, to one process, and no warning at all to the launcher, to a process;
    one that is stuck.
    """
    job = Job(folder / "two", processes=2, epochs=6)

    process = job.start_and_wait()
    process.send_signal(signal.SIGTERM)  # to torchrun, which passes it on
    code, output = job.end(process, 90)
    assert code != 0 and output.count("Stopped by SIGTERM at step") == 1, output

    process = job.start_and_wait()
    os.kill(workers(process)[-1], signal.SIGUSR1)
    code, output = job.end(process, 90)
    assert code == 0 and output.count("Stopped by SIGUSR1 at step") == 1, output

    process = job.start_and_wait()
    children = workers(process)
    os.kill(process.pid, signal.SIGKILL)  # the launcher alone
    process.wait()
    assert len(children) == 2
    assert_gone(children)

    process = job.start_and_wait()
    ranks = workers(process)
    os.kill(ranks[1], signal.SIGKILL)
    code, output = job.end(process, 60)  # with the time limit it would be half an hour
    assert code != 0 and "(exitcode: -9)" in output and f"(pid: {ranks[1]})" in output, output
    assert "error: the connection to another process is lost" in output and "trainer/loop.py" not in output
    assert_gone(ranks)

    process = job.start_and_wait("--timeout-minutes", 0.1)
    ranks = workers(process)
    os.kill(ranks[1], signal.SIGSTOP)
    job.wait_for(process, "error: rank 1 did not come within the time limit (--timeout-minutes)", 60)
    kill_all(process)  # torchrun would wait 30 s for the stopped one
    assert_gone(ranks)
    assert "Resuming from step" in job.run()
    assert_same_end(job, whole_of_two)


RAISING = """
import os, sys
sys.path.insert(0, {repo!r})
import torch, train_mixer
step, calls = torch.optim.AdamW.step, []

def raising_step(self, *args, **kwargs):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 5 and not os.path.exists({mark!r}):
        open({mark!r}, "w").close()
        raise KeyError("a fault in this process alone")
    return step(self, *args, **kwargs)

torch.optim.AdamW.step = raising_step
train_mixer.main()
"""


@pytest.mark.full
def test_the_launcher_restarts_the_processes_and_they_go_on(folder, whole_of_two):
    """After a kill, and after an exception in one process."""
    raising = folder / "raising.py"
    raising.write_text(RAISING.format(repo=str(REPO), mark=str(folder / "raised")))
    job = Job(folder / "restarted", processes=2, epochs=6, launcher=["--max-restarts=2"], script=raising)
    process = job.start("--overwrite")  # of the first start alone
    job.wait_for(process, "step 9/36")
    os.kill(workers(process)[1], signal.SIGKILL)
    code, output = job.end(process, 120)
    assert code == 0 and output.count("Resuming from step") == 2 and "Finished at step 36" in output, output
    assert "a fault in this process alone" in output and "(exitcode: -9)" in output
    assert_same_end(job, whole_of_two)


def test_a_second_signal_ends_at_once(folder, whole):
    """Where the first cannot be followed: the other rank does not come, and this one waits for it."""
    job = Job(folder / "second", processes=2)
    process = job.start()
    job.wait_for(process, "step 6/24")
    first, other = workers(process)
    os.kill(other, signal.SIGSTOP)
    time.sleep(1)
    for _ in range(2):
        assert alive(first)
        os.kill(first, signal.SIGUSR1)
        time.sleep(1.3)
    assert_gone([first], 2)
    kill_all(process)
    os.kill(other, signal.SIGKILL)
    assert "model" in job.last()  # whole and readable


@pytest.mark.full
def test_a_stop_while_torch_is_imported(folder):
    job = Job(folder / "importing")
    process = job.start()
    status = f"/proc/{process.pid}/status"
    until = time.monotonic() + 20
    while (
        not int(open(status).read().partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGUSR1 - 1) & 1
        and time.monotonic() < until
    ):
        time.sleep(0.005)
    assert "libtorch" not in open(f"/proc/{process.pid}/maps").read()
    process.send_signal(signal.SIGUSR1)
    code, output = job.end(process)
    assert code == 0 and "Stopped by SIGUSR1 before the first step" in output, output
    assert not job.folder.exists()


@pytest.mark.full
def test_a_stop_during_preparation_leaves_nothing_half_done(folder):
    rows = [(f"{text} {i}", code) for i in range(40_000) for text, code in TITLES]
    many = write_csv(folder / "many.csv", ("occ1", "hisco_1"), rows)
    job = Job(folder / "preparing")
    job.flags = ["--train-data", many, "--val-data", many, "--target-cols", "hisco_1"]
    job.flags += ["--model-size", "tiny", "--save-dir", job.folder]
    process = job.start()
    job.wait_for(process, "Preparing data")
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    code, output = job.end(process)
    assert code == 0 and "Stopped by SIGTERM before the first step" in output, output
    assert not job.folder.exists()


def test_a_run_that_may_last_so_long_only(folder):
    job = Job(folder / "limited", epochs=500)
    assert "Stopped by --stop-after" in job.run("--stop-after", 0.05)


@pytest.mark.full
def test_a_folder_is_used_by_one_job_at_a_time(folder):
    job = Job(folder / "locked", epochs=40)
    process = job.start()
    job.wait_for(process, "Starting training")
    owner = (job.folder / "run.lock").read_text()
    other = Job(folder / "locked", epochs=40)
    second = other.start()
    code = second.wait(60)
    said = other.said()
    assert code == 2 and "is in use by another job" in said, said
    assert f"process {process.pid}, since 20" in said and f"process {process.pid}, since 20" in owner
    kill_all(process)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting a small disk needs root")
@pytest.mark.full
def test_a_full_disk_does_not_end_the_run_but_its_code_tells(folder):
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        job = Job(disk / "run", epochs=1, logs=folder)
        output = job.run(code=1)
        assert "WARNING: the checkpoint of step 4 could not be saved" in output
        assert "error: the last checkpoint, of step 6, could not be saved" in output
        assert "Training continues" in output and "Traceback" not in output
        assert not [name for name in os.listdir(job.folder) if name.endswith(".bin") or ".tmp" in name]
        assert [row["step"] for row in job.rows()] == [3, 5, 6]
        subprocess.run(["mount", "-o", "remount,size=400m", str(disk)], check=True)
        assert "Finished at step 6" in job.run()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert f"error: {job.folder}: cannot write there: the file system is read-only" in job.run(
            "--num-epochs", 2, code=2
        )
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def go_on_with_other_numbers(folder, name, stages):
    """The losses of one process that was never interrupted, in double precision and without dropout. stages:
    (processes, last step).
    """
    flags = ["--dropout", 0, "--encoder-dropout", 0, "--float64", "--log-interval", 1]
    one = Job(folder / f"{name}_alone", flags=flags, epochs=2)
    mixed = Job(folder / name, flags=flags, epochs=2)
    one.run()
    for processes, stop in stages:
        mixed.processes = processes
        mixed.run("--max-steps", stop)
    assert_same_losses(mixed, one)
    weights, others = one.last()["model"], mixed.last()["model"]
    assert max(float((weights[name] - others[name]).abs().max()) for name in weights) < 1e-9
    assert one.last()["position"]["samples"] == mixed.last()["position"]["samples"] == 48


@pytest.mark.full
def test_going_on_with_another_number_of_processes(folder):
    go_on_with_other_numbers(folder, "one_two_one", ((None, 3), (2, 8), (None, 12)))


def test_going_on_with_four_processes(folder, fault_seed):
    go_on_with_other_numbers(folder, f"two_four_one_{fault_seed}", ((2, 3), (4, 8), (None, 12)))
