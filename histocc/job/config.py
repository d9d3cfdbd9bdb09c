"""The flags of finetune.py and train_mixer.py beside those of any training script and of files of rows, the
combinations that are refused, and the values of flags that are left open.
"""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from histocc import __version__
from histocc.data.config import FEW_TEXTS, USUAL_LEN, DescriptionFlags, Split, Tables
from histocc.model.loss import BEST_FIT, BLOCK_LOSSES, LINEAR_LOSSES, MEAN, ONE_TO_ONE, ROWS
from histocc.model.mixer import NGRAMS
from histocc.model.ngrams import AUTO, LONGEST, MAX_BITS, MIN_BITS, NONE
from histocc.runtime.config import (
    Config,
    Count,
    CountOrZero,
    Fraction,
    Parser,
    Positive,
    flag,
    number,
    start_flag,
)
from histocc.runtime.errors import UserError
from histocc.trainer import script
from histocc.trainer.config import TrainConfig, step_flag

USUAL_FLAGS = (  # beside the flags of the data
    *("save_path", "target_cols", "input_col", "language", "language_col", "formatter", "initial_checkpoint"),
    *("model_size", "num_epochs", "batch_size", "learning_rate", "bf16", "distributed", "overwrite"),
)
UpToHundred = Annotated[int, number(int, lambda value: 0 <= value <= 100, "a whole number from 0 to 100")]


