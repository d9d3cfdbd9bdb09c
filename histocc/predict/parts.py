"""Coding in parts: each file of a folder, or range of rows of a large file, gets its own part of the output.
Tasks that share the parts work independently, and may be killed and restarted.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from histocc.data.binary import RANGE
from histocc.data.tables import TABLE_NAME, Path, part_of, parts_of, read_chunks, str_of, table_format
from histocc.data.written import ENDINGS, ending_of, missing_package, table_writer
from histocc.formatter import NUMBERS, coded_columns
from histocc.predict.coding import Coding
from histocc.predict.config import PredictConfig, hidden
from histocc.runtime import files
from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.log import counted

SETTINGS_OF_PARTS = "_histocc.json"  # of all parts of a folder. Readers of folders pass over such names


class Unit(NamedTuple):
    """A part of the input and of the output."""

    path: Path
    file: str  # of the input
    span: int | None  # number of the range of its rows, None for all
    files: list[Path]  # of the input: it continues those before `place`
    place: int
    output: str


def units_of(args: PredictConfig) -> list[Unit]:
    """Return the parts of the output in their order. Raises UserError if there are none, or two of a name."""
    if "-" in (args.input or ()):
        raise UserError("--input - is one table: give --output a file, or -")
    parts, units = [part for name in args.input or () for part in parts_of(name)], []
    paths: list[Path] = [[part] if part.keys else part.path for part in parts]
    for place, part in enumerate(parts):
        stem, ending = TABLE_NAME.sub(r"\1", part.name), ending_of(part.name)
        # the encoding of a small file need not be known to divide it
        is_large = os.path.getsize(part.path) >= 2 * RANGE
        ranges = table_format(part.path, *args.how([])).ranges if is_large else 1
        for span in range(ranges) if ranges > 1 else [None]:
            number = "" if span is None else f"-{span:05d}"
            output = os.path.join(args.output, stem + number + ending)
            units.append(Unit(paths[place], part.path, span, paths, place, output))
    for one, other in pairwise(sorted(units, key=lambda unit: unit.output)):
        if one.output == other.output:
            raise UserError(f"{one.output} would be the output of {one.file} and {other.file}: rename one")
    return units


def task_of(args: PredictConfig) -> tuple[int, int, str]:
    """Return this task's number, counted from 0, the number of tasks, and the source of both."""
    if args.task:
        return args.task[0] - 1, args.task[1], "--task"
    number, count = (int(os.environ.get(name) or at) for name, at in (("RANK", 0), ("WORLD_SIZE", 1)))
    given = ["RANK"] * (count > 1)
    if os.environ.get("SLURM_ARRAY_TASK_COUNT", "1") != "1":
        try:
            names = (f"SLURM_ARRAY_TASK_{name}" for name in ("COUNT", "MIN", "MAX", "ID"))
            tasks, first, last, own = (int(os.environ[name]) for name in names)
            place, rest = divmod((own - first) * (tasks - 1), last - first)
        except (KeyError, ValueError, ZeroDivisionError):
            place = tasks = rest = 0
        if rest or not 0 <= place < tasks:
            raise UserError("the numbers of this SLURM array leave this task's open: add --task I/N")
        number, count, given = place * count + number, tasks * count, ["SLURM_ARRAY_TASK_ID", *given]
    return number, count, " and ".join(given)


def check_folder(args: PredictConfig, units: list[Unit]) -> None:
    """Raise UserError if the output folder cannot take these parts."""
    folder = os.path.realpath(args.output)
    for name in args.input or ():
        place = os.path.realpath(name if os.path.isdir(name) else os.path.dirname(os.path.abspath(name)))
        if os.path.isdir(name) and (folder + os.sep).startswith(place + os.sep):
            raise UserError(f"--output {args.output} is inside the input {name}: choose another folder")
    if any(files.is_same(unit.file, unit.output) for unit in units):
        raise UserError(f"--output {args.output} holds the input: choose another folder")
    if args.overwrite:
        raise UserError(f"--overwrite is for a file: to code everything again, remove {args.output}")
    raise_if_any(files.save_path_problems(args.output))


def check_columns(coding: Coding, first: Path, units: list[Unit]) -> None:
    """Raise UserError if a part of the input has other columns than the first part."""
    names = table_format(first, *coding.how).names
    for unit in units:
        if (found := table_format(unit.path, *coding.how).names) != names:
            odd = ", ".join(sorted({*found}.symmetric_difference(names))) or "their order differs"
            raise UserError(f"{unit.file} has other columns than {str_of(first)}: {odd}")


def settings_of(folder: str) -> dict | None:
    """Return the content that `keep_settings` wrote, or None."""
    return json.loads(files.read_sealed(os.path.join(folder, SETTINGS_OF_PARTS)) or "null")


def inputs_of(args: PredictConfig, units: list[Unit]) -> dict[str, list]:
    """Return the input of each part by the part's name, with values that change with it or with the file
    before it, whose last row its first row may repeat.
    """
    inputs, own, before = {}, [], []
    for unit in units:
        state = os.stat(unit.file)
        now = [os.path.realpath(unit.file), state.st_size, state.st_mtime_ns]
        if now != own:
            own, before = now, own
        inputs[os.path.relpath(unit.output, args.output)] = [*now, *before]
    return inputs


