"""Arguments of `python -m histocc.predict`, and what can be wrong with them."""

import argparse
import os

import torch

from histocc.data import arguments as table_arguments
from histocc.data.dataset import CODE_COLUMNS, TEXT_COLUMNS
from histocc.model import published
from histocc.predict.coder import DECODERS
from histocc.runtime import arguments, entrypoint, files
from histocc.runtime.device import Precision, PrecisionSettings

# What decides the output beside the input and the model; another value is another output.
DECIDES = (
    "column",
    "language",
    "language_column",
    "decoder",
    "k",
    "threshold",
    "min_prob",
    "descriptions",
    "system",
    "formatter",
    "key",
    "no_deduplicate",
    "delimiter",
    "float64",
    "bf16",
    "fp16",
    "use_amp",
    "target_cols",
    "use_within_block_sep",
    "target_accuracy",
    "back_off",
    "raw_confidence",
    "int8",
    "precision",
)


def probability(text: str) -> float:
    """For argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a probability between 0 and 1")
    return value


def threshold(text: str) -> tuple[str | None, float]:
    """0.5, or en=0.5: (language, probability), for argparse."""
    language, sign, value = text.rpartition("=")
    return (language.strip() if sign else None), probability(value)


def get_args_parser() -> arguments.Parser:
    parser = arguments.make_parser(
        "python -m histocc.predict", "Code a file of descriptions with a trained model."
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--model",
        required=True,
        metavar="RUN_OR_FILE",
        help="folder of a run, a checkpoint, or a published model",
    )
    files.add_argument(
        "--input", "--fn-in", required=True, metavar="FILE", help="rows to code: CSV or Parquet"
    )
    files.add_argument(
        "--output",
        "--fn-out",
        required=True,
        metavar="FILE.csv",
        help="where they go, with their codes (CSV, UTF-8)",
    )
    files.add_argument("--column", "--col", default="occ1", help="column with the descriptions")
    files.add_argument(
        "--language", default=None, help="language of all descriptions, instead of a column (default: unk)"
    )
    files.add_argument(
        "--language-column",
        "--language-col",
        default=None,
        metavar="COL",
        help="column with the language of each description (default: none, all have that of --language)",
    )
    files.add_argument(
        "--delimiter",
        type=table_arguments.delimiter,
        default=None,
        metavar="CHAR",
        help="column delimiter of the input (default: found)",
    )
    files.add_argument(
        "--descriptions",
        default=None,
        metavar="FILE",
        help=(
            f"codes ({', '.join(CODE_COLUMNS)}) and their descriptions ({', '.join(TEXT_COLUMNS)}), to be"
            " written beside the codes"
        ),
    )
    files.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    how = parser.add_argument_group("coding")
    how.add_argument(
        "--decoder",
        choices=tuple(DECODERS),
        default="greedy",
        help="; ".join(f"{name}: {what}" for name, what in DECODERS.items()),
    )
    how.add_argument("--k", type=arguments.count, default=5, help="most codes of a row")
    how.add_argument(
        "--threshold",
        type=threshold,
        nargs="+",
        default=None,
        metavar="[LANG=]P",
        help=(
            "flat: codes above this probability count; one number for all, or by language: en=0.3 da=0.4 0.5"
            " (default: those of the model: published ones, those of evaluate --fit-thresholds, else 0.5)"
        ),
    )
    how.add_argument(
        "--min-prob",
        type=probability,
        default=0.0,
        metavar="P",
        help="rows whose conf is lower have 1 in needs_review; so do those without a code, or with one"
        " that is none of the model's",
    )
    how.add_argument(
        "--target-accuracy",
        type=probability,
        default=None,
        metavar="P",
        help="instead of --min-prob: the conf above which this share of the model's answers was right on the"
        " texts that its confidence was fitted on, for example 0.98",
    )
    how.add_argument(
        "--back-off",
        type=probability,
        default=None,
        metavar="P",
        help="also the longest prefix of the first code whose probability, that of all codes of the key below"
        " it together, is at least P",
    )
    how.add_argument(
        "--raw-confidence",
        action="store_true",
        help="probabilities as the decoders give them, not as they were fitted to how often they are right",
    )
    how.add_argument(
        "--system",
        default=None,
        metavar="NAME",
        help="name of the columns of codes (default: the model's, for example hisco)",
    )
    add_published_arguments(how)
    how.add_argument(
        "--target-cols",
        nargs="+",
        default=None,
        metavar="COL",
        help=(
            "columns with which a published general-purpose model was trained, one for each code, where it"
            " does not say how many it writes (default: as it says)"
        ),
    )
    how.add_argument("--no-deduplicate", action="store_true", help="code every row, also where texts repeat")
    parser.add_argument("--non-verbose", action="store_true", help="no words but warnings and errors")
    machine = entrypoint.add_process_arguments(parser)
    machine.add_argument("--batch-size", type=arguments.count, default=256, help="texts at once")
    add_processes_argument(machine)
    machine.add_argument(
        "--stop-after",
        type=float,
        default=None,
        metavar="MINUTES",
        help="stop so long after the start; the same command continues",
    )
    for name, what in (
        ("float64", "double precision"),
        ("bf16", "matrix products in bfloat16"),
        ("fp16", "matrix products in float16"),
        ("int8", "matrix products in int8, on CPUs"),
        ("use-amp", "the fastest of bf16 and fp16 that the device has"),
    ):
        machine.add_argument(f"--{name}", action="store_true", help=what)
    machine.add_argument(
        "--precision",
        choices=("float32", "float64", "bf16", "fp16", "int8"),
        default=None,
        help="the number format by name",
    )
    return parser


def precision_of(args: argparse.Namespace, device: torch.device) -> Precision:
    """The number format that is asked for, by name or by a flag of its own. Raises UserError."""
    name = args.precision or ("int8" if args.int8 else None)
    if name is not None:
        return Precision(name, device)
    return Precision.of(arguments.settings_of(PrecisionSettings, args), device)


def argument_problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with the arguments themselves, a line each."""
    inputs = {
        args.input: "the input",
        args.descriptions: "the file of --descriptions",
        args.key: "the file of --key",
        **dict.fromkeys(published.files_of(args.model), "the model"),
    }
    together = [
        (args.language and args.language_column, "--language and --language-column are mutually exclusive"),
        (
            args.threshold and args.decoder != "flat",
            f"--threshold is for --decoder flat; {args.decoder} has none",
        ),
        (
            len(dict(args.threshold or [])) < len(args.threshold or []),
            "--threshold: a language is listed twice",
        ),
        (
            args.target_accuracy is not None and args.min_prob > 0,
            "--min-prob and --target-accuracy are mutually exclusive",
        ),
        (
            args.target_accuracy is not None and args.raw_confidence,
            "--target-accuracy is for the fitted confidence: leave --raw-confidence out",
        ),
        (args.stop_after is not None and not args.stop_after > 0, "--stop-after must be above 0 minutes"),
        (not args.timeout_minutes > 0, "--timeout-minutes must be above 0"),
        (
            sum((args.bf16, args.fp16, args.int8, args.use_amp, args.float64, args.precision is not None))
            > 1,
            "--bf16, --fp16, --int8, --use-amp, --float64 and --precision are mutually exclusive",
        ),
    ]
    problems = [text for wrong, text in together if wrong]
    problems += files.problems(
        [args.output, args.output + ".rejected.csv"][: 1 if not args.output.strip() else 2],
        inputs,
        args.overwrite,
    )
    unwritable = files.save_path_problem(os.path.dirname(os.path.abspath(args.output)))
    return problems + ([unwritable] if unwritable else [])


def add_processes_argument(group: arguments.Group) -> None:
    group.add_argument(
        "--processes",
        type=arguments.count,
        default=None,
        help="without a launcher, on CPUs: processes that share the rows, and the memory of the weights"
        " (default: one for each core, where there are rows enough)",
    )


def add_published_arguments(group: arguments.Group | argparse.ArgumentParser) -> None:
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
