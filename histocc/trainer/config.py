"""The flags of any training script, and the checks of flags that exclude each other."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import partial
from typing import Annotated, Any

from histocc.runtime.checkpoint import exists_in
from histocc.runtime.config import (
    AUTO,
    Config,
    Count,
    CountOrZero,
    Fraction,
    NotNegative,
    Positive,
    ProcessFlags,
    Whole,
    flag,
    flag_of,
    number,
    process_flag,
    start_flag,
    step_flag,
)
from histocc.runtime.parallel import MODES

LOGIN_SECONDS = 20.0  # limit of W&B's login
EXTRAS = {"tensorboard": "tensorboard", "log_wandb": "wandb"}  # flag: the package that it needs
BatchSize = Annotated[
    Any,
    number(
        lambda text: AUTO if text == AUTO else int(text),
        lambda value: value == AUTO or 1 <= value < 10**12,
        "a whole number of at least 1, or auto",
    ),
]


def wandb_login_error() -> str:
    """Return why W&B cannot log in, or "". This does not prompt, and when silent does not ask a server."""
    program = "import wandb\ntry: wandb.login(verify=False)\nexcept wandb.Error as error: print(error)"
    line, silent = [sys.executable, "-P", "-c", program], os.environ | {"WANDB_SILENT": "true"}
    run = partial(subprocess.run, line, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        return run(env=silent, timeout=LOGIN_SECONDS).stdout.strip()
    except subprocess.TimeoutExpired:
        return f"no answer within {LOGIN_SECONDS:g} s."


@dataclass(frozen=True, kw_only=True)
class RunFlags(Config):
    """run folder"""

    save_path: str = process_flag(
        MISSING,
        "checkpoints and logs; an existing run there is continued",
        *("--save-dir", "--checkpoint-dir", "--output"),
        metavar="FOLDER",
    )
    save_interval: Count = flag(1000, "optimizer steps between checkpoints", resumable=True)
    save_each_epoch: bool = step_flag(False, "also keep a checkpoint of every epoch", resumable=True)
    keep_checkpoints: Count = step_flag(
        3, "how many {step}.bin files to keep; older ones are removed", resumable=True
    )
    overwrite: bool = start_flag(False, "start over if the folder holds a run")
    log_interval: Count = flag(100, "optimizer steps between rows of logs.csv", resumable=True)
    eval_interval: Count = step_flag(1000, "optimizer steps between validations", resumable=True)
    log_wandb: bool = process_flag(False, "also log to Weights & Biases (needs the package wandb)")
    wandb_project_name: str | None = process_flag(
        None, "project of --log-wandb (default: histocc)", metavar="NAME"
    )
    tensorboard: bool = process_flag(False, "also log to TensorBoard (needs the package tensorboard)")
    config: str | None = process_flag(
        None,
        "read flags from a TOML file, or from the args.json of a run. The command line overrides it;"
        " --no-NAME switches off a flag of the file",
        metavar="FILE.toml",
        of_start=True,
    )


@dataclass(frozen=True, kw_only=True)
class LoadingFlags(Config):
    """loading of data"""

    num_workers: CountOrZero = process_flag(0, "processes that load data, for each training process")
    prefetch_factor: Count | None = process_flag(None, "batches that each of them loads ahead (default: 2)")
    pin_memory: bool | None = process_flag(
        None, "page-locked memory, which speeds up copies to a GPU (default: if there is a GPU)"
    )
    persistent_workers: bool = process_flag(False, "keep these processes between epochs")


@dataclass(frozen=True, kw_only=True)
class StepFlags(Config):
    """training"""

    num_epochs: Count = step_flag(10, "passes over the training data", "--epochs", resumable=True)
    batch_size: BatchSize = step_flag(
        32,
        "rows per process at a time; auto: as many as fit",
        metavar="N|auto",
        resumable=True,
    )
    accumulate_steps: Count = step_flag(
        1, "batches of a process for each optimizer step", "--gradient-accumulation-steps", resumable=True
    )
    global_batch_size: Count | None = step_flag(
        None,
        "rows for each optimizer step, shared among all processes (default: --batch-size ×"
        " --accumulate-steps × processes)",
        resumable=True,
    )
    learning_rate: Positive | None = step_flag(None, "highest learning rate", "--lr", resumable="kept")
    lr_scaling: str = flag(  # not a step_flag: run_multi_gpu_train.sh adds it for every model
        "none",
        "multiply the learning rate by the number of processes (linear) or its square root (sqrt)",
        choices=("none", "linear", "sqrt"),
    )
    warmup_pct: Fraction = step_flag(0.05, "share of the steps in which the learning rate rises, 0…1")
    warmup_steps: CountOrZero | None = step_flag(
        None, "the same as a number of steps, instead of --warmup-pct"
    )
    schedule_steps: Count | None = step_flag(
        None, "steps until the learning rate has fallen to 0 (default: the steps of all epochs)"
    )
    max_steps: Count | None = flag(
        None, "stop after this many optimizer steps; the learning rates stay the same", resumable=True
    )
    patience: Count | None = step_flag(
        None, "finish after this many validations in a row without a new best.bin", resumable=True
    )
    weight_decay: NotNegative = step_flag(0.01, "weight decay of AdamW")
    seed: Whole = flag(42, "seed of weights, order, noise and dropout")
    eval_only: bool = start_flag(False, "only validate --initial-checkpoint, or else best.bin")
    dry_run: bool = start_flag(False, "do not train: report how much time and memory it would take")

    @property
    def samples_at_once(self) -> int:
        """The value of --batch-size, or the script's default if it is auto and not yet chosen."""
        return type(self).batch_size if self.batch_size == AUTO else self.batch_size

    def total_batch(self, processes: int) -> int:
        """Return the number of samples of an optimizer step, over all processes."""
        return self.global_batch_size or self.samples_at_once * processes * self.accumulate_steps


