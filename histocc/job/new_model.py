"""What a new model starts from where it starts from nothing: frequencies of the codes, and n-grams that
were fitted to the texts."""

from collections.abc import Callable

import numpy as np
import torch

from histocc.data.arrays import PreparedData
from histocc.data.dataset import TextRows
from histocc.job.config import JobConfig
from histocc.job.ngram_fit import BATCH, DistinctRows, TextNgrams, fit, ngrams_of
from histocc.model.loss import LossMixer
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.model.ngrams import AUTO, NONE
from histocc.runtime.errors import UserError
from histocc.runtime.log import Stage
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World
from histocc.trainer.batches import BatchPlan, MicroBatches

NGRAM_WIDTH = 128  # numbers for each n-gram
MOST_FOUND = 18  # 2^18 n-grams, since a step of the optimizer goes over all


def has_ngrams(asked: str, first: dict | None, only_encoder: bool) -> bool:
    """Whether a new run has n-grams. asked: --ngrams; first: the initial weights. Raises UserError where
    these have others than are asked for."""
    held = None if first is None or only_encoder else first["config"].get("ngrams")
    if held is not None and (asked == NONE or asked != AUTO and held["rows"] > 1 << int(asked)):
        raise UserError(
            f"--ngrams {asked}: the initial weights have {held['rows']:,} n-grams and need them; leave "
            "--ngrams out, or take --only-encoder"
        )
    return held is not None or asked not in (AUTO, NONE) or asked == AUTO and first is None


def ngram_config(
    args: JobConfig, first: dict | None, world: World, data: PreparedData
) -> tuple[dict | None, tuple | None]:
    """(`ngrams` in the config of a new run, None for a model without; hashes and weights of the n-grams
    of the training texts, on rank 0, where the initial weights bring none). All ranks. Raises UserError."""
    if not has_ngrams(args.ngrams, first, args.only_encoder):
        return None, None
    if first is not None and not args.only_encoder and first["config"].get("ngrams"):
        return first["config"]["ngrams"], None
    counted = {}

    def count() -> int:
        most = 1 << (MOST_FOUND if args.ngrams == AUTO else int(args.ngrams))
        counted["found"] = TextNgrams(data, args.max_len, world.give_up_if_asked).weights(most)
        return len(counted["found"][0])

    rows = world.run_on_main("n-grams", count)
    return ({"rows": rows, "width": NGRAM_WIDTH} if rows else None), counted.get("found")


def start_at_frequencies(model: Seq2SeqMixerOccCANINE, data: PreparedData) -> None:
    """A new linear decoder starts at how often each code stands in the training rows, whatever the text:
    its bias is the log-odds, its weights are 0. From ½ each, a short training is spent on learning that
    codes are rare."""
    rows, counts = len(data.train), np.zeros(len(data.codes), dtype=np.int64)
    for start in range(0, rows, 1 << 18):
        codes = data.train.codes[start : start + (1 << 18)]
        counts += np.bincount(codes[codes >= 0], minlength=len(counts))
    share = torch.from_numpy((counts + 0.5) / (rows + 1))
    with torch.no_grad():
        model.linear_decoder.weight.zero_()
        model.linear_decoder.bias.copy_(torch.logit(share))


def fit_ngrams(
    model: Seq2SeqMixerOccCANINE,
    data: PreparedData,
    as_rows: Callable[[DistinctRows], TextRows],
    loss_fn: LossMixer,
    passes: int,
    seed: int,
    check: Callable[[str, int, int], None],
) -> float:
    """`ngram_fit.fit` on the distinct training rows of a run. as_rows: what the trainer takes of them.
    check: as there. Returns the seconds."""
    rows = DistinctRows(data.train)
    batches = MicroBatches(as_rows(rows), BatchPlan(len(rows), BATCH, 1, BATCH), 0, seed)
    return fit(model, batches, rows.weight, loss_fn, passes, seed, check)


def progress(world: World) -> Callable[[str, int, int], None]:
    """What `fit_ngrams` calls before each step: shows how far it is, and ends it where the run is to stop.
    Its parts are stages of their own, since a step with both decoders takes several times as long as one
    with the linear decoder."""
    stage: Stage | None = None

    def check(part: str, step: int, steps: int) -> None:
        nonlocal stage
        if world.stop_asked_anywhere():
            world.print(
                f"The fit is given up after {step:,} of {steps:,} steps with the {part}; fewer --ngram-passes"
                " make it shorter"
            )
            raise Stopped
        if step == 0:
            stage = Stage(f"fitting n-grams, {part}", steps, "steps")
        assert stage is not None
        stage.at(step)
        if step + 1 >= steps:
            stage.close()

    return check


def start_ngrams(
    model: Seq2SeqMixerOccCANINE,
    world: World,
    counted: tuple | None,
    fit: Callable[[], float] | None,
    frozen: bool,
) -> None:
    """Gives every rank the n-grams of rank 0, and its decoders. counted: hashes and weights of the
    n-grams, on rank 0; fit: what trains them there, returns its seconds; frozen: whether the encoder stays as
    it is. All ranks.
    """

    def first() -> float:
        if counted:
            ngrams_of(model).hashes.copy_(torch.from_numpy(counted[0]))
            ngrams_of(model).idf.copy_(torch.from_numpy(counted[1]))
        return fit() if fit else 0.0

    seconds = world.run_on_main("fit of n-grams", first)
    own = {name: value for name, value in model.state_dict().items() if not name.startswith("encoder.")}
    model.load_state_dict(world.broadcast(own if world.is_main else None, 0), strict=False)
    if seconds:
        model.encoder.say_nothing()  # which the decoders know nothing of yet
        world.print(f"Fitted in {seconds:.1f} s")
        if frozen:
            world.print(
                "Note: --freeze-encoder without --initial-checkpoint: what an encoder reads that nothing has "
                "trained is left out, so the decoders have the n-grams alone"
            )
