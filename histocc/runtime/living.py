"""Whether another process of this machine is still there, by what the system says of it. Linux alone;
elsewhere nothing is known.
"""

import os


def own_name() -> str:
    """What tells this process from every other one there ever was: machine and its start, the numbering of
    its processes (containers have one each), number and start. "" where the system does not say.
    """
    try:
        return f"{_machine()} {os.getpid()} {_state(os.getpid())[1]}"
    except (OSError, IndexError):
        return ""


def has_ended(name: str) -> bool:
    """Whether the process with this `own_name` ran on this machine and is gone, or only waits to be
    collected; False where that cannot be told.
    """
    try:
        machine, process, start = name.rsplit(" ", 2)
        if machine != _machine():
            return False
    except (OSError, ValueError):
        return False
    try:
        state, since = _state(int(process))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, IndexError, ValueError):
        return False
    return since != start or state in "ZX"


def _machine() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _state(process: int) -> tuple[str, str]:
    """(letter, start in ticks since the start of the machine) of a process. Raises OSError where there is
    none.
    """
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        found = file.read().rpartition(")")[2].split()  # its name may hold anything
    return found[0], found[19]
