"""New n-grams: their choice, and their fit before a run.

An encoder learns for minutes what a linear model on n-grams knows after seconds. So before the first step of
a run from scratch, its n-grams and both decoders are trained without the encoder, on the texts as they are,
since noise makes them worse here. The linear decoder comes first, in seconds; then both decoders, or the
other one alone if rows are many. Each part goes through the ordinary training loop, in one thread of rank 0;
the n-grams of a text are computed once. If rows are few, ridge regression finds more than steps do: its
logits are added.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from histocc.data.arrays import JoinedRows, PreparedData, RowSet, SomeRows, text_keys, thinned
from histocc.data.config import AUTO
from histocc.data.dataset import RowEncoding, TextRows
from histocc.data.prepare import nothing
from histocc.formatter import PAD_IDX, BlockyFormatter
from histocc.job.config import FEW_ROWS, JobConfig, is_fit_alone, is_fitted
from histocc.model.confidence import MIN_TEXTS
from histocc.model.loss import LossMixer, loss_of_rows
from histocc.model.mixer import NGRAMS as NGRAMS_ALONE
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.model.ngrams import PATTERNS, Ngrams, NoEncoder, hash_ngrams
from histocc.runtime import checkpoint
from histocc.runtime.config import differing
from histocc.runtime.device import Precision, settings_of_torch
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles
from histocc.runtime.log import Stage, duration
from histocc.runtime.rng import NGRAMS, chance, derived_seed, draw, mix, streams
from histocc.runtime.signals import Stopped, stop_asked
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import multi_hot
from histocc.text import encode_batch, language_table
from histocc.trainer import loop
from histocc.trainer.batches import BatchLoader, BatchPlan, MicroBatches, Rows
from histocc.trainer.estimate import seconds_of_step
from histocc.trainer.log import RunLog, log_columns
from histocc.trainer.schedule import linear_factor

FILE = "ngrams.bin"  # progress of the fit, in the folder of a run until there is a checkpoint
KIND = "fit of n-grams"  # the entry "kind" in FILE
MAX_TEXTS = 3 << 16  # distinct texts that are counted and fitted
CHUNK = 4096  # texts that are hashed at once
MIN_STEPS, MIN_BATCH = 40, 16  # steps of a pass; batches of few rows are smaller, at least MIN_BATCH
MANY_ROWS = 20_000  # from this number on, a part has other learning rates
MAX_RIDGE = 1 << 25  # most weights of ridge regression, for FEW_ROWS at most: 134 MB
PENALTIES = (0.1, 0.3, 1.0)  # of regression; one is chosen
SIMILARITY = 0.5  # of a row and a title with the same n-grams, in regression; it is 1 for two rows
MAX_CHOOSING = 3_000  # on so many rows, evenly spread
TIMED_ROWS = 1_000  # rows of which regression is timed, to know how long it takes for all
SHARPNESS, MIDDLE = 20.0, 0.4  # a code that regression gives y, 0 to 1, has the logit 20 × (y − 0.4)
DROPOUT = 0.3  # share of the n-grams that are left out
# of all texts, for confidence, if fewer than ENOUGH are validated on; so many answers are enough
FOLDS, ENOUGH = 4, 1_000
TINY_WIDTH = 128  # width of a decoder that writes; a wider one sees fewer rows


# ---- the choice of n-grams


def count_ngrams(
    data: PreparedData,
    max_len: int,
    most: int,
    check: Callable[[], None] = nothing,
    patterns: Sequence[str] = PATTERNS,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (hashes of the `most` n-grams that most distinct training texts have, increasing, int64 [R];
    their inverse document frequency, ln((1 + texts) / (1 + texts with it)) + 1, float32 [R]). check: may
    raise; patterns: of `hash_ngrams`.
    """
    train, table, largest = data.train, language_table(data.languages), torch.iinfo(torch.int64).max
    distinct = np.sort(np.unique(text_keys(train.text_hash, train.language), return_index=True)[1])
    distinct = thinned(distinct, MAX_TEXTS)
    found = [np.zeros(0, dtype=np.int64)]  # hashes, each once per text
    for start in range(0, len(distinct), CHUNK):
        check()
        rows = distinct[start : start + CHUNK]
        ids, _ = encode_batch(*train.texts(rows), train.language[rows].astype(np.int64), table, max_len)
        hashed, exist, _ = hash_ngrams(torch.from_numpy(ids), patterns)
        hashed = hashed.masked_fill(~exist, largest).flatten(1).sort(1).values
        is_new = (hashed != largest) & (hashed != hashed.roll(1, 1))
        is_new[:, 0] = hashed[:, 0] != largest
        found.append(hashed[is_new].numpy())
    hashes, frequency = np.unique(np.concatenate(found), return_counts=True)
    kept = np.sort(np.argsort(-frequency, kind="stable")[:most])
    return hashes[kept], (np.log((1 + len(distinct)) / (1 + frequency[kept])) + 1).astype(np.float32)


