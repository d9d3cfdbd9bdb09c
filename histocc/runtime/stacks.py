"""Every process of a run says where it is, in a file each: at SIGUSR2 to any of them, when the doctor asks,
and when the job ends since one of them got nowhere.

One thread answers requests that this process sees itself, and never waits for another process. Another one
tells the other processes of them through the store, which a cut link may keep waiting.
"""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Generator, Sequence

from histocc.runtime import living, stack_request
from histocc.runtime.heartbeat import Heartbeat, Report
from histocc.runtime.outputs import kind_of, write_text
from histocc.runtime.signals import calling_at_sigusr2
from histocc.runtime.stack_dump import TITLE, Dump, Place, Summary, read_summary
from histocc.runtime.stack_report import compared
from histocc.runtime.world import World, lost_contact

LOOK_SECONDS = 0.5  # at the request file
LISTEN_SECONDS = 1.0  # to the store
POLL_SECONDS = 0.2
ANSWER_SECONDS = 5.0  # until a process counts as one that does not answer
LONGEST = 1 << 18  # characters of a file that goes through the store
HUNG_SECONDS = 15.0  # nothing moved for so long: the processes hang, rather than that one has died
HUNG_SHARE = 0.9  # … or for this share of the time limit

# What a request begins with says who asks, and where the comparison goes.
SIGNAL, LIMIT, OVERDUE = "signal", "limit", "overdue"


@contextlib.contextmanager
def answering(world: World, folder: str, names: Sequence[str]) -> Generator[None]:
    """This process answers, as long as what is inside lasts; where it has lost the others, until it ends. All
    ranks.

    names: of the files of all ranks, in `folder`.
    """
    own = (socket.gethostname(), os.getpid(), living.own_name())
    places = tuple(Place(*place) for place in world.gather(own))
    stacks = Stacks(world, folder, names, places)
    stacks.start()
    try:
        with calling_at_sigusr2(stacks.ask):
            yield
    except Exception as error:
        if not (world.size > 1 and lost_contact(error)):  # else who is missing is found out after this
            stacks.close()
        raise
    except BaseException:
        stacks.close()
        raise
    stacks.close()


