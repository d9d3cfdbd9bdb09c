"""A small data set in six languages, written for this project, so that everything runs with no download."""

from histocc.sample.generate import demo_rows, rows

__all__ = ["demo_rows", "rows"]
