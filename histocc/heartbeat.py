"""What each process of a run is doing, told to all through the store, so that the living can name the dead."""

import threading
import time
from typing import Any

BEAT_SECONDS = 0.5
STORE_PATIENCE_SECONDS = 6.0
LISTEN_SECONDS = 2.5          # a process that beats does so several times meanwhile


class Heartbeat:
    """`did` notes what this process does next; a thread tells it to the store. Costs the training nothing."""

    def __init__(self, store: Any, rank: int, size: int):
        self.store, self.rank, self.size, self.doing, self.beats = store, rank, size, "starting", 0
        self._ended = threading.Event()
        if store is not None and size > 1:
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def did(self, doing: str) -> None:
        self.doing = doing

    def stop(self) -> None:
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self.beats += 1
            try:
                self.store.set(f"heartbeat/{self.rank}", f"{self.beats}|{self.doing}")
            except Exception:                        # the store is gone, and with it everything that could read this
                return

    def listen(self) -> tuple[list[int], dict[int, str]]:
        """(ranks that no longer beat, what each rank said last), after a while of listening.

        A store that does not answer, since the link to it is cut, keeps its caller waiting for minutes: no rank beats then.
        """
        heard = []
        listener = threading.Thread(target=lambda: heard.extend(self._twice()), name="listening", daemon=True)
        listener.start()
        listener.join(STORE_PATIENCE_SECONDS)
        first, second = heard if len(heard) == 2 else ({}, {})
        silent = [rank for rank in range(self.size) if rank != self.rank and first.get(rank) == second.get(rank)]
        return silent, {rank: said.partition("|")[2] for rank, said in second.items()}

    def _twice(self) -> list[dict[int, str]]:
        first = self._all()
        time.sleep(LISTEN_SECONDS)
        return [first, self._all()]

    def _all(self) -> dict[int, str]:
        found = {}
        try:
            for rank in range(self.size):
                if self.store.check([f"heartbeat/{rank}"]):
                    found[rank] = self.store.get(f"heartbeat/{rank}").decode()
        except Exception:                            # the store went with the process that held it
            pass
        return found
