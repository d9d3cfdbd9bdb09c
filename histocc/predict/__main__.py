"""Code a file of descriptions with a trained model:

    histocc predict new.csv --model ./output --output coded.csv
    torchrun --nproc_per_node=4 -m histocc predict new.csv --distributed --model ./output --output coded.csv

The output has the columns of the input, in order. New columns follow them (or the text, with --columns
beside): codes with titles and probabilities, the model's confidence in the whole answer, whether somebody
should check it, and what belongs to the codes. The input is read twice. First its distinct texts are
collected and coded, PIECE at a time, each piece in a file of the folder `OUTPUT.parts`. Then each row gets
the answer to its text. A piece depends only on the input and the settings, never on processes and
interruptions, and (up to rounding) not on batch size and device.
"""

from histocc.runtime import signals

if __name__ == "__main__":
    signals.start_listening()  # from here on a signal is heard, though importing torch takes seconds

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from typing import Any

from histocc.data.config import column_flags
from histocc.data.tables import Path, column_problems, files_left_out, parts_of, table_format
from histocc.predict import parts
from histocc.predict.coder import training_examples
from histocc.predict.coding import INPUT, PIECES, SETTINGS_FILE, Coding, Counts
from histocc.predict.config import PredictConfig, get_args_parser
from histocc.published import models
from histocc.runtime import files
from histocc.runtime.errors import TrainingError, UserError, raise_if_any
from histocc.runtime.forked import Forked, choose_processes
from histocc.runtime.frame import start
from histocc.runtime.log import counted, show_progress
from histocc.runtime.world import World, all_see

STANDARD = "-"  # standard input, or output


def take_input(args: PredictConfig, path: Path, world: World, held: contextlib.ExitStack) -> Path:
    """Return the table to read: `path`, or a copy of a pipe's content, because the table is read twice.
    Rank 0 only. held: keeps the lock on the folder of the pieces.
    """
    raise_if_any(list(args.problems()))
    folder = args.beside(".parts")
    os.makedirs(folder, exist_ok=True)
    held.callback(remove_if_empty, folder)
    was_killed = os.path.exists(os.path.join(folder, files.LOCK))
    held.enter_context(files.run_lock(folder))
    others = set(os.listdir(folder)) - {files.LOCK}  # other programs use such names
    if others and not was_killed and files.read_sealed(os.path.join(folder, SETTINGS_FILE)) is None:
        what = f"{folder}, for the parts of the output, also holds {min(others)}"
        raise UserError(f"{what}: choose another --output")
    if others:
        files.remove_files(folder, rf"({PIECES}|{SETTINGS_FILE}|{INPUT}){files.TEMPORARY}|{INPUT}")
        beside, name = os.path.split(os.path.realpath(args.output))
        files.remove_files(beside, rf"_?{re.escape(name)}(\.rejected\.csv)?{files.TEMPORARY}")
    if isinstance(path, str) and files.kind_of(path) == "a pipe":
        pipe, path = path, os.path.join(folder, INPUT)
        held.callback(files.remove_files, folder, INPUT)
        files.save_pipe(pipe, path, world.give_up_if_asked, 60 * args.timeout_minutes)
    return path


