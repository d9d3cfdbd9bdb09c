"""What command lines are made of: a parser that takes both spellings, and the kinds of values."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar, get_type_hints

from histocc.runtime.config_file import config_arguments
from histocc.runtime.errors import UserError

T = TypeVar("T")


class Group(argparse._ArgumentGroup):
    """As argparse's, with `resumable` of `Parser`."""

    def __init__(self, parser: "Parser", *args: Any, **options: Any):
        self.resumable = parser.resumable
        super().__init__(parser, *args, **options)

    def add_argument(self, *names: str, resumable: bool = False, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        self.resumable |= {action.dest} if resumable else set()
        return action


class Parser(argparse.ArgumentParser):
    """Takes long flags with hyphens or underscores; a mistake is a UserError, so that one rank speaks.

    Args:
        own_flags: script → flags (dest) that no other script has, to tell whose a file of --config is.

    `tables` names tables of such a file that are no flags; the script reads them (`config_file.tables_of`).
    `add_argument` takes `resumable=True` for a flag that may differ when a run is resumed; `resumable` is the
    set of these (dest).
    """

    def __init__(self, *args: Any, own_flags: Mapping[str, set[str]] | None = None, **options: Any):
        self.own_flags = own_flags or {}
        self.resumable: set[str] = set()
        self.tables: tuple[str, ...] = ()  # of a file of --config, which the script reads itself
        self.from_file: dict[str, str] = {}  # flag → file of --config, for flags that it alone gives
        super().__init__(*args, **options)

    def add_argument(self, *names: str, resumable: bool = False, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        self.resumable |= {action.dest} if resumable else set()
        return action

    def add_argument_group(self, *args: Any, **options: Any) -> Group:
        group = Group(self, *args, **options)
        self._action_groups.append(group)
        return group

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  of its overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
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
        if len(files) > 1 and "--config" in self._option_string_actions:
            self.error(f"--config is given {len(files)} times: {', '.join(files)}; put all into one file")
        if files and "--config" in self._option_string_actions:
            of_file = config_arguments(files[-1], self._actions, self.own_flags, self.tables)
            actions = self._option_string_actions
            given = {actions.get(arg.partition("=")[0]) for arg in args}
            names = (arg.partition("=")[0] for arg in of_file)
            self.from_file = {name: files[-1] for name in names if actions.get(name) not in given}
            args = of_file + args
        unknown, inside = [], False  # inside: an unknown flag's values
        for arg in args[: args.index("--") if "--" in args else None]:
            if arg.startswith("--"):
                inside = arg.partition("=")[0] not in self._option_string_actions
            unknown += [arg] if inside else []
        if unknown and not {"-h", "--help"} & set(args):  # before argparse names the flags that are missing
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        flag = message.removeprefix("argument ").partition(":")[0].split("/")[0]
        if flag in self.from_file:
            message = f"--config {self.from_file[flag]}: {message.removeprefix('argument ')}"
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


def make_parser(prog: str, description: str, own_flags: Mapping[str, set[str]] | None = None) -> Parser:
    return Parser(
        prog=sys.argv[0] if sys.argv[0].startswith("histocc ") else prog,  # as the command `histocc` sets it
        description=description,
        allow_abbrev=False,
        formatter_class=_Defaults,
        own_flags=own_flags,
    )


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not that there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
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


def flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")


def not_shares(args: argparse.Namespace, names: list[str]) -> list[str]:
    """Which arguments are not between 0 and 1, a line each."""
    return [
        f"{flag(name)} must lie between 0 and 1, not {getattr(args, name):g}"
        for name in names
        if not 0 <= getattr(args, name, 0.0) <= 1
    ]


def settings_of(kind: type[T], args: argparse.Namespace) -> T:
    """The checked arguments of the names that the dataclass `kind` has, those of dataclasses in it too."""
    hints = get_type_hints(kind)
    return kind(
        **{
            field.name: (
                settings_of(hints[field.name], args)
                if is_dataclass(hints[field.name])
                else getattr(args, field.name)
            )
            for field in fields(kind)  # pyright: ignore[reportArgumentType]  T is a dataclass
        }
    )


def by_flag(settings: Any) -> dict[str, Any]:
    """The values of a settings object by the name (dest) of their flag: what `settings_of` has read."""
    found: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        found |= by_flag(value) if is_dataclass(value) else {field.name: value}
    return found
