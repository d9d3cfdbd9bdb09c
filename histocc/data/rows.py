"""Rows of tables, checked one by one: written to arrays, or listed with the reason why they are rejected."""

import contextlib
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from itertools import compress

import numpy as np

from histocc.data.arrays import ARRAYS
from histocc.data.code_book import BLANK, REPAIRED, SHORT, WORD, CodeBook, Languages
from histocc.data.findings import DOES_NOT_FIT, OUTSIDE_KEY, Findings
from histocc.data.report import WrittenPart, make_report
from histocc.data.settings import PrepareSettings
from histocc.data.tables import Chunk, detect_encoding, is_parquet, read_chunks, read_header
from histocc.data.writer import RowWriter
from histocc.formatter import BlockyFormatter
from histocc.runtime.errors import UserError
from histocc.runtime.progress import Stage
from histocc.text import LANGUAGE_SEPARATOR, UNKNOWN_LANGUAGE
from histocc.text_rules import AS_IS, cleaner

_OF_THE_MODEL = re.compile("[\ue000-\ue004]")
# UTF-8 that was read as Windows-1252, or lost altogether
_BROKEN = re.compile("\ufffd|Ã[\x80-\xbf\u0152-\u2122]")
Reject = tuple[int, str, str, str, str]  # line, column, value, kind, reason
ENCODINGS = {
    "utf-8-sig": "UTF-8",
    "utf-16": "UTF-16",
    "windows-1252": "Windows-1252 (Latin-1), since it is not UTF-8",
}


