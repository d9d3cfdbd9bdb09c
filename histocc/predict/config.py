"""The flags of `python -m histocc.predict`, and the combinations of them that are refused."""

import glob
import os
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Annotated

from histocc.data.config import REPAIR_TEXT, Format
from histocc.data.descriptions import Titles
from histocc.data.rows import key_reader
from histocc.data.tables import parts_of
from histocc.data.written import ENDINGS, missing_package
from histocc.formatter import CLASSES, DEEPEST
from histocc.predict.decoders import BY_THRESHOLD, DECODERS, MEASURED, listed
from histocc.published import formats
from histocc.published.built_in import NAME
from histocc.runtime import files
from histocc.runtime.config import (
    Config,
    Count,
    Fraction,
    Parser,
    Processes,
    flag,
    flag_of,
    number,
    process_flag,
)


def language_and_threshold(text: str) -> tuple[str | None, float]:
    language, sign, value = text.rpartition("=")
    return (language.strip() if sign else None), float(value)


Threshold = Annotated[
    tuple[str | None, float],
    number(language_and_threshold, lambda pair: 0 <= pair[1] <= 1, "a number between 0 and 1, or LANG=P"),
]


Draws = Annotated[int, number(int, lambda value: 2 <= value <= 100, "a whole number from 2 to 100")]


