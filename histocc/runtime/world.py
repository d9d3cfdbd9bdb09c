"""The processes of a run: the rank of this process, the exchange of values outside DDP and FSDP, and joining
the others at the start. `histocc.runtime.frame` starts and ends them.

No other module reads RANK, LOCAL_RANK and WORLD_SIZE. Everything here also works in one process, at no cost.
"""

import contextlib
import ctypes
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from histocc import __version__
from histocc.runtime import signals
from histocc.runtime.config import ProcessFlags, flag_of, flags_that
from histocc.runtime.device import Precision, choose_device
from histocc.runtime.errors import TrainingError, UserError, as_user_error
from histocc.runtime.files import checksum
from histocc.runtime.signals import Stopped, stop_asked, stop_request

if dist.is_available():  # not in all builds for Windows and ARM
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

MIN_TORCH = (2, 10)
LONGEST_WORK = timedelta(days=1)  # limit of work that other ranks wait for in `World.run_on`
JOINING_SECONDS = 5.0  # torch's own limits come first: their messages say more
NOT_MET = (
    "Both must be the same on all machines, rank 0 must run on that one, and the firewall let the port"
    " through"
)
CANNOT_SEND = (
    "The address is right, but messages do not pass. The usual causes: the wrong one of several networks"
    " (NCCL_SOCKET_IFNAME=eth0 and GLOO_SOCKET_IFNAME=eth0 choose), closed ports above 1024; with NCCL 64 MB"
    " of /dev/shm in a container (docker run --shm-size=8g or --ipc=host), two ranks on one GPU"
)
PORT_IN_USE = "Another program has this port, or a second process RANK=0: choose another MASTER_PORT"
START_DIFFERS = "the ranks were started differently; give all machines the same command, versions and files:"
met = SimpleNamespace(store=None, rank=0)  # the store in which several ranks have met, once they have

# ---- the launcher's variables


def srun_environment() -> dict[str, str]:
    """Return torchrun's variables, as set or as `srun` implies, in one of several tasks, else {}."""
    env, names = os.environ, ("STEP_NUM_TASKS", "PROCID", "LOCALID", "STEP_NODELIST", "JOB_ID", "STEP_ID")
    tasks, rank, local, nodes, job, step = (env.get(f"SLURM_{name}", "") for name in names)
    if env.get("RANK") or env.get("WORLD_SIZE") == "1" or tasks in ("", "1"):
        return {}
    with contextlib.suppress(OSError):  # a container may hide the task
        # tasks read a pipe, the shell of srun --pty reads a terminal, a batch script /dev/null
        if os.readlink(f"/proc/{env.get('SLURM_TASK_PID')}/fd/0").startswith("/dev/"):
            return {}
    host = re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).partition(",")[0]  # the first of node[003-007,012],other
    host = host if host != nodes else "127.0.0.1"  # a single machine may not know its node's name
    port = str(10_000 + (37 * int(job) + int(step)) % 20_000)  # jobs and steps near this one differ
    found = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": tasks, "MASTER_ADDR": host, "MASTER_PORT": port}
    return {name: env.get(name) or value for name, value in found.items()}


def started() -> str:
    """Return torchrun's arguments for the running command: "finetune.py", or "-m histocc predict"."""
    spec, name = getattr(sys.modules["__main__"], "__spec__", None), sys.argv[0]
    module = name if name.startswith("histocc ") else spec.name.removesuffix(".__main__") if spec else ""
    return f"-m {module}" if module.startswith("histocc") else "finetune.py"


