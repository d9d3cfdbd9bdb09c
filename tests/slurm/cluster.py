"""A SLURM cluster of two nodes on one machine, for tests: munge, the controller, and a daemon for each node.
As root (Debian: slurm-wlm, munge).
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
# A requeued job waits until its credential is over; UnkillableStepTimeout and KillWait leave time to save.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=60
SchedulerParameters=sched_interval=5,bf_interval=5
MailProg=/bin/true
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={one} CPUs=8 RealMemory=4000 State=UNKNOWN
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={two} CPUs=8 RealMemory=4000 State=UNKNOWN
PartitionName=test Nodes=one,two Default=YES MaxTime=INFINITE State=UP
"""


def available() -> bool:
    return os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


@contextlib.contextmanager
def cluster(folder: Path):
    """Runs it in `folder`; gives the environment in which sbatch and the other commands find it."""
    ports = iter(free_ports(3))
    (folder / "state").mkdir(parents=True)
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder, host=socket.gethostname(), port=next(ports), one=next(ports), two=next(ports)
        )
    )
    key, sock = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={sock}"]
    munge += [f"--{what}-file={folder}/munged.{what}" for what in ("pid", "log", "seed")]
    commands = [munge, ["slurmctld", "-D", "-i"], *(["slurmd", "-D", "-N", node] for node in ("one", "two"))]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    daemons = []
    try:
        for command in commands:
            daemons.append(subprocess.Popen(command, env=env, **quiet))
            wait_for(lambda command=command: command[0] != "munged" or sock.exists(), "munge", 20)
        idle = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
        wait_for(
            lambda: subprocess.run(idle, env=env, capture_output=True, text=True).stdout.strip() == "2",
            "two idle nodes",
            60,
        )
        yield env
    finally:
        for daemon in reversed(daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)


def wait_for(condition, what: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"no {what} within {seconds} s"
        time.sleep(0.2)


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
