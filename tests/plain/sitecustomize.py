"""Python reads this at its start where the folder is on its path: a machine without matplotlib, so that not
every run draws curves.
"""

import sys

sys.modules["matplotlib"] = None
