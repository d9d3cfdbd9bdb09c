"""What a machine has for training, and what is wrong with it: each check gives a `Finding`."""

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass

import torch
from torch.cuda import nccl

from histocc import __version__
from histocc.runtime.forked import usable_cores
from histocc.runtime.outputs import folder_above, save_path_problem
from histocc.runtime.world import World, torch_is_too_old

OK, WARNING, FAULT = "ok", "warning", "fault"
GB = 1e9


@dataclass(frozen=True)
class Finding:
    name: str
    level: str
    text: str
    remedy: str = ""


def versions() -> Finding:
    text = (
        f"histocc {__version__}, Python {platform.python_version()}, torch {torch.__version__}, numpy"
        f" {importlib.metadata.version('numpy')}, CUDA {torch.version.cuda or 'none'}"
    )
    if torch_is_too_old():
        return Finding(
            "versions",
            FAULT,
            text,
            "torch 2.10 or newer is needed: pip install 'torch>=2.10' in a new environment",
        )
    return Finding("versions", OK, text)


def gpus(device_name: str) -> Finding:
    """What torch sees, and what the machine has: GPUs that are there and not used are a warning."""
    smi = _nvidia_smi()
    if not torch.cuda.is_available():
        if smi and device_name != "cpu":
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            why = (
                f"CUDA_VISIBLE_DEVICES is {hidden!r}: unset it"
                if hidden is not None and torch.version.cuda
                else (
                    "install a torch with CUDA, and check that the driver (nvidia-smi) is not older than its"
                    " CUDA"
                )
            )
            return Finding(
                "devices",
                FAULT if device_name == "cuda" else WARNING,
                f"{len(smi)} GPUs in this machine, none usable by torch",
                why,
            )
        if device_name == "cuda":
            return Finding(
                "devices", FAULT, "no GPU usable by torch", "pass --device cpu, or run where there is one"
            )
        return Finding("devices", OK, "no GPU; training runs on CPU processes")
    lines: list[str] = []
    busy: list[str] = []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        lines.append(f"{i}: {torch.cuda.get_device_name(i)}, {free / GB:.0f} of {total / GB:.0f} GB free")
        busy += [str(i)] * (free < 0.8 * total)
    text = (
        "; ".join(lines)
        + f"; driver {smi[0] if smi else 'unknown'}, NCCL {'.'.join(map(str, nccl.version()))}"
    )
    if busy:
        return Finding(
            "devices",
            WARNING,
            text,
            f"GPU {', '.join(busy)} is used by another process: see nvidia-smi, or choose others with"
            " CUDA_VISIBLE_DEVICES",
        )
    return Finding("devices", OK, text)


def _nvidia_smi() -> list[str]:
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


def memory() -> Finding:
    available = _meminfo().get("MemAvailable", 0) * 1024
    limit = _number_in("/sys/fs/cgroup/memory.max")
    if limit is not None:
        available = min(available, limit - (_number_in("/sys/fs/cgroup/memory.current") or 0))
    text = f"{available / GB:.1f} GB available"
    if available < 4 * GB:
        return Finding(
            "memory",
            WARNING,
            text,
            "size base takes some 3 GB a process on CPUs: use --model-size small, or fewer processes",
        )
    return Finding("memory", OK, text)


def _meminfo() -> dict[str, int]:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return {line.partition(":")[0]: int(line.split()[1]) for line in file}
    except (OSError, ValueError, IndexError):
        return {}


def _number_in(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", OK, "no /dev/shm on this system")
    free = shutil.disk_usage("/dev/shm").free
    if free < 1 * GB:
        return Finding(
            "shared memory",
            WARNING,
            f"{free / GB:.2f} GB free in /dev/shm",
            "loader workers hand batches over there: give the container more (docker run --shm-size=8g), or"
            " use --num-workers 0",
        )
    return Finding("shared memory", OK, f"{free / GB:.1f} GB free in /dev/shm")


def disk(save_path: str) -> Finding:
    """Whether checkpoints fit and how fast they are written, measured with 64 MB that are synced."""
    problem = save_path_problem(save_path)
    if problem:
        return Finding("disk", FAULT, problem, "choose another --save-path, or make this one writable")
    there = folder_above(save_path)
    free, block, rate = shutil.disk_usage(there).free, os.urandom(1 << 20), 0.0
    if free > 1 * GB:
        try:
            with tempfile.TemporaryFile(dir=there) as file:
                started = time.perf_counter()
                for _ in range(64):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
                rate = 64 * len(block) / (time.perf_counter() - started)
        except OSError as error:
            return Finding(
                "disk",
                FAULT,
                f"{there}: cannot write: {error.strerror}",
                "make room, or choose another --save-path",
            )
    text = f"{there}: {free / GB:.1f} GB free, {rate / 1e6:,.0f} MB/s written and synced"
    if free < 8 * GB:
        return Finding(
            "disk",
            FAULT if free < 1 * GB else WARNING,
            text,
            "a checkpoint of size base has 1.6 GB, and up to six are kept: make room, or lower"
            " --keep-checkpoints",
        )
    if rate < 30e6:
        return Finding("disk", WARNING, text, "slow: raise --save-interval, or save on a local disk")
    return Finding("disk", OK, text)


def cores(world: World) -> Finding:
    there = usable_cores()
    text = f"{there} cores for {world.local_size} processes here, {torch.get_num_threads()} threads each"
    if world.local_size > there:
        return Finding(
            "cores", WARNING, text, "start at most one process per core; GPUs need one or two cores each"
        )
    if torch.get_num_threads() * world.local_size > there:
        return Finding(
            "cores",
            WARNING,
            text,
            f"they get in each other's way: export OMP_NUM_THREADS={max(1, there // world.local_size)}",
        )
    return Finding("cores", OK, text)


def open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Finding(
        "open files",
        WARNING if limit < 1024 else OK,
        f"at most {limit}",
        "ulimit -n 4096" if limit < 1024 else "",
    )


def extras() -> Finding:
    there = [
        name
        for name in (
            "tqdm",
            "pyarrow",
            "safetensors",
            "huggingface_hub",
            "tensorboard",
            "wandb",
            "matplotlib",
            "pandas",
            "sklearn",
        )
        if importlib.util.find_spec(name)
    ]
    return Finding("optional packages", OK, ", ".join(there) or "none")


def findings(device_name: str, save_path: str, world: World) -> list[Finding]:
    """All of the above. device_name: auto, cpu or cuda."""
    checks = (
        versions,
        lambda: gpus(device_name),
        memory,
        shared_memory,
        lambda: disk(save_path),
        lambda: cores(world),
        open_files,
        extras,
    )
    return [check() for check in checks]
