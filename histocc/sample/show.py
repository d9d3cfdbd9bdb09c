"""Codes twelve descriptions that no model trained on the sample has seen, beside their right codes, and says
how often a thousand other rows are right and how far confidence tells which:

python -m histocc.sample.show --model ./output
"""

import argparse
import sys
from itertools import islice

import numpy as np

from histocc.model.confidence import calibration_error
from histocc.predict.coder import Coder
from histocc.published.models import load_model
from histocc.runtime.entrypoint import run_command
from histocc.sample.generate import demo_rows, read, rows

CODES, TITLE = "predicted (probability)", "title of what was predicted"
TITLE_WIDTH = 34
TRAINED_ROWS, TRAINED_SEED = 40_000, 1  # of launch_training.sh; other texts are new to its model
OTHER_ROWS, OTHER_SEED = 1_000, 2
TARGETS = (0.9, 0.95, 0.98)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m histocc.sample.show", description=str(__doc__).split("\n\n", 1)[0].replace("\n", " ")
    )
    what = "folder of a run (its best checkpoint), or a checkpoint"
    parser.add_argument("--model", required=True, metavar="PATH", help=what)
    return run_command(lambda: show(parser.parse_args(argv).model))


def show(path: str) -> None:
    """Raises UserError."""
    model, formatter, checkpoint = load_model(path)
    coder = Coder(model, formatter, checkpoint)
    demo, right = demo_rows(), 0
    titles = {row["hisco"]: row["en"].split("|")[0] for row in read("occupations.csv")}
    table: list[tuple[str, ...]] = [("description", "lang", CODES, "conf", "right", "", TITLE)]
    for (text, lang, *true), coded in zip(
        demo, coder.code([row[0] for row in demo], [row[1] for row in demo])
    ):
        codes = [code for code in true if code]
        is_right = set(coded.codes) == set(codes)
        right += is_right
        predicted = ", ".join(f"{code} ({p:.2f})" for code, p in zip(coded.codes, coded.probs)) or "none"
        title = ", ".join(titles.get(code, "not in the sample") for code in coded.codes)
        title = title if len(title) <= TITLE_WIDTH else title[: TITLE_WIDTH - 1] + "…"
        conf, mark = f"{coded.conf or 0:.2f}", "✓" if is_right else "✗"
        table.append((text, lang, predicted, conf, ", ".join(codes), mark, title))
    step = f"step {checkpoint.get('step') or 0:,}"
    print(f"Twelve descriptions that the model has not seen, coded by {path} ({step}):")
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(f"{right} of {len(demo)} right")
    print(*other_rows(coder), sep="\n")


def other_rows(coder: Coder) -> list[str]:
    """What `coder` gives for rows of the sample whose texts were not trained on: lines to print."""
    trained = {row[0].casefold() for row in rows(TRAINED_ROWS, TRAINED_SEED)}
    new = (row for row in rows(100 * OTHER_ROWS, OTHER_SEED) if row[0].casefold() not in trained)
    others = list(islice(new, OTHER_ROWS))
    coded = coder.code([row[0] for row in others], [row[1] for row in others])
    right = np.array([set(answer.codes) == {*row[2:]} - {""} for answer, row in zip(coded, others)])
    conf = np.array([answer.conf or 0.0 for answer in coded])
    error = 100 * calibration_error(conf, right, np.ones(len(conf)))
    lines = [
        f"On {len(others):,} other new rows: {right.mean():.1%} right, {conf.mean():.1%} expected by it"
        f" (expected calibration error {error:.1f} points)"
    ]
    for target in TARGETS if coder.confidence.curves else ():
        sure = conf >= coder.confidence.limit(coder.best_decoder, target)[0]
        if sure.any():
            lines.append(
                f"predict --target-accuracy {target:g}: {sure.mean():.0%} of these rows need no review,"
                f" {right[sure].mean():.1%} of them are right"
            )
    return [*lines, "python -m histocc review hands the others to a person"]


if __name__ == "__main__":
    sys.exit(main())
