"""A live view of a run, made only from its files: on the training machine, or on another one that sees the
folder.

    histocc watch ./output
    histocc watch ./output --once
"""

import json
import math
import os
import shutil
import sys
import textwrap
import time
from dataclasses import MISSING, dataclass
from typing import Any

from histocc.figure import ENTRY, STATUS, Figure
from histocc.runtime.config import Config, NotNegative, Parser, flag
from histocc.runtime.errors import UserError, run_command
from histocc.runtime.files import is_held
from histocc.runtime.log import duration, output_is_lost
from histocc.trainer.log import LOG, RUNNING, read_numbers

BARS = "▁▂▃▄▅▆▇█"
WHAT = "Show the progress of a run until it ends, on any machine that sees its folder."
CLEAR = "\x1b[2J\x1b[H\x1b[J"


def spark(values: list[float], width: int) -> str:
    """Return a line of bars, the highest for the highest value, × for non-finite values. More values than
    `width` are cut into equal parts, and the last value of each part is shown.
    """
    if len(values) > width:
        values = [values[(i + 1) * len(values) // width - 1] for i in range(width)]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if math.isfinite(value) else "×" for value in values)


def view(folder: str, width: int = 80) -> tuple[str, bool]:
    """Return the view as text, `width` characters wide, and whether the run continues. Raises UserError if
    there is no run, or its status is damaged.
    """
    path, is_live = os.path.join(folder, STATUS), is_held(folder)
    try:
        with open(path, encoding="utf-8") as file:
            status = json.load(file)
        lines = status_lines(status, read_numbers(os.path.join(folder, LOG)), is_live, width - 46)
        if figure := Figure.of_run(folder):
            lines[:0] = textwrap.wrap(f"{'figure':12}{figure}", width, subsequent_indent=" " * 12)
    except OSError:
        if is_live or is_held(os.path.join(folder, "prepared")):
            return f"{folder}\nstate       running, before the first step", True
        raise UserError(f"{folder}: no run has started to train here (no {STATUS})") from None
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{path}: is damaged: no run writes such content ({error})") from None
    return "\n".join([folder, *lines]), is_live


def status_lines(status: dict[str, Any], rows: list[dict[str, Any]], is_live: bool, size: int) -> list[str]:
    """Return the progress of the run, the last figures, and its state. is_live: a process holds the folder.
    size: length of bars, in characters.
    """
    stop, step = status["stop_step"], max([status["step"], *(int(row["step"]) for row in rows[-1:])])
    if stop <= 0 and rows:  # a fit counts up to step 0
        step, stop = step - int(rows[0]["step"]), stop - int(rows[0]["step"])
    done = min(1.0, step / stop) if stop else 1.0
    lines = [f"progress    {'█' * round(done * size):░<{size}} {done:4.0%}  step {step:,} of {stop:,}"]
    lines *= bool(stop)  # learning in closed form takes no steps
    accuracies = {name: f"{name} {{:.1f}} %" for row in rows[-1:] for name in row if name.endswith("_acc")}
    rates = {"samples_per_sec": "{:,.0f} samples/s", "lr": "learning rate {:.2e}"}
    for title, name, forms in (("loss", "train_loss", rates), ("validation", "val_loss", accuracies)):
        measured = [row for row in rows if row[name] is not None]
        if measured:
            losses, last = [row[name] for row in measured], measured[-1]
            lowest = f"  lowest {min(filter(math.isfinite, losses), default=math.nan):.4f}"
            lines.append(f"{title:12}{spark(losses, size)} {losses[-1]:.4f}{lowest * (ENTRY not in status)}")
            held = {name: last[name] for name in forms if last.get(name) is not None}
            figures = [forms[x].format(value * (100 if x in accuracies else 1)) for x, value in held.items()]
            lines.append(" " * 12 + " · ".join(figures))
    samples = [row for row in rows if row["samples"] and row["samples_per_sec"]][-2:]
    # from the last row's rate and the samples per step since the row before. Each part of a fit restarts
    takes_steps = status["state"] == RUNNING and is_live
    if takes_steps and len(samples) > 1 and samples[0]["samples"] < samples[1]["samples"]:
        of_step = (samples[1]["samples"] - samples[0]["samples"]) / (samples[1]["step"] - samples[0]["step"])
        seconds = max(0, stop - step) * of_step / samples[1]["samples_per_sec"]
        lines.append(f"time left   {duration(seconds)}")
    state, ago = status["state"], duration(max(0.0, time.time() - status["updated"]))
    if state == RUNNING and not is_live:
        state = "ended unexpectedly: killed, or by an error"
    elif state != RUNNING and is_live:
        state += "; its process is still working"
    lines.append(f"state       {state}, last row {ago} ago")
    return lines + [f"last note   {status['warning']}"] * bool(status["warning"])


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Config):
    """The flags of watch."""

    run: str = flag(MISSING, "run folder", metavar="RUN", positional=True)
    once: bool = flag(False, "print the progress once and end")
    every: NotNegative = flag(2.0, "seconds between updates", metavar="SECONDS")


def watch(args: WatchConfig) -> None:
    """Print the view until the run ends, Ctrl-C, or nobody reads the output."""
    clear, running = CLEAR if sys.stdout.isatty() and not args.once else "", True
    while running and not output_is_lost():
        text, running = view(args.run, max(60, min(120, shutil.get_terminal_size().columns)))
        print(clear + text, flush=True)
        running = running and not args.once
        time.sleep(max(0.2, args.every) if running else 0.0)


def get_args_parser() -> Parser:
    return Parser(WatchConfig, "python -m histocc.watch", WHAT, "./output", "./output --once")


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: watch(get_args_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
