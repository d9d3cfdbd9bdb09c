"""Measures everything that docs/benchmarks.md shows, and writes that page and its pictures:

    python -m benchmarks --all                  # about half an hour on two cores
    python -m benchmarks census quality         # longer parts, which --all leaves out
    python -m benchmarks length batch           # these parts again; the others stay as they are
    python -m benchmarks                        # the page anew from what was measured

Each part is one of the scripts of this folder in a process of its own; what it prints as JSON is kept in
results.json, with its command. Needs matplotlib.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from . import page
from .common import REPO, arguments, command, machine

RESULTS, DOCS = REPO / "benchmarks" / "results.json", REPO / "docs"
CODED_ROWS = (1_000, 10_000, 100_000)
PARTS = {
    "small": "speed --size small",
    "base": "speed --size base --batch 32 --rounds 2 --steps 3 --rows 64 --decode-batch 32",
    "length": "speed --by length --rows 128 --rounds 3",
    "batch": "speed --by batch --rounds 3",
    "processes": "processes",
    **{f"coding {rows}": f"coding --rows {rows}" for rows in CODED_ROWS},
}
# Parts that --all leaves out: most take a quarter of an hour or more.
LONG = {
    "data": "data --rows 1000000 --seconds 5",
    "quality": "quality",
    "tables": "quality --data ammo diary diary_rows diary_shop kldb esco",
    "formats": "formats",
    "formats base": "formats --sizes base --texts 2000",
    "census": "census --register 200000",
    "census base": "census --sizes base --register 0 --rounds 1 --texts 8192",
    "lexicon": "lexicon",
    "recovery 60": "recovery --every 60",
    "recovery 30": "recovery --every 30",
}
# Flags of --quick: too small to mean anything, with one thread, because it runs beside other tests.
TINY = "--size tiny --rounds 1 --threads 1 --batch 8 --steps 1 --rows 8 --decode-batch 8 --learn 2"
QUICK = {
    "small": f"speed {TINY}",
    "length": f"speed --by length --values 8 {TINY}",
    "batch": f"speed --by batch --values 8 {TINY}",
    "processes": "processes --size tiny --batch 8 --rounds 1 --steps 3",
    "data": "data --rows 1000 --seconds 0.5",
    "coding 1000": "coding --rows 1000 --steps 5 --threads 1",
}


def measure(line: str) -> dict:
    """Run a script, with its output shown as it comes; return its last line, which is JSON."""
    last, line = "", f"-m benchmarks.{line}"
    with subprocess.Popen(command(line), cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for last in process.stdout:
            print(last, end="", flush=True)
    if process.returncode:
        sys.exit(f"python {line} ended with exit code {process.returncode}")
    return {"command": f"python {line}", **json.loads(last)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="; ".join([*PARTS, *LONG]))
    parser.add_argument("--all", action="store_true", help=f"every part but {', '.join(LONG)}")
    parser.add_argument(
        "--quick", action="store_true", help="a trial: each kind of part, too small to mean anything"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--output", type=Path, default=DOCS, metavar="FOLDER", help="of the page")
    args = parser.parse_args()
    if args.quick and (args.results, args.output) == (RESULTS, DOCS):
        parser.error("--quick measures nothing worth keeping: give it --results and --output of its own")
    parts = QUICK if args.quick else PARTS | LONG
    wanted = list(QUICK) if args.quick else list(PARTS) if args.all else args.parts
    if unknown := [name for name in wanted if name not in parts]:
        parser.error(f"no such part: {', '.join(unknown)}; there are: {', '.join(parts)}")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the pictures need matplotlib: pip install matplotlib")
    measured = args.results.exists() and not args.quick
    found = json.loads(args.results.read_text(encoding="utf-8")) if measured else {}
    for name in wanted:
        print(f"\n== {name}: python -m benchmarks.{parts[name]}", flush=True)
        found[name] = {"machine": machine(), **measure(parts[name])}
        args.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if missing := [name for name in (QUICK if args.quick else PARTS) if name not in found]:
        parser.error(f"not measured yet: {', '.join(missing)}; --all measures everything")
    page.write({name: found[name] for name in parts if name in found}, args.output)
    print(f"Page: {args.output / 'benchmarks.md'}")


if __name__ == "__main__":
    main()
