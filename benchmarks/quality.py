"""What training from scratch reaches, and in what time, beside a linear support vector machine and fastText:
accuracy on held-out texts by the number of labels.

    python -m benchmarks.quality --results quality.json     # all registers, methods and numbers of labels
    python -m benchmarks.quality --data english --labels all --methods ours --seeds 1
    python -m benchmarks.quality --methods ours --flags="" --flags="--prior none"             # compares both
    python -m benchmarks.quality --methods ours --flags="--model-size base --device cuda --use-amp" # on a GPU
    python -m benchmarks.quality --methods --results a.json b.json --picture both.png     # measures nothing
    python -m benchmarks.quality --data ammo diary diary_rows diary_shop kldb esco   # other classifications

A label is a distinct text with all its rows. Seed N holds out tenth N of the texts by their hash, the same
for all numbers of labels, which are beginnings of each other; by tenth 0 (and 4, 5 and 6 of the English ones)
settings were chosen. Right is a text whose whole set of codes is answered; a distinct text counts once, as
written and with one random letter replaced.

ours: the default command, finetune.py with the flags of the columns alone, so it stands on the answers of the
built-in model; last.bin codes the held-out texts. Seconds are those of the command, from its start to the
saved model, on one process; the built-in model is made before. Expected is the mean `conf`. The command has
the labels alone: beyond 12,000 texts it sets a tenth of them aside for validation.
svm: that of `histocc.evaluate --baseline`; in seconds of fitting and answering.
fasttext: supervised, as in FASTTEXT, which was chosen by a few tries on an 80/20 split; if rows have several
codes, each against all others (ova), and those above 0.5 are answered. Both have one thread and no prior.
Methods that are not installed are left out.

--results: what was measured before stays in the first file unless the same is measured again; table and
picture are of all files. benchmarks/results.json may be one: `python -m benchmarks` then writes
docs/benchmarks.md with it.

TABLES of other classifications: seed N draws the tenth of the distinct texts that is held out, and ours codes
them by `histocc.predict`. Held-out rows count, too; seconds are those of one core, of both commands.
"""

import glob
import importlib.util
import json
import math
import os
import random
import re
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
import torch

from histocc.data.arrays import PreparedData, RowSet
from histocc.data.split import split_values
from histocc.evaluate import baseline
from histocc.predict.coder import Coder
from histocc.predict.fitting import MAX_CODES_OF_ANSWER
from histocc.published import models
from histocc.published.built_in import NAME as BUILT_IN
from histocc.text import join_columns

from . import common
from .common import COLUMNS, REGISTERS, arguments, data_flags, finish, run, spread, table, write_csv

PACKAGES = {"svm": "sklearn", "fasttext": "fasttext"}
NAMES = {"ours": "histocc", "svm": "SVM", "fasttext": "fastText"}
LABEL = "__label__"
DATA, SAMPLE_ROWS = (*REGISTERS, "sample"), 22_000
TABLES = {  # file, column of codes, flags, columns of each text of the SVM
    "ammo": ("ammo_finnish_hisco.csv", "hisco_1", "--input-col text", ["text"]),
    "diary": ("coicop_diary_fr.csv", "coicop", "--input-col text", ["text"]),
    "diary_rows": ("coicop_diary_fr.csv", "coicop", "--input-col text", ["text"]),
    "diary_shop": ("coicop_diary_fr.csv", "coicop", "--input-col text shop", ["text", "shop"]),
    "kldb": ("kldb2010_titles_de.csv", "kldb", "--input-col text", ["text"]),
    "esco": ("esco_isco08_sv_el_bg_fr.csv", "isco08", "--input-col text --language-col lang", ["lang text"]),
}
ROWS_HELD_OUT = ("diary_rows", "diary_shop")  # of the other tables texts are
FILES = REGISTERS | {name: common.FOLDER / "other" / table[0] for name, table in TABLES.items()}
ALL = (*DATA, *TABLES)
WAYS = {"0": "as written", "1": "one letter changed"}
FASTTEXT = {"minn": 2, "maxn": 5, "wordNgrams": 2, "dim": 100, "lr": 1.0, "epoch": 50, "bucket": 200_000}
TEXT = """![Accuracy by labels and by seconds](benchmarks_quality.png)

Share (%) of unseen, distinct texts that are coded completely right, by the number of labels: mean and
half the range over seeds, each of which holds out another tenth of the texts. A label is a distinct text
with its codes. histocc is the default command without further flags, which stands on the answers of the
built-in model. It learns from all labels up to 12,000; beyond that it sets a tenth of them aside for
validation. "conf expects" is the mean of its `conf`. The SVM and fastText learn from all labels, without
such a prior. Seconds of histocc are those of the whole command on two cores, with the built-in model made
before; those of the others are of fitting and answering, with one thread; the least over the seeds."""
TEXT_OF_TABLES = """% of distinct held-out texts, and of their rows, whose code is right, mean and half the
range over seeds, each with another tenth of the texts; rows and seconds of one core of the first.
histocc: the default command without further flags; the SVM learns from the same rows. ammo: Finnish and
English occupations, HISCO. diary: French expenses, COICOP; diary_rows: rows are held out instead of
texts; diary_shop: these, with the column of the shop. kldb: German titles, KldB 2010. esco: Bulgarian,
French, Greek, Swedish, ISCO-08."""
Answers = list[Collection[str]]


