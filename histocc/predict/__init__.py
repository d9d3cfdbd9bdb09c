"""Coding of new rows with a trained model: `python -m histocc.predict`."""