# ---- rows of the fit


class DistinctRows(SomeRows):
    """Distinct training rows, at most MAX_TEXTS; weight float32 [N]: root of each one's number, mean 1. own:
    their number without titles, which come last.
    """

    def __init__(self, train: RowSet):
        pair = text_keys(train.text_hash, train.language)
        for column in np.sort(np.asarray(train.codes), axis=1).astype(np.uint64).T:
            pair = mix(pair ^ mix(column))
        _, first, count = np.unique(pair, return_index=True, return_counts=True)
        order = thinned(np.argsort(first), MAX_TEXTS)
        super().__init__(train, first[order])
        weight = np.sqrt(count[order])
        weight = weight / weight.mean()
        self.own = len(self.index)
        if isinstance(train, JoinedRows) and train.weight:
            self.own = int(np.searchsorted(self.index, train.own))
            weight[self.own :] *= train.weight
        self.weight = weight.astype(np.float32)


class FitRows(Rows):
    """Rows with their n-grams, E at most in a text. Batches have the entries of `TextRows`, and ngram_rows
    int64 [B, E], ngram_weights [B, E] (0 for none, and for those that are left out), ngram_words int64 [B,
    E], positions [B, W] of each word, row_weights [B].
    """

    has_lengths = True

    def __init__(self, rows: TextRows, weight: np.ndarray, ngrams: Ngrams, memory_mask: bool, seed: int):
        self.rows, self.weight, self.seed, self.dtype = rows, weight, seed, ngrams.idf.dtype
        pieces, counts, positions = [], [], []
        for start in range(0, len(rows), CHUNK):
            batch = rows.batch(np.arange(start, min(start + CHUNK, len(rows))), 0)
            weighted = ngrams.weighted(batch["input_ids"].to(ngrams.idf.device))
            found, weights, word = (x.cpu() for x in weighted)
            at = weights.nonzero(as_tuple=True)  # they follow the positions, and so the words
            pieces.append([x.numpy() for x in (found[at].int(), weights[at].float(), word[at[:2]].short())])
            counts.append(torch.bincount(at[0], minlength=len(word)).numpy())
            seen = batch["attention_mask"] if memory_mask else torch.ones_like(batch["attention_mask"])
            count = torch.zeros(len(word), int(word.max()) + 1, dtype=torch.int16)
            positions.append(count.scatter_add(1, word[:, 1:], seen[:, 1:].short()).numpy())
        self.found, self.weights, self.words = map(np.concatenate, zip(*pieces))
        self.offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        widest = max(part.shape[1] for part in positions)
        padded = [np.pad(part, ((0, 0), (0, widest - part.shape[1]))) for part in positions]
        self.positions = np.concatenate(padded)

    def __len__(self) -> int:
        return len(self.weight)

    def first(self, number: int) -> "FitRows":
        """Return the first rows, for `ridge_weights` alone."""
        first, end = copy(self), self.offsets[number]
        first.found, first.weights = self.found[:end], self.weights[:end]
        first.offsets, first.weight = self.offsets[: number + 1], self.weight[:number]
        return first

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        return self.rows.lengths(numbers)

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, Tensor]:
        begins = self.offsets[numbers]
        sizes = self.offsets[numbers + 1] - begins
        columns = np.arange(max(1, sizes.max()))
        exists = columns < sizes[:, None]
        at = np.where(exists, begins[:, None] + columns, 0)
        left_out = chance(draw(streams(self.seed, epoch, numbers)[:, None], columns), DROPOUT)
        positions = self.positions[numbers]
        words = int(np.flatnonzero(positions.any(axis=0)).max(initial=0)) + 1
        batch = self.rows.batch(numbers, epoch)
        return batch | {
            "targets_seq2seq": self.rows.shortened(batch["targets_seq2seq"]),
            "ngram_rows": torch.from_numpy(self.found[at].astype(np.int64)),
            "ngram_weights": torch.from_numpy(self.weights[at] * (exists & ~left_out)).to(self.dtype),
            "ngram_words": torch.from_numpy(np.where(exists, self.words[at], 0).astype(np.int64)),
            "positions": torch.from_numpy(positions[:, :words]).to(self.dtype),
            "row_weights": torch.from_numpy(self.weight[numbers]).to(self.dtype),
        }


