"""Tools of all benchmarks: rows, commands that are run, sides that take turns, tables, pictures."""

import argparse
import csv
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from histocc.runtime.device import synchronize

REPO = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("HISTOCC_REAL_DATA") or REPO.parent / "shared" / "data")
REGISTERS = {"english": FOLDER / "occupations_en.csv", "swedish": FOLDER / "occupations_se.csv"}
REAL = REGISTERS["english"]
COLUMNS = "--formatter hisco --language-col lang"
SAMPLE_ROWS, HELD_OUT = 12_000, 1_200  # rows of the sample, unless more are asked for
NEVER = 10**9  # steps between validations, and between checkpoints


def command(line: str) -> list[str]:
    """Return a command of the repository for `subprocess`: Python with the words of a line, as in a shell."""
    return [sys.executable, *shlex.split(line)]


def device_of(line: str) -> torch.device:
    """Return the device of a command: the CPU, unless it names --device cuda."""
    return torch.device("cuda" if "--device cuda" in line else "cpu")


def environment(threads: int | None = None, line: str = "") -> dict[str, str]:
    """Return a command's environment, with GPUs if it names them; threads: None leaves their number to it."""
    found = os.environ | {"PYTHONPATH": str(REPO)}
    found |= {} if device_of(line).type == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    return found if threads is None else found | {"OMP_NUM_THREADS": str(threads)}


def run(line: str, threads: int | None = None) -> str:
    """Run a command and return its output. A command that fails ends this program with its output."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command(line), cwd=REPO, env=environment(threads, line), **both)
    if done.returncode:
        sys.exit(f"{line} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def script(name: str, processes: int = 1) -> str:
    """Return the words that start a training script on several processes, or on one."""
    torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={processes}"
    return f"{torchrun} {name} --distributed" if processes > 1 else name


def write_sample(path: str | Path, rows: int, seed: int = 1) -> str:
    """Write so many rows of the sample, occ1, lang, hisco_1 to hisco_3, unless the file exists; return it."""
    if not os.path.exists(path):
        run(f"-m histocc.sample --rows {rows} --seed {seed} --output {shlex.quote(str(path))}")
    return str(path)


def read_csv(path: str | Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path: str | Path, header: Sequence[str], rows: Iterable[Sequence]) -> str:
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def data_flags(name: str, folder: str, rows: int = 0) -> str:
    """Return flags of a register, if it is there, or of at least so many rows of the sample to train on; a
    tenth of the texts is held out.
    """
    if name in REGISTERS and REGISTERS[name].exists():
        return (
            f"--dataset {shlex.quote(str(REGISTERS[name]))} --target-cols hisco_1 --share-val 0.1 {COLUMNS}"
        )
    number = max(SAMPLE_ROWS, rows * 102 // 100 + HELD_OUT)
    path = write_sample(Path(folder) / "sample.csv", number)
    flags = f"--target-cols hisco_1 hisco_2 hisco_3 --share-val {HELD_OUT / number:.4g} {COLUMNS}"
    return f"--dataset {shlex.quote(path)} {flags}"


def train(flags: str, steps: int, folder: str, threads: int | None = None) -> str:
    """Train so many steps, which are the schedule; return what finetune.py printed."""
    length = f"--max-steps {steps} --schedule-steps {steps} --num-epochs 1000"
    quiet = f"--eval-interval {NEVER} --save-interval {NEVER} --device cpu --overwrite"
    return run(f"finetune.py {flags} {length} {quiet} --save-path {shlex.quote(folder)}", threads)


def trained(folder: str, size: str, steps: int, more: str = "") -> str:
    """Train a model without n-grams on the sample so that it stops after a code; return its folder."""
    path, output = write_sample(Path(folder) / "learned.csv", 20_000), str(Path(folder) / f"run_{size}")
    flags = f"--dataset {shlex.quote(path)} --target-cols hisco_1 hisco_2 hisco_3 {COLUMNS} --share-val 0.02"
    train(f"{flags} --model-size {size} --learning-rate 5e-4 --ngrams none {more}", steps, output)
    return output


def seconds(work: Callable[[], object], device: torch.device | None = None) -> float:
    """Return how long some work takes, on a GPU until it is done there."""
    device = device or torch.device("cpu")
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def in_turns(
    sides: Mapping[str, Callable[[int], object]], rounds: int, size: int, device: torch.device | None = None
) -> dict[str, float]:
    """Return median seconds of each side's work of `size`. In a turn it first does work of size 1, untimed,
    so that it is as warm as it is alone; the order alternates, and the first round does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in sorted(sides, reverse=number % 2 == 1):
            sides[name](1)
            times[name].append(seconds(lambda name=name: sides[name](size), device))
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def spread(values: Sequence[float]) -> str:
    """Return the mean of fractions as %, and half their range if there are several."""
    mean = f"{100 * statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {50 * (max(values) - min(values)):.1f}"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    first, *lines = (f"| {' | '.join(map(str, line))} |" for line in [heads, *rows])
    return "\n".join([first, "|---" * len(heads) + "|", *lines])


def machine() -> dict:
    """Return the processor of this machine, its cores, and the version of torch."""
    known: dict[str, str] = {}
    if os.path.exists("/proc/cpuinfo"):
        lines = (line.partition(":") for line in open("/proc/cpuinfo", encoding="utf-8"))
        known = {name.strip(): value.strip() for name, _, value in lines}
    features = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "VNNI", "avx512_bf16": "bfloat16"}
    features["amx_tile"] = "AMX"
    found = {"cpu": known.get("model name", "")}
    if "cpu family" in known:  # several generations may have one model name
        found |= {"family": known["cpu family"], "model": known["model"]}
    flags = known.get("flags", "").split()
    return found | {
        "features": [name for flag, name in features.items() if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__.partition("+")[0],
    }


def draw(path: Path, columns: int, fill, width: float = 3.9, rows: int = 1) -> None:
    """Draw a picture; fill: draws on its axes. width: of a column, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, 3.4 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    fill(panels)
    for axes in panels:
        if axes.get_yscale() == "log":
            plain_ticks(axes.yaxis)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=70)


def plain_ticks(axis) -> None:
    """Write ticks of a logarithmic axis as 2 and 50, not as powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for the script with this docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def finish(found: dict, text: str) -> None:
    """End a script: print the findings in words, and as a line of JSON for results.json."""
    print(f"\n{text}\n{json.dumps(found)}")
