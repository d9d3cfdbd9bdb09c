"""Where the time of a step goes: `--profile N`."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable
from typing import Any, BinaryIO

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from histocc.runtime.device import synchronize
from histocc.runtime.files import OwnFiles, atomic_write

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
        self.own, self.device, self.say, self.steps = own, device, say, 0
        self.profile = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"),
            schedule=schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._finish,
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

    def _write_trace(self, file: BinaryIO) -> None:
        with tempfile.TemporaryDirectory() as folder:  # torch writes to a name
            path = os.path.join(folder, OF_PROFILE[1])
            self.profile.export_chrome_trace(path)
            with open(path, "rb") as written:
                shutil.copyfileobj(written, file)

    def _finish(self, _: profile) -> None:
        self.steps = self.profile.step_num - WARM_UP
        if self.steps < 1:
            return
        events = self.profile.key_averages()
        lines = self._phases(events)
        operations = events.table(
            sort_by="self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total",
            row_limit=40,
        )
        try:
            text = "\n".join(lines) + "\n\n" + operations
            table, trace = self.own.claim(*OF_PROFILE)
            with atomic_write(table) as file:
                file.write(text.encode())
            with atomic_write(trace) as file:
                self._write_trace(file)
        except (OSError, RuntimeError) as error:
            self.say(
                "\n".join([*lines, f"WARNING: {self.own.folder}: the profile could not be written: {error}"])
            )
            return
        self.say("\n".join([*lines, f"Operations: {table}; trace: {trace}"]))

    def _phases(self, events: Iterable[Any]) -> list[str]:
        """The table, out of `key_averages()`. A GPU's timeline repeats the names of the phases: those of the
        CPU, which waits for it, count.
        """
        on_cpu = [event for event in events if event.device_type == DeviceType.CPU]
        seconds = {event.key: event.cpu_time_total / 1e6 for event in on_cpu}
        whole = sum(seconds.get(name, 0.0) for name in PHASES)
        lines = [f"Profile of {self.steps} steps of rank 0, {whole / self.steps:.4f} s each:"]
        lines += [
            f"  {name:26} {seconds.get(name, 0.0) / self.steps:9.4f} s {seconds.get(name, 0.0) / whole:5.0%}"
            for name in PHASES
        ]
        reduce = sum(value for name, value in seconds.items() if name.startswith("gloo:all_reduce"))
        # kernels
        reduce += sum(
            event.device_time_total / 1e6
            for event in events
            if event.device_type != DeviceType.CPU
            and event.key.startswith("nccl")
            and "AllReduce" in event.key
        )
        return lines + [f"  {'all-reduce, on the way':26} {reduce / self.steps:9.4f} s"] * (reduce > 0)
