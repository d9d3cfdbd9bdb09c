"""A run of any model: its folder, the checkpoint that it resumes from, what it needs before its first step,
what it writes, and how it ends.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from histocc.runtime import checkpoint, files, signals
from histocc.runtime.config import differing
from histocc.runtime.device import Precision, missing_compiler
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.files import OwnFiles, atomic_write, run_lock
from histocc.runtime.parallel import (
    evaluating,
    gather_shares,
    is_sharded,
    is_wrapped,
    load_optimizer_state,
    unsharded,
    wrap,
)
from histocc.runtime.rng import derived_seed
from histocc.runtime.signals import stop_request
from histocc.runtime.world import World, launcher_id
from histocc.trainer import loop
from histocc.trainer.batches import DROPOUT, BatchLoader, Rows, batch_plan, make_loaders
from histocc.trainer.config import AUTO, TrainConfig
from histocc.trainer.estimate import choose_batch_size, estimate, memory_advice
from histocc.trainer.log import LOG, STATUS, STOPPED, RunLog, banner, log_columns, start_lines
from histocc.trainer.plot import CURVES, draw_run
from histocc.trainer.schedule import Schedule, make_optimizer
from histocc.trainer.trackers import OF_PROFILE, Tracker, open_trackers, profiled

ARGS = "args.json"
MAX_THREADS = 1024
# What a resumed run takes of the groups of the optimizer; the rest is how they are made now.
OF_GROUP = ("lr", "initial_lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True)
class Training:
    """What a run trains, and on what.

    Args:
        model: bare, on its device, with the weights that it starts or continues from.
        task, flops: see `histocc.trainer.loop`.
        train, val: rows; None for a run that is not validated.
        entries: what its checkpoints hold beside what those of any run do: enough to use the model.
        fingerprint: of the rows; a run is resumed on the same alone.
        files: checksum of each file beside the rows that decides the result, by flag.
        fast: names of the parameters that have a learning rate of their own, and its factor on that of the
            rest. Names, since sharding replaces the parameters.
        about: lines for the banner on data and model; about_rate: on its learning rates.
        epoch_name: of the checkpoint of an epoch, {} for its number.
        fitted_before: what was fitted before the first step, "" for nothing.
        smaller_model: what to take if memory is short.
        finish: called on all ranks after the last step, or if none is left to take, with the model in
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
    about: Sequence[str] = ()
    about_rate: str = ""
    epoch_name: str = checkpoint.EPOCH
    fitted_before: str = ""
    smaller_model: str = "a smaller model"
    finish: Callable[[nn.Module], object] | None = None


# ---- before the model


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
    names = [ARGS, LOG, STATUS, CURVES, *lists, checkpoint.LAST, checkpoint.BEST]
    return files.problems(
        map(own.path, [*names, *(OF_PROFILE if args.profile else ())]), inputs, args.overwrite, own
    )


@contextlib.contextmanager
def held_folder(args: TrainConfig, world: World) -> Generator[None]:
    """The folder of the run, that no other job may use meanwhile, without what a killed run left half
    written; meanwhile stacks of a run that hangs go there. All ranks. Raises UserError.
    """
    with contextlib.ExitStack() as held:

        def lock() -> list[str]:
            held.enter_context(run_lock(args.save_path))
            own = OwnFiles(args.save_path, args.overwrite)
            own.remove_leftovers()
            return own.claim(*map(signals.STACKS.format, range(world.size)))

        paths = world.run_on_main("lock", lock)
        held.enter_context(signals.stacks_in(paths, world.rank, world.time_limit))
        yield


# ---- the checkpoint that a run resumes from


