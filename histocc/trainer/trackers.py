"""The rows of a run's log for TensorBoard (`--tensorboard`) and Weights & Biases (`--log-wandb`), and where
the time of its steps goes (`--profile`). Rank 0 only.

Each library works in its own thread with a bounded queue: one that raises, exits or never comes back costs
the run a line of warning and nothing else. A run that is resumed continues the same curves: TensorBoard hides
rows after the step from which it continues, and W&B knows the run by its id, which all checkpoints of a run
have in common. WANDB_MODE=offline writes to the save folder alone, for `wandb sync`.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from histocc.runtime import entrypoint
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles, atomic_write
from histocc.trainer.config import TrainConfig

MAX_WAITING_ROWS = 200  # of a library that does not come back
OPEN_SECONDS, CLOSE_SECONDS, STOP_SECONDS = 60.0, 60.0, 2.0  # the last if the run was stopped

Library = tuple[Callable[[dict[str, float]], object], Callable[[], object]]  # write a row, close


def open_tensorboard(folder: str, step: int) -> Library:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(os.path.join(folder, "tensorboard"), purge_step=step + 1)

    def write(row: dict[str, float]) -> None:
        for name, value in row.items():
            if name != "step":
                writer.add_scalar(name, value, row["step"])
        writer.flush()

    return write, writer.close


def open_wandb(folder: str, name: str, project: str, arguments: dict[str, Any]) -> Library:
    import wandb

    run = wandb.init(
        project=project,
        id=name,
        name=os.path.basename(os.path.abspath(folder)),
        dir=folder,
        resume="allow",
        config=arguments,
        reinit="finish_previous",
        settings=wandb.Settings(console="off"),
    )

    def write(row: dict[str, float]) -> None:
        run.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))

    return write, run.finish


class Tracker:
    """A library in its own thread, which opens it. Nothing here raises, and nothing waits but `close`."""

    def __init__(self, flag: str, open_library: Callable[[], Library]):
        self.flag, self.error, self.given_up = flag, "", False
        self.rows: queue.Queue[dict[str, float] | None] = queue.Queue(MAX_WAITING_ROWS)
        self.opened = threading.Event()
        self.thread = threading.Thread(target=self._work, args=(open_library,), name=flag, daemon=True)
        self.thread.start()
        entrypoint.libraries.append(flag)

    def _work(self, open_library: Callable[[], Library]) -> None:
        try:
            write, close = open_library()
            self.opened.set()
            while (row := self.rows.get()) is not None:
                write(row)
            close()
        except BaseException as error:  # SystemExit, too: libraries end a process that they take for theirs
            self.error = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        finally:
            self.opened.set()

    def row(self, values: dict[str, float] | None) -> None:
        """None: there are no more."""
        with contextlib.suppress(queue.Full):
            if not self.error:
                return self.rows.put_nowait(values)
        self._give_up(self.error or f"{MAX_WAITING_ROWS} rows are waiting for it")

    def close(self, until: float) -> None:
        """Waits for it until time.monotonic() is `until`, and no longer."""
        self.row(None)
        self.thread.join(max(0.0, until - time.monotonic()))
        if self.error or self.thread.is_alive():
            self._give_up(self.error or "it has not finished in time")

    def _give_up(self, reason: str) -> None:
        if not self.given_up:
            print(
                f"WARNING: {self.flag}: {reason}. The run continues without it; logs.csv has every row.",
                flush=True,
            )
        self.given_up = True


def open_trackers(
    args: TrainConfig, name: str, step: int, stop: Callable[[], bool] = lambda: False
) -> list[Tracker]:
    """Those that are asked for.

    Args:
        name: what all checkpoints of the run have in common.
        step: from which the run continues, 0 for a new one.
        stop: whether to wait no longer.

    Raises:
        UserError: one cannot be opened at the begin of a run; a run that is resumed continues without it.
    """
    folder, trackers = args.save_path, []
    if args.tensorboard:
        trackers.append(Tracker("--tensorboard", lambda: open_tensorboard(folder, step)))
    if args.log_wandb:
        project, values = args.wandb_project_name or "histocc", args.values()
        trackers.append(Tracker("--log-wandb", lambda: open_wandb(folder, name, project, values)))
    until = time.monotonic() + OPEN_SECONDS
    for tracker in trackers:
        while not tracker.opened.wait(0.1) and time.monotonic() < until and not stop():
            pass
    if step == 0 and (failed := next((tracker for tracker in trackers if tracker.error), None)):
        close_trackers([tracker for tracker in trackers if not tracker.error], stopped=True)
        offline = "; WANDB_MODE=offline needs no network" if failed.flag == "--log-wandb" else ""
        raise UserError(f"{failed.flag}: {failed.error}{offline}")
    return trackers


def close_trackers(trackers: Iterable[Tracker], stopped: bool = False) -> None:
    """stopped: the run is to end now."""
    until = time.monotonic() + (STOP_SECONDS if stopped else CLOSE_SECONDS)
    for tracker in trackers:
        tracker.close(until)


# ---- --profile N

OF_PROFILE = ("profile.txt", "trace.json")


@contextlib.contextmanager
def profiled(
    steps: int | None, own: OwnFiles, device: torch.device, say: Callable[[str], None]
) -> Generator[Callable[[], object]]:
    """Profiles `steps` steps of this process, from the fourth on; gives what is to be called after each.

    Args:
        steps: None for no profile.
        own: files of the run, which get profile.txt and trace.json; chrome://tracing shows the latter.
        say: is told where they are, or that they could not be written.
    """
    if not steps:
        yield lambda: None
        return

    def write(profiler: profile) -> None:
        order = f"self_{'device' if device.type == 'cuda' else 'cpu'}_time_total"
        try:
            table, trace = own.claim(*OF_PROFILE)
            with atomic_write(table) as file:
                file.write(profiler.key_averages().table(sort_by=order, row_limit=40).encode())
            profiler.export_chrome_trace(f"{trace}.tmp{os.getpid()}")
            os.replace(f"{trace}.tmp{os.getpid()}", trace)
            say(f"Profile of rank 0: {table}; trace: {trace}")
        except (OSError, RuntimeError) as error:
            say(f"WARNING: {own.folder}: the profile could not be written: {error}")

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    of_steps = schedule(wait=2, warmup=1, active=steps, repeat=1)
    with profile(activities=activities, schedule=of_steps, on_trace_ready=write) as profiler:
        yield profiler.step
