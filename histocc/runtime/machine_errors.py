"""Errors of the machine in words: no space, no memory, too many open files, and what to do about each.

torch says some of them in its own way: a failed write is a RuntimeError whose context holds the OSError of
the file, and what a process that loads data ran into is known from the text alone.
"""

import contextlib
import errno
import os
import re
import resource
import shutil
import signal
from collections.abc import Iterator

import torch

from histocc.runtime.errors import TrainingError, UserError

SHARED_MEMORY = "/dev/shm"
_OTHER_FOLDER = "choose another folder"
_WRITES = {  # errno of what a disk refuses: the cause, and what to do
    errno.ENOSPC: ("no space left on the device", f"make room, or {_OTHER_FOLDER}"),
    errno.EDQUOT: ("the disk quota is used up", f"make room (quota -s shows it), or {_OTHER_FOLDER}"),
    errno.EFBIG: ("the file is too large", f"{_OTHER_FOLDER}: this file system takes no file of that size"),
    errno.EROFS: (
        "the file system is read-only",
        f"{_OTHER_FOLDER}; one that could be written before may be damaged (dmesg)",
    ),
    errno.EIO: ("input/output error", f"the disk, or the connection to it, fails (dmesg): {_OTHER_FOLDER}"),
    errno.ESTALE: (
        "the file is gone from its file server",
        "wait until the server is back, and give the same command again",
    ),
}
_FILES = {  # errno of what is wrong with a name
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
_OPEN_FILES = (errno.EMFILE, errno.ENFILE)
_IN_TEXTS = (*_WRITES, *_OPEN_FILES, errno.ENOMEM)  # torch gives the system's text for these
_WITHOUT_ERRNO = {  # and others of its texts
    r"received 0 items of ancdata|unable to open shared memory object": errno.EMFILE,
    r"can't start new thread": errno.EAGAIN,
}
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|ALLOC_FAILED|out of memory|std::bad_alloc|Cannot "
    r"allocate memory|could not (create|execute) a (primitive|memory)"
)
_LOADER = re.compile(r"DataLoader worker .*(killed by signal|exited unexpectedly)")
_KILLED = re.compile(r"DataLoader worker .*killed by signal: Killed")
_SHARED = re.compile(r"out of shared memory|killed by signal: Bus error|shm|shared memory|</torch_")
_WRITER = re.compile(r"inline_container|StreamWriter|write failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU, of the machine, or of what `ulimit -v` leaves of it."""
    return (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or isinstance(error, OSError)
        and error.errno == errno.ENOMEM
        or isinstance(error, RuntimeError)
        and _OUT_OF_MEMORY.search(str(error)) is not None
    )


def in_words(error: BaseException, path: str | None = None, size: int | None = None) -> str:
    """What happened, where, how much was needed and is free, and what to do. An unknown error keeps its
    words.

    path: the file in question, where the error does not name it; size: bytes that were to be written there.
    """
    number, path = _errno(error), path or getattr(error, "filename", None)
    at = f"{os.fsdecode(path)}: " if isinstance(path, str | bytes) else ""
    if number in _WRITES and not _is_of_shared_memory(error):
        cause, remedy = _WRITES[number]
        if number == errno.EFBIG and (most := _limit(resource.RLIMIT_FSIZE)) is not None:
            cause = f"{cause}: one may have {size_words(most)} at most (ulimit -f)"
            remedy = "ulimit -f unlimited, before the command"
        return f"{at}{', '.join([cause, *_space(number, path, size)])}; {remedy}"
    if number in _FILES:
        cause, remedy = _FILES[number]
        return f"{at}{cause}; {remedy}"
    if number in _WRITES or _SHARED.search(str(error)) and number is None and isinstance(error, RuntimeError):
        return (
            f"{SHARED_MEMORY} is full, {', '.join(_space(errno.ENOSPC, SHARED_MEMORY, None))}: "
            "processes that load data hand it over there; "
            "--num-workers 0, or a larger one (docker run --shm-size=8g)"
        )
    if number in _OPEN_FILES:
        limit = _limit(resource.RLIMIT_NOFILE)
        own = number == errno.EMFILE and limit is not None
        most = f": this process may open {limit:,} (ulimit -n)" if own else " on this machine"
        enough = max(4096, 2 * (limit or 0))
        return f"{at}too many open files{most}; ulimit -n {enough}, before the command, or --num-workers 0"
    if is_out_of_memory(error) or _KILLED.search(str(error)):
        return at + memory_in_words(error)
    if number == errno.EAGAIN:
        return f"{at}no more processes or threads can be started (ulimit -u); take fewer --num-workers"
    if _LOADER.search(str(error)):
        return (
            f"{at}a process that loads data has died; --num-workers 0 shows where"
            f" ({str(error).splitlines()[0]})"
        )
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return at + (said.strip() or type(error).__name__)


def memory_in_words(error: BaseException) -> str:
    """That there was not enough memory, how much was asked for, and what limits it, without what to do."""
    text, most = str(error), _limit(resource.RLIMIT_AS)
    if _KILLED.search(text):
        return "out of memory, perhaps: a process that loads data was killed; fewer --num-workers need less"
    facts = []
    if on_gpu := re.search(
        r"Tried to allocate ([\d.]+ \w+).*?total capacity of ([\d.]+ \w+)", text, re.DOTALL
    ):
        facts = [f"{on_gpu[1]} more were asked for, of {on_gpu[2]} that the GPU has"]
    elif asked := re.search(r"allocate (\d+) bytes", text):
        facts = [f"{size_words(int(asked[1]))} more were asked for"]
    if most is not None:
        facts.append(f"the process may have {size_words(most)}: ulimit -v")
    return "out of memory" + (f" ({', '.join(facts)})" if facts else "")


def as_user_error(error: BaseException) -> UserError | TrainingError | None:
    """The same error as a message that ends the program, said by the process that it happened to; None where
    it is none of the machine.
    """
    if isinstance(error, (UserError, TrainingError)):
        return error
    number, text = _errno(error), str(error)
    named = isinstance(getattr(error, "filename", None), str | bytes)
    known = number in (*_WRITES, *_OPEN_FILES) or number in _FILES and named or is_out_of_memory(error)
    if isinstance(error, RuntimeError):
        of_worker = _LOADER.search(text) or "DataLoader" in text and _SHARED.search(text)
        known = known or number == errno.EAGAIN or bool(of_worker)
    if not known:
        return None
    return (UserError if number in _FILES else TrainingError)(in_words(error), said_by_all=True)


def too_few_open_files(workers: int, tensors: int) -> str:
    """Raises the limit of open files where processes that load data could reach it: torch would wait for ever
    for a batch that one of them could not hand over. "", or what to do where the system does not allow
    enough.

    workers: of this process; tensors: on their way at once, of each of them. Each is an open file here and
    two in its worker until it has been fetched, and a worker has the files of this process besides.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ""
    try:
        here = len(os.listdir("/proc/self/fd"))
    except OSError:
        here = 32
    needed = here + 8 * workers + max(workers, 2) * tensors + 8
    if needed > soft and (hard == resource.RLIM_INFINITY or needed <= hard):
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            return ""
    return (
        ""
        if needed <= soft
        else (
            f"--num-workers {workers}: up to {needed:,} open files are needed, and this process may open "
            f"{soft:,} (ulimit -n); "
            f"ulimit -n {max(4096, 1 << needed.bit_length())}, before the command, or --num-workers 0"
        )
    )


def size_words(count: int) -> str:
    """Bytes in words: 900 bytes, 35 MB, 1.2 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}" if count < 10 * size else f"{count / size:,.0f} {unit}"
    return f"{count} bytes"


