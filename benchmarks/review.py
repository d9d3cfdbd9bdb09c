"""What a person's decisions are worth: accuracy of a coded file against the number of texts decided, where
the texts come in the order of `histocc.review make`, and at random.

    python -m benchmarks.review --model ./output --data held_out.csv --target-cols hisco_1
    python -m benchmarks.review --model a b c --data held_out.csv --target-cols hisco_1 hisco_2 --decoder flat
    python -m benchmarks.review --share 8

The data (columns occ1, lang and the codes) have the right codes, which stand for the person; the model was
not trained on them. Random: the mean over 20 orders of the texts. Doubt alone: the least sure texts first,
whatever their rows.

--share: how far the share that the page says to be right is true, in 60 settings with so many seeds: a model
whose probabilities are at least 0.5 to 0.97 is right in 40 to 95 % of 500 Swedish titles, of which 30 or 150
are decided on. In odd seeds a third of the texts have two occupations. Then a right answer has both codes,
and half of the wrong ones have the first code alone. In half of the seeds all texts have one row.
"""

import functools
import random
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import numpy as np

from histocc.review.learn import Learner
from histocc.review.serve import DRAW_EVERY, MIN_DECISIONS
from histocc.review.sheet import CodedFile, CodedText, Pair, most_wrong_first, pair_of

from .coding import coding
from .common import REGISTERS, arguments, finish, read_csv, run, table, write_csv

ORDERS = 20
TEXTS, LEAST_PROBS, RIGHT = 500, (0.5, 0.7, 0.8, 0.9, 0.97), (0.4, 0.6, 0.7, 0.8, 0.9, 0.95)
GUESSED, MEASURED = (10, 20, 30, 50, 75, 100, 125, 150), (30, 150)  # decisions
FAR = 0.15


def curves(file: CodedFile, true: dict[Pair, list[set[str]]], decisions: list[int]) -> dict[str, list[float]]:
    """Return the rows that are right after each number of decisions, by order. A decision is the most
    frequent set of codes of its text.
    """
    keys = [key for key in file.texts if key in true]
    before, after = np.zeros(len(keys)), np.zeros(len(keys))
    for i, key in enumerate(keys):
        answer, sets = set(file.answer(file.texts[key].codes, "")), true[key]
        best = max(sets, key=sets.count)
        before[i] = sum(bool(answer & each) if file.alternatives else answer == each for each in sets)
        after[i] = max(before[i], sets.count(best))
    texts = [file.texts[key] for key in keys]
    review = sorted(range(len(keys)), key=lambda i: (-texts[i].doubt, -texts[i].rows, texts[i].id))
    doubt = sorted(range(len(keys)), key=lambda i: (-texts[i].doubt / texts[i].rows, texts[i].id))
    draw = np.random.default_rng(1)
    drawn = [draw.permutation(len(keys)).tolist() for _ in range(ORDERS)]
    orders = {"review": [review], "doubt alone": [doubt], "random": drawn}
    found = {}
    for name, each in orders.items():
        gains = [np.concatenate([[0], np.cumsum((after - before)[order])]) for order in each]
        mean = before.sum() + np.mean(gains, axis=0)
        found[name] = [float(mean[min(number, len(keys))]) for number in decisions]
    return found


@functools.cache
def titles() -> list[dict[str, str]]:
    return list({row["occ1"]: row for row in read_csv(REGISTERS["swedish"])}.values())


def coded_texts(least: float, right: float, seed: int) -> list[tuple[CodedText, set[str]]]:
    """Return texts with a model's answers, and their right codes; the most doubtful ones first."""
    draw, found = random.Random(f"{least} {right} {seed}"), []
    pairs = draw.sample(titles(), 2 * TEXTS)
    for one, two in zip(pairs[::2], pairs[1::2]):
        words, true, prob = one["occ1"], [one["hisco_1"]], draw.uniform(least, 1)
        if seed % 2 and draw.random() < 1 / 3:
            words, true = f"{words} och {two['occ1']}", list(dict.fromkeys([*true, two["hisco_1"]]))
        answer = true
        if draw.random() > right:
            answer = true[:1] if len(true) > 1 and draw.random() < 0.5 else [draw.choice(titles())["hisco_1"]]
        rows = min(int(draw.paretovariate(1.1)), 60) if seed % 4 > 1 else 1
        text = CodedText(words, "se", rows, rows * (1 - prob), answer, [f"{prob:.4f}"] * len(answer), answer)
        found.append((text, {*true}))
    place = {text.id: i for i, text in enumerate(most_wrong_first([text for text, _ in found]))}
    return sorted(found, key=lambda each: place[each[0].id])


