"""Checks a machine, or all machines of a job, before a long run; its report belongs into a question for help:

    python -m histocc.doctor --save-path ./output
    torchrun --nproc_per_node=4 -m histocc.doctor --save-path ./output

Each finding is ok, a warning or a fault, and says what to do. Exit code 1 if there is a fault.
"""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass

import torch
from torch.cuda import nccl

from histocc import __version__
from histocc.runtime import entrypoint
from histocc.runtime.config import Parser, Positive, Processes, flag
from histocc.runtime.errors import TrainingError
from histocc.runtime.files import folder_above, save_path_problem
from histocc.runtime.forked import usable_cores
from histocc.runtime.world import World

OK, WARNING, FAULT = "ok", "warning", "fault"
GB = 1e9
WRITTEN_MB, REDUCED_MB = 64, 32


@dataclass(frozen=True)
class Finding:
    name: str
    level: str
    text: str
    remedy: str = ""


# ---- this machine


def versions() -> dict[str, str]:
    return {
        "histocc": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": importlib.metadata.version("numpy"),
        "CUDA": torch.version.cuda or "none",
        "system": platform.platform(),
    }


def driver_versions() -> list[str]:
    """The driver's version, once for each GPU of this machine."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def devices(device: str) -> Finding:
    """What torch sees, and what the machine has: GPUs that are there and not used are a warning."""
    drivers = driver_versions()
    if not torch.cuda.is_available():
        if not drivers or device == "cpu":
            return Finding("devices", OK, "no GPU; training runs on CPU processes")
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        remedy = "install a torch with CUDA; the driver (nvidia-smi) must not be older than its CUDA"
        if hidden is not None and torch.version.cuda:
            remedy = f"CUDA_VISIBLE_DEVICES is {hidden!r}: unset it"
        return Finding("devices", WARNING, f"{len(drivers)} GPUs here, none usable by torch", remedy)
    gpus, busy = [], []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        gpus.append(f"{i}: {torch.cuda.get_device_name(i)}, {free / GB:.0f} of {total / GB:.0f} GB free")
        busy += [str(i)] * (free < 0.8 * total)
    text = "; ".join(
        [*gpus, f"driver {(drivers or ['unknown'])[0]}, NCCL {'.'.join(map(str, nccl.version()))}"]
    )
    if busy:
        remedy = (
            f"GPU {', '.join(busy)} is used by another process: see nvidia-smi, or set CUDA_VISIBLE_DEVICES"
        )
        return Finding("devices", WARNING, text, remedy)
    return Finding("devices", OK, text)


def cores(processes: int, available: int, threads: int) -> Finding:
    """processes: of this machine; threads: of each."""
    text = f"{available} cores for {processes} processes here, {threads} threads each"
    if processes > available:
        remedy = "start at most one process per core; GPUs need one or two cores each"
        return Finding("cores", WARNING, text, remedy)
    if processes * threads > available:
        remedy = f"they get in each other's way: export OMP_NUM_THREADS={max(1, available // processes)}"
        return Finding("cores", WARNING, text, remedy)
    return Finding("cores", OK, text)


def memory_available() -> float:
    """Bytes, also by the limit of a container; infinite if the system does not say."""
    available = float("inf")
    with contextlib.suppress(OSError, ValueError):  # not Linux; no container, or one without a limit
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next(1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvail"))
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            available = min(available, int(limit.read()) - int(used.read()))
    return available


def memory(available: float) -> Finding:
    """available: bytes."""
    if available < 4 * GB:
        remedy = "size base takes some 3 GB a process on CPUs: use --model-size small, or fewer processes"
        return Finding("memory", WARNING, f"{available / GB:.1f} GB available", remedy)
    return Finding("memory", OK, f"{available / GB:.1f} GB available")


def shared_memory(folder: str = "/dev/shm") -> Finding:
    if not os.path.isdir(folder):
        return Finding("shared memory", OK, f"no {folder} on this system")
    free = shutil.disk_usage(folder).free
    if free < 1 * GB:
        remedy = "loader workers hand batches over there: docker run --shm-size=8g, or --num-workers 0"
        return Finding("shared memory", WARNING, f"{free / GB:.2f} GB free in {folder}", remedy)
    return Finding("shared memory", OK, f"{free / GB:.1f} GB free in {folder}")


def write_rate(folder: str) -> float:
    """Bytes per second, synced. Raises OSError."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        for _ in range(WRITTEN_MB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return WRITTEN_MB * len(block) / (time.perf_counter() - started)


def save_folder(path: str) -> Finding:
    """Whether anything can be written there."""
    problem = save_path_problem(path)
    if problem:
        return Finding("disk", FAULT, problem, "choose another --save-path, or make this one writable")
    folder = folder_above(path)
    free, rate = shutil.disk_usage(folder).free, 0.0
    if free > 1 * GB:
        try:
            rate = write_rate(folder)
        except OSError as error:
            remedy = "make room, or choose another --save-path"
            return Finding("disk", FAULT, f"{folder}: cannot write: {error.strerror}", remedy)
    return disk(folder, free, rate)


