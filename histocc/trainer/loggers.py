"""The rows of a run's log for other tools: TensorBoard (`--tensorboard`) and Weights & Biases
(`--log-wandb`), by their own libraries; and, where matplotlib is installed, curves.png after each
validation.

Rank 0 only. Each library works in its own thread with a bounded queue: one that raises, exits or never
comes back costs the run a line of warning and nothing else. A run that is resumed continues the same
curves: TensorBoard hides rows after the step from which it continues, and W&B knows the run by its id,
which all checkpoints of a run have in common. WANDB_MODE=offline writes to the save folder alone, for
`wandb sync`.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from histocc.runtime import console, entrypoint
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles
from histocc.trainer import curves
from histocc.trainer.run_log import LOG, numbers

MOST_WAITING = 1000  # rows in the queue of a logger
PATIENCE_SECONDS = 120.0  # for one call of a library, while the run continues
OPEN_SECONDS = 60.0  # for its first answer, before the first step
CLOSE_SECONDS = 60.0  # for what it still has to do at the end of a run
STOP_SECONDS = 2.0  # the same where the run was stopped
_LOOK_SECONDS = 0.1


def figures_of(values: dict) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if name != "step"}


@dataclass(frozen=True)
class LoggerSettings:
    tensorboard: bool = False
    log_wandb: bool = False
    wandb_project_name: str | None = None


@dataclass(frozen=True)
class LoggedRun:
    """folder: of the run; name: what all its checkpoints have in common; step: from which it continues, 0 for
    a new one; arguments: by name, for W&B.
    """

    folder: str
    name: str
    step: int
    arguments: dict[str, Any]


class TensorBoard:
    """--tensorboard: scalars in the folder tensorboard of the run."""

    name = "--tensorboard"

    def __init__(self, settings: LoggerSettings, run: LoggedRun):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(os.path.join(run.folder, "tensorboard"), purge_step=run.step + 1)

    def row(self, values: dict, more: bool) -> None:
        for column, value in figures_of(values).items():
            self.writer.add_scalar(column, value, values["step"])
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB:
    """--log-wandb."""

    name = "--log-wandb"

    def __init__(self, settings: LoggerSettings, run: LoggedRun):
        import wandb

        self.run = wandb.init(
            project=settings.wandb_project_name or "histocc",
            id=run.name,
            name=os.path.basename(os.path.abspath(run.folder)),
            dir=run.folder,
            resume="allow",
            config=run.arguments,
            reinit="finish_previous",
        )

    def row(self, values: dict, more: bool) -> None:
        self.run.log(figures_of(values), step=values["step"])

    def close(self) -> None:
        self.run.finish()


class Curves:
    """curves.png, after each validation, and at the end where rows came since."""

    name = curves.CURVES

    def __init__(self, own: OwnFiles):
        self.own, self.due, self.drawn = own, False, False

    def row(self, values: dict, more: bool) -> None:
        """more: rows are waiting, after which it would be drawn again."""
        self.due = True
        if values.get("val_loss") is not None:
            self.drawn = True
            if not more:
                self._draw()

    def _draw(self) -> None:
        folder = self.own.folder
        curves.draw(
            {os.path.basename(os.path.abspath(folder)): numbers(os.path.join(folder, LOG))},
            os.path.join(folder, curves.CURVES),
            self.own,
        )
        self.due = False

    def close(self) -> None:
        if self.drawn and self.due:
            self._draw()


class InThread:
    """A logger in its own thread: `make` opens it there. Nothing here raises or waits but `opened`."""

    def __init__(self, name: str, make: Callable[[], TensorBoard | WandB | Curves]):
        self.name, self.make = name, make
        self.queue: queue.Queue[dict | None] = queue.Queue(MOST_WAITING)
        self.is_open = threading.Event()
        self.failed = ""
        self.busy_since = time.monotonic()
        self.given_up = False
        self.thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            logger = self.make()
            console.put_back()
            self.is_open.set()
            while True:
                self.busy_since = None
                values = self.queue.get()
                self.busy_since = time.monotonic()
                if values is None:
                    return logger.close()
                logger.row(values, not self.queue.empty())
                console.put_back()
        except (
            BaseException
        ) as error:  # SystemExit, too: libraries end a process that they take for their own
            self.failed = _words(error)
        finally:
            console.put_back()
            self.is_open.set()
            self.busy_since = None

    def opened(self, stop: Callable[[], bool]) -> str:
        """Waits until it is open, for a while; why it is not, "" where it is, or may still come."""
        until = time.monotonic() + OPEN_SECONDS
        while not self.is_open.wait(_LOOK_SECONDS) and time.monotonic() < until and not stop():
            pass
        return self.failed

    def row(self, values: dict) -> None:
        if self.given_up:
            return
        busy = self.busy_since
        if self.failed:
            self._give_up(self.failed)
        elif busy is not None and time.monotonic() - busy > PATIENCE_SECONDS:
            self._give_up(f"no answer within {time.monotonic() - busy:,.0f} s", hangs=True)
        else:
            try:
                self.queue.put_nowait(values)
            except queue.Full:
                self._give_up(f"{MOST_WAITING:,} rows are waiting for it", hangs=True)

    def close(self, until: float) -> None:
        """Waits for it until time.monotonic() is `until`, and no longer."""
        if self.given_up:
            return
        try:
            self.queue.put_nowait(None)
            self.thread.join(max(0.0, until - time.monotonic()))
        except queue.Full:
            pass
        if self.thread.is_alive():
            self._give_up("it has not finished in time", hangs=True)
        elif self.failed:
            self._give_up(self.failed)

    def _give_up(self, reason: str, hangs: bool = False) -> None:
        self.given_up = True
        if hangs:
            entrypoint.abandoned.append(self.name)
        print(
            f"WARNING: {self.name}: {reason}. The run continues without it; logs.csv has every row.",
            flush=True,
        )


class Loggers:
    """Those that are asked for. own: files of the run, None for no plot; stop: whether to wait no longer.

    Raises UserError where one cannot be opened at the begin of a run; a run that is resumed continues
    without it.
    """

    def __init__(
        self,
        settings: LoggerSettings,
        run: LoggedRun,
        own: OwnFiles | None = None,
        stop: Callable[[], bool] = lambda: False,
    ):
        kinds = [
            kind
            for kind, wanted in ((TensorBoard, settings.tensorboard), (WandB, settings.log_wandb))
            if wanted
        ]
        entrypoint.libraries += [kind.name for kind in kinds]
        self.threads = [InThread(kind.name, lambda kind=kind: kind(settings, run)) for kind in kinds]
        failed = {thread.name: thread.opened(stop) for thread in self.threads}
        for flag, reason in failed.items():
            if reason and run.step == 0:
                for thread in self.threads:  # the error says it
                    thread.given_up = bool(thread.failed)
                self.close(stopped=True)
                raise UserError(
                    f"{flag}: {reason}"
                    + ("; WANDB_MODE=offline needs no network" if flag == WandB.name else "")
                )
        if own is not None and curves.available():
            self.threads.append(InThread(Curves.name, lambda: Curves(own)))

    def row(self, values: dict) -> None:
        """values: what a row of the log holds."""
        for thread in self.threads:
            thread.row(dict(values))

    def close(self, stopped: bool = False) -> None:
        """stopped: the run is to end now."""
        until = time.monotonic() + (STOP_SECONDS if stopped else CLOSE_SECONDS)
        for thread in self.threads:
            thread.close(until)


def _words(error: BaseException) -> str:
    """The first line of what a library says, or the name of its error."""
    try:
        text = str(error).strip()
    except Exception:  # its own words fail
        text = ""
    return (text.splitlines() or [type(error).__name__])[0][:300]
