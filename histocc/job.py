"""A training job from its arguments to its last checkpoint: what `finetune.py` and `train_mixer.py` have in common.

`run_training` reads top to bottom: check, prepare, model, resume, wrap, train.
"""

import argparse
import json
import os
import shutil
from functools import partial

import torch

from histocc import checkpoint, prepare, tables
from histocc import seq2seq_mixer_engine as engine
from histocc.arrays import PreparedData
from histocc.augment import Augmenter
from histocc.canine import CanineConfig
from histocc.cli import MAY_DIFFER_ON_RESUME, argument_problems, save_path_problem
from histocc.counter_rng import derived_seed
from histocc.dataset import BatchLoader, MicroBatches
from histocc.distributed import UserError, World, wrap
from histocc.formatter import PAD_IDX, BlockyFormatter, CodeError, make_formatter
from histocc.loss import BlockOrderInvariantLoss, LossMixer
from histocc.lr_schedule import linear_schedule, scaled_learning_rate
from histocc.mixer import MODEL_SIZES, Seq2SeqMixerOccCANINE, model_config
from histocc.run_log import RunLog
from histocc.sampler import BatchPlan

_SEED_WEIGHTS, _SEED_ORDER, _SEED_NOISE, _SEED_DROPOUT = range(4)


# ---- before the run: what is to be read, and is it sound ----

def settings_from(args: argparse.Namespace, train_files: list[str], val_files: list[str],
                  naming: str = "hisco") -> prepare.PrepareSettings:
    """Rank 0 only. What is to be prepared, after checking arguments, files and folder together.

    Raises one UserError with all problems.
    """
    problems = argument_problems(args)
    problems += [problem for problem in [save_path_problem(args.save_path)] if problem]
    fixed = formatter = None
    try:
        if not args.target_cols:
            args.target_cols = _find_target_cols(args, train_files[0], naming)
        formatter = make_formatter(args.formatter, args.target_cols, args.block_size, args.use_within_block_sep,
                                   args.allow_codes_shorter_than_block_size)
        fixed = _fixed_codes(args, formatter)
    except (UserError, ValueError) as error:
        problems.append(str(error))
    settings = prepare.PrepareSettings(
        train_files=train_files, val_files=val_files, formatter=formatter.to_dict() if formatter else {},
        target_cols=args.target_cols or [], share_val=getattr(args, "share_val", None), input_col=args.input_col,
        language=args.language, language_col=args.language_col, max_len=args.max_len, missing_code=args.missing_code,
        drop_bad_labels=args.drop_bad_labels, fixed_codes=fixed,
        numbered=bool(args.key) and tables.hold_numbers(args.target_cols or []))
    problems += [problem for problem in prepare.file_problems(settings) if problem not in problems]
    problems += _missing_code_problem(formatter, args.missing_code)
    if problems:
        raise UserError(problems[0] if len(problems) == 1 else
                        "\n  ".join([f"{len(problems)} problems:", *(p.replace("\n", "\n  ") for p in problems)]))
    return settings


def _find_target_cols(args: argparse.Namespace, path: str, naming: str) -> list[str]:
    found = tables.find_target_columns(tables.read_header(path)[0], naming, has_key=bool(args.key))
    if found is None:
        raise UserError(f"{path}: has none of the columns {naming}_1, OCC1950_1; name yours with --target-cols")
    return found[1]


def _fixed_codes(args: argparse.Namespace, formatter: BlockyFormatter) -> list[str] | None:
    """Codes of --key or --all-codes-file as the formatter writes them. Raises UserError."""
    path = args.key or args.all_codes_file
    if not path:
        return None
    cells = tables.read_key(path) if args.key else tables.read_column(path, args.all_codes_col or args.target_cols[0])
    codes = [formatter.repair(cell)[0] for cell in cells if cell]
    try:
        for code in codes:
            formatter.encode_code(code)
    except CodeError as error:
        raise UserError(f"{path}: {error}") from None
    return codes if args.key else sorted(set(codes))


def _missing_code_problem(formatter: BlockyFormatter | None, code: str | None) -> list[str]:
    try:
        if formatter is not None and code is not None:
            formatter.encode_code(code)
    except CodeError as error:
        return [f"--missing-code: {error}"]
    return []


