"""Prepared arrays → batches; on the way training rows are joined, and descriptions of codes shown."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from histocc.data.arrays import PreparedData
from histocc.data.config import Descriptions as DescriptionFlags
from histocc.data.noise import Augmenter, noise_characters, piece_ranges
from histocc.data.rows import read_columns
from histocc.data.tables import column_problems, read_header
from histocc.formatter import BOS_IDX, EOS_IDX, PAD_IDX, BlockyFormatter
from histocc.runtime.errors import UserError
from histocc.runtime.rng import below, chance, draw, streams
from histocc.text import (
    ASCII_LOWER,
    SEP_ID,
    UNKNOWN_LANGUAGE,
    ascii_lower,
    cleaner,
    code_points,
    encode_batch,
    join_texts,
    language_table,
    padded_width,
)
from histocc.trainer.batches import Rows

# ---- training rows with one code each, joined into rows with two
#
# `farmer` and `smith` make `farmer and smith`. Descriptions with several codes are few in most data. Noise on
# the text comes afterwards. Which rows are joined is a function of (seed, epoch, row).

# The word between two descriptions, by language; other languages have that of `unk`.
AND = {
    "en": "and",
    "da": "og",
    "no": "og",
    "is": "og",
    "se": "och",
    "nl": "en",
    "ge": "und",
    "fr": "et",
    "es": "y",
    "it": "e",
    "pt": "e",
    "ca": "i",
    "gr": "και",
    UNKNOWN_LANGUAGE: "and",
}

_JOINED, _OTHER = range(2)  # draws of one row, by number
_CHUNK = 1 << 18  # rows


class JoinedRows:
    """Joins some of the training rows that have one code with another such row of the same language.

    A row stays alone where both have the same code, where the joined text would not fit into `max_len`
    positions (also with its language hidden), or where the row itself is drawn, as where its language has no
    other. Needs 8 bytes for each row with one code, in every process; what is sent to a loading process is
    small.

    Args:
        data: prepared rows; their training part is joined.
        seed: of all draws.
        probability: that a row is to be joined, 0…1.
        max_len: most positions of an input.

    Raises:
        ValueError: for a probability out of range, and for data whose rows have room for one code alone.
    """

    def __init__(self, data: PreparedData, seed: int, probability: float, max_len: int = 128):
        if not 0 <= probability <= 1:
            raise ValueError(f"the probability of joining must be between 0 and 1, not {probability}")
        if data.max_codes < 2:
            raise ValueError("rows of this data have room for one code, joined ones have two")
        self.rows, self.languages = data.train, len(data.languages)
        self.seed, self.probability = seed, probability
        cleaned = ascii_lower if data.clean_text == ASCII_LOWER else str
        words = [code_points(cleaned(f" {AND.get(name, AND[UNKNOWN_LANGUAGE])} ")) for name in data.languages]
        self.words, self.word_offsets = join_texts(words)
        before = language_table(data.languages)[1]  # positions, int64 [L]
        self.room = max_len - 1 - np.maximum(before, before[data.languages.index(UNKNOWN_LANGUAGE)])

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_by_language"}

    @cached_property
    def _by_language(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows with one code, language by language, int64 [M]; where each language begins, int64 [L + 1])"""
        alone = [
            start + np.flatnonzero(_one_code(self.rows.codes[start : start + _CHUNK]))
            for start in range(0, len(self.rows), _CHUNK)
        ]
        rows = np.concatenate(alone) if alone else np.zeros(0, dtype=np.int64)
        language = np.asarray(self.rows.language)[rows]
        starts = np.concatenate([[0], np.cumsum(np.bincount(language, minlength=self.languages))])
        return rows[np.argsort(language, kind="stable")], starts

    def characters(self) -> np.ndarray:
        """Code points that joining puts into texts, uint32."""
        return np.unique(self.words)

    def apply(
        self,
        flat: np.ndarray,
        offsets: np.ndarray,
        codes: np.ndarray,
        language: np.ndarray,
        rows: np.ndarray,
        epoch: int,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """B training rows, some of them joined with another one.

        Args:
            flat: uint32 [N], code points of all texts.
            offsets: int64 [B + 1], text i is flat[offsets[i]:offsets[i + 1]].
            codes: int64 [B, K], numbers of each row's codes, −1 behind the last.
            language: int64 [B], their numbers.
            rows: int64 [B], row numbers in the training part.
            epoch: from 0.

        Returns:
            Texts (flat uint32, offsets int64 [B + 1], from 0) and codes int64 [B, K]. The arguments stay as
            they are.
        """
        stream = streams(self.seed, epoch, rows)
        joined = np.flatnonzero(chance(draw(stream, _JOINED), self.probability) & _one_code(codes))
        of_language, starts = self._by_language
        kind = language[joined]
        choice = below(draw(stream[joined], _OTHER), starts[kind + 1] - starts[kind])
        others = of_language[starts[kind] + choice]
        second = self.rows.codes[others, 0].astype(np.int64)
        own, between = np.diff(offsets), np.diff(self.word_offsets)
        fits = own[joined] + between[kind] + self.rows.lengths(others) <= self.room[kind]
        kept = fits & (second != codes[joined, 0])
        joined, kind, others = joined[kept], kind[kept], others[kept]
        texts, text_offsets = self.rows.texts(others)
        begins, sizes = np.zeros((len(rows), 3), dtype=np.int64), np.zeros((len(rows), 3), dtype=np.int64)
        begins[:, 0], sizes[:, 0] = offsets[:-1], own
        begins[joined, 1], sizes[joined, 1] = len(flat) + self.word_offsets[kind], between[kind]
        begins[joined, 2] = len(flat) + len(self.words) + text_offsets[:-1]
        sizes[joined, 2] = np.diff(text_offsets)
        codes = codes.copy()
        codes[joined, 1] = second[kept]
        pool = np.concatenate([flat, self.words, texts])
        ends = np.cumsum(sizes.sum(axis=1))
        return pool[piece_ranges(begins.ravel(), sizes.ravel())], np.concatenate([[0], ends]), codes


def _one_code(codes: np.ndarray) -> np.ndarray:
    """Which rows of `codes` int [B, K] have exactly one; bool [B]."""
    return (codes[:, 0] >= 0) & (codes[:, 1] < 0)


# ---- descriptions of codes, shown behind some of the training texts
#
# A text that gets one becomes, by the published template, `wine merchant [DESC: Working Proprietors
# (Wholesale Trade)]`. It names the answer, so only training texts get one, and only some of them.

CODE_COLUMNS = ("system_code", "hisco", "code")
TEXT_COLUMNS = ("description", "en_hisco_text", "text", "desc")


def find_columns(args: DescriptionFlags) -> list[str]:
    """Columns of --descriptions-file: code, text and, where given, language. Raises UserError."""
    path = args.descriptions_file or ""
    header = read_header(path)[0]
    columns = []
    for flag, given, usual in (
        ("--descriptions-code-col", args.descriptions_code_col, CODE_COLUMNS),
        ("--descriptions-text-col", args.descriptions_text_col, TEXT_COLUMNS),
    ):
        found = given or next((name for name in usual if name in header), None)
        if found is None:
            raise UserError(
                f"{path}: has none of the columns {', '.join(usual)}; name yours with {flag}. It has "
                + ", ".join(map(repr, header))
            )
        columns.append(found)
    if args.descriptions_lang_col:
        columns.append(args.descriptions_lang_col)
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
    args: DescriptionFlags, data: PreparedData, formatter: BlockyFormatter, seed: int
) -> Descriptions | None:
    """What is asked for; None without --include-descriptions. Raises UserError."""
    if not args.include_descriptions:
        return None
    columns, clean = find_columns(args), cleaner(data.clean_text)
    place = {code: i for i, code in enumerate(data.codes)}
    texts: list[np.ndarray] = []
    numbers = np.full((len(data.codes) + 1, len(data.languages)), -1, dtype=np.int64)
    named: dict[tuple[int, int], int] = {}
    for code, text, *language in read_columns(args.descriptions_file or "", columns):
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
            f"--descriptions-file {args.descriptions_file}: none of the {len(data.codes):,} codes of the"
            f" data stands in column {columns[0]!r}"
        )
    between = ascii_lower if data.clean_text == ASCII_LOWER else str
    template = [
        None if piece == "{occ}" else "desc" if piece == "{desc}" else code_points(between(piece))
        for piece in re.split(r"(\{occ\}|\{desc\})", args.description_template)
        if piece
    ]
    flat, offsets = join_texts(texts)
    return Descriptions(seed, args.description_prob, template, numbers, flat, offsets)


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


