"""The review of doubtful rows of a coded file by a person: `python -m histocc.review`."""
