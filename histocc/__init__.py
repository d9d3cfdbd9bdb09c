"""histocc: train, fine-tune and run character-level models that code historical occupations."""

import importlib

__version__ = "0.1.0"

_WHERE = {
    "OccCANINE": "histocc.occ_canine",
    "Seq2SeqMixerOccCANINE": "histocc.mixer",
    "BlockOrderInvariantLoss": "histocc.loss",
    "OrderInvariantSeq2SeqCrossEntropy": "histocc.loss",
    "LossMixer": "histocc.loss",
}
__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str):
    """Loads a public name, and torch with it, when it is first used."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'histocc' has no attribute {name!r}")
