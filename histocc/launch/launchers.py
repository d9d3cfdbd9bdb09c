"""The launchers: what each has of its own, and what they have in common."""

from __future__ import annotations

import os
from dataclasses import dataclass

from histocc.launch.arguments import EXPECTED_DATA, Arguments
from histocc.launch.command import Plan, hangup_is_ignored, torchrun_command
from histocc.launch.data import Training
from histocc.launch.machine import Devices, MeetingPoint, Torch, choose_threads
from histocc.launch.output import say
from histocc.runtime.errors import UserError


@dataclass
class Launcher:
    """What a launcher has of its own.

    Attributes:
        usage: its command line where data are needed, for a message.
        help_files: the texts of --help, in this folder.
        default_processes: a number, or "all" GPUs.
        needs_data: whether DATA must be given; without DATA the others train on the sample.
        scales_learning_rate: whether the learning rate grows with the number of processes.
    """

    usage: str
    help_files: tuple[str, ...]
    default_processes: str
    needs_data: bool = True
    scales_learning_rate: bool = False


LAUNCHERS = {
    "launch_training": Launcher(
        "./launch_training.sh [NUM] DATA", ("launch_training", "both"), "2", needs_data=False
    ),
    "run_multi_gpu_train": Launcher(
        "./run_multi_gpu_train.sh DATA [NUM]",
        ("run_multi_gpu_train", "both"),
        "all",
        scales_learning_rate=True,
    ),
    "train_slurm_multi_node": Launcher(
        "sbatch scripts/train_slurm_multi_node.sh [NUM] DATA", ("train_slurm_multi_node",), "all"
    ),
}


@dataclass
class Options:
    """What the shell scripts tell of the start.

    Attributes:
        launcher: a name in LAUNCHERS.
        check: whether only the arguments are checked, before there is an environment.
        print_only: whether nothing is started.
        started_as: the command that started the launcher, as the user wrote it.
        python: the Python of the environment.
        torch: its torch, None before the environment is made.
        started_at: when the launcher was started, on the monotonic clock.
    """

    launcher: str
    check: bool = False
    print_only: bool = False
    started_as: str = ""
    python: str = ""
    torch: Torch | None = None
    started_at: float = 0.0


def say_help(launcher: Launcher) -> int:
    """Prints the usage of a launcher; the exit code."""
    for name in launcher.help_files:
        with open(f"{os.path.dirname(os.path.abspath(__file__))}/{name}.txt", encoding="utf-8") as file:
            say(file.read().rstrip("\n"))
    return 0


def find_own_script() -> str:
    """The training script that SCRIPT in the environment names, or "".

    Raises:
        UserError: where there is no such file.
    """
    path = os.environ.get("SCRIPT", "")
    if path and not os.path.isfile(path):
        raise UserError(f"SCRIPT={path}: no such file")
    return f"./{path}" if path.startswith("-") else path


def data_are_missing(launcher: Launcher) -> UserError:
    """The error where DATA is not given."""
    return UserError(
        f"DATA is missing: {launcher.usage} [-- FLAGS]\n"
        "  A launcher takes the data from DATA alone; what a file of --config says of them does not count."
        f"\n  {EXPECTED_DATA}"
    )


def make_plan(
    options: Options,
    arguments: Arguments,
    training: Training,
    devices: Devices,
    meeting: MeetingPoint,
    default_threads: int,
) -> Plan:
    """Everything that was chosen, with OMP_NUM_THREADS, which is set for the processes.

    Args:
        default_threads: threads of a process where the user's OMP_NUM_THREADS does not name them.

    Raises:
        UserError: where OMP_NUM_THREADS or SCRIPT is wrong.
    """
    threads = choose_threads(os.environ.get("OMP_NUM_THREADS", ""), default_threads)
    os.environ["OMP_NUM_THREADS"] = threads
    own_script = find_own_script()
    return Plan(options.python, options.torch, arguments, training, devices, meeting, own_script, threads)


def command_of(plan: Plan) -> list[str]:
    """The torchrun command line, with what the environment of this process adds to it."""
    return torchrun_command(plan, hangup_is_ignored(), os.environ.get("MODEL_SIZE", ""))
