"""Each flag of a command is declared once, as a field of a frozen dataclass:

    @dataclass(frozen=True, kw_only=True)
    class Sampling(Config):
        "drawn rows"                              # the heading of these flags in --help
        rows: Count = flag(300, "how many at most", "--number", resumable=True)

    args = Parser(Sampling, "sample.py", "Draws rows.").parse_args()         # a Sampling

The declaration serves the command line, `--config FILE` (TOML, or the args.json of a run), calls from Python,
and the check of a resumed run. A subclass may change only a default: `rows: int = 50`.
"""

import argparse
import contextlib
import difflib
import json
import math
import os
import re
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, NoReturn, Self, Union, get_args, get_origin, get_type_hints

from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.files import opened

AUTO = "auto"  # the program chooses the value of such a flag
DEVICES = (AUTO, "cpu", "cuda")
HELP_WIDTH = 100  # most columns of --help
OUTPUT = "--output"  # the name that `histocc` shows for what a command writes
VALUE_NAMES = {int: "N", float: "X"}  # what --help calls a value
AS_WORDS = " words"  # ends the dest of a positional argument with flags as well


def number(convert: Callable[[str], Any], accepts: Callable[[Any], bool], expected: str) -> Callable:
    """Return a function for argparse that reads a number from a text. Its error quotes `expected`."""

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
    default: Any,
    help: str,
    *names: str,
    resumable: bool | str = False,
    positional: bool | str = False,
    **more: Any,
) -> Any:
    """Return a dataclass field that declares a flag. Its type says which values it takes: bool makes a
    switch, list takes several values, and an `Annotated` reads and checks the text.

    Args:
        default: MISSING for a flag that must be given.
        names: further spellings, such as "--epochs".
        resumable: whether a resumed run may be given another value. With "kept", the default then means the
            run's own value.
        positional: whether it is given without a flag. With further spellings it is a flag as well, and with
            "also" --help shows the flag instead of the bare word.
        more: choices and metavar, as in argparse. of_steps: whether the flag affects only optimizer steps.
            of_start: whether it applies to one start of a run and is not read from its args.json. of_process:
            whether it may differ between the processes of a run. of: the actions that have it, in a command
            with several ("": all).
    """
    metadata = {"names": names, "resumable": resumable, "positional": positional, "of": more.pop("of", "")}
    metadata |= {name: more.pop(name, False) for name in ("of_steps", "of_start", "of_process")}
    return field(default=default, metadata={**metadata, "options": {"help": help, **more}})


step_flag = partial(flag, of_steps=True)
start_flag = partial(flag, of_start=True, resumable=True)
process_flag = partial(flag, of_process=True, resumable=True)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The arguments of a command. `instead` holds remedies for other programs' flags, and `usual` the flags
    that --help shows. --help all shows every flag, and so does --help if `usual` is empty.
    """

    usual: ClassVar[tuple[str, ...]] = ()
    instead: ClassVar[dict[str, str]] = {
        "deterministic": "leave it out: equal seeds give equal results, on GPUs up to rounding"
    }
    asked: "Any" = None

    def with_decided(self, **values: Any) -> Self:
        """Return a copy with the values that the run has decided. `asked` keeps the user's own."""
        return replace(self, asked=self.asked or self, **values)

    def values(self) -> dict[str, Any]:
        """Return the value of each flag, keyed by its name."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "asked"}


@dataclass(frozen=True, kw_only=True)
class ProcessFlags(Config):
    """machine and processes"""

    device: str = process_flag(AUTO, "auto: a CUDA GPU if there is one, else the CPU", choices=DEVICES)
    distributed: bool = start_flag(False, "share the work with the other processes of torchrun")
    local_rank: int | None = start_flag(None, "set by torch.distributed.launch", of_process=True)
    world_size: Count | None = start_flag(None, "how many processes the launcher must have started")
    timeout_minutes: Positive = process_flag(30.0, "minutes that a process waits for the others")
    quiet: bool = process_flag(False, "no progress bars")


def command_of_histocc() -> str:
    """Return "histocc train" and so on if the program `histocc` runs the command, else ""."""
    return sys.argv[0] if sys.argv[0].startswith("histocc ") else ""  # `main` of histocc/__main__.py sets it


def flag_of(name: str) -> str:
    """Return a flag as typed on a command line: "--batch-size" for "batch_size"."""
    return "--" + name.replace("_", "-")


@cache
def declarations(kind: type[Config]) -> dict[str, tuple[Field, Any, type]]:
    """Return each flag's declaration, its type and the class that declares it, in the order of bases."""
    declared: dict[str, tuple[Field, Any, type]] = {}
    for owner in reversed(kind.__mro__):
        hints = get_type_hints(owner, include_extras=True)
        for name, item in getattr(owner, "__dataclass_fields__", {}).items():
            if item.metadata:
                declared[name] = (item, hints[name], declared[name][2] if name in declared else owner)
    return dict(sorted(declared.items(), key=lambda entry: kind.__mro__.index(entry[1][2])))


