"""The frame that a command runs in: its arguments, its processes, its messages and its exit code."""

import atexit
import contextlib
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from textwrap import shorten
from typing import Any, NoReturn

import torch.distributed as dist

from histocc.runtime import log, signals
from histocc.runtime.config import Parser
from histocc.runtime.errors import UserError, as_user_error
from histocc.runtime.signals import Stopped, stop_asked
from histocc.runtime.world import World, close_world, init_world, is_first_rank

# how long a silent rank waits for rank 0 to say what is wrong, which may start later; and once it has noticed
PEER_PATIENCE_SECONDS, HEARD_PATIENCE_SECONDS = 20.0, 2.0
MISSING_SECONDS = 10.0  # for ranks whose wait has reached the time limit to say so: torchrun kills after 30
CLOSE_SECONDS, STOP_SECONDS = 60.0, 2.0  # for exit functions of libraries, the latter if the run was stopped
LOST_CONTACT = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed out|socket|broken pipe|peer", re.IGNORECASE
)

# Libraries that may have left threads, processes and exit functions behind.
libraries: list[str] = []


def run_command(work: Callable[[], int | None]) -> int:
    """Runs a command of one process; returns its exit code: what `work` returns or 0, 2 with one message for
    a user's mistake, 130 after Ctrl-C. Printing never ends it.
    """
    with log.opened(), signals.stacks_at_sigusr2():
        try:
            return work() or 0
        except Exception as error:
            known = as_user_error(error) or (UserError(str(error)) if isinstance(error, OSError) else None)
            if known is None:
                raise
            print(f"error: {known}", file=sys.stderr)
            return 2 if isinstance(known, UserError) else 1
        except KeyboardInterrupt:
            return 130


def start(
    parser: Parser,
    run: Callable[[Any, World], None],
    argv: list[str] | None = None,
    when_stopped: str = " before the first step. The same command starts again.",
) -> None:
    """Parses, joins the other processes, runs, leaves them. The model must live inside `run`: a DDP object
    that is still alive when the interpreter ends can abort the process.

    when_stopped: what is said, behind the signal's name, of a `run` that gave up with Stopped.
    """
    code, joined = 0, False
    with log.opened():
        try:
            with errors_end_all_ranks():
                if not is_first_rank() and {"-h", "--help", "--version"} & set(argv or sys.argv[1:]):
                    sys.exit(0)  # rank 0 prints it
                if not gc.isenabled():  # put off by `start_listening`; what was imported stays
                    gc.freeze()
                    gc.enable()
                args = parser.parse_args(argv)
                with signals.listening() as stop:
                    stop.limit(getattr(args, "stop_after", None))
                    world = init_world(
                        args.distributed,
                        world_size=args.world_size,
                        local_rank=args.local_rank,
                        device=args.device,
                        timeout_minutes=args.timeout_minutes,
                    )
                    log.show_progress(world.is_main and not args.quiet)
                    try:
                        run(args, world)
                    except Stopped:
                        stop.acted = True
                        world.print(
                            f"Stopped by {stop.reason or 'a signal to another process'}{when_stopped}"
                        )
                    except Exception as error:
                        lost = isinstance(error, dist.DistError) or (
                            isinstance(error, RuntimeError) and LOST_CONTACT.search(str(error))
                        )
                        if world.size > 1 and lost:
                            end_without_others(world, error)
                        raise
                    gc.collect()
                    close_world(world)
                    code, joined = stop.exit_code if stop.acted else 0, bool(world.backend)
        except SystemExit as ended:
            code = ended.code or 0
        if joined or libraries and argv is None:  # with arguments of a caller, the process is the caller's
            end_process(code, STOP_SECONDS if stop_asked() else CLOSE_SECONDS)
    if code:
        sys.exit(code)


def end_without_others(world: World, error: Exception) -> NoReturn:
    """After a collective has failed: at the time limit names who is missing, else that the connection is
    lost; the first rank of those that are left says it. Exit code 1. Does not return.

    A launcher names the process that has ended, and ends all others then: it must find that one first.
    """
    reason = shorten((str(error).strip() or type(error).__name__).splitlines()[-1], 200, placeholder=" …")
    files = signals.stacks_written()  # the time limit is up
    late = bool(files) or "timed out" in str(error).lower()
    missing, speaks = world.missing(min(MISSING_SECONDS, 0.1 * world.time_limit) if late else 0.0)
    if not late:
        what = "the connection to another process is lost; its own message, or the launcher's, says why"
    elif missing:
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        what = f"{ranks} did not come within the time limit (--timeout-minutes)"
    else:
        what = "all processes wait for each other until the time limit (--timeout-minutes)"
    if speaks:
        print(
            f"error: {what}. Rank {world.rank} waited ({reason}). Checkpoints are whole: the same command"
            " (without --overwrite) continues from the newest, or starts over if there is none."
            + (files and f"\n  {files}"),
            file=sys.stderr,
            flush=True,
        )
    until = time.monotonic() + (0.0 if late else HEARD_PATIENCE_SECONDS)
    while not stop_asked() and time.monotonic() < until:
        time.sleep(0.05)
    os._exit(1)


def end_process(code: str | int, exit_seconds: float = 30.0) -> NoReturn:
    """Ends a process that has done its work and left its process group. Does not return.

    The interpreter's own ending can abort it (SIGABRT, "terminate called without an active exception"), when
    a thread of the backend asks for the interpreter while that is being taken apart; and it waits for threads
    and processes of libraries. exit_seconds: what functions registered with atexit may take.
    """
    calls = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    calls.start()
    calls.join(exit_seconds)
    for process in multiprocessing.active_children():
        process.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)  # as sys.exit does with a text


@contextlib.contextmanager
def errors_end_all_ranks() -> Generator[None]:
    """Turns UserError into exit code 2 and TrainingError into 1: one message, from rank 0, and no traceback.

    The other ranks stay silent and give rank 0 time to speak: a launcher ends its workers as soon as one is
    gone. If there still is a process group, the process ends without leaving it: NCCL would wait in it for
    those that are stuck in a collective.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        known = as_user_error(error)  # what is one already, too
        if known is None:
            if not dist.is_initialized():
                raise
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            end_process(error.code or 0 if isinstance(error, SystemExit) else 1)
        code = 2 if isinstance(known, UserError) else 1
        if is_first_rank() or known.said_by_all:
            print(f"error: {known}", file=sys.stderr, flush=True)
        else:
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))
            time.sleep(HEARD_PATIENCE_SECONDS if known.heard_from_main else PEER_PATIENCE_SECONDS)
        if dist.is_initialized():
            end_process(code)
        sys.exit(code)
