"""Prepared arrays → batches."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from histocc.data.arrays import PreparedData
from histocc.data.augment import Augmenter, noise_characters
from histocc.data.descriptions import Descriptions
from histocc.data.joined_rows import JoinedRows
from histocc.formatter import BOS_IDX, EOS_IDX, PAD_IDX, BlockyFormatter
from histocc.text import SEP_ID, UNKNOWN_LANGUAGE, encode_batch, language_table, padded_width
from histocc.trainer.batches import Rows


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
        self.longest_language = max(map(len, data.languages))
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

    def widest(self, numbers: np.ndarray, limit: bool) -> dict[str, torch.Tensor]:
        max_len = self.encoding.max_len
        everyone = np.arange(len(self.rows))
        longest = int(self.rows.lengths(everyone).max()) + self.longest_language + len("[SEP]")
        width = max_len if limit else padded_width(min(longest, max_len - 2), max_len)
        return self._encoded(self._read(numbers), self.encoding.fixed_width or width)

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
