"""The published place of `OccCANINE`."""

from histocc.model.confidence import PUBLISHED
from histocc.occ_canine import OccCANINE  # noqa: F401
from histocc.published.names import (  # noqa: F401
    BehaviorType,
    ModelName,
    ModelType,
    PredType,
    SystemType,
    load_keys,
)

THRESHOLD_LOOKUP = PUBLISHED["by_language"]
