"""The flags of `histocc predict`, and the combinations that are refused."""

import glob
import os
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Annotated

from histocc.data.config import REPAIR_TEXT, FormatFlags
from histocc.data.descriptions import TitleFlags
from histocc.data.rows import key_reader
from histocc.data.tables import parts_of
from histocc.data.written import ENDINGS, missing_package
from histocc.formatter import CLASSES, DEEPEST
from histocc.predict.decoders import BY_THRESHOLD, DECODERS, MEASURED, in_series
from histocc.published import formats
from histocc.published.built_in import NAME
from histocc.runtime import files
from histocc.runtime.config import (
    Config,
    Count,
    Fraction,
    Parser,
    ProcessFlags,
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
DrawCount = Annotated[int, number(int, lambda value: 2 <= value <= 100, "a whole number from 2 to 100")]


def hidden(path: str, ending: str) -> str:
    """Return the name of a file in a part's folder that readers of folders ignore."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"_{name}{ending}")


def read_task(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    return int(number), int(count)


TaskNumber = Annotated[
    tuple[int, int],
    number(read_task, lambda task: 1 <= task[0] <= task[1], "I/N with I from 1 to N, such as 3/20"),
]


@dataclass(frozen=True, kw_only=True)
class PublishedFlags(Config):
    """what a published model does not hold itself"""

    formatter: str | None = flag(
        None, "system of its codes: hisco, occ1950 or gpf", choices=("hisco", "occ1950", "gpf")
    )
    key: str | None = flag(None, "its codes: a key file, or the word hisco", metavar="FILE")
    use_within_block_sep: bool = flag(False, "gpf: the parts of a code are separated by commas")

    def given(self, target_cols: list[str] | None, system: str | None = None) -> formats.Given:
        """Return these facts and two more for the functions of `histocc.published` that load a model."""
        return formats.Given(
            self.formatter, key_reader(self.key), target_cols, self.use_within_block_sep, system
        )


@dataclass(frozen=True, kw_only=True)
class CoreFlags(Config):
    """machine and processes"""

    processes: Count | None = flag(
        None, "processes on CPUs (default: as cores and rows allow)", resumable=True
    )


@dataclass(frozen=True, kw_only=True)
class FileFlags(FormatFlags, TitleFlags):
    """model and files"""

    model: str = flag(
        NAME,
        "your run folder, a checkpoint or a published model; built-in: HISCO codes, learned from"
        " titles in six languages",
        metavar="RUN",
        resumable=True,
    )
    input: list[str] | None = flag(
        None,
        "table to code, or several, a folder of parts, a pattern, or - (standard input)",
        "--fn-in",
        metavar="FILE.csv",
        positional=True,
        resumable=True,
    )
    output: str = flag(
        MISSING,
        f"coded table, with a name that ends in {in_series(list(ENDINGS), 'or')}; FOLDER/ gets a part"
        " for each part of the input; - means standard output",
        "--fn-out",
        metavar="FILE.csv",
        resumable=True,
    )
    task: TaskNumber | None = flag(
        None,
        "code only the I-th of N shares of the parts (default: as SLURM or torchrun says)",
        metavar="I/N",
        resumable=True,
    )
    join: str | None = flag(
        None,
        "join the coded parts of this folder into one table, without coding",
        metavar="FOLDER",
        resumable=True,
    )
    repair_text: bool = flag(False, f"{REPAIR_TEXT} (default: as in training)")
    known: str | None = flag(
        None, "table of texts whose codes are certain; they replace the model's", metavar="FILE.csv"
    )
    classes: list[str] | None = flag(
        None, f"also give social classes of HISCO codes: {', '.join(CLASSES)}", choices=CLASSES
    )
    no_titles: bool = flag(False, "leave out the titles of HISCO codes")
    columns: str = flag(
        "end", "where new columns go: at the end, or beside the texts", choices=("end", "beside")
    )
    overwrite_columns: bool = flag(False, "replace the columns of an earlier coding")
    only_missing: bool = flag(False, "code only rows without a code; the others keep theirs")
    overwrite: bool = flag(False, "replace an output that exists", resumable=True)
    non_verbose: bool = process_flag(False, "print only warnings and errors")


@dataclass(frozen=True, kw_only=True)
class DecodingFlags(Config):
    """coding"""

    decoder: str = flag(
        "auto",
        f"auto: whichever of {in_series(MEASURED)} was right most often on the validation texts; flat, the"
        " fastest, unless another is ahead by more than chance; "
        + "; ".join(f"{name}: {decoder.words}" for name, decoder in DECODERS.items()),
        choices=("auto", *DECODERS),
    )
    k: Count | None = flag(None, "maximum codes per row; known texts keep all theirs (default: 5)")
    draws: DrawCount | None = flag(
        None,
        "also draw N sets of codes by their probabilities, with the expected HISCAM and"
        " (--classes) class probabilities, for analyses that allow for uncertain codes",
        metavar="N",
    )
    choices: Count | None = flag(
        None, "also list the N most probable codes of each row (decoder flat or both)", metavar="N"
    )
    threshold: list[Threshold] | None = flag(
        None,
        f"with decoder {in_series(BY_THRESHOLD, 'or')}: give the codes above this probability, also"
        " by language: 0.5 en=0.3 da=0.4 (default: from the model)",
        metavar="[LANG=]P",
    )
    split_texts: str = flag(
        "auto",
        "auto: split texts such as smith and farmer, if the training data code each part",
        choices=("auto", "none"),
    )
    min_prob: Fraction | None = flag(
        None, "mark rows with a lower conf for review (default: 0.5; published models 0)", metavar="P"
    )
    target_accuracy: Fraction | None = flag(
        None,
        "mark as many rows as needed for this share of the others to be right; with --level,"
        " leave out answers below this probability",
        metavar="P",
    )
    level: str | None = flag(
        None,
        f"also give codes at a level: a number of digits (or parts between dots), {', '.join(CLASSES)},"
        " or auto: as deep as --target-accuracy allows",
        metavar="LEVEL",
    )
    raw_confidence: bool = flag(
        False, "conf: the decoder's own probability instead of how often such answers are right"
    )
    system: str | None = flag(None, "name of the code columns (default: the model's)", metavar="NAME")
    target_cols: list[str] | None = flag(
        None, "code columns of a published general-purpose model", metavar="COL"
    )
    explain: bool = flag(False, "also show the three nearest training texts (needs the run folder)")


@dataclass(frozen=True, kw_only=True)
class ComputingFlags(ProcessFlags, CoreFlags):
    """machine and processes"""

    batch_size: Count = flag(256, "texts coded at a time", resumable=True)
    bf16: bool = flag(False, "matrix products in bfloat16")
    fp16: bool = flag(False, "matrix products in float16")
    int8: bool = flag(False, "matrix products in int8, on CPUs")
    use_amp: bool = flag(False, "the faster of bf16 and fp16 on this device")


@dataclass(frozen=True, kw_only=True)
class PredictConfig(FileFlags, DecodingFlags, PublishedFlags, ComputingFlags):
    """The flags of predict. All but resumable flags change the output."""

    usual = (
        *("input", "model", "output", "overwrite", "input_col", "language_col", "language", "known"),
        *("only_missing", "min_prob", "target_accuracy", "choices", "k", "processes", "distributed"),
    )

    @property
    def in_parts(self) -> bool:
        """Whether the output is a folder, in which each part is coded on its own."""
        output = (self.asked or self).output
        return output.endswith(("/", os.sep)) or os.path.isdir(output)

    @property
    def named(self) -> str:
        """The input, for messages."""
        return ", ".join(self.input or ())

    def beside(self, ending: str) -> str:
        """Return the name of a file next to the output. Readers of folders ignore that of a part."""
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
            yield "--level auto needs a limit for each level: add --target-accuracy 0.9"
        if self.threshold and self.decoder not in ("auto", *BY_THRESHOLD):
            yield f"--threshold is for --decoder {in_series(BY_THRESHOLD)}, not {self.decoder}"
        if self.task and not self.in_parts:
            yield f"--task is for parts: name a folder as the output, --output {self.output}/"
        if not (self.input or self.join):
            yield "--input names the table of rows to code"
            return
        weights = formats.model_files(self.model)
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
    what = (
        "Give the rows of a table codes, with their titles and confidence. The table itself is not changed."
    )
    examples = "new.csv --output coded.csv", "new.csv --model ./output --output coded.csv"
    return Parser(PredictConfig, "python -m histocc.predict", what, *examples)
