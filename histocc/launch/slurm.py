"""The job for SLURM: one torchrun on each node, started by srun from the first node."""

from __future__ import annotations

import os
import socket

from histocc.launch.arguments import Arguments, parse, read_config
from histocc.launch.command import say_plan
from histocc.launch.data import choose_save_path, describe_columns, training_of
from histocc.launch.launchers import (
    LAUNCHERS,
    Options,
    command_of,
    data_are_missing,
    find_own_script,
    make_plan,
    say_help,
)
from histocc.launch.machine import MeetingPoint, choose_devices, free_port, meeting_point, usable_cores
from histocc.launch.output import say
from histocc.launch.processes import run_job
from histocc.runtime.errors import UserError

SLURM_JOB = "train_slurm_multi_node"  # among the launchers


def slurm_job(options: Options, words: list[str]) -> int:
    """scripts/train_slurm_multi_node.sh.

    Args:
        words: the user's arguments.

    Returns:
        The exit code.

    Raises:
        UserError: for a mistake of the user's.
    """
    launcher = LAUNCHERS[options.launcher]
    flags_at = words.index("--") if "--" in words else len(words)
    if {"-h", "--help"} & set(words[:flags_at]):
        return say_help(launcher)
    if not os.environ.get("SLURM_JOB_ID"):
        raise UserError(f"this is a job for SLURM: sbatch {options.started_as} DATA [-- FLAGS]")
    own_script = find_own_script()
    arguments = parse(words)
    job = name_job(arguments)
    training = training_of(arguments, own_script)
    if training is None:
        raise data_are_missing(launcher)
    if options.check:
        return 0
    read_config(arguments)
    leave_out_overwrite(arguments)
    devices = choose_devices(arguments, launcher.default_processes, options.torch)
    describe_columns(training, arguments, options.python, options.torch is not None)
    choose_save_path(training, arguments)
    meeting = job_meeting_point(options.started_as)
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK") or usable_cores())
    threads = -(-cores // devices.processes)
    plan = make_plan(options, arguments, training, devices, meeting, threads)
    command = command_of(plan)
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    say(f"Job:         {job} on {meeting.nodes} node(s): {nodes}, start number {restarts() + 1}")
    say_plan(plan, command)
    return 0 if options.print_only else run_job(srun_command(meeting.nodes, command), job)


def name_job(arguments: Arguments) -> str:
    """The name of the job for SLURM; in a job array, %a in a flag becomes the number of the task."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if not task:
        return os.environ["SLURM_JOB_ID"]
    arguments.flags = [flag.replace("%a", task) for flag in arguments.flags]
    # the bare number may stand for all tasks of the array
    return f"{os.environ.get('SLURM_ARRAY_JOB_ID', '')}_{task}"


def restarts() -> int:
    """How often SLURM has started the job again."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def leave_out_overwrite(arguments: Arguments) -> None:
    """Leaves --overwrite out of a job that was started before, which continues.

    Raises:
        UserError: where the file of --config holds it, which every start would read.
    """
    if any(flag.startswith("--overwrite=") for flag in arguments.config):
        raise UserError(
            "overwrite in a config would start over after every requeue: give --overwrite on the command line"
        )
    if restarts() > 0 and arguments.has("--overwrite"):
        say("The job was started before: --overwrite is left out, so that the run continues")
        arguments.flags = [flag for flag in arguments.flags if flag != "--overwrite"]


def job_meeting_point(started_as: str) -> MeetingPoint:
    """Where the processes meet: on this node, unless the environment names another."""
    environment = dict(os.environ)
    environment["NNODES"], environment["NODE_RANK"] = os.environ.get("SLURM_JOB_NUM_NODES", ""), ""
    environment["MASTER_ADDR"] = os.environ.get("MASTER_ADDR") or socket.gethostname()
    environment["MASTER_PORT"] = os.environ.get("MASTER_PORT") or free_port()
    return meeting_point(environment, started_as, numbered_by_srun=True)


def srun_command(nodes: int, command: list[str]) -> list[str]:
    """One torchrun for each node, whose number in the job is that of its node. Where one fails, all end."""
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    srun += [f"--cpus-per-task={cpus}"] if cpus else []
    return [*srun, "bash", "-c", 'PET_NODE_RANK=$SLURM_NODEID exec "$@"', "torchrun", *command]