def prepared(args: argparse.Namespace, world: World, train_files: list[str], val_files: list[str],
             naming: str = "hisco") -> tuple[PreparedData, BlockyFormatter]:
    """Checks everything and prepares the data on rank 0 while the others wait; every rank maps the result. All ranks."""
    def work() -> list:
        settings = settings_from(args, train_files, val_files, naming)
        if checkpoint.exists_in(args.save_path) and not (args.overwrite or args.prepare_only or args.eval_only):
            refuse_other_arguments(args, checkpoint.load(os.path.join(args.save_path, checkpoint.LAST)))
        return [prepare.prepare(settings, args.save_path, world.print), args.target_cols, settings.formatter]
    folder, args.target_cols, formatter = world.main_first("prepare", work)
    if not os.path.isfile(os.path.join(folder, "meta.json")):
        raise UserError(f"rank {world.rank} finds no prepared data in {folder}: all nodes need the same --save-path "
                        "on a shared file system")
    data = PreparedData.open(folder)
    for line in prepare.report_lines(data.report):
        world.print(line)
    return data, BlockyFormatter.from_dict(formatter)


def refuse_other_arguments(args: argparse.Namespace, state: dict) -> None:
    """Raises UserError where a resumed run is asked for with arguments that decide the result and differ."""
    different = checkpoint.differing_args(state["args"], vars(args), MAY_DIFFER_ON_RESUME)
    size = state["args"].get("model_size")
    if args.model_size not in (None, size):
        different.append(f"--model-size was {size!r}, now it is {args.model_size!r}")
    if args.num_epochs < state["args"]["num_epochs"]:
        different.append(f"--num-epochs was {state['args']['num_epochs']}, now it is {args.num_epochs}; only more can go on")
    if different:
        raise UserError("\n  ".join([f"{args.save_path} holds a run with other arguments:", *different,
                                     "Repeat them as they were, choose another folder, or start anew with --overwrite."]))


# ---- model ----

def build_model(config: dict, formatter: BlockyFormatter, codes: int, dropout: float = 0.0) -> Seq2SeqMixerOccCANINE:
    """The model that a checkpoint's `config` describes, with random weights from torch's generator."""
    return Seq2SeqMixerOccCANINE(
        num_classes=formatter.num_classes, num_classes_flat=codes, dropout_rate=dropout,
        decoder_dim_feedforward=config["decoder_dim_feedforward"], config=CanineConfig.from_dict(config),
        memory_mask=config["memory_mask"])


def load_model(path: str, device: torch.device | str = "cpu") -> tuple[Seq2SeqMixerOccCANINE, BlockyFormatter, dict]:
    """(model in eval mode, formatter, checkpoint) of a checkpoint file or a run's folder, its best one first.

    Raises UserError.
    """
    file = checkpoint.find(path, (checkpoint.BEST, checkpoint.LAST))
    if file is None:
        raise UserError(f"{path}: no checkpoint there (neither {checkpoint.BEST} nor {checkpoint.LAST})")
    state = _own_checkpoint(file)
    formatter = BlockyFormatter.from_dict(state["formatter"])
    model = build_model(state["config"], formatter, len(state["key"]))
    model.load_state_dict(state["model"])
    return model.to(device).eval(), formatter, state


def _own_checkpoint(file: str) -> dict:
    state = checkpoint.load(file)
    if state.get("format") != checkpoint.FORMAT:
        raise UserError(f"{file}: holds weights but not the settings of their model (format {state.get('format')!r}); "
                        f"this version reads format {checkpoint.FORMAT}, as its own training writes it")
    return state


