"""Learning without an encoder: few texts in closed form, on the answers of a model; new n-grams by a fit."""
