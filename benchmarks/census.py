"""How long a census takes on this machine: 18 million rows, from measured rates; and a register coded from
end to end, killed twice on the way.

    python -m benchmarks.census                                    # tiny and small, greedy; the register
    python -m benchmarks.census --sizes base --register 0 --rounds 1 --texts 8192

Rates are those of `python -m histocc.predict` on distinct texts of the sample, with a model that was trained
on the sample until it stops after a code; the median of --rounds, in which all cases take turns. "one core"
is --processes 1 and one thread, "all cores" has no such flags. Hours are the distinct texts of the census
divided by that rate, and all its rows by the rate at which rows with known codes are read and written.

The register has rows whose texts follow a Zipf law: the text of rank r occurs in proportion to 1 / r^0.81, as
in the real rows. It is coded once, and once more by a command that is killed (SIGKILL, with all its
processes) after a third and after two thirds of the time, and given again; the outputs must be equal.
"""

import filecmp
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from . import common
from .coding import code, coding
from .common import REPO, arguments, command, finish, read_csv, run, table, write_csv, write_sample

CENSUS, SHARES = 18_000_000, (1.0, 0.38, 0.10)
STEPS, BATCH = {"tiny": 200, "small": 200, "base": 60}, {"tiny": 64, "small": 64, "base": 16}
FORMATS = {"float32": "float32", "int8": "int8"}
WAYS = {"one core": ("--processes 1", 1), "all cores": ("", None)}
ZIPF = 0.81


def distinct_texts(number: int, folder: str) -> list[tuple[str, str]]:
    """Return (text, language) of the sample; if it has no more that differ, with a number behind."""
    sample = read_csv(write_sample(f"{folder}/sample_{number}.csv", 4 * number))
    texts = list(dict.fromkeys((row["occ1"], row["lang"]) for row in sample))[:number]
    more = (texts[i % len(texts)] for i in range(number - len(texts)))
    return texts + [(f"{text} {i}", language) for i, (text, language) in enumerate(more)]


def write_register(path: str, number: int, share: float, folder: str) -> str:
    texts = distinct_texts(round(share * number), folder)
    chances = np.arange(1, len(texts) + 1) ** -ZIPF
    drawn = np.random.default_rng(1).choice(len(texts), number - len(texts), p=chances / chances.sum())
    rows = texts + [texts[i] for i in drawn.tolist()]  # each text at least once
    random.Random(1).shuffle(rows)
    return write_csv(path, ("occ1", "lang"), rows)


def rates(args, folder: str, size: str, model: str) -> dict[str, dict[str, float]]:
    """Return number format → "one core", "all cores" → distinct texts per second."""
    number = args.texts if size != "base" else max(1024, args.texts // 8)
    numbers = {"one core": number, "all cores": max(number, 4096 * (os.cpu_count() or 1))}
    sources = {}
    for way, number in numbers.items():
        sources[way] = write_csv(f"{folder}/{way}.csv", ("occ1", "lang"), distinct_texts(number, folder))
    measured: dict[tuple[str, str], list[float]] = {(name, way): [] for name in args.formats for way in WAYS}
    for _ in range(args.rounds):
        for (name, way), each in measured.items():
            more, threads = WAYS[way]
            format = "" if name == "float32" else f"--{name}"
            flags = f"--decoder greedy {format} {more}"
            each.append(code(model, sources[way], flags, threads)["rows_per_sec"])
    return {name: {way: statistics.median(measured[name, way]) for way in WAYS} for name in args.formats}


def killed_twice(args, folder: str, model: str) -> dict:
    """Measure a register coded at once, and by a command that is killed twice."""
    source = write_register(f"{folder}/register.csv", args.register, args.distinct, folder)
    one, other = f"{folder}/one.csv", f"{folder}/other.csv"
    started = time.perf_counter()
    run(coding(model, source, one, "--decoder greedy --quiet"))
    seconds, resumed = time.perf_counter() - started, 0
    for share in (1 / 3, 1 / 3, None):
        line = command(coding(model, source, other, "--decoder greedy --quiet"))
        piped = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        process = subprocess.Popen(line, cwd=REPO, env=common.environment(), **piped)
        if share is not None:
            time.sleep(share * seconds)
            assert process.poll() is None, "it has ended before it was killed"
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has forked
        resumed += "resuming" in process.communicate()[0]
    equal = filecmp.cmp(one, other, shallow=False)
    found = {"rows": args.register, "seconds": seconds, "rows_per_sec": args.register / seconds}
    return {**found, "equal": equal, "resumed": resumed}


def words(parts: list[dict]) -> str:
    """Return the text for the page."""
    part = parts[0]
    by_size = {size: (formats, each) for each in parts for size, formats in each["rates"].items()}
    measured = [each for formats, _ in by_size.values() for each in formats.values()]
    gains = [each["all cores"] / each["one core"] for each in measured]
    rows = []
    for size, (formats, each) in by_size.items():
        for form, ways in formats.items():
            for way, rate in ways.items():
                hours = [CENSUS * (share / rate + 1 / each["known_rows_per_sec"]) / 3600 for share in SHARES]
                cells = [f"{hour:.1f} h" for hour in hours]
                rows.append([f"{size}, {FORMATS[form]}, {way}", f"{rate:,.0f}", *cells])
    register = next((each["register"] for each in parts if each["register"]), None)
    above = (
        "Hours for a census of 18 million rows on this machine, digit by digit, by division from measured"
        " rates of `python -m histocc.predict` on distinct texts, for several shares of distinct texts among"
        " the rows: equal texts are coded once, and rows whose text is known are read and written at"
        f" {part['known_rows_per_sec']:,.0f} rows/s. One core is `--processes 1` with one thread; all cores,"
        f" the default, does {min(gains):.2f} to {max(gains):.2f} times as much on its {part['cores']} cores."
    )
    below = ""
    if register is not None:
        below = (
            f"\n\nA register of {register['rows']:,} rows, whose texts follow Zipf's law, was coded at size"
            f" tiny in {register['seconds']:,.0f} s ({register['rows_per_sec']:,.0f} rows/s); killed twice on"
            f" the way and given again, the command resumed {register['resumed']} times, and its output was"
            f" {'the same to the byte' if register['equal'] else 'another one'}."
        )
    heads = ("", "texts/s", *(f"{100 * share:.0f} % distinct" for share in SHARES))
    return f"{above}\n\n{table(heads, rows)}{below}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small"], choices=STEPS)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--texts", type=int, default=16_384, help="of a measurement; of base an eighth")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--register", type=int, default=2_000_000, help="rows; 0: none")
    parser.add_argument("--distinct", type=float, default=0.38, help="share of the register's texts")
    args = parser.parse_args()
    found: dict = {"rates": {}, "register": {}, "cores": len(os.sched_getaffinity(0))}
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            model = common.trained(folder, size, STEPS[size], f"--batch-size {BATCH[size]}")
            if not found["rates"]:
                same = distinct_texts(100, folder) * 4_000
                source = write_csv(Path(folder) / "same.csv", ("occ1", "lang"), same)
                rate = code(model, source, "--decoder flat", None)["rows_per_sec"]
                found["known_rows_per_sec"] = rate
                found["register"] = killed_twice(args, folder, model) if args.register else {}
            found["rates"][size] = rates(args, folder, size, model)
    finish(found, words([found]))


if __name__ == "__main__":
    main()
