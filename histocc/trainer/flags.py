"""Flags of any training script: folder of the run, loading, batches, schedule, machine; and what can be wrong
with them.

A flag with resumable=True may differ when a run is resumed; the rest decides the result and must stay.
"""

import argparse
import importlib.util
import math
from collections.abc import Callable

from histocc.runtime.arguments import Group, Parser, count, count_or_zero, flag, not_shares, positive
from histocc.runtime.entrypoint import add_process_arguments
from histocc.runtime.parallel import COMPRESSIONS, MODES
from histocc.trainer.batch_size import AutoBatchSize

# flag: package that it needs, and name of the extra
EXTRAS = {
    "tensorboard": "tensorboard",
    "log_wandb": "wandb",
}


def add_run_arguments(
    parser: Parser,
    save_flag: str,
    save_default: str | None,
    save_interval: int,
    each_epoch: bool = False,
) -> None:
    """The folder of a run, its log and its checkpoints. save_flag: the name of --save-path that the help
    shows; save_default: None where the flag is required; save_interval: the default; each_epoch: whether a
    checkpoint of each epoch is kept unless the user says no.
    """
    group = parser.add_argument_group("files of the run")
    group.add_argument(
        save_flag,
        *sorted({"--save-path", "--save-dir", "--checkpoint-dir"} - {save_flag}),
        dest="save_path",
        default=save_default,
        required=save_default is None,
        metavar="DIR",
        help="folder of the run: checkpoints, logs.csv, key.csv, prepared data; state in it is resumed",
        resumable=True,
    )
    group.add_argument(
        "--save-interval",
        type=count,
        default=save_interval,
        help="optimizer steps between checkpoints",
        resumable=True,
    )
    if each_epoch:
        group.add_argument(
            "--save-each-epoch",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="also keep checkpoint_epoch_N.pt of every epoch",
            resumable=True,
        )
    else:
        group.add_argument(
            "--save-each-epoch",
            action="store_true",
            help="also keep epoch_N.bin of every epoch",
            resumable=True,
        )
    group.add_argument(
        "--keep-checkpoints",
        type=count,
        default=3,
        help="how many {step}.bin stay; older ones are removed",
        resumable=True,
    )
    group.add_argument(
        "--overwrite", action="store_true", help="start over where the folder holds a run", resumable=True
    )
    group.add_argument(
        "--log-interval",
        type=count,
        default=100,
        help="optimizer steps between rows of the log",
        resumable=True,
    )
    group.add_argument(
        "--eval-interval",
        type=count,
        default=1000,
        help="optimizer steps between validations",
        resumable=True,
    )
    group.add_argument(
        "--log-wandb",
        action="store_true",
        help="also log to Weights & Biases (extra wandb); WANDB_MODE=offline needs no network",
        resumable=True,
    )
    group.add_argument(
        "--wandb-project-name",
        default=None,
        help="project for --log-wandb; histocc where it is not given",
        resumable=True,
    )
    group.add_argument(
        "--tensorboard",
        action="store_true",
        help="also log to TensorBoard, in the folder tensorboard of the run (extra tensorboard)",
        resumable=True,
    )
    group.add_argument(
        "--config",
        metavar="FILE.toml",
        default=None,
        help=(
            "arguments from a file: names of flags and their values, or the args.json of a run; the command"
            " line wins"
        ),
        resumable=True,
    )


def add_loader_arguments(parser: Parser) -> None:
    """Loading processes."""
    loader = parser.add_argument_group("loading")
    loader.add_argument(
        "--num-workers", type=count_or_zero, default=0, help="loading processes per process", resumable=True
    )
    loader.add_argument(
        "--prefetch-factor",
        type=count,
        default=None,
        help="batches that each worker loads ahead, with --num-workers (default: 2)",
        resumable=True,
    )
    loader.add_argument(
        "--pin-memory",
        action="store_true",
        help="page-locked memory, for faster copies to a GPU",
        resumable=True,
    )
    loader.add_argument(
        "--persistent-workers", action="store_true", help="keep the workers between epochs", resumable=True
    )


