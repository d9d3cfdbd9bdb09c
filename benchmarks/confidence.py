"""How far a model's confidence can be trusted, before and after it is fitted.

    python -m benchmarks.confidence --picture docs/img/confidence.png

Each seed has its own split by text: a fifth of the texts is tested, a twelfth confidence is fitted on, and
the rest is trained on. Of the sample also with one language that is neither trained nor fitted on, and is
tested alone. Off by: expected calibration error over distinct texts, in percentage points, mean ± half the
range over the seeds, and over rows of all seeds' texts together. So many rows alone make it some points:
"exact" is what it would be on average if every confidence were right.
"""

import json
import os
import random
import tempfile
from pathlib import Path

import numpy as np

from .common import COLUMNS, REAL, arguments, data_flags, finish, run, spread, table, train
from .quality import DataSet, Row

TESTED, FITTED = 0.2, 0.08  # shares of the texts
LEFT_OUT = "da"
NAMES = {"seq2seq": "codes written", "linear": "linear", "both": "both, best code"}
DRAWS = 200


def parts(rows: list[Row], seed: int, language: str | None) -> dict[str, list[Row]]:
    """Return rows to train on, to fit on (val) and to test, by text; language: one that is tested alone."""
    found: dict[str, list[Row]] = {"data/train.csv": [], "data/val.csv": [], "test.csv": []}
    for row in rows:
        value = random.Random(f"{seed} {row.text}").random()
        name = "val.csv" if value < TESTED + FITTED else "train.csv"
        name = "test.csv" if value < TESTED else f"data/{name}"
        if language is not None:
            name = "test.csv" if row.language == language else "" if name == "test.csv" else name
        if name:
            found[name].append(row)
    return found


def reports(args, data: DataSet, folder: str, seed: int, language: str | None) -> dict[str, dict]:
    """Return {"raw", "fitted"}: the decoders of the report on the tested rows."""
    rows = parts([*data.train, *data.val], seed, language)
    os.makedirs(f"{folder}/data")
    for name, each in rows.items():
        data.write(f"{folder}/{name}", each)
    targets = " ".join(data.columns)
    flags = f"--dataset {folder}/data --target-cols {targets} {COLUMNS} --model-size {args.size}"
    train(f"{flags} --seed {seed}", args.steps, f"{folder}/run", args.threads)
    ways = {"raw": "--raw-confidence", "fitted": ""}
    found = {}
    for way, more in ways.items():
        report = f"--data {folder}/test.csv --output {folder}/{way} --device cpu {more}"
        run(f"-m histocc.evaluate --model {folder}/run/last.bin {report}", args.threads)
        found[way] = json.loads(Path(f"{folder}/{way}/report.json").read_text(encoding="utf-8"))["decoders"]
    return found


def bins_of(reports: list[dict], decoder: str) -> np.ndarray:
    """Return rows, their summed confidence and their right answers in each bin of all reports, [10, 3]."""
    found = np.zeros((10, 3))
    for report in reports:
        for each in report[decoder]["calibration"]["bins"]:
            sums = each["rows"] * np.array((1, each["confidence"], each["accuracy"]))
            found[round(10 * each["from"])] += sums
    return found


def error(bins: np.ndarray) -> float:
    return float(np.abs(bins[:, 1] - bins[:, 2]).sum() / bins[:, 0].sum())


def exact_error(bins: np.ndarray) -> float:
    """Return the error if answers are right as often as the mean confidence of their bin says."""
    bins = bins[bins[:, 0] > 0]
    number, mean = np.maximum(bins[:, 0].round().astype(np.int64), 1), bins[:, 1] / bins[:, 0]
    draws = np.random.default_rng(1).binomial(number, np.clip(mean, 0, 1), (DRAWS, len(bins)))
    return float((np.abs(draws / number - mean) @ bins[:, 0]).mean() / bins[:, 0].sum())


def rows_of_table(name: str, seeds: list[dict[str, dict]]) -> list[list[str]]:
    """Return for each decoder the error before and after."""
    found = []
    for decoder in seeds[0]["fitted"]:
        cells = []
        for way in ("raw", "fitted"):
            each = [report[way] for report in seeds]
            figures = [report[decoder]["calibration"] for report in each]
            errors = [figure["expected_calibration_error_over_texts"] for figure in figures]
            bins = bins_of(each, decoder)
            together = f"{100 * error(bins):.1f} (exact {100 * exact_error(bins):.1f})"
            cells.append(f"{spread(errors)}, together {together}")
        found.append([name, NAMES[decoder], *cells])
    return found


def picture(path: str, results: dict[str, list[dict[str, dict]]]) -> None:
    """Draw reliability before and after, of all seeds together: a row of panels for each data set."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 2, squeeze=False)
    for row, (name, seeds) in zip(panels, results.items()):
        for panel, (way, title) in zip(row, {"raw": "before", "fitted": "after"}.items()):
            for decoder in seeds[0][way]:
                bins = bins_of([each[way] for each in seeds], decoder)
                label = f"{NAMES[decoder]}: {100 * error(bins):.1f}"
                bins = bins[bins[:, 0] >= 5]
                x, y = bins[:, 1] / bins[:, 0], bins[:, 2] / bins[:, 0]
                panel.plot(x, y, marker="o", markersize=3, label=label)
            panel.plot([0, 1], [0, 1], color="grey", linewidth=1)
            panel.set(xlim=(0, 1), ylim=(0, 1), title=f"{name}, {title}")
            panel.set(xlabel="confidence", ylabel="right")
            panel.legend(fontsize=7)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", nargs="+", default=["sample", "english"], choices=("sample", "english"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=304)
    parser.add_argument("--size", default="tiny", choices=("ngrams", "tiny", "small", "base"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--picture", metavar="FILE.png", help="reliability")
    args = parser.parse_args()
    results: dict[str, list[dict[str, dict]]] = {}
    lines: list[list[str]] = []
    for name in [name for name in args.data if name == "sample" or REAL.exists()]:
        with tempfile.TemporaryDirectory() as folder:
            data = DataSet.of(data_flags(name, folder), f"{folder}/whole")
            languages = {row.language for row in data.train}
            for language in [None, LEFT_OUT] if LEFT_OUT in languages else [None]:
                label = f"{name}, {language} left out" if language else name
                results[label] = [
                    reports(args, data, f"{folder}/{language}{seed}", seed, language) for seed in args.seeds
                ]
                lines += rows_of_table(label, results[label])
    if args.picture:
        picture(args.picture, results)
    heads = ("data", "decoder", "off by, before", "after")
    finish({"lines": lines}, table(heads, lines))


if __name__ == "__main__":
    main()
