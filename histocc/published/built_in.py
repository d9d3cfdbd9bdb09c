"""The built-in model, which assigns HISCO codes without training data. It is fitted to the lists of
`histocc.lexicon` at first use, in a separate process, and kept in a folder of the user.
"""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

from histocc import lexicon
from histocc.runtime.errors import UserError
from histocc.runtime.files import hash_of_sources, save_path_problems
from histocc.runtime.log import Stage
from histocc.runtime.world import is_first_rank

NAME = "built-in"
CACHE = "HISTOCC_CACHE"  # environment variable: the folder that keeps the model
LAUNCHED = re.compile("RANK|(LOCAL|GROUP|ROLE)_.*|WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|SLURM_.*")


def cache_folder() -> str:
    """Return the folder that keeps the files that histocc makes for its user."""
    usual = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME")
    usual = usual or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get(CACHE) or os.path.join(usual, "histocc")


def path() -> str:
    """Return the path of the built-in model, which changes with the program, its lists and constants."""
    return os.path.join(cache_folder(), f"{NAME}-{hash_of_sources('**/*.py', '**/*.csv')}")


def is_made(folder: str) -> bool:
    """Return whether a folder holds the model and its rows. A cleaner of caches may have removed some."""
    return all(any(Path(folder).glob(name)) for name in ("best.bin", "prepared/*/*.txt"))


def folder() -> str:
    """Return the folder of the built-in model, and make the model if necessary. Raises UserError."""
    made = path()
    if is_made(made):
        return made
    why = "".join(save_path_problems(made))
    if not why:
        if is_first_rank():
            print(f"The built-in model is made once, in about a minute: {made}", file=sys.stderr, flush=True)
        # a process started by a launcher must not join its job a second time
        alone = {name: value for name, value in os.environ.items() if not LAUNCHED.fullmatch(name)}
        of_package = os.path.dirname(os.path.dirname(lexicon.__path__[0]))
        alone["PYTHONPATH"] = os.pathsep.join(filter(None, [of_package, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "histocc.sample.built_in", made]
        pipe, said, stage = subprocess.PIPE, b"", Stage("making the built-in model", None, "seconds")
        with subprocess.Popen(command, env=alone, stdout=pipe, stderr=pipe) as process:
            while process.returncode is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said = process.communicate(timeout=1)[1]
                stage.add()
        if not process.returncode and is_made(made):
            return made
        why = said.decode(errors="replace").rpartition("error: ")[2].strip() or "it was stopped"
    raise UserError(f"the built-in model was not made: {why}\n  {CACHE} names another folder to keep it in")
