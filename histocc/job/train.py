"""A training job from prepared data to its last checkpoint: what `finetune.py` and `train_mixer.py` have in
common.

`run_training` reads top to bottom: what to continue from, model, batches, schedule, banner, wrap, optimizer,
train.
"""

import argparse
import contextlib
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from histocc.data import keys
from histocc.data.arrays import PreparedData
from histocc.data.augment import Augmenter
from histocc.data.dataset import BatchLoader, MicroBatches
from histocc.data.descriptions import load_descriptions
from histocc.data.joined_rows import JoinedRows
from histocc.formatter import BlockyFormatter
from histocc.job import initial_weights, new_model, recipe
from histocc.job.banner import say_banner, say_start
from histocc.job.recipe import make_loss
from histocc.job.resume import (
    check_files,
    check_total_batch,
    find_resumable,
    nothing_to_do,
    restore,
    set_threads,
)
from histocc.model import model_io
from histocc.model.published import Given
from histocc.runtime import checkpoint, checksums, console
from histocc.runtime.compiling import compile_layers, missing_compiler
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.input_files import opened
from histocc.runtime.lock import run_lock
from histocc.runtime.machine_errors import is_out_of_memory, too_few_open_files
from histocc.runtime.outputs import OwnFiles
from histocc.runtime.parallel import is_sharded, whole, wrap
from histocc.runtime.precision import Precision
from histocc.runtime.rng import derived_seed
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import COLUMNS, MixerTask
from histocc.text_rules import ASCII_LOWER, cleaner
from histocc.trainer import loop, run_files
from histocc.trainer.batch_size import (
    AutoBatchSize,
    find_batch_size,
    model_memory_advice,
    out_of_memory_advice,
    total_batch,
)
from histocc.trainer.hints import Hints
from histocc.trainer.hooks import Callbacks, Intervals, Steps, StopPoll
from histocc.trainer.loggers import Loggers
from histocc.trainer.plan import BatchPlan
from histocc.trainer.profiling import StepProfiler
from histocc.trainer.run_log import STOPPED, RunLog, validation_line
from histocc.trainer.saver import Saver
from histocc.trainer.schedule import Schedule, linear_schedule

_SEED_WEIGHTS, _SEED_ORDER, _SEED_NOISE, _SEED_DROPOUT, _SEED_DESCRIPTIONS, _SEED_JOINED, _SEED_NGRAMS = (
    range(7)
)

LENGTH_GROUPS = 4
LENGTH_GROUP_ROWS = {"cpu": 24, "cuda": 64}  # smaller ones cost more than padding does


def batch_plan(args: argparse.Namespace, rows: int, world: World) -> BatchPlan:
    """The batch arithmetic of the training rows."""
    return BatchPlan(
        rows,
        total_batch(args, world),
        world.size,
        args.batch_size,
        args.length_groups or LENGTH_GROUPS,
        1 if args.length_groups else LENGTH_GROUP_ROWS[world.device.type],
    )


def make_augmenter(args: argparse.Namespace, data: PreparedData) -> Augmenter:
    """The noise on the training texts."""
    words = keys.read_words(args.fn_word_freq or os.path.join(data.folder, "words.csv"))
    texts = [cleaner(data.clean_text)(word) for word in words]
    kept = [i for i, word in enumerate(texts) if word.strip()]
    return Augmenter(
        derived_seed(args.seed, _SEED_NOISE),
        args.num_transformations,
        args.augmentation_prob,
        args.unk_lang_prob,
        words=[texts[i] for i in kept],
        word_weights=np.array(list(words.values()))[kept],
        only_ascii=data.clean_text == ASCII_LOWER,
    )


def make_loaders(
    args: argparse.Namespace,
    world: World,
    data: PreparedData,
    formatter: BlockyFormatter,
    config: dict,
    plan: BatchPlan,
) -> dict[str, BatchLoader]:
    """Loaders of this rank's share of training and validation rows."""
    augmenter = make_augmenter(args, data)
    fixed_width = None if config["memory_mask"] else config["max_len"]
    batches = partial(
        MicroBatches,
        rank=world.rank,
        formatter=formatter,
        data=data,
        max_len=config["max_len"],
        fixed_width=fixed_width,
    )
    workers = {"world": world, "num_workers": args.num_workers, "pin_memory": args.pin_memory}
    if args.num_workers:
        workers |= {"prefetch_factor": args.prefetch_factor, "persistent_workers": args.persistent_workers}
    descriptions = load_descriptions(args, data, formatter, derived_seed(args.seed, _SEED_DESCRIPTIONS))
    joined = None
    if args.join_rows and data.max_codes > 1:
        joined = JoinedRows(data, derived_seed(args.seed, _SEED_JOINED), args.join_rows, config["max_len"])
    elif args.join_rows:
        world.print("Note: --join-rows joins nothing: the formatter has no room for a second code")
    loaders = {
        "train": BatchLoader(
            batches(
                data.train,
                plan,
                shuffle_seed=derived_seed(args.seed, _SEED_ORDER),
                augmenter=augmenter,
                descriptions=descriptions,
                joined=joined,
                first_empty_block=args.empty_blocks == "first",
            ),
            **workers,
        )
    }
    if len(data.val):
        val_plan = BatchPlan(len(data.val), args.batch_size * world.size, world.size, args.batch_size)
        loaders["val"] = BatchLoader(batches(data.val, val_plan), **workers)
    return loaders


