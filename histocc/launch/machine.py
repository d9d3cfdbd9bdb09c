"""The machine: GPUs, cores, processes and their threads, and where the processes of all machines meet."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from histocc.launch.arguments import Arguments
from histocc.launch.output import say
from histocc.runtime.errors import UserError

MOST_THREADS = 1024
USUAL_PORT = "29500"


@dataclass
class Torch:
    """The torch of the environment: its version, that of its CUDA or "none", and options of its torchrun."""

    version: str
    cuda: str
    torchrun_options: list[str]


@dataclass
class Devices:
    """How many processes a machine runs, and on what, in words."""

    processes: int
    description: str


@dataclass
class MeetingPoint:
    """Where the processes of all nodes meet; `node_rank` is "" where srun numbers the nodes."""

    nodes: int
    node_rank: str
    address: str
    port: str


def parse_torch(probed: str) -> Torch | None:
    """Reads what the probe of the shell scripts found; None where no environment has torch."""
    words = probed.split()
    return Torch(words[0], words[1], words[2:]) if words else None


# ---- GPUs and cores ----


def list_gpus() -> str:
    """The GPUs as nvidia-smi lists them; "" without it."""
    try:
        return _output_of(["nvidia-smi", "--list-gpus"]).stdout
    except OSError:
        return ""


def count_gpus(listed: str, visible: str | None) -> int:
    """The number of GPUs that can be used.

    Args:
        listed: a line for each GPU, as nvidia-smi prints it.
        visible: CUDA_VISIBLE_DEVICES, or None where that is not set. As CUDA does, it is read up to the first
            GPU that is not there.
    """
    total = sum(line.startswith("GPU ") for line in listed.split("\n"))
    if visible is None or total == 0:
        return total
    count = 0
    for name in re.split(" *, *| +", visible.partition("\n")[0].strip(" ")):
        is_there = re.fullmatch("[0-9]{1,8}", name) and int(name) < total
        if not is_there and not name.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return count


def usable_cores() -> int:
    """The number of cores that this process may use."""
    # nproc would take these for the number of cores
    limits = ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT")
    environment = {name: value for name, value in os.environ.items() if name not in limits}
    for command in (["nproc"], ["getconf", "_NPROCESSORS_ONLN"]):
        try:
            done = _output_of(command, environment)
        except OSError:
            continue
        if done.returncode == 0 and re.fullmatch("[0-9]{1,8}\n?", done.stdout):
            return int(done.stdout)
    return 1


def _output_of(command: list[str], environment: Mapping[str, str] | None = None):
    return subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        errors="replace",
    )


# ---- processes ----


def choose_devices(arguments: Arguments, default: str, torch: Torch | None) -> Devices:
    """The processes of this machine: a GPU each where it has GPUs, else on its cores.

    Args:
        default: number of processes where the user names none; "all" is all GPUs, without GPUs two.

    Raises:
        UserError: where the user asks for more than there can be.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    if arguments.value("--device") == "cpu":
        return cpu_devices(arguments.processes or default, usable_cores(), " (--device cpu)")
    gpus = count_gpus(list_gpus(), visible)
    if gpus == 0:
        return cpu_devices(arguments.processes or default, usable_cores(), hidden)
    return gpu_devices(arguments.processes, default, gpus, hidden, torch)


def cpu_devices(processes: str, cores: int, reason: str) -> Devices:
    """The processes of a machine without GPUs; for `reason`, in words.

    Raises:
        UserError: for more than four processes for each core, where that is more than 8.
    """
    processes = "2" if processes == "all" else processes
    limit = max(4 * cores, 8)
    if _is_more(processes, limit):
        raise UserError(
            f"{processes} processes are too many for the {cores} core(s) of this machine.\n"
            f"  Ask for at most {limit}: on CPUs NUM is limited to four for each core, or 8 where that is"
            " more"
        )
    text = f"NO GPU{reason}: TRAINING ON CPUS, {processes} process(es) on {cores} core(s)"
    return Devices(int(processes), text)


