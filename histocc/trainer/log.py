"""What a run says while it trains: a console line per row of the log, `logs.csv`, `status.json`, and a
progress bar on a terminal.
"""

import contextlib
import csv
import io
import json
import os
import time
from collections.abc import Iterable
from typing import Any

from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles, atomic_write, opened
from histocc.runtime.log import Stage, duration
from histocc.trainer.schedule import Steps
from histocc.trainer.trackers import Tracker, close_trackers

LOG, STATUS, RUNNING, STOPPED = "logs.csv", "status.json", "running", "stopped"
MAX_COUNT = 2.0**53  # from here on floats do not count one by one
FLOP_UNITS = ("", "k", "M", "G", "T", "P", "E")
FIRST_ESTIMATE = 5  # steps after which the time is estimated for the first time
# Share of the time that goes into waiting for data, and in how many rows in a row, before it is remarked on.
WAITING_SHARE, WAITING_ROWS = 0.15, 3

COUNTS = ("step", "epoch", "samples")
MEASURED = ("grad_norm", "lr", "samples_per_sec", "seconds_data", "model_flops_per_sec", "mfu")  # 6 digits
SUMMED_COLUMNS = ("skipped_steps",)  # sums that the loop adds up, see `State.add`
OWN_COLUMNS = (*COUNTS, *MEASURED, *SUMMED_COLUMNS)  # of the trainer itself


def log_columns(task_columns: tuple[str, ...]) -> tuple[str, ...]:
    """Columns of logs.csv, in order, for a task with these columns; see `histocc.trainer.task`."""
    losses = [name for name in task_columns if name.startswith("loss")]
    return (
        *COUNTS,
        *(f"train_{name}" for name in losses),
        *MEASURED[:4],
        *(f"val_{name}" for name in losses),
        *(name for name in task_columns if name not in losses),
        *SUMMED_COLUMNS,
        *MEASURED[4:],
    )


def format_value(name: str, value: Any) -> str:
    """Losses have 12 significant digits."""
    if value is None:
        return ""
    return f"{value:.{6 if name in MEASURED else 12}g}" if isinstance(value, float) else str(value)


def read_rows(path: str) -> tuple[list[dict[str, str]], int]:
    """Complete rows of a logs.csv, and how many lines are damaged, or half-written. Raises UserError."""
    with opened(path) as file:
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
    reader = csv.reader(line.replace("\0", "") for line in lines if line.endswith("\n"))
    rows: list[dict[str, str]] = []
    columns: list[str] = []
    with contextlib.suppress(csv.Error):  # a cell without an end
        columns = next(reader, [])
        for cells in reader:
            row = dict(zip(columns, cells))
            with contextlib.suppress(ValueError, KeyError):
                if len(cells) == len(columns) and is_row({name: number(row[name]) for name in columns}):
                    rows.append(row)
    return rows, max(0, len(lines) - ("step" in columns) - len(rows))


def number(cell: str) -> float | None:
    return float(cell) if cell else None


def is_row(values: dict[str, float | None]) -> bool:
    """Whether a row has a countable place."""
    counts = [values.get(name) for name in COUNTS]
    return counts[0] is not None and all(count is None or 0 <= count < MAX_COUNT for count in counts)


def read_numbers(path: str) -> list[dict[str, float | None]]:
    """Rows of a logs.csv, None for an empty cell; damaged ones are left out. [] if there is no such file."""
    empty = dict.fromkeys(log_columns(("loss",)))
    with contextlib.suppress(UserError):
        return [empty | {name: number(cell) for name, cell in row.items()} for row in read_rows(path)[0]]
    return []


def flops_in_words(rate: float, share: float | None) -> str:
    """As "41.3 GFLOP/s (23% of matmul)": floating point operations per second, and their share of the rate
    of matrix products if that was measured.
    """
    at = 0
    while rate >= 999.5 and at < len(FLOP_UNITS) - 1:
        rate, at = rate / 1000, at + 1
    text = f"{rate:.3g} {FLOP_UNITS[at]}FLOP/s"
    return text if share is None else f"{text} ({share:.0%} of matmul)"


def validation_line(values: dict[str, Any], columns: tuple[str, ...]) -> str:
    """One line on a validation; accuracies (…_acc) as percentages."""
    parts = [f"validation at step {values['step']:,}: loss {values['val_loss']:.4f}"]
    for name in columns[columns.index("val_loss") :]:
        if values.get(name) is not None and name not in OWN_COLUMNS and not name.startswith("val_loss"):
            parts.append(f"{name} {values[name]:{'.1%' if name.endswith('_acc') else '.4g'}}")
    if (seconds := values.get("seconds_val")) is not None:
        parts.append(f"took {duration(seconds) if seconds >= 1 else 'under 1s'}")
    return " · ".join(parts)


