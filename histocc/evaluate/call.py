"""Evaluating from Python and notebooks."""

import contextlib
import json
import os
import tempfile
from typing import Any

import numpy as np
import torch

from histocc.evaluate.__main__ import JSON, MARKDOWN, run
from histocc.evaluate.config import EvaluateConfig, get_args_parser
from histocc.evaluate.markdown import figures_of
from histocc.predict.tables import as_table
from histocc.runtime.device import device_of, settings_of_torch
from histocc.runtime.errors import UserError
from histocc.runtime.world import World

GROUPS = {"digits": "by_digits", "language": "by_language", "major_group": "by_major_group"}


class Report(dict):
    """What report.json holds, with tables and figures of it. text: report.md, as a notebook shows it."""

    def __init__(self, found: dict, text: str):
        super().__init__(found)
        self.text = text

    @classmethod
    def read(cls, folder: str | os.PathLike) -> "Report":
        """Of a folder into which an evaluation was written. Raises UserError."""
        texts = []
        for name in (JSON, MARKDOWN):
            try:
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    texts.append(file.read())
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{folder}: no report there ({name}: {error})") from None
        try:
            found = json.loads(texts[0])
        except ValueError as error:
            raise UserError(f"{os.path.join(folder, JSON)}: is damaged ({error})") from None
        return cls(found, texts[1])

    def accuracy(self, by: str = "digits", decoder: str | None = None, over: str = "texts") -> Any:
        """Accuracy and its 95 % interval by "digits", "language" or "major_group", over distinct "texts" or
        over "rows", as fractions.

        decoder: "seq2seq", "linear" or "both"; None: the last one that the report has. Returns a DataFrame,
        or a list of dicts where pandas is not installed. Raises UserError.
        """
        found = self._decoder(decoder)
        if by not in GROUPS or over not in ("texts", "rows"):
            raise UserError(f"by {by!r} over {over!r}: choose by from {list(GROUPS)}, over from texts, rows")
        groups = found[GROUPS[by]]
        pairs = groups.items() if isinstance(groups, dict) else ((each["digits"], each) for each in groups)
        rows = [
            (name, each["rows"], each["texts"], *each[f"over_{over}"]["accuracy"]) for name, each in pairs
        ]
        names = (by, "rows", "texts", "accuracy", "low", "high")
        columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
        return as_table({name: np.array(each) if name != by else each for name, each in columns.items()})

    def coverage(self, decoder: str | None = None) -> Any:
        """How many of the distinct texts keep an answer where 90, 95, 98 and 99 % of the answers are to be
        right, and how many then are, as fractions; a DataFrame or a list of dicts. Raises UserError.
        """
        found = self._decoder(decoder)["coverage"]["targets"]
        nothing = [float("nan")] * 3
        columns = {
            "accuracy": [each["accuracy"] for each in found],
            "confidence": [each["threshold"] for each in found],
            **{
                name + part: [(each[name]["over_texts"] or nothing)[i] for each in found]
                for name in ("stay", "right")
                for i, part in enumerate(("", "_low", "_high"))
            },
        }
        return as_table({name: np.array(each, dtype=np.float64) for name, each in columns.items()})

    def confusions(self, decoder: str | None = None) -> Any:
        """The most frequent mistakes, with texts; a DataFrame or a list of dicts. Raises UserError."""
        found = self._decoder(decoder)["confusions"]
        return as_table(
            {name: [each[name] for each in found] for name in ("true", "predicted", "texts", "examples")}
        )

    def figures(self) -> tuple[Any, Any]:
        """Figures of matplotlib: accuracy by number of digits, and accuracy by confidence. Raises UserError
        where matplotlib is not installed.
        """
        try:
            return figures_of(self)[:2]
        except ImportError:
            raise UserError("figures need matplotlib: pip install matplotlib") from None

    def _decoder(self, name: str | None) -> dict:
        found = self["decoders"]
        if name is not None and name not in found:
            raise UserError(f"decoder {name!r}: the report has {', '.join(found)}")
        return found[name or list(found)[-1]]

    def _repr_markdown_(self) -> str:
        return self.text


def evaluate(
    model: str | os.PathLike,
    data: str | os.PathLike | list[str],
    output: str | os.PathLike | None = None,
    verbose: bool = False,
    **arguments: Any,
) -> Report:
    """As `python -m histocc.evaluate` does, in one process; returns its report.

    output: folder of the report; None: none is kept. verbose: prints what the command does. The others are
    the flags of the command, with underscores: target_cols=["hisco_1"], share_val=0.1, baseline=True. Raises
    UserError, TrainingError.
    """
    values = {"model": model, "data": [data] if isinstance(data, str | os.PathLike) else list(data)}
    with contextlib.ExitStack() as held:
        values |= {**arguments, "output": output or held.enter_context(tempfile.TemporaryDirectory())}
        args = EvaluateConfig(**get_args_parser().checked(values, "evaluate"))
        world = World(device=device_of(args.device))
        if not verbose:
            held.enter_context(contextlib.redirect_stdout(None))
        with settings_of_torch(), torch.random.fork_rng([]):
            run(args, world)
        return Report.read(args.output)