def left_to_do(args: PredictConfig, units: list[Unit]) -> list[Unit]:
    """Return the parts missing or made from an earlier state of the input. Raises UserError if the
    folder holds something else.
    """
    there, left = (settings_of(args.output) or {"parts": {}})["parts"], []
    for unit, (name, now) in zip(units, inputs_of(args, units).items()):
        is_there = os.path.isfile(unit.output)
        before = there.get(name, [])
        if is_there and not before:
            raise UserError(f"{unit.output} is not a part written by predict; choose another folder")
        if is_there and before[0] != now[0]:
            raise UserError(f"{unit.output} is a part of another input, {before[0]}: choose another folder")
        # a killed process may have left its pieces
        if not is_there or before != now or os.path.isdir(hidden(unit.output, ".parts")):
            left.append(unit)
    return left


def keep_settings(args: PredictConfig, units: list[Unit], now: dict) -> None:
    """Write the settings of all parts, and their inputs. Remove parts of changed inputs.
    Raises UserError if the folder holds parts with other settings.
    """
    path, inputs = os.path.join(args.output, SETTINGS_OF_PARTS), inputs_of(args, units)
    os.makedirs(args.output, exist_ok=True)
    with files.file_lock(path):
        there = settings_of(args.output)
        if there and (odd := sorted(name for name in now if there["settings"].get(name) != now[name])):
            what = f"{args.output} holds parts made by {there['named']}"
            what += f" with other settings ({', '.join(odd)} differ from those of {args.model} now)"
            raise UserError(f"{what}: choose another folder, or remove it")
        before = there["parts"] if there else {}
        for name in before:
            path_of_part = os.path.join(args.output, name)
            if name not in inputs and os.path.isfile(path_of_part):
                what = f"{path_of_part} belongs to an input that is not named now, {before[name][0]}"
                raise UserError(f"{what}: remove it, or choose another folder")
            if name in inputs and inputs[name] != before[name]:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path_of_part)
        if inputs != before:
            content = json.dumps({"settings": now, "named": args.model, "parts": inputs}, indent=1)
            files.write_sealed(path, content.encode())


def unread(folder: str, names: Iterable[str]) -> list[str]:
    """Return the lists of unreadable rows of these parts, if they exist."""
    lists = (hidden(os.path.join(folder, name), ".rejected.csv") for name in names)
    return [path for path in lists if os.path.isfile(path)]


def join(args: PredictConfig) -> str:
    """Write a folder's parts into one table and return a line on it. Raises UserError if one is missing."""
    folder, output = str(args.join), args.output
    if (there := settings_of(folder)) is None:
        raise UserError(f"{folder}: was not written by predict --output FOLDER/")
    if (os.path.realpath(output)).startswith(os.path.realpath(folder) + os.sep):
        raise UserError(f"--output {output} is inside {folder}, whose readers would then find all rows twice")
    paths = [os.path.join(folder, name) for name in there["parts"]]
    remedy = "copy it again, or remove it and repeat the command that writes it"
    if missing := [path for path in paths if not os.path.isfile(path)]:
        what = f"parts missing: {len(missing):,} of {len(paths):,} ({missing[0]})"
        raise UserError(f"{folder}: {what}; repeat the command that writes them to continue")
    inputs: dict[str | None, str] = dict.fromkeys(paths, "a part")
    problems = files.problems([output], inputs, args.overwrite, endings=tuple(ENDINGS))
    raise_if_any([*problems, *missing_package(output)])
    for path in (path for path in paths if path.endswith(".csv")):
        with open(path, "rb") as part:
            part.seek(max(0, os.path.getsize(path) - 1))
            if part.read() != b"\n":
                raise UserError(f"{path}: is cut off within its last line: {remedy}")
    parts = [part_of(path, folder) for path in paths]
    table, system = table_format(parts), there["settings"]["system"]
    written = coded_columns(table.names, table.names.index(f"{system}_1"))
    kept, rows = list(range(len(table.names))), 0
    if there["settings"]["k"] is None and not there["settings"]["only_missing"]:
        # as many columns of codes as the row with most codes fills
        further = [i for i in written if re.fullmatch(rf"{re.escape(system)}_\d+", table.names[i])]
        empty = {*further[1:]}
        for chunk in read_chunks(parts, further):
            empty -= {i for i, cells in zip(further, chunk.columns) if any(cells)}
        numbers = {table.names[i].rpartition("_")[2] for i in empty}
        kept = [i for i in kept if not (i in written and table.names[i].rpartition("_")[2] in numbers)]
    header = [table.names[i] for i in kept]
    are_numbers = {table.names[i] for i in written if re.fullmatch(NUMBERS, table.names[i])}
    types = table.types_but({table.names[i] for i in written})
    with (
        files.atomic_write(os.path.realpath(output), args.overwrite) as file,
        table_writer(file, output, header, are_numbers, types) as write,
    ):
        for chunk in read_chunks(parts, kept):
            for line, _, reason in chunk.faults:
                named = "" if len(parts) > 1 else f"{paths[0]}: "
                raise UserError(f"line {line:,} of a part cannot be read ({named}{reason}): {remedy}")
            write(list(zip(*chunk.columns)))
            rows += len(chunk.lines)
    lists = unread(folder, there["parts"])
    lacking = f"; with unreadable rows: {len(lists):,} ({lists[0]} lists them)" if lists else ""
    return f"{(args.asked or args).output}: {counted(rows, 'row')} of {counted(len(parts), 'part')}{lacking}"
