"""The flags of `python -m histocc.evaluate`."""

from dataclasses import MISSING, dataclass

from histocc.data.config import Delimiter, Reading
from histocc.predict.config import Cores, Published
from histocc.runtime.config import Config, Count, CountOrZero, Fraction, Parser, Processes, flag


@dataclass(frozen=True, kw_only=True)
class Evaluation(Config):
    """model, data and report"""

    model: str = flag(
        MISSING,
        "folder of a run (its best checkpoint), a checkpoint, or a published model",
        metavar="RUN_OR_FILE",
    )
    data: list[str] = flag(MISSING, "CSV or Parquet files of descriptions and codes", metavar="FILE")
    output: str = flag(
        None,
        "folder for the report (default: evaluation, in the model's folder; here for a name on the hub)",
        metavar="DIR",
    )
    fit_thresholds: bool = flag(
        False,
        "store the best threshold of the linear decoder (F1), by language where there are rows enough, in the"
        " checkpoint that was evaluated; coding then uses them. Of a model with n-grams also how much the"
        " linear decoder counts where both rank the codes together (--decoder topk and full). The rows should"
        " be none that it was trained on: --share-val",
    )
    fit_confidence: bool = flag(
        False,
        "fit the probabilities of the checkpoint that was evaluated to how often they are right on these"
        " rows, and store that in it, as the training does on its validation rows; the report is still on"
        " those before",
    )
    raw_confidence: bool = flag(
        False, "report on the probabilities as the decoders give them, not as they were fitted"
    )
    baseline: bool = flag(
        False,
        "also fit a linear support vector machine on n-grams to the rows that the run was trained on, and say"
        " what the model adds to it (extra `baseline`: scikit-learn)",
    )
    int8: bool = flag(False, "report on the codes of predict --int8: matrix products in int8, on CPUs")
    overwrite: bool = flag(False, "replace the report that is there")
    input_col: str | None = flag(None, "column with the descriptions (default: as in training)")
    target_cols: list[str] | None = flag(
        None, "columns with the codes (default: as in training)", metavar="COL"
    )
    language: str | None = flag(
        None, "language of all descriptions, instead of a column (default: as in training)"
    )
    language_col: str | None = flag(
        None, "column with the language of each description (default: as in training)", metavar="COL"
    )
    delimiter: Delimiter | None = flag(None, "column delimiter (default: found)", metavar="CHAR")
    missing_code: str | None = flag(
        None, "code of rows whose first code is missing; without it they are left out", metavar="CODE"
    )
    share_val: Fraction | None = flag(
        None, "evaluate only the texts that finetune.py sets aside with this --share-val (default: all rows)"
    )
    batch_size: Count = flag(256, "rows at once per process")
    resamples: Count = flag(1000, "draws of the bootstrap")
    seed: CountOrZero = flag(1, "seed of the bootstrap")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Evaluation, Reading, Published, Processes, Cores):
    """What evaluate takes."""


def get_args_parser() -> Parser:
    return Parser(
        EvaluateConfig, "python -m histocc.evaluate", "How good a model is on data with known codes."
    )
