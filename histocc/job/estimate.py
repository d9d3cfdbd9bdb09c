"""`--dry-run`: everything but training, and what the run would cost in time, memory and disk."""

import argparse
import resource
import shutil
import time
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from histocc.data.arrays import PreparedData
from histocc.formatter import BlockyFormatter
from histocc.job.train import Setup, advice_on_memory, run_evaluation, run_training, set_up, trial_batch
from histocc.runtime.console import duration
from histocc.runtime.outputs import folder_above
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World
from histocc.text import padded_width
from histocc.trainer import loop
from histocc.trainer.hooks import Callbacks, Intervals, StepHooks, Steps, StopPoll
from histocc.trainer.meter import Meter

STEPS = 3  # that are measured, after one that is not
VALIDATION_BATCHES = 2
GB = 1e9


def run_as_asked(
    args: argparse.Namespace, world: World, data: PreparedData, formatter: BlockyFormatter, files: list[str]
) -> None:
    """What the arguments ask for once the data are prepared: nothing more, an evaluation, a dry run, or the
    run. All ranks.
    """
    if args.prepare_only:
        return
    if args.eval_only:
        return run_evaluation(args, world, data, formatter)
    if args.dry_run:
        return dry_run(args, world, data, formatter, files)
    run_training(args, world, data, formatter, files)


def dry_run(
    args: argparse.Namespace, world: World, data: PreparedData, formatter: BlockyFormatter, files: list[str]
) -> None:
    """Takes some steps that lead nowhere, says what the whole would take, and leaves nothing but the prepared
    data. All ranks.

    Raises UserError and TrainingError as the run itself would.
    """
    with advice_on_memory(args, world):
        setup = set_up(args, world, data, formatter, files)
        if setup is None:
            return
        if world.device.type == "cuda":  # what the search for the batch size has tried does not count
            torch.cuda.reset_peak_memory_stats(world.device)
        stop = StopPoll(world.stop_agreed)
        step_seconds, taken = _seconds_per_step(setup, world, stop)
        if not stop.agreed:
            _longest_texts(args, setup, data, formatter, world)
        validation_seconds = _validation_seconds(setup, formatter, world, stop)
        if stop.agreed:
            raise Stopped
    steps = setup.schedule.stop - setup.step
    last, each = setup.schedule.stop, args.eval_interval
    validations = last // each - setup.step // each + (last % each > 0) if "val" in setup.loaders else 0
    peaks = world.gather(_peak_memory(world))
    size, kept = checkpoint_bytes(setup), min(args.keep_checkpoints, steps // args.save_interval) + 2
    each_epoch = args.num_epochs if args.save_each_epoch else 0
    free = world.run_on_main("free space", lambda: _free_space(args.save_path))
    total = steps * step_seconds + validations * validation_seconds
    lines = [
        (
            f"Dry run: {taken} step{'s' * (taken > 1)} took {taken * step_seconds:.2f} s; nothing was trained"
            " or saved."
        ),
        f"  Steps:       {steps:,} of {step_seconds:.3g} s: {duration(steps * step_seconds)}",
        (
            f"  Validations: {validations:,} of {validation_seconds:.3g} s:"
            f" {duration(validations * validation_seconds)}"
        ),
        f"  Time:        about {duration(total)} in all"
        + ", and before it the fit of the n-grams, not measured" * setup.schedule.fitted
        + (f", in parts of {args.stop_after:g} minutes (--stop-after)" if args.stop_after else ""),
        f"  Memory:      {max(peaks) / GB:.1f} GB at most per process" + _of_device(world),
        (
            f"  Checkpoints: {size / GB:.2f} GB each, up to {kept + each_epoch:,} files; {free / GB:.1f} GB"
            " are free"
        ),
    ]
    if (kept + each_epoch) * size > free:
        lines.append(
            f"WARNING: not enough disk space for {kept + each_epoch:,} checkpoints: lower"
            " --keep-checkpoints, or choose another folder"
        )
    lines.append(
        "Everything checks out: without --dry-run it starts the run."
        if setup.resumed is None
        else f"Everything checks out: without --dry-run it continues from step {setup.step:,}."
    )
    world.print("\n".join(lines))


def _seconds_per_step(setup: Setup, world: World, stop: StopPoll) -> tuple[float, int]:
    """(mean of some steps over batches of the epoch, those of the slowest process; how many). The weights
    that they change are thrown away.
    """

    def take(steps: int, first_batch: int) -> tuple[float, int]:
        batches = setup.loaders["train"].at(0, first_batch)
        callbacks = Callbacks(stop=stop)
        hooks = StepHooks(world, Meter(), Steps(steps), Intervals(log=None), callbacks)
        started = time.perf_counter()
        done = loop.train_one_epoch(replace(setup.run, seed=0), batches, hooks)
        _finish(world)
        return (time.perf_counter() - started) / max(done, 1), done

    take(1, 0)  # the first one is slow: it takes memory and chooses kernels
    return max(world.gather(take(STEPS, min(1, setup.plan.steps_per_epoch - 1))))


def _longest_texts(
    args: argparse.Namespace, setup: Setup, data: PreparedData, formatter: BlockyFormatter, world: World
) -> None:
    """Two passes with a micro-batch that is as wide as the longest text asks for: what takes the most memory
    may come late in an epoch.
    """
    longest = int(np.diff(data.train.offsets).max()) + max(map(len, data.languages)) + len("[SEP]")
    width = (
        padded_width(min(longest, setup.config["max_len"] - 2), setup.config["max_len"])
        if setup.config["memory_mask"]
        else setup.config["max_len"]
    )
    rows = -(-setup.plan.global_batch_size // (world.size * setup.plan.micro_batches(0)))
    for _ in range(2):
        batch = trial_batch(data, formatter, setup.config, rows, width, world)
        loop.forward_backward(setup.run.model, setup.run.task, batch, setup.run.precision)
    setup.run.model.zero_grad(set_to_none=True)


def _validation_seconds(setup: Setup, formatter: BlockyFormatter, world: World, stop: StopPoll) -> float:
    loader = setup.loaders.get("val")
    if loader is None:
        return 0.0
    batches = min(VALIDATION_BATCHES, len(loader))
    started = time.perf_counter()
    loop.evaluate(setup.run.model, islice(loader, batches), setup.run.task, world, setup.run.precision, stop)
    _finish(world)
    return max(world.gather((time.perf_counter() - started) / batches * len(loader)))


def _finish(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _peak_memory(world: World) -> int:
    """Bytes: on a GPU what torch has reserved there, else of the process."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_reserved(world.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _of_device(world: World) -> str:
    if world.device.type != "cuda":
        return (
            " (CPU) in these steps; a long run holds two to three times that, freed but kept for other sizes"
        )
    return f" of {torch.cuda.get_device_properties(world.device).total_memory / GB:.0f} GB of its GPU"


def checkpoint_bytes(setup: Setup) -> int:
    """Of the weights, and of the two moments of what is trained."""
    weights = sum(
        p.numel() * p.element_size()
        for name, p in setup.raw_model.named_parameters()
        if "trained_" not in name
    )
    moments = sum(2 * p.numel() * p.element_size() for p in setup.raw_model.parameters() if p.requires_grad)
    return weights + moments


def _free_space(folder: str) -> int:
    return shutil.disk_usage(folder_above(folder)).free
