"""How much training gains from processes: one process with one core, and one with all cores, against
processes with a core each.

    python -m benchmarks.processes                     # size small, 64 samples a step, on two cores
    python -m benchmarks.processes --processes 4 --size base
    python -m benchmarks.processes --ways ddp accumulation fsdp
    python -m benchmarks.processes --processes 8 --size base --batch 4096 --flags="--device cuda --use-amp"

Whole runs of train_mixer.py take turns; what counts is the median rate of their logs after the first row.
"""

import statistics
import tempfile

from .common import COLUMNS, NEVER, arguments, device_of, finish, read_csv, run, script, table, write_sample

EVERY = 5  # steps for each row of the log
WAYS = {"ddp": (1, "ddp"), "accumulation": (4, "ddp"), "fsdp": (1, "fsdp")}  # micro-batches, --parallel
NAMES = ("1 process, 1 core", "1 process, {} cores", "{} processes, 1 core each")
ON_GPUS = ("1 GPU, share of the batch", "1 GPU, whole batch", "{} GPUs")


def rate(folder: str, processes: int, threads: int, flags: str) -> float:
    """Return samples per second over all processes."""
    files = f"--train-data {folder}/train.csv --val-data {folder}/val.csv --save-dir {folder}/run --overwrite"
    never = f"--log-interval {EVERY} --eval-interval {NEVER} --save-interval {NEVER}"
    more = f"{COLUMNS} --ngrams none --device cpu {flags}"
    run(f"{script('train_mixer.py', processes)} {files} {never} {more}", threads)
    rates = [float(row["samples_per_sec"] or "nan") for row in read_csv(f"{folder}/run/logs.csv")]
    return statistics.median(rates[1 : len(rates) - 1] or rates)


def medians(part: dict, way: str = "ddp") -> dict[str, float]:
    """Return samples/s of the three ways to use the cores, by name."""
    rates = part["samples_per_sec"][way].values()
    return {name.format(part["processes"]): statistics.median(each) for name, each in zip(NAMES, rates)}


def words(part: dict) -> str:
    core, one, many = medians(part).values()
    count = part["processes"]
    return (
        f"{count} processes with a core each do {many / core:.2f} times the samples of one process with one"
        f" core, and {many / one:.2f} times those of one process with {count} cores; what they compute is the"
        " same. [MULTI_GPU_TRAINING.md](../MULTI_GPU_TRAINING.md) has the commands for several GPUs and"
        " machines."
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--size", default="small", choices=("tiny", "small", "base"))
    parser.add_argument("--batch", type=int, default=64, help="samples of all processes, of a micro-batch")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=["ddp"], choices=WAYS)
    parser.add_argument("--steps", type=int, default=25, help="of each run; a quarter with accumulation")
    parser.add_argument("--flags", default="", help="more flags of train_mixer.py, in one argument")
    args = parser.parse_args()
    rates = {way: {"one core": [], "one": [], "many": []} for way in args.ways}
    with tempfile.TemporaryDirectory() as folder:
        write_sample(f"{folder}/train.csv", 12_000)
        write_sample(f"{folder}/val.csv", 16, seed=2)
        for _ in range(args.rounds):
            for way, found in rates.items():
                times, parallel = WAYS[way]
                steps = max(3 * EVERY, args.steps // times)
                flags = f"--model-size {args.size} --parallel {parallel} --accumulate-steps {times}"
                flags += f" --max-steps {steps} {args.flags} --batch-size"
                share, many = args.batch // args.processes, args.processes
                found["one core"].append(rate(folder, 1, 1, f"{flags} {share}"))
                found["one"].append(rate(folder, 1, many, f"{flags} {args.batch}"))
                found["many"].append(rate(folder, many, 1, f"{flags} {share}"))
    found = {name: getattr(args, name) for name in ("size", "batch", "processes")}
    found["samples_per_sec"] = rates
    lines = [[way, *(f"{each:.1f}" for each in medians(found, way).values())] for way in rates]
    names = NAMES if device_of(args.flags).type == "cpu" else ON_GPUS
    finish(found, table(("samples/s", *(name.format(args.processes) for name in names)), lines))


if __name__ == "__main__":
    main()
