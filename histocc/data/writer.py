"""Writes checked rows to the array files of a prepared folder: hashes, split and words on the way.

From some size on this continues in its own process, so that reading and writing share two cores.
"""

import contextlib
import functools
import multiprocessing
import os
import pickle
import socket
from collections import Counter
from collections.abc import Callable
from itertools import compress
from typing import Any

import numpy as np

from histocc.data.arrays import ARRAYS
from histocc.data.report import LINES, WrittenPart
from histocc.runtime.errors import how_it_ended
from histocc.runtime.signals import leave_to_parent
from histocc.text import code_points, text_hashes

PROCESS_FROM = 16  # chunks that are written by the reading process itself, before a second one pays
MOST_COUNTED_WORDS = (
    500_000  # rarer ones are forgotten on the way, so that memory does not grow with the rows
)
ALL_WORDS_OF = 1 << 19  # words of so many training rows are all counted, then those of every fourth chunk
POLL_SECONDS = 0.2  # between two looks at whether the run is to stop, in waiting for the process
JOIN_SECONDS = 10.0  # for a process that has ended or was killed


def split_values(hashes: np.ndarray) -> np.ndarray:
    """Where texts stand in [0, 1) by their hashes (uint64): those below the share of validation are validated
    on.
    """
    return hashes / 2.0**64


class PartFiles:
    """The open array files of one part."""

    def __init__(self, folder: str, part: str, max_codes: int):
        self.info = WrittenPart(folder, part, 0, max_codes)
        self.files = {name: open(os.path.join(folder, f"{part}.{name}"), "wb") for name in (*ARRAYS, "lines")}
        self.end = 0
        self.files["offsets"].write(np.zeros(1, ARRAYS["offsets"]).tobytes())

    def add(self, texts: list[str], **arrays: np.ndarray) -> None:
        """texts: n descriptions; arrays: language, codes [n, K], text_hash, lines."""
        ends = self.end + np.cumsum(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)))
        self.files["chars"].write(code_points("".join(texts)).tobytes())
        self.files["offsets"].write(ends.astype(ARRAYS["offsets"]).tobytes())
        for name, values in arrays.items():
            self.files[name].write(values.astype(ARRAYS.get(name, LINES)).tobytes())
        if texts:
            self.end = int(ends[-1])
        self.info.rows += len(texts)


