"""Confidence of a trained model, fitted on rows that it was not trained on: on the validation rows after each
training, or on any by `python -m histocc.evaluate --fit-confidence`.
"""

import contextlib
import os
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from histocc.data.arrays import PreparedData
from histocc.data.dataset import TextRows
from histocc.formatter import PAD_IDX, BlockyFormatter
from histocc.job.build import make_rows
from histocc.job.config import JobConfig
from histocc.model import confidence, metrics
from histocc.model.confidence import MIN_TEXTS, Confidence, Ranked, Sequences, Thresholds, features, places
from histocc.model.decoding import code_logits, distinct_blocks, greedy_from_memory, upcast_half
from histocc.model.search import CANDIDATES, CodeSearch, CodeTrie
from histocc.published import models
from histocc.runtime import checkpoint
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import multi_hot
from histocc.trainer import loop
from histocc.trainer.batches import BatchLoader, BatchPlan, MicroBatches, Rows

MAX_TEXTS, MAX_ROWS = 2_000, 3_000  # that it is fitted on
MAX_BATCH = 256  # rows
MAX_CODES = 3  # of a row; one with more has too many orders, and takes no part for the seq2seq decoder
OUTPUTS = 5  # most probable outputs of a row, whose probabilities are fitted


class SomeRows(Rows):
    """The rows numbered `index` int64 [N] of others."""

    def __init__(self, rows: Rows, index: np.ndarray):
        self.rows, self.index = rows, index
        self.has_lengths, self.widths, self.piece = rows.has_lengths, rows.widths, rows.piece

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, Tensor]:
        return self.rows.batch(self.index[numbers], epoch)

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        return self.rows.lengths(self.index[numbers])