# ---- parts of the fit


def linear_losses(
    model: Seq2SeqMixerOccCANINE, loss_fn: LossMixer, batch: dict, text: Tensor | None = None
) -> Tensor:
    """Return the loss of the linear decoder from n-grams alone, [B]. text: their sums, if there already."""
    assert model.ngrams is not None
    if text is None:
        text = model.ngrams.text_of(batch["ngram_rows"], batch["ngram_weights"])
    logits = model.ngrams.linear(text) + model.linear_decoder.bias
    target = multi_hot(batch["targets_linear"], logits.shape[1], logits.dtype)
    return loss_of_rows(loss_fn.loss_fn_linear, logits, target)


def both_losses(model: Seq2SeqMixerOccCANINE, loss_fn: LossMixer, batch: dict) -> Tensor:
    """Return the sum of both decoders' losses from n-grams alone, [B]; without a frozen linear decoder's."""
    assert model.ngrams is not None
    ngrams = (batch[name] for name in ("ngram_rows", "ngram_weights", "ngram_words", "positions"))
    text, memory, scores = model.ngrams.by_word(*ngrams)
    target = batch["targets_seq2seq"][:, :-1].long()
    logits = model.decoder.forward_groups([memory], target, [scores[:, None, None]], target == PAD_IDX)
    losses = loss_of_rows(loss_fn.loss_fn_seq2seq, logits, batch["targets_seq2seq"].long())
    if not model.ngrams.linear.weight.requires_grad:
        return losses
    return losses + linear_losses(model, loss_fn, batch, text)


@dataclass(frozen=True)
class FitPart:
    """A part of the fit. Its rates are the peak learning rates of the n-grams, of the linear decoder, and of
    the other decoder (0: it is frozen).
    """

    name: str
    losses: Callable[[Seq2SeqMixerOccCANINE, LossMixer, dict], Tensor]  # (model, loss_fn, batch) → [B]
    passes: int  # most passes over the rows; --ngram-passes replaces those of the last part
    max_rows: int  # most rows in all passes together
    batch_size: int
    rates: tuple[float, float, float]  # for fewer than MANY_ROWS rows
    rates_of_many: tuple[float, float, float]


