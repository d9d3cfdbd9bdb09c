"""What the doctor finds on a good and on a broken set-up."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import REPO, environment

from histocc import doctor
from histocc.runtime.world import World

DOCTOR = [sys.executable, "-W", "ignore", "-m", "histocc.doctor"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
TWO = [*DOCTOR[:3], *TORCHRUN, "-m", "histocc.doctor"]


def examine(command, *flags, timeout=120, **env):
    """(exit code, findings by name, all output)"""
    done = subprocess.run(
        [*command, "--device", "cpu", "--json", *map(str, flags)],
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=REPO,
    )
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return done.returncode, {found["name"]: found for found in report["findings"]}, report["ok"]


@pytest.mark.processes
@pytest.mark.full
def test_two_processes_that_are_well(tmp_path):
    code, found, fine = examine(TWO, "--save-path", tmp_path)
    assert code == 0 and fine and {f["level"] for f in found.values()} <= {"ok", "warning"}
    names = "versions,devices,memory,shared memory,disk,cores,same versions,placement,clocks,speed,training"
    assert set(names.split(",")) <= found.keys() and "sums are right" in found["all-reduce"]["text"]
    assert "2 CPU processes on 1 machine" in found["placement"]["text"]
    assert found["training"]["place"] == "all 2 processes" and found["disk"]["place"].endswith("(machine 0)")
    assert list(tmp_path.iterdir()) == []  # leaves nothing behind


@pytest.mark.processes
@pytest.mark.full
def test_one_process_with_a_save_path_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [*DOCTOR, "--device", "cpu", "--save-path", str(tmp_path / "file" / "run")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPO,
    )
    assert done.returncode == 1 and "1 faults" in done.stdout and "Fix the failed checks" in done.stdout
    assert (
        "fault    disk" in done.stdout
        and "→ choose another --save-path" in done.stdout
        and "ok       training" in done.stdout
    )


@pytest.mark.processes
@pytest.mark.full
def test_a_peer_that_never_comes_is_waited_for_in_bounded_time():
    common = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29671")
    code, found, fine = examine(DOCTOR, "--timeout-minutes", 0.15, RANK="0", LOCAL_RANK="0", **common)
    assert code == 1 and not fine
    meeting = found["meeting the other processes"]
    assert meeting["level"] == "fault" and meeting["remedy"]


SLEEPER = """
import os, signal, time
from histocc.runtime.world import init_world
world = init_world(True, device="cpu", timeout_minutes=1)
time.sleep(1.5)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.processes
@pytest.mark.full
def test_a_peer_that_hangs_is_named():
    common = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29672")
    sleeper = subprocess.Popen(
        [sys.executable, "-c", SLEEPER], cwd=REPO, env=environment(RANK="1", LOCAL_RANK="1", **common)
    )
    try:
        code, found, _ = examine(DOCTOR, "--timeout-minutes", 0.15, RANK="0", LOCAL_RANK="0", **common)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert code == 1 and "rank 1 does not answer" in found["this machine"]["text"]


def test_wrong_flags_end_with_2():
    done = subprocess.run(
        [*DOCTOR, "--wrong"], env=environment(), capture_output=True, text=True, timeout=60, cwd=REPO
    )
    assert done.returncode == 2 and "--wrong" in done.stderr and "Traceback" not in done.stderr


# ---- single findings on machines that are not at hand


@pytest.mark.parametrize(
    "device, cuda, hidden, level, remedy",
    [
        ("auto", None, None, "warning", "install a torch with CUDA"),
        ("cuda", None, None, "fault", "install a torch with CUDA"),
        ("auto", "12.8", "", "warning", "unset it"),
        ("cpu", None, None, "ok", ""),
    ],
)
def test_gpus_that_are_there_and_not_used(monkeypatch, device, cuda, hidden, level, remedy):
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda: ["570.1", "570.1"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    found = doctor.gpus(device)
    assert found.level == level and remedy in found.remedy
    monkeypatch.setattr(doctor, "_nvidia_smi", list)  # and where there are none
    assert doctor.gpus(device).level == ("fault" if device == "cuda" else "ok")


def test_old_torch_little_memory_and_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    assert doctor.versions().level == "fault" and "2.10" in doctor.versions().remedy
    monkeypatch.setattr(doctor, "_meminfo", lambda: {"MemAvailable": 1_000_000})
    assert doctor.memory().level == "warning" and doctor.memory().text.startswith("1.0 GB")
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert doctor.cores(World(local_size=1, size=1)).level == "ok"
    found = doctor.cores(World(local_size=4, size=4))
    assert found.level == "warning" and "OMP_NUM_THREADS=2" in found.remedy


@pytest.mark.parametrize("free, level", [(0.5e9, "fault"), (5e9, "warning"), (50e9, "ok")])
def test_space_for_checkpoints(monkeypatch, tmp_path, free, level):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(doctor.os, "fsync", lambda number: None)
    found = doctor.disk(str(tmp_path))
    assert found.level == level and bool(found.remedy) == (level != "ok")


class Others:
    """A world of three whose gathered values are given."""

    size, rank, backend, device = 3, 0, "gloo", torch.device("cpu")

    def __init__(self, *values):
        self.values = list(values)

    def gather(self, _):
        return self.values.pop(0)

    def barrier(self):
        pass

    def try_all_reduce(self, megabytes):
        return 0.1, True


class Gpus(Others):
    device = torch.device("cuda", 0)


ONE = {"torch": "2.13", "CUDA": None, "Python": "3.11", "histocc": "1", "numpy": "2"}


@pytest.mark.parametrize(
    "find, world, level, text",
    [
        (doctor.slowest, Others([1.0, 1.1, 1.2]), "ok", ""),
        (doctor.slowest, Others([1.0, 1.1, 1.9]), "warning", "slower than the others: rank 2 (1.7 times)"),
        (doctor.clocks, Others([100.0, 100.5, 100.1]), "ok", ""),
        (doctor.clocks, Others([100.0, 107.5, 100.1]), "warning", "rank 1 is ahead"),
        (
            doctor.same_versions,
            Others([ONE, {**ONE, "torch": "2.12"}, ONE]),
            "fault",
            "torch: rank 1 has 2.12, rank 0 2.13",
        ),
        (doctor.all_reduce, Others([True, True, False], [0.1] * 3), "fault", "wrong sums on rank 2"),
        (
            doctor.own_devices,
            Gpus([("a", "cuda:0"), ("a", "cuda:0"), ("b", "cuda:0")]),
            "fault",
            "cuda:0 on a",
        ),
    ],
)
def test_what_is_found_among_the_processes(find, world, level, text):
    found = find(world)
    assert found.level == level and text in found.text


def test_a_fault_is_said_once(capsys):
    report = doctor.Report(as_json=False)
    fault = doctor.Finding("disk", "fault", "full", "make room")
    report.add("here", [doctor.Finding("memory", "ok", "enough"), fault])
    report.say()
    report.say()
    said = capsys.readouterr().out
    assert said.count("1 faults, 0 warnings. Fix the failed checks") == 1 and report.has_fault
