"""Codes twelve descriptions that no model trained on the sample has seen, beside their right codes, and says
how often a thousand other rows are right:

python -m histocc.sample.show --model ./output
"""

import argparse
import sys
from itertools import islice

from histocc.predict.coder import Coder
from histocc.runtime.world import run_command
from histocc.sample.generate import demo_rows, read, rows

TITLE_WIDTH = 34
TRAINED_ROWS, TRAINED_SEED = 40_000, 1  # of launch_training.sh; other texts are new to its model
OTHER_ROWS, OTHER_SEED = 1_000, 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m histocc.sample.show", description=str(__doc__).split("\n\n", 1)[0].replace("\n", " ")
    )
    what = "folder of a run (its best checkpoint), or a checkpoint"
    parser.add_argument("--model", required=True, metavar="PATH", help=what)
    return run_command(lambda: show(parser.parse_args(argv).model))


def show(path: str) -> None:
    """Raises UserError."""
    coder, demo, right = Coder.load(path), demo_rows(), 0
    titles = {row["hisco"]: row["en"].split("|")[0] for row in read("occupations.csv")}
    table = [("description", "lang", "predicted (probability)", "conf", "right", "", "title of what it is")]
    coded = coder.code([row[0] for row in demo], [row[1] for row in demo])
    for (text, lang, *true), answer in zip(demo, coded):
        codes = [code for code in true if code]
        is_right = set(answer.codes) == set(codes)
        right += is_right
        predicted = ", ".join(f"{code} ({p:.2f})" for code, p in zip(answer.codes, answer.probs)) or "none"
        title = ", ".join(titles.get(code, "not in the sample") for code in answer.codes)
        title = title if len(title) <= TITLE_WIDTH else title[: TITLE_WIDTH - 1] + "…"
        mark = "✓" if is_right else "✗"
        table.append((text, lang, predicted, f"{answer.conf or 0:.2f}", ", ".join(codes), mark, title))
    print(f"Twelve descriptions that the model has not seen, coded by {path} (step {coder.step or 0:,}):")
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(f"{right} of {len(demo)} right")
    trained = {row[0].casefold() for row in rows(TRAINED_ROWS, TRAINED_SEED)}
    new = (row for row in rows(100 * OTHER_ROWS, OTHER_SEED) if row[0].casefold() not in trained)
    others = list(islice(new, OTHER_ROWS))
    coded = coder.code([row[0] for row in others], [row[1] for row in others])
    share = sum(set(answer.codes) == {*row[2:]} - {""} for answer, row in zip(coded, others)) / len(others)
    conf = sum(answer.conf or 0.0 for answer in coded) / len(others)
    print(f"On {len(others):,} other new rows: {share:.1%} right, {conf:.1%} expected by it")


if __name__ == "__main__":
    sys.exit(main())
