"""Codes twelve descriptions that no model trained on the sample has seen, beside their right codes:

python -m histocc.sample.show --model ./output
"""

import argparse
import sys

from histocc.predict.coder import Coder
from histocc.published.models import load_model
from histocc.runtime.entrypoint import run_command
from histocc.sample.generate import demo_rows, read

CODES, TITLE = "predicted (probability)", "title of what was predicted"
TITLE_WIDTH = 34


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m histocc.sample.show", description=str(__doc__).split("\n", 1)[0]
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


if __name__ == "__main__":
    sys.exit(main())
