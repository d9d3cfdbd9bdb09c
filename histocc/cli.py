"""Arguments that the scripts share, their checks, and the frame that a script runs in."""

import argparse
import gc
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Callable

from histocc import __version__, console, watchdog
from histocc.arguments import (  # noqa: F401 (some are used as cli.…)
    FLAGS_OF_ONE_SCRIPT,
    Parser,
    batch_size,
    count,
    count_or_zero,
    delimiter,
    flag,
    make_parser,
    ngram_bits,
    positive,
)
from histocc.distributed import (
    World,
    close_world,
    end_process,
    errors_end_all_ranks,
    init_world,
    is_first_rank,
    lost_contact,
)
from histocc.errors import UserError
from histocc.heartbeat import say_who_is_missing
from histocc.linear_loss import LINEAR_LOSSES
from histocc.loss import BLOCK_LOSSES
from histocc.machine_errors import as_user_error, in_words
from histocc.ngrams import AUTO
from histocc.parallel import MODES
from histocc.stopping import Stopped, stop_request
from histocc.text_rules import TEXT_RULES

# for exit functions of libraries, at the end of a run and where it was stopped
CLOSE_SECONDS = 60.0
STOP_SECONDS = 2.0
# flag: package that it needs, and name of the extra
EXTRAS = {
    "tensorboard": "tensorboard",
    "log_wandb": "wandb",
}

# What a resumed run may change: the rest decides the result and must stay.
MAY_DIFFER_ON_RESUME = {
    "dataset",
    "train_data",
    "val_data",
    "save_path",
    "input_col",
    "language_col",
    "delimiter",  # the content is compared instead
    "log_interval",
    "eval_interval",
    "save_interval",
    "save_each_epoch",
    "keep_checkpoints",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "persistent_workers",
    "device",
    "float64",
    "no_fp16",
    "distributed",
    "local_rank",
    "world_size",
    "batch_size",
    "accumulate_steps",
    "global_batch_size",
    "length_groups",
    "max_steps",
    "num_epochs",
    "timeout_minutes",
    "stop_after",
    "config",
    "tensorboard",
    "log_wandb",
    "wandb_project_name",
    "max_bad_steps",
    "check_replicas_every",
    "overwrite",
    "eval_only",
    "prepare_only",
    "dry_run",
    "initial_checkpoint",
    "initial_key",
    "only_encoder",
    "model_size",
    "memory_mask",
    "published_target_mask",
    "clean_text",  # what came of them is compared instead
    "learning_rate",
    "block_loss",
    "empty_blocks",
    "linear_loss",
    "ngrams",  # likewise
    "ngram_passes",
    "use_amp",
    "fp16",
    "bf16",
    "profile",
    "parallel",
    "key",
    "all_codes_file",
    "all_codes_col",
    "compile",
}


def add_finetune_arguments(parser: Parser) -> None:
    """All of finetune.py but its data set."""
    add_run_arguments(parser, "--save-path", "./Finetuned/", save_interval=1000)
    add_data_arguments(parser, formatter="gpf", use_val_share=True)
    add_model_arguments(parser)
    add_training_arguments(parser, num_epochs=5, default_batch=128, seq2seq_weight=0.1)


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
    )
    group.add_argument(
        "--save-interval", type=count, default=save_interval, help="optimizer steps between checkpoints"
    )
    group.add_argument("--save-each-epoch", action="store_true", help="also keep epoch_N.bin of every epoch")
    group.add_argument(
        "--keep-checkpoints", type=count, default=3, help="how many {step}.bin stay; older ones are removed"
    )
    group.add_argument("--overwrite", action="store_true", help="start anew where the folder holds a run")
    group.add_argument(
        "--log-interval", type=count, default=100, help="optimizer steps between rows of the log"
    )
    group.add_argument(
        "--eval-interval", type=count, default=1000, help="optimizer steps between validations"
    )
    group.add_argument(
        "--log-wandb",
        action="store_true",
        help="also log to Weights & Biases (extra wandb); WANDB_MODE=offline needs no network",
    )
    group.add_argument(
        "--wandb-project-name", default=None, help="project for --log-wandb; histocc where it is not given"
    )
    group.add_argument(
        "--tensorboard",
        action="store_true",
        help="also log to TensorBoard, in the folder tensorboard of the run (extra tensorboard)",
    )
    group.add_argument(
        "--config",
        metavar="FILE.toml",
        default=None,
        help=(
            "arguments from a file: names of flags and their values, or the args.json of a run; the command"
            " line wins"
        ),
    )
    group.add_argument("--version", action="version", version=f"histocc {__version__}")


