"""The command `python -m histocc.export`: `histocc.published.export`."""

import sys

from histocc.published.export import differences, export, get_args_parser, main  # noqa: F401

if __name__ == "__main__":
    sys.exit(main())
