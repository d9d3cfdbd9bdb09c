"""How a run ends with a message instead of a traceback, and what the machine refuses, in words.

Exit code 2 is a mistake that the user can fix, 1 a run that cannot continue.
"""

import contextlib
import errno
import os
import re
import shutil
import signal
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
    if len(problems) == 1 and not of:
        raise UserError(problems[0])
    count = f"{len(problems):,} problem{'s' * (len(problems) > 1)}:"
    lines = [problem.replace("\n", "\n  ") for problem in problems[:most]]
    left = len(problems) - len(lines)
    more = [f"… and {left:,} more"] * (left > 0)
    raise UserError("\n  ".join([f"{of}: {count}" if of else count, *lines, *more]))


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
NAMES = {  # UserError
    errno.EACCES: (
        "permission denied",
        "choose a file or folder that you may use, or change its permissions",
    ),
    errno.EPERM: ("operation not permitted", "choose a file or folder that you may use"),
    errno.EEXIST: ("exists and stays as it is", "move it away, or choose another name"),
    errno.EISDIR: ("found a folder, expected a file", "move it away, or choose another name"),
    errno.ENOTDIR: ("found a file where the path has a folder", "choose another name"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter one"),
    errno.ELOOP: ("its symbolic links lead in a circle", "choose another name"),
    errno.ETXTBSY: ("it is a program that runs", "choose another name"),
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
        cause, remedy = MACHINE.get(number) or NAMES[number]
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
    text = str(error)
    if "received 0 items of ancdata" in text:  # a tensor from a process that loads data
        return errno.EMFILE
    if "can't start new thread" in text:
        return errno.EAGAIN
    for number in MACHINE:
        if os.strerror(number) in text and number != errno.EAGAIN:
            return number
    hidden = error.__context__
    while hidden is not None and not isinstance(hidden, OSError):
        hidden = hidden.__context__
    return hidden.errno if hidden is not None and hidden.errno in MACHINE else None


# ---- running out of memory


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU, of the machine, or of what `ulimit -v` leaves of it."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # torch's
        or isinstance(error, OSError)
        and error.errno == errno.ENOMEM
        or isinstance(error, RuntimeError)
        and _OUT_OF_MEMORY.search(str(error)) is not None
    )


def memory_in_words(error: BaseException) -> str:
    """That there was not enough memory, and how much was asked for, without what to do."""
    text = str(error)
    if found := re.search(
        r"Tried to allocate ([\d.]+ \w+).*?total capacity of ([\d.]+ \w+)", text, re.DOTALL
    ):
        return f"out of memory ({found[1]} more were asked for, of {found[2]} that the GPU has)"
    if found := re.search(r"allocate (\d+) bytes", text):
        return f"out of memory ({size_words(int(found[1]))} more were asked for)"
    return "out of memory"


@contextlib.contextmanager
def memory_error_ends_with(advice: str) -> Generator[None]:
    """Running out of memory inside ends with what to do, said by the process that it happened to."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(f"{memory_in_words(error)}{advice}", said_by_all=True) from None


def too_few_open_files(workers: int, tensors: int) -> str:
    """Raises the limit of open files to what processes that load data need: torch would wait for ever for a
    batch that one of them could not hand over. Returns "", or what to do if the system refuses.

    workers: of this process; tensors: on their way at once from each of them. Each is an open file here and
    two in its worker, which has the files of this process besides.
    """
    try:
        import resource
    except ImportError:  # Windows
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 64 + 8 * workers + max(workers, 2) * tensors
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return ""
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return ""
    except (OSError, ValueError):
        return (
            f"--num-workers {workers}: up to {needed:,} open files are needed, and this process may open"
            f" {soft:,} (ulimit -n); ulimit -n {max(4096, 1 << needed.bit_length())}, before the command, or"
            " --num-workers 0"
        )


def size_words(count: int) -> str:
    """Bytes in words: 900 bytes, 35 MB, 1.2 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}" if count < 10 * size else f"{count / size:,.0f} {unit}"
    return f"{count} bytes"


def how_it_ended(exitcode: int | None) -> str:
    """A process, in words; a negative code is the signal that ended it."""
    if exitcode == -signal.SIGKILL:
        return " (killed by SIGKILL: the system does so where memory runs out)"
    if exitcode is not None and exitcode < 0:
        return f" (ended by signal {-exitcode}, {signal.strsignal(-exitcode)})"
    return f" (exit code {exitcode})" if exitcode else ""
