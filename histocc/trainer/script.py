"""A run of any model, from its folder to its end, and `train`, a script for any model. See examples/ and
docs/your-own-model.md.
"""

import contextlib
import hashlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from histocc.figure import STATUS
from histocc.runtime import checkpoint, parallel, signals
from histocc.runtime.config import AUTO, Parser, differing, flag_of
from histocc.runtime.device import Precision, compile_layers
from histocc.runtime.errors import TrainingError, Unreadable, UserError, raise_if_any
from histocc.runtime.files import OwnFiles, atomic_write, is_same, problems, run_lock, save_path_problems
from histocc.runtime.log import counted
from histocc.runtime.rng import DROPOUT, WEIGHTS, derived_seed
from histocc.runtime.world import World, launcher_id
from histocc.trainer import loop
from histocc.trainer.banner import banner, start_lines
from histocc.trainer.batches import BatchLoader, Rows, batch_plan, make_loader
from histocc.trainer.config import ScriptConfig, TrainConfig
from histocc.trainer.estimate import choose_batch_size, estimate, memory_advice
from histocc.trainer.log import LOG, RunLog, log_columns, validation_line
from histocc.trainer.schedule import Schedule, linear_factor, make_optimizer
from histocc.trainer.trackers import OF_PROFILE, Tracker, open_trackers, profiled

ARGS = "args.json"


@dataclass(frozen=True)
class Training:
    """The model, task and rows of a run."""

    model: nn.Module  # bare, on its device, with the weights to start or continue from
    task: loop.Task
    train: Rows
    val: Rows | None = None  # None: no validation
    entries: dict[str, Any] = field(default_factory=dict[str, Any])  # for its checkpoints, to use the model
    fingerprint: str = ""  # hash of the rows, since a run resumes on the same rows only
    files: dict[str, int] = field(default_factory=dict[str, int])  # checksums of other files, by flag
    fast: tuple[Sequence[str], float] = ((), 1.0)  # parameters with a separate rate, its factor
    flops: Callable[[dict[str, Any]], float] | None = None  # see `histocc.trainer.loop`
    about: Sequence[str] = ()  # lines for the banner
    about_rate: str = ""
    epoch_name: str = checkpoint.EPOCH  # name of an epoch's checkpoint, {} for its number
    best_by: Callable[[dict[str, Any]], float] | None = None  # see `histocc.trainer.loop`
    is_fitted: bool = False  # a new model already works: validate and save it before training
    is_announced: bool = False  # the banner has been printed
    steps_before: int = 0  # steps of a fit, also counted in the progress
    # called on all ranks when no step is left, with the whole model in evaluation mode
    finish: Callable[[nn.Module], object] | None = None


# ---- before the model


def number_format(args: TrainConfig, world: World) -> Precision:
    """Set and return the number format to compute in. Raises UserError if the device lacks it."""
    precision = Precision.of(args, world.device)
    precision.use()
    if precision.warning():
        world.print(f"WARNING: {precision.warning()}")
    return precision


def output_problems(
    args: TrainConfig, inputs: dict[str | None, str], files: OwnFiles, lists: Sequence[str] = ()
) -> list[str]:
    """Return why a run may not write its files. inputs: the role of each file. lists: files of its data."""
    if args.eval_only or args.dry_run:
        return []
    if args.config and is_same(args.config, files.path(ARGS)) and files.holds(args.config):
        inputs = {path: what for path, what in inputs.items() if path != args.config}  # read already
    names = [ARGS, LOG, STATUS, *lists, checkpoint.LAST, checkpoint.BEST]
    names += OF_PROFILE if args.profile else ()
    return problems(map(files.path, names), inputs, args.overwrite, files)


@contextlib.contextmanager
def held_folder(args: TrainConfig, world: World) -> Generator[None]:
    """Lock the folder of a run, remove leftovers, and hold files for stacks. All ranks. Raises UserError."""
    if args.dry_run:
        yield
        return
    with contextlib.ExitStack() as held:

        def lock() -> list[str]:
            held.enter_context(run_lock(args.save_path))
            files = OwnFiles(args.save_path, args.overwrite)
            files.remove_leftovers()
            return files.claim(*map(signals.STACKS.format, range(world.size)))

        with signals.stacks_in(world.run_on_main(lock), world.rank, world.time_limit):
            yield


