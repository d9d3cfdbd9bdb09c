#!/usr/bin/env python3
"""What a person's decisions are worth: accuracy of a coded file against the number of texts decided, where
the texts come in the order of `histocc.review make`, and at random.

    python benchmarks/review.py --model ./output --data held_out.csv --target-cols hisco_1
    python benchmarks/review.py --model a b c --data held_out.csv --target-cols hisco_1 hisco_2 --decoder flat

The data have the right codes, which stand for the person; the model was not trained on them. Prints a table
and one JSON line: rows that are right after so many decisions, in %, and rows put right for each decision.
Random: the mean over 20 orders of the texts. Doubt alone: the least sure texts first, whatever their rows.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import numpy as np

from histocc.data.tables import read_chunks
from histocc.review.sheet import CodedFile, Key, key_of

ORDERS = 20


def coded(args: argparse.Namespace, model: str, folder: str) -> CodedFile:
    """The data, coded by the model with the commands."""
    names = [args.column, args.language_column]
    source, target = os.path.join(folder, "new.csv"), os.path.join(folder, "coded.csv")
    with open(source, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["occ1", "lang"])
        for chunk in read_chunks(args.data, names):
            writer.writerows(zip(*chunk.columns))
    command = [
        sys.executable,
        "-m",
        "histocc.predict",
        "--model",
        model,
        "--input",
        source,
        "--output",
        target,
    ]
    command += ["--language-column", "lang", "--decoder", args.decoder, "--device", "cpu", "--overwrite"]
    subprocess.run(command, cwd=REPO, check=True, stdout=subprocess.DEVNULL)
    return CodedFile(target, "occ1", "lang")


def truth(args: argparse.Namespace) -> dict[Key, list[set[str]]]:
    """The codes of each row of each text."""
    found: dict[Key, list[set[str]]] = {}
    for chunk in read_chunks(args.data, [args.column, args.language_column, *args.target_cols]):
        for text, language, *codes in zip(*chunk.columns):
            found.setdefault(key_of(text, language), []).append({code for code in codes if code})
    return found


def curves(file: CodedFile, true: dict[Key, list[set[str]]], decisions: list[int]) -> dict[str, list[float]]:
    """Rows that are right after each number of decisions, by order. A decision is the most frequent set of
    codes of its text.
    """
    keys = [key for key in file.texts if key in true]
    before, after = np.zeros(len(keys)), np.zeros(len(keys))
    for i, key in enumerate(keys):
        answer, sets = set(file.answer(file.texts[key].codes, "")), true[key]
        best = max(sets, key=sets.count)
        before[i] = sum(bool(answer & each) if file.alternatives else answer == each for each in sets)
        after[i] = max(before[i], sets.count(best))
    texts = [file.texts[key] for key in keys]
    ours = np.array(sorted(range(len(keys)), key=lambda i: (-texts[i].doubt, -texts[i].rows, texts[i].id)))
    doubt = np.array(sorted(range(len(keys)), key=lambda i: (-texts[i].doubt / texts[i].rows, texts[i].id)))
    draw = np.random.default_rng(1)

    def right(orders: list[np.ndarray]) -> list[float]:
        gains = np.mean(
            [np.concatenate([[0], np.cumsum((after - before)[order])]) for order in orders], axis=0
        )
        return [float(before.sum() + gains[min(number, len(keys))]) for number in decisions]

    return {
        "review": right([ours]),
        "doubt alone": right([doubt]),
        "random": right([draw.permutation(len(keys)) for _ in range(ORDERS)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--target-cols", nargs="+", required=True)
    parser.add_argument("--column", default="occ1")
    parser.add_argument("--language-column", default="lang")
    parser.add_argument("--decoder", default="topk")
    parser.add_argument("--decisions", type=int, nargs="+", default=[0, 50, 100, 200, 300, 500])
    args = parser.parse_args()
    true, found = truth(args), []
    rows = sum(map(len, true.values()))
    print(
        f"{'model':30} {'order':12} "
        + " ".join(f"{number:>8}" for number in args.decisions)
        + "  rows per decision"
    )
    for model in args.model:
        with tempfile.TemporaryDirectory() as folder:
            result = curves(coded(args, model, folder), true, args.decisions)
        for name, right in result.items():
            shares = " ".join(f"{100 * each / rows:8.1f}" for each in right)
            each = [(b - right[0]) / n for b, n in zip(right[1:], args.decisions[1:])]
            print(f"{model[-30:]:30} {name:12} {shares}  " + " ".join(f"{value:.2f}" for value in each))
        found.append(
            {"model": model, "rows": rows, "texts": len(true), "decisions": args.decisions, "right": result}
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
