"""Flags of the training scripts beside those of any (`histocc.trainer.flags`), and what can be wrong with
them.

A flag with resumable=True may differ when a run is resumed; the rest decides the result and must stay.
"""

import argparse

from histocc import __version__
from histocc.data.arguments import add_table_arguments, table_problems
from histocc.model.linear_loss import LINEAR_LOSSES
from histocc.model.loss import BLOCK_LOSSES
from histocc.model.mixer import NGRAMS
from histocc.model.ngrams import AUTO, LEAST_BITS, MOST_BITS, NONE
from histocc.runtime import arguments
from histocc.runtime.arguments import Group, Parser, count, count_or_zero, not_shares, positive
from histocc.trainer import flags as trainer_flags

# script: flags that no other script has, to tell whose a file of --config is
FLAGS_OF_ONE_SCRIPT = {
    "finetune.py": {"dataset", "share_val"},
    "train_mixer.py": {"train_data", "val_data", "target_col_naming"},
}


def finetune_parser(description: str = "") -> Parser:
    """The flags of finetune.py."""
    parser = arguments.make_parser("finetune.py", description, FLAGS_OF_ONE_SCRIPT)
    parser.add_argument(
        "--dataset",
        "--data-dir",
        "--data-root",
        dest="dataset",
        required=True,
        metavar="FILE.csv",
        help="descriptions and codes; or a folder with one table, or with train and val",
        resumable=True,
    )
    trainer_flags.add_run_arguments(parser, "--save-path", "./Finetuned/", save_interval=1000)
    add_data_arguments(parser, formatter="gpf", use_val_share=True)
    add_model_arguments(parser)
    add_teacher_arguments(parser)
    _add_training_arguments(parser, num_epochs=5, default_batch=128, seq2seq_weight=0.1)
    return parser


def train_mixer_parser(description: str = "") -> Parser:
    """The flags of train_mixer.py."""
    parser = arguments.make_parser("train_mixer.py", description, FLAGS_OF_ONE_SCRIPT)
    parser.add_argument(
        "--train-data",
        "--data-dir",
        "--data-root",
        dest="train_data",
        nargs="+",
        required=True,
        metavar="FILE.csv",
        help="descriptions and codes to train on",
        resumable=True,
    )
    parser.add_argument(
        "--val-data",
        nargs="+",
        required=True,
        metavar="FILE.csv",
        help="descriptions and codes to validate on",
        resumable=True,
    )
    parser.add_argument(
        "--target-col-naming",
        default="hisco",
        metavar="NAME",
        help="without --target-cols: take NAME_1 … NAME_5 where the file has them",
    )
    trainer_flags.add_run_arguments(parser, "--save-dir", None, save_interval=5000)
    add_data_arguments(parser, formatter="hisco", use_val_share=False)
    add_model_arguments(parser)
    add_teacher_arguments(parser)
    _add_training_arguments(parser, num_epochs=50, default_batch=512, seq2seq_weight=0.5)
    return parser


def resumable_flags() -> set[str]:
    """Flags (dest) that may differ when a run is resumed."""
    return finetune_parser().resumable | train_mixer_parser().resumable


def add_data_arguments(parser: Parser, formatter: str, use_val_share: bool) -> None:
    add_table_arguments(parser, formatter, use_val_share)
    parser.add_argument(
        "--prepare-only",
        action="store_true",
        help="prepare the data, report on them and stop",
        resumable=True,
    )
    group = parser.add_argument_group("descriptions of codes, shown with some of the training texts")
    group.add_argument(
        "--include-descriptions",
        action="store_true",
        help="put the description of its first code behind some training texts; needs --descriptions-file",
    )
    group.add_argument(
        "--description-prob", type=float, default=0.5, help="probability that a text gets it, 0…1"
    )
    group.add_argument(
        "--description-template",
        default="{occ} [DESC: {desc}]",
        metavar="TEXT",
        help="what the text becomes: {occ} is the text itself, {desc} the description",
    )
    group.add_argument(
        "--descriptions-file", metavar="FILE", default=None, help="codes and their descriptions"
    )
    group.add_argument(
        "--descriptions-code-col",
        default=None,
        metavar="COL",
        help="its column of codes (default: the first of system_code, hisco, code)",
    )
    group.add_argument(
        "--descriptions-text-col",
        default=None,
        metavar="COL",
        help="its column of descriptions (default: the first of description, en_hisco_text, text)",
    )
    group.add_argument(
        "--descriptions-lang-col",
        default=None,
        metavar="COL",
        help=(
            "its column of languages; a text gets the description in its language, or else the first of its"
            " code"
        ),
    )

    noise = parser.add_argument_group("noise on the training text")
    noise.add_argument(
        "--num-transformations",
        type=count_or_zero,
        default=3,
        help="transformations of a text that is changed",
    )
    noise.add_argument(
        "--augmentation-prob", type=float, default=0.3, help="probability that a text is changed, 0…1"
    )
    noise.add_argument(
        "--join-rows",
        type=float,
        default=0.0,
        metavar="PROB",
        help=(
            "probability that a row with one code is joined with another such row of its "
            "language, drawn again in each epoch, to a row with both codes: farmer and smith, "
            "0…1. Needs a formatter with room for two codes"
        ),
    )
    noise.add_argument(
        "--unk-lang-prob", type=float, default=0.25, help="probability that the language is hidden, 0…1"
    )
    noise.add_argument(
        "--fn-word-freq",
        metavar="FILE",
        default=None,
        help="words to insert: a CSV with columns word, freq (default: the words of the training texts)",
    )
    trainer_flags.add_loader_arguments(parser)


