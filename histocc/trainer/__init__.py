"""The training of any model, without any knowledge of occupations."""
