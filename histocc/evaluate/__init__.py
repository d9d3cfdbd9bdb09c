"""How good a model is on rows with known codes: `python -m histocc.evaluate`, and `evaluate` from Python."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`evaluate` is loaded, and torch with it, when it is first used."""
    if name != "evaluate":
        raise AttributeError(f"module 'histocc.evaluate' has no attribute {name!r}")
    from histocc.evaluate.__main__ import evaluate

    return evaluate
