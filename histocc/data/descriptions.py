"""Descriptions of codes, appended to some of the training texts.

A text that gets one becomes, in the published template, `wine merchant [DESC: Working Proprietors (Wholesale
Trade)]`. A description names the answer, so only some training texts get one, and no other texts.
"""

from dataclasses import dataclass

import numpy as np

from histocc.data.arrays import PreparedData
from histocc.data.config import DescriptionFlags
from histocc.data.rows import code_of_cell, language_name, read_columns
from histocc.data.tables import column_problems, table_format
from histocc.formatter import BlockyFormatter, hisco_classes
from histocc.runtime.config import Config, flag
from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.rng import chance, draw, streams
from histocc.text import ASCII_LOWER, ascii_lower, cleaner, code_points, join_texts, texts_of_pieces

CODE_COLUMNS = ("system_code", "hisco", "code")
TEXT_COLUMNS = ("description", "en_hisco_text", "text", "desc")


@dataclass(frozen=True, kw_only=True)
class TitleFlags(Config):
    """your table"""

    descriptions: str | None = flag(
        None,
        f"table of codes ({', '.join(CODE_COLUMNS)}) and their titles ({', '.join(TEXT_COLUMNS)})",
        metavar="FILE",
    )


def find_columns(args: DescriptionFlags) -> list[str]:
    """Return the columns of code, text and (if named) language. Raises UserError if one is missing."""
    path = args.descriptions_file or ""
    header = table_format(path).names
    columns = [
        args.descriptions_code_col or next((name for name in CODE_COLUMNS if name in header), ""),
        args.descriptions_text_col or next((name for name in TEXT_COLUMNS if name in header), ""),
    ]
    if "" in columns:
        raise UserError(
            f"{path}: needs a column of codes ({', '.join(CODE_COLUMNS)}) and a column of descriptions"
            f" ({', '.join(TEXT_COLUMNS)}); it has {', '.join(map(repr, header))}"
        )
    columns += [args.descriptions_lang_col] if args.descriptions_lang_col else []
    raise_if_any(column_problems(path, header, columns))
    return columns


@dataclass(frozen=True)
class Descriptions:
    """The strings to put before and after texts, by code and language, and how often to do so."""

    seed: int
    probability: float
    keeps_text: bool  # whether the template holds the text itself
    numbers: np.ndarray  # int64 [codes + 1, languages], number of a description or −1. The last row: no code
    flat: np.ndarray  # uint32: the strings before and after the text, for each description
    offsets: np.ndarray  # int64 [2 · descriptions + 1]

    @property
    def codes(self) -> int:
        """The number of codes with a description."""
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
        """Return B texts, some with their code's description, as a pure function of (seed, epoch, row)."""
        shown = self.numbers[codes, languages]  # [B]
        is_shown = (shown >= 0) & chance(draw(streams(self.seed, epoch, rows), 0), self.probability)
        begins, sizes = np.zeros((2, len(rows), 3), dtype=np.int64)  # before the text, the text, after it
        begins[:, 1], sizes[:, 1] = offsets[:-1], np.diff(offsets) * (self.keeps_text | ~is_shown)
        for piece in range(2):
            at = 2 * shown[is_shown] + piece
            begins[is_shown, 2 * piece] = len(flat) + self.offsets[at]
            sizes[is_shown, 2 * piece] = self.offsets[at + 1] - self.offsets[at]
        return texts_of_pieces(np.concatenate([flat, self.flat]), begins, sizes)


def load_descriptions(
    args: DescriptionFlags, data: PreparedData, formatter: BlockyFormatter, seed: int
) -> Descriptions | None:
    """Return the requested descriptions, or None without --include-descriptions. Raises UserError."""
    if not args.include_descriptions:
        return None
    columns, clean = find_columns(args), cleaner(data.clean_text)
    place = {code: i for i, code in enumerate(data.codes)}
    is_ascii, template = data.clean_text == ASCII_LOWER, args.description_template
    before, occ, behind = (ascii_lower(template) if is_ascii else template).partition("{occ}")
    texts: list[np.ndarray] = []
    numbers = np.full((len(data.codes) + 1, len(data.languages)), -1, dtype=np.int64)
    named: dict[tuple[int, int], int] = {}
    for code, text, *language in read_columns(args.descriptions_file or "", columns):
        at, number = place.get(code_of_cell(code, formatter, place)), len(texts) // 2
        if at is None or not text:
            continue
        if (name := language_name("".join(language))) in data.languages:
            named[at, data.languages.index(name)] = number
        numbers[at, numbers[at] < 0] = number  # the first one of a code
        texts += [code_points(part.replace("{desc}", clean(text))) for part in (before, behind)]
    for place_of_code, number in named.items():
        numbers[place_of_code] = number
    if not texts:
        lacks = f"none of the codes of the data ({len(data.codes):,}) is in column {columns[0]!r}"
        raise UserError(f"--descriptions-file {args.descriptions_file}: {lacks}")
    return Descriptions(seed, args.description_prob, bool(occ), numbers, *join_texts(texts))


def read_descriptions(path: str | None, codes: list[str], formatter: BlockyFormatter) -> dict[str, str]:
    """Return the description of each code from a table, or the titles of HISCO codes without one."""
    if path is None:
        return hisco_classes()["title"] if formatter.kind == "hisco" else {}
    columns = find_columns(DescriptionFlags(descriptions_file=path))
    where = f"--descriptions {path}, column {columns[0]!r}"
    return descriptions_of(where, read_columns(path, columns), codes, formatter)


def descriptions_of(
    where: str, rows: list[list[str]], codes: list[str], formatter: BlockyFormatter
) -> dict[str, str]:
    """Return the description of each code from rows of both. Raises UserError if none is in `codes`."""
    key = set(codes)
    texts = {code_of_cell(code, formatter, key): text for code, text in reversed(rows)}  # the first one
    if not key & texts.keys():
        raise UserError(f"{where}: holds none of the codes of the model ({len(codes):,})")
    return texts
