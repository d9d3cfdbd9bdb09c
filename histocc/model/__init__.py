"""The model: CANINE encoder, both decoders, losses, and the formats of its files."""
