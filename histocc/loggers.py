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
        self.undrawn = False                         # whether rows came after the last drawing began
        self.said: set[str] = set()
        if args.tensorboard:
            try:
                self._open_tensorboard(args, step)
            except Exception as error:               # a full disk: the library's own words
                raise UserError(f"--tensorboard: {_words(error)}") from None
        if args.log_wandb:
            try:
                self._open_wandb(args, name)
            except Exception as error:               # no network, no account
                raise UserError(f"--log-wandb: {_words(error)}; WANDB_MODE=offline needs no network") from None

    def _open_tensorboard(self, args: argparse.Namespace, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(os.path.join(args.save_path, "tensorboard"), purge_step=step + 1)

    def _open_wandb(self, args: argparse.Namespace, name: str) -> None:
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
            except Exception as error:               # after a full disk the writer's thread is dead
                self._say_once("--tensorboard", error)
                self._let_go_of_writer()
        if self.wandb is not None:
            try:
                self.wandb.log(figures, step=values["step"])
            except Exception as error:
                self._say_once("--log-wandb", error)
                self.wandb = None                    # finishing it here could wait for a network that is gone; W&B does so as the process ends
        if values.get("val_loss") is not None and plot.available() and (self.drawing is None or not self.drawing.is_alive()):
            self.undrawn = False
            self.drawing = threading.Thread(target=self._draw, name="drawing")
            self.drawing.start()
        else:
            self.undrawn = True

    def _say_once(self, what: str, error: Exception) -> None:
        if what not in self.said:
            self.said.add(what)
            print(f"WARNING: {what}: {_words(error)}. The run goes on without it; logs.csv has every row.", flush=True)

    def _let_go_of_writer(self) -> None:
        with contextlib.suppress(Exception):
            if self.writer is not None:
                self.writer.close()
        self.writer = None

    def _draw(self) -> None:
        try:
            plot.draw({os.path.basename(os.path.abspath(self.folder)): numbers(os.path.join(self.folder, "logs.csv"))},
                      os.path.join(self.folder, plot.PICTURE))
        except Exception as error:                   # a full disk, a matplotlib that is broken: a picture is no reason to end a run
            self._say_once(plot.PICTURE, error)

    def close(self) -> None:
        if self.drawing is not None:
            self.drawing.join()
            if self.undrawn:
                self._draw()
        self._let_go_of_writer()
        if self.wandb is not None:
            try:
                self.wandb.finish()
            except Exception as error:
                self._say_once("--log-wandb", error)
            self.wandb = None


def _words(error: Exception) -> str:
    """The first line of what a library says, or the name of its error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
