"""Checks a machine, or all machines of a job, before a long run:

    python -m histocc.doctor --save-path ./output
    torchrun --nproc_per_node=4 -m histocc.doctor --save-path ./output
    srun … torchrun … -m histocc.doctor --json

Each finding is ok, a warning or a fault, and says what to do. Exit code 1 where there is a fault. It ends by
itself within --timeout-minutes, also when another process hangs.
"""

import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass

import torch
from torch.cuda import nccl

from histocc import __version__
from histocc.formatter import PAD_IDX, hisco_blocky5
from histocc.model.loss import BlockOrderInvariantLoss, LossMixer
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.runtime import entrypoint
from histocc.runtime.config import Parser, Positive, Processes, flag
from histocc.runtime.device import matmul_rate
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.files import folder_above, save_path_problem
from histocc.runtime.forked import usable_cores
from histocc.runtime.parallel import wrap
from histocc.runtime.world import (
    World,
    close_world,
    init_world,
    is_first_of_machine,
    is_first_rank,
    launcher_environment,
    torch_is_too_old,
)
from histocc.seq2seq_mixer_engine import MixerTask
from histocc.text import encode
from histocc.trainer import loop

OK, WARNING, FAULT = "ok", "warning", "fault"
GB = 1e9
SMOKE_STEPS, SMOKE_ROWS = 20, 8
SLOWER = 1.3  # times the median: a rank that all others wait for
SKEW_SECONDS = 2.0
REDUCED_MB = 32
PATIENCE_SECONDS = 5.0
MISSING_SECONDS = 2.5  # within which processes whose time is up say so


@dataclass(frozen=True)
class Finding:
    name: str
    level: str
    text: str
    remedy: str = ""


# ---- this machine


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
    try:
        import resource
    except ImportError:  # Windows
        return Finding("open files", OK, "no limit that is known")
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
    """Of this machine. device_name: auto, cpu or cuda."""
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


# ---- all processes together; every function here is called on all ranks


def same_versions(world: World) -> Finding:
    own = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "Python": platform.python_version(),
        "histocc": __version__,
        "numpy": importlib.metadata.version("numpy"),
    }
    everyone = world.gather(own)
    other = [
        f"{name}: "
        + ", ".join(
            f"rank {rank} has {found[name]}"
            for rank, found in enumerate(everyone)
            if found[name] != everyone[0][name]
        )
        + f", rank 0 {everyone[0][name]}"
        for name in own
        if len({found[name] for found in everyone}) > 1
    ]
    if other:
        return Finding("same versions", FAULT, "; ".join(other), "use one environment on all machines")
    return Finding("same versions", OK, "on all processes")


def own_devices(world: World) -> Finding:
    where = world.gather((socket.gethostname(), str(world.device)))
    if world.device.type != "cuda":
        hosts = list(dict.fromkeys(host for host, _ in where))
        return Finding(
            "placement",
            OK,
            f"{world.size} CPU processes on {len(hosts)} machine{'s' * (len(hosts) > 1)}: {', '.join(hosts)}",
        )
    twice = [
        f"{device} on {host}" for host, device in dict.fromkeys(where) if where.count((host, device)) > 1
    ]
    if twice:
        return Finding(
            "placement",
            FAULT,
            f"several processes share {', '.join(twice)}",
            "start at most as many processes on a machine as it has GPUs",
        )
    return Finding(
        "placement",
        OK,
        "one GPU for each process: "
        + ", ".join(f"rank {i} {device} on {host}" for i, (host, device) in enumerate(where)),
    )


def clocks(world: World) -> Finding:
    world.barrier()
    times = world.gather(time.time())
    spread = max(times) - min(times)
    if spread > SKEW_SECONDS:
        ahead = times.index(max(times))
        return Finding(
            "clocks",
            WARNING,
            f"differ by {spread:.1f} s; that of rank {ahead} is ahead",
            "start a time service (chrony, ntpd): logs and file times will mislead",
        )
    return Finding("clocks", OK, f"differ by less than {max(spread, 0.01):.2f} s")


def all_reduce(world: World) -> Finding:
    seconds, right = world.try_all_reduce(REDUCED_MB)
    wrong = [rank for rank, fine in enumerate(world.gather(right)) if not fine]
    moved = 2 * (world.size - 1) / world.size * REDUCED_MB * 2**20
    text = f"{moved / max(world.gather(seconds)) / GB:.2f} GB/s ({world.backend}, {REDUCED_MB} MB)"
    if wrong:
        return Finding(
            "all-reduce",
            FAULT,
            f"wrong sums on rank {', '.join(map(str, wrong))}; {text}",
            "a device or a link is damaged: run it on each machine alone, then in pairs; NCCL_DEBUG=INFO says"
            " which transport is used",
        )
    return Finding("all-reduce", OK, f"sums are right; {text}")


