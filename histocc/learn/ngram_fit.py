"""New n-grams: their choice, and their fit before a run.

An encoder needs minutes to learn what a linear model on n-grams learns in seconds. So before the first step
of a run from scratch, its n-grams and both decoders are trained without the encoder, on the texts without
noise, which makes them worse here. The linear decoder is fitted first, in seconds. Then both decoders
are trained together, or only the other one if there are many rows. Each part uses the ordinary training loop,
in one thread of rank 0. The n-grams of a text are computed once. Without an encoder, few texts are learned in
closed form instead (histocc/learn/few.py).
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from histocc.data.arrays import PreparedData, RowSet, SomeRows, text_keys, thinned
from histocc.data.dataset import RowEncoding, TextRows
from histocc.data.prepare import nothing
from histocc.formatter import PAD_IDX
from histocc.learn.texts import COUNTED_TEXTS, MAX_PREFIX, distinct, pieces
from histocc.model.loss import LossMixer, loss_of_rows
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.model.ngrams import LONGEST, Ngrams
from histocc.runtime import checkpoint
from histocc.runtime.config import differing
from histocc.runtime.device import Precision, settings_of_torch
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles
from histocc.runtime.log import Stage, duration
from histocc.runtime.rng import NGRAM_FIT, chance, derived_seed, draw, mix, streams
from histocc.runtime.signals import Stopped, stop_asked
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import multi_hot
from histocc.trainer import loop
from histocc.trainer.batches import BatchLoader, BatchPlan, MicroBatches, Rows
from histocc.trainer.config import TrainConfig
from histocc.trainer.estimate import seconds_of_step
from histocc.trainer.log import FIT_PARTS, RunLog, log_columns
from histocc.trainer.schedule import linear_factor

FILE = "ngrams.bin"  # progress of the fit, in the folder of a run until there is a checkpoint
KIND = "fit of n-grams"  # the entry "kind" in FILE
MIN_STEPS, MIN_BATCH = 40, 16  # steps of a pass. For few rows the batch is smaller, at least MIN_BATCH
MANY_ROWS = 20_000  # from this number of rows on, a part has other learning rates
FIT_DROPOUT = 0.3  # share of the n-grams left out
MAX_FIT_POSITIONS = 1 << 25  # of all texts together, whose n-grams take about 60 bytes each
TINY_WIDTH = 128  # width of a decoder that writes. A wider one sees fewer rows


# ---- rows of the fit


class DistinctRows(SomeRows):
    """At most COUNTED_TEXTS distinct training rows, fewer if they are long. weight: root of their counts."""

    def __init__(self, train: RowSet, max_len: int = LONGEST):
        pair = text_keys(train.text_hash, train.language)
        for column in np.sort(np.asarray(train.codes), axis=1).astype(np.uint64).T:
            pair = mix(pair ^ mix(column))
        first, count, _ = distinct(pair)
        length = np.minimum(train.lengths(first), max_len).mean() + MAX_PREFIX
        kept = thinned(np.arange(len(first)), min(COUNTED_TEXTS, int(MAX_FIT_POSITIONS / length)))
        self.left_out = len(first) - len(kept)
        super().__init__(train, first[kept])
        weight = np.sqrt(count[kept])
        weight = weight / weight.mean()
        self.weight = weight.astype(np.float32)


class FitRows(Rows):
    """Rows with their n-grams. Batches have the entries of `TextRows`, row_weights [B], and the number of
    positions [B, W] of each word. For the E n-grams of their texts, one text after another, they have
    ngram_rows int64 [E], ngram_weights [E] (0 if left out), ngram_texts and ngram_words int64 [E].
    """

    has_lengths = True

    def __init__(self, rows: TextRows, weight: np.ndarray, ngrams: Ngrams, memory_mask: bool, seed: int):
        self.rows, self.weight, self.seed, self.dtype = rows, weight, seed, ngrams.idf.dtype
        found_in, counts, positions, words = [], [], [], []
        for part in pieces(rows.lengths(np.arange(len(rows)))):
            batch = rows.batch(np.arange(part.start, part.stop), 0)
            weighted = ngrams.weighted(batch["input_ids"].to(ngrams.idf.device))
            found, weights, word = (x.cpu() for x in weighted)
            at = weights.nonzero(as_tuple=True)  # they follow the positions, and so the words
            found_in.append([x.numpy() for x in (found[at].int(), weights[at].float(), word[at[:2]].short())])
            counts.append(torch.bincount(at[0], minlength=len(word)).numpy())
            seen = batch["attention_mask"] if memory_mask else torch.ones_like(batch["attention_mask"])
            count = torch.zeros(len(word), int(word.max()) + 1, dtype=torch.int16)
            count = count.scatter_add(1, word[:, 1:], seen[:, 1:].short()).numpy()
            words.append(count.shape[1] - (count[:, ::-1] != 0).argmax(axis=1))
            positions.append(count[np.arange(count.shape[1]) < words[-1][:, None]])
        self.found, self.weights, self.words = map(np.concatenate, zip(*found_in))
        self.offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        self.word_offsets = np.concatenate([[0], np.cumsum(np.concatenate(words))])
        self.positions = np.concatenate(positions)

    def __len__(self) -> int:
        return len(self.weight)

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        return self.rows.lengths(numbers)

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, Tensor]:
        text, number = _ragged(self.offsets, numbers)
        at = self.offsets[numbers][text] + number
        left_out = chance(draw(streams(self.seed, epoch, numbers)[text], number), FIT_DROPOUT)
        of_text, word = _ragged(self.word_offsets, numbers)
        positions = np.zeros((len(numbers), int(word.max()) + 1), dtype=np.int16)
        positions[of_text, word] = self.positions[self.word_offsets[numbers][of_text] + word]
        batch = self.rows.batch(numbers, epoch)
        return batch | {
            "targets_seq2seq": self.rows.shortened(batch["targets_seq2seq"]),
            "ngram_rows": torch.from_numpy(self.found[at].astype(np.int64)),
            "ngram_weights": torch.from_numpy(self.weights[at] * ~left_out).to(self.dtype),
            "ngram_texts": torch.from_numpy(text),
            "ngram_words": torch.from_numpy(self.words[at].astype(np.int64)),
            "positions": torch.from_numpy(positions).to(self.dtype),
            "row_weights": torch.from_numpy(self.weight[numbers]).to(self.dtype),
        }

    def piece(self, batch: dict[str, Tensor], kept: np.ndarray) -> dict[str, Tensor]:
        return batch  # a fit has one process and whole batches


def _ragged(offsets: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for the entries of some rows in order: (the place of each entry's row in `numbers`, its place
    in that row), int64 [E]. offsets int64 [N + 1]: start of each row's entries.
    """
    sizes = offsets[numbers + 1] - offsets[numbers]
    row = np.repeat(np.arange(len(numbers)), sizes)
    return row, np.arange(len(row)) - (np.cumsum(sizes) - sizes)[row]


