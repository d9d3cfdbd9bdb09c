"""A table of texts and decided codes, to which every round of decisions adds."""

import os

from histocc.data.tables import read_chunks, read_header, table_format
from histocc.predict.output import csv_text
from histocc.review.coded import CodedText, Key, Layout, key_of
from histocc.runtime.errors import UserError
from histocc.runtime.files import atomic_write, opened


class TrainingRows:
    """The file of --training-data; it need not be there yet. Raises UserError where it lacks a column that a
    decision needs, or cannot be read.
    """

    def __init__(self, path: str, layout: Layout):
        self.path, header = path, layout.header
        self.texts = [header[layout.text]] + ([] if layout.language is None else [header[layout.language]])
        self.header = [*self.texts, *(header[place] for place in layout.codes)]
        self.codes = self.header[len(self.texts) :]
        self.known: set[Key] = set()
        if not os.path.exists(path) or not os.path.getsize(path):
            return
        found, delimiter = read_header(path)
        missing = [name for name in [*self.texts, self.codes[0]] if name not in found]
        if missing:
            raise UserError(
                f"--training-data {path}: has no column {', '.join(map(repr, missing))}; it has"
                f" {', '.join(map(repr, found))}"
            )
        if delimiter != ",":
            raise UserError(f"--training-data {path}: its columns are parted by {delimiter!r}, not by commas")
        with opened(path) as file:
            content = file.read()
        if table_format(path).encoding != "utf-8-sig" or b"\r" in content.replace(b"\r\n", b""):
            raise UserError(
                f"--training-data {path}: is not in UTF-8 with usual line ends, so nothing can be added to"
                " it: save it as CSV (UTF-8)"
            )
        self.header, self.codes = found, [name for name in self.codes if name in found]
        for chunk in read_chunks(path, self.texts):
            if chunk.faults:
                line, _, reason = chunk.faults[0]
                raise UserError(f"--training-data {path}, line {line:,}: cannot be read ({reason})")
            languages = chunk.columns[1] if len(self.texts) > 1 else [""] * len(chunk.lines)
            self.known.update(map(key_of, chunk.columns[0], languages))

    def append(self, decisions: list[tuple[CodedText, tuple[str, ...]]]) -> str:
        """Adds a row for each text that is not there yet; returns what to tell. Raises OSError, UserError."""
        fresh = [
            (text, codes) for text, codes in decisions if key_of(text.text, text.language) not in self.known
        ]
        fitting = [(text, codes) for text, codes in fresh if len(codes) <= len(self.codes)]
        rows = []
        for text, codes in fitting:
            cells = dict(
                zip([*self.texts, *self.codes], [*(text.text, text.language)[: len(self.texts)], *codes])
            )
            rows.append([cells.get(name, "") for name in self.header])
        before = b""
        if os.path.exists(self.path):
            with opened(self.path) as file:
                before = file.read()
        before = before or csv_text([self.header])
        end = b"" if before.endswith(b"\n") else b"\n"
        if rows:
            with atomic_write(os.path.realpath(self.path)) as file:
                file.write(before + end + csv_text(rows))
        there, wide = len(decisions) - len(fresh), len(fresh) - len(fitting)
        return (
            f"{self.path}: {len(rows):,} rows added"
            + (f"; {there:,} texts are there already" if there else "")
            + (f"; {wide:,} have more codes than it has columns for, and are left out" if wide else "")
        )
