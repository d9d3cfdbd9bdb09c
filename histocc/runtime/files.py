"""Files: kinds of paths, checks before writing, atomic writes, one live job per folder. `histocc.json` lists
the files that this program wrote there. Others are replaced or removed only with --overwrite, inputs never.
"""

import contextlib
import difflib
import errno
import filecmp
import hashlib
import json
import os
import re
import select
import shutil
import socket
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Generator, Iterable
from functools import cache
from pathlib import Path
from typing import IO, BinaryIO

from histocc.runtime.errors import Unreadable, UserError, errno_of

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # pyright: ignore[reportAssignmentType]

LIST, LIST_HEAD = "histocc.json", {"written_by": "histocc", "format": 1}
LOCK, OWNER = "run.lock", "histocc on host "  # a lock begins with OWNER
LOCK_SECONDS = 60.0  # how long a process waits for a file that another one holds
LOCKED_BYTE = 1 << 30  # for Windows, where nobody can read locked bytes
# Names of tables that can be read, and of all tables but CSV. data/written.py lists those for writing.
_TEXTS, _OTHERS = "tsv|jsonl|ndjson", "parquet|xls[xmb]?|ods|dta|z?sav|xpt|sas7bdat"
TABLE_NAME = re.compile(rf"(.*)\.((csv|{_TEXTS})(\.gz)?|{_OTHERS})\Z", re.IGNORECASE)
OTHER_TABLES = rf"(.*?)(?:\.csv)?\.({_TEXTS}|{_OTHERS}|rds|feather|arrow|gz|bz2|xz|zst|zip)"
TEMPORARY = r"\.tmp\d+"  # the end of a name until its file is complete
LONGEST_NAME = 240  # bytes: file systems take 255, and a temporary name is longer
FILE_KINDS = {"-": "a file", "d": "a folder", "l": "a symbolic link", "p": "a pipe", "s": "a socket"}


def kind_of(path: str, follow_links: bool = True) -> str | None:
    """Return one of FILE_KINDS or "a device", or None if nothing is found at `path`."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: not a valid name
        mode = os.stat(path, follow_symlinks=follow_links).st_mode
        return FILE_KINDS.get(stat.filemode(mode)[0], "a device")


def is_same(path: str, other: str) -> bool:
    """Return whether two paths are one file, following links. If one does not exist, compare the names."""
    with contextlib.suppress(OSError):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def opened(path: str) -> BinaryIO:
    """Open a regular file to read bytes. Raises UserError for anything else and never waits for a pipe."""
    if (kind := kind_of(path)) not in (None, "a file"):
        why = ", which can be read only once; save it as a file first" if kind == "a pipe" else ", not a file"
        raise UserError(f"{path}: is {kind}{why}")
    try:
        return open(path, "rb")
    except (OSError, ValueError) as error:  # ValueError: a NUL, or a letter that the system cannot encode
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        why = "no such file" if missing else f"cannot be read: {getattr(error, 'strerror', None) or error}"
        with contextlib.suppress(OSError, ValueError):
            folder, name = os.path.split(path)
            near = difflib.get_close_matches(name, os.listdir(folder or ".")) if missing else []
            why += f"; did you mean {os.path.join(folder, near[0])}?" if near else ""
        kind = UserError if missing or isinstance(error, ValueError) else Unreadable
        raise kind(f"{path[:200] or 'an input without a name'}: {why}") from None


def checksum(path: str) -> int:
    """Return the CRC-32 of a file's content. Raises OSError."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return crc


@cache
def hash_of_sources(*patterns: str) -> str:
    """Return a hash, 16 hexadecimal digits, of histocc's files that match any of the `glob` patterns."""
    home, found = Path(__file__).parent.parent, hashlib.blake2b(digest_size=8)
    for path in sorted({path for pattern in patterns for path in home.glob(pattern)}):
        found.update(f"{path.relative_to(home).as_posix()}\n{path.read_text('utf-8')}".encode())
    return found.hexdigest()


def folder_above(path: str) -> str:
    """Return the nearest existing folder that contains `path`, or would contain it."""
    whole = Path(path).absolute()  # this keeps '..', which leads elsewhere after a link
    return os.fspath(next(filter(os.path.isdir, (whole, *whole.parents)), whole))


