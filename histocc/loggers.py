"""The rows of a run's log for other tools: TensorBoard (`--tensorboard`) and Weights & Biases (`--log-wandb`), by their own libraries.

Rank 0 only. A run that goes on continues the same curves: TensorBoard hides rows after the step it goes on from, and W&B knows the run by
its id, which all checkpoints of a run have in common. WANDB_MODE=offline writes to the save folder alone, for `wandb sync`.
"""

import argparse
import contextlib
import importlib.util
import os

from histocc.run_log import COLUMNS

LIBRARIES = {"tensorboard": "tensorboard", "log_wandb": "wandb"}      # flag: package, which is also the name of the extra


def problems(args: argparse.Namespace) -> list[str]:
    """What is asked for and not installed, a line each."""
    return [f"--{flag.replace('_', '-')} needs the package {package}: pip install 'histocc[{package}]'" for flag, package in LIBRARIES.items()
            if getattr(args, flag) and importlib.util.find_spec(package) is None]


class Loggers:
    """Those that `args` asks for. name: of the run; step: that it goes on from, 0 for a new one."""

    def __init__(self, args: argparse.Namespace, name: str, step: int):
        self.writer = self.wandb = None
        if args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.writer = SummaryWriter(os.path.join(args.save_path, "tensorboard"), purge_step=step + 1 if step else None)
        if args.log_wandb:
            import wandb
            self.wandb = wandb.init(project=args.wandb_project_name or "histocc", id=name, name=os.path.basename(os.path.abspath(args.save_path)),
                                    dir=args.save_path, resume="allow", config=vars(args), reinit="finish_previous")

    def row(self, values: dict) -> None:
        """values: of a row of the log, any of COLUMNS."""
        figures = {column: float(values[column]) for column in COLUMNS if column != "step" and values.get(column) is not None}
        if self.writer is not None:
            for column, value in figures.items():
                self.writer.add_scalar(column, value, values["step"])
            with contextlib.suppress(OSError):       # a full disk is said where the log itself is written
                self.writer.flush()
        if self.wandb is not None:
            self.wandb.log(figures, step=values["step"])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        if self.wandb is not None:
            self.wandb.finish()
