"""A run, on one page: the work of finetune.py and train_mixer.py with prepared data, from top to bottom.

`MixerTask.losses` in histocc/seq2seq_mixer_engine.py computes the loss of a step, with the criterion of
`make_loss`. `loss.backward()` and the rest of a step are in histocc/trainer/loop.py.
"""

import os
from dataclasses import replace
from functools import partial

from histocc import plot
from histocc import seq2seq_mixer_engine as engine
from histocc.data import learned, several
from histocc.data.dataset import TextRows
from histocc.data.prepare import copy_lists
from histocc.data.rows import key_reader
from histocc.formatter import BlockyFormatter, classes_in_words
from histocc.job import card, few
from histocc.job.config import JobConfig, decide, is_fit_alone, is_fitted, of_run, refuse_on_resume
from histocc.job.inputs import Inputs, make_rows, read_initial_weights
from histocc.job.model import checkpoint_entries, fast_parameters, load_on_all, make_loss, make_model, place
from histocc.learn import ngram_fit
from histocc.model.canine import CanineEncoder
from histocc.model.confidence import Thresholds
from histocc.model.loss import LossMixer
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.predict import fitting
from histocc.published import formats, models
from histocc.runtime.config import AUTO, differing, flag_of, flags_that
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles, checksum
from histocc.runtime.log import counted
from histocc.runtime.world import World
from histocc.text import AS_IS
from histocc.trainer import loop, script
from histocc.trainer.batches import make_loader
from histocc.trainer.log import validation_line


def run_training(args: JobConfig, inputs: Inputs, world: World) -> None:
    """Validate, make a dry run, train or resume, as asked. All ranks. Raises UserError, TrainingError."""
    formatter = BlockyFormatter.from_dict(inputs.settings.formatter)

    data = inputs.data
    if args.prepare_only:
        return
    if args.eval_only:
        return validate_checkpoint(args, formatter, world, inputs)

    precision = script.number_format(args, world)
    with script.held_folder(args, world):
        # The checkpoint to resume from, or the weights to start from, if there are any.
        refuse, first = partial(refuse_on_resume, args), None
        resumed = script.find_resumable(args, world, inputs.resumable, refuse, data.fingerprint)
        if args.initial_checkpoint and not resumed:
            named = args.initial_checkpoint, args.initial_key, args.key
            first = world.run_on_main(lambda: read_initial_weights(*named, load=inputs.content))

        # Without an encoder, few texts are learned in closed form on the answers of a prior, without steps.
        if resumed and args.ngram_passes not in (None, resumed["args"].get("ngram_passes")):
            said = "--ngram-passes has no effect on a run with a checkpoint; --overwrite starts over"
            world.print(f"Note: {said}")
        args = decide(args, resumed, first)
        if few.is_closed_form(args, inputs, resumed):
            return few.train_few(args, inputs, formatter, world, resumed)
        if not (resumed or first) and (note := few.note_without_prior(args, formatter, data)):
            world.print(note)

        # The model and its loss.
        args, model, config = make_model(args, formatter, world, data, resumed, first)
        for line in without_effect(args):  # also reported if no step is left
            world.print(line)
        loss_fn = make_loss(args, formatter)

        rows = make_rows(args, formatter, data, config)
        training = make_training(args, inputs, formatter, world, model, config, rows, loss_fn, resumed, first)

        # The fit of new n-grams and both decoders, which on CPUs is, by default, the whole training.
        if config["ngrams"] and args.ngram_passes == 0 and not (resumed or first):
            world.print("N-grams are not fitted (--ngram-passes 0)")
        elif config["ngrams"] and not (resumed or first):
            fit = ngram_fit.Fit(args, args.ngram_passes, data, rows[0].encoding, loss_fn, model, world.print)
            if args.batch_size != AUTO:  # else chosen when the model is on its device
                steps_after = script.announce(args, world, training)
                fit, training = replace(fit, steps_after=steps_after), replace(training, is_announced=True)
            training = replace(training, steps_before=ngram_fit.fit_ngrams(fit, world))

        # The training: DDP or FSDP, loaders, optimizer, the position of the interrupted run, and the steps.
        place(model, rows[0], world, args.compile)
        if not args.dry_run:  # key.csv, data_report.json and the other lists, next to the checkpoints
            world.run_on_main(lambda: copy_lists(data.folder, OwnFiles(args.save_path, args.overwrite)))
        if opened := script.open_run(args, world, precision, training, resumed):
            with opened.resources:
                loop.train(opened.run, opened.loaders, opened.state)
                opened.close()
        if args.dry_run:
            return
        world.run_on_main(lambda: OwnFiles(args.save_path).remove([ngram_fit.FILE]))

        # When no step is left: the confidence, which says how often an answer is right, a card and curves.
        if not (opened and opened.state.stopped):
            fitting.fit_run(args.save_path, precision, args.samples_at_once, world, data, resumed)
            if opened or not os.path.exists(os.path.join(args.save_path, card.CARD)):
                file = world.run_on_main(lambda: models.find_weights(args.save_path, args.save_path))
                world.run_on_main(lambda: card.finish_run(file, world.print, overwrite=args.overwrite))
            if world.is_main:
                plot.draw_run(args.save_path)