PARTS = (
    FitPart("linear decoder", linear_losses, 10, 400_000, 256, (0.02, 0.02, 0.0), (0.006, 0.014, 0.0)),
    FitPart("both decoders", both_losses, 10, 10_000, 32, (0.003, 0.001, 0.002), (0.0, 0.0, 0.002)),
)
# for all rows, in the end
PARTS_OF_REFIT = (replace(PARTS[0], passes=2, rates=(0.006, 0.006, 0.0), rates_of_many=(0.006, 0.006, 0.0)),)


class Fitted(nn.Module):
    """The parameters that a part of the fit trains, as a module, and the task of the training loop."""

    columns = ("loss",)

    def __init__(self, part: FitPart, rows: int, model: Seq2SeqMixerOccCANINE, loss_fn: LossMixer):
        super().__init__()
        assert model.ngrams is not None
        ngrams, self.rates = model.ngrams, part.rates if rows < MANY_ROWS else part.rates_of_many
        self.table, self.linear, self.bias = ngrams.table, ngrams.linear, model.linear_decoder.bias
        others = (ngrams.word_to_memory, ngrams.text_to_memory, model.decoder) if self.rates[2] else ()
        self.others, self.compute = nn.ModuleList(others), partial(part.losses, model, loss_fn)
        self.weights = [self.table.weight], [self.linear.weight, self.bias], [*self.others.parameters()]
        for weights, rate in zip(self.weights, self.rates):
            for weight in weights:
                weight.requires_grad_(rate > 0)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.compute(batch) * batch["row_weights"]

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"loss": model(batch)}

    def optimizer(self) -> "FitOptimizer":
        groups = [{"params": x, "lr": lr, "initial_lr": lr} for x, lr in zip(self.weights, self.rates)]
        # eps: with 1e-8 Adam's rounding differs a hundred times as much between numbers of processes
        return FitOptimizer(groups, eps=1e-6, fused=True)


class FitOptimizer(torch.optim.Adam):
    """Adam, but for the first group, a table: only its rows that have a gradient move, by RMSprop with one
    mean square for each row and no momentum, since Adam's moments of each number overfit when texts are few.
    The bias of all rows is corrected by the steps of the table, so a rare row moves up to 1 / √(1 − beta2)
    times as far.
    """

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        group = self.param_groups[0]
        (table,) = group["params"]
        if table.grad is not None and not getattr(self, "found_inf", False):  # see `Precision.optimizer_step`
            gradient = table.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            state, beta = self.state[table], group["betas"][1]
            if not state:
                state |= {"step": torch.tensor(0.0), "squares": table.new_zeros(len(table), 1)}
            state["step"] += 1
            squares = state["squares"][rows].lerp_(values.square().mean(1, keepdim=True), 1 - beta)
            state["squares"][rows] = squares
            rate = group["lr"] * math.sqrt(1 - beta ** int(state["step"]))
            table.index_add_(0, rows, values / (squares.sqrt() + group["eps"]), alpha=-rate)
        table.grad = None
        super().step()


# ---- ridge regression, if rows are few


