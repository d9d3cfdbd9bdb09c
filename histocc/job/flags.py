"""Flags of the training scripts, and what can be wrong with them.

A flag with resumable=True may differ when a run is resumed; the rest decides the result and must stay.
"""

import argparse
import importlib.util
import math
from collections.abc import Callable

from histocc import __version__
from histocc.data.arguments import add_table_arguments, not_shares, table_problems
from histocc.model.linear_loss import LINEAR_LOSSES
from histocc.model.loss import BLOCK_LOSSES
from histocc.model.ngrams import AUTO, LEAST_BITS, MOST_BITS, NONE
from histocc.runtime import arguments
from histocc.runtime.arguments import Parser, count, count_or_zero, flag, positive
from histocc.runtime.entrypoint import add_process_arguments
from histocc.runtime.parallel import MODES
from histocc.trainer.batch_size import AutoBatchSize

# script: flags that no other script has, to tell whose a file of --config is
FLAGS_OF_ONE_SCRIPT = {
    "finetune.py": {"dataset", "share_val"},
    "train_mixer.py": {"train_data", "val_data", "target_col_naming"},
}

# flag: package that it needs, and name of the extra
EXTRAS = {
    "tensorboard": "tensorboard",
    "log_wandb": "wandb",
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
    add_run_arguments(parser, "--save-path", "./Finetuned/", save_interval=1000)
    add_data_arguments(parser, formatter="gpf", use_val_share=True)
    add_model_arguments(parser)
    add_training_arguments(parser, num_epochs=5, default_batch=128, seq2seq_weight=0.1)
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
    add_run_arguments(parser, "--save-dir", None, save_interval=5000)
    add_data_arguments(parser, formatter="hisco", use_val_share=False)
    add_model_arguments(parser)
    add_training_arguments(parser, num_epochs=50, default_batch=512, seq2seq_weight=0.5)
    return parser


def resumable_flags() -> set[str]:
    """Flags (dest) that may differ when a run is resumed."""
    return finetune_parser().resumable | train_mixer_parser().resumable


def add_run_arguments(parser: Parser, save_flag: str, save_default: str | None, save_interval: int) -> None:
    group = parser.add_argument_group("files of the run")
    group.add_argument(
        save_flag,
        *sorted({"--save-path", "--save-dir", "--checkpoint-dir"} - {save_flag}),
        dest="save_path",
        default=save_default,
        required=save_default is None,
        metavar="DIR",
        help="folder of the run: checkpoints, logs.csv, key.csv, prepared data; state in it is resumed",
        resumable=True,
    )
    group.add_argument(
        "--save-interval",
        type=count,
        default=save_interval,
        help="optimizer steps between checkpoints",
        resumable=True,
    )
    group.add_argument(
        "--save-each-epoch", action="store_true", help="also keep epoch_N.bin of every epoch", resumable=True
    )
    group.add_argument(
        "--keep-checkpoints",
        type=count,
        default=3,
        help="how many {step}.bin stay; older ones are removed",
        resumable=True,
    )
    group.add_argument(
        "--overwrite", action="store_true", help="start over where the folder holds a run", resumable=True
    )
    group.add_argument(
        "--log-interval",
        type=count,
        default=100,
        help="optimizer steps between rows of the log",
        resumable=True,
    )
    group.add_argument(
        "--eval-interval",
        type=count,
        default=1000,
        help="optimizer steps between validations",
        resumable=True,
    )
    group.add_argument(
        "--log-wandb",
        action="store_true",
        help="also log to Weights & Biases (extra wandb); WANDB_MODE=offline needs no network",
        resumable=True,
    )
    group.add_argument(
        "--wandb-project-name",
        default=None,
        help="project for --log-wandb; histocc where it is not given",
        resumable=True,
    )
    group.add_argument(
        "--tensorboard",
        action="store_true",
        help="also log to TensorBoard, in the folder tensorboard of the run (extra tensorboard)",
        resumable=True,
    )
    group.add_argument(
        "--config",
        metavar="FILE.toml",
        default=None,
        help=(
            "arguments from a file: names of flags and their values, or the args.json of a run; the command"
            " line wins"
        ),
        resumable=True,
    )
    group.add_argument("--version", action="version", version=f"histocc {__version__}")


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

    loader = parser.add_argument_group("loading")
    loader.add_argument(
        "--num-workers", type=count_or_zero, default=0, help="loading processes per process", resumable=True
    )
    loader.add_argument(
        "--prefetch-factor",
        type=count,
        default=None,
        help="batches that each worker loads ahead, with --num-workers (default: 2)",
        resumable=True,
    )
    loader.add_argument(
        "--pin-memory",
        action="store_true",
        help="page-locked memory, for faster copies to a GPU",
        resumable=True,
    )
    loader.add_argument(
        "--persistent-workers", action="store_true", help="keep the workers between epochs", resumable=True
    )


def add_model_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model-size",
        choices=("tiny", "small", "base"),
        default=None,
        help=(
            "size of a new model: tiny is 128 wide with 2 layers, small 256 with 4, base 768 with 12, as"
            " google/canine-s (default: that of --initial-checkpoint, else base)"
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


def add_training_arguments(
    parser: Parser, num_epochs: int, default_batch: int, seq2seq_weight: float
) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--num-epochs",
        "--epochs",
        type=count,
        default=num_epochs,
        help="passes over the training data",
        resumable=True,
    )
    group.add_argument(
        "--batch-size",
        type=batch_size(default_batch),
        default=default_batch,
        metavar="N|auto",
        help=(
            "samples per process and micro-batch; auto: as many as fit into the GPU, or the fastest"
            f" number on a CPU, for the total batch that {default_batch} would make"
        ),
        resumable=True,
    )
    group.add_argument(
        "--accumulate-steps", type=count, default=1, help="micro-batches of an optimizer step", resumable=True
    )
    group.add_argument(
        "--global-batch-size",
        type=count,
        default=None,
        help=(
            "samples of an optimizer step over all processes; each takes its share in micro-batches of"
            " at most --batch-size (default: none; a step has --batch-size × --accumulate-steps of each"
            " process)"
        ),
        resumable=True,
    )
    group.add_argument(
        "--length-groups",
        type=count,
        default=None,
        metavar="N",
        help=(
            "micro-batches of similar length into which a process cuts its share of a step, for less padding "
            "(default: 4, fewer for small batches; 1: none); changes speed, not results"
        ),
        resumable=True,
    )
    group.add_argument(
        "--learning-rate",
        type=float,
        default=None,
        help=(
            "peak learning rate (default: from scratch 1e-3 for tiny, 5e-4 for small, 1.5e-4 for base; else"
            " 2e-5)"
        ),
        resumable=True,
    )
    group.add_argument(
        "--lr-scaling",
        choices=("none", "linear", "sqrt"),
        default="none",
        help="multiply the learning rate by the number of processes, or its square root",
    )
    group.add_argument(
        "--warmup-pct", type=float, default=0.05, help="share of the schedule spent warming up, 0…1"
    )
    group.add_argument(
        "--warmup-steps",
        type=count_or_zero,
        default=None,
        help="optimizer steps of warm-up, instead of --warmup-pct; without it that share decides",
    )
    group.add_argument(
        "--schedule-steps",
        type=count,
        default=None,
        help="length of the schedule (default: epochs × steps per epoch)",
    )
    group.add_argument(
        "--max-steps",
        type=count,
        default=None,
        help=(
            "stop after this many optimizer steps; the schedule stays (default: none, all epochs are trained)"
        ),
        resumable=True,
    )
    group.add_argument(
        "--stop-after",
        type=positive,
        default=None,
        metavar="MINUTES",
        help="stop and save this long after the start, for queues with a time limit (default: no limit)",
        resumable=True,
    )
    group.add_argument(
        "--max-bad-steps",
        type=count,
        default=20,
        help="steps in a row without a finite gradient after which the run ends; such steps change nothing",
        resumable=True,
    )
    group.add_argument(
        "--check-replicas-every",
        type=count_or_zero,
        default=1000,
        metavar="STEPS",
        help="compare the weights of all processes so often; 0: never",
        resumable=True,
    )
    group.add_argument("--weight-decay", type=float, default=0.01, help="AdamW's weight decay")
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
            "blocks behind an sample's codes in which the decoder learns to write nothing: all of them,"
            " as published, or the first alone, where decoding stops anyway, which is faster (default: first"
            " from scratch, else all)"
        ),
        resumable=True,
    )
    group.add_argument("--seed", type=int, default=42, help="seed of weights, order, noise and dropout")
    group.add_argument(
        "--eval-only",
        action="store_true",
        help="validate --initial-checkpoint, or the best checkpoint of the run, and stop",
        resumable=True,
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help=(
            "everything but training: says what the run would take in time, memory and disk, from three steps"
        ),
        resumable=True,
    )
    _add_machine_arguments(parser)


