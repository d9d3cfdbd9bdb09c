"""What a run says while it goes: one console line per log point, `logs.csv`, and a progress bar where tqdm
is.
"""

import contextlib
import csv
import errno
import io
import json
import os
import time
from typing import Any

from histocc.runtime.console import duration
from histocc.runtime.files import OwnFiles, atomic_write, kind_of
from histocc.runtime.progress import Stage
from histocc.trainer.schedule import Steps

LOG, STATUS, RUNNING, STOPPED = "logs.csv", "status.json", "running", "stopped"
LARGEST = 1 << 30  # bytes of a log
MOST = 2.0**53  # from here on floats do not count one by one
FLOP_UNITS = ("", "k", "M", "G", "T", "P", "E")
FIRST_ESTIMATE = 5  # steps after which the time is estimated for the first time
# Share of the time that goes into waiting for data, and in how many rows running, before it is remarked on.
WAITING_SHARE, WAITING_ROWS = 0.15, 3
# significant digits; losses have 12
_DIGITS = {
    "grad_norm": 6,
    "lr": 6,
    "mfu": 6,
    "model_flops_per_sec": 6,
    "samples_per_sec": 6,
    "seconds_data": 6,
}


SUMMED_COLUMNS = ("skipped_steps",)  # sums that the loop adds up, see `State.add`
# of the trainer itself
OWN_COLUMNS = (
    "step",
    "epoch",
    "samples",
    "grad_norm",
    "lr",
    "samples_per_sec",
    "seconds_data",
    *SUMMED_COLUMNS,
    "model_flops_per_sec",
    "mfu",
)


def log_columns(task_columns: tuple[str, ...]) -> tuple[str, ...]:
    """Columns of logs.csv, in order, for a task with these columns; see `histocc.trainer.task`."""
    losses = [name for name in task_columns if name.startswith("loss")]
    return (
        *("step", "epoch", "samples"),
        *(f"train_{name}" for name in losses),
        *("grad_norm", "lr", "samples_per_sec", "seconds_data"),
        *(f"val_{name}" for name in losses),
        *(name for name in task_columns if name not in losses),
        *(*SUMMED_COLUMNS, "model_flops_per_sec", "mfu"),
    )


def format_value(name: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.{_DIGITS.get(name, 12)}g}" if isinstance(value, float) else str(value)


def read_rows(path: str) -> tuple[list[dict[str, str]], int]:
    """(whole rows of a logs.csv, how many lines are damaged): the last one may be half-written. Raises
    OSError for what is no log.
    """
    if kind_of(path) not in (None, "a file") or os.path.getsize(path) > LARGEST:
        raise OSError(errno.EINVAL, "is no file of the size of a log", path)
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        lines = list(file)
    whole = [line for line in lines if line.endswith("\n")]
    found = list(csv.DictReader(line.replace("\0", "") for line in whole))
    good = [
        row
        for row in found
        if (row.get("step") or "").isdecimal() and len(row["step"]) < 16 and None not in row.values()
    ]
    return good, len(lines) - len(whole) + len(found) - len(good)


def numbers(path: str) -> list[dict[str, float | None]]:
    """Rows of a logs.csv, None where a cell is empty; rows that are damaged or half-written, or have no
    countable place, are left out.
    """
    found = []
    with contextlib.suppress(OSError, csv.Error):
        for row in read_rows(path)[0]:
            with contextlib.suppress(ValueError):
                cells = {name: float(cell) if cell else None for name, cell in row.items() if name}
                found.append({**dict.fromkeys(log_columns(("loss",))), **cells})
    places = ("step", "epoch", "samples")
    return [row for row in found if all(row[name] is None or 0 <= row[name] < MOST for name in places)]


def flops_in_words(rate: float, share: float | None) -> str:
    """As "41.3 GFLOP/s (23% of matmul)": floating point operations per second, and their share of the rate
    of matrix products where that was measured.
    """
    at = 0
    while rate >= 999.5 and at < len(FLOP_UNITS) - 1:
        rate, at = rate / 1000, at + 1
    text = f"{rate:.3g} {FLOP_UNITS[at]}FLOP/s"
    return text if share is None else f"{text} ({share:.0%} of matmul)"


def validation_line(values: dict[str, Any], columns: tuple[str, ...]) -> str:
    """One line on a validation; accuracies (…_acc) as percentages."""
    parts = [f"validation at step {values['step']:,}: loss {values['val_loss']:.4f}"]
    figures = [name for name in columns[columns.index("val_loss") :] if name not in OWN_COLUMNS]
    for name in figures:
        if values.get(name) is not None and not name.startswith("val_loss"):
            parts.append(f"{name} {values[name]:{'.1%' if name.endswith('_acc') else '.4g'}}")
    if values.get("seconds_val") is not None:
        parts.append(
            f"took {duration(values['seconds_val'])}" if values["seconds_val"] >= 1 else "took under 1s"
        )
    return " · ".join(parts)


