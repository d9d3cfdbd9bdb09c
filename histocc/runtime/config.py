"""Each flag of a command is declared once, as a field of a frozen dataclass:

    @dataclass(frozen=True, kw_only=True)
    class Sampling(Config):
        "rows that are drawn"                     # the heading of these flags in --help
        rows: Count = flag(300, "how many at most", "--number", resumable=True)

    args = Parser(Sampling, "sample.py", "Draws rows.").parse_args()         # a Sampling

From it come the command line, `--config FILE` (TOML, or the args.json of a run), the arguments of calls from
Python, and the check of a run that is resumed. A subclass gives another default alone: `rows: int = 50`.
"""

import argparse
import json
import math
import os
import re
import reprlib
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import Annotated, Any, NoReturn, Self, Union, get_args, get_origin, get_type_hints

from histocc.runtime.device import DEVICES
from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.files import opened

MAX_PROBLEMS = 20  # shown of a file of arguments
# of one start of a run: not taken from its args.json
OF_ONE_START = (
    *("config", "distributed", "local_rank", "world_size", "overwrite"),
    *("eval_only", "prepare_only", "dry_run", "profile"),
)


def number(convert: Callable[[str], Any], accepts: Callable[[Any], bool], expected: str) -> Callable:
    """Reads a text as a number, for argparse; `expected` says in a message what it is not."""

    def read(text: str) -> Any:
        try:
            value = convert(text)
        except (ValueError, OverflowError):
            value = math.nan
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"{text[:30]!r} is not {expected}")
        return value

    return read


Count = Annotated[int, number(int, lambda value: 1 <= value < 10**12, "a whole number of at least 1")]
CountOrZero = Annotated[int, number(int, lambda value: 0 <= value < 10**12, "a whole number of at least 0")]
Whole = Annotated[int, number(int, lambda value: abs(value) < 2**63, "a whole number of at most 63 bits")]
Positive = Annotated[float, number(float, lambda value: 0 < value < math.inf, "a number above 0")]
NotNegative = Annotated[float, number(float, lambda value: 0 <= value < math.inf, "a number of at least 0")]
Fraction = Annotated[float, number(float, lambda value: 0 <= value <= 1, "a number between 0 and 1")]


def flag(
    default: Any,
    help: str,
    *names: str,
    choices: Collection[Any] | None = None,
    metavar: str | None = None,
    resumable: bool | str = False,
    positional: bool = False,
) -> Any:
    """A field that is a flag. The type says which values it takes: bool a switch, list several of them, an
    `Annotated` reads and checks the text.

    Args:
        default: MISSING for a flag that must be given.
        names: further spellings, such as "--epochs".
        resumable: whether another value may be given when a run is resumed; "kept": the default then stands
            for what the run has.
    """
    metadata = {"help": help, "names": names, "choices": choices, "metavar": metavar}
    metadata |= {"resumable": resumable, "positional": positional}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a user has asked for. `asked` is None, or in what `decide` returns the object as it was given."""

    asked: "Any" = None

    def decide(self, **values: Any) -> Self:
        """Another object, with what the run has decided; what was asked for stays in `asked`."""
        return replace(self, asked=self.asked or self, **values)

    def values(self) -> dict[str, Any]:
        """By the name of the flag."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "asked"}


@dataclass(frozen=True, kw_only=True)
class Processes(Config):
    """machine and processes"""

    device: str = flag("auto", "auto: CUDA GPUs if there are any, else CPUs", choices=DEVICES, resumable=True)
    distributed: bool = flag(False, "join the processes of the launcher (torchrun)", resumable=True)
    local_rank: int | None = flag(None, "set by torch.distributed.launch", resumable=True)
    world_size: Count | None = flag(
        None, "number of processes, checked against the launcher's", resumable=True
    )
    timeout_minutes: Positive = flag(30.0, "minutes that a process waits for another one", resumable=True)
    quiet: bool = flag(False, "no lines of progress", resumable=True)


