"""The files of a run in its save folder: their names, which of them are the run's own, and what stands in
the way."""

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence

from histocc.runtime import outputs
from histocc.runtime.checkpoint import BEST, CHECKPOINT, LAST, exists_in
from histocc.runtime.errors import UserError
from histocc.runtime.machine_errors import in_words
from histocc.runtime.outputs import OwnFiles
from histocc.trainer.profiling import OF_PROFILE
from histocc.trainer.run_log import LOG, STATUS

ARGS = "args.json"
# for the user, out of the prepared folder
LISTS = (
    "key.csv",
    "rejected_rows.csv",
    "conflicts.csv",
    "data_report.json",
)
CURVES = "curves.png"
STACKS = re.compile(r"stacks-rank(\d+)(\.\d+)?\.txt")


def written(args: argparse.Namespace, lists: Sequence[str] = LISTS) -> list[str]:
    """Names of the files that a run with these arguments writes, but for checkpoints of steps. lists: those
    of its data.
    """
    if args.eval_only or args.dry_run:
        return []
    return [ARGS, LOG, STATUS, *lists, LAST, BEST, *(OF_PROFILE if args.profile else ())]


def of_data_alone(folder: str, overwrite: bool = False) -> OwnFiles:
    """The files of a run's folder, for lists of data that need not be those of the run: its own lists stay,
    where these differ. Raises UserError."""
    return OwnFiles(folder, overwrite, keep=exists_in(folder))


def problems_of_lists(own: OwnFiles, inputs: dict[str | None, str]) -> list[str]:
    """Why the lists of data may not be written into a folder, a line each. inputs: what each file is.
    Beside a run of the same data they are the same; of other data they get other names."""
    paths = [os.path.join(own.folder, name) for name in LISTS]
    return outputs.problems(
        paths, inputs, own.overwrite, lambda path: own.keep or own.holds(path), "choose another --save-path"
    )


def problems(
    args: argparse.Namespace, inputs: dict[str | None, str], own: OwnFiles, lists: Sequence[str] = LISTS
) -> list[str]:
    """Why the run may not write its files, a line each. inputs: what each file is. One that it wrote and
    somebody has edited since is not in its way: what it would hold then gets another name."""
    if (
        args.config
        and outputs.is_same(args.config, os.path.join(args.save_path, ARGS))
        and own.holds(args.config)
    ):
        # read already, and written as it was
        inputs = {path: what for path, what in inputs.items() if path != args.config}
    paths = [os.path.join(args.save_path, name) for name in written(args, lists)]
    return outputs.problems(
        paths,
        inputs,
        args.overwrite,
        lambda path: os.path.basename(path) in own.files,
        "choose another --save-path",
    )


def write_list(own: OwnFiles, name: str, content: bytes, say: Callable[[str], None]) -> None:
    """Writes a small file of the run; says so where it stands under another name. Raises UserError."""
    try:
        path = own.write_content(name, content)
    except OSError as error:
        raise UserError(in_words(error, os.path.join(own.folder, name), len(content))) from None
    if os.path.basename(path) != name:
        say(
            f"Note: {os.path.join(own.folder, name)} was not written by this run, or was edited since, and"
            f" stays as it is; what it would hold is in {path}"
        )


def write_args(own: OwnFiles, args: dict, say: Callable[[str], None]) -> None:
    """args.json, the arguments of the run by name. Raises UserError."""
    write_list(own, ARGS, json.dumps(args, indent=1, sort_keys=True).encode(), say)


def copy_lists(prepared: str, own: OwnFiles, say: Callable[[str], None]) -> None:
    """Copies the lists of a prepared folder to where users look for them. Raises UserError."""
    for name in LISTS:
        try:
            with open(os.path.join(prepared, name), "rb") as file:
                content = file.read()
        except OSError as error:
            raise UserError(in_words(error, os.path.join(prepared, name))) from None
        write_list(own, name, content, say)


def clear(own: OwnFiles, ranks: int = 0) -> None:
    """Removes the checkpoints and logs of a run that is started over (not its prepared data). One process a
    node.

    ranks: those that run now; they have the files of their stacks open, which are emptied."""
    if os.path.isdir(own.folder):
        names = [
            name
            for name in own.files
            if CHECKPOINT.fullmatch(name) or STACKS.fullmatch(name) or name in (LOG, STATUS, ARGS, CURVES)
        ]
        mine = OwnFiles(own.folder)
        opened = [name for name in names if (found := STACKS.fullmatch(name)) and int(found[1]) < ranks]
        for path in (os.path.join(own.folder, name) for name in opened):
            if mine.holds(path):
                os.truncate(path, 0)
        mine.remove(set(names) - set(opened))
        own.files = mine.files
