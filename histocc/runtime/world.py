"""The processes of a run: who this process is, and everything the processes say to each other outside DDP and
FSDP.

No other module calls a collective but `reduction`, for gradients;
`launcher` alone reads RANK, LOCAL_RANK and WORLD_SIZE.
All of it works in one process too, where it costs nothing.
"""

import atexit
import contextlib
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from histocc.runtime import machine_errors, stacks
from histocc.runtime.device import check_one_process_per_gpu, choose_device
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.heartbeat import Heartbeat, end_without
from histocc.runtime.launcher import (
    is_first_rank,
    launcher_environment,
    own_mistake,
    processes_here,
)
from histocc.runtime.signals import Stopped, StopRequest
from histocc.runtime.watchdog import die_with_launcher, limited

LEAST_TORCH = (2, 10)
# How often a waiting rank looks at the store: at first more often, since most work is short.
FIRST_POLL_SECONDS, POLL_GROWTH, POLL_SECONDS = 0.002, 1.2, 0.1
LOOKS_PER_BEAT = 20  # … and, of these, how often at the heartbeat of the one that it waits for
PEER_PATIENCE_SECONDS = (
    20.0  # how long a silent rank waits for rank 0 to say what is wrong; rank 0 may start later
)
JOINING_SECONDS = 5.0  # torch's own limits come first: they say more
NOT_MET = (
    "Both must be set alike on all machines, rank 0 must run on that one, and the firewall let the port"
    " through."
)
HEARD_PATIENCE_SECONDS = 2.0  # the same where rank 0 itself has found it


