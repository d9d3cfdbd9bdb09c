"""`--dry-run`: everything but training, and what the run would cost in time, memory and disk."""

import contextlib
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
from histocc.runtime.world import World
from histocc.trainer import loop
from histocc.trainer.batches import BatchLoader, widest
from histocc.trainer.settings import RunSettings

STEPS = 3  # that are measured, after one that is not
VALIDATION_BATCHES = 2
GB = 1e9


def estimate(
    settings: RunSettings,
    run: loop.Run,
    loaders: dict[str, BatchLoader],
    start: int,
    fitted_before: str,
) -> None:
    """Takes some steps that lead nowhere, says what the whole would take, and leaves nothing but the prepared
    data.

    start: steps done; fitted_before: what would be fitted before the first step. All ranks.
    """
    world = run.world
    if world.device.type == "cuda":  # what the search for the batch size has tried does not count
        torch.cuda.reset_peak_memory_stats(world.device)
    step_seconds, taken = _seconds_per_step(run, loaders["train"])
    _widest_rows(run, loaders["train"])
    validation_seconds = _validation_seconds(run, loaders.get("val"))
    peaks = world.gather(_peak_memory(world))
    last, intervals = run.last_step or 0, settings.intervals
    each = intervals.eval_interval
    left, validations = last - start, last // each - start // each + (last % each > 0)
    validations *= "val" in loaders
    size = checkpoint_bytes(unwrap(run.model))
    kept = min(settings.folder.keep_checkpoints, left // intervals.save_interval) + 2
    kept += settings.schedule.num_epochs if intervals.save_each_epoch else 0
    free = world.run_on_main("free space", lambda: _free_space(settings.folder.save_path))
    total = left * step_seconds + validations * validation_seconds
    lines = [
        f"Dry run: {taken} step{'s' * (taken > 1)} took {taken * step_seconds:.2f} s; nothing was trained or"
        " saved.",
        f"  Steps:       {left:,} of {step_seconds:.3g} s: {duration(left * step_seconds)}",
        f"  Validations: {validations:,} of {validation_seconds:.3g} s:"
        f" {duration(validations * validation_seconds)}",
        f"  Time:        about {duration(total)} in all"
        + f", and before it the fit of {fitted_before}, not measured" * bool(fitted_before)
        + (f", in parts of {settings.stop_after:g} minutes (--stop-after)" if settings.stop_after else ""),
        f"  Memory:      {max(peaks) / GB:.1f} GB at most per process" + _of_device(world),
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


def _seconds_per_step(run: loop.Run, loader: BatchLoader) -> tuple[float, int]:
    """(mean of some steps over batches of the epoch, those of the slowest process; how many). The weights
    that they change are thrown away.
    """

    def take(steps: int, first_batch: int) -> tuple[float, int]:
        batches = loader.at(0, first_batch)
        silent = replace(
            run,
            seed=0,
            total_steps=None,
            stop_step=None,
            log_interval=None,
            save_interval=None,
            epoch_name="",
        )
        state, started = loop.State(), time.perf_counter()
        loop.train_one_epoch(silent, islice(batches, steps * loader.plan.micro_batches(0)), state)
        synchronize(run.world.device)
        return (time.perf_counter() - started) / max(state.step, 1), state.step

    take(1, 0)  # the first one is slow: it takes memory and chooses kernels
    return max(run.world.gather(take(STEPS, min(1, loader.plan.steps_per_epoch - 1))))


def _widest_rows(run: loop.Run, loader: BatchLoader) -> None:
    """Two passes with a micro-batch that is as wide as the longest row asks for: what takes the most memory
    may come late in an epoch.
    """
    plan, world = loader.plan, run.world
    rows = -(-plan.global_batch_size // (world.size * plan.micro_batches(0)))
    for _ in range(2):
        batch = loop.to_device(widest(loader.dataset.rows, rows, limit=False), world.device)
        loop.forward_backward(run.model, run.task, batch, run.number_format)
    run.model.zero_grad(set_to_none=True)


def _validation_seconds(run: loop.Run, loader: BatchLoader | None) -> float:
    if loader is None:
        return 0.0
    batches = min(VALIDATION_BATCHES, len(loader))
    started = time.perf_counter()
    loop.evaluate(run.model, islice(loader, batches), run.task, run.world, run.number_format, run.stop)
    synchronize(run.world.device)
    return max(run.world.gather((time.perf_counter() - started) / batches * len(loader)))


def _peak_memory(world: World) -> int:
    """Bytes: on a GPU what torch has reserved there, else of the process."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_reserved(world.device)
    with contextlib.suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 0  # Windows


def _of_device(world: World) -> str:
    if world.device.type != "cuda":
        return (
            " (CPU) in these steps; a long run holds two to three times that, freed but kept for other sizes"
        )
    return f" of {torch.cuda.get_device_properties(world.device).total_memory / GB:.0f} GB of its GPU"


def checkpoint_bytes(raw_model: torch.nn.Module) -> int:
    """Of the weights, and of the two moments of what is trained."""
    weights = sum(
        p.numel() * p.element_size() for name, p in raw_model.named_parameters() if "trained_" not in name
    )
    moments = sum(2 * p.numel() * p.element_size() for p in raw_model.parameters() if p.requires_grad)
    return weights + moments


def _free_space(folder: str) -> int:
    return shutil.disk_usage(folder_above(folder)).free
