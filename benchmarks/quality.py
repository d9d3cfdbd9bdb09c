"""How well a model codes after so many steps or minutes of training from scratch: accuracy on held-out texts,
of both decoders.

    python -m benchmarks.quality                           # both data sets, 2 and 10 minutes, three seeds
    python -m benchmarks.quality --data real --steps 350 1750 --threads 1    # where the machine is shared
    python -m benchmarks.quality --data sample --minutes 2 --flags="" --flags="--empty-blocks first"
    python -m benchmarks.quality --rows 500 2000 8000 --steps 514 --baseline    # by number of training rows

Trains with finetune.py and counts with histocc.evaluate, each in a process of its own. A tenth of the texts
is held out (a row is on the side of its text); a row is right if its set of codes is. A cell is: % of
distinct held-out texts ± half the range over the seeds | % of held-out rows | % of those with two or more
codes, if there are any | with --noise, % of distinct texts of which one random letter was replaced. The
learning rate's schedule is as long as the training: how many steps fit into --minutes, which count the fit of
the n-grams, follows from the rate of some steps before. Data: rows of the sample, and real ones if they are
there.

--baseline adds the linear support vector machine of `histocc.evaluate --baseline`, on the same rows. --rows
takes so many training rows, each time those before and more; the held-out rows stay.

For comparison, the trainer that the published models were made with, on the real rows, split by text, in 450
s on two cores (281 steps; size small, learning rate 3e-4, batch 64): 21.3 % by the seq2seq decoder; the
linear decoder 7.3 %, which is the most frequent code.
"""

import glob
import json
import os
import random
import re
import statistics
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from histocc.data.arrays import PreparedData, RowSet

from .common import (
    COLUMNS,
    REAL,
    arguments,
    data_flags,
    finish,
    read_csv,
    run,
    spread,
    table,
    train,
    write_csv,
)

DECODERS = ("seq2seq", "linear", "both")


class Row(NamedTuple):
    text: str
    language: str
    codes: tuple[str, ...]


class DataSet:
    """Training rows and held-out rows.

    Args:
        flags: --dataset and what else decides the data.
        folder: for files; it is made.
        noise: whether the held-out texts are also there with one letter changed.
    """

    def __init__(self, flags: str, folder: str, noise: bool = False):
        self.flags = flags
        run(f"finetune.py {flags} --prepare-only --save-path {folder}/prepared")
        data = PreparedData.open(*glob.glob(f"{folder}/prepared/prepared/*"))
        self.columns = [f"hisco_{place + 1}" for place in range(data.max_codes)]
        self.train, self.val = rows_of(data.train, data), rows_of(data.val, data)
        parts = {"all": self.val, "several": [row for row in self.val if len(row.codes) > 1]}
        if noise:
            parts["noise"] = [row._replace(text=text) for row, text in zip(self.val, changed(self.val))]
        self.files = {name: self.write(f"{folder}/{name}.csv", rows) for name, rows in parts.items() if rows}

    def write(self, path: str, rows: Sequence[Row]) -> str:
        header, blanks = ["occ1", "lang", *self.columns], [""] * len(self.columns)
        lines = ([row.text, row.language, *row.codes, *blanks][: len(header)] for row in rows)
        return write_csv(path, header, lines)

    def fewer(self, number: int, folder: str, noise: bool = False) -> "DataSet":
        """The same held-out rows, and `number` of the training rows."""
        os.makedirs(f"{folder}/data")
        self.write(f"{folder}/data/train.csv", self.train[:number])
        self.write(f"{folder}/data/val.csv", self.val)
        targets = " ".join(self.columns)
        return DataSet(f"--dataset {folder}/data --target-cols {targets} {COLUMNS}", folder, noise)


def rows_of(rows: RowSet, data: PreparedData) -> list[Row]:
    """Prepared rows, in the order of a hash of their texts."""
    index = np.argsort(np.asarray(rows.text_hash), kind="stable")
    codes = [tuple(data.codes[code] for code in row if code >= 0) for row in rows.codes[index].tolist()]
    languages = [data.languages[number] for number in rows.language[index].tolist()]
    return list(map(Row, rows.strings(index), languages, codes))


def changed(rows: Sequence[Row]) -> list[str]:
    """Each text with one random letter replaced by another that the texts hold. Equal texts change alike."""
    letters = sorted({letter for row in rows for letter in row.text if letter.isalpha()})

    def with_another(text: str) -> str:
        draw, places = random.Random(f"1 {text}"), [i for i, letter in enumerate(text) if letter.isalpha()]
        if not places or len(letters) < 2:
            return text
        place = draw.choice(places)
        return (
            text[:place] + draw.choice([each for each in letters if each != text[place]]) + text[place + 1 :]
        )

    return [with_another(row.text) for row in rows]