def gpu_devices(processes: str, default: str, gpus: int, hidden: str, torch: Torch | None) -> Devices:
    """The processes of a machine with GPUs; `hidden` says why others are not counted.

    Raises:
        UserError: for more processes than GPUs.
    """
    if (processes or default) == "all":
        processes = str(gpus)
    elif not processes:
        processes = str(min(int(default), gpus))
    if _is_more(processes, gpus):
        raise UserError(
            f"{processes} processes need a GPU each, but {gpus} can be used here{hidden}.\n"
            f"  Ask for at most {gpus}, set CUDA_VISIBLE_DEVICES to more of them, or train on CPUs with --"
            " --device cpu"
        )
    text = f"{processes} of {gpus} GPU(s){hidden}"
    if torch is not None and torch.cuda == "none":
        text += (
            f"\n             WARNING: torch {torch.version} was built without CUDA and trains on CPUs all the"
            " same"
        )
    return Devices(int(processes), text)


def _is_more(number: str, limit: int) -> bool:
    """Whether a number is above the limit; it may have more digits than int() takes."""
    return len(number) > 9 or int(number) > limit


def choose_threads(given: str, default: int) -> str:
    """OMP_NUM_THREADS of a process.

    Args:
        given: the user's number, or a list of one for each level of nested parallelism; "" for the default.
        default: the cores of a process, 0 where several share one.

    Raises:
        UserError: where that is not from 1 to 1024.
    """
    threads = given or str(max(default, 1))
    numbers = re.fullmatch("([1-9][0-9]{0,3})(,[1-9][0-9]{0,3})*", threads)
    if numbers is None or int(numbers[1]) > MOST_THREADS:
        raise UserError(
            f"OMP_NUM_THREADS={threads}: set it to the threads of a process, from 1 to {MOST_THREADS}, or"
            " leave it out"
        )
    return threads


# ---- where the processes meet ----


def check_meeting_point(nodes: str, node_rank: str, port: str) -> None:
    """Checks what the environment says of the nodes.

    Raises:
        UserError: where one of them is no such number.
    """
    if not re.fullmatch("[1-9][0-9]{0,5}", nodes):
        raise UserError(f"NNODES={nodes}: set it to the number of machines, at least 1")
    if port and not (re.fullmatch("[1-9][0-9]{0,4}", port) and int(port) <= 65535):
        raise UserError(
            f"MASTER_PORT={port}: set it to a port, a whole number from 1 to 65535, or leave it out"
        )
    if node_rank and not (re.fullmatch("0|[1-9][0-9]{0,5}", node_rank) and int(node_rank) < int(nodes)):
        raise UserError(
            f"NODE_RANK={node_rank}, but NNODES={nodes}: set NNODES to the number of machines and NODE_RANK"
            " to that of this one, from 0 to NNODES - 1"
        )


def meeting_point(
    environment: Mapping[str, str], started_as: str, numbered_by_srun: bool = False
) -> MeetingPoint:
    """Where the processes meet, by NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.

    On one machine a port that is in use is replaced by a free one; several machines must agree on theirs.

    Args:
        started_as: the command that started the launcher, for the message.
        numbered_by_srun: whether srun gives each node its NODE_RANK.

    Raises:
        UserError: where a variable is wrong, or missing on one of several machines.
    """
    nodes, port = environment.get("NNODES") or "1", environment.get("MASTER_PORT", "")
    node_rank, address = environment.get("NODE_RANK", ""), environment.get("MASTER_ADDR", "")
    check_meeting_point(nodes, node_rank, port)
    if int(nodes) > 1:
        if not address or not (node_rank or numbered_by_srun):
            raise UserError(
                f"NNODES={nodes} needs MASTER_ADDR, the first machine, and NODE_RANK, 0 on that machine and"
                f" 1, 2, ... on the others.\n  On each of them: NNODES={nodes} NODE_RANK=0"
                f" MASTER_ADDR={address or socket.gethostname()} MASTER_PORT=29500 {started_as} ..."
            )
        return MeetingPoint(int(nodes), node_rank, address, port or USUAL_PORT)
    if port and port_in_use(int(port)):
        say(f"Port {port} (MASTER_PORT) is in use: another one is taken")
        port = ""
    return MeetingPoint(1, node_rank, "127.0.0.1", port or free_port())


def free_port() -> str:
    """A port that is free at this moment."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return str(held.getsockname()[1])


def port_in_use(port: int) -> bool:
    """Whether this user cannot have a port."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("", port))
        except OSError:
            return True
    return False
