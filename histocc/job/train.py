"""A training job from prepared data to its last checkpoint: what `finetune.py` and `train_mixer.py` have in
common.
"""

import contextlib
import os
from dataclasses import replace
from functools import partial

import torch

from histocc.data.arrays import PreparedData
from histocc.job import build, estimate
from histocc.job.banner import Banner, say_banner, say_start
from histocc.job.optimizer import linear_rate, make_optimizer
from histocc.job.recipe import make_loss
from histocc.job.resume import check_unchanged, find_resumable, nothing_to_do, restore, set_threads
from histocc.job.run_outputs import RunState, checksums_of_files, finish, held_folder, opened_outputs
from histocc.job.settings import FolderSettings, MachineSettings, Settings
from histocc.job.validate import validate
from histocc.runtime import checkpoint
from histocc.runtime.compiling import missing_compiler
from histocc.runtime.errors import UserError
from histocc.runtime.parallel import wrap
from histocc.runtime.precision import Precision
from histocc.runtime.rng import derived_seed
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import MixerTask
from histocc.trainer import loop
from histocc.trainer.batch_size import memory_advice, model_memory_advice
from histocc.trainer.hints import Hints
from histocc.trainer.hooks import Callbacks, Steps, StopPoll
from histocc.trainer.run_log import STOPPED
from histocc.trainer.schedule import Schedule, linear_schedule


def run_as_asked(settings: Settings, world: World, data: PreparedData) -> None:
    """What the settings ask for once the data are prepared: nothing more, a validation, a dry run, or the
    run. All ranks. Raises UserError, TrainingError.
    """
    if settings.prepare_only:
        return
    if settings.eval_only:
        return validate(settings, world, data)
    with contextlib.ExitStack() as held:
        if not settings.dry_run:
            held.enter_context(held_folder(settings.folder, world))
        with memory_advice(settings.batch, world):
            train(settings, world, data)


def train(settings: Settings, world: World, data: PreparedData) -> None:
    """Trains, or continues training, on prepared data; a dry run ends before the first step and writes
    nothing. All ranks. Raises UserError, TrainingError.
    """
    machine = settings.machine
    precision = number_format(machine, world)

    # The model: that of the run that is resumed, or a new one.
    model_memory = partial(model_memory_advice, machine.parallel, machine.precision.float64, world)
    with model_memory():
        resumed = find_resumable(settings, world, data)
        set_threads(resumed, world)
        settings, raw_model, config = build.make_model(settings, world, data, resumed)

    # Which rows a step takes, and how many steps there are.
    if settings.batch.is_open:
        batch = build.choose_batch_size(settings, world, data, config, raw_model, precision)
        settings = replace(settings, batch=batch)
    memory = partial(memory_advice, settings.batch, world)
    plan = build.batch_plan(settings.batch, len(data.train), world)
    files = checksums_of_files(settings.noise)
    if resumed:
        check_unchanged(settings, resumed, plan, files)
    linear = linear_rate(settings, raw_model, resumed)
    rate = resumed["scheduler"]["base_lrs"][0] if resumed else None  # of the first start
    schedule = Schedule.of(settings.schedule, plan.steps_per_epoch, world.size, rate)
    start = resumed["step"] if resumed else 0
    if start >= schedule.stop and not (resumed and resumed["position"].get("unfinished")):
        return world.print(nothing_to_do(settings.folder.save_path, start, schedule))

    # Loaders, and what is computed of a batch.
    loaders = build.make_loaders(settings, world, data, config, plan)
    task = MixerTask(make_loss(settings.loss, settings.formatter), settings.formatter)
    say_banner(Banner(settings, world, data, raw_model, plan, schedule, linear, precision.name))

    # DDP or FSDP.
    example = loaders["train"].dataset
    if not settings.model.freeze_encoder:
        characters = torch.from_numpy(example.characters())
        raw_model.encoder.char_embeddings.train_rows_of(characters, config["max_len"])
    with model_memory():
        model = wrap(raw_model, world, machine.parallel)
    with memory():
        loop.warm_up_wrapped_model(model, task, example[0, 0][0], world, precision, compiled=machine.compile)

    # The optimizer, and where the resumed run was.
    optimizer = make_optimizer(raw_model, settings.optimizer.weight_decay, schedule, linear)
    scheduler = linear_schedule(optimizer, schedule.warmup, schedule.length)
    if resumed:
        with model_memory():
            restore(resumed, optimizer, scheduler, precision)
        # the weights need not lie in memory twice
        resumed = {part: resumed[part] for part in ("args", "position", "step")}
    run = loop.Run(
        model,
        task,
        optimizer,
        scheduler,
        world,
        precision,
        derived_seed(settings.seed, build.DROPOUT),
        max_bad_steps=settings.optimizer.max_bad_steps,
    )
    if settings.dry_run:
        with memory():
            return estimate.estimate(settings, data, run, loaders, (start, schedule.stop), linear.fitted)

    # Train.
    steps = Steps(schedule.total, start, schedule.stop, plan.steps_per_epoch)
    state = RunState(settings, data, run, config, plan, files, resumed)
    hints = Hints(schedule.stop, settings.loader.num_workers, start, linear.fitted)
    with opened_outputs(settings, world, data, state, steps, hints) as (log, save, step_done):
        say_start(settings.schedule.num_epochs, world, resumed, plan)
        stop = StopPoll(world.stop_agreed)
        callbacks = Callbacks(save, log.row, step_done, stop)
        with memory():
            step = loop.train(run, loaders, steps, settings.intervals.intervals(), callbacks, state.position)
        log.close(STOPPED if stop.agreed else "finished" if step == schedule.total else "at --max-steps")
    seconds = finish(save, step)
    say_end(settings.folder, world, stop, step, schedule, seconds, "val" in loaders)


def number_format(machine: MachineSettings, world: World) -> Precision:
    """What the model computes in, set for this process. Raises UserError for what the machine lacks."""
    precision = Precision.of(machine.precision, world.device)
    precision.use()
    if precision.warning():
        world.print(f"WARNING: {precision.warning()}")
    if machine.compile and (missing := missing_compiler(world.device)):
        raise UserError(f"--compile needs {missing}")
    return precision


def say_end(
    folder: FolderSettings,
    world: World,
    stop: StopPoll,
    step: int,
    schedule: Schedule,
    save_seconds: float,
    validates: bool,
) -> None:
    """Where the run ended, why, and how it continues. All ranks."""
    without = " without --overwrite" if folder.overwrite else ""
    if stop.agreed:
        reason = next(filter(None, world.gather(world.stop.reason)), "a signal")
        world.stop.acted = True
        world.print(
            f"Stopped by {reason} at step {step:,} of {schedule.total:,}, saved in {save_seconds:.1f} s. The"
            f" same command{without} continues."
        )
        return
    world.print(
        f"Finished at step {step:,}."
        if step == schedule.total
        else (
            f"Stopped at step {step:,} of {schedule.total:,} (--max-steps). The same command{without} with"
            " a larger --max-steps continues."
        )
    )
    best = os.path.join(folder.save_path, checkpoint.BEST)
    has_best = validates and os.path.exists(best)
    world.print(
        f"Model: {os.path.join(folder.save_path, checkpoint.LAST)}"
        + f" (lowest validation loss: {checkpoint.BEST})" * has_best
    )
