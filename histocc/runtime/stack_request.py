"""Asks all processes of a run for their stacks through a file in its folder, from outside the run."""

import contextlib
import glob
import json
import os
import socket
import time
import uuid
from collections.abc import Generator

from histocc.runtime.errors import UserError
from histocc.runtime.lock import holder, is_held
from histocc.runtime.machine_errors import in_words
from histocc.runtime.outputs import kind_of, write_text
from histocc.runtime.stack_dump import Place, Summary, summary_of_file

NAME = "stacks-request.json"
FILES = "stacks-rank{}.txt"
PATIENCE_SECONDS, FAR_PATIENCE_SECONDS = 10.0, 70.0
POLL_SECONDS = 0.2
_LARGEST = 1 << 16  # bytes of a request
_HEAD = 1 << 22  # characters of a file, in which its summary is


def seen(folder: str) -> tuple[int, int, int] | None:
    """What tells one request in a folder from the next; None where there is none."""
    try:
        found = os.stat(os.path.join(folder, NAME))
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def read(folder: str) -> str | None:
    """The request in a folder; None for what is none."""
    path = os.path.join(folder, NAME)
    try:
        if kind_of(path) is not None or os.path.getsize(path) > _LARGEST:
            return None
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        request = found["request"] if found["written_by"] == "histocc" else None
        return request[:100] if isinstance(request, str) and request.startswith("doctor-") else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def summary_in(path: str) -> Summary | None:
    """Of what a process has written into its file."""
    try:
        if kind_of(path) is not None:
            return None
        with open(path, encoding="utf-8", errors="replace") as file:
            return summary_of_file(file.read(_HEAD))
    except OSError:
        return None


def patience(folder: str) -> float:
    """Seconds that answers may take: another host that sees the folder notices a new file within a minute."""
    owner = holder(folder)
    return FAR_PATIENCE_SECONDS if owner and owner["host"] != socket.gethostname() else PATIENCE_SECONDS


def ask(folder: str, seconds: float | None = None) -> tuple[dict[int, Summary], tuple[Place, ...]]:
    """(what each rank of the run in `folder` has answered in time, where all ranks are; without an answer
    where rank 0 is, as far as that is known).

    Raises UserError where no run is there.
    """
    if not os.path.isdir(folder):
        raise UserError(f"--stacks {folder}: no folder of that name; give the save folder of a run")
    if is_held(folder) is False:
        raise UserError(
            f"--stacks {folder}: no run is using this folder now. Give the save folder of one that runs, on"
            " the machine of its rank 0 or on one that sees the same folder"
        )
    request = f"doctor-{uuid.uuid4().hex}"
    found, done = dict[int, Summary](), set[str]()
    places = tuple[Place, ...]()
    until = time.monotonic() + (patience(folder) if seconds is None else seconds)
    with _written(folder, request):
        while (not places or len(found) < len(places)) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            for path in {*glob.glob(os.path.join(glob.escape(folder), FILES.format("*")))} - done:
                summary = summary_in(path)
                if summary is not None and summary.request == request:
                    found[summary.rank], places = summary, summary.places
                    done.add(path)
    owner = holder(folder)
    return found, places or ((Place(owner["host"], owner["process"]),) if owner else ())


@contextlib.contextmanager
def _written(folder: str, request: str) -> Generator[None]:
    path = os.path.join(folder, NAME)
    if os.path.lexists(path) and read(folder) is None:
        raise UserError(f"{path}: is not a request of this program, which writes one there; move it away")
    try:
        write_text(path, json.dumps({"written_by": "histocc", "request": request}))
    except OSError as error:
        raise UserError(
            f"{in_words(error, path)}; or send SIGUSR2 to a process of the run: the stacks then are in its"
            " folder, and what they say on its console"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if read(folder) == request:
                os.remove(path)
