"""`python -m histocc.checkpoint export …`: the older name of `python -m histocc.export`."""

import sys

from histocc.export import main
from histocc.runtime.checkpoint import *  # noqa: F403

if __name__ == "__main__":
    sys.exit(main())
