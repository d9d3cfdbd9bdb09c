"""A live view of a run, from its files alone: on the machine that trains, or on another one that sees the
folder.

    python -m histocc.watch ./output
    python -m histocc.watch ./output --once
"""

import json
import math
import os
import shutil
import sys
import time
from dataclasses import MISSING, dataclass

from histocc.runtime.config import Config, NotNegative, Parser, flag
from histocc.runtime.entrypoint import run_command
from histocc.runtime.errors import UserError
from histocc.runtime.files import is_held
from histocc.runtime.log import duration, output_is_lost
from histocc.trainer.log import LOG, MAX_COUNT, RUNNING, STATUS, flops_in_words, read_numbers

SILENT_SECONDS = 600.0  # without a word a run that says it continues may be dead
BARS = "▁▂▃▄▅▆▇█"
NOT_YET = {"state": RUNNING, "step": 0, "stop_step": 0, "total_steps": 0}
CLEAR, HOME = "\x1b[2J", "\x1b[H\x1b[J"


@dataclass
class View:
    """What the files of a run say. status: of status.json; args: of args.json, {} without; rows: of logs.csv,
    numbers or None.
    """

    folder: str
    status: dict
    args: dict
    rows: list[dict]
    held: bool | None  # whether a live job has the folder, None where that cannot be told

    @property
    def running(self) -> bool:
        return self.status["state"] == RUNNING and self.held is not False


def read(folder: str, begun: bool = False) -> View:
    """begun: it has been seen training, so that its status cannot be missing.

    Raises UserError where there is no run, or where one of its files holds what no run writes.
    """
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: no such folder")
    status = _json(os.path.join(folder, STATUS))
    if not status or "state" not in status:
        if is_held(folder) and not begun:
            return View(folder, NOT_YET, {}, [], True)
        raise UserError(
            f"{folder}: is not the folder of a run that has begun to train (no {STATUS} there; the data "
            "are prepared before)"
        )
    args = _json(os.path.join(folder, "args.json"))
    files = args.get("train_data")
    _check(
        folder,
        STATUS,
        {
            **{
                name: _is_number(status.get(name)) and isinstance(status[name], int)
                for name in ("step", "stop_step", "total_steps")
            },
            "updated": "updated" not in status or _is_number(status["updated"]),
            **{name: isinstance(status.get(name, ""), str) for name in ("state", "warning")},
        },
    )
    _check(
        folder,
        "args.json",
        {
            **{name: isinstance(args.get(name), str | None) for name in ("model_size", "dataset")},
            "train_data": (
                isinstance(files, list | None) and all(isinstance(file, str) for file in files or [])
            ),
        },
    )
    return View(folder, status, args, read_numbers(os.path.join(folder, LOG)), is_held(folder))


def _json(path: str) -> dict:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):  # not there yet, or just being replaced
        return {}
    return found if isinstance(found, dict) else {}


