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
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from histocc.runtime import entrypoint
from histocc.runtime.device import synchronize
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

    def _work(self, open_library: Callable[[], Library]) -> None:
        try:
            write, close = open_library()
            self.opened.set()
            while (row := self.rows.get()) is not None:
                write(row)
            close()
        except BaseException as error:  # SystemExit, too: libraries end a process that they take for theirs
            text = str(error).strip() or type(error).__name__
            self.error = text.splitlines()[0][:300]
        finally:
            self.opened.set()

    def row(self, values: dict[str, float]) -> None:
        with contextlib.suppress(queue.Full):
            if not self.error:
                self.rows.put_nowait(values)
                return
        self._give_up(self.error or f"{MAX_WAITING_ROWS} rows are waiting for it")

    def close(self, until: float) -> None:
        """Waits for it until time.monotonic() is `until`, and no longer."""
        with contextlib.suppress(queue.Full):
            self.rows.put_nowait(None)
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
    args: TrainConfig,
    folder: str,
    name: str,
    step: int,
    arguments: dict[str, Any],
    stop: Callable[[], bool] = lambda: False,
) -> list[Tracker]:
    """Those that are asked for.

    Args:
        name: what all checkpoints of the run have in common.
        step: from which the run continues, 0 for a new one.
        arguments: of the run, for W&B.
        stop: whether to wait no longer.

    Raises:
        UserError: one cannot be opened at the begin of a run; a run that is resumed continues without it.
    """
    trackers: list[Tracker] = []
    if args.tensorboard:
        trackers.append(Tracker("--tensorboard", lambda: open_tensorboard(folder, step)))
    if args.log_wandb:
        project = args.wandb_project_name or "histocc"
        trackers.append(Tracker("--log-wandb", lambda: open_wandb(folder, name, project, arguments)))
    entrypoint.libraries += [tracker.flag for tracker in trackers]
    until = time.monotonic() + OPEN_SECONDS
    for tracker in trackers:
        while not tracker.opened.wait(0.1) and time.monotonic() < until and not stop():
            pass
    failed = [tracker for tracker in trackers if tracker.error]
    if failed and step == 0:
        close_trackers([tracker for tracker in trackers if not tracker.error], stopped=True)
        offline = "; WANDB_MODE=offline needs no network" if failed[0].flag == "--log-wandb" else ""
        raise UserError(f"{failed[0].flag}: {failed[0].error}{offline}")
    return trackers


def close_trackers(trackers: Iterable[Tracker], stopped: bool = False) -> None:
    """stopped: the run is to end now."""
    until = time.monotonic() + (STOP_SECONDS if stopped else CLOSE_SECONDS)
    for tracker in trackers:
        tracker.close(until)


# ---- --profile N

PHASES = ("asking to stop", "data", "forward", "backward", "optimizer", "log, validation, saving")
OF_PROFILE = ("profile.txt", "trace.json")
WARM_UP = 3  # steps before the first that counts
_active: list[torch.device] = []


@contextlib.contextmanager
def phase(name: str) -> Generator[None]:
    """Marks what happens inside as `name`, one of PHASES. Without a profile it costs nothing; with one it
    waits for the device.
    """
    if not _active:
        yield
        return
    with record_function(name):
        yield
        synchronize(_active[0])


class StepProfiler:
    """Profiles `steps` steps of this process, from the fourth on; `step_done` is to be called after each.

    own: of the run's folder, which gets profile.txt and trace.json; chrome://tracing and Perfetto show the
    latter. say: is told what came out, or that it could not be written.
    """

    def __init__(self, steps: int, own: OwnFiles, device: torch.device, say: Callable[[str], None]):
        self.own, self.device, self.say = own, device, say
        self.profile = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"),
            schedule=schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._write,
        )
        self.profile.start()

    def step_done(self) -> None:
        self.profile.step()
        active = self.profile.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        _active[:] = [self.device] * active

    def close(self) -> None:
        """Ends a profile for which there were not enough steps."""
        self.profile.stop()
        _active.clear()

    def _write(self, _: profile) -> None:
        steps, events = self.profile.step_num - WARM_UP, self.profile.key_averages()
        if steps < 1:
            return
        lines = phase_lines(events, steps)
        kind = "cuda" if self.device.type == "cuda" else "cpu"
        operations = events.table(
            sort_by="self_device_time_total" if kind == "cuda" else "self_cpu_time_total", row_limit=40
        )
        try:
            table, trace = self.own.claim(*OF_PROFILE)
            with atomic_write(table) as file:
                file.write("\n".join([*lines, "", operations]).encode())
            self.profile.export_chrome_trace(f"{trace}.tmp{os.getpid()}")
            os.replace(f"{trace}.tmp{os.getpid()}", trace)
            lines.append(f"Operations: {table}; trace: {trace}")
        except (OSError, RuntimeError) as error:
            lines.append(f"WARNING: {self.own.folder}: the profile could not be written: {error}")
        self.say("\n".join(lines))


def phase_lines(events: Iterable[Any], steps: int) -> list[str]:
    """The time of each phase, out of `key_averages()`. A GPU's timeline repeats the names of the phases:
    those of the CPU, which waits for it, count.
    """
    on_cpu = [event for event in events if event.device_type == DeviceType.CPU]
    seconds = {event.key: event.cpu_time_total / 1e6 / steps for event in on_cpu if event.key in PHASES}
    total = sum(seconds.values())
    return [
        f"Profile of {steps} steps of rank 0, {total:.4f} s each:",
        *(
            f"  {name:26} {seconds.get(name, 0):9.4f} s {seconds.get(name, 0) / total:5.0%}"
            for name in PHASES
        ),
    ]
