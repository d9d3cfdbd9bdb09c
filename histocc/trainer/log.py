"""The output of each row of a run's log: a console line, `logs.csv` and `status.json`."""

import contextlib
import csv
import json
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from histocc.figure import STATUS, percent
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles, atomic_write, opened
from histocc.runtime.log import Stage, duration

if TYPE_CHECKING:  # commands that read a log start without torch, which takes a second to load
    from histocc.trainer.trackers import Tracker

LOG, RUNNING = "logs.csv", "running"

# Columns of logs.csv that add up over optimizer steps. A new one is one line here. The function returns a
# step's summand, a 0-d tensor equal on all ranks, from (norm of its gradient, was it taken, was it bad).
SUMMED_COLUMNS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "skipped_steps": lambda norm, taken, bad: bad,
}
FIT_PARTS = ("linear decoder", "both decoders")  # parts of the fit of n-grams, whose steps count up to 0
COUNTS = ("step", "epoch", "samples")
ROW_FIGURES = ("grad_norm", "lr", "samples_per_sec", "seconds_data")  # they follow the losses of training
FLOPS = ("model_flops_per_sec", "mfu")  # they come last
SIX_DIGITS = {*ROW_FIGURES, *FLOPS}  # other numbers have twelve
OWN_COLUMNS = (*COUNTS, *ROW_FIGURES, *SUMMED_COLUMNS, *FLOPS)  # the trainer's own


def log_columns(task_columns: Iterable[str]) -> tuple[str, ...]:
    """Return the columns of logs.csv, in order, for the columns of a task (see `histocc.trainer.loop`)."""
    task_columns = tuple(task_columns)
    losses = [name for name in task_columns if name.startswith("loss")]
    return (
        *COUNTS,
        *(f"train_{name}" for name in losses),
        *ROW_FIGURES,
        *(f"val_{name}" for name in losses),
        *(name for name in task_columns if name not in losses),
        *SUMMED_COLUMNS,
        *FLOPS,
    )


def complete_lines(path: str) -> list[str]:
    """Return the complete lines of a logs.csv, with their line ends. Raises UserError."""
    with opened(path) as file:
        lines = file.read().decode(errors="replace").replace("\0", "").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def read_numbers(path: str) -> list[dict[str, float | None]]:
    """Return the undamaged rows of a logs.csv, with None for an empty cell, or [] without such a file."""
    empty, rows = dict.fromkeys(log_columns(("loss",))), []
    with contextlib.suppress(UserError, csv.Error):
        for row in csv.DictReader(complete_lines(path)):
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):  # not numbers
                values = {name: None if cell == "" else float(cell) for name, cell in row.items()}
                counts = [int(float(row["step"])), *(int(values[name] or 0) for name in COUNTS[1:])]  # or inf
                rows += [empty | values] * (min(counts[1:]) >= 0)
    return rows


def validation_line(values: dict[str, Any], columns: tuple[str, ...]) -> str:
    """Return one line about a validation, with accuracies (…_acc) as percentages."""
    parts = [f"validation at step {values['step']:,}: loss {values['val_loss']:.4f}"]
    for name in columns[columns.index("val_loss") :]:
        if values.get(name) is not None and name not in OWN_COLUMNS and not name.startswith("val_loss"):
            is_share = name.endswith("_acc")
            parts.append(f"{name} {percent(values[name]) if is_share else f'{values[name]:.4g}'}")
    if "seconds_val" in values:
        parts.append(f"took {duration(values['seconds_val'])}")
    return " · ".join(parts)