@dataclass(frozen=True, kw_only=True)
class ComputationFlags(ProcessFlags):
    """machine and processes"""

    parallel: str = flag(
        "ddp",
        "ddp: each process holds the whole model; fsdp: each holds a share of weights, gradients"
        " and optimizer state",
        choices=MODES,
        resumable=True,
    )
    float64: bool = flag(False, "compute in double precision, to check results", resumable=True)
    bf16: bool = flag(
        False, "faster on recent GPUs: matrix products in bfloat16, the rest in float32", resumable=True
    )
    fp16: bool = flag(False, "matrix products in float16, with a scaled loss; slow on CPUs", resumable=True)
    use_amp: bool = flag(False, "the fastest of bf16, fp16 and float32 on this device", resumable=True)
    profile: Count | None = start_flag(
        None, "profile this many steps into profile.txt and trace.json", metavar="STEPS", of_steps=True
    )
    compile: bool = flag(
        False, "compile the layers with torch.compile; not tried on GPUs", "--compile-model", resumable=True
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunFlags, LoadingFlags, StepFlags, ComputationFlags):
    """The flags of every training script."""

    def problems(self) -> Iterator[str]:
        """Yield a line for each problem of these arguments."""
        for name, package in EXTRAS.items():
            if getattr(self, name) and importlib.util.find_spec(package) is None:
                yield f"{flag_of(name)} needs the package {package}: pip install {package}"
        is_new = self.overwrite or not exists_in(self.save_path)  # a resumed run can continue without W&B
        if self.log_wandb and is_new and (reason := wandb_login_error()):
            yield f"--log-wandb: {reason} Without an account, set WANDB_MODE=offline."
        formats = self.bf16, self.fp16, self.use_amp, self.float64
        wrong = {
            "--persistent-workers needs --num-workers": self.persistent_workers and not self.num_workers,
            "--prefetch-factor needs --num-workers": self.prefetch_factor and not self.num_workers,
            "--accumulate-steps and --global-batch-size are mutually exclusive": self.global_batch_size
            and self.accumulate_steps > 1,
            "--lr-scaling and --global-batch-size are mutually exclusive": self.global_batch_size
            and self.lr_scaling != "none",
            "--dry-run and --eval-only are mutually exclusive": self.dry_run and self.eval_only,
            "--overwrite and --eval-only are mutually exclusive": self.overwrite and self.eval_only,
            "--bf16, --fp16, --use-amp and --float64 are mutually exclusive": sum(formats) > 1,
        }
        yield from (problem for problem, is_so in wrong.items() if is_so)


@dataclass(frozen=True, kw_only=True)
class ScriptConfig(TrainConfig):
    """weights"""

    save_path: str = "./output"
    save_each_epoch: bool = True
    learning_rate: float | None = 1e-3
    initial_checkpoint: str | None = flag(
        None,
        "checkpoint or run folder to start from; a continued run ignores it",
        metavar="PATH",
        resumable=True,
    )
