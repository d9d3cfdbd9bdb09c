"""What number formats do to coding: how fast, and how many rows get the codes that they get in float32.

    python -m benchmarks.formats                             # tiny and small; the real rows, or the sample
    python -m benchmarks.formats --sizes base --texts 2000

Models are trained a while on the rows first, so that they write codes and stop. Distinct texts are coded by
`python -m histocc.predict` on one core, formats in turns, medians of --rounds; then codes and confidence of
each text are compared, and rows (not texts) are counted.
"""

import statistics
import tempfile
from collections import Counter

from histocc.runtime.device import has_bfloat16, has_int8

from .coding import code
from .common import REAL, arguments, data_flags, finish, read_csv, table, train, write_csv

NAMES = {"float32": "float32", "bf16": "bfloat16", "int8": "int8"}
DECODERS = {"greedy": "digit by digit", "flat": "linear decoder"}
STEPS, BATCH = {"tiny": 600, "small": 300, "base": 60}, {"tiny": 64, "small": 64, "base": 16}


def measured(model: str, decoder: str, counts: Counter, rounds: int, folder: str) -> dict:
    """Return by format: texts per second, the share of rows with the codes of float32, and how far confidence
    is apart.
    """
    formats = ["float32", *(["bf16"] if has_bfloat16("cpu") else []), *(["int8"] if has_int8() else [])]
    source = write_csv(f"{folder}/texts.csv", ("occ1", "lang"), counts)
    rates: dict[str, list[float]] = {name: [] for name in formats}
    for _ in range(rounds):
        for name in formats:
            flag = "" if name == "float32" else f"--{name}"
            flags = f"--decoder {decoder} {flag} --processes 1 --system coded --overwrite"
            rates[name].append(code(model, source, flags, 1, f"{folder}/{name}.csv")["rows_per_sec"])
    answers = {name: read_csv(f"{folder}/{name}.csv") for name in formats}
    found = {}
    for name, rows in answers.items():
        pairs = list(zip(counts.values(), answers["float32"], rows))
        codes = [column for column in rows[0] if column.startswith("coded_")]
        same = sum(n for n, one, other in pairs if all(one[column] == other[column] for column in codes))
        apart = [abs(float(one["conf"] or 0) - float(other["conf"] or 0)) for _, one, other in pairs]
        found[name] = {"texts_per_sec": statistics.median(rates[name]), "same_rows": same / counts.total()}
        found[name] |= {"conf_mean": statistics.mean(apart), "conf_most": max(apart)}
    return found


def words(parts: list[dict]) -> str:
    """Return the text for the page."""
    formats = {name: each for part in parts for name, each in part["formats"].items()}
    names, rows = list(next(iter(formats.values()))), []
    for name, each in formats.items():
        size, decoder = name.split(", ")
        first, *others = (each[form]["texts_per_sec"] for form in names)
        rates = [f"{first:,.0f}", *(f"{rate:,.0f} ({rate / first:.2f} times)" for rate in others)]
        same = ", ".join(f"{100 * each[form]['same_rows']:.2f} %" for form in names[1:])
        shown = (f"{each[form]['conf_mean']:.4f}, {each[form]['conf_most']:.2f}" for form in names[1:])
        apart = ", ".join(shown)
        codes = ["–", "–"] if size == "base" else [same, apart]
        rows.append([f"{size}: {DECODERS[decoder]}", *rates, *codes])
    heads = ("", *(NAMES[name] for name in names), "same codes", "conf apart: mean, most")
    return (
        "Distinct texts per second of one core by the number format in which a model codes, and the share of"
        f" {parts[0]['rows']:,} register rows that get the codes of float32; the models were trained on such"
        " rows for some minutes, but base for seconds, so that its codes are not worth comparing.\n\n"
    ) + table(heads, rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small"], choices=STEPS)
    parser.add_argument("--texts", type=int, help="so many of the most frequent ones (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict = {"threads": 1, "formats": {}}
    with tempfile.TemporaryDirectory() as folder:
        flags = data_flags("english", folder)
        rows = read_csv(REAL if REAL.exists() else f"{folder}/sample.csv")
        every = Counter((row["occ1"], row["lang"]) for row in rows).most_common(args.texts)
        counts = Counter(dict(every))
        found["rows"] = counts.total()
        for size in args.sizes:
            # n-grams of base take minutes to fit, and are float32 in every format
            more = f"--model-size {size} --batch-size {BATCH[size]}" + " --ngrams none" * (size == "base")
            train(f"{flags} {more}", STEPS[size], f"{folder}/{size}")
            for decoder in DECODERS:
                model = f"{folder}/{size}"
                found["formats"][f"{size}, {decoder}"] = measured(model, decoder, counts, args.rounds, folder)
    finish(found, words([found]))


if __name__ == "__main__":
    main()
