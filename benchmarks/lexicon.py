"""What histocc's lists of titles give without a label: accuracy of the built-in model on registers.

    python -m benchmarks.lexicon
    python -m benchmarks.lexicon --shares 1 --register danish=my.csv     # columns occ1 or text, lang, hisco_1

% of rows right, and the mean confidence, of the built-in model, and of models of a share of its titles.

Then answers of the built-in model at levels, as `predict --level LEVEL --target-accuracy 0.9` gives them:
% of rows answered and % of these wrong; and over all rows % right, the mean confidence, and the expected
calibration error in points over rows and over distinct texts. Rows whose code has no class do not count.

Then pairs of titles of a list, joined by "and", &, /, a comma, + or ;, and the registers: % right, whole
(`--split-texts none`) and split, and of the split answers the share, % right and the mean confidence.
"""

import random
import tempfile
from pathlib import Path

import numpy as np

from histocc.data.rows import csv_text
from histocc.formatter import DEEPEST, BlockyFormatter
from histocc.lexicon import LEXICON_LANGUAGES, titles
from histocc.model.confidence import calibration_error
from histocc.predict.coder import Coder
from histocc.sample.built_in import THRESHOLD, tables
from histocc.sample.generate import HEADER

from .common import FOLDER, REGISTERS, arguments, finish, read_csv, run, table

TARGET = 0.9  # of the answers at levels that shall be right
LEVELS_TEXT = f"""Answers of the built-in model at a level where its confidence is {TARGET} or more (`predict
--level LEVEL --target-accuracy {TARGET}`; auto: at the deepest number of digits). Right, expected and the
calibration error (in points) are of all rows, answered or not."""
AND = dict(zip(LEXICON_LANGUAGES, (" and ", " og ", " och ", " en ", " und ", " et ")))
PAIRS_TEXT = """Pairs of titles of a list, which are not those of the model's training, and the registers,
with one code for a row: % right of texts as a whole, and split as `predict` does it."""


def rows_of(path: str) -> list[tuple[str, str, str]]:
    """Return (text, language, code) of the rows of a register that are in a language of the lists."""
    repair = BlockyFormatter("hisco", ["hisco_1"]).repair
    return [
        (row.get("occ1") or row["text"], row["lang"], repair(row["hisco_1"])[0])
        for row in read_csv(path)
        if row["lang"] in LEXICON_LANGUAGES
    ]


def judged(
    model: str, rows: list[tuple[str, str, str]], threshold: float | None = None
) -> tuple[float, float]:
    """Return (share of the rows that are right, mean confidence)."""
    texts = list(dict.fromkeys((text, language) for text, language, _ in rows))
    descriptions, languages = map(list, zip(*texts))
    coder = Coder.load(model)
    if coder.trained:  # a model of a share of the titles doubts these as the built-in model does
        coder.trained[2].fill(np.nan)
    answers = dict(zip(texts, coder.code(descriptions, languages, "flat", 5, threshold)))
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


def at_levels(model: str, registers: dict[str, list]) -> list[list[str]]:
    """Return a line for each register and level."""
    lines, coder = [], Coder.load(model)
    for register, rows in registers.items():
        numbers = {
            text: i for i, text in enumerate(dict.fromkeys((text, speech) for text, speech, _ in rows))
        }
        texts, languages = map(list, zip(*numbers))
        coded = coder.code(texts, languages, "flat", levels=coder.fitted_levels)
        of_row = np.array([numbers[text, language] for text, language, _ in rows])
        codes = [[code] for *_, code in rows]
        weights = np.ones(len(of_row)), 1 / np.bincount(of_row)[of_row]
        for level in [DEEPEST, *coder.fitted_levels]:
            tried = coder.levels.asked(level)
            places = [coder.fitted_levels.index(name) for name in tried]
            counted, answered, wrong = 0, 0, 0
            for i, true in zip(of_row.tolist(), codes):
                confs = (
                    [coded[i].levels[place] for place in places] if coded[i].levels else [0.0] * len(places)
                )
                answer = coder.levels.answer(coded[i].codes, tried, confs, TARGET)
                at = answer[1] if answer else ""
                is_right = coder.levels.agree(at or tried[-1], coded[i].codes, true)
                counted += is_right is not None
                answered += bool(at) and is_right is not None
                wrong += bool(at) and is_right is False
            cells = [f"{100 * answered / counted:.1f}", f"{100 * wrong / max(answered, 1):.1f}"]
            if level != DEEPEST:
                agree = [coder.levels.agree(level, coded[i].codes, true) for i, true in zip(of_row, codes)]
                known, right = np.array([each is not None for each in agree]), np.array(agree, dtype=bool)
                conf = np.array([coded[i].levels[places[0]] if coded[i].levels else 0.0 for i in of_row])
                cells += [f"{100 * each[known].mean():.1f}" for each in (right, conf)]
                errors = (calibration_error(conf, right, weight * known) for weight in weights)
                cells.append(" / ".join(f"{100 * error:.1f}" for error in errors))
            lines.append([register, level, *cells, *[""] * (5 - len(cells))])
    return lines


