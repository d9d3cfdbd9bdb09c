"""Settings of any training run, by subject: what its arguments become once they have been checked.

Each field has the name of its flag, which says what it means. None is what the arguments leave open; where
the run decides it, it is decided in a new object, and `asked` stays.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from histocc.runtime.arguments import by_flag, settings_of
from histocc.runtime.device import PrecisionSettings
from histocc.trainer.batch_size import AutoBatchSize, BatchSettings
from histocc.trainer.schedule import ScheduleSettings
from histocc.trainer.trackers import LoggerSettings


@dataclass(frozen=True)
class FolderSettings:
    """Where the run is kept."""

    save_path: str
    overwrite: bool
    keep_checkpoints: int
    config: str | None


@dataclass(frozen=True)
class OptimizerSettings:
    """How the loss is minimized, beside the schedule."""

    weight_decay: float
    max_bad_steps: int


@dataclass(frozen=True)
class LoaderSettings:
    """Loading processes; passed on to torch's DataLoader."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool


@dataclass(frozen=True)
class IntervalSettings:
    """Optimizer steps between rows of the log, validations and checkpoints."""

    log_interval: int
    eval_interval: int
    save_interval: int
    save_each_epoch: bool


@dataclass(frozen=True)
class MachineSettings:
    """How the processes compute."""

    device: str
    parallel: str
    gradient_compression: str
    compile: bool
    profile: int | None
    precision: PrecisionSettings


@dataclass(frozen=True)
class RunSettings:
    """asked: every argument by name, as it was given: what args.json holds. Keyword arguments alone."""

    asked: dict[str, Any]
    folder: FolderSettings
    optimizer: OptimizerSettings
    schedule: ScheduleSettings
    batch: BatchSettings
    loader: LoaderSettings
    intervals: IntervalSettings
    loggers: LoggerSettings
    machine: MachineSettings
    seed: int
    eval_only: bool
    dry_run: bool
    stop_after: float | None

    @classmethod
    def of_run(cls, args: argparse.Namespace, **more: Any) -> Any:
        """An object of this class. args: checked; more: the fields of a class that has more than this one."""
        return cls(
            asked=vars(args) | ({"batch_size": "auto"} if isinstance(args.batch_size, AutoBatchSize) else {}),
            folder=settings_of(FolderSettings, args),
            optimizer=settings_of(OptimizerSettings, args),
            schedule=settings_of(ScheduleSettings, args),
            batch=settings_of(BatchSettings, args),
            loader=settings_of(LoaderSettings, args),
            intervals=settings_of(IntervalSettings, args),
            loggers=settings_of(LoggerSettings, args),
            machine=settings_of(MachineSettings, args),
            seed=args.seed,
            eval_only=args.eval_only,
            dry_run=args.dry_run,
            stop_after=args.stop_after,
            **more,
        )

    def decided(self) -> dict[str, Any]:
        """Every argument by name, with what the run has decided so far: what a checkpoint keeps, and a
        resumed run is compared with.
        """
        return self.asked | by_flag(self.schedule) | by_flag(self.batch)
