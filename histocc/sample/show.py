"""Code twelve descriptions that no model of the sample has seen, and show their right codes:

python -m histocc.sample.show --model ./output
"""

import argparse
import sys

from histocc.predict.coder import Coder
from histocc.runtime.errors import run_command
from histocc.sample.generate import demo_rows, read

TITLE_WIDTH = 34


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m histocc.sample.show", description=str(__doc__).split("\n\n")[0]
    )
    what = "run folder (its best checkpoint), or a checkpoint"
    parser.add_argument("--model", required=True, metavar="PATH", help=what)
    return run_command(lambda: show(parser.parse_args(argv).model))


def show(path: str) -> None:
    coder, demo, right = Coder.load(path), demo_rows(), 0
    titles = {row["hisco"]: row["en"].split("|")[0] for row in read("occupations.csv")}
    table = [("description", "lang", "predicted (probability)", "conf", "right", "", "title of prediction")]
    coded = coder.code([row[0] for row in demo], [row[1] for row in demo])
    for (text, lang, *true), answer in zip(demo, coded):
        codes = [code for code in true if code]
        answered = set(answer.codes) == set(codes)
        right += answered
        predicted = ", ".join(f"{code} ({p:.2f})" for code, p in zip(answer.codes, answer.probs)) or "none"
        title = ", ".join(titles.get(code, "not in the sample") for code in answer.codes)
        title = title if len(title) <= TITLE_WIDTH else title[: TITLE_WIDTH - 1] + "…"
        mark = "✓" if answered else "✗"
        table.append((text, lang, predicted, f"{answer.conf or 0:.2f}", ", ".join(codes), mark, title))
    print(f"Twelve descriptions that the model has not seen, coded with {path} (step {coder.step or 0:,}):")
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(f"{right} of {len(demo)} right")
    print("histocc review: check and decide codes by hand")


if __name__ == "__main__":
    sys.exit(main())
