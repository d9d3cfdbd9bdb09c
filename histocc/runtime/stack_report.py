"""What the processes of a run say of themselves, compared: which wait in what, and which to look at."""

import os
import signal
import socket
from collections.abc import Mapping

from histocc.runtime import living
from histocc.runtime.stack_dump import Place, Summary


def compared(
    found: Mapping[int, Summary], places: tuple[Place, ...], said: Mapping[int, str] | None = None
) -> tuple[str, list[str]]:
    """(who waits in what, and whom to look at, in a few sentences; a line on each rank).

    found: what each rank has answered; said: what those that have not told last, where that is known.
    """
    missing = [rank for rank in range(len(places)) if rank not in found]
    outside = [found[rank] for rank in sorted(found) if found[rank].wait is None]
    sentences = [*_waits(found), *(f"{_ranks([each.rank])} waits in none" for each in outside)]
    text = ", ".join(sentences)
    remedies = [f"{_ranks([rank])} has not answered: {_state(places[rank])}" for rank in missing]
    if any(each.wait for each in found.values()):
        remedies += [_look_at(each) for each in outside]
        if not missing and not outside:
            remedies.append(_all_wait(found))
    elif len(found) > 1:
        text = "no rank waits for another one"
    lines = [
        str(found[rank])
        if rank in found
        else f"rank {rank}, {places[rank]}: no answer; last reported activity:"
        f" {(said or {}).get(rank, 'not known')}"
        for rank in range(len(places))
    ]
    return ". ".join(_capital(part) for part in filter(None, [text, *remedies])) + ".", lines


def _waits(found: Mapping[int, Summary]) -> list[str]:
    """Who waits in which collective, the one furthest behind first."""
    groups: dict[tuple[int, str], list[Summary]] = {}
    for rank in sorted(found):
        if wait := found[rank].wait:
            groups.setdefault((wait.number, wait.name), []).append(found[rank])
    return [
        f"{_ranks([each.rank for each in those])} {'wait' if len(those) > 1 else 'waits'} {those[0].wait} for"
        f" {max(each.wait.seconds for each in those if each.wait):,.0f} s"
        for _, those in sorted(groups.items())
    ]


def _look_at(each: Summary) -> str:
    return (
        f"look at rank {each.rank} on host {each.place.host} (process {each.place.process}): it is in"
        f" {each.call or 'no call of the program'}, {each.activity}, for {each.seconds:,.0f} s"
    )


def _all_wait(found: Mapping[int, Summary]) -> str:
    waits = {(each.wait.number, each.wait.name) for each in found.values() if each.wait}
    if len(found) == 1:
        return ""
    if len(waits) == 1:
        return (
            "all wait in the same: if that lasts, messages are lost on their way; look at the network between"
            " the hosts (python -m histocc.doctor, started as the run is, measures it)"
        )
    behind = min(waits)
    first = [each for each in found.values() if each.wait and (each.wait.number, each.wait.name) == behind]
    return (
        "they wait for each other, since they have taken different ways through the program: compare the"
        f" calls of {_ranks([each.rank for each in first])}, furthest behind, with those of the others"
    )


def _state(place: Place) -> str:
    """What is known of a process that does not answer, and what to do."""
    # a host of the same name may be another container, which numbers its processes by itself
    here = living.is_numbered_here(place.name) if place.name else place.host == socket.gethostname()
    if here:
        if _is_gone(place):
            return f"process {place.process} on host {place.host} is gone"
        try:
            with open(f"/proc/{place.process}/status", encoding="utf-8") as file:
                state = file.read().partition("State:")[2].split(maxsplit=1)[0]
        except (OSError, IndexError):
            state = ""
        if state == "T":
            resume = f"kill -{signal.SIGCONT.name.removeprefix('SIG')} {place.process}"
            return f"process {place.process} on host {place.host} is stopped (SIGSTOP); {resume} wakes it"
        if state in ("D", "Z"):
            what = "hangs in a device or file system" if state == "D" else "has died"
            return f"process {place.process} on host {place.host} {what}"
    return (
        f"look at process {place.process} on host {place.host}: it is stopped, dead, out of reach, or in a"
        " call that lets no other thread run"
    )


def _is_gone(place: Place) -> bool:
    """Of this machine. The files of a process may be hidden from others, its number is not."""
    if living.has_ended(place.name):
        try:
            os.kill(place.process, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
    return False


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
