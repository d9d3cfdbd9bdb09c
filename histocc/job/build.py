"""What a run is made of: prepared data, its model, the fit of new n-grams, its rows, its loss, and what a
checkpoint keeps.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from histocc.data import prepare as preparing
from histocc.data.arrays import PreparedData, RowSet
from histocc.data.config import PrepareSettings, StartsFrom, columns_of, file_problems, settings_from
from histocc.data.dataset import RowEncoding, TextRows, load_descriptions
from histocc.data.noise import Augmenter
from histocc.data.prepare import LISTS
from histocc.data.report import report_lines
from histocc.data.rows import read_key, read_words
from histocc.formatter import PAD_IDX, BlockyFormatter
from histocc.job import ngram_fit, teacher
from histocc.job.config import JobConfig, Losses, decide, is_fitted, refuse_other_arguments
from histocc.model.canine import CanineEncoder
from histocc.model.confidence import USUAL
from histocc.model.loss import ROWS, BlockOrderInvariantLoss, DistillationLoss, LinearLoss, LossMixer
from histocc.model.mixer import NGRAMS, Seq2SeqMixerOccCANINE, model_config
from histocc.model.ngrams import ALL_CASES, AUTO, NONE, PATTERNS
from histocc.published import formats, models
from histocc.runtime import checkpoint
from histocc.runtime.config import flag_of
from histocc.runtime.device import Precision, compile_layers
from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.files import OwnFiles, is_same, problems, save_path_problem
from histocc.runtime.rng import derived_seed
from histocc.runtime.world import World
from histocc.text import ASCII_LOWER, cleaner
from histocc.trainer.batches import WEIGHTS
from histocc.trainer.log import LOG
from histocc.trainer.script import output_problems

# Streams of random numbers beside those of any run, numbered for `derived_seed`.
NOISE, DESCRIPTIONS, TEACHER = 2, 4, 7
NGRAM_WIDTH = 128  # numbers for each n-gram
MAX_AUTO_BITS = 18  # 2^18 n-grams, since a step of the optimizer goes over all
EQUAL_SHARE = 0.5
# Of the learning rate, in benchmarks/LOG.md: with a mean over the classes, a new linear decoder learns next
# to nothing at the rate of the rest, and what was fitted already becomes worse at it.
NEW_LINEAR_LR_FACTOR = {"mean": 30.0, "rows": 5.0}
FITTED_LINEAR_LR_FACTOR = 0.1


# ---- data


def dataset_files(paths: list[str]) -> tuple[list[str], list[str]]:
    """(training files, validation files) of finetune.py's --dataset: files, or a folder with one table, or
    with train and val. Raises UserError.
    """
    if len(paths) > 1 or not os.path.isdir(path := paths[0]):
        return paths, []
    names = sorted(set(os.listdir(path)) - {*LISTS, LOG})  # those of a run in the same folder
    ends = (".csv", ".tsv", ".parquet")
    tables = [name for name in names if name.lower().endswith(ends) and name[0] != "."]
    files = [os.path.join(path, name) for name in tables]
    parts = [os.path.splitext(name)[0].lower() for name in tables]
    if len(files) == 1 or parts in (["train", "val"], ["train", "validation"]):
        return files[:1], files[1:]
    train, val = (
        " ".join(file for file, name in zip(files, parts) if part in name) for part in ("train", "val")
    )
    key = os.path.join(path, LISTS[0])
    raise UserError(
        f"{path}: is a folder with {len(tables)} tables ({', '.join(tables[:5]) or 'none'}): finetune.py"
        " takes files, or a folder with one table, or with train and val; for files of each kind:"
        f" train_mixer.py --train-data {train or 'A B …'} --val-data {val or 'V'}"
        f"{f' --key {key}' * os.path.isfile(key)}"
    )


def resumes(args: JobConfig) -> bool:
    """Whether the save folder holds a run that is resumed, if it can be read."""
    return checkpoint.exists_in(args.save_path) and not (args.overwrite or args.eval_only)


def initial_weights(args: JobConfig) -> dict:
    """`models.initial_weights` of --initial-checkpoint. Raises UserError."""
    named = args.initial_checkpoint or ""
    keys = (read_key(path) if path else None for path in (args.initial_key, args.key))
    return models.initial_weights(models.find_weights(named, f"--initial-checkpoint {named}"), *keys)


def starts_from(args: JobConfig, resumed: dict | None) -> StartsFrom:
    """What the data must know of the weights that a run starts from, or of its teacher. Raises UserError."""
    kept = None  # of its codes: all
    if not resumed and args.initial_checkpoint:
        state = initial_weights(args)
        if args.only_encoder:
            return StartsFrom(state["config"]["text"])
        if not (state["config"].get("encoder", True) or args.max_steps or args.eval_only):
            raise UserError(
                f"--initial-checkpoint {args.initial_checkpoint}: n-grams alone are trained by their fit,"
                " which a run from a checkpoint leaves out. Omit it and fit anew to the rows of its training"
                " and the new ones together: --dataset OLD.csv NEW.csv (train_mixer.py: --train-data). Or add"
                " --max-steps N to take steps from its weights"
            )
    elif not resumed and args.teacher and not args.eval_only:
        state = models.load_model(teacher.teacher_file(args))[2]
    else:
        state = resumed
        if args.eval_only:
            file = models.find_weights(args.save_path, f"--eval-only: {args.save_path}")
            state = models.load_model(file)[2]
        if state is None:
            return StartsFrom()
        kept = int(state.get("kept_codes") or 0)
    codes, formatter = list(state["key"])[:kept], state["formatter"] or {}
    return StartsFrom(state["config"]["text"], codes, formatter.get("kind"), formatter.get("chars"))


def _problems_of_files(args: JobConfig, files: list[str]) -> list[str]:
    """What of the files that the run will write is in the way, or an input."""
    inputs: dict[str | None, str] = dict.fromkeys(files, "a file of the data")
    inputs |= dict.fromkeys(args.unlabelled or [], "a file of --unlabelled")
    inputs |= {
        getattr(args, dest): f"the file of {flag_of(dest)}"
        for dest in ("key", "initial_key", "all_codes_file", "descriptions_file", "fn_word_freq", "config")
    }
    if args.initial_checkpoint and not resumes(args):
        first = formats.local_weights(args.initial_checkpoint)
        inputs[first] = "the file of --initial-checkpoint"
        if args.overwrite and first and is_same(os.path.dirname(os.path.realpath(first)), args.save_path):
            return [f"--overwrite would remove {first} of --initial-checkpoint: choose another folder"]
    own = OwnFiles(args.save_path, args.overwrite)
    if args.prepare_only:
        return problems(map(own.path, LISTS), inputs, args.overwrite, own)
    return output_problems(args, inputs, own, [*LISTS, ngram_fit.FILE])


def prepare_data(
    args: JobConfig,
    world: World,
    train_files: list[str],
    val_files: list[str],
    default_formatter: str = "gpf",
    naming: str = "hisco",
) -> tuple[JobConfig, PrepareSettings, PreparedData]:
    """(arguments with the columns of the files, how these are read, the rows). Rank 0 checks arguments and
    files and prepares the data; a node that does not see its folder prepares its own, and all must agree. All
    ranks. Raises UserError with all that is wrong.
    """

    def prepare() -> tuple[PrepareSettings, str]:
        wrong = [*args.problems(), *filter(None, [save_path_problem(args.save_path)])]
        wrong += _problems_of_files(args, train_files + val_files)
        path, resumed, start = "", None, StartsFrom()
        if resumes(args) and not args.prepare_only:
            path, resumed, _ = checkpoint.newest_good(args.save_path, models.load_resumable)
        try:
            start = starts_from(args, resumed)
        except UserError as error:
            wrong.append(str(error))
        columns = columns_of(args, train_files[0], wrong, default_formatter, naming)
        settings = settings_from(args, columns, train_files, val_files, wrong, start)
        if args.unlabelled:
            raise_if_any(file_problems(teacher.unlabelled_settings(args, settings)))
        if columns.note:
            world.print(columns.note)
        if resumed:
            with checkpoint.reading(path):
                refuse_other_arguments(with_columns(args, settings), resumed)
        lists = OwnFiles(args.save_path, args.overwrite) if args.prepare_only else None
        folder = preparing.prepare(settings, args.save_path, world.print, lists, world.give_up_if_asked)
        formatter = BlockyFormatter.from_dict(settings.formatter)
        if texts := load_descriptions(args, PreparedData.open(folder), formatter, 0):
            world.print(f"Descriptions: {texts.codes:,} of {texts.numbers.shape[0] - 1:,} codes have one")
        return settings, folder

    settings, folder = world.run_on_main(prepare)
    data = preparing.on_every_node(settings, args.save_path, folder, world, world.give_up_if_asked)
    world.print("\n".join(report_lines(data.report)))
    return with_columns(args, settings), settings, data


def with_columns(args: JobConfig, settings: PrepareSettings) -> JobConfig:
    columns = {name: getattr(settings, name) for name in ("target_cols", "language", "language_col")}
    return args.decide(formatter=settings.formatter["kind"], **columns)


# ---- the model


def make_model(
    args: JobConfig, formatter: BlockyFormatter, world: World, data: PreparedData, resumed: dict | None
) -> tuple[JobConfig, Seq2SeqMixerOccCANINE, dict]:
    """(arguments with what the weights decide, model, its config): random weights, those of
    --initial-checkpoint, or those of the run that is resumed. All ranks. Raises UserError.
    """
    first = counted = None
    if args.initial_checkpoint and not resumed:
        first = world.run_on_main(lambda: initial_weights(args))
    if args.model_size == AUTO:
        args = args.decide(model_size=None if resumed or first else auto_size(args, world))
    if resumed and args.ngram_passes not in (None, resumed["args"].get("ngram_passes")):
        world.print("Note: --ngram-passes has no effect on a run with a checkpoint; --overwrite starts over")
    args = decide(args, resumed, first)
    if resumed:
        config: dict = resumed["config"]
    else:
        config = new_config(args, first) | {"text": data.clean_text}
        config["ngrams"], counted = new_ngrams(args, first, world, data)
    args = args.decide(model_size=models.size_name(config))
    torch.manual_seed(derived_seed(args.seed, WEIGHTS) % 2**32)
    model = models.build_model(config, formatter, len(data.codes), args.dropout, args.ngram_dropout)
    start_at_frequencies(model, data)
    model.to(Precision.of(args, world.device).dtype)
    if counted and model.ngrams:
        model.ngrams.hashes.copy_(torch.from_numpy(counted[0]))
        model.ngrams.idf.copy_(torch.from_numpy(counted[1]))
        if first is None and (args.ngram_passes == 0 or args.dry_run):
            world.print(
                "N-grams are not fitted (--ngram-passes 0, or a dry run, which lacks it in times and memory)"
            )
        elif first is None:
            encoding = RowEncoding(formatter, args.max_len, first_empty_block=args.empty_blocks == "first")
            rows_of = partial(training_rows, args, data=data, encoding=encoding)
            loss_fn = make_loss(args, formatter)
            ngram_fit.fit(args, world, data, rows_of, loss_fn, model)
            config["ngrams"]["answers"] = model.ngrams.answers is not None
            model.encoder.zero_output()  # which the decoders know nothing of yet
    if resumed:
        model.load_state_dict(resumed["model"])
    if first:
        models.load_initial_weights(model, first, data.codes, formatter, args.only_encoder, world.print)
    model.encoder.requires_grad_(not args.freeze_encoder)
    if args.compile:
        compile_layers(model)
        model.in_groups = False  # a compiled layer has few shapes
    return args, model.to(world.device), config


def auto_size(args: JobConfig, world: World) -> str:
    """Return the size of a new model. On CPUs an encoder takes most of the time, for little more accuracy."""
    if args.ngrams == NONE or args.freeze_encoder:
        return "base"
    chosen = "base, since there is a GPU; --model-size ngrams trains n-grams alone"
    if world.device.type != "cuda":
        chosen = f"{NGRAMS}, since there is no GPU; tiny has an encoder, too"
    world.print(f"--model-size auto: {chosen}")
    return chosen.partition(",")[0]


def freeze_unseen_characters(
    model: Seq2SeqMixerOccCANINE, rows: TextRows, config: dict, frozen: bool
) -> None:
    """Of the embeddings of characters only those that can occur are trained. frozen: the encoder is."""
    if not frozen and isinstance(model.encoder, CanineEncoder):
        characters = torch.from_numpy(rows.characters())
        model.encoder.char_embeddings.train_rows_of(characters, config["max_len"])


def new_config(args: JobConfig, first: dict | None) -> dict:
    """`config` of a new run but its text rule: sizes from --model-size or from the initial weights. Raises
    UserError.
    """
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), args.encoder_dropout)
    size, named = args.model_size, args.initial_checkpoint
    if first is None:
        encoder = model_config(size or "base", **dropouts).to_dict()
        if size == NGRAMS:
            encoder["encoder"] = False
    else:
        encoder = {**first["config"], **dropouts}
        if not encoder.get("encoder", True) and (args.only_encoder or args.freeze_encoder):
            raise UserError(f"{named} has no encoder: omit --only-encoder and --freeze-encoder")
        if size and not models.has_size(encoder, size):
            sizes = f"width {encoder['hidden_size']}, {encoder['num_hidden_layers']} layers"
            raise UserError(f"--model-size {size}: the checkpoint {named} has another size ({sizes})")
    config = {**encoder, "max_len": args.max_len}
    if first is None or args.only_encoder:  # its decoder is new
        config |= {"memory_mask": True, "target_mask": True}
        config["decoder_dim_feedforward"] = config["hidden_size"]
    asked = {name: getattr(args, name) for name in ("decoder_dim_feedforward", "memory_mask")}
    asked["target_mask"] = False if args.published_target_mask else None
    return config | {name: value for name, value in asked.items() if value is not None}


def load_on_all(world: World, load: Callable[[], models.Loaded]) -> models.Loaded:
    """Return what `load` does on rank 0, but for an optimizer, on every rank: other nodes may not see the
    file. All ranks. Raises UserError.
    """

    def work() -> tuple[BlockyFormatter, dict]:
        _, formatter, state = load()
        return formatter, {**state, "optimizer": {}}

    formatter, state = world.run_on_main(work)
    of_model = state["config"], formatter, len(state["key"]), state["model"], state.get("kind", "mixer")
    return models.model_with(*of_model), formatter, state


def start_at_frequencies(model: Seq2SeqMixerOccCANINE, data: PreparedData) -> None:
    """A new linear decoder starts at how often each code occurs in the training rows: its bias is the
    log-odds, its weights are 0. From ½ each, a short training is spent on learning that codes are rare.
    """
    rows, counts = len(data.train), np.zeros(len(data.codes), dtype=np.int64)
    for start in range(0, rows, 1 << 18):
        codes = data.train.codes[start : start + (1 << 18)]
        counts += np.bincount(codes[codes >= 0], minlength=len(counts))
    share = torch.from_numpy((counts + 0.5) / (rows + 1))
    with torch.no_grad():
        model.linear_decoder.weight.zero_()
        model.linear_decoder.bias.copy_(torch.logit(share))


def fast_parameters(
    args: JobConfig, model: Seq2SeqMixerOccCANINE, resumed: dict | None
) -> tuple[list[str], float]:
    """(names of the parameters with a learning rate of their own, its factor on that of the rest): the linear
    decoder and its n-grams, or n-grams alone that are added to trained weights. args are decided.
    """
    ngrams, added = model.ngrams, False
    if resumed:
        with checkpoint.reading(resumed["path"]):
            groups, rates = resumed["optimizer"]["param_groups"], resumed["scheduler"]["base_lrs"]
            factor = rates[-1] / rates[0]
            added = ngrams is not None and len(groups[-1]["params"]) == len([*ngrams.parameters()])
    elif ngrams and is_fitted(args):  # they are fitted
        factor = FITTED_LINEAR_LR_FACTOR
    else:
        is_new = not model.linear_decoder.weight.any()
        new_ngrams = ngrams is not None and not ngrams.linear.weight.any()
        added = new_ngrams and not is_new
        starts = new_ngrams if ngrams else is_new
        factor = NEW_LINEAR_LR_FACTOR[args.linear_loss or "mean"] if starts else 1.0
    parts = ["linear_decoder"] * (not added) + ["ngrams"] * bool(ngrams)
    names = [f"{part}.{name}" for part in parts for name, _ in model.get_submodule(part).named_parameters()]
    return names if factor != 1 else [], factor


def new_ngrams(
    args: JobConfig, first: dict | None, world: World, data: PreparedData
) -> tuple[dict | None, tuple[np.ndarray, np.ndarray] | None]:
    """(`ngrams` in the config of a new run, None for none; what `count_ngrams` gives, None if the initial
    weights bring n-grams). All ranks. Raises UserError if these are others than asked for.
    """
    asked = args.ngrams
    held = None if first is None or args.only_encoder else first["config"].get("ngrams")
    if held is not None:
        if asked == NONE or asked != AUTO and held["rows"] > 1 << int(asked):
            had = f"the initial weights have {held['rows']:,} n-grams and need them"
            raise UserError(f"--ngrams {asked}: {had}; omit --ngrams, or take --only-encoder")
        return held, None
    if asked == NONE or asked == AUTO and first is not None:
        return None, None
    most, check = 1 << (MAX_AUTO_BITS if asked == AUTO else int(asked)), world.give_up_if_asked
    counted = world.run_on_main(lambda: ngram_fit.count_ngrams(data, args.max_len, most, check))
    sizes = {"rows": len(counted[0]), "width": NGRAM_WIDTH}
    return {**sizes, "patterns": list(PATTERNS), "case": ALL_CASES, "answers": False}, counted


# ---- rows and their loss


def make_rows(
    args: JobConfig, formatter: BlockyFormatter, data: PreparedData, config: dict
) -> tuple[TextRows, TextRows | None]:
    """Rows for training, with noise and descriptions, and for validation, if any. Raises UserError."""
    max_len, seed = config["max_len"], args.seed
    width = None if config["memory_mask"] else max_len
    encoding = RowEncoding(formatter, max_len, width, args.empty_blocks == "first")
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
    descriptions = load_descriptions(args, data, formatter, derived_seed(seed, DESCRIPTIONS))
    train = training_rows(args, data.train, data, encoding, augmenter, descriptions)
    if args.compile:
        train.groups_in_model = ()
    all_blocks = replace(encoding, first_empty_block=False)
    return train, TextRows(data.val, data, all_blocks) if len(data.val) else None


def training_rows(
    args: JobConfig, rows: RowSet, data: PreparedData, encoding: RowEncoding, *changes: Any
) -> TextRows:
    """Rows that are trained on, with what a teacher says of them if there is one."""
    if data.train.teacher is None:
        return TextRows(rows, data, encoding, *changes)
    seed = derived_seed(args.seed, TEACHER)
    return teacher.TaughtRows(rows, data, encoding, *changes, weight=args.distillation_weight, seed=seed)


def make_loss(args: Losses, formatter: BlockyFormatter) -> LossMixer:
    """The loss of decided arguments: of the decoder that writes codes, and of the linear decoder."""
    assert args.empty_blocks and args.block_loss and args.linear_loss, "still open"
    blocks, size = formatter.max_num_codes, formatter.block_size
    loss_fn = BlockOrderInvariantLoss(PAD_IDX, blocks, size, args.empty_blocks, args.block_loss)
    return DistillationLoss(loss_fn, LinearLoss(args.linear_loss), args.seq2seq_weight)


# ---- what a checkpoint keeps


def checkpoint_entries(
    args: JobConfig, formatter: BlockyFormatter, data: PreparedData, config: dict
) -> dict[str, Any]:
    """What a checkpoint holds, so that one can code with it and without the data. `linear_share` is the part
    of the linear decoder in rankings, where n-grams make it as good as the other one; of `thresholds`, its
    loss decides whether its best code always counts, and that not more do than a row of the data has.
    """
    found: dict[str, Any] = {"linear_share": EQUAL_SHARE} if config["ngrams"] else {}
    if args.linear_loss == ROWS:
        most = max([1, *map(int, data.report["codes_per_row"])])
        usual = {"default": USUAL, "by_language": {}, "source": "usual"}
        found["thresholds"] = {**usual, "at_least_one": True, "at_most": most}
    return {
        "config": config,
        "formatter": formatter.to_dict(),
        "key": {code: i for i, code in enumerate(data.codes)},
        "system": models.system_name(formatter),
        "languages": data.languages,
        "kept_codes": data.kept_codes,
        "hisco_numbers": data.hisco_numbers,
        **found,
    }
