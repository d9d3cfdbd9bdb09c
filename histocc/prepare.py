"""CSV → checked, memory-mapped arrays, once: what every process of a run then maps and nobody parses again.

Nothing is dropped or changed without a count: each rejected row stands in `rejected_rows.csv` with its file, line,
column, value and reason. The folder is keyed by the content of the files and the settings, and appears whole or not
at all. `histocc.arrays` says what lies in it.
"""

import csv
import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np

from histocc.arrays import ARRAYS, PREPARED_FORMAT, map_array
from histocc.code_book import BLANK, CodeBook
from histocc.distributed import UserError
from histocc.formatter import BlockyFormatter
from histocc.tables import column_problems, read_header, read_rows, write_key, write_words
from histocc.text import LANGUAGE_SEPARATOR, UNKNOWN_LANGUAGE, code_points

EXAMPLES = 5                  # rows shown of each kind of problem
MOST_LANGUAGES = 255


@dataclass(frozen=True)
class PrepareSettings:
    """What is read and how. `share_val` splits `train_files` by their texts; None takes `val_files` instead."""

    train_files: list[str]
    formatter: dict
    target_cols: list[str]
    val_files: list[str] = field(default_factory=list)
    share_val: float | None = None
    input_col: str = "occ1"
    language: str = UNKNOWN_LANGUAGE
    language_col: str | None = None
    max_len: int = 128
    missing_code: str | None = None
    drop_bad_labels: bool = False
    fixed_codes: list[str] | None = None             # the codes of --key or --all-codes-file, in their order
    numbered: bool = False                           # cells hold numbers of `fixed_codes`, not codes

    @property
    def columns(self) -> list[str]:
        return [self.input_col, *self.target_cols, *([self.language_col] if self.language_col else [])]


def split_value(text: str) -> float:
    """Where a text stands in [0, 1): equal for texts that differ only in case and blanks, whatever the machine."""
    digest = hashlib.blake2b(" ".join(text.casefold().split()).encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little") / 2**64


def fingerprint(settings: PrepareSettings) -> str:
    """Hash of the content of all files and of the settings; paths do not count. Hexadecimal, 16 digits."""
    plain = asdict(settings)
    for name in ("train_files", "val_files"):
        plain[name] = []
        for path in getattr(settings, name):
            with open(path, "rb") as file:
                plain[name].append(hashlib.file_digest(file, "blake2b").hexdigest())
    plain["prepared_format"] = PREPARED_FORMAT
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=8).hexdigest()


def file_problems(settings: PrepareSettings) -> list[str]:
    """All that is wrong with the files and their columns."""
    problems = []
    for path in dict.fromkeys([*settings.train_files, *settings.val_files]):
        try:
            problems += column_problems(path, read_header(path)[0], settings.columns)
        except UserError as error:
            problems.append(str(error))
    return problems


def swallowed(cell: str, delimiter: str, columns: int) -> bool:
    """Whether a cell of several lines looks like rows of the table: one of its lines has as many delimiters as a row."""
    return any(line.count(delimiter) >= columns - 1 for line in cell.split("\n")) if columns > 1 else False


class PartWriter:
    """Appends rows to the array files of one part, a chunk at a time."""

    CHUNK = 1 << 16

    def __init__(self, folder: str, part: str, max_codes: int):
        self.files = {name: open(os.path.join(folder, f"{part}.{name}"), "wb") for name in ARRAYS}
        self.max_codes, self.rows, self.end = max_codes, 0, 0
        self.files["offsets"].write(np.zeros(1, ARRAYS["offsets"]).tobytes())
        self._clear()

    def _clear(self) -> None:
        self.texts: list[str] = []
        self.languages, self.codes = array("B"), array("i")

    def add(self, text: str, language: int, codes: list[int]) -> None:
        self.texts.append(text)
        self.languages.append(language)
        self.codes.extend(codes + [-1] * (self.max_codes - len(codes)))
        if len(self.texts) >= self.CHUNK:
            self.flush()

    def flush(self) -> None:
        if not self.texts:
            return
        lengths = np.array([len(text) for text in self.texts], dtype=np.int64)
        self.files["chars"].write(code_points("".join(self.texts)).tobytes())
        self.files["offsets"].write((self.end + np.cumsum(lengths)).astype(ARRAYS["offsets"]).tobytes())
        self.files["language"].write(self.languages.tobytes())
        self.files["codes"].write(np.array(self.codes, dtype=ARRAYS["codes"]).tobytes())
        self.rows, self.end = self.rows + len(self.texts), self.end + int(lengths.sum())
        self._clear()

    def close(self) -> None:
        self.flush()
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()


