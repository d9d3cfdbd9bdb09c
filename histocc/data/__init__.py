"""From tables of rows to batches."""
