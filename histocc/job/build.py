"""What a run trains with: its model, its batches and their loaders."""

from dataclasses import replace
from functools import partial
from os.path import join

import numpy as np
import torch

from histocc.data import keys
from histocc.data.arrays import PreparedData
from histocc.data.augment import Augmenter
from histocc.data.dataset import BatchLoader, MicroBatches, RowEncoding, TextChanges
from histocc.data.descriptions import load_descriptions
from histocc.data.joined_rows import JoinedRows
from histocc.job import initial_weights, new_model, recipe
from histocc.job.ngram_fit import ngrams_of
from histocc.job.recipe import make_loss
from histocc.job.settings import Settings
from histocc.model import model_io
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.runtime.compiling import compile_layers
from histocc.runtime.errors import UserError
from histocc.runtime.machine_errors import too_few_open_files
from histocc.runtime.precision import Precision
from histocc.runtime.rng import derived_seed
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import MixerTask
from histocc.text_rules import ASCII_LOWER, cleaner
from histocc.trainer import loop
from histocc.trainer.batch_size import BatchSettings, find_batch_size
from histocc.trainer.plan import BatchPlan

# Streams of random numbers, numbered for `derived_seed`.
WEIGHTS, ORDER, NOISE, DROPOUT, DESCRIPTIONS, JOINED, NGRAMS = range(7)

LENGTH_GROUPS = 4
LENGTH_GROUP_ROWS = {"cpu": 24, "cuda": 64}  # smaller ones cost more than padding does


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
        config = initial_weights.run_config(asked, first)
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
        encoding,
        make_loss(settings.loss, settings.formatter),
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


def batch_plan(batch: BatchSettings, rows: int, world: World) -> BatchPlan:
    """The batch arithmetic of the training rows."""
    return BatchPlan(
        rows,
        batch.total(world.size),
        world.size,
        batch.batch_size,
        batch.length_groups or LENGTH_GROUPS,
        1 if batch.length_groups else LENGTH_GROUP_ROWS[world.device.type],
    )


def text_changes(settings: Settings, world: World, data: PreparedData, max_len: int) -> TextChanges:
    """Noise, joined rows and descriptions of the training texts. Raises UserError."""
    noise, seed = settings.noise, settings.seed
    words = keys.read_words(noise.fn_word_freq or join(data.folder, "words.csv"))
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


def make_loaders(
    settings: Settings, world: World, data: PreparedData, config: dict, plan: BatchPlan
) -> dict[str, BatchLoader]:
    """Loaders of this rank's share of training and validation rows. All ranks. Raises UserError."""
    loader = settings.loader
    workers = {"world": world, "num_workers": loader.num_workers, "pin_memory": loader.pin_memory}
    if loader.num_workers:
        workers |= {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
    encoding = row_encoding(settings, config)
    train = MicroBatches(
        data.train,
        plan,
        world.rank,
        data,
        encoding,
        shuffle_seed=derived_seed(settings.seed, ORDER),
        changes=text_changes(settings, world, data, config["max_len"]),
    )
    loaders = {"train": BatchLoader(train, **workers)}
    if len(data.val):
        at_once = settings.batch.batch_size
        val_plan = BatchPlan(len(data.val), at_once * world.size, world.size, at_once)
        val = MicroBatches(data.val, val_plan, world.rank, data, replace(encoding, first_empty_block=False))
        loaders["val"] = BatchLoader(val, **workers)
    if loader.num_workers:
        tensors = sum(isinstance(value, torch.Tensor) for batch in train[0, 0] for value in batch.values())
        on_their_way = (loader.prefetch_factor or 2) * tensors
        if short := list(filter(None, world.gather(too_few_open_files(loader.num_workers, on_their_way)))):
            raise UserError(short[0])
    return loaders


def choose_batch_size(
    settings: Settings,
    world: World,
    data: PreparedData,
    config: dict,
    model: Seq2SeqMixerOccCANINE,
    precision: Precision,
) -> BatchSettings:
    """--batch-size auto: a size that was tried; the total batch stays that of the default. All ranks."""
    task = MixerTask(make_loss(settings.loss, settings.formatter), settings.formatter)
    model.train()
    encoding = row_encoding(settings, config)
    # a GPU must hold the longest texts
    width = config["max_len"] if world.device.type == "cuda" or not config["memory_mask"] else None

    def take(rows: int) -> None:
        batch = trial_batch(data, encoding, rows, width, world)
        loop.forward_backward(model, task, batch, precision)

    total = settings.batch.total(world.size)
    most = min(-(-total // world.size), len(data.train))
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    # AdamW's two means, DDP's buckets
    found = find_batch_size(take, most, world, still_to_come=3 * trained)
    model.zero_grad(set_to_none=True)
    world.print(f"Batch size: {found} samples at once per process, chosen automatically; total batch {total}")
    return settings.batch.found(found, world.size)


def trial_batch(
    data: PreparedData, encoding: RowEncoding, rows: int, width: int | None, world: World
) -> dict:
    """A micro-batch of `rows` training rows on this rank's device, `width` positions wide (None: as wide as
    they ask for).
    """
    plan, encoding = BatchPlan(len(data.train), rows), replace(encoding, fixed_width=width)
    batches = MicroBatches(data.train, plan, 0, data, encoding, shuffle_seed=0)
    return loop.to_device(batches[0, 0][0], world.device)
