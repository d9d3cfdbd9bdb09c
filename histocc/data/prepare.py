"""Prepare tables as checked arrays, which every process of a run maps. `histocc.data.arrays` describes them.

Everything dropped or changed is counted, and each rejected row is listed in `rejected_rows.csv` with its
file, line, column, value and reason. The folder's name is a hash of the files' content and the settings. An
incomplete or damaged folder is made again.
"""

import contextlib
import filecmp
import gc
import json
import os
import re
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from itertools import chain, compress
from typing import TYPE_CHECKING

import numpy as np

from histocc.data.arrays import HELD, WRITTEN, PreparedData, RowSet, fault, map_array, text_keys, write_last
from histocc.data.config import PrepareSettings, fingerprint
from histocc.data.records import DECIDED, LEAVE, MAX_WEIGHT, NO_ROW_ABOVE, Records, Table, nothing
from histocc.data.report import compare_rows, describe_parts
from histocc.data.rows import (
    BLANK,
    DECLARED,
    DOES_NOT_FIT,
    NOTES,
    OUTSIDE_KEY,
    UNFIT,
    WORD,
    CodeBook,
    Findings,
    Languages,
    code_of_cell,
    csv_text,
    escape_formula,
    read_together,
    splitter,
)
from histocc.data.split import OFTEN, named_parts, parts_of_rows
from histocc.data.tables import read_chunks
from histocc.figure import percent
from histocc.formatter import NO_WORK, BlockyFormatter, classes_in_words, hisco_key, in_key
from histocc.runtime.errors import UserError, in_words
from histocc.runtime.files import OwnFiles, atomic_write, kind_of, run_lock
from histocc.runtime.log import Stage, counted
from histocc.runtime.rng import mix
from histocc.text import AS_IS, LANGUAGE_SEPARATOR, UNKNOWN_LANGUAGE, code_points, text_hashes

if TYPE_CHECKING:
    from histocc.runtime.world import World

LISTS = ("key.csv", "rejected_rows.csv", "conflicts.csv", "data_report.json")  # for the user
MAX_WORDS = 50_000  # the most frequent words of the training texts, for word insertion
MAX_COUNTED_WORDS = 500_000  # rarer words are dropped on the way, so that memory does not grow with the rows
ALL_WORDS_OF = 1 << 19  # all words of so many training rows are counted, then those of every fourth chunk
MAX_REPEATED, MAX_TIMES = 1_000_000, 1_000  # most rows from whole weights, most copies of a row if divided
MAX_CODES_OF_ROW = 100  # most codes of a row whose codes are separated in one cell


class UnusableData(UserError):
    """An error for rows that cannot be trained on as they are. `report` still describes the files."""

    def __init__(self, message: str, report: dict):
        super().__init__(message)
        self.report = report


# ---- rows → arrays


class PartFiles:
    """The open array files of one part, `train` or `val`, and how many rows they have."""

    def __init__(self, folder: str, part: str):
        self.files = {name: open(os.path.join(folder, f"{part}.{name}"), "wb") for name in WRITTEN}
        self.rows = self.end = 0
        self.files["offsets"].write(np.zeros(1, WRITTEN["offsets"]).tobytes())

    def add(self, texts: list[str], arrays: dict[str, np.ndarray]) -> None:
        """Append n descriptions (texts) and their arrays: language, codes [n, K], text_hash, lines."""
        ends = self.end + np.cumsum(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)))
        for name, values in {**arrays, "chars": code_points("".join(texts)), "offsets": ends}.items():
            self.files[name].write(values.astype(WRITTEN[name]).tobytes())
        self.end = int(ends[-1]) if texts else self.end
        self.rows += len(texts)


def split_cells(columns: list[list[str]], separator: str | None) -> list[list[str]]:
    """Return the codes of each row from columns whose cells may hold several, split at `separator`."""
    split = splitter(separator) if separator else lambda cell: [cell]
    return [[code for cell in row for code in split(cell) if code.strip()] for row in zip(*columns)]


