"""The arguments of a launcher, and the flags that it hands on to the training script."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field

from histocc.launch.output import say
from histocc.runtime.errors import UserError

DATA_FLAGS = ("--dataset", "--train-data", "--data-dir", "--data-root", "--val-data")
EXPECTED_DATA = (
    "DATA is a CSV file (*.csv, *.tsv or *.txt) or a Parquet file (*.parquet), or a folder with train.csv and"
    " val.csv (or .parquet)"
)


@dataclass
class Arguments:
    """What the user asks of a launcher.

    Attributes:
        processes: number of processes as it was given, without leading zeros; "all", or "" for the default.
        data: the file or folder with the data, or "".
        flags: flags of the training script, behind "--".
        config: what the file of --config holds, as flags.
        help: whether the usage is asked for.
    """

    processes: str = ""
    data: str = ""
    flags: list[str] = field(default_factory=list)
    config: list[str] = field(default_factory=list)
    help: bool = False

    def value(self, *names: str) -> str | None:
        """The value of a flag on the command line or in the file of --config.

        Args:
            names: names of the flag, with hyphens; the user may have written underscores.

        Returns:
            What follows the last of these flags, "" where nothing does, None where no such flag is given.
        """
        found, follows = None, False
        for word in [*self.config, *self.flags]:
            if follows:
                found = word
            follows = False
            name, equals, rest = word.partition("=")
            if name.startswith("--") and name.replace("_", "-") in names:
                found, follows = rest, not equals
        return found

    def has(self, *names: str) -> bool:
        """Whether one of these flags is given."""
        return self.value(*names) is not None


def parse(words: list[str]) -> Arguments:
    """Reads the command line of a launcher.

    Args:
        words: `[NUM] [DATA] [--print-only] [-- FLAGS]`, the first two in either order.

    Returns:
        The arguments; `help` is set as soon as -h or --help is met, and nothing behind it is read.

    Raises:
        UserError: for an unknown option, a number below 1, data that are not there, or anything given twice.
    """
    arguments = Arguments()
    for position, word in enumerate(words):
        if word in ("-h", "--help"):
            arguments.help = True
            return arguments
        if word == "--":
            arguments.flags = words[position + 1 :]
            break
        if word != "--print-only":  # the shell script has seen to it
            _take(arguments, word)
    named = [flag for flag in DATA_FLAGS if Arguments(flags=arguments.flags).has(flag)]
    if arguments.data and named:
        raise UserError(
            f"DATA is {arguments.data}, and {named[0]} behind -- names data, too: give one of them"
        )
    if arguments.processes not in ("", "all"):
        arguments.processes = arguments.processes.lstrip("0")
        if not arguments.processes:
            raise UserError("NUM is the number of processes: at least 1")
    return arguments


def _take(arguments: Arguments, word: str) -> None:
    """Sets the number of processes or the data."""
    if re.match("-[0-9]", word):
        raise UserError(f"NUM={word}: expected the number of processes, at least 1")
    if word.startswith("-"):
        raise UserError(
            f"unknown option {word}. Flags for the training script stand after --: [NUM] [DATA] -- {word}"
        )
    is_number = word == "all" or re.fullmatch("[0-9]+", word)
    if not word:
        raise UserError(f"DATA is empty.\n  {EXPECTED_DATA}")
    if not is_number and not os.path.exists(word):
        raise UserError(f"{word}: no such file or folder, and no number of processes.\n  {EXPECTED_DATA}")
    name, given = ("NUM", arguments.processes) if is_number else ("DATA", arguments.data)
    if given:
        raise UserError(
            f"{name} is given twice: {given} and {word}. Flags for the training script stand after --"
        )
    if is_number:
        arguments.processes = word
    else:
        arguments.data = word


def read_config(arguments: Arguments) -> None:
    """Sets `config` to what the file of --config holds, without what belongs to one start alone.

    What is wrong with the file the training script says.
    """
    path = arguments.value("--config")
    if path is None:
        return
    try:
        import tomllib

        from histocc.runtime.config_file import OF_ONE_START
    except ImportError:  # Python 3.10 or older
        say(f"Config:      {path} is not read here: what it says does not count in the lines below")
        return
    is_args = path.endswith(".json")
    content = None
    try:
        if os.path.isfile(path):
            with open(path, "rb") as file:
                content = json.load(file) if is_args else tomllib.load(file)
    except (OSError, ValueError, RecursionError):
        pass
    for name, value in content.items() if isinstance(content, dict) else ():
        if value not in (None, False) and not (is_args and name in OF_ONE_START):
            flag = f"--{name}={value}".replace("\0", " ")
            arguments.config.append(os.fsdecode(flag.encode("utf-8", "replace")))