def run_training(
    args: argparse.Namespace, world: World, data: PreparedData, formatter: BlockyFormatter, files: list[str]
) -> None:
    """Trains, or continues training, on prepared data, in a folder that no other job uses. All ranks. Raises
    UserError, TrainingError.
    """
    with contextlib.ExitStack() as held:

        def take() -> None:
            held.enter_context(run_lock(args.save_path))
            own = run_files.own_files(args.save_path, args.overwrite)
            checkpoint.remove_leftovers(own)
            console.write_into(own.free_name(console.FILE))

        world.run_on_main("lock", take)
        with advice_on_memory(args, world):
            _train_in_folder(args, world, data, formatter, files)


@dataclass
class Setup:
    """A run that could take its first step. run: its model, as it is spread over the processes, task and
    optimizer; step: the last one that is done.
    """

    raw_model: torch.nn.Module
    run: loop.Run
    config: dict
    plan: BatchPlan
    schedule: Schedule
    loaders: dict[str, BatchLoader]
    resumed: dict | None
    step: int


def set_up(
    args: argparse.Namespace, world: World, data: PreparedData, formatter: BlockyFormatter, files: list[str]
) -> Setup | None:
    """Everything that training needs, in memory; writes nothing. None, said, where there is nothing to do.
    All ranks. Raises UserError.
    """
    precision = Precision.of(args, world.device)
    precision.use()
    if precision.warning():
        world.print(f"WARNING: {precision.warning()}")
    if args.compile and (missing := missing_compiler(world.device)):
        raise UserError(f"--compile needs {missing}")
    model_memory = partial(advice_on_memory, args, world, of_model=True)
    with model_memory():
        resumed = find_resumable(args, world, data)
        set_threads(resumed, world)
        raw_model, config = make_model(args, world, data, formatter, resumed)
        raw_model.to(world.device)
    if isinstance(args.batch_size, AutoBatchSize):
        choose_batch_size(args, world, data, formatter, config, raw_model, precision)
    plan = batch_plan(args, len(data.train), world)
    if resumed:
        check_total_batch(args, resumed, plan)
        check_files(args, resumed, checksums_of_files(args))
    schedule = Schedule.of(
        args, plan.steps_per_epoch, world.size, resumed, *new_model.state_of_outputs(args, raw_model, resumed)
    )
    step = resumed["step"] if resumed else 0
    if step >= schedule.stop and not (resumed and resumed["position"].get("unfinished")):
        world.print(nothing_to_do(args, step, schedule.stop, schedule.total))
        return None
    loaders = make_loaders(args, world, data, formatter, config, plan)
    if args.num_workers:
        share = loaders["train"].dataset[0, 0]
        on_their_way = (args.prefetch_factor or 2) * sum(
            isinstance(value, torch.Tensor) for batch in share for value in batch.values()
        )
        if short := list(filter(None, world.gather(too_few_open_files(args.num_workers, on_their_way)))):
            raise UserError(short[0])
    task = MixerTask(make_loss(args, formatter), formatter)
    say_banner(args, world, data, formatter, raw_model, plan, files, schedule, precision.name)
    if not args.freeze_encoder:
        raw_model.encoder.char_embeddings.train_rows_of(
            torch.from_numpy(loaders["train"].dataset.characters()), config["max_len"]
        )
    with model_memory():
        model = wrap(raw_model, world, args.parallel)
    loop.warm_up_wrapped_model(
        model, task, loaders["train"].dataset[(0, 0)][0], world, precision, compiled=args.compile
    )
    optimizer = make_optimizer(args, raw_model, schedule)
    scheduler = linear_schedule(optimizer, schedule.warmup, schedule.length)
    if resumed:
        with model_memory():
            restore(resumed, optimizer, scheduler, precision)
        # the weights need not lie in memory twice
        resumed = {part: resumed[part] for part in ("args", "position", "step")}
    seed = derived_seed(args.seed, _SEED_DROPOUT)
    run = loop.Run(
        model, task, optimizer, scheduler, world, precision, seed, max_bad_steps=args.max_bad_steps
    )
    return Setup(raw_model, run, config, plan, schedule, loaders, resumed, step)


