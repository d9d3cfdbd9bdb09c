"""A run, on one page: what finetune.py and train_mixer.py do with prepared data, from top to bottom.

The loss of a step is computed by `MixerTask.losses` in histocc/seq2seq_mixer_engine.py, with the criterion of
`build.make_loss`; `loss.backward()` and all else of a step is in histocc/trainer/loop.py.
"""

import contextlib
from functools import partial

from histocc import plot
from histocc import seq2seq_mixer_engine as engine
from histocc.data.arrays import PreparedData
from histocc.data.config import PrepareSettings
from histocc.data.prepare import copy_lists
from histocc.data.rows import key_reader
from histocc.formatter import BlockyFormatter
from histocc.job import build, confidence, ngram_fit
from histocc.job.config import JobConfig, decide, is_fitted, of_run, refuse_other_arguments
from histocc.job.teacher import with_teacher
from histocc.model.canine import CanineEncoder
from histocc.model.confidence import Thresholds
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.published import formats, models
from histocc.runtime.config import declarations, differing, flag_of
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles, checksum
from histocc.runtime.world import World
from histocc.text import AS_IS
from histocc.trainer import loop, script
from histocc.trainer.batches import make_loader
from histocc.trainer.log import validation_line


def train(args: JobConfig, settings: PrepareSettings, world: World, data: PreparedData) -> None:
    """Does what the arguments ask for on prepared data, read as in `settings`: stops after preparing,
    validates, makes a dry run, or trains (or resumes). All ranks. Raises UserError, TrainingError.
    """
    formatter = BlockyFormatter.from_dict(settings.formatter)
    data = with_teacher(args, settings, world, data)
    if args.prepare_only:
        return
    if args.eval_only:
        return validate(args, formatter, world, data)

    precision = script.number_format(args, world)
    with contextlib.nullcontext() if args.dry_run else script.held_folder(args, world):
        # The checkpoint to resume from, if there is one; then the model: from scratch, from other
        # weights, or as the interrupted run left it.
        refuse = partial(refuse_other_arguments, args)
        resumed = script.find_resumable(args, world, models.load_resumable, refuse, data.fingerprint)
        args, model, config = build.make_model(args, formatter, world, data, resumed)
        for line in without_effect(args):  # also where no step is left to take
            world.print(line)
        train_rows, val_rows = build.make_rows(args, formatter, data, config)
        build.freeze_unseen_characters(model, train_rows, config, args.freeze_encoder)

        # What is trained: the losses of both decoders (histocc/model/loss.py). The linear decoder and the
        # n-grams may have a learning rate of their own.
        loss_fn = build.make_loss(args, formatter)
        entries = build.checkpoint_entries(args, formatter, data, config)
        task = engine.MixerTask(loss_fn, formatter, model=model, at_most=Thresholds.of(entries).at_most)
        fast = build.fast_parameters(args, model, resumed)
        beside = ("fn_word_freq", "descriptions_file")  # flags of files that decide the result, too

        def finish(_: object) -> None:
            """When no step is left: curves, and confidence, so that it says how often an answer is right."""
            if world.is_main:
                plot.draw_run(args.save_path)
            confidence.fit_run(args, world, data)

        training = script.Training(
            model,
            task,
            train_rows,
            val_rows,
            entries=entries,
            fingerprint=data.fingerprint,
            files={name: checksum(path) for name in beside if (path := getattr(args, name))},
            fast=fast,
            about=about(args, settings, data, model),
            about_rate=about_rate(*fast),
            best_by=engine.accuracy if args.best_by == "accuracy" else None,
            is_fitted=bool(config["ngrams"]) and is_fitted(args),
            finish=finish,
        )
        if not args.dry_run:  # key.csv, data_report.json and the other lists, beside the checkpoints
            world.run_on_main(lambda: copy_lists(data.folder, OwnFiles(args.save_path, args.overwrite)))

        # DDP or FSDP, loaders, optimizer, and where the interrupted run was; then the loop, that of
        # histocc/trainer/loop.py with the mixer's task.
        with script.ready(args, world, precision, training, resumed) as steps:
            if steps:
                loaders, state, options = steps
                engine.train(
                    data_loaders=loaders,
                    loss_fn=loss_fn,
                    device=world.device,
                    scheduler=None,
                    task=task,
                    state=state,
                    **options,
                )
        if not args.dry_run:
            world.run_on_main(lambda: OwnFiles(args.save_path).remove([ngram_fit.FILE]))


