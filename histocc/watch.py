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
from typing import Any

from histocc.runtime.config import Config, NotNegative, Parser, flag
from histocc.runtime.entrypoint import run_command
from histocc.runtime.errors import UserError
from histocc.runtime.files import is_held
from histocc.runtime.log import duration, output_is_lost
from histocc.trainer.log import LOG, MAX_COUNT, RUNNING, STATUS, flops_in_words, read_numbers

SILENT_SECONDS = 600.0  # without a row a run that says it continues may be dead
BARS = "▁▂▃▄▅▆▇█"
CLEAR, HOME = "\x1b[2J", "\x1b[H\x1b[J"


def read_json(path: str) -> dict[str, Any]:
    """{} for a file that is not there yet, or just being replaced."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def spark(values: list[float], width: int) -> str:
    """A line of bars, the highest for the highest value, × for what is not finite; neighbours are averaged if
    there are more than `width`.
    """
    if len(values) > width:
        parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
        values = [sum(part) / len(part) for part in parts if part]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if math.isfinite(value) else "×" for value in values)


def view(
    folder: str, width: int = 80, now: float | None = None, begun: bool = False
) -> tuple[str, bool, bool]:
    """The view as text, whether the run goes on, and whether it has begun to train.

    Args:
        width: of the terminal, in characters.
        now: for the time since the last row; time.time() if None.
        begun: it has been seen training, so that its status cannot be missing.

    Raises:
        UserError: there is no run, or one of its files holds what no run writes.
    """
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: no such folder")
    held, status = is_held(folder), read_json(os.path.join(folder, STATUS))
    if "state" not in status:
        if held and not begun:
            return (
                f"{folder}\nstate       running, before the first step (n-grams are fitted before it)",
                True,
                False,
            )
        raise UserError(
            f"{folder}: is not the folder of a run that has begun to train (no {STATUS} there; the data are"
            " prepared before)"
        )
    running = status["state"] == RUNNING and held is not False
    rows = read_numbers(os.path.join(folder, LOG))
    name = STATUS
    try:
        lines = status_lines(status, rows, running, width - 46, time.time() if now is None else now)
        name = "args.json"
        args = read_json(os.path.join(folder, name))
        data = args.get("dataset") or " ".join(args.get("train_data") or [])
        what = ", ".join(filter(None, [args.get("model_size"), data]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{os.path.join(folder, name)}: is damaged; it holds what no run writes ({error})"
        ) from None
    return "\n".join([folder + (f" ({what})" if what else ""), *lines]), running, True


def status_lines(
    status: dict[str, Any], rows: list[dict[str, Any]], running: bool, size: int, now: float
) -> list[str]:
    """How far the run has come, the last figures, and whether it runs. size: of bars."""
    step, stop, total = (int(status[name]) for name in ("step", "stop_step", "total_steps"))
    if not all(0 <= count < MAX_COUNT for count in (step, stop, total)):
        raise ValueError("no number of steps")
    step = max(step, int(rows[-1]["step"]) if rows else 0)
    done = min(1.0, step / max(stop, 1))
    full = round(done * size)
    of_all = f" (--max-steps; {total:,} in all)" if stop < total else ""
    lines = [f"progress    {'█' * full}{'░' * (size - full)} {done:4.0%}  step {step:,} of {stop:,}{of_all}"]

    trained = [row for row in rows if row["train_loss"] is not None]
    if trained:
        losses, last = [row["train_loss"] for row in trained], trained[-1]
        lowest = min(filter(math.isfinite, losses), default=math.nan)
        figures = {
            "samples_per_sec": lambda rate: f"{rate:,.0f} samples/s",
            "model_flops_per_sec": lambda rate: flops_in_words(rate, last["mfu"]),
            "lr": lambda rate: f"learning rate {rate:.2e}",
            "epoch": lambda epoch: f"epoch {int(epoch) + 1}",
            "samples": lambda samples: f"{int(samples):,} samples",
        }
        shown = [write(last[name]) for name, write in figures.items() if last[name] is not None]
        lines.append(f"loss        {spark(losses, size)} {losses[-1]:.4f}  lowest {lowest:.4f}")
        lines.append(f"rate        {' · '.join(shown)}")

    validated = [row for row in rows if row["val_loss"] is not None]
    if validated:
        losses, last = [row["val_loss"] for row in validated], validated[-1]
        best = min(validated, key=lambda row: row["val_loss"] if math.isfinite(row["val_loss"]) else math.inf)
        lines.append(
            f"validation  {spark(losses, size)} {last['val_loss']:.4f} at step {int(last['step']):,}; lowest"
            f" {best['val_loss']:.4f} at step {int(best['step']):,}"
        )
        names = [name for name in last if name.endswith("_acc") and last[name] is not None]
        lines.append("            " + " · ".join(f"{name} {last[name]:.1%}" for name in names))

    # By the rate of the last row, and the samples of a step since the row before.
    if running and len(trained) > 1 and None not in (trained[-2]["samples"], trained[-1]["samples"]):
        before, last = trained[-2:]
        of_step = (last["samples"] - before["samples"]) / max(1.0, last["step"] - before["step"])
        if MAX_COUNT > (last["samples_per_sec"] or 0) > 1e-9:
            seconds = max(0, stop - step) * of_step / last["samples_per_sec"]
            lines.append(f"time left   {duration(seconds)}")

    silent = now - status.get("updated", now)
    state = status["state"]
    if state == RUNNING and not running:
        state = "ended without a word: killed, or by an error"
    dead = ": it may be dead, or at a long validation" if running and silent > SILENT_SECONDS else ""
    lines.append(f"state       {state}, last row {duration(max(0, silent))} ago{dead}")
    if status.get("warning"):
        lines.append(f"last note   {status['warning']}")
    return lines


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
    clear = CLEAR + HOME if sys.stdout.isatty() and not args.once else ""
    text, running, begun = "", True, False
    while True:
        trouble = ""
        try:
            width = max(60, min(120, shutil.get_terminal_size().columns))
            text, running, begun = view(args.run, width, begun=begun)
        except UserError as error:  # the folder is being cleared for --overwrite, or its disk is away
            if not text:
                raise
            trouble = f"\nnot now     {error}; the view is the last one, and it looks again"
        print(clear + text + trouble, flush=True)
        if args.once or not running or output_is_lost():
            return
        time.sleep(max(0.2, args.every))


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: watch(get_args_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