# ---- parts of the fit


def losses_of(model: Seq2SeqMixerOccCANINE, loss_fn: LossMixer, writes: bool, batch: dict) -> Tensor:
    """Return the losses of rows from only their n-grams, [B]: of the linear decoder, unless it is frozen, and
    of the other one if `writes`.
    """
    ngrams, losses = model.ngrams, []
    assert ngrams is not None
    rows, weights, texts, words = (batch[f"ngram_{name}"] for name in ("rows", "weights", "texts", "words"))
    if writes:
        text, memory, scores = ngrams.by_word(rows, weights, texts, words, batch["positions"])
        target = batch["targets_seq2seq"][:, :-1].long()
        logits = model.decoder.forward_groups([memory], target, [scores[:, None, None]], target == PAD_IDX)
        losses.append(loss_of_rows(loss_fn.loss_fn_seq2seq, logits, batch["targets_seq2seq"].long()))
    else:
        text = ngrams.text_of(rows, weights, texts, len(batch["row_weights"]))
    if ngrams.linear.weight.requires_grad:
        logits = ngrams.linear(text) + model.linear_decoder.bias
        target = multi_hot(batch["targets_linear"], logits.shape[1], logits.dtype)
        losses.append(loss_of_rows(loss_fn.loss_fn_linear, logits, target))
    return sum(losses[1:], losses[0])


@dataclass(frozen=True)
class FitPart:
    """A part of the fit."""

    name: str
    passes: int  # most passes over the rows, unless --ngram-passes replaces it in the last part
    max_rows: int  # most rows in all passes together
    batch_size: int
    # Peak learning rates of the n-grams, the linear and the other decoder, for fewer than MANY_ROWS
    # rows, and for more. Rate 0: it is frozen, or left out.
    rates: tuple[float, float, float]
    rates_of_many: tuple[float, float, float]


