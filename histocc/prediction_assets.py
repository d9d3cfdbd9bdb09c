"""The published place of `OccCANINE`."""

from histocc.compat.datasets import keys as load_keys  # noqa: F401
from histocc.model.confidence import PUBLISHED
from histocc.occ_canine import OccCANINE  # noqa: F401

THRESHOLD_LOOKUP = PUBLISHED["by_language"]
