"""Names that the published package has in this module."""

from typing import Literal

from histocc.formatter import hisco_key
from histocc.model.confidence import PUBLISHED
from histocc.occ_canine import OccCANINE, as_table  # noqa: F401
from histocc.sample.generate import rows

PredType = Literal["flat", "greedy", "full", "greedy-topk", "embeddings"]
SystemType = Literal["hisco"] | str
BehaviorType = Literal["good", "fast"]
ModelType = Literal["flat", "seq2seq", "mix"]
ModelName = Literal["OccCANINE", "OccCANINE_s2s", "OccCANINE_s2s_mix"]
THRESHOLD_LOOKUP = PUBLISHED["by_language"]


def load_keys():
    """Return the HISCO key: columns code (number of the linear output) and hisco, without the titles."""
    return as_table({"code": list(range(len(hisco_key()))), "hisco": list(hisco_key())})


def toydata():
    """Return made-up rows of registers in six languages (not the published rows)."""
    columns = zip(("occ1", "lang", "hisco_1", "hisco_2", "hisco_3"), zip(*rows(10_000, seed=1)))
    return as_table({name: [cell or None for cell in column] for name, column in columns})


DATASETS = {"keys": load_keys, "toydata": toydata}
