"""Evaluation of a model on rows with known codes: `histocc evaluate`, `evaluate` from Python."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Load `evaluate`, and torch with it, when it is first used."""
    if name != "evaluate":
        raise AttributeError(f"module 'histocc.evaluate' has no attribute {name!r}")
    from histocc.evaluate.__main__ import evaluate

    return evaluate