class Reader:
    """Check all rows: write each or list it as rejected, and count everything."""

    def __init__(self, settings: PrepareSettings, folder: str, check: Callable[[], None]):
        self.settings, self.folder, self.check = settings, folder, check
        self.formatter = BlockyFormatter.from_dict(settings.formatter)
        self.room = settings.max_codes or 1  # most codes of a row
        self.notes: list[str] = []  # notes on the codes, for the user
        self.book = self._code_book()
        self.languages = Languages(settings.language_col, settings.max_len // 2)
        self.missing = None if settings.missing_code is None else self.book.of_code(settings.missing_code)
        self.empty = None if settings.empty_text is None else self.book.of_code(settings.empty_text)
        self.longest = 0  # most positions of a text
        self.named = named_parts(settings, check)
        self.rows, self.drawn = 0.0, {"val": [], "test": []}  # all rows, and (hashes, rows) of each part
        self.test_rows, self.outside_key = 0.0, {"train": 0.0, "val": 0.0}
        self.findings = Findings(folder)
        self.files: list[dict] = []
        self.parts = {part: PartFiles(folder, part) for part in ("train", "val")}
        self.words: Counter[str] = Counter()  # in the training texts
        self.used: set[int] = set()  # numbers of the codes of accepted rows
        self.characters = np.zeros(sys.maxunicode + 1, dtype=bool)  # characters of their texts
        self.chunks = 0
        self.few = np.zeros(0, np.uint64) if settings.few_texts else None  # hashes of texts, while few

    def _code_book(self) -> CodeBook:
        """Return the numbers of cells, using the codes of all rows together."""
        settings, repair, zeros = self.settings, self.formatter.repair, {}
        recode = {repair(old)[0]: repair(new)[0] for old, new in settings.recode.items()}
        fixed, hisco, is_hisco = settings.fixed_codes, {*hisco_key()}, self.formatter.kind == "hisco"
        any_code, joins = self.formatter.kind == "classes" and fixed is None, settings.join_spellings
        if any_code or joins or settings.max_codes is None:
            counts, known = self._count_codes(recode), {*(fixed or ()), *(settings.first_codes or ())}
            if any_code or joins:
                recode, zeros, self.notes = read_together(counts, known, recode, any_code, joins)
            if any_code:
                is_hisco = 2 * sum(in_key(code, hisco) in hisco for code in counts) > len(counts)
        declared = NO_WORK.intersection(fixed or (hisco if is_hisco else ()))
        fixed = None if fixed is None else frozenset(fixed)
        return CodeBook(self.formatter, fixed, settings.number_codes, recode, zeros, declared)

    def _count_codes(self, recode: dict[str, str]) -> Counter[str]:
        """Return the codes of all rows and how often each occurs. Sets `room` to the most that a row has."""
        settings, cells = self.settings, Counter()
        for _, path in settings.files:
            for chunk in read_chunks(path, settings.target_cols, *settings.reading):
                self.check()
                rows = split_cells(chunk.columns, settings.code_separator)
                cells.update(chain.from_iterable(rows))
                if settings.max_codes is None:
                    self.room = max([self.room, *map(len, rows)])
        self.room = min(self.room, MAX_CODES_OF_ROW)
        counts: Counter[str] = Counter()
        for cell, count in cells.items():
            if code := code_of_cell(cell, self.formatter, settings.fixed_codes or ()):
                counts[recode.get(code, code)] += count
        return counts

    def read(self, path: str, part: str) -> None:
        """Read one file into `part`, or split it by hashes of its texts if the settings ask for it."""
        table = self.settings.table(path)
        rows, size = 0, round(os.path.getsize(path) / 1e6, 1)
        stage = Stage(f"reading {path}", size, "MB")
        for records in table.records(self.check):
            rows += len(records.lines) + len(records.faults)
            try:
                self._read_rows(table, part, records)
            except UserError as error:  # cells without a language name
                where = f"{path}, in lines {records.lines[0]:,} to {records.lines[-1]:,}"
                raise UserError(f"{where}: {error}") from None
            self.book.faults.clear()
            stage.at(round(size * records.share, 1))
        table = table.format
        encoding = table.binary.kind if table.binary else table.encoding.removesuffix("-sig").upper()
        more = {"delimiter": table.delimiter, "columns": table.names, "notes": list(table.notes)}
        self.files.append({"path": path, "part": part, "rows": rows, "encoding": encoding, **more})

    def _check_rows(self, table: Table, records: Records) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Note and reject unusual rows. Returns whether each is kept (bool [n]), their codes (see `_codes`),
        and the rows with a code outside the key.
        """
        settings, path, lines, texts = self.settings, table.name, records.lines, records.texts
        columns, cells, deciders = records.filled, records.filled[table.texts[0]], table.decided
        keep, text_column = np.ones(len(texts), dtype=bool), table.names[table.texts[0]]
        rejects: list[tuple] = [(line, "", "", kind, reason) for line, kind, reason in records.faults]
        outside: list[int] = []  # rows with a code outside the key

        def note(kind: str, rows) -> None:
            self.findings.note(kind, path, lines[rows], (cells[i].strip() for i in rows))

        def reject(rows, kind: str, reason: str, column: str, values: list[str]) -> None:
            for i in filter(keep.__getitem__, rows):
                keep[i] = False
                rejects.append((lines[i], column, values[i], kind, reason))
                outside.extend([i] * (kind == OUTSIDE_KEY))

        for kind, found in records.noted.items():
            note(kind, found)
        in_lines = [i for i, cell in enumerate(cells) if "\n" in cell or "\r" in cell]
        note("texts_of_lines", [i for i in in_lines if re.search("[\r\n]", cells[i].strip())])
        reason = "the text holds NUL, or a character from U+E000 to U+E004, which marks its ends"
        for i, place in records.forbidden.items():
            values = list(map(str.strip, columns[place]))
            reject([i], "forbidden character", reason, table.names[place], values)
        reason = "the row repeats the column names (were files joined?)"
        reject(records.headers, "names of the columns", reason, text_column, cells)
        blank = [i for i, text in enumerate(texts) if not text.strip()]
        if settings.ditto != LEAVE:
            reason = "the text only repeats the one above; --ditto fills in that text"
            reject(records.left, f"ditto {records.why or NO_ROW_ABOVE}", reason, text_column, cells)
        if self.empty is None:
            reason = "the description is empty, or a word such as NA"
            reject(blank, "empty text", reason, text_column, cells)
        if deciders is not None:
            reason = "nobody has decided on this row of a reviewed file; remove this column to use it"
            reject(records.guesses, "decided by nobody", reason, DECIDED, columns[deciders])
        if table.weights is not None:
            reason = f"weight is not above 0 and at most {MAX_WEIGHT:,}, or may be two numbers (1,000)"
            unfit = [i for i, times in enumerate(records.weights) if not times]
            reject(unfit, reason, f"the {reason}", settings.weight_col or "", columns[table.weights])
        codes = self._codes(table, records, keep, reject)  # [n, K]
        if self.empty is not None:
            alone = (codes[:, 0] == self.empty) & (codes[:, 1:] < 0).all(axis=1)
            reason = f"the description is empty, and the code is not {settings.empty_text}"
            reject([i for i in blank if not alone[i]], "empty text", reason, text_column, cells)
            note("texts_empty", [i for i in blank if keep[i]])
        for line, column, value, kind, reason in sorted(rejects, key=lambda reject: reject[0]):
            stops = kind == DOES_NOT_FIT and not settings.drop_bad_labels
            self.findings.reject(kind, path, line, column, value, reason, stops)
        return keep, codes, outside

    def _read_rows(self, table: Table, part: str, records: Records) -> None:
        """Check some rows, and write those kept."""
        keep, codes, outside = self._check_rows(table, records)
        lines, texts, languages = records.lines, records.texts, records.languages
        # texts that differ only in further columns go to the same part
        splits_by, times = records.parts[0], np.array(records.weights, dtype=np.float64)
        if outside:
            hashes = text_hashes([splits_by[i].strip() for i in outside])
            is_val, is_test = parts_of_rows(self.settings, self.named, part, hashes)
            self.outside_key["train"] += times[outside][~(is_val | is_test)].sum()
            self.outside_key["val"] += times[outside][is_val].sum()
        if not keep.all():
            lines, codes, times = lines[keep], codes[keep], times[keep]
            texts, splits_by, languages = (list(compress(x, keep)) for x in (texts, splits_by, languages))
        if not texts:
            return
        language = self._languages(table.name, lines, languages, texts)
        more = 2 + len(LANGUAGE_SEPARATOR) + np.array(list(map(len, self.languages.names)))[language]
        positions = np.fromiter(map(len, texts), np.int64, len(texts)) + more
        self.longest = max(self.longest, int(positions.max()))
        cut = np.flatnonzero(positions > self.settings.max_len)
        self.findings.note("texts_cut", table.name, lines[cut], (texts[i] for i in cut))
        hashes = text_hashes(list(map(str.strip, texts)))
        split = hashes if len(table.texts) == 1 else text_hashes(list(map(str.strip, splits_by)))
        arrays = {"language": language, "codes": codes, "text_hash": hashes, "split": split}
        arrays["lines"] = lines + (len(self.files) << 40)
        self._write(part, texts, arrays | ({} if table.weights is None else {"times": times}), times)

    def too_frequent(self) -> np.ndarray:
        """Return the hashes of texts with over half of the rows of a share, if other texts are left."""
        settings, found = self.settings, [np.zeros(0, np.uint64)]
        joined = self.few is not None and not settings.split_col
        for name, share in (("val", not joined and settings.share_val), ("test", settings.share_test)):
            if share and share < 1 and self.drawn[name]:
                hashes, times = map(np.concatenate, zip(*self.drawn[name]))
                texts, place = np.unique(hashes, return_inverse=True)
                is_often = np.bincount(place.reshape(-1), times) > share * self.rows / 2
                found += [] if is_often.all() else [np.setdiff1d(texts[is_often], self.named.get(name, ()))]
        return np.concatenate(found)

    def _languages(self, path: str, lines: np.ndarray, cells: list[str], texts: list[str]) -> np.ndarray:
        """Return the numbers of the languages of kept rows, int64 [n]."""
        language = np.fromiter(map(self.languages.__getitem__, cells), np.int64, len(cells))
        renamed = [i for i, cell in enumerate(cells) if cell in self.languages.renamed]
        self.findings.note("languages_renamed", path, lines[renamed], (cells[i] for i in renamed))
        blank = [i for i in np.flatnonzero(language == 0) if not cells[i].strip()]
        self.findings.note("language_missing", path, lines[blank], (texts[i] for i in blank))
        return language

    def _write(self, part: str, texts: list[str], arrays: dict[str, np.ndarray], times: np.ndarray) -> None:
        """Append kept rows to `part`, or split them by text. Test rows only add counts and codes."""
        self.used.update(arrays["codes"].ravel().tolist())
        self.chunks += 1
        is_val, is_test = parts_of_rows(self.settings, self.named, part, split := arrays.pop("split"))
        self.test_rows += times[is_test].sum()
        self.rows += times.sum()
        for name, chosen in (("val", is_val), ("test", is_test)) if part == "train" else ():
            self.drawn[name].append((split[chosen], times[chosen]))
        if self.few is not None:
            self.few = np.union1d(self.few, text_keys(arrays["text_hash"], arrays["language"])[~is_test])
            self.few = self.few if len(self.few) <= self.settings.few_texts else None
        for side, chosen in (("train", ~(is_val | is_test)), ("val", is_val)):
            chosen_texts = texts if chosen.all() else list(compress(texts, chosen))
            self.characters[code_points("".join(chosen_texts))] = True
            self.parts[side].add(chosen_texts, {name: values[chosen] for name, values in arrays.items()})
            if side == "train" and (self.parts[side].rows <= ALL_WORDS_OF or self.chunks % 4 == 0):
                self.words.update(" ".join(chosen_texts).split())
        if len(self.words) > MAX_COUNTED_WORDS:
            self.words = Counter(dict(self.words.most_common(MAX_COUNTED_WORDS // 2)))

    def _codes(
        self, table: Table, records: Records, keep: np.ndarray, reject: Callable[..., None]
    ) -> np.ndarray:
        """Return provisional numbers of the codes, int64 [n, K], padded with −1. Rejects unusable rows."""
        names, room = self.settings.target_cols, self.room
        cells = [records.filled[place] for place in table.codes]
        if self.settings.code_separator:  # split into columns with one code each
            rows = split_cells(cells, self.settings.code_separator)
            for i, codes in enumerate(rows):
                if keep[i] and len(codes) > room:
                    reason = f"{len(codes)} codes in the row, but the formatter has room for {room}"
                    reject([i], "too many codes", reason, names[0], cells[0])
            padded = ([*codes, *[""] * room][:room] for codes in rows)
            cells = [list(column) for column in zip(*padded)] or [[] for _ in range(room)]
            names = [*names, *[names[-1]] * room][:room]
        columns = [np.fromiter(map(self.book.__getitem__, column), np.int64, len(column)) for column in cells]
        numbers = np.stack(columns, axis=1)  # [n, K]

        def note(kind: str, marked: np.ndarray) -> None:  # bool [n, K]
            rows, places = np.nonzero(marked & keep[:, None])
            values = (cells[place][row] for row, place in zip(rows, places))
            self.findings.note(kind, table.name, records.lines[rows], values)

        note("missing_declared", numbers == DECLARED)
        blank = keep & np.isin(numbers[:, 0], (BLANK, WORD, DECLARED))
        if self.missing is None:
            reason = "the first code is missing or blank; use --missing-code CODE to give such rows a code"
            reject(np.flatnonzero(blank), "first code missing", reason, names[0], cells[0])
        else:
            numbers[blank, 0] = self.missing
        for i in np.flatnonzero(keep & (numbers == UNFIT).any(axis=1)):
            place = int(np.argmax(numbers[i] == UNFIT))
            reject([i], *self.book.faults[cells[place][i]], names[place], cells[place])

        if self.missing is not None:
            note("missing_code_used", np.pad(blank[:, None], ((0, 0), (0, len(names) - 1))))
        note("missing_words", numbers == WORD)
        for kind, noted in self.book.noted.items():
            note(kind, np.array([[cell in noted for cell in column] for column in cells]).T)
        numbers = np.maximum(numbers, BLANK)
        repeated = np.zeros(numbers.shape, dtype=bool)  # codes that also occur further left in their row
        for place in range(1, numbers.shape[1]):
            repeated[:, place] = (numbers[:, :place] == numbers[:, place : place + 1]).any(axis=1)
        repeated &= numbers >= 0
        note("codes_repeated", repeated)
        numbers[repeated] = BLANK
        return np.take_along_axis(numbers, np.argsort(numbers < 0, axis=1, kind="stable"), axis=1)

    def finish(self) -> tuple[list[str], dict]:
        """Close the files and give codes their final numbers. Returns (codes, report)."""
        self.close()
        if self.few is not None and not self.settings.split_col:
            self._join_parts()
        self._repeat_rows()
        settings, parts = self.settings, []
        codes, met = settings.fixed_codes, list(self.book.codes)
        if codes is None:
            first = settings.first_codes or []
            codes = first + sorted({met[number] for number in self.used - {BLANK}} - set(first))
        place = {code: i for i, code in enumerate(codes)}
        final = np.array([place.get(code, -1) for code in met] + [-1], dtype=WRITTEN["codes"])  # −1 stays −1
        for name in self.parts:
            with open(os.path.join(self.folder, f"{name}.codes"), "r+b") as file:
                while block := file.read(1 << 22):
                    file.seek(-len(block), os.SEEK_CUR)
                    file.write(final[np.frombuffer(block, final.dtype)].tobytes())
            parts.append(RowSet(self.folder, name, self.room))
        findings, names, paths = self.findings, self.languages.names, [file["path"] for file in self.files]
        rejected = {kind["kind"]: kind["rows"] for kind in findings.problems("rejected")}
        unusable = sum(kind["rows"] for kind in findings.problems("error"))
        conflicts, split = os.path.join(self.folder, "conflicts.csv"), not settings.val_files
        report = {
            "read": self._what_was_read(codes),
            "rows": sum(map(len, parts)) + round(self.test_rows) + sum(rejected.values()) + unusable,
            "train_rows": len(parts[0]),
            "val_rows": len(parts[1]),
            "test_rows": round(self.test_rows),
            "rows_outside_key": {part: round(rows) for part, rows in self.outside_key.items()},
            "rejected_rows": sum(rejected.values()),
            "rejected": rejected,
            "unusable_rows": unusable,
            **{kind: findings.kinds.get(kind, {"rows": 0})["rows"] for kind in NOTES},
            **compare_rows(parts, split, paths, codes, names, conflicts),
            **describe_parts(parts, codes, names),
            "longest": {"has": self.longest, "read": min(self.longest, settings.max_len)},
            "files": self.files,
            "problems": findings.problems("error", "rejected", "noted"),
        }
        asked, most = {"val": settings.share_val, "test": settings.share_test}, report["most_rows_of_a_text"]
        has = {name: rows for name, share in asked.items() if share and (rows := report[f"{name}_rows"])}
        if most > min(has.values(), default=most):
            are = (f"{name} has {percent(rows / report['rows'])} of all rows" for name, rows in has.items())
            report["read"].append(f"Note: one text has {most:,} rows, all in one part: {', '.join(are)}")
        for name in self.parts if not settings.by else ():
            os.unlink(os.path.join(self.folder, f"{name}.lines"))
        return codes, report

    def _repeat_rows(self) -> None:
        """Turn weights into whole numbers of copies of each row. Whole weights stay, unless they sum to more
        than MAX_REPEATED and the least is not 1. Others are divided by the least weight, or so that none is
        above MAX_TIMES, and rounded up with the probability of their fraction, from a hash of text and row.
        """
        paths = [part.files["times"].name for part in self.parts.values()]
        weights = [np.fromfile(path, WRITTEN["times"]) for path in paths]
        both = np.concatenate(weights)
        if (both == both.round()).all() and (both.sum() <= MAX_REPEATED or both.min() == 1):
            return
        unit = max(both.min(), both.max() / MAX_TIMES)
        why = "the least" if unit == both.min() else f"by which none is above {MAX_TIMES:,}"
        for part, path, weight in zip(self.parts, paths, weights):
            hashes = map_array(os.path.join(self.folder, f"{part}.text_hash"), WRITTEN["text_hash"])
            drawn = mix(hashes ^ mix(np.arange(len(weight), dtype=np.uint64))) / 2.0**64
            np.maximum(1, np.floor(weight / unit + drawn)).tofile(path)
        self.test_rows /= unit
        self.outside_key = {part: rows / unit for part, rows in self.outside_key.items()}
        what = f"weights are divided by {unit:g}, {why}, and rounded"
        self.notes.append(f"{what}: each row is repeated that often, at least once")

    def _join_parts(self) -> None:
        """Append the validation rows to the training rows."""
        train, val = self.parts.values()
        for name, source in val.files.items():
            values = np.fromfile(source.name, WRITTEN[name])
            left = values[: name == "offsets"]  # the first offset
            with open(train.files[name].name, "ab") as file:
                (values[1:] + train.end if len(left) else values).tofile(file)
            left.tofile(source.name)
        train.rows, val.rows = train.rows + val.rows, 0

    def close(self) -> None:
        self.findings.file.close()
        for part in self.parts.values():
            for file in part.files.values():
                file.close()

    def _what_was_read(self, codes: list[str]) -> list[str]:
        settings, formatter, column = self.settings, self.formatter, self.settings.language_col
        columns, kind = ", ".join(settings.target_cols), formatter.kind
        how = f"{kind}, --block-size {formatter.block_size}" if kind == "gpf" else kind
        what = f"codes from {columns} ({classes_in_words(codes) if kind == 'classes' else how})"
        language = f"column {column}" if column else f"{settings.language} for all"
        texts = "" if settings.clean_text == AS_IS else f"; texts: {settings.clean_text}"
        texts += f"; weights: column {settings.weight_col}" if settings.weight_col else ""
        read, notes = " and ".join(settings.input_col), [*self.notes]
        unread = [name for file in self.files for name in file["columns"] if name not in settings.columns]
        languages = [name for name in unread if name.casefold() in ("lang", "language")]
        if languages and not column and settings.language == UNKNOWN_LANGUAGE:
            notes.append(f"column {languages[0]!r} is not read; add --language-col {languages[0]} to read it")
        counts = [name for name in unread if name.strip().casefold() in ("n", "freq", "frequency", "count")]
        if counts and not settings.weight_col:
            notes.append(f"each line counts once; add --weight-col {counts[0]} to use that column as counts")
        missing = self.findings.kinds.get("first code missing", {"rows": 0})["rows"]
        if 2 * missing > sum(file["rows"] for file in self.files):
            way = f"add --fill-down {' '.join(settings.target_cols)} if a row above gives it"
            notes.append(f"rows without a first code: {missing:,}; {way}")
        how = f"Read: descriptions from column {read}, {what}, language: {language}{texts}"
        return [how, *(f"Note: {note}" for note in notes)]

    def problem(self) -> str | None:
        """Return why the data is unusable, or None."""
        settings, (train, val) = self.settings, (part.rows for part in self.parts.values())
        files, formatter = ", ".join(settings.train_files), self.formatter
        if stops := self.findings.problems("error"):
            [found] = stops
            what = f"other codes than {formatter.system_name} of length {formatter.block_size}"
            is_hisco = settings.target_cols[0].casefold().startswith("hisco") and formatter.kind != "hisco"
            hint = f"; without --formatter, {settings.target_cols[0]} is read as HISCO" * is_hisco
            ways = [f"check --target-cols and --formatter (auto accepts any codes{hint})"]
            if settings.number_codes is not None:
                what = "a value that is not a number of the key"
                ways = ["name the file with these numbers: --key FILE (default: the HISCO key)"]
            elif formatter.kind == "gpf" and not formatter.allow_short:
                ways.append("use --formatter hisco for HISCO codes; it restores lost leading zeros")
                ways.append("use --allow-codes-shorter-than-block-size or --block-size for other lengths")
            ways.append("use --drop-bad-labels to leave out these rows and list them")
            first = [f"{row['file']}, line {row['line']}, {row['reason']}" for row in found["first"]]
            hold = f"{counted(found['rows'], 'row')} hold{'s' * (found['rows'] == 1)}"
            return "\n    ".join([f"{hold} {what}. The first:", *first, "What to do:", *ways])
        if not train:
            rejected = self.findings.problems("rejected")
            kinds = "; ".join(f"{kind['rows']:,} × {kind['kind']}" for kind in rejected)
            if aside := val + round(self.test_rows):
                kinds = f"valid rows: {aside:,}, all for validation or test; lower --share-val (0: none)"
            return f"{files}: no valid row to train on ({kinds or 'there are only column names'})"
        if not val and settings.val_files:
            return f"{', '.join(settings.val_files)}: no valid row to validate on"
        if not val and settings.share_val and self.few is None:
            return f"--share-val {settings.share_val:g} leaves no row for validation: raise it, or choose 0"
        if not self.test_rows and settings.share_test:
            return f"--share-test {settings.share_test:g} leaves no row for the test: raise it, or choose 0"
        return None


# ---- the folder


def build_folder(folder: str, build: Callable[[str], None]) -> None:
    """Fill a folder with `build(folder)` if it is missing or damaged, in one process of a job. The file
    written last, `arrays.META`, makes it complete. An exception leaves nothing new in place, and only plain
    files with names in `arrays.HELD` are removed or replaced. Raises UserError if something else is in the
    way, or another job works in the folder above.
    """
    root = os.path.dirname(folder)
    missing, path = [], os.path.abspath(folder)
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    expected = {os.path.realpath(root): "a folder", folder: "a folder"}  # root may be a link to another disk
    for path, kind in (expected | {os.path.join(folder, name): "a file" for name in HELD}).items():
        there = kind_of(path, follow_links=False)
        if there not in (None, kind):
            raise UserError(
                f"{path}: found {there}, expected {kind} made by histocc; nothing was changed. Move it"
                " away, or choose another folder for the run"
            )
    try:
        with run_lock(root):
            if fault(folder) is not None:
                os.makedirs(folder, exist_ok=True)
                _remove_files(folder)
                try:
                    build(folder)
                except BaseException as error:
                    traceback.clear_frames(error.__traceback__)  # Windows cannot remove a mapped file
                    _remove_files(folder)
                    raise
    except BaseException as error:
        for path in missing:
            with contextlib.suppress(OSError):  # not empty: another job works in it
                os.rmdir(path)
        if isinstance(error, (OSError, MemoryError)):
            raise UserError(f"the data could not be prepared in {root}: {in_words(error)}") from None
        raise


def _remove_files(folder: str) -> None:
    for name in HELD:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))


def copy_lists(folder: str, own: OwnFiles) -> None:
    """Copy the lists of prepared data to the run folder. Raises UserError if that replaces other lists."""
    from histocc.runtime.checkpoint import exists_in  # which loads torch, as `histocc.prepare` need not

    keep = exists_in(own.folder) and not own.overwrite
    for name in LISTS:
        path, source = own.path(name), os.path.join(folder, name)
        try:
            there = os.path.exists(path)
            is_same = there and filecmp.cmp(path, source, shallow=False)
            if keep and there and not is_same:
                raise UserError(
                    f"{path}: differs from what would be written there: it was edited, or the run in this"
                    " folder has other data. Move it away, choose another folder, or give --overwrite"
                )
            own.claim(name)
            if not is_same:
                with open(source, "rb") as content, atomic_write(path) as file:
                    shutil.copyfileobj(content, file)
        except OSError as error:
            raise UserError(in_words(error, path)) from None


def prepare(
    settings: PrepareSettings,
    save_path: str,
    say: Callable[[str], None] = print,
    reports: OwnFiles | None = None,
    check: Callable[[], None] = nothing,
) -> str:
    """Return the folder of the data under `save_path`/prepared, made if missing or damaged. One process.

    Raises UnusableData for rows that cannot be trained on, UserError for anything else that the user must
    fix. Both leave only `reports`, the lists of unusual rows. check: called often, may raise.
    """
    paths = [path for _, path in settings.files]
    before, key = _states(paths), fingerprint(settings)
    folder = os.path.join(save_path, "prepared", key)

    def build(new: str) -> None:
        content = _read_all(settings, new, reports, check)
        if _states(paths) != before:
            raise UserError(f"{', '.join(paths)}: changed while being read; start again")
        write_last(new, {"fingerprint": key, **content})

    if (damaged := fault(folder)) is None:
        say(f"Prepared data: found in {folder}")
    else:
        if os.path.lexists(folder):
            say(f"Prepared data: {folder}: {damaged} is not as it was written; preparing it again")
        say(f"Preparing data: {', '.join(paths)}")
        build_folder(folder, build)
    if reports:
        copy_lists(folder, reports)
    return folder


def _read_all(
    settings: PrepareSettings, folder: str, reports: OwnFiles | None, check: Callable[[], None]
) -> dict:
    """Write all files of a folder except the last and return the content of that. Raises like `prepare`."""
    reader = Reader(settings, folder, check)
    collects_garbage = gc.isenabled()
    gc.disable()  # rows form no cycles, and searching for them takes a fifth of the time
    try:
        for part, path in settings.files:
            reader.read(path, part)
        if len(often := reader.too_frequent()):
            reader.close()
            reader = Reader(settings, folder, check)
            reader.named[OFTEN] = often
            what = "texts trained on, because each has more than half of the rows requested for a part"
            reader.notes.append(f"{what}: {len(often):,}")
            for part, path in settings.files:
                reader.read(path, part)
        codes, report = reader.finish()
    finally:
        if collects_garbage:
            gc.enable()
        with contextlib.suppress(OSError):  # a failed write has been reported
            reader.close()
    key = [("system_code", "code"), *((escape_formula(code), i) for i, code in enumerate(codes))]
    words = sorted(reader.words.items(), key=lambda item: (-item[1], item[0]))[:MAX_WORDS]
    report_text = json.dumps(report, indent=1, ensure_ascii=False).encode("utf-8", "backslashreplace")
    tables = {"key.csv": csv_text(key), "words.csv": csv_text([("word", "freq"), *words])}
    for name, content in {**tables, "data_report.json": report_text}.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
    if unusable := reader.problem():
        if reports:
            copy_lists(folder, reports)
        raise UnusableData(unusable, report)
    return {
        "codes": codes,
        "languages": reader.languages.names,
        "alphabet": np.flatnonzero(reader.characters).tolist(),
        "max_codes": reader.room,
        "clean_text": settings.clean_text,
        "kept_codes": len(settings.first_codes or []),
        "hisco_numbers": settings.number_codes == list(hisco_key()),
        "report": report,
    }


def _states(paths: list[str]) -> list[int | None]:
    return [os.stat(path).st_mtime_ns if os.path.exists(path) else None for path in paths]


def on_every_node(
    settings: PrepareSettings, save_path: str, folder: str, world: "World", check: Callable[[], None]
) -> PreparedData:
    """Return the data in `folder`. A node without access to it prepares its own. All ranks."""

    def prepared_here() -> str:
        if world.rank == 0 or fault(folder) is None:  # rank 0 has just compared the checksums
            return folder
        return prepare(settings, save_path, nothing, None, check)

    leaders = world.node_leaders()
    folders = world.run_on(leaders, prepared_here)
    if len(set(map(os.path.basename, folders))) > 1:
        paths = ", ".join(path for _, path in settings.files)
        raise UserError(f"some nodes have other data files than rank 0: copy the same {paths} to every node")
    return PreparedData.open(folders[leaders.index(world.leader)])