@contextlib.contextmanager
def naming(path: str) -> Generator[None]:
    """Add `path` to an error of the machine that names no other file. Raises OSError."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's writer makes it a RuntimeError
        number, named = errno_of(error), getattr(error, "filename", None)
        if number is None or named not in (None, f"{path}.tmp{os.getpid()}"):
            raise
        raise OSError(number, getattr(error, "strerror", "") or os.strerror(number), path) from error


def sync_folder(path: str) -> None:
    """Make the name `path` survive a power cut."""
    with contextlib.ExitStack() as held, contextlib.suppress(PermissionError):  # Windows opens no folders
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        held.callback(os.close, folder)
        os.fsync(folder)


@contextlib.contextmanager
def _temporary_name(path: str, durable: bool = True) -> Generator[str]:
    """Yield a free name next to `path`, to be renamed inside. durable: the renaming survives a power cut."""
    temporary = f"{path}.tmp{os.getpid()}"
    Path(temporary).unlink(missing_ok=True)  # left by a killed process, and never written to
    try:
        yield temporary
    finally:
        Path(temporary).unlink(missing_ok=True)
    if durable:
        sync_folder(path)


@contextlib.contextmanager
def atomic_write(path: str, overwrite: bool = True, durable: bool = True) -> Generator[BinaryIO]:
    """Yield a binary file that gets the name `path` when it is complete. An exception removes it. A symbolic
    link is replaced, not followed. Raises OSError with a file name.

    Args:
        overwrite: if False, raise FileExistsError instead of replacing a file, unless it has equal content.
        durable: whether it must survive a power cut, which takes milliseconds.
    """
    with naming(path), _temporary_name(path, durable) as temporary:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        try:
            (os.replace if overwrite else os.link)(temporary, path)  # a link takes only a free name
        except OSError:
            if overwrite:
                raise
            if not os.path.lexists(path):  # the file system has no hard links
                os.rename(temporary, path)
            elif kind_of(path) != "a file" or not filecmp.cmp(temporary, path, shallow=False):
                raise FileExistsError(errno.EEXIST, "exists; --overwrite replaces it", path) from None


def atomic_copy(source: str, path: str) -> None:
    """Give a file another name: as a hard link if the file system has them, else as a copy."""
    try:
        with _temporary_name(path) as temporary:
            os.link(source, temporary)
            os.replace(temporary, path)
    except OSError:
        with open(source, "rb") as content, atomic_write(path) as file:
            shutil.copyfileobj(content, file)


def write_sealed(path: str, content: bytes, of: str = "") -> None:
    """Write a file that begins with a checksum of its name, its content and `of`, the content's source."""
    with atomic_write(path) as file:
        file.write(_seal(path, content, of) + b"\n" + content)


def read_sealed(path: str, of: str = "") -> bytes | None:
    """Return the content that `write_sealed` wrote to `path` for the same `of`, or None. Raises UserError."""
    if kind_of(path) is None:
        return None
    with opened(path) as file:
        seal, _, content = file.read().partition(b"\n")
    return content if seal == _seal(path, content, of) else None


def _seal(path: str, content: bytes, of: str) -> bytes:
    return b"%08x" % zlib.crc32(content, zlib.crc32(f"{of} {os.path.basename(path)} ".encode()))


def save_pipe(path: str, target: str, check: Callable[[], None], limit_seconds: float) -> None:
    """Copy a pipe into the file `target`, until its last writer closes it. `check` is called several times a
    second and may end the copy with an exception. Raises UserError if nothing comes for `limit_seconds`.
    """
    handle, last = os.open(path, os.O_RDONLY | os.O_NONBLOCK), time.monotonic()  # does not wait for a writer
    with open(handle, "rb", buffering=0) as pipe, atomic_write(target) as file:
        # a read before the first writer has come would return b"", as at the end
        while (block := pipe.read(1 << 20) if select.select([pipe], [], [], 0.2)[0] else None) != b"":
            check()
            if block:
                file.write(block)
                last = time.monotonic()
            elif time.monotonic() - last > limit_seconds:
                what = f"{path}: nothing has come through this pipe for {limit_seconds:g} s; start the"
                raise UserError(f"{what} program that writes to it, or save its output as a file")


def remove_files(folder: str, pattern: str) -> None:
    """Remove a folder's regular files whose whole name matches `pattern` (names of ours only), in order."""
    for name in filter(re.compile(pattern).fullmatch, sorted(os.listdir(folder))):
        if kind_of(path := os.path.join(folder, name), follow_links=False) == "a file":
            os.remove(path)


