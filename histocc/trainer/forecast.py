"""What a run would take on other numbers of processes, by arithmetic from what one of them computes here and
the link between them.

Every process is taken to be as fast as the slowest one here, with equal shares of each step. A sum of b
bytes over n processes sends 2 (n − 1) / n × b over each link of a ring (Patarasuk and Yuan, 2009, "Bandwidth
optimal all-reduce algorithms for clusters of workstations"), so that its slowest link decides. Not counted:
latency, loading of data.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from histocc.runtime.console import duration
from histocc.runtime.device import synchronize
from histocc.runtime.parallel import unwrap
from histocc.runtime.reduction import GradientReducer
from histocc.trainer import loop
from histocc.trainer.batches import MicroBatches, Rows
from histocc.trainer.exchange import SyncSettings, steps_together
from histocc.trainer.hooks import StopPoll
from histocc.trainer.plan import BatchPlan

STEPS, SECONDS = (
    8,
    5.0,
)  # most steps that are measured for a size of shares; no further one after so many seconds
SUMS = 3
HEADERS = 1.06  # bytes on an Ethernet link for one of a message
HALF_WORD = 2  # bytes
MB, GB = 1e6, 1e9
BYTES_OF_GBIT = 1e9 / 8 / HEADERS


@dataclass(frozen=True)
class ForecastSettings:
    """For which numbers of processes, and the rate of the slowest link between them; see the flags."""

    processes: list[int] | None = None
    link_gbit: float | None = None


@dataclass(frozen=True)
class Messages:
    """What the processes send each other.

    gradients: bytes of those of a step, as they are sent; moved: the same of an exchange between groups;
    every: optimizer steps from one exchange to the next, 1 where all processes take every step together;
    start: steps before the first; members: processes of a group.
    """

    gradients: float
    moved: float = 0.0
    every: int = 1
    start: int = 0
    members: int = 1

    def of_step(self, processes: int, alone: bool) -> float:
        """Bytes over the slowest link for an optimizer step. alone: whether groups take it on their own; the
        links inside of a group, between processes of a node, are taken to cost nothing then. A single group
        sums its gradients in every step.
        """
        groups = -(-processes // self.members)
        if not alone or groups == 1:
            return ring(processes) * self.gradients
        return ring(groups) * self.moved / self.every


def ring(processes: int) -> float:
    """Times that what is summed over `processes` goes over each link."""
    return 2 * (processes - 1) / processes


@dataclass(frozen=True)
class Line:
    """What is said of one number of processes. seconds: of the optimizer steps of the run; sending: the part
    of them in which messages are waited for; memory: bytes of a process.
    """

    processes: int
    total: int
    samples_per_second: float
    seconds: float
    sending: float
    memory: float = 0.0

    def __str__(self) -> str:
        return (
            f"  {self.processes:>9,}  {self.total:>11,}  {self.samples_per_second:>9,.1f}"
            f"  {duration(self.seconds):>8}  {self.sending / max(self.seconds, 1e-9):>7.0%}"
            f"  {self.memory / GB:>5.1f} GB"
        )


HEAD = "  processes  total batch  samples/s      time  waiting    memory"


def forecast(plan: BatchPlan, steps: tuple[int, int], own: float, messages: Messages, rate: float) -> Line:
    """Args:
    plan: for the number of processes that is asked for.
    steps: done, and where the run would end.
    own: seconds in which a process does its own part of an optimizer step.
    rate: bytes per second of the slowest link.
    """
    first, last = steps
    together = last - first if messages.every == 1 else max(0, min(messages.start, last) - first)
    alone = last - first - together
    waits = [messages.of_step(plan.processes, which) / rate for which in (False, True)]
    sending = together * waits[0] + alone * waits[1]
    seconds = (last - first) * own + sending
    usual = own + waits[messages.every > 1]
    return Line(plan.processes, plan.global_batch_size, plan.batch_rows(0) / usual, seconds, sending)


def own_seconds(run: loop.Run, rows: Rows, plans: Sequence[BatchPlan], stop: StopPoll) -> list[float]:
    """Seconds in which a process does its own part of an optimizer step, for each plan: the mean over some
    steps of an epoch, of the slowest process here. The weights that they change are thrown away. All ranks.
    """
    measured: dict[int, float] = {}
    for plan in plans:
        share = -(-plan.global_batch_size // plan.processes)
        if share not in measured and not stop():
            measured[share] = max(run.world.gather(_own_seconds(run, rows, plan)))
    return [measured.get(-(-plan.global_batch_size // plan.processes), 0.0) for plan in plans]


def _own_seconds(run: loop.Run, rows: Rows, plan: BatchPlan) -> float:
    """The last rank has the longest rows."""
    batches, world = MicroBatches(rows, plan, plan.processes - 1, 0), run.world
    alone = replace(run, model=unwrap(run.model), reducer=None, exchange=None)
    trained = [p for p in alone.model.parameters() if p.requires_grad]
    reducer = GradientReducer(trained, plan.processes)
    whole = max(
        1, plan.rows // plan.global_batch_size
    )  # batches of an epoch, but for a last one that is smaller
    numbers = [whole * number // STEPS for number in range(STEPS)]
    begun = time.perf_counter()
    taken: list[float] = []
    for number in [numbers[-1], *numbers]:  # the first one takes memory and chooses kernels
        micro_batches = [loop.to_device(batch, world.device) for batch in batches[0, number]]
        started = time.perf_counter()
        for batch in micro_batches:
            loop.forward_backward(alone.model, alone.task, batch, alone.number_format, plan.processes)
        reducer.rehearse()
        loop.optimizer_step(alone)
        synchronize(world.device)
        taken.append(time.perf_counter() - started)
        if len(taken) > 2 and time.perf_counter() - begun > SECONDS:
            break
    return sum(taken[1:]) / len(taken[1:])


def rate_here(run: loop.Run) -> float | None:
    """Bytes per second that go over each link while the gradients of a step are summed over the processes
    here; None for a single one, or where torch's DDP sums them. All ranks.
    """
    world, reducer = run.world, run.reducer
    if world.size == 1 or reducer is None:
        return None
    reducer()
    synchronize(world.device)
    started = time.perf_counter()
    for _ in range(SUMS):
        reducer()
    synchronize(world.device)
    seconds = max(world.gather((time.perf_counter() - started) / SUMS))
    run.optimizer.zero_grad(set_to_none=True)
    return ring(world.size) * sent_bytes(run, reducer.compression) / seconds


def sent_bytes(run: loop.Run, compression: str) -> float:
    """Of a number for each weight that is trained, as they are sent."""
    trained = [p for p in unwrap(run.model).parameters() if p.requires_grad]
    return sum(p.numel() * (HALF_WORD if compression == "bf16" else p.element_size()) for p in trained)


def messages_of(run: loop.Run, compression: str, sync: SyncSettings, warmup: int) -> Messages:
    """Of these settings. warmup: steps of the learning rate's."""
    members = run.world.local_size if sync.sync_group == "node" else 1
    start = steps_together(sync, warmup, {})
    moved = sent_bytes(run, sync.sync_compression)
    return Messages(sent_bytes(run, compression), moved, sync.sync_every, start, members)