def launcher_environment(args: ProcessFlags) -> tuple[int, int, int, int]:
    """Return (rank, local rank, world size, local world size) from the launcher. Raises UserError."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    os.environ.update(srun_environment())
    values = {name: os.environ[name] for name in names if os.environ.get(name)}
    if values in ({}, {"WORLD_SIZE": "1"}):
        if args.distributed or args.world_size not in (None, 1):
            flag = "--distributed" if args.distributed else f"--world-size {args.world_size}"
            raise UserError(
                f"{flag} needs a launcher, and {', '.join(names)} are not all set. Start it with\n"
                f"  torchrun --nproc-per-node={args.world_size or 2} {started()} --distributed …\n"
                f"or leave {flag} out to run in one process."
            )
        return 0, 0, 1, 1
    if args.local_rank is not None and args.local_rank >= 0:  # older launchers pass it only as a flag
        values.setdefault("LOCAL_RANK", str(args.local_rank))
    elif args.device == "cpu" or not (torch.cuda.is_available() and torch.cuda.device_count() > 1):
        values.setdefault("LOCAL_RANK", "0")  # some launchers set only the other two
    try:
        rank, local, size = (int(values[name]) for name in names)
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or local + 1)
        fit = 0 <= rank < size and 0 <= local < local_size <= size
    except (KeyError, ValueError):
        fit, rank, local, size, local_size = False, 0, 0, 1, 1
    if not fit:
        given = {name: os.environ.get(name, "not set")[:30] for name in (*names, "LOCAL_WORLD_SIZE")}
        raise UserError(
            f"{', '.join(f'{name}={value}' for name, value in given.items())}: a launcher such as torchrun"
            " sets them all to whole numbers, RANK below WORLD_SIZE and LOCAL_RANK below LOCAL_WORLD_SIZE."
            " Unset them to run in one process."
        )
    for flag, asked, actual in (
        ("world-size", args.world_size, size),
        ("local-rank", args.local_rank, local),
    ):
        if asked not in (None, -1, actual):  # -1: scripts for the older launcher mean "not given"
            raise UserError(f"--{flag} {asked} contradicts the launcher, which says {actual}. Leave it out.")
    return rank, local, size, local_size


def is_first_rank() -> bool:
    """Return whether the launcher made this process rank 0. Usable before there is a `World`."""
    return (srun_environment() or os.environ).get("RANK", "0") in ("", "0")


def launcher_id() -> str:
    """Return a unique name of torchrun's agent, which restarts this process after a failure, or ""."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return ""
    with open(f"/proc/{os.getppid()}/stat", encoding="utf-8") as file:
        started = file.read().rpartition(")")[2].split()[19]
    return f"{socket.gethostname()} {os.getppid()} {started}"


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, as torchrun's agent then forwards no signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


# ---- the place of this process, and the collectives


@dataclass(frozen=True)
class World:
    """The place of this process in the run. `init_world` makes it once, and it is handed down."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    device: torch.device = torch.device("cpu")
    backend: str | None = None  # backend of the default process group (tensors on `device`), or None
    control: Any = field(default=None, compare=False)  # the group for tensors on the CPU (None: the default)
    patient: Any = field(default=None, compare=False)  # the group in which waits may be long (None: the same)
    time_limit: float = field(default=math.inf, compare=False)  # seconds that one process waits for another
    leader: int = field(default=0, compare=False)  # the first rank on this machine

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of the whole job, the only one that writes files and prints."""
        return self.rank == 0

    def share(self, process: int = 0, count: int = 1) -> slice:
        """Return this rank's slice of a list of work, or that slice for one of `count` forked processes."""
        return slice(self.rank * count + process, None, self.size * count)

    def print(self, *words: object, sep: str = " ") -> None:
        """Print on rank 0 only, and flush, so that the line is in the log when a job dies."""
        if self.is_main:
            print(*words, sep=sep, flush=True)

    # ---- collectives: every rank calls them, in the same order ----

    def sum_over_ranks(self, totals: dict[str, Any]) -> dict[str, float]:
        """Return sums and counts over all ranks, from one float64 all-reduce of numbers or 0-d tensors."""
        names = sorted(totals)  # the same order on every rank
        values = [
            (value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64))
            .to(self.device, torch.float64)
            .reshape(())
            for value in map(totals.get, names)
        ]
        packed = torch.stack(values)  # [len(names)]
        if self.backend:
            dist.all_reduce(packed)
        return dict(zip(names, packed.tolist()))

    def stop_agreed(self) -> bool:
        """Return whether any rank was asked to stop, the same on all. Costs a message of a few bytes."""
        signals.set_timer()
        asked = torch.tensor(float(stop_asked()))
        if self.backend:
            dist.all_reduce(asked, group=self.control)
        return bool(asked > 0)

    def gather(self, value: Any, main_alone: bool = False) -> list[Any]:
        """Return every rank's `value`, in order of rank. main_alone: only on rank 0, [] on the others."""
        if not self.backend:
            return [value]
        values: list[Any] = [None] * self.size
        if main_alone:
            dist.gather_object(value, values if self.is_main else None, 0, group=self.control)
        else:
            dist.all_gather_object(values, value, group=self.control)
        return values if self.is_main or not main_alone else []

    def broadcast(self, value: Any, source: int) -> Any:
        """Return the `value` of rank `source` on every rank. It may hold tensors on the CPU."""
        if not self.backend:
            return value
        held = [value]
        dist.broadcast_object_list(held, source, group=self.patient)
        # No rank leaves before all have received: a rank that ends now could keep another waiting forever.
        dist.all_reduce(torch.zeros(1), group=self.patient)
        return held[0]

    def node_leaders(self) -> list[int]:
        """Return the rank of the first process of each node, in order."""
        return sorted(set(self.gather(self.leader)))

    def run_on_main(self, work: Callable[[], Any], limited: bool = False) -> Any:
        """Run `work` on rank 0 and return its result on every rank (see `run_on`)."""
        return self.run_on([0], work, limited)[0]

    def run_on(self, leaders: list[int], work: Callable[[], Any], limited: bool = False) -> list[Any]:
        """Run `work` on the ranks `leaders` and return their results, in that order, on every rank. The time
        limit applies only to `limited` work. If a leader ends with a message, or because it was asked to
        stop, every rank raises the same.
        """
        signals.stop_timer()
        if not self.backend:
            return [work()]
        if limited:
            signals.set_timer()
        result, ended = None, None
        if self.rank in leaders:
            try:
                result = work()
            except Stopped:
                ended = (Stopped, "")
            except Exception as error:
                if (known := as_user_error(error)) is None:
                    raise
                kind = UserError if isinstance(known, UserError) else TrainingError
                ended = (kind, str(known))
        # Results are broadcast: in an all-gather each rank would hold one result per rank.
        outcomes: list[Any] = [None] * self.size
        group = self.control if limited else self.patient
        dist.all_gather_object(outcomes, (ended, result is None), group=group)
        for rank, (ended, _) in enumerate(outcomes):
            if ended is not None:
                signals.set_timer()
                error = ended[0](ended[1])
                error.rank = rank
                raise error
        results = [None if outcomes[leader][1] else self.broadcast(result, leader) for leader in leaders]
        signals.set_timer()
        return results

    def give_up_if_asked(self) -> None:
        """Raise Stopped if this process was asked to stop. Work inside `run_on` calls it."""
        if stop_asked():
            raise Stopped


