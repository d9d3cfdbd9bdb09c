"""The formats of other programs, read and written: weights, keys, characters."""
