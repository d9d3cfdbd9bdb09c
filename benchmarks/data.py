#!/usr/bin/env python3
"""How fast rows become batches, and in how much memory, at the size of a census:

    python benchmarks/data.py                     # 18 million rows, about 6 GB of disk in --folder
    python benchmarks/data.py --rows 1000000      # a quick look

Prints one table and one JSON line. Every part runs in its own process, whose peak memory is what the
system counted (resident set, pages of mapped files included). One thread each; preparation reads in one
process and writes in a second one.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

COLUMNS = ["hisco_1", "hisco_2", "hisco_3"]
TARGETS = [  # (key, what it is, unit, bound, True: at least, False: below)
    ("prepare_rows_per_sec", "preparation, two cores", "rows/s", 250_000, True),
    ("prepare_peak_mb", "peak memory of preparation", "MB", 1500, False),
    ("cached_start_sec", "second start, from the cache", "s", 2.0, False),
    ("batch_rows_per_sec", "batches without noise, one core", "rows/s", 150_000, True),
    ("noisy_rows_per_sec", "batches with the default noise, one core", "rows/s", 40_000, True),
    ("resumed_first_batch_sec", "first batch of a resumed epoch", "s", 1.0, False),
    ("second_rank_mb", "memory of a second rank beyond its model", "MB", 150, False),
    ("padding", "padding beyond what each row asks for", "share", 0.1, False),
]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def own_mb() -> float:
    """Memory of this process that no other shares, in MB (Linux)."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return (
            sum(int(line.split()[1]) for line in file if line.startswith(("Private_Clean", "Private_Dirty")))
            / 1024
        )


def write_rows(path: str, rows: int) -> dict:
    from histocc.sample.files import write
    from histocc.sample.generate import rows as sample_rows

    started = time.perf_counter()
    write(sample_rows(rows, 1), path)
    return {
        "write_rows_per_sec": rows / (time.perf_counter() - started),
        "file_mb": os.path.getsize(path) / 1e6,
    }


def settings_of(path: str):
    from histocc.data.config import PrepareSettings
    from histocc.formatter import make_formatter

    return PrepareSettings(
        [path], make_formatter("hisco", COLUMNS).to_dict(), COLUMNS, share_val=0.1, language_col="lang"
    )


def prepare_rows(path: str, folder: str) -> dict:
    from histocc.data.prepare import prepare

    before, started = peak_mb(), time.perf_counter()
    prepare(settings_of(path), folder, lambda line: None)
    seconds = time.perf_counter() - started
    return {"prepare_sec": seconds, "prepare_peak_mb": peak_mb(), "imports_mb": before}


def start_again(path: str, folder: str) -> dict:
    from histocc.data.arrays import PreparedData
    from histocc.data.prepare import prepare

    started = time.perf_counter()
    data = PreparedData.open(prepare(settings_of(path), folder, lambda line: None))
    return {
        "cached_start_sec": time.perf_counter() - started,
        "folder": data.folder,
        "report": {
            name: data.report[name]
            for name in ("rows", "train_rows", "distinct_texts", "duplicates", "conflicts")
        },
    }


def open_batches(folder: str, noise: bool, total: int, processes: int = 1, rank: int = 0):
    from histocc.data.arrays import PreparedData
    from histocc.data.dataset import RowEncoding, TextChanges, TextRows
    from histocc.data.noise import Augmenter
    from histocc.data.rows import read_words
    from histocc.formatter import make_formatter
    from histocc.trainer.batches import LENGTH_GROUP_ROWS, LENGTH_GROUPS, BatchPlan, MicroBatches

    data = PreparedData.open(folder)
    words = read_words(os.path.join(folder, "words.csv"))
    plan = BatchPlan(len(data.train), total, processes, 0, LENGTH_GROUPS, LENGTH_GROUP_ROWS["cpu"])
    augmenter = Augmenter(5, words=list(words), word_weights=list(words.values())) if noise else None
    encoding, changes = RowEncoding(make_formatter("hisco", COLUMNS)), TextChanges(augmenter=augmenter)
    return MicroBatches(TextRows(data.train, data, encoding, changes), plan, rank, 3)


