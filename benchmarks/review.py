"""What a person's decisions are worth: accuracy of a coded file against the number of texts decided, where
the texts come in the order of `histocc.review make`, and at random.

    python -m benchmarks.review --model ./output --data held_out.csv --target-cols hisco_1
    python -m benchmarks.review --model a b c --data held_out.csv --target-cols hisco_1 hisco_2 --decoder flat

The data (columns occ1, lang and the codes) have the right codes, which stand for the person; the model was
not trained on them. Random: the mean over 20 orders of the texts. Doubt alone: the least sure texts first,
whatever their rows.
"""

import tempfile

import numpy as np

from histocc.review.sheet import CodedFile, Key, key_of

from .coding import coding
from .common import arguments, finish, read_csv, run, table, write_csv

ORDERS = 20


def curves(file: CodedFile, true: dict[Key, list[set[str]]], decisions: list[int]) -> dict[str, list[float]]:
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


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--target-cols", nargs="+", required=True)
    parser.add_argument("--decoder", default="topk")
    parser.add_argument("--decisions", type=int, nargs="+", default=[0, 50, 100, 200, 300, 500])
    args = parser.parse_args()
    true: dict[Key, list[set[str]]] = {}
    for row in read_csv(args.data):
        codes = {row[column] for column in args.target_cols if row[column]}
        true.setdefault(key_of(row["occ1"], row["lang"]), []).append(codes)
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
