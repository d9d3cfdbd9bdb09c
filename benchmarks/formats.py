#!/usr/bin/env python3
"""What number formats do to coding: how fast, and how many rows get the codes that they get in float32.

    python benchmarks/formats.py                             # tiny and small; the real rows, or the sample
    python benchmarks/formats.py --sizes base --texts 256
    python benchmarks/formats.py --models ./output --threads 2

Models are trained a while on the rows first, so that they write codes and stop; --models takes runs that are
there. Rates are those of the coder on distinct texts, formats in turns, medians of --rounds; each format has
coded a batch before. Then every distinct text is coded in each format: the share of rows (not texts) with
the codes of float32, and the mean and greatest difference of conf. Prints a table and one JSON line.
"""

import argparse
import csv
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

import torch
from quality import COLUMNS, COMMON, REAL, data_flags

import finetune
from histocc.predict.coder import Coder
from histocc.runtime.device import Precision, has_bfloat16, has_int8
from histocc.sample.generate import rows

STEPS, BATCH = {"tiny": 600, "small": 300, "base": 60}, {"tiny": 64, "small": 64, "base": 16}
SAMPLE_ROWS = 9_000


def texts_of_rows() -> Counter[tuple[str, str]]:
    """(text, language) → rows: of the real rows, or of as many of the sample."""
    if not REAL.exists():
        return Counter((text, language) for text, language, *_ in rows(SAMPLE_ROWS, 3))
    with open(REAL, encoding="utf-8", newline="") as file:
        return Counter((row["occ1"], row["lang"]) for row in csv.DictReader(file))


def trained(size: str, folder: str) -> str:
    data = data_flags("real", folder) or data_flags("sample", folder) or []
    steps = ["--max-steps", str(STEPS[size]), "--schedule-steps", str(STEPS[size]), "--num-epochs", "1000"]
    flags = [*data, *COLUMNS, *COMMON, *steps, "--model-size", size, "--batch-size", str(BATCH[size])]
    if size == "base":  # whose n-grams take minutes to fit, and are float32 in every format
        flags += ["--ngrams", "none"]
    finetune.main([*flags, "--quiet", "--save-path", str(Path(folder) / size)])
    return str(Path(folder) / size)


def measured(model: str, decoder: str, texts: list[tuple[str, str]], counts: list[int], args) -> dict:
    formats = ["float32", *(["bf16"] if has_bfloat16("cpu") else []), *(["int8"] if has_int8() else [])]
    coders = {name: Coder.load(model, precision=Precision(name)) for name in formats}
    timed = texts[:: max(1, len(texts) // args.texts)][: args.texts]
    rates: dict[str, list[float]] = {name: [] for name in coders}
    for i in range(args.rounds + 1):
        for name, coder in coders.items():
            some = timed if i else timed[:64]  # the first round takes memory and chooses kernels
            started = time.perf_counter()
            coder.code(*map(list, zip(*some)), decoder)
            if i:
                rates[name].append(len(some) / (time.perf_counter() - started))
    answers = {name: coder.code(*map(list, zip(*texts)), decoder) for name, coder in coders.items()}
    found: dict[str, dict] = {}
    for name, coded in answers.items():
        same = sum(n for n, one, other in zip(counts, answers["float32"], coded) if one.codes == other.codes)
        apart = [abs((one.conf or 0) - (other.conf or 0)) for one, other in zip(answers["float32"], coded)]
        found[name] = {
            "texts_per_sec": statistics.median(rates[name]),
            "same_rows": same / sum(counts),
            "conf_mean": statistics.mean(apart),
            "conf_most": max(apart),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small"], choices=STEPS)
    parser.add_argument("--models", nargs="+", default=None, metavar="RUN", help="instead of training")
    parser.add_argument("--decoders", nargs="+", default=["greedy", "flat"], choices=("greedy", "flat"))
    parser.add_argument("--texts", type=int, default=1024, help="that are timed")
    parser.add_argument(
        "--all", type=int, default=None, help="distinct texts that are compared (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    counted = texts_of_rows().most_common(args.all)
    texts, counts = [text for text, _ in counted], [number for _, number in counted]
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {Path(path).name: path for path in args.models or []}
        models = models or {size: trained(size, folder) for size in args.sizes}
        torch.set_num_threads(args.threads)
        for size, model in models.items():
            for decoder in args.decoders:
                found[f"{size}, {decoder}"] = measured(model, decoder, texts, counts, args)
    print(f"\n{sum(counts):,} rows, {len(texts):,} distinct texts; {args.threads} threads")
    print(
        f"{'':16} {'':8} {'texts/s':>9} {'ratio':>6} {'same codes':>11} {'conf apart: mean':>17} {'most':>6}"
    )
    for name, formats in found.items():
        for each, value in formats.items():
            ratio = value["texts_per_sec"] / formats["float32"]["texts_per_sec"]
            print(
                f"{name:16} {each:8} {value['texts_per_sec']:9,.0f} {ratio:6.2f} {value['same_rows']:11.2%}"
                f" {value['conf_mean']:17.4f} {value['conf_most']:6.3f}"
            )
    print(json.dumps({"threads": args.threads, "rows": sum(counts), "formats": found}))


if __name__ == "__main__":
    main()
