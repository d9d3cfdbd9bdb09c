"""Prepared arrays → batches."""

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from histocc.arrays import PreparedData, RowSet
from histocc.augment import Augmenter
from histocc.formatter import BOS_IDX, EOS_IDX, PAD_IDX, BlockyFormatter
from histocc.sampler import BatchPlan, EpochOrder, MicroBatchSampler
from histocc.text import UNKNOWN_LANGUAGE, encode_batch, language_table


def code_token_table(codes: list[str], formatter: BlockyFormatter) -> np.ndarray:
    """Tokens of each code, with a block of PAD at index −1 for «no code»; int64 [len(codes) + 1, block_size]."""
    table = np.full((len(codes) + 1, formatter.block_size), PAD_IDX, dtype=np.int64)
    for i, code in enumerate(codes):
        table[i] = formatter.encode_code(code)
    return table


class MicroBatches(Dataset):
    """One rank's micro-batches, asked for by (epoch, batch, micro-batch): a pure function of these and the settings.

    shuffle_seed: None keeps the order of the file (validation). augmenter: noise on the text, None for none.
    fixed_width: pad to this many positions instead of to the longest of the batch.
    """

    def __init__(self, rows: RowSet, plan: BatchPlan, rank: int, formatter: BlockyFormatter, data: PreparedData, *,
                 max_len: int = 128, shuffle_seed: int | None = None, augmenter: Augmenter | None = None,
                 fixed_width: int | None = None):
        self.rows, self.plan, self.rank, self.max_len = rows, plan, rank, max_len
        self.augmenter, self.fixed_width = augmenter, fixed_width
        self.order = None if shuffle_seed is None else EpochOrder(plan, shuffle_seed, rows.lengths)
        self.max_codes, self.nb_blocks = data.max_codes, formatter.max_num_codes
        self.prefixes = language_table(data.languages)
        self.unknown_language = data.languages.index(UNKNOWN_LANGUAGE)
        self.code_tokens = code_token_table(data.codes, formatter)

    def __len__(self) -> int:
        return len(MicroBatchSampler(self.plan))

    def __getitem__(self, index: tuple[int, int, int]) -> dict:
        """A batch: input_ids int64 [B, S], attention_mask bool [B, S], targets_seq2seq int64 [B, T], targets_linear
        int64 [B, K] (indices of the row's codes, −1 for none), weights float32 [B], and the plain numbers
        global_count (observations of the whole optimizer step, over all ranks) and last_micro_batch.

        A rank without rows in this batch gets one row of weight 0, so that it takes part in every collective.
        """
        epoch, batch, micro_batch = index
        positions = self.plan.positions(batch, self.rank, micro_batch)
        weight = 1.0 if len(positions) else 0.0
        if not len(positions):
            positions = np.array([batch * self.plan.total], dtype=np.int64)
        rows = positions
        if self.order is not None:
            rows = self.order.batch(epoch, batch)[positions - batch * self.plan.total]
        input_ids, mask = self._input(rows, epoch)
        codes = self.rows.codes[rows].astype(np.int64)                                        # [B, K]
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(mask),
            "targets_seq2seq": torch.from_numpy(self._targets(codes)),
            "targets_linear": torch.from_numpy(codes),
            "weights": torch.full((len(rows),), weight),
            "global_count": self.plan.batch_rows(batch),
            "last_micro_batch": micro_batch == self.plan.micro_batches(batch) - 1,
        }

    def _input(self, rows: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        flat, offsets = self.rows.texts(rows)
        language = self.rows.language[rows].astype(np.int64)
        if self.augmenter is not None:
            flat, offsets = self.augmenter.apply(flat, offsets, rows, epoch)
            language[self.augmenter.hide_language(rows, epoch)] = self.unknown_language
        return encode_batch(flat, offsets, language, self.prefixes, self.max_len, self.fixed_width)

    def _targets(self, codes: np.ndarray) -> np.ndarray:
        """Token sequences of `codes` int64 [B, K]: BOS, the blocks, EOS; int64 [B, nb_blocks × block_size + 2]."""
        block = self.code_tokens.shape[1]
        targets = np.full((len(codes), self.nb_blocks * block + 2), PAD_IDX, dtype=np.int64)
        targets[:, 0], targets[:, -1] = BOS_IDX, EOS_IDX
        targets[:, 1:1 + self.max_codes * block] = self.code_tokens[codes].reshape(len(codes), -1)
        return targets


class BatchLoader:
    """Iterates one rank's micro-batches from a position on: `for batch in loader.at(epoch, first_batch)`.

    Keyword arguments go to torch's DataLoader (num_workers, prefetch_factor, pin_memory, persistent_workers).
    """

    def __init__(self, dataset: MicroBatches, **loader_arguments):
        self.dataset, self.plan = dataset, dataset.plan
        self.sampler = MicroBatchSampler(self.plan)
        self.loader = DataLoader(dataset, batch_size=None, sampler=self.sampler, generator=torch.Generator(),
                                 **loader_arguments)

    def at(self, epoch: int, first_batch: int = 0) -> "BatchLoader":
        """Sets where the next iteration starts. Workers, persistent or not, are told with each index."""
        self.sampler.epoch, self.sampler.first_batch = epoch, first_batch
        return self

    def __iter__(self):
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.sampler)
