"""What training from scratch reaches, and in what time, beside a linear support vector machine and fastText:
accuracy on held-out texts by the number of rows to train on.

    python -m benchmarks.quality --noise --results quality.json     # all registers, methods and sizes
    python -m benchmarks.quality --data english --rows all --methods ours --seeds 1
    python -m benchmarks.quality --methods ours --flags="" --flags="--ngram-passes 20"        # compares both
    python -m benchmarks.quality --methods ours --size base --flags="--device cuda --use-amp"     # on a GPU
    python -m benchmarks.quality --methods --results a.json b.json --picture both.png     # measures nothing
    python -m benchmarks.quality --data ammo diary diary_rows diary_shop kldb esco   # other classifications

Seed N holds out tenth N of the texts by their hash (a row is on the side of its text), the same for all
sizes, which are beginnings of each other; by tenth 0 (and 4, 5 and 6 of the English ones) settings of the fit
were chosen. Right is a text whose whole set of codes is answered; a distinct text counts once.

ours: last.bin of finetune.py, --size ngrams, on one process, from its start to the saved model, without the
titles of histocc's lists, which the others lack. A ninth as many held-out rows as it trains on are its
validation rows, which decide what `auto` is (flat, if they have fewer than 200 distinct texts).
svm: that of `histocc.evaluate --baseline`; in seconds of fitting and answering.
fasttext: supervised, as in FASTTEXT, which was chosen by a few tries on an 80/20 split; if rows have several
codes, each against all others (ova), and those above 0.5 are answered. Both have one thread.

The held-out texts count as written and in capitals; --noise also counts them with one and with two random
letters replaced. --results: what was measured before stays in the first file unless the same is measured
again; table and picture are of all files. benchmarks/results.json may be one: `python -m benchmarks` then
writes docs/benchmarks.md with it.

TABLES of other classifications: seed N draws the tenth of the distinct texts that is held out. ours is the
command without further flags. Held-out rows count, too; seconds are those of one core.
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

from histocc.data.arrays import PreparedData, RowSet
from histocc.data.split import split_values
from histocc.evaluate import baseline
from histocc.job.confidence import MAX_CODES
from histocc.predict.coder import Coder
from histocc.runtime.world import World
from histocc.text import join_columns

from . import common
from .common import COLUMNS, REGISTERS, arguments, data_flags, finish, run, spread, table, write_csv

DECODERS = {"seq2seq": "greedy", "linear": "flat", "both": "both"}
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
CHANGED = {"0": "right", "capitals": "in capitals", "1": "one letter changed", "2": "two letters"}
CHANGED |= {"rows": "of rows"}  # of TABLES
FASTTEXT = {"minn": 2, "maxn": 5, "wordNgrams": 2, "dim": 100, "lr": 1.0, "epoch": 50, "bucket": 200_000}
TEXT = """![Accuracy by rows and by seconds](benchmarks_quality.png)