@contextlib.contextmanager
def paused_garbage_collection():
    """Rows make no cycles, but so many lists that looking for cycles takes a fifth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _readable(path: str, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """The chunks of a file; an error of the disk that it lies on is said as such, not as one of writing."""
    try:
        yield from chunks
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _repeated(numbers: np.ndarray) -> np.ndarray:
    """Which numbers ≥ 0 stand further left in their row, too; int64 [n, K] → bool [n, K]."""
    found = np.zeros(numbers.shape, dtype=bool)
    for place in range(1, numbers.shape[1]):
        found[:, place] = (numbers[:, :place] == numbers[:, place : place + 1]).any(axis=1)
    return found & (numbers >= 0)


class Reader:
    """One pass over the files: checks each row, writes it or lists it as rejected, and counts everything.

    check: called often; an exception of it ends the work. wait_seconds: how long the process that writes may
    take no rows.
    """

    def __init__(
        self, settings: PrepareSettings, folder: str, check: Callable[[], None], wait_seconds: float
    ):
        self.settings, self.folder, self.check = settings, folder, check
        self.formatter = BlockyFormatter.from_dict(settings.formatter)
        self.book = CodeBook(
            self.formatter,
            settings.fixed_codes,
            settings.number_codes or settings.fixed_codes if settings.numbered else None,
        )
        # nobody has named a key for them
        self.numbers_assumed = settings.number_codes is not None and settings.fixed_codes is None
        self.clean = cleaner(settings.clean_text)
        self.languages = Languages(settings.language_col, settings.max_len // 2)
        self.missing = None if settings.missing_code is None else self.book.of_code(settings.missing_code)
        self.findings = Findings(folder)
        self.files: list[dict] = []
        self.writer = RowWriter(folder, settings.max_codes, settings.share_val, check, wait_seconds)

    def read(self, path: str, part: str) -> None:
        """Reads one file into `part`, or into both parts by the hash of the text where the settings ask for
        it.
        """
        encoding = None if is_parquet(path) else detect_encoding(path)
        columns, delimiter = read_header(path, self.settings.delimiter)
        rows, size = 0, round(os.path.getsize(path) / 1e6, 1)
        with paused_garbage_collection(), Stage(f"reading {path}", size, "MB") as stage:
            for chunk in _readable(
                path, read_chunks(path, self.settings.columns, delimiter or None, encoding)
            ):
                self.check()
                rows += len(chunk.lines) + len(chunk.faults)
                try:
                    self._read_chunk(path, part, chunk)
                except UserError as error:
                    raise UserError(
                        f"{path}, in lines {chunk.lines[0]:,} to {chunk.lines[-1]:,}: {error}"
                    ) from None
                self.book.forget_faults()
                stage.at(round(size * (chunk.share or 0.0), 1))
        self.files.append(
            {
                "path": path,
                "part": part,
                "rows": rows,
                "encoding": ENCODINGS[encoding] if encoding else "Parquet",
                "delimiter": delimiter,
                "columns": columns,
            }
        )

    def _read_chunk(self, path: str, part: str, chunk: Chunk) -> None:
        columns, lines = chunk.columns, chunk.lines
        texts = list(map(self.clean, columns[0]))
        rejects = [(line, "", "", kind, reason) for line, kind, reason in chunk.faults]
        keep, unusable = self._check_texts(path, chunk, texts)
        rejects += unusable
        codes = self._codes(path, chunk, keep, rejects)  # [n, K]; clears `keep` where a row is no use
        for line, column, value, kind, reason in sorted(rejects, key=lambda reject: reject[0]):
            self.findings.reject(kind, path, line, column, value, reason)
        if not keep.all():
            texts, codes, lines = list(compress(texts, keep)), codes[keep], lines[keep]
            columns = [list(compress(column, keep)) for column in columns]
        if texts:
            language = self._language(path, lines, texts, columns)
            self.writer.add(
                part,
                texts,
                language=language.astype(ARRAYS["language"]),
                codes=codes.astype(ARRAYS["codes"]),
                lines=lines + (len(self.files) << 40),
            )

    def _check_texts(self, path: str, chunk: Chunk, texts: list[str]) -> tuple[np.ndarray, list[Reject]]:
        """(which rows have a usable description, bool [n], what is said of the others); texts: the
        descriptions, cleaned. Also notes letters that were broken before.
        """
        column, cells = self.settings.input_col, chunk.columns[0]
        whole = "".join(cells)
        keep = np.fromiter(map(len, map(str.strip, texts)), dtype=np.int64, count=len(texts)) > 0
        of_model = []
        if _OF_THE_MODEL.search(whole):
            of_model = [i for i, text in enumerate(cells) if _OF_THE_MODEL.search(text)]
        keep[of_model] = True  # transliterated, nothing may be left of them
        rejects = [
            (chunk.lines[i], column, cells[i], "empty text", "the description is empty")
            for i in np.flatnonzero(~keep)
        ]
        if "\ufffd" in whole or "Ã" in whole:
            broken = [i for i, text in enumerate(cells) if _BROKEN.search(text)]
            self.findings.note(
                "letters_broken", path, chunk.lines[broken], (cells[i].strip() for i in broken)
            )
        if "\0" in whole:
            nul = [i for i, text in enumerate(texts) if "\0" in text]
            keep[nul] = False
            reason = "the description holds a NUL character"
            rejects += [(chunk.lines[i], column, texts[i], "NUL character", reason) for i in nul]
        of_model = [i for i in of_model if keep[i]]
        keep[of_model] = False
        reason = (
            "the description holds a character from U+E000 to U+E004, which the model uses for the ends of a"
            " text"
        )
        rejects += [
            (chunk.lines[i], column, cells[i].strip(), "character of the model", reason) for i in of_model
        ]
        return keep, rejects

    def _codes(self, path: str, chunk: Chunk, keep: np.ndarray, rejects: list[Reject]) -> np.ndarray:
        """Provisional numbers of the codes, int64 [n, K], −1 behind the last; rows that cannot be used leave
        `keep`.
        """
        names = self.settings.target_cols
        if not names:
            return np.full((len(keep), self.settings.max_codes), BLANK)
        cells = chunk.columns[1 : 1 + len(names)]
        # [n, K]
        numbers = np.stack(
            [
                np.fromiter(map(self.book.__getitem__, column), dtype=np.int64, count=len(column))
                for column in cells
            ],
            axis=1,
        )
        blank = keep & ((numbers[:, 0] == BLANK) | (numbers[:, 0] == WORD))
        if self.missing is None:
            rejects += [
                (
                    chunk.lines[i],
                    names[0],
                    cells[0][i],
                    "first code missing",
                    "the first code is missing or blank; --missing-code CODE gives such rows a code",
                )
                for i in np.flatnonzero(blank)
            ]
            keep &= ~blank
        else:
            numbers[blank, 0] = self.missing
        self._check_numbers(path, chunk, numbers, keep, rejects)

        def note(kind: str, where: np.ndarray) -> None:  # where: bool [n, K]
            rows, places = np.nonzero(where & keep[:, None])
            if len(rows):
                self.findings.note(
                    kind, path, chunk.lines[rows], (cells[place][row] for row, place in zip(rows, places))
                )

        if self.missing is not None:
            note("missing_code_used", np.pad(blank[:, None], ((0, 0), (0, len(names) - 1))))
        note("missing_words", numbers == WORD)
        note("zeros_restored", (numbers >= REPAIRED) & (numbers & REPAIRED > 0))
        note("codes_short", numbers >= SHORT)
        numbers &= np.where(numbers >= 0, REPAIRED - 1, -1)
        numbers[numbers < 0] = BLANK
        repeated = _repeated(numbers)
        note("codes_repeated", repeated)
        numbers[repeated] = BLANK
        return np.take_along_axis(numbers, np.argsort(numbers < 0, axis=1, kind="stable"), axis=1)

    def _check_numbers(
        self, path: str, chunk: Chunk, numbers: np.ndarray, keep: np.ndarray, rejects: list[Reject]
    ) -> None:
        """Rows with a cell that is no code of the model or the key leave `keep`, and are rejected or, where
        the user must decide, errors.
        """
        for i in np.flatnonzero(keep & (numbers < WORD).any(axis=1)):
            place = int(np.argmax(numbers[i] < WORD))
            kind, message = self.book.fault(int(numbers[i, place]))
            found = DOES_NOT_FIT if kind == "label" else OUTSIDE_KEY
            line, value = chunk.lines[i], chunk.columns[1 + place][i]
            column = self.settings.target_cols[place]
            if kind == "label" and (self.numbers_assumed or not self.settings.drop_bad_labels):
                self.findings.error(found, path, line, column, value, message)
            else:
                rejects.append((line, column, value, found, message))
            keep[i] = False

    def _language(
        self, path: str, lines: np.ndarray, texts: list[str], columns: list[list[str]]
    ) -> np.ndarray:
        """Number of each row's language; also counts what is missing, and the texts that will be cut."""
        settings = self.settings
        if settings.language_col:
            cells = columns[-1]
            numbers = np.fromiter(map(self.languages.__getitem__, cells), dtype=np.int64, count=len(cells))
            blank = [i for i in np.flatnonzero(numbers == 0) if not cells[i].strip()]
            self.findings.note("language_missing", path, lines[blank], (texts[i] for i in blank))
        else:
            numbers = np.full(len(texts), self.languages[settings.language])
        room = settings.max_len - 2 - len(LANGUAGE_SEPARATOR) - np.array(list(map(len, self.languages.names)))
        cut = np.flatnonzero(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)) > room[numbers])
        self.findings.note("texts_cut", path, lines[cut], (texts[i] for i in cut))
        return numbers

    def problems(self) -> list[str]:
        """What makes the data unusable."""
        settings, findings = self.settings, self.findings
        rows = {part.part: part.rows for part in self._parts()}
        if findings.errors:
            return [self._bad_labels()]
        if not rows["train"]:
            kinds = (
                "; ".join(f"{count:,} × {kind}" for kind, count in findings.rejected.items())
                or "there are only column names"
            )
            if rows["val"]:
                kinds = f"all {rows['val']:,} valid rows went to validation; lower --share-val (0: none)"
            return [f"{', '.join(settings.train_files)}: no valid row to train on ({kinds})"]
        if rows["val"] or not (settings.val_files or settings.share_val):
            return []
        if settings.val_files:
            return [", ".join(settings.val_files) + ": no valid row to validate on"]
        return [
            f"--share-val {settings.share_val:g} leaves no row for validation in a file this small; raise it,"
            " or pass --share-val 0 to train without validation"
        ]

    def _what_was_read(self) -> list[str]:
        settings, formatter = self.settings, self.formatter
        language = (
            f"column {settings.language_col}" if settings.language_col else f"{settings.language} for all"
        )
        codes = "no codes"
        if settings.target_cols:
            columns = ", ".join(settings.target_cols)
            codes = f"codes from {columns} ({formatter.kind}, block size {formatter.block_size})"
        lines = [
            f"Read: descriptions from column {settings.input_col}, {codes}, language: {language}"
            + (f"; texts: {settings.clean_text}" if settings.clean_text != AS_IS else "")
        ]
        ignored = [
            name for file in self.files for name in file["columns"] if name.casefold() in ("lang", "language")
        ]
        if ignored and not settings.language_col and settings.language == UNKNOWN_LANGUAGE:
            lines.append(
                f"Note: there is a column {ignored[0]!r} that is not read; --language-col {ignored[0]}"
                " reads it"
            )
        return lines

    def _bad_labels(self) -> str:
        formatter, [(kind, rows)] = self.formatter, self.findings.errors.items()
        ways = ["--drop-bad-labels leaves these rows out and lists them"]
        if formatter.kind == "gpf" and not formatter.allow_short:
            ways = [
                "--allow-codes-shorter-than-block-size fills shorter codes up",
                *ways,
                "--block-size N sets another length",
            ]
            hisco = "--formatter hisco is for HISCO codes, and restores lost leading zeros"
            ways = [hisco, *ways] if formatter.target_cols[0].startswith("hisco") else [*ways, hisco]
        if rows > sum(part.rows for part in self._parts()):
            ways.insert(
                0, "Most rows are of this kind: look whether --target-cols and --formatter are the right ones"
            )
        what = f"a code that does not fit the formatter {formatter.kind} (block size {formatter.block_size})"
        if self.settings.numbered:
            rename = [
                "columns code1, code2 … hold numbers of the HISCO key where no --key is named: where they"
                " hold codes, rename them"
            ]
            what = "what is not a number of the key"
            ways = [
                "--key names the file that the numbers belong to",
                *(rename if self.settings.number_codes else ways),
            ]
        return "\n    ".join(
            [f"{rows:,} rows hold {what}. The first:", *self._first(kind), "What to do:", *ways]
        )

    def _first(self, kind: str) -> list[str]:
        return [
            f"{each['file']}, line {each['line']}, {each['reason']}" for each in self.findings.examples[kind]
        ]

    def finish(self) -> tuple[list[str], dict]:
        """Closes the files and gives codes their final numbers. Returns (codes, report)."""
        self.writer.close()
        self.findings.close()
        found = list(self.book.codes)
        used = np.zeros(len(found) + 1, dtype=bool)  # not those of rejected rows alone
        for part in self._parts():
            for numbers in part.blocks("codes", ARRAYS["codes"], part.max_codes):
                used[np.unique(numbers)] = True  # −1 marks the last
        codes = self.settings.fixed_codes
        if codes is None:
            first = self.settings.first_codes or []
            codes = first + sorted({code for number, code in enumerate(found) if used[number]} - set(first))
        place = {code: i for i, code in enumerate(codes)}
        final = np.array([place.get(code, -1) for code in found] + [-1], dtype=ARRAYS["codes"])  # −1 stays −1
        for part in self._parts():
            path = os.path.join(self.folder, f"{part.part}.codes")
            with open(path + ".new", "wb") as file:
                for numbers in part.blocks("codes", ARRAYS["codes"], part.max_codes):
                    file.write(final[numbers].tobytes())
            os.replace(path + ".new", path)
        report = make_report(
            self._parts(),
            not self.settings.val_files,
            self._what_was_read(),
            self.files,
            self.findings,
            list(codes),
            self.languages.names,
            os.path.join(self.folder, "conflicts.csv"),
        )
        for part in self._parts():
            os.unlink(os.path.join(self.folder, f"{part.part}.lines"))
        return list(codes), report

    def alphabet(self) -> list[int]:
        """All code points of the descriptions, sorted. After `finish`."""
        stand = np.zeros(sys.maxunicode + 1, dtype=bool)
        for part in self._parts():
            for points in part.blocks("chars", ARRAYS["chars"]):
                stand[points] = True
        return np.flatnonzero(stand).tolist()

    def _parts(self) -> list[WrittenPart]:
        return [files.info for files in self.writer.parts.values()]

    def abandon(self) -> None:
        """Ends what is still at work and closes what is still open. Called after `finish`, too."""
        self.writer.abandon()
        with contextlib.suppress(OSError):  # what could not be written has been said
            self.findings.close()
