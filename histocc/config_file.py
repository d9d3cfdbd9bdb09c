"""Arguments from a file: `--config FILE.toml`, or the args.json that a run has written. What stands on the command line wins."""

import argparse
import difflib
import json
import re
import tomllib

from histocc.errors import UserError

NOT_FROM_A_FILE = ("config", "help", "version")
OF_ONE_START = ("config", "distributed", "local_rank", "world_size", "overwrite", "eval_only", "prepare_only", "dry_run", "profile")


def config_arguments(path: str, actions: list[argparse.Action], of_others: dict[str, set[str]]) -> list[str]:
    """The file's arguments as they would stand on a command line; names may be spelled with hyphens or underscores.

    of_others: script → names of flags that it alone has, to tell whose file it is where `actions` are those of another script.

    An args.json holds every argument of a run; what belongs to its start alone, such as the number of processes, is left out. Raises
    UserError for what cannot be read, for names that no flag has or that stand there twice, and for values of the wrong kind.
    """
    names = {option.lstrip("-").replace("-", "_"): action for action in actions for option in action.option_strings}
    names |= {action.dest: action for action in actions}
    found, problems, given = [], [], {}
    content, is_args = _read(path)
    for name, value in content.items():
        plain = name.replace("-", "_")
        action = names.get(plain)
        if action is None:
            near = difflib.get_close_matches(plain, names, 1)
            owner = next((script for script, flags in of_others.items() if plain in flags), None)
            problems.append(f"{name!r}: there is no such flag" + (f" here, it is a flag of {owner}" if owner else
                                                                  f"; the nearest is {near[0]!r}" if near else ""))
        elif value is None or is_args and action.dest in OF_ONE_START:
            continue
        elif is_args and action.dest == "memory_mask" and "clean_text" not in content and not value:
            continue                                 # in an args.json of earlier versions false was what was not given
        elif action.dest in NOT_FROM_A_FILE:
            problems.append(f"{name!r}: stands on a command line alone")
        elif (first := given.setdefault(action.dest, name)) != name:
            problems.append(f"{name!r}: is the same flag as {first!r}; give one of them")
        elif isinstance(value, (list, dict)) != (action.nargs == "+") or isinstance(value, bool) != (action.nargs == 0):
            kind = "a list" if action.nargs == "+" else "true or false" if action.nargs == 0 else "one value"
            problems.append(f"{name!r}: expected {kind}, not {json.dumps(value, default=str)}")
        elif action.nargs == "+" and (odd := [item for item in value if isinstance(item, bool) or not isinstance(item, str | int | float)]):
            problems.append(f"{name!r}: expected texts or numbers in the list, not {json.dumps(odd[0], default=str)}")
        elif action.nargs == 0:
            off = [option for option in action.option_strings if option.startswith("--no-") and len(action.option_strings) > 1]
            found += [action.option_strings[0]] if value else off[:1]
        elif action.nargs == "+":
            found += [action.option_strings[0], *map(str, value)] if value else []
        else:
            found.append(f"{action.option_strings[0]}={value}")
    if problems:
        raise UserError("\n  ".join([f"--config {path}: {len(problems)} problem{'s' * (len(problems) > 1)}:", *problems]))
    return found


def _read(path: str) -> tuple[dict, bool]:
    """(content, whether it is an args.json)"""
    try:
        if path.endswith((".yaml", ".yml")):
            raise UserError(f"--config {path}: the file must be TOML, not YAML" + _as_toml(path))
        with open(path, "rb") as file:
            if not path.endswith(".json"):
                return tomllib.load(file), False
            content = json.load(file)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:                      # of either format, and of text that is not UTF-8
        raise UserError(f"--config {path}: cannot be read as {'JSON' if path.endswith('.json') else 'TOML'}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: is not the args.json of a run")
    return content, True


def _as_toml(path: str) -> str:
    """What a YAML file of names and values would be as TOML, as part of a message; "" where it holds more than that."""
    values: dict[str, str | list[str]] = {}
    last = None
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            line = re.sub(r"(^|\s)#.*", "", line).rstrip()
            pair, item = re.fullmatch(r"([\w-]+):\s*(.*)", line), re.fullmatch(r"\s*-\s+(.*)", line)
            if pair:
                last = pair[1]
                values[last] = pair[2]
            elif item and last is not None and values[last] in ("", []) or item and isinstance(values.get(last), list):
                values[last] = [*values[last], item[1]]
            elif line and line != "---":
                return ""
    lines = [f"{name} = {_toml_value(value)}" for name, value in values.items() if value not in ("", "null", "~")]
    return ". As TOML, in a file that ends with .toml:\n\n" + "\n".join(lines) if lines else ""


def _toml_value(value: str | list[str]) -> str:
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        value = [part.strip() for part in value[1:-1].split(",") if part.strip()]
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return str(value.lower() in ("true", "yes", "on")).lower()
    if re.fullmatch(r"[-+]?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", value):
        return value
    return json.dumps(value.strip("'\""), ensure_ascii=False)
