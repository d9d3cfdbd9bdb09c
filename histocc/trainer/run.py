"""A run of any model: `set_up`, then the loop between `outputs`, then `finish`."""

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from histocc.runtime import checkpoint, files, stacks
from histocc.runtime.device import Precision, missing_compiler
from histocc.runtime.errors import TrainingError, UserError, in_words
from histocc.runtime.files import OwnFiles, atomic_write, run_lock
from histocc.runtime.log import CONSOLE, write_console_to
from histocc.runtime.parallel import evaluating, is_sharded, is_wrapped, unwrap, whole, whole_weights, wrap
from histocc.runtime.rng import derived_seed
from histocc.runtime.signals import stop_request
from histocc.runtime.world import World, launcher_id
from histocc.trainer import loop, resume
from histocc.trainer.banner import say_banner, say_start
from histocc.trainer.batch_size import find_batch_size, memory_advice, model_memory_advice
from histocc.trainer.batches import (
    DROPOUT,
    BatchLoader,
    BatchPlan,
    MicroBatches,
    Rows,
    batch_plan,
    make_loaders,
    widest,
)
from histocc.trainer.config import AUTO, TrainConfig
from histocc.trainer.estimate import estimate
from histocc.trainer.log import LOG, STATUS, STOPPED, RunLog, log_columns
from histocc.trainer.plot import CURVES, draw_run
from histocc.trainer.schedule import Schedule, Steps, make_optimizer
from histocc.trainer.trackers import OF_PROFILE, StepProfiler, Tracker, open_trackers

ARGS = "args.json"


@dataclass(frozen=True)
class Training:
    """What a run trains, and on what.

    Args:
        model: bare, on its device, with the weights that it starts or continues from.
        task: what is computed of a batch; see `histocc.trainer.task`.
        train, val: rows; None for a run that is not validated.
        entries: what its checkpoints hold beside what those of any run do: enough to use the model.
        fingerprint: of the rows; a run is resumed on the same alone.
        files: checksum of each file beside the rows that decides the result, by flag.
        fast: names of the parameters that have a learning rate of their own, and its factor on that of the
            rest. Names, since sharding replaces the parameters.
        flops: of a micro-batch; see `histocc.trainer.loop.Run`.
        about: lines of what is said before the start, on data and model; about_rate: on its learning rates.
        lists: small files that are copied into the folder of the run.
        epoch_name: of the checkpoint of an epoch, {} for its number.
        fitted_before: what was fitted before the first step, "" for nothing.
        smaller_model: what to take where memory is short.
        finish: called on all ranks after the last step, and where none is left to take, with the model in
            evaluation mode, without gradients, its weights whole.
    """

    model: nn.Module
    task: loop.Task
    train: Rows
    val: Rows | None = None
    entries: dict[str, Any] = field(default_factory=dict[str, Any])
    fingerprint: str = ""
    files: dict[str, int] = field(default_factory=dict[str, int])
    fast: tuple[Sequence[str], float] = ((), 1.0)
    flops: Callable[[dict[str, Any]], float] | None = None
    about: list[str] = field(default_factory=list[str])
    about_rate: str = ""
    lists: Sequence[str] = ()
    epoch_name: str = checkpoint.EPOCH
    fitted_before: str = ""
    smaller_model: str = "a smaller model"
    finish: Callable[[nn.Module], object] | None = None


@dataclass(frozen=True)
class Ready:
    """A run that is set up. options: those of `histocc.trainer.loop.Run` but for what it calls."""

    args: TrainConfig
    training: Training
    world: World
    plan: BatchPlan
    schedule: Schedule
    precision: Precision
    model: nn.Module
    loaders: dict[str, BatchLoader]
    optimizer: torch.optim.Optimizer
    state: loop.State
    options: dict[str, Any]
    resumed: dict[str, Any] | None


def number_format(args: TrainConfig, world: World) -> Precision:
    """What the model computes in, set for this process. Raises UserError for what the machine lacks."""
    precision = Precision.of(args, world.device)
    precision.use()
    if precision.warning():
        world.print(f"WARNING: {precision.warning()}")
    if args.compile and (missing := missing_compiler(world.device)):
        raise UserError(f"--compile needs {missing}")
    return precision