def run_config(args: argparse.Namespace, first: dict | None) -> dict:
    """`config` of a new run: sizes from --model-size or from the checkpoint that it starts from. Raises UserError."""
    dropouts = {"hidden_dropout_prob": args.encoder_dropout, "attention_probs_dropout_prob": args.encoder_dropout}
    if first is None:
        encoder = model_config(args.model_size or "base", **dropouts).to_dict()
    else:
        encoder = {**first["config"], **dropouts}
        if args.model_size and not has_size(encoder, args.model_size):
            raise UserError(f"--model-size {args.model_size}: the checkpoint {args.initial_checkpoint} has another size "
                            f"(width {encoder['hidden_size']}, {encoder['num_hidden_layers']} layers); leave --model-size out")
    config = {**encoder, "max_len": args.max_len, "memory_mask": True,
              "decoder_dim_feedforward": args.decoder_dim_feedforward or encoder["hidden_size"]}
    if first is not None and not args.only_encoder:
        config["memory_mask"] = first["config"]["memory_mask"]
        if args.decoder_dim_feedforward is None:
            config["decoder_dim_feedforward"] = first["config"]["decoder_dim_feedforward"]
    return config


def load_first_weights(model: Seq2SeqMixerOccCANINE, args: argparse.Namespace, first: dict, key: dict, world: World) -> None:
    """Weights of --initial-checkpoint where name and shape fit; says what is new."""
    weights = {name: value for name, value in first["model"].items()
               if not args.only_encoder or name.startswith("encoder.")}
    same_key = list(first["key"]) == list(key)
    if not same_key:
        linear = {name: weights.pop(name) for name in list(weights) if name.startswith("linear_decoder.")}
    new, unused = checkpoint.load_matching(model, weights)
    world.print(f"First weights: {args.initial_checkpoint}" + (" (encoder alone)" if args.only_encoder else ""))
    if not same_key and not args.only_encoder:
        own = model.state_dict()
        kept = checkpoint.transfer_linear_rows(own, linear, first["key"], key)
        model.load_state_dict(own)
        new = [name for name in new if not name.startswith("linear_decoder.")]
        world.print(f"  the key differs: {kept:,} of {len(key):,} codes keep their weights in the linear decoder, the others are new")
    if new:
        world.print(f"  new, with random weights: {', '.join(new)}")
    if unused:
        world.print(f"  in the checkpoint, but of another name or shape: {', '.join(unused)}")


# ---- batches ----

def batch_plan(args: argparse.Namespace, rows: int, processes: int) -> BatchPlan:
    """The batch arithmetic of the training rows."""
    total = args.global_batch_size or args.batch_size * processes * args.accumulate_steps
    return BatchPlan(rows, total, processes, args.batch_size)


def make_loaders(args: argparse.Namespace, world: World, data: PreparedData, formatter: BlockyFormatter,
                 config: dict, plan: BatchPlan) -> dict[str, BatchLoader]:
    """Loaders of this rank's share of training and validation rows."""
    words = tables.read_words(args.fn_word_freq or os.path.join(data.folder, "words.csv"))
    augmenter = Augmenter(derived_seed(args.seed, _SEED_NOISE), args.num_transformations, args.augmentation_prob,
                          args.unk_lang_prob, words=list(words), word_weights=list(words.values()))
    fixed_width = None if config["memory_mask"] else config["max_len"]
    batches = partial(MicroBatches, rank=world.rank, formatter=formatter, data=data, max_len=config["max_len"],
                      fixed_width=fixed_width)
    workers = {"num_workers": args.num_workers, "pin_memory": args.pin_memory}
    if args.num_workers:
        workers |= {"prefetch_factor": args.prefetch_factor, "persistent_workers": args.persistent_workers}
    loaders = {"data_loader_train": BatchLoader(
        batches(data.train, plan, shuffle_seed=derived_seed(args.seed, _SEED_ORDER), augmenter=augmenter), **workers)}
    if len(data.val):
        val_plan = BatchPlan(len(data.val), args.batch_size * world.size, world.size, args.batch_size)
        loaders["data_loader_val"] = BatchLoader(batches(data.val, val_plan), **workers)
    return loaders


def make_loss(args: argparse.Namespace, formatter: BlockyFormatter) -> LossMixer:
    return LossMixer(BlockOrderInvariantLoss(PAD_IDX, formatter.max_num_codes, formatter.block_size),
                     torch.nn.BCEWithLogitsLoss(), args.seq2seq_weight)


# ---- the banner ----

