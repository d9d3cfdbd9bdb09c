"""Each flag of a command is declared once, as a field of a frozen dataclass:

    @dataclass(frozen=True, kw_only=True)
    class Sampling(Config):
        "rows that are drawn"                     # the heading of these flags in --help
        rows: Count = flag(300, "how many at most", "--number", resumable=True)

    args = Parser(Sampling, "sample.py", "Draws rows.").parse_args()         # a Sampling

The declaration serves the command line, `--config FILE` (TOML, or the args.json of a run), calls from Python,
and the check of a run that is resumed. A subclass may change a default alone: `rows: int = 50`.
"""

import argparse
import contextlib
import difflib
import json
import math
import os
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, NoReturn, Self, Union, get_args, get_origin, get_type_hints

from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.files import opened

DEVICES = ("auto", "cpu", "cuda")


def number(convert: Callable[[str], Any], accepts: Callable[[Any], bool], expected: str) -> Callable:
    """Return a function that reads a number from a text, for argparse; its error quotes `expected`."""

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError, OverflowError):
            if accepts(value := convert(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text[:30]!r} is not {expected}")

    return read


Count = Annotated[int, number(int, lambda value: 1 <= value < 10**12, "a whole number of at least 1")]
CountOrZero = Annotated[int, number(int, lambda value: 0 <= value < 10**12, "a whole number of at least 0")]
Whole = Annotated[int, number(int, lambda value: abs(value) < 2**63, "a whole number of at most 63 bits")]
Positive = Annotated[float, number(float, lambda value: 0 < value < math.inf, "a number above 0")]
NotNegative = Annotated[float, number(float, lambda value: 0 <= value < math.inf, "a number of at least 0")]
Fraction = Annotated[float, number(float, lambda value: 0 <= value <= 1, "a number between 0 and 1")]


def flag(
    default: Any, help: str, *names: str, resumable: bool | str = False, positional: bool = False, **more: Any
) -> Any:
    """Return a dataclass field that is a flag. Its type says which values it takes: bool makes a switch, list
    takes several values, and an `Annotated` reads and checks the text.

    Args:
        default: MISSING for a flag that must be given.
        names: further spellings, such as "--epochs".
        resumable: whether another value may be given when a run is resumed; "kept": the default then stands
            for the run's own value.
        more: choices and metavar, as in argparse; of_steps: whether the flag affects optimizer steps alone;
            of_start: whether it is of one start of a run, and not taken from its args.json; of_process:
            whether the processes of a run may be given other values; of: the actions that have it, in a
            command of several ("": all).
    """
    metadata = {"names": names, "resumable": resumable, "positional": positional, "of": more.pop("of", "")}
    metadata |= {name: more.pop(name, False) for name in ("of_steps", "of_start", "of_process")}
    return field(default=default, metadata={**metadata, "options": {"help": help, **more}})


step_flag = partial(flag, of_steps=True)
start_flag = partial(flag, of_start=True, resumable=True)
process_flag = partial(flag, of_process=True, resumable=True)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The arguments of a command; `with_decided` keeps those that the user asked for in `asked`. instead:
    remedies for other programs' flags; usual: the flags that --help shows, while --help all shows all; if
    there are none, --help does.
    """

    usual: ClassVar[tuple[str, ...]] = ()
    instead: ClassVar[dict[str, str]] = {
        "deterministic": "leave it out: equal seeds give equal results, on GPUs up to rounding"
    }
    asked: "Any" = None

    def with_decided(self, **values: Any) -> Self:
        """Return a copy with the values that the run has decided; `asked` keeps what was asked for."""
        return replace(self, asked=self.asked or self, **values)

    def values(self) -> dict[str, Any]:
        """Return the values by the name of the flag."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "asked"}


@dataclass(frozen=True, kw_only=True)
class Processes(Config):
    """machine and processes"""

    device: str = process_flag("auto", "auto: CUDA GPUs if there are any, else CPUs", choices=DEVICES)
    distributed: bool = start_flag(False, "join the processes of the launcher (torchrun)")
    local_rank: int | None = start_flag(None, "set by torch.distributed.launch", of_process=True)
    world_size: Count | None = start_flag(None, "number of processes that the launcher must say")
    timeout_minutes: Positive = process_flag(30.0, "minutes that a process waits for another one")
    quiet: bool = process_flag(False, "no bars or lines of progress")


def flag_of(name: str) -> str:
    """Return a flag as it stands on a command line: "--batch-size" for "batch_size"."""
    return "--" + name.replace("_", "-")


def declarations(kind: type[Config]) -> dict[str, tuple[Field, Any, type]]:
    """Return each flag's declaration, its type and the class that it stands in, in the order of bases."""
    declared: dict[str, tuple[Field, Any, type]] = {}
    for owner in reversed(kind.__mro__):
        hints = get_type_hints(owner, include_extras=True)
        for name, item in getattr(owner, "__dataclass_fields__", {}).items():
            if item.metadata:
                declared[name] = (item, hints[name], declared[name][2] if name in declared else owner)
    return dict(sorted(declared.items(), key=lambda entry: kind.__mro__.index(entry[1][2])))


def flags_that(kind: type[Config], what: str) -> list[str]:
    """Return the names of the flags that are `what`: of_steps, of_start or of_process, see `flag`."""
    return [name for name, (item, _, _) in declarations(kind).items() if item.metadata[what]]


def differing(
    kind: type[Config], now: Mapping[str, Any], before: Mapping[str, Any], only_kept: bool = False
) -> list[str]:
    """Return a line on each flag that decides the result and differs now; only_kept: on "kept" ones alone."""
    lines = []
    for name, (item, _, _) in declarations(kind).items():
        policy, default = item.metadata["resumable"], kind.__dataclass_fields__[name].default
        if policy is True or only_kept and not policy or policy == "kept" and now[name] == default:
            continue
        if name in before and now[name] != before[name]:
            lines.append(f"{flag_of(name)} was {before[name]!r}, now it is {now[name]!r}")
    return lines


class _Help(argparse.Action):
    """The action of --help, which prints the usual flags, and of --help all, which prints all of them."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, values: Any, option: Any = None) -> NoReturn:
        assert isinstance(parser, Parser)
        usual = ("help", *parser.kind.usual)
        for action in parser._actions if values != "all" and len(usual) > 1 else ():
            if action.dest not in usual:
                action.help = argparse.SUPPRESS
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """The command line of `kind`; `parse_args` returns an object of it. Long flags have hyphens or
    underscores; a mistake is a UserError, so that one rank speaks. tables: tables of --config, which are no
    flags; of: the action of a command of several, whose other flags are refused.
    """

    def __init__(
        self, kind: type[Config], prog: str, description: str, tables: Collection[str] = (), of: str = ""
    ):
        prog = sys.argv[0] if sys.argv[0].startswith("histocc ") else prog  # `histocc` sets it so
        prog += f" {of}" if of else ""
        super().__init__(
            prog=prog,
            description=description,
            add_help=False,
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            argument_default=argparse.SUPPRESS,  # --help leaves out None, which the class fills in
        )
        self.kind, self.tables = kind, tables
        more: dict[str, Any] = {"nargs": "?", "metavar": "all"} if kind.usual else {"nargs": 0}
        words = "the flags that most people use; --help all: every flag" if kind.usual else "show these lines"
        self.add_argument("-h", "--help", action=_Help, help=words, **more)
        self._negative_number_matcher = re.compile(r"-[\d.]")  # a value such as -1=99999 is no flag either
        self.named: dict[str, argparse.Action] = {}  # the action by each spelling of its flag, but --no-
        self.instead = {**kind.instead}  # and of flags of other actions
        groups: dict[str | None, Any] = {kind.__doc__: self}
        for name, (item, hint, owner) in declarations(kind).items():
            if owner.__doc__ not in groups:
                groups[owner.__doc__] = self.add_argument_group(owner.__doc__)
            group, declared = groups[owner.__doc__], item.metadata
            options, default = dict(declared["options"]), kind.__dataclass_fields__[name].default
            if of and declared["of"] and of not in declared["of"].split():
                self.instead[name] = f"{flag_of(name)} is a flag of {', '.join(declared['of'].split())}"
                continue
            if get_origin(hint) in (Union, UnionType):  # a type or None
                hint = next(each for each in get_args(hint) if each is not NoneType)
            if get_origin(hint) is list:
                options["nargs"], (hint,) = "+", get_args(hint)
            if hint is bool:
                options["action"] = "store_true" if default is False else argparse.BooleanOptionalAction
            else:
                options["type"] = getattr(hint, "__metadata__", [hint])[0]  # the reader of an Annotated
            if default not in (None, MISSING, ""):
                options["default"] = default
            if declared["positional"]:
                group.add_argument(name, **options)
                continue
            names = [flag_of(name), *declared["names"]]
            action = group.add_argument(*names, dest=name, required=default is MISSING, **options)
            if name != "config":
                self.named |= {each[2:].replace("-", "_"): action for each in names}
            if default is False and "config" in kind.__dataclass_fields__:  # a file may have switched it on
                off = f"--no-{names[0][2:]}"
                group.add_argument(off, dest=name, action="store_false", help=argparse.SUPPRESS)

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> Any:  # pyright: ignore
        """Return the arguments as an object of `kind`. Raises UserError."""
        given = sys.argv[1:] if args is None else args
        args = [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), arg) for arg in given]
        self.given = [arg.partition("=")[0] for arg in args if arg.startswith("--")]
        of_config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        of_config.add_argument("--config", nargs="?")
        file = of_config.parse_known_args(args)[0].config
        of_file: dict[str, Any] = {}
        if file and "config" in self.kind.__dataclass_fields__:
            if sum(arg.partition("=")[0] == "--config" for arg in args) > 1:
                self.error("--config is given twice: give one file; the flags beside it win")
            content = read_file(file)
            left_out = [name for name in self.tables if isinstance(content.get(name), dict)]
            left_out += [name for name, value in content.items() if value is None]  # it is not given
            left_out += ("made_by", *flags_that(self.kind, "of_start")) if file.endswith(".json") else ()
            content = {name: value for name, value in content.items() if name not in left_out}
            of_file = self.checked(content, f"--config {file}")
        for action in self._actions:
            action.required = action.required and action.dest not in of_file
        return self.kind(**vars(super().parse_args(args, argparse.Namespace(**of_file))))

    def checked(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return values as their flags read them, by the field's name; None is a flag that is not given.
        Raises one UserError, which begins with `where`, for names that no flag has and values that no flag
        takes.
        """
        accepted, problems = {}, []
        for name, value in values.items():
            action = self.named.get(name.replace("-", "_"))
            if action is None:
                problems.append(f"{name[:200]!r}: there is no such flag{self.hint(name.replace('-', '_'))}")
            elif action.dest in accepted:
                problems.append(f"{name!r}: is given already, by another name")
            elif value is not None:
                try:
                    accepted[action.dest] = _read(action, value)
                except (ValueError, argparse.ArgumentTypeError) as error:
                    problems.append(f"{name!r}: {error}")
        raise_if_any(problems, where, most=20)
        return accepted

    def hint(self, name: str, spelled: Callable[[str], str] = str) -> str:
        """Return what to type instead of a name (with underscores) that no flag has, or ""."""
        near = difflib.get_close_matches(name, {*self.named, "config"} - {name}, 1)
        hints = self.instead.get(name), *(f"did you mean {spelled(other)}?" for other in near)
        return next((f"; {hint}" for hint in hints if hint), "")

    def error(self, message: str) -> NoReturn:
        if message.startswith(("unrecognized", "the following")):  # a required flag may be misspelled
            unknown = [name[2:] for name in self.given if name not in self._option_string_actions]
            message += "".join(self.hint(name.replace("-", "_"), flag_of) for name in unknown)
        raise UserError(f"{message}\n  {self.prog} --help lists the flags")


def _read(action: argparse.Action, value: Any) -> Any:
    """Return a value as the flag reads it. Raises ValueError, argparse.ArgumentTypeError."""
    if getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
        value = value.item()
    is_switch, is_list, read = action.nargs == 0, action.nargs == "+", action.type
    found = []
    for item in value if is_list and isinstance(value, list | tuple) else [value]:
        if action.nargs == "?" and isinstance(item, bool):  # true and false are its first and last choice
            item = list(action.choices or "")[not item]
        if isinstance(item, bool) != is_switch or not isinstance(item, str | int | float | os.PathLike):
            expected = "true or false" if is_switch else "a text or a number"
            raise ValueError(f"expected {expected}, not {item!r:.60}")
        if isinstance(item, float) and item.is_integer():  # R has 3.0 for 3
            item = int(item)
        found.append(read(str(item)) if callable(read) else item)
        if action.choices is not None and found[-1] not in action.choices:
            raise ValueError(f"expected one of {', '.join(map(str, action.choices))}, not {item!r:.60}")
    if is_list and not (isinstance(value, str) and value == action.default):  # as args.json has the default
        return found or None
    return found[0]


def read_file(path: str) -> dict[str, Any]:
    """Return the content of a --config file: JSON by its name, else TOML. Any failure is a UserError."""
    if path.lower().endswith((".yaml", ".yml")):
        convert = f"python -c 'import json, yaml; print(json.dumps(yaml.safe_load(open(0))))' <{path}"
        raise UserError(f"--config {path}: TOML and JSON are read. Convert it: {convert} >{path}.json")
    kind, parse = ("JSON", json.loads) if path.endswith(".json") else ("TOML", tomllib.loads)
    try:
        with opened(path) as file:
            content = parse(file.read().decode("utf-8-sig"))
        if not isinstance(content, dict):
            raise ValueError("it is not the args.json of a run")
    except UserError as error:
        raise UserError(f"--config {error}") from None
    except (ValueError, RecursionError) as error:  # either format's, or the text is not UTF-8
        raise UserError(f"--config {path}: cannot be read as {kind}: {str(error)[:300]}") from None
    return content
