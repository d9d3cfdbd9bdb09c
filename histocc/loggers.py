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
from histocc.errors import UserError
from histocc.run_log import COLUMNS, numbers

class Loggers:
    """Those that `args` asks for. name: of the run; step: that it goes on from, 0 for a new one. Raises UserError."""

    def __init__(self, args: argparse.Namespace, name: str, step: int):
        self.writer = self.wandb = None
        self.folder, self.drawing = args.save_path, None
        try:
            self._open(args, name, step)
        except Exception as error:                   # a full disk, no network, no account: the libraries' own words
            raise UserError(f"{'--log-wandb' if args.log_wandb else '--tensorboard'}: {str(error).strip().splitlines()[0][:300]}"
                            + ("; WANDB_MODE=offline needs no network" if args.log_wandb else "")) from None

    def _open(self, args: argparse.Namespace, name: str, step: int) -> None:
        if args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.writer = SummaryWriter(os.path.join(args.save_path, "tensorboard"), purge_step=step + 1)
        if args.log_wandb:
            import wandb
            self.wandb = wandb.init(project=args.wandb_project_name or "histocc", id=name, name=os.path.basename(os.path.abspath(args.save_path)),
                                    dir=args.save_path, resume="allow", config=vars(args), reinit="finish_previous")

    def row(self, values: dict) -> None:
        """values: of a row of the log, any of COLUMNS."""
        figures = {column: float(values[column]) for column in COLUMNS if column != "step" and values.get(column) is not None}
        if self.writer is not None:
            try:
                for column, value in figures.items():
                    self.writer.add_scalar(column, value, values["step"])
                self.writer.flush()
            except OSError:                          # a full disk is said where the log itself is written; the writer's thread is dead now
                self._let_go_of_writer()
        if self.wandb is not None:
            self.wandb.log(figures, step=values["step"])
        if values.get("val_loss") is not None and plot.available() and (self.drawing is None or not self.drawing.is_alive()):
            self.drawing = threading.Thread(target=self._draw, name="drawing")
            self.drawing.start()

    def _let_go_of_writer(self) -> None:
        with contextlib.suppress(OSError):
            if self.writer is not None:
                self.writer.close()
        self.writer = None

    def _draw(self) -> None:
        with contextlib.suppress(OSError):           # a picture is no reason to say more than the log itself does
            plot.draw({os.path.basename(os.path.abspath(self.folder)): numbers(os.path.join(self.folder, "logs.csv"))},
                      os.path.join(self.folder, plot.PICTURE))

    def close(self) -> None:
        if self.drawing is not None:                 # once more, with what came while it was drawn
            self.drawing.join()
            self._draw()
        self._let_go_of_writer()
        if self.wandb is not None:
            self.wandb.finish()