# ---- batches


def code_token_table(codes: list[str], formatter: BlockyFormatter) -> np.ndarray:
    """Tokens of each code, with a block of PAD at index −1 for «no code»; int64 [len(codes) + 1,
    block_size].
    """
    table = np.full((len(codes) + 1, formatter.block_size), PAD_IDX, dtype=np.int64)
    for i, code in enumerate(codes):
        table[i] = formatter.encode_code(code)
    return table


@dataclass(frozen=True)
class RowEncoding:
    """How rows become tensors. fixed_width: pad to this many positions instead of to the longest of the
    micro-batch; first_empty_block: targets end with the first empty block of the row that has most codes.
    """

    formatter: BlockyFormatter
    max_len: int = 128
    fixed_width: int | None = None
    first_empty_block: bool = False


@dataclass(frozen=True)
class TextChanges:
    """What is done to training texts, in this order; None for nothing. joined: rows of one code become rows
    of two; augmenter: noise; descriptions: of codes, shown behind some texts.
    """

    joined: JoinedRows | None = None
    augmenter: Augmenter | None = None
    descriptions: Descriptions | None = None


NO_CHANGES = TextChanges()


class TextRowSet(Protocol):
    """A `RowSet`, or rows of one. language int [N], codes int [N, K]."""

    language: np.ndarray
    codes: np.ndarray

    def __len__(self) -> int: ...

    def lengths(self, rows: np.ndarray) -> np.ndarray: ...

    def texts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...

    def teacher_of(self, rows: np.ndarray) -> np.ndarray | None: ...