def flag_of(name: str) -> str:
    """How a flag stands on a command line: "batch_size" is "--batch-size"."""
    return "--" + name.replace("_", "-")


def declarations(kind: type[Config]) -> dict[str, tuple[Field, Any, type]]:
    """Each flag's declaration, its type, and the class that it stands in: in the order of the bases."""
    declared: dict[str, tuple[Field, Any, type]] = {}
    for owner in reversed(kind.__mro__):
        for name, item in getattr(owner, "__dataclass_fields__", {}).items():
            if item.metadata and (name not in declared or declared[name][0] is not item):
                hint = get_type_hints(owner, include_extras=True)[name]
                declared[name] = (item, hint, declared[name][2] if name in declared else owner)
    order = kind.__mro__.index
    return dict(sorted(declared.items(), key=lambda entry: order(entry[1][2])))


def deciding(kind: type[Config]) -> list[str]:
    """Names of the flags that may not differ when a run is resumed."""
    return [name for name, (item, _, _) in declarations(kind).items() if not item.metadata["resumable"]]


def differing(
    kind: type[Config],
    now: Mapping[str, Any],
    before: Mapping[str, Any],
    only_kept: bool = False,
) -> list[str]:
    """Flags that decide the result and are not as in the run that is resumed, a line each.

    Args:
        now, before: the arguments by name, now and as the run has them.
        only_kept: of the flags whose default stands for what the run has.
    """
    lines = []
    for name, (item, _, _) in declarations(kind).items():
        policy = item.metadata["resumable"]
        kept = policy == "kept" and now[name] == kind.__dataclass_fields__[name].default
        if policy is True or only_kept and not policy or name not in before:
            continue
        if not kept and now[name] != before[name]:
            lines.append(f"{flag_of(name)} was {before[name]!r}, now it is {now[name]!r}")
    return lines