class Reader:
    """One pass over the files: checks each row, writes it or lists it as rejected, and counts everything."""

    def __init__(self, settings: PrepareSettings, folder: str):
        self.settings, self.folder = settings, folder
        self.formatter = BlockyFormatter.from_dict(settings.formatter)
        self.book = CodeBook(self.formatter, settings.fixed_codes, settings.numbered)
        self.counts: Counter = Counter()
        self.rejected: Counter = Counter()           # reason kind → rows
        self.bad_labels: list[str] = []              # the first few, as shown to the user
        self.languages: dict[str, int] = {UNKNOWN_LANGUAGE: 0}
        self.language_rows: Counter = Counter()
        self.missing = None if settings.missing_code is None else self.book.of_code(settings.missing_code)
        self.words: Counter = Counter()
        self.writers = {part: PartWriter(folder, part, len(settings.target_cols)) for part in ("train", "val")}
        self.rejects_file = open(os.path.join(folder, "rejected_rows.csv"), "w", encoding="utf-8", newline="")
        self.rejects = csv.writer(self.rejects_file, lineterminator="\n")
        self.rejects.writerow(["file", "line", "column", "value", "reason"])

    def read(self, path: str, part: str, header: list[str], delimiter: str) -> None:
        """Reads one file into `part`, or into both parts by the hash of the text where the settings ask for it."""
        settings = self.settings
        text_at = header.index(settings.input_col)
        codes_at = [header.index(name) for name in settings.target_cols]
        language_at = header.index(settings.language_col) if settings.language_col else None
        split = settings.share_val if part == "train" else None
        longest = settings.max_len - 2 - len(LANGUAGE_SEPARATOR)
        for line, cells in read_rows(path, delimiter):
            self.counts["rows"] += 1
            if len(cells) != len(header):
                self._reject(path, line, "", "", "wrong number of cells",
                             f"{len(cells)} cells in the row, {len(header)} columns in the header")
                continue
            text = cells[text_at].strip()
            if not text:
                self._reject(path, line, settings.input_col, cells[text_at], "empty text", "the description is empty")
                continue
            if "\0" in text:
                self._reject(path, line, settings.input_col, text, "NUL character", "the description holds a NUL character")
                continue
            if any("\n" in cell and swallowed(cell, delimiter, len(header)) for cell in cells):
                self._reject(path, line, "", "", "rows inside a cell",
                             "a cell holds whole rows: a quotation mark that is not closed swallows those below")
                continue
            codes = self._codes(path, line, cells, codes_at)
            if codes is None:
                continue
            language = UNKNOWN_LANGUAGE if settings.language_col else settings.language
            if language_at is not None:
                language = cells[language_at].strip()
                if not language:
                    language = UNKNOWN_LANGUAGE
                    self.counts["language_missing"] += 1
            if len(text) + len(language) > longest:
                self.counts["texts_cut"] += 1
            target = part if split is None or split_value(text) >= split else "val"
            if target == "train":
                self.words.update(text.split())
            self.writers[target].add(text, self._language(language), codes)

    def _codes(self, path: str, line: int, cells: list[str], codes_at: list[int]) -> list[int] | None:
        """Provisional numbers of a row's codes; None where the row is rejected or does not fit."""
        codes: list[int] = []
        counts: Counter = Counter()                  # of this row, kept where the row is
        for place, (name, index) in enumerate(zip(self.settings.target_cols, codes_at)):
            number = self.book.number(cells[index])
            if number == BLANK and place == 0:
                if self.missing is None:
                    self._reject(path, line, name, cells[index], "first code missing",
                                 "the first code is missing or blank; --missing-code CODE gives such rows a code")
                    return None
                counts["missing_code_used"] += 1
                number = self.missing
            elif number == BLANK:
                counts["missing_words"] += bool(cells[index].strip())
            if number < BLANK:
                kind, message = self.book.fault(number)
                if kind == "label" and not self.settings.drop_bad_labels:
                    self.counts["bad_labels"] += 1
                    if len(self.bad_labels) < EXAMPLES:
                        self.bad_labels.append(f"{path}, line {line}, column {name!r}: {message}")
                else:
                    self._reject(path, line, name, cells[index],
                                 "code does not fit" if kind == "label" else "code outside the key", message)
                return None
            if number >= 0:
                counts["zeros_restored"] += cells[index] in self.book.repaired_cells
                if number in codes:
                    counts["codes_repeated"] += 1
                else:
                    codes.append(number)
        self.counts.update(counts)
        return codes

    def _language(self, language: str) -> int:
        if len(language) > self.settings.max_len // 2:
            raise UserError(f"column {self.settings.language_col!r} holds {language[:30] + '…'!r}, of {len(language)} characters; "
                            "is it the language?")
        self.language_rows[language] += 1
        number = self.languages.setdefault(language, len(self.languages))
        if number >= MOST_LANGUAGES:
            raise UserError(f"column {self.settings.language_col!r} holds more than {MOST_LANGUAGES} different values; "
                            "is it the language?")
        return number

    def _reject(self, path: str, line: int, column: str, value: str, kind: str, reason: str) -> None:
        self.rejected[kind] += 1
        self.rejects.writerow([path, line, column, value, reason])

    def check(self) -> None:
        """Raises one UserError with what makes the data unusable."""
        problems, settings = [], self.settings
        if self.counts["bad_labels"]:
            general = self.formatter.kind == "gpf"
            ways = ["--drop-bad-labels leaves these rows out and lists them"]
            if general and not self.formatter.allow_short:
                ways = ["--allow-codes-shorter-than-block-size fills shorter codes up", *ways,
                        "--block-size N sets another length",
                        "--formatter hisco is for HISCO codes, and restores lost leading zeros"]
            problems.append("\n    ".join(
                [f"{self.counts['bad_labels']:,} rows hold a code that does not fit the formatter {self.formatter.kind} "
                 f"(block size {self.formatter.block_size}). The first:", *self.bad_labels, "What to do:", *ways]))
        elif not self.writers["train"].rows:
            kinds = "; ".join(f"{count:,} × {kind}" for kind, count in self.rejected.items()) or "there are only column names"
            if self.writers["val"].rows:
                kinds = f"all {self.writers['val'].rows:,} valid rows went to validation; lower --share-val (0: none)"
            problems.append(f"{', '.join(settings.train_files)}: no valid row to train on ({kinds})")
        elif not self.writers["val"].rows and (settings.val_files or settings.share_val):
            where = (", ".join(settings.val_files) + ": no valid row to validate on" if settings.val_files else
                     f"--share-val {settings.share_val:g} leaves no row for validation in a file this small; "
                     "raise it, or pass --share-val 0 to train without validation")
            problems.append(where)
        if problems:
            raise UserError("\n  ".join(problems))

    def finish(self) -> tuple[list[str], list[str]]:
        """Closes the files and gives codes their final numbers. Returns (codes, languages)."""
        for writer in self.writers.values():
            writer.close()
        self.rejects_file.close()
        self.check()
        found = list(self.book.codes)
        old = {part: map_array(os.path.join(self.folder, f"{part}.codes"), ARRAYS["codes"]) for part in self.writers}
        used = set().union(*(np.unique(numbers).tolist() for numbers in old.values()))      # not those of rejected rows alone
        codes = self.settings.fixed_codes
        if codes is None:
            codes = sorted(code for number, code in enumerate(found) if number in used)
        place = {code: i for i, code in enumerate(codes)}
        final = np.array([place.get(code, -1) for code in found] + [-1], dtype=ARRAYS["codes"])      # −1 stays −1
        for part, numbers in old.items():
            path = os.path.join(self.folder, f"{part}.codes")
            final[numbers].tofile(path + ".new")
            os.replace(path + ".new", path)
        return list(codes), list(self.languages)

    def report(self, codes: list[str]) -> dict:
        """What was found, as plain types."""
        return {**{name: self.counts[name] for name in (
                    "rows", "zeros_restored", "missing_words", "language_missing", "texts_cut", "missing_code_used", "codes_repeated")},
                "train_rows": self.writers["train"].rows, "val_rows": self.writers["val"].rows,
                "codes": len(codes), "languages": dict(self.language_rows.most_common()),
                "rejected_rows": sum(self.rejected.values()), "rejected": dict(self.rejected)}