def pairs(number: int = 1000, seed: int = 8) -> list[tuple[str, str, set[str]]]:
    """Return (text, language, codes) of pairs of titles with an occupation each, of different codes."""
    draw, found = random.Random(seed), []
    while len(found) < number:
        language = draw.choice(LEXICON_LANGUAGES)
        listed = sorted(titles(language).items())
        (one, first), (two, second) = draw.choice(listed), draw.choice(listed)
        between = draw.choice([AND[language], " & ", " / ", "/", ", ", " + ", "; "])
        if first != second and "-" not in first[0] + second[0]:
            found.append((one + between + two, language, {first, second}))
    return found


def split(model: str, registers: dict[str, list]) -> list[list[str]]:
    """Return a line for the pairs and for each register."""
    lines, coders = [], [Coder.load(model, split_texts=each) for each in (False, True)]
    sets = {name: [(*row[:2], {row[2]}) for row in rows] for name, rows in registers.items()}
    for name, rows in ({"pairs": pairs()} | sets).items():
        texts, languages, true = map(list, zip(*rows))
        whole, coded = (coder.code(texts, languages) for coder in coders)
        right, before = (np.array([{*a.codes} == b for a, b in zip(each, true)]) for each in (coded, whole))
        changed = np.array([a != b for a, b in zip(whole, coded)])
        conf = np.array([one.conf or 0.0 for one in coded])
        of_split = [right[changed].mean(), conf[changed].mean()] if changed.any() else [0.0, 0.0]
        shares = [before.mean(), right.mean(), changed.mean(), *of_split]
        lines.append([name, *(f"{100 * share:.1f}" for share in shares)])
    return lines


def words(parts: list[dict]) -> str:
    """Return the findings in words."""
    text = table(("titles", "register", "rows right, %", "mean confidence, %"), parts[0]["without"])
    if "levels" in parts[0]:
        heads = ("register", "level", "answered, %", "wrong of these, %", "right, %", "expected, %")
        heads = (*heads, "calibration error, rows / texts")
        text += f"\n\n{LEVELS_TEXT}\n\n"
        text += table(heads, parts[0]["levels"])
    if "split" in parts[0]:
        heads = ("texts", "right whole, %", "right split, %", "split, %", "right of these, %", "expected, %")
        text += f"\n\n{PAIRS_TEXT}\n\n{table(heads, parts[0]['split'])}"
    return text


def main() -> None:
    parser = arguments(__doc__)
    all_registers = REGISTERS | {"ammo, English titles": FOLDER / "other" / "ammo_finnish_hisco.csv"}
    usual = [f"{name}={path}" for name, path in all_registers.items()]
    parser.add_argument("--register", nargs="+", default=usual, metavar="NAME=FILE")
    parser.add_argument("--shares", nargs="*", type=float, default=[0.25, 0.5, 1.0])
    parser.add_argument("--model", default="built-in", help="of the answers at levels")
    args = parser.parse_args()
    registers = {name: rows_of(path) for name, path in (item.split("=", 1) for item in args.register)}
    found = {"without": measured(args.shares, registers), "levels": at_levels(args.model, registers)}
    found["split"] = split(args.model, registers)
    finish(found, words([found]))


if __name__ == "__main__":
    main()
