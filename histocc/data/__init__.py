"""The steps from tables of rows to batches."""
