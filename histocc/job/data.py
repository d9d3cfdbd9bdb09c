"""From arguments to prepared data: everything that can be wrong is found here, and said together."""

import argparse
import contextlib
import os
from collections.abc import Callable

from histocc.data import keys
from histocc.data import prepare as preparing
from histocc.data.arrays import PreparedData
from histocc.data.descriptions import find_columns, load_descriptions
from histocc.data.report import report_lines
from histocc.data.settings import PrepareSettings, StartsFrom, settings_from
from histocc.formatter import BlockyFormatter
from histocc.job import initial_weights, recipe
from histocc.job.flags import argument_problems, resumable_flags
from histocc.model import model_io
from histocc.model.ngrams import AUTO, NONE
from histocc.runtime import checkpoint
from histocc.runtime.arguments import flag
from histocc.runtime.errors import UserError
from histocc.runtime.outputs import save_path_problem
from histocc.runtime.world import World
from histocc.trainer import run_files
from histocc.trainer.run_log import LOG


def _description_problems(args: argparse.Namespace) -> list[str]:
    try:
        if args.include_descriptions and args.descriptions_file:
            find_columns(args)
    except UserError as error:
        return [str(error)]
    return []


def _checkpoint_problems(args: argparse.Namespace) -> list[str]:
    try:
        first = initial_weights.initial_file(args) if args.initial_checkpoint and not resumes(args) else None
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
    if args.eval_only and getattr(args, "share_val", None) == 0 and not os.path.isdir(args.dataset):
        return ["--eval-only needs rows to validate on, and --share-val 0 leaves none"]
    return []


def _problems_of_outputs(args: argparse.Namespace, files: list[str]) -> list[str]:
    """What of the files that the run will write is in the way, or an input."""
    inputs = dict.fromkeys(files, "a file of the data")
    inputs |= {
        getattr(args, dest): f"the file of {flag(dest)}"
        for dest in ("key", "initial_key", "all_codes_file", "descriptions_file", "fn_word_freq", "config")
    }
    if args.initial_checkpoint and not resumes(args):
        with contextlib.suppress(UserError):  # said already
            inputs[initial_weights.initial_file(args)] = "the file of --initial-checkpoint"
    try:
        return run_files.problems(args, inputs, run_files.own_files(args.save_path, args.overwrite))
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
        and name not in (*run_files.LISTS, LOG)
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


def resumes(args: argparse.Namespace) -> bool:
    """Whether the save folder holds a run that is resumed, if it can be read."""
    return checkpoint.exists_in(args.save_path) and not (args.overwrite or args.eval_only)


def _start(args: argparse.Namespace, resumed: dict | None, problems: list[str]) -> StartsFrom:
    """What the weights that the run starts from, or is resumed from, say of its data. Adds what is wrong to
    `problems`.
    """
    try:
        if resumed:
            return initial_weights.resumes_from(resumed)
        if args.initial_checkpoint:
            return initial_weights.starts_from(args)
        if args.eval_only and checkpoint.find(args.save_path):
            return initial_weights.resumes_from(model_io.own_checkpoint(checkpoint.find(args.save_path)))
    except UserError as error:
        problems += [str(error)] if str(error) not in problems else []
    return StartsFrom()


