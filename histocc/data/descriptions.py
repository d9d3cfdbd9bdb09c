"""Descriptions of codes, shown behind some of the training texts so that the model meets the words of a
classification.

A text that gets one becomes, by the published template, `wine merchant [DESC: Working Proprietors (Wholesale
Trade)]`. It names the answer, so only training texts get one, and only some of them.
"""

import re
from dataclasses import dataclass

import numpy as np

from histocc.data.arrays import PreparedData
from histocc.data.augment import piece_ranges
from histocc.data.keys import read_columns
from histocc.data.tables import column_problems, read_header
from histocc.formatter import BlockyFormatter
from histocc.runtime.errors import UserError
from histocc.runtime.rng import chance, draw, streams
from histocc.text import code_points, join_texts
from histocc.text_rules import ASCII_LOWER, ascii_lower, cleaner

CODE_COLUMNS = ("system_code", "hisco", "code")
TEXT_COLUMNS = ("description", "en_hisco_text", "text", "desc")


@dataclass(frozen=True)
class DescriptionSettings:
    """--include-descriptions and the flags that belong to it."""

    include_descriptions: bool
    descriptions_file: str | None
    description_prob: float
    description_template: str
    descriptions_code_col: str | None
    descriptions_text_col: str | None
    descriptions_lang_col: str | None

    def file(self) -> str:
        """--descriptions-file, which --include-descriptions needs."""
        assert self.descriptions_file is not None
        return self.descriptions_file


def find_columns(asked: DescriptionSettings) -> list[str]:
    """Columns of --descriptions-file: code, text and, where given, language. Raises UserError."""
    path = asked.file()
    header = read_header(path)[0]
    columns = []
    for flag, given, usual in (
        ("--descriptions-code-col", asked.descriptions_code_col, CODE_COLUMNS),
        ("--descriptions-text-col", asked.descriptions_text_col, TEXT_COLUMNS),
    ):
        found = given or next((name for name in usual if name in header), None)
        if found is None:
            raise UserError(
                f"{path}: has none of the columns {', '.join(usual)}; name yours with {flag}. It has "
                + ", ".join(map(repr, header))
            )
        columns.append(found)
    if asked.descriptions_lang_col:
        columns.append(asked.descriptions_lang_col)
    problems = column_problems(path, header, columns)
    if problems:
        raise UserError("\n  ".join(problems))
    return columns


@dataclass(frozen=True)
class Descriptions:
    """What is shown for each code and language, and to which texts.

    numbers: int64 [codes + 1, languages], which description, −1 for none (the last row is that of no code);
    flat, offsets: their code points; template: pieces as code points, None the text, "desc" the description.
    """

    seed: int
    probability: float
    template: list
    numbers: np.ndarray
    flat: np.ndarray
    offsets: np.ndarray

    @property
    def codes(self) -> int:
        """How many codes have a description."""
        return int((self.numbers >= 0).any(axis=1).sum())

    def apply(
        self,
        flat: np.ndarray,
        offsets: np.ndarray,
        codes: np.ndarray,
        languages: np.ndarray,
        rows: np.ndarray,
        epoch: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """B texts (flat uint32 [N], offsets int64 [B + 1]), some of them with the description of their code
        (codes,
        languages, rows: int64 [B]); a pure function of (seed, epoch, row).
        """
        shown = self.numbers[codes, languages]  # [B]
        shown = np.where(chance(draw(streams(self.seed, epoch, rows), 0), self.probability), shown, -1)
        pool, begins, sizes = [flat, self.flat], [], []
        end = len(flat) + len(self.flat)
        for piece in self.template:
            if piece is None:
                begins.append(offsets[:-1])
                sizes.append(np.diff(offsets))
            elif isinstance(piece, str):
                begins.append(len(flat) + self.offsets[shown])
                sizes.append(np.where(shown < 0, 0, self.offsets[shown + 1] - self.offsets[shown]))
            else:
                pool.append(piece)
                begins.append(np.full(len(rows), end))
                sizes.append(np.where(shown < 0, 0, len(piece)))
                end += len(piece)
        if not any(piece is None for piece in self.template):  # a template without {occ}
            begins.append(offsets[:-1])
            sizes.append(np.where(shown < 0, np.diff(offsets), 0))
        starts, lengths = np.stack(begins, axis=1), np.stack(sizes, axis=1)  # [B, pieces]
        return (
            np.concatenate(pool)[piece_ranges(starts.ravel(), lengths.ravel())],
            np.concatenate([[0], np.cumsum(lengths.sum(axis=1))]),
        )


def load_descriptions(
    asked: DescriptionSettings, data: PreparedData, formatter: BlockyFormatter, seed: int
) -> Descriptions | None:
    """What is asked for; None without --include-descriptions. Raises UserError."""
    if not asked.include_descriptions:
        return None
    columns, clean = find_columns(asked), cleaner(data.clean_text)
    place = {code: i for i, code in enumerate(data.codes)}
    texts: list[np.ndarray] = []
    numbers = np.full((len(data.codes) + 1, len(data.languages)), -1, dtype=np.int64)
    named: dict[tuple[int, int], int] = {}
    for code, text, *language in read_columns(asked.file(), columns):
        at = place.get(formatter.repair(code)[0])
        if at is None or not text:
            continue
        if language and language[0] in data.languages:
            named[at, data.languages.index(language[0])] = len(texts)
        numbers[at, numbers[at] < 0] = len(texts)  # the first of its code
        texts.append(code_points(clean(text)))
    for (code, language), number in named.items():
        numbers[code, language] = number
    if not texts:
        raise UserError(
            f"--descriptions-file {asked.descriptions_file}: none of the {len(data.codes):,} codes of the"
            f" data stands in column {columns[0]!r}"
        )
    between = ascii_lower if data.clean_text == ASCII_LOWER else str
    template = [
        None if piece == "{occ}" else "desc" if piece == "{desc}" else code_points(between(piece))
        for piece in re.split(r"(\{occ\}|\{desc\})", asked.description_template)
        if piece
    ]
    flat, offsets = join_texts(texts)
    return Descriptions(seed, asked.description_prob, template, numbers, flat, offsets)


def read_descriptions(
    path: str, codes: list[str], formatter: BlockyFormatter, required: bool = True
) -> dict[str, str]:
    """Code → description, from a table of both. Raises UserError where it has no such columns or none of
    `codes`; without `required` that is no description.
    """
    header, _ = read_header(path)
    usual_names = (CODE_COLUMNS, TEXT_COLUMNS)
    names = [there[0] for usual in usual_names if (there := [name for name in usual if name in header])]
    if len(names) < len(usual_names):
        if not required:
            return {}
        raise UserError(
            f"--descriptions {path}: needs a column of codes ({', '.join(CODE_COLUMNS)}) and one of"
            f" descriptions ({', '.join(TEXT_COLUMNS)}); it has {', '.join(map(repr, header))}"
        )
    found: dict[str, str] = {}
    for code, text in read_columns(path, names):
        found.setdefault(formatter.repair(code)[0], text)
    if required and not set(codes) & found.keys():
        raise UserError(
            f"--descriptions {path}: none of the {len(codes):,} codes of the model stands in column"
            f" {names[0]!r}"
        )
    return found
