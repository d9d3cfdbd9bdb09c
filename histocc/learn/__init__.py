"""Learning without an encoder: few texts in closed form on a model's answers, or a fit of new n-grams."""