def shares_right(least: float, right: float, order: str, seed: int) -> dict[int, tuple]:
    """Return (low, share, high) that the page says after each number of decisions, and the true share."""
    texts = coded_texts(least, right, seed)
    learner = Learner([text for text, _ in texts], {code for _, codes in texts for code in codes})
    decided: dict[int, tuple[str, ...]] = {}
    every, found = [*range(len(texts))], {}
    queue = random.Random(seed).sample(every, len(every)) if order == "random" else every
    for number in range(max(MEASURED) + 1):
        if number in (MEASURED if order == "random" else GUESSED):
            guesses = learner.learn(decided)
            queue = queue if order == "random" else [*guesses.order, *every]
            if number in MEASURED:
                is_right = [i in decided or {*learner.answer(guesses, i)} == texts[i][1] for i in every]
                found[number] = *guesses.right, float(learner.rows @ is_right / learner.rows.sum())
        is_draw = order == "page" and number >= MIN_DECISIONS and number % DRAW_EVERY == DRAW_EVERY - 1
        text = next(i for i in (learner.draws if is_draw else queue) if i not in decided)
        decided[text] = tuple(texts[text][1])
    return found


def report_shares(said: dict[tuple, dict[int, tuple]]) -> None:
    """Print how far the shares are true. said: `shares_right` by its arguments."""
    found: dict[tuple, list[tuple]] = {}
    settings: dict[tuple, list[float]] = {}
    for (least, right, order, seed), measured in said.items():
        for number, (low, share, high, true) in measured.items():
            case = low <= true <= high, share - true, (high - low) / 2
            found.setdefault((order, "one or two" if seed % 2 else "one", number), []).append(case)
            settings.setdefault((order, least, right, number), []).append(share - true)
    lines = []
    for name, cases in found.items():
        holds, error, half = np.array(cases, float).T
        figures = [
            holds.mean(),
            error.mean(),
            (error**2).mean() ** 0.5,
            half.mean(),
            (abs(error) > FAR).mean(),
        ]
        lines.append([*name, *(f"{100 * each:.1f}" for each in figures)])
    every = [case for cases in found.values() for case in cases]
    far = {order: 0 for order in ("random", "page")}
    for name, errors in settings.items():
        far[name[0]] += abs(sum(errors) / len(errors)) > FAR
    result = {"runs": len(every), "holds": sum(case[0] for case in every) / len(every), "settings off": far}
    heads = ("order", "occupations", "decisions", "interval holds", "mean error", "root of mean square")
    finish(result, table((*heads, "to each side", "off by more than 15"), lines))


def simulate(seeds: int, processes: int) -> None:
    cases = [*product(LEAST_PROBS, RIGHT, ("random", "page"), range(seeds))]
    with ProcessPoolExecutor(processes) as pool:
        report_shares(dict(zip(cases, pool.map(shares_right, *zip(*cases)))))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", nargs="+")
    parser.add_argument("--data")
    parser.add_argument("--target-cols", nargs="+")
    parser.add_argument("--decoder", default="topk")
    parser.add_argument("--processes", type=int, default=2, help="of --share")
    parser.add_argument("--decisions", type=int, nargs="+", default=[0, 50, 100, 200, 300, 500])
    parser.add_argument(
        "--share", type=int, metavar="SEEDS", help="what the page says to be right, simulated"
    )
    args = parser.parse_args()
    if args.share:
        return simulate(args.share, args.processes)
    true: dict[Pair, list[set[str]]] = {}
    for row in read_csv(args.data):
        codes = {row[column] for column in args.target_cols if row[column]}
        true.setdefault(pair_of(row["occ1"], row["lang"]), []).append(codes)
    found, lines, rows = [], [], sum(map(len, true.values()))
    for model in args.model:
        with tempfile.TemporaryDirectory() as folder:
            texts = ((row["occ1"], row["lang"]) for row in read_csv(args.data))
            source = write_csv(f"{folder}/new.csv", ("occ1", "lang"), texts)
            run(coding(model, source, f"{folder}/coded.csv", f"--decoder {args.decoder} --device cpu"))
            result = curves(CodedFile(f"{folder}/coded.csv", ["occ1"], "lang"), true, args.decisions)
        for name, right in result.items():
            gains = [(b - right[0]) / n for b, n in zip(right[1:], args.decisions[1:])]
            shares = [f"{100 * each / rows:.1f}" for each in right]
            lines.append([model, name, *shares, ", ".join(f"{gain:.2f}" for gain in gains)])
        found.append({"model": model, "rows": rows, "decisions": args.decisions, "right": result})
    heads = ("model", "order", *args.decisions, "rows put right by a decision")
    finish({"models": found}, table(heads, lines))


if __name__ == "__main__":
    main()
