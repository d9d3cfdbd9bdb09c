"""Inputs of a run: its files, the checkpoint that it starts or continues from, and its rows."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from histocc.data import prepare as preparing
from histocc.data.arrays import PreparedData
from histocc.data.config import (
    PrepareSettings,
    StartsFrom,
    columns_of,
    fingerprint,
    settings_from,
    written_by,
)
from histocc.data.dataset import RowEncoding, TextRows
from histocc.data.descriptions import load_descriptions
from histocc.data.noise import Augmenter
from histocc.data.prepare import LISTS
from histocc.data.report import report_lines
from histocc.data.rows import read_key, read_words
from histocc.data.tables import TABLE_NAME
from histocc.formatter import BlockyFormatter
from histocc.job.card import CARD
from histocc.job.config import JobConfig, of_ngrams_alone, refuse_on_resume
from histocc.job.model import auto_size
from histocc.learn.ngram_fit import FILE as FIT
from histocc.model.ngrams import NONE
from histocc.published import built_in, formats, models
from histocc.runtime import checkpoint
from histocc.runtime.config import AUTO, flag_of
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles, is_same, problems, save_path_problems
from histocc.runtime.rng import DESCRIPTIONS, NOISE, derived_seed
from histocc.runtime.world import World
from histocc.text import ASCII_LOWER, cleaner
from histocc.trainer.log import LOG
from histocc.trainer.script import output_problems, refuse_other_data


class Inputs(NamedTuple):
    """The data of a run, and the checkpoints, by path, that rank 0 has read for it, each to be taken once."""

    settings: PrepareSettings
    data: PreparedData
    read: dict[str, dict]

    def resumable(self, file: str) -> dict:
        """Return the checkpoint of an interrupted run. Raises UserError."""
        return self.read.pop(file, None) or models.load_run(file)

    def content(self, file: str) -> dict:
        """Return the content of a file of weights. Raises UserError."""
        return self.read.pop(file, None) or formats.load_content(file)


# ---- data


def dataset_files(paths: list[str]) -> tuple[list[str], list[str]]:
    """Return (training, validation files) of --dataset: files, or a folder of tables. Raises UserError."""
    if len(paths) > 1 or not os.path.isdir(path := paths[0]):
        return paths, []
    names = sorted(set(os.listdir(path)) - {*LISTS, LOG})  # without the files of a run in the same folder
    tables = [
        name for name in names if TABLE_NAME.fullmatch(name) and name[0] not in ".~"
    ]  # ~: is open in Excel
    files = [os.path.join(path, name) for name in tables]
    parts = [TABLE_NAME.sub(r"\1", name).lower() for name in tables]
    if len(files) == 1 or parts in (["train", "val"], ["train", "validation"]):
        return files[:1], files[1:]
    train, val = (
        " ".join([file for file, name in zip(files, parts) if part in name][:3]) for part in ("train", "val")
    )
    key = os.path.join(path, LISTS[0])
    raise UserError(
        f"{path}: is a folder with {len(tables)} tables ({', '.join(tables[:5]) or 'none'}). Name the files"
        " to train on (histocc train A.csv B.csv), or a folder with one table, or with train and val; or the"
        f" files of each kind: histocc mix --train-data {train or 'A.csv'} --val-data {val or 'V.csv'}"
        f"{f' --key {key}' * os.path.isfile(key)}"
    )


def resumes(args: JobConfig) -> bool:
    """Return whether the save folder holds a run to resume, if that is readable."""
    return checkpoint.exists_in(args.save_path) and not (args.overwrite or args.eval_only)


def read_initial_weights(
    named: str, *keys: str | None, load: Callable[[str], dict] = formats.load_content
) -> dict:
    """Return `models.initial_weights` of --initial-checkpoint. keys: files of --initial-key, --key. load:
    returns the content of a file. Raises UserError.
    """
    file = models.find_weights(named, f"--initial-checkpoint {named}")
    codes = (read_key(path) if path else None for path in keys)
    return models.initial_weights(file, load(file), *codes)


def starts_from(args: JobConfig, resumed: dict | None, read: dict[str, dict]) -> StartsFrom:
    """Return the requirements of the initial weights, and add their content to `read`. Raises UserError."""

    def load(file: str) -> dict:
        read[file] = formats.load_content(file)
        return read[file]

    kept = None  # keep all of its codes
    if not resumed and args.initial_checkpoint:
        state = read_initial_weights(args.initial_checkpoint, args.initial_key, args.key, load=load)
        if args.only_encoder:
            return StartsFrom(state["config"]["text"])
        is_solved = bool(state["config"].get("ridge"))
        has_steps = args.max_steps and not is_solved
        if not (args.eval_only or has_steps or state["config"].get("encoder", True)):
            steps = ". Or add --max-steps N to take steps from its weights" * (not is_solved)
            prior = ". Or name it with --prior, for a model that builds on its answers"
            raise UserError(
                f"--initial-checkpoint {args.initial_checkpoint}: this model has no encoder and cannot be"
                " trained further. Train a new one on the old and the new rows together, in a new folder:"
                " histocc train OLD.csv NEW.csv --output NEW"
                f"{steps}{prior * (not state.get('prior'))}"
            )
    else:
        state = resumed
        if args.eval_only:
            file = models.find_weights(args.save_path, f"--eval-only: {args.save_path}")
            state = models.model_of_content(file, load(file))[2]
        if state is None:
            return StartsFrom()
        kept = int(state.get("kept_codes") or 0)
    return StartsFrom(state["config"]["text"], list(state["key"])[:kept], state["formatter"])


def _problems_of_files(args: JobConfig, files: list[str]) -> list[str]:
    """Return problems with files to be written: they exist, or are an input."""
    inputs: dict[str | None, str] = dict.fromkeys(files, "a file of the data")
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
    return output_problems(args, inputs, own, [*LISTS, FIT, CARD])


def prepare_data(
    args: JobConfig,
    world: World,
    train_files: list[str],
    val_files: list[str],
    default_formatter: str = AUTO,
    naming: str = "hisco",
) -> tuple[JobConfig, Inputs]:
    """Return (arguments with the columns of the files, the run's inputs). Rank 0 checks arguments and files
    and prepares the data. A node that does not see its folder prepares its own, and all must agree. All
    ranks. Raises UserError with all problems.
    """
    read: dict[str, dict] = {}
    if args.model_size == AUTO and not (args.initial_checkpoint or resumes(args)):
        args = args.with_decided(model_size=auto_size(args, world))

    def prepare() -> tuple[PrepareSettings, str, dict]:
        wrong = [*args.problems(), *save_path_problems(args.save_path)]
        wrong += _problems_of_files(args, train_files + val_files)
        path, resumed, start = "", None, StartsFrom()
        if resumes(args) and not args.prepare_only:
            path, resumed, _ = checkpoint.newest_good(args.save_path, models.load_run)
            read[path] = resumed
        try:
            start = starts_from(args, resumed, read)
            if args.prior not in (AUTO, NONE, built_in.NAME) and not resumed:
                models.find_weights(args.prior, f"--prior {args.prior}")
        except UserError as error:
            wrong.append(str(error))
        before = (resumed or {}).get("args", {})
        default = before.get("formatter", default_formatter)
        decided, note = columns_of(args, train_files[0], wrong, default, naming)
        few, max_len = of_ngrams_alone(args.with_decided(**before) if resumed else args)
        settings = settings_from(decided, train_files, val_files, wrong, start, few, max_len)
        if note:
            world.print(note)
        if resumed:
            with checkpoint.reading(path):
                refuse_on_resume(with_columns(args, settings), resumed)
                if fingerprint(settings) != resumed["position"]["fingerprint"]:
                    refuse_other_data(args.save_path)  # before a report on data that will not be used
        lists = OwnFiles(args.save_path, args.overwrite) if args.prepare_only else None
        folder = preparing.prepare(settings, args.save_path, world.print, lists, world.give_up_if_asked)
        data = PreparedData.open(folder)
        written = written_by(settings, data, start)
        if texts := load_descriptions(args, data, BlockyFormatter.from_dict(written), 0):
            world.print(f"Codes with a description: {texts.codes:,} of {texts.numbers.shape[0] - 1:,}")
        return settings, folder, written

    settings, folder, written = world.run_on_main(prepare)
    data = preparing.on_every_node(settings, args.save_path, folder, world, world.give_up_if_asked)
    world.print("\n".join(report_lines(data.report)))
    return with_columns(args, settings), Inputs(replace(settings, formatter=written), data, read)


def with_columns(args: JobConfig, settings: PrepareSettings) -> JobConfig:
    names = ("target_cols", "language", "language_col", "max_len")
    columns = {name: getattr(settings, name) for name in names}
    return args.with_decided(formatter=settings.formatter["kind"].replace("classes", AUTO), **columns)


# ---- rows


def make_rows(
    args: JobConfig, formatter: BlockyFormatter, data: PreparedData, config: dict
) -> tuple[TextRows, TextRows | None]:
    """Return rows for training, with noise and descriptions, and for validation, if any. Raises UserError."""
    max_len, seed = config["max_len"], args.seed
    width = None if config["memory_mask"] else max_len
    encoding = RowEncoding(formatter, max_len, width, args.empty_blocks == "first")
    words = read_words(args.fn_word_freq or os.path.join(data.folder, "words.csv"))
    cleaned = [cleaner(data.clean_text)(word) for word in words]
    kept = [i for i, word in enumerate(cleaned) if word.strip()]
    augmenter = Augmenter(
        derived_seed(seed, NOISE),
        args.num_transformations,
        args.augmentation_prob,
        args.unk_lang_prob,
        words=[cleaned[i] for i in kept],
        word_weights=np.array(list(words.values()))[kept],
        only_ascii=data.clean_text == ASCII_LOWER,
    )
    descriptions = load_descriptions(args, data, formatter, derived_seed(seed, DESCRIPTIONS))
    train = TextRows(data.train, data, encoding, augmenter, descriptions)
    if args.compile:
        train.groups_in_model = ()
    all_blocks = replace(encoding, first_empty_block=False)
    return train, TextRows(data.val, data, all_blocks) if len(data.val) else None
