"""Coding in parts: each file of a folder, or range of rows of a large file, gets its own part of the output.
Tasks that share the parts need not know of each other, and may be killed and started again.
"""

import json
import os
import re
from collections import Counter
from typing import NamedTuple

from histocc.data.binary import RANGE
from histocc.data.rows import csv_text
from histocc.data.tables import TABLE_NAME, Path, parts_of, read_chunks, str_of, table_format
from histocc.data.written import ENDINGS, missing_package, table_writer
from histocc.formatter import NUMBERS, coded_columns
from histocc.predict.coding import Coding
from histocc.predict.config import PredictConfig
from histocc.runtime import files
from histocc.runtime.errors import UserError, raise_if_any

SETTINGS = "_histocc.json"  # of all parts of a folder; readers of folders pass over such names


class Unit(NamedTuple):
    """A part of the input and of the output."""

    path: Path
    file: str  # of the input
    span: int | None  # number of the range of its rows; None: all
    files: list[Path]  # of the input: it continues those before `place`
    place: int
    output: str


def units_of(args: PredictConfig) -> list[Unit]:
    """Return the parts of the output in their order. Raises UserError if there are none, or two of a name."""
    parts, units = [part for name in args.input or () for part in parts_of(name)], []
    paths: list[Path] = [[part] if part.keys else part.path for part in parts]
    for place, part in enumerate(parts):
        stem, name = TABLE_NAME.sub(r"\1", part.name), part.name.lower()
        ending = next((ending for ending in ENDINGS if name.endswith(ending)), ".csv")
        # the encoding of a small file need not be known to divide it
        is_large = os.path.getsize(part.path) >= 2 * RANGE
        ranges = table_format(part.path, *args.how([])).ranges if is_large else 1
        for span in range(ranges) if ranges > 1 else [None]:
            number = "" if span is None else f"-{span:05d}"
            output = os.path.join(args.output, stem + number + ending)
            units.append(Unit(paths[place], part.path, span, paths, place, output))
    for output, count in Counter(unit.output for unit in units).items():
        if count > 1:
            raise UserError(f"{output} would be the output of {count} parts: name the folder that holds them")
    return units


def task_of(args: PredictConfig) -> tuple[int, int, str]:
    """Return (the number of this task from 0 on, how many there are, what says so)."""
    if args.task:
        return args.task[0] - 1, args.task[1], "--task"
    number, count = (int(os.environ.get(name) or at) for name, at in (("RANK", 0), ("WORLD_SIZE", 1)))
    given = ["RANK"] * (count > 1)
    if array := int(os.environ.get("SLURM_ARRAY_TASK_COUNT") or 1) - 1:
        first, last, own = (int(os.environ[f"SLURM_ARRAY_TASK_{name}"]) for name in ("MIN", "MAX", "ID"))
        place, rest = divmod((own - first) * array, last - first)
        if rest:
            raise UserError(f"the numbers of this SLURM array leave gaps: add --task I/N (here {own} is one)")
        number, count, given = place * count + number, (array + 1) * count, ["SLURM_ARRAY_TASK_ID", *given]
    return number, count, " and ".join(given)


def check_folder(args: PredictConfig, units: list[Unit]) -> None:
    """Raise UserError if the folder of the output is not one for these parts."""
    folder = os.path.realpath(args.output)
    for name in args.input or ():
        place = os.path.realpath(name if os.path.isdir(name) else os.path.dirname(os.path.abspath(name)))
        if os.path.isdir(name) and (folder + os.sep).startswith(place + os.sep):
            raise UserError(f"--output {args.output} is in the input {name}: choose a folder elsewhere")
    if any(files.is_same(unit.file, unit.output) for unit in units):
        raise UserError(f"--output {args.output} holds the input: choose another folder")
    if args.overwrite:
        raise UserError(f"--overwrite is for a file: to code all anew, remove {args.output}")
    raise_if_any(files.save_path_problems(args.output))


def check_columns(coding: Coding, first: Path, units: list[Unit]) -> None:
    """Raise UserError if a part of the input has other columns than the first of all."""
    names = table_format(first, *coding.how).names
    for unit in units:
        if (found := table_format(unit.path, *coding.how).names) != names:
            odd = ", ".join(sorted({*found}.symmetric_difference(names))) or "their order differs"
            raise UserError(f"{unit.file} has other columns than {str_of(first)}: {odd}")


def settings_of(folder: str) -> dict | None:
    """Return what `keep_settings` has written, or None."""
    return json.loads(files.read_sealed(os.path.join(folder, SETTINGS)) or "null")


def keep_settings(args: PredictConfig, units: list[Unit], now: dict) -> None:
    """Write the settings that decide all parts, and the names of these. Raises UserError if the folder holds
    parts by other settings.
    """
    there, names = settings_of(args.output), [os.path.relpath(unit.output, args.output) for unit in units]
    if there is None and (found := [unit.output for unit in units if os.path.exists(unit.output)]):
        raise UserError(f"{found[0]} is no part of an output of predict; choose another folder")
    if there and (odd := sorted(name for name in now if there["settings"].get(name) != now[name])):
        what = f"{args.output} holds parts by {there['named']}"
        what += f" with other settings ({', '.join(odd)} differ from those of {args.model} now)"
        raise UserError(f"{what}: choose another folder, or remove it")
    content = json.dumps({"settings": now, "named": args.model, "parts": names}, indent=1).encode()
    if there is None or there["parts"] != names:
        os.makedirs(args.output, exist_ok=True)
        files.write_sealed(os.path.join(args.output, SETTINGS), content)


def is_done(unit: Unit) -> bool:
    """Return whether the part is there, and not older than its input."""
    return os.path.isfile(unit.output) and os.path.getmtime(unit.output) >= os.path.getmtime(unit.file)


def join(args: PredictConfig) -> str:
    """Write the parts of a folder into one table; return a line on it. Raises UserError if some lack."""
    folder, output = str(args.join), args.output
    if (there := settings_of(folder)) is None:
        raise UserError(f"{folder}: is no folder that predict --output FOLDER/ has written")
    paths = [os.path.join(folder, name) for name in there["parts"]]
    if missing := [path for path in paths if not os.path.isfile(path)]:
        what = f"{len(missing):,} of its {len(paths):,} parts are missing ({missing[0]})"
        raise UserError(f"{folder}: {what}; the command that writes them continues")
    inputs: dict[str | None, str] = dict.fromkeys(paths, "a part")
    problems = files.problems([output], inputs, args.overwrite, endings=tuple(ENDINGS))
    raise_if_any([*problems, *missing_package(output)])
    of_path = {part.path: part for part in parts_of(folder)}
    parts = [of_path[path] for path in paths if path in of_path]  # an input without rows has an empty part
    table, system = table_format(parts), there["settings"]["system"]
    written = coded_columns(table.names, table.names.index(f"{system}_1"))
    kept, rows = list(range(len(table.names))), 0
    if there["settings"]["k"] is None:  # as many columns of codes as the row with most codes fills
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
        table_writer(file, output, header, are_numbers, csv_text, types) as write,
    ):
        for chunk in read_chunks(parts, kept):
            write(list(zip(*chunk.columns)))
            rows += len(chunk.lines)
    return f"{output}: {rows:,} rows of {len(parts):,} parts"
