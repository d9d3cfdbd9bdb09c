"""The training of any model; it knows no occupations."""
