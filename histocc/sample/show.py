"""Codes twelve descriptions that no model trained on the sample has seen, beside their right codes, and says
how far the model's confidence can be trusted on a thousand other rows:

python -m histocc.sample.show --model ./output
"""

import argparse
import sys
from itertools import islice

import numpy as np

from histocc.model.confidence_fit import calibration_error
from histocc.model.model_io import load_model
from histocc.predict.coder import Coder
from histocc.runtime.entrypoint import run_command
from histocc.sample.demo import demo_rows
from histocc.sample.generate import rows
from histocc.sample.table import read_table

HEADER = (
    "description",
    "lang",
    "predicted (probability)",
    "conf",
    "right",
    "",
    "title of what was predicted",
)
TITLE_WIDTH = 34
TRAINED_ROWS, TRAINED_SEED = 40_000, 1  # of launch_training.sh; other texts are new to its model
OTHER_ROWS, OTHER_SEED = 1_000, 2
TARGETS = (0.9, 0.95, 0.98)


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m histocc.sample.show", description=str(__doc__).split("\n", 1)[0]
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="folder of a run (its best checkpoint), or a checkpoint",
    )
    return parser


def table_lines(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows of cells as aligned lines."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: show(get_args_parser().parse_args(argv)))


def show(args: argparse.Namespace) -> None:
    """Raises UserError."""
    model, formatter, checkpoint = load_model(args.model)
    coder = Coder(model, formatter, checkpoint)
    demo = demo_rows()
    titles = {row["hisco"]: row["en"].split("|")[0] for row in read_table()}
    coded = coder.code([row[0] for row in demo], [row[1] for row in demo])
    predictions = [list(zip(each.codes, each.probs)) for each in coded]
    shown: list[tuple[str, ...]] = [HEADER]
    right = 0
    for (text, language, *codes), predicted, conf in zip(demo, predictions, [each.conf for each in coded]):
        codes = [code for code in codes if code]
        same = {code for code, _ in predicted} == set(codes)
        right += same
        title = ", ".join(titles.get(code, "not in the sample") for code, _ in predicted)
        shown.append(
            (
                text,
                language,
                ", ".join(f"{code} ({p:.2f})" for code, p in predicted) or "none",
                f"{conf or 0:.2f}",
                ", ".join(codes),
                "✓" if same else "✗",
                title if len(title) <= TITLE_WIDTH else title[: TITLE_WIDTH - 1] + "…",
            )
        )
    print(
        f"Twelve descriptions that the model has not seen, coded by {args.model} (step"
        f" {checkpoint.get('step') or 0:,}):"
    )
    print("\n".join(table_lines(shown)))
    print(f"{right} of {len(demo)} right")
    print(*confidence_lines(coder), sep="\n")


def other_rows() -> list[tuple[str, ...]]:
    """Rows of the sample with texts that a model of launch_training.sh was not trained on."""
    known = {text_of(row[0]) for row in rows(TRAINED_ROWS, TRAINED_SEED)}
    found = (row for row in rows(100 * OTHER_ROWS, OTHER_SEED) if text_of(row[0]) not in known)
    return list(islice(found, OTHER_ROWS))


def text_of(text: str) -> str:
    """The same for texts that differ only in case and blanks."""
    return " ".join(text.split()).casefold()


def confidence_lines(coder: Coder) -> list[str]:
    """How far the confidence of the decoder that writes codes can be trusted on other rows."""
    if coder.kind == "flat":
        return []
    if coder.confidence.written is None:
        return ["Its confidence is not fitted to how often it is right: 200 texts to validate on are needed"]
    others = other_rows()
    coded = coder.code([row[0] for row in others], [row[1] for row in others])
    conf = np.array([each.conf or 0.0 for each in coded])
    right = np.array([set(each.codes) == {*row[2:]} - {""} for each, row in zip(coded, others)])
    error = calibration_error(conf, right, np.ones(len(conf)))
    lines = [
        (
            f"On {len(others):,} other new rows: {right.mean():.1%} right, {conf.mean():.1%} expected by it"
            f" (expected calibration error {100 * error:.1f} points)"
        )
    ]
    for target in TARGETS:
        least, _ = coder.confidence.limit("greedy", target)
        kept = conf >= least
        if kept.any():
            lines.append(
                f"predict --target-accuracy {target:g}: {kept.mean():.0%} of these rows need no review,"
                f" {right[kept].mean():.1%} of them are right"
            )
    return [*lines, "python -m histocc review hands the others to a person"]


if __name__ == "__main__":
    sys.exit(main())
