"""How good a model is on rows with known codes: `python -m histocc.evaluate`, and `evaluate` from Python."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`evaluate` and `Report` are loaded, and torch with them, when they are first used."""
    if name in ("evaluate", "Report"):
        from histocc.evaluate import call

        return getattr(call, name)
    raise AttributeError(f"module 'histocc.evaluate' has no attribute {name!r}")
