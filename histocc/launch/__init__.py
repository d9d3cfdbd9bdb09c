"""What the launchers make of their arguments, of the machine and of the data, until torchrun starts.

The shell scripts find or make a Python environment and then run this folder as a program, in any Python 3.8
or newer: with `--print-only` there may be none that has torch. So nothing here imports torch or numpy.
"""