class RunLog:
    """The log of one run; every method may be called on every rank and acts on rank 0 alone.

    Args:
        folder: where `logs.csv` lies, and status.json, for whoever watches the run: its steps, its state, the
            last warning; a path, all of whose names are taken for the run's own, or the run's files in it.
            None writes no file.
        steps: a resumed run's `start` drops rows after it, or from it on with `again`: its row is still to be
            written.
        columns: of logs.csv; see `log_columns`.
        bar: whether to show a progress bar where `runtime.progress` shows them.
        workers: loading processes per process, for the note on waiting for data.
        others: has the methods row and close, too, and is called on rank 0 (`histocc.trainer.loggers`).
    """

    def __init__(
        self,
        folder: str | OwnFiles | None,
        steps: Steps,
        columns: tuple[str, ...],
        is_main: bool = True,
        *,
        bar: bool = True,
        again: bool = False,
        workers: int = 0,
        others: Any = None,
    ):
        self.path = self.status_path = ""
        self.own: OwnFiles
        if folder and is_main:
            self.own = folder if isinstance(folder, OwnFiles) else OwnFiles(folder, overwrite=True)
            self.path, self.status_path = self.own.path(LOG), self.own.path(STATUS)
        self.is_main, self.columns = is_main, columns
        self.total_steps, self.first_step, self.stop = steps.total or 0, steps.start, steps.last or 0
        self.started, self.steps = time.monotonic(), 0
        self.others = others if is_main else None
        self.bar, self.waiting = None, []
        self.workers, self.rows_waiting, self.waiting_noted = workers, 0, False
        self.status = {
            "state": RUNNING,
            "step": self.first_step,
            "first_step": self.first_step,
            "stop_step": self.stop,
            "total_steps": self.total_steps,
            "warning": "",
        }
        if self.path:
            self._start_file(self.first_step - again)
            self._tell()
        if is_main and bar:  # without a terminal the rows of the log say how far it is
            self.bar = Stage("training", self.stop, "steps", self.first_step, lines=False).bar

    def _start_file(self, step: int) -> None:
        rows = []
        if step and os.path.isfile(self.path):
            found, damaged = read_rows(self.path)
            rows = [row for row in found if int(row["step"]) <= step]
            if damaged:
                print(
                    f"Note: {damaged} damaged line{'s' * (damaged > 1)} of {self.path} left out", flush=True
                )
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self.own.claim(LOG, STATUS)
        with atomic_write(self.path, durable=False) as file:
            file.write(text.getvalue().encode())

    def say(self, *words: object) -> None:
        if not self.is_main:
            return
        text = " ".join(map(str, words))
        if text.startswith(("WARNING", "Note")):
            self._tell(warning=f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
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
        if self.path:
            self._append([format_value(name, values.get(name)) for name in self.columns])
        if self.others is not None:
            self.others.row({name: values[name] for name in self.columns if values.get(name) is not None})
        if values.get("skipped_steps"):
            self.say(
                f"step {values['step']:,}: {values['skipped_steps']} steps since the last row had no finite"
                " gradient and were skipped"
            )
        self._tell(step=values["step"])
        if values.get("train_loss") is not None:
            self.say(self._train_line(values))
        if values.get("val_loss") is not None:
            self.say(validation_line(values, self.columns))
        self._note_waiting(values.get("data_share") or 0.0)

    def _note_waiting(self, share: float) -> None:
        """Says once how to wait less for data."""
        self.rows_waiting = self.rows_waiting + 1 if share > WAITING_SHARE else 0
        if self.rows_waiting < WAITING_ROWS or self.waiting_noted:
            return
        self.waiting_noted = True
        self.say(
            f"Note: {share:.0%} of the time goes into waiting for data: --num-workers"
            f" {max(2, 2 * self.workers)} instead of {self.workers} (per process), or a faster disk for"
            " the data"
        )

    def _append(self, *rows: list[str]) -> None:
        """Rows that cannot be written (no space left, the folder gone) wait for the next one, or for the
        end.
        """
        self.waiting += rows
        try:
            with open(self.path, "a", encoding="utf-8", newline="") as file:
                start = file.tell()
                try:
                    csv.writer(file, lineterminator="\n").writerows(
                        self.waiting if start else [self.columns, *self.waiting]
                    )
                    file.flush()
                except OSError:
                    os.truncate(self.path, start)
                    raise
            self.waiting.clear()
        except OSError as error:
            self.say(
                f"WARNING: {self.path} could not be written: {error.strerror}. Its rows are kept and tried"
                " again."
            )

    def _train_line(self, values: dict[str, Any]) -> str:
        step = values["step"]
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
        return " · ".join([*parts, f"{duration(self._seconds_left(step))} left"])

    def _tell(self, **values: Any) -> None:
        """Brings status.json up to date, as far as it can be written."""
        if not self.path:
            return
        self.status |= {**values, "updated": time.time()}
        with contextlib.suppress(OSError), atomic_write(self.status_path, durable=False) as file:
            file.write(json.dumps(self.status).encode())

    def close(self, state: str = "ended") -> None:
        """state: what became of the run, in a word or two. Once; later calls do nothing."""
        if self.status["state"] != RUNNING:
            return
        self.status["state"] = state
        self._tell()
        if self.waiting:
            self._append()
        if self.others is not None:
            self.others.close(stopped=state == STOPPED)
        if self.bar is not None:
            self.bar.close()
