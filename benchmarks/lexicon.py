"""What histocc's lists of titles give without a label: accuracy of the built-in model on registers.

    python -m benchmarks.lexicon
    python -m benchmarks.lexicon --shares 1 --register danish=my.csv     # columns occ1 or text, lang, hisco_1

% of rows right, and the mean confidence, of the built-in model, and of models of a share of its titles.
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

from .common import FOLDER, REGISTERS, arguments, finish, read_csv, run, table


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


def trained(folder: Path, parts: dict[str, list]) -> str:
    """Train on files of rows, as the built-in model is trained; return the model."""
    for name, rows in parts.items():
        (folder / name).write_bytes(csv_text([HEADER, *rows]))
    flags = "--formatter hisco --language-col lang --model-size ngrams --prior none"
    run(f"finetune.py --dataset {folder} {flags} --save-path {folder / 'run'}", 1)
    return str(folder / "run")


def measured(shares: list[float], registers: dict[str, list]) -> list[list[str]]:
    lines = []
    for share in shares:
        with tempfile.TemporaryDirectory() as name:
            model, parts = "built-in", tables()
            if share < 1:
                rows = parts["train.csv"]
                parts["train.csv"] = [row for row in rows if random.Random(str(row)).random() < share]
                model = trained(Path(name), parts)
            for register, rows in registers.items():
                right, conf = judged(model, rows, THRESHOLD)
                lines.append([f"{share:.0%}", register, f"{100 * right:.1f}", f"{100 * conf:.1f}"])
    return lines


def words(parts: list[dict]) -> str:
    """Return the findings in words."""
    return table(("titles", "register", "rows right, %", "mean confidence, %"), parts[0]["without"])


def main() -> None:
    parser = arguments(__doc__)
    all_registers = REGISTERS | {"ammo, English titles": FOLDER / "other" / "ammo_finnish_hisco.csv"}
    usual = [f"{name}={path}" for name, path in all_registers.items()]
    parser.add_argument("--register", nargs="+", default=usual, metavar="NAME=FILE")
    parser.add_argument("--shares", nargs="*", type=float, default=[0.25, 0.5, 1.0])
    args = parser.parse_args()
    registers = {name: rows_of(path) for name, path in (item.split("=", 1) for item in args.register)}
    found = {"without": measured(args.shares, registers)}
    finish(found, words([found]))


if __name__ == "__main__":
    main()
