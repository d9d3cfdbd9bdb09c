"""A run folder belongs to one live job at a time."""

import contextlib
import datetime
import fcntl
import json
import os
import socket
import stat
from collections.abc import Generator
from typing import Any

from histocc.runtime.errors import UserError
from histocc.runtime.machine_errors import in_words

NAME = "run.lock"


@contextlib.contextmanager
def run_lock(folder: str) -> Generator[None]:
    """Holds `folder` for this process; the system lets go of it when the process ends, however it ends. Rank
    0 only.

    Where the file system has no locks nothing is held. Raises UserError with the host, process and start of
    the job that has the folder.
    """
    path = os.path.join(folder, NAME)
    handle, is_ours = _take(folder, path)
    _held.add(handle)
    try:
        if is_ours:
            owner = {
                "host": socket.gethostname(),
                "process": os.getpid(),
                "since": datetime.datetime.now().isoformat(" ", "seconds"),
            }
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(owner).encode(), 0)
        yield
        with contextlib.suppress(OSError):
            if is_ours and is_same_file(handle, path):
                os.unlink(path)
    finally:
        _held.discard(handle)
        os.close(handle)


def is_held(folder: str) -> bool | None:
    """Whether a live job has `folder`; None where that cannot be told: locks of another machine are not
    always seen. Changes nothing.
    """
    try:
        handle = os.open(os.path.join(folder, NAME), os.O_RDONLY | os.O_NONBLOCK)
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


def _take(folder: str, path: str) -> tuple[int, bool]:
    """(the locked file, whether its content is ours to write: an empty file that was there may be
    anybody's)
    """
    while True:
        try:
            os.makedirs(folder, exist_ok=True)
            flags, made = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW, True
            try:
                handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                handle, made = os.open(path, flags), False
        except FileNotFoundError:  # its owner has just removed it
            continue
        except OSError as error:
            raise UserError(in_words(error, path)) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(handle)
            os.close(handle)
            raise UserError(
                f"{folder} is in use by another job: {owner}. Wait for it, stop it, or choose another folder"
            ) from None
        except OSError:  # no locks here
            pass
        if not _is_lock(handle):
            os.close(handle)
            raise UserError(
                f"{path}: is not a lock of this program, which writes one under this name; move it away, or"
                " choose another folder"
            )
        if is_same_file(handle, path):
            return handle, made or os.fstat(handle).st_size > 0
        os.close(handle)  # its owner has just removed it: take the new one


def _is_lock(handle: int) -> bool:
    """Whether an open file is empty, or what a job writes into its lock."""
    found = os.fstat(handle)
    return stat.S_ISREG(found.st_mode) and (not found.st_size or _facts(handle) is not None)


# a process that is forked while the lock is held, to load data, must not keep it alive
_held: set[int] = set()


def _let_go() -> None:
    for handle in _held:
        with contextlib.suppress(OSError):
            os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def _facts(handle: int) -> dict[str, Any] | None:
    """What a lock says of the job that took it; None where it is none."""
    try:
        found = json.loads(os.pread(handle, 4096, 0))
        return {name: found[name] for name in ("host", "process", "since")}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _owner(handle: int) -> str:
    found = _facts(handle)
    return (
        f"host {found['host']}, process {found['process']}, since {found['since']}"
        if found
        else "its host is not known"
    )


def is_same_file(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