def all_see(world: World, folder: str, otherwise: str = "") -> None:
    """Raise UserError if a rank does not see within 5 s a file that rank 0 writes into `folder`. otherwise:
    an alternative to naming another folder. All ranks.
    """
    # The name is new: a network disk may remember for a minute that a name did not exist.
    path = os.path.join(folder, world.broadcast(f".seen-{os.urandom(8).hex()}", 0))
    world.run_on_main(lambda: open(path, "x").close())
    until = time.monotonic() + 5
    while not (sees := os.path.exists(path)) and time.monotonic() < until:
        time.sleep(0.1)
    seen = world.gather((sees, f"rank {world.rank} on {socket.gethostname()}"))
    world.run_on_main(lambda: os.remove(path))
    if blind := [rank for sees, rank in seen if not sees]:
        why = f"{blind[0]} does not see what {seen[0][1]} writes there"
        raise UserError(f"{folder}: {why}. Name a folder on a disk that all machines share{otherwise}")


# ---- joining the others


def init_world(args: ProcessFlags) -> World:
    """Read the launcher's variables and join the other processes: nccl with CUDA, gloo without. One process
    without --distributed makes no process group. All ranks. Raises UserError if joining fails.
    """
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < MIN_TORCH:
        raise UserError(
            f"torch {torch.__version__} is installed, and {'.'.join(map(str, MIN_TORCH))} or newer is needed"
            " (in older ones a file of weights can run code): pip install 'torch>=2.10' in a new environment"
        )
    rank, local, size, local_size = launcher_environment(args)
    if sys.platform == "win32" and size > 1:
        raise UserError("several processes do not run on Windows: start them in WSL, or train with one")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())
    limit, chosen, refused = 60 * args.timeout_minutes, torch.device("cpu"), None
    try:
        chosen = choose_device(args.device, local, local_size)
        if size == 1 and not args.distributed or getattr(args, "in_parts", False):
            return World(device=chosen, time_limit=limit)
        start = own_start(args, chosen, local)
    except UserError as error:  # others would wait for this rank in vain, so it joins and says why
        refused, start = error, {"device": str(error)}
    if not dist.is_available():
        why = "this torch was built without torch.distributed: start one process, without --distributed"
        raise refused or UserError(why)
    on_gpu, timeout = chosen.type == "cuda", timedelta(seconds=limit)
    backend = "nccl" if on_gpu else "gloo"
    place = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')}, MASTER_PORT={os.environ.get('MASTER_PORT')}"
    if rank == 0 < size - 1 and not os.environ.get("LOCAL_WORLD_SIZE"):  # torchrun sets it, srun does not
        print(f"{size} processes meet at {place}", flush=True)
    store, remedy = dist.HashStore(), NOT_MET  # pyright: ignore[reportPrivateImportUsage]
    with limit_of_joining(f"rank {rank}: the other processes, at {place}", limit + JOINING_SECONDS):
        try:
            if size > 1:
                wait_for_address(rank, limit)
                store, rank, size = next(rendezvous("env://", rank, size, timeout=timeout))  # pyright: ignore
            # a launcher's store outlives its restarts, and still holds the addresses of the dead
            attempt = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT') or 0}"
            store = PrefixStore(attempt, store)  # pyright: ignore
            hosts = compare_starts(store, rank, size, start)
            if refused:
                raise refused
            remedy = CANNOT_SEND
            own_device = chosen if on_gpu else None
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=own_device
            )
            control = dist.new_group(backend="gloo", timeout=timeout) if on_gpu else None
            patient = dist.new_group(backend="gloo", timeout=LONGEST_WORK)
        except (OSError, ValueError, RuntimeError) as error:
            # MASTER_ADDR is missing, the port is in use, the host is not reached, or a peer never came
            text = str(error) or type(error).__name__
            reason = text.partition("\n")[0] + " ".join(text.partition("Last error:")[1:]).strip()
            remedy = PORT_IN_USE if "EADDRINUSE" in text else remedy
            raise UserError(f"could not meet the other processes at {place}: {reason}\n  {remedy}.") from None
    node = range(rank - local, rank - local + local_size)
    if not os.environ.get("LOCAL_WORLD_SIZE"):  # not set by srun: ranks with one host name share a machine
        node = [i for i, host in enumerate(hosts) if host == hosts[rank]]
    return World(rank, node.index(rank), size, len(node), chosen, backend, control, patient, limit, node[0])