def add_model_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model-size",
        choices=("tiny", "small", "base", "ngrams"),
        default=None,
        help=(
            "size of a new model: tiny is 128 wide with 2 layers, small 256 with 4, base 768 with 12, as"
            " google/canine-s; ngrams has no encoder, but n-grams alone (default: that of"
            " --initial-checkpoint, else base)"
        ),
        resumable=True,
    )
    group.add_argument(
        "--initial-checkpoint",
        "--model-name",
        metavar="PATH",
        default=None,
        help=(
            "what to take the initial weights from: a run folder, a checkpoint, a published encoder, mixer or"
            " flat classifier (.bin, .safetensors, folder, or name on the hub, for example"
            " OccCANINE_s2s_mix); not used when resuming"
        ),
        resumable=True,
    )
    group.add_argument(
        "--initial-key",
        metavar="FILE",
        default=None,
        help=(
            "the codes of the linear outputs of --initial-checkpoint (default: those that it holds, else"
            " those of --key, or the HISCO key for a published HISCO model)"
        ),
        resumable=True,
    )
    group.add_argument(
        "--memory-mask",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=(
            "whether the decoder leaves out padding of the text. Published mixers look at it, at 128"
            " positions, which is slower (default: as in --initial-checkpoint, else it does)"
        ),
        resumable=True,
    )
    group.add_argument(
        "--published-target-mask",
        action="store_true",
        help=(
            "the decoder looks at PAD among the codes as that of the published program does, for models that"
            " it shall code with"
        ),
        resumable=True,
    )
    group.add_argument(
        "--shrink-key",
        action="store_true",
        help=(
            "the codes are those of the data alone; without it those of --initial-checkpoint stay, in their"
            " order, and new ones are appended"
        ),
    )
    group.add_argument(
        "--ngrams",
        type=ngram_bits,
        default=AUTO,
        metavar="auto|none|BITS",
        help=(
            "n-grams of characters and words beside the encoder, at most 2^BITS; auto: those of the training"
            " texts in a model from scratch, else as --initial-checkpoint has them; where it has none, BITS"
            " adds them"
        ),
        resumable=True,
    )
    group.add_argument(
        "--ngram-passes",
        type=count_or_zero,
        default=10,
        metavar="N",
        help=(
            "passes over the distinct rows (200,000 rows at most, fewer for wider models) that fit new"
            " n-grams with both decoders before the encoder is trained, after ten quick ones with the linear"
            " decoder alone; 0, or with --initial-checkpoint: no fit"
        ),
        resumable=True,
    )
    group.add_argument(
        "--only-encoder",
        action="store_true",
        help="take the encoder alone from --initial-checkpoint",
        resumable=True,
    )
    group.add_argument("--freeze-encoder", action="store_true", help="train the decoders only")
    group.add_argument("--dropout", type=float, default=0.0, help="dropout of the decoders, 0…1")
    group.add_argument("--encoder-dropout", type=float, default=0.1, help="dropout of the encoder, 0…1")
    group.add_argument(
        "--ngram-dropout",
        type=float,
        default=0.3,
        help="share of the n-grams left out in training of the whole model, 0…1",
    )
    group.add_argument(
        "--decoder-dim-feedforward",
        type=count,
        help="feed-forward width of the decoder (default: the encoder's width)",
    )


def add_teacher_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("learning from a larger model")
    group.add_argument(
        "--teacher",
        metavar="MODEL",
        default=None,
        help=(
            "a trained model (run folder, checkpoint, published or exported model) whose answers are learned,"
            " beside the true codes: they are made once and kept with the prepared data; without"
            " --initial-checkpoint or a fixed key, its codes come first in the key (default: none)"
        ),
        resumable=True,
    )
    group.add_argument(
        "--unlabelled",
        nargs="+",
        default=None,
        metavar="FILE",
        help=(
            "texts that are learned from --teacher alone: CSV or Parquet, columns as in the training data;"
            " codes in them are not read (default: none)"
        ),
        resumable=True,
    )
    group.add_argument(
        "--distillation-weight",
        type=float,
        default=0.5,
        metavar="W",
        help="share of the teacher in what a row with true codes is trained towards, 0…1",
    )
    group.add_argument(
        "--distillation-temperature",
        type=positive,
        default=1.0,
        metavar="T",
        help="divides the linear decoders' logits where the teacher's are learned: above 1 they are softer",
    )


