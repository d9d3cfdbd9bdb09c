"""How fast rows become batches, and in how much memory, at the size of a census:

    python -m benchmarks.data                     # 18 million rows, about 6 GB of disk in --folder
    python -m benchmarks.data --rows 1000000      # a quick look

Preparation, a second start and the batches run in processes of their own, one thread each; the peak memory is
what the system counted (resident set, pages of mapped files included).
"""

import contextlib
import os
import resource
import shlex
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from .common import COLUMNS, arguments, finish, table, write_sample

WHAT = {  # figure: (what it is, unit)
    "prepare_rows_per_sec": ("preparation", "rows/s"),
    "prepare_peak_mb": ("peak memory of preparation", "MB"),
    "cached_start_sec": ("second start, from the cache", "s"),
    "batch_rows_per_sec": ("batches of 512 without noise, one core", "rows/s"),
    "noisy_rows_per_sec": ("batches of 512 with the default noise, one core", "rows/s"),
    "resumed_first_batch_sec": ("first batch of a resumed epoch", "s"),
}


def prepared(path: str, folder: str, more: str = ""):
    """Return (arguments, formatter, data), as finetune.py gets them."""
    import finetune
    from histocc.formatter import BlockyFormatter
    from histocc.job import inputs
    from histocc.runtime.world import World

    flags = f"--dataset {shlex.quote(path)} --target-cols hisco_1 hisco_2 hisco_3 {COLUMNS} --share-val 0.1"
    flags += f" --save-path {shlex.quote(folder)} --batch-size 512 --device cpu {more}"
    with contextlib.redirect_stdout(None):
        args = finetune.get_args_parser().parse_args(shlex.split(flags))
        args, read = inputs.prepare_data(args, World(), [path], [])
    return args, BlockyFormatter.from_dict(read.settings.formatter), read.data


def start(path: str, folder: str) -> tuple[float, float]:
    """Return (seconds of getting the data, peak memory in MB)."""
    import histocc.job.train  # noqa: F401  it is in memory before there are data

    started = time.perf_counter()
    prepared(path, folder)
    return time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def make_batches(path: str, folder: str, more: str, seconds: float) -> tuple[float, float]:
    """Return (rows per second, seconds of the first batch, in the middle of the eighth epoch)."""
    import torch

    from histocc.job import inputs
    from histocc.runtime.world import World
    from histocc.trainer import batches

    torch.set_num_threads(1)
    args, formatter, data = prepared(path, folder, more)
    config = {"max_len": args.max_len, "memory_mask": True}
    rows, _ = inputs.make_rows(args, formatter, data, config)
    made = batches.MicroBatches(rows, batches.batch_plan(args, rows, World()), 0, 1)
    started = time.perf_counter()
    made[7, len(made) // 2]
    first, count, number = time.perf_counter() - started, 0, 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        parts = made[0, number * 7919 % max(1, len(made) - 1)]  # taken from all over the file
        count, number = count + sum(len(part["weights"]) for part in parts), number + 1
    return count / (time.perf_counter() - started), first


def alone(work, *given):
    """Return the result of a function that runs in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def words(parts: list[dict]) -> str:
    """Return the text for the page."""
    part = parts[0]
    return (
        f"{part['rows']:,} rows of the sample are prepared in {part['prepare_sec']:.1f} s, once for each file"
        f" and formatter ({part['prepare_rows_per_sec']:,.0f} rows/s, {part['prepare_peak_mb']:,.0f} MB); a"
        f" later start on the same file takes {part['cached_start_sec']:.2f} s."
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=18_000_000)
    parser.add_argument("--seconds", type=float, default=15.0, help="how long batches are made")
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found = {"rows": args.rows}
    with contextlib.ExitStack() as ends:
        folder = args.folder or ends.enter_context(tempfile.TemporaryDirectory())
        path = write_sample(f"{folder}/rows_{args.rows}.csv", args.rows)
        found["prepare_sec"], found["prepare_peak_mb"] = alone(start, path, folder)
        found["prepare_rows_per_sec"] = args.rows / found["prepare_sec"]
        found["cached_start_sec"], _ = alone(start, path, folder)
        no_noise = "--augmentation-prob 0 --unk-lang-prob 0"
        rate, found["resumed_first_batch_sec"] = alone(make_batches, path, folder, no_noise, args.seconds)
        found["batch_rows_per_sec"] = rate
        found["noisy_rows_per_sec"], _ = alone(make_batches, path, folder, "", args.seconds)
    rows = [[what, f"{found[name]:,.3g} {unit}"] for name, (what, unit) in WHAT.items()]
    finish(found, f"{args.rows:,} rows of the sample\n\n{table(('what', 'measured'), rows)}")


if __name__ == "__main__":
    main()
