"""How good a model is on rows with known codes: `python -m histocc.evaluate`."""
