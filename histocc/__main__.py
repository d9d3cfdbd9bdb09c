"""Every command under one name:

    histocc train --dataset data.csv --target-cols hisco_1 hisco_2 --save-path ./output
    torchrun --nproc_per_node=4 -m histocc train --distributed --dataset data.csv …

The same parsers and the same code as `python finetune.py`, `python -m histocc.predict` and so on.
"""

import importlib
import sys
from difflib import get_close_matches

from histocc import __version__
from histocc.runtime import signals
from histocc.runtime.entrypoint import run_command
from histocc.runtime.errors import UserError

COMMANDS = {
    "train": ("finetune", "train a model on one table, split into training and validation rows"),
    "mix": ("train_mixer", "train a model on training and validation files"),
    "predict": ("histocc.predict.__main__", "code a file of descriptions"),
    "review": ("histocc.review.__main__", "get doubtful rows of a coded file to a person and back"),
    "evaluate": ("histocc.evaluate.__main__", "say how good a model is on rows with known codes"),
    "prepare": ("histocc.prepare", "say what a table holds and what is wrong with it"),
    "doctor": ("histocc.doctor", "check this machine, or all machines of a job, before a long run"),
    "watch": ("histocc.watch", "show the progress of a run"),
    "plot": ("histocc.plot", "draw the curves of one run or several"),
    "export": ("histocc.export", "write a model for other tools"),
    "sample": ("histocc.sample.__main__", "make rows like those of a register"),
}
LISTEN_EARLY = ("train", "mix", "predict", "evaluate")  # importing torch takes seconds


def overview() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: histocc COMMAND [flags]",
            "",
            *(f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()),
            "",
            "histocc COMMAND --help lists the flags of a command; histocc --completion bash (or zsh, tcsh)",
            "prints a script that completes commands and flags in that shell (extra completion).",
        ]
    )


def completion(shell: str) -> str:
    """Raises UserError where the package shtab is missing or does not know the shell."""
    try:
        import shtab
    except ImportError:
        raise UserError("--completion needs the package shtab: pip install shtab") from None
    if shell not in shtab.SUPPORTED_SHELLS:
        raise UserError(f"--completion {shell}: choose from {', '.join(shtab.SUPPORTED_SHELLS)}")
    import argparse

    parser = argparse.ArgumentParser(prog="histocc")
    commands = parser.add_subparsers()
    for name, (module, what) in COMMANDS.items():
        flags = importlib.import_module(module).get_args_parser()
        command = commands.add_parser(name, parents=[flags], add_help=False, help=what)
        for action in command._actions:
            shown = str(action.metavar or "")
            kind = "FILE" in shown or shown == "PATH", shown in ("DIR", "RUN")
            if any(kind):
                action.complete = shtab.FILE if kind[0] else shtab.DIRECTORY  # pyright: ignore
    return shtab.complete(parser, shell)


def chosen(argv: list[str]) -> str | None:
    """The command that is meant; None where all is said already. Raises UserError."""
    first = argv[0] if argv else "--help"
    if first in ("-h", "--help", "help"):
        print(overview())
    elif first == "--version":
        print(f"histocc {__version__}")
    elif first == "--completion":
        print(completion(argv[1] if len(argv) > 1 else "bash"))
    elif first in COMMANDS:
        return first
    else:
        near = get_close_matches(first, COMMANDS, 1)
        hint = f" (is {near[0]} meant?)" if near else ""
        raise UserError(f"{first}: there is no such command{hint}\n  histocc --help lists them")
    return None


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    found: list[str] = []
    code = run_command(lambda: found.extend(filter(None, [chosen(argv)])))
    if not found:
        return code
    if found[0] in LISTEN_EARLY:
        signals.start_listening()
    sys.argv = [f"histocc {found[0]}", *argv[1:]]  # what the parsers read
    return importlib.import_module(COMMANDS[found[0]][0]).main() or 0


if __name__ == "__main__":
    sys.exit(main())