def add_training_arguments(
    parser: Parser, num_epochs: int, default_batch: int, rate: float | None, rate_help: str = ""
) -> Group:
    """Batches, schedule and stops; returns the group, for what the losses of a task take. num_epochs,
    default_batch, rate: defaults; rate_help: what the learning rate is by default, where `rate` is None.
    """
    group = parser.add_argument_group("training")
    group.add_argument(
        "--num-epochs",
        "--epochs",
        type=count,
        default=num_epochs,
        help="passes over the training data",
        resumable=True,
    )
    group.add_argument(
        "--batch-size",
        type=batch_size(default_batch),
        default=default_batch,
        metavar="N|auto",
        help=(
            "samples per process and micro-batch; auto: as many as fit into the GPU, or the fastest"
            f" number on a CPU, for the total batch that {default_batch} would make"
        ),
        resumable=True,
    )
    group.add_argument(
        "--accumulate-steps", type=count, default=1, help="micro-batches of an optimizer step", resumable=True
    )
    group.add_argument(
        "--global-batch-size",
        type=count,
        default=None,
        help=(
            "samples of an optimizer step over all processes; each takes its share in micro-batches of"
            " at most --batch-size (default: none; a step has --batch-size × --accumulate-steps of each"
            " process)"
        ),
        resumable=True,
    )
    group.add_argument(
        "--learning-rate",
        type=float,
        default=rate,
        help="peak learning rate" + f" (default: {rate_help})" * bool(rate_help),
        resumable=True,
    )
    group.add_argument(
        "--lr-scaling",
        choices=("none", "linear", "sqrt"),
        default="none",
        help="multiply the learning rate by the number of processes, or its square root",
    )
    group.add_argument(
        "--warmup-pct", type=float, default=0.05, help="share of the schedule spent warming up, 0…1"
    )
    group.add_argument(
        "--warmup-steps",
        type=count_or_zero,
        default=None,
        help="optimizer steps of warm-up, instead of --warmup-pct; without it that share decides",
    )
    group.add_argument(
        "--schedule-steps",
        type=count,
        default=None,
        help="length of the schedule (default: epochs × steps per epoch)",
    )
    group.add_argument(
        "--max-steps",
        type=count,
        default=None,
        help=(
            "stop after this many optimizer steps; the schedule stays (default: none, all epochs are trained)"
        ),
        resumable=True,
    )
    group.add_argument(
        "--stop-after",
        type=positive,
        default=None,
        metavar="MINUTES",
        help="stop and save this long after the start, for queues with a time limit (default: no limit)",
        resumable=True,
    )
    group.add_argument(
        "--max-bad-steps",
        type=count,
        default=20,
        help="steps in a row without a finite gradient after which the run ends; such steps change nothing",
        resumable=True,
    )
    group.add_argument("--weight-decay", type=float, default=0.01, help="AdamW's weight decay")
    group.add_argument("--seed", type=int, default=42, help="seed of weights, order, noise and dropout")
    group.add_argument(
        "--eval-only",
        action="store_true",
        help="validate --initial-checkpoint, or the best checkpoint of the run, and stop",
        resumable=True,
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help=(
            "everything but training: says what the run would take in time, memory and disk, from three steps"
        ),
        resumable=True,
    )
    return group


