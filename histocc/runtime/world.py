"""The processes of a run: who this process is among them, and everything that they say to each other
outside DDP and FSDP.

No other module reads RANK, LOCAL_RANK and WORLD_SIZE, or calls a collective. All of it works in one process
too, and costs nothing there.
"""

import contextlib
import ctypes
import itertools
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from histocc.runtime import signals
from histocc.runtime.device import check_one_process_per_gpu, choose_device
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.signals import Stopped, stop_asked, stop_request

MIN_TORCH = (2, 10)
POLL_SECONDS = 0.02  # between two looks at the store
ALIVE_SECONDS = 1.0  # how often a rank that works for all says that it lives
STOP_SECONDS = 10.0  # how long a rank that was asked to stop waits for one that says so no more
LEAVING_SECONDS = 10.0  # how long rank 0 may stay for the others to read what it has said
STORE_SECONDS = 5.0  # for an answer of the store, which may be out of reach
JOINING_SECONDS = 5.0  # torch's own limits come first: they say more
NOT_MET = (
    "Both must be set alike on all machines, rank 0 must run on that one, and the firewall let the port"
    " through."
)


# ---- what a launcher says of this process


def launcher_environment(
    distributed: bool = False, world_size: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int, int]:
    """(rank, local rank, world size, local world size) from the launcher's variables and the flags that must
    agree with them. Raises UserError if they are missing or contradict each other.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    values = {name: os.environ[name] for name in names if os.environ.get(name)}
    if not values:
        if distributed or world_size not in (None, 1):
            flag = "--distributed" if distributed else f"--world-size {world_size}"
            raise UserError(
                f"{flag} needs a launcher, and {', '.join(names)} are not set. Start it with\n"
                f"  torchrun --nproc-per-node={world_size or 2} finetune.py --distributed …\n"
                f"or leave {flag} out to run in one process."
            )
        return 0, 0, 1, 1
    if local_rank is not None and local_rank >= 0:  # launchers from before torchrun pass it as a flag alone
        values.setdefault("LOCAL_RANK", str(local_rank))
    try:
        rank, local, size = (int(values[name]) for name in names)
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or local + 1)
        fit = 0 <= rank < size and 0 <= local < local_size <= size
    except (KeyError, ValueError):
        fit, rank, local, size, local_size = False, 0, 0, 1, 1
    if not fit:
        given = {name: os.environ.get(name, "not set")[:30] for name in (*names, "LOCAL_WORLD_SIZE")}
        raise own_mistake(
            f"{', '.join(f'{name}={value}' for name, value in given.items())}: a launcher such as torchrun"
            " sets them all to whole numbers, RANK below WORLD_SIZE and LOCAL_RANK below LOCAL_WORLD_SIZE."
            " Unset them to run in one process."
        )
    for flag, asked, actual in (("world-size", world_size, size), ("local-rank", local_rank, local)):
        if asked not in (None, -1, actual):  # -1: scripts for the older launcher say so that there is none
            raise UserError(f"--{flag} {asked} contradicts the launcher, which says {actual}. Leave it out.")
    return rank, local, size, local_size


def own_mistake(message: str) -> UserError:
    """What is wrong with this process alone, which it says itself."""
    return UserError(message, said_by_all=True)


def is_first_rank() -> bool:
    """Whether this process is rank 0 by the launcher's variables, before there is a `World`."""
    return os.environ.get("RANK", "0") in ("", "0")