def about(
    args: JobConfig, settings: PrepareSettings, data: PreparedData, model: Seq2SeqMixerOccCANINE
) -> list[str]:
    """What is said of data and model before the start, a line each."""
    encoder, columns = model.config, ", ".join(settings.target_cols or [])
    source = "the initial checkpoint" if args.initial_checkpoint or not args.teacher else "the teacher"
    kept = f", the first {data.kept_codes:,} those of {source}" if data.kept_codes else ""
    return [
        f"Dataset: {', '.join(settings.train_files)} ({len(data.train):,} rows for training,"
        f" {len(data.val):,} for validation)",
        f"Model: {args.model_size} ({'' if isinstance(model.encoder, CanineEncoder) else 'no encoder, '}width"
        f" {encoder.hidden_size}, {encoder.num_hidden_layers} layers)",
        f"Model parameters: {sum(p.numel() for p in model.parameters()):,}",
        f"Vocabulary size: {model.vocab_size}",
        f"Codes: {len(data.codes):,} ({settings.formatter['kind']}, columns {columns}){kept}",
        *([f"Texts: {data.clean_text}"] if data.clean_text != AS_IS else []),
        *(["Target mask: published (PAD among the codes is looked at)"] if not model.target_mask else []),
    ]


def without_effect(args: JobConfig) -> list[str]:
    """Return a line with the flags that were given and count in steps alone, if the run takes none."""
    of_steps = [name for name, (item, _, _) in declarations(type(args)).items() if item.metadata["of_steps"]]
    defaults, asked = type(args).__dataclass_fields__, args.asked or args
    given = [flag_of(name) for name in of_steps if getattr(asked, name) != defaults[name].default]
    what = "Note: n-grams alone are fitted and take no steps, so these flags have no effect: "
    remedy = ". Type --model-size tiny to train an encoder, or --max-steps N to take steps"
    return [what + ", ".join(given) + remedy] if given and not args.num_epochs else []


def about_rate(names: list[str], factor: float) -> str:
    """What has another learning rate than the rest, to be said behind that of the rest."""
    parts = dict.fromkeys(name.partition(".")[0] for name in names)
    words = " and ".join({"linear_decoder": "the linear decoder", "ngrams": "the n-grams"}[x] for x in parts)
    return f", of {words} {factor:g} times that" if words else ""


def validate(args: JobConfig, formatter: BlockyFormatter, world: World, data: PreparedData) -> None:
    """--eval-only: validates a checkpoint and prints the figures. All ranks. Raises UserError."""
    named = args.initial_checkpoint or args.save_path
    file: str = world.run_on_main(lambda: models.find_weights(named, named))

    def load() -> models.Loaded:
        content, given = formats.load_content(file), formats.Given()
        if not models.brings_settings(content):
            key, separated = key_reader(args.initial_key or args.key), formatter.within_block_sep is not None
            given = formats.Given(formatter.kind, key, formatter.target_cols, separated)
        return models.model_of(file, content, given)

    model, own_formatter, state = build.load_on_all(world, load)
    ignored = {"target_cols": None, "allow_short": None}  # which columns were read does not matter here
    if own_formatter.to_dict() | ignored != formatter.to_dict() | ignored:
        raise UserError(f"{file}: its formatter is {own_formatter.to_dict()}, here {formatter.to_dict()}")
    if list(state["key"]) != data.codes:
        raise UserError(f"{file}: knows other codes than the data; pass --key with the key.csv of its run")
    before = state["args"] | of_run(state) if "args" in state else {}
    if other := differing(type(args), args.values(), before, only_kept=True):
        world.print(f"Note: the model and its losses are those of {file}: {'; '.join(other)}")
    args = decide(args, state)
    rows = build.make_rows(args, formatter, data, state["config"])[1]
    if rows is None:
        raise UserError("--eval-only needs rows to validate on; raise --share-val")
    precision = script.number_format(args, world)
    model.to(world.device, precision.dtype)
    most = Thresholds.of(state).at_most
    task = engine.MixerTask(build.make_loss(args, formatter), formatter, at_most=most)
    loader = make_loader(args, world, rows)
    values = loop.evaluate(model, loader, task, world, precision, world.stop_agreed)
    world.print(validation_line({"step": state.get("step") or 0, **values}, engine.COLUMNS))