class TextRows(Rows):
    """Texts and codes as the trainer takes rows: input_ids int64 [B, S], attention_mask bool [B, S],
    targets_seq2seq int64 [B, T], targets_linear int64 [B, K] (indices of the row's codes, −1 for none).
    """

    has_lengths = True
    groups_in_model = ("cpu",)  # see `histocc.model.width_groups`

    def __init__(
        self,
        rows: TextRowSet,
        data: PreparedData,
        encoding: RowEncoding,
        changes: TextChanges = NO_CHANGES,
    ):
        formatter, max_len = encoding.formatter, encoding.max_len
        self.rows, self.encoding, self.changes, self.languages = rows, encoding, changes, data.languages
        if encoding.fixed_width:
            self.groups_in_model = ()
        self.fingerprint = data.fingerprint
        self.max_codes, self.nb_blocks = data.max_codes, formatter.max_num_codes
        self.prefixes, self.alphabet = language_table(data.languages), data.alphabet
        self.unknown_language = data.languages.index(UNKNOWN_LANGUAGE)
        self.code_tokens = code_token_table(data.codes, formatter)
        # by characters
        self.positions = np.array([encoding.fixed_width or padded_width(n, max_len) for n in range(max_len)])

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        return self.rows.lengths(numbers)

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        return self._encoded(self._changed(self._read(numbers), numbers, epoch), self.encoding.fixed_width)

    def widths(self, batch: dict[str, torch.Tensor]) -> np.ndarray:
        return self.positions[batch["attention_mask"].sum(dim=1).numpy() - 2]

    def piece(self, batch: dict[str, torch.Tensor], kept: np.ndarray) -> dict[str, torch.Tensor]:
        width, rows = self.widths(batch)[kept].max(), torch.from_numpy(kept)
        found = {name: value[rows] for name, value in batch.items()}
        for name in ("input_ids", "attention_mask"):
            found[name] = found[name][:, :width]
        found["targets_seq2seq"] = self._shortened(found["targets_seq2seq"])
        return found

    def characters(self) -> np.ndarray:
        """Every character id that an input can hold, but for words from other files; sorted int64."""
        own = [
            np.array(self.alphabet, dtype=np.int64),
            self.prefixes[0].ravel(),
            np.array([0, SEP_ID]),
            noise_characters().astype(np.int64),
        ]
        if self.changes.descriptions is not None:
            own += [
                self.changes.descriptions.flat,
                *(piece for piece in self.changes.descriptions.template if isinstance(piece, np.ndarray)),
            ]
        if self.changes.joined is not None:
            own.append(self.changes.joined.characters())
        return np.unique(np.concatenate(own).astype(np.int64))

    def _read(self, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """(code points uint32 [N], offsets int64 [B + 1], numbers of the languages int64 [B], codes int64
        [B, K])."""
        language, codes = self.rows.language[rows].astype(np.int64), self.rows.codes[rows].astype(np.int64)
        return *self.rows.texts(rows), language, codes

    def _changed(self, read: tuple[np.ndarray, ...], rows: np.ndarray, epoch: int) -> tuple[np.ndarray, ...]:
        """The same with this epoch's joined rows and noise."""
        flat, offsets, language, codes = read
        if self.changes.joined is not None:
            flat, offsets, codes = self.changes.joined.apply(flat, offsets, codes, language, rows, epoch)
        if self.changes.augmenter is not None:
            flat, offsets = self.changes.augmenter.apply(flat, offsets, rows, epoch)
        if self.changes.descriptions is not None:
            flat, offsets = self.changes.descriptions.apply(flat, offsets, codes[:, 0], language, rows, epoch)
        if self.changes.augmenter is not None:
            language[self.changes.augmenter.hide_language(rows, epoch)] = self.unknown_language
        return flat, offsets, language, codes

    def _encoded(self, read: tuple[np.ndarray, ...], fixed_width: int | None) -> dict[str, torch.Tensor]:
        flat, offsets, language, codes = read
        max_len = self.encoding.max_len
        input_ids, mask = encode_batch(flat, offsets, language, self.prefixes, max_len, fixed_width)
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(mask),
            "targets_seq2seq": torch.from_numpy(self._targets(codes)),
            "targets_linear": torch.from_numpy(codes),
        }

    def _targets(self, codes: np.ndarray) -> np.ndarray:
        """Token sequences of `codes` int64 [B, K]: BOS, the blocks, EOS; int64 [B, nb_blocks × block_size +
        2].
        """
        block = self.code_tokens.shape[1]
        targets = np.full((len(codes), self.nb_blocks * block + 2), PAD_IDX, dtype=np.int64)
        targets[:, 0], targets[:, -1] = BOS_IDX, EOS_IDX
        targets[:, 1 : 1 + self.max_codes * block] = self.code_tokens[codes].reshape(len(codes), -1)
        return targets

    def _shortened(self, targets: torch.Tensor) -> torch.Tensor:
        """Targets without blocks that are empty in every row; with `first_empty_block` one of these stays."""
        if not self.encoding.first_empty_block:
            return targets
        size = self.code_tokens.shape[1]
        begins = targets[:, 1:-1:size]  # the first token of each block
        blocks = min(self.nb_blocks, int((begins != PAD_IDX).sum(dim=1).max()) + 1)
        return torch.cat([targets[:, : 1 + blocks * size], targets[:, -1:]], dim=1)
