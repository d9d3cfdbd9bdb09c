"""The published place of the engines of evaluation."""

from histocc.published.names import EvalEngine, TopKEvalEngine  # noqa: F401
