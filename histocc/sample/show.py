"""Codes twelve descriptions that no model trained on the sample has seen, beside their right codes:

python -m histocc.sample.show --model ./output
"""

import argparse
import sys

from histocc.model.model_io import load_model
from histocc.predict.coder import Coder
from histocc.runtime.entrypoint import run_command
from histocc.sample.demo import demo_rows
from histocc.sample.table import read_table

HEADER = ("description", "lang", "predicted (probability)", "right", "", "title of what was predicted")
TITLE_WIDTH = 34


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
    rows: list[tuple[str, ...]] = [HEADER]
    right = 0
    for (text, language, *codes), predicted in zip(demo, predictions):
        codes = [code for code in codes if code]
        same = {code for code, _ in predicted} == set(codes)
        right += same
        title = ", ".join(titles.get(code, "not in the sample") for code, _ in predicted)
        rows.append(
            (
                text,
                language,
                ", ".join(f"{code} ({p:.2f})" for code, p in predicted) or "none",
                ", ".join(codes),
                "✓" if same else "✗",
                title if len(title) <= TITLE_WIDTH else title[: TITLE_WIDTH - 1] + "…",
            )
        )
    print(
        f"Twelve descriptions that the model has not seen, coded by {args.model} (step"
        f" {checkpoint.get('step') or 0:,}):"
    )
    print("\n".join(table_lines(rows)))
    print(f"{right} of {len(demo)} right")


if __name__ == "__main__":
    sys.exit(main())
