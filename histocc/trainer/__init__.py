"""The training of any model: order of the rows, steps, validation, log, checkpoints. It knows no
occupations.
"""