def ridge_weights(
    rows: FitRows, codes: np.ndarray, ngrams: int, classes: int, own: int, penalty: float = 0.0
) -> tuple[Tensor, float]:
    """Return (the weights [ngrams, classes] of ridge regression, its penalty), solved in its dual, in time
    N³: of each code, 0 or 1 by the codes int [N, codes of a row] (−1 for none), on the n-grams of each text.
    A penalty of 0 stands for the one of PENALTIES by which most rows that are left out, each alone, get a
    code of theirs.

    Titles stand behind the `own` rows. An n-gram has a weight for both and one for each (Daumé III, 2007,
    "Frustratingly easy domain adaptation"), so rows decide where they differ from titles; those for titles
    are not returned.
    """
    row = np.repeat(np.arange(len(rows)), np.diff(rows.offsets))
    length = np.sqrt(np.bincount(row, rows.weights**2, minlength=len(rows))).clip(min=1e-6)
    index = torch.from_numpy(np.stack([row, rows.found]))
    weights = torch.from_numpy(rows.weights / length[row]).to(rows.dtype)  # so each text has length 1
    texts = torch.sparse_coo_tensor(index, weights, (len(rows), ngrams), check_invariants=False).coalesce()
    target = multi_hot(torch.from_numpy(codes), classes, texts.dtype)
    kernel = torch.empty(len(rows), len(rows), dtype=texts.dtype)
    for part in torch.arange(len(rows)).split(512):  # the kernel is symmetric
        rest = texts.index_select(0, torch.arange(int(part[0]), len(rows)))
        kernel[part[0] :, part] = torch.sparse.mm(rest, texts.index_select(0, part).t().to_dense())
        kernel[part, part[0] :] = kernel[part[0] :, part].t()
    kernel[own:, :own] *= SIMILARITY
    kernel[:own, own:] *= SIMILARITY
    weight = torch.from_numpy(rows.weight).to(texts.dtype)
    if not penalty:
        some = torch.from_numpy(thinned(np.arange(len(rows)), MAX_CHOOSING))
        of_some = kernel[some[:, None], some], target[some], weight[some]
        penalty = max(PENALTIES, key=lambda penalty: right_if_left_out(*of_some, penalty))
    kernel.diagonal().add_(penalty / weight)
    kernel = torch.linalg.cholesky(kernel)
    solved = torch.cholesky_solve(target, kernel)
    solved[own:] *= SIMILARITY
    return torch.sparse.mm(texts.t(), solved), penalty


def ridge_seconds(
    rows: FitRows, codes: np.ndarray, ngrams: int, classes: int, own: int
) -> tuple[float, float]:
    """Return (about how long `ridge_weights` takes, from its time for TIMED_ROWS and that of their N³ work;
    how much of that the choice of the penalty takes).
    """
    small, matrix = min(len(rows), TIMED_ROWS), 0.5 + torch.eye(2 * TIMED_ROWS, dtype=rows.dtype)
    of_small, seconds = partial(ridge_weights, rows.first(small), codes[:small], ngrams, classes, own), []
    for work in (of_small, partial(torch.linalg.cholesky, matrix)):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    cube, times = seconds[1] * (small / TIMED_ROWS / 2) ** 3, len(rows) / small
    choosing = 4 * len(PENALTIES) * cube  # an inverse is three times as much work, and is multiplied
    rest = max(0.0, seconds[0] - cube - choosing) * times
    choosing *= min(times, MAX_CHOOSING / small) ** 3
    return rest + cube * times**3 + choosing, choosing


