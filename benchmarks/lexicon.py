"""What histocc's lists of titles give: accuracy without a label, by size of the lists, and beside few labels.

    python -m benchmarks.lexicon
    python -m benchmarks.lexicon --labels 300 2000 --seeds 1 2 3 --shares
    python -m benchmarks.lexicon --register danish=my.csv       # columns occ1 or text, lang, hisco_1

Without a label: % of rows right, and the mean confidence, of the built-in model, and of models of a share of
its titles. With labels: % of 1,500 held-out distinct texts right, by the default command without
the lists, with them, and with all their codes; mean and half the range over --seeds.
"""

import random
import tempfile
from pathlib import Path

from histocc.data.rows import csv_text
from histocc.formatter import BlockyFormatter
from histocc.lexicon import LANGUAGES
from histocc.predict.coder import Coder
from histocc.sample.built_in import THRESHOLD, tables
from histocc.sample.generate import HEADER

from .common import FOLDER, REGISTERS, arguments, finish, read_csv, run, spread, table

HELD_OUT = 1_500


def rows_of(path: str) -> list[tuple[str, str, str]]:
    """Return (text, language, code) of the rows of a register that are in a language of the lists."""
    repair = BlockyFormatter("hisco", ["hisco_1"]).repair
    return [
        (row.get("occ1") or row["text"], row["lang"], repair(row["hisco_1"])[0])
        for row in read_csv(path)
        if row["lang"] in LANGUAGES
    ]


def judged(
    model: str, rows: list[tuple[str, str, str]], threshold: float | None = None
) -> tuple[float, float]:
    """Return (share of the rows that are right, mean confidence)."""
    texts = list(dict.fromkeys((text, language) for text, language, _ in rows))
    descriptions, languages = map(list, zip(*texts))
    coded = Coder.load(model).code(descriptions, languages, "flat", 5, threshold)
    answers = dict(zip(texts, coded))
    right = [{*answers[text, language].codes} == {code} for text, language, code in rows]
    conf = [answers[text, language].conf or 0.0 for text, language, _ in rows]
    return sum(right) / len(rows), sum(conf) / len(rows)


def trained(folder: Path, more: str) -> str:
    """Train on a folder, with train.csv and maybe val.csv; return the model."""
    flags = f"--formatter hisco --language-col lang --model-size ngrams {more}"
    run(f"finetune.py --dataset {folder} {flags} --save-path {folder / 'run'}", 1)
    return str(folder / "run")


def write(folder: Path, parts: dict[str, list], header: tuple[str, ...] = HEADER) -> Path:
    for name, rows in parts.items():
        (folder / name).write_bytes(csv_text([header, *rows]))
    return folder


def without_labels(shares: list[float], registers: dict[str, list]) -> list[list[str]]:
    lines = []
    for share in shares:
        with tempfile.TemporaryDirectory() as name:
            parts = tables()
            parts["train.csv"] = [
                row for row in parts["train.csv"] if random.Random(str(row)).random() < share
            ]
            model = "built-in"
            if share < 1:
                model = trained(write(Path(name), parts), "--seq2seq-weight 0")
            for language, rows in registers.items():
                right, conf = judged(model, rows, THRESHOLD)
                lines.append([f"{share:.0%}", language, f"{100 * right:.1f}", f"{100 * conf:.1f}"])
    return lines


def with_labels(labels: list[int], seeds: list[int], registers: dict[str, list]) -> list[list[str]]:
    lines = []
    for language, rows in registers.items():
        distinct = list({text.casefold(): (text, of, code) for text, of, code in rows}.values())
        for number in (n for n in labels if HELD_OUT + n <= len(distinct)):
            right: dict[str, list[float]] = {"none": [], "auto": [], "codes": []}
            for seed in seeds:
                drawn = random.Random(seed).sample(distinct, HELD_OUT + number)
                parts = {"train.csv": drawn[HELD_OUT:]}  # the others' codes are not in the key
                for mode, found in right.items():
                    with tempfile.TemporaryDirectory() as name:
                        folder = write(Path(name), parts, ("occ1", "lang", "hisco_1"))
                        found.append(judged(trained(folder, f"--lexicon {mode}"), drawn[:HELD_OUT])[0])
            lines.append([language, f"{number:,}", *map(spread, right.values())])
    return lines


def words(parts: list[dict]) -> str:
    """Return the findings in words."""
    found = parts[0]
    heads = ("titles", "register", "rows right, %", "mean confidence, %")
    without = table(heads, found["without"]) if found["without"] else ""
    heads = ("register", "labels", "alone, % right", "with the lists, % right", "with all codes, % right")
    return f"{without}\n\n{table(heads, found['with']) if found['with'] else ''}".strip()


def main() -> None:
    parser = arguments(__doc__)
    all_registers = REGISTERS | {"ammo, English titles": FOLDER / "other" / "ammo_finnish_hisco.csv"}
    usual = [f"{name}={path}" for name, path in all_registers.items()]
    parser.add_argument("--register", nargs="+", default=usual, metavar="NAME=FILE")
    parser.add_argument("--shares", nargs="*", type=float, default=[0.25, 0.5, 1.0])
    parser.add_argument("--labels", nargs="*", type=int, default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    args = parser.parse_args()
    registers = {name: rows_of(path) for name, path in (item.split("=", 1) for item in args.register)}
    found = {"without": without_labels(args.shares, registers)}
    found["with"] = with_labels(args.labels, args.seeds, registers)
    finish(found, words([found]))


if __name__ == "__main__":
    main()
