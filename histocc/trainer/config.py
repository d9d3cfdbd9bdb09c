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
    Config,
    Count,
    CountOrZero,
    Fraction,
    NotNegative,
    Positive,
    Processes,
    Whole,
    flag,
    flag_of,
    number,
    process_flag,
    start_flag,
    step_flag,
)
from histocc.runtime.parallel import MODES

AUTO = "auto"
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
    """Return why W&B cannot log in, "" if it can; it neither prompts nor, when silent, asks a server."""
    program = "import wandb\ntry: wandb.login(verify=False)\nexcept wandb.Error as error: print(error)"
    line, silent = [sys.executable, "-P", "-c", program], os.environ | {"WANDB_SILENT": "true"}
    run = partial(subprocess.run, line, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        return run(env=silent, timeout=LOGIN_SECONDS).stdout.strip()
    except subprocess.TimeoutExpired:
        return f"no answer within {LOGIN_SECONDS:g} s."


@dataclass(frozen=True, kw_only=True)
class RunFiles(Config):
    """files of the run"""

    save_path: str = process_flag(
        MISSING,
        "folder of the run: checkpoints, logs.csv, key.csv, prepared data; state in it is resumed",
        *("--save-dir", "--checkpoint-dir"),
        metavar="DIR",
    )
    save_interval: Count = flag(1000, "optimizer steps between checkpoints", resumable=True)
    save_each_epoch: bool = step_flag(False, "also keep a checkpoint of every epoch", resumable=True)
    keep_checkpoints: Count = step_flag(3, "how many {step}.bin stay; older ones are removed", resumable=True)
    overwrite: bool = start_flag(False, "start over if the folder holds a run")
    log_interval: Count = flag(100, "optimizer steps between rows of the log", resumable=True)
    eval_interval: Count = step_flag(1000, "optimizer steps between validations", resumable=True)
    log_wandb: bool = process_flag(False, "also log to Weights & Biases (extra wandb)")
    wandb_project_name: str | None = process_flag(None, "project for --log-wandb; default: histocc")
    tensorboard: bool = process_flag(False, "also log to TensorBoard (extra tensorboard)")
    config: str | None = process_flag(
        None,
        "arguments from a file: names of flags and their values, or the args.json of a run; the command line"
        " wins, where --no-NAME switches off what is true in the file",
        metavar="FILE.toml",
        of_start=True,
    )


@dataclass(frozen=True, kw_only=True)
class Loading(Config):
    """loading"""

    num_workers: CountOrZero = process_flag(0, "loading processes per process")
    prefetch_factor: Count | None = process_flag(None, "batches each worker loads ahead (default 2)")
    pin_memory: bool | None = process_flag(
        None, "page-locked memory, for faster copies to a GPU (default: if there is one)"
    )
    persistent_workers: bool = process_flag(False, "keep the workers between epochs")


@dataclass(frozen=True, kw_only=True)
class Steps(Config):
    """training"""

    num_epochs: Count = step_flag(10, "passes over the training data", "--epochs", resumable=True)
    batch_size: BatchSize = step_flag(
        32,
        "samples per process and micro-batch; auto: as many as fit into the GPU, for the default's total",
        metavar="N|auto",
        resumable=True,
    )
    accumulate_steps: Count = step_flag(
        1, "micro-batches of an optimizer step", "--gradient-accumulation-steps", resumable=True
    )
    global_batch_size: Count | None = step_flag(
        None,
        "samples of an optimizer step, shared out over the processes in micro-batches of at most --batch-size"
        " (default: --batch-size × --accumulate-steps of each process)",
        resumable=True,
    )
    learning_rate: Positive | None = step_flag(None, "peak learning rate", "--lr", resumable="kept")
    lr_scaling: str = flag(  # no step_flag: run_multi_gpu_train.sh adds it, whatever is trained
        "none",
        "multiply the learning rate by the number of processes, or its square root",
        choices=("none", "linear", "sqrt"),
    )
    warmup_pct: Fraction = step_flag(0.05, "share of the schedule spent warming up, 0…1")
    warmup_steps: CountOrZero | None = step_flag(None, "optimizer steps of warm-up, instead of --warmup-pct")
    schedule_steps: Count | None = step_flag(None, "steps of the schedule (default: the steps of all epochs)")
    max_steps: Count | None = flag(None, "stop after so many steps; the schedule stays", resumable=True)
    patience: Count | None = step_flag(
        None, "finish when so many validations in a row were no better than best.bin", resumable=True
    )
    weight_decay: NotNegative = step_flag(0.01, "AdamW's weight decay")
    seed: Whole = flag(42, "seed of weights, order, noise and dropout")
    eval_only: bool = start_flag(False, "validate --initial-checkpoint, or best.bin, and stop")
    dry_run: bool = start_flag(False, "everything but training: reports its time and memory")


@dataclass(frozen=True, kw_only=True)
class Computation(Processes):
    """machine and processes"""

    parallel: str = flag(
        "ddp",
        "ddp: every process holds the model; fsdp: a share of its weights, gradients and optimizer state",
        choices=MODES,
        resumable=True,
    )
    float64: bool = flag(False, "double precision, for checking results", resumable=True)
    bf16: bool = flag(False, "matrix products in bfloat16; all else stays float32", resumable=True)
    fp16: bool = flag(False, "matrix products in float16, with a scaled loss; slow on CPUs", resumable=True)
    use_amp: bool = flag(False, "the fastest of --bf16, --fp16, float32 on the device", resumable=True)
    profile: Count | None = start_flag(
        None, "profile so many steps: profile.txt and trace.json", metavar="STEPS", of_steps=True
    )
    compile: bool = flag(False, "torch.compile of layers, untried on GPUs", "--compile-model", resumable=True)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunFiles, Loading, Steps, Computation):
    """The flags of every training script."""

    @property
    def samples_at_once(self) -> int:
        """The value of --batch-size; the script's default if it is auto and not yet chosen."""
        return type(self).batch_size if self.batch_size == AUTO else self.batch_size

    def total_batch(self, processes: int) -> int:
        """Return the number of samples of an optimizer step, over all processes."""
        return self.global_batch_size or self.samples_at_once * processes * self.accumulate_steps

    def problems(self) -> Iterator[str]:
        """Yield the problems of these arguments, a line each."""
        for name, package in EXTRAS.items():
            if getattr(self, name) and importlib.util.find_spec(package) is None:
                yield f"{flag_of(name)} needs the package {package}: pip install {package}"
        is_new = self.overwrite or not exists_in(self.save_path)  # a resumed run can do without W&B
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
        "a checkpoint, or the folder of a run, to take the first weights from; ignored when a run is resumed",
        metavar="PATH",
        resumable=True,
    )
