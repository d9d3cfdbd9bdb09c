"""Prepared arrays → batches."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from histocc.data.arrays import PreparedData
from histocc.data.augment import Augmenter, noise_characters
from histocc.data.descriptions import Descriptions
from histocc.data.joined_rows import JoinedRows
from histocc.formatter import BOS_IDX, EOS_IDX, PAD_IDX, BlockyFormatter
from histocc.runtime.world import World
from histocc.text import SEP_ID, UNKNOWN_LANGUAGE, encode_batch, language_table, padded_width
from histocc.trainer.loading import Loader
from histocc.trainer.plan import BatchPlan, BatchSampler, EpochOrder, WindowOrder, cut_by_width


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


class Rows(Protocol):
    """What micro-batches are made of: a `RowSet`, or rows of one. language int [N], codes int [N, K]."""

    language: np.ndarray
    codes: np.ndarray

    def __len__(self) -> int: ...

    def lengths(self, rows: np.ndarray) -> np.ndarray: ...

    def texts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...


class MicroBatches(Dataset):
    """One rank's share of each global batch, asked for by (epoch, batch): a pure function of these and the
    settings.

    shuffle_seed: None is for validation, where order does not matter.
    """

    def __init__(
        self,
        rows: Rows,
        plan: BatchPlan,
        rank: int,
        data: PreparedData,
        encoding: RowEncoding,
        *,
        shuffle_seed: int | None = None,
        changes: TextChanges = TextChanges(),
    ):
        formatter, max_len = encoding.formatter, encoding.max_len
        self.rows, self.plan, self.rank, self.encoding, self.changes = rows, plan, rank, encoding, changes
        self.order = (
            WindowOrder(plan, rows.lengths)
            if shuffle_seed is None
            else EpochOrder(plan, shuffle_seed, rows.lengths)
        )
        self.max_codes, self.nb_blocks = data.max_codes, formatter.max_num_codes
        self.prefixes, self.alphabet = language_table(data.languages), data.alphabet
        self.unknown_language = data.languages.index(UNKNOWN_LANGUAGE)
        self.code_tokens = code_token_table(data.codes, formatter)
        # by characters
        self.widths = np.array([encoding.fixed_width or padded_width(n, max_len) for n in range(max_len)])

    def __len__(self) -> int:
        return self.plan.steps_per_epoch

    def __getitem__(self, index: tuple[int, int]) -> list[dict]:
        """Micro-batches of similar length: input_ids int64 [B, S], attention_mask bool [B, S],
        targets_seq2seq int64 [B, T], targets_linear int64 [B, K] (indices of the row's codes, −1 for none),
        weights float32 [B], rows int64 [B] (which ones they are), and the plain numbers global_count
        (rows of the whole optimizer step, over all ranks) and last_micro_batch.

        A micro-batch without rows gets one of weight 0, so that the rank takes part in every collective.
        """
        epoch, batch = index
        rows = self.order.batch(epoch, batch)
        share = rows[self.plan.rank_positions(batch, self.rank)]
        weight = 1.0 if len(share) else 0.0
        share = share if len(share) else rows[:1]
        flat, offsets, language, codes = self._texts_and_codes(share, epoch)
        input_ids, mask = encode_batch(
            flat, offsets, language, self.prefixes, self.encoding.max_len, self.encoding.fixed_width
        )
        characters = mask.sum(axis=1) - 2  # [B]
        width = self.widths[characters]
        targets, parts = self._targets(codes), self.plan.micro_batches(batch)
        pieces = cut_by_width(width, parts, self.plan.micro_batch_size)
        return [
            {
                "input_ids": torch.from_numpy(input_ids[kept, : width[kept].max()]),
                "attention_mask": torch.from_numpy(mask[kept, : width[kept].max()]),
                "targets_seq2seq": torch.from_numpy(self._shortened(targets[kept], codes[kept])),
                "targets_linear": torch.from_numpy(codes[kept]),
                "weights": torch.full((len(kept),), weight if len(piece) else 0.0),
                "rows": torch.from_numpy(share[kept]),
                "global_count": self.plan.batch_rows(batch),
                "last_micro_batch": number == parts - 1,
            }
            for number, piece in enumerate(pieces)
            for kept in [piece if len(piece) else np.zeros(1, dtype=np.int64)]
        ]

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

    def _texts_and_codes(self, rows: np.ndarray, epoch: int) -> tuple[np.ndarray, ...]:
        """(code points uint32 [N], offsets int64 [B + 1], numbers of the languages int64 [B], codes int64
        [B, K]) with this epoch's joined rows and noise."""
        flat, offsets = self.rows.texts(rows)
        language, codes = self.rows.language[rows].astype(np.int64), self.rows.codes[rows].astype(np.int64)
        if self.changes.joined is not None:
            flat, offsets, codes = self.changes.joined.apply(flat, offsets, codes, language, rows, epoch)
        if self.changes.augmenter is not None:
            flat, offsets = self.changes.augmenter.apply(flat, offsets, rows, epoch)
        if self.changes.descriptions is not None:
            flat, offsets = self.changes.descriptions.apply(flat, offsets, codes[:, 0], language, rows, epoch)
        if self.changes.augmenter is not None:
            language[self.changes.augmenter.hide_language(rows, epoch)] = self.unknown_language
        return flat, offsets, language, codes

    def _targets(self, codes: np.ndarray) -> np.ndarray:
        """Token sequences of `codes` int64 [B, K]: BOS, the blocks, EOS; int64 [B, nb_blocks × block_size +
        2].
        """
        block = self.code_tokens.shape[1]
        targets = np.full((len(codes), self.nb_blocks * block + 2), PAD_IDX, dtype=np.int64)
        targets[:, 0], targets[:, -1] = BOS_IDX, EOS_IDX
        targets[:, 1 : 1 + self.max_codes * block] = self.code_tokens[codes].reshape(len(codes), -1)
        return targets

    def _shortened(self, targets: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Targets without blocks that are empty in every row; with `first_empty_block` one of these stays."""
        if not self.encoding.first_empty_block:
            return targets
        blocks = min(self.nb_blocks, int((codes >= 0).sum(axis=1).max()) + 1)
        return np.concatenate([targets[:, : 1 + blocks * self.code_tokens.shape[1]], targets[:, -1:]], axis=1)


class BatchLoader:
    """Iterates one rank's micro-batches from a position on: `for batch in loader.at(epoch, first_batch)`.

    world: whose limit and signals end a wait for loading processes. Keyword arguments go to torch's
    DataLoader (num_workers, prefetch_factor, pin_memory, persistent_workers).
    """

    def __init__(self, dataset: MicroBatches, world: World | None = None, **loader_arguments):
        self.dataset, self.plan, world = dataset, dataset.plan, world or World()
        self.sampler = BatchSampler(self.plan)
        self.loader = Loader(
            dataset, self.sampler, world.patience, world.stop, world.size == 1, **loader_arguments
        )

    def at(self, epoch: int, first_batch: int = 0) -> "BatchLoader":
        """Sets where the next iteration starts. Workers, persistent or not, are told with each index."""
        self.sampler.epoch, self.sampler.first_batch = epoch, first_batch
        return self

    def __iter__(self):
        for share in self.loader:
            yield from share

    def __len__(self) -> int:
        """Optimizer steps from the position on."""
        return len(self.sampler)
