"""What is wrong or remarkable in the rows of a data set: counted, with the first rows of each kind."""

import csv
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

EXAMPLES = 5  # rows shown of each kind
SHOWN = 60  # characters of a value in an example
LONGEST = 300  # characters of a reason

# Kinds that leave a row as it is, or mend it: what is said of them.
NOTES = {
    "zeros_restored": "codes got a lost leading zero (or a trailing .0) repaired",
    "missing_words": "cells such as NA or null in the columns of codes were read as no code",
    "language_missing": "rows without a language are coded as unk",
    "texts_cut": "descriptions are longer than the model reads and are cut",
    "missing_code_used": "rows without a first code got the code of --missing-code",
    "codes_repeated": "codes repeated within a row count once",
    "codes_short": "codes are shorter than the block and are filled up",
    "letters_broken": (
        "descriptions hold letters that were broken by a wrong encoding before (such as Ã¦ for æ)"
    ),
}
DOES_NOT_FIT, OUTSIDE_KEY = "code does not fit", "code outside the key"


def row_writer(file) -> Callable[[Sequence], object]:
    """Writes rows of CSV to an open file. Python's writer leaves a lone carriage return bare, where readers
    would cut the row.
    """
    usual = csv.writer(file, lineterminator="\n")
    quoted = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
    return lambda row: (
        quoted if any("\r" in cell for cell in row if isinstance(cell, str)) else usual
    ).writerow(row)


class Findings:
    """Counts by kind. Rejected rows are listed in `folder`/rejected_rows.csv: file, line, column, value,
    reason.
    """

    def __init__(self, folder: str):
        self.notes: Counter = Counter()
        self.rejected: Counter = Counter()
        self.errors: Counter = Counter()
        self.examples: dict[str, list[dict]] = {}
        self.file = open(
            os.path.join(folder, "rejected_rows.csv"),
            "w",
            encoding="utf-8",
            newline="",
            errors="backslashreplace",
        )
        self.write_row = row_writer(self.file)
        self.write_row(["file", "line", "column", "value", "reason"])

    def reject(self, kind: str, path: str, line: int, column: str, value: str, reason: str) -> None:
        """A row that is not used."""
        self.rejected[kind] += 1
        self.write_row([path, line, column, value, reason[:LONGEST]])
        self._example(kind, path, line, value, reason)

    def error(self, kind: str, path: str, line: int, column: str, value: str, reason: str) -> None:
        """A row that makes the data unusable until the user decides."""
        self.errors[kind] += 1
        self.write_row([path, line, column, value, reason[:LONGEST]])
        self._example(kind, path, line, value, f"column {column!r}: {reason}")

    def note(self, kind: str, path: str, lines: Iterable[int], values: Iterable[str]) -> None:
        """Rows that are used, after a change or in spite of something: their lines and what stands there."""
        for line, value in zip(lines, values):
            self.notes[kind] += 1
            self._example(kind, path, line, value, NOTES[kind])

    def _example(self, kind: str, path: str, line: int, value: str, reason: str) -> None:
        known = self.examples.setdefault(kind, [])
        if len(known) < EXAMPLES:
            known.append(
                {"file": path, "line": int(line), "value": value[:SHOWN], "reason": reason[:LONGEST]}
            )

    def close(self) -> None:
        self.file.close()

    def problems(self) -> list[dict]:
        """Each kind with its rows: {"kind", "action": error|rejected|noted, "rows", "first": examples}; the
        worst first.
        """
        return [
            {"kind": kind, "action": action, "rows": rows, "first": self.examples[kind]}
            for action, counter in (
                ("error", self.errors),
                ("rejected", self.rejected),
                ("noted", self.notes),
            )
            for kind, rows in counter.most_common()
        ]
