"""What the doctor finds on a good and on a broken set-up."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import run, run_here

from histocc import doctor
from histocc.runtime.errors import as_user_error


@pytest.mark.processes
def test_two_processes_that_are_well(tmp_path):
    output = run("histocc.doctor", "--device", "cpu", "--save-path", tmp_path, processes=2, timeout=120)
    names = ["versions", "devices", "cores", "disk", "same versions"]
    assert all(f"  ok       {name}" in output or f"  warning  {name}" in output for name in names), output
    assert "rank 0 cpu on" in output and "sums are right" in output and "Ready to train." in output
    assert output.count(" disk ") == 1 and list(tmp_path.iterdir()) == []  # once a machine; nothing left


def test_a_save_path_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    output = run_here(doctor.main, "--device", "cpu", "--save-path", tmp_path / "file" / "run", code=1)
    assert "fault    disk" in output and "--output" in output
    assert "ok       versions" in output and "error: faults: 1." in output


@pytest.mark.parametrize(
    "device, gpus, level, remedy",
    [("auto", 2, "warning", "which torch fits which driver"), ("cpu", 2, "ok", ""), ("auto", 0, "ok", "")],
)
def test_gpus_that_are_there_and_not_used(tmp_path, monkeypatch, device, gpus, level, remedy):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "echo 'GPU 0: one (UUID)'\n" * gpus)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = doctor.devices(device)
    assert finding.level == level and remedy in finding.remedy
    assert ("CUDA_VISIBLE_DEVICES=" in finding.text) == (level != "ok")


def test_a_gpu_that_torch_was_not_built_for(monkeypatch):
    error = RuntimeError("CUDA error: no kernel image is available for execution on the device\nSearch for")
    for name, value in {"is_available": True, "device_count": 1, "get_device_name": "Tesla V100"}.items():
        monkeypatch.setattr(torch.cuda, name, Mock(return_value=value))
    monkeypatch.setattr(doctor, "has_bfloat16", Mock(return_value=False))
    monkeypatch.setattr(doctor, "matmul_rate", Mock(side_effect=[1.0, error]))
    finding, ended = doctor.devices("auto"), as_user_error(error)
    assert finding.level == "fault" and "GPU 0 (Tesla V100): CUDA error: no kernel image" in finding.text
    assert ended.exit_code == 2 and finding.remedy in str(ended)


def test_gpus_of_a_torch_without_nccl(monkeypatch):
    """As on Windows."""
    seen = {"is_available": True, "device_count": 1, "mem_get_info": (9e9, 10e9), "get_device_name": "GPU"}
    for name, value in seen.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(doctor, "has_bfloat16", Mock(return_value=False))
    monkeypatch.setattr(doctor, "matmul_rate", Mock(return_value=1.0))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.delattr(torch._C, "_nccl_version", raising=False)
    assert doctor.devices("auto") == ("devices", "ok", "0: GPU, 9 of 10 GB free", "")


@pytest.mark.parametrize("free, level", [(0.5e9, "fault"), (5e9, "warning"), (50e9, "ok")])
def test_space_on_the_disk(tmp_path, monkeypatch, free, level):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    finding = doctor.disk(str(tmp_path))
    assert finding.level == level and ("lower --keep-checkpoints" in finding.remedy) == (level != "ok")


ONE = {"torch": "2.13", "CUDA": "none", "histocc": "1", "system": "a"}


@pytest.mark.parametrize(
    "finding, level, text",
    [
        (doctor.cores(4, 2, 1), "warning", "at most one process per core"),
        (doctor.cores(4, 8, 8), "warning", "OMP_NUM_THREADS=2"),
        (doctor.cores(2, 8, 4), "ok", ""),
        (doctor.same_versions([ONE, ONE | {"system": "b"}]), "ok", ""),
        (doctor.same_versions([ONE, ONE | {"torch": "2.12"}]), "fault", "rank 1 has torch 2.12, rank 0 2.13"),
    ],
)
def test_what_is_found_and_what_to_do(finding, level, text):
    assert finding.level == level and text in finding.text + finding.remedy
    assert bool(finding.remedy) == (level != "ok")