% of distinct held-out texts whose whole set of codes is right, mean and half the range over seeds, each with
another tenth; rows and seconds of the first. histocc: n-grams alone, by `auto`; then its decoders."""
TEXT_OF_TABLES = """% of distinct held-out texts, and of their rows, whose code is right, mean and half the
range over seeds, each with another tenth of the texts; rows and seconds of one core of the first. histocc:
the command without further flags, which sets a tenth of these rows aside for validation; the SVM learns from
all. ammo: Finnish and English occupations, HISCO. diary: French expenses, COICOP; diary_rows: rows are held
out instead of texts; diary_shop: these, with the column of the shop. kldb: German titles, KldB 2010. esco:
Bulgarian, French, Greek, Swedish, ISCO-08."""
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
        return found.fewer(len(found.train), folder)

    def write(self, path: str, rows: Sequence[Row]) -> str:
        header, blanks = ["occ1", "lang", *self.columns], [""] * len(self.columns)
        lines = ([row.text, row.language, *row.codes, *blanks][: len(header)] for row in rows)
        return write_csv(path, header, lines)

    def fewer(self, number: int, folder: str) -> "DataSet":
        """Return the same held-out rows, and `number` of the training rows."""
        os.makedirs(f"{folder}/data")
        self.write(f"{folder}/data/train.csv", self.train[:number])
        self.write(f"{folder}/data/val.csv", self.val)
        flags = f"--dataset {folder}/data --target-cols {' '.join(self.columns)} {COLUMNS}"
        return self._replace(flags=flags, train=self.train[:number])

    def parts(self, noise: bool = False) -> dict[str, list[Row]]:
        """Return held-out rows to count: as written, in capitals, by the number of changed letters."""
        parts = {"0": self.val, "capitals": [row._replace(text=row.text.upper()) for row in self.val]}
        for number in (1, 2) if noise else ():
            texts = changed(self.val, number)
            parts[str(number)] = [row._replace(text=text) for row, text in zip(self.val, texts)]
        return parts


def rows_of(rows: RowSet, data: PreparedData) -> list[Row]:
    """Return prepared rows, in the order of a hash of their texts."""
    index = np.argsort(np.asarray(rows.text_hash), kind="stable")
    codes = [tuple(data.codes[code] for code in row if code >= 0) for row in rows.codes[index].tolist()]
    languages = [data.languages[number] for number in rows.language[index].tolist()]
    return list(map(Row, rows.strings(index), languages, codes))


def changed(rows: Sequence[Row], number: int) -> list[str]:
    """Return each text with so many random letters, at most all, replaced by others that the texts hold.
    Equal texts change alike.
    """
    letters = sorted({letter for row in rows for letter in row.text if letter.isalpha()})

    def with_others(text: str) -> str:
        draw, places = random.Random(f"{number} {text}"), [i for i, x in enumerate(text) if x.isalpha()]
        found = list(text)
        for place in draw.sample(places, min(number, len(places))):
            found[place] = draw.choice([each for each in letters if each != text[place]] or letters)
        return "".join(found)

    return [with_others(row.text) for row in rows]


def right(answers: Answers, rows: Sequence[Row]) -> float:
    """Return the share of the distinct texts whose whole set of codes is answered; a text with several rows
    counts by the mean over its rows.
    """
    texts: dict[str, list[bool]] = {}
    for answer, row in zip(answers, rows, strict=True):
        texts.setdefault(row.text, []).append({*answer} == {*row.codes})
    return mean(map(mean, texts.values()))


# ---- the methods


def of_model(path: str, parts: dict[str, list[Row]], world: World | None = None) -> dict:
    """Return the shares of right texts by the decoder that `auto` takes and by each of a checkpoint."""
    coder, found = Coder.load(path, world), {}
    for name, decoder in DECODERS.items():
        for part, rows in parts.items():
            texts, languages = [row.text for row in rows], [row.language for row in rows]
            answers: Answers = [each.codes for each in coder.code(texts, languages, decoder, MAX_CODES)]
            found.setdefault(name, {})[part] = right(answers, rows)
    auto = {decoder: name for name, decoder in DECODERS.items()}[coder.best_decoder]
    return {"right": found[auto], "auto": auto, "decoders": found}


def ours(data: DataSet, parts: dict[str, list[Row]], flags: str, seed: int, threads: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        line = f"{data.flags} --device cpu --lexicon none {flags} --seed {seed} --save-path {folder}/run"
        started, world = time.perf_counter(), World(device=common.device_of(line))
        run(f"finetune.py {line}", threads)
        return {"seconds": time.perf_counter() - started, **of_model(f"{folder}/run/last.bin", parts, world)}


def texts_of(rows: Sequence[Row], data: DataSet) -> list[str]:
    """Return the texts, with their languages in front if the training rows have several."""
    several = len({row.language for row in data.train}) > 1
    return [f"{row.language} {row.text}" if several else row.text for row in rows]


def svm(data: DataSet, parts: dict[str, list[Row]], *_) -> dict:
    started, asked = time.perf_counter(), [row for rows in parts.values() for row in rows]
    known = texts_of(data.train, data), [frozenset(row.codes) for row in data.train]
    answers = iter(baseline.svm(*known, texts_of(asked, data)))
    found = {part: right([next(answers) for _ in rows], rows) for part, rows in parts.items()}
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
    for part, rows in parts.items():
        answers = zip(*model.predict(lines_of(rows), k=5))  # (codes, probabilities), the best ones first
        taken = ([code for i, code in enumerate(x) if i == 0 or several and p[i] > 0.5] for x, p in answers)
        found[part] = right([[code.removeprefix(LABEL) for code in codes] for codes in taken], rows)
    return {"seconds": seconds, "right": found}


METHODS = {"ours": ours, "svm": svm, "fasttext": fasttext}


def measured(name: str, args) -> Iterator[dict]:
    of_ours = [f"--model-size {args.size} {flags}".strip() for flags in args.flags or [""]]
    ways = [("ours", flags) for flags in of_ours] + [("svm", ""), ("fasttext", "")]
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            whole = DataSet.of(data_flags(name, folder, SAMPLE_ROWS), f"{folder}/whole", seed)
            parts, texts = whole.parts(args.noise), len({row.text for row in whole.val})
            for number in sorted({int(min(number, len(whole.train))) for number in args.rows}):
                validated = whole._replace(val=whole.val[: number // 9 + 1])
                data = validated.fewer(number, f"{folder}/rows_{number}")
                for method, flags in (way for way in ways if way[0] in args.methods):
                    entry = {"data": name, "rows": "all" if number == len(whole.train) else number}
                    entry |= {"method": method, "flags": flags, "seed": seed, "train": number, "texts": texts}
                    yield entry | METHODS[method](data, parts, flags, seed, args.threads)


# ---- tables of other classifications


def default_command(train: list[dict], val: list[dict], code: str, flags: str) -> Answers:
    """Return the codes of rows by a model of finetune.py without further flags."""
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in {"train": train, "val": val}.items():
            write_csv(f"{folder}/{name}.csv", [*rows[0]], (list(row.values()) for row in rows))
        model, files = f"{folder}/run", f"--input {folder}/val.csv --output {folder}/coded.csv"
        run(f"finetune.py --dataset {folder}/train.csv {flags} --target-cols {code} --save-path {model}", 1)
        run(f"-m histocc.predict --model {model} {files} {flags} --system coded", 1)
        return [{row["coded_1"]} for row in common.read_csv(f"{folder}/coded.csv")]


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
            started = sum(os.times()[:4])
            if method == "ours":
                answers = default_command(train, val, code, flags)
            else:
                codes = [frozenset([row[code]]) for row in train]
                answers = [*baseline.svm(joined(train), codes, joined(val))]
            entry = {"data": name, "rows": "all", "method": method, "flags": "", "seed": seed}
            entry |= {"train": len(train), "seconds": sum(os.times()[:4]) - started}
            rows = mean(each == {row[code]} for each, row in zip(answers, val, strict=True))
            asked = [Row(row["text"], "", (row[code],)) for row in val]
            yield entry | {"right": {"0": right(answers, asked), "rows": rows}}


# ---- results


def key(entry: dict) -> tuple:
    return tuple(entry[name] for name in ("data", "rows", "method", "flags", "seed"))


def kept(files: Sequence[Path]) -> dict[tuple, dict]:
    """Return earlier results, in files of the form of results.json; by `key`, the later file's."""
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    return {key(entry): entry for each in contents for entry in each.get("quality", {}).get("runs", [])}