def make_training(
    args: JobConfig,
    inputs: Inputs,
    formatter: BlockyFormatter,
    world: World,
    model: Seq2SeqMixerOccCANINE,
    config: dict,
    rows: tuple[TextRows, TextRows | None],
    loss_fn: LossMixer,
    resumed: dict | None,
    first: dict | None,
) -> script.Training:
    """Return the trainer's input: the model, its rows, and its task, the losses of both decoders. All ranks.
    Raises UserError.
    """
    data = inputs.data
    model.encoder.requires_grad_(not args.freeze_encoder)
    entries = checkpoint_entries(args, formatter, data, config)
    if world.is_main:  # which writes the checkpoints
        entries |= learned.entries(data, resumed, first) | {"splits": several.splits(data)}
        if any({"source", "origin"} & {*state} for state in (resumed, first) if state):
            entries["origin"] = "published"  # its first weights
        if is_fit_alone(args):
            entries["answers"] = learned.trained_answers(data.train)
    task = engine.MixerTask(loss_fn, formatter, model=model, at_most=Thresholds.of(entries).at_most)
    fast = fast_parameters(model, resumed, is_fitted(args), args.linear_loss)
    beside = ("fn_word_freq", "descriptions_file")  # flags of further files that affect the result
    return script.Training(
        model,
        task,
        *rows,
        entries=entries,
        fingerprint=data.fingerprint,
        files={name: checksum(path) for name in beside if (path := getattr(args, name))},
        fast=fast,
        flops=task.flops,
        about=about(args, inputs, model),
        about_rate=about_rate(*fast),
        best_by=engine.accuracy if args.best_by == "accuracy" else None,
        is_fitted=bool(config["ngrams"]) and is_fitted(args),
    )


def about(args: JobConfig, inputs: Inputs, model: Seq2SeqMixerOccCANINE) -> list[str]:
    """Return lines on data and model for the start of a run."""
    settings, data = inputs.settings, inputs.data
    encoder, columns = model.config, ", ".join(settings.target_cols or [])
    codes = classes_in_words(data.codes) if args.formatter == AUTO else f"{len(data.codes):,}"
    size = f"width {encoder.hidden_size}, {counted(encoder.num_hidden_layers, 'layer')}"
    kept = f", the first {data.kept_codes:,} from the initial checkpoint" if data.kept_codes else ""
    return [
        f"Dataset: {', '.join(settings.train_files)} ({counted(len(data.train), 'row')} for training,"
        f" {len(data.val):,} for validation)",
        f"Model: {args.model_size} ({size if isinstance(model.encoder, CanineEncoder) else 'no encoder'})",
        f"Model parameters: {sum(p.numel() for p in model.parameters()):,}",
        f"Vocabulary size: {model.vocab_size}",
        f"Codes: {codes} ({settings.formatter['kind']}, columns {columns}){kept}",
        *([f"Texts: {data.clean_text}"] if data.clean_text != AS_IS else []),
        *(["Target mask: published (PAD among the codes is not masked)"] if not model.target_mask else []),
    ]


def without_effect(args: JobConfig) -> list[str]:
    """Return a line with the given flags that affect only steps, if the run takes no steps."""
    asked = args.asked or args
    given = [
        flag_of(name)
        for name in flags_that(type(args), "of_steps")
        if getattr(asked, name) != type(args).__dataclass_fields__[name].default
    ]
    what = "Note: a model without encoder is fitted and takes no steps, so these flags have no effect: "
    remedy = ". Type --model-size tiny to train an encoder, or --max-steps N to take steps"
    return [what + ", ".join(given) + remedy] if given and not args.num_epochs else []


def about_rate(names: list[str], factor: float) -> str:
    """Return a phrase on the parts with another learning rate, to be printed after the rate of the rest."""
    parts = dict.fromkeys(name.partition(".")[0] for name in names)
    words = " and ".join({"linear_decoder": "the linear decoder", "ngrams": "the n-grams"}[x] for x in parts)
    return f", of {words} {factor:g} times that" if words else ""


def validate_checkpoint(args: JobConfig, formatter: BlockyFormatter, world: World, inputs: Inputs) -> None:
    """Validate a checkpoint and print the figures, for --eval-only. All ranks. Raises UserError."""
    data = inputs.data
    named = args.initial_checkpoint or args.save_path
    file: str = world.run_on_main(lambda: models.find_weights(named, named))

    def load() -> models.Loaded:
        content, given = inputs.content(file), formats.Given()
        if not models.brings_settings(content):
            key, separated = key_reader(args.initial_key or args.key), formatter.within_block_sep is not None
            given = formats.Given(formatter.kind, key, formatter.target_cols, separated)
        return models.model_of_content(file, content, given)

    model, own_formatter, state = load_on_all(world, load)
    ignored = {"target_cols": None, "allow_short": None}  # the columns read do not matter here
    if own_formatter.to_dict() | ignored != formatter.to_dict() | ignored:
        raise UserError(f"{file}: its formatter is {own_formatter.to_dict()}, here {formatter.to_dict()}")
    if list(state["key"]) != data.codes:
        raise UserError(f"{file}: its codes differ from the data's; pass --key with the key.csv of its run")
    before = state["args"] | of_run(state) if "args" in state else {}
    if other := differing(type(args), args.values(), before, only_kept=True):
        world.print(f"Note: the model and its losses come from {file}: {'; '.join(other)}")
    if state["config"].get("ridge"):
        raise UserError(
            f"{file}: was learned in closed form; histocc evaluate TABLE --model measures how good it is"
        )
    args = decide(args, state)
    rows = make_rows(args, formatter, data, state["config"])[1]
    if rows is None:
        raise UserError("--eval-only needs rows to validate on; raise --share-val")
    precision = script.number_format(args, world)
    model.to(world.device, precision.dtype)
    most = Thresholds.of(state).at_most
    task = engine.MixerTask(make_loss(args, formatter), formatter, at_most=most)
    loader = make_loader(args, world, rows)
    values = loop.evaluate(model, loader, task, world, precision, world.stop_agreed)
    world.print(validation_line({"step": state.get("step") or 0, **values}, engine.COLUMNS))