def _is_number(value: object) -> bool:
    """That can be counted or be a time."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MAX_COUNT


def _check(folder: str, name: str, sound: dict[str, bool]) -> None:
    """sound: whether each entry of the file is what a run writes. Raises UserError."""
    wrong = [entry for entry, good in sound.items() if not good]
    if wrong:
        raise UserError(
            f"{os.path.join(folder, name)}: is damaged; missing or not what a run writes: {', '.join(wrong)}"
        )


def spark(values: list[float], width: int) -> str:
    """A line of bars, the highest for the highest value, × for what is not finite; neighbours are averaged
    where there are more than `width`.
    """
    if len(values) > width:
        values = [
            sum(part) / len(part)
            for i in range(width)
            if (part := values[i * len(values) // width : (i + 1) * len(values) // width])
        ]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(
        (
            "×"
            if not math.isfinite(value)
            else BARS[round((value - low) / (high - low) * (len(BARS) - 1))]
            if high > low
            else BARS[0]
        )
        for value in values
    )


def lines(view: View, width: int = 80, now: float | None = None) -> list[str]:
    """The view as text."""
    if view.status is NOT_YET:
        return [view.folder, "state       running, before the first step (n-grams are fitted before it)"]
    step = max([view.status["step"], *(int(row["step"]) for row in view.rows[-1:])])
    trained = [row for row in view.rows if row["train_loss"] is not None]
    validated = [row for row in view.rows if row["val_loss"] is not None]
    size = width - 46  # of bars
    found = _progress(view, step, size)
    if trained:
        found += _training(trained, size)
    if validated:
        found += _validation(validated, size)
    if view.running and (seconds := seconds_per_step(trained)) is not None:
        found.append(f"time left   {duration(max(0, view.status['stop_step'] - step) * seconds)}")
    return found + _state(view, time.time() if now is None else now)


def _progress(view: View, step: int, size: int) -> list[str]:
    """Which run it is, and how far it has come."""
    stop, total, args = view.status["stop_step"], view.status["total_steps"], view.args
    data = args.get("dataset") or " ".join(args.get("train_data") or [])
    what = ", ".join(filter(None, [args.get("model_size"), data]))
    done = min(1.0, step / max(stop, 1))
    return [
        view.folder + (f" ({what})" if what else ""),
        f"progress    {'█' * round(done * size)}{'░' * (size - round(done * size))} {done:4.0%}  step"
        f" {step:,} of {stop:,}" + (f" (--max-steps; {total:,} in all)" if stop < total else ""),
    ]


def _training(trained: list[dict], size: int) -> list[str]:
    """The loss, and the figures of the last row."""
    losses, last = [row["train_loss"] for row in trained], trained[-1]
    figures = [
        ("samples_per_sec", lambda rate: f"{rate:,.0f} samples/s"),
        ("model_flops_per_sec", lambda rate: flops_in_words(rate, last["mfu"])),
        ("lr", lambda rate: f"learning rate {rate:.2e}"),
        ("epoch", lambda epoch: f"epoch {int(epoch) + 1}"),
        ("samples", lambda samples: f"{int(samples):,} samples"),
    ]
    return [
        (
            f"loss        {spark(losses, size)} {losses[-1]:.4f}  lowest"
            f" {min(filter(math.isfinite, losses), default=math.nan):.4f}"
        ),
        "rate        " + " · ".join(write(last[name]) for name, write in figures if last[name] is not None),
    ]


def _validation(validated: list[dict], size: int) -> list[str]:
    """The loss, its lowest value, and the last accuracies."""
    last = validated[-1]
    best = min(validated, key=lambda row: row["val_loss"] if math.isfinite(row["val_loss"]) else math.inf)
    figures = " · ".join(
        f"{name} {last[name]:.1%}" for name in last if name.endswith("_acc") and last[name] is not None
    )
    return [
        (
            f"validation  {spark([row['val_loss'] for row in validated], size)} {last['val_loss']:.4f} at"
            f" step {int(last['step']):,}; lowest {best['val_loss']:.4f} at step {int(best['step']):,}"
        ),
        f"            {figures}",
    ]


def _state(view: View, now: float) -> list[str]:
    """Whether it runs, and the last thing it said."""
    status = view.status
    silent = now - status.get("updated", now)
    state = (
        status["state"]
        if view.running or status["state"] != RUNNING
        else "ended without a word: killed, or by an error"
    )
    found = [
        f"state       {state}, last row {duration(max(0, silent))} ago"
        + (": it may be dead, or at a long validation" if view.running and silent > SILENT_SECONDS else "")
    ]
    if status.get("warning"):
        found.append(f"last note   {status['warning']}")
    return found


def seconds_per_step(trained: list[dict]) -> float | None:
    """By the last row's rate, and the samples of a step since the row before; None where the rows do not say
    so.
    """
    if (
        len(trained) < 2
        or None in (trained[-2]["samples"], trained[-1]["samples"])
        or not MAX_COUNT > (trained[-1]["samples_per_sec"] or 0) > 1e-9
    ):
        return None
    before, last = trained[-2:]
    return (
        (last["samples"] - before["samples"])
        / max(1.0, last["step"] - before["step"])
        / last["samples_per_sec"]
    )


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Config):
    """What watch takes."""

    run: str = flag(MISSING, "folder of the run", metavar="RUN", positional=True)
    once: bool = flag(False, "print the view and end")
    every: NotNegative = flag(2.0, "how often to look", metavar="SECONDS")


def get_args_parser() -> Parser:
    return Parser(WatchConfig, "python -m histocc.watch", "A live view of a run, from its files.")


def watch(args: WatchConfig) -> None:
    """Until the run ends, or Ctrl-C. Once it has seen the run, it outlasts looks at which the files cannot be
    read.
    """
    terminal = sys.stdout.isatty() and not args.once
    view = None
    while True:
        trouble = []
        try:
            view = read(args.run, begun=view is not None and view.status is not NOT_YET)
        except UserError as error:  # the folder is being cleared for --overwrite, or its disk is away
            if view is None:
                raise
            trouble = [f"not now     {error}; the view is the last one, and it looks again"]
        text = "\n".join(lines(view, max(60, min(120, shutil.get_terminal_size().columns))) + trouble)
        print((CLEAR if terminal else "") + (HOME if terminal else "") + text, flush=True)
        if args.once or not view.running or output_is_lost():
            return
        time.sleep(max(0.2, args.every))


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: watch(get_args_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