def keep(found: dict[tuple, dict], file: Path) -> None:
    """Add to the file, which is read anew: another command may have added to it."""
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    about = {"machine": common.machine(), "command": "python -m benchmarks.quality --noise"}
    content["quality"] = {**about, "runs": [*(kept([file]) | found).values()]}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def grouped(part: dict) -> dict[tuple, list[dict]]:
    """Return (data, rows, method, flags) → its seeds, in the order of the table."""
    found: dict[tuple, list[dict]] = {}
    orders = {"data": ALL.index, "rows": lambda x: math.inf if x == "all" else x, "method": [*METHODS].index}
    by_seed = sorted(part["runs"], key=lambda entry: entry["seed"])
    for entry in sorted(by_seed, key=lambda entry: [order(entry[name]) for name, order in orders.items()]):
        found.setdefault(key(entry)[:-1], []).append(entry)
    return found


def words(parts: list[dict]) -> str:
    """Return the text for the page."""
    has_tables = any(entry["data"] in TABLES for entry in parts[0]["runs"])
    lines, text = [], TEXT_OF_TABLES if has_tables else TEXT
    decoders = [name for name in DECODERS if any("decoders" in entry for entry in parts[0]["runs"])]
    shown = [part for part in CHANGED if any(part in entry["right"] for entry in parts[0]["runs"])]
    for (data, _, method, flags), entries in grouped(parts[0]).items():
        name = f"{NAMES[method]} {flags.removeprefix('--model-size ngrams').strip()}".strip()
        cells = [data, f"{entries[0]['train']:,}", name, f"{entries[0]['seconds']:.0f}"]
        figures = [[each["right"].get(part) for each in entries] for part in shown]
        figures += [[each.get("decoders", {}).get(x, {}).get("0") for each in entries] for x in decoders]
        lines.append([*cells, *("" if None in each else spread(each) for each in figures)])
    heads = ["", "rows", "", "seconds", *map(CHANGED.get, shown), *decoders]
    return f"{text}{parts[0].get('note', '')}\n\n{table(heads, lines)}"