def _add_machine_arguments(parser: Parser) -> None:
    machine = add_process_arguments(parser)
    machine.add_argument(
        "--parallel",
        choices=MODES,
        default="ddp",
        help=(
            "ddp: every process holds the whole model; fsdp: a share of its weights, gradients and optimizer"
            " state, which are gathered layer by layer: less memory, more messages, same results"
        ),
        resumable=True,
    )
    machine.add_argument(
        "--float64", action="store_true", help="double precision, for checking results", resumable=True
    )
    machine.add_argument(
        "--bf16",
        action="store_true",
        help="matrix products in bfloat16; weights, optimizer and loss stay float32",
        resumable=True,
    )
    machine.add_argument(
        "--fp16",
        action="store_true",
        help="matrix products in float16, with a scaled loss; slow on CPUs",
        resumable=True,
    )
    machine.add_argument(
        "--no-fp16", action="store_true", help="float32, which is the default", resumable=True
    )
    machine.add_argument(
        "--use-amp",
        action="store_true",
        help="the fastest of --bf16, --fp16 and float32 that the device has",
        resumable=True,
    )
    machine.add_argument(
        "--profile",
        type=count,
        default=None,
        metavar="STEPS",
        help=(
            "write where the time of so many steps went: profile.txt and trace.json in the save folder; "
            "without it nothing is measured"
        ),
        resumable=True,
    )
    machine.add_argument(
        "--compile",
        action="store_true",
        help=(
            "layers through torch.compile: a minute or more at the start; no faster on the CPUs measured,"
            " untried on GPUs"
        ),
        resumable=True,
    )