class Row(NamedTuple):
    text: str
    language: str
    codes: tuple[str, ...]


class DataSet(NamedTuple):
    """Training rows and held-out rows. flags: finetune.py's for these rows. columns: columns of codes."""

    flags: str
    columns: list[str]
    train: list[Row]
    val: list[Row]

    @classmethod
    def of(cls, flags: str, folder: str, tenth: int = 0) -> "DataSet":
        """Return the rows of finetune.py with these flags, a tenth held out. folder: for its files."""
        flags += f" --share-val {0.1 * tenth + 0.1:.1f}"
        run(f"finetune.py {flags} --prepare-only --save-path {folder}/prepared")
        data = PreparedData.open(*glob.glob(f"{folder}/prepared/prepared/*"))
        columns = [f"hisco_{place + 1}" for place in range(data.max_codes)]
        val, before = rows_of(data.val, data), int((split_values(data.val.text_hash) < 0.1 * tenth).sum())
        found = cls(flags, columns, rows_of(data.train, data) + val[:before], val[before:])
        return found.fewer(math.inf, f"{folder}/all")

    def write(self, path: str, rows: Sequence[Row]) -> str:
        header, blanks = ["occ1", "lang", *self.columns], [""] * len(self.columns)
        lines = ([row.text, row.language, *row.codes, *blanks][: len(header)] for row in rows)
        return write_csv(path, header, lines)

    def fewer(self, labels: float, folder: str) -> "DataSet":
        """Return the same held-out rows, and the rows of the first `labels` of the training texts."""
        texts = list(dict.fromkeys(row.text for row in self.train))[: int(min(labels, len(self.train)))]
        chosen = {*texts}
        train = [row for row in self.train if row.text in chosen]
        os.makedirs(folder, exist_ok=True)
        path = self.write(f"{folder}/train.csv", train)
        flags = f"--dataset {path} --target-cols {' '.join(self.columns)} {COLUMNS}"
        return self._replace(flags=flags, train=train)

    def parts(self) -> dict[str, list[Row]]:
        """Return the held-out rows as written, and with a letter changed, by WAYS."""
        texts = misspelled(self.val)
        return {"0": self.val, "1": [row._replace(text=text) for row, text in zip(self.val, texts)]}


def rows_of(rows: RowSet, data: PreparedData) -> list[Row]:
    """Return prepared rows, in the order of a hash of their texts."""
    index = np.argsort(np.asarray(rows.text_hash), kind="stable")
    codes = [tuple(data.codes[code] for code in row if code >= 0) for row in rows.codes[index].tolist()]
    languages = [data.languages[number] for number in rows.language[index].tolist()]
    return list(map(Row, rows.strings(index), languages, codes))


def misspelled(rows: Sequence[Row]) -> list[str]:
    """Return each text with a random letter replaced by another one that the texts hold. Equal texts change
    alike.
    """
    letters = sorted({letter for row in rows for letter in row.text if letter.isalpha()})

    def with_another(text: str) -> str:
        draw, places = random.Random(f"1 {text}"), [i for i, x in enumerate(text) if x.isalpha()]
        for place in draw.sample(places, min(1, len(places))):
            other = draw.choice([each for each in letters if each != text[place]] or letters)
            text = text[:place] + other + text[place + 1 :]
        return text

    return [with_another(row.text) for row in rows]


def right(answers: Sequence[Collection[str]], rows: Sequence[Row]) -> float:
    """Return the share of the distinct texts whose whole set of codes is answered; a text with several rows
    counts by the mean over its rows.
    """
    texts: dict[str, list[bool]] = {}
    for answer, row in zip(answers, rows, strict=True):
        texts.setdefault(row.text, []).append({*answer} == {*row.codes})
    return mean(map(mean, texts.values()))


# ---- the methods


