"""Doubtful rows of a coded file to a person and back: `python -m histocc.review`."""
