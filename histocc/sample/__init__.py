"""A small data set in six languages, written for this project, so that everything runs with no download."""

from histocc.sample.demo import demo_rows
from histocc.sample.generate import rows

__all__ = ["demo_rows", "rows"]