PARTS_OF_FIT = (
    FitPart(FIT_PARTS[0], 10, 400_000, 256, (0.02, 0.02, 0.0), (0.006, 0.014, 0.0)),
    FitPart(FIT_PARTS[1], 10, 10_000, 32, (0.003, 0.001, 0.002), (0.0, 0.0, 0.002)),
)


class Fitted(nn.Module):
    """The parameters that a part of the fit trains, as a module, and the task of the training loop."""

    columns = ("loss",)

    def __init__(self, part: FitPart, rows: int, model: Seq2SeqMixerOccCANINE, loss_fn: LossMixer):
        super().__init__()
        assert model.ngrams is not None
        ngrams, self.rates = model.ngrams, part.rates if rows < MANY_ROWS else part.rates_of_many
        self.table, self.linear, self.bias = ngrams.table, ngrams.linear, model.linear_decoder.bias
        others = (ngrams.word_to_memory, ngrams.text_to_memory, model.decoder) if self.rates[2] else ()
        self.others, self.compute = nn.ModuleList(others), partial(losses_of, model, loss_fn, bool(others))
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
        # eps: with 1e-8, Adam's rounding would depend a hundred times more on the number of processes
        return FitOptimizer(groups, eps=1e-6, fused=True)


class FitOptimizer(torch.optim.Adam):
    """Adam, except for the first group, a table. RMSprop moves only its rows with a gradient, with one mean
    square per row and no momentum, since Adam's moments of each number overfit when texts are few. The bias
    of all rows is corrected with the steps of the table, so a rare row moves up to 1 / √(1 − beta2) times as
    far.
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


# ---- the fit


@dataclass
class Fit:
    """A fit of n-grams and decoders, in place, to the distinct training rows of `data`, on rank 0."""

    args: TrainConfig
    passes: int | None  # over the rows, in the last part, or None to use PARTS_OF_FIT
    data: PreparedData
    encoding: RowEncoding  # of the training rows
    loss_fn: LossMixer
    model: Seq2SeqMixerOccCANINE
    say: Callable[[str], None] = nothing
    steps_after: int = 0  # steps of the run, also counted in the progress

    @settings_of_torch()
    def run(self) -> dict[str, Tensor]:
        """Fit in one thread and return the weights. Raises Stopped."""
        torch.set_num_threads(1)
        began, args, model, say = time.perf_counter(), self.args, self.model, self.say
        assert model.ngrams is not None
        self.own, self.alone = OwnFiles(args.save_path, args.overwrite), World()
        self.seed = derived_seed(args.seed, NGRAM_FIT)
        train = DistinctRows(self.data.train, self.encoding.max_len)
        model.eval()  # no n-gram of a text is left out
        # as in training, but without noise
        rows = TextRows(train, self.data, replace(self.encoding, fixed_width=None))
        self.rows = FitRows(rows, train.weight, model.ngrams, model.memory_mask, self.seed)
        self.plans = list(map(self._steps_of, PARTS_OF_FIT))
        self.first_step = -sum(steps for _, steps in self.plans)  # the steps of a fit end at step 0
        before = time.perf_counter() - began
        if left_out := train.left_out:
            say(f"Note: the fit has no room for {left_out:,} of {left_out + len(self.rows):,} distinct rows")
        interrupted, first = self._interrupted(), 0
        if interrupted is not None:
            first = interrupted["part"]
            model.load_state_dict(interrupted["model"], strict=False)
            say(f"The fit continues: {PARTS_OF_FIT[first].name}, step {interrupted['step']:,}")
        model.train()
        model.ngrams.table.sparse = True
        numbers = range(first, len(PARTS_OF_FIT))
        seconds = [self.take_part(i, interrupted if i == first else None) for i in numbers]
        model.ngrams.table.sparse = False
        if args.dry_run:
            total, what = before + sum(seconds), f"{-self.first_step:,} steps and the work before and after"
            say(f"The fit takes about {duration(total)}, {what}")
        else:
            say(f"Fitted in {time.perf_counter() - began:.1f} s")
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the model without its encoder."""
        state = self.model.state_dict()
        return {name: x for name, x in state.items() if not name.startswith("encoder.")}

    def _steps_of(self, part: FitPart) -> tuple[BatchPlan, int]:
        """Return the batches of a part and the number of its steps, few for the decoder that writes."""
        rows = len(self.rows)
        batch_size = min(part.batch_size, max(MIN_BATCH, rows // MIN_STEPS))
        plan = BatchPlan(rows, batch_size)
        steps = min(part.passes * plan.steps_per_epoch, part.max_rows // batch_size)
        if part.rates[2]:
            steps = max(1, steps * TINY_WIDTH // max(TINY_WIDTH, self.model.config.hidden_size))
            steps = self.passes * plan.steps_per_epoch if self.passes else steps
            steps *= bool(self.loss_fn.seq2seq_weight)
        return plan, steps

    def take_part(self, number: int, interrupted: dict[str, Any] | None) -> float:
        """Take the remaining steps of a part, or in a dry run return the seconds of all. Raises Stopped."""
        args, part = self.args, PARTS_OF_FIT[number]
        fitted = Fitted(part, len(self.rows), self.model, self.loss_fn)
        (plan, steps), optimizer, state = self.plans[number], fitted.optimizer(), loop.State()
        if interrupted is not None:
            optimizer.load_state_dict(interrupted["optimizer"])
            state = loop.State.resumed(interrupted["step"], interrupted["position"], self.alone)
        begin = self.first_step + sum(steps for _, steps in self.plans[:number])
        counts = self.steps_after - self.first_step, "steps", begin - self.first_step + state.step
        stage = Stage(f"fitting n-grams, {part.name}", *counts)
        log = self._log(number, begin, begin + state.step)

        def content(step: int, position: dict[str, Any]) -> dict[str, Any]:
            entries = {"format": checkpoint.FORMAT, "kind": KIND, "args": args.values(), "part": number}
            entries |= {"model": self.weights(), "optimizer": optimizer.state_dict()}
            return {**entries, "fingerprint": self.data.fingerprint, "step": step, "position": position}

        saver = checkpoint.Saver(self.own, args.keep_checkpoints, self.alone, content, self.say)
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
            save=lambda step, _, position: saver(step, [FILE], position),
            log=log and (lambda row: log.row({**row, "step": begin + row["step"]})),
            step_done=lambda: (stage.add(), log and log.step()),
            stop=stop_asked,
        )
        loaders = {"train": BatchLoader(MicroBatches(self.rows, plan, shuffle_seed=self.seed))}
        seconds = 0.0
        if args.dry_run:
            seconds = steps * seconds_of_step(run, loaders["train"])
        else:
            loop.train(run, loaders, state)
        if state.stopped:
            if log:
                log.close("stopped")
            raise Stopped
        fitted.requires_grad_()
        return seconds

    def _log(self, number: int, begin: int, done: int) -> RunLog | None:
        """Return the log of a part from step `begin` on, now at `done`, if the training is only a fit."""
        if self.args.num_epochs or self.args.dry_run:
            return None
        start = done - (done == self.first_step)  # a new fit keeps no row
        end, name = begin + self.plans[number][1], PARTS_OF_FIT[number].name
        log = RunLog(self.own, log_columns(Fitted.columns), end, start, first=self.first_step, part=name)
        if start < done:
            log.row({"step": done, "epoch": 0, "samples": 0})
        return log

    def _interrupted(self) -> dict[str, Any] | None:
        """Return the content of an interrupted fit with the same arguments and data, if there is one."""
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
                is_same = is_same and kept["args"]["ngram_passes"] == self.passes
                return kept if is_same and not differing(type(args), args.values(), kept["args"]) else None
        except UserError as error:
            return self.say(f"Note: the fit starts over: {error}")


def fit_ngrams(fit: Fit, world: World) -> int:
    """Fit the n-grams of a model, its seq2seq decoder and the bias of its linear decoder on the CPU, in
    place. Its encoder then adds nothing until it is trained. All ranks. Return the number of steps, on rank
    0. Raises Stopped on all ranks. The next start continues an interrupted fit.

    Rank 0 fits in one thread, and all get its weights: the steps amplify rounding until it affects accuracy,
    so sums over processes, threads or a GPU's atomics would give a different model each time.
    """
    others = f" on rank 0; processes waiting for it: {world.size - 1}" * (world.size > 1)
    what = "both decoders" if fit.loss_fn.seq2seq_weight else "the linear decoder"
    world.print(f"{'Timing the fit of' if fit.args.dry_run else 'Fitting'} the n-grams and {what}{others}")
    fit.model.load_state_dict(world.run_on_main(fit.run), strict=False)
    fit.model.encoder.zero_output()  # the decoders were fitted without it
    return -fit.first_step if world.is_main else 0
