"""Curves of one run or several in one plot (extra `plots`):

    python -m histocc.plot ./output ./other --output curves.png

Losses, accuracies, learning rate and speed by step; `curves` gives the figure, for notebooks.
"""

import sys

from histocc.trainer.plot import curves, get_args_parser, main

__all__ = ["curves", "get_args_parser", "main"]

if __name__ == "__main__":
    sys.exit(main())
