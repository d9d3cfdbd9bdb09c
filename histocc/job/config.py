"""The flags of finetune.py and train_mixer.py beside those of any training script and of files of rows, and
what of them does not go together.
"""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Annotated

from histocc import __version__
from histocc.data.config import Descriptions, Split, Tables
from histocc.model.loss import BLOCK_LOSSES, LINEAR_LOSSES
from histocc.model.mixer import NGRAMS
from histocc.model.ngrams import AUTO, MAX_BITS, MIN_BITS, NONE
from histocc.runtime.config import Config, Count, CountOrZero, Fraction, Parser, Positive, flag, number
from histocc.trainer.config import TrainConfig

NgramBits = Annotated[
    str,
    number(
        str,
        lambda text: (
            text in (AUTO, NONE)
            or (text.isascii() and text.isdecimal() and MIN_BITS <= int(text[:4]) <= MAX_BITS)
        ),
        f"auto, none or a number of bits from {MIN_BITS} to {MAX_BITS}",
    ),
]
UpToHundred = Annotated[int, number(int, lambda value: 0 <= value <= 100, "a whole number from 0 to 100")]


@dataclass(frozen=True, kw_only=True)
class Noise(Config):
    """noise on the training text"""

    num_transformations: UpToHundred = flag(3, "transformations of a text that is changed")
    augmentation_prob: Fraction = flag(0.3, "probability that a text is changed, 0…1")
    join_rows: Fraction = flag(
        0.0,
        "probability that a row with one code is joined with another such row of its language, drawn again in"
        " each epoch, to a row with both codes: farmer and smith, 0…1. Needs a formatter with room for two"
        " codes",
        metavar="PROB",
    )
    unk_lang_prob: Fraction = flag(0.25, "probability that the language is hidden, 0…1")
    fn_word_freq: str | None = flag(
        None,
        "words to insert: a CSV with columns word, freq (default: the words of the training texts)",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class Model(Config):
    """model"""

    model_size: str | None = flag(
        None,
        "size of a new model: tiny is 128 wide with 2 layers, small 256 with 4, base 768 with 12, as"
        " google/canine-s; ngrams has no encoder, but n-grams alone (default: that of --initial-checkpoint,"
        " else base)",
        choices=("tiny", "small", "base", "ngrams"),
        resumable="kept",
    )
    initial_checkpoint: str | None = flag(
        None,
        "what to take the initial weights from: a run folder, a checkpoint, a published encoder, mixer or"
        " flat classifier (.bin, .safetensors, folder, or name on the hub, for example OccCANINE_s2s_mix);"
        " not used when resuming",
        "--model-name",
        metavar="PATH",
        resumable=True,
    )
    initial_key: str | None = flag(
        None,
        "the codes of the linear outputs of --initial-checkpoint (default: those that it holds, else those of"
        " --key, or the HISCO key for a published HISCO model)",
        metavar="FILE",
        resumable=True,
    )
    memory_mask: bool | None = flag(
        None,
        "whether the decoder leaves out padding of the text. Published mixers look at it, at 128 positions,"
        " which is slower (default: as in --initial-checkpoint, else it does)",
        resumable="kept",
    )
    published_target_mask: bool = flag(
        False,
        "the decoder looks at PAD among the codes as that of the published program does, for models that it"
        " shall code with",
        resumable="kept",
    )
    shrink_key: bool = flag(
        False,
        "the codes are those of the data alone; without it those of --initial-checkpoint stay, in their"
        " order, and new ones are appended",
    )
    ngrams: NgramBits = flag(
        AUTO,
        "n-grams of characters and words beside the encoder, at most 2^BITS; auto: those of the training"
        " texts in a model from scratch, else as --initial-checkpoint has them; if it has none, BITS"
        " adds them",
        metavar="auto|none|BITS",
    )
    ngram_passes: CountOrZero = flag(
        10,
        "passes over the distinct rows (200,000 rows at most, fewer for wider models) that fit new n-grams"
        " with both decoders before the encoder is trained, after ten quick ones with the linear decoder"
        " alone; 0, or with --initial-checkpoint: no fit",
        metavar="N",
        resumable=True,
    )
    only_encoder: bool = flag(False, "take the encoder alone from --initial-checkpoint", resumable=True)
    freeze_encoder: bool = flag(False, "train the decoders only")
    dropout: Fraction = flag(0.0, "dropout of the decoders, 0…1")
    encoder_dropout: Fraction = flag(0.1, "dropout of the encoder, 0…1")
    ngram_dropout: Fraction = flag(0.3, "share of the n-grams left out in training of the whole model, 0…1")
    decoder_dim_feedforward: Count | None = flag(
        None, "feed-forward width of the decoder (default: the encoder's width)"
    )


@dataclass(frozen=True, kw_only=True)
class Teaching(Config):
    """learning from a larger model"""

    teacher: str | None = flag(
        None,
        "a trained model (run folder, checkpoint, published or exported model) whose answers are learned,"
        " beside the true codes: they are made once and kept with the prepared data; without"
        " --initial-checkpoint or a fixed key, its codes come first in the key (default: none)",
        metavar="MODEL",
        resumable=True,
    )
    unlabelled: list[str] | None = flag(
        None,
        "texts that are learned from --teacher alone: CSV or Parquet, columns as in the training data; codes"
        " in them are not read (default: none)",
        metavar="FILE",
        resumable=True,
    )
    distillation_weight: Fraction = flag(
        0.5, "share of the teacher in what a row with true codes is trained towards, 0…1", metavar="W"
    )
    distillation_temperature: Positive = flag(
        1.0,
        "divides the linear decoders' logits where the teacher's are learned: above 1 they are softer",
        metavar="T",
    )


@dataclass(frozen=True, kw_only=True)
class Losses(Config):
    """losses"""

    seq2seq_weight: Fraction = flag(
        0.1,
        "weight of the seq2seq decoder's loss, 0…1; the linear decoder has the rest. From scratch the linear"
        " decoder learns faster at 0.03, and the other no slower",
    )
    linear_loss: str | None = flag(
        None,
        "loss of the linear decoder: mean, over all codes, as published; rows: summed over the codes, and"
        " with a softmax (default: rows if it is new, else that of --initial-checkpoint)",
        choices=LINEAR_LOSSES,
        resumable="kept",
    )
    block_loss: str | None = flag(
        None,
        "how a row's codes are held against the blocks that the decoder writes. best-fit, as published: each"
        " code against the block that fits it best, so two codes may share one, and another learns nothing;"
        " one-to-one: every block answers for one code (default: as in --initial-checkpoint, where a"
        " published one has best-fit; one-to-one if the decoder is new); --eval-only: that of the"
        " checkpoint",
        choices=BLOCK_LOSSES,
        resumable="kept",
    )
    many_codes_weight: Positive = flag(
        1.0,
        "factor on the seq2seq loss of rows with more than one code, in training and validation; a step's"
        " loss is still divided by the number of rows",
        metavar="W",
    )
    empty_blocks: str | None = flag(
        None,
        "blocks behind a sample's codes in which the decoder learns to write nothing: all of them, as"
        " published, or the first alone, where decoding stops anyway, which is faster (default: first from"
        " scratch, else all)",
        choices=("all", "first"),
        resumable="kept",
    )


@dataclass(frozen=True, kw_only=True)
class JobConfig(Tables, Descriptions, Noise, Model, Teaching, Losses, TrainConfig):
    """training"""

    learning_rate: Positive | None = flag(
        None,
        "peak learning rate (default: from scratch 1e-3 for tiny and ngrams, 5e-4 for small, 1.5e-4 for base;"
        " else 2e-5)",
        resumable="kept",
    )
    linear_lr_factor: Positive | None = flag(
        None,
        "learning rate of the linear decoder and the n-grams, as a multiple of that of the rest (default: 1;"
        " if they are new 5, or 30 with --linear-loss mean; if they were fitted before 0.1)",
        metavar="FACTOR",
        resumable="kept",
    )
    prepare_only: bool = flag(False, "prepare the data, report on them and stop", resumable=True)

    def problems(self) -> Iterator[str]:
        """What is wrong with these arguments, a line each."""
        yield from TrainConfig.problems(self)
        yield from Tables.problems(self)
        if self.include_descriptions and not self.descriptions_file:
            yield "--include-descriptions needs --descriptions-file"
        if self.descriptions_file and not self.include_descriptions:
            yield "--descriptions-file needs --include-descriptions"
        if "{desc}" not in self.description_template:
            yield "--description-template must hold {desc}, the place of the description"
        if self.model_size == NGRAMS and self.ngrams == NONE:
            yield "--model-size ngrams has nothing but n-grams: omit --ngrams none"
        if self.model_size == NGRAMS and self.freeze_encoder:
            yield "--model-size ngrams has no encoder: omit --freeze-encoder"
        if self.only_encoder and not self.initial_checkpoint:
            yield "--only-encoder needs --initial-checkpoint"
        if self.unlabelled and not self.teacher:
            yield "--unlabelled needs --teacher, which answers to its texts"
        if self.teacher and self.join_rows:
            yield "--teacher and --join-rows are mutually exclusive: the teacher answers to no joined row"


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(JobConfig, Split):
    """What finetune.py takes."""

    dataset: str = flag(
        MISSING,
        "descriptions and codes; or a folder with one table, or with train and val",
        *("--data-dir", "--data-root"),
        metavar="FILE.csv",
        resumable=True,
    )
    save_path: str = "./Finetuned/"
    num_epochs: int = 5
    batch_size: int = 128


@dataclass(frozen=True, kw_only=True)
class MixerConfig(JobConfig):
    """What train_mixer.py takes."""

    train_data: list[str] = flag(
        MISSING,
        "descriptions and codes to train on",
        *("--data-dir", "--data-root"),
        metavar="FILE.csv",
        resumable=True,
    )
    val_data: list[str] = flag(
        MISSING, "descriptions and codes to validate on", metavar="FILE.csv", resumable=True
    )
    target_col_naming: str = flag(
        "hisco", "without --target-cols: take NAME_1 … NAME_5 if the file has them", metavar="NAME"
    )
    save_interval: int = 5000
    num_epochs: int = 50
    batch_size: int = 512
    seq2seq_weight: float = 0.5


def finetune_parser(description: str = "") -> Parser:
    return _parser(FinetuneConfig, "finetune.py", description)


def train_mixer_parser(description: str = "") -> Parser:
    return _parser(MixerConfig, "train_mixer.py", description)


def _parser(kind: type[JobConfig], prog: str, description: str) -> Parser:
    parser = Parser(kind, prog, description)
    parser.add_argument("--version", action="version", version=f"histocc {__version__}")
    return parser
