"""Where this process is: the stacks of its threads, the innermost call of the program, the collective that
it waits in.
"""

import datetime
import faulthandler
import json
import math
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, BinaryIO

import torch

from histocc.runtime.collectives import Collective, Collectives
from histocc.runtime.heartbeat import Heartbeat
from histocc.runtime.torch_private import recorded_collectives

TITLE = "histocc stacks, format 1"  # the first line of a file
RECORDED = 20  # of torch's collectives, in a file
VOTE = 4  # numbers: what is no larger is asked beside the step, and keeps nobody waiting
DEVICE_SECONDS = 2.0  # a device that is in one collective for so long waits in it
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# where every wait for another process is: the caller says more
WAITING = tuple(
    os.path.join(HERE, "runtime", name) for name in ("world.py", "collectives.py", "reduction.py")
)

_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class Call:
    """One entry of a stack."""

    file: str
    line: int
    function: str

    @property
    def where(self) -> str:
        """The file, those of histocc as `histocc/trainer/loop.py`."""
        inside = self.file.startswith(HERE + os.sep)
        return os.path.relpath(self.file, os.path.dirname(HERE)) if inside else self.file

    def __str__(self) -> str:
        return f"{self.where}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Wait:
    """name: what follows on "this rank waits": "in a barrier". number: the same on every rank that waits in
    the same.
    """

    name: str
    number: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} (no. {self.number:,})"


@dataclass(frozen=True)
class Place:
    """Where a rank runs: the host, the number of its process there, and its `living.own_name`."""

    host: str
    process: int
    name: str = ""

    def __str__(self) -> str:
        return f"host {self.host}, process {self.process}"


@dataclass(frozen=True)
class Summary:
    """What a process says of itself to the others.

    request: which it answers. activity: its last one, for so many `seconds`. places: those of all ranks.
    """

    rank: int
    request: str
    activity: str
    seconds: float
    wait: Wait | None
    call: Call | None
    places: tuple[Place, ...]

    @property
    def place(self) -> Place:
        return self.places[self.rank]

    def written(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        waits = f"waits {self.wait} for {self.wait.seconds:,.0f} s; " if self.wait else ""
        return (
            f"rank {self.rank}, {self.place}: {self.activity} for {self.seconds:,.0f} s; {waits}in"
            f" {self.call or 'no call of the program'}"
        )


def read_summary(text: str | bytes) -> Summary | None:
    """None for what is none."""
    try:
        found = json.loads(text)
        wait, call, places = found.pop("wait"), found.pop("call"), found.pop("places")
        made = Summary(
            wait=Wait(**wait) if wait else None,
            call=Call(**call) if call else None,
            places=tuple(Place(**place) for place in places),
            **found,
        )
        fits = 0 <= made.rank < len(made.places) and isinstance(made.request, str)
        return made if fits and str(made) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def thread_stacks() -> str:
    """The calls of all threads as `faulthandler` writes them, the innermost first; of no file system, since
    that may be what hangs.
    """
    try:
        with _nameless_file() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().decode("utf-8", "replace")
    except OSError:  # no free descriptor
        return "\n".join(map(_frames_in_words, sys._current_frames().items()))


def _frames_in_words(thread: tuple[int, FrameType]) -> str:
    """As `faulthandler` writes them."""
    calls = [(frame.f_code, line) for frame, line in traceback.walk_stack(thread[1])]
    lines = [f'  File "{code.co_filename}", line {line} in {code.co_name}' for code, line in calls]
    return "\n".join([f"Thread {thread[0]:#018x} (most recent call first):", *lines])


@contextmanager
def _nameless_file() -> Generator[BinaryIO]:
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("stacks"), "w+b") as file:
            yield file
    else:
        with tempfile.TemporaryFile() as file:
            yield file


def calls_of(stacks: str, thread: int | None) -> list[Call]:
    """The calls of one thread out of the text of `thread_stacks`, the innermost first."""
    found: list[Call] = []
    inside = False
    for line in stacks.splitlines():
        if head := _THREAD.match(line):
            inside = int(head[1], 16) == thread
        elif inside and (call := _CALL.fullmatch(line)):
            found.append(Call(call[1], int(call[2]), call[3]))
    return found


def innermost(calls: list[Call]) -> Call | None:
    """The innermost call of histocc or of a user's script; where it waits for another process, its caller."""
    own = [call for call in calls if _is_own(call.file)]
    return next((call for call in own if call.file not in WAITING), own[0] if own else None)


def _is_own(file: str) -> bool:
    if file.startswith(HERE + os.sep):
        return True
    return not file.startswith(_OF_OTHERS) and not {"site-packages", "dist-packages"} & set(
        file.split(os.sep)
    )


