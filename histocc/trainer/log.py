"""What a run says: the banner before it starts; then a console line per row of the log, `logs.csv`,
`status.json`, and a progress bar on a terminal.
"""

import contextlib
import csv
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles, atomic_write, opened
from histocc.runtime.log import Stage, duration
from histocc.runtime.world import World
from histocc.trainer.batches import BatchPlan
from histocc.trainer.config import TrainConfig
from histocc.trainer.schedule import Schedule, scaled_learning_rate
from histocc.trainer.trackers import Tracker, close_trackers

LOG, STATUS, RUNNING, STOPPED = "logs.csv", "status.json", "running", "stopped"
MAX_COUNT = 2.0**53  # from here on floats do not count one by one
FIRST_ESTIMATE = 5  # steps after which the time is estimated for the first time
# Share of the time that goes into waiting for data, and in how many rows in a row, before it is remarked on.
WAITING_SHARE, WAITING_ROWS = 0.15, 3

# A new column of logs.csv that is summed over optimizer steps is one line here: what a step adds to it, a 0-d
# tensor that is the same on all ranks, out of its `histocc.trainer.loop.StepResult`.
SUMMED_COLUMNS: dict[str, Callable[[Any], Tensor]] = {
    "skipped_steps": lambda result: result.bad,
}
COUNTS = ("step", "epoch", "samples")
MEASURED = ("grad_norm", "lr", "samples_per_sec", "seconds_data", "model_flops_per_sec", "mfu")  # 6 digits
OWN_COLUMNS = (*COUNTS, *MEASURED, *SUMMED_COLUMNS)  # of the trainer itself


def log_columns(task_columns: Iterable[str]) -> tuple[str, ...]:
    """Columns of logs.csv, in order, for a task with these columns; see `histocc.trainer.loop`."""
    task_columns = tuple(task_columns)
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


# ---- logs.csv


def format_value(name: str, value: Any) -> str:
    """Losses have 12 significant digits."""
    if value is None:
        return ""
    return f"{value:.{6 if name in MEASURED else 12}g}" if isinstance(value, float) else str(value)