def launcher_id() -> str:
    """What tells torchrun's agent, which starts this process again after a failure, from every other process
    there ever was: its host, number and start; "" without torchrun.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    parent, started = os.getppid(), ""
    with (
        contextlib.suppress(OSError, IndexError),  # another system than Linux
        open(f"/proc/{parent}/stat", encoding="utf-8") as file,
    ):
        started = file.read().rpartition(")")[2].split()[19]
    return f"{socket.gethostname()} {parent} {started}"


def die_with(parent: int) -> None:
    """Asks the system (Linux) to kill this process when its parent dies: torchrun's agent forwards no signal
    then.
    """
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return  # another system
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


# ---- who this process is, and the collectives


@dataclass(frozen=True)
class World:
    """Who this process is among the processes of the run. Made once, by `init_world`, and handed down.

    Args:
        backend: of the default process group, for tensors on `device`; None: there is none.
        control: the group for tensors on the CPU; None: the default one.
        store: what the processes write for each other.
        time_limit: seconds that one waits for another.
        calls: numbers those of `run_on`, alike on all ranks.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    device: torch.device = torch.device("cpu")
    backend: str | None = None
    control: Any = field(default=None, repr=False, compare=False)
    store: Any = field(default=None, repr=False, compare=False)
    time_limit: float = field(default=math.inf, repr=False, compare=False)
    calls: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """True on rank 0 of the whole job, the only one that writes files and speaks."""
        return self.rank == 0

    @property
    def nodes(self) -> int:
        return max(1, self.size // max(1, self.local_size))

    def print(self, *words: object, sep: str = " ") -> None:
        """Rank 0 only; flushed, so that the line is in the log when a job dies."""
        if self.is_main:
            print(*words, sep=sep, flush=True)

    # ---- collectives: every rank calls them, in the same order ----

    def sum_over_ranks(self, totals: dict[str, Any]) -> dict[str, float]:
        """Sums and counts over all ranks, packed into one float64 all-reduce. Values: numbers or 0-d
        tensors.
        """
        names = sorted(totals)  # the same order on every rank
        values = [
            (value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64))
            .to(self.device, torch.float64)
            .reshape(())
            for value in map(totals.get, names)
        ]
        packed = torch.stack(values)  # [len(names)]
        if self.backend:
            with signals.waiting():
                dist.all_reduce(packed)
        return dict(zip(names, packed.tolist()))

    def stop_agreed(self) -> bool:
        """Whether any rank was asked to stop: the same answer on all. Costs one message of a few bytes."""
        asked = torch.tensor(float(stop_asked()))
        if self.backend:
            with signals.waiting():
                dist.all_reduce(asked, group=self.control)
        return bool(asked > 0)

    def differing(self, value: Any) -> list[int]:
        """Ranks whose plain Python `value` is not that of rank 0: the same list on all."""
        values = self.gather(value)
        return [rank for rank, other in enumerate(values) if other != values[0]]

    def gather(self, value: Any) -> list[Any]:
        """The plain Python `value` of every rank, in order of rank, on every rank."""
        if not self.backend:
            return [value]
        values: list[Any] = [None] * self.size
        with signals.waiting():
            dist.all_gather_object(values, value)
        return values

    def gather_on_main(self, value: Any) -> list[Any] | None:
        """The `value` of every rank (plain Python or arrays), in order of rank, on rank 0; None on the
        others.
        """
        if not self.backend:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        with signals.waiting():
            dist.gather_object(value, values, 0, group=self.control)
        return values

    def broadcast(self, value: Any, source: int) -> Any:
        """What rank `source` holds, tensors on the CPU included, on every rank; the `value` of the others is
        not used.
        """
        if not self.backend:
            return value
        held = [value]
        with signals.waiting():
            dist.broadcast_object_list(held, source, group=self.control)
        return held[0]

    def try_all_reduce(self, megabytes: int) -> tuple[float, bool]:
        """(seconds of the fastest of four all-reduces of so many megabytes of float32, whether every sum was
        right).
        """
        best, right = float("inf"), True
        for _ in range(4):
            values = torch.full((megabytes << 18,), float(self.rank + 1), device=self.device)
            self.barrier()
            started = time.perf_counter()
            if self.backend:
                dist.all_reduce(values)
            right = bool((values == self.size * (self.size + 1) / 2).all()) and right  # waits for the device
            best = min(best, time.perf_counter() - started)
        return best, right

    def barrier(self) -> None:
        if self.backend:
            with signals.waiting():
                dist.barrier(device_ids=[self.local_rank] if self.backend == "nccl" else None)

    def run_on_main(self, name: str, work: Callable[[], Any]) -> Any:
        """Runs `work` on rank 0 and returns its result on every rank; see `run_on`."""
        return self.run_on(name, [0], work)[0]

    def node_leaders(self) -> list[int]:
        """The rank of the first process of each node, in order."""
        return sorted(set(self.gather(self.rank - self.local_rank)))

    def run_on(self, name: str, leaders: list[int], work: Callable[[], Any]) -> list[Any]:
        """Runs `work` on the ranks `leaders` and returns their results, in that order, on every rank.

        Who waits polls the store instead of entering a collective: long work meets no time limit as long as
        its process says that it lives. Results of any kind then come through the CPU. A `UserError` of a
        leader is raised on every rank.
        """
        if not self.backend:
            return [work()]
        key, own_error, result = f"histocc/run_on/{next(self.calls)}/{name}", None, None
        done = threading.Event()

        def say_alive() -> None:
            with contextlib.suppress(dist.DistError):  # the store is gone: the wait for it says so
                while not done.wait(ALIVE_SECONDS):
                    self.store.add(f"{key}/{self.rank}/alive", 1)

        if self.rank in leaders:
            answer = {"failed": True}
            signals.stop_timer()  # the others wait as long as this process lives
            threading.Thread(target=say_alive, name=name, daemon=True).start()
            try:
                result = work()
                answer = {"result": result is not None}
            except UserError as error:
                answer, own_error = {"user_error": str(error)}, error
            except Stopped:
                answer = {"stopped": True}
            finally:
                done.set()
                self.store.set(f"{key}/{self.rank}", json.dumps(answer))
                if "failed" in answer:  # an exception of another kind passes through
                    self._leave_together(key + "/seen")
        answers = [self._answer(f"{key}/{leader}", leader) for leader in leaders]
        if all("result" in answer for answer in answers):
            return [
                self.broadcast(result, leader) if answer["result"] else None
                for leader, answer in zip(leaders, answers)
            ]
        self._leave_together(key + "/seen")
        if own_error is not None and self.is_main:
            raise own_error
        if any("stopped" in answer for answer in answers):
            raise Stopped
        for answer in answers:
            if "user_error" in answer:
                raise UserError(answer["user_error"], heard_from_main=True)
        raise SystemExit(1)

    def _answer(self, key: str, leader: int) -> dict[str, Any]:
        """What `leader` has put into the store. Raises TrainingError if it has shown no sign of life for the
        time limit: a launcher ends this process, too, as soon as it has died.
        """
        alive, since = 0, time.monotonic()
        with signals.waiting():
            while not self.store.check([key]):
                if stop_asked():  # only one rank may have got the signal: tell who works
                    self.store.set("histocc/stop", "1")
                if (now := self.store.add(f"{key}/alive", 0)) != alive:
                    alive, since = now, time.monotonic()
                    signals.set_timer()
                silent = time.monotonic() - since
                if silent > (min(STOP_SECONDS, self.time_limit) if stop_asked() else self.time_limit):
                    what = f"rank {leader} has given no sign of life for {silent:,.0f} s (--timeout-minutes)"
                    files = signals.stacks_written()
                    raise TrainingError(what + (files and f"; {files}"), said_by_all=True)
                time.sleep(POLL_SECONDS)
        return json.loads(self.store.get(key))

    def stop_asked_anywhere(self) -> bool:
        """Whether this rank, or one that waits for it in `run_on`, was asked to stop: for who works."""
        return stop_asked() or (self.store is not None and self.store.check(["histocc/stop"]))

    def give_up_if_asked(self) -> None:
        """Raises Stopped if `stop_asked_anywhere`."""
        if self.stop_asked_anywhere():
            raise Stopped

    def _leave_together(self, key: str) -> None:
        """Rank 0 may hold the store: it stays until all others have read what is in it."""
        if not self.is_main:
            self.store.add(key, 1)
            return
        until = time.monotonic() + LEAVING_SECONDS
        while self.store.add(key, 0) < self.size - 1 and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def missing(self, seconds: float) -> tuple[list[int], bool]:
        """(ranks that do not call this within `seconds`, whether this one was the first that did). For ranks
        whose wait for the others has failed, or has lasted too long: who hangs, or is gone, does not call it.
        """
        came, order = {self.rank}, [1]  # if the store is out of reach, all others are

        def ask() -> None:
            with contextlib.suppress(Exception):
                self.store.set(f"waited/{self.rank}", "")
                order[0] = self.store.add("waited", 1)
                until = time.monotonic() + seconds
                while len(came) < self.size and time.monotonic() < until:
                    time.sleep(POLL_SECONDS)
                    came.update(rank for rank in range(self.size) if self.store.check([f"waited/{rank}"]))

        asking = threading.Thread(target=ask, name="who is missing", daemon=True)
        asking.start()
        asking.join(seconds + STORE_SECONDS)
        return [rank for rank in range(self.size) if rank not in came], order[0] == 1


