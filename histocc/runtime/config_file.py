"""Arguments from a file: `--config FILE.toml`, or the args.json that a run has written. What stands on the
command line wins.
"""

import argparse
import codecs
import difflib
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.files import opened

NOT_FROM_A_FILE = ("config", "help", "version")
LARGEST = 1 << 20  # bytes: a file of arguments has some lines
SHOWN = 20  # problems at most in a message
OF_ONE_START = (
    "config",
    "distributed",
    "local_rank",
    "world_size",
    "overwrite",
    "eval_only",
    "prepare_only",
    "dry_run",
    "profile",
)


def config_arguments(
    path: str, actions: list[argparse.Action], of_others: Mapping[str, set[str]], tables: Collection[str] = ()
) -> list[str]:
    """The file's arguments as they would stand on a command line; names may be spelled with hyphens or
    underscores.

    of_others: script → names of flags that it alone has, to tell whose file it is where `actions` are those
    of another script.

    tables: names of tables that are for `tables_of`.

    An args.json holds every argument of a run; what belongs to its start alone, such as the number of
    processes, is left out. Raises UserError for what cannot be read, for names that no flag has or that stand
    there twice, and for values of the wrong kind.
    """
    names = {
        option.lstrip("-").replace("-", "_"): action for action in actions for option in action.option_strings
    }
    names |= {action.dest: action for action in actions}
    found: list[str] = []
    problems: list[str] = []
    given: dict[str, str] = {}
    content, is_args = _read(path)
    for name, value in content.items():
        plain = name.replace("-", "_")
        action = names.get(plain)
        if name in tables and isinstance(value, dict):
            continue
        if action is None:
            hint = _hint(plain, names if len(problems) < SHOWN else {}, of_others)
            problems.append(f"{name!r:.200}: there is no such flag{hint}")
        elif value is None or is_args and action.dest in OF_ONE_START:
            continue
        elif (problem := _odd_value(value)) is not None:
            problems.append(f"{name!r}: {problem}")
        elif action.dest in NOT_FROM_A_FILE:
            problems.append(f"{name!r}: stands on a command line alone")
        elif (first := given.setdefault(action.dest, name)) != name:
            problems.append(f"{name!r}: is the same flag as {first!r}: they are mutually exclusive")
        elif (problem := _wrong_kind(action, value)) is not None:
            problems.append(f"{name!r}: {problem}")
        else:
            found += _on_command_line(action, value)
    raise_if_any(problems, f"--config {path}", SHOWN)
    return found


def tables_of(path: str, names: Collection[str]) -> dict[str, dict[str, Any]]:
    """The tables of these names that a file of arguments holds. Raises UserError."""
    return {
        name: value for name, value in _read(path)[0].items() if name in names and isinstance(value, dict)
    }


def _hint(plain: str, names: dict[str, argparse.Action], of_others: Mapping[str, set[str]]) -> str:
    """Whose flag a name is that is none here, or the nearest of `names`."""
    owner = next((script for script, flags in of_others.items() if plain in flags), None)
    if owner:
        return f" here, it is a flag of {owner}"
    near = difflib.get_close_matches(plain, names, 1) if len(plain) < 100 else []
    return f"; the nearest is {near[0]!r}" if near else ""


def _wrong_kind(action: argparse.Action, value: Any) -> str | None:
    """Why a value is none of this flag's kind: a list, true or false, or one text or number."""
    if isinstance(value, (list, dict)) != (action.nargs == "+") or isinstance(value, bool) != (
        action.nargs == 0
    ):
        kind = "a list" if action.nargs == "+" else "true or false" if action.nargs == 0 else "one value"
        return f"expected {kind}, not {_shown(value)}"
    if action.nargs == "+" and (wrong := [item for item in value if not _is_plain(item)]):
        return f"expected texts or numbers in the list, not {_shown(wrong[0])}"
    return None


def _on_command_line(action: argparse.Action, value: Any) -> list[str]:
    """A value of the flag's kind as it would stand there; false is its --no- form, where it has one."""
    options = action.option_strings
    if action.nargs == 0:
        off = [option for option in options if option.startswith("--no-") and len(options) > 1]
        return [options[0]] if value else off[:1]
    if action.nargs == "+":
        return [options[0], *map(str, value)] if value else []
    return [f"{options[0]}={value}"]


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _odd_value(value: Any) -> str | None:
    """What is wrong with a text or a number, alone or in a list, that no flag could take; None for
    nothing.
    """
    items: list[Any] = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, str) and ("\0" in item or re.search("[\ud800-\udfff]", item)):
            return f"{_shown(item)} holds a NUL character or half of a character, which no text has"
        if isinstance(item, float) and not math.isfinite(item):
            return f"expected a finite number, not {item}"
        if isinstance(item, int) and abs(item) >= 1 << 63:
            return "the whole number is too large: more than 63 bits"
    return None


def _shown(value: Any) -> str:
    """A value as part of a message, of bounded length."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):  # a number of thousands of digits; nested too deeply
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else text[:200] + "…"


def _read(path: str) -> tuple[dict[str, Any], bool]:
    """(content, whether it is an args.json). Raises UserError, one message for whatever the file is."""
    kind = "JSON" if path.endswith(".json") else "TOML"
    try:
        with opened(path) as file:
            plain = file.read(LARGEST + 1).removeprefix(codecs.BOM_UTF8)
        if len(plain) > LARGEST:
            raise UserError(f"{path}: is larger than {LARGEST:,} bytes; is this a file of arguments?")
        if path.endswith((".yaml", ".yml")):
            raise UserError(f"{path}: must be TOML, not YAML (docs/training.md shows such a file)")
        if kind == "TOML":
            return tomllib.loads(plain.decode()), False
        content: Any = json.loads(plain, object_pairs_hook=_without_repeats)
    except UserError as error:
        raise UserError(f"--config {error}") from None
    except RecursionError:
        raise UserError(f"--config {path}: cannot be read as {kind}: it is nested too deeply") from None
    except ValueError as error:  # of either format, and of text that is not UTF-8
        raise UserError(f"--config {path}: cannot be read as {kind}: {_reason(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: is not the args.json of a run")
    return content, True


def _reason(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        line = error.object.count(b"\n", 0, error.start) + 1
        return f"line {line:,} is not UTF-8 (byte 0x{error.object[error.start]:02x}); save the file as UTF-8"
    if "integer string conversion" in str(error):
        return "a number in it has thousands of digits"
    return str(error)[:300]


def _without_repeats(pairs: list[tuple[Any, ...]]) -> dict[str, Any]:
    """An object of a JSON file. Raises ValueError where a name is there twice, as TOML does."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{name!r:.200} is there twice")
    return found
