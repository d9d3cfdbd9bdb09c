"""How far a model's confidence can be trusted, before and after it is fitted: what `quality.py --confidence`
prints.

Each seed has its own split by text: a fifth of the texts is tested, a twelfth confidence is fitted on, and
the rest is trained on. Of the sample also with one language that is neither trained nor fitted on, and is
tested alone. Off by: expected calibration error over distinct texts, in percentage points, mean ± half the
range over the seeds, and of all seeds' texts together. So many texts alone make it some points: "exact" is
what it would be on average if every confidence were right.
"""

import argparse
import csv
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

import numpy as np
import rows as rows_as_files

from histocc.data.arrays import PreparedData
from histocc.runtime.rng import mix

TESTED, FITTED = 0.2, 0.08  # shares of the texts
LEFT_OUT = "da"
NAMES = {"seq2seq": "codes written", "linear": "linear", "both": "both, best code"}
DRAWS = 200


def parts(data: PreparedData, seed: int, language: str | None) -> dict[str, list[tuple]]:
    """(rows, numbers of them) of train, val and test: by text, another split for each seed. language: that is
    tested alone.
    """
    found: dict[str, list[tuple]] = {"train": [], "val": [], "test": []}
    for rows in (data.train, data.val):
        value = mix(np.asarray(rows.text_hash) + np.uint64(seed)).astype(np.float64) / 2.0**64
        place = np.where(value < TESTED, 2, np.where(value < TESTED + FITTED, 1, 0))
        if language is not None:
            place = np.where(
                rows.language == data.languages.index(language), 2, np.where(place == 2, -1, place)
            )
        for i, name in enumerate(found):
            found[name].append((rows, np.flatnonzero(place == i)))
    return found


def write(path: str, data: PreparedData, pieces: list[tuple]) -> None:
    """Rows as a file."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        for number, (rows, index) in enumerate(pieces):
            piece = rows_as_files.write(f"{path}.{number}", rows, data, index)
            with open(piece, encoding="utf-8", newline="") as lines:
                if number:
                    next(csv.reader(lines))
                file.write(lines.read())
            os.remove(piece)


def run(arguments: list[str], threads: int) -> None:
    """Ends the program with the output of a command that fails."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=REPO,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{shlex.join(arguments)} ended with {done.returncode}:\n{done.stdout}")


def reports(
    args: argparse.Namespace, flags: list[str], folder: str, seed: int, steps: int
) -> dict[str, dict]:
    """{"raw", "fitted"}: the decoders of the report on the tested rows."""
    output = os.path.join(folder, "run")
    train = ["finetune.py", "--dataset", os.path.join(folder, "data"), *flags, "--save-path", output]
    train += [
        "--model-size",
        args.size,
        "--batch-size",
        str(args.batch),
        "--seed",
        str(seed),
        "--device",
        "cpu",
    ]
    train += ["--max-steps", str(steps), "--schedule-steps", str(steps), "--num-epochs", "1000"]
    run([*train, "--eval-interval", "1000000", "--save-interval", "1000000"], args.threads)
    found = {}
    for name, more in (("raw", ["--raw-confidence"]), ("fitted", [])):
        report = os.path.join(folder, name)
        evaluate = ["-m", "histocc.evaluate", "--model", os.path.join(output, "last.bin"), "--device", "cpu"]
        evaluate += ["--data", os.path.join(folder, "test.csv"), "--output", report, "--resamples", "100"]
        run([*evaluate, *more], args.threads)
        with open(os.path.join(report, "report.json"), encoding="utf-8") as file:
            found[name] = json.load(file)["decoders"]
    return found


def bins_of(reports: list[dict], decoder: str) -> np.ndarray:
    """Texts, their summed confidence and their right answers in each bin of all reports together, [10, 3]."""
    found = np.zeros((10, 3))
    for report in reports:
        for each in report[decoder]["calibration"]["bins"]:
            texts = each["texts"]
            found[round(10 * each["from"])] += (
                texts,
                texts * each["confidence_over_texts"],
                texts * each["accuracy_over_texts"],
            )
    return found


def error(bins: np.ndarray) -> float:
    return float(np.abs(bins[:, 1] - bins[:, 2]).sum() / bins[:, 0].sum())


