#!/usr/bin/env python3
"""How much training is left over slow links: two nodes of one process and one core each, joined by a link
that is limited at both ends.

    python benchmarks/links.py                                        # sizes small and base; as root, Linux
    python benchmarks/links.py --sizes small --ngrams default --links 100mbit 20mbit
    python benchmarks/links.py --sizes base --ways ddp sync-50 --budget 200
    python benchmarks/links.py --sizes small --forecast               # beside it what a dry run says of each
    python benchmarks/links.py --accuracy --epochs 3                  # what it costs; needs no root

Each run is finetune.py on rows of the sample, in two network namespaces (benchmarks/namespaces.py). It starts
without a limit, which is set with the first row of the log; what counts are the rows after that: the median
of their rates, and the bytes that the devices of both ends have sent meanwhile, per optimizer step. With
--sync-every a row covers the steps from one exchange to the next. A run ends after so many --rows, or with
the first row past --budget; one that could not have a row within it, by forecast, is left out. Every way is
measured without limit first.

By arithmetic, from bytes and rates without limit: no more is possible than what the link lets through ("at
most"), and no less than where nothing is computed while bytes are under way ("without overlap"). A rate that
is more than a tenth above the one or below the other is marked "?". Limits count the headers of packets,
about 4 % of the bytes.

--forecast: beside each rate what `finetune.py --dry-run --processes 2` says of it, from two processes on the
link before it is limited (`--link-gbit` is the limit).

--accuracy: what the ways get right of the held-out texts of real rows, after the same number of rows, on two
processes without limit. A cell is % of distinct texts, mean over the seeds ± half their range.

Prints tables and one JSON line.
"""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

import quality
import torch
from namespaces import ADDRESSES, DEVICE, Link, NoLink, bits_per_second
from training import Training

from histocc.trainer.run_log import numbers

PORT = 29500  # in a namespace of its own
POLL_SECONDS = 0.005
WARM_UP = 2  # optimizer steps without limit at the start, which do not count
EVERY = 5  # optimizer steps of a row of the log, where one takes little time
PATIENCE = 300.0  # seconds for the start and a row, beyond what is expected
NONE = "none"  # link without limit
DEFAULT_LINKS = ["1gbit", "100mbit", "20mbit"]


@dataclass(frozen=True)
class Way:
    """How nodes train together: flags of finetune.py, micro-batches of an optimizer step, and optimizer steps
    from one exchange to the next.
    """

    flags: tuple[str, ...] = ()
    micro_batches: int = 1
    every: int = 1


def sync(every: int, *more: str) -> Way:
    return Way(("--sync-every", str(every), *more), every=every)


MEAN = ("--outer-learning-rate", "1", "--outer-momentum", "0")  # of the weights of all groups


WAYS = {
    "ddp": Way(),
    "bf16": Way(("--gradient-compression", "bf16")),
    "accumulate-4": Way(("--accumulate-steps", "4"), micro_batches=4),
    "sync-10": sync(10),
    "sync-20": sync(20),
    "sync-50": sync(50),
    "mean-10": sync(10, *MEAN),
    "mean-20": sync(20, *MEAN),
    "mean-50": sync(50, *MEAN),
}
# averages send as much
RATE_WAYS = [name for name in WAYS if not name.startswith("mean")]
ACCURACY_WAYS = [name for name, way in WAYS.items() if name == "ddp" or way.every > 1]


@dataclass(frozen=True)
class Setup:
    """What all runs of a table share. flags: of finetune.py, data and model; batch: samples of a micro-batch
    on both nodes; trained: number of trained parameters.
    """

    folder: str
    flags: list[str]
    batch: int
    rows: int
    budget: float
    trained: int


# ---- arithmetic


