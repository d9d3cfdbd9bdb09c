"""A data set of a call from Python as a file, as finetune.py takes it."""

import contextlib
import os
import tempfile
from typing import Any

from histocc.runtime.config import shown
from histocc.runtime.errors import UserError


def dataset_file(dataset: Any, held: contextlib.ExitStack) -> str:
    """A data set's file; a DataFrame goes into one that `held` removes. Raises UserError."""
    if isinstance(dataset, str | os.PathLike):
        if not os.fspath(dataset):
            raise UserError("dataset: is the name of no file")
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
