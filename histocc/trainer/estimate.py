"""The resources that a run takes: `--batch-size auto`, `--dry-run`, and advice if memory is short."""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice

import torch
from torch import nn

from histocc.runtime.device import Precision, synchronize
from histocc.runtime.errors import is_out_of_memory, memory_error_ends_with
from histocc.runtime.log import duration
from histocc.runtime.world import World
from histocc.trainer import loop
from histocc.trainer.batches import BatchLoader, Rows, widest
from histocc.trainer.config import StepFlags

STEPS = 3  # steps measured in a dry run, after one that is not measured
FIRST_SIZE, MEMORY_SHARE = 8, 0.85  # first batch size tried, usable share of a GPU's free memory


def choose_batch_size(
    flags: StepFlags, world: World, model: nn.Module, task: loop.Task, rows: Rows, precision: Precision
) -> dict[str, int]:
    """Return the batch flags, by name, for --batch-size auto: as many samples as fit into every GPU. All
    ranks.
    """

    def forward_backward(size: int) -> None:
        batch = loop.to_device(widest(rows, size), world.device)
        loop.forward_backward(model, task, batch, precision)

    total = flags.total_batch(world.size)
    size = min(-(-total // world.size), len(rows))
    if world.device.type == "cuda":
        trained = sum(p.numel() * p.element_size() for p in model.train().parameters() if p.requires_grad)
        size = find_batch_size(forward_backward, size, world, 3 * trained)  # AdamW's means, DDP's buckets
        model.zero_grad(set_to_none=True)
    else:
        size = min(size, flags.samples_at_once)
    world.print(f"Batch size: {size} at once per process, chosen automatically; total batch {total}")
    return {"batch_size": size, "global_batch_size": total, "accumulate_steps": 1}


def find_batch_size(run: Callable[[int], None], most: int, world: World, still_to_come: int = 0) -> int:
    """Return the largest of 8, 16, 32 … and `most` samples that fits into the memory of every GPU. All ranks.
    run: takes a number of samples forward and backward. still_to_come: further bytes that a step needs.
    """
    best = 1
    for size in [size for size in (FIRST_SIZE << i for i in range(12)) if size < most] + [most]:
        torch.cuda.empty_cache()  # memory left by smaller sizes does not count
        torch.cuda.reset_peak_memory_stats(world.device)
        left_by_others = torch.cuda.mem_get_info(world.device)[0] + torch.cuda.memory_reserved(world.device)
        fits = False
        try:
            run(size)
            needed = torch.cuda.max_memory_allocated(world.device) + still_to_come
            fits = needed < MEMORY_SHARE * left_by_others
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        if not all(world.gather(fits)):
            break
        best = size
    return best


def memory_advice(flags: StepFlags, world: World) -> AbstractContextManager[None]:
    """Return a context in which lack of memory ends with flags for the same total batch in smaller parts."""
    rows, advice = flags.samples_at_once, "Take"
    if rows > 1:
        parts = next(n for n in range(2, rows + 1) if rows % n == 0)
        words = f"--batch-size {rows // parts} --accumulate-steps {parts * flags.accumulate_steps}"
        if flags.global_batch_size:
            words = f"--batch-size {rows // 2} --global-batch-size {flags.global_batch_size}"
        same = f"the total batch stays {flags.total_batch(world.size)}, and so does the result"
        advice = f"Give {words}: {same}; the run then continues. If no batch size fits, take"
    smaller = "a smaller model, --bf16, or --parallel fsdp on several GPUs"
    return memory_error_ends_with(f" (rank {world.rank}) with --batch-size {rows}. {advice} {smaller}")


def seconds_of_step(run: loop.Run, loader: BatchLoader) -> float:
    """Measure the time of a step, with steps over batches of the epoch that change the weights. All ranks."""
    nothing = dict.fromkeys(("stop_step", "log_interval", "save_interval"))
    silent, seconds, plan = replace(run, seed=0, epoch_name="", **nothing), 0.0, loader.plan
    for first_batch, steps in ((0, 1), (min(1, plan.steps_per_epoch - 1), STEPS)):  # the first is slow
        batches = islice(loader.at(0, first_batch), steps * plan.micro_batches(0))
        state, started = loop.State(), time.perf_counter()
        loop.train_one_epoch(silent, batches, state, 0)
        synchronize(run.world.device)
        seconds = (time.perf_counter() - started) / max(state.step, 1)
    return seconds


def estimate(run: loop.Run, loader: BatchLoader, start: int) -> None:
    """Take trial steps and print the time and memory of a run from step `start` (--dry-run). All ranks."""
    world, plan = run.world, loader.plan
    if world.device.type == "cuda":  # the search for the batch size does not count
        torch.cuda.reset_peak_memory_stats(world.device)

    seconds = seconds_of_step(run, loader)

    # The batch that takes the most memory may come late in an epoch.
    rows = -(-plan.global_batch_size // (world.size * plan.micro_batches(0)))
    batch = loop.to_device(widest(loader.dataset.rows, rows), world.device)
    loop.forward_backward(run.model, run.task, batch, run.precision)
    run.model.zero_grad(set_to_none=True)

    peak = 0  # bytes: torch's reserve on a GPU, else the process's peak, if the system reports it
    if world.device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(world.device)
    elif sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    seconds, peak = map(max, zip(*world.gather((seconds, peak))))
    left, end = (run.stop_step or 0) - start, f"continues from step {start:,}" if start else "starts the run"
    steps = f"{left:,} of {seconds:.3g} s: {duration(left * seconds)}, and the validations"
    world.print(
        "Dry run: nothing was trained or saved.\n"
        f"  Steps:  {steps if left else 'none after the fit, see above'}\n"
        f"  Memory: {peak / 1e9:.1f} GB at most per process\n"
        f"Everything checks out: without --dry-run it {end}."
    )
