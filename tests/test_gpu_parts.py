"""What only runs with GPUs, held against a CUDA of the tests' own: its clock, its memory."""

from types import SimpleNamespace

import pytest
import torch

from histocc.runtime import device
from histocc.runtime.device import DeviceClock
from histocc.runtime.world import World
from histocc.trainer.estimate import find_batch_size

GPU = torch.device("cuda", 0)


class Queue:
    """A GPU whose work takes as long as it is told: `busy(seconds)`; the host's time is `at`."""

    def __init__(self):
        self.at, self.free_at = 0.0, 0.0

    def busy(self, seconds):
        self.free_at = max(self.free_at, self.at) + seconds

    def event(queue, enable_timing):
        class Event:
            def record(self):
                self.over_at = max(queue.free_at, queue.at)

            def query(self):
                return queue.at >= self.over_at

            def synchronize(self):
                queue.at = max(queue.at, self.over_at)

            def elapsed_time(self, later):
                assert self.query() and later.query()
                return 1000 * (later.over_at - self.over_at)

        return Event()


@pytest.fixture
def queue(monkeypatch):
    made = Queue()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    return made


def test_data_that_comes_while_the_gpu_works_is_not_waited_for(queue):
    clock = DeviceClock(GPU)

    def fetch():
        started = clock.now()
        queue.at += 2.0
        clock.add(started, clock.now())

    fetch()  # nothing to do before the first batch
    queue.busy(5.0)
    fetch()  # ready long before the GPU is
    queue.busy(1.0)
    queue.at = 9.5  # the GPU was done at 8
    fetch()
    queue.busy(1.0)
    clock.synchronize()
    assert clock.seconds == pytest.approx(4.0) and queue.at == 12.5


def test_sizes_leave_room_for_what_is_still_to_come(monkeypatch):
    held = {}
    for name, value in {
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda _: None,
        "synchronize": lambda _: None,
        "max_memory_allocated": lambda _: held["bytes"],
        "get_device_properties": lambda _: SimpleNamespace(total_memory=1000),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    world = World(device=GPU)

    def find(**more):
        return find_batch_size(lambda rows: held.update(bytes=10 * rows), 4096, world, **more)

    assert find() == 64 and find(still_to_come=300) == 32 and find(still_to_come=800) == 1


def test_what_compiles_for_gpus_is_asked_for(monkeypatch):
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert device.missing_compiler(GPU) == "a C compiler (no-such-compiler: not there; apt-get install gcc)"
    monkeypatch.setenv("CC", "bash")
    assert device.missing_compiler(GPU) is None
