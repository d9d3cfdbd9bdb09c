"""What command lines are made of: a parser that takes both spellings, and the kinds of values."""

import argparse
import math
import sys
from collections.abc import Callable
from difflib import get_close_matches

from histocc.batch_size import AutoBatchSize
from histocc.config_file import config_arguments
from histocc.errors import UserError
from histocc.ngrams import AUTO, LEAST_BITS, MOST_BITS, NONE
from histocc.table_files import DELIMITERS

# script: flags that no other script has, to tell whose a file of --config is
FLAGS_OF_ONE_SCRIPT = {
    "finetune.py": {"dataset", "share_val"},
    "train_mixer.py": {"train_data", "val_data", "target_col_naming"},
}


class Parser(argparse.ArgumentParser):
    """Takes long flags with hyphens or underscores; a mistake is a UserError, so that one rank speaks for
    all."""

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else list(args)
        args = [
            (
                arg
                if not arg.startswith("--")
                else arg.partition("=")[0].replace("_", "-") + arg[len(arg.partition("=")[0]) :]
            )
            for arg in args
        ]
        files = [
            args[i + 1] if arg == "--config" else arg[len("--config=") :]
            for i, arg in enumerate(args)
            if arg.startswith("--config=") or arg == "--config" and i + 1 < len(args)
        ]
        if files and "--config" in self._option_string_actions:
            args = config_arguments(files[-1], self._actions, FLAGS_OF_ONE_SCRIPT) + args
        unknown, inside = [], False  # inside: an unknown flag's values
        for arg in args[: args.index("--") if "--" in args else None]:
            if arg.startswith("--"):
                inside = arg.partition("=")[0] not in self._option_string_actions
            unknown += [arg] if inside else []
        if unknown and not {"-h", "--help"} & set(args):  # before argparse names the flags that are missing
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return super().parse_known_args(args, namespace)

    def error(self, message):
        unknown = message.partition("unrecognized arguments: ")[2].split()
        near = sum(
            (
                get_close_matches(word.partition("=")[0], self._option_string_actions, 1)
                for word in unknown
                if word.startswith("--")
            ),
            [],
        )
        raise UserError(
            message
            + (f" (is {' or '.join(near)} meant?)" if near else "")
            + f"\n  {self.prog} --help lists the flags"
        )


def make_parser(prog: str, description: str) -> Parser:
    return Parser(prog=prog, description=description, allow_abbrev=False, formatter_class=_Defaults)


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not that there is none."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.lstrip("+").isdecimal() or len(text) > 12 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:30]!r} is not a whole number of at least 1")
    return int(text)


def positive(text: str) -> float:
    """A finite number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text[:30]!r} is not a number above 0")
    return value


def count_or_zero(text: str) -> int:
    if not text.lstrip("+").isdecimal() or len(text) > 12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def delimiter(text: str) -> str:
    """A character or the name of one, for argparse."""
    found = {**DELIMITERS, "\\t": "\t"}.get(text, text)
    if len(found) != 1 or found in '"\r\n':
        raise argparse.ArgumentTypeError(f"{text!r} is not one character, nor comma, semicolon, tab or pipe")
    return found


def batch_size(default: int) -> Callable[[str], int]:
    """For argparse: a count, or auto, which stands for `default` until the run has found its own."""

    def parse(text: str) -> int:
        return AutoBatchSize(default) if text == "auto" else count(text)

    parse.__name__ = "batch size"
    return parse


def flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")


def ngram_bits(text: str) -> str:
    """The value of --ngrams: auto, none, or a number of bits, as text."""
    if text in (AUTO, NONE) or text.isascii() and text.isdecimal() and LEAST_BITS <= int(text) <= MOST_BITS:
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not auto, none or a number of bits from {LEAST_BITS} to {MOST_BITS}"
    )