def remove_leftovers(path: str) -> None:
    """Remove temporary files of `path` that killed processes have left."""
    folder, name = os.path.split(os.path.realpath(path))
    remove_files(folder, re.escape(name) + TEMPORARY)


class OwnFiles:
    """The files of a folder that this program wrote, according to the list in it. Raises UserError if another
    program or version wrote the list. overwrite: whether other programs' files may also be replaced.
    """

    def __init__(self, folder: str, overwrite: bool = False):
        self.folder, self.overwrite = folder, overwrite
        self.names = self._listed()

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def holds(self, path: str) -> bool:
        return os.path.basename(path) in self.names and is_same(os.path.dirname(path) or ".", self.folder)

    def _listed(self) -> set[str]:
        path = self.path(LIST)
        if not os.path.lexists(path):
            return set()
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError), opened(path) as file:
            content = json.load(file)
            if all(content[entry] == value for entry, value in LIST_HEAD.items()):
                return {name for name in content["files"] if os.path.basename(name) == name}
        raise UserError(f"{path}: is not the list of files of this version of histocc; choose another folder")

    def _list(self, more: Iterable[str], gone: Iterable[str] = ()) -> None:
        listed = self._listed()  # another process may have written it since
        names = self.names.union(listed, more).difference(gone)
        if names != listed:
            with atomic_write(self.path(LIST)) as file:
                file.write(json.dumps({**LIST_HEAD, "files": sorted(names)}, indent=1).encode())
        self.names = names

    def claim(self, *names: str) -> list[str]:
        """Return paths to write to, and remove links there. Raises FileExistsError for others' files."""
        for name in names:
            path = self.path(name)
            if os.path.lexists(path) and not self.overwrite and name not in self.names:
                raise FileExistsError(errno.EEXIST, "exists and stays as it is", path)
            if os.path.islink(path):
                os.remove(path)
        self._list(names)  # this comes first: the next process knows them, however this one ends
        return list(map(self.path, names))

    def remove(self, names: Iterable[str]) -> None:
        """Remove the named files that this program wrote."""
        if mine := self.names & set(names):
            for name in mine:
                Path(self.path(name)).unlink(missing_ok=True)  # another process may have been first
            self._list((), mine)

    def remove_leftovers(self) -> None:
        """Remove temporary files, also of the list, that killed processes have left."""
        remove_files(self.folder, f"({'|'.join(map(re.escape, [*self.names, LIST]))}){TEMPORARY}")


def problems(
    paths: Iterable[str],
    inputs: dict[str | None, str],
    overwrite: bool = False,
    own: OwnFiles | None = None,
    endings: tuple[str, ...] = (),
) -> list[str]:
    """Return a line for each of `paths` that a command may not write to. It may replace its `own` files.

    Args:
        inputs: the role of each file, such as {"my/key.csv": "the file of --key"}. A name None is ignored.
        endings: the endings that tables may have, if they have one, or () for the endings of CSV.
    """
    lines, there = [], []
    for path in paths:
        kind = kind_of(path) or (own and kind_of(path, follow_links=False))  # a link may lead nowhere
        name = os.path.basename(path)
        if not path.strip() or "\0" in path or not kind and name in ("", os.curdir, os.pardir):
            lines.append(f"{path!r} is not a valid file name")
        elif len(os.fsencode(name)) > LONGEST_NAME:
            lines.append(f"{path}: a name has at most {LONGEST_NAME} bytes; choose a shorter one")
        elif read := [what for name, what in inputs.items() if name and is_same(path, name)]:
            lines.append(f"{path} is {read[0]}, and inputs are never written to; choose another name")
        elif endings and "." in name and not path.lower().endswith(endings):
            names = " or ".join([", ".join(endings[:-1]), endings[-1]])
            lines.append(f"{path}: choose a name that ends in {names}")
        elif not endings and (named := re.fullmatch(OTHER_TABLES, path, re.IGNORECASE | re.DOTALL)):
            lines.append(f"{path}: tables are written as CSV: name it {named[1]}.csv")
        elif kind not in (None, "a file", "a symbolic link"):
            lines.append(f"{path} is {kind}, which is not written to; choose another name")
        elif kind and not overwrite and not (own and own.holds(path)):
            there.append(path)
    if there:
        more = f" and {len(there) - 3} more" * (len(there) > 3)
        exist = "exist; --overwrite replaces them" if len(there) > 1 else "exists; --overwrite replaces it"
        lines.append(f"{', '.join(there[:3])}{more} {exist}, or choose another name")
    return lines


