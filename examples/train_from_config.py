#!/usr/bin/env python3
"""Train any model that a file names: model, task and rows by import path, and the flags of any script.

    python examples/train_from_config.py --config configs/scenes.toml
    scripts/train_multi_gpu.sh configs/scenes.toml 4

The file has the tables model, task, train and, to validate, val. Each has name = "package.module:name", a
class or a function, and its arguments. Modules are looked for in the current folder, in the file's folder and
among installed packages. The same command, given again, continues.
"""

import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from histocc.runtime import signals

if __name__ == "__main__":
    signals.start_listening()  # before torch is imported, which takes seconds

from torch import nn

from histocc.runtime.config import Parser, read_file
from histocc.runtime.errors import UserError
from histocc.runtime.frame import start
from histocc.trainer import script
from histocc.trainer.batches import Rows
from histocc.trainer.config import ScriptConfig
from histocc.trainer.script import Training

DATA_FLAG = "--config"  # the launchers pass DATA here
TABLES = ("model", "task", "train", "val")


def get_args_parser():
    description = (__doc__ or "").split("\n", 1)[0]
    return Parser(ScriptConfig, "train_from_config.py", description, tables=TABLES)


def found(path: str, where: str):
    """Return the object that an import path names. Raises UserError."""
    module, colon, name = path.partition(":")
    if not (colon and module and name):
        raise UserError(f"{where}: name = {path!r} is not an import path: expected package.module:name")
    try:
        thing = importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{where}: {path}: cannot be imported: {error}") from None
    for part in name.split("."):
        if not hasattr(thing, part):
            raise UserError(f"{where}: {path}: the module {module} has no {name}")
        thing = getattr(thing, part)
    if not callable(thing):
        raise UserError(f"{where}: {path} is a {type(thing).__name__}, not a class or a function")
    return thing


def made(config: str, tables: dict, table: str, kind: type | None = None) -> Any:
    """Return the object that a table names, with its arguments. Raises UserError if it is not of `kind`."""
    where, content = f"--config {config}: [{table}]", dict(tables.get(table, {}))
    path = content.pop("name", None)
    if not isinstance(path, str):
        raise UserError(f'{where}: no name: give name = "package.module:name"')
    make = found(path, where)
    try:
        inspect.signature(make).bind(**content)
    except TypeError as error:
        raise UserError(f"{where}: {path}: {error}") from None
    except ValueError:  # an object without a signature fails when it is called
        pass
    thing = make(**content)
    lacking = [name for name in ("columns", "losses", "metrics") if not hasattr(thing, name)]
    if kind is not None and not isinstance(thing, kind) or kind is None and lacking:
        expected = f"a {kind.__module__}.{kind.__name__}" if kind else f"a task: it has no {lacking[0]}"
        raise UserError(f"{where}: {path} gives a {type(thing).__name__}, which is not {expected}")
    return thing


def run(args, world):
    """Train what the file names. All ranks."""

    def make():
        if not args.config:
            raise UserError("--config is missing: the file that names model, task and rows")
        sys.path[:0] = [os.getcwd(), os.path.dirname(os.path.abspath(args.config))]
        content = read_file(args.config)
        tables = {name: content[name] for name in TABLES if isinstance(content.get(name), dict)}
        val = made(args.config, tables, "val", Rows) if "val" in tables else None
        model, task = made(args.config, tables, "model", nn.Module), made(args.config, tables, "task")
        train = made(args.config, tables, "train", Rows)
        held_out = f", {len(val):,} for validation" if val else ""
        about = [
            f"Dataset: {tables['train']['name']} ({len(train):,} rows for training{held_out})",
            f"Model: {tables['model']['name']}",
            f"Model parameters: {sum(p.numel() for p in model.parameters()):,}",
        ]
        return Training(model, task, train, val, entries={"config": tables}, about=about)

    script.train(get_args_parser(), args, world, make)


def main(argv=None):
    start(get_args_parser(), run, argv)


if __name__ == "__main__":
    main()
