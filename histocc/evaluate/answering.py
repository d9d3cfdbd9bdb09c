"""What a model answers to the rows of an evaluation, over all processes."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from histocc.data.arrays import PreparedData, RowSet
from histocc.evaluate.answers import RANKED, Both, Collected, Outcomes
from histocc.evaluate.config import EvaluateConfig
from histocc.evaluate.fitted import known_languages, text_rows
from histocc.formatter import BlockyFormatter
from histocc.job import recipe
from histocc.job.config import Losses
from histocc.model import model_io
from histocc.model.code_trie import CodeTrie
from histocc.model.confidence import Confidence
from histocc.model.decoding import greedy_from_memory, sets_of
from histocc.model.linear_loss import MEAN
from histocc.model.loss import BEST_FIT
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.model.search import CodeSearch
from histocc.model.thresholds import Thresholds
from histocc.runtime.device import Precision
from histocc.runtime.forked import Forked, choose_processes
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import MixerTask
from histocc.trainer import loop
from histocc.trainer.batches import BatchLoader, MicroBatches
from histocc.trainer.plan import BatchPlan

# of models that do not say how they were trained
LOSS = {
    "block_loss": BEST_FIT,
    "empty_blocks": "all",
    "linear_loss": MEAN,
    "many_codes_weight": 1.0,
    "seq2seq_weight": 0.1,
}


def ranks_together(state: dict) -> bool:
    """Whether the report is also on the codes that both decoders rank together: of a model that was made for
    it, or has a share.
    """
    return state.get("kind", "mixer") == "mixer" and bool(
        state["config"].get("ngrams") or state.get("linear_share")
    )


def collector(
    outcomes: Outcomes,
    model: Seq2SeqMixerOccCANINE,
    formatter: BlockyFormatter,
    state: dict,
    confidence: Confidence,
) -> Callable[..., None]:
    """What the task gives every batch to."""
    together, share = ranks_together(state), state.get("linear_share") or 0.0
    search = None
    if state.get("kind") != "flat":
        tree = CodeTrie(list(state["key"]), formatter)
        search = CodeSearch(model, tree, share, confidence.ranking) if together else CodeSearch(model, tree)
    writing, sizes = confidence.written, (formatter.max_num_codes, formatter.block_size)

    def each(batch: dict, memory, padding, decoded, linear_logits) -> None:
        if writing is not None:
            decoded = greedy_from_memory(
                model, memory, padding, max_codes=sizes[0], block_size=sizes[1], writing=writing
            )
        blocks, set_probs = sets_of(model, memory, padding, decoded, formatter, writing)
        both = None
        if search is None:
            ranking = torch.full((len(blocks), RANKED), -1, device=blocks.device)
        elif together:
            written, linear = search.log_probs(batch["input_ids"], batch["attention_mask"])
            ranking = written.sort(dim=1, descending=True, stable=True).indices[:, :RANKED]
            scores = search.scores(written, linear)
            both = Both(written, scores.argmax(1), search.probs_of(scores).max(1).values)
        else:
            ranking = search.topk(batch["input_ids"], batch["attention_mask"], RANKED)[0]
        outcomes.add(batch, blocks, set_probs, ranking, linear_logits, both)

    return each


def answered(
    args: EvaluateConfig, world: World, loaded: model_io.Loaded, data: PreparedData, rows: RowSet
) -> tuple[dict, Outcomes]:
    """(what validation in training would log, the answers to this rank's rows). All ranks. Raises Stopped."""
    model, formatter, state = loaded
    Precision("float32", world.device).use()  # as in training
    read_as = known_languages(data, state["languages"])
    number = choose_processes(args.processes, world, -(-len(rows) // args.batch_size))
    parts = world.size * number
    plan = BatchPlan(len(rows), args.batch_size * parts, parts, args.batch_size)
    texts = text_rows(loaded, data, rows)
    confidence = Confidence() if args.raw_confidence else Confidence.of(state)
    outcomes = Outcomes(
        formatter, np.asarray(rows.language), read_as.languages, Thresholds.of(state), confidence.outputs
    )
    trained_with = {name: value for name, value in state.get("args", {}).items() if name in LOSS}
    loss_fn = recipe.make_loss(Losses(**LOSS | trained_with), formatter)
    task = MixerTask(loss_fn, formatter, collector(outcomes, model, formatter, state, confidence))

    def share(part: int) -> tuple[dict[str, float], Collected]:
        loader = BatchLoader(MicroBatches(texts, plan, world.rank * number + part))
        found = loop.own_totals(model, loader, task, world, stop=world.stop_agreed)
        return {name: float(value) for name, value in found.items()}, outcomes.collected

    totals: Counter[str] = Counter()
    for part, (found, collected) in enumerate(Forked(number, world.give_up_if_asked).each(share)):
        totals.update(found)
        if part:
            outcomes.take(collected)
    return loop.figures_of(dict(totals), world), outcomes
