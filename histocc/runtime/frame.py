"""The frame of a command that several processes may run: its start and its end, with one message for all.
`run_command` in `histocc.runtime.errors` is the frame of a single process.
"""

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
from datetime import timedelta
from textwrap import shorten
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from histocc.runtime import log, signals
from histocc.runtime.config import Parser
from histocc.runtime.errors import RunError, TrainingError, as_user_error
from histocc.runtime.signals import Stopped, stop_asked
from histocc.runtime.world import CANNOT_SEND, World, init_world, is_first_rank, met, wait_for_address

# seconds that the others leave rank 0 to say what is wrong, before they have joined and afterwards
JOINING_PATIENCE_SECONDS, PATIENCE_SECONDS = 20.0, 3.0
LINGER_SECONDS = 1.0  # pause of rank 0 after its message
MISSING_SECONDS = 8.0  # limit for ranks to say that their wait timed out: torchrun kills after 30
CLOSE_SECONDS, STOP_SECONDS = 60.0, 2.0  # limits of libraries' exit functions, the latter after a stop
LOST_CONTACT = re.compile(r"gloo|nccl|connection|time(d )?out|socket|broken pipe|peer|pair", re.IGNORECASE)
COLLECTIVES = re.compile(r"torch/(distributed|nn/parallel|autograd)/|histocc/runtime/(world|parallel)\.py$")
SAID = "said"  # key of the store: the rank that prints why the job ends, and its exit code
libraries: list[str] = []  # they may have left threads, processes and exit functions


def start(parser: Parser, run: Callable[[Any, World], None], argv: list[str] | None = None) -> None:
    """Parse the arguments, join the other processes, run, and leave them. The model must live inside `run`,
    since a DDP object still alive when the interpreter ends can abort the process.
    """
    code, joined = 0, False
    with log.safe_output():
        try:
            with errors_end_all_ranks():
                if not is_first_rank() and {"-h", "--help", "--version"} & set(argv or sys.argv[1:]):
                    sys.exit(0)  # rank 0 prints it
                args = parser.parse_args(argv)
                with signals.listening() as stop:
                    world = init_world(args)
                    log.show_progress(world.is_main and not args.quiet)
                    try:
                        run(args, world)
                    except Stopped:
                        stop.acted = True
                        reason = stop.reason or "a signal to another process"
                        world.print(f"Stopped by {reason}. Give the same command again to continue")
                    except RuntimeError as error:
                        if world.size > 1 and is_lost_contact(error):
                            end_without_others(world, error)
                        raise
                    if world.backend:
                        gc.collect()  # no DDP object is alive any more
                        dist.destroy_process_group()
                    code, joined = stop.exit_code if stop.acted else 0, bool(world.backend)
        except SystemExit as ended:
            code = ended.code or 0
        if joined or libraries and argv is None:  # with arguments of a caller, the process is the caller's
            end_process(code, STOP_SECONDS if stop_asked() else CLOSE_SECONDS)
    if code:
        sys.exit(code)


def ask_store(question: Callable[[Any], Any], otherwise: Any) -> Any:
    """Return the store's answer, or `otherwise` if there is none or its holder, rank 0, is gone or hangs."""
    answers = [otherwise]

    def ask() -> None:
        with contextlib.suppress(OSError, RuntimeError):
            wait_for_address(met.rank, 0.5)  # torch would print its stack if nobody is there
            answers[0] = question(met.store)

    if met.store is not None:
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(2.0)
    return answers[0]


def claim_message(code: int) -> str:
    """Claim the only message for this process. Return the exit code and rank of the first one to do so."""
    own = f"{code} by {met.rank}"
    return ask_store(lambda store: store.compare_set(SAID, "", own).decode(), own)


