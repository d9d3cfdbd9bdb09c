"""What a run takes: `--batch-size auto`, `--dry-run`, and what to type if memory is short."""

import shutil
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
from histocc.runtime.files import folder_above
from histocc.runtime.log import duration
from histocc.runtime.parallel import unwrap
from histocc.runtime.world import World
from histocc.trainer import loop
from histocc.trainer.batches import BatchLoader, BatchPlan, MicroBatches, Rows, widest
from histocc.trainer.config import TrainConfig

STEPS = 3  # that a dry run measures, after one that it does not
VALIDATION_BATCHES = 2
GB = 1e9
# first batch size tried; what a larger one must gain on a CPU; share of a GPU's memory that may fill
FIRST, GAIN, FULL = 8, 1.05, 0.85


def choose_batch_size(
    args: TrainConfig, world: World, model: nn.Module, task: loop.Task, rows: Rows, precision: Precision
) -> TrainConfig:
    """--batch-size auto: a size that was tried; the total batch stays that of the default. All ranks."""

    def forward_backward(size: int) -> None:  # a GPU must hold the widest
        if world.device.type == "cuda":
            batch = widest(rows, size)
        else:
            batch = MicroBatches(rows, BatchPlan(len(rows), size), 0, 0)[0, 0][0]
        loop.forward_backward(model, task, loop.to_device(batch, world.device), precision)

    total = args.total_batch(world.size)
    trained = sum(p.numel() * p.element_size() for p in model.train().parameters() if p.requires_grad)
    most = min(-(-total // world.size), len(rows))
    size = find_batch_size(forward_backward, most, world, 3 * trained)  # AdamW's two means, DDP's buckets
    model.zero_grad(set_to_none=True)
    world.print(f"Batch size: {size} samples at once per process, chosen automatically; total batch {total}")
    return args.decide(batch_size=size, global_batch_size=total, accumulate_steps=1)


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


def memory_advice(
    args: TrainConfig, world: World, smaller_model: str = "a smaller model", *, of_steps: bool = True
) -> AbstractContextManager[None]:
    """Running out of memory inside ends with what to type: in steps flags for the same total batch, and so
    the same result, with less at once; else what makes the model itself smaller.
    """
    place = "this machine" if world.device.type == "cpu" else f"GPU {world.local_rank}"
    remedies = [smaller_model, "--parallel fsdp on several GPUs" * (args.parallel != "fsdp"), "--bf16"]
    smaller = ", or ".join(filter(None, remedies))
    rows, total = args.samples_at_once, args.total_batch(world.size)
    if not of_steps or rows < 2:
        why = "for the model itself, whatever the batch size" if not of_steps else "with one sample at once"
        return memory_error_ends_with(f", on {place} (rank {world.rank}), {why}: take {smaller}")
    if args.global_batch_size is None and rows % 2 == 0:
        flags = f"--batch-size {rows // 2} --accumulate-steps {2 * args.accumulate_steps}"
    else:
        flags = f"--batch-size {rows // 2} --global-batch-size {total}"
        flags += " without --accumulate-steps" * (args.accumulate_steps > 1)
    return memory_error_ends_with(
        f", on {place} (rank {world.rank}) with --batch-size {rows}. Give {flags}: the total batch stays"
        f" {total}, and so does the result; the same command then continues from the last checkpoint."
        f" --batch-size auto finds what fits. If no batch size fits, the model is too large: {smaller}"
    )


def estimate(
    args: TrainConfig, run: loop.Run, loaders: dict[str, BatchLoader], start: int, fitted_before: str
) -> None:
    """--dry-run: takes some steps that lead nowhere, says what the run would take, and leaves nothing but the
    prepared data. All ranks.

    Args:
        start: steps done.
        fitted_before: what would be fitted before the first step.
    """
    world, gpu, loader = run.world, run.world.device.type == "cuda", loaders["train"]
    if gpu:  # what the search for the batch size has tried does not count
        torch.cuda.reset_peak_memory_stats(world.device)

    # Steps over batches of the epoch; the weights that they change are thrown away. The first is slow.
    silent = replace(
        run, seed=0, total_steps=None, stop_step=None, log_interval=None, save_interval=None, epoch_name=""
    )
    step_seconds, taken = 0.0, 0
    for first_batch, steps in ((0, 1), (min(1, loader.plan.steps_per_epoch - 1), STEPS)):
        batches = islice(loader.at(0, first_batch), steps * loader.plan.micro_batches(0))
        state, started = loop.State(), time.perf_counter()
        loop.train_one_epoch(silent, batches, state)
        synchronize(world.device)
        step_seconds, taken = (time.perf_counter() - started) / max(state.step, 1), state.step

    # What takes the most memory may come late in an epoch.
    rows = -(-loader.plan.global_batch_size // (world.size * loader.plan.micro_batches(0)))
    batch = loop.to_device(widest(loader.dataset.rows, rows), world.device)
    loop.forward_backward(run.model, run.task, batch, run.precision)
    run.model.zero_grad(set_to_none=True)

    validation_seconds, val_loader = 0.0, loaders.get("val")
    if val_loader is not None:
        count, started = min(VALIDATION_BATCHES, len(val_loader)), time.perf_counter()
        part = islice(val_loader, count)
        loop.evaluate(run.model, part, run.task, world, run.precision, run.stop)
        synchronize(world.device)
        validation_seconds = (time.perf_counter() - started) / count * len(val_loader)

    # What that comes to, for the slowest process.
    step_seconds, validation_seconds = map(max, zip(*world.gather((step_seconds, validation_seconds))))
    peak = max(world.gather(peak_memory(world.device)))
    last, every = run.last_step or 0, args.eval_interval
    left = last - start
    validations = (last // every - start // every + (last % every > 0)) * (val_loader is not None)
    of_steps, of_validations = left * step_seconds, validations * validation_seconds
    size = checkpoint_bytes(unwrap(run.model))
    kept = min(args.keep_checkpoints, left // args.save_interval) + 2
    kept += args.num_epochs if args.save_each_epoch else 0
    free = world.run_on_main("free space", lambda: shutil.disk_usage(folder_above(args.save_path)).free)
    of_device = " (CPU) in these steps; a long run holds two to three times that, freed but kept"
    if gpu:
        total = torch.cuda.get_device_properties(world.device).total_memory
        of_device = f" of {total / GB:.0f} GB of its GPU"
    continues = f"continues from step {start:,}" if start else "starts the run"
    end = f"Everything checks out: without --dry-run it {continues}."
    if kept * size > free:
        end = (
            f"WARNING: not enough disk space for {kept:,} checkpoints: lower --keep-checkpoints, or choose"
            f" another folder. All else checks out: without --dry-run it {continues}."
        )
    lines = [
        f"Dry run: {taken} step{'s' * (taken > 1)} took {taken * step_seconds:.2f} s; nothing was trained or"
        " saved.",
        f"  Steps:       {left:,} of {step_seconds:.3g} s: {duration(of_steps)}",
        f"  Validations: {validations:,} of {validation_seconds:.3g} s: {duration(of_validations)}",
        f"  Time:        about {duration(of_steps + of_validations)} in all"
        + f", and before it the fit of {fitted_before}, not measured" * bool(fitted_before)
        + (f", in parts of {args.stop_after:g} minutes (--stop-after)" if args.stop_after else ""),
        f"  Memory:      {peak / GB:.1f} GB at most per process{of_device}",
        f"  Checkpoints: {size / GB:.2f} GB each, up to {kept:,} files; {free / GB:.1f} GB are free",
        end,
    ]
    world.print("\n".join(lines))


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU what torch has reserved there, else of the process; 0 if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def checkpoint_bytes(raw_model: nn.Module) -> int:
    """Of the weights, and of the two moments of what is trained."""
    weights = sum(p.nbytes for name, p in raw_model.named_parameters() if "trained_" not in name)
    return weights + sum(2 * p.nbytes for p in raw_model.parameters() if p.requires_grad)
