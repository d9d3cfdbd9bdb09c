"""The rows of a run's log for TensorBoard (`--tensorboard`) and Weights & Biases (`--log-wandb`), and a
profile of its steps (`--profile`). Rank 0 only. A resumed run continues the same curves.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles, atomic_write
from histocc.runtime.frame import STOP_SECONDS, libraries
from histocc.runtime.signals import stop_asked
from histocc.trainer.config import RunFlags

Library = tuple[Callable[[dict[str, float]], object], Callable[[], object]]  # write a row, close
MAX_SECONDS = 60.0  # limit of a call of a library, which may wait for its server
OF_PROFILE = ("profile.txt", "trace.json")


def open_tensorboard(save_path: str, step: int) -> Library:
    from torch.utils.tensorboard import SummaryWriter

    # rows after the step resumed from are hidden
    writer = SummaryWriter(os.path.join(save_path, "tensorboard"), purge_step=step + 1)

    def write(row: dict[str, float]) -> None:
        for name in row.keys() - {"step"}:
            writer.add_scalar(name, row[name], row["step"])
        writer.flush()

    return write, writer.close


def open_wandb(flags: RunFlags, values: dict[str, Any], name: str) -> Library:
    """Open W&B. values: all flags. name: name of the run, the same in all its checkpoints."""
    import wandb

    run = wandb.init(
        project=flags.wandb_project_name or "histocc",
        id=name,
        name=os.path.basename(os.path.abspath(flags.save_path)),
        dir=flags.save_path,
        resume="allow",
        config=values,
        reinit="finish_previous",
        settings=wandb.Settings(console="off"),
    )

    def write(row: dict[str, float]) -> None:
        run.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))

    return write, run.finish


class Tracker:
    """A library that receives rows of the log until it raises, exits or hangs. Then a warning is printed."""

    def __init__(self, flag: str, open_library: Callable[[], Library]):
        self.flag, self.error = flag, ""
        self.write, self.finish = self._try(open_library) or (lambda row: None, lambda: None)
        libraries.append(flag)

    def _try(self, work: Callable[..., Any], *given: Any) -> Any:
        returned: list[Any] = []

        def call() -> None:
            try:
                returned.append(work(*given))
            except (Exception, SystemExit) as error:
                self.error = (str(error).strip() or type(error).__name__).splitlines()[0][:300]

        if self.error:
            return None
        thread = threading.Thread(target=call, name=self.flag, daemon=True)
        thread.start()
        until = time.monotonic() + MAX_SECONDS
        thread.join(min(STOP_SECONDS, MAX_SECONDS))  # this long even after a signal
        while thread.is_alive() and time.monotonic() < until and not stop_asked():
            thread.join(0.05)
        if not returned:
            self.error = self.error or "no answer" + f" within {MAX_SECONDS:g} s" * (not stop_asked())
            print(f"WARNING: {self.flag}: {self.error}; logs.csv has every row", flush=True)
        return returned[0] if returned else None

    def row(self, values: dict[str, float]) -> None:
        self._try(self.write, values)

    def close(self) -> None:
        self._try(self.finish)


def open_trackers(flags: RunFlags, values: dict[str, Any], name: str, step: int) -> list[Tracker]:
    """Open the trackers that flags ask for. values: all flags. If one fails, raise UserError at step 0. A
    resumed run continues without it.
    """
    trackers: list[Tracker] = []
    if flags.tensorboard:
        trackers.append(Tracker("--tensorboard", lambda: open_tensorboard(flags.save_path, step)))
    if flags.log_wandb:
        trackers.append(Tracker("--log-wandb", lambda: open_wandb(flags, values, name)))
    for tracker in trackers:
        if tracker.error and step == 0:
            raise UserError(f"{tracker.flag} cannot be opened: {tracker.error}")
    return trackers


@contextlib.contextmanager
def profiled(
    steps: int | None, files: OwnFiles, device: torch.device, say: Callable[[str], None]
) -> Generator[Callable[[], object]]:
    """Profile `steps` steps, if any, from the fourth on. Yield the function to call after each step."""
    if not steps:
        yield lambda: None
        return

    def write(profiler: profile) -> None:
        table, trace = files.claim(*OF_PROFILE)
        order = f"self_{'device' if device.type == 'cuda' else 'cpu'}_time_total"
        with atomic_write(table) as file:
            file.write(profiler.key_averages().table(sort_by=order, row_limit=40).encode())
        profiler.export_chrome_trace(trace)
        say(f"Profile of rank 0: {table}; trace: {trace}")

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints lines to stderr
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    of_steps = schedule(wait=2, warmup=1, active=steps, repeat=1)
    with profile(activities=activities, schedule=of_steps, on_trace_ready=write) as profiler:
        yield profiler.step