def argument_problems(args: argparse.Namespace) -> list[str]:
    """All that is wrong with the arguments themselves, a line each."""
    problems = [
        f"{flag(dest)} needs the package {package}: pip install {package}"
        for dest, package in EXTRAS.items()
        if getattr(args, dest) and importlib.util.find_spec(package) is None
    ]
    problems += table_problems(args)
    problems += not_shares(
        args,
        [
            "augmentation_prob",
            "join_rows",
            "unk_lang_prob",
            "description_prob",
            "dropout",
            "encoder_dropout",
            "ngram_dropout",
            "warmup_pct",
            "seq2seq_weight",
        ],
    )
    if args.learning_rate is not None and not (args.learning_rate > 0 and math.isfinite(args.learning_rate)):
        problems.append(f"--learning-rate must be above 0, not {args.learning_rate:g}")
    if not (args.weight_decay >= 0 and math.isfinite(args.weight_decay)):
        problems.append(f"--weight-decay must be a number of at least 0, not {args.weight_decay:g}")
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
            args.persistent_workers and not args.num_workers,
            "--persistent-workers needs --num-workers of at least 1",
        ),
        (
            args.prefetch_factor and not args.num_workers,
            "--prefetch-factor needs --num-workers of at least 1",
        ),
        (
            args.global_batch_size and args.accumulate_steps > 1,
            "--accumulate-steps and --global-batch-size are mutually exclusive: the total fixes the"
            " accumulation",
        ),
        (
            args.global_batch_size and args.lr_scaling != "none",
            (
                "--lr-scaling with --global-batch-size: the total batch does not grow with the processes, so"
                " the rate must not"
            ),
        ),
        (args.only_encoder and not args.initial_checkpoint, "--only-encoder needs --initial-checkpoint"),
        (args.dry_run and args.eval_only, "--dry-run and --eval-only are mutually exclusive"),
        (args.overwrite and args.eval_only, "--overwrite and --eval-only: an evaluation replaces nothing"),
        (
            sum(map(bool, (args.bf16, args.fp16, args.use_amp, args.float64, args.no_fp16))) > 1,
            "--bf16, --fp16, --use-amp, --float64 and --no-fp16 are mutually exclusive",
        ),
        (
            args.wandb_project_name is not None and not args.log_wandb,
            "--wandb-project-name needs --log-wandb",
        ),
    ]
    return problems + [text for wrong, text in together if wrong]


def batch_size(default: int) -> Callable[[str], int]:
    """For argparse: a count, or auto, which stands for `default` until the run has found its own."""

    def parse(text: str) -> int:
        return AutoBatchSize(default) if text == "auto" else count(text)

    parse.__name__ = "batch size"
    return parse


def ngram_bits(text: str) -> str:
    """The value of --ngrams: auto, none, or a number of bits, as text."""
    if text in (AUTO, NONE) or text.isascii() and text.isdecimal() and LEAST_BITS <= int(text) <= MOST_BITS:
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not auto, none or a number of bits from {LEAST_BITS} to {MOST_BITS}"
    )
