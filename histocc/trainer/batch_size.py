"""How many samples go through the model at once: `--batch-size auto`, and what to do if they do not fit into
memory.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from histocc.runtime.device import synchronize
from histocc.runtime.errors import is_out_of_memory, memory_error_ends_with
from histocc.runtime.world import World
from histocc.trainer.config import TrainConfig

# first size tried; what a larger one must gain on a CPU; share of a GPU's memory that may fill
FIRST = 8
GAIN = 1.05
FULL = 0.85


def find_batch_size(run: Callable[[int], None], most: int, world: World, still_to_come: int = 0) -> int:
    """The largest number of samples, up to `most`, that fits into the memory of every GPU; on CPUs the
    fastest one. All ranks.

    Args:
        run: takes so many samples through the model, forward and backward: 8, 16, 32 … and `most`.
        still_to_come: bytes that a step needs besides.
    """
    device, gpu = world.device, world.device.type == "cuda"
    best, fastest = 1, 0.0
    for size in [size for size in (FIRST << i for i in range(12)) if size < most] + [most]:
        if gpu:
            torch.cuda.empty_cache()  # what smaller sizes left behind does not count
            torch.cuda.reset_peak_memory_stats(device)
        seconds, fits = float("inf"), True
        try:
            for _ in range(2):
                started = time.perf_counter()
                run(size)
                synchronize(device)
                seconds = min(seconds, time.perf_counter() - started)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        if gpu and fits:
            needed = torch.cuda.max_memory_allocated(device) + still_to_come
            fits = needed < FULL * torch.cuda.get_device_properties(device).total_memory
        if not all(world.gather(fits)):
            break
        rate = size / sum(world.gather(seconds))
        if not gpu and rate < GAIN * fastest:
            break
        best, fastest = size, rate
    if gpu:
        torch.cuda.empty_cache()
    return best


def place_of(world: World) -> str:
    return (
        f"{f'GPU {world.local_rank}' if world.device.type == 'cuda' else 'this machine'} (rank {world.rank})"
    )


def memory_advice(
    args: TrainConfig, world: World, smaller_model: str = "a smaller model"
) -> AbstractContextManager[None]:
    """Running out of memory inside ends with flags for the same total batch, and so the same result, with
    less at once.
    """
    rows, total = args.samples_at_once, args.total_batch(world.size)
    if rows < 2:
        return memory_error_ends_with(
            f", on {place_of(world)}, with one sample at once: take {smaller_model}, or --bf16"
        )
    per_process, rest = divmod(total, world.size)
    if rest:
        flags = f"--batch-size {rows // 2} --global-batch-size {total}"
    else:
        smaller = max(size for size in range(1, rows // 2 + 1) if per_process % size == 0)
        flags = f"--batch-size {smaller} --accumulate-steps {per_process // smaller}"
        flags += " without --global-batch-size" * (args.global_batch_size is not None)
    return memory_error_ends_with(
        f", on {place_of(world)} with --batch-size {rows}. Give {flags}: the total batch stays {total}, and"
        " so does the result. --batch-size auto finds what fits; --bf16 needs less. The same command then"
        f" continues from the last checkpoint. If no batch size fits, the model is too large:"
        f" {smaller_model}, or --parallel fsdp"
    )


def model_memory_advice(
    parallel: str, float64: bool, world: World, smaller_model: str = "a smaller model"
) -> AbstractContextManager[None]:
    """The same if the model itself or its optimizer does not fit, whatever the batch size."""
    others = [smaller_model]
    if world.size > 1 and parallel != "fsdp":
        others.append(f"--parallel fsdp, with which the {world.size} processes share its weights")
    elif world.size == 1 and world.device.type == "cuda":
        others.append("several GPUs with --parallel fsdp")
    if float64:
        others.append("no --float64")
    return memory_error_ends_with(
        f", on {place_of(world)}, for the model itself, whatever the batch size. Take {', or '.join(others)}"
    )