def report_lines(report: dict) -> list[str]:
    """A report as lines for people; what did not happen is not said."""
    lines = [f"Rows: {report['rows']:,} read, {report['train_rows']:,} for training, {report['val_rows']:,} for validation",
             f"Codes: {report['codes']:,}; languages: "
             + ", ".join(f"{name} {count:,}" for name, count in report["languages"].items())]
    sayings = {
        "zeros_restored": "codes got a lost leading zero (or a trailing .0) repaired",
        "missing_words": "cells such as NA or null in the columns of codes were read as no code",
        "language_missing": f"rows without a language are coded as {UNKNOWN_LANGUAGE}",
        "texts_cut": "descriptions are longer than the model reads and are cut",
        "missing_code_used": "rows without a first code got the code of --missing-code",
        "codes_repeated": "codes repeated within a row count once",
        "rejected_rows": "rows rejected, listed in rejected_rows.csv",
    }
    lines += [f"Note: {report[name]:,} {saying}" for name, saying in sayings.items() if report[name]]
    return lines + [f"  {count:,} × {kind}" for kind, count in report["rejected"].items()]


def prepare(settings: PrepareSettings, save_path: str, say: Callable[[str], None] = print) -> str:
    """Prepares the data under `save_path`/prepared, or finds it there; returns the folder. One process.

    The files must have passed `file_problems`. Raises UserError, and then leaves nothing behind.
    """
    key = fingerprint(settings)
    root = os.path.join(save_path, "prepared")
    folder = os.path.join(root, key)
    if os.path.isfile(os.path.join(folder, "meta.json")):
        say(f"Prepared data: found in {folder}")
        return folder
    say(f"Preparing data: {', '.join([*settings.train_files, *settings.val_files])}")
    missing = _missing_folders(root)
    os.makedirs(root, exist_ok=True)
    new = tempfile.mkdtemp(prefix=f".{key}.", dir=root)
    try:
        os.chmod(new, 0o755)
        _write_folder(settings, key, new)
        try:
            os.rename(new, folder)
        except OSError:                              # another job has just finished the same
            if not os.path.isfile(os.path.join(folder, "meta.json")):
                raise
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        for path in missing:
            if os.path.isdir(path) and not os.listdir(path):
                os.rmdir(path)
        raise
    shutil.rmtree(new, ignore_errors=True)
    return folder


def _missing_folders(path: str) -> list[str]:
    """`path` and its parents that do not exist yet, the deepest first."""
    missing = []
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def _write_folder(settings: PrepareSettings, key: str, folder: str) -> None:
    reader = Reader(settings, folder)
    for part, paths in (("train", settings.train_files), ("val", settings.val_files)):
        for path in paths:
            reader.read(path, part, *read_header(path))
    codes, languages = reader.finish()
    write_key(os.path.join(folder, "key.csv"), codes)
    write_words(os.path.join(folder, "words.csv"), reader.words)
    with open(os.path.join(folder, "meta.json"), "w", encoding="utf-8") as file:
        json.dump({"format": PREPARED_FORMAT, "fingerprint": key, "codes": codes, "languages": languages,
                   "max_codes": len(settings.target_cols), "report": reader.report(codes)}, file)
        file.flush()
        os.fsync(file.fileno())