class RunLog:
    """The log of one run. Every method may be called on every rank but acts only on rank 0.

    Args:
        files: the files of the run, to write logs.csv and status.json, or None to write no file.
        start: steps done. Later rows are dropped (all rows for a new run), with `again` also the validation
            of that step, which is still to be repeated. A fit ends at step 0 with a row that stays.
        stop_step: the step at which this start ends.
        first: the step of a fit that is shown as 0 (its steps count up to 0). part: the fit's name in lines.
        steps_before: steps of an earlier fit, to be counted in the progress, or None to show no progress.
    """

    def __init__(
        self,
        files: OwnFiles | None,
        columns: tuple[str, ...],
        total_steps: int = 0,
        start: int = 0,
        stop_step: int | None = None,
        *,
        is_main: bool = True,
        again: bool = False,
        trackers: "Iterable[Tracker]" = (),
        first: int = 0,
        part: str = "",
        steps_before: int | None = None,
    ):
        self.files, self.columns, self.is_main = files if is_main else None, columns, is_main
        self.total_steps, self.first_step, self.first, self.part = total_steps, max(start, first), first, part
        self.stop_step = total_steps if stop_step is None else stop_step
        self.started, self.trackers, self.stage = time.monotonic(), list(trackers), None
        if steps_before is not None and self.stop_step > self.first_step:
            counts = steps_before + self.stop_step, "steps", steps_before + self.first_step
            self.stage = Stage("training", *counts)
        self.unwritten: list[str] = []  # rows
        self.status = {"state": RUNNING, "step": self.first_step, "stop_step": self.stop_step, "warning": ""}
        if self.files is not None:
            path, _ = self.files.claim(LOG, STATUS)
            kept = [columns]
            lines = complete_lines(path) if os.path.isfile(path) else []
            names, *old = [line.rstrip("\r\n").split(",") for line in lines] or [[]]
            for cells in old:  # another version of the program may have had other columns
                with contextlib.suppress(ValueError, KeyError):  # damaged
                    row = dict(zip(names, cells, strict=True))
                    last = start - bool(again and row.get("val_loss"))
                    kept += [tuple(row.get(name, "") for name in columns)] * (float(row["step"]) <= last)
            with atomic_write(path, durable=False) as file:
                file.write("".join(",".join(row) + "\n" for row in kept).encode())
            self._write_status()

    def say(self, text: str) -> None:
        if text.startswith(("WARNING", "Note")):
            self._write_status(warning=f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
        if self.is_main:
            print(text, flush=True)

    def step(self) -> None:
        """Count a step and show how long the rest will take, as the first row may be minutes away."""
        if self.stage:
            self.stage.add()

    def _left(self, step: int) -> str:
        seconds = (time.monotonic() - self.started) / max(step - self.first_step, 1)
        return f"{duration(seconds * (self.stop_step - step))} left"

    def row(self, values: dict[str, Any]) -> None:
        """Write one row to logs.csv, the trackers and the console. `values` may hold any of the columns."""
        if not self.is_main:
            return
        step = values["step"]
        given = {name: values[name] for name in self.columns if values.get(name) is not None}
        cells = {
            name: f"{value:.{6 if name in SIX_DIGITS else 12}g}" if isinstance(value, float) else str(value)
            for name, value in given.items()
        }
        self.unwritten.append(",".join(cells.get(name, "") for name in self.columns) + "\n")
        self._append()
        for tracker in self.trackers:
            tracker.row(given)
        self._write_status(step=step)
        if values.get("skipped_steps"):
            what = "steps since the last row skipped, as they had no finite gradient"
            self.say(f"step {step:,}: {what}: {values['skipped_steps']:.0f}")
        if values.get("train_loss") is not None:
            parts = [f"step {step - self.first:,}/{self.total_steps - self.first:,}"]
            parts += [f"{f'{self.part}, pass' if self.part else 'epoch'} {values['epoch'] + 1}"]
            parts += [f"loss {values['train_loss']:.4f}", f"lr {values['lr']:.2e}"]
            parts += [f"{values['samples_per_sec']:,.0f} samples/s"]
            if values.get("mfu"):
                rate = values["model_flops_per_sec"] / 1e9
                parts.append(f"{rate:,.0f} GFLOP/s ({values['mfu']:.0%} of matmul)")
            parts += [f"waiting for data {values['data_share']:.0%}", self._left(step)]
            self.say(" · ".join(parts))
            if self.stage:
                self.stage.shown_at = time.monotonic()
        if values.get("val_loss") is not None:
            self.say(validation_line(values, self.columns))

    def _append(self) -> None:
        """Write pending rows. If this fails (no space, no folder), try again with the next row."""
        if self.files is None:
            return
        path = self.files.path(LOG)
        try:
            before = os.path.getsize(path) if os.path.isfile(path) else 0
            lines = self.unwritten if before else [",".join(self.columns) + "\n", *self.unwritten]
            try:
                with open(path, "ab") as file:
                    file.write("".join(lines).encode())
            except OSError:
                os.truncate(path, before)
                raise
            self.unwritten.clear()
        except OSError as error:
            self.say(f"WARNING: {path} could not be written: {error.strerror}. Its rows are kept for later.")

    def _write_status(self, **values: Any) -> None:
        """Update status.json, if it can be written."""
        self.status |= {**values, "updated": time.time()}
        with contextlib.suppress(OSError):
            if self.files is not None:
                with atomic_write(self.files.path(STATUS), durable=False) as file:
                    file.write(json.dumps(self.status).encode())

    def close(self, state: str = "ended", step: int | None = None) -> None:
        """End the log. Later calls do nothing. state: how the run ended. step: steps done (None: logged)."""
        if self.status["state"] != RUNNING:
            return
        self._write_status(state=state, step=self.status["step"] if step is None else step)
        self._append()
        for tracker in self.trackers:
            tracker.close()