def of_model(path: str, parts: dict[str, list[Row]], device: torch.device) -> dict:
    """Return the shares of right texts of a checkpoint, and the shares that its `conf` expects."""
    coder, found = Coder(*models.load_model(path, device)), {"right": {}, "expected": {}}
    for way, rows in parts.items():
        coded = coder.code(
            [row.text for row in rows], [row.language for row in rows], "auto", MAX_CODES_OF_ANSWER
        )
        found["right"][way] = right([each.codes for each in coded], rows)
        conf = {row.text: each.conf or 0.0 for row, each in zip(rows, coded)}
        found["expected"][way] = mean(conf.values())
    return found


def ours(data: DataSet, parts: dict[str, list[Row]], flags: str, seed: int, threads: int) -> dict:
    models.load_model(BUILT_IN)  # it is made at first use, which takes a minute
    with tempfile.TemporaryDirectory() as folder:
        line = f"{data.flags} --device cpu {flags} --seed {seed} --save-path {folder}/run"
        started = time.perf_counter()
        run(f"finetune.py {line}", threads)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, **of_model(f"{folder}/run/last.bin", parts, common.device_of(line))}


def texts_of(rows: Sequence[Row], data: DataSet) -> list[str]:
    """Return the texts, with their languages in front if the training rows have several."""
    several = len({row.language for row in data.train}) > 1
    return [f"{row.language} {row.text}" if several else row.text for row in rows]


def svm(data: DataSet, parts: dict[str, list[Row]], *_) -> dict:
    started, asked = time.perf_counter(), [row for rows in parts.values() for row in rows]
    known = texts_of(data.train, data), [frozenset(row.codes) for row in data.train]
    answers = iter(baseline.svm(*known, texts_of(asked, data)))
    found = {way: right([next(answers) for _ in rows], rows) for way, rows in parts.items()}
    return {"seconds": time.perf_counter() - started, "right": found}


def fasttext(data: DataSet, parts: dict[str, list[Row]], _: str, seed: int, *__) -> dict:
    import fasttext as package

    def lines_of(rows: Sequence[Row]) -> list[str]:
        """Return texts in small letters, signs apart, as its guide has them."""
        texts = (re.sub(r"([^\w\s])", r" \1 ", text.lower()) for text in texts_of(rows, data))
        return [" ".join(text.split()) for text in texts]

    package.FastText.eprint = lambda _: None  # it prints a warning with each model
    several = any(len(row.codes) > 1 for row in data.train)
    with tempfile.TemporaryDirectory() as folder:
        started, path = time.perf_counter(), f"{folder}/train.txt"
        with open(path, "w", encoding="utf-8") as file:
            for row, line in zip(data.train, lines_of(data.train)):
                file.write(" ".join([*(LABEL + code for code in row.codes), line, "\n"]))
        settings = FASTTEXT | {"loss": "ova" if several else "softmax", "seed": seed, "thread": 1}
        model = package.train_supervised(path, verbose=0, **settings)
        seconds = time.perf_counter() - started
    found = {}
    for way, rows in parts.items():
        answers = zip(*model.predict(lines_of(rows), k=5))  # (codes, probabilities), the best ones first
        taken = ([code for i, code in enumerate(x) if i == 0 or several and p[i] > 0.5] for x, p in answers)
        found[way] = right([[code.removeprefix(LABEL) for code in codes] for codes in taken], rows)
    return {"seconds": seconds, "right": found}


METHODS = {"ours": ours, "svm": svm, "fasttext": fasttext}


def measured(name: str, args) -> Iterator[dict]:
    ways = [("ours", flags) for flags in args.flags or [""]] + [("svm", ""), ("fasttext", "")]
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            whole = DataSet.of(data_flags(name, folder, SAMPLE_ROWS), f"{folder}/whole", seed)
            parts, texts = whole.parts(), len({row.text for row in whole.train})
            for labels in sorted({int(min(labels, texts)) for labels in args.labels}):
                data = whole.fewer(labels, f"{folder}/labels_{labels}")
                for method, flags in (way for way in ways if way[0] in args.methods):
                    entry = {"data": name, "labels": "all" if labels == texts else labels}
                    entry |= {"method": method, "flags": flags, "seed": seed, "train": labels}
                    yield entry | METHODS[method](data, parts, flags, seed, args.threads)


# ---- tables of other classifications


