"""What an evaluation fits, and puts into the checkpoint that it evaluated."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from histocc.data.arrays import PreparedData, RowSet
from histocc.data.dataset import RowEncoding, TextRows
from histocc.evaluate.config import EvaluateConfig
from histocc.evaluate.figures import LEAST_ROWS
from histocc.job import confidence
from histocc.model import model_io
from histocc.model.confidence_fit import LEAST_TEXTS
from histocc.model.published import SETTINGS
from histocc.model.thresholds import Thresholds
from histocc.runtime import checkpoint
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError
from histocc.runtime.files import run_lock
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World
from histocc.text import UNKNOWN_LANGUAGE


def known_languages(data: PreparedData, languages: list[str]) -> PreparedData:
    """The data with languages that the model was not trained on read as unk."""
    return replace(
        data, languages=[name if name in languages else UNKNOWN_LANGUAGE for name in data.languages]
    )


def text_rows(loaded: model_io.Loaded, data: PreparedData, rows: RowSet) -> TextRows:
    """The rows as the model takes them."""
    _, formatter, state = loaded
    max_len = state["config"]["max_len"]
    encoding = RowEncoding(formatter, max_len, None if state["config"]["memory_mask"] else max_len)
    return TextRows(rows, known_languages(data, state["languages"]), encoding)


@contextlib.contextmanager
def unchanged(file: str, evaluated: tuple[int, ...]) -> Iterator[tuple[dict, dict]]:
    """(content of a checkpoint, its entries for coding), to be changed and written back; evaluated: its
    identity when it was read. Raises UserError where it is another file by now.
    """
    with run_lock(os.path.dirname(file) or "."):  # no run may put another one there meanwhile
        if checkpoint.identity(file) != evaluated:
            raise UserError(f"{file} is no longer the file that was evaluated: nothing is stored in it")
        content = checkpoint.load(file)
        yield content, content.get(SETTINGS, content)


def store_thresholds(
    file: str,
    evaluated: tuple[int, ...],
    found: dict,
    share: float | None,
    texts_trained_on: int | None,
    world: World,
) -> tuple[int, ...]:
    """Puts the fitted thresholds, and the fitted share of the linear decoder where there is one, into the
    checkpoint; evaluated: its identity when it was read. Rank 0 only. Returns its identity now.
    Raises UserError.
    """
    fitted = {
        "default": found["all"]["threshold_f1"],
        "source": "fitted",
        "by_language": {name: each["threshold_f1"] for name, each in found.items() if name != "all"},
    }
    with unchanged(file, evaluated) as (content, settings):
        held = settings.get("thresholds") or {}
        fitted |= {name: held[name] for name in ("at_least_one", "at_most") if name in held}
        settings |= {"thresholds": fitted, **({} if share is None else {"linear_share": share})}
        checkpoint.replace(file, content)
    world.print(f"Thresholds stored in {file}: {Thresholds.of({'thresholds': fitted})}")
    if share is not None:
        world.print(f"Linear share stored in {file}: {share:g}, for coding with --decoder topk or full")
    if found["all"]["rows"] < LEAST_ROWS:
        world.print(f"WARNING: they are fitted on {found['all']['rows']:,} rows; take {LEAST_ROWS} or more")
    if texts_trained_on:
        world.print(
            f"WARNING: {texts_trained_on:,} of the texts that they are fitted on were trained on; others give"
            " better ones"
        )
    return checkpoint.identity(file)


def fit_confidence(
    args: EvaluateConfig,
    file: str,
    evaluated: tuple[int, ...],
    loaded: model_io.Loaded,
    data: PreparedData,
    rows: RowSet,
    world: World,
) -> None:
    """--fit-confidence; without it nothing. All ranks. Raises UserError, Stopped."""
    if not args.fit_confidence:
        return
    number = len(np.unique(np.asarray(rows.text_hash)))
    if number < LEAST_TEXTS:
        world.print(confidence.too_few(number, "take more rows"))
        return
    precision = Precision("float32", world.device)
    loaded = with_stored(file, loaded, world)
    texts = text_rows(loaded, data, rows)
    fitted = confidence.fit(loaded, texts, rows.text_hash, world, args.batch_size, precision)
    if fitted is None and world.is_main:
        raise Stopped
    if fitted is not None:
        with unchanged(file, evaluated) as (content, settings):
            settings["confidence"] = fitted.confidence.to_dict()
            checkpoint.replace(file, content)
        world.print(f"{file}: {fitted.line}")


def with_stored(file: str, loaded: model_io.Loaded, world: World) -> model_io.Loaded:
    """The model with the thresholds and the share that its file holds by now."""

    def stored() -> dict:
        content = checkpoint.load(file)
        settings = content.get(SETTINGS, content)
        return {name: settings[name] for name in ("thresholds", "linear_share") if name in settings}

    model, formatter, state = loaded
    return model, formatter, {**state, **world.run_on_main("stored", stored)}
