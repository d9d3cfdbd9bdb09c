"""histocc: train, fine-tune and run character-level models that code historical occupations."""

import importlib
import importlib.util
import os
import sys

__version__ = "0.1.0"

# OpenMP's threads wait for each other by spinning. Beside another busy process the thread that is waited for
# may not be running, and the others spin through their time slices: training on two cores fell from 204 to 69
# samples/s, and with this limit to 137. libgomp reads it when torch is loaded, so it is set here; what the
# user has set wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        f"torch is not there for this Python ({sys.executable}). Where launch_training.sh or tests/run made"
        " an environment: source .venv/bin/activate. Otherwise, in the folder of histocc: pip install -r"
        " requirements.txt",
        name="torch",
    )

_WHERE = {
    "OccCANINE": "histocc.occ_canine",
    "OccupationClassifier": "histocc.estimator",
    "Seq2SeqMixerOccCANINE": "histocc.model.mixer",
    "BlockOrderInvariantLoss": "histocc.model.loss",
    "OrderInvariantSeq2SeqCrossEntropy": "histocc.model.loss",
    "LossMixer": "histocc.model.loss",
    "EvalEngine": "histocc.eval_metrics",
    "DATASETS": "histocc.prediction_assets",
}
__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str):
    """Load a public name, and torch with it, when it is first used."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'histocc' has no attribute {name!r}")
