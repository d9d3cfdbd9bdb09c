"""Codes twelve descriptions that no model trained on the sample has seen, beside their right codes, and says
how often a thousand other rows are right, and how often the model expects it:

python -m histocc.sample.show --model ./output
"""

import argparse
import sys
from itertools import islice

from histocc.predict.coder import Coder
from histocc.runtime.world import run_command
from histocc.sample.generate import demo_rows, read, rows

TRAINED_ROWS, TRAINED_SEED = 40_000, 1  # of launch_training.sh; other texts are new to its model
OTHER_ROWS, OTHER_SEED = 1_000, 2


def show(path: str) -> None:
    coder, demo, right = Coder.load(path), demo_rows(), 0
    titles = {row["hisco"]: row["en"].split("|")[0] for row in read("occupations.csv")}
    table = [("description", "lang", "predicted (probability)", "conf", "right", "", "title of what it is")]
    coded = coder.code([row[0] for row in demo], [row[1] for row in demo])
    for (text, lang, *true), answer in zip(demo, coded):
        mark = "✓" if {*answer.codes} == {*true} - {""} else "✗"
        right += mark == "✓"
        predicted = ", ".join(f"{code} ({p:.2f})" for code, p in zip(answer.codes, answer.probs)) or "none"
        title, codes = (
            ", ".join(titles.get(code, "?") for code in answer.codes),
            ", ".join(filter(None, true)),
        )
        table.append((text, lang, predicted, f"{answer.conf or 0:.2f}", codes, mark, title))
    print(f"Twelve descriptions that the model has not seen, coded by {path} (step {coder.step or 0:,}):")
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(f"{right} of {len(demo)} right")
    trained = {row[0].casefold() for row in rows(TRAINED_ROWS, TRAINED_SEED)}
    new = (row for row in rows(100 * OTHER_ROWS, OTHER_SEED) if row[0].casefold() not in trained)
    others = list(islice(new, OTHER_ROWS))
    coded = coder.code([row[0] for row in others], [row[1] for row in others])
    right = sum({*answer.codes} == {*row[2:]} - {""} for answer, row in zip(coded, others)) / OTHER_ROWS
    expected = sum(answer.conf or 0.0 for answer in coded) / OTHER_ROWS
    print(f"On {OTHER_ROWS:,} other new rows: {right:.1%} right, {expected:.1%} expected by it")
    print("python -m histocc.review hands doubtful rows to a person")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m histocc.sample.show", description="What a model has learnt.")
    parser.add_argument("--model", required=True, metavar="PATH", help="folder of a run, or a checkpoint")
    return run_command(lambda: show(parser.parse_args(argv).model))


if __name__ == "__main__":
    sys.exit(main())