class RowWriter:
    """Takes chunks of rows. share_val: the share of texts of `train` that goes to `val`; None leaves the
    parts as they are.

    `check` is called while the second process is waited for, `wait_seconds` at most without a byte that it
    takes or sends. After `close`: `parts`, what was written, and `words`, how often each word stands in the
    training texts.
    """

    def __init__(
        self,
        folder: str,
        max_codes: int,
        share_val: float | None,
        check: Callable[[], None],
        wait_seconds: float,
    ):
        self.parts = {part: PartFiles(folder, part, max_codes) for part in ("train", "val")}
        self.share_val, self.words = share_val, Counter()
        self.check, self.wait_seconds = check, wait_seconds
        self.rare = 0  # words met this often or less have been forgotten
        self.chunks = 0
        self.process: Any = None
        self.pipe: Any = None  # to that process, while it is there

    def add(self, part: str, texts: list[str], **arrays: np.ndarray) -> None:
        """texts: n descriptions without NUL; arrays: language, codes [n, K], lines. Raises OSError."""
        if self.pipe is None:
            self._write(part, texts, **arrays)
            if self.chunks == PROCESS_FROM and len(os.sched_getaffinity(0)) > 1:
                self._start_process()
            return
        self._send((part, "\0".join(texts), arrays))

    def close(self) -> None:
        """Closes the files. Raises what writing them raised."""
        if self.pipe is not None:
            self._send(None)
            infos, self.words = self._result()
            for part, info in infos.items():
                self.parts[part].info = info
        for files in self.parts.values():
            for file in files.files.values():
                file.close()

    def abandon(self) -> None:
        """Ends the second process, if there is one, without its work, and closes what is still open."""
        if self.pipe is not None:
            self.pipe.close()
            if self.process.is_alive():
                self.process.kill()
                self.process.join(JOIN_SECONDS)
        for files in self.parts.values():
            for file in files.files.values():
                with contextlib.suppress(OSError):  # what could not be written has been said
                    file.close()

    def _start_process(self) -> None:
        self._flush()
        context = multiprocessing.get_context("fork")  # it continues with the open files and the words
        self.pipe, other_end = socket.socketpair()
        self.process = context.Process(target=self._serve, args=(self.pipe, other_end), daemon=True)
        self.process.start()
        other_end.close()
        self.pipe.settimeout(POLL_SECONDS)

    def _serve(self, readers_end: socket.socket, pipe: socket.socket) -> None:
        """The second process: writes what it is sent; ends when the reader does, or has died."""
        readers_end.close()
        leave_to_parent()
        try:
            with pipe.makefile("rb") as chunks:
                while (chunk := pickle.load(chunks)) is not None:
                    part, texts, arrays = chunk
                    self._write(part, texts.split("\0"), **arrays)
            self._flush()
            result = {part: files.info for part, files in self.parts.items()}, self.words
        except (EOFError, ConnectionError):
            return
        except (OSError, MemoryError) as error:
            result = error
        except Exception as error:  # whatever it is, it can be sent
            result = RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):  # the reader has died
            pipe.sendall(pickle.dumps(result, protocol=-1))

    def _send(self, message) -> None:
        left = memoryview(pickle.dumps(message, protocol=-1))
        while left:
            try:
                left = left[self._patiently(functools.partial(self.pipe.send, left)) :]
            except ConnectionError:
                self._result()  # raises what ended the process
                raise

    def _result(self):
        """What the second process sends at its end. Raises what it raised."""
        received = bytearray()
        with contextlib.suppress(ConnectionError):
            while block := self._patiently(lambda: self.pipe.recv(1 << 20)):
                received += block
        self.process.join(JOIN_SECONDS)
        try:
            result = pickle.loads(received)
        except (EOFError, pickle.UnpicklingError):
            end = how_it_ended(self.process.exitcode)
            raise OSError(f"the process that writes the prepared data has died{end}") from None
        if isinstance(result, BaseException):
            raise result
        return result

    def _patiently(self, work: Callable[[], Any]) -> Any:
        """`work()`, which raises TimeoutError after POLL_SECONDS, as soon as it succeeds."""
        waited = 0.0  # not by the clock: a run that was suspended has not waited
        while True:
            try:
                return work()
            except TimeoutError:
                waited += POLL_SECONDS
                self.check()
            if waited >= self.wait_seconds:
                raise OSError(
                    "the process that writes the prepared data has not moved for "
                    f"{self.wait_seconds / 60:g} minutes"
                )

    def _flush(self) -> None:
        for files in self.parts.values():
            for file in files.files.values():
                file.flush()

    def _write(self, part: str, texts: list[str], **arrays: np.ndarray) -> None:
        self.chunks += 1
        arrays["text_hash"] = hashes = text_hashes(list(map(str.strip, texts)))
        sides = {part: np.ones(len(texts), dtype=bool)}
        if part == "train" and self.share_val is not None:
            val = split_values(hashes) < self.share_val
            sides = {"train": ~val, "val": val}
        for side, chosen in sides.items():
            whole = chosen.all()
            kept = texts if whole else list(compress(texts, chosen))
            self.parts[side].add(
                kept, **(arrays if whole else {name: values[chosen] for name, values in arrays.items()})
            )
            if side == "train":
                self._count_words(kept)

    def _count_words(self, texts: list[str]) -> None:
        if self.parts["train"].info.rows > ALL_WORDS_OF and self.chunks % 4:
            return  # enough for how often a word is drawn
        self.words.update(" ".join(texts).split())
        while len(self.words) > MOST_COUNTED_WORDS:
            self.rare += 1
            self.words = Counter({word: count for word, count in self.words.items() if count > self.rare})