def flags_that(kind: type[Config], what: str) -> list[str]:
    """Return the names of the flags marked `what`: of_steps, of_start or of_process, see `flag`."""
    return [name for name, (item, _, _) in declarations(kind).items() if item.metadata[what]]


def differing(
    kind: type[Config], now: Mapping[str, Any], before: Mapping[str, Any], only_kept: bool = False
) -> list[str]:
    """Return a line for each flag that affects the result and now differs. only_kept: for "kept" ones."""
    lines = []
    for name, (item, _, _) in declarations(kind).items():
        policy, default = item.metadata["resumable"], kind.__dataclass_fields__[name].default
        if policy is True or only_kept and not policy or policy == "kept" and now[name] == default:
            continue
        if name in before and now[name] != before[name]:
            lines.append(f"{flag_of(name)} was {before[name]!r}, now it is {now[name]!r}")
    return lines


class _Help(argparse.Action):
    """The action of --help, which prints the usual flags, and of --help all, which prints every flag."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, values: Any, option: Any = None) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_help(everything=values == "all"), end="")
        parser.exit()


class _Layout(argparse.HelpFormatter):
    """Help in two columns: one spelling of each flag, with its default if that is informative."""

    def __init__(self, prog: str):
        columns = shutil.get_terminal_size((HELP_WIDTH, 24)).columns
        super().__init__(prog, max_help_position=28, width=min(HELP_WIDTH, columns) - 1)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return self._format_args(action, str(action.metavar))
        is_switch = action.nargs == 0
        values = "" if is_switch else " " + self._format_args(action, action.dest.split("_")[-1].upper())
        return action.option_strings[0] + values

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        choices = "|".join(map(str, action.choices or ()))
        value = action.metavar or (choices if 0 < len(choices) < 20 else default_metavar)
        return f"{value} …" if action.nargs == "+" else f"[{value}]" if action.nargs == "?" else str(value)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default is None or default is False or default == argparse.SUPPRESS or "(default" in text:
            return text
        if default is True:
            default = f"on; {action.option_strings[1]}"
        shown = f"{default:g}" if isinstance(default, float) else default
        return f"{text} (default: {shown})"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text


def _type_options(hint: Any, default: Any) -> dict[str, Any]:
    """Return the options of `add_argument` for a flag of this type, with this default."""
    options: dict[str, Any] = {} if default in (None, MISSING, "") else {"default": default}
    if get_origin(hint) in (Union, UnionType):  # a type or None
        hint = next(each for each in get_args(hint) if each is not NoneType)
    if get_origin(hint) is list:
        options["nargs"], (hint,) = "+", get_args(hint)
    if hint is bool:
        return {**options, "action": "store_true" if default is False else argparse.BooleanOptionalAction}
    value = get_args(hint)[0] if get_args(hint) else hint
    if value in VALUE_NAMES and default != AUTO:
        options["metavar"] = VALUE_NAMES[value]
    return {**options, "type": getattr(hint, "__metadata__", [hint])[0]}  # the reader of an Annotated


class Parser(argparse.ArgumentParser):
    """The command line of `kind`. `parse_args` returns an object of that class. Long flags take hyphens or
    underscores. A mistake raises UserError, so that only one rank prints it.

    Args:
        examples: example arguments for --help.
        tables: names of the tables in --config, which are not flags.
        of: the action, in a command with several. Flags of the others are refused.
    """

    def __init__(
        self,
        kind: type[Config],
        prog: str,
        description: str,
        *examples: str,
        tables: Collection[str] = (),
        of: str = "",
    ):
        prog = command_of_histocc() or prog
        prog += f" {of}" if of else ""
        command = f"python {prog}" if prog.endswith(".py") else prog
        lines = [textwrap.fill(description, HELP_WIDTH - 1), ""]
        lines += (f"  {command} {line}" for line in examples)
        super().__init__(
            prog=prog,
            description="\n".join(lines).rstrip(),
            add_help=False,
            allow_abbrev=False,
            formatter_class=_Layout,
            argument_default=argparse.SUPPRESS,  # --help leaves out None, which the class fills in
        )
        self.kind, self.tables = kind, tables
        self._positionals.title, self._optionals.title = "input", "flags"
        self.add_argument("-h", "--help", action=_Help, help=argparse.SUPPRESS, nargs="?")
        self._negative_number_matcher = re.compile(r"-[\d.]")  # a value such as -1=99999 is not a flag
        self.named: dict[str, argparse.Action] = {}  # the action by each spelling of its flag, except --no-
        self.instead = {**kind.instead}  # and of flags of other actions
        headings = [owner.__doc__ or "" for owner in kind.__mro__]
        groups: dict[str | None, Any] = {kind.__doc__: self}
        groups |= {text: self for text in headings if text.startswith("The flags of")}  # no heading
        for name, (item, hint, owner) in declarations(kind).items():
            if owner.__doc__ not in groups:
                groups[owner.__doc__] = self.add_argument_group(owner.__doc__)
            group, declared = groups[owner.__doc__], item.metadata
            if of and declared["of"] and of not in declared["of"].split():
                self.instead[name] = f"{flag_of(name)} is a flag of {', '.join(declared['of'].split())}"
                continue
            default = kind.__dataclass_fields__[name].default
            options = {**_type_options(hint, default), **declared["options"]}
            names = [flag_of(name), *declared["names"]]
            if declared["positional"]:
                is_flag = len(names) > 1 or declared["positional"] == "also"
                word = self.add_argument(f"{name}{AS_WORDS}" if is_flag else name, **options)
                if not is_flag:
                    continue
                word.required = False  # the flag may be given instead, and --help shows one of the two
                (word.__dict__ if declared["positional"] == "also" else options)["help"] = argparse.SUPPRESS
            if command_of_histocc() and OUTPUT in names:
                names = [OUTPUT, *filter(OUTPUT.__ne__, names)]
            required = default is MISSING and not declared["positional"]
            action: argparse.Action = group.add_argument(names[0], dest=name, required=required, **options)
            action.help = options["help"]  # Python 3.11 adds a default to it
            self._option_string_actions.update(dict.fromkeys(names, action))  # --help names the first one
            if name != "config":
                self.named |= {each[2:].replace("-", "_"): action for each in names}
            if default is False and "config" in kind.__dataclass_fields__:  # a file may have switched it on
                off = f"--no-{names[0][2:]}"
                group.add_argument(off, dest=name, action="store_false", help=argparse.SUPPRESS)
        self.usage = self._usage_line()

    def _usage_line(self) -> str:
        """Return the usage: the program, what must be given, and "[flags]"."""
        needed = [action for action in self._actions if action.required or action.dest.endswith(AS_WORDS)]
        needed = [action for action in needed if action.help != argparse.SUPPRESS]
        needed.sort(key=lambda action: bool(action.option_strings))
        words = map(_Layout(self.prog)._format_action_invocation, needed)
        return " ".join([self.prog, *words, "[flags]"]).replace("%", "%%")

    def format_help(self, everything: bool = False) -> str:
        """Return help, in groups, on the usual flags in the order of `usual`, or on all flags."""
        usual = self.kind.usual if self.kind.usual and not everything else ()
        layout, groups = self._get_formatter(), []
        for group in self._action_groups:
            shown = [each for each in group._group_actions if each.help != argparse.SUPPRESS]
            if usual and group is not self._positionals:
                shown = sorted(
                    (each for each in shown if each.dest in usual), key=lambda each: usual.index(each.dest)
                )
            groups.append((group.title, shown))
        if usual:
            groups[1:] = sorted(
                groups[1:], key=lambda group: min([usual.index(each.dest) for each in group[1]], default=0)
            )
        layout.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        layout.add_text(self.description)
        for title, shown in groups:
            layout.start_section(title)
            layout.add_arguments(shown)
            layout.end_section()
        layout.add_text(f"{self.prog} --help all lists every flag." * bool(usual))
        return layout.format_help()

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
                self.error("--config is given twice: give one file; flags on the command line override it")
            content = read_file(file)
            left_out = [name for name in self.tables if isinstance(content.get(name), dict)]
            left_out += [name for name, value in content.items() if value is None]  # it is not given
            left_out += ("made_by", *flags_that(self.kind, "of_start")) if file.endswith(".json") else ()
            content = {name: value for name, value in content.items() if name not in left_out}
            of_file = self.checked(content, f"--config {file}")
        for action in self._actions:
            action.required = action.required and action.dest not in of_file
        found = vars(super().parse_args(args, argparse.Namespace(**of_file)))
        for word in [action for action in self._actions if action.dest.endswith(AS_WORDS)]:
            name, words = word.dest.removesuffix(AS_WORDS), found.pop(word.dest, None)
            by_flag = [each for each in self.given if self._option_string_actions[each].dest == name]
            if words is not None and by_flag:
                shown = " ".join([words] if isinstance(words, str) else words)
                self.error(f"{shown}: also given by {by_flag[0]}: leave one of them out")
            found |= {} if words is None else {name: words}
            if name not in found and self.kind.__dataclass_fields__[name].default is MISSING:
                first = f"{word.metavar} (it comes before the flags: {str(self.usage).split(' [')[0]})"
                missing = flag_of(name) if word.help == argparse.SUPPRESS else first
                self.error(f"the following arguments are required: {missing}")
        return self.kind(**found)

    def checked(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return values as their flags read them, keyed by the field's name. None means not given. Raises
        one UserError, which begins with `where`, for all unknown names and invalid values.
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
        """Return what to type instead of an unknown flag (written with underscores), or ""."""
        near = difflib.get_close_matches(name, {*self.named, "config"} - {name}, 1)
        hints = self.instead.get(name), *(f"did you mean {spelled(other)}?" for other in near)
        return next((f"; {hint}" for hint in hints if hint), "")

    def error(self, message: str) -> NoReturn:
        if message.startswith(("unrecognized", "the following")):  # a required flag may be misspelled
            unknown = [name[2:] for name in self.given if name not in self._option_string_actions]
            message += "".join(self.hint(name.replace("-", "_"), flag_of) for name in unknown)
            needed = re.findall("--([a-z-]+)", message) if message.startswith("the following") else []
            hints = {self.kind.instead.get(name.replace("-", "_")) for name in needed} - {None}
            message += "".join(f"; {hint}" for hint in hints)
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
    """Return the content of a --config file, JSON if its name says so, else TOML. Raises UserError."""
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
