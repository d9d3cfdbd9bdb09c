"""The published place of the engines of evaluation."""

from histocc.compat.evaluation import EvalEngine, TopKEvalEngine  # noqa: F401
