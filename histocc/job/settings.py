"""Settings of a training job beside those of any run, by subject; see `histocc.trainer.settings`."""

import argparse
from dataclasses import dataclass
from typing import Any

from histocc.data.dataset import DescriptionSettings
from histocc.data.settings import PrepareSettings
from histocc.formatter import BlockyFormatter
from histocc.runtime.arguments import by_flag, settings_of
from histocc.trainer.settings import RunSettings


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
class NoiseSettings:
    """What is done to the training texts."""

    num_transformations: int
    augmentation_prob: float
    unk_lang_prob: float
    fn_word_freq: str | None
    join_rows: float
    descriptions: DescriptionSettings


@dataclass(frozen=True)
class TeachingSettings:
    """What a student learns from: a trained model, and texts without labels."""

    teacher: str | None
    unlabelled: list[str] | None
    distillation_weight: float
    distillation_temperature: float


@dataclass(frozen=True)
class Settings(RunSettings):
    """data: with the target columns that were found."""

    data: PrepareSettings
    formatter: BlockyFormatter
    model: ModelSettings
    loss: LossSettings
    linear_lr_factor: float | None
    noise: NoiseSettings
    teaching: TeachingSettings
    prepare_only: bool

    @classmethod
    def of(cls, args: argparse.Namespace, data: PrepareSettings) -> "Settings":
        """args: checked; data: what they ask for of the data."""
        return cls.of_run(
            args,
            data=data,
            formatter=BlockyFormatter.from_dict(data.formatter),
            model=settings_of(ModelSettings, args),
            loss=settings_of(LossSettings, args),
            linear_lr_factor=args.linear_lr_factor,
            noise=settings_of(NoiseSettings, args),
            teaching=settings_of(TeachingSettings, args),
            prepare_only=args.prepare_only,
        )

    def decided(self) -> dict[str, Any]:
        """As in any run; with the model, its losses, and what the columns of the data mean."""
        found = super().decided() | {
            "formatter": self.formatter.kind,
            "target_cols": self.data.target_cols,
            "language": self.data.language,
            "language_col": self.data.language_col,
        }
        return found | by_flag(self.model) | by_flag(self.loss)
