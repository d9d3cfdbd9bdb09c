"""What a run does if its arguments leave it open: a model from scratch has other needs than one that starts
from trained weights.

The choice is made once, when the initial weights are, and is kept in the checkpoint.
"""

from dataclasses import dataclass
from typing import Any

from histocc.data.arrays import PreparedData
from histocc.formatter import PAD_IDX, BlockyFormatter
from histocc.job.config import JobConfig, Losses
from histocc.model.confidence import USUAL
from histocc.model.distillation import DistillationLoss
from histocc.model.loss import (
    BEST_FIT,
    MEAN,
    ONE_TO_ONE,
    ROWS,
    BlockOrderInvariantLoss,
    LinearLoss,
    LossMixer,
)
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.runtime import checkpoint
from histocc.trainer import run

EQUAL_SHARE = 0.5
# the wider the encoder the lower; measured for tiny
SCRATCH_RATES = {
    "tiny": 1e-3,
    "small": 5e-4,
    "base": 1.5e-4,
    "ngrams": 1e-3,
}
# In benchmarks/LOG.md: with a mean over the classes, a new linear decoder learns next to nothing at the rate
# of the rest, and what was fitted already becomes worse at it.
NEW_LINEAR_LR_FACTOR = {"mean": 30.0, "rows": 5.0}
FITTED_LINEAR_LR_FACTOR = 0.1
# dest: (from scratch, from trained weights). Chosen on held-out texts; see benchmarks/LOG.md.
CHOICES = {
    "learning_rate": (SCRATCH_RATES, 2e-5),
    "empty_blocks": ("first", "all"),
    "linear_loss": (ROWS, MEAN),
    "block_loss": (ONE_TO_ONE, BEST_FIT),
}


def decide(args: JobConfig, trained: dict | None = None, first: dict | None = None) -> JobConfig:
    """Arguments without a None among CHOICES: always those of `trained`, the checkpoint that is resumed or
    validated; else those of a part in `first`, the initial weights, that is trained already; else those of a
    start from scratch.
    """
    if trained is not None:
        saved = trained.get("args", {})  # published weights have none
        decided = {name: saved.get(name, usual) for name, (_, usual) in CHOICES.items()}
        return args.decide(**decided, many_codes_weight=saved.get("many_codes_weight", 1.0))
    open_ones = [name for name in CHOICES if getattr(args, name) is None]
    return args.decide(**{name: _decided(name, args, first) for name in open_ones})


def _decided(dest: str, args: JobConfig, first: dict | None) -> Any:
    scratch, usual = CHOICES[dest]
    weights = () if first is None or args.only_encoder else first["model"]
    part = {"linear_loss": "linear_decoder.", "block_loss": "decoder."}.get(dest)
    is_trained = first is not None if part is None else any(name.startswith(part) for name in weights)
    if is_trained:
        if first is None or dest == "learning_rate":  # which belongs to a schedule, not to weights
            return usual
        return first.get("args", {}).get(dest, usual)
    return scratch[args.model_size or "base"] if isinstance(scratch, dict) else scratch


def of_run(state: dict) -> dict[str, Any]:
    """What the checkpoint of a run keeps elsewhere than in its arguments, by flag."""
    config = state["config"]
    return {
        "memory_mask": config["memory_mask"],
        "published_target_mask": not config["target_mask"],
        "clean_text": config["text"],
    }


def refuse_other_arguments(args: JobConfig, state: dict) -> None:
    """Raises UserError if a run is to be resumed with other arguments than those that decide its result."""
    before, teaches = state["args"].get("teacher"), bool(args.teacher)
    other_teacher = [f"--teacher was {before}, now it is {args.teacher}"] * (teaches != bool(before))
    run.refuse_other_arguments(args, state, other_teacher, of_run(state))


