"""histocc: train, fine-tune and run character-level models that code historical occupations."""

import importlib
import importlib.util
import sys

__version__ = "0.1.0"

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        f"torch is not there for this Python ({sys.executable}). Where launch_training.sh or tests/run made"
        " an environment: source .venv/bin/activate. Otherwise, in the folder of histocc: pip install -r"
        " requirements.txt",
        name="torch",
    )

_WHERE = {
    "OccCANINE": "histocc.occ_canine",
    "Seq2SeqMixerOccCANINE": "histocc.model.mixer",
    "BlockOrderInvariantLoss": "histocc.model.loss",
    "OrderInvariantSeq2SeqCrossEntropy": "histocc.model.loss",
    "LossMixer": "histocc.model.loss",
    "EvalEngine": "histocc.compat.evaluation",
    "TopKEvalEngine": "histocc.compat.evaluation",
    "DATASETS": "histocc.compat.datasets",
}
__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str):
    """Loads a public name, and torch with it, when it is first used."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'histocc' has no attribute {name!r}")