# ---- the checkpoint that a run resumes from


def refuse_other_data(folder: str) -> NoReturn:
    raise UserError(
        f"{folder} holds a run on other data (or data prepared with other settings, or by another version of"
        " histocc). Use the same files and the version that began it, choose another folder, or start"
        " over with --overwrite."
    )


def find_resumable(
    args: TrainConfig,
    world: World,
    read: Callable[[str], dict[str, Any]],
    refuse: Callable[[dict[str, Any]], None],
    fingerprint: str,
) -> dict[str, Any] | None:
    """Return the checkpoint to resume from, with its file as `path`, or None. All ranks. Raises UserError."""
    state, is_on_main = newest_of_nodes(args, world, read)
    if state is None:
        return None
    with checkpoint.reading(state["path"]):
        refuse(state)
        if state["position"]["fingerprint"] != fingerprint:
            refuse_other_data(args.save_path)
        set_threads(state["rng"], world)
    files = OwnFiles(args.save_path, args.overwrite)
    if is_on_main and state["path"] == files.path(checkpoint.LAST) and not args.dry_run:
        world.run_on_main(lambda: checkpoint.complete(files, state, args.keep_checkpoints), limited=True)
    return state


def newest_of_nodes(
    args: TrainConfig, world: World, read: Callable[[str], dict[str, Any]]
) -> tuple[dict[str, Any] | None, bool]:
    """Return the newest checkpoint, the same on all ranks, and whether the node of rank 0 has it. If nodes
    have separate folders, the newest of all is sent to every rank. All ranks. Raises UserError.
    """
    read_here: dict[str, dict[str, Any]] = {}  # by the file
    launchers = set(world.gather(launcher_id())) - {""}

    def newest() -> tuple[int, str, Any, list[str]] | None:
        if not checkpoint.exists_in(args.save_path):
            return None
        try:
            path, state, damaged = checkpoint.newest_good(args.save_path, read)
        except UserError as error:
            if args.overwrite and not isinstance(error, Unreadable):  # a restart must find it again
                return None
            raise
        with checkpoint.reading(path):
            if args.overwrite and not launchers & set(state["position"]["launchers"]):
                return None  # a restart by the launcher starts nothing over
            read_here[path] = state
            return int(state["step"]), path, state.get(checkpoint.CHECKSUM), damaged

    leaders = world.node_leaders()
    of_nodes = world.run_on(leaders, newest)
    source, best = max(zip(leaders, of_nodes), key=lambda pair: pair[1][0] if pair[1] else -1)
    if best is None:
        return None, False
    _, path, _, damaged = best
    if damaged:
        end = f"Continuing from {path} instead."
        world.print("\n  ".join(["WARNING: a newer checkpoint cannot be used:", *damaged, end]))
    if all(of_node == best for of_node in of_nodes):
        state = read_here.get(path) or read(path)
    else:
        state = world.broadcast(read_here.get(path), source)
    return {**state, "path": path}, of_nodes[0] == best


def set_threads(first: dict[str, int], world: World) -> None:
    """Set the number of threads of the first start, since it affects the last bits of sums."""
    threads, now = first["threads"], torch.get_num_threads()
    if threads != now and first["processes"] == world.size:
        torch.set_num_threads(threads)
        world.print(f"Threads per process: set to {threads}, as in the run so far")
    elif threads != now:
        world.print(f"Threads per process: {now}, not {threads} as before; last digits may differ")


def refuse_other_arguments(args: TrainConfig, state: dict[str, Any], more: list[str]) -> None:
    """Raise UserError if arguments that affect the result differ from `state`. more: other differences."""
    saved, now, epochs = {**state["args"]}, args.values(), state["args"]["num_epochs"]
    as_before = replace(args, num_epochs=epochs, warmup_steps=None)
    warmup = Schedule.of(as_before, state["position"]["steps_per_epoch"], 1, 1.0).warmup
    for values in (saved, now):  # the same warm-up given as a share is not a difference
        if values.get("warmup_steps") is None:
            values["warmup_steps"] = warmup
    different = differing(type(args), now, saved) + more
    if args.num_epochs < epochs:
        different.append(f"--num-epochs was {epochs}, now it is {args.num_epochs}; only more can continue")
    if different:
        different.append("Repeat them as they were, choose another folder, or start over with --overwrite.")
        raise UserError("\n  ".join([f"{args.save_path} holds a run with other arguments:", *different]))