def output_problems(
    args: TrainConfig, inputs: dict[str | None, str], own: OwnFiles, lists: Sequence[str] = ()
) -> list[str]:
    """Why a run with these arguments may not write its files, a line each. inputs: what each file is; lists:
    names of those of its data.
    """
    if args.eval_only or args.dry_run:
        return []
    if args.config and files.is_same(args.config, own.path(ARGS)) and own.holds(args.config):
        # read already, and written as it was
        inputs = {path: what for path, what in inputs.items() if path != args.config}
    names = [ARGS, LOG, STATUS, CURVES, CONSOLE, *lists, checkpoint.LAST, checkpoint.BEST]
    return files.problems(
        map(own.path, [*names, *(OF_PROFILE if args.profile else ())]), inputs, args.overwrite, own
    )


def copy_lists(sources: Iterable[str], own: OwnFiles, keep: bool) -> None:
    """Copies lists of the data to where users look for them. keep: no content may change there.

    Raises:
        UserError: one would change, or cannot be copied.
    """
    for source in sources:
        path = own.path(os.path.basename(source))
        try:
            with open(source, "rb") as file:
                content = file.read()
            if keep and os.path.exists(path):
                with open(path, "rb") as file:
                    if file.read() != content:
                        raise UserError(
                            f"{path}: is not what would be written there: it was edited, or the run in this"
                            " folder has other data. Move it away, choose another --save-path, or give"
                            " --overwrite"
                        )
            own.claim(os.path.basename(source))
            with atomic_write(path) as file:
                file.write(content)
        except OSError as error:
            raise UserError(in_words(error, path)) from None


def clear(own: OwnFiles) -> None:
    """Removes the checkpoints and logs of a run that is started over. One process a node."""
    own.remove(
        name
        for name in own.names
        if checkpoint.CHECKPOINT.fullmatch(name) or name in (ARGS, LOG, STATUS, CURVES)
    )


@contextlib.contextmanager
def held_folder(args: TrainConfig, world: World) -> Generator[None]:
    """The folder of the run, that no other job may use meanwhile, without what a killed run left half
    written; meanwhile stacks of a run that hangs go there. All ranks. Raises UserError.
    """
    with contextlib.ExitStack() as held:

        def take() -> list[str]:
            held.enter_context(run_lock(args.save_path))
            own = OwnFiles(args.save_path, args.overwrite)
            own.remove_leftovers()
            path, *paths = own.claim(CONSOLE, *map(stacks.NAME.format, range(world.size)))
            write_console_to(path)
            return paths

        paths = world.run_on_main("lock", take)
        held.enter_context(stacks.in_folder(paths, world.rank, world.time_limit))
        yield


def set_up(
    args: TrainConfig,
    world: World,
    precision: Precision,
    training: Training,
    resumed: dict[str, Any] | None,
) -> Ready | None:
    """Everything that a run needs before its first step. All ranks. Raises UserError, TrainingError.

    resumed: the checkpoint that the run continues from, its weights already in the model.

    Returns:
        None if no step is left to take, and after a dry run.
    """
    raw_model, task = training.model, training.task

    # Which rows a step takes, and how many steps there are.
    if args.batch_size == AUTO:
        with memory_of_steps(args, world, training):
            args = choose_batch_size(args, world, training, precision)
    plan = batch_plan(args, training.train, world)
    state, rate = loop.State(), None
    if resumed:
        with checkpoint.reading(resumed["path"]):
            resume.check_unchanged(args, resumed, plan, training.files)
            rate = resumed["scheduler"]["base_lrs"][0]  # of the first start
            state = loop.State.resumed(resumed["step"], resumed["position"], world)
    schedule = Schedule.of(args, plan.steps_per_epoch, world.size, rate)
    if state.step >= schedule.stop and not state.unfinished:
        world.print(resume.nothing_to_do(args.save_path, state.step, schedule))
        return None
    loaders = make_loaders(args, world, training.train, training.val, plan)
    about = (training.about, training.about_rate)
    say_banner(args, world, *about, plan, schedule, precision.name)

    # One process's model, or that of all.
    with memory_of_model(args, world, training.smaller_model):
        model = wrap(raw_model, world, args.parallel, args.gradient_compression)
    with memory_of_steps(args, world, training):
        first = loaders["train"].dataset[0, 0][0]
        warm_up_wrapped_model(model, task, first, world, precision, args.compile)

    # The optimizer, and what of it the resumed run had.
    with memory_of_model(args, world, training.smaller_model):
        optimizer = make_optimizer(raw_model, args.weight_decay, schedule.rate, training.fast)
        if resumed:
            resume.restore(resumed, optimizer, precision)
            resumed = {part: resumed[part] for part in ("args", "position", "step")}  # weights lie there once
    options: dict[str, Any] = {
        "world": world,
        "precision": precision,
        "seed": derived_seed(args.seed, DROPOUT),
        "schedule": schedule.factor,
        "max_bad_steps": args.max_bad_steps,
        "total_steps": schedule.total,
        "stop_step": schedule.stop,
        "steps_per_epoch": plan.steps_per_epoch,
        "log_interval": args.log_interval,
        "eval_interval": args.eval_interval,
        "save_interval": args.save_interval,
        "epoch_name": training.epoch_name if args.save_each_epoch else "",
        "stop": world.stop_agreed,
    }
    if args.dry_run:
        with memory_of_steps(args, world, training):
            run = loop.Run(model, task, optimizer, **options)
            estimate(args, run, loaders, state.step, training.fitted_before)
        return None
    return Ready(
        args,
        training,
        world,
        plan,
        schedule,
        precision,
        model,
        loaders,
        optimizer,
        state,
        options,
        resumed,
    )


