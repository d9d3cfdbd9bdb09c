"""Formats of others, in and out: weights, keys, characters; and the names of the published package."""