# ---- joining the others, and leaving them


def init_world(
    distributed: bool = False,
    *,
    world_size: int | None = None,
    local_rank: int | None = None,
    device: str = "auto",
    timeout_minutes: float = 30.0,
) -> World:
    """Reads the launcher's variables and joins the other processes: nccl with CUDA, gloo without. One process
    without `distributed` makes no process group. All ranks.

    Raises:
        UserError: if the others cannot be met, or this process has the place of another one.
    """
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < MIN_TORCH:
        raise UserError(
            f"torch {torch.__version__} is here, and {'.'.join(map(str, MIN_TORCH))} or newer is needed"
            " (older ones can be made to run code by a file of weights): pip install 'torch>=2.10' in a new"
            " environment"
        )
    rank, local, size, local_size = launcher_environment(distributed, world_size, local_rank)
    if sys.platform == "win32" and size > 1:
        raise UserError("several processes do not run on Windows: start them in WSL, or train with one")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())
    chosen, limit = choose_device(device, local, local_size), 60 * timeout_minutes
    if size == 1 and not distributed:
        return World(device=chosen, time_limit=limit)
    backend, timeout = "nccl" if chosen.type == "cuda" else "gloo", timedelta(minutes=timeout_minutes)
    place = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')}, MASTER_PORT={os.environ.get('MASTER_PORT')}"
    with limit_of_joining(f"rank {rank}: the other processes, at {place}", limit + JOINING_SECONDS):
        try:
            store, rank, size = next(rendezvous("env://", rank, size, timeout=timeout))
            # the launcher's store still holds what the dead wrote
            store = PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT') or 0}", store)
            own_store = PrefixStore("histocc", store)
            # torchrun gives each rank once, and its store outlives attempts
            if "TORCHELASTIC_RUN_ID" not in os.environ and own_store.add(f"joined/{rank}", 1) > 1:
                raise own_mistake(
                    f"RANK={rank} was given to two processes of this job: each needs its own, from 0 to"
                    " WORLD_SIZE - 1"
                )
            if backend == "nccl":  # before NCCL itself meets two processes on one GPU
                check_one_process_per_gpu(own_store, rank, local, local_size)
            dist.init_process_group(
                backend,
                store=PrefixStore("default_pg", store),
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=chosen if backend == "nccl" else None,
            )
            control = dist.new_group(backend="gloo", timeout=timeout) if backend == "nccl" else None
        except (ValueError, RuntimeError) as error:
            # MASTER_ADDR missing, port in use, host not reached, a peer that never came
            reason = str(error).partition("\n")[0] or type(error).__name__
            remedy = NOT_MET
            if "EADDRINUSE" in str(error):
                remedy = (
                    "Another program has this port, or a second process RANK=0: choose another MASTER_PORT."
                )
            raise own_mistake(
                f"Rank {rank} could not meet the other processes at {place}: {reason}\n  {remedy}"
            ) from None
    return World(rank, local, size, local_size, chosen, backend, control, own_store, limit)