def default_command(train: list[dict], val: list[dict], code: str, flags: str) -> tuple[Answers, float]:
    """Return the codes of rows by a model of finetune.py without further flags, and its mean conf."""
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in {"train": train, "val": val}.items():
            write_csv(f"{folder}/{name}.csv", [*rows[0]], (list(row.values()) for row in rows))
        model, files = f"{folder}/run", f"--input {folder}/val.csv --output {folder}/coded.csv"
        run(f"finetune.py --dataset {folder}/train.csv {flags} --target-cols {code} --save-path {model}", 1)
        run(f"-m histocc.predict --model {model} {files} {flags} --system coded", 1)
        coded = common.read_csv(f"{folder}/coded.csv")
        return [{row["coded_1"]} for row in coded], mean(float(row["conf"] or 0) for row in coded)


def of_table(name: str, args) -> Iterator[dict]:
    """Yield what the default command and the SVM reach on a table, as `measured` does."""
    _, code, flags, columns = TABLES[name]
    table = common.read_csv(FILES[name])
    unit = list(range(len(table))) if name in ROWS_HELD_OUT else [row["text"] for row in table]
    units = sorted({*unit})

    def joined(rows: list[dict]) -> list[str]:
        first, *further = [
            [" ".join(row[name] for name in names.split()) for row in rows] for names in columns
        ]
        return join_columns(first, further)

    for seed in args.seeds:
        chosen = {*random.Random(seed).sample(units, len(units) // 10)}
        train = [row for row, each in zip(table, unit) if each not in chosen]
        val = [row for row, each in zip(table, unit) if each in chosen]
        for method in sorted({*args.methods} - {"fasttext"}):
            entry = {"data": name, "labels": "all", "method": method, "flags": "", "seed": seed}
            started = sum(os.times()[:4])
            if method == "ours":
                answers, expected = default_command(train, val, code, flags)
                entry["expected"] = {"rows": expected}
            else:
                codes = [frozenset([row[code]]) for row in train]
                answers = [{*each} for each in baseline.svm(joined(train), codes, joined(val))]
            entry |= {"train": len(train), "seconds": sum(os.times()[:4]) - started}
            rows = mean(each == {row[code]} for each, row in zip(answers, val, strict=True))
            asked = [Row(row["text"], "", (row[code],)) for row in val]
            yield entry | {"right": {"0": right(answers, asked), "rows": rows}}


# ---- results


def key(entry: dict) -> tuple:
    return tuple(entry[name] for name in ("data", "labels", "method", "flags", "seed"))


def kept(files: Sequence[Path]) -> dict[tuple, dict]:
    """Return earlier results, in files of the form of results.json; by `key`, the later file's."""
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    return {key(entry): entry for each in contents for entry in each.get("quality", {}).get("runs", [])}


def keep(found: dict[tuple, dict], file: Path) -> None:
    """Add to the file, which is read anew: another command may have added to it."""
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    about = {"machine": common.machine(), "command": "python -m benchmarks.quality"}
    content["quality"] = {**about, "runs": [*(kept([file]) | found).values()]}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def number_of(labels: str | int) -> float:
    return math.inf if labels == "all" else int(labels)


def grouped(runs: Sequence[dict]) -> dict[tuple, list[dict]]:
    """Return (data, labels, method, flags) → its seeds, in the order of the table."""
    found: dict[tuple, list[dict]] = {}
    orders = {"data": ALL.index, "labels": number_of, "method": [*METHODS].index}
    by_seed = sorted(runs, key=lambda entry: entry["seed"])
    for entry in sorted(by_seed, key=lambda entry: [order(entry[name]) for name, order in orders.items()]):
        found.setdefault(key(entry)[:-1], []).append(entry)
    return found


def words(parts: list[dict]) -> str:
    """Return the text for the page: a column for each number of labels."""
    groups = grouped([entry for entry in parts[0]["runs"] if entry["data"] in DATA])
    columns = sorted({labels for _, labels, *_ in groups}, key=number_of)
    lines: dict[tuple, dict] = {(data, way): {} for data, *_ in groups for way in (*WAYS, "seconds")}
    most: dict[str, int] = {}
    for (data, labels, method, flags), entries in groups.items():
        name = f"{NAMES[method]} {flags}".strip()
        most[data] = max([most.get(data, 0), *(each["train"] for each in entries)])
        for way in WAYS:
            for figure, what in {"right": name, "expected": f"{name}: conf expects"}.items():
                if all(figure in each for each in entries):
                    cells = lines[data, way].setdefault(what, {})
                    cells[labels] = spread([each[figure][way] for each in entries])
        seconds = f"{min(each['seconds'] for each in entries):.0f}"
        lines[data, "seconds"].setdefault(name, {})[labels] = seconds
    rows = [
        [f"{data}, {most[data]:,}", WAYS.get(way, way), name, *(cells.get(x, "") for x in columns)]
        for (data, way), names in lines.items()
        for name, cells in names.items()
    ]
    heads = ["register, all labels", "", "", *(x if x == "all" else f"{x:,}" for x in columns)]
    return f"{TEXT}{parts[0].get('note', '')}\n\n{table(heads, rows)}"


def words_of_tables(parts: list[dict]) -> str:
    """Return the text for the page on TABLES."""
    lines = []
    runs = [entry for entry in parts[0]["runs"] if entry["data"] in TABLES]
    for (data, _, method, _), entries in grouped(runs).items():
        first = entries[0]
        figures = [[each["right"][part] for each in entries] for part in ("0", "rows")]
        figures.append([each.get("expected", {}).get("rows") for each in entries])
        cells = [data, f"{first['train']:,}", NAMES[method], f"{first['seconds']:.0f}"]
        lines.append([*cells, *("" if None in each else spread(each) for each in figures)])
    heads = ["", "rows", "", "seconds", "right", "of rows", "conf expects"]
    return f"{TEXT_OF_TABLES}{parts[0].get('note', '')}\n\n{table(heads, lines)}"


def draw(part: dict, path: Path) -> None:
    """Draw accuracy by labels, a panel for each register, and below by seconds."""
    groups = grouped(part["runs"])
    registers = [*dict.fromkeys(data for data, *_ in groups)]

    def fill(panels: Sequence) -> None:
        for place, axes in enumerate(panels):
            name, by_labels = registers[place % len(registers)], place < len(registers)
            lines: dict[tuple, list] = {}
            for (data, _, method, flags), entries in groups.items():
                x = min(each["train" if by_labels else "seconds"] for each in entries)
                for way in WAYS if data == name else ():
                    y = 100 * mean(each["right"][way] for each in entries)
                    lines.setdefault((way, method, flags), []).append((x, y))
            for (way, method, _), points in lines.items():
                label = NAMES[method] + (", one letter changed" if way == "1" else "")
                style = f"C{[*METHODS].index(method)}.{':' if way == '1' else '-'}"
                axes.plot(*zip(*points), style, label=label)
            axes.set(
                xscale="log", xlabel="labels" if by_labels else "seconds", title=name if by_labels else ""
            )
            common.plain_ticks(axes.xaxis)
            axes.tick_params(axis="x", labelrotation=30, labelsize=7)
            axes.set(ylabel="" if place % len(registers) else "% of texts right")
            axes.grid(alpha=0.3)
        shown = [axes.get_legend_handles_labels() for axes in panels]  # a register may lack a method
        by_label = {label: line for lines, labels in shown for line, label in zip(lines, labels)}
        legend = {"loc": "outside lower center", "ncols": 3, "fontsize": 8}
        panels[0].figure.legend(by_label.values(), by_label.keys(), **legend)

    common.draw(path, len(registers), fill, rows=2)


def main() -> None:
    there = [name for name in METHODS if importlib.util.find_spec(PACKAGES.get(name, "histocc"))]
    parser = arguments(__doc__)
    parser.add_argument("--data", nargs="+", default=[*REGISTERS], choices=ALL)
    labels = {"type": lambda text: math.inf if text == "all" else int(text), "metavar": "N|all"}
    parser.add_argument(
        "--labels", nargs="+", default=[300, 1_000, 2_000, 10_000, 30_000, math.inf], **labels
    )
    parser.add_argument("--methods", nargs="*", default=there, choices=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], choices=range(9))
    parser.add_argument("--threads", type=int, default=2, help="of ours")
    parser.add_argument("--flags", action="append", metavar="TEXT", help="of finetune.py; several compare")
    parser.add_argument("--results", nargs="+", type=Path, default=[], metavar="FILE.json")
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    found = kept(args.results)
    if found:
        keep(found, args.results[0])
    for name in args.data if args.methods else ():
        if name in FILES and not FILES[name].exists():
            print(f"{name} left out: {FILES[name].name} is not there")
            continue
        for entry in (of_table if name in TABLES else measured)(name, args):
            print(entry, flush=True)
            found[key(entry)] = entry
            if args.results and name in DATA:
                keep({key(entry): entry}, args.results[0])
    part = {"runs": [*found.values()]}
    if args.picture:
        draw(part, args.picture)
    texts = [words([part])] * any(entry["data"] in DATA for entry in found.values())
    texts += [words_of_tables([part])] * any(entry["data"] in TABLES for entry in found.values())
    finish(part, "\n\n".join(texts))


if __name__ == "__main__":
    main()
