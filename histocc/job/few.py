"""A run without encoder on few distinct texts: learned in closed form (histocc/learn), without steps."""

import os
import time
import uuid
from typing import Any

import numpy as np
import torch

from histocc import plot
from histocc import seq2seq_mixer_engine as engine
from histocc.data import learned as learned_data
from histocc.data import several
from histocc.data.arrays import PreparedData
from histocc.data.config import FEW_TEXTS
from histocc.data.prepare import copy_lists
from histocc.data.rows import csv_text, escape_formula
from histocc.figure import ENTRY, VALIDATION, Figure, may_have_seen, wilson
from histocc.formatter import BlockyFormatter
from histocc.job import card
from histocc.job.config import JobConfig, learns_few
from histocc.job.inputs import Inputs
from histocc.job.model import checkpoint_entries, new_config, patterns_of
from histocc.learn.few import FewTexts, Learned, judge, learn, learning_curve
from histocc.learn.prior import PRIOR_ANSWERS, Prior, find_prior, has_hisco
from histocc.model.levels import Levels
from histocc.model.mixer import NGRAMS
from histocc.model.ngrams import NONE, WORDS
from histocc.predict.coder import Coder
from histocc.predict.fitting import rows_right
from histocc.published import models
from histocc.runtime import checkpoint
from histocc.runtime.config import AUTO
from histocc.runtime.device import Precision, settings_of_torch
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.files import OwnFiles, atomic_write
from histocc.runtime.log import counted
from histocc.runtime.world import World, launcher_id
from histocc.trainer import script
from histocc.trainer.log import RunLog, log_columns


def is_closed_form(args: JobConfig, inputs: Inputs, resumed: dict | None) -> bool:
    """Return whether a run learns, or has learned, in closed form. Its arguments must be decided."""
    if resumed:
        return bool(resumed["config"].get("ridge"))
    settings, data = inputs.settings, inputs.data
    were_many = settings.few_texts and len(data.val) and not settings.split_col  # as the preparation found
    return learns_few(args) and not were_many and data.texts <= FEW_TEXTS


def note_without_prior(args: JobConfig, formatter: BlockyFormatter, data: PreparedData) -> str:
    """Return a note if a model without encoder takes steps although its few texts with HISCO codes would gain
    from a prior, or "". Raises UserError if --prior names one.
    """
    flags = "--max-steps, --ngrams, --ngram-passes 0 and --seq2seq-weight"
    if args.prior not in (AUTO, NONE):
        what = f"at most {FEW_TEXTS:,} distinct texts ({data.texts:,} here), without {flags}"
        raise UserError(f"--prior {args.prior}: only used for {what}: omit --prior")
    is_usual = args.prior == AUTO and args.model_size == NGRAMS and not learns_few(args)
    if not (is_usual and data.texts <= FEW_TEXTS and has_hisco(formatter, data)):
        return ""
    return f"Note: without {flags} the built-in model would help to learn these few texts"


def train_few(
    args: JobConfig, inputs: Inputs, formatter: BlockyFormatter, world: World, resumed: dict | None
) -> None:
    """Learn in closed form and write the files of the run, unless that is done. Rank 0 does it in one thread,
    so the number of processes changes nothing. All ranks. Raises UserError, TrainingError, Stopped.
    """
    if resumed:
        file = os.path.join(args.save_path, checkpoint.BEST)
        if not os.path.exists(os.path.join(args.save_path, card.CARD)):  # it was stopped before the last file
            world.run_on_main(lambda: card.write_card(file, checkpoint.load(file)))
        what = "is finished: nothing to do. --overwrite starts over."
        return world.print(f"The run in {args.save_path} {what}")
    position = {
        "files": {},
        "total_batch": 1,
        "steps_per_epoch": 1,
        "fingerprint": inputs.data.fingerprint,
        "launchers": sorted(set(world.gather(launcher_id()))),
        "run": uuid.uuid4().hex,
    }
    world.run_on_main(lambda: _train(args, inputs.data, formatter, world, position))


