"""A file of rows that is being coded: cut into numbered parts, each written whole or not at all, and put
together at the end.

The parts lie in `OUTPUT.parts` beside the output, with the settings that made them. What a part holds depends
on its rows and on the settings alone, never on the number of processes or on interruptions, and up to
rounding not on the batch size or the device: texts that occur often are coded first, for all parts.
"""

import hashlib
import json
import os
import re
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from histocc.data.rows import csv_text, with_texts
from histocc.data.tables import Chunk, Format, read_chunks
from histocc.runtime.errors import UserError
from histocc.runtime.files import LOCK, TEMPORARY, atomic_write, read_sealed, remove_files, write_sealed

ROWS_FOR_LARGER_PARTS = 2_000_000  # so many rows add a chunk to each part
MAX_FREQUENT = 1 << 16  # texts that are coded once for all parts
PIECE = 2048  # of them at once
SETTINGS, SCAN, INPUT = "settings.json", "scan.json", "input"
# names of files in the folder beside the lock and the copied input
_PARTS = rf"((settings|scan|frequent\d+)\.json|\d{{6,}}\.part)({TEMPORARY})?"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Scan:
    """What a first reading found.

    Args:
        rows: that can be read.
        parts: how many, of `chunks` chunks each.
        encoding: of a CSV file.
        frequent: cleaned texts and languages that occur more than once, the most frequent first.
    """

    rows: int
    parts: int
    chunks: int
    encoding: str | None
    frequent: list[tuple[str, str]]

    @property
    def pieces(self) -> int:
        """Of the frequent texts, PIECE each."""
        return -(-len(self.frequent) // PIECE)


def fingerprint(path: str, copied: bool) -> dict:
    """What tells an input file from another, or from itself after a change: size and time of change; of what
    was `copied` out of a pipe, size and hash.
    """
    state = os.stat(path)
    more = {"hash": file_hash(path)} if copied else {"changed": state.st_mtime_ns}
    return {"size": state.st_size, **more}


def file_hash(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_pipe(path: str, target: str, check: Callable[[], None], limit_seconds: float) -> None:
    """Copies what comes out of a pipe, until its last writer closes it, into the file `target`.

    Args:
        check: called several times a second, also while nothing comes; what it raises ends the copying.
        limit_seconds: how long nothing may come, neither a writer nor a byte.

    Raises:
        UserError: the pipe cannot be read, the target cannot be written, or the limit is reached.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # waits for no writer
        with open(handle, "rb", buffering=0) as pipe, atomic_write(target) as file:
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            last, checked = time.monotonic(), 0.0
            # before the first writer has come a read would return b"", as at the end
            while (block := pipe.read(1 << 20) if poll.poll(POLL_SECONDS * 1000) else None) != b"":
                if time.monotonic() - checked >= POLL_SECONDS:
                    check()
                    checked = time.monotonic()
                if block:
                    file.write(block)
                    last = time.monotonic()
                elif time.monotonic() - last > limit_seconds:
                    raise UserError(
                        f"{path}: nothing has come through this pipe for {limit_seconds:g} s; start the"
                        " program that writes to it, or save its output as a file"
                    )
    except OSError as error:
        raise UserError(f"{path}: cannot be saved as {target}: {error.strerror or error}") from None


class CodedFile:
    """The parts of one output.

    Args:
        output: its path.
        settings: everything that decides what the parts hold, plain types.
    """

    def __init__(self, output: str, settings: dict):
        self.output, self.folder, self.settings = output, output + ".parts", settings
        self._of = json.dumps(settings, sort_keys=True)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def write(self, name: str, value: Any) -> None:
        write_sealed(self.path(name), json.dumps(value).encode(), "" if name == SETTINGS else self._of)

    def read(self, name: str) -> Any:
        """What `write` has written; None if there is no such file, or one of other settings."""
        content = read_sealed(self.path(name), "" if name == SETTINGS else self._of)
        return None if content is None else json.loads(content)

    def part(self, number: int) -> str:
        return self.path(f"{number:06d}.part")

    def write_part(self, number: int, rows: list[list], counts: dict) -> None:
        content = json.dumps(counts).encode() + b"\n" + csv_text(rows)
        write_sealed(self.part(number), content, self._of)

    def is_done(self, number: int) -> bool:
        return read_sealed(self.part(number), self._of) is not None

    def frequent(self, scan: Scan) -> dict[tuple[str, str], list]:
        """What each of the frequent texts got. Raises UserError if a piece is missing."""
        answers: list[list] = []
        for name in map("frequent{}.json".format, range(scan.pieces)):
            piece = self.read(name)
            if piece is None:
                raise UserError(f"{self.path(name)}{MISSING} makes it again")
            answers += piece
        return dict(zip(scan.frequent, answers, strict=True))

    def open_scan(self) -> Scan:
        content = self.read(SCAN)
        if content is None:
            raise UserError(
                f"{self.folder} cannot be read on every machine of the job: the output must lie in a folder"
                " that they share"
            )
        return Scan(**{**content, "frequent": [tuple(pair) for pair in content["frequent"]]})

    def rows(
        self, path: str, table: Format, scan: Scan, place: int, ditto: bool
    ) -> Iterator[tuple[int, list[Chunk]]]:
        """(number, chunks) of each part that is to be read, all columns.

        Args:
            place: of the column with the texts.
            ditto: as in `scan`.
        """
        chunks = with_texts(read_chunks(path, None, table.delimiter, scan.encoding), place, ditto)
        for number in range(scan.parts):
            yield number, list(islice(chunks, scan.chunks))

    # ---- rank 0 alone

    def refuse_others(self) -> None:
        """Raises UserError if the folder holds something and was not made for an output: names alone are no
        proof.
        """
        if not os.path.isdir(self.folder) or self.read(SETTINGS) is not None:
            return
        for name in sorted(os.listdir(self.folder)):
            if name != LOCK and not re.fullmatch(rf"settings\.json{TEMPORARY}", name):
                raise UserError(
                    f"{self.folder}, where the parts of the output would lie, holds {name}, which is none of"
                    " them: choose another --output"
                )

    def begin(self, overwrite: bool) -> bool:
        """Notes the settings in the folder; returns whether those of an interrupted run are there. Raises
        UserError if that had other settings, unless `overwrite`, which removes it.
        """
        before = self.read(SETTINGS)
        if before == self.settings:
            return True
        if before is not None and not overwrite:
            names = sorted({*self.settings, *before})
            differing = [name for name in names if before.get(name) != self.settings.get(name)]
            raise UserError(
                f"{self.folder} holds an unfinished output with other settings ({', '.join(differing)}"
                " differ): repeat that command to continue with it, or start over with --overwrite"
            )
        remove_files(self.folder, _PARTS)  # what a process left that was killed at its begin, too
        self.write(SETTINGS, self.settings)
        return False

    def clear(self) -> None:
        """Removes what is its own but the lock, which the caller holds."""
        remove_files(self.folder, f"{_PARTS}|{INPUT}({TEMPORARY})?")

    def scan(
        self,
        path: str,
        table: Format,
        columns: list[str],
        ditto: bool,
        key_of: Callable[[str, str], tuple[str, str]],
        check: Callable[[], None],
    ) -> None:
        """Reads the whole input once; notes what `Scan` holds.

        Args:
            columns: of texts, and of languages if there is one.
            ditto: whether texts such as do. are those of the row above.
            key_of: what the model reads of a text and its language.
        """
        if self.read(SCAN) is not None:
            return
        counts: Counter = Counter()
        rows = chunks = 0
        for chunk in with_texts(read_chunks(path, columns, table.delimiter, table.encoding), 0, ditto):
            check()
            rows += len(chunk.lines)
            chunks += 1
            languages = chunk.columns[1] if len(columns) > 1 else [""] * len(chunk.lines)
            counts.update(map(key_of, chunk.texts, languages))
            if len(counts) > 16 * MAX_FREQUENT:  # a bound for the memory: what is rare so far is forgotten
                counts = Counter({key: count for key, count in counts.items() if count > 1})
                if len(counts) > 8 * MAX_FREQUENT:
                    counts = Counter(dict(counts.most_common(MAX_FREQUENT)))
        of_part = 1 + rows // ROWS_FOR_LARGER_PARTS
        parts = -(-chunks // of_part)
        often = counts.most_common(MAX_FREQUENT) if parts > 1 else []
        frequent = [key for key, count in often if count > 1 and key[0].strip()]
        self.write(SCAN, vars(Scan(rows, parts, of_part, table.encoding, frequent)))

    def join(self, header: list[str], scan: Scan, overwrite: bool) -> tuple[Counter, Counter]:
        """Puts the parts together into the output, and what could not be read into `OUTPUT.rejected.csv`;
        returns (their counts, summed; the languages that the model does not know). The parts stay. Raises
        UserError if one is missing or damaged.
        """
        total, languages, faults = Counter(), Counter(), []
        rejected = self.output + ".rejected.csv"
        with atomic_write(os.path.realpath(self.output), overwrite) as file:
            file.write(csv_text([header]))
            for number in range(scan.parts):
                content = read_sealed(self.part(number), self._of)
                if content is None:
                    raise UserError(f"{self.part(number)}{MISSING} codes it again")
                counts, _, rows = content.partition(b"\n")
                counts = json.loads(counts)
                faults += counts.pop("faults")
                languages.update(counts.pop("languages"))
                total.update(counts)
                file.write(rows)
            if total["rows"] != scan.rows:
                raise UserError(
                    f"{self.folder}: its parts hold {total['rows']:,} rows, and the input {scan.rows:,}:"
                    " start over with --overwrite"
                )
            if faults:
                with atomic_write(os.path.realpath(rejected), overwrite) as listed:
                    listed.write(csv_text([["line", "kind", "reason"], *faults]))
        if overwrite and not faults and os.path.isfile(rejected):
            os.remove(rejected)  # of the output that was there before
        total["faults"] = len(faults)
        return total, languages


MISSING = " was there and is missing or damaged: the same command"