def log_interval(way: Way, rows: int, budget: float, step_seconds: float | None) -> int:
    """Optimizer steps between rows of the log: fewer where `rows` of them would take longer than the budget.
    step_seconds: forecast; None where there is none.
    """
    if way.every > 1:
        return 1  # there are rows at exchanges alone
    most = max(1, EVERY // way.micro_batches)
    return most if step_seconds is None else max(1, min(most, int(budget / (rows * step_seconds))))


def forecast(way: Way, plain: dict, rate: str) -> float:
    """Seconds of an optimizer step where nothing is computed while bytes are under way. plain: the run of the
    way without limit.
    """
    return plain["step_seconds"] + 8 * max(plain["bytes_per_step"]) / bits_per_second(rate)


def bounds(plain: dict, rate: str) -> tuple[float, float]:
    """Samples per second, without overlap and at most; see the module's docstring."""
    sending = 8 * max(plain["bytes_per_step"]) / bits_per_second(rate)
    samples = plain["samples_per_sec"] * plain["step_seconds"]
    return samples / (plain["step_seconds"] + sending), samples / max(plain["step_seconds"], sending)


def plausible(rate: float, without_overlap: float, at_most: float) -> bool:
    return 0.9 * without_overlap <= rate <= 1.1 * at_most


def figures(rows: list[dict], first: tuple, last: tuple) -> dict:
    """What was measured between two moments.

    Args:
        rows: of the log.
        first, last: (step, bytes sent by each node since the link was made).
    """
    counted = [row for row in rows if first[0] < row["step"] <= last[0]]
    steps, rate = last[0] - first[0], statistics.median(row["samples_per_sec"] for row in counted)
    before = next(row["samples"] for row in rows if row["step"] == first[0])
    samples = counted[-1]["samples"] - before
    return {
        "samples_per_sec": rate,
        "rates": [row["samples_per_sec"] for row in counted],
        "steps": int(steps),
        "step_seconds": samples / steps / rate,
        "bytes_per_step": [(end - start) / steps for start, end in zip(first[1], last[1])],
    }


# ---- a run


def start_nodes(link: Link, flags: list[str], folder: str) -> list[subprocess.Popen]:
    """The process of each node; what it prints is in node0.txt and node1.txt."""
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": DEVICE}
    nodes = []
    for rank in range(2):
        with open(os.path.join(folder, f"node{rank}.txt"), "w", encoding="utf-8") as output:
            nodes.append(
                subprocess.Popen(
                    link.command(rank, sys.executable, "finetune.py", "--distributed", *flags),
                    cwd=REPO,
                    env={**os.environ, **common, "RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for this program, which ends them
                )
            )
    return nodes


def end_nodes(nodes: list[subprocess.Popen]) -> None:
    """At once, with what they have started: nobody needs their last checkpoint."""
    for node in nodes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()


def watch(link: Link, nodes: list, folder: str, rate: str, setup: Setup, patience: float) -> dict:
    """Sets the limit when the run is warm, waits for the rows that count, and returns the `figures`. Raises
    RuntimeError where the run ends before, or is silent for longer than `patience` seconds.
    """
    log, size, first, last = os.path.join(folder, "run", "logs.csv"), 0, None, None
    heard, since = time.monotonic(), 0.0
    while True:
        time.sleep(POLL_SECONDS)
        ended = [node.returncode for node in nodes if node.poll() is not None]
        now = os.stat(log).st_size if os.path.exists(log) else 0
        rows = numbers(log) if now != size else []
        size = now
        if rows and rows[-1]["step"] >= WARM_UP:
            heard, last = time.monotonic(), (rows[-1]["step"], link.sent())
            if first is None:
                first, since = last, heard
                if rate != NONE:
                    link.limit(rate)
            counted = sum(row["step"] > first[0] for row in rows)
            if counted >= setup.rows or counted and heard - since > setup.budget:
                return figures(rows, first, last)
        if ended or time.monotonic() - heard > patience:
            why = f"ended with {ended[0]}" if ended else f"gave no row of its log for {patience:.0f} s"
            said = [Path(folder, f"node{rank}.txt").read_text(encoding="utf-8") for rank in range(2)]
            raise RuntimeError(f"a node {why}:\n" + "\n".join(said))


def foreseen(setup: Setup, way: Way, rate: str) -> float:
    """Samples per second that a dry run of both nodes says of them. Raises RuntimeError."""
    with tempfile.TemporaryDirectory(dir=setup.folder) as folder, Link() as link:
        flags = [*setup.flags, *way.flags, "--dry-run", "--processes", "2"]
        flags += ["--link-gbit", str(bits_per_second(rate) / 1e9)] if rate != NONE else []
        nodes: list[subprocess.Popen] = []
        try:
            nodes = start_nodes(link, [*flags, "--save-path", os.path.join(folder, "run")], folder)
            for node in nodes:
                node.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"a dry run took longer than {PATIENCE:.0f} s") from None
        finally:
            end_nodes(nodes)
        said = Path(folder, "node0.txt").read_text(encoding="utf-8")
    found = re.search(r"^ +2 +[\d,]+ +([\d,.]+) .* GB$", said, re.M)
    if found is None:
        raise RuntimeError(f"a dry run made no forecast:\n{said}")
    return float(found[1].replace(",", ""))


def measured(setup: Setup, way: Way, rate: str, plain: dict | None) -> dict:
    """The `figures` of a run over a link. plain: those without limit, for a forecast."""
    step_seconds = forecast(way, plain, rate) if plain else None
    row_seconds = (step_seconds or 0.0) * way.every
    if row_seconds > setup.budget:
        return {"left_out": f"an exchange takes {row_seconds:.0f} s"}
    with tempfile.TemporaryDirectory(dir=setup.folder) as folder, Link() as link:
        interval = log_interval(way, setup.rows, setup.budget, step_seconds)
        flags = [*setup.flags, *way.flags, "--log-interval", str(interval)]
        flags += ["--sync-start", str(WARM_UP)] if way.every > 1 else []
        nodes: list[subprocess.Popen] = []
        try:
            nodes = start_nodes(link, [*flags, "--save-path", os.path.join(folder, "run")], folder)
            return watch(link, nodes, folder, rate, setup, PATIENCE + 3 * row_seconds * interval)
        finally:
            end_nodes(nodes)


# ---- tables of rates


def make_setup(args: argparse.Namespace, size: str, ngrams: str, folder: str) -> Setup:
    data = quality.data_flags("sample", folder)
    assert data is not None
    flags = [
        *data,
        *quality.COLUMNS,
        *quality.COMMON,
        "--model-size",
        size,
        "--batch-size",
        str(args.batch // 2),
        *("--num-epochs", "1000"),
        *("--ngrams", "none" if ngrams == "none" else "auto", "--ngram-passes", "0"),
    ]
    return Setup(folder, flags, args.batch, args.rows, args.budget, trained_parameters(flags, folder))


def trained_parameters(flags: list[str], folder: str) -> int:
    """How many numbers a step of training changes."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        training = Training([*flags, "--save-path", own], torch.device("cpu"))
        training.train_seen_rows()
        return sum(p.numel() for p in training.model.parameters() if p.requires_grad)


def line(way: str, link: str, columns: list[str]) -> str:
    widths = (10, 11, 8, 17, 9, 8, 8, 5, 14)
    found = [f"{column:>{width}}" for column, width in zip(columns, widths)]
    return "  ".join([f"{way:12}", f"{link:>8}", *found]).rstrip()


HEAD = [
    line(
        "way",
        "link",
        ["samples/s", "of the way", "of DDP", "MB a step", "of the", "without", "at", "steps", "forecast"],
    ),
    line("", "", ["", "at no limit", "at none", "from each node", "gradients", "overlap", "most", "", ""]),
]


def cells(setup: Setup, run: dict, plain: dict, ddp: dict | None, link: str) -> list[str]:
    """What stands behind way and link in a line. plain: without limit; ddp: DDP without limit."""
    low, high = bounds(plain, link) if link != NONE else (math.nan, math.nan)
    allowed = ["", ""] if link == NONE else [f"{low:.1f}", f"{high:.1f}"]
    if "left_out" in run:
        return ["—", run["left_out"], "", "", "", *allowed, "", ""]
    rate, sent = run["samples_per_sec"], run["bytes_per_step"]
    doubt = "" if link == NONE or plausible(rate, low, high) else " ?"
    return [
        f"{rate:.1f}{doubt}",
        f"{rate / plain['samples_per_sec']:.2f}",
        f"{rate / ddp['samples_per_sec']:.2f}" if ddp else "",
        " ".join(f"{each / 1e6:.2f}" for each in sent),
        f"{max(sent) / (4 * setup.trained):.3f}",
        *allowed,
        str(run["steps"]),
        f"{run['forecast']:.1f} ({run['forecast'] / rate - 1:+.0%})" if "forecast" in run else "",
    ]


def table(args: argparse.Namespace, size: str, ngrams: str, folder: str) -> dict:
    """Measures and prints the table of a size; returns it for the JSON line."""
    setup = make_setup(args, size, ngrams, folder)
    print(
        f"size {size}, n-grams {ngrams}: {setup.trained:,} trained parameters,"
        f" {4 * setup.trained / 1e6:.1f} MB of gradients; {args.batch} samples a micro-batch on both nodes\n"
        + "\n".join(HEAD),
        flush=True,
    )
    found: dict[str, dict[str, dict]] = {}
    for name in sorted(args.ways, key=list(WAYS).index):  # DDP first
        runs = found[name] = {}
        for link in [NONE, *args.links]:
            runs[link] = run = measured(setup, WAYS[name], link, runs.get(NONE))
            if args.forecast and "left_out" not in run:
                run["forecast"] = foreseen(setup, WAYS[name], link)
            run |= {"without_overlap_and_at_most": bounds(runs[NONE], link)} if link != NONE else {}
            ddp = found.get("ddp", {}).get(NONE)
            print(line(name, link, cells(setup, run, runs[NONE], ddp, link)), flush=True)
    print()
    return {"size": size, "ngrams": ngrams, "trained_parameters": setup.trained, "runs": found}


# ---- accuracy


def verdict(values: list[float], of_ddp: list[float]) -> str:
    """Where the mean of some seeds lies by those of DDP."""
    mean = statistics.mean(values)
    if mean < min(of_ddp):
        return f"{100 * (min(of_ddp) - mean):.1f} below the lowest of DDP"
    if mean > max(of_ddp):
        return f"{100 * (mean - max(of_ddp)):.1f} above the highest of DDP"
    return "within DDP's spread"


def trained_and_counted(
    args: argparse.Namespace, data: quality.DataSet, size: str, ngrams: str, way: Way
) -> list[dict]:
    """What a way gets right, for each seed; see `quality.Run.accuracy`."""
    flags = [*way.flags, *(["--sync-group", "process"] if way.every > 1 else [])]
    flags += ["--ngrams", "none"] if ngrams == "none" else []
    # a step has the same rows in every way
    asked = argparse.Namespace(size=size, batch=args.batch // 2 // way.micro_batches, threads=1)
    steps = args.steps or args.epochs * math.ceil(len(data.prepared.train) / args.batch)
    with tempfile.TemporaryDirectory() as folder:
        run = quality.Run(asked, data, " ".join(flags), folder, processes=2)
        return [run.accuracy(steps, seed) for seed in args.seeds]


def accuracy_table(args: argparse.Namespace, data: quality.DataSet, size: str, ngrams: str) -> dict:
    """Prints what each way gets right, and returns it for the JSON line."""
    number = len(data.prepared.train)
    print(f"size {size}, n-grams {ngrams}: {number:,} training rows, {args.batch} a step, seeds {args.seeds}")
    found: dict[str, list[dict]] = {}
    for name in sorted(args.ways, key=list(WAYS).index):  # DDP first
        found[name] = results = trained_and_counted(args, data, size, ngrams, WAYS[name])
        for decoder in (each for each in quality.DECODERS if each in results[0]):
            values, of_ddp = ([each[decoder]["all"] for each in found.get(way, [])] for way in (name, "ddp"))
            said = verdict(values, of_ddp) if of_ddp and name != "ddp" else ""
            what = f"{results[0]['steps']:>6} steps  {decoder:8} {quality.spread(values)} %"
            print(f"{name:13} {what}  {said}".rstrip(), flush=True)
    print()
    return {"size": size, "ngrams": ngrams, "accuracy": found}


# ---- the command


def link_rate(text: str) -> str:
    """A value of --links."""
    try:
        bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", nargs="+", default=None, choices=("tiny", "small", "base"))
    parser.add_argument("--ways", nargs="+", default=None, choices=WAYS, help="DDP comes first")
    parser.add_argument(
        "--links", nargs="*", type=link_rate, default=DEFAULT_LINKS, help="rates as tc writes them"
    )
    parser.add_argument(
        "--ngrams", nargs="+", default=["none"], choices=("none", "default"), help="a table for each"
    )
    parser.add_argument(
        "--batch", type=int, default=64, help="samples of both nodes together, before accumulation"
    )
    parser.add_argument("--rows", type=int, default=5, help="of the log that count, at most")
    parser.add_argument(
        "--budget", type=float, default=60.0, metavar="SECONDS", help="of each run, once it is warm"
    )
    parser.add_argument("--forecast", action="store_true", help="and what a dry run says of each rate")
    parser.add_argument("--accuracy", action="store_true", help="instead: what the ways get right")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="with --accuracy")
    parser.add_argument("--epochs", type=int, default=3, help="with --accuracy")
    parser.add_argument("--steps", type=int, default=None, help="with --accuracy, instead of --epochs")
    return parser


def main() -> None:
    args = get_args_parser().parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    args.ways = args.ways or (ACCURACY_WAYS if args.accuracy else RATE_WAYS)
    args.sizes = args.sizes or (["small"] if args.accuracy else ["small", "base"])
    tables = [(size, ngrams) for size in args.sizes for ngrams in args.ngrams]
    with tempfile.TemporaryDirectory() as folder:
        if args.accuracy:
            flags = quality.data_flags("real", folder)
            if flags is None:
                return print(f"accuracy left out: {quality.REAL} is not there")
            data = quality.DataSet(flags, folder, noise=False)
            found = [accuracy_table(args, data, *each) for each in tables]
        else:
            with Link() as link:  # says what is missing before anything takes time
                link.limit("1gbit")
            found = [table(args, *each, folder) for each in tables]
    print(json.dumps({"batch": args.batch, "tables": found}))


if __name__ == "__main__":
    try:
        main()
    except NoLink as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