def exact_error(bins: np.ndarray) -> float:
    """The error where answers are right as often as they are said to be, by the mean confidence of a bin."""
    there = bins[bins[:, 0] > 0]
    number = np.maximum(there[:, 0].round().astype(np.int64), 1)
    draws = np.random.default_rng(1).binomial(
        number, np.clip(there[:, 1] / there[:, 0], 0, 1), (DRAWS, len(there))
    )
    off = np.abs(draws / number - there[:, 1] / there[:, 0]) @ there[:, 0]
    return float(off.mean() / there[:, 0].sum())


def spread(values: list[float]) -> str:
    return f"{100 * statistics.mean(values):4.1f} ± {50 * (max(values) - min(values)):.1f}"


def lines(name: str, all_reports: list[dict[str, dict]]) -> list[str]:
    """The table of one data set: for each decoder off by before and after, and what stays."""
    found = []
    for decoder in all_reports[0]["fitted"]:
        cells = []
        for way in ("raw", "fitted"):
            each = [report[way] for report in all_reports]
            errors = [
                report[decoder]["calibration"]["expected_calibration_error_over_texts"] for report in each
            ]
            bins = bins_of(each, decoder)
            cells.append(
                f"{spread(errors)}, together {100 * error(bins):4.1f} (exact {100 * exact_error(bins):.1f})"
            )
        stay = []
        for i, target in enumerate(all_reports[0]["fitted"][decoder]["coverage"]["targets"]):
            of_seeds = [report["fitted"][decoder]["coverage"]["targets"][i] for report in all_reports]
            values = {
                what: [each[what]["over_texts"][0] for each in of_seeds if each[what]["over_texts"]]
                for what in ("stay", "right")
            }
            shares = [f"{100 * statistics.mean(each):.0f}" if each else "-" for each in values.values()]
            stay.append(f"{100 * target['accuracy']:g}: {shares[0]} ({shares[1]})")
        found.append(f"{name:22} {NAMES[decoder]:16} {cells[0]:38} {cells[1]:38} {'  '.join(stay)}")
    return found


def picture(path: str, results: dict[str, list[dict[str, dict]]]) -> None:
    """Reliability before and after, of all seeds together: a row of panels for each data set."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 2, squeeze=False)
    for row, (name, found) in zip(panels, results.items()):
        for panel, way in zip(row, ("raw", "fitted")):
            for decoder in found[0][way]:
                bins = bins_of([each[way] for each in found], decoder)
                bins = bins[bins[:, 0] >= 5]
                label = f"{NAMES[decoder]}: {100 * error(bins):.1f}"
                panel.plot(
                    bins[:, 1] / bins[:, 0], bins[:, 2] / bins[:, 0], marker="o", markersize=3, label=label
                )
            panel.plot([0, 1], [0, 1], color="grey", linewidth=1)
            panel.set(xlim=(0, 1), ylim=(0, 1), title=f"{name}, {'before' if way == 'raw' else 'after'}")
            panel.set(xlabel="confidence", ylabel="right, of distinct texts")
            panel.legend(fontsize=7)
    figure.savefig(path, dpi=100)


def compare(args: argparse.Namespace, sets: dict[str, list[str]], folder: str) -> None:
    """sets: flags of each data set, as `quality.data_flags` gives them."""
    results: dict[str, list[dict[str, dict]]] = {}
    print(
        f"{'data':22} {'decoder':16} {'off by, before':38} {'off by, after':38}"
        " to be right in %: texts that stay, % (right of these, %)"
    )
    for name, flags in sets.items():
        at = flags.index("--target-cols")
        columns = ["--formatter", "hisco", "--language-col", "lang", *flags[at : flags.index("--share-val")]]
        data = rows_as_files.prepared([*flags, *columns], os.path.join(folder, name, "prepared"))
        ways = [None, LEFT_OUT] if LEFT_OUT in data.languages else [None]
        for language in ways:
            label = f"{name}, {language} left out" if language else name
            results[label] = []
            for seed in args.seeds:
                at = os.path.join(folder, name, f"{seed}{language or ''}")
                for part, pieces in parts(data, seed, language).items():
                    path = (
                        os.path.join(at, "test.csv")
                        if part == "test"
                        else os.path.join(at, "data", f"{part}.csv")
                    )
                    write(path, data, pieces)
                results[label].append(reports(args, columns, at, seed, (args.steps or [304])[0]))
            print("\n".join(lines(label, results[label])), flush=True)
    if args.picture:
        picture(args.picture, results)
