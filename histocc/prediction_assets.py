"""The published place of `OccCANINE`."""

from histocc.compat.datasets import keys as load_keys  # noqa: F401
from histocc.occ_canine import OccCANINE  # noqa: F401
from histocc.thresholds import PUBLISHED

THRESHOLD_LOOKUP = PUBLISHED["by_language"]