def _add_training_arguments(
    parser: Parser, num_epochs: int, default_batch: int, seq2seq_weight: float
) -> None:
    rates = "from scratch 1e-3 for tiny and ngrams, 5e-4 for small, 1.5e-4 for base; else 2e-5"
    group = trainer_flags.add_training_arguments(parser, num_epochs, default_batch, None, rates)
    add_loss_arguments(group, seq2seq_weight)
    trainer_flags.add_machine_arguments(parser)
    parser.add_argument("--version", action="version", version=f"histocc {__version__}")


def add_loss_arguments(group: Group, seq2seq_weight: float) -> None:
    """What the mixer minimizes. seq2seq_weight: the default."""
    group.add_argument(
        "--seq2seq-weight",
        type=float,
        default=seq2seq_weight,
        help=(
            "weight of the seq2seq decoder's loss, 0…1; the linear decoder has the rest. From scratch the"
            " linear decoder learns faster at 0.03, and the other no slower"
        ),
    )
    group.add_argument(
        "--linear-lr-factor",
        type=positive,
        default=None,
        metavar="FACTOR",
        help=(
            "learning rate of the linear decoder and the n-grams, as a multiple of that of the rest (default:"
            " 1; where they are new 5, or 30 with --linear-loss mean; where they were fitted before 0.1)"
        ),
    )
    group.add_argument(
        "--linear-loss",
        choices=LINEAR_LOSSES,
        default=None,
        help=(
            "loss of the linear decoder: mean, over all codes, as published; rows: summed over the codes, and"
            " with a softmax (default: rows where it is new, else that of --initial-checkpoint)"
        ),
        resumable=True,
    )
    group.add_argument(
        "--block-loss",
        choices=BLOCK_LOSSES,
        default=None,
        help=(
            "how a row's codes are held against the blocks that the decoder writes. "
            "best-fit, as published: each code against the block that fits it best, so two "
            "codes may share one, and another learns nothing; one-to-one: every block "
            "answers for one code (default: as in --initial-checkpoint, where a published "
            "one has best-fit; one-to-one where the decoder is new); --eval-only: that of the checkpoint"
        ),
        resumable=True,
    )
    group.add_argument(
        "--many-codes-weight",
        type=positive,
        default=1.0,
        metavar="W",
        help=(
            "factor on the seq2seq loss of rows with more than one code, in training and "
            "validation; a step's loss is still divided by the number of rows"
        ),
    )
    group.add_argument(
        "--empty-blocks",
        choices=("all", "first"),
        default=None,
        help=(
            "blocks behind a sample's codes in which the decoder learns to write nothing: all of them,"
            " as published, or the first alone, where decoding stops anyway, which is faster (default: first"
            " from scratch, else all)"
        ),
        resumable=True,
    )


def argument_problems(args: argparse.Namespace) -> list[str]:
    """All that is wrong with the arguments themselves, a line each."""
    problems = trainer_flags.argument_problems(args)
    problems += table_problems(args)
    problems += not_shares(
        args,
        [
            "augmentation_prob",
            "join_rows",
            "distillation_weight",
            "unk_lang_prob",
            "description_prob",
            "dropout",
            "encoder_dropout",
            "ngram_dropout",
            "seq2seq_weight",
        ],
    )
    together = [
        (
            args.include_descriptions and not args.descriptions_file,
            "--include-descriptions needs --descriptions-file",
        ),
        (
            args.descriptions_file and not args.include_descriptions,
            "--descriptions-file needs --include-descriptions",
        ),
        (
            "{desc}" not in args.description_template,
            "--description-template must hold {desc}, the place of the description",
        ),
        (
            args.model_size == NGRAMS and args.ngrams == NONE,
            "--model-size ngrams has nothing but n-grams: leave --ngrams none out",
        ),
        (
            args.model_size == NGRAMS and args.freeze_encoder,
            "--model-size ngrams has no encoder: leave --freeze-encoder out",
        ),
        (args.only_encoder and not args.initial_checkpoint, "--only-encoder needs --initial-checkpoint"),
        (args.unlabelled and not args.teacher, "--unlabelled needs --teacher, which answers to its texts"),
        (
            args.teacher and args.join_rows,
            "--teacher and --join-rows are mutually exclusive: a joined row has no answer of the teacher",
        ),
    ]
    return problems + [text for wrong, text in together if wrong]


def ngram_bits(text: str) -> str:
    """The value of --ngrams: auto, none, or a number of bits, as text."""
    if text in (AUTO, NONE) or text.isascii() and text.isdecimal() and LEAST_BITS <= int(text) <= MOST_BITS:
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not auto, none or a number of bits from {LEAST_BITS} to {MOST_BITS}"
    )