def restore(resumed: dict[str, Any], optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """Load optimizer state, rates and scaler from a checkpoint. All ranks. Raises UserError."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with checkpoint.reading(resumed["path"]):
        state, peaks = resumed["optimizer"], resumed["scheduler"]["base_lrs"]  # from the first start
        for number, moments in state["state"].items():
            shape, shapes = parameters[number].shape, {name: value.shape for name, value in moments.items()}
            if shapes != {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}:
                raise ValueError(f"optimizer: state {number} belongs to another model")
        groups = [
            {**now, "lr": saved["lr"], "params": saved["params"]}
            for now, saved in zip(optimizer.state_dict()["param_groups"], state["param_groups"])
        ]
        parallel.load_optimizer_state(optimizer, {"state": state["state"], "param_groups": groups})
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["initial_lr"] = float(peak)
        if resumed.get("scaler"):
            precision.scaler.load_state_dict(resumed["scaler"])


# ---- the run


@dataclass(frozen=True)
class OpenRun:
    """A run between `open_run` and `close`, with the inputs of its steps and the files that they write."""

    run: loop.Run
    loaders: dict[str, BatchLoader]
    state: loop.State
    schedule: Schedule
    log: RunLog
    saver: checkpoint.Saver
    resources: contextlib.ExitStack  # around the steps: closes the log if they fail, and the measurements

    def close(self) -> None:
        """Report how the steps ended. All ranks. Raises TrainingError if the last save failed."""
        self.saver.wait_for_space()
        run, state, total, files = self.run, self.state, self.schedule.total, self.saver.files
        is_early, world = ended_early(run.patience, state, self.schedule), run.world
        finished = "finished" if is_early or state.step == total else "at --max-steps"
        self.log.close("stopped" if state.stopped else finished, state.step)
        if self.saver.failed:
            raise TrainingError(
                f"the last checkpoint, of step {state.step:,}, could not be saved: {self.saver.failed}. After"
                " that, the same command (without --overwrite) continues from the checkpoint before, if any."
            )
        where, same = f"at step {state.step:,}", "The same command" + " without --overwrite" * files.overwrite
        if state.stopped:
            signals.stop_request().acted = True
            reason = next(filter(None, world.gather(signals.stop_request().reason)), "a signal")
            saved = f"saved in {self.saver.seconds:.1f} s. {same} continues."
            return world.print(f"Stopped by {reason} {where} of {total:,}, {saved}")
        how = f"Finished {where}." if total else "Finished: the fit was all of the training."
        if is_early:
            how = f"No better for {counted(state.since_best, 'validation')}: finished {where} of {total:,}."
            how += f" {same} with a larger --patience continues."
        elif state.step < total:
            how = f"Stopped {where} of {total:,}. {same} with a larger --max-steps continues."
        has_best = "val" in self.loaders and os.path.exists(files.path(checkpoint.BEST))
        what = "lowest validation loss" if run.best_by is None else "highest accuracy"
        best = f" ({what}: {checkpoint.BEST})" * has_best
        world.print(f"{how}\nModel: {files.path(checkpoint.LAST)}{best}")
        run.optimizer.state.clear()  # frees twice the size of the weights for later work


def open_run(
    args: TrainConfig, world: World, precision: Precision, training: Training, resumed: dict[str, Any] | None
) -> OpenRun | None:
    """Make everything around the steps of a run: batches, schedule, the wrapped model, optimizer, log. Return
    None if no step is left, or after a dry run. All ranks. The caller takes the steps inside `resources` and
    calls `close` there. `resumed`, whose weights are in the model, is emptied, so that memory holds them
    once. Raises UserError, TrainingError, on all ranks alike.
    """
    is_resumed = resumed is not None
    if args.patience and training.val is None:
        raise UserError("--patience needs rows to validate on")
    with contextlib.ExitStack() as resources:
        # The batch arithmetic, and where the interrupted run was.
        if args.batch_size == AUTO:
            of_run = world, training.model, training.task, training.train, precision
            args = args.with_decided(**choose_batch_size(args, *of_run))
        resources.enter_context(memory_advice(args, world))
        plan = batch_plan(args, training.train, world)
        state, rate, name = place_of(args, world, training, plan.global_batch_size, resumed)
        schedule = Schedule.of(args, plan.steps_per_epoch, world.size, rate)
        if resumed and (nothing := nothing_left(args.patience, state, schedule)):
            return world.print(f"The run in {args.save_path} is {nothing}")
        loaders = {"train": make_loader(args, world, training.train, plan)}
        if training.val is not None:
            loaders["val"] = make_loader(args, world, training.val)
        if not training.is_announced:
            world.print(banner(args, world, training.about, training.about_rate, plan, schedule))

        # The wrapped model and its optimizer, and a dry run of them.
        said = start_lines(args.num_epochs, world, plan, resumed)
        run = make_run(args, world, precision, training, schedule, loaders["train"], resumed)
        if args.dry_run:
            return estimate(run, loaders["train"], state.step)
        world.print(said)

        # The files that it writes: args.json, rows of the log, checkpoints.
        files = OwnFiles(args.save_path, args.overwrite)
        log = open_log(args, world, files, training, schedule, state, name, is_resumed)
        resources.callback(log.close, "ended by an error")  # unless it is closed before
        same_in_all = {
            "files": training.files,
            "total_batch": plan.global_batch_size,
            "steps_per_epoch": plan.steps_per_epoch,
            "fingerprint": training.fingerprint,
            "launchers": sorted(set(world.gather(launcher_id()))),
            "run": name,
        }
        content = partial(checkpoint_content, args, training, run, same_in_all)
        saver = checkpoint.Saver(files, args.keep_checkpoints, world, content, log.say)
        steps_to_profile = args.profile if world.is_main else None
        step_profiled = resources.enter_context(profiled(steps_to_profile, files, world.device, log.say))
        run = replace(run, save=saver, log=log.row, step_done=lambda: (log.step(), step_profiled()))
        return OpenRun(run, loaders, state, schedule, log, saver, resources.pop_all())


def announce(args: TrainConfig, world: World, training: Training) -> int:
    """Print the banner of a new run. Return the step at which it ends. All ranks."""
    plan = batch_plan(args, training.train, world)
    schedule = Schedule.of(args, plan.steps_per_epoch, world.size)
    world.print(banner(args, world, training.about, training.about_rate, plan, schedule))
    return schedule.stop


def make_run(
    args: TrainConfig,
    world: World,
    precision: Precision,
    training: Training,
    schedule: Schedule,
    loader: BatchLoader,
    resumed: dict[str, Any] | None,
) -> loop.Run:
    """Return the run of the loop, without its files. Empties `resumed`. All ranks. Raises UserError."""
    model = parallel.wrap(training.model, world, args.parallel)
    if world.backend is not None or args.compile:
        loop.warm_up(model, training.task, loader, world, precision)
    optimizer = make_optimizer(training.model, args.weight_decay, schedule.rate, training.fast)
    is_new = resumed is None
    if resumed:
        restore(resumed, optimizer, precision)
        resumed.clear()
    return loop.Run(
        model,
        training.task,
        optimizer,
        world,
        precision,
        seed=derived_seed(args.seed, DROPOUT),
        rate_factor=partial(linear_factor, warmup_steps=schedule.warmup, total_steps=schedule.length),
        flops=training.flops,
        stop_step=schedule.stop,
        steps_per_epoch=loader.plan.steps_per_epoch,
        log_interval=args.log_interval,
        eval_interval=args.eval_interval,
        save_interval=args.save_interval,
        best_by=training.best_by,
        patience=args.patience,
        validate_first=(training.is_fitted or not schedule.total) and is_new,
        epoch_name=training.epoch_name if args.save_each_epoch else "",
        stop=world.stop_agreed,
    )


def place_of(
    args: TrainConfig, world: World, training: Training, total_batch: int, resumed: dict[str, Any] | None
) -> tuple[loop.State, float | None, str]:
    """Return (state, peak rate, name) of the run. All ranks. Raises UserError for other batches or files."""
    if not resumed:
        return loop.State(), None, uuid.uuid4().hex
    with checkpoint.reading(resumed["path"]):
        position = resumed["position"]
        if resumed["step"] and position["total_batch"] != total_batch:
            raise UserError(
                f"the run in {args.save_path} has a total batch of {position['total_batch']}, these"
                f" arguments make {total_batch}; pass --global-batch-size {position['total_batch']}"
            )
        for flag, crc in position["files"].items():
            if crc != training.files.get(flag):
                raise UserError(
                    f"{getattr(args, flag)}: was changed since the run in {args.save_path} began"
                    f" ({flag_of(flag)}). Give it the same file, or start over with --overwrite"
                )
        state = loop.State.resumed(resumed["step"], position, world)
        return state, resumed["scheduler"]["base_lrs"][0], position["run"]


def ended_early(patience: int | None, state: loop.State, schedule: Schedule) -> bool:
    """Return whether --patience ended a run before its last step."""
    return state.is_out_of(patience) and state.step < schedule.total


def nothing_left(patience: int | None, state: loop.State, schedule: Schedule) -> str:
    """Return a message that says why a resumed run has no step left, or "" if it has one."""
    is_early = ended_early(patience, state, schedule)
    if state.unfinished or not is_early and state.step < schedule.stop:
        return ""
    if is_early:
        more = f"No better for {counted(state.since_best, 'validation')}: a larger --patience continues, "
    elif state.step < schedule.total:
        return f"at step {state.step:,}, and --max-steps is {schedule.stop:,}: nothing to do. More continue."
    else:
        more = "More --num-epochs continue, " * bool(schedule.total)
    steps = f" ({counted(state.step, 'step')})" * bool(state.step)
    return f"finished{steps}: nothing to do. {more}--overwrite starts over."


def open_log(
    args: TrainConfig,
    world: World,
    files: OwnFiles,
    training: Training,
    schedule: Schedule,
    state: loop.State,
    name: str,
    is_resumed: bool,
) -> RunLog:
    """Write args.json, remove what --overwrite replaces, and open the log and the trackers. All ranks."""
    trackers: list[Tracker] = []
    world.run_on_main(lambda: trackers.extend(open_trackers(args, args.values(), name, state.step)))
    if args.overwrite and not is_resumed:
        old = [name for name in files.names if checkpoint.CHECKPOINT.fullmatch(name)]
        old += [ARGS, LOG, STATUS] if schedule.total else [ARGS]  # otherwise the fit has begun the log
        world.run_on(world.node_leaders(), lambda: files.remove(old))
    if world.is_main:
        write_args(args, files)
    # a new run drops all rows, unless it consists only of a fit
    columns, keeps_rows = log_columns(training.task.columns), is_resumed or not schedule.total
    counts = schedule.total, state.step if keeps_rows else -sys.maxsize, schedule.stop
    again = state.unfinished or not is_resumed
    main, before = world.is_main, training.steps_before
    return RunLog(files, columns, *counts, is_main=main, again=again, trackers=trackers, steps_before=before)


def write_args(args: TrainConfig, files: OwnFiles) -> None:
    """Write args.json: the flags of a run as the user gave them. Rank 0 only."""
    asked = {**(args.asked or args).values(), "made_by": checkpoint.made_by()}
    with atomic_write(files.claim(ARGS)[0]) as file:
        file.write(json.dumps(asked, indent=1, sort_keys=True).encode())


def checkpoint_content(
    args: TrainConfig,
    training: Training,
    run: loop.Run,
    same_in_all: dict[str, Any],
    step: int,
    position: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of a checkpoint, complete only on rank 0. All ranks."""
    world, model, optimizer = run.world, training.model, run.optimizer
    if not (world.is_main or parallel.is_sharded(model)):
        return {}
    weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    rates = [group["initial_lr"] for group in optimizer.param_groups]
    return {
        **parallel.gather_shares(weights, keep=world.is_main),
        "scheduler": {"base_lrs": rates, "last_epoch": step},
        "scaler": run.precision.scaler.state_dict(),
        "step": step,
        "format": checkpoint.FORMAT,
        "made_by": checkpoint.made_by(),
        "args": args.values(),
        **training.entries,
        "rng": {"seed": args.seed, "threads": torch.get_num_threads(), "processes": world.size},
        "position": {**same_in_all, **position},
    }


# ---- a script for any model


def train(parser: Parser, args: ScriptConfig, world: World, make: Callable[[], Training]) -> None:
    """Do what the arguments ask with the model that `make` returns: start or continue a run, make a dry run,
    or validate. All ranks. Raises UserError, TrainingError.

    make: called on every rank after the arguments are checked and before anything is written, with torch's
    generator seeded, so that the weights are the same everywhere. It raises UserError for unusable data.
    """

    def check_arguments() -> None:
        raise_if_any([*args.problems(), *save_path_problems(args.save_path)])
        files = OwnFiles(args.save_path, args.overwrite)
        raise_if_any(output_problems(args, {args.config: "the file of --config"}, files))

    world.run_on_main(check_arguments)
    torch.manual_seed(derived_seed(args.seed, WEIGHTS) % 2**32)
    training = make()
    rows = [rows for rows in (training.train, training.val) if rows is not None]
    if not all(map(len, rows)):
        raise UserError("there are no rows to train or validate on")
    fingerprint = training.fingerprint or " ".join(part.fingerprint or str(len(part)) for part in rows)
    of_ranks = world.gather(fingerprint)
    if others := ", ".join(str(rank) for rank, other in enumerate(of_ranks) if other != of_ranks[0]):
        raise UserError(f"ranks {others} have other data than rank 0: copy the same to every node")
    training = replace(
        training,
        entries={"config": {}, **training.entries, "script": os.path.basename(parser.prog)},
        fingerprint=hashlib.sha256(fingerprint.encode()).hexdigest()[:32],
        epoch_name=checkpoint.EPOCH_OF_ANY,
    )
    model, precision = training.model, number_format(args, world)
    model.to(precision.dtype)
    if args.eval_only:
        return validate(args, world, precision, training)

    def refuse(state: dict[str, Any]) -> None:
        """Also refuse checkpoints of another script or another model."""
        before, now = ({"script": x.get("script"), **x.get("config", {})} for x in (state, training.entries))
        more = [
            f"{name} was {before.get(name)!r}, now it is {now.get(name)!r}"
            for name in sorted({*before, *now}, key=str)
            if before.get(name) != now.get(name)
        ]
        refuse_other_arguments(args, state, more)

    with held_folder(args, world):
        resumed = find_resumable(args, world, checkpoint.load_resumable, refuse, training.fingerprint)
        if resumed:
            with checkpoint.reading(resumed["path"]):
                model.load_state_dict(resumed["model"])
        elif args.initial_checkpoint:
            _load_weights(world, model, args.initial_checkpoint, "--initial-checkpoint")
        if args.compile:
            compile_layers(model)
        model.to(world.device)
        if opened := open_run(args, world, precision, training, resumed):
            with opened.resources:
                loop.train(opened.run, opened.loaders, opened.state)
                opened.close()
        if not (args.dry_run or opened and opened.state.stopped):
            finish(training)


def validate(args: ScriptConfig, world: World, precision: Precision, training: Training) -> None:
    """Validate a checkpoint and print the figures, for --eval-only. All ranks. Raises UserError."""
    if training.val is None:
        raise UserError("--eval-only needs rows to validate on")
    file = _load_weights(world, training.model, args.initial_checkpoint or args.save_path, "--eval-only:")
    training.model.to(world.device)
    loader = make_loader(args, world, training.val)
    values = loop.evaluate(training.model, loader, training.task, world, precision, world.stop_agreed)
    values["step"] = checkpoint.step_of(file) or 0
    world.print(validation_line(values, log_columns(training.task.columns)))
    finish(training)


def finish(training: Training) -> None:
    """Call the script's function for the end of a run, with the whole model. All ranks."""
    if training.finish is not None:
        with parallel.evaluating(training.model), parallel.unsharded(training.model):
            training.finish(training.model)


def read_checkpoint(path: str, flag: str) -> tuple[dict[str, Any], str]:
    """Return (content, file) of a checkpoint or a run's folder. flag: begins a message. Raises UserError."""
    if file := checkpoint.find(path, (checkpoint.BEST, checkpoint.LAST)):
        return checkpoint.load(file), file
    raise UserError(f"{flag} {path}: no checkpoint there (neither a file nor a folder of a run)")


def _load_weights(world: World, model: nn.Module, path: str, flag: str) -> str:
    """Copy weights from a run or state dict, read on rank 0. Return its file. All ranks. Raises UserError."""

    def read() -> tuple[dict[str, Any], str]:
        state, file = read_checkpoint(path, flag)
        with checkpoint.reading(file):
            return state.get("model", state.get(checkpoint.SECOND_NAME, state)), file

    weights, file = world.run_on_main(read)
    with checkpoint.reading(file):
        model.load_state_dict(weights)
    return file
