"""Settings of a training run, by subject: what its arguments become once they have been checked.

Each field has the name of its flag, which says what it means. None is what the arguments leave open; where
the run decides it, it is decided in a new `Settings`, and `asked` stays.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from histocc.data.descriptions import DescriptionSettings
from histocc.data.settings import PrepareSettings
from histocc.formatter import BlockyFormatter
from histocc.runtime.arguments import by_flag, settings_of
from histocc.runtime.precision import PrecisionSettings
from histocc.trainer.batch_size import AutoBatchSize, BatchSettings
from histocc.trainer.hooks import Intervals
from histocc.trainer.loggers import LoggerSettings
from histocc.trainer.schedule import ScheduleSettings


@dataclass(frozen=True)
class FolderSettings:
    """Where the run is kept."""

    save_path: str
    overwrite: bool
    keep_checkpoints: int
    config: str | None


@dataclass(frozen=True)
class ModelSettings:
    """What is trained, and from which weights."""

    model_size: str | None
    initial_checkpoint: str | None
    initial_key: str | None
    key: str | None
    only_encoder: bool
    freeze_encoder: bool
    max_len: int
    decoder_dim_feedforward: int | None
    memory_mask: bool | None
    published_target_mask: bool
    clean_text: str | None
    ngrams: str
    ngram_passes: int
    dropout: float
    encoder_dropout: float
    ngram_dropout: float


@dataclass(frozen=True)
class LossSettings:
    """What is minimized."""

    seq2seq_weight: float
    many_codes_weight: float
    empty_blocks: str | None
    linear_loss: str | None
    block_loss: str | None


@dataclass(frozen=True)
class OptimizerSettings:
    """How it is minimized, beside the schedule."""

    weight_decay: float
    linear_lr_factor: float | None
    max_bad_steps: int


@dataclass(frozen=True)
class NoiseSettings:
    """What is done to the training texts."""

    num_transformations: int
    augmentation_prob: float
    unk_lang_prob: float
    fn_word_freq: str | None
    join_rows: float
    descriptions: DescriptionSettings


@dataclass(frozen=True)
class LoaderSettings:
    """Loading processes; passed on to torch's DataLoader."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool


@dataclass(frozen=True)
class IntervalSettings:
    """Optimizer steps between rows of the log, validations, checkpoints and comparisons of the replicas."""

    log_interval: int
    eval_interval: int
    save_interval: int
    check_replicas_every: int | None
    save_each_epoch: bool

    def intervals(self) -> Intervals:
        """As the trainer takes them."""
        return Intervals(
            self.log_interval,
            self.eval_interval,
            self.save_interval,
            self.check_replicas_every,
            self.save_each_epoch,
        )


@dataclass(frozen=True)
class MachineSettings:
    """How the processes compute; none of it decides the result."""

    device: str
    parallel: str
    compile: bool
    profile: int | None
    precision: PrecisionSettings


@dataclass(frozen=True)
class Settings:
    """asked: every argument by name, as it was given: what args.json holds. data: with the target columns
    that were found.
    """

    asked: dict[str, Any]
    data: PrepareSettings
    formatter: BlockyFormatter
    folder: FolderSettings
    model: ModelSettings
    loss: LossSettings
    optimizer: OptimizerSettings
    schedule: ScheduleSettings
    batch: BatchSettings
    noise: NoiseSettings
    loader: LoaderSettings
    intervals: IntervalSettings
    loggers: LoggerSettings
    machine: MachineSettings
    seed: int
    prepare_only: bool
    eval_only: bool
    dry_run: bool
    stop_after: float | None

    @classmethod
    def of(cls, args: argparse.Namespace, data: PrepareSettings) -> "Settings":
        """args: checked; data: what they ask for of the data."""
        return cls(
            asked=vars(args) | ({"batch_size": "auto"} if isinstance(args.batch_size, AutoBatchSize) else {}),
            data=data,
            formatter=BlockyFormatter.from_dict(data.formatter),
            folder=settings_of(FolderSettings, args),
            model=settings_of(ModelSettings, args),
            loss=settings_of(LossSettings, args),
            optimizer=settings_of(OptimizerSettings, args),
            schedule=settings_of(ScheduleSettings, args),
            batch=settings_of(BatchSettings, args),
            noise=settings_of(NoiseSettings, args),
            loader=settings_of(LoaderSettings, args),
            intervals=settings_of(IntervalSettings, args),
            loggers=settings_of(LoggerSettings, args),
            machine=settings_of(MachineSettings, args),
            seed=args.seed,
            prepare_only=args.prepare_only,
            eval_only=args.eval_only,
            dry_run=args.dry_run,
            stop_after=args.stop_after,
        )

    def decided(self) -> dict[str, Any]:
        """Every argument by name, with what the run has decided so far: what a checkpoint keeps, and a
        resumed run is compared with.
        """
        found = self.asked | {"target_cols": self.data.target_cols}
        for part in (self.model, self.loss, self.schedule, self.batch):
            found |= by_flag(part)
        return found