def warm_up_wrapped_model(
    model: nn.Module,
    task: loop.Task,
    batch: dict[str, Any],
    world: World,
    precision: Precision,
    compiled: bool,
) -> None:
    """Two throw-away passes through DDP, FSDP or layers to be compiled (`compiled`), before optimizer and
    random state are set. All ranks.

    DDP lays its buckets out again after its first step, so a run that is resumed would sum the gradients of
    more than two ranks in another order than one that was never interrupted. After this the layout no longer
    depends on when the process started. It costs two micro-batches at every start. FSDP finds out in its
    first pass which module is the outermost. What torch.compile makes depends on the shapes that it sees
    first.
    """
    if not is_wrapped(model) and not compiled:
        return
    batch = loop.to_device(batch, world.device)
    for _ in range(2):
        loop.forward_backward(model, task, batch, precision)
    model.zero_grad(set_to_none=True)


@contextlib.contextmanager
def outputs(ready: Ready) -> Generator[dict[str, Any]]:
    """What a run writes: args.json and the lists of the data; then, as the fields of
    `histocc.trainer.loop.Run` that it gives, rows of the log and checkpoints; at the end how it ended and how
    it continues. All ranks. Raises UserError, TrainingError.
    """
    args, training, world, state = ready.args, ready.training, ready.world, ready.state
    schedule, resumed = ready.schedule, ready.resumed
    own = OwnFiles(args.save_path, args.overwrite)
    name: str = resumed["position"]["run"] if resumed else uuid.uuid4().hex  # all checkpoints of the run
    trackers: list[Tracker] = []
    arguments, stop = args.values(), world.stop_asked_anywhere
    world.run_on_main(
        "trackers",
        lambda: trackers.extend(open_trackers(args, args.save_path, name, state.step, arguments, stop)),
    )
    if args.overwrite and not resumed:
        world.run_on("clear", world.node_leaders(), lambda: clear(own))
    if world.is_main:
        with atomic_write(own.claim(ARGS)[0]) as file:
            file.write(json.dumps((args.asked or args).values(), indent=1, sort_keys=True).encode())
        copy_lists(training.lists, own, keep=resumed is not None)
    log = RunLog(
        own,
        Steps(schedule.total, state.step, schedule.stop),
        log_columns(tuple(training.task.columns)),
        world.is_main,
        again=state.unfinished,
        workers=args.num_workers,
        trackers=trackers,
    )
    save = checkpoint.Saver(own, args.keep_checkpoints, world, content_of_checkpoints(ready, name), log.say)
    with contextlib.ExitStack() as ends:
        ends.callback(log.close, "ended by an error")  # unless it is closed before
        step_done = log.step
        if args.profile and world.is_main:
            profiler = StepProfiler(args.profile, own, world.device, log.say)
            ends.callback(profiler.close)

            def step_done() -> None:
                log.step()
                profiler.step_done()

        say_start(args.num_epochs, world, resumed, ready.plan)
        try:
            with memory_of_steps(args, world, training):
                yield {"save": save, "log": log.row, "say": log.say, "step_done": step_done}
        except loop.Diverged as error:
            raise TrainingError(f"{error} {way_back(save, world, error.good_step)}") from None
        finished = "finished" if state.step == schedule.total else "at --max-steps"
        log.close(STOPPED if state.stopped else finished)
        if world.is_main and not state.stopped:
            draw_run(own)
    if save.failed:
        raise TrainingError(
            f"the last checkpoint, of step {state.step:,}, could not be saved: {save.failed}. After that,"
            " give the same command again (without --overwrite): it continues from the checkpoint before, if"
            " there is one."
        )
    say_end(ready, save.seconds)


