"""A folder that appears whole or not at all, made by one job at a time.

Work goes on in a hidden folder beside it that gets its name by one rename. A lock tells living jobs from dead ones: what a killed job
left is removed by the next, and two jobs that need the same do the work once. Where the file system has no locks both may
do it, and the first to finish wins.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable

from histocc.errors import UserError

POLL_SECONDS = 0.2
LAST_FILE = "meta.json"       # written last: a folder that has it is whole


def is_whole(folder: str) -> bool:
    """Whether a folder is there with all its files, each as long as it was written."""
    try:
        with open(os.path.join(folder, LAST_FILE), encoding="utf-8") as file:
            sizes = json.load(file)["sizes"]
        return all(os.path.getsize(os.path.join(folder, name)) == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_last(folder: str, content: dict) -> None:
    """Writes the file that makes a folder whole: `content`, and the sizes of all other files."""
    sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}
    with open(os.path.join(folder, LAST_FILE), "w", encoding="utf-8") as file:
        json.dump({**content, "sizes": sizes}, file)


def build_folder(root: str, name: str, build: Callable[[str], None], say: Callable[[str], None],
                 check: Callable[[], None] = lambda: None) -> str:
    """The folder `root`/`name`, filled by `build(path)` if it is not there yet; `check` is called while it waits. One
    process of a job.

    An exception of `build` passes through, an OSError (no space left, …) as a UserError, and nothing that was not there
    before stays behind.
    """
    folder = os.path.join(root, name)
    missing = _missing_folders(root)
    try:
        os.makedirs(root, exist_ok=True)
        with _lock(root, say, check) as locked:
            if not is_whole(folder):
                if locked:
                    _remove_leftovers(root)
                _build(root, folder, build)
    except BaseException as error:
        for path in missing:
            with contextlib.suppress(OSError):       # not empty: somebody else's work is in it
                os.rmdir(path)
        if isinstance(error, OSError):
            raise UserError(f"the data could not be prepared in {root}: {error}") from None
        raise
    return folder


def _build(root: str, folder: str, build: Callable[[str], None]) -> None:
    new = tempfile.mkdtemp(prefix=f".{os.path.basename(folder)}.", dir=root)
    try:
        os.chmod(new, 0o755)
        build(new)
        for name in os.listdir(new):
            sync(os.path.join(new, name))
        try:
            os.rename(new, folder)
        except OSError:                              # another job has just finished the same, or part of a folder was copied there
            if not is_whole(folder):
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(new, folder)
        sync(root)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def sync(path: str) -> None:
    """Makes a file, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _lock(root: str, say: Callable[[str], None], check: Callable[[], None]):
    """Holds the lock of `root`; yields False where the file system has none. Waits for its owner, and says so."""
    path, said = os.path.join(root, ".lock"), False
    while True:
        os.makedirs(root, exist_ok=True)             # the job that held the lock may have failed and removed it
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            os.close(handle)
            if not said:
                say(f"Waiting for another job that prepares data in {root}")
                said = True
            check()
            time.sleep(POLL_SECONDS)
            continue
        except OSError:
            locked = False
        if not locked or is_same_file(handle, path):
            break
        os.close(handle)                             # its owner has removed it: lock the new one
    try:
        yield locked
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(handle)


def is_same_file(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_leftovers(root: str) -> None:
    for name in os.listdir(root):
        if name.startswith(".") and name != ".lock":
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)


def _missing_folders(path: str) -> list[str]:
    """`path` and its parents that do not exist yet, the deepest first."""
    missing = []
    path = os.path.abspath(path)
    while not os.path.isdir(path) and path != os.path.dirname(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing
