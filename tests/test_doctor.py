"""What the doctor finds on a good and on a broken set-up."""

import subprocess
import sys

import pytest
from helpers import REPO, environment, run, run_inside

from histocc import doctor

DOCTOR = [sys.executable, "-W", "ignore", "-m", "histocc.doctor"]
SLEEPER = """
import os, signal, time
from histocc.runtime.world import init_world
world = init_world(True, device="cpu", timeout_minutes=1)
time.sleep(1.5)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.processes
def test_two_processes_that_are_well(tmp_path):
    output = run("histocc.doctor", "--device", "cpu", "--save-path", tmp_path, processes=2, timeout=120)
    names = ["versions", "devices", "cores", "memory", "disk", "same versions"]
    assert all(f"  ok       {name}" in output or f"  warning  {name}" in output for name in names), output
    assert "rank 0 cpu on" in output and "sums are right" in output and "Ready to train." in output
    assert output.count(" disk ") == 1 and list(tmp_path.iterdir()) == []  # once a machine; nothing left


def test_a_save_path_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    code, output = run_inside(doctor.main, "--device", "cpu", "--save-path", tmp_path / "file" / "run")
    assert code == 1 and "fault    disk" in output and "→ choose another --save-path" in output
    assert "ok       versions" in output and "error: 1 faults: fix them" in output


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("peer, message", [(None, "the other processes"), (SLEEPER, "rank 1 did not come")])
def test_a_peer_that_never_comes_or_hangs_is_waited_for_in_bounded_time(peer, message):
    common = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29671" if peer else "29672")
    sleeper = peer and subprocess.Popen(
        [sys.executable, "-c", peer], cwd=REPO, env=environment(RANK="1", LOCAL_RANK="1", **common)
    )
    try:
        done = subprocess.run(
            [*DOCTOR, "--device", "cpu", "--timeout-minutes", "0.15"],
            env=environment(RANK="0", LOCAL_RANK="0", **common),
            capture_output=True,
            text=True,
            timeout=120,
            cwd=REPO,
        )
    finally:
        if sleeper:
            sleeper.kill()
            sleeper.wait()
    assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr


def test_wrong_flags_end_with_2():
    code, output = run_inside(doctor.main, "--wrong")
    assert code == 2 and "--wrong" in output


@pytest.mark.parametrize(
    "device, gpus, level, remedy",
    [("auto", 2, "warning", "install a torch with CUDA"), ("cpu", 2, "ok", ""), ("auto", 0, "ok", "")],
)
def test_gpus_that_are_there_and_not_used(tmp_path, monkeypatch, device, gpus, level, remedy):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "echo 570.1\n" * gpus)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = doctor.devices(device)
    assert finding.level == level and remedy in finding.remedy


ONE = {"torch": "2.13", "CUDA": "none", "histocc": "1", "system": "a"}


@pytest.mark.parametrize(
    "finding, level, text",
    [
        (doctor.memory(1e9), "warning", "1.0 GB available"),
        (doctor.memory(float("inf")), "ok", ""),
        (doctor.disk("/x", 0.5e9, 0.0), "fault", "0.5 GB free"),
        (doctor.disk("/x", 5e9, 1e9), "warning", "lower --keep-checkpoints"),
        (doctor.disk("/x", 50e9, 20e6), "warning", "raise --save-interval"),
        (doctor.disk("/x", 50e9, 1e9), "ok", ""),
        (doctor.cores(4, 2, 1), "warning", "at most one process per core"),
        (doctor.cores(4, 8, 8), "warning", "OMP_NUM_THREADS=2"),
        (doctor.cores(2, 8, 4), "ok", ""),
        (doctor.same_versions([ONE, ONE | {"system": "b"}]), "ok", ""),
        (doctor.same_versions([ONE, ONE | {"torch": "2.12"}]), "fault", "rank 1 has torch 2.12, rank 0 2.13"),
        (doctor.all_reduce("gloo", [0.1] * 3, [True, True, False]), "fault", "wrong sums on rank 2"),
        (doctor.all_reduce("gloo", [0.1] * 3, [True] * 3), "ok", "0.45 GB/s (gloo, 32 MB)"),
    ],
)
def test_what_is_found_and_what_to_do(finding, level, text):
    assert finding.level == level and text in finding.text + finding.remedy
    assert bool(finding.remedy) == (level != "ok")
