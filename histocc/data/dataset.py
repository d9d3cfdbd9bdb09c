"""Prepared arrays → batches; on the way training rows are joined, and descriptions of codes shown."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from histocc.data.arrays import PreparedData
from histocc.data.config import Descriptions as DescriptionFlags
from histocc.data.noise import Augmenter, noise_characters
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
    texts_of_pieces,
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

    A row stays alone if both have the same code, if the joined text would not fit into `max_len` positions
    (also with its language hidden), or if the row itself is drawn, as in a language that has no other. Needs
    8 bytes for each row with one code, in every process; little is sent to a loading process.

    Args:
        data: prepared rows; their training part is joined.
        seed: of all draws.
        probability: that a row is to be joined, 0…1.
        max_len: most positions of an input.

    Raises:
        ValueError: a probability out of range, or data whose rows have room for one code alone.
    """

    def __init__(self, data: PreparedData, seed: int, probability: float, max_len: int = 128):
        if not 0 <= probability <= 1:
            raise ValueError(f"the probability of joining must be between 0 and 1, not {probability}")
        if data.max_codes < 2:
            raise ValueError("rows of this data have room for one code, joined ones have two")
        self.rows, self.languages = data.train, len(data.languages)
        self.seed, self.probability = seed, probability
        clean = ascii_lower if data.clean_text == ASCII_LOWER else str
        words = [code_points(clean(f" {AND.get(name, AND[UNKNOWN_LANGUAGE])} ")) for name in data.languages]
        self.words, self.word_offsets = join_texts(words)
        before = language_table(data.languages)[1]  # positions, int64 [L]
        self.room = max_len - 1 - np.maximum(before, before[data.languages.index(UNKNOWN_LANGUAGE)])

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_by_language"}

    @cached_property
    def _by_language(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows with one code, language by language, int64 [M]; where each language begins, int64 [L + 1])"""
        starts = range(0, len(self.rows), _CHUNK)
        alone = [at + np.flatnonzero(_one_code(self.rows.codes[at : at + _CHUNK])) for at in starts]
        rows = np.concatenate([np.zeros(0, dtype=np.int64), *alone])
        language = np.asarray(self.rows.language)[rows]
        begins = np.concatenate([[0], np.cumsum(np.bincount(language, minlength=self.languages))])
        return rows[np.argsort(language, kind="stable")], begins

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
        """B training rows, some of them joined with another one: texts (flat, offsets) and codes int64 [B,
        K], −1 behind the last. language, rows: int64 [B]. The arguments stay as they are.
        """
        stream = streams(self.seed, epoch, rows)
        joined = np.flatnonzero(chance(draw(stream, _JOINED), self.probability) & _one_code(codes))
        of_language, starts = self._by_language
        kind = language[joined]
        choice = below(draw(stream[joined], _OTHER), starts[kind + 1] - starts[kind])
        others = of_language[starts[kind] + choice]
        second = self.rows.codes[others, 0].astype(np.int64)
        lengths, between = np.diff(offsets), np.diff(self.word_offsets)
        fits = lengths[joined] + between[kind] + self.rows.lengths(others) <= self.room[kind]
        kept = fits & (second != codes[joined, 0])
        joined, kind, others = joined[kept], kind[kept], others[kept]
        texts, text_offsets = self.rows.texts(others)
        begins, sizes = np.zeros((2, len(rows), 3), dtype=np.int64)
        begins[:, 0], sizes[:, 0] = offsets[:-1], lengths
        begins[joined, 1], sizes[joined, 1] = len(flat) + self.word_offsets[kind], between[kind]
        begins[joined, 2] = len(flat) + len(self.words) + text_offsets[:-1]
        sizes[joined, 2] = np.diff(text_offsets)
        codes = codes.copy()
        codes[joined, 1] = second[kept]
        return *texts_of_pieces(np.concatenate([flat, self.words, texts]), begins, sizes), codes


def _one_code(codes: np.ndarray) -> np.ndarray:
    """Which rows of `codes` int [B, K] have exactly one; bool [B]."""
    return (codes[:, 0] >= 0) & (codes[:, 1] < 0)


# ---- descriptions of codes, shown behind some of the training texts
#
# A text that gets one becomes, by the published template, `wine merchant [DESC: Working Proprietors
# (Wholesale Trade)]`. It names the answer, so only training texts get one, and only some of them.

CODE_COLUMNS = ("system_code", "hisco", "code")
TEXT_COLUMNS = ("description", "en_hisco_text", "text", "desc")


def find_columns(args: DescriptionFlags, required: bool = True) -> list[str]:
    """Columns of a table of descriptions: code, text and, if it is named, language. Raises UserError if it
    lacks one; without `required` there are none then.
    """
    path = args.descriptions_file or ""
    header = read_header(path)[0]
    columns = [
        name or next((name for name in usual if name in header), "")
        for name, usual in (
            (args.descriptions_code_col, CODE_COLUMNS),
            (args.descriptions_text_col, TEXT_COLUMNS),
        )
    ]
    if "" in columns and not required:
        return []
    if "" in columns:
        raise UserError(
            f"{path}: needs a column of codes ({', '.join(CODE_COLUMNS)}) and one of descriptions"
            f" ({', '.join(TEXT_COLUMNS)}); it has {', '.join(map(repr, header))}"
        )
    columns += [args.descriptions_lang_col] if args.descriptions_lang_col else []
    if problems := column_problems(path, header, columns):
        raise UserError("\n  ".join(problems))
    return columns


@dataclass(frozen=True)
class Descriptions:
    """What is shown for each code and language, and to which texts."""

    seed: int
    probability: float
    template: list  # pieces as code points, None the text, "desc" the description
    numbers: np.ndarray  # int64 [codes + 1, languages], which description, −1 for none; last: no code
    flat: np.ndarray  # of the descriptions
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
        (codes, languages, rows: int64 [B]); a pure function of (seed, epoch, row).
        """
        shown = self.numbers[codes, languages]  # [B]
        shown = np.where(chance(draw(streams(self.seed, epoch, rows), 0), self.probability), shown, -1)
        pool, begins, sizes = [flat, self.flat], [], []
        end, is_shown, lengths = len(flat) + len(self.flat), shown >= 0, np.diff(offsets)
        for piece in self.template:
            if piece is None:
                begins.append(offsets[:-1])
                sizes.append(lengths)
            elif isinstance(piece, str):
                begins.append(len(flat) + self.offsets[shown])
                sizes.append(is_shown * (self.offsets[shown + 1] - self.offsets[shown]))
            else:
                pool.append(piece)
                begins.append(np.full(len(rows), end))
                sizes.append(is_shown * len(piece))
                end += len(piece)
        if not any(piece is None for piece in self.template):  # a template without {occ}
            begins.append(offsets[:-1])
            sizes.append(~is_shown * lengths)
        return texts_of_pieces(np.concatenate(pool), np.stack(begins, axis=1), np.stack(sizes, axis=1))


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
    for place_of_code, number in named.items():
        numbers[place_of_code] = number
    if not texts:
        raise UserError(
            f"--descriptions-file {args.descriptions_file}: none of the {len(data.codes):,} codes of the"
            f" data stands in column {columns[0]!r}"
        )
    clean = ascii_lower if data.clean_text == ASCII_LOWER else str
    template = [
        {"{occ}": None, "{desc}": "desc"}.get(piece, code_points(clean(piece)))
        for piece in re.split(r"(\{occ\}|\{desc\})", args.description_template)
        if piece
    ]
    return Descriptions(seed, args.description_prob, template, numbers, *join_texts(texts))


