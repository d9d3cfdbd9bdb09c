"""Prepared arrays → batches; on the way descriptions of codes are shown with some of the training texts."""

from dataclasses import dataclass

import numpy as np
import torch

from histocc.data.arrays import PreparedData, RowSet
from histocc.data.config import Descriptions as DescriptionFlags
from histocc.data.noise import Augmenter, noise_characters
from histocc.data.rows import language_name, read_columns
from histocc.data.tables import column_problems, table_format
from histocc.formatter import BOS_IDX, EOS_IDX, PAD_IDX, BlockyFormatter
from histocc.runtime.errors import UserError
from histocc.runtime.rng import chance, draw, streams
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

# ---- descriptions of codes, shown behind some of the training texts
#
# A text that gets one becomes, by the published template, `wine merchant [DESC: Working Proprietors
# (Wholesale Trade)]`. It names the answer, so only training texts get one, and only some of them.

CODE_COLUMNS = ("system_code", "hisco", "code")
TEXT_COLUMNS = ("description", "en_hisco_text", "text", "desc")


def find_columns(args: DescriptionFlags) -> list[str]:
    """Columns of a table of descriptions: code, text and, if it is named, language. Raises UserError if it
    lacks one.
    """
    path = args.descriptions_file or ""
    header = table_format(path).names
    columns = [
        args.descriptions_code_col or next((name for name in CODE_COLUMNS if name in header), ""),
        args.descriptions_text_col or next((name for name in TEXT_COLUMNS if name in header), ""),
    ]
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
    """What is put before and behind the text of each code and language, and how often."""

    seed: int
    probability: float
    keeps_text: bool  # whether the template holds the text itself
    numbers: np.ndarray  # int64 [codes + 1, languages], which description, −1 for none; last: no code
    flat: np.ndarray  # uint32: before the text, and behind it, of each description
    offsets: np.ndarray  # int64 [2 · descriptions + 1]

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
        is_shown = (shown >= 0) & chance(draw(streams(self.seed, epoch, rows), 0), self.probability)
        begins, sizes = np.zeros((2, len(rows), 3), dtype=np.int64)  # before the text, the text, behind it
        begins[:, 1], sizes[:, 1] = offsets[:-1], np.diff(offsets) * (self.keeps_text | ~is_shown)
        for piece in range(2):
            at = 2 * shown[is_shown] + piece
            begins[is_shown, 2 * piece] = len(flat) + self.offsets[at]
            sizes[is_shown, 2 * piece] = self.offsets[at + 1] - self.offsets[at]
        return texts_of_pieces(np.concatenate([flat, self.flat]), begins, sizes)


def load_descriptions(
    args: DescriptionFlags, data: PreparedData, formatter: BlockyFormatter, seed: int
) -> Descriptions | None:
    """What is asked for; None without --include-descriptions. Raises UserError."""
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
        at, number = place.get(formatter.repair(code)[0]), len(texts) // 2
        if at is None or not text:
            continue
        if (name := language_name("".join(language))) in data.languages:
            named[at, data.languages.index(name)] = number
        numbers[at, numbers[at] < 0] = number  # the first of its code
        texts += [code_points(part.replace("{desc}", clean(text))) for part in (before, behind)]
    for place_of_code, number in named.items():
        numbers[place_of_code] = number
    if not texts:
        raise UserError(
            f"--descriptions-file {args.descriptions_file}: none of the {len(data.codes):,} codes of the"
            f" data stands in column {columns[0]!r}"
        )
    return Descriptions(seed, args.description_prob, bool(occ), numbers, *join_texts(texts))


def read_descriptions(path: str, codes: list[str], formatter: BlockyFormatter) -> dict[str, str]:
    """Code → description, from a table of both. Raises UserError if it has no such columns or none of
    `codes`.
    """
    columns = find_columns(DescriptionFlags(descriptions_file=path))
    rows = reversed(read_columns(path, columns))
    texts = {formatter.repair(code)[0]: text for code, text in rows}  # the first of each code
    if not set(codes) & texts.keys():
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


