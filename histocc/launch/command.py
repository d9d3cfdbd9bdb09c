"""The torchrun command line of a training, and what is printed of it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from histocc.launch.arguments import Arguments
from histocc.launch.data import Training
from histocc.launch.machine import Devices, MeetingPoint, Torch
from histocc.launch.output import say, shell_line

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@dataclass
class Plan:
    """All that is known before torchrun starts.

    Attributes:
        python: the Python of the environment.
        torch: its torch, None before the environment is made.
        own_script: a training script of the user's (SCRIPT), or "".
        threads: OMP_NUM_THREADS of a process.
    """

    python: str
    torch: Torch | None
    arguments: Arguments
    training: Training
    devices: Devices
    meeting: MeetingPoint
    own_script: str
    threads: str

    @property
    def world_size(self) -> int:
        """The number of processes on all nodes."""
        return self.devices.processes * self.meeting.nodes


def torchrun_command(plan: Plan, hangup_is_ignored: bool, model_size: str = "") -> list[str]:
    """The command line that starts the processes of this node.

    Args:
        hangup_is_ignored: whether this process lives on after a hang-up, as under nohup; torchrun would
            listen to a signal that is ignored, too.
        model_size: the size of the model where the user's flags name none.
    """
    meeting = plan.meeting
    command = [plan.python, "-m", "torch.distributed.run", f"--nnodes={meeting.nodes}"]
    command.append(f"--nproc-per-node={plan.devices.processes}")
    command += [f"--master-addr={meeting.address}", f"--master-port={meeting.port}"]
    if meeting.node_rank:
        command.append(f"--node-rank={meeting.node_rank}")
    if plan.torch is None or "--signals-to-handle" in plan.torch.torchrun_options:
        hangup = "" if hangup_is_ignored else "SIGHUP,"
        command.append(f"--signals-to-handle=SIGTERM,SIGINT,{hangup}SIGQUIT,SIGUSR1")
    if plan.torch is None or "--shutdown-timeout" in plan.torch.torchrun_options:
        command.append("--shutdown-timeout=120")
    command += [plan.own_script or f"{REPO}/{plan.training.script}", "--distributed", *plan.training.flags]
    if model_size and not plan.arguments.has("--model-size"):
        command += ["--model-size", model_size]
    return command + plan.arguments.flags


def hangup_is_ignored() -> bool:
    """Whether this process and what it starts were told to live on after a hang-up, as by nohup."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def learning_rate(plan: Plan) -> str:
    """How the learning rate comes about, in words."""
    given = plan.arguments.value("--learning-rate")
    rate = "the learning rate of the script" if given is None else f"learning rate {given}"
    scaling = plan.arguments.value("--lr-scaling")
    if scaling is None:
        scaling = "linear" if "--lr-scaling" in plan.training.flags else "none"
    if scaling == "linear":
        return f"{rate} x {plan.world_size} processes (--lr-scaling linear)"
    if scaling == "sqrt":
        return f"{rate} x square root of {plan.world_size} processes (--lr-scaling sqrt)"
    return f"{rate}, whatever the number of processes"


def say_plan(plan: Plan, command: list[str]) -> None:
    """Prints what will run."""
    nodes = plan.meeting.nodes
    machines = "" if nodes == 1 else f" on each of {nodes} machines"
    say(
        f"Data:        {plan.training.data}",
        f"Script:      {plan.own_script or plan.training.script}",
        f"Processes:   {plan.devices.processes}{machines}",
        f"Devices:     {plan.devices.description}",
        f"Threads:     OMP_NUM_THREADS={plan.threads}",
        f"Port:        {plan.meeting.port}",
        f"Rate:        {learning_rate(plan)}",
        f"Save path:   {plan.training.save_path}",
        "Command:",
        shell_line(command),
    )