def is_lost_contact(error: RuntimeError) -> bool:
    """Return whether the connection to another rank failed: torch says so, and a collective raised the error.
    Errors of the user's own code may also mention sockets and time limits.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_torch = os.path.dirname(torch.__file__)
    while files and files[-1].startswith(of_torch) and not COLLECTIVES.search(files[-1]):
        files.pop()  # torch's code below the collective
    says_so = isinstance(error, dist.DistError) or LOST_CONTACT.search(str(error))
    return bool(files and COLLECTIVES.search(files[-1]) and says_so)


def end_without_others(world: World, error: Exception) -> NoReturn:
    """End this process after a failed collective. Name the ranks missing at the time limit, or say that the
    connection is lost. Rank 0 prints this, or another rank if rank 0 is gone, unless a launcher ends it first
    or a rank has reported why it ends. The exit code is 1, or the code of that rank.
    """
    reason = shorten((str(error).strip() or type(error).__name__).splitlines()[-1], 200, placeholder=" …")
    what = "the connection to another process is lost; its own message, or the launcher's, says why"
    late, files = re.search(r"time(d )?out", str(error), re.IGNORECASE), ""
    if late:
        files, missing = signals.stacks_written(), "0"  # others report it if rank 0 does not answer
        seconds = min(MISSING_SECONDS, 0.1 * world.time_limit)

        def meet() -> None:
            nonlocal missing
            try:
                dist.monitored_barrier(world.patient, timedelta(seconds=seconds), wait_all_ranks=True)
                missing = ""
            except RuntimeError as found:
                named = re.search(r"[Rr]anks? ([\d, ]*\d) failed to pass", str(found))
                missing = named[1] if named and world.is_main else "0"

        meeting = threading.Thread(target=meet, daemon=True)
        meeting.start()
        meeting.join(2 * seconds)
        ranks = f"rank{'s' * (',' in missing)} {missing} did not come within the"
        what = f"{ranks if missing else 'all processes wait for each other until the'} time limit"
        what += " (--timeout-minutes)"
    elif "NCCL error" in str(error) and "ncclRemoteError" not in str(error):  # the latter: another has ended
        what = CANNOT_SEND

    def leave_to_launcher(seconds: float) -> None:
        """Let the launcher find the process that ended first. It names that one and ends all others."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if stop_asked():
                os._exit(code)
            time.sleep(0.05)

    code = 1
    if not world.is_main:
        leave_to_launcher(PATIENCE_SECONDS + 0.5 * world.rank)
    if (first := claim_message(code)) == f"{code} by {world.rank}":
        print(
            f"error: {what}. Rank {world.rank} waited ({reason}). Checkpoints are whole: the same command"
            " (without --overwrite) continues from the newest, or starts over if there is none."
            + (files and f"\n  {files}"),
            file=sys.stderr,
            flush=True,
        )
    code = int(first.split()[0])
    if not late:
        leave_to_launcher(PATIENCE_SECONDS)
    os._exit(code)


def end_process(code: str | int, exit_seconds: float = 30.0) -> NoReturn:
    """End a process after its work, outside of its process group. The interpreter's own shutdown can abort
    (SIGABRT, "terminate called without an active exception") when a thread of the backend asks for it, and
    waits for threads and processes of libraries. exit_seconds: time limit of the exit functions.
    """
    calls = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    calls.start()
    calls.join(exit_seconds)
    for process in multiprocessing.active_children():
        process.kill()
    if isinstance(code, str):  # as sys.exit does
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


@contextlib.contextmanager
def errors_end_all_ranks() -> Generator[None]:
    """Turn UserError into exit code 2 and TrainingError into 1, with one message for all ranks. Only other
    errors print a traceback. Before the processes have met, rank 0 prints it, or after some seconds another.

    If there still is a process group, the process ends without leaving it, as NCCL would wait there for ranks
    that hang in a collective.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        known, joined = as_user_error(error), dist.is_available() and dist.is_initialized()
        text = error.code if isinstance(error, SystemExit) else traceback.format_exc().rstrip()
        if known is None and isinstance(text, str) and joined:
            known = TrainingError(text)
        if known is not None:
            say_once(known)
        if joined:
            end_process(known.exit_code if known is not None else text or 0)
        if known is None:
            raise
        sys.exit(known.exit_code)


def say_once(error: RunError) -> None:
    """Print the error if this rank is the first to claim the message in the store. The message names the
    rank, except for rank 0, which speaks for all and has some seconds to do so. Before the ranks have met,
    the others print it if no launcher ends them meanwhile, since rank 0 may not see it.
    """
    is_main, is_met, said = is_first_rank(), met.store is not None, False
    until = time.monotonic() + (PATIENCE_SECONDS if is_met else JOINING_PATIENCE_SECONDS)
    with contextlib.suppress(ValueError):  # this is not the main thread
        if is_met or not is_main:  # a launcher ends its workers as soon as one has ended
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(error.exit_code))
    while not (is_main or said or stop_asked() or time.monotonic() > until):
        time.sleep(0.1)
        said = ask_store(lambda store: store.check([SAID]), False)
    is_ended = stop_asked() and not (is_met or is_main)  # the launcher did so before the handler was set
    if not is_ended and claim_message(error.exit_code).endswith(f" by {met.rank}"):
        rank = os.environ.get("RANK", "")[:30] or "0" if error.rank is None else str(error.rank)
        print(f"error: {f'rank {rank}: ' * (rank != '0')}{error}", file=sys.stderr, flush=True)
    if is_met and is_main:  # it may hold the store, which the others ask
        time.sleep(LINGER_SECONDS)
