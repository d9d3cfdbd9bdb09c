"""The frame that a command runs in: its arguments, its processes, its messages and its exit code."""

import argparse
import gc
import sys
from collections.abc import Callable

from histocc.runtime import console, progress, stacks, watchdog
from histocc.runtime.arguments import Group, Parser, count, positive
from histocc.runtime.errors import UserError
from histocc.runtime.heartbeat import say_who_is_missing
from histocc.runtime.machine_errors import as_user_error
from histocc.runtime.signals import Stopped, stop_request
from histocc.runtime.world import (
    World,
    close_world,
    end_process,
    errors_end_all_ranks,
    init_world,
    is_first_rank,
    lost_contact,
)

# for exit functions of libraries, at the end of a run and where it was stopped
CLOSE_SECONDS = 60.0
STOP_SECONDS = 2.0


def add_process_arguments(
    parser: Parser, minutes: float = 30.0, timeout_help: str = "minutes that a process waits for another one"
) -> Group:
    """What every command that runs on several processes takes; `start` reads it. Returns the group, for more
    of its kind.
    """
    machine = parser.add_argument_group("machine and processes")
    machine.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="auto: CUDA GPUs where there are any, else the CPU; cpu; cuda; or another accelerator that"
        " torch.accelerator finds here, such as xpu, for one process",
        resumable=True,
    )
    machine.add_argument(
        "--distributed",
        action="store_true",
        help="join the processes of the launcher (torchrun)",
        resumable=True,
    )
    machine.add_argument(
        "--local-rank", type=int, default=None, help="set by torch.distributed.launch", resumable=True
    )
    machine.add_argument(
        "--world-size",
        type=count,
        default=None,
        help="number of processes, checked against the launcher's",
        resumable=True,
    )
    machine.add_argument(
        "--timeout-minutes", type=positive, default=minutes, help=timeout_help, resumable=True
    )
    machine.add_argument(
        "--quiet",
        action="store_true",
        help="no progress bars and lines of progress",
        resumable=True,
    )
    return machine


def run_command(work: Callable[[], int | None]) -> int:
    """Runs a command of one process; returns its exit code: what `work` returns or 0, 2 with one message for
    a user's mistake, 130 after Ctrl-C. Printing never ends it.
    """
    with console.opened(), stacks.at_sigusr2():
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
    run: Callable[[argparse.Namespace, World], None],
    argv: list[str] | None = None,
    when_stopped: str = " before the first step. The same command starts again.",
) -> None:
    """Parses, joins the other processes, runs, leaves them. The model must live inside `run`: a DDP object
    that is still alive when the interpreter ends can abort the process.

    when_stopped: what is said, behind the signal's name, of a `run` that gave up with Stopped.
    """
    with console.opened():
        end = False
        try:
            code, end = _started(parser, run, argv, when_stopped)
        except SystemExit as ended:
            code = ended.code
        # with arguments of a caller, the process is the caller's
        if end or watchdog.libraries and argv is None:
            end_process(
                code or 0, 0.0 if watchdog.abandoned else STOP_SECONDS if stop_request() else CLOSE_SECONDS
            )
    if code:
        sys.exit(code)


def _started(
    parser: Parser,
    run: Callable[[argparse.Namespace, World], None],
    argv: list[str] | None,
    when_stopped: str,
) -> tuple[int, bool]:
    """(exit code, whether the process must end without the interpreter's own ending)"""
    with errors_end_all_ranks():
        if not is_first_rank() and {"-h", "--help", "--version"} & set(argv or sys.argv[1:]):
            sys.exit(0)  # rank 0 prints it
        if not gc.isenabled():  # put off by `start_listening`; what was imported stays, and is not looked at
            gc.freeze()
            gc.enable()
        args = parser.parse_args(argv)
        stop = stop_request()
        stop.limit(getattr(args, "stop_after", None))
        console.give_up_when(lambda: bool(stop))
        with stop.listening():
            world = init_world(
                args.distributed,
                world_size=args.world_size,
                local_rank=args.local_rank,
                device=args.device,
                timeout_minutes=args.timeout_minutes,
                stop=stop,
            )
            progress.show(world.is_main and not args.quiet)
            try:
                run(args, world)
            except Stopped:
                stop.acted = True
                world.print(f"Stopped by {stop.reason or 'a signal to another process'}{when_stopped}")
            except BaseException as error:
                if world.heartbeat is not None:
                    if world.size > 1 and lost_contact(error):
                        say_who_is_missing(world.heartbeat, error)
                    world.heartbeat.fall_silent()
                raise
            gc.collect()
            close_world(world)
    return stop.exit_code if stop.acted else 0, bool(world.backend)
