"""The flags that finetune.py and train_mixer.py add to the flags of any training script and of files of rows,
the combinations to refuse, and the values of flags that the user leaves open.
"""

from argparse import SUPPRESS
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, ClassVar

from histocc import __version__
from histocc.data.config import FEW_TEXTS, USUAL_LEN, DescriptionFlags, SplitFlags, TableFlags
from histocc.model.loss import BEST_FIT, BLOCK_LOSSES, LINEAR_LOSSES, MEAN, ONE_TO_ONE, ROWS
from histocc.model.mixer import NGRAMS
from histocc.model.ngrams import LONGEST, MAX_BITS, MIN_BITS, NONE
from histocc.runtime.config import (
    AUTO,
    Config,
    Count,
    CountOrZero,
    Fraction,
    Parser,
    Positive,
    command_of_histocc,
    flag,
    number,
    start_flag,
)
from histocc.runtime.errors import UserError
from histocc.trainer import script
from histocc.trainer.config import TrainConfig, step_flag

USUAL_FLAGS = (  # after the flags that name the tables
    *("save_path", "overwrite", "target_cols", "formatter", "input_col", "language_col", "language"),
    *("model_size", "initial_checkpoint", "num_epochs", "batch_size", "bf16", "distributed"),
)
UpToHundred = Annotated[int, number(int, lambda value: 0 <= value <= 100, "a whole number from 0 to 100")]


