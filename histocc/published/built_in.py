"""The built-in model, which codes HISCO without training data. It is fitted to the lists of `histocc.lexicon`
at first use, in a process of its own, and kept in a folder of the user's.
"""

import os
import re
import subprocess
import sys
import zlib

from histocc import __version__, lexicon
from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.runtime.files import save_path_problems
from histocc.runtime.world import is_first_rank

NAME = "built-in"
CACHE = "HISTOCC_CACHE"  # variable of the environment: the folder that keeps the model
LAUNCHED = re.compile("RANK|(LOCAL|GROUP|ROLE)_.*|WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|SLURM_.*")


def cache_folder() -> str:
    """Return the folder that keeps what histocc makes for its user."""
    usual = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME")
    usual = usual or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get(CACHE) or os.path.join(usual, "histocc")


def folder() -> str:
    """Return the folder of the built-in model, made if it is not there. Raises UserError."""
    number = lexicon.checksum(zlib.crc32(f"{__version__} {checkpoint.FORMAT}".encode()))
    path = os.path.join(cache_folder(), f"{NAME}-{number:08x}")
    if os.path.isdir(path):
        return path
    why = "".join(save_path_problems(path))
    if not why:
        if is_first_rank():
            print(f"The built-in model is made once, in about a minute: {path}", file=sys.stderr, flush=True)
        # a process that a launcher has started must not join its job a second time
        alone = {name: value for name, value in os.environ.items() if not LAUNCHED.fullmatch(name)}
        of_package = os.path.dirname(os.path.dirname(lexicon.__path__[0]))
        alone["PYTHONPATH"] = os.pathsep.join(filter(None, [of_package, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "histocc.sample.built_in", path]
        made = subprocess.run(command, env=alone, capture_output=True, encoding="utf-8", errors="replace")
        if not made.returncode and os.path.isdir(path):
            return path
        why = made.stderr.rpartition("error: ")[2].strip() or "it was stopped"
    raise UserError(f"the built-in model was not made: {why}\n  {CACHE} names another folder to keep it in")