def make_batches(folder: str, noise: bool, seconds: float) -> dict:
    from histocc.text import padded_width

    batches = open_batches(folder, noise, total=512)
    last = batches.plan.steps_per_epoch - 1
    started = time.perf_counter()
    batches[7, last // 2]  # as a run that continues in the middle of its eighth epoch
    first = time.perf_counter() - started
    rows = positions = asked = number = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        for part in batches[0, number * 7919 % last]:  # from all over the file
            rows += len(part["weights"])
            positions += part["input_ids"].numel()
            if number < 50:
                asked += sum(padded_width(int(n) - 2) for n in part["attention_mask"].sum(1))
        number += 1
        if number == 50:
            padding = 1 - asked / positions
            rows, started = 0, time.perf_counter()  # the clock runs without that count, and with warm caches
    rate = rows / (time.perf_counter() - started)
    return (
        {"noisy_rows_per_sec": rate, "padding": padding}
        if noise
        else {"batch_rows_per_sec": rate, "resumed_first_batch_sec": first}
    )


def hold_a_rank(folder: str, rank: int, ready, go, answer) -> None:
    """A rank that has its loader ready and takes batches; says how much memory it alone has beyond torch
    itself.
    """
    import torch

    torch.set_num_threads(1)
    import histocc.job.train  # noqa: F401  what every rank has in memory before there are data

    before = own_mb()
    batches = open_batches(folder, True, total=1024, processes=2, rank=rank)
    for number in range(60):
        batches[0, number * 7919 % batches.plan.steps_per_epoch]
    ready.wait()  # both hold their data now
    answer.put((rank, own_mb() - before))
    go.wait()


def second_rank(folder: str) -> dict:
    context = multiprocessing.get_context("spawn")
    ready, go, answer = context.Barrier(2), context.Barrier(2), context.Queue()
    ranks = [context.Process(target=hold_a_rank, args=(folder, rank, ready, go, answer)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = dict(answer.get(timeout=300) for _ in ranks)
    for process in ranks:
        process.join()
    return {"second_rank_mb": found[1]}


def _answer(queue, work, arguments) -> None:
    import torch

    torch.set_num_threads(1)
    queue.put(work(*arguments))


def alone(work, *arguments) -> dict:
    """Runs `work` in its own process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_answer, args=(queue, work, arguments))
    process.start()
    while True:
        try:
            result = queue.get(timeout=1)
            break
        except Exception:  # queue.Empty: look whether it still lives
            if process.exitcode not in (None, 0):
                sys.exit(f"{work.__name__} failed")
    process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=18_000_000)
    parser.add_argument("--seconds", type=float, default=15.0, help="how long batches are made")
    parser.add_argument("--folder", default=None, help="where to work (default: a temporary folder)")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = args.folder or tempfile.mkdtemp(prefix="histocc-bench-")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"rows_{args.rows}.csv")
    try:
        found = alone(write_rows, path, args.rows) if not os.path.exists(path) else {}
        shutil.rmtree(os.path.join(folder, "prepared"), ignore_errors=True)
        found |= alone(prepare_rows, path, folder)
        found |= alone(start_again, path, folder)
        prepared = found.pop("folder")
        found["prepare_rows_per_sec"] = args.rows / found["prepare_sec"]
        found["prepared_mb"] = sum(file.stat().st_size for file in Path(prepared).iterdir()) / 1e6
        found |= alone(make_batches, prepared, False, args.seconds)
        found |= alone(make_batches, prepared, True, args.seconds)
        found |= second_rank(prepared)
    finally:
        if args.folder is None:
            shutil.rmtree(folder)
    print(f"{args.rows:,} rows made from the sample\n")
    print("| what | measured | wanted | |\n|---|---|---|---|")
    for key, what, unit, bound, least in TARGETS:
        value = found[key]
        digits = 0 if value >= 100 else 3
        print(
            f"| {what} | {value:,.{digits}f} {unit} | {'≥' if least else '<'} {bound:,} | "
            f"{'met' if (value >= bound if least else value < bound) else 'MISSED'} |"
        )
    print(
        json.dumps(
            {
                "rows": args.rows,
                **{
                    name: value if isinstance(value, dict) else round(value, 4)
                    for name, value in found.items()
                },
            }
        )
    )


if __name__ == "__main__":
    main()
