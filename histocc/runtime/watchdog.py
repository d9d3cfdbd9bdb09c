"""What ends a process while its main thread waits where no exception reaches it."""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator

from histocc.runtime.signals import StopRequest

LOOK_SECONDS = 0.2

# Libraries that may have left threads, processes and exit functions behind.
libraries: list[str] = []
# Calls of libraries that never came back: the interpreter's own ending would wait for them.
abandoned: list[str] = []


@contextlib.contextmanager
def limited(seconds: float, stop: StopRequest, waits_for: str, remedy: str) -> Generator[None]:
    """Ends this process where what is inside takes longer than `seconds` (exit code 2), or when it is asked
    to stop meanwhile.

    For calls into libraries that wait without looking at signals; nothing must be there yet that would have
    to be saved.
    """
    done = threading.Event()

    def watch() -> None:
        until = time.monotonic() + seconds
        while not done.wait(LOOK_SECONDS):
            if stop:
                print(
                    f"Stopped by {stop.reason} while it waited for {waits_for}. The same command starts"
                    " again.",
                    flush=True,
                )
                os._exit(stop.exit_code)
            if time.monotonic() > until:
                print(
                    f"error: {waits_for}: no answer within {seconds:,.0f} s (--timeout-minutes). {remedy}",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(2)

    threading.Thread(target=watch, name="time limit", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def die_with_launcher() -> str:
    """Asks the system (Linux) to kill this process when torchrun's agent dies, which forwards no signal
    then.

    Returns what tells that agent from every other process there ever was: its host, number and start; ""
    without torchrun.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    parent = os.getppid()
    agent = f"{socket.gethostname()} {parent}"
    if parent == 1 and not _is_torchrun(parent):  # it died before the call, and init has this process
        os._exit(1)
    die_with(parent)
    try:
        with open(f"/proc/{parent}/stat", encoding="utf-8") as file:
            agent += " " + file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        pass  # another system
    return agent


def die_with(parent: int) -> None:
    """Asks the system (Linux) to kill this process when its parent dies."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return  # another system
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def _is_torchrun(process: int) -> bool:
    """By its command line: in a container torchrun may be process 1."""
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return b"torch" in file.read()
    except OSError:
        return False