def remove_if_empty(folder: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def code_table(
    args: PredictConfig, path: Path, world: World, says: bool = True, **how: Any
) -> tuple[Coding, Counts]:
    """Code a table, write the output, and return its `Coding` and the counts of its rows. All ranks.
    says: whether to report the start. how: further arguments of `Coding`.
    """
    ranks = list(range(world.size))
    with contextlib.ExitStack() as held:
        path = world.run_on_main(lambda: take_input(args, path, world, held))
        if world.size > 1:
            all_see(world, args.beside(".parts"), ", or use --output FOLDER/, which needs none")
        if not how:
            world.run_on_main(lambda: check(args, path, world))
        coding = Coding(args, path, world, **how)
        if args.explain:
            coding.coder.nearest = training_examples(coding.coder, coding.weights, world)
        rows = world.run_on(ranks, coding.read_texts)[0]  # a signal to one rank stops all
        coding.settings, resumed = world.run_on_main(coding.begin)
        processes = choose_processes(args.processes, world, len(coding.pieces))
        coding.forked = Forked(processes, world.give_up_if_asked, world.time_limit)
        if says and not args.non_verbose:
            world.print(*coding.start_lines(rows, resumed), sep="\n")
        world.run_on(ranks, coding.code_pieces)
        return coding, world.run_on_main(coding.join)


def check(args: PredictConfig, path: Path, world: World) -> None:
    """Raise UserError for problems that can be found before the model is loaded or made (a minute)."""
    for other in filter(None, (args.known, args.descriptions)):
        for part in parts_of(other):
            files.opened(part.path).close()
    named = [*(args.input_col or []), *filter(None, [args.language_col])]
    header = table_format(path, *args.how(named)).names
    raise_if_any(column_problems(path, header, named, column_flags(args)))
    if outline := models.outline(args.model):
        Coding(args, path, world, outline)


def code_parts(args: PredictConfig, world: World) -> None:
    """Code this task's share of the parts, each into its own file, and report on all of them. Raises
    TrainingError if rows could not be read.
    """
    units, (number, count, by) = parts.units_of(args), parts.task_of(args)
    parts.check_folder(args, units)
    own, left = units[number::count], {unit.output for unit in parts.left_to_do(args, units)}
    missing = [unit for unit in own if unit.output in left]
    task = f"Task {number + 1:,} of {count:,} (by {by}): " * (count > 1)
    there = f", {len(own) - len(missing):,} of them done" * (len(missing) < len(own))
    world.print(f"{task}{len(own):,} of {counted(len(units), 'part')} of {args.named}{there}")
    for note in filter(None, map(files_left_out, args.input or ())):
        world.print(f"Note: {note}")
    if not own:
        return
    first = missing[0] if missing else own[0]
    # `left_to_do` has checked in the folder's settings that existing parts are ours
    asked = args.with_decided(input=[first.file], output=first.output, overwrite=True)
    raise_if_any(list(asked.problems()))
    check(asked, first.path, world)
    coding = Coding(asked, first.path, world)
    parts.check_columns(coding, own[0].files[0], missing)
    parts.keep_settings(args, units, coding.deciding())
    all_counts, started = [Counter(), Counter(), Counter(), Counter()], coding.started
    for unit in missing:
        asked = args.with_decided(input=[unit.file], output=unit.output, overwrite=True)
        how = {"span": unit.span, "before": unit.files[: unit.place], "loaded": coding.loaded}
        coding, counts = code_table(asked, unit.path, world, unit is first, **how)
        Coding.cells.cache_clear()  # frees the answers
        coding.pieces = []  # frees the texts
        for sums, more in zip(all_counts, (*counts, coding.table.counts)):
            sums.update(more)
        world.print(f"{unit.output}: {counted(counts[0]['rows'], 'row')}")
    if missing:
        *counts, coding.table.counts = all_counts
        coding.args, coding.started = args, started
        world.print(*coding.end_lines(counts[0], counts[1], counts[2]), sep="\n")
    joined = f"histocc predict --join {args.output} --output coded.csv joins them into one table"
    left = len(parts.left_to_do(args, units))
    world.print(
        f"Not coded yet, by this or other tasks: {left:,} of {counted(len(units), 'part')}"
        if left
        else f"All parts are done: {joined}"
    )
    if lists := parts.unread("", [unit.output for unit in own]):
        what = f"rows of {counted(len(lists), 'part')} could not be read and are not in the output"
        raise TrainingError(f"{what}; listed by line in {', '.join(lists[:3])}{' …' * (len(lists) > 3)}")


def run(args: PredictConfig, world: World) -> None:
    """Code the input and write the output. All ranks."""
    if args.non_verbose:
        show_progress(False)
    with contextlib.ExitStack() as held:
        counts, to_standard = None, args.output == STANDARD
        if to_standard:
            folder = held.enter_context(tempfile.TemporaryDirectory())
            held.enter_context(contextlib.redirect_stdout(sys.stderr))
            args = args.with_decided(output=os.path.join(folder, "output.csv"))
        if args.join:
            world.print(world.run_on_main(lambda: parts.join(args)))
        elif args.in_parts:
            code_parts(args, world)
        else:
            names = ["/dev/stdin" if name == STANDARD else name for name in args.input or ()]
            args = args.with_decided(input=names)
            path = names[0] if len(names) == 1 else [part for name in names for part in parts_of(name)]
            coding, counts = code_table(args, path, world)
            for line in coding.end_lines(*counts):
                world.print(line)
        if to_standard:
            coded = held.enter_context(open(args.output, "rb"))
            with contextlib.suppress(BrokenPipeError), open(1, "wb", closefd=False) as out:
                shutil.copyfileobj(coded, out)
        if counts and (faults := counts[0]["faults"]):
            listed = f"{args.beside('.rejected.csv')} lists them by line"
            listed = "to get a list of them, write the output to a file" if to_standard else listed
            what = f"rows of {args.named} that could not be read and are not in the output: {faults:,}"
            raise TrainingError(f"{what}; {listed}")


def main(argv: list[str] | None = None) -> None:
    start(get_args_parser(), run, argv)


if __name__ == "__main__":
    main()