class Parser(argparse.ArgumentParser):
    """The command line of a Config. Long flags are spelled with hyphens or underscores; a mistake is a
    UserError, so that one rank speaks.

    Args:
        kind: the class; `parse_args` returns one.
        tables: names of tables of a file of --config that are no flags.
    """

    def __init__(self, kind: type[Config], prog: str, description: str, tables: Collection[str] = ()):
        if sys.argv[0].startswith("histocc "):  # as the command `histocc` sets it
            prog = sys.argv[0]
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=_Defaults)
        self.kind, self.tables = kind, tables
        self.named: dict[str, argparse.Action] = {}  # by each spelling of the flag, but --no-
        groups: dict[str | None, Any] = {}
        for name, (item, hint, owner) in declarations(kind).items():
            if owner is not kind and owner.__doc__ not in groups:
                groups[owner.__doc__] = self.add_argument_group(owner.__doc__)
            group = self if owner is kind else groups[owner.__doc__]
            self._add(group, name, hint, kind.__dataclass_fields__[name].default, **item.metadata)

    def _add(self, group: Any, name: str, hint: Any, default: Any, *, resumable: Any, **given: Any) -> None:
        options = {option: given[option] for option in ("help", "choices", "metavar") if given[option]}
        if get_origin(hint) in (Union, UnionType):  # of a type and None
            hint = next(kind for kind in get_args(hint) if kind is not NoneType)
        if get_origin(hint) is list:
            options, hint = options | {"nargs": "+"}, get_args(hint)[0]
        if hint is bool:
            options["action"] = "store_true" if default is False else argparse.BooleanOptionalAction
        elif get_origin(hint) is Annotated:
            options["type"] = get_args(hint)[1]
        elif hint is not str:
            options["type"] = hint
        if given["positional"]:
            group.add_argument(name, **options)
            return
        names = [flag_of(name), *given["names"]]
        options |= {"dest": name, "required": default is MISSING}
        action = group.add_argument(*names, default=None if default is MISSING else default, **options)
        if name != "config":
            self.named |= {each[2:].replace("-", "_"): action for each in names}
        if default is False and "config" in self.kind.__dataclass_fields__:  # a file may have switched it on
            off = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            group.add_argument(f"--no-{names[0][2:]}", dest=name, action="store_false", **off)

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]  of its overloads
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> Any:
        """The arguments as an object of `kind`. Raises UserError."""
        args = sys.argv[1:] if args is None else args
        args = [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), arg) for arg in args]
        of_config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        of_config.add_argument("--config", nargs="?")
        file = of_config.parse_known_args(args)[0].config
        given: dict[str, Any] = {}
        if file and "config" in self.kind.__dataclass_fields__:
            content, is_args = read_file(file)
            left_out = [name for name in self.tables if isinstance(content.get(name), dict)]
            given = self.checked(content, f"--config {file}", [*left_out, *(OF_ONE_START * is_args)])
        for action in self._actions:
            action.required = action.required and action.dest not in given
        return self.kind(**vars(super().parse_args(args, argparse.Namespace(**given))))

    def checked(
        self, values: Mapping[str, Any], where: str, left_out: Collection[str] = ()
    ) -> dict[str, Any]:
        """Values as their flags read them, by the field's name; None is a flag that is not given. Raises one
        UserError, which begins with `where`, for names that no flag has and values that no flag takes.
        """
        accepted: dict[str, Any] = {}
        problems: list[str] = []
        for name, value in values.items():
            action = self.named.get(name.replace("-", "_"))
            if name in left_out or action and (value is None or action.dest in left_out):
                continue
            if action is None:
                problems.append(f"{name[:200]!r}: there is no such flag")
            elif action.dest in accepted:
                problems.append(f"{name!r}: is given already, by another name")
            else:
                try:
                    accepted[action.dest] = _read(action, value)
                except (ValueError, argparse.ArgumentTypeError) as error:
                    problems.append(f"{name!r}: {error}")
        raise_if_any(problems, where, MAX_PROBLEMS)
        return accepted

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\n  {self.prog} --help lists the flags")


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not that there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _read(action: argparse.Action, value: Any) -> Any:
    """A value as the flag reads it. Raises ValueError, argparse.ArgumentTypeError."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # of numpy or torch
        value = value.item()
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"expected true or false, not {shown(value)}")
        return value
    found = []
    for item in value if action.nargs == "+" and isinstance(value, list | tuple) else [value]:
        if isinstance(item, bool) or not isinstance(item, str | int | float | os.PathLike):
            raise ValueError(f"expected a text or a number, not {shown(item)}")
        found.append(action.type(str(item)) if callable(action.type) else str(item))
        if action.choices is not None and found[-1] not in action.choices:
            raise ValueError(f"expected one of {', '.join(map(str, action.choices))}, not {shown(item)}")
    return (found or None) if action.nargs == "+" else found[0]


def shown(value: Any) -> str:
    """A value as part of a message: short, on one line."""
    text, known = " ".join(reprlib.repr(value).split()), str | int | float | list | tuple | dict | None
    return text if isinstance(value, known) else f"{text} ({type(value).__name__})"


def read_file(path: str) -> tuple[dict[str, Any], bool]:
    """(content of a file of --config, whether it is an args.json). Raises UserError: one message for whatever
    the file is.
    """
    is_args = path.endswith(".json")
    try:
        with opened(path) as file:
            text = file.read().decode("utf-8-sig")
        content: Any = json.loads(text) if is_args else tomllib.loads(text)
    except UserError as error:
        raise UserError(f"--config {error}") from None
    except (ValueError, RecursionError) as error:  # of either format, and of text that is not UTF-8
        kind = "JSON" if is_args else "TOML"
        raise UserError(f"--config {path}: cannot be read as {kind}: {str(error)[:300]}") from None
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: is not the args.json of a run")
    return content, is_args