def forecast_lines(
    run: loop.Run,
    rows: Rows,
    asked: ForecastSettings,
    messages: Messages,
    plan_of: Callable[[int], BatchPlan],
    steps_of: Callable[[BatchPlan], tuple[int, int]],
    memory: float,
    stop: StopPoll,
) -> list[str]:
    """What is said of all numbers of processes that are asked for. All ranks.

    plan_of, steps_of: for a number of processes; see `forecast`. memory: bytes that a process takes here.
    """
    here, plans = rate_here(run), [plan_of(number) for number in asked.processes or []]
    owns = own_seconds(run, rows, plans, stop)
    if stop.agreed:
        return []
    given = None if asked.link_gbit is None else asked.link_gbit * BYTES_OF_GBIT
    rate = min(filter(None, (here, given)))
    more = sent_bytes(run, "none") * (run.world.size == 1)  # where gradients are summed
    of_groups = 2 * sent_bytes(run, "none") * (messages.every > 1 and run.exchange is None)
    lines = [
        replace(
            forecast(plan, steps_of(plan), own, messages, rate),
            memory=memory + more * (plan.processes > 1) + of_groups * (plan.processes > messages.members),
        )
        for plan, own in zip(plans, owns)
    ]
    link = f"{rate / BYTES_OF_GBIT:.3g} Gbit/s" + " (measured here)" * (rate == here)
    exchange = f", {messages.moved / MB:,.1f} MB at an exchange," * (messages.every > 1)
    return [
        f"Forecast without validations, for {messages.gradients / MB:,.1f} MB of gradients a step{exchange}"
        f" over {link}, where a process's own part of a step takes {owns[0]:.3g} s:",
        HEAD,
        *map(str, lines),
    ]
