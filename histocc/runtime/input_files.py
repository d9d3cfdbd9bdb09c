"""What a path given by the user is, before anything is read from it.

Input files are read more than once, so only a regular file will do: opening a pipe without a writer blocks
without end, and a second pass through one finds nothing. `spooled` turns what comes through one into a file.
"""

import contextlib
import errno
import os
import select
import stat
import time
from collections.abc import Callable, Generator, Iterator
from typing import BinaryIO

from histocc.runtime.errors import UserError

_KINDS = (
    (stat.S_ISDIR, "is a folder, not a file"),
    (stat.S_ISFIFO, "is a pipe, which can be read only once; save it as a file first"),
    (stat.S_ISSOCK, "is a socket, not a file; save what it sends as a file first"),
    (stat.S_ISCHR, "is a device, not a file"),
    (stat.S_ISBLK, "is a device, not a file"),
)
_REASONS = {
    errno.ENOENT: "no such file",
    errno.ENOTDIR: "no such file (a part of the path is a file, not a folder)",
    errno.ENAMETOOLONG: "cannot be read: the name is too long",
    errno.ELOOP: "cannot be read: its symbolic links lead back to themselves",
}
_POLL_SECONDS = 0.2
_BLOCK = 1 << 20  # bytes


def unreadable(path: str, error: OSError | ValueError) -> UserError:
    """The message for a path that cannot be opened or read."""
    if not isinstance(error, OSError):  # the name itself: NUL, or what the system cannot encode
        return UserError(f"{path!r:.200}: is not the name of a file ({error})")
    if not path:
        return UserError("the name of an input file is empty")
    shown = path if len(path) <= 200 else path[:200] + "…"
    reason = _REASONS.get(error.errno or 0, f"cannot be read: {error.strerror or error}")
    return UserError(f"{shown}: {reason}")


def regular_file(path: str) -> None:
    """Raises UserError unless `path`, links followed, is a regular file. Never blocks on a pipe."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    kind = next((words for is_kind, words in _KINDS if is_kind(mode)), None)
    if kind:
        raise UserError(f"{path}: {kind}")


@contextlib.contextmanager
def opened(path: str) -> Generator[BinaryIO]:
    """A regular file, open for reading bytes. Raises UserError where it is none or cannot be read."""
    regular_file(path)
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from None


def is_pipe(path: str) -> bool:
    """Whether `path`, links followed, is a named pipe or another one such as /dev/stdin or /dev/fd/63."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def spooled(path: str, target: str, check: Callable[[], None], limit_seconds: float) -> int:
    """Copies what comes out of a pipe, until its last writer closes it, into the file `target`.

    Args:
        path: a pipe (`is_pipe`).
        target: written again; removed where anything is raised.
        check: called several times a second, also while nothing comes; what it raises ends the copying.
        limit_seconds: how long nothing may come, neither a writer nor a byte.

    Returns:
        The number of bytes.

    Raises:
        UserError: the pipe cannot be read, the target cannot be written, or the limit is reached.
    """
    try:
        source = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # waits for no writer
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(target)
        with open(target, "xb") as file:  # follows no link
            return sum(file.write(block) for block in _arriving(path, source, check, limit_seconds))
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(target)
        if isinstance(error, OSError):
            raise UserError(f"{path}: cannot be saved as {target}: {error.strerror or error}") from None
        raise
    finally:
        os.close(source)


def _arriving(path: str, source: int, check: Callable[[], None], limit_seconds: float) -> Iterator[bytes]:
    """What comes through the open pipe `source`, in blocks."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    heard = checked = time.monotonic()
    check()
    while True:
        # Before the first writer has come a read would return b"", as at the end; poll reports nothing then.
        ready = poll.poll(_POLL_SECONDS * 1000)
        now = time.monotonic()
        if now - checked >= _POLL_SECONDS:
            check()
            checked = now
        block = None
        if ready:
            with contextlib.suppress(BlockingIOError):  # another reader was faster
                block = os.read(source, _BLOCK)
        if block == b"":
            return
        if block:
            heard = now
            yield block
        elif now - heard > limit_seconds:
            raise UserError(
                f"{path}: nothing has come through this pipe for {limit_seconds:g} s; start the "
                "program that writes to it, or save its output as a file"
            )
