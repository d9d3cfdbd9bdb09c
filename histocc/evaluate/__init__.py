"""How good a model is on rows with known codes: `python -m histocc.evaluate`, and `evaluate` from Python."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`evaluate` and `Report` are loaded, and torch with them, when they are first used."""
    if name == "evaluate":
        from histocc.evaluate.__main__ import evaluate

        return evaluate
    if name == "Report":
        from histocc.evaluate.report import Report

        return Report
    raise AttributeError(f"module 'histocc.evaluate' has no attribute {name!r}")
