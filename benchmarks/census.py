#!/usr/bin/env python3
"""How long a census takes on this machine: 18 million rows, from measured rates; and a register of some
million rows coded from end to end, killed twice on the way.

    python benchmarks/census.py                                    # tiny and small, greedy; the register
    python benchmarks/census.py --sizes base --register 0
    python benchmarks/census.py --decoder flat --sizes tiny --register 0

Rates are those of `python -m histocc.predict` on distinct texts of the sample, with a model that was trained
on the sample until it stops after a code: texts divided by the seconds of a run on all of them, less those of
a run on a few (start, loading); the median of --rounds, in which all cases take turns. "one core" is
--processes 1 and one thread, "all cores" has no such flags. Hours are the distinct texts of the census
divided by that rate, and all its rows by the rate at which rows whose codes are known already are read and
written.

The register has rows whose texts follow a Zipf law: the text of rank r occurs in proportion to 1 / r^s, at
least once, with as many texts as --distinct says. s is that of the real rows where they are there. It is
coded once, and once more by a command that is killed (SIGKILL, with all its processes) after a third and
after two thirds of the time, and given again; the outputs must be equal.

Prints tables and one JSON line.
"""

import argparse
import contextlib
import csv
import filecmp
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

import numpy as np
from quality import REAL
from search import train

from histocc.data.tables import CHUNK
from histocc.runtime.forked import usable_cores
from histocc.sample.generate import rows

CENSUS, SHARES = 18_000_000, (1.0, 0.38, 0.10)
STEPS, BATCH = {"tiny": 200, "small": 200, "base": 60}, {"tiny": "64", "small": "64", "base": "16"}
FEW = 512  # texts of the run that says what a start takes
ZIPF = 0.81  # of the real rows


def zipf_exponent() -> float:
    """Of the real rows: the slope of log count by log rank over texts that occur more than once."""
    if not REAL.exists():
        return ZIPF
    with open(REAL, encoding="utf-8", newline="") as file:
        counts = np.array(sorted(Counter(row["occ1"] for row in csv.DictReader(file)).values())[::-1])
    often = counts[counts > 1]
    return float(-np.polyfit(np.log(np.arange(1, len(often) + 1)), np.log(often), 1)[0])


def zipf_counts(number: int, texts: int, exponent: float) -> np.ndarray:
    """How often each of `texts` texts occurs in `number` rows, int64 [texts], the most frequent first."""
    shape, low, high = np.arange(1, texts + 1) ** -exponent, 0.0, float(number)
    for _ in range(200):  # the factor with which all rows are used up
        factor = (low + high) / 2
        if np.maximum(1, factor * shape).astype(np.int64).sum() > number:
            high = factor
        else:
            low = factor
    counts = np.maximum(1, low * shape).astype(np.int64)
    counts[0] += number - counts.sum()
    return counts


def distinct_texts(number: int, seed: int = 1) -> list[tuple[str, str]]:
    """(text, language) of the sample's generator; where it has no more that differ, with a number behind."""
    found: dict[tuple[str, str], None] = {}
    for i, (text, language, *_) in enumerate(rows(8 * number, seed)):
        found[(text if i < 4 * number or (text, language) not in found else f"{text} {i}", language)] = None
        if len(found) == number:
            break
    return list(found)


def write_texts(path: str, texts: list[tuple[str, str]]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("occ1", "lang"))
        writer.writerows(texts)


def write_register(path: str, number: int, share: float) -> None:
    counts = zipf_counts(number, max(1, round(share * number)), zipf_exponent())
    texts = distinct_texts(len(counts))
    order = np.random.default_rng(1).permutation(np.repeat(np.arange(len(counts)), counts))
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "occ1", "lang"))
        writer.writerows((i, *texts[text]) for i, text in enumerate(order.tolist()))


def command(model: str, source: str, output: str, flags: list[str]) -> list[str]:
    found = [sys.executable, "-m", "histocc.predict", "--model", model, "--input", source, "--quiet"]
    return [*found, "--column", "occ1", "--language-column", "lang", "--output", output, *flags]


