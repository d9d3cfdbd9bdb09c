"""Which training script fits the data, with which flags, and where the run is kept."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from dataclasses import dataclass, field

from histocc.launch.arguments import EXPECTED_DATA, Arguments
from histocc.launch.output import say
from histocc.runtime.errors import UserError


@dataclass
class Training:
    """What a process runs.

    Attributes:
        script: finetune.py or train_mixer.py, or a script of the user's.
        data: the data in words.
        flags: flags that the launcher chooses; those of the user come behind them and win.
        table: the file whose columns count.
        save_path: the folder of the run.
    """

    script: str
    data: str
    flags: list[str] = field(default_factory=list)
    table: str = ""
    save_path: str = ""


def training_for(data: str) -> Training:
    """The training that fits a file or a folder.

    Raises:
        UserError: where it holds no table, holds one twice or may not be read.
    """
    if os.path.isdir(data):
        if not os.access(data, os.R_OK | os.X_OK):
            raise UserError(f"{data} may not be read by this user.")
        train, val = (_table_in(data, name) for name in ("train", "val"))
        return Training("train_mixer.py", data, ["--train-data", train, "--val-data", val], train)
    if not os.path.isfile(data):
        raise UserError(f"{data} is no regular file: a table is read several times.\n  {EXPECTED_DATA}")
    if not data.lower().endswith((".csv", ".tsv", ".txt", ".parquet")):
        raise UserError(f"{data} is neither a table nor a folder of tables.\n  {EXPECTED_DATA}")
    if not os.access(data, os.R_OK):
        raise UserError(f"{data} may not be read by this user.")
    return Training("finetune.py", data, ["--dataset", data], data)


def data_flag(script: str) -> str:
    """The flag to which a training script wants DATA given, which it names as DATA_FLAG = "--flag"; "" where
    it names none: it takes tables as histocc's own scripts do. The script is read, not run.
    """
    try:
        with open(script, "rb") as file:
            body = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return ""  # the script itself says what is wrong
    for line in body:
        named = [target.id for target in getattr(line, "targets", ()) if isinstance(target, ast.Name)]
        if isinstance(line, ast.Assign) and named == ["DATA_FLAG"] and isinstance(line.value, ast.Constant):
            return str(line.value.value)
    return ""


def training_of(arguments: Arguments, own_script: str) -> Training | None:
    """The training of these arguments; None where there are no data, and the sample is meant. A script that
    names its DATA_FLAG gets DATA as it is, or nothing where it has data of its own; a file of --config
    becomes part of the arguments.

    Raises:
        UserError: as `training_for`.
    """
    flag = data_flag(own_script) if own_script else ""
    if not flag:
        return training_for(arguments.data) if arguments.data else None
    data = f"./{arguments.data}" if arguments.data.startswith("-") else arguments.data
    if data and flag == "--config":
        arguments.flags = [flag, data, *arguments.flags]
    given = [flag, data] if data and flag != "--config" else []
    return Training(own_script, data or f"those of {own_script}", given)


def _table_in(folder: str, name: str) -> str:
    """The path of the table train or val in a folder."""
    base = f"{folder[:-1] if folder.endswith('/') else folder}/{name}"
    found = [base + ending for ending in (".csv", ".parquet") if os.path.isfile(base + ending)]
    if not found:
        raise UserError(f"{folder} is a folder without {name}.csv or {name}.parquet.\n  {EXPECTED_DATA}")
    if len(found) > 1:
        raise UserError(f"{folder} holds both {name}.csv and {name}.parquet: leave one.")
    return found[0]


def describe_columns(training: Training, arguments: Arguments, python: str, has_torch: bool) -> None:
    """Adds the flags that fit the columns of the table, where the user has not given them.

    Args:
        python: the Python of the environment.
        has_torch: whether it can read tables, which needs torch; where not, a line says so.

    Raises:
        SystemExit: where the columns cannot be read or none holds codes; the reason has been printed.
    """
    wanted = []
    if not training.table:  # the script reads its data itself
        return
    if not arguments.has("--target-cols", "--key", "--target-col-naming"):
        wanted.append("target-cols")
    if not arguments.has("--language", "--language-col"):
        wanted.append("language-col")
    if not wanted:
        return
    if not has_torch:
        say(
            "Columns:     not read, since that needs torch: a start adds the flags that fit them, such as"
            " --target-cols"
        )
        return
    command = [python, "-m", "histocc.data.keys", training.table, *wanted]
    done = subprocess.run(command, stdout=subprocess.PIPE, close_fds=False)
    if done.returncode:
        raise SystemExit(done.returncode if done.returncode > 0 else 128 - done.returncode)
    flags = os.fsdecode(done.stdout).split()
    if flags[:1] == ["--formatter"] and arguments.has("--formatter"):
        flags = flags[2:]
    training.flags += flags


def choose_save_path(training: Training, arguments: Arguments) -> None:
    """Sets the save path: the user's, or ./output and the flag for it.

    Raises:
        UserError: where the user's is empty.
    """
    given = arguments.value("--save-path", "--save-dir", "--checkpoint-dir")
    if given is None:
        training.save_path = "./output"
        flag = "--save-path" if training.script == "finetune.py" else "--save-dir"
        training.flags += [flag, training.save_path]
    elif not given:
        raise UserError("--save-path is empty: expected a folder. Without the flag it is ./output")
    else:
        training.save_path = f"./{given}" if given.startswith("-") else given


def holds_sample_run(save_path: str) -> bool:
    """Whether a folder holds a run on the sample, however the path was spelled when it was started."""
    if not os.path.isfile(f"{save_path}/sample/train.csv"):
        return False
    try:
        with open(f"{save_path}/args.json", "rb") as file:
            return re.search(rb'"[^"\n]*/sample/train\.csv"', file.read()) is not None
    except OSError:
        return False