def read_descriptions(
    path: str, codes: list[str], formatter: BlockyFormatter, required: bool = True
) -> dict[str, str]:
    """Code → description, from a table of both. Raises UserError if it has no such columns or none of
    `codes`; without `required` that is no description.
    """
    columns = find_columns(DescriptionFlags(descriptions_file=path), required)
    rows = read_columns(path, columns) if columns else []
    texts = {formatter.repair(code)[0]: text for code, text in reversed(rows)}  # the first of each code
    if required and not set(codes) & texts.keys():
        raise UserError(
            f"--descriptions {path}: none of the {len(codes):,} codes of the model stands in column"
            f" {columns[0]!r}"
        )
    return texts


# ---- batches


@dataclass(frozen=True)
class RowEncoding:
    """How rows become tensors."""

    formatter: BlockyFormatter
    max_len: int = 128
    fixed_width: int | None = None  # positions, instead of padding to the longest of the micro-batch
    first_empty_block: bool = False  # targets end with that of the row that has most codes


@dataclass(frozen=True)
class TextChanges:
    """What is done to training texts, in this order; None for nothing."""

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
    groups_in_model = ("cpu",)  # see `histocc.model.layers.width_groups`

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
        no_code = np.full(formatter.block_size, PAD_IDX, dtype=np.int64)  # index −1
        self.code_tokens = np.stack([*map(formatter.encode_code, data.codes), no_code])
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
        piece = {name: value[rows] for name, value in batch.items()}
        for name in ("input_ids", "attention_mask"):
            piece[name] = piece[name][:, :width]
        return piece | {"targets_seq2seq": self._shortened(piece["targets_seq2seq"])}

    def characters(self) -> np.ndarray:
        """Every character id that an input can hold, but for words from other files; sorted int64."""
        ids = [self.alphabet, self.prefixes[0].ravel(), [0, SEP_ID], noise_characters()]
        if (descriptions := self.changes.descriptions) is not None:
            ids += [descriptions.flat]
            ids += [piece for piece in descriptions.template if isinstance(piece, np.ndarray)]
        if self.changes.joined is not None:
            ids.append(self.changes.joined.characters())
        return np.unique(np.concatenate([np.asarray(part, dtype=np.int64) for part in ids]))

    def _read(self, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """(code points uint32 [N], offsets int64 [B + 1], numbers of the languages int64 [B], codes int64
        [B, K])."""
        language, codes = self.rows.language[rows].astype(np.int64), self.rows.codes[rows].astype(np.int64)
        return *self.rows.texts(rows), language, codes

    def _changed(self, read: tuple[np.ndarray, ...], rows: np.ndarray, epoch: int) -> tuple[np.ndarray, ...]:
        """The same with this epoch's joined rows and noise."""
        (flat, offsets, language, codes), changes = read, self.changes
        if changes.joined is not None:
            flat, offsets, codes = changes.joined.apply(flat, offsets, codes, language, rows, epoch)
        if changes.augmenter is not None:
            flat, offsets = changes.augmenter.apply(flat, offsets, rows, epoch)
        if changes.descriptions is not None:
            flat, offsets = changes.descriptions.apply(flat, offsets, codes[:, 0], language, rows, epoch)
        if changes.augmenter is not None:
            language[changes.augmenter.hide_language(rows, epoch)] = self.unknown_language
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
        """BOS, the blocks of `codes` int64 [B, K] as tokens, EOS; int64 [B, blocks × block_size + 2]."""
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
