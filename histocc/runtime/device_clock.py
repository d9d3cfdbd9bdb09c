"""How long something took on the device that works, not on the host that hands it the work."""

import time
from collections import deque
from typing import Any

import torch


class DeviceClock:
    """Adds up `seconds` between pairs of moments. On a GPU they are moments of its own queue: what the host
    does while the queue is not empty takes no time. Events are read when they are over, so nothing waits for
    the device but `synchronize`. device: None for the host's own clock.
    """

    def __init__(self, device: torch.device | None = None):
        self.seconds = 0.0
        self._on_gpu = device is not None and device.type == "cuda"
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def now(self) -> Any:
        """A moment, for `add`."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, since: Any, until: Any) -> None:
        if not self._on_gpu:
            self.seconds += until - since
            return
        self._open.append((since, until))
        self._read()

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given, and reads all events."""
        if self._on_gpu:
            self.now().synchronize()
            self._read()

    def _read(self) -> None:
        while self._open and self._open[0][1].query():
            since, until = self._open.popleft()
            self.seconds += since.elapsed_time(until) / 1000
