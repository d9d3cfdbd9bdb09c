"""A run folder belongs to one live job at a time."""

import contextlib
import datetime
import fcntl
import json
import os
import socket

from histocc.errors import UserError

NAME = "run.lock"


@contextlib.contextmanager
def run_lock(folder: str):
    """Holds `folder` for this process; the system lets go of it when the process ends, however it ends. Rank 0 only.

    Where the file system has no locks nothing is held. Raises UserError with the host, process and start of the job that
    has the folder.
    """
    path = os.path.join(folder, NAME)
    os.makedirs(folder, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is in use by another job: {_owner(handle)}. Wait for it, stop it, or choose another "
                            "folder") from None
        except OSError:                              # no locks here
            pass
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": datetime.datetime.now().isoformat(
            " ", "seconds")}).encode(), 0)
        yield
        with contextlib.suppress(OSError):
            os.unlink(path)
    finally:
        os.close(handle)


def _owner(handle: int) -> str:
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
        return f"host {owner['host']}, process {owner['process']}, since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "its host is not known"