def csv_lines(rows: Iterable[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def read_rows(path: str) -> tuple[list[dict[str, str]], int]:
    """Complete rows of a logs.csv, and how many lines are damaged, or half-written. Raises UserError."""
    with opened(path) as file:
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
    rows = []
    with contextlib.suppress(csv.Error):  # a cell without an end
        for row in csv.DictReader(line.replace("\0", "") for line in lines if line.endswith("\n")):
            with contextlib.suppress(ValueError, TypeError, KeyError):  # more cells, fewer, or no numbers
                values = {name: number(cell) for name, cell in row.items()}
                counts = [float(row["step"]), *(values.get(name) or 0 for name in COUNTS)]
                if all(0 <= count < MAX_COUNT for count in counts):
                    rows.append(row)
    return rows, max(0, len(lines) - 1 - len(rows))


def number(cell: str) -> float | None:
    return None if cell == "" else float(cell)


def read_numbers(path: str) -> list[dict[str, float | None]]:
    """Rows of a logs.csv, None for an empty cell; damaged ones are left out. [] if there is no such file."""
    empty = dict.fromkeys(log_columns(("loss",)))
    with contextlib.suppress(UserError):
        return [empty | {name: number(cell) for name, cell in row.items()} for row in read_rows(path)[0]]
    return []


# ---- lines


def flops_in_words(rate: float, share: float | None) -> str:
    """As "41.3 GFLOP/s (23% of matmul)": floating point operations per second, and their share of the rate
    of matrix products if that was measured.
    """
    units = list(" kMGTPE")
    while rate >= 999.5 and len(units) > 1:
        rate, units = rate / 1000, units[1:]
    text = f"{rate:.3g} {units[0].strip()}FLOP/s"
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
        columns: of logs.csv; see `log_columns`.
        total_steps: of the run.
        start: steps done; rows after it are dropped, or from it on with `again`: its row is still to be
            written.
        stop_step: where this start ends.
        workers: loading processes per process, for the note on waiting for data.
        trackers: get each row, too.
    """

    def __init__(
        self,
        own: OwnFiles | None,
        columns: tuple[str, ...],
        total_steps: int = 0,
        start: int = 0,
        stop_step: int | None = None,
        *,
        is_main: bool = True,
        again: bool = False,
        workers: int = 0,
        trackers: Iterable[Tracker] = (),
    ):
        self.own, self.columns, self.is_main = own if is_main else None, columns, is_main
        self.total_steps, self.first_step = total_steps, start
        self.stop_step = total_steps if stop_step is None else min(stop_step, total_steps or stop_step)
        self.started, self.steps = time.monotonic(), 0
        self.workers, self.rows_waiting = workers, 0
        self.trackers = list(trackers)
        self.unwritten: list[list[str]] = []
        self.status = {
            "state": RUNNING,
            "step": start,
            "first_step": start,
            "stop_step": self.stop_step,
            "total_steps": total_steps,
            "warning": "",
        }
        if self.own is not None:
            path, _ = self.own.claim(LOG, STATUS)
            rows, last = [], start - again
            if last and os.path.isfile(path):
                rows, damaged = read_rows(path)
                if damaged:
                    print(f"Note: {damaged} damaged line{'s' * (damaged > 1)} of {path} left out", flush=True)
            kept = [[row.get(name, "") for name in columns] for row in rows if float(row["step"]) <= last]
            with atomic_write(path, durable=False) as file:
                file.write(csv_lines([list(columns), *kept]))
            self._write_status()
        # without a terminal the rows of the log say how far it is
        self.bar = Stage("training", self.stop_step, "steps", start, lines=False).bar if is_main else None

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
        self.steps += 1
        if self.bar is not None:
            self.bar.update(1)
        elif self.steps == FIRST_ESTIMATE and self.first_step + self.steps < self.stop_step:
            self.say(
                f"{self.steps} steps took {duration(time.monotonic() - self.started)}: "
                f"about {duration(self._seconds_left(self.first_step + self.steps))} left"
            )

    def _seconds_left(self, step: int) -> float:
        return (time.monotonic() - self.started) / max(step - self.first_step, 1) * (self.stop_step - step)

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
            skipped = f"{values['skipped_steps']:.0f} steps since the last row"
            self.say(f"step {step:,}: {skipped} had no finite gradient and were skipped")
        if values.get("train_loss") is not None:
            parts = [
                f"step {step:,}/{self.total_steps:,}",
                f"epoch {values['epoch'] + 1}",
                f"loss {values['train_loss']:.4f}",
                f"lr {values['lr']:.2e}",
                f"{values['samples_per_sec']:,.0f} samples/s",
            ]
            if values.get("model_flops_per_sec"):
                parts.append(flops_in_words(values["model_flops_per_sec"], values.get("mfu")))
            parts += [
                f"waiting for data {values['data_share']:.0%}",
                f"{duration(self._seconds_left(step))} left",
            ]
            self.say(" · ".join(parts))
        if values.get("val_loss") is not None:
            self.say(validation_line(values, self.columns))
        share = values.get("data_share") or 0.0
        if self.rows_waiting < WAITING_ROWS:  # said once
            self.rows_waiting = self.rows_waiting + 1 if share > WAITING_SHARE else 0
            if self.rows_waiting == WAITING_ROWS:
                self.say(
                    f"Note: {share:.0%} of the time goes into waiting for data: --num-workers"
                    f" {max(2, 2 * self.workers)} instead of {self.workers} (per process), or a faster disk"
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
            self.say(f"WARNING: {path} could not be written: {error.strerror}. Its rows are kept for later.")

    def _write_status(self, **values: Any) -> None:
        """Brings status.json up to date, as far as it can be written."""
        self.status |= {**values, "updated": time.time()}
        with contextlib.suppress(OSError):
            if self.own is not None:
                with atomic_write(self.own.path(STATUS), durable=False) as file:
                    file.write(json.dumps(self.status).encode())

    def close(self, state: str = "ended", step: int | None = None) -> None:
        """Once; later calls do nothing.

        Args:
            state: what became of the run, in a word or two.
            step: optimizer steps done; None: as many as the last row says.
        """
        if self.status["state"] != RUNNING:
            return
        self._write_status(state=state, step=self.status["step"] if step is None else step)
        self._append()
        close_trackers(self.trackers, stopped=state == STOPPED)
        if self.bar is not None:
            self.bar.close()


# ---- before the start

PARALLEL = {
    "ddp": "DDP (each process holds the whole model)",
    "fsdp": "FSDP (each process holds a share of weights, gradients and optimizer state)",
}


def banner(
    args: TrainConfig,
    world: World,
    about: Iterable[str],
    about_rate: str,
    plan: BatchPlan,
    schedule: Schedule,
    precision: str,
) -> str:
    """What is about to run, with the labels that users of the guides look for.

    Args:
        about: lines on data and model.
        about_rate: on learning rates other than that of the schedule.
        precision: its name.
    """
    kind, none = world.device.type, "none (one process)"
    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    name = f" ({torch.cuda.get_device_name(world.device)})" if gpus else ""
    environment = "SINGLE" if world.size == 1 else "MULTI_GPU" if gpus else "MULTI_CPU"
    lines = ["=" * 72]
    if kind == "cpu":
        why = "torch sees none; nvidia-smi, CUDA_VISIBLE_DEVICES and python -m histocc.doctor tell more"
        if args.device == "cpu":
            why = "--device cpu"
        elif torch.version.cuda is None:
            why = "this torch is made for CPUs"
        lines.append(f"TRAINING ON CPUs, NO GPU IS USED: {why}")
    lines += [
        f"Distributed environment: {environment}",
        f"Number of processes: {world.size}",
        f"Number of GPUs: {world.size if gpus else 0}",
        f"Nodes: {world.nodes}",
        f"Backend: {world.backend or none}",
        f"Parallel: {PARALLEL[args.parallel] if world.backend else none}",
        f"Available GPUs: {gpus}{name}",
        f"Threads per process: {torch.get_num_threads()}",
    ]
    lines += about

    # The batch arithmetic.
    accumulation, total, at_once = plan.accumulation(0), plan.global_batch_size, args.samples_at_once
    shares = f"{at_once} × {devices(world)} × {accumulation} accumulation step{'s' * (accumulation > 1)}"
    exact = total == at_once * world.size * accumulation
    shares = (
        f"{shares} = Total batch size: {total}" if exact else f"at most {shares}; Total batch size: {total}"
    )
    lines.append(f"Batch size per {kind_of(world)}: {shares}")
    if plan.micro_batches(0) > accumulation:
        lines.append(f"Micro-batches of similar length: {plan.micro_batches(0)} per step, for less padding")
    ends = f"; stops at step {schedule.stop:,}, --max-steps" if schedule.stop < schedule.total else ""

    # The learning rate, and how it came from the one that was asked for.
    rate = args.learning_rate or 0.0
    scaling = {
        "none": "not scaled",
        "linear": f"{rate:g} × {world.size} processes, linear scaling",
        "sqrt": f"{rate:g} × √{world.size} processes, square-root scaling",
    }[args.lr_scaling]
    if not math.isclose(schedule.rate, scaled_learning_rate(rate, args.lr_scaling, world.size)):
        scaling = "as at the first start of the run"
    warmup = f"warm-up over {schedule.warmup:,} step{'s' * (schedule.warmup != 1)}"
    lines += [
        f"Steps per epoch: {plan.steps_per_epoch:,}",
        f"Epochs: {args.num_epochs} ({schedule.total:,} steps{ends})",
        f"Learning rate: {schedule.rate:g} ({scaling}; {warmup}){about_rate}",
        f"Precision: {precision}",
        *([f"Configuration: {args.config}"] if args.config else []),
        f"Save directory: {args.save_path}",
        "=" * 72,
    ]
    if gpus > world.local_size:
        lines.append(
            f"Note: {gpus} GPUs are here and {world.local_size} used: torchrun --nproc_per_node={gpus} …"
            " --distributed uses all"
        )
    if plan.rows < total:
        lines.append(
            f"Note: a step takes all {plan.rows:,} rows, fewer than the total batch of {total:,}: a smaller"
            " --batch-size learns more often"
        )
    return "\n".join(lines)


def kind_of(world: World) -> str:
    return {"cuda": "GPU", "cpu": "CPU process"}.get(world.device.type, f"{world.device.type} process")


def devices(world: World) -> str:
    plural = "s" if world.device.type == "cuda" else "es"
    return f"{world.size} {kind_of(world)}{plural if world.size > 1 else ''}"


def start_lines(epochs: int, world: World, resumed: dict[str, Any] | None, plan: BatchPlan) -> str:
    """resumed: what the run continues from, or None."""
    name, lines = f"{epochs} epoch{'s' * (epochs > 1)}", []
    if resumed:
        step, before = resumed["step"], resumed["args"]["num_epochs"]
        epoch, batch = divmod(step, plan.steps_per_epoch)
        more = f"; {epochs} epochs instead of {before}, with the longer schedule" if epochs > before else ""
        if resumed["position"].get("unfinished"):
            more += "; first the validation that was interrupted"
        lines.append(f"Resuming from step {step:,} (epoch {epoch + 1}, batch {batch:,}){more}")
    verb = "Continuing the training of" if resumed else "Starting training for"
    return "\n".join([*lines, f"{verb} {name}", f"Training on {devices(world)}"])
