"""The learning rate of the linear decoder, which has its own."""

from dataclasses import dataclass

from histocc.job.config import JobConfig
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.runtime import checkpoint

# In benchmarks/LOG.md: with a mean over the classes, a new linear decoder learns next to nothing at the rate
# of the rest, and what was fitted already becomes worse at it.
NEW_LINEAR_LR_FACTOR = {"mean": 30.0, "rows": 5.0}
FITTED_LINEAR_LR_FACTOR = 0.1


@dataclass(frozen=True)
class LinearRate:
    """The learning rate of the linear decoder and its n-grams, as a multiple of the rest's; ngrams_alone: of
    these alone; fitted: whether they were fitted before the first step.
    """

    factor: float = 1.0
    ngrams_alone: bool = False
    fitted: bool = False


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
