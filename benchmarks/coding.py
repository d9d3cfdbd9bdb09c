"""How fast a file is coded from the command line, and in how much memory:

    python -m benchmarks.coding                             # a million rows of the sample; size tiny
    python -m benchmarks.coding --rows 100000 --decoders greedy flat
    python -m benchmarks.coding --draw-from register.csv    # its rows (occ1, lang) again and again

Every run is a process of its own, whose peak memory is what the system counted.
"""

import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from . import common
from .common import REPO, arguments, command, environment, finish, read_csv, table, write_csv, write_sample


def coding(model: str, source: str, output: str, flags: str) -> str:
    """Return the command that codes a file with columns occ1 and lang."""
    files = f"--model {shlex.quote(model)} --input {shlex.quote(source)} --output {shlex.quote(output)}"
    return f"-m histocc.predict {files} --input-col occ1 --language-col lang {flags}"


def code(model: str, source: str, flags: str, threads: int | None, output: str | None = None) -> dict:
    """Return rows per second, as the command says it, and peak memory. output: None if nobody reads it."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        line = coding(model, source, output or f"{folder}/out.csv", flags)
        process = subprocess.Popen(command(line), cwd=REPO, env=environment(threads), stdout=said)
        _, status, usage = os.wait4(process.pid, 0)
        said.seek(0)
        rate = re.search(r"([\d,]+) rows/s", text := said.read())
    if status or not rate:
        sys.exit(f"{line}: {text}")
    return {"rows_per_sec": float(rate[1].replace(",", "")), "peak_mb": usage.ru_maxrss / 1024}


def words(parts: dict[int, dict]) -> str:
    """Return the text for the page. parts: by rows."""
    rows, coded = max(parts), parts[max(parts)]["greedy"]
    return (
        f"A model of size tiny codes {rows:,} rows of the sample, digit by digit, at"
        f" {coded['rows_per_sec']:,.0f} rows/s; equal texts are coded once ({coded['peak_mb']:,.0f} MB)."
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=200, help="of training, so that most rows get one code")
    parser.add_argument("--model", help="a run instead of training one")
    parser.add_argument("--decoders", nargs="+", default=["greedy"])
    parser.add_argument("--draw-from", metavar="FILE.csv", help="rows drawn from it, with replacement")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    found: dict = {"rows": args.rows, "size": "tiny", "threads": args.threads}
    with tempfile.TemporaryDirectory() as folder:
        source = str(Path(folder) / "rows.csv")
        if args.draw_from:
            rows = [(row["occ1"], row["lang"]) for row in read_csv(args.draw_from)]
            write_csv(source, ("occ1", "lang"), random.Random(1).choices(rows, k=args.rows))
        else:
            write_sample(source, args.rows)
        model = args.model or common.trained(folder, "tiny", args.steps)
        for decoder in args.decoders:
            flags = f"--decoder {decoder} --system coded"
            found[decoder] = code(model, source, flags, args.threads)
    measured = {name: (found[name]["rows_per_sec"], found[name]["peak_mb"]) for name in args.decoders}
    rows = [[name, *map("{:,.0f}".format, each)] for name, each in measured.items()]
    finish(found, table(("decoder", "rows/s", "peak memory, MB"), rows))


if __name__ == "__main__":
    main()