_OF_OTHERS = (
    "<",
    *(
        folder + os.sep
        for path in (os.__file__, torch.__file__ or os.__file__)
        for folder in (os.path.dirname(path), os.path.dirname(os.path.realpath(path)))
    ),
)


def waiting_in(collectives: Collectives, calls: list[Call], recorded: list[dict[str, Any]]) -> Wait | None:
    """What this process waits in: a collective of the program or, where its innermost call is in torch or it
    has waited for the device for long, one that torch has recorded as begun.
    """
    current = collectives.current()
    if current is not None:
        return Wait(current.name, current.number, time.monotonic() - current.started)
    begun = [entry for entry in recorded if _is_pending(entry) and _largest(entry) > VOTE]
    if not begun or not calls:
        return None
    kind, number = str(begun[0].get("profiling_name", "")), int(begun[0].get("collective_seq_id") or 0)
    seconds = max(0.0, time.time() - float(begun[0].get("time_created_ns") or 0) / 1e9)
    in_torch = _in_autograd(calls[0]) or _in_torch(calls[0])
    if not in_torch and not (kind.startswith("nccl") and seconds > DEVICE_SECONDS):
        return None
    gradients = "reduce" in kind and any(map(_in_autograd, calls))
    return Wait("in the sum over gradients" if gradients else f"in {kind} of torch", number, seconds)


def _in_autograd(call: Call) -> bool:
    return f"torch{os.sep}autograd{os.sep}" in call.file


def _in_torch(call: Call) -> bool:
    return f"torch{os.sep}distributed{os.sep}" in call.file


def _is_pending(entry: dict[str, Any]) -> bool:
    return not entry.get("retired") and entry.get("state") != "completed"


def _largest(entry: dict[str, Any]) -> int:
    """Numbers in the largest tensor that it sends."""
    sizes = [math.prod(size) for size in entry.get("input_sizes") or ()]
    return max(sizes, default=0)


class Dump:
    """What this process writes of itself when it is asked: `summary`, and the `text` of its file."""

    def __init__(
        self,
        rank: int,
        places: tuple[Place, ...],
        backend: str | None,
        collectives: Collectives,
        heartbeat: Heartbeat,
        request: str,
    ):
        main = threading.main_thread().ident
        stacks = thread_stacks()
        recorded = recorded_collectives(backend)[-RECORDED:]
        gave_up = calls_of_error(heartbeat.error) if heartbeat.error is not None else []
        calls = gave_up or calls_of(stacks, main)
        wait = waiting_in(collectives, calls, recorded)
        seconds = time.monotonic() - heartbeat.since
        self.summary = Summary(rank, request, heartbeat.doing, seconds, wait, innermost(calls), places)
        parts = [
            f"{TITLE}\n{self.summary.written()}\n\n{self.summary}\nwritten {datetime.datetime.now()}",
            "The collectives of the program, the newest first\n"
            + "\n".join(map(_line, reversed(collectives.last()))),
            "Those that torch has recorded, the newest first\n"
            + ("\n".join(map(_recorded_line, reversed(recorded))) or "  none"),
            "Where the main thread gave up\n" + "\n".join(f"  {call}" for call in gave_up) if gave_up else "",
            "Threads, the innermost call first\n" + stacks,
        ]
        self.text = "\n\n".join(filter(None, parts)) + "\n"


def calls_of_error(error: BaseException) -> list[Call]:
    """Where an exception came from, the innermost first."""
    frames = traceback.walk_tb(error.__traceback__)
    return [Call(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames][::-1]


def summary_of_file(text: str) -> Summary | None:
    """Of what a process has written; None for what is no such file."""
    title, _, rest = text.partition("\n")
    return read_summary(rest.partition("\n")[0]) if title == TITLE else None


def _line(entry: Collective) -> str:
    now = time.monotonic()
    begun = f"begun {now - entry.started:,.1f} s ago"
    if entry.failed:
        ended = "failed"
    elif entry.ended is None:
        ended = "has not ended"
    else:
        ended = f"took {entry.ended - entry.started:,.3f} s"
    return f"  no. {entry.number:,}, {entry.name}: {begun}, {ended}"


def _recorded_line(entry: dict[str, Any]) -> str:
    seconds = time.time() - float(entry.get("time_created_ns") or 0) / 1e9
    sent = entry.get("input_sizes")
    return (
        f"  no. {entry.get('collective_seq_id')}, {entry.get('profiling_name')} of {sent}: begun"
        f" {seconds:,.1f} s ago, {'has not ended' if _is_pending(entry) else 'ended'}"
    )