@dataclass(frozen=True)
class World:
    """Who this process is among the processes of the run. Made once, by `init_world`, and handed down."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    device: torch.device = torch.device("cpu")
    backend: str | None = None  # None: no process group
    launcher: str = ""  # the process that started this one, where that may start it again
    store: Any = field(default=None, repr=False, compare=False)
    # a group of CPU tensors; None: the default one
    control: Any = field(default=None, repr=False, compare=False)
    stop: StopRequest = field(default_factory=StopRequest, repr=False, compare=False)
    heartbeat: Heartbeat | None = field(default=None, repr=False, compare=False)
    # seconds that others wait for a silent rank
    patience: float = field(default=math.inf, repr=False, compare=False)

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

    def print_here(self, text: str) -> None:
        """On any rank, with its number where there are others; flushed."""
        print(text if self.size == 1 else f"rank {self.rank}: {text}", flush=True)

    def note(self, doing: str) -> None:
        """Notes what this rank does next, for the message if it dies in it."""
        if self.heartbeat is not None:
            self.heartbeat.note(doing)

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
            with stacks.waiting():
                dist.all_reduce(packed)
        return dict(zip(names, packed.tolist()))

    def stop_agreed(self) -> bool:
        """Whether any rank was asked to stop: the same answer on all. Costs one message of a few bytes."""
        asked = torch.tensor(float(bool(self.stop)))
        if self.backend:
            with stacks.waiting():
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
        with stacks.waiting():
            dist.all_gather_object(values, value)
        return values

    def gather_on_main(self, value: Any) -> list[Any] | None:
        """The `value` of every rank (plain Python or arrays), in order of rank, on rank 0; None on the
        others.
        """
        if not self.backend:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        with stacks.waiting():
            dist.gather_object(value, values, 0, group=self.control)
        return values

    def broadcast(self, value: Any, source: int) -> Any:
        """What rank `source` holds, tensors on the CPU included, on every rank; the `value` of the others is
        not used.
        """
        if not self.backend:
            return value
        held = [value]
        with stacks.waiting():
            dist.broadcast_object_list(held, source, group=self.control)
        return held[0]

    def try_all_reduce(self, megabytes: int, repeats: int = 4) -> tuple[float, bool]:
        """(seconds of the fastest of some all-reduces of so many megabytes of float32, whether every sum was
        right).
        """
        best, right = float("inf"), True
        for _ in range(repeats):
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
            with stacks.waiting():
                dist.barrier(device_ids=[self.local_rank] if self.backend == "nccl" else None)

    def run_on_main(self, name: str, work: Callable[[], Any]) -> Any:
        """Runs `work` on rank 0 and returns its result on every rank; see `run_on`."""
        return self.run_on(name, [0], work)[0]

    def node_leaders(self) -> list[int]:
        """The rank of the first process of each node, in order."""
        return sorted(set(self.gather(self.rank - self.local_rank)))

    def run_on(self, name: str, leaders: list[int], work: Callable[[], Any]) -> list[Any]:
        """Runs `work` on the ranks `leaders` and returns their results, in that order, on every rank.

        Who waits polls the store instead of entering a collective, so that long work never meets the time
        limit of collectives; results of any kind then come through the CPU. A `UserError` of a leader is
        raised on every rank. Each `name` may be used once in a run.
        """
        if not self.backend:
            return [work()]
        key = f"histocc/run_on/{name}"
        own_error = result = None
        if self.rank in leaders:
            answer = {"failed": True}
            stacks.stop_timer()  # the others wait as long as this process lives
            try:
                result = work()
                answer = {"result": result is not None}
            except UserError as error:
                answer, own_error = {"user_error": str(error)}, error
            except Stopped:
                answer = {"stopped": True}
            finally:
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
        said = next((answer["user_error"] for answer in answers if "user_error" in answer), None)
        if any("stopped" in answer for answer in answers):
            raise Stopped
        if said is None:
            raise SystemExit(1)
        raise UserError(said, heard_from_main=True)

    def _answer(self, key: str, leader: int) -> dict[str, Any]:
        """What `leader` has put into the store. Raises TrainingError where it works no more: it is waited for
        as long as it beats.
        """
        with stacks.waiting():
            return self._awaited(key, leader)

    def _awaited(self, key: str, leader: int) -> dict[str, Any]:
        looks, beat, since, wait = 0, None, time.monotonic(), FIRST_POLL_SECONDS
        while not self.store.check([key]):
            if self.stop:  # only one rank may have got the signal: tell who works
                self.store.set("histocc/stop", "1")
            if (looks % LOOKS_PER_BEAT == 0 or self.stop) and self.heartbeat is not None:
                if (now := self.heartbeat.of(leader)) != beat:
                    beat, since = now, time.monotonic()
                    stacks.set_timer()
                elif self.heartbeat.has_ended(leader) and not self.store.check([key]):
                    raise TrainingError(_silent("does not answer any more", leader, beat), said_by_all=True)
            if time.monotonic() - since > self.patience:
                silence = (
                    f"has given no sign of life for {time.monotonic() - since:,.0f} s (--timeout-minutes)"
                )
                files = stacks.written()
                raise TrainingError(
                    _silent(silence, leader, beat) + (files and f"; {files}"), said_by_all=True
                )
            looks += 1
            time.sleep(wait)
            wait = min(POLL_GROWTH * wait, POLL_SECONDS)
        return json.loads(self.store.get(key))

    def stop_asked_anywhere(self) -> bool:
        """Whether this rank, or one that waits for it in `led`, was asked to stop. For the rank that
        works.
        """
        return bool(self.stop) or (self.store is not None and self.store.check(["histocc/stop"]))

    def give_up_if_asked(self) -> None:
        """Raises Stopped where `stop_asked_anywhere`."""
        if self.stop_asked_anywhere():
            raise Stopped

    def _leave_together(self, key: str) -> None:
        """Rank 0 may hold the store: it stays until all others have read what is in it."""
        if not self.is_main:
            self.store.add(key, 1)
            return
        until = time.monotonic() + PEER_PATIENCE_SECONDS / 2
        while self.store.add(key, 0) < self.size - 1 and time.monotonic() < until:
            time.sleep(POLL_SECONDS)


def _silent(what: str, rank: int, beat: str | None) -> str:
    said = Heartbeat.last_words({0: beat or "nothing"})[0]
    return f"rank {rank} {what}; last reported activity: {said}"


def init_world(
    distributed: bool = False,
    *,
    world_size: int | None = None,
    local_rank: int | None = None,
    device: str = "auto",
    timeout_minutes: float = 30.0,
    stop: StopRequest | None = None,
) -> World:
    """Reads the launcher's variables and joins the other processes. All ranks.

    nccl with CUDA, gloo without. One process without `distributed` makes no process group. Raises UserError.
    """
    if torch_is_too_old():
        raise UserError(
            f"torch {torch.__version__} is here, and {'.'.join(map(str, LEAST_TORCH))} or newer is needed"
            " (older ones can be made to run code by a file of weights): pip install 'torch>=2.10' in a new"
            " environment"
        )
    rank, local, size = launcher_environment(distributed, world_size, local_rank)
    launcher = die_with_launcher()
    local_size = processes_here(local)
    chosen = choose_device(device, local, local_size)
    stop = StopRequest() if stop is None else stop  # an open request is false
    if size == 1 and not distributed:
        return World(device=chosen, stop=stop, patience=60 * timeout_minutes)
    with limited(
        60 * timeout_minutes + JOINING_SECONDS,
        stop,
        f"rank {rank}: the other processes, at MASTER_ADDR="
        f"{os.environ.get('MASTER_ADDR')}, MASTER_PORT={os.environ.get('MASTER_PORT')}",
        NOT_MET,
    ):
        rank, size, store, control = join(rank, local, size, local_size, chosen, timeout_minutes)
    heartbeat = Heartbeat(store, rank, size, stop.__bool__, range(rank - local, rank - local + local_size))
    world = World(
        rank,
        local,
        size,
        local_size,
        chosen,
        backend_of(chosen),
        launcher,
        store,
        control,
        stop,
        heartbeat,
        60 * timeout_minutes,
    )
    if world.backend == "nccl":  # a host that waits for its device and that for a dead peer sees no exception
        heartbeat.watch(
            lambda silent, doing: end_without(heartbeat, silent, doing, "it gives no sign of life")
        )
    return world


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def join(
    rank: int, local: int, size: int, local_size: int, device: torch.device, timeout_minutes: float
) -> tuple[int, int, Store, dist.ProcessGroup | None]:
    """Meets the other processes and makes the process group.

    Returns (rank, size, the store of what this program says, the group of tensors on the CPU or None where
    that is the default one). Raises UserError where the others cannot be met, or this process has the place
    of another one.
    """
    backend, timeout = backend_of(device), timedelta(minutes=timeout_minutes)
    try:
        store, rank, size = next(rendezvous("env://", rank, size, timeout=timeout))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0
        # the launcher's store still holds what the dead wrote
        store = PrefixStore(f"attempt_{attempt}", store)
        own_store = PrefixStore("histocc", store)
        check_rank_is_single(own_store, rank)
        if backend == "nccl":  # before NCCL itself meets two processes on one GPU
            check_one_process_per_gpu(own_store, rank, local, local_size)
        dist.init_process_group(
            backend,
            store=PrefixStore("default_pg", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        control: Any = dist.new_group(backend="gloo", timeout=timeout) if backend == "nccl" else None
    except (ValueError, RuntimeError) as error:
        # MASTER_ADDR missing, port in use, host not reached, a peer that never came
        raise not_met(rank, error) from None
    return rank, size, own_store, control


def check_rank_is_single(store: Any, rank: int) -> None:
    """Raises UserError where another process of the job has the same RANK. torchrun gives each once, and its
    store outlives attempts.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ and store.add(f"joined/{rank}", 1) > 1:
        raise own_mistake(
            f"RANK={rank} was given to two processes of this job: each needs its own, from 0 to"
            " WORLD_SIZE - 1"
        )


