"""A training run from a model and its rows to its last checkpoint: what every training script has in common,
in one function.
"""

import os
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from histocc.runtime import checkpoint
from histocc.runtime.device import missing_compiler
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.parallel import evaluating, unwrap, whole_weights, wrap
from histocc.runtime.precision import Precision
from histocc.runtime.rng import derived_seed
from histocc.runtime.signals import stop_request
from histocc.runtime.world import World
from histocc.trainer import loop
from histocc.trainer.banner import Banner, say_banner, say_start
from histocc.trainer.batch_size import memory_advice, model_memory_advice
from histocc.trainer.estimate import estimate
from histocc.trainer.resume import check_unchanged, nothing_to_do, restore
from histocc.trainer.run_log import STOPPED
from histocc.trainer.run_outputs import RunState, check_last_save, opened_outputs
from histocc.trainer.saver import Saver
from histocc.trainer.schedule import Schedule, Steps
from histocc.trainer.settings import FolderSettings, MachineSettings, RunSettings
from histocc.trainer.training import (
    DROPOUT,
    Training,
    batch_plan,
    choose_batch_size,
    make_loaders,
    make_optimizer,
)


def number_format(machine: MachineSettings, world: World) -> Precision:
    """What the model computes in, set for this process. Raises UserError for what the machine lacks."""
    precision = Precision.of(machine.precision, world.device)
    precision.use()
    if precision.warning():
        world.print(f"WARNING: {precision.warning()}")
    if machine.compile and (missing := missing_compiler(world.device)):
        raise UserError(f"--compile needs {missing}")
    return precision


def train(
    settings: RunSettings,
    world: World,
    precision: Precision,
    training: Training,
    resumed: dict[str, Any] | None,
) -> None:
    """Trains, or continues training; a dry run ends before the first step and writes nothing. All ranks.

    resumed: the checkpoint that the run continues from, its weights already in the model. Raises UserError,
    TrainingError.
    """
    machine, raw_model, task = settings.machine, training.model, training.task
    smaller = training.smaller_model
    model_memory = partial(model_memory_advice, machine.parallel, machine.precision.float64, world, smaller)

    # Which rows a step takes, and how many steps there are.
    if settings.batch.is_open:
        settings = replace(settings, batch=choose_batch_size(settings, world, training, precision))
    memory = partial(memory_advice, settings.batch, world, smaller, settings.schedule.lr_scaling != "none")
    plan = batch_plan(settings.batch, training.train, world)
    if resumed:
        check_unchanged(settings, resumed, plan, training.files)
    rate = resumed["scheduler"]["base_lrs"][0] if resumed else None  # of the first start
    schedule = Schedule.of(settings.schedule, plan.steps_per_epoch, world.size, rate)
    start = resumed["step"] if resumed else 0
    if start >= schedule.stop and not (resumed and resumed["position"].get("unfinished")):
        world.print(nothing_to_do(settings.folder.save_path, start, schedule))
        return use_model(training, raw_model)

    # Who takes which rows, and what is about to run.
    loaders = make_loaders(settings, world, training, plan)
    about = (training.about, training.about_rate)
    say_banner(Banner(settings, world, *about, plan, schedule, precision.name))

    # One process's model, or that of all.
    with model_memory():
        model = wrap(raw_model, world, machine.parallel, machine.gradient_compression)
    with memory():
        first = loaders["train"].dataset[0, 0][0]
        loop.warm_up_wrapped_model(model, task, first, world, precision, compiled=machine.compile)

    # The optimizer, and where the resumed run was.
    optimizer = make_optimizer(raw_model, settings.optimizer.weight_decay, schedule.rate, training.fast)
    seed, most_bad = derived_seed(settings.seed, DROPOUT), settings.optimizer.max_bad_steps
    intervals = settings.intervals
    run = loop.Run(
        model,
        task,
        optimizer,
        world,
        precision,
        seed,
        schedule.factor,
        max_bad_steps=most_bad,
        flops=training.flops,
        steps=Steps(schedule.total, start, schedule.stop, plan.steps_per_epoch),
        log_interval=intervals.log_interval,
        eval_interval=intervals.eval_interval,
        save_interval=intervals.save_interval,
        epoch_name=training.epoch_name if intervals.save_each_epoch else "",
        stop=world.stop_agreed,
    )
    with model_memory():
        if resumed:
            restore(resumed, run)
            # the weights need not lie in memory twice
            resumed = {part: resumed[part] for part in ("args", "position", "step")}
    if settings.dry_run:
        with memory():
            return estimate(settings, run, loaders, training.fitted_before)

    # Train.
    state = loop.State.resumed(start, resumed["position"], world) if resumed else loop.State()
    content = RunState(settings, training, run, plan, resumed)
    with opened_outputs(settings, training, world, content, run.steps) as (log, save, step_done):
        say_start(settings.schedule.num_epochs, world, resumed, plan)
        run = replace(run, save=save, log=log.row, say=log.say, step_done=step_done)
        try:
            with memory():
                step = loop.train(run, loaders, state)
        except loop.Diverged as error:
            raise TrainingError(f"{error} {way_back(save, world, error.good_step)}") from None
        log.close(STOPPED if state.stopped else "finished" if step == schedule.total else "at --max-steps")
    check_last_save(save, step)
    say_end(settings.folder, world, state, schedule, save.seconds, "val" in loaders)
    if not state.stopped:
        use_model(training, model)


def way_back(save: Saver, world: World, step: int | None) -> str:
    """From where to start again: the newest checkpoint of `step` or of one before. All ranks."""
    here = save.newest_until(step) if world.is_main and step is not None else None
    newest = world.gather(here)[0]
    remedy = "a lower --learning-rate (a third), or more --warmup-pct; with --fp16, --bf16 instead"
    if newest:
        return (
            f"The last checkpoint that is known to be good is {newest[0]}, of step {newest[1]:,}. Give it as"
            f" --initial-checkpoint, with another --save-path and {remedy}. If that does not help, look for"
            " damaged rows in the data."
        )
    return (
        f"No checkpoint is known to be good. Start over: --overwrite and {remedy}. If that does not help,"
        " look for damaged rows in the data, or weights in --initial-checkpoint."
    )


def use_model(training: Training, model: nn.Module) -> None:
    """What the script does with the trained model. All ranks."""
    if training.finish is not None:
        raw_model = unwrap(model)
        with evaluating(raw_model), whole_weights(raw_model):
            training.finish(raw_model)


def say_end(
    folder: FolderSettings,
    world: World,
    state: loop.State,
    schedule: Schedule,
    save_seconds: float,
    validates: bool,
) -> None:
    """Where the run ended, why, and how it continues. All ranks."""
    step, without = state.step, " without --overwrite" if folder.overwrite else ""
    if state.stopped:
        stop_request().acted = True
        reason = next(filter(None, world.gather(stop_request().reason)), "a signal")
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