def _train_in_folder(
    args: argparse.Namespace, world: World, data: PreparedData, formatter: BlockyFormatter, files: list[str]
) -> None:
    asked = {}
    if isinstance(args.batch_size, AutoBatchSize):  # for args.json: the same arguments find it again
        asked = {
            "batch_size": "auto",
            "global_batch_size": args.global_batch_size,
            "accumulate_steps": args.accumulate_steps,
        }
    setup = set_up(args, world, data, formatter, files)
    if setup is None:
        return
    schedule, resumed = setup.schedule, setup.resumed
    position = (resumed or {}).get("position", {})
    name, here = position.get("run") or uuid.uuid4().hex, {}
    own = run_files.own_files(args.save_path, args.overwrite)

    def open_loggers() -> None:
        here["loggers"] = Loggers(args, name, setup.step, own, world.stop_asked_anywhere)

    world.run_on_main("loggers", open_loggers)
    if args.overwrite and not resumed:
        world.run_on("clear", world.node_leaders(), lambda: run_files.clear(own))
    if world.is_main:
        write_run_files(vars(args) | asked, own, data, world.print)
    stop = StopPoll(world.stop_agreed)
    steps = Steps(schedule.total, setup.step, schedule.stop, setup.plan.steps_per_epoch)
    log = RunLog(
        own,
        steps,
        COLUMNS,
        world.is_main,
        again=bool(position.get("unfinished")),
        hints=Hints(schedule.stop, args.num_workers, setup.step, schedule.fitted),
        others=here.get("loggers"),
    )
    save = Saver(
        own, args.keep_checkpoints, world, state_maker(args, world, data, formatter, setup, name), log.say
    )
    say_start(args, world, resumed, setup.step, setup.plan)
    with contextlib.ExitStack() as ends:
        ends.callback(log.close, "ended by an error")  # unless it is closed before
        ends.callback(save.close)
        step_done = log.step
        if args.profile and world.is_main:
            profiler = StepProfiler(args.profile, own, world.device, log.say)

            def step_done() -> None:
                log.step()
                profiler.step_done()

            ends.callback(profiler.close)
        intervals = Intervals(
            args.log_interval,
            args.eval_interval,
            args.save_interval,
            args.check_replicas_every,
            args.save_each_epoch,
        )
        callbacks = Callbacks(save, log.row, step_done, stop)
        step = loop.train(setup.run, setup.loaders, steps, intervals, callbacks, position)
        log.close(STOPPED if stop.agreed else "finished" if step == schedule.total else "at --max-steps")
    if save.finish():
        raise TrainingError(
            f"the last checkpoint, of step {step:,}, could not be saved: {save.failed}. After that, give the"
            " same command again (without --overwrite): it continues from the checkpoint before, if there is"
            " one."
        )
    say_end(args, world, stop, step, schedule, save.seconds, "val" in setup.loaders)


def say_end(
    args: argparse.Namespace,
    world: World,
    stop: StopPoll,
    step: int,
    schedule: Schedule,
    save_seconds: float,
    validates: bool,
) -> None:
    """Where the run ended, why, and how it continues. All ranks."""
    without = " without --overwrite" if args.overwrite else ""
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
            " more continues."
        )
    )
    world.print(
        f"Model: {os.path.join(args.save_path, checkpoint.LAST)}"
        + (
            f" (lowest validation loss: {checkpoint.BEST})"
            if validates and os.path.exists(os.path.join(args.save_path, checkpoint.BEST))
            else ""
        )
    )