def say_banner(args: argparse.Namespace, world: World, data: PreparedData, formatter: BlockyFormatter, model: torch.nn.Module,
               plan: BatchPlan, files: list[str], schedule: tuple[int, int, float]) -> None:
    """What is about to run, on rank 0, with the labels that users of the guides look for."""
    total_steps, warmup_steps, rate = schedule
    gpu = world.device.type == "cuda"
    kind = "SINGLE" if world.size == 1 else "MULTI_GPU" if gpu else "MULTI_CPU"
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = f" ({torch.cuda.get_device_name(world.device)})" if gpu else ""
    per = "GPU" if gpu else "GPU (CPU process here)"
    on = {n: BatchPlan(plan.rows, args.global_batch_size or args.batch_size * n * args.accumulate_steps, n).steps_per_epoch
          for n in (1, 2, 4, 8)}
    accumulation = plan.micro_batches(0)
    scaling = {"none": "not scaled", "linear": f"{args.learning_rate:g} × {world.size} processes, linear scaling",
               "sqrt": f"{args.learning_rate:g} × √{world.size} processes, square-root scaling"}[args.lr_scaling]
    uneven = plan.total % world.size or (plan.total // world.size) % plan.micro
    world.print("\n".join([
        "=" * 72,
        f"Distributed environment: {kind}",
        f"Number of processes: {world.size}",
        f"Number of GPUs: {world.size if gpu else 0}",
        f"Nodes: {world.nodes}",
        f"Backend: {world.backend or 'none (one process)'}",
        f"Available GPUs: {visible}{names}",
        f"Threads per process: {torch.get_num_threads()}",
        f"Dataset: {', '.join(files)} ({len(data.train):,} rows for training, {len(data.val):,} for validation)",
        f"Model: {args.model_size} (width {model.encoder.config.hidden_size}, {model.encoder.config.num_hidden_layers} layers)",
        f"Model parameters: {sum(p.numel() for p in model.parameters()):,}",
        f"Vocabulary size: {model.vocab_size}",
        f"Codes: {len(data.codes):,} ({formatter.kind}, columns {', '.join(formatter.target_cols)})",
        f"Batch size per {per}: {args.batch_size} × {world.size} processes × {accumulation} accumulation steps "
        + ("≥ " if uneven else "= ") + f"Total batch size: {plan.total}",
        f"Steps per epoch: {plan.steps_per_epoch:,} (processes → steps: "
        + ", ".join(f"{n} → {steps:,}" for n, steps in on.items()) + ")",
        f"Epochs: {args.num_epochs} ({total_steps:,} steps)",
        f"Learning rate: {rate:g} ({scaling}; warm-up over {warmup_steps:,} steps)",
        f"Precision: {'float64' if args.float64 else 'float32'}",
        f"Save directory: {args.save_path}",
        "=" * 72]))


def devices(world: World) -> str:
    kind = "GPU" if world.device.type == "cuda" else "CPU process"
    plural = "s" if kind == "GPU" else "es"
    return f"{world.size} {kind}{plural if world.size > 1 else ''}"


# ---- the run ----

def run_training(args: argparse.Namespace, world: World, data: PreparedData, formatter: BlockyFormatter,
                 files: list[str]) -> None:
    """Trains, or goes on training, on prepared data. All ranks. Raises UserError, TrainingError."""
    key = {code: i for i, code in enumerate(data.codes)}
    resumed = find_resumable(args, world, data)
    first = None if resumed or not args.initial_checkpoint else _own_checkpoint(_initial_file(args))
    config = resumed["config"] if resumed else run_config(args, first)
    args.model_size = resumed["args"]["model_size"] if resumed else size_name(config)
    set_threads(resumed, world)

    torch.manual_seed(derived_seed(args.seed, _SEED_WEIGHTS) % 2**32)
    raw_model = build_model(config, formatter, len(data.codes), args.dropout)
    raw_model.to(torch.float64 if args.float64 else torch.float32)
    if first:
        load_first_weights(raw_model, args, first, key, world)
    raw_model.encoder.requires_grad_(not args.freeze_encoder)

    plan = batch_plan(args, len(data.train), world.size)
    if resumed and resumed["position"]["total_batch"] != plan.total:
        raise UserError(f"the run in {args.save_path} has a total batch of {resumed['position']['total_batch']}, these "
                        f"arguments make {plan.total}; pass --global-batch-size {resumed['position']['total_batch']}")
    loaders = make_loaders(args, world, data, formatter, config, plan)
    loss_fn = make_loss(args, formatter)
    rate = scaled_learning_rate(args.learning_rate, args.lr_scaling, world.size)
    if resumed:
        rate = resumed["scheduler"]["base_lrs"][0]    # keeps the factor of the first start
    total_steps = args.num_epochs * plan.steps_per_epoch
    schedule_steps = args.schedule_steps or total_steps
    warmup_steps = args.warmup_steps if args.warmup_steps is not None else round(args.warmup_pct * schedule_steps)
    step = resumed["step"] if resumed else 0
    if step >= total_steps:
        world.print(f"The run in {args.save_path} is finished ({step:,} steps): nothing to do. "
                    "More --num-epochs go on, --overwrite starts anew.")
        return
    stop_step = min(total_steps, args.max_steps or total_steps)
    if step >= stop_step:
        world.print(f"The run in {args.save_path} is at step {step:,}, and --max-steps is {stop_step:,}: nothing to do.")
        return
    say_banner(args, world, data, formatter, raw_model, plan, files, (total_steps, warmup_steps, rate))

    model = wrap(raw_model, world)
    engine.settle(model, loaders["data_loader_train"], loss_fn, world)
    optimizer = torch.optim.AdamW([p for p in raw_model.parameters() if p.requires_grad], lr=rate,
                                  weight_decay=args.weight_decay, fused=True)
    scheduler = linear_schedule(optimizer, warmup_steps, schedule_steps)
    if resumed:
        raw_model.load_state_dict(resumed["model"])
        optimizer.load_state_dict(resumed["optimizer"])
        scheduler.load_state_dict(resumed["scheduler"])
        del resumed["model"], resumed["optimizer"]
    if world.is_main:
        write_run_files(args, data)
    log = RunLog(args.save_path, total_steps, world.is_main, step)
    say_start(args, world, resumed, step, plan)

    fixed = {"format": checkpoint.FORMAT, "config": config, "formatter": formatter.to_dict(), "key": key,
             "system": system_name(formatter), "languages": data.languages, "args": vars(args),
             "rng": {"seed": args.seed, "threads": torch.get_num_threads(), "processes": world.size}}
    facts = {"total_batch": plan.total, "steps_per_epoch": plan.steps_per_epoch, "fingerprint": data.fingerprint}

    def save(step: int, names: list[str], position: dict) -> None:
        if world.is_main:
            epoch, batch = divmod(step, plan.steps_per_epoch)
            checkpoint.save(args.save_path, names, {
                "model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                "step": step, **fixed, "position": {"epoch": epoch, "batch": batch, **facts, **position}})
            checkpoint.prune(args.save_path, args.keep_checkpoints)

    step = engine.train(
        model, loaders, loss_fn, optimizer, world.device, scheduler, total_steps, step, args.log_interval,
        args.eval_interval, args.save_interval, stop_step=stop_step, steps_per_epoch=plan.steps_per_epoch,
        formatter=formatter, save=save, log=log.row, step_done=log.step, position=resumed and resumed["position"],
        save_each_epoch=args.save_each_epoch, seed=derived_seed(args.seed, _SEED_DROPOUT), world=world)
    log.close()
    world.print(f"Finished at step {step:,}." if step == total_steps else
                f"Stopped at step {step:,} of {total_steps:,} (--max-steps). The same command with a higher --max-steps goes on.")
    world.print(f"Model: {os.path.join(args.save_path, checkpoint.LAST)}"
                + (f" (lowest validation loss: {checkpoint.BEST})" if "data_loader_val" in loaders else ""))


def find_resumable(args: argparse.Namespace, world: World, data: PreparedData) -> dict | None:
    """The checkpoint to go on from, on every rank; None to start anew. Raises UserError where it does not fit."""
    def work() -> bool:
        found = checkpoint.exists_in(args.save_path)
        if found and args.overwrite:
            world.print(f"--overwrite: the run in {args.save_path} is removed")
            checkpoint.clear(args.save_path)
            return False
        return found
    if not world.main_first("resume", work):
        return None
    state = _own_checkpoint(os.path.join(args.save_path, checkpoint.LAST))
    if state["position"]["fingerprint"] != data.fingerprint:
        raise UserError(f"{args.save_path} holds a run on other data (or data prepared with other settings). Give it the "
                        "same files, choose another folder, or start anew with --overwrite.")
    return state


def _initial_file(args: argparse.Namespace) -> str:
    file = checkpoint.find(args.initial_checkpoint, (checkpoint.BEST, checkpoint.LAST))
    if file is None:
        raise UserError(f"--initial-checkpoint {args.initial_checkpoint}: no checkpoint there")
    return file


def has_size(config: dict, name: str) -> bool:
    """Whether the encoder of `config` has the sizes that --model-size `name` makes."""
    sizes = model_config(name).to_dict()
    return all(config[field] == value for field, value in sizes.items() if "dropout" not in field)


def size_name(config: dict) -> str | None:
    """tiny, small or base; None for other sizes."""
    return next((name for name in MODEL_SIZES if has_size(config, name)), None)


def system_name(formatter: BlockyFormatter) -> str:
    """Name of the output columns: hisco, occ1950, or what the target columns have in common."""
    if formatter.kind != "gpf":
        return formatter.kind
    return os.path.commonprefix(formatter.target_cols).rstrip("_0123456789") or formatter.target_cols[0]


def set_threads(resumed: dict | None, world: World) -> None:
    """The number of threads decides the last bits of every sum: a resumed run takes that of its first start."""
    if not resumed or resumed["rng"]["threads"] == torch.get_num_threads():
        return
    threads = resumed["rng"]["threads"]
    if resumed["rng"]["processes"] == world.size:
        torch.set_num_threads(threads)
        world.print(f"Threads per process: set to {threads}, as in the interrupted run")
    else:
        world.print(f"Note: {torch.get_num_threads()} threads per process instead of {threads} before; last digits may differ")


def say_start(args: argparse.Namespace, world: World, resumed: dict | None, step: int, plan: BatchPlan) -> None:
    if resumed:
        before = resumed["args"]["num_epochs"]
        longer = f"; {args.num_epochs} epochs instead of {before}, with the longer schedule" if args.num_epochs > before else ""
        epoch, batch = divmod(step, plan.steps_per_epoch)
        world.print(f"Resuming from step {step:,} (epoch {epoch + 1}, batch {batch:,}){longer}")
    world.print(f"Starting training for {args.num_epochs} epochs")
    world.print(f"Training on {devices(world)}")


def write_run_files(args: argparse.Namespace, data: PreparedData) -> None:
    """args.json, key.csv and rejected_rows.csv of the run. Rank 0 only."""
    checkpoint.write_atomic(os.path.join(args.save_path, "args.json"),
                            lambda file: file.write(json.dumps(vars(args), indent=1, sort_keys=True).encode()))
    for name in ("key.csv", "rejected_rows.csv"):
        with open(os.path.join(data.folder, name), "rb") as source:
            checkpoint.write_atomic(os.path.join(args.save_path, name), partial(shutil.copyfileobj, source))


def run_evaluation(args: argparse.Namespace, world: World, data: PreparedData, formatter: BlockyFormatter) -> None:
    """Validates a checkpoint and prints the figures; writes nothing. All ranks."""
    model, own_formatter, state = load_model(args.initial_checkpoint or args.save_path, world.device)
    if own_formatter.to_dict() | {"target_cols": None} != formatter.to_dict() | {"target_cols": None}:
        raise UserError(f"the checkpoint was trained with the formatter {own_formatter.to_dict()}, "
                        f"these arguments make {formatter.to_dict()}")
    if list(state["key"]) != data.codes:
        raise UserError("the checkpoint knows other codes than the data; pass --key with the key.csv of its run")
    loaders = make_loaders(args, world, data, formatter, state["config"], batch_plan(args, len(data.train), world.size))
    if "data_loader_val" not in loaders:
        raise UserError("--eval-only needs rows to validate on; raise --share-val")
    model.to(torch.float64 if args.float64 else torch.float32)
    values = engine.evaluate(model, loaders["data_loader_val"], make_loss(args, formatter), world.device,
                             formatter=formatter, world=world)
    world.print(RunLog.validation_line({"step": state["step"], **values}))