def prepared(
    args: argparse.Namespace,
    world: World,
    train_files: list[str],
    val_files: list[str],
    naming: str = "hisco",
) -> tuple[PreparedData, BlockyFormatter]:
    """Checks everything and prepares the data on rank 0 while the others wait; every rank maps the result.
    All ranks.

    A node that does not see rank 0's folder prepares its own from its own files, and all must agree.
    """

    def first() -> tuple[PrepareSettings, str]:
        found = [
            problem for problem in [save_path_problem(args.save_path)] if problem
        ] + _checkpoint_problems(args)
        found += _description_problems(args)
        found = argument_problems(args) + found + _problems_of_outputs(args, train_files + val_files)
        resumed = model_io.newest_good(args.save_path)[1] if resumes(args) and not args.prepare_only else None
        start = _start(args, resumed, found)
        settings = settings_from(args, train_files, val_files, naming, found, start)
        if resumed:
            refuse_other_arguments(args, resumed)
        elif (
            start.codes
            and settings.fixed_codes is None
            and settings.first_codes is None
            and not args.shrink_key
        ):
            world.print(
                f"Key: the codes of --initial-checkpoint are not kept, since formatter {args.formatter} does"
                " not write all of them as they are (--formatter, --block-size, --use-within-block-sep,"
                " --allow-codes-shorter-than-block-size): the key is that of the data"
            )
        if args.fn_word_freq:
            keys.read_words(args.fn_word_freq)  # only to find out now whether it can be read
        lists = run_files.of_data_alone(args.save_path, args.overwrite) if args.prepare_only else None
        folder = preparing.prepare(
            settings, args.save_path, world.print, lists, world.give_up_if_asked, 60 * args.timeout_minutes
        )
        if args.include_descriptions:
            found = load_descriptions(
                args, PreparedData.open(folder), BlockyFormatter.from_dict(settings.formatter), 0
            )
            world.print(f"Descriptions: {found.codes:,} of {found.numbers.shape[0] - 1:,} codes have one")
        return settings, folder

    world.note("preparing data")
    settings, folder = world.run_on_main("prepare", first)
    args.target_cols = settings.target_cols
    data = on_every_node(
        settings, args.save_path, folder, world, world.give_up_if_asked, 60 * args.timeout_minutes
    )
    for line in report_lines(data.report):
        world.print(line)
    return data, BlockyFormatter.from_dict(settings.formatter)


def on_every_node(
    settings: PrepareSettings,
    save_path: str,
    folder: str,
    world: World,
    check: Callable[[], None],
    wait_seconds: float,
) -> PreparedData:
    """The data that rank 0 has prepared in `folder`, or what a node prepares itself that does not see it. All
    ranks.
    """
    leaders = world.node_leaders()
    folders = world.run_on(
        "prepare on each node",
        leaders,
        lambda: preparing.prepare_on_node(settings, save_path, folder, world.rank, check, wait_seconds),
    )
    if len({os.path.basename(folder) for folder in folders}) > 1:
        differ = [
            rank
            for rank, folder in zip(leaders, folders)
            if os.path.basename(folder) != os.path.basename(folders[0])
        ]
        raise UserError(
            f"the nodes of ranks {', '.join(map(str, differ))} have other data files than that of rank 0:"
            f" copy the same {', '.join(path for _, path in settings.files)} to every node",
            heard_from_main=True,
        )
    return PreparedData.open(folders[leaders.index(world.rank - world.local_rank)])


def refuse_other_arguments(args: argparse.Namespace, state: dict) -> None:
    """Raises UserError where a resumed run is asked for with arguments that decide the result and differ."""
    saved = {**recipe.BEFORE_THE_FLAG, **state["args"]}
    different = checkpoint.differing_args(saved, vars(args), resumable_flags())
    size = state["args"].get("model_size")
    if args.model_size not in (None, size):
        different.append(f"--model-size was {size!r}, now it is {args.model_size!r}")
    config = state["config"]
    different += recipe.differing(args, state["args"])
    if args.ngrams != state["args"].get("ngrams", AUTO if args.ngrams == AUTO else NONE):
        different.append(f"--ngrams was {state['args'].get('ngrams', NONE)}, now it is {args.ngrams}")
    if args.shrink_key and "shrink_key" not in state["args"]:
        different.append("--shrink-key was not there, now it is")
    if args.memory_mask not in (None, config["memory_mask"]):
        different.append(
            f"--{'no-' * config['memory_mask']}memory-mask: its decoder"
            f" {'leaves out' if config['memory_mask'] else 'looks at'} padding"
        )
    if args.published_target_mask and config.get("target_mask", True):
        different.append("--published-target-mask: it was started without")
    if args.clean_text not in (None, model_io.text_rule(config)):
        different.append(f"--clean-text was {model_io.text_rule(config)!r}, now it is {args.clean_text!r}")
    if args.num_epochs < state["args"]["num_epochs"]:
        different.append(
            f"--num-epochs was {state['args']['num_epochs']}, now it is {args.num_epochs}; only more can"
            " continue"
        )
    if different:
        raise UserError(
            "\n  ".join(
                [
                    f"{args.save_path} holds a run with other arguments:",
                    *different,
                    "Repeat them as they were, choose another folder, or start over with --overwrite.",
                ]
            )
        )
