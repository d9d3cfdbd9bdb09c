"""Codes twelve descriptions that no model trained on the sample has seen, beside their right codes, and says
how far the model's confidence can be trusted on a thousand other rows:

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
    words = str(__doc__).split("\n", 1)[0]
    parser = argparse.ArgumentParser("python -m histocc.sample.show", description=words)
    what = "folder of a run (its best checkpoint), or a checkpoint"
    parser.add_argument("--model", required=True, metavar="PATH", help=what)
    return run_command(lambda: show(parser.parse_args(argv).model))


def show(path: str) -> None:
    """Raises UserError."""
    model, formatter, checkpoint = load_model(path)
    coder = Coder(model, formatter, checkpoint)
    demo, right = demo_rows(), 0
    titles = {row["hisco"]: row["en"].split("|")[0] for row in read("occupations.csv")}
    shown: list[tuple[str, ...]] = [("description", "lang", CODES, "conf", "right", "", TITLE)]
    for row, coded in zip(demo, coder.code([row[0] for row in demo], [row[1] for row in demo])):
        codes = [code for code in row[2:] if code]
        same = set(coded.codes) == set(codes)
        right += same
        predicted = ", ".join(f"{code} ({p:.2f})" for code, p in zip(coded.codes, coded.probs)) or "none"
        title = ", ".join(titles.get(code, "not in the sample") for code in coded.codes)
        title = title if len(title) <= TITLE_WIDTH else title[: TITLE_WIDTH - 1] + "…"
        conf, mark = f"{coded.conf or 0:.2f}", "✓" if same else "✗"
        shown.append((row[0], row[1], predicted, conf, ", ".join(codes), mark, title))
    step = f"step {checkpoint.get('step') or 0:,}"
    print(f"Twelve descriptions that the model has not seen, coded by {path} ({step}):")
    widths = [max(map(len, column)) for column in zip(*shown)]
    for row in shown:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(f"{right} of {len(demo)} right")
    print(*confidence_lines(coder), sep="\n")


def confidence_lines(coder: Coder) -> list[str]:
    """How far the confidence of the best decoder can be trusted on other rows."""
    if coder.kind == "flat":
        return []
    if coder.confidence.written is None:
        return ["Its confidence is not fitted to how often it is right: 200 texts to validate on are needed"]
    known = {row[0].casefold() for row in rows(TRAINED_ROWS, TRAINED_SEED)}
    found = (row for row in rows(100 * OTHER_ROWS, OTHER_SEED) if row[0].casefold() not in known)
    others = list(islice(found, OTHER_ROWS))
    coded = coder.code([row[0] for row in others], [row[1] for row in others])
    conf = np.array([each.conf or 0.0 for each in coded])
    right = np.array([set(each.codes) == {*row[2:]} - {""} for each, row in zip(coded, others)])
    error = calibration_error(conf, right, np.ones(len(conf)))
    lines = [
        f"On {len(others):,} other new rows: {right.mean():.1%} right, {conf.mean():.1%} expected by it"
        f" (expected calibration error {100 * error:.1f} points)"
    ]
    for target in TARGETS:
        least, _ = coder.confidence.limit(coder.best_decoder, target)
        kept = conf >= least
        if kept.any():
            lines.append(
                f"predict --target-accuracy {target:g}: {kept.mean():.0%} of these rows need no review,"
                f" {right[kept].mean():.1%} of them are right"
            )
    return [*lines, "python -m histocc review hands the others to a person"]


if __name__ == "__main__":
    sys.exit(main())