class AnswersTask:
    """A task whose metrics collect what the decoders of a model answer to each row of this rank.

    least: threshold of each row, float64 [N].
    """

    columns = ("loss",)

    def __init__(self, loaded: models.Loaded, least: Tensor):
        model, self.formatter, state = loaded
        self.kind, self.thresholds, self.least = (
            state.get("kind", "mixer"),
            Thresholds.of(state),
            least.logit(),
        )
        share, self.search = (state.get("linear_share") or 0.0) if self.kind == "mixer" else 0.0, None
        if self.kind != "flat":
            self.search = CodeSearch(model, CodeTrie(list(state["key"]), self.formatter), share)
        self.parts: dict[str, list[Tensor]] = {}

    def _keep(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.parts.setdefault(name, []).append(value.cpu())

    def losses(self, model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
        raise NotImplementedError

    def metrics(self, model: Any, batch: dict[str, Any]) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        kept = batch["weights"] > 0
        true = batch["targets_linear"][kept]
        memory, pooled = model.encode(batch["input_ids"], batch["attention_mask"])
        with torch.autocast(memory.device.type, enabled=False):
            self._keep(rows=batch["rows"][kept])
            if self.search is not None:
                self._add_written(model, memory.to(pooled), batch, kept)
                written, linear = self.search.log_probs(batch["input_ids"], batch["attention_mask"])
                written, scores = written[kept], self.search.scores(written, linear)[kept]
                found, best = Ranked.of(scores), scores.argmax(1)
                hit = (true == best[:, None]).any(1)
                self._keep(score=found.score, norms=found.norms, ranked_right=hit)
            if self.kind != "seq2seq":
                logits = upcast_half(model.classify(pooled))[kept]
                least = self.least.to(logits)[batch["rows"][kept]]
                on = self.thresholds.answered(logits, places(logits), least)
                is_true = multi_hot(true, logits.shape[1], logits.dtype) > 0
                best = logits.topk(min(OUTPUTS, logits.shape[1]))
                self._keep(
                    logits=best.values.double(),
                    hits=is_true.gather(1, best.indices),
                    of_sets=features(logits, on),
                    flat_right=(on == is_true).all(1),
                )
                if self.search is not None:
                    self._add_both(written, logits, on, is_true)
        return {"loss": torch.zeros(len(kept), device=kept.device)}

    def _add_written(self, model: Any, memory: Tensor, batch: dict[str, Any], kept: Tensor) -> None:
        """What the seq2seq decoder writes, in every order of its codes."""
        room, size = self.formatter.max_num_codes, self.formatter.block_size
        padding = model.memory_padding_mask(batch["attention_mask"])
        written = greedy_from_memory(model, memory, padding, max_codes=room, block_size=size)
        blocks = distinct_blocks(self.formatter.canonical_blocks(written.tokens))
        true = self.formatter.canonical_blocks(batch["targets_seq2seq"].long())
        there = (blocks != PAD_IDX).any(-1)  # [B, room]
        number = there.sum(1)
        fits = kept & (number > 0) & (number <= MAX_CODES)
        front = torch.argsort((~there).long(), dim=1, stable=True)[..., None].expand_as(blocks)
        front = blocks.gather(1, front)
        self._keep(
            written_right=metrics.same_code_sets(blocks, true, PAD_IDX)[kept], written_there=fits[kept]
        )
        for count in number[fits].unique().tolist():
            rows = (fits & (number == count)).nonzero()[:, 0]
            orders = torch.tensor(list(permutations(range(count))), device=rows.device)  # [orders, count]
            of, codes = rows.repeat_interleave(len(orders)), front[rows][:, orders].flatten(0, 1)
            seen = None if padding is None else padding[of]
            logits, tokens = code_logits(model, memory[of], seen, codes, room)
            found = Sequences.of(batch["rows"][of], logits, tokens, size)
            missing = room - found.odds.shape[1]
            odds, ends = pad(found.odds, (0, missing), value=float("nan")), pad(found.ends, (0, missing))
            self._keep(of=found.row, first=found.first, later=found.later, odds=odds, ends=ends)

    def _add_both(self, written: Tensor, logits: Tensor, on: Tensor, is_true: Tensor) -> None:
        """As many codes as the linear decoder gives, of its candidates ranked by both; on: those that it
        gives itself, bool [kept, codes].
        """
        assert self.search is not None
        codes = logits.topk(min(CANDIDATES, logits.shape[1])).indices
        scores, order = self.search.joint(written.gather(1, codes), logits, codes).sort(1, descending=True)
        codes, number = codes.gather(1, order), on.sum(1)
        first = torch.arange(codes.shape[1], device=on.device) < number[:, None]
        answered = torch.zeros_like(on).scatter(1, codes, first)
        found = Ranked.of(scores)
        self._keep(
            both_score=found.score,
            both_norms=found.norms,
            both_best=is_true.gather(1, codes[:, :1])[:, 0],
            both_several=number > 1,
            both_right=(answered == is_true).all(1),
        )

    def gathered(self, world: World) -> tuple[Any, Any, Any, Any] | None:
        """The answers to all rows in their order, as `confidence.fit` takes them, on rank 0; None on the
        others. All ranks.
        """
        shares = world.gather_on_main({name: torch.cat(values) for name, values in self.parts.items()})
        if shares is None:
            return None
        names = dict.fromkeys(name for share in shares for name in share)
        found = {name: torch.cat([share[name] for share in shares if name in share]) for name in names}
        order = found.pop("rows").argsort(stable=True)
        written = outputs = ranked = both = None
        if "of" in found:
            parts = [found.pop(name) for name in ("of", "first", "later", "odds", "ends")]
            by_row = parts[0].argsort(stable=True)
            written = Sequences(*(part[by_row] for part in parts))
        found = {name: value[order] for name, value in found.items()}
        if written is not None:
            written = written, found["written_right"], found["written_there"]
        if "score" in found:
            ranked = Ranked(found["score"], found["norms"]), found["ranked_right"]
        if "logits" in found:
            outputs = found["logits"], found["hits"], found["of_sets"], found["flat_right"]
        if "both_score" in found:
            ranking = Ranked(found["both_score"], found["both_norms"])
            both = ranking, found["both_best"], found["both_several"], found["both_right"]
        return written, outputs, ranked, both


class Fitted(NamedTuple):
    """confidence: for a checkpoint; line: what to tell of it."""

    confidence: Confidence
    line: str


def too_few(texts: int, remedy: str) -> str:
    return (
        f"Confidence is not fitted: {texts:,} distinct texts to fit it on, and it takes {MIN_TEXTS}"
        f" ({remedy}); probabilities are the decoders' own"
    )


def fit(
    loaded: models.Loaded,
    rows: TextRows,
    text_hash: np.ndarray,
    world: World,
    batch_size: int,
    precision: Precision,
) -> Fitted | None:
    """Fits a model's confidence on rows of MIN_TEXTS distinct texts or more: those of MAX_TEXTS texts, at
    most MAX_ROWS, spread over the file. text_hash: of each row, uint64 [N]. All ranks; None on all but rank
    0, and on all where the run was asked to stop.
    """
    text_hash = np.asarray(text_hash)
    index = np.flatnonzero(text_hash <= np.unique(text_hash)[:MAX_TEXTS][-1])
    if len(index) > MAX_ROWS:
        index = index[np.linspace(0, len(index) - 1, MAX_ROWS).astype(np.int64)]
    thresholds = Thresholds.of(loaded[2])
    least = torch.tensor([thresholds.least(name) for name in rows.languages], dtype=torch.float64)
    task = AnswersTask(loaded, least[np.asarray(rows.rows.language)[index].astype(np.int64)])
    plan = BatchPlan(len(index), batch_size * world.size, world.size, batch_size)
    loader = BatchLoader(MicroBatches(SomeRows(rows, index), plan, world.rank), world)
    try:
        loop.evaluate(loaded[0], loader, task, world, precision, world.stop_agreed)
    except Stopped:
        return None
    answers = task.gathered(world)
    if answers is None:
        return None
    with torch.random.fork_rng([]):
        found, errors = confidence.fit(*answers, text_hash[index])
    changes = [f"{name} {100 * before:.1f} → {100 * after:.1f}" for name, (before, after) in errors.items()]
    best, why = found.best_decoder(loaded[2].get("kind", "mixer"))
    return Fitted(
        found,
        f"confidence is fitted on {found.texts:,} texts; expected calibration error there, in points:"
        f" {', '.join(changes)}. --decoder auto is {best} ({why})",
    )


def fit_run(args: JobConfig, formatter: BlockyFormatter, world: World, data: PreparedData) -> None:
    """Fits the confidence of the checkpoints of a run that has ended, best.bin and last.bin, as far as they
    do not have one, on its validation rows. All ranks.
    """
    names = [os.path.join(args.save_path, name) for name in (checkpoint.BEST, checkpoint.LAST)]
    steps: dict[int, list[str]] = world.run_on_main("confidence", lambda: steps_without(names, data))
    texts = len(np.unique(np.asarray(data.val.text_hash)))
    if steps and texts < MIN_TEXTS:
        world.print(too_few(texts, "--share-val is the share of texts that finetune.py sets aside"))
        return
    precision = Precision.of(args, world.device)
    for files in steps.values():
        model, own_formatter, state = models.load_model(files[0], world.device)
        rows = make_rows(args, formatter, world, data, state["config"])[1]
        assert rows is not None
        size = min(args.samples_at_once, MAX_BATCH)
        loaded = model.to(precision.dtype), own_formatter, state
        fitted = fit(loaded, rows, data.val.text_hash, world, size, precision)
        if world.stop_agreed():
            world.print("Confidence is not fitted yet: the same command fits it")
            return
        world.run_on_main("store confidence", partial(store, files, fitted))
        if fitted is not None:
            world.print(f"{' and '.join(map(os.path.basename, files))}: {fitted.line}")


def store(files: list[str], fitted: Fitted | None) -> None:
    """Puts it into checkpoints of the same weights. Rank 0 only; nobody else may write them meanwhile."""
    assert fitted is not None
    for file in files:
        content = checkpoint.load(file)
        content["confidence"] = fitted.confidence.to_dict()
        checkpoint.replace(file, content)


def steps_without(files: list[str], data: PreparedData) -> dict[int, list[str]]:
    """Those of the checkpoints that have no fitted confidence, by their step; the same step is the same
    weights. Links, and what is no checkpoint on these data, are others' and stay as they are. Rank 0 only.
    """
    found: dict[int, list[str]] = {}
    for file in files:
        if os.path.islink(file) or not os.path.isfile(file):
            continue
        with contextlib.suppress(UserError):
            state = checkpoint.load(file)
            is_own = state.get("position", {}).get("fingerprint") == data.fingerprint
            if is_own and state.get("confidence") is None:
                found.setdefault(int(state["step"]), []).append(file)
    return found
