"""A folder of prepared data that appears whole or not at all, made by one job at a time.

Work continues in a hidden folder beside it that gets its name by one rename. A lock tells living jobs from
dead
ones: what a killed job left is removed by the next, and two jobs that need the same do the work once. Where
the file system has no locks, or the lock is held for longer than anybody waits, both may do it, and the first
to finish wins. Nothing is removed or replaced but plain files with names of `arrays.FILES`, in folders with
names of ours.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable

from histocc.data.arrays import FILES, META, content_checksum, file_of_other_size, read_meta
from histocc.runtime import checksums
from histocc.runtime.errors import UserError, in_words
from histocc.runtime.files import is_same_file, kind_of, remove_files, sync, try_lock

POLL_SECONDS = 0.2
WAIT_SECONDS = 1800.0  # for another job, unless the caller says otherwise
_LEFTOVER = re.compile(r"\.[0-9a-f]{16}\.[a-z0-9_]{8}")  # the hidden folders that _build makes


def nothing(*_) -> None:
    """Says nothing, checks nothing."""


def is_whole(folder: str, contents: bool = True) -> bool:
    """Whether a folder is there with all its files as they were written: by their checksums, or, where those
    have just been looked at, by the sizes and meta.json alone (contents=False)."""
    return fault(folder, contents) is None


def fault(folder: str, contents: bool = True, check: Callable[[], None] = nothing) -> str | None:
    """Why a folder is not whole, naming the first damaged file; None where it is. `check` is called between
    files."""
    if not os.path.exists(os.path.join(folder, META)):
        return f"{META} is missing"
    try:
        meta = read_meta(folder)
    except UserError:
        return f"{META} is not as it was written"
    if meta["fingerprint"] != os.path.basename(os.path.abspath(folder)):
        return f"{META} is that of other data"
    if found := file_of_other_size(folder, meta):
        return found
    for name, expected in meta["checksums"].items() if contents else ():
        check()
        try:
            if checksums.of_file(os.path.join(folder, name)) != expected:
                return f"{name} is not as it was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def write_last(folder: str, content: dict) -> None:
    """Writes the file that makes a folder whole: `content`, and the sizes and checksums of all other
    files."""
    paths = {name: os.path.join(folder, name) for name in sorted(os.listdir(folder))}
    sizes = {name: os.path.getsize(path) for name, path in paths.items()}
    sums = {name: checksums.of_file(path) for name, path in paths.items()}
    meta = json.loads(json.dumps({**content, "sizes": sizes, "checksums": sums}))
    with open(os.path.join(folder, META), "w", encoding="utf-8") as file:
        json.dump({**meta, "checksum": content_checksum(meta)}, file)


def build_folder(
    root: str,
    name: str,
    build: Callable[[str], None],
    say: Callable[[str], None],
    check: Callable[[], None] = nothing,
    wait_seconds: float = WAIT_SECONDS,
) -> str:
    """The folder `root`/`name`, filled by `build(path)` if it is not there as it was written; one process of
    a job.

    `check` is called while it waits for another job, for `wait_seconds` at most. An exception of `build`
    passes through, an OSError (no space left, …) as a UserError, and nothing that was not there before stays
    behind. Raises UserError where something that is not ours stands in the way; it stays as it is.
    """
    folder = os.path.join(root, name)
    missing, path = [], os.path.abspath(root)
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    try:
        _refuse_what_is_not_ours(root, folder)
        os.makedirs(root, exist_ok=True)
        with _lock(root, say, check, wait_seconds) as locked:
            if fault(folder, check=check) is not None:
                if locked:
                    _remove_leftovers(root)
                _build(root, folder, build)
    except BaseException as error:
        for path in missing:
            with contextlib.suppress(OSError):  # not empty: somebody else's work is in it
                os.rmdir(path)
        if isinstance(error, (OSError, MemoryError)):
            raise UserError(f"the data could not be prepared in {root}: {in_words(error)}") from None
        raise
    return folder


def _refuse_what_is_not_ours(root: str, folder: str) -> None:
    """Raises UserError where `root` or `folder` is no folder, or a file in `folder` that would be replaced is
    no plain file."""
    on_disk = os.path.realpath(root) if os.path.exists(root) else root  # it may link to another disk
    expected = {on_disk: "a folder", folder: "a folder"}
    for path, kind in (expected | {os.path.join(folder, name): "a file" for name in FILES}).items():
        found = kind_of(path, follow_links=False)
        if found not in (None, kind):
            raise UserError(
                f"{path}: found {found}, expected {kind} that this program made; nothing was changed. Move it"
                " away, or choose another folder for the run"
            )


def _build(root: str, folder: str, build: Callable[[str], None]) -> None:
    new = tempfile.mkdtemp(prefix=f".{os.path.basename(folder)}.", dir=root)
    try:
        with _in_work(new):
            os.chmod(new, 0o755)
            build(new)
            for name in os.listdir(new):
                sync(os.path.join(new, name))
            try:
                os.rename(new, folder)
            except OSError:  # another job has just finished the same, or there is a damaged folder
                if not is_whole(folder):
                    _refuse_what_is_not_ours(root, folder)
                    _replace_files(new, folder)
            sync(root)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _replace_files(new: str, folder: str) -> None:
    """Puts the files of `new` into `folder` one by one, in place of those with our names; what else is there
    stays. It is not whole in between: meta.json goes first and comes last."""
    for name in set(FILES).difference(os.listdir(new)) | {META}:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
    for name in sorted(os.listdir(new), key=lambda name: name == META):
        os.replace(os.path.join(new, name), os.path.join(folder, name))
    sync(folder)


@contextlib.contextmanager
def _lock(root: str, say: Callable[[str], None], check: Callable[[], None], wait_seconds: float):
    """Holds the lock of `root`; yields False where there is none to be had. Waits for its owner, and says
    so."""
    path, waited, handle = os.path.join(root, ".lock"), 0.0, None
    try:
        while True:
            handle, busy = _try_lock(root, path, say)
            if not busy:
                break
            if not waited:
                say(f"Waiting for another job that prepares data in {root}")
            if waited >= wait_seconds:
                say(f"Another job has held {path} for {wait_seconds / 60:g} minutes; not waiting any longer")
                break
            check()
            time.sleep(POLL_SECONDS)
            waited += POLL_SECONDS  # not by the clock: a job that was suspended has not waited
        yield handle is not None and try_lock(handle)
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                if is_same_file(handle, path) and not os.fstat(handle).st_size:
                    os.unlink(path)
            os.close(handle)


def _try_lock(root: str, path: str, say: Callable[[str], None]) -> tuple[int | None, bool]:
    """(the open lock file or None, whether another job holds it). A pipe, a link or a folder of that name is
    no lock, and stays."""
    os.makedirs(root, exist_ok=True)  # the job that held the lock may have failed and removed it
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except FileNotFoundError:  # removed this moment
        return None, True
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        say(f"{path} cannot be used as a lock ({error.strerror}); preparing data without one")
        return None, False
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            say(f"{path} is no plain file and cannot be used as a lock; preparing data without one")
            busy = None
        else:
            # Its owner may have removed it: then the new one is to be locked.
            busy = try_lock(handle) is None or not is_same_file(handle, path)
    except BaseException:
        os.close(handle)
        raise
    if busy is False:
        return handle, False
    os.close(handle)
    return None, bool(busy)


@contextlib.contextmanager
def _in_work(folder: str):
    """Locks the hidden folder of a living job itself: it may work without the lock of the root."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try_lock(handle)
        yield
    finally:
        os.close(handle)


def _remove_leftovers(root: str) -> None:
    """Removes hidden folders of killed jobs: named and filled as this program does, with nothing else in
    them."""
    for name in os.listdir(root):
        path = os.path.join(root, name)
        if not _LEFTOVER.fullmatch(name) or os.path.islink(path) or not os.path.isdir(path):
            continue
        with contextlib.suppress(OSError):
            if set(os.listdir(path)) <= set(FILES) and _is_dead(path):
                remove_files(path, "|".join(map(re.escape, FILES)))
                os.rmdir(path)


def _is_dead(folder: str) -> bool:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        return try_lock(handle) is not None
    finally:
        os.close(handle)
