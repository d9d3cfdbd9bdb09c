"""histocc: train, fine-tune and run character-level models that code historical occupations."""

import importlib
import importlib.util
import os
import sys

__version__ = "0.1.0"

# OpenMP's threads wait for each other by spinning. If another process is busy, the awaited thread may not be
# running while the others spin through their time slices: training on two cores fell from 204 to 69
# samples/s, and with this limit to 137. libgomp reads it when torch is loaded, so it is set here, unless the
# user has set it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if importlib.util.find_spec("torch") is None:
    _said = (
        f"histocc needs torch, which this Python ({sys.executable}) lacks. In the folder of histocc, run:"
        " source .venv/bin/activate, or if there is no .venv: pip install -r requirements.txt"
    )
    if os.path.basename(sys.argv[0]) in ("-m", "histocc", "finetune.py", "train_mixer.py"):  # a command
        sys.exit(print(f"error: {_said}", file=sys.stderr) or 2)
    raise ModuleNotFoundError(_said, name="torch")

_WHERE = {
    "OccCANINE": "histocc.occ_canine",
    "OccupationClassifier": "histocc.estimator",
    "Seq2SeqMixerOccCANINE": "histocc.model.mixer",
    "BlockOrderInvariantLoss": "histocc.model.loss",
    "OrderInvariantSeq2SeqCrossEntropy": "histocc.model.loss",
    "LossMixer": "histocc.model.loss",
    "EvalEngine": "histocc.eval_metrics",
    "DATASETS": "histocc.prediction_assets",
    "join_columns": "histocc.text",
    "load_model": "histocc.published.models",
}
__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str):
    """Load a public name or module, and torch with it, when it is first used."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in ("evaluate", "plot"):
        return importlib.import_module(f"histocc.{name}")
    raise AttributeError(f"module 'histocc' has no attribute {name!r}")
