"""What a run trains: its model and its rows, and what of them a checkpoint keeps."""

from dataclasses import replace
from functools import partial
from os.path import join
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
from histocc.job import initial_weights, new_model, recipe
from histocc.job.config import JobConfig
from histocc.job.ngram_fit import ngrams_of
from histocc.job.recipe import make_loss
from histocc.job.teacher import TaughtRows
from histocc.model.canine import CanineEncoder
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.published import models
from histocc.runtime.device import Precision, compile_layers
from histocc.runtime.files import checksum, opened
from histocc.runtime.rng import derived_seed
from histocc.runtime.world import World
from histocc.text import ASCII_LOWER, cleaner
from histocc.trainer.batches import WEIGHTS

# Streams of random numbers beside those of any run, numbered for `derived_seed`.
NOISE, DESCRIPTIONS, JOINED, NGRAMS, TEACHER = 2, 4, 5, 6, 7


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
        first = world.run_on_main("initial weights", lambda: initial_weights.initial_weights(args))
    args = recipe.decide(args, resumed, first)
    counted = None
    if resumed:
        config = resumed["config"]
    else:
        config = initial_weights.run_config(args, first) | {"text": data.clean_text}
        config["ngrams"], counted = new_model.ngram_config(args, first, world, data)
    args = args.decide(model_size=models.size_name(config))
    torch.manual_seed(derived_seed(args.seed, WEIGHTS) % 2**32)
    model = models.build_model(config, formatter, len(data.codes), args.dropout, args.ngram_dropout)
    new_model.start_at_frequencies(model, data)
    if not resumed and model.ngrams:
        fit = partial(fit_of_ngrams, args, formatter, world, data, model) if first is None else None
        new_model.start_ngrams(model, world, counted, fit, args.freeze_encoder)
    model.to(Precision.of(args, world.device).dtype)
    if resumed:
        model.load_state_dict(resumed["model"])
    if first:
        key = {code: i for i, code in enumerate(data.codes)}
        initial_weights.load_initial_weights(model, args, first, key, formatter, world)
    model.encoder.requires_grad_(not args.freeze_encoder)
    if args.compile:
        compile_layers(model)
        model.in_groups = False  # a compiled layer has few shapes
    return args, model.to(world.device), config


def fit_of_ngrams(
    args: JobConfig,
    formatter: BlockyFormatter,
    world: World,
    data: PreparedData,
    model: Seq2SeqMixerOccCANINE,
) -> float:
    """Fits n-grams and decoders of a new model; the seconds, 0 where nothing is to be fitted. Rank 0 only."""
    passes = args.ngram_passes
    fit = (
        f"{len(ngrams_of(model).idf):,} n-grams and both decoders, before the encoder is trained"
        f" (--ngram-passes {passes})"
    )
    if not passes or args.dry_run:
        world.print(
            f"Not in a dry run, nor in its times: the fit of {fit}"
            if passes
            else "N-grams: not fitted (--ngram-passes 0)"
        )
        return 0.0
    world.print(f"Fitting {fit}")
    first_empty_block = args.empty_blocks == "first"
    encoding = RowEncoding(formatter, args.max_len, first_empty_block=first_empty_block)
    return new_model.fit_ngrams(
        model,
        data,
        partial(training_rows, args, data=data, encoding=encoding),
        make_loss(args, formatter, args.distillation_temperature),
        passes,
        derived_seed(args.seed, NGRAMS),
        new_model.progress(world),
    )


def row_encoding(args: JobConfig, formatter: BlockyFormatter, config: dict) -> RowEncoding:
    """How rows become tensors for the model of `config`."""
    return RowEncoding(
        formatter,
        config["max_len"],
        None if config["memory_mask"] else config["max_len"],
        args.empty_blocks == "first",
    )


def text_changes(
    args: JobConfig, formatter: BlockyFormatter, world: World, data: PreparedData, max_len: int
) -> TextChanges:
    """Noise, joined rows and descriptions of the training texts. Raises UserError."""
    seed = args.seed
    words = read_words(args.fn_word_freq or join(data.folder, "words.csv"))
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
    """Rows that are trained on, with what a teacher says of them where there is one."""
    if data.train.teacher is None:
        return TextRows(rows, data, encoding, changes)
    seed = derived_seed(args.seed, TEACHER)
    return TaughtRows(rows, data, encoding, changes, args.distillation_weight, seed)


def make_rows(
    args: JobConfig, formatter: BlockyFormatter, world: World, data: PreparedData, config: dict
) -> tuple[TextRows, TextRows | None]:
    """Rows for training and for validation (None where there are none), for the model of `config`. Raises
    UserError.
    """
    encoding = row_encoding(args, formatter, config)
    changes = text_changes(args, formatter, world, data, config["max_len"])
    train = training_rows(args, data.train, data, encoding, changes)
    if args.compile:
        train.groups_in_model = ()
    val = replace(encoding, first_empty_block=False)
    return train, TextRows(data.val, data, val) if len(data.val) else None


def train_seen_characters(model: Seq2SeqMixerOccCANINE, rows: TextRows, config: dict, frozen: bool) -> None:
    """Of the embeddings of characters only those that can occur are trained. frozen: the encoder is."""
    if not frozen and isinstance(model.encoder, CanineEncoder):
        characters = torch.from_numpy(rows.characters())
        model.encoder.char_embeddings.train_rows_of(characters, config["max_len"])


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