def save_path_problems(path: str) -> list[str]:
    """Return a line that says why nothing can be written below `path`, or []. Leaves no trace."""
    if not path.strip() or "\0" in path:
        return [f"{path!r} is not a valid folder name"]
    front = re.match(r"(.*/)?\.\.(?=/|$)", path)
    if front and not os.path.isdir(front[0]):  # nobody knows yet where it leads
        return [f"{path}: {front[0]} is not a folder yet; name it without '..'"]
    above = folder_above(path)
    below = os.path.join(above, os.path.relpath(path, above).split(os.sep)[0])
    if os.path.lexists(below) and not os.path.isdir(below):
        return [f"{path}: cannot be the save folder, since {below} is not a folder"]
    try:
        tempfile.TemporaryFile(dir=os.path.realpath(above)).close()
    except OSError as error:
        return [f"{path}: cannot write there: {error.strerror}"]
    return []


# ---- one live job to a folder


def is_held(folder: str) -> bool:
    """Return whether a job holds `folder`. A lock left by a dead process of this machine does not count."""
    try:
        with open(os.path.join(folder, LOCK), encoding="utf-8", errors="replace") as file:
            _lock(file, shared=True)
            return not file.read(1000).startswith(f"{OWNER}{socket.gethostname()},")
    except OSError as error:  # it is held, or cannot be opened
        return not isinstance(error, FileNotFoundError)


def _lock(file: IO, shared: bool = False) -> None:
    """Lock an open file until it is closed. Raises OSError if another process holds it."""
    if fcntl is not None:
        return fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    import msvcrt

    os.lseek(file.fileno(), LOCKED_BYTE, os.SEEK_SET)
    msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # pyright: ignore
    os.lseek(file.fileno(), 0, os.SEEK_SET)


def take_lock(file: IO) -> bool:
    """Lock an open file until it is closed, if the system has locks. Return False if it is locked already."""
    try:
        _lock(file)
    except OSError as error:
        return not isinstance(error, PermissionError if fcntl is None else BlockingIOError)
    return True


@contextlib.contextmanager
def file_lock(path: str) -> Generator[None]:
    """Hold a file while it is read and replaced. Other processes wait. Raises UserError, OSError."""
    name, until = f"{path}.histocc-lock", time.monotonic() + LOCK_SECONDS
    while time.monotonic() < until:
        with open(name, "ab") as file:
            if take_lock(file) and os.fstat(file.fileno()).st_nlink:  # 0: its holder has just removed it
                try:
                    return (yield)
                finally:
                    with contextlib.suppress(PermissionError):  # Windows removes no file that is open
                        os.remove(name)
        time.sleep(0.1)
    raise UserError(f"{path} is in use by another process; wait for it, then repeat the command")


@contextlib.contextmanager
def run_lock(folder: str) -> Generator[None]:
    """Hold `folder` until this process leaves the context or dies. Rank 0 only. Raises UserError, OSError."""
    path = os.path.join(folder, LOCK)
    os.makedirs(folder, exist_ok=True)
    foreign = UserError(f"{path}: is not the lock of a run; move it away, or choose another folder")
    if kind_of(path, follow_links=False) not in (None, "a file"):
        raise foreign
    with open(path, "a+", encoding="utf-8", errors="replace") as file:
        file.seek(0)
        owner = file.read(1000)
        if not take_lock(file) or not os.path.lexists(path):  # its owner has just removed it
            raise UserError(f"{folder} is in use by another job: {owner}; wait, or choose another folder")
        if owner[: len(OWNER)] != OWNER[: len(owner)]:  # a job killed at once writes nothing
            raise foreign
        if hasattr(os, "register_at_fork"):  # a forked process must not keep the lock of a dead parent
            os.register_at_fork(after_in_child=file.close)
        try:
            since = f"process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
            with naming(path):
                file.truncate(0)
                os.write(file.fileno(), f"{OWNER}{socket.gethostname()}, {since}".encode())
            yield
        finally:
            if fcntl is None:
                file.close()  # Windows removes no file that is open
            with contextlib.suppress(OSError):
                os.remove(path)
