"""From arguments to prepared data: everything that can be wrong is found here, and said together."""

import contextlib
import os
import tempfile
from typing import Any

from histocc.data import prepare as preparing
from histocc.data.arrays import PreparedData
from histocc.data.config import PrepareSettings, StartsFrom, columns_of, settings_from
from histocc.data.dataset import find_columns, load_descriptions
from histocc.data.prepare import LISTS
from histocc.data.report import report_lines
from histocc.data.rows import read_key, read_words
from histocc.formatter import BlockyFormatter
from histocc.job import teacher
from histocc.job.config import FinetuneConfig, JobConfig
from histocc.job.recipe import refuse_other_arguments
from histocc.published import models
from histocc.runtime import checkpoint
from histocc.runtime.config import flag_of, shown
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles, problems, save_path_problem
from histocc.runtime.world import World
from histocc.trainer.log import LOG
from histocc.trainer.run import output_problems


def _description_problems(args: JobConfig) -> list[str]:
    try:
        if args.include_descriptions and args.descriptions_file:
            find_columns(args)
    except UserError as error:
        return [str(error)]
    return []


def _checkpoint_problems(args: JobConfig) -> list[str]:
    try:
        first = initial_file(args) if args.initial_checkpoint and not resumes(args) else None
    except UserError as error:
        return [str(error)]
    if (
        first
        and args.overwrite
        and os.path.realpath(os.path.dirname(first) or ".") == os.path.realpath(args.save_path)
    ):
        return [
            f"--overwrite would remove {first}, which --initial-checkpoint needs: choose another folder for"
            " the new run"
        ]
    if args.eval_only and first is None and checkpoint.find(args.save_path) is None:
        return [f"--eval-only: no checkpoint in {args.save_path}; --initial-checkpoint names one"]
    no_rows = isinstance(args, FinetuneConfig) and args.share_val == 0 and not os.path.isdir(args.dataset)
    if args.eval_only and no_rows:
        return ["--eval-only needs rows to validate on, and --share-val 0 leaves none"]
    return []


def _problems_of_outputs(args: JobConfig, files: list[str]) -> list[str]:
    """What of the files that the run will write is in the way, or an input."""
    inputs: dict[str | None, str] = dict.fromkeys(files, "a file of the data")
    inputs |= dict.fromkeys(args.unlabelled or [], "a file of --unlabelled")
    inputs |= {
        getattr(args, dest): f"the file of {flag_of(dest)}"
        for dest in ("key", "initial_key", "all_codes_file", "descriptions_file", "fn_word_freq", "config")
    }
    if args.initial_checkpoint and not resumes(args):
        with contextlib.suppress(UserError):  # said already
            inputs[initial_file(args)] = "the file of --initial-checkpoint"
    try:
        own = OwnFiles(args.save_path, args.overwrite)
        if args.prepare_only:
            return problems(map(own.path, LISTS), inputs, args.overwrite, own)
        return output_problems(args, inputs, own, LISTS)
    except UserError as error:
        return [str(error)]


def dataset_files(path: str) -> tuple[list[str], list[str]]:
    """(training files, validation files) of finetune.py's data set: a file, or a folder with one table, or
    with train and val.

    Raises UserError for another folder.
    """
    if not os.path.isdir(path):
        return [path], []
    # of a run in the same folder
    tables = sorted(
        name
        for name in os.listdir(path)
        if name.lower().endswith((".csv", ".tsv", ".parquet"))
        and not name.startswith(".")
        and name not in (*LISTS, LOG)
    )
    files = {os.path.splitext(name)[0].lower(): os.path.join(path, name) for name in tables}
    if len(tables) == 1:
        return [os.path.join(path, tables[0])], []
    val = files.get("val") or files.get("validation")
    if len(tables) == len(files) == 2 and val and "train" in files:
        return [files["train"]], [val]
    raise UserError(
        f"{path}: is a folder with {len(tables)} tables ({', '.join(tables[:5]) or 'none'}): finetune.py"
        " takes one file, or a folder with one table, or with train and val; train_mixer.py --train-data A B"
        " … --val-data V takes several"
    )


def resumes(args: JobConfig) -> bool:
    """Whether the save folder holds a run that is resumed, if it can be read."""
    return checkpoint.exists_in(args.save_path) and not (args.overwrite or args.eval_only)


def initial_file(args: JobConfig) -> str:
    """The file that --initial-checkpoint names. Raises UserError."""
    what = f"--initial-checkpoint {args.initial_checkpoint}"
    return models.find_weights(args.initial_checkpoint or "", what)


def initial_weights(args: JobConfig) -> dict:
    """`models.initial_weights` of --initial-checkpoint. Raises UserError."""
    keys = (read_key(path) if path else None for path in (args.initial_key, args.key))
    return models.initial_weights(initial_file(args), *keys)


def _starts_from(state: dict, only_encoder: bool = False, kept: int | None = None) -> StartsFrom:
    """What the data of a run must know of the weights that it starts from; kept: how many of its codes."""
    formatter = state["formatter"] or {}
    codes, chars = ([], None) if only_encoder else (list(state["key"])[:kept], formatter.get("chars"))
    return StartsFrom(state["config"]["text"], codes, formatter.get("kind"), chars)


def _resumes_from(state: dict) -> StartsFrom:
    return _starts_from(state, kept=int(state.get("kept_codes") or 0))


