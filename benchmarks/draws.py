"""Whether analyses of draws (`predict --draws`) hold the truth, beside those of single codes:

    python -m benchmarks.draws                                   # about half an hour on two cores
    python -m benchmarks.draws --registers english --splits 2 --repetitions 100

Each split holds out 3,000 rows of a register, with all rows of their texts, and codes them by a default run
on 2,000 labels of others, or by the built-in model without labels. A repetition draws --rows of them with
replacement and analyses these with 20 draws, pooled by Rubin's rules. Truth is the same analysis of all 3,000
rows with their true codes; an interval of 95 % should hold it in about 95 % of the repetitions. Simulated are
x, which depends on the true HISCAM (the score is the outcome), and y = HISCAM + noise (it is a regressor).
"""

import random
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from histocc.formatter import hisco_classes
from histocc.predict.coder import Coder
from histocc.predict.draws import Draws
from histocc.published import models

from .common import COLUMNS, REGISTERS, arguments, finish, read_csv, run, table, write_csv

HELD_OUT, LABELS, DRAWS, SEEDS = 3_000, 2_000, 20, 10
CLASS = "3"  # of HISCLASS-5, the most frequent one


def pooled(figures: Iterable[Any]) -> np.ndarray:
    """Return (estimate, half the width of its interval) of estimates and variances, by Rubin's rules."""
    q, u = np.array(list(figures)).T
    between = (1 + 1 / len(q)) * q.var(ddof=min(len(q) - 1, 1))
    freedom = max(len(q) - 1, 1) * (1 + u.mean() / max(between, 1e-12)) ** 2
    return np.array([q.mean(), (1.96 + 2.4 / freedom) * (u.mean() + between) ** 0.5])


def mean(values: np.ndarray) -> tuple[Any, Any]:
    values = values[~np.isnan(values)]
    return values.mean(), values.var(ddof=1) / len(values)


def slope(y: np.ndarray, x: np.ndarray) -> tuple[Any, Any]:
    there = ~(np.isnan(x) | np.isnan(y))
    y, x = y[there] - y[there].mean(), x[there] - x[there].mean()
    found = (x @ y) / (x @ x)
    return found, ((y - found * x) ** 2).sum() / (len(x) - 2) / (x @ x)


def split(path: Any, folder: str, seed: int) -> tuple[list[dict], str]:
    """Return rows that are held out, and a file of labels of other texts."""
    rows, draw = read_csv(path), random.Random(seed)
    draw.shuffle(rows)
    texts = list(dict.fromkeys(row["occ1"].casefold() for row in rows))
    draw.shuffle(texts)
    place = {text: i for i, text in enumerate(texts)}
    rows.sort(key=lambda row: place[row["occ1"].casefold()])
    held, last = rows[:HELD_OUT], rows[HELD_OUT - 1]["occ1"].casefold()
    labels = draw.sample([row for row in rows[HELD_OUT:] if row["occ1"].casefold() != last], LABELS)
    names = ["occ1", "lang", "hisco_1"]
    return held, write_csv(f"{folder}/labels{seed}.csv", names, ([row[x] for x in names] for row in labels))


def repeated(model: str, held: list[dict], rows: int, number: int, draw: np.random.Generator) -> Iterator:
    """Yield (analysis, its codes, truth, (estimate, half width)) of repetitions with a model."""
    coder = Coder.load(models.find_weights(model, model))
    pairs = [(coder.clean(row["occ1"]), coder.known(row["lang"])) for row in held]
    distinct = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
    at = np.array([distinct[pair] for pair in pairs])
    texts, languages = map(list, zip(*distinct))
    coded, cells = coder.code(texts, languages, cleaned=True), []
    for seed in range(SEEDS):
        every = Draws(coder, model, coder.best_decoder, DRAWS, [], seed).cells(texts, languages, coded)
        cells.append(np.array([row or [""] * (DRAWS + 1) for row in every], dtype=object)[at])
    true = np.array([coder.formatter.repair(row["hisco_1"])[0] for row in held], dtype=object)
    best = np.array([one.codes[0] if one.codes else "" for one in coded], dtype=object)[at]
    of_code, most = hisco_classes(), max(true, key=list(true).count)
    values = {
        f"share of HISCLASS-5 {CLASS}": lambda code: of_code["hisclass_5"].get(code) == CLASS,
        "share of the most frequent code": lambda code: code == most,
        "mean HISCAM": lambda code: float(of_code["hiscam"].get(code.partition("&")[0]) or "nan"),
    }
    scored = {}
    for name, value in values.items():
        value = np.vectorize(value, otypes=[float])
        scored[name] = value(true), value(best), [value(each[:, :DRAWS]) for each in cells]
    score, single, drawn = scored["mean HISCAM"]
    expected = np.array([float(cell or "nan") for cell in cells[0][:, DRAWS]])
    for _ in range(number):
        i, seed = draw.integers(len(held), size=rows), draw.integers(SEEDS)
        for name, (of_true, of_best, of_draws) in scored.items():
            yield name, "single codes", mean(of_true)[0], pooled([mean(of_best[i])])
            yield name, "draws", mean(of_true)[0], pooled(mean(column) for column in of_draws[seed][i].T)
        few, guess, noise = drawn[seed][i].T, expected[i], draw.standard_normal((2, len(held)))
        told = np.nanvar(guess) / np.nanvar(few, axis=1).mean()
        x, y = np.nan_to_num(score - np.nanmean(score)) / 25 + noise[0], score + 12 * noise[1]
        name, truth, of_draws = "HISCAM on x", slope(score, x)[0], pooled(slope(each, x[i]) for each in few)
        yield name, "single codes", truth, pooled([slope(single[i], x[i])])
        yield name, "draws", truth, of_draws
        yield name, "draws, divided by λ", truth, of_draws / told
        yield name, "expected, divided by λ", truth, pooled([slope(guess, x[i])]) / told
        name, truth = "y on HISCAM", slope(y, score)[0]
        yield name, "single codes", truth, pooled([slope(y[i], single[i])])
        yield name, "draws", truth, pooled(slope(y[i], each) for each in few)
        yield name, "expected", truth, pooled([slope(y[i], guess)])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--registers", nargs="+", default=list(REGISTERS), choices=REGISTERS)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=1_000)
    parser.add_argument("--rows", type=int, default=1_000)
    parser.add_argument(
        "--prior", default="built-in", help="the model without labels, and prior of the others"
    )
    args = parser.parse_args()
    found, draw = {}, np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, seed in ((name, seed) for name in args.registers for seed in range(args.splits)):
            held, labels = split(REGISTERS[name], folder, seed)
            flags = f"--target-cols hisco_1 {COLUMNS} --device cpu --prior {args.prior}"
            run(f"finetune.py --dataset {labels} {flags} --save-path {folder}/{name}{seed}")
            for way, model in {"2,000 labels": f"{folder}/{name}{seed}", "built-in": args.prior}.items():
                number = args.repetitions // args.splits
                for *key, true, (estimate, half) in repeated(model, held, args.rows, number, draw):
                    figures = true, estimate, 100 * (abs(estimate - true) <= half)
                    found.setdefault((f"{name}, {way}", *key), []).append(figures)
    means = {key: np.mean(figures, axis=0) for key, figures in found.items()}
    lines = [[*key, *(f"{x:.{n}f}" for x, n in zip(figures, (3, 3, 0)))] for key, figures in means.items()]
    finish({"lines": lines}, table(("model", "analysis", "by", "true", "estimated", "holds, %"), lines))


if __name__ == "__main__":
    main()