def find_resumable(
    args: TrainConfig,
    world: World,
    read: Callable[[str], dict[str, Any]],
    refuse: Callable[[dict[str, Any]], None],
    fingerprint: str,
) -> dict[str, Any] | None:
    """The checkpoint to resume from, the same on every rank, with its file as the entry `path`; None to start
    over. All ranks.

    Each node looks in its own folder, since nodes may not share one and the launcher may give rank 0 to
    another node than before. The file of the node that has come furthest is then read by all ranks at the
    same time; if one does not find the same there, by its checksum, it is sent to all.

    Args:
        read: a file, as `histocc.runtime.checkpoint.load_resumable`.
        refuse: raises UserError for a checkpoint with other arguments.
        fingerprint: of the rows.

    Raises:
        UserError: it does not fit.
    """
    state: dict[str, Any] | None = None

    def newest() -> dict[str, Any] | None:
        nonlocal state
        if not checkpoint.exists_in(args.save_path):
            return None
        try:
            path, state, damaged = checkpoint.newest_good(args.save_path, read)
        except UserError:
            if args.overwrite:
                return None
            raise
        with checkpoint.reading(path):
            return {
                "path": path,
                "damaged": damaged,
                "step": int(state["step"]),
                "run": state["position"]["run"],
                "launchers": set(state["position"]["launchers"]),
                "checksum": state.get(checkpoint.CHECKSUM),
            }

    leaders, launchers = world.node_leaders(), set(world.gather(launcher_id()))
    # a restart by the launcher starts nothing over
    on_nodes = {
        rank: newest_there
        for rank, newest_there in zip(leaders, world.run_on("resume", leaders, newest))
        if newest_there and (not args.overwrite or launchers & newest_there["launchers"] - {""})
    }
    if 0 in on_nodes:  # what another node holds of an earlier run is not for this one
        on_nodes = {rank: there for rank, there in on_nodes.items() if there["run"] == on_nodes[0]["run"]}
    if not on_nodes:
        return None
    owner = max(on_nodes, key=lambda rank: (on_nodes[rank]["step"], -rank))
    best = on_nodes[owner]
    path = best["path"]
    if best["damaged"]:
        lines = ["WARNING: a newer checkpoint cannot be used:", *best["damaged"]]
        world.print("\n  ".join([*lines, f"Continuing from {path} instead."]))
    if owner != 0 and on_nodes.get(0, {}).get("step") != best["step"]:
        world.print(
            f"Note: the checkpoint to continue from lies on the node of rank {owner} alone; from here on rank"
            " 0 writes on its own node"
        )
    if world.rank != owner:
        state = None
        with contextlib.suppress(UserError, TrainingError):  # whoever has it can still send it
            state = read(path) if best["checksum"] is not None else None
        if state and state[checkpoint.CHECKSUM] != best["checksum"]:
            state = None
    if not all(world.gather(state is not None)):
        state = world.broadcast(state, owner)
    assert state is not None
    with checkpoint.reading(path):
        refuse(state)
        if state["position"]["fingerprint"] != fingerprint:
            raise UserError(
                f"{args.save_path} holds a run on other data (or data prepared with other settings)."
                " Give it the same files, choose another folder, or start over with --overwrite."
            )
    return {**state, "path": path}


def refuse_other_arguments(
    args: TrainConfig, state: dict[str, Any], more: list[str], before: dict[str, Any] | None = None
) -> None:
    """Raises UserError if a run is to be resumed with other arguments than those that decide its result.

    Args:
        state: the checkpoint.
        more: what else differs, a line each.
        before: what the run has of the arguments that its checkpoint keeps elsewhere.
    """
    saved = state["args"] | (before or {})
    as_before = replace(args, num_epochs=saved["num_epochs"], warmup_steps=None)
    warmup = Schedule.of(as_before, state["position"]["steps_per_epoch"], 1, 1.0).warmup
    different = differing(type(args), args.values(), saved, {"warmup_steps": warmup}) + more
    if args.num_epochs < saved["num_epochs"]:
        different.append(
            f"--num-epochs was {saved['num_epochs']}, now it is {args.num_epochs}; only more can continue"
        )
    if different:
        end = "Repeat them as they were, choose another folder, or start over with --overwrite."
        raise UserError("\n  ".join([f"{args.save_path} holds a run with other arguments:", *different, end]))


