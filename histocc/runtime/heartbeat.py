"""What each process of a run is doing, told to all through the store, so that the living can name the
dead.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from textwrap import shorten
from typing import Any, NoReturn

from histocc.runtime import living, stacks
from histocc.runtime.launcher import is_first_of_machine, is_under_torchrun

BEAT_SECONDS = 0.5
STORE_PATIENCE_SECONDS = 6.0
LISTEN_SECONDS = 2.5  # a process that beats does so several times meanwhile
# How often a process that gets nowhere looks at the others, and how many looks in a row must find one silent.
LOOK_SECONDS, LOOKS = 5.0, 4
ENDING_SECONDS = 0.4  # that the system may take to end a process whose connections are closed already
LISTEN_AGAIN_SECONDS = 0.05
LAST_SAVE_SECONDS = 20.0  # for a checkpoint that is being written; torchrun kills after 30 s
LEFT = "left"


class Heartbeat:
    """`note` notes what this process does next; a thread tells it to the store. Costs the training
    nothing.

    asked: whether this process was asked to stop; near: ranks of this machine; before_leaving: called, with
    the seconds that it may take, where this process ends because others are gone.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        asked: Callable[[], bool] = lambda: False,
        near: Sequence[int] = (),
    ):
        self.store, self.rank, self.size, self.doing, self.beats = store, rank, size, "starting", 0
        self.asked, self.near = asked, [other for other in near if other != rank]
        self.before_leaving: Callable[[float], object] = lambda seconds: None
        self._ended, self._watches = threading.Event(), False
        self._names: dict[int, str] = {}  # of the other processes
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
            self._tell_last()

    def leave(self) -> None:
        """Tells the others that this process ends because a third one is gone; a store that does not answer
        is not waited for.
        """
        self.fall_silent()
        telling = threading.Thread(target=self._tell_last, name="leaving", daemon=True)
        telling.start()
        telling.join(2 * BEAT_SECONDS)

    def _tell_last(self) -> None:
        if self._beating.is_alive():
            self._beating.join(BEAT_SECONDS)
        self._tell(LEFT)

    def _beat(self) -> None:
        try:
            self.store.set(f"process/{self.rank}", living.own_name())
        except Exception:  # the store is gone
            return
        while not self._ended.wait(BEAT_SECONDS):
            self.beats += 1
            if not self._tell(f"{self.beats}|{self.doing}"):
                return

    def says_it_first(self, otherwise: bool) -> bool:
        """Whether no other rank has asked this before; `otherwise` where the store is gone."""
        try:
            return self.store.add("says it", 1) == 1
        except Exception:
            return otherwise

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
        doing, beats = None, 0
        while not self._ended.wait(BEAT_SECONDS):
            if self.doing != doing:
                before, doing, silent_for, beats = {}, self.doing, {}, 0
                continue
            beats += 1
            if beats >= LOOKS and (ended := self.ended()):
                lost(ended, self.last_words(self._all()))
                return
            look = (
                LOOK_SECONDS if not self.asked() else 2 * BEAT_SECONDS
            )  # a launcher that ends all waits 30 s
            if beats % round(look / BEAT_SECONDS):
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

    def has_ended(self, rank: int) -> bool:
        """Whether a rank runs no more, though it did not say that it leaves: known of this machine alone, and
        at once.
        """
        try:
            if rank not in self._names and self.store.check([f"process/{rank}"]):
                self._names[rank] = self.store.get(f"process/{rank}").decode()
            return living.has_ended(self._names.get(rank, "")) and self.of(rank) != LEFT
        except Exception:  # the store is gone
            return False

    def ended(self) -> list[int]:
        """Ranks of this machine of which `has_ended` is true."""
        return [rank for rank in self.near if self.has_ended(rank)]

    @staticmethod
    def last_words(said: dict[int, str]) -> dict[int, str]:
        return {rank: words.partition("|")[2] or words for rank, words in said.items()}

    def listen(self, leaves: bool = False) -> tuple[list[int], dict[int, str]]:
        """(ranks that are gone, what each rank said last): those of this machine that have ended, which is
        known at once, or else those that do not beat while this one listens. leaves: this process is to end,
        so it listens no longer once it was asked to stop, as by a launcher that ends all: none is named then.

        A store that does not answer, since the link to it is cut, keeps its caller waiting for minutes: no
        rank beats then.
        """
        heard: list[tuple[list[int], dict[int, str]]] = []
        listener = threading.Thread(
            target=lambda: heard.append(self._heard(leaves)), name="listening", daemon=True
        )
        listener.start()
        listener.join(STORE_PATIENCE_SECONDS)
        others = [rank for rank in range(self.size) if rank != self.rank]
        gone, said = heard[0] if heard else (others, {})
        return gone, self.last_words(said)

    def _heard(self, leaves: bool) -> tuple[list[int], dict[int, str]]:
        first, started = self._all(), time.monotonic()
        while (lasts := time.monotonic() - started) < LISTEN_SECONDS:
            if gone := self.ended():
                return gone, first
            if leaves and lasts >= ENDING_SECONDS and self.asked():
                return [], first
            time.sleep(LISTEN_AGAIN_SECONDS)
        second = self._all()
        silent = [
            rank
            for rank in range(self.size)
            if rank != self.rank and first.get(rank) == second.get(rank) and second.get(rank) != LEFT
        ]
        return silent, second

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
    reason = shorten(str(error).strip().splitlines()[-1], 200, placeholder=" …")
    end_without(own, *own.listen(leaves=True), reason, doing)


def end_without(
    own: Heartbeat, silent: list[int], said: dict[int, str], reason: str, doing: str | None = None
) -> NoReturn:
    """Ends this process, since the ranks `silent` are gone; the first of the living says so. Does not return.

    said: what each rank said last; doing: what this one was in, by default what it does. Nothing is saved,
    since that needs all processes, but a checkpoint that is being written is finished. Exit code 1.
    """
    doing = doing or own.doing
    nobody_named = not silent and own.asked() and is_first_of_machine()
    speaks = nobody_named or all(rank in silent for rank in range(own.rank))
    files = stacks.written()  # the time limit is up
    if files and len(silent) < own.size - 1:  # the first rank may be the one that hangs
        speaks = own.says_it_first(speaks)
    if speaks:
        who = "; ".join(
            f"rank {rank} does not answer any more, last reported activity: {said.get(rank, 'nothing')} (a"
            " heartbeat comes twice a second)"
            for rank in silent
        )
        unknown = "the connection between the processes failed"
        unknown += ", and this one was asked to end" if own.asked() else ", though all answer"
        if files:
            unknown = (
                "the processes did not get on within the time limit (--timeout-minutes), though all live"
            )
        print(
            f"error: {who or unknown}. Rank"
            f" {own.rank} waited for it in: {doing} ({reason}). Checkpoints are whole: the same"
            " command (without --overwrite) continues from the newest, or starts over where there is none."
            + (files and f"\n  {files}"),
            file=sys.stderr,
            flush=True,
        )
    own.leave()
    own.before_leaving(LAST_SAVE_SECONDS)
    if not is_under_torchrun():
        time.sleep(1.0)  # others may still be listening to a store that this process holds
    os._exit(1)
