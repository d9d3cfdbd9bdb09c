"""`--dry-run`: everything but training, and what the run would cost in time, memory and disk."""

import shutil
import sys
import time
from dataclasses import replace
from itertools import islice

import torch

from histocc.runtime.device import synchronize
from histocc.runtime.files import folder_above
from histocc.runtime.log import duration
from histocc.runtime.parallel import unwrap
from histocc.trainer import loop
from histocc.trainer.batches import BatchLoader, widest
from histocc.trainer.config import TrainConfig

STEPS = 3  # that are measured, after one that is not
VALIDATION_BATCHES = 2
GB = 1e9


def estimate(
    args: TrainConfig,
    run: loop.Run,
    loaders: dict[str, BatchLoader],
    start: int,
    fitted_before: str,
) -> None:
    """Takes some steps that lead nowhere, says what the run would take, and leaves nothing but the prepared
    data. All ranks.

    Args:
        start: steps done.
        fitted_before: what would be fitted before the first step.
    """
    world, gpu, loader = run.world, run.world.device.type == "cuda", loaders["train"]
    if gpu:  # what the search for the batch size has tried does not count
        torch.cuda.reset_peak_memory_stats(world.device)

    # Steps over batches of the epoch; the weights that they change are thrown away.
    silent = replace(
        run, seed=0, total_steps=None, stop_step=None, log_interval=None, save_interval=None, epoch_name=""
    )
    step_seconds, taken = 0.0, 0
    for first_batch, steps in ((0, 1), (min(1, loader.plan.steps_per_epoch - 1), STEPS)):  # the first is slow
        batches = islice(loader.at(0, first_batch), steps * loader.plan.micro_batches(0))
        state, started = loop.State(), time.perf_counter()
        loop.train_one_epoch(silent, batches, state)
        synchronize(world.device)
        step_seconds, taken = (time.perf_counter() - started) / max(state.step, 1), state.step

    # A micro-batch as wide as the longest row: what takes the most memory may come late in an epoch.
    rows = -(-loader.plan.global_batch_size // (world.size * loader.plan.micro_batches(0)))
    for _ in range(2):
        batch = loop.to_device(widest(loader.dataset.rows, rows), world.device)
        loop.forward_backward(run.model, run.task, batch, run.number_format)
    run.model.zero_grad(set_to_none=True)

    # A validation.
    validation_seconds, val_loader = 0.0, loaders.get("val")
    if val_loader is not None:
        batches, started = min(VALIDATION_BATCHES, len(val_loader)), time.perf_counter()
        part = islice(val_loader, batches)
        loop.evaluate(run.model, part, run.task, world, run.number_format, run.stop)
        synchronize(world.device)
        validation_seconds = (time.perf_counter() - started) / batches * len(val_loader)

    # What that comes to, for the slowest process.
    step_seconds, validation_seconds = (
        max(world.gather(seconds)) for seconds in (step_seconds, validation_seconds)
    )
    peak = max(world.gather(peak_memory(world.device)))
    last = run.last_step or 0
    every = args.eval_interval
    left, validations = last - start, last // every - start // every + (last % every > 0)
    validations *= val_loader is not None
    of_steps, of_validations = left * step_seconds, validations * validation_seconds
    size = checkpoint_bytes(unwrap(run.model))
    kept = min(args.keep_checkpoints, left // args.save_interval) + 2
    kept += args.num_epochs if args.save_each_epoch else 0
    folder = args.save_path
    free = world.run_on_main("free space", lambda: shutil.disk_usage(folder_above(folder)).free)
    of_device = (
        " (CPU) in these steps; a long run holds two to three times that, freed but kept for other sizes"
    )
    if gpu:
        total = torch.cuda.get_device_properties(world.device).total_memory
        of_device = f" of {total / GB:.0f} GB of its GPU"
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
    ]
    continues = f"continues from step {start:,}" if start else "starts the run"
    if kept * size > free:
        lines += [
            f"WARNING: not enough disk space for {kept:,} checkpoints: lower --keep-checkpoints, or choose"
            " another folder",
            f"All else checks out: without --dry-run it {continues}, which may end for lack of space.",
        ]
    else:
        lines.append(f"Everything checks out: without --dry-run it {continues}.")
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


def checkpoint_bytes(raw_model: torch.nn.Module) -> int:
    """Of the weights, and of the two moments of what is trained."""
    weights = sum(
        p.numel() * p.element_size() for name, p in raw_model.named_parameters() if "trained_" not in name
    )
    return weights + sum(2 * p.numel() * p.element_size() for p in raw_model.parameters() if p.requires_grad)