class RunLog:
    """The log of one run; every method may be called on every rank and acts on rank 0 alone.

    Args:
        own: files of the run: logs.csv, and status.json for whoever watches it; None writes no file.
        steps: a resumed run's `start` drops rows after it, or from it on with `again`: its row is still to be
            written.
        columns: of logs.csv; see `log_columns`.
        bar: whether to show a progress bar, if progress is shown.
        workers: loading processes per process, for the note on waiting for data.
        trackers: get each row, too.
    """

    def __init__(
        self,
        own: OwnFiles | None,
        steps: Steps,
        columns: tuple[str, ...],
        is_main: bool = True,
        *,
        bar: bool = True,
        again: bool = False,
        workers: int = 0,
        trackers: Iterable[Tracker] = (),
    ):
        self.own, self.columns, self.is_main = own if is_main else None, columns, is_main
        self.total_steps, self.first_step, self.stop = steps.total or 0, steps.start, steps.last or 0
        self.started, self.steps = time.monotonic(), 0
        self.workers, self.rows_waiting, self.waiting_noted = workers, 0, False
        self.trackers = list(trackers)
        self.unwritten: list[list[str]] = []
        self.status = {
            "state": RUNNING,
            "step": self.first_step,
            "first_step": self.first_step,
            "stop_step": self.stop,
            "total_steps": self.total_steps,
            "warning": "",
        }
        if self.own is not None:
            path, _ = self.own.claim(LOG, STATUS)
            rows, last = [], self.first_step - again
            if last and os.path.isfile(path):
                rows, damaged = read_rows(path)
                if damaged:
                    print(f"Note: {damaged} damaged line{'s' * (damaged > 1)} of {path} left out", flush=True)
            kept = [[row.get(name, "") for name in columns] for row in rows if float(row["step"]) <= last]
            with atomic_write(path, durable=False) as file:
                file.write(csv_lines([list(columns), *kept]))
            self._write_status()
        # without a terminal the rows of the log say how far it is
        stage = (
            Stage("training", self.stop, "steps", self.first_step, lines=False) if is_main and bar else None
        )
        self.bar = stage and stage.bar

    def say(self, *words: object) -> None:
        if not self.is_main:
            return
        text = " ".join(map(str, words))
        if text.startswith(("WARNING", "Note")):
            self._write_status(warning=f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
        if self.bar is not None:
            self.bar.write(text)
        else:
            print(text, flush=True)

    def step(self) -> None:
        """Counts a step. After a few of them says how long the rest will take: the first row may be minutes
        away.
        """
        if self.bar is not None:
            self.bar.update(1)
            return
        self.steps += 1
        if self.steps == FIRST_ESTIMATE and self.first_step + self.steps < self.stop:
            self.say(
                f"{self.steps} steps took {duration(time.monotonic() - self.started)}: "
                f"about {duration(self._seconds_left(self.first_step + self.steps))} left"
            )

    def _seconds_left(self, step: int) -> float:
        return (time.monotonic() - self.started) / max(step - self.first_step, 1) * (self.stop - step)

    def row(self, values: dict[str, Any]) -> None:
        """One row of logs.csv, and its lines on the console. `values` may hold any of the columns."""
        if not self.is_main:
            return
        step = values["step"]
        self.unwritten.append([format_value(name, values.get(name)) for name in self.columns])
        self._append()
        for tracker in self.trackers:
            tracker.row({name: values[name] for name in self.columns if values.get(name) is not None})
        self._write_status(step=step)
        if values.get("skipped_steps"):
            self.say(
                f"step {step:,}: {values['skipped_steps']} steps since the last row had no finite gradient"
                " and were skipped"
            )
        if values.get("train_loss") is not None:
            parts = [
                f"step {step:,}/{self.total_steps:,}",
                f"epoch {values['epoch'] + 1}",
                f"loss {values['train_loss']:.4f}",
                f"lr {values['lr']:.2e}",
            ]
            if values.get("samples_per_sec"):
                parts.append(f"{values['samples_per_sec']:,.0f} samples/s")
                if values.get("model_flops_per_sec"):
                    parts.append(flops_in_words(values["model_flops_per_sec"], values.get("mfu")))
                parts.append(f"waiting for data {values['data_share']:.0%}")
            if values.get("peer_share") is not None:
                parts.append(f"for other processes {values['peer_share']:.0%}")
            self.say(" · ".join([*parts, f"{duration(self._seconds_left(step))} left"]))
        if values.get("val_loss") is not None:
            self.say(validation_line(values, self.columns))
        share = values.get("data_share") or 0.0
        self.rows_waiting = self.rows_waiting + 1 if share > WAITING_SHARE else 0
        if self.rows_waiting == WAITING_ROWS and not self.waiting_noted:
            self.waiting_noted = True
            self.say(
                f"Note: {share:.0%} of the time goes into waiting for data: --num-workers"
                f" {max(2, 2 * self.workers)} instead of {self.workers} (per process), or a faster disk for"
                " the data"
            )

    def _append(self) -> None:
        """Rows that cannot be written (no space left, the folder gone) wait for the next one, or for the
        end.
        """
        if self.own is None or not self.unwritten:
            return
        path = self.own.path(LOG)
        try:
            with open(path, "ab") as file:
                start = file.tell()
                try:
                    file.write(csv_lines(self.unwritten if start else [list(self.columns), *self.unwritten]))
                    file.flush()
                except OSError:
                    os.truncate(path, start)
                    raise
            self.unwritten.clear()
        except OSError as error:
            self.say(
                f"WARNING: {path} could not be written: {error.strerror}. Its rows are kept and tried again."
            )

    def _write_status(self, **values: Any) -> None:
        """Brings status.json up to date, as far as it can be written."""
        if self.own is None:
            return
        self.status |= {**values, "updated": time.time()}
        with (
            contextlib.suppress(OSError),
            atomic_write(self.own.path(STATUS), durable=False) as file,
        ):
            file.write(json.dumps(self.status).encode())

    def close(self, state: str = "ended") -> None:
        """state: what became of the run, in a word or two. Once; later calls do nothing."""
        if self.status["state"] != RUNNING:
            return
        self.status["state"] = state
        self._write_status()
        self._append()
        close_trackers(self.trackers, stopped=state == STOPPED)
        if self.bar is not None:
            self.bar.close()


def csv_lines(rows: Iterable[list[str]]) -> bytes:
    """Rows as lines of CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