def set_threads(resumed: dict[str, Any] | None, world: World) -> None:
    """The number of threads decides the last bits of every sum: a resumed run takes that of its first
    start.
    """
    if not resumed:
        return
    with checkpoint.reading(resumed["path"]):
        threads, processes = int(resumed["rng"]["threads"]), resumed["rng"]["processes"]
        if not 1 <= threads <= MAX_THREADS:
            raise ValueError(f"rng: threads: found {threads}, expected 1 … {MAX_THREADS}")
    now = torch.get_num_threads()
    if threads != now and processes == world.size:
        torch.set_num_threads(threads)
        world.print(f"Threads per process: set to {threads}, as in the interrupted run")
    elif threads != now:
        world.print(f"Note: {now} threads per process instead of {threads} before; last digits may differ")


def refuse_other_files(
    args: TrainConfig, position: dict[str, Any], total: int, checksums: dict[str, int]
) -> None:
    """Raises UserError if the total batch is another one than at the `position` of a checkpoint, or a file
    beside the rows that decides the result was changed.
    """
    if position["total_batch"] != total:
        raise UserError(
            f"the run in {args.save_path} has a total batch of {position['total_batch']}, these arguments"
            f" make {total}; pass --global-batch-size {position['total_batch']}"
        )
    for name, before in position["files"].items():
        if before != checksums.get(name):
            raise UserError(
                f"{getattr(args, name)}: was changed since the run in {args.save_path} began"
                f" (--{name.replace('_', '-')}). Give it the same file, choose another folder, or start"
                " over with --overwrite"
            )