def compare_starts(store: Any, rank: int, size: int, start: dict[str, Any]) -> list[str]:
    """Return the host of each rank. Raises UserError on all if one was started differently than rank 0."""
    store.set(f"start{rank}", json.dumps([socket.gethostname(), start], default=str))
    read = [json.loads(value) for value in store.multi_get([f"start{i}" for i in range(size)])]
    store.set(f"read{rank}", "")
    if rank == 0:  # it may hold the store, which others still read: it must not end now
        store.wait([f"read{i}" for i in range(size)])
    if size > 1:
        met.store, met.rank = store, rank
    first_host, first_start = read[0]
    for i, (host, there) in enumerate(read):  # entries that a rank lacks are not compared
        if different := [
            f"{name}: {first!r} for rank 0 on {first_host}, {there[name]!r} for rank {i} on {host}"
            for name, first in first_start.items()
            if there.get(name, first) != first
        ]:
            raise UserError("\n  ".join([START_DIFFERS, *different]))
    return [host for host, _ in read]


def own_start(args: ProcessFlags, device: torch.device, local_rank: int) -> dict[str, Any]:
    """Return, by name, the settings that must be equal on all ranks: flags, device, versions, and checksums
    of files named by flags, which only the first process of each machine reads. Raises UserError.
    """
    own = flags_that(type(args), "of_process")
    given = {name: value for name, value in args.values().items() if name not in own}
    start = {flag_of(name): value for name, value in given.items()}
    start |= {"device": device.type, "torch": str(torch.__version__), "histocc": __version__}
    if hasattr(args, "use_amp"):  # the command has number formats
        start["number format"] = Precision.of(args, device).name
    for value in given.values() if local_rank == 0 else ():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, str) and os.path.isfile(path) and os.access(path, os.R_OK):
                start[f"checksum of {path}"] = f"{checksum(path):08x}"
    return start


def wait_for_address(rank: int, seconds: float) -> object:
    """Wait until MASTER_ADDR is known (rank 0) or accepts connections. Else torch prints 40 lines of C++."""
    at: Any = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    until, quiet_until = time.monotonic() + seconds, time.monotonic() + JOINING_SECONDS
    while all(at):  # else torch says which is missing
        try:
            return socket.create_connection(at, seconds).close() if rank else socket.getaddrinfo(*at)
        except OSError as error:
            if time.monotonic() > until:
                raise
            if isinstance(error, socket.gaierror) and time.monotonic() > quiet_until:
                said = f"rank {rank} waits for MASTER_ADDR={at[0]}, which its machine does not know"
                print(f"WARNING: {said} ({error.strerror})", file=sys.stderr, flush=True)
                quiet_until = until
        time.sleep(0.2)


@contextlib.contextmanager
def limit_of_joining(others: str, seconds: float) -> Generator[None]:
    """End this process if the code inside takes longer (exit code 2), or if it is asked to stop meanwhile.
    Torch waits there without looking at signals, and there is nothing to save yet.
    """
    done = threading.Event()

    def watch() -> None:
        until = time.monotonic() + seconds
        while not done.wait(0.02):
            if stop := stop_request():
                what = f"Stopped by {stop.reason} while it waited for {others}."
                print(what, "The same command starts again.", flush=True)
                os._exit(stop.exit_code)
            if time.monotonic() > until:
                what = f"error: {others}: no answer within {seconds:,.0f} s (--timeout-minutes). {NOT_MET}."
                print(what, file=sys.stderr, flush=True)
                os._exit(2)

    threading.Thread(target=watch, name="limit of joining", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def current_world(device: torch.device | str = "cpu") -> World:
    """Return the world of a process group that the caller has already initialized, or of one process."""
    device = torch.device(device)
    if not (dist.is_available() and dist.is_initialized()):
        return World(device=device)
    return World(dist.get_rank(), size=dist.get_world_size(), device=device, backend=dist.get_backend())