def add_table_arguments(parser: Parser, formatter: str, use_val_share: bool) -> None:
    """What files of rows hold, and how they are read: for the scripts and for `python -m histocc.prepare`."""
    group = parser.add_argument_group("data")
    group.add_argument("--input-col", default="occ1", help="column with the descriptions")
    group.add_argument(
        "--target-cols",
        nargs="+",
        default=None,
        metavar="COL",
        help=(
            "columns with the codes; default: the first of code1 … code5 (numbers, with --key), hisco_1 …"
            " hisco_5, OCC1950_1/2 that the file has"
        ),
    )
    group.add_argument(
        "--language", default="unk", help="language of all descriptions, where --language-col names no column"
    )
    group.add_argument(
        "--language-col",
        default=None,
        metavar="COL",
        help="column with the language of each description (default: none, all have that of --language)",
    )
    group.add_argument(
        "--delimiter",
        type=delimiter,
        default=None,
        metavar="CHAR",
        help=(
            "what parts the columns of CSV files: a character, or comma, semicolon, tab, pipe (default: found"
            " in the first line)"
        ),
    )
    group.add_argument(
        "--formatter",
        choices=("gpf", "hisco", "occ1950"),
        default=formatter,
        help="system of the codes; gpf, general purpose: as many codes as target columns",
    )
    group.add_argument("--block-size", type=count, default=5, help="gpf: tokens of a code")
    group.add_argument(
        "--use-within-block-sep", action="store_true", help="gpf: the tokens of a code are separated by ','"
    )
    group.add_argument(
        "--allow-codes-shorter-than-block-size", action="store_true", help="gpf: accept shorter codes"
    )
    group.add_argument(
        "--drop-bad-labels", action="store_true", help="leave out, and list, rows whose code does not fit"
    )
    group.add_argument(
        "--missing-code",
        default=None,
        metavar="CODE",
        help="code of rows whose first code is missing; without it they are left out, and listed",
    )
    group.add_argument(
        "--key",
        metavar="FILE",
        default=None,
        help=(
            "fixes the codes and their order: columns code and system_code (or hisco), or the word hisco for"
            " the 1,919 codes of the published models; without it the codes are those of --all-codes-file,"
            " else those of --initial-checkpoint, then those of the data, in sorted order"
        ),
    )
    group.add_argument(
        "--all-codes-file", metavar="FILE", default=None, help="fixes the set of codes: a CSV that lists them"
    )
    group.add_argument(
        "--all-codes-col", default=None, help="column of --all-codes-file (default: the first target column)"
    )
    group.add_argument(
        "--clean-text",
        choices=TEXT_RULES,
        default=None,
        help=(
            "what happens to texts before a model sees them; ascii-lower: lower case, transliterated to"
            " ASCII, as the published models have them (default: as in --initial-checkpoint, else as-is)"
        ),
    )
    if use_val_share:
        group.add_argument(
            "--share-val", type=float, default=0.1, help="share of texts set aside for validation, 0…1"
        )
    group.add_argument(
        "--max-len", type=count, default=128, help="most positions of an input; longer descriptions are cut"
    )


