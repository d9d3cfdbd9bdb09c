"""What each process of a run is doing, told to all through the store, so that the living can name the
dead.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from textwrap import shorten
from typing import Any, NoReturn

BEAT_SECONDS = 0.5
STORE_PATIENCE_SECONDS = 6.0
LISTEN_SECONDS = 2.5  # a process that beats does so several times meanwhile
# How often a process that gets nowhere looks at the others, and how many looks in a row must find one silent.
LOOK_SECONDS, LOOKS = 5.0, 4
LEFT = "left"


class Heartbeat:
    """`note` notes what this process does next; a thread tells it to the store. Costs the training
    nothing.
    """

    def __init__(self, store: Any, rank: int, size: int):
        self.store, self.rank, self.size, self.doing, self.beats = store, rank, size, "starting", 0
        self._ended, self._watches = threading.Event(), False
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        if store is not None and size > 1:
            self._beating.start()

    def note(self, doing: str) -> None:
        self.doing = doing

    def fall_silent(self) -> None:
        """No more beats, as from a process that is dead."""
        self._ended.set()

    def stop(self) -> None:
        """This process leaves; where others `watch`, it tells them that its silence is no bad sign from now
        on.
        """
        self.fall_silent()
        if self._watches:
            self._beating.join(BEAT_SECONDS)
            self._tell(LEFT)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self.beats += 1
            if not self._tell(f"{self.beats}|{self.doing}"):
                return

    def _tell(self, what: str) -> bool:
        try:
            self.store.set(f"heartbeat/{self.rank}", what)
            return True
        except Exception:  # the store is gone, and with it everything that could read this
            return False

    def watch(self, lost: Callable[[list[int], dict[int, str]], None]) -> None:
        """From now on a thread calls lost(silent ranks, what each rank said last), once, where this process
        gets nowhere and others do not beat.

        For backends whose collectives keep the host waiting without an exception when a peer dies. While this
        process gets on (`note` says so) nobody is asked. All ranks.
        """
        self._watches = True
        threading.Thread(target=self._watch, args=(lost,), name="watching the others", daemon=True).start()

    def _watch(self, lost: Callable[[list[int], dict[int, str]], None]) -> None:
        before: dict[int, str] = {}
        silent_for: dict[int, int] = {}
        doing = None
        while not self._ended.wait(LOOK_SECONDS):
            if self.doing != doing:
                before, doing, silent_for = {}, self.doing, {}
                continue
            now = self._all()
            for rank in range(self.size):
                same = (
                    rank != self.rank and rank in now and now[rank] == before.get(rank) and now[rank] != LEFT
                )
                silent_for[rank] = silent_for.get(rank, 0) + 1 if same else 0
            before = now
            silent = [rank for rank, looks in silent_for.items() if looks >= LOOKS]
            if silent and not self._ended.is_set():
                lost(silent, self.last_words(now))
                return

    def of(self, rank: int) -> str | None:
        """What a rank said last, with the number of its beat; None before its first."""
        return (
            self.store.get(f"heartbeat/{rank}").decode() if self.store.check([f"heartbeat/{rank}"]) else None
        )

    @staticmethod
    def last_words(said: dict[int, str]) -> dict[int, str]:
        return {rank: words.partition("|")[2] or words for rank, words in said.items()}

    def listen(self) -> tuple[list[int], dict[int, str]]:
        """(ranks that no longer beat, what each rank said last), after a while of listening.

        A store that does not answer, since the link to it is cut, keeps its caller waiting for minutes: no
        rank beats then.
        """
        heard: list[dict[int, str]] = []
        listener = threading.Thread(target=lambda: heard.extend(self._twice()), name="listening", daemon=True)
        listener.start()
        listener.join(STORE_PATIENCE_SECONDS)
        first, second = heard if len(heard) == 2 else ({}, {})
        silent = [
            rank for rank in range(self.size) if rank != self.rank and first.get(rank) == second.get(rank)
        ]
        return silent, self.last_words(second)

    def _twice(self) -> list[dict[int, str]]:
        first = self._all()
        time.sleep(LISTEN_SECONDS)
        return [first, self._all()]

    def _all(self) -> dict[int, str]:
        found: dict[int, str] = {}
        try:
            for rank in range(self.size):
                if self.store.check([f"heartbeat/{rank}"]):
                    found[rank] = self.store.get(f"heartbeat/{rank}").decode()
        except Exception:  # the store went with the process that held it
            pass
        return found


def say_who_is_missing(own: Heartbeat, error: BaseException) -> NoReturn:
    """After a collective has failed: the living find out who is missing, and the first of them says it. Does
    not return.
    """
    doing = own.doing
    end_without(
        own, *own.listen(), shorten(str(error).strip().splitlines()[-1], 200, placeholder=" …"), doing
    )


def end_without(
    own: Heartbeat, silent: list[int], said: dict[int, str], reason: str, doing: str | None = None
) -> NoReturn:
    """Ends this process, since the ranks `silent` are gone; the first of the living says so. Does not return.

    said: what each rank said last; doing: what this one was in, by default what it does. Nothing is saved:
    that needs all processes. Exit code 1.
    """
    if all(rank in silent for rank in range(own.rank)):
        who = "; ".join(
            f"rank {rank} does not answer any more, last reported activity: {said.get(rank, 'nothing')} (a"
            " heartbeat comes twice a second)"
            for rank in silent
        )
        print(
            f"error: {who or 'the connection between the processes failed, though all answer'}. Rank"
            f" {own.rank} waited for it in: {doing or own.doing} ({reason}). Checkpoints are whole: the same"
            " command (without --overwrite) continues from the newest, or starts over where there is none.",
            file=sys.stderr,
            flush=True,
        )
    time.sleep(1.0)  # others may still be listening
    os._exit(1)
