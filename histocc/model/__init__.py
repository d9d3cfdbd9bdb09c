"""The model: CANINE encoder, n-grams, both decoders, their search, losses and confidence."""