def restore(resumed: dict[str, Any], optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """All but the weights, which are whole in a checkpoint and must be in the model before it is shared out;
    of the optimizer's groups only the rates and decays, since all else is that of this optimizer. All ranks.
    Raises UserError if the checkpoint is of other parameters.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with checkpoint.reading(resumed["path"]):
        state, peaks = resumed["optimizer"], resumed["scheduler"]["base_lrs"]  # of the first start
        for number, moments in state["state"].items():
            shape, shapes = parameters[number].shape, {name: value.shape for name, value in moments.items()}
            if shapes != {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}:
                raise ValueError(f"optimizer: state {number} is that of another model")
        groups = [
            {**own, **{name: saved[name] for name in OF_GROUP if name in saved}, "params": saved["params"]}
            for own, saved in zip(optimizer.state_dict()["param_groups"], state["param_groups"])
        ]
        load_optimizer_state(optimizer, {"state": state["state"], "param_groups": groups})
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["initial_lr"] = float(peak)
        if resumed.get("scaler"):
            precision.scaler.load_state_dict(resumed["scaler"])


# ---- the run


@dataclass(frozen=True)
class Ready:
    """A run that is ready for its steps. options: the other arguments of `histocc.trainer.loop.Run`."""

    model: nn.Module
    loaders: dict[str, BatchLoader]
    optimizer: torch.optim.Optimizer
    state: loop.State
    options: dict[str, Any]


@contextlib.contextmanager
def ready(
    args: TrainConfig,
    world: World,
    precision: Precision,
    training: Training,
    resumed: dict[str, Any] | None,
) -> Generator[Ready | None]:
    """Everything around the steps of a run, which are taken inside: before them the batch arithmetic, DDP or
    FSDP, loaders, the optimizer and what a resumed run had of it; meanwhile log and checkpoints; afterwards
    how it ended, and what the script does with the trained model. All ranks.

    Args:
        resumed: the checkpoint that the run continues from, its weights already in the model. Emptied, so
            that its weights lie in memory once.

    Yields:
        None if no step is left to take, and after a dry run.

    Raises:
        UserError, TrainingError
    """
    raw_model, task, is_resumed = training.model, training.task, resumed is not None
    memory = partial(memory_advice, world=world, smaller_model=training.smaller_model)

    # Which rows a step takes, and how many steps there are.
    if args.batch_size == AUTO:
        with memory(args):
            args = choose_batch_size(args, world, raw_model, task, training.train, precision)
    plan = batch_plan(args, training.train, world)
    state, rate, name = loop.State(), None, uuid.uuid4().hex  # all checkpoints of the run have the name
    if resumed:
        with checkpoint.reading(resumed["path"]):
            position, rate = resumed["position"], resumed["scheduler"]["base_lrs"][0]  # of the first start
            name = position["run"]
            refuse_other_files(args, position, plan.global_batch_size, training.files)
            state = loop.State.resumed(resumed["step"], position, world)
    schedule = Schedule.of(args, plan.steps_per_epoch, world.size, rate)
    if state.step >= schedule.stop and not state.unfinished:
        world.print(nothing_to_do(args.save_path, state.step, schedule))
        finish(args, world, training, raw_model)
        yield None
        return
    loaders = make_loaders(args, world, training.train, training.val, plan)
    world.print(banner(args, world, training.about, training.about_rate, plan, schedule, precision.name))
    resumes = start_lines(args.num_epochs, world, resumed, plan)

    # One process's model, or that of all; the optimizer, and what of it the resumed run had.
    with memory(args, of_steps=False):
        model = wrap(raw_model, world, args.parallel, args.gradient_compression)
    # Two throw-away passes: DDP lays its buckets out again after its first step, so a resumed run would sum
    # the gradients of more than two ranks in another order than one that was never interrupted. FSDP finds
    # out in its first pass which module is the outermost. What torch.compile makes depends on the shapes that
    # it sees first.
    with memory(args):
        batch = loop.to_device(loaders["train"].dataset[0, 0][0], world.device)
        for _ in range(2 * (is_wrapped(model) or args.compile)):
            loop.forward_backward(model, task, batch, precision)
        model.zero_grad(set_to_none=True)
    with memory(args, of_steps=False):
        optimizer = make_optimizer(raw_model, args.weight_decay, schedule.rate, training.fast)
        if resumed:
            restore(resumed, optimizer, precision)
            resumed.clear()
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
        with memory(args):
            dry = loop.Run(model, task, optimizer, **options)
            estimate(args, dry, loaders, state.step, training.fitted_before)
        yield None
        return

    # What it writes: args.json, the lists of the data, rows of the log, checkpoints.
    own = OwnFiles(args.save_path, args.overwrite)
    trackers: list[Tracker] = []
    world.run_on_main(
        "trackers", lambda: trackers.extend(open_trackers(args, name, state.step, world.stop_asked_anywhere))
    )
    if args.overwrite and not is_resumed:
        old = [name for name in own.names if checkpoint.CHECKPOINT.fullmatch(name)]
        world.run_on("clear", world.node_leaders(), lambda: own.remove([*old, ARGS, LOG, STATUS, CURVES]))
    if world.is_main:
        with atomic_write(own.claim(ARGS)[0]) as file:
            file.write(json.dumps((args.asked or args).values(), indent=1, sort_keys=True).encode())
    log = RunLog(
        own,
        log_columns(task.columns),
        schedule.total,
        state.step,
        schedule.stop,
        is_main=world.is_main,
        again=state.unfinished,
        workers=args.num_workers,
        trackers=trackers,
    )
    same_in_all = {
        "files": training.files,
        "total_batch": plan.global_batch_size,
        "steps_per_epoch": plan.steps_per_epoch,
        "fingerprint": training.fingerprint,
        "launchers": sorted(set(world.gather(launcher_id()))),
        "run": name,
    }

    def content(step: int, position: dict[str, Any]) -> dict[str, Any]:
        """Of a checkpoint, whole on rank 0 alone. All ranks."""
        if not (world.is_main or is_sharded(raw_model)):
            return {}
        weights = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
        rates = [group["initial_lr"] for group in optimizer.param_groups]
        return {
            **gather_shares(weights, keep=world.is_main),
            "scheduler": {"base_lrs": rates, "last_epoch": step},
            "scaler": precision.scaler.state_dict(),
            "step": step,
            "format": checkpoint.FORMAT,
            "args": args.values(),
            **training.entries,
            "rng": {"seed": args.seed, "threads": torch.get_num_threads(), "processes": world.size},
            "position": {**same_in_all, **position},
        }

    save = checkpoint.Saver(own, args.keep_checkpoints, world, content, log.say)
    world.print(resumes)
    with contextlib.ExitStack() as ends:
        ends.callback(log.close, "ended by an error")  # unless it is closed before
        profiling = profiled(args.profile if world.is_main else None, own, world.device, log.say)
        step_profiled = ends.enter_context(profiling)

        def step_done() -> None:
            log.step()
            step_profiled()

        options |= {"save": save, "log": log.row, "say": log.say, "step_done": step_done}
        try:
            with memory(args):
                yield Ready(model, loaders, optimizer, state, options)
        except loop.Diverged as error:
            raise TrainingError(f"{error} {way_back(save, world, error.good_step)}") from None
        finished = "finished" if state.step == schedule.total else "at --max-steps"
        log.close(STOPPED if state.stopped else finished, state.step)
    if world.is_main and not state.stopped:
        draw_run(own)
    if save.failed:
        raise TrainingError(
            f"the last checkpoint, of step {state.step:,}, could not be saved: {save.failed}. After that,"
            " give the same command again (without --overwrite): it continues from the checkpoint before, if"
            " there is one."
        )
    say_end(args, world, state, schedule, save.seconds, "val" in loaders)
    if not state.stopped:
        finish(args, world, training, raw_model)


# ---- its end


def finish(args: TrainConfig, world: World, training: Training, raw_model: nn.Module) -> None:
    """What the script does with the trained model. All ranks."""
    if training.finish is not None and not args.dry_run:
        memory = memory_advice(args, world, training.smaller_model)
        with memory, evaluating(raw_model), unsharded(raw_model):
            training.finish(raw_model)


def way_back(save: checkpoint.Saver, world: World, step: int | None) -> str:
    """From where to start again: the newest checkpoint of `step` or of one before. All ranks."""
    here = save.newest_until(step) if world.is_main and step is not None else None
    newest = world.gather(here)[0]
    remedy = "a lower --learning-rate (a third), or more --warmup-pct; with --fp16, --bf16 instead"
    start = f"No checkpoint is known to be good. Start over: --overwrite and {remedy}."
    if newest:
        start = (
            f"The last checkpoint that is known to be good is {newest[0]}, of step {newest[1]:,}. Give it as"
            f" --initial-checkpoint, with another --save-path and {remedy}."
        )
    return f"{start} If that does not help, look for damaged rows in the data."


def say_end(
    args: TrainConfig, world: World, state: loop.State, schedule: Schedule, seconds: float, has_val: bool
) -> None:
    """Where the run ended, why, and how it continues. All ranks. seconds: of the last save."""
    total, without = schedule.total, " without --overwrite" if args.overwrite else ""
    if state.stopped:
        stop_request().acted = True
        reason = next(filter(None, world.gather(stop_request().reason)), "a signal")
        world.print(
            f"Stopped by {reason} at step {state.step:,} of {total:,}, saved in {seconds:.1f} s. The same"
            f" command{without} continues."
        )
        return
    if state.step == total:
        world.print(f"Finished at step {state.step:,}.")
    else:
        world.print(
            f"Stopped at step {state.step:,} of {total:,} (--max-steps). The same command{without} with a"
            " larger --max-steps continues."
        )
    has_best = has_val and os.path.exists(os.path.join(args.save_path, checkpoint.BEST))
    world.print(
        f"Model: {os.path.join(args.save_path, checkpoint.LAST)}"
        + f" (lowest validation loss: {checkpoint.BEST})" * has_best
    )


def nothing_to_do(folder: str, start: int, schedule: Schedule) -> str:
    """What to say if a run has no step left to take. folder: of the run."""
    if start >= schedule.total:
        return (
            f"The run in {folder} is finished ({start:,} steps): nothing to do. "
            "More --num-epochs continue, --overwrite starts over."
        )
    return f"The run in {folder} is at step {start:,}, and --max-steps is {schedule.stop:,}: nothing to do."
