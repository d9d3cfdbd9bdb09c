"""What is summed up between two rows of the log, and how long it took."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from histocc.runtime.device import DeviceClock
from histocc.runtime.parallel import StragglerTimer
from histocc.runtime.world import World

FLOPS = " flops"  # beside the names of losses among the sums of an open step


def as_int(count: float) -> float:
    """An int where it is one: a sum of weights usually is."""
    return int(count) if float(count).is_integer() else count


class Meter:
    """Sums since the last row of the log, on this rank; and what the run has seen so far, over all ranks.

    matmul_rate: measures how fast this rank's device multiplies matrices, in floating point operations per
    second; called once, on all ranks at the same time, and its time does not count. None where nobody asks
    for the share of it that the model has.
    """

    def __init__(
        self,
        samples: float = 0,
        state: dict[str, Any] | None = None,
        peers: StragglerTimer | None = None,
        device: torch.device | None = None,
        matmul_rate: Callable[[], float] | None = None,
    ):
        self.samples = samples  # samples of all ranks since the run began
        self.sums: dict[str, Tensor | float] = dict(state["sums"]) if state else {}
        self.count: Tensor | float = state["count"] if state else 0  # samples of all ranks since the last row
        self.grad_norm: Tensor | float | None = state.get("grad_norm") if state else None
        self.skipped: Tensor | float = state.get("skipped", 0) if state else 0  # steps since the last row
        self.pending: dict[str, Tensor | float] = {}  # sums of the step that is not finished
        # waits for other ranks, and for data since the last row
        self.peers = peers or StragglerTimer()
        self.data = DeviceClock(device)
        self.data.seconds = state["seconds_data"] if state else 0.0
        self.matmul_rate = matmul_rate
        self.all_matmul_rates = 0.0  # sum over all ranks, once it is measured
        self.restart_clock()

    def restart_clock(self) -> None:
        self.timed_from = time.perf_counter()
        self.flops = 0.0  # of the steps since then
        self.timed_samples = self.samples
        self.timed_data = self.data.seconds
        self.timed_peers = self.peers.seconds

    def state(self) -> dict[str, Any]:
        return {
            "sums": {name: float(value) for name, value in self.sums.items()},
            "count": as_int(float(self.count)),
            "seconds_data": self.data.seconds,
            "skipped": int(self.skipped),
            "grad_norm": None if self.grad_norm is None else float(self.grad_norm),
        }

    def snapshot(self) -> tuple[Any, ...]:
        return dict(self.sums), self.count, self.data.seconds, self.grad_norm, self.skipped

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        self.sums, self.count, self.data.seconds, self.grad_norm, self.skipped = snapshot

    def time_data(self, fetch: Callable[[], Any]) -> Any:
        """What `fetch` returns; its time counts as waiting for data, on a GPU where that had nothing else to
        do.
        """
        started = self.data.now()
        found = fetch()
        self.data.add(started, self.data.now())
        return found

    def untimed(self, work: Callable[[], object]) -> None:
        """Does what is no part of the training: its time does not count."""
        started = time.perf_counter()
        work()
        self.timed_from += time.perf_counter() - started

    def add(self, sums: dict[str, Tensor]) -> None:
        for name, value in sums.items():  # float64 and on the device: no host wait, no rounding that grows
            self.pending[name] = self.pending.get(name, 0.0) + value.detach().double()

    def add_flops(self, task: Any, batch: Any) -> None:
        """What a task with a method `flops` says of a micro-batch."""
        count = getattr(task, "flops", None)
        if count is not None:
            self.pending[FLOPS] = self.pending.get(FLOPS, 0.0) + count(batch)

    def discard_step(self) -> None:
        """Forgets the open sums."""
        self.pending = {}

    def add_step(self, samples: float, grad_norm: Tensor, done: Tensor, bad: Tensor) -> None:
        """Takes the open sums in, unless the step was not `done`: its sums are no figures. No wait for the
        device. samples: of the step, of all ranks.
        """
        self.samples = as_int(self.samples + samples)
        self.count = self.count + samples * done.double()
        self.skipped = self.skipped + bad.double()
        self.grad_norm = grad_norm if self.grad_norm is None else torch.where(done, grad_norm, self.grad_norm)
        self.flops += float(self.pending.pop(FLOPS, 0.0))  # a step that was skipped was worked out, too
        for name, value in self.pending.items():
            self.sums[name] = self.sums.get(name, 0.0) + torch.where(done, value, 0.0)
        self.pending = {}

    def row(self, world: World) -> dict[str, Any]:
        """Values for the log since the last row, over all ranks; starts the next row. All ranks."""
        self.data.synchronize()
        self.peers.synchronize()
        elapsed = time.perf_counter() - self.timed_from
        waited = self.data.seconds - self.timed_data
        total = world.sum_over_ranks(
            {
                **self.sums,
                "_data": self.data.seconds,
                "_waited": waited,
                "_peers": self.peers.seconds - self.timed_peers,
                "_flops": self.flops,
            }
        )
        count = float(self.count)
        row = {f"train_{name}": total[name] / count for name in self.sums if count}
        shares = {
            name: min(1.0, total[name] / world.size / max(elapsed, 1e-9)) for name in ("_waited", "_peers")
        }
        row |= {
            "samples": self.samples,
            "seconds_data": total["_data"] / world.size,
            "samples_per_sec": (self.samples - self.timed_samples) / max(elapsed, 1e-9),
            "data_share": shares["_waited"],
            "peer_share": shares["_peers"] if self.peers.measures else None,
            "grad_norm": None if self.grad_norm is None or not count else float(self.grad_norm),
            "skipped_steps": int(self.skipped),
            **self._flops_of(total["_flops"] / max(elapsed, 1e-9), world),
        }
        self.sums, self.count, self.data.seconds, self.skipped = {}, 0, 0.0, 0
        self.restart_clock()
        return row

    def _flops_of(self, rate: float, world: World) -> dict[str, float | None]:
        """Columns of the log for operations per second over all ranks, where they are known. All ranks, with
        the same `rate` but for the clock: measures that of matrix products where it is not yet known.
        """
        known = math.isfinite(rate) and rate > 0
        if known and self.matmul_rate is not None:
            measured, self.matmul_rate = self.matmul_rate(), None
            self.all_matmul_rates = world.sum_over_ranks({"rate": measured})["rate"]
        share = rate / self.all_matmul_rates if known and self.all_matmul_rates else None
        return {"model_flops_per_sec": rate if known else None, "mfu": share}
