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
from histocc.data.taught import TaughtRows
from histocc.job import initial_weights, new_model, recipe
from histocc.job.ngram_fit import ngrams_of
from histocc.job.recipe import make_loss
from histocc.job.settings import NoiseSettings, Settings
from histocc.model import model_io
from histocc.model.canine import CanineEncoder
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.runtime.device import Precision, compile_layers
from histocc.runtime.files import checksum, opened
from histocc.runtime.rng import derived_seed
from histocc.runtime.world import World
from histocc.text_rules import ASCII_LOWER, cleaner
from histocc.trainer.batches import WEIGHTS

# Streams of random numbers beside those of any run, numbered for `derived_seed`.
NOISE, DESCRIPTIONS, JOINED, NGRAMS, TEACHER = 2, 4, 5, 6, 7


def make_model(
    settings: Settings, world: World, data: PreparedData, resumed: dict | None
) -> tuple[Settings, Seq2SeqMixerOccCANINE, dict]:
    """(settings with what the weights decide, model, its config): random weights, those of
    --initial-checkpoint, or those of the run that is resumed. All ranks. Raises UserError.
    """
    asked, formatter, first = settings.model, settings.formatter, None
    if asked.initial_checkpoint and not resumed:
        first = world.run_on_main("initial weights", lambda: initial_weights.initial_weights(asked))
    settings = recipe.decide(settings, resumed, first)
    counted = None
    if resumed:
        config = resumed["config"]
    else:
        config = initial_weights.run_config(asked, first) | {"text": data.clean_text}
        config["ngrams"], counted = new_model.ngram_config(asked, first, world, data)
    settings = replace(settings, model=replace(asked, model_size=model_io.size_name(config)))
    torch.manual_seed(derived_seed(settings.seed, WEIGHTS) % 2**32)
    model = model_io.build_model(config, formatter, len(data.codes), asked.dropout, asked.ngram_dropout)
    new_model.start_at_frequencies(model, data)
    if not resumed and model.ngrams:
        fit = partial(fit_of_ngrams, settings, world, data, model) if first is None else None
        new_model.start_ngrams(model, world, counted, fit, asked.freeze_encoder)
    model.to(Precision.of(settings.machine.precision, world.device).dtype)
    if resumed:
        model.load_state_dict(resumed["model"])
    if first:
        key = {code: i for i, code in enumerate(data.codes)}
        initial_weights.load_initial_weights(model, asked, first, key, formatter, world)
    model.encoder.requires_grad_(not asked.freeze_encoder)
    if settings.machine.compile:
        compile_layers(model)
        model.in_groups = False  # a compiled layer has few shapes
    return settings, model.to(world.device), config


def fit_of_ngrams(
    settings: Settings, world: World, data: PreparedData, model: Seq2SeqMixerOccCANINE
) -> float:
    """Fits n-grams and decoders of a new model; the seconds, 0 where nothing is to be fitted. Rank 0 only."""
    passes = settings.model.ngram_passes
    fit = (
        f"{len(ngrams_of(model).idf):,} n-grams and both decoders, before the encoder is trained"
        f" (--ngram-passes {passes})"
    )
    if not passes or settings.dry_run:
        world.print(
            f"Not in a dry run, nor in its times: the fit of {fit}"
            if passes
            else "N-grams: not fitted (--ngram-passes 0)"
        )
        return 0.0
    world.print(f"Fitting {fit}")
    first_empty_block = settings.loss.empty_blocks == "first"
    encoding = RowEncoding(settings.formatter, settings.model.max_len, first_empty_block=first_empty_block)
    return new_model.fit_ngrams(
        model,
        data,
        partial(training_rows, settings, data=data, encoding=encoding),
        make_loss(settings.loss, settings.formatter, settings.teaching.distillation_temperature),
        passes,
        derived_seed(settings.seed, NGRAMS),
        new_model.progress(world),
    )


