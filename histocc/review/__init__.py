"""The review of doubtful rows of a coded file by a person: `histocc review`."""
