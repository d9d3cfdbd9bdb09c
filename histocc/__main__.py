"""Every command under one name:

    histocc train data.csv --output ./output
    torchrun --nproc_per_node=4 -m histocc train data.csv --distributed --output ./output

Parsers and code are the same as in `python finetune.py`, `python -m histocc.predict` and so on.
"""

import difflib
import importlib
import sys

from histocc import __version__
from histocc.runtime import signals
from histocc.runtime.errors import UserError, run_command

COMMANDS = {
    "train": ("finetune", "train a model on your coded table"),
    "mix": ("train_mixer", "train a model on separate training and validation tables"),
    "predict": ("histocc.predict.__main__", "give the rows of a table codes"),
    "review": ("histocc.review.__main__", "check and decide codes by hand, in the browser or in a sheet"),
    "evaluate": ("histocc.evaluate.__main__", "measure how often a model is right on coded rows"),
    "compare": ("histocc.evaluate.compare", "compare two models by their evaluations"),
    "prepare": ("histocc.prepare", "report what a coded table holds and what is wrong with it"),
    "doctor": ("histocc.doctor", "check this machine, or all machines of a job, before a long run"),
    "watch": ("histocc.watch", "show the progress of a run"),
    "plot": ("histocc.plot", "draw the curves of runs or the results of evaluations"),
    "export": ("histocc.export", "write a model as one file, for other tools and machines"),
    "sample": ("histocc.sample.__main__", "write made-up tables to try histocc with"),
}
LISTEN_EARLY = ("train", "mix", "predict", "evaluate")  # importing torch takes seconds
TASKS = (
    ("Code a table without training", "histocc predict new.csv --output coded.csv"),
    ("Decide codes by hand, in the browser", "histocc review"),
    ("Train on your own coded table", "histocc train data.csv --output ./output"),
    ("Measure how often a model is right", "histocc evaluate data.csv --model ./output"),
    ("Train on several GPUs or a cluster", "torchrun --nproc_per_node=4 finetune.py data.csv --distributed"),
)


def overview() -> str:
    tasks = (f"  {task:<38}{line}" for task, line in TASKS)
    commands = (f"  {name:<10}{what}" for name, (_, what) in COMMANDS.items())
    lines = ["usage: histocc COMMAND [flags]", "", "What you can do, and what to type:", "", *tasks]
    return "\n".join([*lines, "", "Commands (histocc COMMAND --help describes one):", "", *commands])


def say(asked: str) -> None:
    """Print the version or the help. Raises UserError for anything else."""
    if asked == "--version":
        print(f"histocc {__version__}")
    elif asked in ("-h", "--help", "help"):
        print(overview())
    else:
        near = difflib.get_close_matches(asked, COMMANDS, 1)
        hint = f"; did you mean histocc {near[0]}?" if near else ""
        raise UserError(f"{asked}: there is no such command{hint}\n  histocc --help lists all commands")


def main(argv: list[str] | None = None) -> int:
    is_program, argv = argv is None, sys.argv[1:] if argv is None else list(argv)
    name = argv[0] if argv else "--help"
    if name not in COMMANDS:
        return run_command(lambda: say(name))
    if name in LISTEN_EARLY and is_program:  # else the process is the caller's
        signals.start_listening()
    sys.argv = [f"histocc {name}", *argv[1:]]  # the parsers read it
    return importlib.import_module(COMMANDS[name][0]).main() or 0


if __name__ == "__main__":
    sys.exit(main())