class Run:
    """Trainings with the same flags on the same data, one after the other in one folder."""

    def __init__(self, data: DataSet, flags: str, folder: str, threads: int, batch: int = 64):
        self.data, self.folder, self.threads, self.batch = data, folder, threads, batch
        self.flags = f"{data.flags} --batch-size {batch} {flags}"

    def train(self, steps: int, seed: int, more: str = "") -> float:
        """Seconds that the fit of the n-grams took."""
        said = train(f"{self.flags} --seed {seed} {more}", steps, self.folder, self.threads)
        fitted = re.search(r"^Fitted in ([0-9.]+) s$", said, re.MULTILINE)
        return float(fitted[1]) if fitted else 0.0

    def log(self) -> list[dict]:
        return read_csv(f"{self.folder}/logs.csv")

    def steps_in(self, minutes: float) -> int:
        """How many steps fit into so many minutes, behind the fit of the n-grams."""
        fit = self.train(40, 0, "--log-interval 20")
        rate = [float(row["samples_per_sec"]) for row in self.log() if row["samples_per_sec"]][-1]
        return max(1, round((60 * minutes - fit) * rate / self.batch))

    def evaluated(self, part: str, more: str = "") -> dict:
        """The report on a file of the held-out rows."""
        report = f"{self.folder}/evaluation_{part}"
        files = f"--model {self.folder}/last.bin --data {self.data.files[part]} --output {report} --overwrite"
        run(f"-m histocc.evaluate {files} --device cpu --resamples 10 {more}", self.threads)
        with open(f"{report}/report.json", encoding="utf-8") as file:
            return json.load(file)

    def accuracy(self, steps: int, seed: int, baseline: bool = False) -> dict:
        """Trains `steps` and returns what the last checkpoint gets right."""
        fitted = self.train(steps, seed, f"--log-interval {steps}")
        return self.result(fitted, "--baseline" if baseline else "")

    def result(self, fitted: float = 0.0, more: str = "") -> dict:
        """For each decoder, and the baseline, fractions of distinct held-out texts ("all"), of their rows, of
        rows with several codes, and of noisy texts ("noise"), for the training that is in the folder. fitted:
        seconds of the fit of its n-grams.
        """
        log, seconds, before = self.log(), fitted, 0
        for row in log:
            if row["samples_per_sec"]:
                seconds += (int(row["samples"]) - before) / float(row["samples_per_sec"])
                before = int(row["samples"])
        found: dict = {"steps": int(log[-1]["step"]), "seconds": seconds}
        for part in self.data.files:
            report = self.evaluated(part, more)
            over = "over_rows" if part == "several" else "over_texts"
            for name, each in report["decoders"].items():
                whole_codes = each["by_digits"][-1]
                found.setdefault(name, {})[part] = whole_codes[over]["accuracy"][0]
                if part == "all":
                    found[name]["rows"] = each["accuracy"]
            if part == "all":
                found["texts"] = report["data"]["texts"]
            if "baseline" in report:
                svm = report["baseline"]
                found.setdefault("svm", {})[part] = svm[over][0]
                if part == "all":
                    found["svm"]["rows"] = svm["over_rows"][0]
        return found


def cell(results: list[dict], name: str) -> str:
    """What a decoder or the baseline gets right; empty if the results lack it."""
    if any(name not in each for each in results):
        return ""
    parts = [
        f"{100 * statistics.mean(each[name][part] for each in results):.1f}"
        for part in ("rows", "several", "noise")
        if part in results[0][name]
    ]
    return " | ".join([spread([each[name]["all"] for each in results]), *parts])


def data_sets(name: str, args, folder: str):
    """The data set, or with --rows one for each number of training rows."""
    data = DataSet(data_flags(name, folder, max(args.rows or [0])), f"{folder}/whole", args.noise)
    if not args.rows:
        yield data
    for number in sorted({min(number, len(data.train)) for number in args.rows or ()}):
        yield data.fewer(number, f"{folder}/rows_{number}", args.noise)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", nargs="+", default=["sample", "real"], choices=("sample", "real"))
    parser.add_argument("--minutes", nargs="+", type=float, default=[2, 10], help="of training")
    parser.add_argument("--steps", nargs="+", type=int, help="optimizer steps, instead of --minutes")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--size", default="tiny", choices=("ngrams", "tiny", "small", "base"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--flags", action="append", metavar="TEXT", help="more flags of finetune.py; several compare"
    )
    parser.add_argument("--baseline", action="store_true", help="needs scikit-learn")
    parser.add_argument("--noise", action="store_true", help="count texts with one letter changed, too")
    parser.add_argument("--rows", nargs="+", type=int, help="numbers of training rows")
    args = parser.parse_args()
    found, lines = [], []
    for name in args.data:
        if name == "real" and not REAL.exists():
            print(f"real rows left out: {REAL.name} is not there")
            continue
        with tempfile.TemporaryDirectory() as folder:
            for data in data_sets(name, args, folder):
                for flags in args.flags or [""]:
                    model = Run(data, f"--model-size {args.size} {flags}", f"{folder}/run", args.threads)
                    for budget in args.steps or args.minutes:
                        steps = budget if args.steps else model.steps_in(budget)
                        results = [model.accuracy(steps, seed, args.baseline) for seed in args.seeds]
                        what = f"{budget:g} {'steps' if args.steps else 'min'}"
                        seconds = statistics.mean(each["seconds"] for each in results)
                        cells = [cell(results, each) for each in (*DECODERS, "svm")]
                        row = [name, len(data.train), what, steps, f"{seconds:.0f}", *cells, flags]
                        print(row, flush=True)
                        lines.append(row)
                        entry = {"data": name, "rows": len(data.train), "flags": flags, "budget": what}
                        found.append({**entry, "results": results})
    heads = ("data", "rows", "budget", "steps", "seconds", *DECODERS, "SVM", "flags")
    finish({"size": args.size, "threads": args.threads, "runs": found}, table(heads, lines))


if __name__ == "__main__":
    main()