def choose_batch_size(
    args: argparse.Namespace,
    world: World,
    data: PreparedData,
    formatter: BlockyFormatter,
    config: dict,
    model: torch.nn.Module,
    precision: Precision,
) -> None:
    """--batch-size auto: sets it, and the total batch, which stays that of the default. All ranks."""
    args.global_batch_size = total_batch(args, world)
    args.accumulate_steps = 1
    task, model = MixerTask(make_loss(args, formatter)), model.to(world.device).train()
    # a GPU must hold the longest texts
    width = config["max_len"] if world.device.type == "cuda" or not config["memory_mask"] else None

    def take(rows: int) -> None:
        batch = trial_batch(data, formatter, config, rows, width, world)
        loop.forward_backward(model, task, batch, precision)

    most = min(-(-args.global_batch_size // world.size), len(data.train))
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    # AdamW's two means, DDP's buckets
    args.batch_size = find_batch_size(take, most, world, still_to_come=3 * trained)
    model.zero_grad(set_to_none=True)
    world.print(
        f"Batch size: {args.batch_size} samples at once per process, chosen automatically; total batch"
        f" {args.global_batch_size}"
    )


def trial_batch(
    data: PreparedData, formatter: BlockyFormatter, config: dict, rows: int, width: int | None, world: World
) -> dict:
    """A micro-batch of `rows` training rows on this rank's device, `width` positions wide (None: as wide as
    they ask for).
    """
    batches = MicroBatches(
        data.train,
        BatchPlan(len(data.train), rows),
        0,
        formatter,
        data,
        max_len=config["max_len"],
        shuffle_seed=0,
        fixed_width=width,
    )
    return loop.to_device(batches[0, 0][0], world.device)


@contextlib.contextmanager
def advice_on_memory(args: argparse.Namespace, world: World, of_model: bool = False):
    """Running out of memory ends with what to type instead, said by the process that it happened to.
    of_model: whatever the batch size.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        advice = model_memory_advice if of_model else out_of_memory_advice
        raise TrainingError(advice(args, world, error), said_by_all=True) from None


def make_model(
    args: argparse.Namespace,
    world: World,
    data: PreparedData,
    formatter: BlockyFormatter,
    resumed: dict | None,
) -> tuple[torch.nn.Module, dict]:
    """(model, its config): random weights, those of --initial-checkpoint, or those of the run that is
    resumed. Settles the arguments.
    """
    first = None
    if args.initial_checkpoint and not resumed:
        first = world.run_on_main("initial weights", lambda: initial_weights.initial_weights(args))
    recipe.settle(args, resumed, first)
    if resumed:
        config = resumed["config"]
    else:
        config = initial_weights.run_config(args, first)
        config["ngrams"], counted = new_model.ngram_config(
            args.ngrams, first, args.only_encoder, world, data, args.max_len
        )
    args.model_size = model_io.size_name(config)
    torch.manual_seed(derived_seed(args.seed, _SEED_WEIGHTS) % 2**32)
    model = model_io.build_model(config, formatter, len(data.codes), args.dropout, args.ngram_dropout)
    new_model.start_at_frequencies(model, data)
    if not resumed and model.ngrams:
        fit = partial(fit_of_ngrams, args, world, data, formatter, model) if first is None else None
        new_model.start_ngrams(model, world, counted, fit, args.freeze_encoder)
    model.to(Precision.of(args, world.device).dtype)
    if resumed:
        model.load_state_dict(resumed["model"])
    if first:
        initial_weights.load_initial_weights(model, args, first, code_numbers(data), formatter, world)
    model.encoder.requires_grad_(not args.freeze_encoder)
    if args.compile:
        compile_layers(model)
    return model, config


def fit_of_ngrams(
    args: argparse.Namespace,
    world: World,
    data: PreparedData,
    formatter: BlockyFormatter,
    model: torch.nn.Module,
) -> float:
    """Fits n-grams and decoders of a new model; the seconds, 0 where nothing is to be fitted. Rank 0 only."""
    fit = (
        f"{len(model.ngrams.idf):,} n-grams and both decoders, before the encoder is trained (--ngram-passes"
        f" {args.ngram_passes})"
    )
    if not args.ngram_passes or args.dry_run:
        world.print(
            f"Not in a dry run, nor in its times: the fit of {fit}"
            if args.ngram_passes
            else "N-grams: not fitted (--ngram-passes 0)"
        )
        return 0.0
    world.print(f"Fitting {fit}")
    return new_model.fit_ngrams(
        model,
        data,
        formatter,
        make_loss(args, formatter),
        args.max_len,
        args.ngram_passes,
        derived_seed(args.seed, _SEED_NGRAMS),
        new_model.progress(world),
    )


def make_optimizer(
    args: argparse.Namespace, model: torch.nn.Module, schedule: Schedule
) -> torch.optim.Optimizer:
    """AdamW over what is trained, all tensors in one pass; the linear decoder with its n-grams, or these
    alone, are a group of their own where their rate is another.
    """
    fast = [] if schedule.ngrams_alone else [*model.linear_decoder.parameters()]
    fast = (
        [*fast, *(model.ngrams.parameters() if model.ngrams else ())] if schedule.linear_factor != 1 else []
    )
    groups = [{"params": [p for p in model.parameters() if p.requires_grad and p not in set(fast)]}]
    if fast:
        groups.append({"params": fast, "lr": schedule.rate * schedule.linear_factor})
    return torch.optim.AdamW(groups, lr=schedule.rate, weight_decay=args.weight_decay, fused=True)


def code_numbers(data: PreparedData) -> dict[str, int]:
    return {code: i for i, code in enumerate(data.codes)}


def checksums_of_files(args: argparse.Namespace) -> dict[str, int]:
    """Of the files beside the rows that decide the result, by flag. Raises UserError."""
    found = {}
    for dest in ("fn_word_freq", "descriptions_file"):
        if path := getattr(args, dest):
            with opened(path):  # a regular file that can be read
                found[dest] = checksums.of_file(path)
    return found


def state_maker(
    args: argparse.Namespace,
    world: World,
    data: PreparedData,
    formatter: BlockyFormatter,
    setup: Setup,
    name: str,
) -> Callable[[int, dict], dict]:
    """What makes the content of a checkpoint out of (step, position): called on all ranks, and whole on rank
    0 alone. All ranks. name: what all checkpoints of a run have in common.
    """
    fixed = {
        "format": checkpoint.FORMAT,
        "config": setup.config,
        "formatter": formatter.to_dict(),
        "key": code_numbers(data),
        "system": model_io.system_name(formatter),
        "languages": data.languages,
        "args": vars(args),
        "kept_codes": data.kept_codes,
        "hisco_numbers": data.hisco_numbers,
        **recipe.coding_entries(args, setup.raw_model.ngrams is not None, data),
        "rng": {"seed": args.seed, "threads": torch.get_num_threads(), "processes": world.size},
    }
    facts = {
        "files": checksums_of_files(args),
        "total_batch": setup.plan.global_batch_size,
        "steps_per_epoch": setup.plan.steps_per_epoch,
        "fingerprint": data.fingerprint,
        "launchers": sorted(set(world.gather(world.launcher))),
        "run": name,
    }

    def state(step: int, position: dict) -> dict:
        if not (world.is_main or is_sharded(setup.raw_model)):
            return {}
        epoch, batch = divmod(step, setup.plan.steps_per_epoch)
        weights = whole(
            {"model": setup.raw_model.state_dict(), "optimizer": setup.run.optimizer.state_dict()},
            keep=world.is_main,
        )
        return {
            **weights,
            "scheduler": setup.run.scheduler.state_dict(),
            "scaler": setup.run.precision.state(),
            "step": step,
            **fixed,
            "position": {"epoch": epoch, "batch": batch, **facts, **position},
        }

    return state


def write_run_files(args: dict, own: OwnFiles, data: PreparedData, say: Callable[[str], None]) -> None:
    """args.json of the run, and what was found in its data. Rank 0 only."""
    run_files.write_args(own, args, say)
    run_files.copy_lists(data.folder, own, say)


def run_evaluation(
    args: argparse.Namespace, world: World, data: PreparedData, formatter: BlockyFormatter
) -> None:
    """Validates a checkpoint and prints the figures; writes nothing. All ranks."""
    file = model_io.find_weights(
        args.initial_checkpoint or args.save_path, args.initial_checkpoint or args.save_path
    )
    content = model_io.load_state(file)
    key = keys.key_reader(args.initial_key or args.key)
    given = Given(args.formatter, key, args.target_cols, args.use_within_block_sep)
    model, own_formatter, state = model_io.model_of(
        file, content, Given() if model_io.brings_settings(content) else given
    )
    model.to(world.device)
    rest = {"target_cols": None, "allow_short": None}
    if own_formatter.to_dict() | rest != formatter.to_dict() | rest:
        raise UserError(
            f"the checkpoint was trained with the formatter {own_formatter.to_dict()}, "
            f"these arguments make {formatter.to_dict()}"
        )
    if list(state["key"]) != data.codes:
        raise UserError(
            "the checkpoint knows other codes than the data; pass --key with the key.csv of its run"
        )
    recipe.settle(args, state)
    loaders = make_loaders(
        args, world, data, formatter, state["config"], batch_plan(args, len(data.train), world)
    )
    if "val" not in loaders:
        raise UserError("--eval-only needs rows to validate on; raise --share-val")
    precision = Precision.of(args, world.device)
    precision.use()
    model.to(precision.dtype)
    task = MixerTask(make_loss(args, formatter), formatter)
    values = loop.evaluate(model, loaders["val"], task, world, precision, StopPoll(world.stop_agreed))
    if values is None:
        raise Stopped
    world.print(validation_line({"step": state.get("step") or 0, **values}, COLUMNS))
