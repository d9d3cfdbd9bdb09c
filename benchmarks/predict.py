#!/usr/bin/env python3
"""How fast a file is coded from the command line, with and without de-duplication, and in how much memory:

    python benchmarks/predict.py     # a million rows made from the sample; size tiny, trained a while on it
    python benchmarks/predict.py --rows 100000 --decoders flat
    python benchmarks/predict.py --draw-from register.csv --ways de-duplicated   # its rows again and again

Every run is a separate process, whose peak memory is what the system counted. Prints a table and one JSON
line.
"""

import argparse
import csv
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

from search import train

from histocc.sample.files import write
from histocc.sample.generate import rows

WAYS = {"de-duplicated": [], "every row": ["--no-deduplicate"]}


def draw(source: str, number: int, path: str) -> None:
    """`number` rows of a CSV file with columns occ1 and lang, drawn with replacement."""
    with open(source, encoding="utf-8", newline="") as file:
        found = [(row["occ1"], row["lang"]) for row in csv.DictReader(file)]
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "occ1", "lang"))
        writer.writerows((i, *row) for i, row in enumerate(random.Random(1).choices(found, k=number)))


def code(model: str, source: str, output: str, threads: int, flags: list[str]) -> dict:
    command = [
        sys.executable,
        "-m",
        "histocc.predict",
        "--model",
        model,
        "--input",
        source,
        "--column",
        "occ1",
        "--language-column",
        "lang",
        "--system",
        "coded",
        "--output",
        output,
        "--overwrite",
        *flags,
    ]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(REPO)}, stdout=said
        )
        _, status, usage = os.wait4(process.pid, 0)
        said.seek(0)
        text = said.read()
    if status:
        sys.exit(text)
    return {
        "rows_per_sec": float(re.search(r"([\d,]+) rows/s", text)[1].replace(",", "")),
        "peak_mb": usage.ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--steps", type=int, default=200, help="of training, so that most rows get one code")
    parser.add_argument("--model", default=None, help="a run instead of training one")
    parser.add_argument("--decoders", nargs="+", default=["greedy", "flat"])
    parser.add_argument(
        "--draw-from",
        default=None,
        metavar="FILE.csv",
        help="draw the rows from this file instead of making them",
    )
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(prefix="histocc-bench-") as folder:
        source = str(Path(folder) / "rows.csv")
        if args.draw_from:
            draw(args.draw_from, args.rows, source)
        else:
            write(rows(args.rows, 1), source)
        model = args.model or train(folder, args.size, args.steps)
        for decoder in args.decoders:
            for name in args.ways:
                found[f"{decoder}, {name}"] = code(
                    model,
                    source,
                    str(Path(folder) / "out.csv"),
                    args.threads,
                    ["--decoder", decoder, *WAYS[name]],
                )
    print(
        f"{args.rows:,} rows"
        f" {f'drawn from {Path(args.draw_from).name}' if args.draw_from else 'made from the sample'},"
        f" {args.model or f'size {args.size}, {args.steps} steps'}, one process, {args.threads} threads\n"
    )
    print("| decoder | rows/s | peak memory, MB |\n|---|---|---|")
    for name, figures in found.items():
        print(f"| {name} | {figures['rows_per_sec']:,.0f} | {figures['peak_mb']:,.0f} |")
    print(json.dumps({"rows": args.rows, "size": args.size, "threads": args.threads, **found}))


if __name__ == "__main__":
    main()
