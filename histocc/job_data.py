"""From arguments to prepared data: everything that can be wrong is found here, and said together."""

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict

from histocc import checkpoint, model_io, prepare, tables
from histocc.arrays import PreparedData
from histocc.cli import MAY_DIFFER_ON_RESUME, argument_problems, save_path_problem
from histocc.data_report import report_lines
from histocc.data_settings import PrepareSettings, settings_from
from histocc.descriptions import find_columns, load_descriptions
from histocc.distributed import World
from histocc.errors import UserError
from histocc.formatter import BlockyFormatter
from histocc.stopping import Stopped


def _description_problems(args: argparse.Namespace) -> list[str]:
    try:
        if args.include_descriptions and args.descriptions_file:
            find_columns(args)
    except UserError as error:
        return [str(error)]
    return []


def _checkpoint_problems(args: argparse.Namespace) -> list[str]:
    goes_on = checkpoint.exists_in(args.save_path) and not (args.overwrite or args.eval_only)
    try:
        first = model_io.initial_file(args) if args.initial_checkpoint and not goes_on else None
    except UserError as error:
        return [str(error)]
    if first and args.overwrite and os.path.realpath(os.path.dirname(first) or ".") == os.path.realpath(args.save_path):
        return [f"--overwrite would remove {first}, which --initial-checkpoint needs: choose another folder for the new run"]
    if args.eval_only and first is None and checkpoint.find(args.save_path) is None:
        return [f"--eval-only: no checkpoint in {args.save_path}; --initial-checkpoint names one"]
    if args.eval_only and getattr(args, "share_val", None) == 0:
        return ["--eval-only needs rows to validate on, and --share-val 0 leaves none"]
    return []


def prepared(args: argparse.Namespace, world: World, train_files: list[str], val_files: list[str],
             naming: str = "hisco") -> tuple[PreparedData, BlockyFormatter]:
    """Checks everything and prepares the data on rank 0 while the others wait; every rank maps the result. All ranks.

    A node that does not see rank 0's folder prepares its own from its own files, and all must agree.
    """
    def check() -> None:
        if world.stop_asked_anywhere():
            raise Stopped

    def first() -> list:
        found = [problem for problem in [save_path_problem(args.save_path)] if problem] + _checkpoint_problems(args)
        found += _description_problems(args)
        settings = settings_from(args, train_files, val_files, naming, argument_problems(args) + found)
        if checkpoint.exists_in(args.save_path) and not (args.overwrite or args.prepare_only or args.eval_only):
            refuse_other_arguments(args, model_io.newest_good(args.save_path)[1])
        if args.fn_word_freq:
            tables.read_words(args.fn_word_freq)     # only to find out now whether it can be read
        folder = prepare.prepare(settings, args.save_path, world.print, args.save_path if args.prepare_only else None, check)
        if args.include_descriptions:
            found = load_descriptions(args, PreparedData.open(folder), BlockyFormatter.from_dict(settings.formatter), 0)
            world.print(f"Descriptions: {found.codes:,} of {found.numbers.shape[0] - 1:,} codes have one")
        return [asdict(settings), folder]
    world.did("preparing data")
    settings, folder = world.main_first("prepare", first)
    settings = PrepareSettings(**settings)
    args.target_cols = settings.target_cols
    data = on_every_node(settings, args.save_path, folder, world, check)
    for line in report_lines(data.report):
        world.print(line)
    return data, BlockyFormatter.from_dict(settings.formatter)


def on_every_node(settings: PrepareSettings, save_path: str, folder: str, world: World, check: Callable[[], None]) -> PreparedData:
    """The data that rank 0 has prepared in `folder`, or what a node prepares itself that does not see it. All ranks."""
    leaders = world.node_leaders()
    folders = world.led("prepare on each node", leaders, lambda: prepare.prepare_on_node(settings, save_path, folder, world.rank, check))
    if len({os.path.basename(folder) for folder in folders}) > 1:
        differ = [rank for rank, folder in zip(leaders, folders) if os.path.basename(folder) != os.path.basename(folders[0])]
        error = UserError(f"the nodes of ranks {', '.join(map(str, differ))} have other data files than that of rank 0: copy the same "
                          f"{', '.join(path for _, path in settings.files)} to every node")
        error.heard_from_main = True                 # all ranks know it at the same time
        raise error
    return PreparedData.open(folders[leaders.index(world.rank - world.local_rank)])


def refuse_other_arguments(args: argparse.Namespace, state: dict) -> None:
    """Raises UserError where a resumed run is asked for with arguments that decide the result and differ."""
    different = checkpoint.differing_args(state["args"], vars(args), MAY_DIFFER_ON_RESUME)
    size = state["args"].get("model_size")
    if args.model_size not in (None, size):
        different.append(f"--model-size was {size!r}, now it is {args.model_size!r}")
    if args.num_epochs < state["args"]["num_epochs"]:
        different.append(f"--num-epochs was {state['args']['num_epochs']}, now it is {args.num_epochs}; only more can go on")
    if different:
        raise UserError("\n  ".join([f"{args.save_path} holds a run with other arguments:", *different,
                                     "Repeat them as they were, choose another folder, or start anew with --overwrite."]))