@dataclass(frozen=True, kw_only=True)
class NoiseFlags(Config):
    """noise on the training text"""

    num_transformations: UpToHundred = step_flag(3, "transformations of a text that is changed")
    augmentation_prob: Fraction = step_flag(0.3, "probability that a text is changed, 0…1")
    unk_lang_prob: Fraction = step_flag(0.25, "probability that the language is hidden, 0…1")
    fn_word_freq: str | None = step_flag(
        None,
        "words to insert: a CSV with columns word, freq (default: the words of the training texts)",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class ModelFlags(Config):
    """model"""

    model_size: str | None = flag(
        AUTO,
        "size of a new model: tiny is 128 wide with 2 layers, small 256 with 4, base 768 with 12, as"
        " google/canine-s; ngrams has no encoder, but n-grams alone; auto: that of --initial-checkpoint, else"
        " base on GPUs and ngrams on CPUs. A model of n-grams alone is trained by its fit, and takes epochs"
        " only if --max-steps is given",
        choices=(AUTO, "tiny", "small", "base", NGRAMS),
        resumable="kept",
    )
    initial_checkpoint: str | None = flag(
        None,
        "what to take the initial weights from: a run folder, a checkpoint, a published encoder, mixer or"
        " flat classifier (.bin, .safetensors, folder, or name on the hub, for example OccCANINE_s2s_mix);"
        " ignored when a run is resumed; a model of n-grams alone can be continued only with --max-steps",
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
        "whether the decoder leaves out padding of the text, which published ones look at, slower (default:"
        " as in --initial-checkpoint, else it does)",
        resumable="kept",
    )
    published_target_mask: bool = flag(
        False,
        "the decoder looks at PAD among the codes, for models that the published program shall code with",
        resumable="kept",
    )
    ngrams: str = flag(
        AUTO,
        "n-grams of characters and words beside the encoder, at most 2^BITS; auto: those of the training"
        " texts in a model from scratch, else as --initial-checkpoint has them; if it has none, BITS"
        " adds them",
        choices=(AUTO, NONE, *map(str, range(MIN_BITS, MAX_BITS + 1))),
        metavar="auto|none|BITS",
    )
    ngram_passes: CountOrZero | None = flag(
        None,
        "passes over the distinct rows that fit the decoder that writes to new n-grams, before the encoder is"
        " trained and after the linear decoder, which takes 10 at most (default: 10,000 rows, at most 10"
        " passes, fewer for wider models); 0, or with --initial-checkpoint: no fit of either",
        metavar="N",
        resumable=True,
    )
    prior: str = flag(
        AUTO,
        "the model on whose answers n-grams alone stand that are learned from few texts, and which their"
        " checkpoint holds: built-in, a run, a checkpoint, a published model, or none; auto: the built-in one"
        " for HISCO codes, and for others in its languages where it helps",
        metavar="auto|none|MODEL",
        resumable="kept",
    )
    only_encoder: bool = flag(False, "take the encoder alone from --initial-checkpoint", resumable=True)
    freeze_encoder: bool = flag(False, "train the decoders only")
    dropout: Fraction = flag(0.0, "dropout of the decoders, 0…1")
    encoder_dropout: Fraction = step_flag(0.1, "dropout of the encoder, 0…1")
    ngram_dropout: Fraction = step_flag(0.3, "share of n-grams left out in training of the whole model, 0…1")
    decoder_dim_feedforward: Count | None = flag(
        None, "feed-forward width of the decoder (default: the encoder's width)"
    )


@dataclass(frozen=True, kw_only=True)
class LossFlags(Config):
    """losses"""

    usual_weight: ClassVar[float] = 0.1
    seq2seq_weight: Fraction | None = flag(
        None,
        "weight of the seq2seq decoder's loss, 0…1; the linear decoder has the rest, and learns faster from"
        " scratch at 0.03; 0: a flat classifier, quicker to fit (default: 0.1, of train_mixer.py 0.5; 0 for"
        " n-grams alone)",
        resumable="kept",
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
        "how a row's codes are compared with the blocks that the decoder writes. best-fit, as published: each"
        " code with the block that fits it best, so two codes may share one; one-to-one: every block answers"
        " for one code, beyond five in their order (default: one-to-one if the decoder is new, else as in"
        " --initial-checkpoint)",
        choices=BLOCK_LOSSES,
        resumable="kept",
    )
    empty_blocks: str | None = flag(
        None,
        "blocks behind a row's codes in which the decoder learns to write nothing: all, as published, or the"
        " first alone, where decoding stops anyway, which is faster (default: first from scratch, else all)",
        choices=("all", "first"),
        resumable="kept",
    )


@dataclass(frozen=True, kw_only=True)
class JobConfig(Tables, DescriptionFlags, NoiseFlags, ModelFlags, LossFlags, TrainConfig):
    """training"""

    instead = TrainConfig.instead | {
        "lexicon": "--prior built-in (the default for HISCO) knows all titles; for none type --prior none",
        "refit": "leave it out: few texts are all learned from, and each is left out in turn for figures",
        "teacher": "code the texts with that model (python -m histocc.predict) and train on the coded file",
    }
    learning_rate: Positive | None = step_flag(
        None,
        "peak learning rate (default: from scratch 1e-3 for tiny and ngrams, 5e-4 for small, 1.5e-4 for base;"
        " else 2e-5)",
        "--lr",
        resumable="kept",
    )
    best_by: str | None = step_flag(
        None,
        "best.bin has the highest accuracy (whole sets of codes right, of the better decoder), or the lowest"
        " validation loss (default: accuracy from scratch, loss from trained weights)",
        choices=("accuracy", "loss"),
        resumable="kept",
    )
    prepare_only: bool = start_flag(False, "prepare the data, report on them and stop")

    def problems(self) -> Iterator[str]:
        """Yield a line for each problem of these arguments."""
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
        stands = self.prior not in (AUTO, NONE)
        if stands and (self.initial_checkpoint or self.model_size not in (None, AUTO, NGRAMS)):
            yield "--prior is for n-grams alone (--model-size ngrams), without --initial-checkpoint"


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(JobConfig, Split):
    """The flags of finetune.py."""

    usual = ("dataset", *USUAL_FLAGS)
    dataset: list[str] = flag(
        MISSING,
        "descriptions and codes, in one file or several; or a folder with one table, or with train and val",
        *("--data", "--data-dir", "--data-root"),
        metavar="FILE.csv",
        resumable=True,
    )
    save_path: str = "./Finetuned/"
    num_epochs: int = 5
    batch_size: int = 128


@dataclass(frozen=True, kw_only=True)
class MixerConfig(JobConfig):
    """The flags of train_mixer.py."""

    usual = ("train_data", "val_data", *USUAL_FLAGS)
    train_data: list[str] = flag(
        MISSING,
        "descriptions and codes to train on",
        *("--data", "--dataset", "--data-dir", "--data-root"),
        metavar="FILE.csv",
        resumable=True,
    )
    val_data: list[str] = flag(MISSING, "rows to validate on", metavar="FILE.csv", resumable=True)
    target_col_naming: str = flag(
        "hisco", "without --target-cols: take NAME_1 … NAME_5 if the file has them", metavar="NAME"
    )
    save_interval: int = 5000
    num_epochs: int = 50
    batch_size: int = 512
    usual_weight = 0.5


def _parser(kind: type[JobConfig], prog: str, description: str = "") -> Parser:
    parser = Parser(kind, prog, description)
    parser.add_argument("--version", action="version", version=f"histocc {__version__}")
    return parser


finetune_parser = partial(_parser, FinetuneConfig, "finetune.py")
train_mixer_parser = partial(_parser, MixerConfig, "train_mixer.py")


# ---- values of arguments that are left open; they are chosen once, and kept in the checkpoint

# the wider the encoder, the lower the rate; it was measured for tiny
SCRATCH_RATES = {"tiny": 1e-3, "small": 5e-4, "base": 1.5e-4, "ngrams": 1e-3}
# dest: (from scratch, from trained weights). Chosen on held-out texts; see benchmarks/LOG.md.
CHOICES = {
    "learning_rate": (SCRATCH_RATES, 2e-5),
    "empty_blocks": ("first", "all"),
    "linear_loss": (ROWS, MEAN),
    "block_loss": (ONE_TO_ONE, BEST_FIT),
    "best_by": ("accuracy", "loss"),
}
# a run keeps these from its first start
OF_START = ("model_size", "initial_checkpoint", "ngram_passes", "seq2seq_weight")
PART_OF = {"linear_loss": "linear_decoder.", "block_loss": "decoder."}  # the part that a loss trains


def decide(args: JobConfig, trained: dict | None = None, first: dict | None = None) -> JobConfig:
    """Return arguments without a None among CHOICES: the values of `trained`, the checkpoint that is resumed
    or validated; else those of a part of the model that is in `first`, the initial weights; else those of a
    start from scratch. N-grams alone that are fitted have no epochs, unless --max-steps asks for steps.
    """
    if args.model_size == AUTO:  # that of the run or of the initial weights
        args = args.with_decided(model_size=None)
    if saved := (trained or {}).get("args"):  # published weights have none
        args = args.with_decided(**{name: saved.get(name) for name in OF_START})
    decided: dict[str, Any] = {"num_epochs": 0 if is_fit_alone(args) else args.num_epochs}
    if args.seq2seq_weight is None:
        is_alone = args.model_size == NGRAMS and not args.initial_checkpoint
        decided["seq2seq_weight"] = 0.0 if is_alone else args.usual_weight
    if trained is not None:
        decided |= {name: (saved or {}).get(name, usual) for name, (_, usual) in CHOICES.items()}
        return args.with_decided(**decided)
    weights = () if first is None or args.only_encoder else first["model"]
    for name, (scratch, usual) in CHOICES.items():
        part = PART_OF.get(name)
        if getattr(args, name) is not None:
            continue
        if first is None or part and not any(weight.startswith(part) for weight in weights):
            by_size = isinstance(scratch, dict)
            decided[name] = scratch.get(args.model_size, scratch["base"]) if by_size else scratch
        else:  # these belong to a run, not to weights
            saved = {} if name in ("learning_rate", "best_by") else first.get("args", {})
            decided[name] = saved.get(name, usual)
    return args.with_decided(**decided)


def is_fitted(args: ModelFlags) -> bool:
    """Return whether a run from scratch fits its n-grams, if it has any."""
    return args.ngram_passes != 0 and not args.initial_checkpoint


def is_fit_alone(args: JobConfig) -> bool:
    """Return whether the fit of n-grams alone is all of the training. The model's size must be decided."""
    return args.model_size == NGRAMS and is_fitted(args) and not args.max_steps


def learns_few(args: JobConfig) -> bool:
    """Return whether few texts are learned in closed form. The model's size must be decided."""
    return is_fit_alone(args) and not args.seq2seq_weight and args.ngrams == AUTO


def of_ngrams_alone(args: JobConfig) -> tuple[int, int]:
    """Return (up to how many distinct texts the run learns in closed form, 0 for never; the most positions of
    a text that it reads, if --max-len does not say it). The model's size must be decided.
    """
    reads_all = is_fit_alone(args) and not args.seq2seq_weight  # steps and the other decoder need memory
    return learns_few(args) * FEW_TEXTS, LONGEST if reads_all else USUAL_LEN


def of_run(state: dict) -> dict[str, Any]:
    """Return by flag the values that the checkpoint of a run keeps elsewhere than in its arguments."""
    config = state["config"]
    masks = {"memory_mask": config["memory_mask"], "published_target_mask": not config["target_mask"]}
    return {**masks, "clean_text": config["text"]}


def refuse_other_arguments(args: JobConfig, state: dict) -> None:
    """Raise UserError for arguments that would decide another result, or steps after a closed form."""
    script.refuse_other_arguments(args, {**state, "args": state["args"] | of_run(state)}, [])
    if state["config"].get("ridge") and args.max_steps:
        raise UserError(
            f"{args.save_path}: this model was learned in closed form, and takes no steps: leave --max-steps"
            " out. In another folder, or with --overwrite, it trains a model by steps, without a prior, which"
            " few labels make worse"
        )
