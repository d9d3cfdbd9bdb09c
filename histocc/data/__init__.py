"""The way from tables of rows to batches."""