class TextRows(Rows):
    """Texts and codes as the trainer takes rows: input_ids int64 [B, S], attention_mask bool [B, S],
    targets_seq2seq int64 [B, T], targets_linear int64 [B, K] (indices of the row's codes, −1 for none).
    """

    has_lengths = True
    groups_in_model = ("cpu",)  # see `histocc.model.layers.width_groups`

    def __init__(
        self,
        rows: RowSet,
        data: PreparedData,
        encoding: RowEncoding,
        augmenter: Augmenter | None = None,
        descriptions: Descriptions | None = None,
    ):
        formatter, max_len = encoding.formatter, encoding.max_len
        self.rows, self.encoding, self.augmenter, self.descriptions = rows, encoding, augmenter, descriptions
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
        """The rows with this epoch's noise and descriptions."""
        flat, offsets = self.rows.texts(numbers)
        language = self.rows.language[numbers].astype(np.int64)
        codes = self.rows.codes[numbers].astype(np.int64)  # [B, K]
        if self.augmenter is not None:
            flat, offsets = self.augmenter.apply(flat, offsets, numbers, epoch)
        if self.descriptions is not None:
            flat, offsets = self.descriptions.apply(flat, offsets, codes[:, 0], language, numbers, epoch)
        if self.augmenter is not None:
            language[self.augmenter.hide_language(numbers, epoch)] = self.unknown_language
        width, max_len = self.encoding.fixed_width, self.encoding.max_len
        input_ids, mask = encode_batch(flat, offsets, language, self.prefixes, max_len, width)
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(mask),
            "targets_seq2seq": torch.from_numpy(self._targets(codes)),
            "targets_linear": torch.from_numpy(codes),
        }

    def widths(self, batch: dict[str, torch.Tensor]) -> np.ndarray:
        return self.positions[batch["attention_mask"].sum(dim=1).numpy() - 2]

    def piece(self, batch: dict[str, torch.Tensor], kept: np.ndarray) -> dict[str, torch.Tensor]:
        width, rows = self.widths(batch)[kept].max(), torch.from_numpy(kept)
        piece = {name: value[rows] for name, value in batch.items()}
        for name in ("input_ids", "attention_mask"):
            piece[name] = piece[name][:, :width]
        return piece | {"targets_seq2seq": self.shortened(piece["targets_seq2seq"])}

    def characters(self) -> np.ndarray:
        """Every character id that an input can hold, but for words from other files; sorted int64."""
        ids = [self.alphabet, self.prefixes[0].ravel(), [0, SEP_ID], noise_characters()]
        ids += [] if self.descriptions is None else [self.descriptions.flat]
        return np.unique(np.concatenate([np.asarray(part, dtype=np.int64) for part in ids]))

    def _targets(self, codes: np.ndarray) -> np.ndarray:
        """BOS, the blocks of `codes` int64 [B, K] as tokens, EOS; int64 [B, blocks × block_size + 2]."""
        block = self.code_tokens.shape[1]
        targets = np.full((len(codes), self.nb_blocks * block + 2), PAD_IDX, dtype=np.int64)
        targets[:, 0], targets[:, -1] = BOS_IDX, EOS_IDX
        targets[:, 1 : 1 + self.max_codes * block] = self.code_tokens[codes].reshape(len(codes), -1)
        return targets

    def shortened(self, targets: torch.Tensor) -> torch.Tensor:
        """Targets without blocks that are empty in every row; with `first_empty_block` one of these stays."""
        if not self.encoding.first_empty_block:
            return targets
        size = self.code_tokens.shape[1]
        begins = targets[:, 1:-1:size]  # the first token of each block
        blocks = min(self.nb_blocks, int((begins != PAD_IDX).sum(dim=1).max()) + 1)
        return torch.cat([targets[:, : 1 + blocks * size], targets[:, -1:]], dim=1)
