"""A coded file as `python -m histocc.predict` writes it, text by text."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from histocc.data.tables import Chunk, column_problems, read_chunks, read_header
from histocc.formatter import CLASSES
from histocc.runtime.errors import UserError, raise_if_any
from histocc.text_rules import text_key

DECIDED = "decided_by"  # column of the file with decisions
MODEL = "model"  # in it: nobody has decided
Key = tuple[str, str]  # a text and its language, as `key_of` gives them


def key_of(text: str, language: str) -> Key:
    """Equal for texts that differ only in case and blanks, in the same language."""
    return text_key(text), language.strip()


@dataclass(frozen=True)
class Layout:
    """Where the columns of a coded file are. system: in the names of the columns of codes; codes, probs: a
    place each; words: places of descriptions, none where there are none; classes: places of titles and
    classes of HISCO, by name; more: places of what is about the code that was replaced; decided: place of
    DECIDED, None where there is none.
    """

    header: list[str]
    text: int
    language: int | None
    system: str
    codes: list[int]
    probs: list[int]
    words: list[int]
    classes: dict[str, list[int]]
    more: list[int]
    conf: int
    review: int
    decided: int | None

    @classmethod
    def of(cls, path: str, column: str, language_column: str | None, delimiter: str | None) -> "Layout":
        """Raises UserError where the file is none that predict has written, or lacks a column."""
        header = read_header(path, delimiter)[0]
        missing = [name for name in ("prob_1", "conf", "needs_review") if header.count(name) != 1]
        first = header.index("prob_1") - 1 if not missing else -1
        if missing or first < 0 or not header[first].endswith("_1"):
            raise UserError(
                f"{path}: is no coded file: it has no column {(missing or ['of codes before prob_1'])[0]!r}"
                f" as python -m histocc.predict writes it; it has {', '.join(map(repr, header))}"
            )
        if language_column is None and "lang" in header:
            language_column = "lang"
        wanted = [column] + ([language_column] if language_column else [])
        flags = {column: "--column", language_column or "": "--language-column"}
        raise_if_any(column_problems(path, header, wanted, flags))
        system = header[first].removesuffix("_1")
        # what predict writes stands together; columns of the same names elsewhere are the user's own
        own = {header[i]: i for i in range(first, header.index("conf"))}
        numbers = [i for i in range(1, len(own)) if {f"{system}_{i}", f"prob_{i}"} <= own.keys()]
        if DECIDED in header[:first]:
            raise UserError(
                f"{path}: has a column {DECIDED!r} of its own, which is the name of the one that review adds:"
                " rename it"
            )

        def places(name: str) -> list[int]:
            return [own[f"{name}_{i}"] for i in numbers if f"{name}_{i}" in own]

        prefix = [own[name] for name in (f"{system}_prefix", "prob_prefix") if name in own]
        return cls(
            header,
            header.index(column),
            header.index(language_column) if language_column else None,
            system,
            places(system),
            places("prob"),
            places("desc"),
            {name: places(name) for name in ("title", *CLASSES)},
            prefix,
            header.index("conf"),
            header.index("needs_review"),
            header.index(DECIDED) if DECIDED in header else None,
        )

    def key(self, row: list[str]) -> Key:
        return key_of(row[self.text], row[self.language] if self.language is not None else "")

    def codes_of(self, row: list[str]) -> list[str]:
        return [row[i] for i in self.codes if row[i]]

    def decider(self, row: list[str]) -> str:
        """Who has decided on a row, "" for nobody."""
        found = row[self.decided] if self.decided is not None else ""
        return "" if found == MODEL else found


@dataclass
class CodedText:
    """A text with what the model says of it: text and language as they stand in its first row; rows: how many
    it has; doubt: how many of them are expected to be wrong; decided: who has decided, "" for nobody.
    """

    text: str
    language: str
    rows: int = 0
    doubt: float = 0.0
    codes: list[str] = field(default_factory=list)
    probs: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    decided: str = ""

    @property
    def id(self) -> str:
        """The same for the same text, language and codes."""
        own = "\0".join([*key_of(self.text, self.language), *self.codes])
        return hashlib.blake2b(own.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class CodedFile:
    """All texts of a coded file, but blank ones. texts: by `key_of`; rows: of the file; words: code → its
    description, as far as the file has some; alternatives: whether the codes behind the first one are other
    possible answers (decoders topk and full), and not further codes of the same answer. Raises UserError.
    """

    def __init__(self, path: str, layout: Layout, delimiter: str | None = None):
        self.path, self.layout, self.delimiter = path, layout, delimiter
        self.texts: dict[Key, CodedText] = {}
        self.words: dict[str, str] = {}
        self.rows = self.empty = 0
        several = same = 0
        for row in self.read():
            self.rows += 1
            codes, probs = layout.codes_of(row), [row[i] for i in layout.probs if row[i]]
            by = layout.decider(row)
            several += len(codes) > 1 and not by
            same += len(codes) > 1 and not by and row[layout.conf] in probs[:1]
            key = layout.key(row)
            if not key[0]:
                self.empty += 1
                continue
            found = self.texts.get(key)
            if found is None:
                words = [row[i] for i in layout.words][: len(codes)]
                language = row[layout.language] if layout.language is not None else ""
                found = CodedText(row[layout.text], language.strip(), 0, 0.0, codes, probs, words)
                self.texts[key] = found
                self.words.update({code: word for code, word in zip(codes, words) if word})
            found.rows += 1
            found.doubt += 1 - confidence(row[layout.conf], bool(codes))
            if by:
                found.decided, found.doubt = by, 0.0
        self.alternatives = 0 < several == same

    def chunks(self) -> Iterator[Chunk]:
        """Raises UserError where a row cannot be read."""
        for chunk in read_chunks(self.path, None, self.delimiter):
            if chunk.faults:
                line, _, reason = chunk.faults[0]
                raise UserError(f"{self.path}, line {line:,}: cannot be read ({reason})")
            yield chunk

    def read(self) -> Iterator[list[str]]:
        for chunk in self.chunks():
            yield from map(list, zip(*chunk.columns))

    def answer(self, codes: list[str], by: str) -> list[str]:
        """Those of the codes of a row that are its answer; by: who has decided, "" for the model."""
        return codes[:1] if self.alternatives and not by else codes


def confidence(cell: str, coded: bool) -> float:
    """How sure the model was, 0 … 1; 0 without a code, or where it does not say."""
    try:
        value = float(cell)
    except ValueError:
        return 0.0
    return min(max(value, 0.0), 1.0) if coded and math.isfinite(value) else 0.0