class Stacks:
    """See `answering`. places: of all ranks."""

    def __init__(self, world: World, folder: str, names: Sequence[str], places: tuple[Place, ...]):
        self.world, self.folder, self.places = world, folder, places
        self.paths = [os.path.join(folder, name) for name in names]
        self.heartbeat = world.heartbeat or Heartbeat(None, world.rank, 1)
        self._dump: tuple[str, Dump] | None = None  # the last request, and the answer to it
        self._own: set[str] = set()  # requests that began here, by a signal
        self._answers, self._ended = threading.Lock(), threading.Event()
        self._asked, self._to_tell = threading.Event(), threading.Event()
        self._untold: list[str] = []
        self._silent: list[int] = []
        self._report: Report | None = None
        self._reported, self._speaks = threading.Event(), False
        self._overdue_since, self._at_limit = 0.0, False

    @property
    def _several(self) -> bool:
        return self.world.store is not None and self.world.size > 1

    def start(self) -> None:
        self.heartbeat.report = self.at_the_end
        threading.Thread(target=self._listen, name="stacks", daemon=True).start()
        if self._several:
            threading.Thread(target=self._exchange, name="stacks of all", daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        self._asked.set()
        self._to_tell.set()
        self.heartbeat.report = lambda silent, said: None

    def ask(self) -> None:
        """All processes are to answer; returns at once."""
        self._asked.set()

    # ---- this process

    def _listen(self) -> None:
        before = stack_request.seen(self.folder)
        while True:
            self._asked.wait(LOOK_SECONDS)
            if self._ended.is_set():
                return
            if self._asked.is_set():
                self._asked.clear()
                request = f"{SIGNAL}-{uuid.uuid4().hex}"
                self._own.add(request)
                self.answer(request)
            now = stack_request.seen(self.folder)
            if now != before:
                before = now
                if request := stack_request.read(self.folder):
                    self.answer(request)
            if self.world.backend == "nccl":
                self._look_whether_overdue()

    def _look_whether_overdue(self) -> None:
        """A host that waits for its device sees no exception at the time limit; torch then ends it without
        a word of the others. So they are compared shortly before.
        """
        last = max(self.heartbeat.since, self.world.collectives.changed)
        if last == self._overdue_since or time.monotonic() - last < HUNG_SHARE * self.world.patience:
            return
        self._overdue_since = last
        wait = self._take("").summary.wait
        if wait is not None and not wait.name.startswith("for rank"):
            self.answer(f"{OVERDUE}-{self.world.collectives.count}")

    def _take(self, request: str) -> Dump:
        world = self.world
        return Dump(world.rank, self.places, world.backend, world.collectives, self.heartbeat, request)

    def answer(self, request: str) -> Dump:
        """Writes the file of this process, unless it has for this request, and has the others do so."""
        with self._answers:
            if self._dump is not None and self._dump[0] == request:
                return self._dump[1]
            dump = self._take(request)
            self._dump = (request, dump)
            self._write(self.world.rank, dump.text)
        if self._several:
            self._untold.append(request)
            self._to_tell.set()
        elif request.startswith(SIGNAL):
            self._say({self.world.rank: dump.summary})
        return dump

    def _write(self, rank: int, text: str) -> None:
        """A folder that is gone, and a file that is not the run's, stay as they are."""
        path = self.paths[rank]
        with contextlib.suppress(OSError):
            if os.path.isdir(self.folder) and (not os.path.lexists(path) or _is_ours(path)):
                write_text(path, text)

    def _say(self, found: dict[int, Summary]) -> None:
        sentence, lines = compared(found, self.places, self._said_last(found))
        print(f"Stacks: {sentence}", *lines, self.where_files_are(), sep="\n  ", flush=True)

    def where_files_are(self) -> str:
        more = f" to {os.path.basename(self.paths[-1])}" if len(self.paths) > 1 else ""
        return f"the stacks of all threads: {self.paths[0]}{more}"

    # ---- all processes, through the store

    def _exchange(self) -> None:
        store, seen = self.world.store, 0
        with contextlib.suppress(Exception):  # the store is gone, and with it everybody who could answer
            while True:
                self._to_tell.wait(LISTEN_SECONDS)
                if self._ended.is_set():
                    return
                self._to_tell.clear()
                while self._untold:
                    self._tell(self._untold.pop(0))
                number = store.add("stacks/requests", 0)
                # each of them, in the same order on all: who has asked waits for the answers to that
                while seen < number and store.check([f"stacks/request/{seen + 1}"]):
                    seen += 1
                    self._answer_with_all(store.get(f"stacks/request/{seen}").decode())

    def _tell(self, request: str) -> None:
        """Passes a request on, unless another process has done so."""
        store = self.world.store
        if store.add(f"stacks/asked/{request}", 1) > 1:
            return
        self._speaks = self._speaks or request == LIMIT
        number = store.add("stacks/numbers", 1)
        store.set(f"stacks/request/{number}", request)
        store.add("stacks/requests", 1)

    def _answer_with_all(self, request: str) -> None:
        world, dump = self.world, self.answer(request)
        if self._is_far(world.rank):  # its folder may be another one: rank 0 writes what it has said
            world.store.set(f"stacks/text/{request}/{world.rank}", dump.text[:LONGEST])
        world.store.set(f"stacks/answer/{request}/{world.rank}", dump.summary.written())
        speaks = self._speaks and request == LIMIT
        if world.is_main or speaks or request in self._own:
            found = self._collect(request)
            if request.startswith((SIGNAL, OVERDUE)) and (world.is_main or 0 not in found):
                self._say(found)
            if speaks:
                sentence, lines = compared(found, self.places, self._said_last(found))
                self._report = Report(True, sentence, [*lines, self.where_files_are()], self._at_limit)
                world.store.set("stacks/collected", "1")
        if request == LIMIT:
            self._wait_for_speaker()

    def _collect(self, request: str) -> dict[int, Summary]:
        """What those say who answer in time."""
        store, found = self.world.store, dict[int, Summary]()
        until = time.monotonic() + ANSWER_SECONDS
        waited_for = set(range(self.world.size)) - set(self._silent)
        while waited_for - found.keys() and time.monotonic() < until:
            for rank in waited_for - found.keys():
                key = f"stacks/answer/{request}/{rank}"
                summary = read_summary(store.get(key)) if store.check([key]) else None
                if summary is not None and summary.request == request:
                    found[rank] = summary
                    if self.world.is_main and self._is_far(rank):
                        self._write_for(rank, request)
            time.sleep(POLL_SECONDS)
        return found

    def _is_far(self, rank: int) -> bool:
        first, other = self.places[0], self.places[rank]
        if first.name and other.name:
            return living.machine_of(first.name) != living.machine_of(other.name)
        return first.host != other.host

    def _write_for(self, rank: int, request: str) -> None:
        """The file of a rank on another host, unless that has put it into this folder itself."""
        summary = stack_request.summary_in(self.paths[rank])
        if summary is None or summary.request != request:
            self._write(
                rank, self.world.store.get(f"stacks/text/{request}/{rank}").decode("utf-8", "replace")
            )

    def _said_last(self, found: dict[int, Summary]) -> dict[int, str]:
        """By their heartbeats, those that have not answered."""
        missing = set(range(self.world.size)) - found.keys()
        words = {rank: self.heartbeat.of(rank) for rank in missing} if self._several else {}
        return Heartbeat.last_words({rank: said for rank, said in words.items() if said})

    # ---- the end of the job

    def at_the_end(self, silent: list[int], said: dict[int, str]) -> Report | None:
        """When the job ends and nothing has moved for long; else None. The store is not waited for longer
        than a few seconds.
        """
        still = time.monotonic() - max(self.heartbeat.since, self.world.collectives.changed)
        self._at_limit = still >= HUNG_SHARE * self.world.patience
        # one that is asked to end, as by a launcher after another has failed, has waited for that one
        if not self._at_limit and (still < HUNG_SECONDS or self.world.stop):
            return None
        self._silent = silent
        summary = self.answer(LIMIT).summary
        if self._several and self._reported.wait(2 * LISTEN_SECONDS + ANSWER_SECONDS) and self._report:
            return self._report
        sentence, lines = compared({self.world.rank: summary}, self.places, said)
        speaks = all(rank in silent for rank in range(self.world.rank))
        return Report(speaks, sentence, [*lines, self.where_files_are()], self._at_limit)

    def _wait_for_speaker(self) -> None:
        """As soon as one process ends, a launcher ends the others: who speaks first collects the answers."""
        until = time.monotonic() + ANSWER_SECONDS + LISTEN_SECONDS
        while not self.world.store.check(["stacks/collected"]) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        self._report = self._report or Report(False)
        self._reported.set()


def _is_ours(path: str) -> bool:
    """Whether a file is one that this module writes."""
    if kind_of(path) is not None or os.path.islink(path):
        return False
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(len(TITLE)) == TITLE
