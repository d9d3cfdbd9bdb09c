"""The flags of `python -m histocc.predict`, and what of them does not go together."""

import glob
import os
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Annotated

from histocc.data.config import Delimiter, Encoding
from histocc.data.dataset import CODE_COLUMNS, TEXT_COLUMNS
from histocc.formatter import CLASSES
from histocc.predict.coder import DECODERS
from histocc.published import formats
from histocc.runtime import files
from histocc.runtime.config import Config, Count, Fraction, Parser, Processes, flag, number


def language_and_threshold(text: str) -> tuple[str | None, float]:
    language, sign, value = text.rpartition("=")
    return (language.strip() if sign else None), float(value)


Threshold = Annotated[
    tuple[str | None, float],
    number(
        language_and_threshold, lambda pair: 0 <= pair[1] <= 1, "a number between 0 and 1, or LANG=NUMBER"
    ),
]


@dataclass(frozen=True, kw_only=True)
class Published(Config):
    """what a published model does not say itself"""

    formatter: str | None = flag(
        None, "system of a published model that does not show it", choices=("hisco", "occ1950", "gpf")
    )
    key: str | None = flag(
        None, "codes of a published model that does not hold them, or the word hisco", metavar="FILE"
    )
    use_within_block_sep: bool = flag(
        False, "the tokens of a code of a published general-purpose model are separated by ','"
    )


@dataclass(frozen=True, kw_only=True)
class Cores(Config):
    """machine and processes"""

    processes: Count | None = flag(
        None,
        "without a launcher, on CPUs: processes that share the rows and the weights (default: one for each"
        " core, where there are rows enough)",
        resumable=True,
    )


@dataclass(frozen=True, kw_only=True)
class Files(Config):
    """files"""

    model: str = flag(
        MISSING, "folder of a run, a checkpoint, or a published model", metavar="RUN_OR_FILE", resumable=True
    )
    input: str = flag(MISSING, "rows to code: CSV or Parquet", "--fn-in", metavar="FILE", resumable=True)
    output: str = flag(
        MISSING, "the rows with their codes: CSV, UTF-8", "--fn-out", metavar="FILE.csv", resumable=True
    )
    column: str = flag("occ1", "column with the descriptions", "--col")
    language: str | None = flag(None, "language of all descriptions, instead of a column (default: unk)")
    language_column: str | None = flag(
        None, "column with the language of each description", "--language-col", metavar="COL"
    )
    delimiter: Delimiter | None = flag(None, "column delimiter of the input (default: found)", metavar="CHAR")
    encoding: Encoding | None = flag(
        None, "encoding of the input, such as cp1250 (default: found)", metavar="NAME"
    )
    ditto: bool = flag(
        False, "code do., ditto, 〃 as the text of the row above; without it they get needs_review"
    )
    descriptions: str | None = flag(
        None,
        f"codes ({', '.join(CODE_COLUMNS)}) and their descriptions ({', '.join(TEXT_COLUMNS)}), to be written"
        " beside the codes",
        metavar="FILE",
    )
    known: str | None = flag(
        None,
        "texts whose codes are right, such as the training data: their codes win over the model's, conf is 1,"
        " and a column source says known or model",
        metavar="FILE",
    )
    classes: list[str] | None = flag(
        None, "also the social classes of HISCO codes: HISCLASS (12 or 5), SOCPO, HISCAM", choices=CLASSES
    )
    no_titles: bool = flag(False, "HISCO codes without their titles")
    overwrite: bool = flag(False, "replace an output that exists", resumable=True)
    non_verbose: bool = flag(False, "no words but warnings and errors", resumable=True)


@dataclass(frozen=True, kw_only=True)
class Decoding(Config):
    """coding"""

    decoder: str = flag(
        "auto", "; ".join(f"{name}: {what}" for name, what in DECODERS.items()), choices=tuple(DECODERS)
    )
    k: Count = flag(5, "most codes of a row")
    threshold: list[Threshold] | None = flag(
        None,
        "flat: codes above this probability count; one number for all, or by language: en=0.3 da=0.4 0.5"
        " (default: those of the model: published ones, those of evaluate --fit-thresholds, else 0.5)",
        metavar="[LANG=]P",
    )
    min_prob: Fraction = flag(
        0.0,
        "rows with a lower conf get needs_review; so do those with no code, or one that is not the model's",
        metavar="P",
    )
    target_accuracy: Fraction | None = flag(
        None,
        "instead of --min-prob: the conf above which this share of the answers was right on the texts that"
        " the confidence was fitted on, for example 0.98",
        metavar="P",
    )
    raw_confidence: bool = flag(
        False, "probabilities as the decoders give them, not as often as they are right"
    )
    system: str | None = flag(
        None, "name of the columns of codes (default: the model's, for example hisco)", metavar="NAME"
    )
    target_cols: list[str] | None = flag(
        None,
        "columns of a published general-purpose model, one for each code, if it does not say how many",
        metavar="COL",
    )
    explain: bool = flag(
        False,
        "also the three training texts that are nearest to each text by the model's own vectors, with their"
        " codes; needs the folder of the run, and keeps the vectors of its texts there",
    )


@dataclass(frozen=True, kw_only=True)
class Machine(Processes, Cores):
    """machine and processes"""

    batch_size: Count = flag(256, "texts at once", resumable=True)
    float64: bool = flag(False, "double precision")
    bf16: bool = flag(False, "matrix products in bfloat16")
    fp16: bool = flag(False, "matrix products in float16")
    int8: bool = flag(False, "matrix products in int8, on CPUs")
    use_amp: bool = flag(False, "the fastest of bf16 and fp16 that the device has")


@dataclass(frozen=True, kw_only=True)
class PredictConfig(Files, Decoding, Published, Machine):
    """What predict takes. A flag that is not resumable decides the output."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these arguments, a line each."""
        for flags, are_given in (
            ("--language and --language-column", (self.language, self.language_column)),
            ("--min-prob and --target-accuracy", (self.min_prob, self.target_accuracy)),
            ("--target-accuracy and --raw-confidence", (self.target_accuracy, self.raw_confidence)),
            (
                "--bf16, --fp16, --int8, --use-amp and --float64",
                (self.bf16, self.fp16, self.int8, self.use_amp, self.float64),
            ),
        ):
            if sum(map(bool, are_given)) > 1:
                yield f"{flags} are mutually exclusive"
        if self.threshold and self.decoder not in ("flat", "both"):
            yield f"--threshold is for --decoder flat and both, not {self.decoder}"
        weights = formats.files_of(self.model)
        of_run: list[str] = []
        if weights:
            run = os.path.dirname(weights[0])
            of_run = [os.path.join(run, name) for name in files.OwnFiles(run).names]
            of_run += glob.glob(os.path.join(glob.escape(run), "prepared", "*", "*"))
        inputs = {
            self.input: "the input",
            self.descriptions: "the file of --descriptions",
            self.key: "the file of --key",
            self.known: "the file of --known",
            **dict.fromkeys(of_run, "a file of the run"),
            **dict.fromkeys(weights, "the model"),
        }
        paths = [self.output, self.output + ".rejected.csv"] if self.output.strip() else [self.output]
        yield from files.problems(paths, inputs, self.overwrite)
        unwritable = files.save_path_problem(os.path.dirname(os.path.abspath(self.output)))
        yield from [unwritable] if unwritable else []


def get_args_parser() -> Parser:
    return Parser(
        PredictConfig, "python -m histocc.predict", "Code a file of descriptions with a trained model."
    )