def add_machine_arguments(parser: Parser) -> None:
    """Processes, devices and number formats."""
    machine = add_process_arguments(parser)
    machine.add_argument(
        "--parallel",
        choices=MODES,
        default="ddp",
        help=(
            "ddp: every process holds the whole model; fsdp: a share of its weights, gradients and optimizer"
            " state, which are gathered layer by layer: less memory, more messages, same results"
        ),
        resumable=True,
    )
    machine.add_argument(
        "--gradient-compression",
        choices=COMPRESSIONS,
        default="none",
        help="bf16: half the bytes between processes, gradients rounded to bfloat16 (--parallel ddp)",
    )
    machine.add_argument(
        "--float64", action="store_true", help="double precision, for checking results", resumable=True
    )
    machine.add_argument(
        "--bf16",
        action="store_true",
        help="matrix products in bfloat16; weights, optimizer and loss stay float32",
        resumable=True,
    )
    machine.add_argument(
        "--fp16",
        action="store_true",
        help="matrix products in float16, with a scaled loss; slow on CPUs",
        resumable=True,
    )
    machine.add_argument(
        "--no-fp16", action="store_true", help="float32, which is the default", resumable=True
    )
    machine.add_argument(
        "--use-amp",
        action="store_true",
        help="the fastest of --bf16, --fp16 and float32 that the device has",
        resumable=True,
    )
    machine.add_argument(
        "--profile",
        type=count,
        default=None,
        metavar="STEPS",
        help=(
            "write where the time of so many steps went: profile.txt and trace.json in the save folder; "
            "without it nothing is measured"
        ),
        resumable=True,
    )
    machine.add_argument(
        "--compile",
        action="store_true",
        help=(
            "layers through torch.compile: a minute or more at the start; no faster on the CPUs measured,"
            " untried on GPUs"
        ),
        resumable=True,
    )


def argument_problems(args: argparse.Namespace) -> list[str]:
    """All that is wrong with these arguments, a line each."""
    problems = [
        f"{flag(dest)} needs the package {package}: pip install {package}"
        for dest, package in EXTRAS.items()
        if getattr(args, dest) and importlib.util.find_spec(package) is None
    ]
    problems += not_shares(args, ["warmup_pct"])
    if args.learning_rate is not None and not (args.learning_rate > 0 and math.isfinite(args.learning_rate)):
        problems.append(f"--learning-rate must be above 0, not {args.learning_rate:g}")
    if not (args.weight_decay >= 0 and math.isfinite(args.weight_decay)):
        problems.append(f"--weight-decay must be a number of at least 0, not {args.weight_decay:g}")
    together = [
        (
            args.persistent_workers and not args.num_workers,
            "--persistent-workers needs --num-workers of at least 1",
        ),
        (
            args.prefetch_factor and not args.num_workers,
            "--prefetch-factor needs --num-workers of at least 1",
        ),
        (
            args.global_batch_size and args.accumulate_steps > 1,
            "--accumulate-steps and --global-batch-size are mutually exclusive: the total fixes the"
            " accumulation",
        ),
        (
            args.global_batch_size and args.lr_scaling != "none",
            (
                "--lr-scaling with --global-batch-size: the total batch does not grow with the processes, so"
                " the rate must not"
            ),
        ),
        (args.dry_run and args.eval_only, "--dry-run and --eval-only are mutually exclusive"),
        (args.overwrite and args.eval_only, "--overwrite and --eval-only: an evaluation replaces nothing"),
        (
            sum(map(bool, (args.bf16, args.fp16, args.use_amp, args.float64, args.no_fp16))) > 1,
            "--bf16, --fp16, --use-amp, --float64 and --no-fp16 are mutually exclusive",
        ),
        (
            args.wandb_project_name is not None and not args.log_wandb,
            "--wandb-project-name needs --log-wandb",
        ),
        (
            args.gradient_compression != "none" and args.parallel == "fsdp",
            "--gradient-compression needs --parallel ddp",
        ),
    ]
    return problems + [text for wrong, text in together if wrong]


def batch_size(default: int) -> Callable[[str], int]:
    """For argparse: a count, or auto, which stands for `default` until the run has found its own."""

    def parse(text: str) -> int:
        return AutoBatchSize(default) if text == "auto" else count(text)

    parse.__name__ = "batch size"
    return parse
