"""What a run does where its arguments leave it open: a model from scratch has other needs than one that
starts from trained weights.

The choice is made once, when the initial weights are, and is kept in the checkpoint.
"""

import argparse

from histocc.data.arrays import PreparedData
from histocc.formatter import PAD_IDX, BlockyFormatter
from histocc.model.linear_loss import MEAN, ROWS, LinearLoss
from histocc.model.loss import BEST_FIT, ONE_TO_ONE, BlockOrderInvariantLoss, LossMixer
from histocc.model.thresholds import USUAL

EQUAL_SHARE = 0.5
# the wider the encoder the lower; measured for tiny
SCRATCH_RATES = {
    "tiny": 1e-3,
    "small": 5e-4,
    "base": 1.5e-4,
}
# dest: (from scratch, from trained weights). Chosen on held-out texts; see benchmarks/LOG.md.
CHOICES = {
    "learning_rate": (SCRATCH_RATES, 2e-5),
    "empty_blocks": ("first", "all"),
    "linear_loss": (ROWS, MEAN),
    "block_loss": (ONE_TO_ONE, BEST_FIT),
}
# What runs of versions without these flags were trained with.
BEFORE_THE_FLAG = {"block_loss": BEST_FIT, "linear_loss": MEAN, "many_codes_weight": 1.0, "join_rows": 0.0}


def settle(args: argparse.Namespace, trained: dict | None = None, first: dict | None = None) -> None:
    """Fills the arguments of CHOICES that are None, in place: those of `trained`, the checkpoint that is
    resumed or validated, always; else those of a part in `first`, the initial weights, that is trained
    already; else those of a start from scratch."""
    weights = () if first is None or args.only_encoder else first["model"]
    old = {
        "learning_rate": first is not None,
        "empty_blocks": first is not None,
        "linear_loss": any(name.startswith("linear_decoder.") for name in weights),
        "block_loss": any(name.startswith("decoder.") for name in weights),
    }
    for dest, choice in CHOICES.items():
        if trained is not None:
            saved = {**BEFORE_THE_FLAG, **trained.get("args", {})}
            value = saved.get(dest, choice[1])
        elif (value := getattr(args, dest)) is None:
            value = (first or {}).get(dest, choice[1]) if old[dest] else choice[0]
            value = value[args.model_size or "base"] if isinstance(value, dict) else value
        setattr(args, dest, value)
    if trained is not None:
        args.many_codes_weight = trained.get("args", {}).get("many_codes_weight", 1.0)


def differing(args: argparse.Namespace, saved: dict) -> list[str]:
    """Which of the arguments of CHOICES are given and are not those of the run, in words. saved:
    arguments of its checkpoint."""
    saved = {**BEFORE_THE_FLAG, **saved}
    return [
        f"--{dest.replace('_', '-')} was {saved[dest]!r}, now it is {getattr(args, dest)!r}"
        for dest in CHOICES
        if dest in saved and getattr(args, dest) not in (None, saved[dest])
    ]


def make_loss(args: argparse.Namespace, formatter: BlockyFormatter) -> LossMixer:
    """The loss that settled arguments ask for."""
    loss_fn = BlockOrderInvariantLoss(
        PAD_IDX,
        formatter.max_num_codes,
        formatter.block_size,
        args.empty_blocks,
        args.block_loss,
        args.many_codes_weight,
    )
    return LossMixer(loss_fn, LinearLoss(args.linear_loss), args.seq2seq_weight)


def coding_entries(args: argparse.Namespace, has_ngrams: bool, data: PreparedData) -> dict:
    """What a checkpoint says of how its linear decoder is used: `linear_share`, its part in rankings,
    where n-grams make it as good as the other decoder; `thresholds`, of which its loss decides whether
    its best code always counts, and that not more do than a row of the data has. `evaluate
    --fit-thresholds` finds better ones."""
    found = {"linear_share": EQUAL_SHARE} if has_ngrams else {}
    if args.linear_loss == ROWS:
        most = max(*map(int, data.report["codes_per_row"]), 1, min(data.max_codes, 2 * (args.join_rows > 0)))
        found["thresholds"] = {
            "default": USUAL,
            "by_language": {},
            "source": "usual",
            "at_least_one": True,
            "at_most": most,
        }
    return found
