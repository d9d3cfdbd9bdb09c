"""Errors that end a run with a message instead of a traceback, and messages for failures of the machine."""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Generator

from histocc.runtime import log


class RunError(Exception):
    """An error that ends every rank with one message. rank: its origin, if `World.run_on` raised it."""

    exit_code = 1
    rank: int | None = None


class UserError(RunError):
    """A mistake that the user can fix."""

    exit_code = 2


class Unreadable(UserError):
    """A file that the system cannot hand over, so that nothing is known about its bytes."""


class TrainingError(RunError):
    """A run that cannot continue."""


def raise_if_any(problems: list[str], of: str = "", most: int | None = None) -> None:
    """Raise one UserError if there are `problems`: a line with `of` and their number, then at most `most`
    problems. A single problem without `of` has no such line.
    """
    if not problems:
        return
    lines = [problem.replace("\n", "\n  ") for problem in problems[:most]]
    if len(lines) < len(problems):
        lines.append(f"… and {len(problems) - len(lines):,} more")
    if of or len(problems) > 1:
        lines.insert(0, (of and f"{of}: ") + f"{len(problems):,} problem{'s' * (len(problems) > 1)}:")
    raise UserError("\n  ".join(lines))


def run_command(work: Callable[[], int | None]) -> int:
    """Run a command in one process and return its exit code, 130 after Ctrl-C (`start` runs several)."""
    with log.safe_output():
        try:
            return work() or 0
        except Exception as error:
            known = as_user_error(error) or (UserError(str(error)) if isinstance(error, OSError) else None)
            if known is None:
                raise
            print(f"error: {known}", file=sys.stderr)
            return known.exit_code
        except KeyboardInterrupt:
            return 130


# ---- refusals of the machine

MACHINE = {  # errno → text of a TrainingError: cause and remedy
    errno.ENOSPC: "no space left on the device; make room (df -h and df -i), or choose another folder",
    errno.EDQUOT: "the disk quota is used up; make room (quota -s), or choose another folder",
    errno.EFBIG: "the file is too large; raise ulimit -f, or choose another folder",
    errno.EIO: "input/output error; the disk or its connection fails (dmesg): choose another folder",
    errno.EMFILE: "too many open files; ulimit -n 4096, before the command, or --num-workers 0",
    errno.EAGAIN: "no more processes or threads can be started (ulimit -u); take fewer --num-workers",
}
SHARED_MEMORY_IS_FULL = (
    "/dev/shm is full: processes that load data hand it over there; --num-workers 0, or a larger one"
    " (docker run --shm-size=8g)"
)
OTHER_TORCH = "README.md says which torch fits which driver and card"
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|ALLOC_FAILED|out of memory|std::bad_alloc|Cannot allocate memory"
    r"|could not (create|execute) a (primitive|memory)"
)


def in_words(error: BaseException, path: str | None = None) -> str:
    """Return what happened, where, and what to do. path: the file, if the error does not name it."""
    number, path = errno_of(error), path or getattr(error, "filename", None)
    at = f"{os.fsdecode(path)}: " if isinstance(path, str | bytes) else ""
    if number == errno.ENOSPC and re.search("shared memory|</torch_", str(error)):
        return SHARED_MEMORY_IS_FULL
    if is_out_of_memory(error):
        return at + "out of memory"
    if number in MACHINE:
        return at + MACHINE[number]
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return at + (text.strip() or type(error).__name__)


def as_user_error(error: BaseException) -> UserError | TrainingError | None:
    """Return the error as a message that ends this process, or None if no machine or file caused it."""
    if isinstance(error, (UserError, TrainingError)):
        return error
    if "no kernel image is available" in str(error):
        return UserError(f"this torch was not built for this GPU; {OTHER_TORCH}")
    if errno_of(error) in MACHINE or is_out_of_memory(error):
        return TrainingError(in_words(error))
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes):
        return UserError(in_words(error))
    return None


def errno_of(error: BaseException) -> int | None:
    """Return the errno of an OSError, of one that torch's writer hides, or one that an error's text names."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if not isinstance(error, (OSError, RuntimeError)):
        return None
    if "received 0 items of ancdata" in str(error):  # a process that loads data sent a tensor
        return errno.EMFILE
    if "can't start new thread" in str(error):
        return errno.EAGAIN
    named = (number for number in MACHINE if os.strerror(number) in str(error) and number != errno.EAGAIN)
    hidden = error.__context__
    while hidden is not None and not isinstance(hidden, OSError):
        hidden = hidden.__context__
    return next(named, hidden.errno if hidden is not None and hidden.errno in MACHINE else None)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on a GPU, on the machine or within `ulimit -v`."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    of_torch = type(error).__name__ == "OutOfMemoryError"
    by_text = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    return isinstance(error, MemoryError) or of_torch or by_text


@contextlib.contextmanager
def memory_error_ends_with(advice: str) -> Generator[None]:
    """End with `advice` if memory runs out inside. The affected process prints it."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(f"out of memory{advice}") from None


def allow_open_files() -> None:
    """Raise the limit of open files as far as allowed. Each tensor from a process that loads data takes one,
    and torch waits forever for a batch that could not be handed over.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows, or refused
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
