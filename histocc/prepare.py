"""Tables → checked, memory-mapped arrays, once: what every process of a run then maps and nobody parses again.

Nothing is dropped or changed without a count: each rejected row stands in `rejected_rows.csv` with its file, line,
column, value and reason. The folder is keyed by the content of the files and the settings, and appears whole or not
at all. `histocc.arrays` says what lies in it. As a command it shows what a data set holds, without training:

    python -m histocc.prepare data.csv --formatter hisco --target-cols hisco_1 hisco_2 --language-col lang --save-path ./report
"""

import contextlib
import gc
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from itertools import compress

import numpy as np

from histocc import cli
from histocc.arrays import ARRAYS, PREPARED_FORMAT, PreparedData
from histocc.code_book import BLANK, REPAIRED, SHORT, WORD, CodeBook, Languages
from histocc.data_report import WrittenPart, make_report, report_lines
from histocc.data_settings import PrepareSettings, file_problems, fingerprint, settings_from
from histocc.errors import UserError
from histocc.findings import DOES_NOT_FIT, OUTSIDE_KEY, Findings
from histocc.formatter import BlockyFormatter
from histocc.prepared_folder import build_folder, is_whole, write_last
from histocc.row_writer import RowWriter
from histocc.table_files import Chunk, detect_encoding, is_parquet, read_chunks, read_header
from histocc.tables import write_key, write_words
from histocc.text import LANGUAGE_SEPARATOR, UNKNOWN_LANGUAGE
from histocc.text_rules import AS_IS, cleaner

_OF_THE_MODEL = re.compile("[\ue000-\ue004]")
_BROKEN = re.compile("\ufffd|Ã[\x80-\xbf\u0152-\u2122]")     # UTF-8 that was read as Windows-1252, or lost altogether
ENCODINGS = {"utf-8-sig": "UTF-8", "utf-16": "UTF-16", "windows-1252": "Windows-1252 (Latin-1), since it is not UTF-8"}
LISTS = ("key.csv", "rejected_rows.csv", "conflicts.csv", "data_report.json")      # for the user, out of the prepared folder


class UnusableData(UserError):
    """Rows that cannot be trained on as they are; `report` says what the files hold all the same."""

    def __init__(self, message: str, report: dict):
        super().__init__(message)
        self.report = report


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