def add_data_arguments(parser: Parser, formatter: str, use_val_share: bool) -> None:
    add_table_arguments(parser, formatter, use_val_share)
    parser.add_argument(
        "--prepare-only", action="store_true", help="prepare the data, report on them and stop"
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
            "language, drawn anew in each epoch, to a row with both codes: farmer and smith, "
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
    loader.add_argument("--num-workers", type=count_or_zero, default=0, help="loading processes per process")
    loader.add_argument(
        "--prefetch-factor",
        type=count,
        default=None,
        help="batches that each worker loads ahead, with --num-workers (default: 2)",
    )
    loader.add_argument(
        "--pin-memory", action="store_true", help="page-locked memory, for faster copies to a GPU"
    )
    loader.add_argument("--persistent-workers", action="store_true", help="keep the workers between epochs")


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
    )
    group.add_argument(
        "--initial-key",
        metavar="FILE",
        default=None,
        help=(
            "the codes of the linear outputs of --initial-checkpoint (default: those that it holds, else"
            " those of --key, or the HISCO key for a published HISCO model)"
        ),
    )
    group.add_argument(
        "--memory-mask",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=(
            "whether the decoder leaves out padding of the text. Published mixers look at it, at 128"
            " positions, which is slower (default: as in --initial-checkpoint, else it does)"
        ),
    )
    group.add_argument(
        "--published-target-mask",
        action="store_true",
        help=(
            "the decoder looks at PAD among the codes as that of the published program does, for models that"
            " it shall code with"
        ),
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
    )
    group.add_argument(
        "--only-encoder", action="store_true", help="take the encoder alone from --initial-checkpoint"
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
        "--num-epochs", "--epochs", type=count, default=num_epochs, help="passes over the training data"
    )
    group.add_argument(
        "--batch-size",
        type=batch_size(default_batch),
        default=default_batch,
        metavar="N|auto",
        help=(
            "observations per process and micro-batch; auto: as many as fit into the GPU, or the fastest"
            f" number on a CPU, for the total batch that {default_batch} would make"
        ),
    )
    group.add_argument("--accumulate-steps", type=count, default=1, help="micro-batches of an optimizer step")
    group.add_argument(
        "--global-batch-size",
        type=count,
        default=None,
        help=(
            "observations of an optimizer step over all processes; each takes its share in micro-batches of"
            " at most --batch-size (default: none; a step has --batch-size × --accumulate-steps of each"
            " process)"
        ),
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
    )
    group.add_argument(
        "--learning-rate",
        type=float,
        default=None,
        help=(
            "peak learning rate (default: from scratch 1e-3 for tiny, 5e-4 for small, 1.5e-4 for base; else"
            " 2e-5)"
        ),
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
    )
    group.add_argument(
        "--stop-after",
        type=positive,
        default=None,
        metavar="MINUTES",
        help="stop and save this long after the start, for queues with a time limit (default: no limit)",
    )
    group.add_argument(
        "--max-bad-steps",
        type=count,
        default=20,
        help="steps in a row without a finite gradient after which the run ends; such steps change nothing",
    )
    group.add_argument(
        "--check-replicas-every",
        type=count_or_zero,
        default=1000,
        metavar="STEPS",
        help="compare the weights of all processes so often; 0: never",
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
            "blocks behind an observation's codes in which the decoder learns to write nothing: all of them,"
            " as published, or the first alone, where decoding stops anyway, which is faster (default: first"
            " from scratch, else all)"
        ),
    )
    group.add_argument("--seed", type=int, default=42, help="seed of weights, order, noise and dropout")
    group.add_argument(
        "--eval-only",
        action="store_true",
        help="validate --initial-checkpoint, or the best checkpoint of the run, and stop",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help=(
            "everything but training: says what the run would take in time, memory and disk, from three steps"
        ),
    )
    _add_machine_arguments(parser)


def add_process_arguments(
    parser: Parser, minutes: float = 30.0, timeout_help: str = "minutes that a process waits for another one"
) -> argparse._ArgumentGroup:
    """What every command that runs on several processes takes; `start` reads it. Returns the group, for more
    of its kind.
    """
    machine = parser.add_argument_group("machine and processes")
    machine.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs where there are any"
    )
    machine.add_argument(
        "--distributed", action="store_true", help="join the processes of the launcher (torchrun)"
    )
    machine.add_argument("--local-rank", type=int, default=None, help="set by torch.distributed.launch")
    machine.add_argument(
        "--world-size", type=count, default=None, help="number of processes, checked against the launcher's"
    )
    machine.add_argument("--timeout-minutes", type=positive, default=minutes, help=timeout_help)
    return machine


