"""A file of rows that is being coded: cut into numbered parts, each written whole or not at all, and put
together at the end.

The parts lie in `OUTPUT.parts` beside the output, with the settings that made them. What a part holds depends
on its rows and on the settings alone, never on the number of processes or on interruptions, and up to
rounding not on the batch size or the device: texts that occur often are coded first, for all parts.
"""

import hashlib
import io
import json
import os
import re
import select
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from histocc.data.rows import row_writer
from histocc.data.tables import Chunk, read_chunks, table_format
from histocc.predict.coder import Coded
from histocc.runtime.errors import UserError
from histocc.runtime.files import LOCK, TEMPORARY, atomic_write, kind_of, opened, remove_files
from histocc.runtime.log import Stage

ROWS_FOR_LARGER_PARTS = 2_000_000  # so many rows add a chunk to each part
MOST_FREQUENT = 1 << 16  # texts that are coded once for all parts
PIECE = 2048  # of them at once
_END = 1 << 16  # bytes of the input's begin and end that tell it from others
SETTINGS, SCAN, INPUT = "settings.json", "scan.json", "input"
# names of files in the folder beside the lock and the copied input
_PARTS = rf"((settings|scan|frequent\d+|\d{{6,}})\.json|\d{{6,}}\.csv)({TEMPORARY})?"
POLL_SECONDS = 0.2