def hidden(path: str, ending: str) -> str:
    """Return the name of a file beside a part, which readers of folders pass over."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"_{name}{ending}")


def task_of(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    return int(number), int(count)


Task = Annotated[
    tuple[int, int],
    number(task_of, lambda task: 1 <= task[0] <= task[1], "I/N with I from 1 to N, such as 3/20"),
]


@dataclass(frozen=True, kw_only=True)
class Published(Config):
    """what a published model does not say itself"""

    formatter: str | None = flag(None, "system of its codes", choices=("hisco", "occ1950", "gpf"))
    key: str | None = flag(None, "its codes: a key file, or the word hisco", metavar="FILE")
    use_within_block_sep: bool = flag(False, "general-purpose: ',' separates the tokens of a code")

    def given(self, target_cols: list[str] | None, system: str | None = None) -> formats.Given:
        """Return these facts and two more for the functions of `histocc.published` that load a model."""
        return formats.Given(
            self.formatter, key_reader(self.key), target_cols, self.use_within_block_sep, system
        )


@dataclass(frozen=True, kw_only=True)
class Cores(Config):
    """machine and processes"""

    processes: Count | None = flag(None, "on CPUs (default: by cores and rows)", resumable=True)


@dataclass(frozen=True, kw_only=True)
class Files(Format, Titles):
    """files"""

    model: str = flag(
        NAME,
        "a run, a checkpoint, or a published model; built-in: HISCO, from titles in six languages",
        metavar="MODEL",
        resumable=True,
    )
    input: list[str] | None = flag(
        None,
        "table of rows to code: a file, several, a folder of parts, a pattern, or - for standard input",
        "--fn-in",
        metavar="FILE",
        resumable=True,
    )
    output: str = flag(
        MISSING,
        f"the rows with codes: a table that ends in {listed(list(ENDINGS), 'or')}; a folder (FOLDER/) gets a"
        " part for each part of the input; - is standard output",
        "--fn-out",
        metavar="FILE.csv",
        resumable=True,
    )
    task: Task | None = flag(
        None,
        "of N tasks that share the parts of a folder, the I-th, from 1 on (default: by the variables of SLURM"
        " or torchrun)",
        metavar="I/N",
        resumable=True,
    )
    join: str | None = flag(
        None, "put the parts in this folder together, coding nothing", metavar="FOLDER", resumable=True
    )
    repair_text: bool = flag(False, f"{REPAIR_TEXT} (default: as in the training)")
    known: str | None = flag(None, "texts whose codes are right and win over the model's", metavar="FILE")
    classes: list[str] | None = flag(None, "also social classes of HISCO codes", choices=CLASSES)
    no_titles: bool = flag(False, "HISCO codes without their titles")
    columns: str = flag("end", "new columns at the end or beside the texts", choices=("end", "beside"))
    overwrite_columns: bool = flag(False, "replace the columns of an earlier coding of the input")
    only_missing: bool = flag(False, "code rows without a first code; the others keep theirs")
    overwrite: bool = flag(False, "replace an output that exists", resumable=True)
    non_verbose: bool = process_flag(False, "no words but warnings and errors")


@dataclass(frozen=True, kw_only=True)
class Decoding(Config):
    """coding"""

    decoder: str = flag(
        "auto",
        f"auto: that of {listed(MEASURED)} which was right most often on the validation texts; flat, the"
        " fastest, unless another is ahead by more than chance; "
        + "; ".join(f"{name}: {decoder.words}" for name, decoder in DECODERS.items()),
        choices=("auto", *DECODERS),
    )
    k: Count | None = flag(None, "most codes of a row (5); one of --known keeps all of its own")
    draws: Draws | None = flag(
        None,
        "also N draws of the codes by their probabilities, and of HISCO the expected HISCAM and, with"
        " --classes, the probability of each class, for analyses that take codes as uncertain",
        metavar="N",
    )
    choices: Count | None = flag(
        None, "also the N most probable codes for a person to choose from, by flat, or by both", metavar="N"
    )
    threshold: list[Threshold] | None = flag(
        None,
        f"{', '.join(BY_THRESHOLD)}: codes above P count; en=0.3 da=0.4 0.5 (default: the model's)",
        metavar="[LANG=]P",
    )
    split_texts: str = flag(
        "auto", "split smith and farmer, if the training codes each part", choices=("auto", "none")
    )
    min_prob: Fraction | None = flag(None, "needs_review below this conf (0.5; published: 0)", metavar="P")
    target_accuracy: Fraction | None = flag(
        None,
        "--min-prob by the share of right answers; with --level, no answer that is less probably right",
        metavar="P",
    )
    level: str | None = flag(
        None,
        f"also the answer at a level: its number of digits (or parts between dots), {', '.join(CLASSES)}, or"
        " auto: the deepest number that reaches --target-accuracy",
        metavar="LEVEL",
    )
    raw_confidence: bool = flag(False, "probabilities of the decoders, not how often they are right")
    system: str | None = flag(None, "name of the columns of codes (default: the model's)", metavar="NAME")
    target_cols: list[str] | None = flag(None, "of a published general-purpose model", metavar="COL")
    explain: bool = flag(False, "also the three nearest texts of the training; needs the folder of the run")


@dataclass(frozen=True, kw_only=True)
class Computing(Processes, Cores):
    """machine and processes"""

    batch_size: Count = flag(256, "texts at once", resumable=True)
    bf16: bool = flag(False, "matrix products in bfloat16")
    fp16: bool = flag(False, "matrix products in float16")
    int8: bool = flag(False, "matrix products in int8, on CPUs")
    use_amp: bool = flag(False, "the fastest of bf16 and fp16 that the device has")


@dataclass(frozen=True, kw_only=True)
class PredictConfig(Files, Decoding, Published, Computing):
    """The flags of predict. A flag that is not resumable decides the output."""

    @property
    def in_parts(self) -> bool:
        """Whether the output is a folder, in which each part is coded without the others."""
        output = (self.asked or self).output
        return output.endswith(("/", os.sep)) or os.path.isdir(output)

    @property
    def named(self) -> str:
        """The input, for messages."""
        return ", ".join(self.input or ())

    def beside(self, ending: str) -> str:
        """Return the name of a file beside the output; readers of folders pass over that of a part."""
        return hidden(self.output, ending) if self.in_parts else self.output + ending

    def problems(self) -> Iterator[str]:
        """Yield a line for each problem of these arguments."""
        for names in (
            ("language", "language_col"),
            ("overwrite_columns", "only_missing"),
            ("min_prob", "target_accuracy"),
            ("target_accuracy", "raw_confidence"),
            ("draws", "raw_confidence"),
            ("bf16", "fp16", "int8", "use_amp"),
        ):
            given = [flag_of(name) for name in names if getattr(self, name) is not getattr(type(self), name)]
            if len(given) > 1:
                yield f"{' and '.join(given)} are mutually exclusive"
        if self.level == DEEPEST and self.target_accuracy is None:
            yield "--level auto takes the deepest level that is right often enough: add --target-accuracy 0.9"
        if self.threshold and self.decoder not in ("auto", *BY_THRESHOLD):
            yield f"--threshold is for --decoder {listed(BY_THRESHOLD)}, not {self.decoder}"
        if self.task and not self.in_parts:
            yield f"--task is for parts: give the output a folder, --output {self.output}/"
        if not (self.input or self.join):
            yield "--input names the table of rows to code"
            return
        weights = formats.files_of(self.model)
        of_run: list[str] = []
        if weights:
            run = os.path.dirname(weights[0])
            of_run = [os.path.join(run, name) for name in files.OwnFiles(run).names]
            of_run += glob.glob(os.path.join(glob.escape(run), "prepared", "*", "*"))
        inputs = {
            **{part.path: "the input" for name in self.input or () for part in parts_of(name)},
            self.descriptions: "the file of --descriptions",
            self.key: "the file of --key",
            self.known: "the file of --known",
            **dict.fromkeys(of_run, "a file of the run"),
            **dict.fromkeys(weights, "the model"),
        }
        overwrite = self.overwrite or os.path.isdir(self.beside(".parts"))  # `begin` compares the settings
        paths, endings = [self.output, self.beside(".rejected.csv")], tuple(ENDINGS)
        yield from files.problems(paths, inputs, overwrite, endings=endings)
        yield from missing_package(self.output)
        yield from files.save_path_problems(os.path.dirname(os.path.abspath(self.output)))


def get_args_parser() -> Parser:
    return Parser(PredictConfig, "python -m histocc.predict", "Codes descriptions with a trained model.")