def make_loss(args: Losses, formatter: BlockyFormatter, temperature: float = 1.0) -> LossMixer:
    """The loss of decided arguments. temperature: of what a teacher says, if rows have one."""
    empty_blocks, matching, linear = args.empty_blocks, args.block_loss, args.linear_loss
    assert empty_blocks and matching and linear, "still open"
    blocks, block_size = formatter.max_num_codes, formatter.block_size
    loss_fn = BlockOrderInvariantLoss(
        PAD_IDX, blocks, block_size, empty_blocks, matching, args.many_codes_weight
    )
    return DistillationLoss(loss_fn, LinearLoss(linear), args.seq2seq_weight, temperature)


def coding_entries(
    linear_loss: str | None, join_rows: float, has_ngrams: bool, data: PreparedData
) -> dict[str, Any]:
    """What a checkpoint says of how its linear decoder is used: `linear_share`, its part in rankings,
    where n-grams make it as good as the other decoder; `thresholds`, of which its loss decides whether
    its best code always counts, and that not more do than a row of the data has. `evaluate
    --fit-thresholds` finds better ones."""
    found: dict[str, Any] = {"linear_share": EQUAL_SHARE} if has_ngrams else {}
    if linear_loss == ROWS:
        most = max(*map(int, data.report["codes_per_row"]), 1, min(data.max_codes, 2 * (join_rows > 0)))
        found["thresholds"] = {
            "default": USUAL,
            "by_language": {},
            "source": "usual",
            "at_least_one": True,
            "at_most": most,
        }
    return found


@dataclass(frozen=True)
class LinearRate:
    """The learning rate of the linear decoder and its n-grams, as a multiple of the rest's; ngrams_alone: of
    these alone; fitted: whether they were fitted before the first step.
    """

    factor: float = 1.0
    ngrams_alone: bool = False
    fitted: bool = False

    def in_words(self, model: Seq2SeqMixerOccCANINE) -> str:
        """What has another learning rate than the rest, behind that of the rest."""
        names = ["the linear decoder"] * (not self.ngrams_alone) + ["the n-grams"] * bool(model.ngrams)
        return f", of {' and '.join(names)} {self.factor:g} times that" if self.factor != 1 else ""


def linear_rate(args: JobConfig, model: Seq2SeqMixerOccCANINE, resumed: dict | None) -> LinearRate:
    """For decided settings, and a model with the weights that it starts from; a resumed run keeps its own."""
    ngrams, given = model.ngrams, args.linear_lr_factor
    if resumed:
        own = list(ngrams.parameters()) if ngrams else []
        with checkpoint.reading(resumed["path"]):
            groups, rates = resumed["optimizer"]["param_groups"], resumed["scheduler"]["base_lrs"]
            alone = bool(own) and len(groups) == 2 and len(groups[1]["params"]) == len(own)
            return LinearRate(rates[-1] / rates[0], alone)
    new = not model.linear_decoder.weight.any()
    fitted = new and ngrams is not None and args.ngram_passes > 0
    if fitted and not args.initial_checkpoint:
        return LinearRate(given or FITTED_LINEAR_LR_FACTOR, fitted=True)
    new_ngrams = ngrams is not None and not ngrams.linear.weight.any()
    is_new = new_ngrams if ngrams is not None else new
    usual = NEW_LINEAR_LR_FACTOR[args.linear_loss or "mean"] if is_new else 1.0
    return LinearRate(given or usual, ngrams_alone=new_ngrams and not new and given is None)


def fast_parameters(model: Seq2SeqMixerOccCANINE, linear: LinearRate) -> tuple[list[str], float]:
    """Names of what has a learning rate of its own, and its factor: the linear decoder with its n-grams, or
    these alone.
    """
    apart = [] if linear.ngrams_alone else ["linear_decoder"]
    apart += ["ngrams"] if model.ngrams else []
    fast = [f"{part}.{name}" for part in apart for name, _ in model.get_submodule(part).named_parameters()]
    return fast if linear.factor != 1 else [], linear.factor
