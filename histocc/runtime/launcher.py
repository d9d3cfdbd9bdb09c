"""What a launcher tells a process of its place among the others, by the variables that it sets."""

import os
import sys

from histocc.runtime.errors import UserError

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def as_typed() -> str:
    """What a launcher starts this command by: a script, or -m and a module with its command."""
    if sys.argv[0].startswith("histocc "):  # the command `histocc`
        return f"-m {sys.argv[0]}"
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name.startswith("histocc."):
        return f"-m {spec.name.removesuffix('.__main__')}"
    return os.path.basename(sys.argv[0]) or "finetune.py"


def launcher_environment(
    distributed: bool, world_size: int | None, local_rank: int | None
) -> tuple[int, int, int]:
    """(rank, local rank, world size) from the launcher's variables and the flags that must agree with them.

    Raises UserError where they are missing, incomplete or contradict each other.
    """
    values = {name: os.environ[name] for name in LAUNCHER_VARIABLES if os.environ.get(name)}
    # so scripts for the older launcher say that there is none
    local_rank = None if local_rank == -1 else local_rank
    if "LOCAL_RANK" not in values and local_rank is not None and values:
        values["LOCAL_RANK"] = str(local_rank)  # launchers from before torchrun pass it as a flag alone
    if not values:
        if distributed:
            raise UserError(
                "--distributed needs a launcher, and RANK, LOCAL_RANK and WORLD_SIZE are not set. Start it"
                f" with\n  torchrun --nproc_per_node=2 {as_typed()}"
                " --distributed …\nor leave --distributed out to run in one process."
            )
        if world_size not in (None, 1):
            raise UserError(
                f"--world-size {world_size} needs a launcher that starts {world_size} processes: "
                f"torchrun --nproc_per_node={world_size} …"
            )
        return 0, 0, 1
    missing = [name for name in LAUNCHER_VARIABLES if name not in values]
    if missing:
        raise own_mistake(
            f"{', '.join(missing)} not set, but {', '.join(values)} is. A launcher such as torchrun sets "
            "all three; unset them to run in one process."
        )
    try:
        rank, local, size = (int(values[name]) for name in LAUNCHER_VARIABLES)
    except ValueError:
        raise own_mistake(
            "RANK, LOCAL_RANK and WORLD_SIZE must be whole numbers; they are "
            + ", ".join(f"{k}={v[:30]!r}" for k, v in values.items())
        ) from None
    if world_size is not None and world_size != size:
        raise UserError(
            f"--world-size {world_size} contradicts WORLD_SIZE={size} of the launcher. "
            "Leave --world-size out, or start that many processes."
        )
    if local_rank is not None and local_rank != local:
        raise UserError(
            f"--local-rank {local_rank} contradicts LOCAL_RANK={local} of the launcher. Leave --local-rank"
            " out."
        )
    if not 0 <= rank < size or not 0 <= local < size:
        raise own_mistake(
            f"RANK={rank} and LOCAL_RANK={local} do not fit WORLD_SIZE={size}: ranks run from 0 to "
            "WORLD_SIZE - 1"
        )
    return rank, local, size


def processes_here(local: int) -> int:
    """How many processes of the job this machine has, by LOCAL_WORLD_SIZE; where that is not set, at least
    those up to LOCAL_RANK."""
    found = os.environ.get("LOCAL_WORLD_SIZE") or str(local + 1)
    if not found.isdecimal() or len(found) > 9 or int(found) <= local:
        raise own_mistake(
            f"LOCAL_WORLD_SIZE={found[:30]!r} is not the number of processes on this machine, above "
            f"LOCAL_RANK={local}"
        )
    return int(found)


def own_mistake(message: str) -> UserError:
    """What is wrong with this process alone, which it says itself."""
    return UserError(message, said_by_all=True)


def is_under_torchrun() -> bool:
    """Whether torchrun has started this process: it holds the store, and ends all processes where one has
    died.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first_rank() -> bool:
    """Whether this process is rank 0 by the launcher's variables, before there is a `World`."""
    return os.environ.get("RANK", "0") in ("", "0")


def is_first_of_machine() -> bool:
    """Whether the launcher made this process the first on its machine, known before the processes have
    met.
    """
    return os.environ.get("LOCAL_RANK", "0") == "0"
