"""The training of any model; it knows nothing of occupations."""
