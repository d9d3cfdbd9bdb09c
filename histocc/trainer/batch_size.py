"""How many samples go through the model at once: `--batch-size auto`, and what to do where they do not
fit into memory.
"""

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from histocc.runtime.device import synchronize
from histocc.runtime.errors import TrainingError
from histocc.runtime.machine_errors import is_out_of_memory, memory_in_words
from histocc.runtime.world import World

# first size tried; what a larger one must gain on a CPU; share of a GPU's memory that may fill
FIRST = 8
GAIN = 1.05
FULL = 0.85


class AutoBatchSize(int):
    """`--batch-size auto`: the script's default, until the run has found its own."""


@dataclass(frozen=True)
class BatchSettings:
    """Samples of an optimizer step: `batch_size` at most at once per process, `accumulate_steps` times, or
    `global_batch_size` over all processes.
    """

    batch_size: int
    global_batch_size: int | None = None
    accumulate_steps: int = 1

    @property
    def is_open(self) -> bool:
        """Whether the run finds the size itself."""
        return isinstance(self.batch_size, AutoBatchSize)

    def total(self, processes: int) -> int:
        """Samples of an optimizer step over all processes."""
        return self.global_batch_size or int(self.batch_size) * processes * self.accumulate_steps

    def found(self, batch_size: int, processes: int) -> "BatchSettings":
        """The same total with `batch_size` samples at once."""
        return BatchSettings(batch_size, self.total(processes))


def find_batch_size(run: Callable[[int], None], most: int, world: World, still_to_come: int = 0) -> int:
    """The largest number of samples, up to `most`, that fits into the memory of every GPU; on CPUs the
    fastest one. All ranks.

    run(rows): takes so many through the model, forward and backward. The sizes tried are 8, 16, 32 … and
    `most`. still_to_come: bytes that a step needs besides.
    """
    device, found, fastest = world.device, 1, 0.0
    sizes = [size for size in (FIRST << i for i in range(12)) if size < most] + [most]
    for size in sizes:
        seconds, fits = _try(run, size, device, still_to_come)
        if not all(world.gather(fits)):
            break
        if device.type == "cuda":
            found = size
        else:
            rate = size * world.size / world.sum_over_ranks({"seconds": seconds})["seconds"]
            if rate < GAIN * fastest:
                break
            found, fastest = size, rate
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _try(
    run: Callable[[int], None], size: int, device: torch.device, still_to_come: int
) -> tuple[float, bool]:
    """(seconds, whether it fits and on a GPU leaves room for `still_to_come` bytes); the better of two
    times.
    """
    best = float("inf")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what smaller sizes left behind does not count
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):
        started = time.perf_counter()
        try:
            run(size)
            synchronize(device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return best, False
        best = min(best, time.perf_counter() - started)
    if device.type == "cuda":
        return (
            best,
            torch.cuda.max_memory_allocated(device) + still_to_come
            < FULL * torch.cuda.get_device_properties(device).total_memory,
        )
    return best, True


def _where(world: World) -> str:
    place = f"GPU {world.local_rank}" if world.device.type == "cuda" else "this machine"
    return f"{place} (rank {world.rank})"


@contextlib.contextmanager
def memory_advice(
    batch: BatchSettings, world: World, smaller: str = "a smaller model", scaled: bool = False
) -> Generator[None]:
    """Running out of memory ends with what to type instead, said by the process that it happened to.

    smaller: what to take where not even one sample fits; scaled: whether --lr-scaling is given.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        advice = _out_of_memory_advice(batch, world, error, smaller, scaled)
        raise TrainingError(advice, said_by_all=True) from None


@contextlib.contextmanager
def model_memory_advice(
    parallel: str, float64: bool, world: World, smaller: str = "a smaller model"
) -> Generator[None]:
    """The same where the model itself or its optimizer does not fit, whatever the batch size."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        advice = _model_advice(parallel, float64, world, error, smaller)
        raise TrainingError(advice, said_by_all=True) from None


def _model_advice(parallel: str, float64: bool, world: World, error: BaseException, smaller: str) -> str:
    others = [smaller]
    if world.size > 1 and parallel != "fsdp":
        others.append(f"--parallel fsdp, with which the {world.size} processes share its weights")
    elif world.size == 1 and world.device.type == "cuda":
        others.append("several GPUs with --parallel fsdp")
    if float64:
        others.append("no --float64")
    return (
        f"{_where(world)} has not enough memory for the model itself, whatever the batch size: "
        f"{memory_in_words(error)}. Take "
        f"{', or '.join(others)}"
    )


def _out_of_memory_advice(
    batch: BatchSettings, world: World, error: BaseException, smaller_model: str, scaled: bool
) -> str:
    """The same total batch, and so the same result, with less at once."""
    rows, total = int(batch.batch_size), batch.total(world.size)
    smaller = rows // 2
    if smaller == 0:
        return (
            f"{memory_in_words(error)}, on {_where(world)}, with one sample at once: take {smaller_model}, "
            "or --bf16"
        )
    per_process, rest = divmod(total, world.size)
    if batch.global_batch_size is None and rows % 2 == 0:
        same = f"--accumulate-steps {batch.accumulate_steps * 2}"
    elif not rest and (scaled or batch.accumulate_steps > 1):  # which --global-batch-size does not go with
        smaller = max(size for size in range(1, smaller + 1) if per_process % size == 0)
        same = f"--accumulate-steps {per_process // smaller}"
    else:
        same = f"--global-batch-size {total}"
    return (
        f"{memory_in_words(error)}, on {_where(world)} with --batch-size {rows}. Give --batch-size "
        f"{smaller} {same}: the total batch stays {total}, and so "
        "does the result. --batch-size auto finds what fits; --bf16 needs less. The same command then "
        "continues from the last checkpoint. "
        f"Where no batch size fits, the model is too large: {smaller_model}, or --parallel fsdp"
    )