def draw(part: dict, path: Path) -> None:
    """Draw accuracy by rows, a panel for each register, and below by seconds."""
    groups = grouped(part)
    registers = [*dict.fromkeys(data for data, *_ in groups)]

    def fill(panels: Sequence) -> None:
        for place, axes in enumerate(panels):
            name, by_rows = registers[place % len(registers)], place < len(registers)
            lines: dict[tuple, list] = {}
            for (data, _, method, flags), entries in groups.items():
                x = entries[0]["train" if by_rows else "seconds"]
                for part in {"0", "1"} & {*entries[0]["right"]} if data == name else ():
                    y = 100 * mean(each["right"][part] for each in entries)
                    lines.setdefault((part, method, flags), []).append((x, y))
            for (part, method, _), points in lines.items():
                label = NAMES[method] + (", one letter changed" if part == "1" else "")
                style = f"C{[*METHODS].index(method)}.{':' if part == '1' else '-'}"
                axes.plot(*zip(*points), style, label=label)
            axes.set(xscale="log", xlabel="rows" if by_rows else "seconds", title=name if by_rows else "")
            common.plain_ticks(axes.xaxis)
            axes.set(ylabel="" if place % len(registers) else "% of texts right")
            axes.grid(alpha=0.3)
        handles = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(*handles, loc="outside lower center", ncols=6, fontsize=8)

    common.draw(path, len(registers), fill, rows=2)


def main() -> None:
    there = [name for name in METHODS if importlib.util.find_spec(PACKAGES.get(name, "histocc"))]
    parser = arguments(__doc__)
    parser.add_argument("--data", nargs="+", default=DATA, choices=ALL)
    rows = {"type": lambda text: math.inf if text == "all" else int(text), "metavar": "N|all"}
    parser.add_argument("--rows", nargs="+", default=[2_000, 10_000, 30_000, math.inf], **rows)
    parser.add_argument("--methods", nargs="*", default=there, choices=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], choices=range(9))
    parser.add_argument("--size", default="ngrams", choices=("ngrams", "tiny", "small", "base"))
    parser.add_argument("--threads", type=int, default=2, help="of ours")
    parser.add_argument("--flags", action="append", metavar="TEXT", help="of finetune.py; several compare")
    parser.add_argument("--noise", action="store_true")
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
    finish(part, words([part]))


if __name__ == "__main__":
    main()
