"""The program that the shell scripts start."""

from __future__ import annotations

import argparse
import os
import time

from histocc.launch.command import REPO
from histocc.launch.launchers import LAUNCHERS, Options
from histocc.launch.machine import parse_torch
from histocc.launch.output import say_error
from histocc.launch.slurm import SLURM_JOB, slurm_job
from histocc.launch.start import launch
from histocc.runtime.errors import UserError


def main(argv: list[str]) -> int:
    """Checks the arguments of a launcher, or starts it.

    Args:
        argv: the launcher, options of the shell script that starts this, "--", and the user's arguments.

    Returns:
        The exit code: 2 for a mistake of the user's.
    """
    if "--" not in argv:
        say_error(
            "histocc/launch is started by launch_training.sh and run_multi_gpu_train.sh: --help of these"
        )
        return 2
    split = argv.index("--")
    options, words = parse_options(argv[:split]), argv[split + 1 :]
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{REPO}:{path}" if path else REPO  # for the processes, in whatever folder
    try:
        if options.launcher == SLURM_JOB:
            return slurm_job(options, words)
        return launch(options, words)
    except UserError as error:
        say_error(str(error))
        return 2


def parse_options(words: list[str]) -> Options:
    """Reads the options of the shell scripts, which say what they found and do not check it."""
    parser = argparse.ArgumentParser(prog="histocc/launch", add_help=False, allow_abbrev=False)
    parser.add_argument("launcher", choices=LAUNCHERS)
    parser.add_argument("--check", action="store_true", help="only check the arguments")
    parser.add_argument("--print-only", action="store_true", help="start nothing")
    parser.add_argument("--started-as", default="", help="the command that started the launcher")
    parser.add_argument("--python", default="", help="the Python of the environment")
    parser.add_argument("--torch", default="", help="what the probe said of its torch, empty for none")
    parser.add_argument("--seconds", default=0, type=int, help="time since the launcher was started")
    found = vars(parser.parse_args(words))
    started_at = time.monotonic() - found.pop("seconds")
    return Options(**{**found, "torch": parse_torch(found["torch"])}, started_at=started_at)