@contextlib.contextmanager
def limit_of_joining(others: str, seconds: float) -> Generator[None]:
    """Ends this process if what is inside takes longer (exit code 2), or if it is asked to stop meanwhile:
    torch waits there without looking at signals, and nothing has to be saved yet.
    """
    done = threading.Event()

    def watch() -> None:
        until = time.monotonic() + seconds
        while not done.wait(POLL_SECONDS):
            if stop_asked():
                stop = stop_request()
                what = (
                    f"Stopped by {stop.reason} while it waited for {others}. The same command starts again."
                )
                print(what, flush=True)
                os._exit(stop.exit_code)
            if time.monotonic() > until:
                what = f"error: {others}: no answer within {seconds:,.0f} s (--timeout-minutes). {NOT_MET}"
                print(what, file=sys.stderr, flush=True)
                os._exit(2)

    threading.Thread(target=watch, name="limit of joining", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def close_world(world: World) -> None:
    """Leaves the process group. Call it when no DDP object is alive any more, after `gc.collect()`."""
    if world.backend and dist.is_initialized():
        dist.destroy_process_group()


def current_world(device: torch.device | str = "cpu") -> World:
    """The world of a process group that the caller has initialised already, or one process."""
    if not dist.is_initialized():
        return World(device=torch.device(device))
    return World(
        dist.get_rank(),
        int(os.environ.get("LOCAL_RANK") or 0),
        dist.get_world_size(),
        int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size()),
        torch.device(device),
        dist.get_backend(),
    )