def _start(
    args: JobConfig,
    resumed: dict | None,
    problems: list[str],
) -> StartsFrom:
    """What the weights that the run starts from, or is resumed from, say of its data. Adds what is wrong to
    `problems`.
    """
    try:
        if resumed:
            return _resumes_from(resumed)
        if args.initial_checkpoint:
            return _starts_from(initial_weights(args), args.only_encoder)
        if args.teacher and not args.eval_only:
            return teacher.starts_from(args)
        if args.eval_only and (file := checkpoint.find(args.save_path)):
            return _resumes_from(models.load_model(file)[2])
    except UserError as error:
        problems += [str(error)] if str(error) not in problems else []
    return StartsFrom()


class ReadOnce:
    """Reads a checkpoint to resume from; one that is kept is given without reading it again, once, unless its
    file was changed meanwhile.
    """

    def __init__(self):
        self.kept: tuple[str, tuple[int, ...], dict] | None = None

    def keep(self, path: str, state: dict) -> None:
        self.kept = path, checkpoint.identity(path), state

    def __call__(self, path: str) -> dict:
        kept, self.kept = self.kept, None
        if kept and kept[0] == path and kept[1] == checkpoint.identity(path):
            return kept[2]
        return models.load_resumable(path)


def prepared(
    args: JobConfig,
    world: World,
    train_files: list[str],
    val_files: list[str],
    default_formatter: str = "gpf",
    naming: str = "hisco",
) -> tuple[JobConfig, PrepareSettings, PreparedData, ReadOnce]:
    """Checks everything and prepares the data on rank 0 while the others wait; every rank maps the result.
    All ranks.

    A node that does not see rank 0's folder prepares its own from its own files, and all must agree.

    Returns:
        The arguments with the columns that were found, how the files are read, the rows, and what reads the
        checkpoint to resume from.
    """
    read = ReadOnce()

    def prepare() -> tuple[PrepareSettings, str]:
        problems = [*args.problems(), *filter(None, [save_path_problem(args.save_path)])]
        problems += _checkpoint_problems(args) + _description_problems(args)
        problems += _problems_of_outputs(args, train_files + val_files)
        path, resumed = "", None
        if resumes(args) and not args.prepare_only:
            path, resumed, _ = checkpoint.newest_good(args.save_path, read)
            read.keep(path, resumed)
        start = _start(args, resumed, problems)
        columns = columns_of(args, train_files[0], problems, default_formatter, naming)
        problems += [line for line in teacher.problems(args, columns) if line not in problems]
        settings = settings_from(args, columns, train_files, val_files, problems, start)
        if columns.note:
            world.print(columns.note)
        fixed = settings.fixed_codes is not None or settings.first_codes is not None
        if resumed:
            with checkpoint.reading(path):
                refuse_other_arguments(with_columns(args, settings), resumed)
        elif start.codes and not fixed and not args.shrink_key:
            source = "--initial-checkpoint" if args.initial_checkpoint else "--teacher"
            world.print(
                f"Key: the codes of {source} are not kept, since formatter {columns.formatter} does"
                " not write all of them as they are (--formatter, --block-size, --use-within-block-sep,"
                " --allow-codes-shorter-than-block-size): the key is that of the data"
            )
        if args.fn_word_freq:
            read_words(args.fn_word_freq)  # only to find out now whether it can be read
        lists = OwnFiles(args.save_path, args.overwrite) if args.prepare_only else None
        folder = preparing.prepare(settings, args.save_path, world.print, lists, world.give_up_if_asked)
        formatter = BlockyFormatter.from_dict(settings.formatter)
        if texts := load_descriptions(args, PreparedData.open(folder), formatter, 0):
            world.print(f"Descriptions: {texts.codes:,} of {texts.numbers.shape[0] - 1:,} codes have one")
        return settings, folder

    settings, folder = world.run_on_main("prepare", prepare)
    data = preparing.on_every_node(settings, args.save_path, folder, world, world.give_up_if_asked)
    for line in report_lines(data.report):
        world.print(line)
    return with_columns(args, settings), settings, data, read


def with_columns(args: JobConfig, settings: PrepareSettings) -> JobConfig:
    return args.decide(
        formatter=settings.formatter["kind"],
        target_cols=settings.target_cols,
        language=settings.language,
        language_col=settings.language_col,
    )


def dataset_file(dataset: Any, held: contextlib.ExitStack) -> str:
    """The file of a data set that is given in Python; a DataFrame goes into one that `held` removes. Raises
    UserError.
    """
    if isinstance(dataset, str | os.PathLike):
        return os.fspath(dataset)
    if not (hasattr(dataset, "to_csv") and hasattr(dataset, "columns")):
        raise UserError(
            f"dataset: found {shown(dataset)}, expected a file or a DataFrame, not {type(dataset).__name__}"
        )
    columns = list(dataset.columns)
    if not len(dataset) or not columns:
        raise UserError("dataset: is an empty DataFrame")
    if any(isinstance(name, tuple) for name in columns) or len(set(map(str, columns))) < len(columns):
        raise UserError(
            f"dataset: has column names of several levels, or twice the same: {', '.join(map(str, columns))}"
        )
    file = os.path.join(held.enter_context(tempfile.TemporaryDirectory(prefix="histocc_")), "DataFrame.csv")
    frame = dataset.copy()
    for name in columns:
        # whole numbers among missing values are floats in pandas, and codes have no .0
        if frame[name].dtype.kind == "f" and (frame[name].dropna() % 1 == 0).all():
            frame[name] = frame[name].astype("Int64")
    frame.to_csv(file, index=False)
    return file
