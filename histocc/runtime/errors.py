"""How a run ends with a message instead of a traceback, and what the machine refuses, in words.

Exit code 2 is a mistake that the user can fix, 1 a run that cannot continue.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Generator


class RunError(Exception):
    """Ends every rank with one message, from rank 0.

    said_by_all: it is of one process alone, which says it itself, whichever rank that is; heard_from_main:
    all ranks know of it at the same time, so that they do not wait for rank 0 to find it, too.
    """

    def __init__(self, message: str = "", *, said_by_all: bool = False, heard_from_main: bool = False):
        super().__init__(message)
        self.said_by_all, self.heard_from_main = said_by_all, heard_from_main


class UserError(RunError):
    """A mistake that the user can fix: exit code 2."""


class TrainingError(RunError):
    """A run that cannot continue: exit code 1."""


def raise_if_any(problems: list[str], of: str = "", most: int | None = None) -> None:
    """Raises one UserError that lists `problems`, below how many they are; a single one of nothing stands
    alone.

    of: what they are problems of; most: how many are listed.
    """
    if not problems:
        return
    lines = [problem.replace("\n", "\n  ") for problem in problems[:most]]
    if len(lines) < len(problems):
        lines.append(f"… and {len(problems) - len(lines):,} more")
    if of or len(problems) > 1:
        lines.insert(0, (of and f"{of}: ") + f"{len(problems):,} problem{'s' * (len(problems) > 1)}:")
    raise UserError("\n  ".join(lines))


# ---- what the machine refuses: errno → (cause, remedy)

MACHINE = {  # TrainingError
    errno.ENOSPC: ("no space left on the device", "make room (df -h and df -i), or choose another folder"),
    errno.EDQUOT: ("the disk quota is used up", "make room (quota -s), or choose another folder"),
    errno.EFBIG: ("the file is too large", "raise ulimit -f, or choose another folder"),
    errno.EROFS: ("the file system is read-only", "choose another folder, or see dmesg for why"),
    errno.EIO: ("input/output error", "the disk or its connection fails (dmesg): choose another folder"),
    errno.ESTALE: ("the file is gone from its file server", "give the same command again once that is back"),
    errno.EMFILE: ("too many open files", "ulimit -n 4096, before the command, or --num-workers 0"),
    errno.ENFILE: ("too many open files on this machine", "close other programs, or --num-workers 0"),
    errno.EAGAIN: ("no more processes or threads can be started (ulimit -u)", "take fewer --num-workers"),
}
NAMES = {  # UserError, whose remedy is another name
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.EEXIST: "exists and stays as it is",
    errno.EISDIR: "found a folder, expected a file",
    errno.ENOTDIR: "found a file where the path has a folder",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "its symbolic links lead in a circle",
    errno.ETXTBSY: "it is a program that runs",
}
SHARED_MEMORY_IS_FULL = (
    "/dev/shm is full: processes that load data hand it over there; --num-workers 0, or a larger one"
    " (docker run --shm-size=8g)"
)
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|ALLOC_FAILED|out of memory|std::bad_alloc|Cannot allocate memory"
    r"|could not (create|execute) a (primitive|memory)"
)


def in_words(error: BaseException, path: str | None = None, size: int | None = None) -> str:
    """What happened, where, how much was needed and is free, and what to do. An unknown error keeps its
    words.

    path: the file in question, if the error does not name it; size: bytes that were to be written there.
    """
    number, path = errno_of(error), path or getattr(error, "filename", None)
    at = f"{os.fsdecode(path)}: " if isinstance(path, str | bytes) else ""
    if number == errno.ENOSPC and re.search("shared memory|</torch_", str(error)):
        return SHARED_MEMORY_IS_FULL
    if is_out_of_memory(error):
        return at + memory_in_words(error)
    if number in MACHINE or number in NAMES:
        cause, remedy = MACHINE.get(number) or (NAMES[number], "choose another file or folder")
        facts = [f"{size_words(size)} needed"] if size else []
        if at and number in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(os.path.dirname(os.path.abspath(os.fsdecode(path or "")))).free
                facts.append(f"{size_words(free)} free")
        return f"{at}{', '.join([cause, *facts])}; {remedy}"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return at + (text.strip() or type(error).__name__)


def as_user_error(error: BaseException) -> UserError | TrainingError | None:
    """The same error as a message that ends the program, said by the process that it happened to; None if it
    is none of the machine.
    """
    if isinstance(error, (UserError, TrainingError)):
        return error
    number = errno_of(error)
    if number in NAMES and isinstance(getattr(error, "filename", None), str | bytes):
        return UserError(in_words(error), said_by_all=True)
    if number in MACHINE or is_out_of_memory(error):
        return TrainingError(in_words(error), said_by_all=True)
    return None


def errno_of(error: BaseException) -> int | None:
    """Of an OSError, as the text of another error tells it, or of the OSError that torch's writer hides."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if not isinstance(error, (OSError, RuntimeError)):
        return None
    if "received 0 items of ancdata" in str(error):  # a tensor from a process that loads data
        return errno.EMFILE
    if "can't start new thread" in str(error):
        return errno.EAGAIN
    named = (number for number in MACHINE if os.strerror(number) in str(error) and number != errno.EAGAIN)
    hidden = error.__context__
    while hidden is not None and not isinstance(hidden, OSError):
        hidden = hidden.__context__
    return next(named, hidden.errno if hidden is not None and hidden.errno in MACHINE else None)


# ---- running out of memory


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU, of the machine, or of what `ulimit -v` leaves of it."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    of_torch = type(error).__name__ == "OutOfMemoryError"
    by_text = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    return isinstance(error, MemoryError) or of_torch or by_text


def memory_in_words(error: BaseException) -> str:
    """That there was not enough memory, and how much was asked for, without what to do."""
    asked = re.search(r"allocate ([\d.]+ \w+)", str(error))
    return "out of memory" + (f" ({asked[1]} more were asked for)" if asked else "")


@contextlib.contextmanager
def memory_error_ends_with(advice: str) -> Generator[None]:
    """Running out of memory inside ends with what to do, said by the process that it happened to."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(f"{memory_in_words(error)}{advice}", said_by_all=True) from None


def allow_open_files() -> None:
    """Raises this process's limit of open files as far as the system lets it: each tensor on its way from a
    process that loads data is one, and torch waits for ever for a batch that could not be handed over.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows; refused
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def size_words(count: int) -> str:
    """Bytes in words: 900 bytes, 35 MB, 1.2 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}" if count < 10 * size else f"{count / size:,.0f} {unit}"
    return f"{count} bytes"