def disk(folder: str, free: float, rate: float) -> Finding:
    """free: bytes; rate: bytes per second that are written and synced."""
    text = f"{folder}: {free / GB:.1f} GB free, {rate / 1e6:,.0f} MB/s written and synced"
    if free < 8 * GB:
        remedy = "a checkpoint of size base has 1.6 GB, and up to six are kept: make room, or lower"
        remedy += " --keep-checkpoints"
        return Finding("disk", FAULT if free < 1 * GB else WARNING, text, remedy)
    if rate < 30e6:
        return Finding("disk", WARNING, text, "slow: raise --save-interval, or save on a local disk")
    return Finding("disk", OK, text)


def this_machine(args: "DoctorConfig", world: World) -> list[Finding]:
    installed = versions()
    return [
        Finding("versions", OK, ", ".join(f"{name} {version}" for name, version in installed.items())),
        devices(args.device),
        cores(world.local_size, usable_cores(), torch.get_num_threads()),
        memory(memory_available()),
        shared_memory(),
        save_folder(args.save_path),
    ]


# ---- all processes together


def same_versions(everyone: list[dict[str, str]]) -> Finding:
    """everyone: `versions` of each rank."""
    other = [
        f"rank {rank} has {name} {installed[name]}, rank 0 {everyone[0][name]}"
        for rank, installed in enumerate(everyone)
        for name in installed
        if installed[name] != everyone[0][name] and name != "system"
    ]
    if other:
        return Finding("same versions", FAULT, "; ".join(other), "use one environment on all machines")
    return Finding("same versions", OK, "on all processes")


def all_reduce(backend: str, seconds: list[float], right: list[bool]) -> Finding:
    """seconds, right: of each rank, for a sum of REDUCED_MB over all of them."""
    moved = 2 * (len(right) - 1) / len(right) * REDUCED_MB * 2**20
    text = f"{moved / max(seconds) / GB:.2f} GB/s ({backend}, {REDUCED_MB} MB)"
    wrong = [str(rank) for rank, is_right in enumerate(right) if not is_right]
    if wrong:
        remedy = "a device or a link is damaged: run it on each machine alone, then in pairs; NCCL_DEBUG=INFO"
        remedy += " says which transport is used"
        return Finding("all-reduce", FAULT, f"wrong sums on rank {', '.join(wrong)}; {text}", remedy)
    return Finding("all-reduce", OK, f"sums are right; {text}")


# ---- the command


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Processes):
    """What doctor takes."""

    save_path: str = flag(".", "folder of the run", "--save-dir", metavar="FOLDER")
    timeout_minutes: Positive = 3.0


def examine(args: DoctorConfig, world: World) -> None:
    """Prints the report. All ranks. Raises TrainingError on all of them if there is a fault."""
    findings = [asdict(finding) for finding in this_machine(args, world)] if world.local_rank == 0 else []
    everyone = world.gather((socket.gethostname(), str(world.device), findings, versions()))
    report = {
        f"{host} (rank {rank})": [Finding(**finding) for finding in findings]
        for rank, (host, _, findings, _) in enumerate(everyone)
        if findings
    }
    if world.backend:
        seconds, right = map(list, zip(*world.gather(world.try_all_reduce(REDUCED_MB))))
        places = ", ".join(f"rank {i} {device} on {host}" for i, (host, device, _, _) in enumerate(everyone))
        report[f"all {world.size} processes"] = [
            Finding("placement", OK, places),
            same_versions([installed for *_, installed in everyone]),
            all_reduce(world.backend, seconds, right),
        ]
    for place, findings in report.items():
        world.print(place)
        for finding in findings:
            world.print(f"  {finding.level:8} {finding.name:14} {finding.text}")
            if finding.remedy:
                world.print(f"{'':26}→ {finding.remedy}")
    levels = [finding.level for findings in report.values() for finding in findings]
    if faults := levels.count(FAULT):
        raise TrainingError(f"{faults} faults: fix them before a long run", heard_from_main=True)
    world.print(f"0 faults, {levels.count(WARNING)} warnings. Ready to train.")


def get_args_parser() -> Parser:
    return Parser(
        DoctorConfig,
        "python -m histocc.doctor",
        "Checks versions, devices, memory, disk and cores of each machine; under a launcher also whether the"
        " processes meet and sum rightly. Exit code 1 if there is a fault, 2 for a mistake in the arguments.",
    )


def main(argv: list[str] | None = None) -> None:
    entrypoint.start(get_args_parser(), examine, argv)


if __name__ == "__main__":
    main()
