"""Check a machine, or all machines of a job, before a long run. Add its report when you ask for help:

    histocc doctor --output ./output
    torchrun --nproc_per_node=4 -m histocc doctor --output ./output

Each finding is ok, a warning or a fault, and says what to do. The exit code is 1 if there is a fault. For the
time and memory of a run, use --dry-run of the training commands.
"""

import contextlib
import platform
import shutil
import socket
import subprocess
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from torch.cuda import nccl

from histocc import __version__
from histocc.runtime.config import Parser, Positive, ProcessFlags, flag
from histocc.runtime.device import has_bfloat16, matmul_rate, why_no_gpu
from histocc.runtime.errors import OTHER_TORCH, TrainingError
from histocc.runtime.files import folder_above, save_path_problems
from histocc.runtime.forked import usable_cores
from histocc.runtime.frame import start
from histocc.runtime.world import World

OK, WARNING, FAULT = "ok", "warning", "fault"
FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
GB = 1e9


class Finding(NamedTuple):
    name: str
    level: str
    text: str
    remedy: str = ""


def devices(device: str) -> Finding:
    """Return the devices that torch sees and can multiply on. Unused GPUs are a warning."""
    if not torch.cuda.is_available():
        listed = ""
        for tool in (["nvidia-smi", "-L"], ["amd-smi", "list"]):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                listed += subprocess.run(tool, capture_output=True, text=True, timeout=20).stdout
        number = f"\n{listed}".count("\nGPU")
        if not number or device == "cpu":
            return Finding("devices", OK, "no GPU; training runs on CPU processes")
        text = f"GPUs here: {number}, none usable by torch {torch.__version__}: {why_no_gpu()}"
        return Finding("devices", WARNING, text, f"{OTHER_TORCH}; CUDA_VISIBLE_DEVICES chooses GPUs")
    gpus, busy = [], []
    for i in range(torch.cuda.device_count()):
        try:
            for dtype in FORMATS[: None if has_bfloat16("cuda") else -1]:
                matmul_rate(torch.device("cuda", i), dtype, 0.01)
        except RuntimeError as error:
            text = f"GPU {i} ({torch.cuda.get_device_name(i)}): {str(error).splitlines()[0]}"
            return Finding("devices", FAULT, text, OTHER_TORCH)
        free, total = torch.cuda.mem_get_info(i)
        gpus.append(f"{i}: {torch.cuda.get_device_name(i)}, {free / GB:.0f} of {total / GB:.0f} GB free")
        busy += [str(i)] * (free < 0.8 * total)
    text = "; ".join(gpus)
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        text += f"; NCCL {'.'.join(map(str, nccl.version()))}"
    remedy = f"GPU {', '.join(busy)} is used by another process: see nvidia-smi, or set CUDA_VISIBLE_DEVICES"
    return Finding("devices", WARNING if busy else OK, text, remedy if busy else "")


def cores(processes: int, available: int, threads: int) -> Finding:
    """Compare the processes of this machine, and the threads of each, with the available cores."""
    text, remedy = f"{available} usable; processes here: {processes}; threads of each: {threads}", ""
    if processes > available:
        remedy = "start at most one process per core; GPUs need one or two cores each"
    elif processes * threads > available:
        remedy = f"there are more threads than cores: export OMP_NUM_THREADS={max(1, available // processes)}"
    return Finding("cores", WARNING if remedy else OK, text, remedy)


def disk(path: str) -> Finding:
    """Check that the run folder can be written, and report the free space there."""
    if problems := save_path_problems(path):
        return Finding(
            "disk", FAULT, problems[0], "choose another folder (--output), or make this one writable"
        )
    free = shutil.disk_usage(folder_above(path)).free
    text = f"{folder_above(path)}: {free / GB:.1f} GB free"
    if free > 8 * GB:
        return Finding("disk", OK, text)
    remedy = "up to six checkpoints stay, 1.6 GB each at size base: free space, or lower --keep-checkpoints"
    return Finding("disk", FAULT if free < 1 * GB else WARNING, text, remedy)


def same_versions(everyone: list[dict[str, str]]) -> Finding:
    """Compare all ranks' installed versions with rank 0's. everyone: name → version, for each rank."""
    other = [
        f"rank {rank} has {name} {installed[name]}, rank 0 {everyone[0][name]}"
        for rank, installed in enumerate(everyone)
        for name in installed
        if installed[name] != everyone[0][name] and name != "system"
    ]
    remedy = "use one environment on all machines" if other else ""
    return Finding("same versions", FAULT if other else OK, "; ".join(other) or "on all processes", remedy)


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(ProcessFlags):
    """The flags of doctor."""

    output: str = flag(".", "folder that a run will write to", "--save-path", "--save-dir", metavar="FOLDER")
    timeout_minutes: Positive = 3.0


def examine(args: DoctorConfig, world: World) -> None:
    """Print the report. All ranks. Raises TrainingError on all of them if there is a fault."""
    installed = {
        "histocc": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "CUDA": torch.version.cuda or torch.version.hip or "none",
        "system": platform.platform(),
    }
    findings = []
    if world.local_rank == 0:
        findings = [
            Finding("versions", OK, ", ".join(f"{name} {version}" for name, version in installed.items())),
            devices(args.device),
            cores(world.local_size, usable_cores(), torch.get_num_threads()),
            disk(args.output),
        ]
    everyone = world.gather((socket.gethostname(), str(world.device), list(map(tuple, findings)), installed))
    report = [(f"{host} (rank {i})", found) for i, (host, _, found, _) in enumerate(everyone) if found]
    if world.backend:
        right = world.sum_over_ranks({"rank": world.rank})["rank"] == world.size * (world.size - 1) / 2
        places = ", ".join(f"rank {i} {device} on {host}" for i, (host, device, _, _) in enumerate(everyone))
        sums = Finding("all-reduce", OK, f"sums are right ({world.backend})")
        if not right:
            sums = Finding("all-reduce", FAULT, "sums are wrong", "try each machine by itself, then in pairs")
        together = same_versions([installed for *_, installed in everyone])
        report += [("all processes", [Finding("placement", OK, places), together, sums])]
    levels = []
    for place, found in report:
        world.print(place)
        for name, level, text, remedy in found:
            levels.append(level)
            world.print(f"  {level:8} {name:14} {text}" + (f"\n{'':26}→ {remedy}" if remedy else ""))
    if faults := levels.count(FAULT):
        raise TrainingError(f"faults: {faults}. Repair them before a long run")
    world.print(f"Faults: 0. Warnings: {levels.count(WARNING)}. Ready to train.")


def get_args_parser() -> Parser:
    what = "Check versions, devices, disk and cores of each machine and, under a launcher, the sums over all"
    what += " processes. The exit code is 1 if there is a fault, 2 for a mistake in the arguments."
    return Parser(DoctorConfig, "python -m histocc.doctor", what, "", "--output ./output")


def main(argv: list[str] | None = None) -> None:
    start(get_args_parser(), examine, argv)


if __name__ == "__main__":
    main()
