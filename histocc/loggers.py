"""The rows of a run's log for other tools: TensorBoard (`--tensorboard`) and Weights & Biases (`--log-wandb`), by their own libraries; and,
where matplotlib is installed, curves.png after each validation.

Rank 0 only. A run that goes on continues the same curves: TensorBoard hides rows after the step it goes on from, and W&B knows the run by
its id, which all checkpoints of a run have in common. WANDB_MODE=offline writes to the save folder alone, for `wandb sync`.
"""

import argparse
import contextlib
import os
import threading

from histocc import plot
from histocc.run_log import COLUMNS, numbers

class Loggers:
    """Those that `args` asks for. name: of the run; step: that it goes on from, 0 for a new one."""

    def __init__(self, args: argparse.Namespace, name: str, step: int):
        self.writer = self.wandb = None
        self.folder, self.drawing = args.save_path, None
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
        if values.get("val_loss") is not None and plot.available() and (self.drawing is None or not self.drawing.is_alive()):
            self.drawing = threading.Thread(target=self._draw, name="drawing")
            self.drawing.start()

    def _draw(self) -> None:
        with contextlib.suppress(OSError):           # a picture is no reason to say more than the log itself does
            plot.draw({os.path.basename(os.path.abspath(self.folder)): numbers(os.path.join(self.folder, "logs.csv"))},
                      os.path.join(self.folder, plot.PICTURE))

    def close(self) -> None:
        if self.drawing is not None:                 # once more, with what came while it was drawn
            self.drawing.join()
            self._draw()
        if self.writer is not None:
            self.writer.close()
        if self.wandb is not None:
            self.wandb.finish()