def add_published_arguments(group: argparse._ArgumentGroup) -> None:
    """What a user says of a published model that it does not say itself; `published.Given`."""
    group.add_argument(
        "--formatter",
        choices=("hisco", "occ1950", "gpf"),
        default=None,
        help="system of a published model that does not show it",
    )
    group.add_argument(
        "--key",
        default=None,
        metavar="FILE",
        help=(
            "codes of a published model that does not hold them; the word hisco: those of the published HISCO"
            " models"
        ),
    )
    group.add_argument(
        "--use-within-block-sep",
        action="store_true",
        help=(
            "the tokens of a code of a published general-purpose model are separated by ',', where its key"
            " does not show it"
        ),
    )


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
    )
    machine.add_argument("--float64", action="store_true", help="double precision, for checking results")
    machine.add_argument(
        "--bf16",
        action="store_true",
        help="matrix products in bfloat16; weights, optimizer and loss stay float32",
    )
    machine.add_argument(
        "--fp16", action="store_true", help="matrix products in float16, with a scaled loss; slow on CPUs"
    )
    machine.add_argument("--no-fp16", action="store_true", help="float32, which is the default")
    machine.add_argument(
        "--use-amp", action="store_true", help="the fastest of --bf16, --fp16 and float32 that the device has"
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
    )
    machine.add_argument(
        "--compile",
        action="store_true",
        help=(
            "layers through torch.compile: a minute or more at the start; no faster on the CPUs measured,"
            " untried on GPUs"
        ),
    )


def table_problems(args: argparse.Namespace) -> list[str]:
    """All that is wrong with the arguments of `add_table_arguments`, a line each."""
    together = [
        (args.language != "unk" and args.language_col, "--language and --language-col: give one of them"),
        (args.key and args.all_codes_file, "--key and --all-codes-file: give one of them"),
        (args.all_codes_col and not args.all_codes_file, "--all-codes-col needs --all-codes-file"),
        (
            len(set(args.target_cols or [])) < len(args.target_cols or []),
            "--target-cols: a column is named twice",
        ),
        (
            args.input_col in (args.target_cols or []),
            f"--input-col and --target-cols both name {args.input_col!r}",
        ),
        (args.max_len < 16, f"--max-len must be at least 16, not {args.max_len}"),
        (args.max_len > 2048, f"--max-len must be at most 2048, not {args.max_len}"),
        (args.block_size > 100, f"--block-size must be at most 100, not {args.block_size}"),
        (
            args.language_col in (args.input_col, *(args.target_cols or [])),
            f"--language-col {args.language_col} is also the column of the descriptions or of codes",
        ),
        (args.language_col is not None and not args.language_col.strip(), "--language-col is empty"),
        (len(args.language) > args.max_len // 2, f"--language {args.language[:30]}: is it a language?"),
    ]
    return _not_shares(args, ["share_val"]) + [text for wrong, text in together if wrong]


def _not_shares(args: argparse.Namespace, names: list[str]) -> list[str]:
    return [
        f"{flag(name)} must lie between 0 and 1, not {getattr(args, name):g}"
        for name in names
        if not 0 <= getattr(args, name, 0.0) <= 1
    ]


def argument_problems(args: argparse.Namespace) -> list[str]:
    """All that is wrong with the arguments themselves, a line each."""
    problems = [
        f"{flag(dest)} needs the package {package}: pip install {package}"
        for dest, package in EXTRAS.items()
        if getattr(args, dest) and importlib.util.find_spec(package) is None
    ]
    problems += table_problems(args)
    problems += _not_shares(
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
            "--accumulate-steps and --global-batch-size: give one of them; the total fixes the accumulation",
        ),
        (
            args.global_batch_size and args.lr_scaling != "none",
            (
                "--lr-scaling with --global-batch-size: the total batch does not grow with the processes, so"
                " the rate must not"
            ),
        ),
        (args.only_encoder and not args.initial_checkpoint, "--only-encoder needs --initial-checkpoint"),
        (args.dry_run and args.eval_only, "--dry-run and --eval-only: give one of them"),
        (args.overwrite and args.eval_only, "--overwrite and --eval-only: an evaluation starts nothing anew"),
        (
            sum(map(bool, (args.bf16, args.fp16, args.use_amp, args.float64, args.no_fp16))) > 1,
            "--bf16, --fp16, --use-amp, --float64 and --no-fp16: give one of them",
        ),
        (
            args.wandb_project_name is not None and not args.log_wandb,
            "--wandb-project-name needs --log-wandb",
        ),
    ]
    return problems + [text for wrong, text in together if wrong]


