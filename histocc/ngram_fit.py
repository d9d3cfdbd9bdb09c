"""What a new model's n-grams start from: how often each occurs in the training texts, and weights that
were fitted to the texts alone.

An encoder learns for minutes what a linear model on n-grams knows after seconds. So before the first step
the n-grams and both decoders are trained without the encoder. It is a part of the initial weights:
computed by rank 0 on its CPU with a fixed number of threads, the same for any number of processes, and
never again when a run is resumed.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from histocc.arrays import PreparedData, RowSet
from histocc.counter_rng import mix
from histocc.dataset import MicroBatches
from histocc.loss import LossMixer
from histocc.lr_schedule import linear_factor
from histocc.mixer import Seq2SeqMixerOccCANINE
from histocc.ngrams import NgramHasher
from histocc.seq2seq_mixer_engine import CLIP_NORM, row_losses
from histocc.text import encode_batch, language_table

MOST_COUNTED = 1 << 20  # rows that are looked at for frequencies
MOST_SHOWN, BATCH = 60_000, 64  # rows that the fit sees, and in one step
DROPOUT = 0.3  # share of the n-grams that are left out
RATE, DECODER_RATE = 0.01, 0.002
THREADS = 2
_CHUNK = 4096


def _spread(rows: np.ndarray, most: int) -> np.ndarray:
    """At most `most` of the row numbers, evenly spread."""
    return rows if len(rows) <= most else rows[np.arange(most) * len(rows) // most]


class TextNgrams:
    """The n-grams of distinct training texts. rows: number of each text's first row, int64 [N]; flat:
    hashes of all texts, one after the other, int64; offsets: int64 [N + 1]."""

    def __init__(self, data: PreparedData, max_len: int):
        train = data.train
        looked_at = _spread(np.arange(len(train)), MOST_COUNTED)
        _, first = np.unique(np.asarray(train.text_hash[looked_at]), return_index=True)
        self.rows = looked_at[np.sort(first)]
        table, hasher = language_table(data.languages), NgramHasher()
        hashes, counts = [], []
        for start in range(0, len(self.rows), _CHUNK):
            rows = self.rows[start : start + _CHUNK]
            ids, _ = encode_batch(*train.texts(rows), train.language[rows].astype(np.int64), table, max_len)
            found, there, _ = hasher(torch.from_numpy(ids))
            hashes.append(found[there].numpy())
            counts.append(there.sum((1, 2)).numpy())
        self.flat = np.concatenate(hashes) if hashes else np.zeros(0, dtype=np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts) if counts else [])]).astype(
            np.int64
        )

    def weights(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """(hashes of the `most` n-grams that most texts have, increasing, int64 [R]; their inverse
        document frequency, float32 [R]): ln((1 + texts) / (1 + texts with it)) + 1."""
        text = np.repeat(np.arange(len(self.rows)), np.diff(self.offsets))
        hashes, place = np.unique(self.flat, return_inverse=True)
        pairs = np.unique(text * len(hashes) + place)
        frequency = np.bincount(pairs % max(1, len(hashes)), minlength=len(hashes))
        kept = np.sort(np.argsort(-frequency, kind="stable")[:most])
        return hashes[kept], (np.log((1 + len(self.rows)) / (1 + frequency[kept])) + 1).astype(np.float32)


class DistinctRows:
    """Training rows of which none has the text and the codes of another, read like a `RowSet`; `weight`
    float32 [N]: the root of how often each occurs, 1 on average."""

    def __init__(self, train: RowSet):
        pair = np.asarray(train.text_hash).copy()
        for column in np.sort(np.asarray(train.codes), axis=1).astype(np.uint64).T:
            pair = mix(pair ^ mix(column))
        _, first, count = np.unique(pair, return_index=True, return_counts=True)
        order = np.argsort(first)
        self.train, self.index = train, first[order]
        weight = np.sqrt(count[order])
        self.weight = torch.from_numpy((weight / weight.mean()).astype(np.float32))
        self.language, self.codes = train.language[self.index], train.codes[self.index]

    def __len__(self) -> int:
        return len(self.index)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        return self.train.lengths(self.index[rows])

    def texts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.train.texts(self.index[rows])


def fit(
    model: Seq2SeqMixerOccCANINE,
    batches: MicroBatches,
    loss_fn: LossMixer,
    passes: int,
    seed: int,
    check: Callable[[], None] = lambda: None,
) -> float:
    """Trains the n-grams of `model`, its seq2seq decoder and the bias of its linear decoder on `batches`
    of `DistinctRows`, without the encoder, in place, on the CPU in float32. passes: over the rows, of
    which at most MOST_SHOWN are seen; check: called before each step, may raise to stop. Returns the
    seconds."""
    began, threads, state = time.perf_counter(), torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(THREADS)  # the same to the last bit, whatever the number of processes and threads
    torch.manual_seed(seed % 2**63)
    model.train()
    dropout, model.ngrams.dropout, model.ngrams.sparse = model.ngrams.dropout, DROPOUT, True
    try:
        _fit(model, batches, loss_fn, passes, check)
    finally:
        model.ngrams.dropout, model.ngrams.sparse = dropout, False
        model.zero_grad(set_to_none=True)
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    return time.perf_counter() - began


def _fit(
    model: Seq2SeqMixerOccCANINE,
    batches: MicroBatches,
    loss_fn: LossMixer,
    passes: int,
    check: Callable[[], None],
) -> None:
    ngrams = model.ngrams
    fast = [ngrams.linear.weight, model.linear_decoder.bias]
    slow = [ngrams.word_to_memory.weight, ngrams.text_to_memory.weight, *model.decoder.parameters()]
    optimizers = [
        torch.optim.SparseAdam([ngrams.table.weight], lr=RATE),
        torch.optim.Adam([{"params": fast, "lr": RATE}, {"params": slow, "lr": DECODER_RATE}]),
    ]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    steps = max(1, min(passes * len(batches), MOST_SHOWN // batches.plan.total))
    for step in range(steps):
        check()
        for group, peak in zip(groups, peaks):
            group["lr"] = peak * linear_factor(step, steps // 20, steps)
        for batch in batches[divmod(step, len(batches))]:
            losses = row_losses(loss_fn, without_encoder(model, batch), batch)
            loss = (
                (losses["loss_seq2seq"] + losses["loss_linear"])
                * batch["weights"]
                * batches.rows.weight[batch["rows"]]
            )
            (loss.sum() / batch["global_count"]).backward()
        torch.nn.utils.clip_grad_norm_(slow, CLIP_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def without_encoder(model: Seq2SeqMixerOccCANINE, batch: dict) -> tuple[Tensor, Tensor]:
    """What `model` gives from n-grams alone, teacher-forced: (logits [B, T − 1, V], linear logits [B, C])."""
    text, memory = model.ngrams(batch["input_ids"])
    target = batch["targets_seq2seq"][:, :-1].long()
    logits = model.decode(memory, target, model.memory_padding_mask(batch["attention_mask"]))
    return logits, model.ngrams.linear(text) + model.linear_decoder.bias
