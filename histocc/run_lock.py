"""A run folder belongs to one live job at a time."""

import contextlib
import datetime
import fcntl
import json
import os
import socket

from histocc.errors import UserError
from histocc.prepared_folder import is_same_file

NAME = "run.lock"


@contextlib.contextmanager
def run_lock(folder: str):
    """Holds `folder` for this process; the system lets go of it when the process ends, however it ends. Rank 0 only.

    Where the file system has no locks nothing is held. Raises UserError with the host, process and start of the job that
    has the folder.
    """
    path = os.path.join(folder, NAME)
    handle = _take(folder, path)
    _held.add(handle)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": datetime.datetime.now().isoformat(
            " ", "seconds")}).encode(), 0)
        yield
        with contextlib.suppress(OSError):
            os.unlink(path)
    finally:
        _held.discard(handle)
        os.close(handle)


def is_held(folder: str) -> bool | None:
    """Whether a live job has `folder`; None where that cannot be told: locks of another machine are not always seen. Changes nothing."""
    try:
        handle = os.open(os.path.join(folder, NAME), os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False if f"host {socket.gethostname()}," in _owner(handle) else None
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)


def _take(folder: str, path: str) -> int:
    while True:
        try:
            os.makedirs(folder, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(handle)
            os.close(handle)
            raise UserError(f"{folder} is in use by another job: {owner}. Wait for it, stop it, or choose another folder") from None
        except OSError:                              # no locks here
            return handle
        if is_same_file(handle, path):
            return handle
        os.close(handle)                             # its owner has just removed it: take the new one


_held: set[int] = set()       # a process that is forked while the lock is held, to load data, must not keep it alive


def _let_go() -> None:
    for handle in _held:
        with contextlib.suppress(OSError):
            os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def _owner(handle: int) -> str:
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
        return f"host {owner['host']}, process {owner['process']}, since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "its host is not known"