def slowest(world: World) -> Finding:
    world.barrier()
    times = world.gather(1 / max(matmul_rate(world.device, torch.float32), 1.0))
    middle = sorted(times)[(len(times) - 1) // 2]
    slow = [
        f"rank {rank} ({seconds / middle:.1f} times)"
        for rank, seconds in enumerate(times)
        if seconds > SLOWER * middle
    ]
    if slow:
        return Finding(
            "speed",
            WARNING,
            f"slower than the others: {', '.join(slow)}",
            "all wait for it at each step: look what else runs there, and how warm it is",
        )
    return Finding("speed", OK, f"the slowest process takes {max(times) / middle:.2f} times the median")


def smoke_test(world: World) -> Finding:
    """Some training steps of a tiny model, as a run takes them; the loss must fall, and all replicas stay
    equal.
    """
    formatter = hisco_blocky5()
    texts = [f"description number {i}" for i in range(SMOKE_ROWS * world.size)]
    own = slice(world.rank * SMOKE_ROWS, (world.rank + 1) * SMOKE_ROWS)
    ids, mask = encode(texts, ["en"] * len(texts))
    labels = torch.stack(
        [torch.from_numpy(formatter.transform_label(f"{61110 + i}")).long() for i in range(len(texts))]
    )
    classes = torch.eye(len(texts))
    batch = {
        "input_ids": torch.as_tensor(ids)[own],
        "attention_mask": torch.as_tensor(mask)[own],
        "targets_seq2seq": labels[own],
        "targets_linear": classes[own],
    }
    torch.manual_seed(1)
    raw_model = Seq2SeqMixerOccCANINE(formatter.num_classes, len(texts), config=model_config("tiny"))
    loss = LossMixer(BlockOrderInvariantLoss(PAD_IDX), torch.nn.BCEWithLogitsLoss(), 0.5)
    model = wrap(raw_model, world)
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-3)
    losses: list[float] = []
    started = time.perf_counter()
    for part in range(2):
        run = loop.Run(
            model,
            MixerTask(loss),
            optimizer,
            world,
            seed=part,
            log_interval=SMOKE_STEPS // 2,
            log=lambda row: losses.append(row["train_loss"]),
        )
        loop.train_one_epoch(run, [batch] * (SMOKE_STEPS // 2), loop.State())
    seconds = time.perf_counter() - started
    # any changed bit changes them, but for rare accidents; float32
    sums = [p.detach().view(torch.int32).sum(dtype=torch.int64) for p in raw_model.parameters()]
    differing = world.differing(torch.stack(sums).tolist())
    text = f"{SMOKE_STEPS} steps in {seconds:.1f} s, loss {losses[0]:.2f} → {losses[-1]:.2f}"
    if differing or not losses[-1] < losses[0]:
        what = (
            f"the weights of rank {', '.join(map(str, differing))} differ from those of rank 0"
            if differing
            else "the loss does not fall"
        )
        return Finding(
            "training",
            FAULT,
            f"{text}; {what}",
            "a device, its memory or a link is damaged: run it on each machine alone",
        )
    return Finding("training", OK, text)


TOGETHER = {
    "same versions": same_versions,
    "placement": own_devices,
    "clocks": clocks,
    "all-reduce": all_reduce,
    "speed": slowest,
    "training": smoke_test,
}


# ---- the report


class Report:
    """Findings as they come, by machine; printed once, on rank 0, or by the first rank that is left when time
    is up.
    """

    def __init__(self, as_json: bool):
        self.as_json, self.found, self.doing = as_json, {}, "starting"
        self.ends = math.inf  # time.monotonic() at which time is up
        self._said = threading.Lock()

    def add(self, place: str, found: list[Finding]) -> None:
        self.found.setdefault(place, []).extend(found)

    @property
    def has_fault(self) -> bool:
        return any(finding.level == FAULT for found in self.found.values() for finding in found)

    def say(self) -> None:
        if not self._said.acquire(blocking=False):
            return
        if self.as_json:
            print(
                json.dumps(
                    {
                        "ok": not self.has_fault,
                        "findings": [
                            {"place": place, **asdict(f)}
                            for place, found in self.found.items()
                            for f in found
                        ],
                    }
                ),
                flush=True,
            )
            return
        for place, found in self.found.items():
            print(place, flush=True)
            for finding in found:
                print(
                    f"  {finding.level:8} {finding.name:18} {finding.text}"
                    + (f"\n{'':30}→ {finding.remedy}" if finding.remedy else ""),
                    flush=True,
                )
        counts = [
            sum(f.level == level for found in self.found.values() for f in found)
            for level in (FAULT, WARNING)
        ]
        print(
            f"{counts[0]} faults, {counts[1]} warnings. "
            + ("Fix the failed checks before a long run." if counts[0] else "Ready to train."),
            flush=True,
        )


REACH = (
    "check that every machine runs the same command, that MASTER_ADDR and MASTER_PORT are reached (firewall),"
    " and the network interface"
)


def watch(report: Report, worlds: list[World], seconds: float) -> None:
    """Ends this process when time is up; the first rank that is left says where it hung and who is
    missing.
    """
    report.ends = time.monotonic() + seconds

    def end() -> None:
        while (left := report.ends - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
        missing, speaks = [], is_first_of_machine()  # nobody has met: the others may not even run
        if worlds and worlds[0].backend:
            missing, speaks = worlds[0].missing(MISSING_SECONDS)
        if speaks:
            who = "".join(f"; rank {rank} does not answer" for rank in missing)
            report.add(
                "all processes",
                [Finding(report.doing, FAULT, f"no answer within {seconds:.0f} s{who}", REACH)],
            )
            report.say()
        os._exit(1)

    threading.Thread(target=end, name="time limit", daemon=True).start()


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Processes):
    """What doctor takes."""

    save_path: str = flag(".", "where the run will save", "--save-dir", metavar="FOLDER")
    json: bool = flag(False, "print one JSON line instead of the table")
    timeout_minutes: Positive = flag(3.0, "minutes for the whole examination, also where a process hangs")


def examine(args: DoctorConfig, world: World, report: Report) -> None:
    """All ranks."""
    leads = world.local_rank == 0
    report.doing = "this machine"
    left = world.gather(report.ends - time.monotonic())
    report.ends = time.monotonic() + min(left)  # the same moment on all: who does not come then is missing
    everyone = world.gather(
        (
            socket.gethostname(),
            [asdict(f) for f in findings(args.device, args.save_path, world)] if leads else None,
        )
    )
    for number, (host, those) in enumerate((host, found) for host, found in everyone if found is not None):
        report.add(f"{host} (machine {number})", [Finding(**finding) for finding in those])
    for name, check in TOGETHER.items():
        report.doing = name
        if world.backend or check is smoke_test:
            report.add(f"all {world.size} processes" if world.backend else "one process", [check(world)])


def get_args_parser() -> Parser:
    parser = Parser(DoctorConfig, "python -m histocc.doctor", str(__doc__).split("\n", 1)[0].rstrip(":"))
    parser.epilog = (
        "Versions, devices, memory, disk and cores of each machine; under a launcher, of all processes:"
        " whether they meet, clocks, sums over them and their speed, the slowest of them; and some training"
        " steps. Exit code 1 where something is at fault, 2 for a mistake in the arguments."
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    sys.exit(entrypoint.run_command(lambda: run(argv)))


def run(argv: list[str] | None) -> None:
    """Does not return. Raises UserError for a mistake in the arguments."""
    args = get_args_parser().parse_args(argv)
    report, worlds = Report(args.json), []
    report.doing = "meeting the other processes"
    watch(report, worlds, args.timeout_minutes * 60)
    try:
        _, _, size = launcher_environment(args.distributed, args.world_size, args.local_rank)
        worlds.append(
            init_world(
                args.distributed or size > 1,
                world_size=args.world_size,
                local_rank=args.local_rank,
                device=args.device,
                timeout_minutes=2 * args.timeout_minutes,  # time is up before
            )
        )
        examine(args, worlds[0], report)
    except (UserError, TrainingError, RuntimeError) as error:
        text = str(error).strip() or type(error).__name__
        speaks = is_first_rank() or bool(getattr(error, "said_by_all", False) and is_first_of_machine())
        lost = entrypoint.lost_contact(error)
        if worlds and lost:
            _, speaks = worlds[0].missing(0.0)
        report.add(
            "all processes",
            [
                Finding(
                    report.doing,
                    FAULT,
                    text,
                    REACH if lost else "the message says what failed",
                )
            ],
        )
        if not speaks:
            # a launcher ends all as soon as one is gone: the other one speaks first
            time.sleep(PATIENCE_SECONDS)
        report.say()
    if is_first_rank():
        report.say()
    gc.collect()
    if worlds and not report.has_fault:
        close_world(worlds[0])
    entrypoint.end_process(int(report.has_fault))


if __name__ == "__main__":
    main()