def _errno(error: BaseException) -> int | None:
    """Of the error, of the OSError that it hides, or as its text tells it; None where none is known."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    text = str(error)
    if _WRITER.search(text):
        return next((cause.errno for cause in _causes(error) if isinstance(cause, OSError)), None)
    if isinstance(error, (OSError, RuntimeError)):
        for number in _IN_TEXTS:
            if os.strerror(number) in text:
                return number
        return next((number for pattern, number in _WITHOUT_ERRNO.items() if re.search(pattern, text)), None)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """What the error was raised from, or while."""
    cause = error
    while cause := cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__):
        yield cause


def _is_of_shared_memory(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _SHARED.search(str(error)) is not None


def _limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _space(number: int, path: str | None, size: int | None) -> list[str]:
    """What was needed and, where that is the cause, what is free."""
    found = [f"{size_words(size)} needed"] if size else []
    folder = os.path.abspath(os.fsdecode(path)) if path else None
    while folder and not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    if folder and number in (errno.ENOSPC, errno.EDQUOT):
        try:
            found.append(f"{size_words(shutil.disk_usage(folder).free)} free")
            if number == errno.ENOSPC and os.statvfs(folder).f_files and not os.statvfs(folder).f_favail:
                found.append("and no file can be added (df -i)")
        except OSError:
            pass
    return found


def how_it_ended(exitcode: int | None) -> str:
    """In words; a negative code is the signal that ended a process."""
    if exitcode == -signal.SIGKILL:
        return " (killed by SIGKILL: the system does so where memory runs out)"
    if exitcode is not None and exitcode < 0:
        return f" (ended by signal {-exitcode}, {signal.strsignal(-exitcode)})"
    return f" (exit code {exitcode})" if exitcode else ""
