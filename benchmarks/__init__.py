"""Measurements, one file for each question: `python -m benchmarks.NAME`, from the root of the repository."""
