"""Every command under one name:

    histocc train --dataset data.csv --target-cols hisco_1 hisco_2 --save-path ./output
    torchrun --nproc_per_node=4 -m histocc train --distributed --dataset data.csv …

Parsers and code are those of `python finetune.py`, `python -m histocc.predict` and so on.
"""

import importlib
import sys

from histocc import __version__
from histocc.runtime import signals
from histocc.runtime.errors import UserError, run_command

COMMANDS = {
    "train": ("finetune", "train a model on one table, split into training and validation rows"),
    "mix": ("train_mixer", "train a model on training and validation files"),
    "predict": ("histocc.predict.__main__", "code a file of descriptions"),
    "review": ("histocc.review.__main__", "get doubtful rows of a coded file to a person and back"),
    "evaluate": ("histocc.evaluate.__main__", "say how good a model is on rows with known codes"),
    "compare": ("histocc.evaluate.compare", "say which of two models is better, by their reports"),
    "prepare": ("histocc.prepare", "say what a table holds and what is wrong with it"),
    "doctor": ("histocc.doctor", "check this machine, or all machines of a job, before a long run"),
    "watch": ("histocc.watch", "show the progress of a run"),
    "plot": ("histocc.plot", "draw the curves of one run or several, or an evaluation"),
    "export": ("histocc.export", "write a model for other tools"),
    "sample": ("histocc.sample.__main__", "make rows like those of a register"),
}
LISTEN_EARLY = ("train", "mix", "predict", "evaluate")  # importing torch takes seconds


def overview() -> str:
    commands = (f"  {name:<10}{what}" for name, (_, what) in COMMANDS.items())
    flags = "histocc COMMAND --help lists the flags of a command."
    return "\n".join(["usage: histocc COMMAND [flags]", "", *commands, "", flags])


def say(asked: str) -> None:
    """Print the version or the help. Raises UserError for anything else."""
    if asked == "--version":
        print(f"histocc {__version__}")
    elif asked in ("-h", "--help", "help"):
        print(overview())
    else:
        raise UserError(f"{asked}: there is no such command\n  histocc --help lists them")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    name = argv[0] if argv else "--help"
    if name not in COMMANDS:
        return run_command(lambda: say(name))
    if name in LISTEN_EARLY:
        signals.start_listening()
    sys.argv = [f"histocc {name}", *argv[1:]]  # the parsers read it
    return importlib.import_module(COMMANDS[name][0]).main() or 0


if __name__ == "__main__":
    sys.exit(main())