class Reader:
    """One pass over the files: checks each row, writes it or lists it as rejected, and counts everything."""

    def __init__(self, settings: PrepareSettings, folder: str):
        self.settings, self.folder = settings, folder
        self.formatter = BlockyFormatter.from_dict(settings.formatter)
        self.book = CodeBook(self.formatter, settings.fixed_codes, settings.number_codes or settings.fixed_codes if settings.numbered else None)
        self.numbers_assumed = settings.number_codes is not None and settings.fixed_codes is None      # nobody has named a key for them
        self.clean = cleaner(settings.clean_text)
        self.languages = Languages(settings.language_col, settings.max_len // 2)
        self.missing = None if settings.missing_code is None else self.book.of_code(settings.missing_code)
        self.findings = Findings(folder)
        self.files: list[dict] = []
        self.writer = RowWriter(folder, len(settings.target_cols), settings.share_val)

    def read(self, path: str, part: str, check: Callable[[], None]) -> None:
        """Reads one file into `part`, or into both parts by the hash of the text where the settings ask for it."""
        encoding = None if is_parquet(path) else detect_encoding(path)
        columns, delimiter = read_header(path, self.settings.delimiter)
        rows = 0
        with paused_garbage_collection():
            for chunk in read_chunks(path, self.settings.columns, delimiter or None, encoding):
                check()
                rows += len(chunk.lines) + len(chunk.faults)
                try:
                    self._read_chunk(path, part, chunk)
                except UserError as error:
                    raise UserError(f"{path}, in lines {chunk.lines[0]:,} to {chunk.lines[-1]:,}: {error}") from None
                self.book.forget_faults()
        self.files.append({"path": path, "part": part, "rows": rows, "encoding": ENCODINGS.get(encoding, "Parquet"),
                           "delimiter": delimiter, "columns": columns})

    def _read_chunk(self, path: str, part: str, chunk: Chunk) -> None:
        settings, columns = self.settings, chunk.columns
        rejects = [(line, "", "", kind, reason) for line, kind, reason in chunk.faults]
        whole = "".join(columns[0])
        own = {i for i, text in enumerate(columns[0]) if _OF_THE_MODEL.search(text)} if _OF_THE_MODEL.search(whole) else set()
        texts = list(map(self.clean, columns[0]))
        keep = np.fromiter(map(len, map(str.strip, texts)), dtype=np.int64, count=len(texts)) > 0
        keep[list(own)] = True                        # transliterated, nothing may be left of them
        rejects += [(chunk.lines[i], settings.input_col, columns[0][i], "empty text", "the description is empty")
                    for i in np.flatnonzero(~keep)]
        if "\ufffd" in whole or "Ã" in whole:
            broken = [i for i, text in enumerate(columns[0]) if _BROKEN.search(text)]
            self.findings.note("letters_broken", path, chunk.lines[broken], (columns[0][i].strip() for i in broken))
        if "\0" in whole:
            nul = [i for i, text in enumerate(texts) if "\0" in text]
            keep[nul] = False
            rejects += [(chunk.lines[i], settings.input_col, texts[i], "NUL character", "the description holds a NUL character") for i in nul]
        keep[own := sorted(i for i in own if keep[i])] = False
        rejects += [(chunk.lines[i], settings.input_col, columns[0][i].strip(), "character of the model", "the description holds a character "
                     "from U+E000 to U+E004, which the model uses for the ends of a text") for i in own]
        codes = self._codes(path, chunk, keep, rejects)                       # [n, K]; clears `keep` where a row is no use
        for line, column, value, kind, reason in sorted(rejects, key=lambda reject: reject[0]):
            self.findings.reject(kind, path, line, column, value, reason)
        if not keep.all():
            texts, codes, lines = list(compress(texts, keep)), codes[keep], chunk.lines[keep]
            columns = [list(compress(column, keep)) for column in columns]
        else:
            lines = chunk.lines
        if texts:
            language = self._language(path, lines, texts, columns)
            self.writer.add(part, texts, language=language.astype(ARRAYS["language"]), codes=codes.astype(ARRAYS["codes"]),
                            lines=lines + (len(self.files) << 40))

    def _codes(self, path: str, chunk: Chunk, keep: np.ndarray, rejects: list) -> np.ndarray:
        """Provisional numbers of the codes, int64 [n, K], −1 behind the last; rows that cannot be used leave `keep`."""
        names = self.settings.target_cols
        cells = chunk.columns[1:1 + len(names)]
        numbers = np.stack([np.fromiter(map(self.book.__getitem__, column), dtype=np.int64, count=len(column))
                            for column in cells], axis=1)                     # [n, K]
        blank = keep & ((numbers[:, 0] == BLANK) | (numbers[:, 0] == WORD))
        if self.missing is None:
            rejects += [(chunk.lines[i], names[0], cells[0][i], "first code missing",
                         "the first code is missing or blank; --missing-code CODE gives such rows a code") for i in np.flatnonzero(blank)]
            keep &= ~blank
        else:
            numbers[blank, 0] = self.missing
        for i in np.flatnonzero(keep & (numbers < WORD).any(axis=1)):
            place = int(np.argmax(numbers[i] < WORD))
            kind, message = self.book.fault(int(numbers[i, place]))
            row = (chunk.lines[i], names[place], cells[place][i], DOES_NOT_FIT if kind == "label" else OUTSIDE_KEY, message)
            if kind == "label" and (self.numbers_assumed or not self.settings.drop_bad_labels):
                self.findings.error(row[3], path, *row[:3], message)
            else:
                rejects.append(row)
            keep[i] = False

        def note(kind: str, where: np.ndarray) -> None:                       # where: bool [n, K]
            rows, places = np.nonzero(where & keep[:, None])
            if len(rows):
                self.findings.note(kind, path, chunk.lines[rows], (cells[place][row] for row, place in zip(rows, places)))
        if self.missing is not None:
            note("missing_code_used", np.pad(blank[:, None], ((0, 0), (0, len(names) - 1))))
        note("missing_words", numbers == WORD)
        note("zeros_restored", (numbers >= REPAIRED) & (numbers & REPAIRED > 0))
        note("codes_short", numbers >= SHORT)
        numbers &= np.where(numbers >= 0, REPAIRED - 1, -1)
        numbers[numbers < 0] = BLANK
        repeated = np.zeros(numbers.shape, dtype=bool)
        for place in range(1, len(names)):
            repeated[:, place] = (numbers[:, :place] == numbers[:, place:place + 1]).any(axis=1) & (numbers[:, place] >= 0)
        note("codes_repeated", repeated)
        numbers[repeated] = BLANK
        return np.take_along_axis(numbers, np.argsort(numbers < 0, axis=1, kind="stable"), axis=1)

    def _language(self, path: str, lines: np.ndarray, texts: list[str], columns: list[list[str]]) -> np.ndarray:
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
            kinds = "; ".join(f"{count:,} × {kind}" for kind, count in findings.rejected.items()) or "there are only column names"
            if rows["val"]:
                kinds = f"all {rows['val']:,} valid rows went to validation; lower --share-val (0: none)"
            return [f"{', '.join(settings.train_files)}: no valid row to train on ({kinds})"]
        if rows["val"] or not (settings.val_files or settings.share_val):
            return []
        if settings.val_files:
            return [", ".join(settings.val_files) + ": no valid row to validate on"]
        return [f"--share-val {settings.share_val:g} leaves no row for validation in a file this small; raise it, or pass "
                "--share-val 0 to train without validation"]

    def _what_was_read(self) -> list[str]:
        settings, formatter = self.settings, self.formatter
        language = f"column {settings.language_col}" if settings.language_col else f"{settings.language} for all"
        lines = [f"Read: descriptions from column {settings.input_col}, codes from {', '.join(settings.target_cols)} "
                 f"({formatter.kind}, block size {formatter.block_size}), language: {language}"
                 + (f"; texts: {settings.clean_text}" if settings.clean_text != AS_IS else "")]
        ignored = [name for file in self.files for name in file["columns"] if name.casefold() in ("lang", "language")]
        if ignored and not settings.language_col and settings.language == UNKNOWN_LANGUAGE:
            lines.append(f"Note: there is a column {ignored[0]!r} that is not read; --language-col {ignored[0]} reads it")
        return lines

    def _bad_labels(self) -> str:
        formatter, [(kind, rows)] = self.formatter, self.findings.errors.items()
        ways = ["--drop-bad-labels leaves these rows out and lists them"]
        if formatter.kind == "gpf" and not formatter.allow_short:
            ways = ["--allow-codes-shorter-than-block-size fills shorter codes up", *ways, "--block-size N sets another length"]
            hisco = "--formatter hisco is for HISCO codes, and restores lost leading zeros"
            ways = [hisco, *ways] if formatter.target_cols[0].startswith("hisco") else [*ways, hisco]
        if rows > sum(part.rows for part in self._parts()):
            ways.insert(0, "Most rows are of this kind: look whether --target-cols and --formatter are the right ones")
        what = f"a code that does not fit the formatter {formatter.kind} (block size {formatter.block_size})"
        if self.settings.numbered:
            rename = ["columns code1, code2 … hold numbers of the HISCO key where no --key is named: where they hold codes, rename them"]
            what, ways = "what is not a number of the key", ["--key names the file that the numbers belong to",
                                                             *(rename if self.settings.number_codes else ways)]
        return "\n    ".join([f"{rows:,} rows hold {what}. The first:", *self._first(kind), "What to do:", *ways])

    def _first(self, kind: str) -> list[str]:
        return [f"{each['file']}, line {each['line']}, {each['reason']}" for each in self.findings.examples[kind]]

    def finish(self) -> tuple[list[str], dict]:
        """Closes the files and gives codes their final numbers. Returns (codes, report)."""
        self.writer.close()
        self.findings.close()
        found = list(self.book.codes)
        used = np.zeros(len(found) + 1, dtype=bool)                           # not those of rejected rows alone
        for part in self._parts():
            for numbers in part.blocks("codes", ARRAYS["codes"], part.max_codes):
                used[np.unique(numbers)] = True                               # −1 marks the last
        codes = self.settings.fixed_codes
        if codes is None:
            first = self.settings.first_codes or []
            codes = first + sorted({code for number, code in enumerate(found) if used[number]} - set(first))
        place = {code: i for i, code in enumerate(codes)}
        final = np.array([place.get(code, -1) for code in found] + [-1], dtype=ARRAYS["codes"])      # −1 stays −1
        for part in self._parts():
            path = os.path.join(self.folder, f"{part.part}.codes")
            with open(path + ".new", "wb") as file:
                for numbers in part.blocks("codes", ARRAYS["codes"], part.max_codes):
                    file.write(final[numbers].tobytes())
            os.replace(path + ".new", path)
        report = make_report(self._parts(), not self.settings.val_files, self._what_was_read(), self.files, self.findings, list(codes), self.languages.names,
                             os.path.join(self.folder, "conflicts.csv"))
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


def write_folder(settings: PrepareSettings, key: str, folder: str, reports: str | None, check: Callable[[], None]) -> dict:
    """Reads the files and fills `folder` with all but its last file, whose content it returns; `reports`: a folder that
    gets the lists of what was found if the data are of no use.

    Raises UnusableData, and UserError for what cannot be read at all.
    """
    reader = Reader(settings, folder)
    try:
        for part, path in settings.files:
            reader.read(path, part, check)
        codes, report = reader.finish()
    finally:
        reader.writer.abandon()
    write_key(os.path.join(folder, "key.csv"), codes)
    write_words(os.path.join(folder, "words.csv"), reader.writer.words)
    with open(os.path.join(folder, "data_report.json"), "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(report, file, indent=1, ensure_ascii=False)
    if problems := reader.problems():
        if reports:
            copy_lists(folder, reports)
        raise UnusableData("\n  ".join(problems), report)
    return {"format": PREPARED_FORMAT, "fingerprint": key, "codes": codes, "languages": reader.languages.names, "alphabet": reader.alphabet(),
            "max_codes": len(settings.target_cols), "clean_text": settings.clean_text, "kept_codes": len(settings.first_codes or []),
            "hisco_numbers": settings.number_codes is not None,
            "report": report}


def copy_lists(folder: str, target: str) -> None:
    """Copies the lists of a prepared folder to where users look for them; each is whole or not there."""
    for name in LISTS:
        new = os.path.join(target, f".{name}.new")
        try:
            shutil.copyfile(os.path.join(folder, name), new)
            os.replace(new, os.path.join(target, name))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise UserError(f"{os.path.join(target, name)} could not be written: {error.strerror}") from None


def prepare(settings: PrepareSettings, save_path: str, say: Callable[[str], None] = print, reports: str | None = None,
            check: Callable[[], None] = lambda: None) -> str:
    """Prepares the data under `save_path`/prepared, or finds it there; returns the folder. One process.

    reports: a folder for the lists of what was found. check: called often; an exception of it ends the work.
    The files must have passed `file_problems`. Raises UserError, and then leaves nothing behind.
    """
    before, key = _states(settings), fingerprint(settings)
    root = os.path.join(save_path, "prepared")
    folder = os.path.join(root, key)
    if is_whole(folder):
        made_from = [file["path"] for file in PreparedData.open(folder).report["files"]]
        others = f", made from {', '.join(made_from)}" if made_from != [path for _, path in settings.files] else ""
        say(f"Prepared data: found in {folder}{others}")
        if reports:
            copy_lists(folder, reports)
        return folder
    say(f"Preparing data: {', '.join(path for _, path in settings.files)}")

    def build(new: str) -> None:
        content = write_folder(settings, key, new, reports, check)
        changed = [path for path, state in _states(settings).items() if state != before[path]]
        if changed:
            raise UserError(f"{', '.join(changed)} changed while it was read; start again when nobody writes to it")
        write_last(new, content)
    folder = build_folder(root, key, build, say, check)
    if reports:
        copy_lists(folder, reports)
    return folder


def _states(settings: PrepareSettings) -> dict[str, tuple]:
    """What tells a file from one that was written to since."""
    found = {path: os.stat(path) for _, path in settings.files}
    return {path: (state.st_ino, state.st_size, state.st_mtime_ns) for path, state in found.items()}


def prepare_on_node(settings: PrepareSettings, save_path: str, folder: str, rank: int, check: Callable[[], None]) -> str:
    """The prepared folder of the node that `rank` leads: `folder`, that of rank 0, where it is seen, else its own.

    Raises UserError that names the rank.
    """
    if is_whole(folder):
        return folder
    try:
        problems = file_problems(settings)
        if problems:
            raise UserError("\n  ".join(problems))
        return prepare(settings, save_path, lambda line: None, check=check)
    except (UserError, OSError) as error:
        raise UserError(f"on the node of rank {rank}: {error}") from None


def get_args_parser() -> cli.Parser:
    parser = cli.make_parser("python -m histocc.prepare", "Shows what a data set holds, without training.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="CSV or Parquet files")
    parser.add_argument("--save-path", "--save-dir", required=True, metavar="DIR",
                        help="folder for data_report.json, rejected_rows.csv, conflicts.csv, key.csv and the prepared data")
    cli.add_table_arguments(parser, formatter="gpf", use_val_share=True)
    return parser


def main(argv: list[str] | None = None) -> int:
    cli.speak_any_encoding()
    made = None
    try:
        args = get_args_parser().parse_args(argv)
        problems = cli.table_problems(args) + [problem for problem in [cli.save_path_problem(args.save_path)] if problem]
        settings = settings_from(args, args.files, [], problems=problems)
        made = None if os.path.isdir(args.save_path) else args.save_path
        os.makedirs(args.save_path, exist_ok=True)
        try:
            report = PreparedData.open(prepare(settings, args.save_path, reports=args.save_path)).report
        except UnusableData as error:
            print("\n".join(report_lines(error.report)))
            print(f"Report: {os.path.join(args.save_path, 'data_report.json')}", flush=True)
            raise
        print("\n".join(report_lines(report)))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if made:
            with contextlib.suppress(OSError):       # something came into it
                os.rmdir(made)
        return 2
    print(f"Report: {os.path.join(args.save_path, 'data_report.json')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