def torch_is_too_old() -> bool:
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < LEAST_TORCH


def not_met(rank: int, error: Exception) -> UserError:
    """Said by the process itself: the others are out of reach."""
    return own_mistake(
        f"Rank {rank} could not meet the other processes at MASTER_ADDR={os.environ.get('MASTER_ADDR')},"
        f" MASTER_PORT={os.environ.get('MASTER_PORT')}:"
        f" {str(error).splitlines()[0] if str(error) else type(error).__name__}\n"
        + (
            "  Another program has this port, or a second process RANK=0: choose another MASTER_PORT, the"
            " same on all machines."
            if "EADDRINUSE" in str(error)
            else f"  {NOT_MET}"
        )
    )


def close_world(world: World) -> None:
    """Leaves the process group. Call it when no DDP object is alive any more, after `gc.collect()`."""
    if world.heartbeat is not None:
        world.heartbeat.stop()
    if world.backend and dist.is_initialized():
        dist.destroy_process_group()


def lost_contact(error: BaseException) -> bool:
    """Whether an exception says that a collective failed because another process did not take part."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and re.search(
            r"gloo|nccl|connection (closed|reset|refused)|timed out|socket|broken pipe|peer",
            str(error),
            re.IGNORECASE,
        )
        is not None
    )


def end_process(code: str | int, exit_seconds: float = 30.0) -> NoReturn:
    """Ends a process that has done its work and left its process group. Does not return.

    The interpreter's own ending can abort it (SIGABRT, "terminate called without an active exception"), when
    a thread of the backend asks for the interpreter while that is being taken apart; and it waits for threads
    and processes of libraries.
    exit_seconds: what functions registered with atexit may take; 0: they are not called.
    """
    if exit_seconds:
        calls = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
        calls.start()
        calls.join(exit_seconds)
    for process in multiprocessing.active_children():
        process.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)  # as sys.exit does with a text


def current_world(device: torch.device | str = "cpu") -> World:
    """The world of a process group that the caller has initialised already; one process where there is
    none.
    """
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


def tell_launcher(message: str) -> None:
    """Writes what torchrun shows of this process in its report, when it has failed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message, "timestamp": int(time.time())}, file)


@contextlib.contextmanager
def errors_end_all_ranks() -> Generator[None]:
    """Turns UserError into exit code 2 and TrainingError into 1: one message, from rank 0, and no traceback.

    The other ranks stay silent and give rank 0 time to speak: a launcher ends its workers as soon as one is
    gone. Where a process group is still there, the process ends without leaving it: NCCL would wait in it for
    those that are stuck in a collective.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        known = machine_errors.as_user_error(error)  # what is one already, too
        if known is None:
            if not isinstance(error, SystemExit):
                tell_launcher(traceback.format_exc())
            if not dist.is_initialized():
                raise
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            end_process(error.code or 0 if isinstance(error, SystemExit) else 1)
        code = 2 if isinstance(known, UserError) else 1
        if is_first_rank() or known.said_by_all:
            tell_launcher(str(known))
            print(f"error: {known}", file=sys.stderr, flush=True)
        else:
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))
            time.sleep(HEARD_PATIENCE_SECONDS if known.heard_from_main else PEER_PATIENCE_SECONDS)
        if dist.is_initialized():
            end_process(code)
        sys.exit(code)
