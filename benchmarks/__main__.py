"""Measures everything that docs/benchmarks.md shows, and writes that page and its pictures:

    python -m benchmarks --all                  # about half an hour on two cores
    python -m benchmarks census students   # longer parts, which --all leaves out
    python -m benchmarks length batch           # these parts again; the others stay as they are
    python -m benchmarks                        # the page anew from what was measured

Each part is one of the scripts of this folder in a process of its own; what it prints as JSON is kept in
results.json, with its command. Needs matplotlib.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

PREPARED_ROWS, CODED_ROWS = (10_000, 100_000, 1_000_000), (1_000, 10_000, 100_000)
QUICK_ROWS = (1_000, 4_000)
# part → (script, arguments, arguments of --quick: one thread, because a trial runs beside other tests)
PARTS = {
    "small": (
        "reference.py",
        "--size small --rounds 4",
        "--size tiny --batch 8 --rounds 1 --steps 1 --learn 2 --rows 8 --decode-batch 8 --threads 1",
    ),
    "base": (
        "reference.py",
        "--size base --batch 32 --rounds 2 --steps 3 --rows 64 --decode-batch 32",
        "--size tiny --batch 8 --rounds 1 --steps 1 --learn 2 --rows 8 --decode-batch 8 --threads 1",
    ),
    "length": (
        "cost.py",
        "length",
        "length --size tiny --values 8 32 --batch 8 --rounds 1 --rows 16 --learn 2 --threads 1",
    ),
    "batch": ("cost.py", "batch", "batch --size tiny --values 8 16 --rounds 1 --threads 1"),
    "processes": (
        "processes.py",
        "--ways ddp",
        "--ways ddp --size tiny --batch 8 --rounds 1 --steps 3",
    ),
    **{f"data {rows}": ("data.py", f"--rows {rows} --seconds 5", "") for rows in PREPARED_ROWS},
    **{f"predict {rows}": ("predict.py", f"--rows {rows} --decoders greedy", "") for rows in CODED_ROWS},
}
# Parts that --all leaves out: most take a quarter of an hour or more, and products wants other libraries.
LONG = {
    "products": ("products.py", ""),
    "formats": ("formats.py", ""),
    "formats base": ("formats.py", "--sizes base --texts 256 --all 2000"),
    "census": ("census.py", ""),
    "census base": ("census.py", "--sizes base --register 0"),
    "students": ("students.py", ""),
    "students with fewer labels": ("students.py", "--labelled 1000 --sizes tiny"),
    "recovery 60": ("recovery.py", "--every 60"),
    "recovery 30": ("recovery.py", "--every 30"),
}
QUICK = {
    **{name: (script, quick) for name, (script, _, quick) in PARTS.items() if quick},
    **{f"data {rows}": ("data.py", f"--rows {rows} --seconds 0.5") for rows in QUICK_ROWS},
    **{
        f"predict {rows}": ("predict.py", f"--rows {rows} --decoders greedy --steps 5 --threads 1")
        for rows in QUICK_ROWS
    },
}


def machine() -> dict:
    import torch

    cpu, flags, generation = "", set(), {}
    if os.path.exists("/proc/cpuinfo"):
        for line in open("/proc/cpuinfo", encoding="utf-8"):
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                cpu = value.strip()
            elif name.strip() == "flags":
                flags = set(value.split())
            # a model name may be that of several generations
            elif name.strip() in ("cpu family", "model") and value.strip().isdecimal():
                generation[name.strip().split()[-1]] = int(value)
    features = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "VNNI", "avx512_bf16": "bfloat16"}
    features["amx_tile"] = "AMX"
    return {
        "cpu": cpu,
        **generation,
        "features": [name for flag, name in features.items() if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__.partition("+")[0],
    }


def measure(script: str, arguments: str) -> dict | None:
    """Runs a script, its output shown as it comes; what its last line, JSON, says. None where it has left out
    what it measures, for lack of data."""
    command = [sys.executable, str(REPO / "benchmarks" / script), *arguments.split()]
    line = ""
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
    if process.returncode:
        sys.exit(f"python benchmarks/{script} {arguments} ended with exit code {process.returncode}")
    if not line.startswith("{"):
        return None
    return {"command": f"python benchmarks/{script} {arguments}", **json.loads(line)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="; ".join([*PARTS, *LONG]))
    parser.add_argument("--all", action="store_true", help=f"every part but {', '.join(LONG)}")
    parser.add_argument(
        "--quick", action="store_true", help="every part, too small to mean anything: a trial"
    )
    results, output = str(REPO / "benchmarks" / "results.json"), str(REPO / "docs")
    parser.add_argument("--results", default=results, metavar="FILE")
    parser.add_argument("--output", default=output, metavar="FOLDER", help="of the page")
    args = parser.parse_args(argv)
    if args.quick and (args.results, args.output) == (results, output):
        parser.error("--quick measures nothing worth keeping: give it --results and --output of its own")
    parts = QUICK if args.quick else {name: part[:2] for name, part in PARTS.items()} | LONG
    every = [name for name in parts if name not in LONG]
    wanted = every if args.all or args.quick else args.parts
    if unknown := [name for name in wanted if name not in parts]:
        parser.error(f"no such part: {', '.join(unknown)}; there are: {', '.join(parts)}")
    try:
        import page
    except ImportError:
        parser.error("the pictures need matplotlib: pip install matplotlib")
    path = Path(args.results)
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() and not args.quick else {}
    for name in wanted:
        print(f"\n== {name}: python benchmarks/{' '.join(parts[name])}", flush=True)
        measured = measure(*parts[name])
        if measured is None:
            continue
        found[name] = {"machine": machine(), **measured}
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if missing := [name for name in every if name not in found]:
        parser.error(f"not measured yet: {', '.join(missing)}; --all measures everything")
    page.write({name: found[name] for name in parts if name in found}, Path(args.output))
    print(f"Page: {Path(args.output) / 'benchmarks.md'}")


if __name__ == "__main__":
    main()
