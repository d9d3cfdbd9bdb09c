"""What a new model's n-grams start from: how often each occurs in the training texts, and weights that
were fitted to the texts alone.

An encoder learns for minutes what a linear model on n-grams knows after seconds. So before the first step
the n-grams and both decoders are trained without the encoder, on the texts as they are: noise makes them
worse here. It is a part of the initial weights: computed by rank 0 on its CPU with a fixed number of
threads, the same for any number of processes, and never again when a run is resumed.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from histocc.data.arrays import PreparedData, RowSet, text_keys
from histocc.formatter import PAD_IDX
from histocc.model.loss import LossMixer
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.model.ngrams import Ngrams, hash_ngrams
from histocc.runtime.rng import mix
from histocc.seq2seq_mixer_engine import more_entries, multi_hot, row_losses
from histocc.text import encode_batch, language_table
from histocc.trainer.batches import MicroBatches
from histocc.trainer.loop import CLIP_NORM
from histocc.trainer.schedule import linear_factor, set_learning_rate

MAX_ROWS, MAX_TEXTS = 1 << 22, 1 << 17  # rows looked at, and distinct texts counted, for frequencies
MAX_SEEN, BATCH = 200_000, 64  # rows that the fit of both decoders sees at size tiny, and in one step
TINY_WIDTH = 128
LINEAR_PASSES = 10  # of the first part
DROPOUT = 0.3  # share of the n-grams that are left out
RATE, RATE_WITH_DECODER, DECODER_RATE = 0.01, 0.003, 0.002
THREADS = 1  # operations are small: two are 1.5 times as fast on idle cores, many times slower on busy ones
_CHUNK = 4096


def ngrams_of(model: Seq2SeqMixerOccCANINE) -> Ngrams:
    """Those of a model that has some."""
    assert model.ngrams is not None
    return model.ngrams


def _spread(rows: np.ndarray, most: int) -> np.ndarray:
    """At most `most` of the row numbers, evenly spread."""
    return rows if len(rows) <= most else rows[np.arange(most) * len(rows) // most]


class TextNgrams:
    """The n-grams of distinct training texts. texts: their number; flat: hashes of all texts, one text after
    the other, int64; counts: of each text, int64 [texts].
    """

    def __init__(self, data: PreparedData, max_len: int, check: Callable[[], None] = lambda: None):
        """check: called again and again, may raise to stop."""
        train, table = data.train, language_table(data.languages)
        sample = _spread(np.arange(len(train)), MAX_ROWS)
        _, first = np.unique(text_keys(train.text_hash[sample], train.language[sample]), return_index=True)
        distinct = _spread(sample[np.sort(first)], MAX_TEXTS)
        hashes, counts = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for start in range(0, len(distinct), _CHUNK):
            check()
            rows = distinct[start : start + _CHUNK]
            ids, _ = encode_batch(*train.texts(rows), train.language[rows].astype(np.int64), table, max_len)
            hashed, exist, _ = hash_ngrams(torch.from_numpy(ids))
            hashes.append(hashed[exist].numpy())
            counts.append(exist.sum((1, 2)).numpy())
        self.texts, self.flat, self.counts = len(distinct), np.concatenate(hashes), np.concatenate(counts)

    def weights(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """(hashes of the `most` n-grams that most texts have, increasing, int64 [R]; their inverse
        document frequency, float32 [R]): ln((1 + texts) / (1 + texts with it)) + 1.
        """
        text = np.repeat(np.arange(self.texts), self.counts)
        hashes, place = np.unique(self.flat, return_inverse=True)
        pairs = np.unique(text * len(hashes) + place)
        frequency = np.bincount(pairs % max(1, len(hashes)), minlength=len(hashes))
        kept = np.sort(np.argsort(-frequency, kind="stable")[:most])
        return hashes[kept], (np.log((1 + self.texts) / (1 + frequency[kept])) + 1).astype(np.float32)


class DistinctRows:
    """Training rows of which none has text, language and codes of another, read like a `RowSet`; `weight`
    float32 [N]: the root of how often each occurs, 1 on average.
    """

    def __init__(self, train: RowSet):
        pair = text_keys(train.text_hash, train.language)
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

    def teacher_of(self, rows: np.ndarray) -> np.ndarray | None:
        return self.train.teacher_of(self.index[rows])


def fit(
    model: Seq2SeqMixerOccCANINE,
    batches: MicroBatches,
    weights: Tensor,
    loss_fn: LossMixer,
    passes: int,
    seed: int,
    check: Callable[[str, int, int], None] = lambda part, step, steps: None,
) -> float:
    """Trains the n-grams of `model`, its seq2seq decoder and the bias of its linear decoder without the
    encoder, in place, on the CPU in float32: first with the linear decoder alone in LINEAR_PASSES, each of
    which takes a sixth of one with both, then with both in `passes`. At most MAX_SEEN rows are seen in either
    part, and the fewer the wider the decoder. Returns the seconds.

    Args:
        batches: of `DistinctRows` with these `weights`.
        check: called before each step with the name of its part, its number there and how many steps the part
            has; may raise to stop.
    """
    began, threads, state = time.perf_counter(), torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(THREADS)  # the same to the last bit, whatever the number of processes and threads
    torch.manual_seed(seed % 2**63)
    model.train()
    ngrams = ngrams_of(model)
    dropout, ngrams.dropout, ngrams.sparse = ngrams.dropout, DROPOUT, True
    most = MAX_SEEN * TINY_WIDTH // max(TINY_WIDTH, model.config.hidden_size)
    fast = [ngrams.linear.weight, model.linear_decoder.bias]
    slow = [ngrams.word_to_memory.weight, ngrams.text_to_memory.weight, *model.decoder.parameters()]
    first = 0  # step
    try:
        for part, losses, count, others, rate in (
            ("linear decoder", linear_losses, LINEAR_PASSES, [], RATE),
            ("both decoders", both_losses, passes, slow, RATE_WITH_DECODER),
        ):
            steps = max(1, min(count * len(batches), most // batches.plan.global_batch_size))
            groups = [{"params": fast, "lr": rate}]
            if others:
                groups.append({"params": others, "lr": DECODER_RATE})
            optimizers = [
                torch.optim.SparseAdam([ngrams.table.weight], lr=rate),
                torch.optim.Adam(groups, fused=True),
            ]
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["initial_lr"] = group["lr"]
            for step in range(steps):
                check(part, step, steps)
                for batch in batches[divmod(first + step, len(batches))]:
                    loss = losses(model, loss_fn, batch) * batch["weights"] * weights[batch["rows"]]
                    (loss.sum() / batch["global_count"]).backward()
                torch.nn.utils.clip_grad_norm_(others, CLIP_NORM)
                for optimizer in optimizers:
                    set_learning_rate(optimizer, linear_factor(step, steps // 20, steps))
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            first += steps
    finally:
        ngrams.dropout, ngrams.sparse = dropout, False
        model.zero_grad(set_to_none=True)
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    return time.perf_counter() - began


def linear_losses(model: Seq2SeqMixerOccCANINE, loss_fn: LossMixer, batch: dict) -> Tensor:
    """Loss of the linear decoder from n-grams alone, [B]."""
    ngrams = ngrams_of(model)
    text, _, _ = ngrams.by_word(batch["input_ids"], batch["attention_mask"])
    logits = ngrams.linear(text) + model.linear_decoder.bias
    target = multi_hot(batch["targets_linear"], logits.shape[1], logits.dtype)
    return loss_fn.linear(logits, target, **more_entries(loss_fn, batch))


def both_losses(model: Seq2SeqMixerOccCANINE, loss_fn: LossMixer, batch: dict) -> Tensor:
    """Sum of both decoders' losses from n-grams alone, [B]."""
    losses = row_losses(loss_fn, without_encoder(model, batch), batch)
    return losses["loss_seq2seq"] + losses["loss_linear"]


def without_encoder(model: Seq2SeqMixerOccCANINE, batch: dict) -> tuple[Tensor, Tensor]:
    """What `model` gives from n-grams alone, teacher-forced: (logits [B, T − 1, V], linear logits [B, C])."""
    looked_at = batch["attention_mask"] if model.memory_mask else torch.ones_like(batch["attention_mask"])
    ngrams = ngrams_of(model)
    text, memory, scores = ngrams.by_word(batch["input_ids"], looked_at)
    target = batch["targets_seq2seq"][:, :-1].long()
    logits = model.decoder(memory, target, None, target == PAD_IDX, memory_scores=scores)
    return logits, ngrams.linear(text) + model.linear_decoder.bias