def row_encoding(settings: Settings, config: dict) -> RowEncoding:
    """How rows become tensors for the model of `config`."""
    return RowEncoding(
        settings.formatter,
        config["max_len"],
        None if config["memory_mask"] else config["max_len"],
        settings.loss.empty_blocks == "first",
    )


def text_changes(settings: Settings, world: World, data: PreparedData, max_len: int) -> TextChanges:
    """Noise, joined rows and descriptions of the training texts. Raises UserError."""
    noise, seed = settings.noise, settings.seed
    words = read_words(noise.fn_word_freq or join(data.folder, "words.csv"))
    texts = [cleaner(data.clean_text)(word) for word in words]
    kept = [i for i, word in enumerate(texts) if word.strip()]
    augmenter = Augmenter(
        derived_seed(seed, NOISE),
        noise.num_transformations,
        noise.augmentation_prob,
        noise.unk_lang_prob,
        words=[texts[i] for i in kept],
        word_weights=np.array(list(words.values()))[kept],
        only_ascii=data.clean_text == ASCII_LOWER,
    )
    joined = None
    if noise.join_rows and data.max_codes > 1:
        joined = JoinedRows(data, derived_seed(seed, JOINED), noise.join_rows, max_len)
    elif noise.join_rows:
        world.print("Note: --join-rows joins nothing: the formatter takes one code per row")
    descriptions = load_descriptions(
        noise.descriptions, data, settings.formatter, derived_seed(seed, DESCRIPTIONS)
    )
    return TextChanges(joined, augmenter, descriptions)


def training_rows(
    settings: Settings,
    rows: TextRowSet,
    data: PreparedData,
    encoding: RowEncoding,
    changes: TextChanges = NO_CHANGES,
) -> TextRows:
    """Rows that are trained on, with what a teacher says of them where there is one."""
    if data.train.teacher is None:
        return TextRows(rows, data, encoding, changes)
    seed = derived_seed(settings.seed, TEACHER)
    return TaughtRows(rows, data, encoding, changes, settings.teaching.distillation_weight, seed)


def make_rows(
    settings: Settings, world: World, data: PreparedData, config: dict
) -> tuple[TextRows, TextRows | None]:
    """Rows for training and for validation (None where there are none), for the model of `config`. Raises
    UserError.
    """
    encoding, changes = row_encoding(settings, config), text_changes(settings, world, data, config["max_len"])
    train = training_rows(settings, data.train, data, encoding, changes)
    if settings.machine.compile:
        train.groups_in_model = ()
    val = replace(encoding, first_empty_block=False)
    return train, TextRows(data.val, data, val) if len(data.val) else None


def train_seen_characters(model: Seq2SeqMixerOccCANINE, rows: TextRows, config: dict, frozen: bool) -> None:
    """Of the embeddings of characters only those that can occur are trained. frozen: the encoder is."""
    if not frozen and isinstance(model.encoder, CanineEncoder):
        characters = torch.from_numpy(rows.characters())
        model.encoder.char_embeddings.train_rows_of(characters, config["max_len"])


def entries(settings: Settings, data: PreparedData, config: dict, has_ngrams: bool) -> dict[str, Any]:
    """What a checkpoint holds, so that one can code with it and without the data."""
    formatter = settings.formatter
    return {
        "config": config,
        "formatter": formatter.to_dict(),
        "key": {code: i for i, code in enumerate(data.codes)},
        "system": model_io.system_name(formatter),
        "languages": data.languages,
        "kept_codes": data.kept_codes,
        "hisco_numbers": data.hisco_numbers,
        **recipe.coding_entries(settings.loss.linear_loss, settings.noise.join_rows, has_ngrams, data),
    }


def checksums_of_files(noise: NoiseSettings) -> dict[str, int]:
    """Of the files beside the rows that decide the result, by flag. Raises UserError."""
    found = {}
    for dest, path in (
        ("fn_word_freq", noise.fn_word_freq),
        ("descriptions_file", noise.descriptions.descriptions_file),
    ):
        if path:
            with opened(path):  # a regular file that can be read
                found[dest] = checksum(path)
    return found
