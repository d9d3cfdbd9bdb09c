"""What was measured, one file a question: `python -m benchmarks.NAME`, from the root of the repository."""
