"""Training on this machine, or on one of several that are started one by one; without data, on the sample."""

from __future__ import annotations

import os
import time

from histocc.launch.arguments import DATA_FLAGS, Arguments, parse, read_config
from histocc.launch.command import REPO, say_plan
from histocc.launch.data import Training, choose_save_path, describe_columns, holds_sample_run, training_of
from histocc.launch.launchers import (
    LAUNCHERS,
    Options,
    command_of,
    data_are_missing,
    find_own_script,
    make_plan,
    say_help,
)
from histocc.launch.machine import Devices, choose_devices, meeting_point, usable_cores
from histocc.launch.output import say, shell_line
from histocc.launch.processes import become, run_and_wait
from histocc.runtime.errors import UserError

SAVE_FLAGS = ("--save-path", "--save-dir", "--checkpoint-dir")

# Any number of processes gives the same total batch, and so the same result.
SAMPLE_FLAGS = {
    "--formatter": "hisco",
    "--target-cols": "hisco_1 hisco_2 hisco_3",
    "--language-col": "lang",
    "--model-size": "tiny",
    "--num-epochs": "1",
    "--ngram-passes": "5",
    "--schedule-steps": "60",
    "--max-steps": "60",
    "--batch-size": "32",
    "--global-batch-size": "64",
    "--learning-rate": "3e-4",
    "--warmup-pct": "0.1",
    "--seq2seq-weight": "0.9",
    "--encoder-dropout": "0",
    "--ngram-dropout": "0",
    "--augmentation-prob": "0",
    "--unk-lang-prob": "0",
    "--log-interval": "20",
    "--eval-interval": "1000",
    "--save-interval": "500",
}


def launch(options: Options, words: list[str]) -> int:
    """launch_training.sh and run_multi_gpu_train.sh; where all is well, becomes torchrun.

    Args:
        words: the user's arguments.

    Returns:
        The exit code.

    Raises:
        UserError: for a mistake of the user's.
    """
    launcher = LAUNCHERS[options.launcher]
    own_script = find_own_script()
    arguments = parse(words)
    if arguments.help:
        return say_help(launcher)
    training = training_of(arguments, own_script)
    if training is None and launcher.needs_data:
        raise data_are_missing(launcher)
    if options.check:
        return 0
    read_config(arguments)
    devices = choose_devices(arguments, launcher.default_processes, options.torch)
    if training is None:
        return train_on_sample(options, arguments, devices)
    return train_on_data(options, arguments, training, devices)


def train_on_data(options: Options, arguments: Arguments, training: Training, devices: Devices) -> int:
    """Trains on the user's data. Raises UserError where the save path holds the run on the sample."""
    describe_columns(training, arguments, options.python, options.torch is not None)
    choose_save_path(training, arguments)
    scales = LAUNCHERS[options.launcher].scales_learning_rate
    if scales and not arguments.has("--lr-scaling", "--global-batch-size"):
        training.flags += ["--lr-scaling", "linear"]
    if not arguments.has(*SAVE_FLAGS, "--overwrite") and holds_sample_run(training.save_path):
        raise UserError(
            f"{training.save_path} holds the run on the sample.\n  Choose another folder with -- --save-path"
            " DIR, or replace that run with -- --overwrite"
        )
    meeting = meeting_point(os.environ, options.started_as)
    threads = usable_cores() // devices.processes
    plan = make_plan(options, arguments, training, devices, meeting, threads)
    command = command_of(plan)
    say_plan(plan, command)
    if not options.print_only:
        become(command)
    return 0


# ---- the sample ----


def train_on_sample(options: Options, arguments: Arguments, devices: Devices) -> int:
    """Trains on the sample and shows what the model makes of texts that it has never seen.

    Returns:
        The exit code of the first command that fails.

    Raises:
        UserError: where the flags name data, or the save path holds another run.
    """
    if arguments.has(*DATA_FLAGS):
        raise data_are_missing(LAUNCHERS[options.launcher])
    training = sample_training(arguments)
    meeting = meeting_point(os.environ, options.started_as)
    threads = usable_cores() // devices.processes
    plan = make_plan(options, arguments, training, devices, meeting, threads)
    train = command_of(plan)
    say_plan(plan, train)
    sample = f"{training.save_path}/sample"
    commands = [
        [options.python, "-m", "histocc.sample", "--rows", "40000", "--seed", "1", "--split-dir", sample],
        train,
    ]
    makes_model = not arguments.has("--dry-run", "--prepare-only")
    if makes_model:
        commands.append([options.python, "-m", "histocc.sample.show", "--model", training.save_path])
        say(shell_line(commands[-1]))
    if options.print_only:
        return 0
    for command in commands:
        status = run_and_wait(command)
        if status != 0:
            return status
    if makes_model:
        say_what_is_next(options)
    return 0


def sample_training(arguments: Arguments) -> Training:
    """The training on the sample. Raises UserError where the save path holds another run."""
    training = Training("train_mixer.py", "the sample of histocc")
    choose_save_path(training, arguments)
    folder = training.save_path
    holds_other_run = os.path.isfile(f"{folder}/last.bin") and not holds_sample_run(folder)
    if holds_other_run and not arguments.has("--overwrite"):
        raise UserError(
            f"{folder} holds another run. Train on the sample elsewhere: ./launch_training.sh --"
            " --save-path DIR"
        )
    sample = f"{folder}/sample"
    training.flags += ["--train-data", f"{sample}/train.csv", "--val-data", f"{sample}/val.csv"]
    for flag, value in SAMPLE_FLAGS.items():
        training.flags += [flag, *value.split()]
    return training


def say_what_is_next(options: Options) -> None:
    """The last lines of a run on the sample."""
    minutes, seconds = divmod(int(time.monotonic() - options.started_at), 60)
    say(f"Took {minutes} min {seconds} s in all.")
    if options.python.startswith(f"{REPO}/.venv/") and os.environ.get("VIRTUAL_ENV") != f"{REPO}/.venv":
        say("For the commands of README.md: source .venv/bin/activate")
    say("Next, your own data: ./launch_training.sh 2 data.csv -- --save-path ./mine")
