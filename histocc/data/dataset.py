"""Batches from prepared arrays."""

from dataclasses import dataclass

import numpy as np
import torch

from histocc.data.arrays import PreparedData, RowSet
from histocc.data.descriptions import Descriptions
from histocc.data.noise import Augmenter, noise_characters
from histocc.formatter import BOS_IDX, EOS_IDX, PAD_IDX, BlockyFormatter
from histocc.text import SEP_ID, UNKNOWN_LANGUAGE, encode_batch, language_table, padded_width
from histocc.trainer.batches import Rows


@dataclass(frozen=True)
class RowEncoding:
    """The settings for turning rows into tensors."""

    formatter: BlockyFormatter
    max_len: int = 128
    fixed_width: int | None = None  # positions, or None to pad to the longest row of the micro-batch
    first_empty_block: bool = False  # targets keep one empty block after those of the row with most codes


class TextRows(Rows):
    """Texts and codes in the form of the trainer: input_ids int64 [B, S], attention_mask bool [B, S],
    targets_seq2seq int64 [B, T], targets_linear int64 [B, K], the indices of the row's codes, −1 for none.
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
        # width by number of characters
        self.positions = np.array([encoding.fixed_width or padded_width(n, max_len) for n in range(max_len)])

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        return self.rows.lengths(numbers)

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        """Return the rows with this epoch's noise and descriptions."""
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
        """Return all character ids of inputs, except in words from other files, as sorted int64."""
        ids = [self.alphabet, self.prefixes[0].ravel(), [0, SEP_ID], noise_characters()]
        ids += [] if self.descriptions is None else [self.descriptions.flat]
        return np.unique(np.concatenate([np.asarray(part, dtype=np.int64) for part in ids]))

    def _targets(self, codes: np.ndarray) -> np.ndarray:
        """Return BOS, the blocks of `codes` int64 [B, K], EOS: int64 [B, blocks × block_size + 2]."""
        block = self.code_tokens.shape[1]
        targets = np.full((len(codes), self.nb_blocks * block + 2), PAD_IDX, dtype=np.int64)
        targets[:, 0], targets[:, -1] = BOS_IDX, EOS_IDX
        targets[:, 1 : 1 + self.max_codes * block] = self.code_tokens[codes].reshape(len(codes), -1)
        return targets

    def shortened(self, targets: torch.Tensor) -> torch.Tensor:
        """Return targets without blocks empty in all rows. `first_empty_block` keeps one."""
        if not self.encoding.first_empty_block:
            return targets
        size = self.code_tokens.shape[1]
        begins = targets[:, 1:-1:size]  # the first token of each block
        blocks = min(self.nb_blocks, int((begins != PAD_IDX).sum(dim=1).max()) + 1)
        return torch.cat([targets[:, : 1 + blocks * size], targets[:, -1:]], dim=1)