def environment(threads: int | None) -> dict[str, str]:
    own = {"PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | own | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})


def seconds(model: str, source: str, flags: list[str], threads: int | None) -> float:
    """Of a whole run, from its start to its last line."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        asked = command(model, source, os.path.join(folder, "out.csv"), flags)
        done = subprocess.run(asked, env=environment(threads), capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        return time.perf_counter() - started


def rates(args: argparse.Namespace, folder: str, size: str, model: str) -> dict[str, dict[str, float]]:
    """Number format → "one core", "all cores" → distinct texts per second."""
    number = args.texts if size != "base" else max(1024, args.texts // 8)
    few, many = os.path.join(folder, "few.csv"), os.path.join(folder, "many")
    # a process takes CHUNK rows at once: with fewer, some would have none
    numbers = {"one core": number, "all cores": max(number, CHUNK * usable_cores() - FEW)}
    texts = distinct_texts(FEW + max(numbers.values()))
    write_texts(few, texts[:FEW])
    for cores, each in numbers.items():
        write_texts(f"{many} {cores}.csv", texts[: FEW + each])
    ways = {"one core": (["--processes", "1"], 1), "all cores": ([], None)}
    taken: dict[tuple[str, str], list[float]] = {(name, cores): [] for name in args.formats for cores in ways}
    for _ in range(args.rounds):
        for name, cores in taken:
            more, threads = ways[cores]
            flags = ["--decoder", args.decoder, "--precision", name, *more]
            start, whole = (seconds(model, path, flags, threads) for path in (few, f"{many} {cores}.csv"))
            taken[name, cores].append(whole - start)
    found: dict[str, dict[str, float]] = {name: {} for name in args.formats}
    for (name, cores), times in taken.items():
        found[name][cores] = numbers[cores] / statistics.median(times)
    return found


def rows_per_second(model: str, folder: str) -> float:
    """Of rows whose texts have their codes already."""
    path, number = os.path.join(folder, "same.csv"), 400_000
    write_texts(path, distinct_texts(100) * (number // 100))
    flags = ["--decoder", "flat"]
    few = os.path.join(folder, "hundred.csv")
    write_texts(few, distinct_texts(100))
    return number / (seconds(model, path, flags, None) - seconds(model, few, flags, None))


def kill(process: subprocess.Popen) -> None:
    """At once, with the processes that it has forked."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def whole_register(args: argparse.Namespace, folder: str, model: str) -> dict:
    """A register coded at once, and by a command that is killed twice."""
    source = os.path.join(folder, "register.csv")
    write_register(source, args.register, args.distinct)
    one, other = (os.path.join(folder, f"{name}.csv") for name in ("one", "other"))
    flags = ["--decoder", args.decoder]
    started = time.perf_counter()
    done = subprocess.run(
        command(model, source, one, flags), env=environment(None), capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    whole, said = time.perf_counter() - started, []
    for share in (1 / 3, 1 / 3, None):
        with subprocess.Popen(
            command(model, source, other, flags),
            env=environment(None),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            if share is not None:
                time.sleep(share * whole)
                assert process.poll() is None, "it has ended before it was killed"
                kill(process)
            assert process.stdout is not None
            said.append(process.stdout.read())
    size, equal = os.path.getsize(one), filecmp.cmp(one, other, shallow=False)
    resumed = sum("resuming" in text for text in said)
    rate = float((re.search(r"([\d,]+) rows/s", done.stdout) or [0, "0"])[1].replace(",", ""))
    print(
        f"\nregister of {args.register:,} rows, {args.distinct:.0%} distinct texts: {whole:.0f} s"
        f" ({rate:,.0f} rows/s); killed twice and given again ({resumed} times resumed): output of"
        f" {size / 1e6:.0f} MB {'equal' if equal else 'NOT EQUAL'}"
    )
    return {"rows": args.register, "seconds": whole, "rows_per_sec": rate, "equal": equal, "resumed": resumed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small"], choices=STEPS)
    parser.add_argument("--formats", nargs="+", default=["float32", "int8"])
    parser.add_argument("--decoder", default="greedy", choices=("greedy", "flat"))
    parser.add_argument(
        "--texts", type=int, default=16_384, help="of a measurement; of base an eighth on one core"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--register", type=int, default=2_000_000, help="rows; 0: none")
    parser.add_argument("--distinct", type=float, default=0.38, help="share of the register's texts")
    args = parser.parse_args()
    found: dict[str, dict] = {}
    register: dict = {}
    for i, size in enumerate(args.sizes):
        with tempfile.TemporaryDirectory() as folder:
            model = train(folder, size, STEPS[size], "--batch-size", BATCH[size])
            if not i:
                known = rows_per_second(model, folder)
                if args.register:
                    register = whole_register(args, folder, model)
            found[size] = rates(args, folder, size, model)
    heads = " ".join(f"{f'{share:.0%} distinct':>14}" for share in SHARES)
    print(f"\n{args.decoder}, hours for {CENSUS:,} rows, on {usable_cores()} cores\n")
    print(f"{'size':6} {'format':8} {'cores':10} {'texts/s':>9} {heads}")
    for size, formats in found.items():
        for name, by_cores in formats.items():
            for cores, rate in by_cores.items():
                hours = [(share * CENSUS / rate + CENSUS / known) / 3600 for share in SHARES]
                cells = " ".join(f"{each:14.1f}" for each in hours)
                print(f"{size:6} {name:8} {cores:10} {rate:9,.0f} {cells}")
    result = {"decoder": args.decoder, "rates": found, "known_rows_per_sec": known, "register": register}
    print(json.dumps({**result, "zipf": zipf_exponent(), "cores": usable_cores()}))


if __name__ == "__main__":
    main()