def content_of_checkpoints(ready: Ready, name: str) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """A function of (step, position) that makes the content of a checkpoint, which is whole on rank 0 alone.
    All ranks. name: what all checkpoints of the run have in common.
    """
    args, training, world, plan = ready.args, ready.training, ready.world, ready.plan
    raw_model, optimizer = unwrap(ready.model), ready.optimizer
    same_at_all_steps = {
        "files": training.files,
        "total_batch": plan.global_batch_size,
        "steps_per_epoch": plan.steps_per_epoch,
        "fingerprint": training.fingerprint,
        "launchers": sorted(set(world.gather(launcher_id()))),
        "run": name,
    }

    def content(step: int, position: dict[str, Any]) -> dict[str, Any]:
        if not (world.is_main or is_sharded(raw_model)):
            return {}
        epoch, batch = divmod(step, plan.steps_per_epoch)
        weights = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
        rates = [group["initial_lr"] for group in optimizer.param_groups]
        return {
            **whole(weights, keep=world.is_main),
            "scheduler": {"base_lrs": rates, "last_epoch": step},
            "scaler": ready.precision.scaler.state_dict(),
            "step": step,
            "format": checkpoint.FORMAT,
            "args": args.values(),
            **training.entries,
            "rng": {"seed": args.seed, "threads": torch.get_num_threads(), "processes": world.size},
            "position": {"epoch": epoch, "batch": batch, **same_at_all_steps, **position},
        }

    return content


def finish(training: Training, args: TrainConfig, world: World, ready: Ready | None) -> None:
    """What the script does with the trained model, unless the run was stopped. All ranks.

    ready: None if no step was left to take, or after a dry run.
    """
    if training.finish is None or args.dry_run or ready and ready.state.stopped:
        return
    raw_model = unwrap(ready.model) if ready else training.model
    with memory_of_steps(args, world, training), evaluating(raw_model), whole_weights(raw_model):
        training.finish(raw_model)


def way_back(save: checkpoint.Saver, world: World, step: int | None) -> str:
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


def say_end(ready: Ready, save_seconds: float) -> None:
    """Where the run ended, why, and how it continues. All ranks."""
    args, world, state, total = ready.args, ready.world, ready.state, ready.schedule.total
    without = " without --overwrite" if args.overwrite else ""
    if state.stopped:
        stop_request().acted = True
        reason = next(filter(None, world.gather(stop_request().reason)), "a signal")
        world.print(
            f"Stopped by {reason} at step {state.step:,} of {total:,}, saved in {save_seconds:.1f} s. The"
            f" same command{without} continues."
        )
        return
    if state.step == total:
        world.print(f"Finished at step {state.step:,}.")
    else:
        world.print(
            f"Stopped at step {state.step:,} of {total:,} (--max-steps). The same command{without} with a"
            " larger --max-steps continues."
        )
    best = os.path.join(args.save_path, checkpoint.BEST)
    has_best = "val" in ready.loaders and os.path.exists(best)
    world.print(
        f"Model: {os.path.join(args.save_path, checkpoint.LAST)}"
        + f" (lowest validation loss: {checkpoint.BEST})" * has_best
    )


def memory_of_model(
    args: TrainConfig, world: World, smaller_model: str
) -> contextlib.AbstractContextManager[None]:
    """Running out of memory inside: the model itself does not fit."""
    return model_memory_advice(args.parallel, args.float64, world, smaller_model)


def memory_of_steps(
    args: TrainConfig, world: World, training: Training
) -> contextlib.AbstractContextManager[None]:
    """Running out of memory inside: the batch does not fit."""
    return memory_advice(args, world, training.smaller_model)


def choose_batch_size(
    args: TrainConfig, world: World, training: Training, precision: Precision
) -> TrainConfig:
    """--batch-size auto: a size that was tried; the total batch stays that of the default. All ranks."""
    model = training.model.train()

    def take(rows: int) -> None:  # a GPU must hold the widest
        if world.device.type == "cuda":
            batch = widest(training.train, rows)
        else:
            batch = MicroBatches(training.train, BatchPlan(len(training.train), rows), 0, 0)[0, 0][0]
        loop.forward_backward(model, training.task, loop.to_device(batch, world.device), precision)

    total = args.total_batch(world.size)
    most = min(-(-total // world.size), len(training.train))
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    # AdamW's two means, DDP's buckets
    found = find_batch_size(take, most, world, still_to_come=3 * trained)
    model.zero_grad(set_to_none=True)
    world.print(f"Batch size: {found} samples at once per process, chosen automatically; total batch {total}")
    return args.decide(batch_size=found, global_batch_size=total, accumulate_steps=1)