def save_path_problem(path: str) -> str | None:
    """Why nothing can be written below `path`, or None. Leaves nothing behind."""
    if not path.strip() or "\0" in path:
        return f"{path!r} is no name of a folder"
    before_last = path[: path.rindex("..") + 2] if ".." in path.split(os.sep) else "."
    if not os.path.isdir(before_last):  # what it leads to can only be known when it is there
        return f"{path}: {before_last} is no folder; name the folder without '..'"
    there = os.path.abspath(path)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        return f"{path}: cannot be the save folder, since {there} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"{path}: cannot write there: {in_words(OSError(error.errno, error.strerror))}"


def run_command(work: Callable[[], int | None]) -> int:
    """Runs a command of one process; returns its exit code: what `work` returns or 0, 2 with one message for
    a user's mistake, 130 after Ctrl-C. Printing never ends it.
    """
    with console.opened():
        try:
            return work() or 0
        except Exception as error:
            known = as_user_error(error) or (UserError(str(error)) if isinstance(error, OSError) else None)
            if known is None:
                raise
            print(f"error: {known}", file=sys.stderr)
            return 2 if isinstance(known, UserError) else 1
        except KeyboardInterrupt:
            return 130


def start(
    parser: Parser, run: Callable[[argparse.Namespace, World], None], argv: list[str] | None = None
) -> None:
    """Parses, joins the other processes, runs, leaves them. The model must live inside `run`: a DDP object
    that is still alive when the interpreter ends can abort the process.
    """
    with console.opened():
        end = False
        try:
            code, end = _started(parser, run, argv)
        except SystemExit as ended:
            code = ended.code
        # with arguments of a caller, the process is the caller's
        if end or watchdog.libraries and argv is None:
            end_process(
                code or 0, 0.0 if watchdog.abandoned else STOP_SECONDS if stop_request() else CLOSE_SECONDS
            )
    if code:
        sys.exit(code)


def _started(
    parser: Parser, run: Callable[[argparse.Namespace, World], None], argv: list[str] | None
) -> tuple[int, bool]:
    """(exit code, whether the process must end without the interpreter's own ending)"""
    with errors_end_all_ranks():
        if not is_first_rank() and {"-h", "--help", "--version"} & set(argv or sys.argv[1:]):
            sys.exit(0)  # rank 0 prints it
        args = parser.parse_args(argv)
        stop = stop_request()
        stop.limit(args.stop_after)
        console.give_up_when(lambda: bool(stop))
        with stop.listening():
            world = init_world(
                args.distributed,
                world_size=args.world_size,
                local_rank=args.local_rank,
                device=args.device,
                timeout_minutes=args.timeout_minutes,
                stop=stop,
            )
            try:
                run(args, world)
            except Stopped:
                stop.acted = True
                world.print(
                    f"Stopped by {stop.reason or 'a signal to another process'} before the first step. The"
                    " same command starts again."
                )
            except BaseException as error:
                if world.size > 1 and lost_contact(error):
                    say_who_is_missing(world.heartbeat, error)
                if world.heartbeat is not None:
                    world.heartbeat.fall_silent()
                raise
            gc.collect()
            close_world(world)
    return stop.exit_code if stop.acted else 0, bool(world.backend)