@dataclass
class Scan:
    """What a first reading found. rows: that can be read; parts: how many, of `chunks` chunks each; frequent:
    cleaned texts and languages that occur more than once, the most frequent first; encoding: of a CSV
    file.
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


def fingerprint(path: str, copied: bool = False) -> dict:
    """What tells an input file from another, or from itself after a change: size, time of change, hash of its
    begin and end; of what was `copied` out of a pipe, the hash of all.
    """
    found = os.stat(path)
    if copied:
        return {"size": found.st_size, "hash": file_hash(path)}
    with open(path, "rb") as file:
        begin = file.read(_END)
        file.seek(max(0, found.st_size - _END))
        return {
            "size": found.st_size,
            "changed": found.st_mtime_ns,
            "ends": hashlib.sha256(begin + file.read()).hexdigest(),
        }


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
        with open(handle, "rb", buffering=0) as pipe:
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            last = checked = time.monotonic()
            check()
            with atomic_write(target) as file:
                while True:
                    # before the first writer has come a read would return b"", as at the end
                    block = pipe.read(1 << 20) if poll.poll(POLL_SECONDS * 1000) else None
                    if block == b"":
                        return
                    now = time.monotonic()
                    if now - checked >= POLL_SECONDS:
                        check()
                        checked = now
                    if block:
                        file.write(block)
                        last = now
                    elif now - last > limit_seconds:
                        raise UserError(
                            f"{path}: nothing has come through this pipe for {limit_seconds:g} s; start the"
                            " program that writes to it, or save its output as a file"
                        )
    except OSError as error:
        raise UserError(f"{path}: cannot be saved as {target}: {error.strerror or error}") from None


class CodedFile:
    """The parts of one output. output: its path; settings: everything that decides what the parts hold, plain
    types.
    """

    def __init__(self, output: str, settings: dict):
        self.output, self.folder, self.settings = output, output + ".parts", settings

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _seal(self, name: str, text: str) -> str:
        """Tells a file of this output, under its own name, from all others: a checksum of the settings, the
        name and the content.
        """
        of = "" if name == SETTINGS else json.dumps(self.settings, sort_keys=True)
        return f"{zlib.crc32(f'{of} {name} {text}'.encode()):08x}"

    def note(self, name: str, value) -> None:
        """Writes a value into the folder: a line with its seal, and the value as JSON."""
        text = json.dumps(value)
        with atomic_write(self.path(name)) as file:
            file.write(f"{self._seal(name, text)}\n{text}".encode())

    def read(self, name: str) -> Any:
        """What `note` has written; None where there is no such file, or it was not written here under this
        name. Raises UserError for what is no file at all.
        """
        kind = kind_of(self.path(name))
        if kind not in (None, "a file"):
            raise UserError(
                f"{self.path(name)} is {kind}, where a file of the unfinished output would be: move it away"
            )
        try:
            with open(self.path(name), encoding="utf-8") as file:
                seal, _, text = file.read().partition("\n")
            return json.loads(text) if seal == self._seal(name, text) else None
        except (FileNotFoundError, ValueError, RecursionError):
            return None

    def part(self, number: int, ending: str = "csv") -> str:
        return self.path(f"{number:06d}.{ending}")

    def is_done(self, number: int) -> bool:
        """Whether a part is there as it was written, as far as its size shows."""
        noted = self.read(f"{number:06d}.json")
        try:
            return noted is not None and os.path.getsize(self.part(number)) == noted["size"]
        except OSError:
            return False

    # ---- rank 0 alone

    def refuse_others(self) -> None:
        """Raises UserError where the folder holds something and was not made for an output: names alone are
        no proof.
        """
        if not os.path.isdir(self.folder) or self.read(SETTINGS) is not None:
            return
        others = [
            name
            for name in sorted(os.listdir(self.folder))
            if name != LOCK and not re.fullmatch(rf"settings\.json{TEMPORARY}", name)
        ]
        if others:
            raise UserError(
                f"{self.folder}, where the parts of the output would lie, holds {others[0]}, which is none of"
                " them: choose another --output"
            )

    def begin(self, overwrite: bool) -> bool:
        """Notes the settings in the folder, or finds those of an interrupted run; returns whether there was
        one. Raises UserError where that had other settings, unless `overwrite`, which removes it.
        `refuse_others` has looked whose the folder is.
        """
        before = self.read(SETTINGS)
        if before == self.settings:
            return True
        if before is not None and not overwrite:
            names = {*self.settings, *before}
            differing = sorted(name for name in names if before.get(name) != self.settings.get(name))
            raise UserError(
                f"{self.folder} holds an unfinished output with other settings ({', '.join(differing)}"
                " differ): repeat that command to continue with it, or start over with --overwrite"
            )
        remove_files(self.folder, _PARTS)  # what a process left that was killed at its begin, too
        self.note(SETTINGS, self.settings)
        return False

    def clear(self) -> None:
        """Removes what is its own but the lock, which the caller holds."""
        remove_files(self.folder, f"{_PARTS}|{INPUT}({TEMPORARY})?")

    def scan(
        self,
        path: str,
        delimiter: str | None,
        columns: list[str],
        clean: Callable[[str], str],
        known: Callable[[str], str],
        frequent: bool,
        check: Callable[[], None],
    ) -> None:
        """Reads the whole input once; notes what `Scan` holds. columns: of texts, and of languages where
        there is one; clean, known: what the model reads of these.
        """
        if self.read(SCAN) is not None:
            return
        encoding = table_format(path, delimiter).encoding
        counts: Counter = Counter()
        rows = chunks = 0
        for chunk in read_chunks(path, columns, delimiter, encoding):
            check()
            rows += len(chunk.lines)
            chunks += 1
            if frequent:
                languages = map(known, chunk.columns[1]) if len(columns) > 1 else [""] * len(chunk.lines)
                counts.update(zip(map(clean, chunk.columns[0]), languages))
                # what is rare so far is forgotten: a bound for the memory
                if len(counts) > 16 * MOST_FREQUENT:
                    counts = Counter(
                        {key: number for key, number in counts.items() if number > 1}
                        if len(counts) < 32 * MOST_FREQUENT
                        else dict(counts.most_common(MOST_FREQUENT))
                    )
        of_part = 1 + rows // ROWS_FOR_LARGER_PARTS
        parts = -(-chunks // of_part)
        often = (
            [key for key, number in counts.most_common(MOST_FREQUENT) if number > 1 and key[0].strip()]
            if parts > 1
            else []
        )
        self.note(
            SCAN, {"rows": rows, "parts": parts, "chunks": of_part, "encoding": encoding, "frequent": often}
        )

    def join(self, header: list[str], parts: int, rows: int, overwrite: bool) -> dict:
        """Puts the parts together into the output, and what could not be read into `OUTPUT.rejected.csv`;
        returns their counts, summed. Raises UserError where a part is missing or damaged.
        """
        missing = [number for number in range(parts) if not self.is_done(number)]
        if missing:
            raise UserError(
                f"{self.part(missing[0])} was there and is missing or damaged: the same command codes it"
                " again"
            )
        total: Counter = Counter()
        languages: Counter = Counter()
        for number in range(parts):
            noted = self.read(f"{number:06d}.json")
            for name in ("size", "checksum"):
                noted.pop(name)
            total["faults"] += len(noted.pop("faults"))
            languages.update(noted.pop("unknown_languages"))
            total.update(noted)
        if total["rows"] != rows:
            raise UserError(
                f"{self.folder}: its parts hold {total['rows']:,} rows, and the input {rows:,}: start over"
                " with --overwrite"
            )

        rejected = self.output + ".rejected.csv"
        with atomic_write(os.path.realpath(self.output), overwrite) as file:
            file.write(csv_text([header]))
            for number in range(parts):
                with opened(self.part(number)) as part:
                    content = part.read()
                if zlib.crc32(content) != self.read(f"{number:06d}.json")["checksum"]:
                    os.remove(self.part(number))
                    raise UserError(
                        f"{self.part(number)} is not as it was written: the same command codes it again"
                    )
                file.write(content)
            if total["faults"]:
                with atomic_write(os.path.realpath(rejected), overwrite) as listed:
                    listed.write(csv_text([["line", "kind", "reason"]]))
                    for number in range(parts):
                        listed.write(csv_text(self.read(f"{number:06d}.json")["faults"]))
        # the parts stay until the caller clears them
        if overwrite and not total["faults"] and os.path.isfile(rejected):
            os.remove(rejected)  # of the output that was there before
        return {
            **total,
            "faults": total["faults"],
            "unknown": total["unknown"],
            "rejected": rejected,
            "unknown_languages": dict(languages.most_common(10)),
        }

    # ---- every rank

    def open_scan(self) -> Scan:
        found = self.read(SCAN)
        if found is None:
            raise UserError(
                f"{self.folder} cannot be read on every machine of the job: the output must lie in a folder"
                " that they share"
            )
        return Scan(**{**found, "frequent": [tuple(pair) for pair in found["frequent"]]})

    def rows(self, path: str, delimiter: str | None, scan: Scan) -> Iterator[tuple[int, list[Chunk]]]:
        """(number, chunks) of each part that is to be read, all columns."""
        held: list[Chunk] = []
        number = 0
        for chunk in read_chunks(path, None, delimiter, scan.encoding):
            held.append(chunk)
            if len(held) == scan.chunks:
                yield number, held
                number, held = number + 1, []
        if held:
            yield number, held

    def write_part(self, number: int, rows: list[list[str]], noted: dict) -> None:
        content = csv_text(rows)
        self.note(f"{number:06d}.json", {**noted, "size": len(content), "checksum": zlib.crc32(content)})
        # written last: it says that the part is done
        with atomic_write(self.part(number)) as file:
            file.write(content)

    def code_frequent(
        self, scan: Scan, mine: Callable[[int], bool], code: Callable[[list, list], list[Coded]]
    ) -> None:
        """Codes this rank's pieces of the frequent texts, as far as they are not there."""
        for number, start in enumerate(range(0, len(scan.frequent), PIECE)):
            if mine(number) and self.read(f"frequent{number}.json") is None:
                texts, languages = zip(*scan.frequent[start : start + PIECE])
                self.note(f"frequent{number}.json", code(list(texts), list(languages)))

    def frequent(self, scan: Scan) -> dict[tuple[str, str], Coded]:
        """The frequent texts with what they got. Raises UserError where a piece is missing."""
        pieces = [self.read(f"frequent{number}.json") for number in range(scan.pieces)]
        if None in pieces:
            raise UserError(
                f"{self.path(f'frequent{pieces.index(None)}.json')} was there and is missing or damaged: the"
                " same command makes it again"
            )
        return {
            key: Coded(*coded)
            for key, coded in zip(scan.frequent, (coded for piece in pieces for coded in piece), strict=True)
        }


class Progress:
    """How much of a part of the work all processes together have done, by the files that are there. Rank 0
    looks.
    """

    def __init__(self, file: CodedFile, looks: bool):
        self.folder, self.looks = file.folder, looks
        self.stage: Stage | None = None

    def begin(self, what: str, unit: str, total: int, pieces: int, is_piece: Callable[[str], bool]) -> None:
        """what: is done; total: units of it, in so many pieces; is_piece: whether a file of the folder is one
        that is done.
        """
        self.close()
        self.total, self.is_piece = total, is_piece
        self.of_piece = total / max(1, pieces)
        self.stage = Stage(what, total, unit, round(self.done()) if self.looks else 0)

    def done(self) -> float:
        return min(self.total, sum(map(self.is_piece, os.listdir(self.folder))) * self.of_piece)

    def show(self, share: float) -> None:
        """share: of the piece that this process is at, 0…1."""
        if self.looks and self.stage is not None and self.stage.is_due():
            self.stage.at(round(self.done() + share * self.of_piece))

    def close(self) -> None:
        if self.stage is not None:
            self.stage.close()


def csv_text(rows: list[list]) -> bytes:
    out = io.StringIO()
    write = row_writer(out)
    for row in rows:
        write(row)
    return out.getvalue().encode()
