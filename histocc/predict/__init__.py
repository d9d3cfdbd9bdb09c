"""Coding of new rows with a trained model: `histocc predict`."""