@dataclass(frozen=True, kw_only=True)
class NoiseFlags(Config):
    """noise in the training texts"""

    num_transformations: UpToHundred = step_flag(3, "changes made to a text")
    augmentation_prob: Fraction = step_flag(0.3, "share of the texts that are changed, 0…1")
    unk_lang_prob: Fraction = step_flag(0.25, "share of the texts whose language is hidden, 0…1")
    fn_word_freq: str | None = step_flag(
        None,
        "words to insert: a CSV with columns word, freq (default: words of the training texts)",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class ModelFlags(Config):
    """model"""

    model_size: str | None = flag(
        AUTO,
        "ngrams (quick on CPUs), tiny, small or base; auto: as --initial-checkpoint, else base on"
        " GPUs and ngrams on CPUs (default: auto)",
        choices=(AUTO, "tiny", "small", "base", NGRAMS),
        resumable="kept",
    )
    initial_checkpoint: str | None = flag(
        None,
        "run folder, file or name on the hub (OccCANINE_s2s_mix) to start from; ignored when a run continues",
        "--model-name",
        metavar="RUN",
        resumable=True,
    )
    initial_key: str | None = flag(
        None,
        "codes of the linear decoder of --initial-checkpoint (default: those it holds, else --key, or"
        " HISCO for a published HISCO model)",
        metavar="FILE",
        resumable=True,
    )
    memory_mask: bool | None = flag(
        None,
        "ignore the padding of texts; published models attend to it and are slower (default: as"
        " in --initial-checkpoint, else on)",
        resumable="kept",
    )
    published_target_mask: bool = flag(
        False,
        "attend to the padding of codes, for models to be used in the published program",
        resumable="kept",
    )
    ngrams: str = flag(
        AUTO,
        "n-grams of characters and words, added to the encoder: at most 2^BITS, or none; auto: as in"
        " --initial-checkpoint, in a new model from the training texts",
        choices=(AUTO, NONE, *map(str, range(MIN_BITS, MAX_BITS + 1))),
        metavar="auto|none|BITS",
    )
    ngram_passes: CountOrZero | None = flag(
        None,
        "fitting passes for the digit-by-digit decoder before the encoder is trained (default:"
        " 10,000 rows, at most 10; 0: n-grams are not fitted)",
        metavar="N",
        resumable=True,
    )
    prior: str = flag(
        AUTO,
        "model whose answers help a model without encoder to learn from few texts: built-in, a run"
        " or a published model, or none; auto: built-in for HISCO, and for other codes where it"
        " helps",
        metavar="auto|none|MODEL",
        resumable="kept",
    )
    only_encoder: bool = flag(False, "take only the encoder from --initial-checkpoint", resumable=True)
    freeze_encoder: bool = flag(False, "train only the decoders")
    dropout: Fraction = flag(0.0, "dropout of the decoders, 0…1")
    encoder_dropout: Fraction = step_flag(0.1, "dropout of the encoder, 0…1")
    ngram_dropout: Fraction = step_flag(
        0.3, "share of the n-grams hidden while the whole model is trained, 0…1"
    )
    decoder_dim_feedforward: Count | None = flag(
        None, "feed-forward width of the decoder (default: width of the encoder)"
    )


@dataclass(frozen=True, kw_only=True)
class LossFlags(Config):
    """losses"""

    usual_weight: ClassVar[float] = 0.1
    seq2seq_weight: Fraction | None = flag(
        None,
        "weight of the digit-by-digit decoder, 0…1; the linear decoder has the rest. 0: a flat"
        " classifier; 0.03 learns faster from scratch (default: 0.1; train_mixer.py 0.5; ngrams 0)",
        resumable="kept",
    )
    linear_loss: str | None = flag(
        None,
        "loss of the linear decoder: rows (a sum over codes and a softmax), or mean over all"
        " codes, as published (default: rows in a new model)",
        choices=LINEAR_LOSSES,
        resumable="kept",
    )
    block_loss: str | None = flag(
        None,
        "how a row's codes are matched with the codes that the decoder writes: one-to-one, or"
        " best-fit, as published, where two may share one (default: one-to-one in a new decoder)",
        choices=BLOCK_LOSSES,
        resumable="kept",
    )
    empty_blocks: str | None = flag(
        None,
        "where the decoder learns to write nothing: in the first place after the last code"
        " (first: faster), or in all, as published (default: first from scratch, else all)",
        choices=("all", "first"),
        resumable="kept",
    )


@dataclass(frozen=True, kw_only=True)
class JobConfig(TableFlags, DescriptionFlags, NoiseFlags, ModelFlags, LossFlags, TrainConfig):
    """training"""

    instead = TrainConfig.instead | {
        "lexicon": "--prior built-in (the default for HISCO) knows all titles; for none type --prior none",
        "refit": "leave it out: with few texts all are learned, and each is left out in turn for figures",
        "teacher": "code the texts with that model (histocc predict) and train on the coded file",
    }
    learning_rate: Positive | None = step_flag(
        None,
        "highest learning rate (default: 2e-5 from a trained model; from scratch tiny and ngrams"
        " 1e-3, small 5e-4, base 1.5e-4)",
        "--lr",
        resumable="kept",
    )
    best_by: str | None = step_flag(
        None,
        "best.bin has the highest accuracy (rows with all codes right), or the lowest loss"
        " (default: accuracy from scratch, else loss)",
        choices=("accuracy", "loss"),
        resumable="kept",
    )
    prepare_only: bool = start_flag(False, "prepare the data, report on them and stop")

    def problems(self) -> Iterator[str]:
        """Yield a line for each problem of these arguments."""
        yield from TrainConfig.problems(self)
        yield from TableFlags.problems(self)
        if self.include_descriptions and not self.descriptions_file:
            yield "--include-descriptions needs --descriptions-file"
        if self.descriptions_file and not self.include_descriptions:
            yield "--descriptions-file needs --include-descriptions"
        if "{desc}" not in self.description_template:
            yield "--description-template must contain {desc}, the place of the description"
        if self.model_size == NGRAMS and self.ngrams == NONE:
            yield "--model-size ngrams consists only of n-grams: omit --ngrams none"
        if self.model_size == NGRAMS and self.freeze_encoder:
            yield "--model-size ngrams has no encoder: omit --freeze-encoder"
        if self.only_encoder and not self.initial_checkpoint:
            yield "--only-encoder needs --initial-checkpoint"
        stands = self.prior not in (AUTO, NONE)
        if stands and (self.initial_checkpoint or self.model_size not in (None, AUTO, NGRAMS)):
            yield "--prior is for models without encoder (--model-size ngrams), without --initial-checkpoint"


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(JobConfig, SplitFlags):
    """The flags of finetune.py."""

    usual = ("dataset", *USUAL_FLAGS)
    dataset: list[str] = flag(
        MISSING,
        "coded table, or several, or a folder with train.csv and val.csv",
        *("--data", "--data-dir", "--data-root"),
        metavar="FILE.csv",
        positional=True,
        resumable=True,
    )
    save_path: str = "./Finetuned/"
    num_epochs: int = 5
    batch_size: int = 128


@dataclass(frozen=True, kw_only=True)
class FinetuneCommandConfig(FinetuneConfig):
    """The flags of histocc train."""

    save_path: str = "./output"


@dataclass(frozen=True, kw_only=True)
class MixerConfig(JobConfig):
    """The flags of train_mixer.py."""

    usual = ("train_data", "val_data", *USUAL_FLAGS[:-2])  # one screen
    train_data: list[str] = flag(
        MISSING,
        "coded tables to train on",
        *("--data", "--dataset", "--data-dir", "--data-root"),
        metavar="FILE.csv",
        resumable=True,
    )
    instead = JobConfig.instead | {"val_data": "or use histocc train (finetune.py), which splits one table"}
    val_data: list[str] = flag(MISSING, "coded tables to validate on", metavar="FILE.csv", resumable=True)
    target_col_naming: str = flag(
        "hisco", "without --target-cols, the columns are NAME_1 … NAME_5", metavar="NAME"
    )
    save_interval: int = 5000
    num_epochs: int = 50
    batch_size: int = 512
    usual_weight = 0.5


@dataclass(frozen=True, kw_only=True)
class MixerCommandConfig(MixerConfig):
    """The flags of histocc mix."""

    save_path: str = "./output"


def _parser(kind: type[JobConfig], prog: str, *examples: str) -> Parser:
    what = "Train a model on your coded tables. The same command, given again, continues the run."
    parser = Parser(kind, prog, what, *examples)
    parser.add_argument("--version", action="version", version=f"histocc {__version__}", help=SUPPRESS)
    return parser


def finetune_parser() -> Parser:
    if command_of_histocc():
        continues = "new.csv --initial-checkpoint ./output --output ./mine"
        return _parser(FinetuneCommandConfig, "finetune.py", "data.csv --output ./output", continues)
    continues = "data.csv --initial-checkpoint ./published --save-path ./mine"
    return _parser(FinetuneConfig, "finetune.py", "data.csv --save-path ./mine", continues)


def train_mixer_parser() -> Parser:
    kind, output = (MixerCommandConfig, "--output") if command_of_histocc() else (MixerConfig, "--save-dir")
    files = f"--train-data a.csv b.csv --val-data v.csv {output} ./output"
    return _parser(kind, "train_mixer.py", files, f"{files} --num-epochs 10")


# ---- values of open arguments, chosen once and kept in the checkpoint

# A wider encoder has a lower rate. This was measured only for tiny.
SCRATCH_RATES = {"tiny": 1e-3, "small": 5e-4, "base": 1.5e-4, "ngrams": 1e-3}
# dest: (from scratch, from trained weights). Chosen on held-out texts, see benchmarks/LOG.md.
LEFT_OPEN = {
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
    """Return arguments without a None among LEFT_OPEN. Values come from `trained`, the checkpoint to resume
    or validate, or from `first`, the initial weights, if these have the part of the model. Otherwise they are
    the defaults from scratch. A fitted model without encoder has no epochs, unless --max-steps asks for
    steps.
    """
    if args.model_size == AUTO:  # take the size of the run or of the initial weights
        args = args.with_decided(model_size=None)
    if saved := (trained or {}).get("args"):  # published weights have none
        args = args.with_decided(**{name: saved.get(name) for name in OF_START})
    decided: dict[str, Any] = {"num_epochs": 0 if is_fit_alone(args) else args.num_epochs}
    if args.seq2seq_weight is None:
        is_alone = args.model_size == NGRAMS and not args.initial_checkpoint
        decided["seq2seq_weight"] = 0.0 if is_alone else args.usual_weight
    if trained is not None:
        decided |= {name: (saved or {}).get(name, usual) for name, (_, usual) in LEFT_OPEN.items()}
        return args.with_decided(**decided)
    weights = () if first is None or args.only_encoder else first["model"]
    for name, (scratch, usual) in LEFT_OPEN.items():
        part = PART_OF.get(name)
        if getattr(args, name) is not None:
            continue
        if first is None or part and not any(weight.startswith(part) for weight in weights):
            by_size = isinstance(scratch, dict)
            decided[name] = scratch.get(args.model_size, scratch["base"]) if by_size else scratch
        else:  # the two named here belong to a run, not to weights
            saved = {} if name in ("learning_rate", "best_by") else first.get("args", {})
            decided[name] = saved.get(name, usual)
    return args.with_decided(**decided)


def is_fitted(args: ModelFlags) -> bool:
    """Return whether a run from scratch fits its n-grams, if it has any."""
    return args.ngram_passes != 0 and not args.initial_checkpoint


def is_fit_alone(args: JobConfig) -> bool:
    """Return whether training is only a fit of n-grams. The model's size must be decided."""
    return args.model_size == NGRAMS and is_fitted(args) and not args.max_steps


def learns_few(args: JobConfig) -> bool:
    """Return whether few texts are learned in closed form. The model's size must be decided."""
    return is_fit_alone(args) and not args.seq2seq_weight and args.ngrams == AUTO


def of_ngrams_alone(args: JobConfig) -> tuple[int, int]:
    """Return (the largest number of distinct texts to learn in closed form, 0 for never, the most positions
    of a text to read without --max-len). The model's size must be decided.
    """
    reads_all = is_fit_alone(args) and not args.seq2seq_weight  # steps and the other decoder need memory
    return learns_few(args) * FEW_TEXTS, LONGEST if reads_all else USUAL_LEN


def of_run(state: dict) -> dict[str, Any]:
    """Return, by flag, the values that a run's checkpoint keeps outside its arguments."""
    config = state["config"]
    masks = {"memory_mask": config["memory_mask"], "published_target_mask": not config["target_mask"]}
    return {**masks, "clean_text": config["text"]}


def refuse_on_resume(args: JobConfig, state: dict) -> None:
    """Raise UserError for arguments that would change the result, or ask for steps after a closed form."""
    script.refuse_other_arguments(args, {**state, "args": state["args"] | of_run(state)}, [])
    if state["config"].get("ridge") and args.max_steps:
        raise UserError(
            f"{args.save_path}: this model was learned in closed form, and takes no steps: leave --max-steps"
            " out. In another folder, or with --overwrite, --max-steps trains a model by steps, without a"
            " prior, which is less accurate with few labels"
        )