@settings_of_torch()
def _train(
    args: JobConfig, data: PreparedData, formatter: BlockyFormatter, world: World, position: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    began, say, own = time.perf_counter(), world.print, OwnFiles(args.save_path, args.overwrite)
    if args.overwrite and not args.dry_run:
        own.remove([PRIOR_ANSWERS, plot.LEARNING])
    others = f", on rank 0; processes waiting for it: {world.size - 1}" * (world.size > 1)
    say(f"\nLearning {counted(data.texts, 'distinct text')} in closed form{others}")

    def texts_with(prior: Prior | None) -> FewTexts:
        takes_codes = prior and prior.is_same and not (args.key or args.all_codes_file)
        joined = prior.with_codes(formatter, data) if prior and takes_codes else data
        patterns = [*patterns_of(args.input_col), *WORDS]
        dtype = torch.float64 if args.float64 else torch.float32
        return FewTexts(joined, patterns, args.max_len or 0, prior, world.give_up_if_asked, dtype)

    try:
        precision, check = Precision.of(args, world.device), world.give_up_if_asked
        prior = find_prior(args.prior, formatter, data, precision, own, check)
    except UserError as error:
        remedy = "--prior none learns without it"
        if args.prior != AUTO:
            remedy = "Leave --prior out: the built-in model is the prior of HISCO codes"
        raise UserError(f"{error}\n  {remedy}") from None
    few = texts_with(prior)
    if args.dry_run:
        prepared = time.perf_counter() - began
        say(f"Preparing them took {prepared:.1f} s; learning takes about {few.seconds():.0f} s")
        return say("Everything checks out: without --dry-run it starts the run. Nothing was trained")
    if known := int((~few.is_new).sum()):
        say(f"The prior was trained on {known:,} of the texts: not used for settings or figures")
    learned = learn(few)
    if prior and not learned.config["ridge"]["prior"]:
        say(f"The answers of {prior.content['name']} do not help: the model learns without a prior")
        prior, few = None, texts_with(None)
        learned = learn(few)
    on = f", on top of the answers of {prior.content['name']}" if prior else ""
    say(f"Learned in {time.perf_counter() - began:.1f} s{on}")

    most_codes = max([1, *map(int, data.report["codes_per_row"])])
    judged = judge(few, learned, most_codes, Levels(few.data.codes, formatter))
    if curve := learning_curve(few, learned.settings, judged, most_codes):
        rows = [
            (texts, *(f"{x:.4f}" for x in (share, *wilson(share, number))), number)
            for texts, share, number in curve
        ]
        with atomic_write(own.claim(plot.LEARNING)[0]) as file:
            file.write(csv_text([plot.LEARNING_COLUMNS, *rows]))
    content: dict[str, Any] = {
        **few_entries(args, formatter, few.data, learned),
        **judged,
        **({"prior": prior.content} if prior else {}),
        "rng": {"seed": args.seed, "threads": 1, "processes": world.size},
        "position": position,
    }
    figure = validation_figure(content, data, prior) if len(data.val) else None
    if figure := figure or Figure.of(content):
        content[ENTRY] = figure._replace(unsure=may_have_seen(content))._asdict()
    write_run(args, own, data, content)


def few_entries(args: JobConfig, formatter: BlockyFormatter, data: PreparedData, learned: Learned) -> dict:
    """Return entries of a checkpoint: the model in closed form, and what it keeps of the data."""
    config = new_config(args, args.max_len or 0, None) | {"text": data.clean_text} | learned.config
    return {
        "model": learned.weights,
        "optimizer": {},
        "scheduler": {"base_lrs": [], "last_epoch": 0},
        "step": 0,
        "format": checkpoint.FORMAT,
        "made_by": checkpoint.made_by(),
        "args": args.values(),
        **checkpoint_entries(args, formatter, data, config),
        **learned_data.entries(data),
        "splits": several.splits(data),
        "answers": learned_data.trained_answers(data.train),
    }


def validation_figure(content: dict[str, Any], data: PreparedData, prior: Prior | None) -> Figure | None:
    """Return the figure for validation rows with texts new also to the prior, or None without such rows."""
    coder = Coder(*models.model_of_checkpoint("the new model", content))
    texts = data.val.strings(np.arange(len(data.val)))
    languages = [data.languages[i] for i in np.asarray(data.val.language)]
    right = rows_right(coder.code(texts, languages, "flat", cleaned=True), data.val, data)
    is_new = ~np.isin(data.val.text_hash, data.train.text_hash)  # from separate files, which may share texts
    is_new &= ~prior.seen(texts) if prior else True
    return Figure.measured(right[is_new], data.val.text_hash[is_new], VALIDATION, "flat")


def write_run(args: JobConfig, own: OwnFiles, data: PreparedData, content: dict[str, Any]) -> None:
    """Write the files of a run, and report how good its model is. Raises TrainingError."""
    if args.overwrite:
        old = [name for name in own.names if checkpoint.CHECKPOINT.fullmatch(name)]
        own.remove([*old, *plot.files(plot.CURVES)])
    copy_lists(data.folder, own)
    codes = list(content["key"])
    if len(codes) > len(data.codes):
        sources = ["data"] * len(data.codes) + ["prior"] * (len(codes) - len(data.codes))
        numbered = zip(map(escape_formula, codes), range(len(codes)), sources)
        with atomic_write(own.claim("key.csv")[0]) as file:
            file.write(csv_text([("system_code", "code", "source"), *numbered]))
    script.write_args(args, own)
    log = RunLog(own, log_columns((*engine.LOSSES, "flat_acc")), start=-1)
    figure = Figure.of(content)
    log.row({"step": 0, "epoch": 0, "samples": 0, "flat_acc": figure and figure.share})
    saver = checkpoint.Saver(own, args.keep_checkpoints, World(), lambda *_: content, log.say)
    failed = saver(0, [checkpoint.LAST, checkpoint.BEST], {})
    log.close("ended by an error" if failed else "finished", 0)
    if failed:
        raise TrainingError(f"the model could not be saved: {failed}. The same command learns it again")
    card.finish_run(own.path(checkpoint.BEST), log.say, overwrite=args.overwrite)
