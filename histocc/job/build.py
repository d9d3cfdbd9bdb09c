"""What a run trains: its model and its rows, what a new model starts from, and what of them a checkpoint
keeps.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from histocc.data.arrays import PreparedData
from histocc.data.dataset import (
    NO_CHANGES,
    JoinedRows,
    RowEncoding,
    TextChanges,
    TextRows,
    TextRowSet,
    load_descriptions,
)
from histocc.data.noise import Augmenter
from histocc.data.rows import read_words
from histocc.formatter import BlockyFormatter
from histocc.job import ngram_fit, recipe
from histocc.job.config import JobConfig
from histocc.job.data import initial_weights
from histocc.job.ngram_fit import ngrams_of
from histocc.job.teacher import TaughtRows
from histocc.model.canine import CanineEncoder
from histocc.model.mixer import NGRAMS as NGRAMS_ALONE
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.model.ngrams import AUTO, NONE
from histocc.published import models
from histocc.runtime.device import Precision, compile_layers
from histocc.runtime.errors import UserError
from histocc.runtime.files import checksum, opened
from histocc.runtime.log import Stage
from histocc.runtime.rng import derived_seed
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World
from histocc.text import AS_IS, ASCII_LOWER, cleaner
from histocc.trainer.batches import WEIGHTS, BatchPlan, MicroBatches

# Streams of random numbers beside those of any run, numbered for `derived_seed`.
NOISE, DESCRIPTIONS, JOINED, NGRAMS, TEACHER = 2, 4, 5, 6, 7
NGRAM_WIDTH = 128  # numbers for each n-gram
MAX_AUTO_BITS = 18  # 2^18 n-grams, since a step of the optimizer goes over all


def make_model(
    args: JobConfig,
    formatter: BlockyFormatter,
    world: World,
    data: PreparedData,
    resumed: dict | None,
) -> tuple[JobConfig, Seq2SeqMixerOccCANINE, dict]:
    """(arguments with what the weights decide, model, its config): random weights, those of
    --initial-checkpoint, or those of the run that is resumed. All ranks. Raises UserError.
    """
    first = None
    if args.initial_checkpoint and not resumed:
        first = world.run_on_main("initial weights", lambda: initial_weights(args))
    args = recipe.decide(args, resumed, first)
    counted = None
    if resumed:
        config = resumed["config"]
    else:
        config = new_config(args, first) | {"text": data.clean_text}
        config["ngrams"], counted = ngram_config(args, first, world, data)
    args = args.decide(model_size=models.size_name(config))
    torch.manual_seed(derived_seed(args.seed, WEIGHTS) % 2**32)
    model = models.build_model(config, formatter, len(data.codes), args.dropout, args.ngram_dropout)
    start_at_frequencies(model, data)
    if not resumed and model.ngrams:
        start_ngrams(args, formatter, world, data, model, counted, fit=first is None)
    model.to(Precision.of(args, world.device).dtype)
    if resumed:
        model.load_state_dict(resumed["model"])
    if first:
        models.load_initial_weights(model, first, data.codes, formatter, args.only_encoder, world.print)
    model.encoder.requires_grad_(not args.freeze_encoder)
    if args.compile:
        compile_layers(model)
        model.in_groups = False  # a compiled layer has few shapes
    return args, model.to(world.device), config


def train_seen_characters(model: Seq2SeqMixerOccCANINE, rows: TextRows, config: dict, frozen: bool) -> None:
    """Of the embeddings of characters only those that can occur are trained. frozen: the encoder is."""
    if not frozen and isinstance(model.encoder, CanineEncoder):
        characters = torch.from_numpy(rows.characters())
        model.encoder.char_embeddings.train_rows_of(characters, config["max_len"])


# ---- what a new model starts from


def new_config(args: JobConfig, first: dict | None) -> dict:
    """`config` of a new run: sizes from --model-size or from the checkpoint that it starts from. Raises
    UserError."""
    dropouts = {
        "hidden_dropout_prob": args.encoder_dropout,
        "attention_probs_dropout_prob": args.encoder_dropout,
    }
    if first is None:
        encoder = model_config(args.model_size or "base", **dropouts).to_dict()
        if args.model_size == NGRAMS_ALONE:
            encoder["encoder"] = False
    else:
        encoder = {**first["config"], **dropouts}
        if not encoder.get("encoder", True) and (args.only_encoder or args.freeze_encoder):
            flag = "--only-encoder" if args.only_encoder else "--freeze-encoder"
            raise UserError(f"{flag}: {args.initial_checkpoint} has no encoder; leave the flag out")
        if args.model_size and not models.has_size(encoder, args.model_size):
            raise UserError(
                f"--model-size {args.model_size}: the checkpoint {args.initial_checkpoint} has another"
                f" size (width {encoder['hidden_size']}, {encoder['num_hidden_layers']} layers); leave "
                "--model-size out"
            )
    config = {
        **encoder,
        "max_len": args.max_len,
        "memory_mask": True,
        "target_mask": True,
        "decoder_dim_feedforward": args.decoder_dim_feedforward or encoder["hidden_size"],
        "text": args.clean_text or (first["config"]["text"] if first else AS_IS),
    }
    if first is not None and not args.only_encoder:
        config |= {name: first["config"][name] for name in ("memory_mask", "target_mask")}
        if args.decoder_dim_feedforward is None:
            config["decoder_dim_feedforward"] = first["config"]["decoder_dim_feedforward"]
    if args.memory_mask is not None:
        config["memory_mask"] = args.memory_mask
    if args.published_target_mask:
        config["target_mask"] = False
    return config


def start_at_frequencies(model: Seq2SeqMixerOccCANINE, data: PreparedData) -> None:
    """A new linear decoder starts at how often each code stands in the training rows, whatever the text:
    its bias is the log-odds, its weights are 0. From ½ each, a short training is spent on learning that
    codes are rare.
    """
    rows, counts = len(data.train), np.zeros(len(data.codes), dtype=np.int64)
    for start in range(0, rows, 1 << 18):
        codes = data.train.codes[start : start + (1 << 18)]
        counts += np.bincount(codes[codes >= 0], minlength=len(counts))
    share = torch.from_numpy((counts + 0.5) / (rows + 1))
    with torch.no_grad():
        model.linear_decoder.weight.zero_()
        model.linear_decoder.bias.copy_(torch.logit(share))


def ngram_config(
    args: JobConfig, first: dict | None, world: World, data: PreparedData
) -> tuple[dict | None, tuple | None]:
    """The n-grams of a new run. All ranks. first: the initial weights.

    Returns:
        `ngrams` in its config, None for a model without; hashes and weights of the n-grams of the training
        texts, on rank 0, if the initial weights bring none.

    Raises:
        UserError: the initial weights have others than are asked for.
    """
    asked = args.ngrams
    held = None if first is None or args.only_encoder else first["config"].get("ngrams")
    if held is not None:
        if asked == NONE or asked != AUTO and held["rows"] > 1 << int(asked):
            raise UserError(
                f"--ngrams {asked}: the initial weights have {held['rows']:,} n-grams and need them; omit"
                " --ngrams, or take --only-encoder"
            )
        return held, None
    if asked == NONE or asked == AUTO and first is not None:
        return None, None
    counted: dict[str, Any] = {}

    def count() -> int:
        most = 1 << (MAX_AUTO_BITS if asked == AUTO else int(asked))
        texts = ngram_fit.TextNgrams(data, args.max_len, world.give_up_if_asked)
        counted["ngrams"] = texts.weights(most)
        return len(counted["ngrams"][0])

    rows = world.run_on_main("n-grams", count)
    return ({"rows": rows, "width": NGRAM_WIDTH} if rows else None), counted.get("ngrams")


def start_ngrams(
    args: JobConfig,
    formatter: BlockyFormatter,
    world: World,
    data: PreparedData,
    model: Seq2SeqMixerOccCANINE,
    counted: tuple | None,
    fit: bool,
) -> None:
    """Gives every rank the n-grams of rank 0, and its decoders. All ranks.

    Args:
        counted: hashes and weights of the n-grams, on rank 0.
        fit: whether n-grams and decoders are fitted before the encoder is trained.
    """

    def first() -> float:
        if counted:
            ngrams_of(model).hashes.copy_(torch.from_numpy(counted[0]))
            ngrams_of(model).idf.copy_(torch.from_numpy(counted[1]))
        return fit_ngrams(args, formatter, world, data, model) if fit else 0.0

    seconds = world.run_on_main("fit of n-grams", first)
    own = {name: value for name, value in model.state_dict().items() if not name.startswith("encoder.")}
    model.load_state_dict(world.broadcast(own if world.is_main else None, 0), strict=False)
    if seconds:
        model.encoder.zero_output()  # which the decoders know nothing of yet
        world.print(f"Fitted in {seconds:.1f} s")
        if args.freeze_encoder:
            world.print(
                "Note: --freeze-encoder without --initial-checkpoint: what an encoder reads that nothing has "
                "trained is left out, so the decoders have the n-grams alone"
            )


def fit_ngrams(
    args: JobConfig,
    formatter: BlockyFormatter,
    world: World,
    data: PreparedData,
    model: Seq2SeqMixerOccCANINE,
) -> float:
    """Fits n-grams and decoders of a new model to the distinct training rows; the seconds, 0 if nothing is to
    be fitted. Rank 0 only.
    """
    passes = args.ngram_passes
    what = (
        f"{len(ngrams_of(model).idf):,} n-grams and both decoders, before the encoder is trained"
        f" (--ngram-passes {passes})"
    )
    if not passes:
        world.print("N-grams: not fitted (--ngram-passes 0)")
        return 0.0
    if args.dry_run:
        world.print(f"Not in a dry run, nor in its times: the fit of {what}")
        return 0.0
    world.print(f"Fitting {what}")
    encoding = RowEncoding(formatter, args.max_len, first_empty_block=args.empty_blocks == "first")
    distinct, seed = ngram_fit.DistinctRows(data.train), derived_seed(args.seed, NGRAMS)
    rows = training_rows(args, distinct, data=data, encoding=encoding)
    plan = BatchPlan(len(rows), ngram_fit.BATCH)
    loss_fn = recipe.make_loss(args, formatter, args.distillation_temperature)
    batches = MicroBatches(rows, plan, 0, seed)
    return ngram_fit.fit(model, batches, distinct.weight, loss_fn, passes, seed, progress_of_fit(world))


def progress_of_fit(world: World) -> Callable[[str, int, int], None]:
    """What the fit calls before each step: shows how far it is, and ends it if the run is to stop. Its parts
    are stages of their own, since a step with both decoders takes several times as long as one with the
    linear decoder.
    """
    stage: Stage | None = None

    def check(part: str, step: int, steps: int) -> None:
        nonlocal stage
        if world.stop_asked_anywhere():
            world.print(
                f"The fit is given up after {step:,} of {steps:,} steps with the {part}; fewer --ngram-passes"
                " make it shorter"
            )
            raise Stopped
        if step == 0 or stage is None:
            stage = Stage(f"fitting n-grams, {part}", steps, "steps")
        stage.at(step)
        if step + 1 >= steps:
            stage.close()

    return check


# ---- rows


def make_rows(
    args: JobConfig, formatter: BlockyFormatter, world: World, data: PreparedData, config: dict
) -> tuple[TextRows, TextRows | None]:
    """Rows for training and for validation (None if there are none), for the model of `config`. Raises
    UserError.
    """
    encoding = RowEncoding(
        formatter,
        config["max_len"],
        None if config["memory_mask"] else config["max_len"],
        args.empty_blocks == "first",
    )
    changes = text_changes(args, formatter, world, data, config["max_len"])
    train = training_rows(args, data.train, data, encoding, changes)
    if args.compile:
        train.groups_in_model = ()
    all_blocks = replace(encoding, first_empty_block=False)
    return train, TextRows(data.val, data, all_blocks) if len(data.val) else None


def text_changes(
    args: JobConfig, formatter: BlockyFormatter, world: World, data: PreparedData, max_len: int
) -> TextChanges:
    """Noise, joined rows and descriptions of the training texts. Raises UserError."""
    seed = args.seed
    words = read_words(args.fn_word_freq or os.path.join(data.folder, "words.csv"))
    texts = [cleaner(data.clean_text)(word) for word in words]
    kept = [i for i, word in enumerate(texts) if word.strip()]
    augmenter = Augmenter(
        derived_seed(seed, NOISE),
        args.num_transformations,
        args.augmentation_prob,
        args.unk_lang_prob,
        words=[texts[i] for i in kept],
        word_weights=np.array(list(words.values()))[kept],
        only_ascii=data.clean_text == ASCII_LOWER,
    )
    joined = None
    if args.join_rows and data.max_codes > 1:
        joined = JoinedRows(data, derived_seed(seed, JOINED), args.join_rows, max_len)
    elif args.join_rows:
        world.print("Note: --join-rows joins nothing: the formatter takes one code per row")
    descriptions = load_descriptions(args, data, formatter, derived_seed(seed, DESCRIPTIONS))
    return TextChanges(joined, augmenter, descriptions)


def training_rows(
    args: JobConfig,
    rows: TextRowSet,
    data: PreparedData,
    encoding: RowEncoding,
    changes: TextChanges = NO_CHANGES,
) -> TextRows:
    """Rows that are trained on, with what a teacher says of them if there is one."""
    if data.train.teacher is None:
        return TextRows(rows, data, encoding, changes)
    seed = derived_seed(args.seed, TEACHER)
    return TaughtRows(rows, data, encoding, changes, args.distillation_weight, seed)


# ---- what a checkpoint keeps


def entries(
    args: JobConfig, formatter: BlockyFormatter, data: PreparedData, config: dict, has_ngrams: bool
) -> dict[str, Any]:
    """What a checkpoint holds, so that one can code with it and without the data."""
    return {
        "config": config,
        "formatter": formatter.to_dict(),
        "key": {code: i for i, code in enumerate(data.codes)},
        "system": models.system_name(formatter),
        "languages": data.languages,
        "kept_codes": data.kept_codes,
        "hisco_numbers": data.hisco_numbers,
        **recipe.coding_entries(args.linear_loss, args.join_rows, has_ngrams, data),
    }


def checksums_of_files(args: JobConfig) -> dict[str, int]:
    """Of the files beside the rows that decide the result, by flag. Raises UserError."""
    found = {}
    for dest, path in (
        ("fn_word_freq", args.fn_word_freq),
        ("descriptions_file", args.descriptions_file),
    ):
        if path:
            with opened(path):  # a regular file that can be read
                found[dest] = checksum(path)
    return found