def right_if_left_out(kernel: Tensor, target: Tensor, weight: Tensor, penalty: float) -> float:
    """Return the weight of the rows whose most probable code by ridge regression on all other rows is right,
    in closed form, as scikit-learn's RidgeCV. kernel [N, N], target [N, classes] of 0 or 1, weight [N].
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(kernel + torch.diag(penalty / weight)))
    answers = target - inverse @ target / inverse.diagonal()[:, None]
    return float(weight @ target.gather(1, answers.argmax(1, keepdim=True))[:, 0])


# ---- the fit


@dataclass
class Fit:
    """A fit of n-grams and decoders, in place, to the distinct training rows of `data`, on rank 0. If its
    parts are all PARTS, progress is kept in the folder of the run.
    """

    args: JobConfig
    data: PreparedData
    formatter: BlockyFormatter
    loss_fn: LossMixer
    model: Seq2SeqMixerOccCANINE
    parts: tuple[FitPart, ...] = PARTS
    say: Callable[[str], None] = nothing

    def _prepare(self) -> Ngrams:
        """Make the rows and the plan of the steps, and return the n-grams."""
        args, model = self.args, self.model
        assert model.ngrams is not None
        self.is_whole, self.ngrams = self.parts is PARTS, model.ngrams
        self.own, self.alone = OwnFiles(args.save_path, args.overwrite), World()
        self.distinct, self.seed = DistinctRows(self.data.train), derived_seed(args.seed, NGRAMS)
        model.eval()  # no n-gram of a text is left out
        # as they are trained on, but without noise
        encoding = RowEncoding(self.formatter, args.max_len, first_empty_block=args.empty_blocks == "first")
        rows = TextRows(self.distinct, self.data, encoding)
        self.rows = FitRows(rows, self.distinct.weight, model.ngrams, model.memory_mask, self.seed)
        self.plans = list(map(self._steps_of, self.parts))
        self.first_step = -sum(steps for _, steps in self.plans)  # the steps of a fit end at step 0
        return model.ngrams

    @settings_of_torch()
    def run(self) -> dict[str, Tensor]:
        """Fit in one thread and return the weights. Raises Stopped."""
        torch.set_num_threads(1)
        began = time.perf_counter()
        args, model, say, ngrams = self.args, self.model, self.say, self._prepare()
        before = time.perf_counter() - began
        if ngrams.answers is not None:  # the steps continue from their own half of the mean of both logits
            with torch.no_grad():
                ngrams.linear.weight.mul_(2)
                model.linear_decoder.bias.mul_(2).add_(SHARPNESS * MIDDLE)
        interrupted = self._interrupted() if self.is_whole else None
        if interrupted is not None:
            model.load_state_dict(interrupted["model"], strict=False)
            say(f"The fit continues: {PARTS[interrupted['part']].name}, step {interrupted['step']:,}")
        model.train()
        ngrams.table.sparse = True
        first = interrupted["part"] if interrupted else 0
        numbers = range(first, len(self.parts))
        seconds = [self.take_part(i, interrupted if i == first else None) for i in numbers]
        ngrams.table.sparse = False
        model.requires_grad_()
        ridge, choosing = self.add_regression()
        also = ", with answers of ridge regression" * (ngrams.answers is not None)
        if args.dry_run:
            self._say_estimate(before, seconds, ridge, choosing)
        else:
            say(f"Fitted in {time.perf_counter() - began:.1f} s{also}")
        return self.weights()

    def _say_estimate(self, before: float, of_parts: list[float], ridge: float, choosing: float) -> None:
        """Say about how long the fit takes, from the seconds of its stages, and what follows it."""
        args, seconds = self.args, before + sum(of_parts) + ridge
        what = f"{-self.first_step:,} steps and what comes before and after"
        self.say(f"The fit takes about {duration(seconds)}, {what}")
        if is_fit_alone(args):
            after = self._seconds_after(before + of_parts[0], ridge - choosing)
            what = f"about {duration(after)}, and answers to the validation texts some more"
            self.say(f"The folds of its confidence and the refit take {what}")

    def _seconds_after(self, linear: float, ridge: float) -> float:
        """Return about how long the folds of confidence and the refit take. linear, ridge: the seconds of the
        first part, with what comes before, and of regression with a penalty that is known.
        """
        args, data, seconds = self.args, self.data, 0.0
        share = 1 - self.distinct.own / len(self.rows) / FOLDS  # titles are in every fold
        if needs_folds(args, data):
            folds = min(FOLDS, -(-ENOUGH * FOLDS // sum(map(distinct_texts, (data.train, data.val)))))
            seconds = folds * (share * linear + share**3 * ridge)
        if args.refit == AUTO and len(data.val) and self.distinct.own < MANY_ROWS:
            seconds += linear * PARTS_OF_REFIT[0].passes / PARTS[0].passes + ridge
        return seconds

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the model, but for its encoder."""
        state = self.model.state_dict()
        return {name: x for name, x in state.items() if not name.startswith("encoder.")}

    def _steps_of(self, part: FitPart) -> tuple[BatchPlan, int]:
        """Return the batches of a part and the number of its steps. The decoder that writes takes few rows,
        and learns nothing from titles.
        """
        rows = self.distinct.own if part.rates[2] else len(self.rows)
        passes = self.args.ngram_passes
        batch_size = min(part.batch_size, max(MIN_BATCH, rows // MIN_STEPS))
        plan = BatchPlan(rows, batch_size)
        steps = min(part.passes * plan.steps_per_epoch, part.max_rows // batch_size)
        if part.rates[2]:
            steps = max(1, steps * TINY_WIDTH // max(TINY_WIDTH, self.model.config.hidden_size))
            steps = passes * plan.steps_per_epoch if passes else steps
            steps *= self.args.seq2seq_weight > 0
        return plan, steps

    def take_part(self, number: int, interrupted: dict[str, Any] | None) -> float:
        """Take the steps of a part, or those that an interrupted fit has left. A dry run takes a few and
        returns about how many seconds all would take. Raises Stopped.
        """
        args, part = self.args, self.parts[number]
        fitted = Fitted(part, len(self.rows), self.model, self.loss_fn)
        (plan, steps), optimizer, state = self.plans[number], fitted.optimizer(), loop.State()
        if interrupted is not None:
            optimizer.load_state_dict(interrupted["optimizer"])
            state = loop.State.resumed(interrupted["step"], interrupted["position"], self.alone)
        stage = Stage(f"fitting n-grams, {part.name}", steps, "steps", state.step)
        begin = self.first_step + sum(steps for _, steps in self.plans[:number])
        log = self._log(number, begin, begin + state.step)

        def content(step: int, position: dict[str, Any]) -> dict[str, Any]:
            entries = {"format": checkpoint.FORMAT, "kind": KIND, "args": args.values(), "part": number}
            entries |= {"model": self.weights(), "optimizer": optimizer.state_dict()}
            return {**entries, "fingerprint": self.data.fingerprint, "step": step, "position": position}

        saver = checkpoint.Saver(self.own, args.keep_checkpoints, self.alone, content, self.say)

        def save(step: int, _: list[str], position: dict[str, Any]) -> str | None:
            return saver(step, [FILE], position)

        run = loop.Run(
            fitted,
            fitted,
            optimizer,
            self.alone,
            Precision("float64" if args.float64 else "float32"),
            seed=self.seed,
            rate_factor=partial(linear_factor, warmup_steps=steps // 20, total_steps=steps),
            stop_step=steps,
            steps_per_epoch=plan.steps_per_epoch,
            clip_norm=None,
            log_interval=args.log_interval,
            save_interval=args.save_interval,
            save=save if self.is_whole else None,
            log=log and (lambda row: log.row({**row, "step": begin + row["step"]})),
            step_done=lambda: (stage.add(), log and log.step()),
            stop=stop_asked,
        )
        loaders = {"train": BatchLoader(MicroBatches(self.rows, plan, shuffle_seed=self.seed))}
        if args.dry_run:
            return steps * seconds_of_step(run, loaders["train"])
        loop.train(run, loaders, state)
        if state.stopped:
            if log:
                log.close("stopped")
            raise Stopped
        return 0.0

    def _log(self, number: int, begin: int, done: int) -> RunLog | None:
        """Return the log of a part, which has taken its steps from `begin` to `done`, if the fit is the whole
        training.
        """
        if not self.is_whole or self.args.num_epochs or self.args.dry_run:
            return None
        start = done - (done == self.first_step)  # a new fit keeps no row
        end, name = begin + self.plans[number][1], self.parts[number].name
        log = RunLog(self.own, log_columns(Fitted.columns), end, start, first=self.first_step, part=name)
        if start < done:
            log.row({"step": done, "epoch": 0, "samples": 0})
        return log

    def add_regression(self) -> tuple[float, float]:
        """Solve ridge regression if rows are few, and take the mean of its logits and those of the steps. A
        dry run changes nothing. Returns `ridge_seconds`.
        """
        data, ngrams, seconds = self.data, self.ngrams, (0.0, 0.0)
        are_few = len(self.rows) <= FEW_ROWS and len(ngrams.idf) * len(data.codes) <= MAX_RIDGE
        if are_few and isinstance(self.model.encoder, NoEncoder):  # an encoder would have nothing to learn
            sizes = len(ngrams.idf), len(data.codes), self.distinct.own
            regression = self.rows, self.distinct.codes, *sizes
            if self.is_whole:
                seconds = ridge_seconds(*regression)
                self.say(f"Ridge regression on {len(self.rows):,} texts: about {duration(seconds[0])}")
            if not self.args.dry_run:
                weights, ngrams.ridge = ridge_weights(*regression, ngrams.ridge)
                ngrams.answers = weights.to(ngrams.idf) * (SHARPNESS / 2)
        if ngrams.answers is not None:  # those of a fit stay if a refit has too many rows to solve them again
            with torch.no_grad():
                ngrams.linear.weight.div_(2)
                self.model.linear_decoder.bias.sub_(SHARPNESS * MIDDLE).div_(2)
        return seconds

    def _interrupted(self) -> dict[str, Any] | None:
        """Return the content of an interrupted fit with these arguments to these data, if there is one."""
        args, path = self.args, self.own.path(FILE)
        if FILE not in self.own.names or not os.path.isfile(path):
            return None
        try:
            with checkpoint.reading(path):
                kept = checkpoint.load(path)
                if kept.get("kind") != KIND or checkpoint.CHECKSUM not in kept:
                    raise UserError(f"{path}: is not the file of an interrupted fit")
                checkpoint.check_format(path, kept["format"])
                is_same = kept["fingerprint"] == self.data.fingerprint
                is_same = is_same and kept["args"]["ngram_passes"] == args.ngram_passes
                return kept if is_same and not differing(type(args), args.values(), kept["args"]) else None
        except UserError as error:
            return self.say(f"Note: the fit starts over: {error}")


def distinct_texts(rows: RowSet) -> int:
    """Return how many distinct texts rows have, without the titles behind them."""
    return len(np.unique(rows.text_hash[: rows.own if isinstance(rows, JoinedRows) else None]))


def needs_folds(args: JobConfig, data: PreparedData) -> bool:
    """Return whether n-grams alone were fitted to few rows, and few texts are validated on."""
    train, val = map(distinct_texts, (data.train, data.val))
    if args.model_size != NGRAMS_ALONE or not is_fitted(args):
        return False
    return val < ENOUGH and train + val >= MIN_TEXTS and DistinctRows(data.train).own <= FEW_ROWS


def fit_ngrams(fit: Fit, world: World) -> float:
    """Fit the n-grams of a model, its seq2seq decoder and the bias of its linear decoder, all on the CPU, to
    the distinct training rows, without the encoder, in place; its encoder then adds nothing until it is
    trained. All ranks.

    Rank 0 fits in one thread, and all get its weights: the steps amplify rounding until it can be seen in the
    accuracy, so a sum over processes, threads or a GPU's atomics would give another model each time.

    Returns:
        The penalty of ridge regression, whose weights the n-grams have now; 0 if they have none.

    Raises:
        Stopped: on all ranks, if rank 0 was asked to stop. An interrupted fit is continued by the next start.
    """
    args, model = fit.args, fit.model
    ngrams = model.ngrams
    assert ngrams is not None
    if args.ngram_passes == 0:
        world.print("N-grams are not fitted (--ngram-passes 0)")
        return 0.0
    others = f" on rank 0 alone; {world.size - 1} more wait for it" * (world.size > 1)
    world.print(f"{'Timing the fit of' if args.dry_run else 'Fitting'} the n-grams and both decoders{others}")
    fitted, ngrams.ridge = world.run_on_main(lambda: (fit.run(), ngrams.ridge))
    ngrams.answers = fitted.get("ngrams.answers")
    model.load_state_dict(fitted, strict=False)
    model.encoder.zero_output()  # the decoders were fitted without it
    return ngrams.ridge
