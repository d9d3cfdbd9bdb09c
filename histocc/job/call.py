"""Arguments of finetune.py as a call from Python has them: by name, checked, and as a command line."""

import argparse
import contextlib
import math
import numbers
import os
import tempfile
from difflib import get_close_matches
from typing import Any

from histocc.job.flags import finetune_parser
from histocc.runtime.arguments import flag as flag_of
from histocc.runtime.call_arguments import (
    COLUMNS,
    FLAG,
    PATH,
    Kind,
    checked,
    either,
    fits,
    optional,
    plain,
    shown,
)
from histocc.runtime.errors import UserError

NOT_OF_A_CALL = {"help", "version", "dataset"}  # flags that end the program, or that have another place


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


NUMBER = Kind("a number", is_number)


def kind_of(action: argparse.Action) -> Kind:
    """What a call may give for a flag; the flag's own check comes after it."""
    if action.nargs == 0:
        return optional(FLAG)
    if action.nargs == "+":
        return optional(COLUMNS)
    named_by_number = action.dest.endswith("_col")  # as columns of a DataFrame may be
    return optional(PATH if action.type is None and not named_by_number else either(NUMBER, PATH))


def checked_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that are not None, as finetune.py takes them. Raises UserError for names that it does not have,
    and for values of a wrong type, all in one message."""
    actions = {
        flag.removeprefix("--").replace("-", "_"): action
        for flag, action in finetune_parser()._option_string_actions.items()
    }
    known = actions.keys() - NOT_OF_A_CALL
    unknown = [name for name in arguments if name not in known]
    if unknown:
        near = get_close_matches(unknown[0], known, 1)
        raise UserError(
            f"finetune: unknown argument {', '.join(map(repr, unknown))}"
            + (f" (is {near[0]!r} meant?)" if near else "")
            + "; python finetune.py --help lists them, with - instead of _"
        )
    try:
        read = checked({name: kind_of(actions[name]) for name in arguments}, arguments)
    except ValueError as error:
        raise UserError(str(error)) from None
    return {name: value for name, value in read.items() if value is not None}


def as_flags(arguments: dict[str, Any]) -> list[str]:
    """Arguments by name as a command line, so that they are checked as there; None is one not given, as is
    False where nothing else can be said."""
    flags, off = [], finetune_parser()._option_string_actions
    for name, value in arguments.items():
        if value is False and flag_of(f"no_{name}") in off:
            flags.append(flag_of(f"no_{name}"))
        elif isinstance(value, (list, tuple)):
            flags += [flag_of(name), *map(str, value)]
        elif value is not None and value is not False:
            flags.append(flag_of(name) if value is True else f"{flag_of(name)}={value}")
    return flags


def dataset_file(dataset: Any, held: contextlib.ExitStack) -> str:
    """A data set's file; a DataFrame goes into one that `held` removes. Raises UserError."""
    dataset = plain(dataset)
    if isinstance(dataset, (str, os.PathLike)):
        if not fits(PATH, dataset):
            raise UserError(f"dataset: found {shown(dataset)}, expected a file or a DataFrame")
        return os.fspath(dataset)
    if not (hasattr(dataset, "to_csv") and hasattr(dataset, "columns")):
        raise UserError(
            f"dataset: found {shown(dataset)}, expected a file or a DataFrame, not {type(dataset).__name__}"
        )
    columns = ", ".join(map(str, dataset.columns))
    if getattr(dataset.columns, "nlevels", 1) > 1:
        raise UserError(f"dataset: has column names of several levels, expected one: {columns}")
    if len(set(map(str, dataset.columns))) < len(dataset.columns):
        raise UserError(f"dataset: has columns of the same name: {columns}")
    if not len(dataset) or not len(dataset.columns):
        raise UserError(f"dataset: is an empty DataFrame ({len(dataset)} rows; columns: {columns or 'none'})")
    file = os.path.join(held.enter_context(tempfile.TemporaryDirectory(prefix="histocc_")), "DataFrame.csv")
    frame = dataset.copy()
    for name in frame.columns:
        # whole numbers among missing values are floats in pandas, and codes have no .0
        if frame[name].dtype.kind == "f" and (frame[name].dropna() % 1 == 0).all():
            frame[name] = frame[name].astype("Int64")
    frame.to_csv(file, index=False)
    return file
