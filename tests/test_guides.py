"""The commands of README.md and MULTI_GPU_TRAINING.md are run as they stand there, on a small file, with
small sizes put behind them.

Those of one process that end soon are run always; `--guides` runs all of them, each once, in the order in
which they stand.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPO, environment, read_logs, write_csv, write_rows

GUIDES = ("README.md", "MULTI_GPU_TRAINING.md", "docs/published.md", "docs/faults.md")
SMALL = [
    "--model-size",
    "tiny",
    "--device",
    "cpu",
    "--max-steps",
    "2",
    "--batch-size",
    "4",
    "--ngram-passes",
    "1",
]
# test_launchers and the installation by .ci/run
ELSEWHERE = (
    "tests/run",
    "pip install",
    "./launch_training.sh\n",
)
HELP = """
import finetune, train_mixer
from histocc import doctor, export, plot, prepare, watch
from histocc.evaluate import __main__ as evaluate
from histocc.predict import arguments as predict_arguments
for script in (finetune, train_mixer, doctor, evaluate, export, plot, predict_arguments, prepare, watch):
    print(script.get_args_parser().format_help())
"""


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (REPO / name).read_text(encoding="utf-8"), re.M | re.S)


def commands() -> list[tuple[str, str]]:
    """(guide, command), equal ones once."""
    found: dict[str, str] = {}
    for name in GUIDES:
        for block in blocks(name, "bash"):
            for line in re.sub(r"\\\n\s*", "", block).splitlines(keepends=True):
                if line.strip() and not line.startswith(ELSEWHERE):
                    found.setdefault(line.strip(), name)
    return [(name, line) for line, name in found.items()]


@pytest.fixture
def place(tmp_path):
    """A folder that looks like the repository, with data.csv, train.csv, val.csv, and commands that add SMALL
    to every training.
    """
    folder = tmp_path
    for name in (
        "finetune.py",
        "train_mixer.py",
        "launch_training.sh",
        "run_multi_gpu_train.sh",
        "histocc",
        "scripts",
        "configs",
        "benchmarks",
    ):
        (folder / name).symlink_to(REPO / name)
    for name, rows in (
        ("data.csv", 60),
        ("train.csv", 60),
        ("val.csv", 12),
        ("a.csv", 40),
        ("b.csv", 30),
        ("v.csv", 12),
        ("test.csv", 30),
    ):
        write_rows(folder / name, rows, 0 if rows == 60 else 1000)
    write_csv(folder / "new.csv", ("id", "occ1", "lang"), [(i, f"weaver no {i}", "en") for i in range(20)])
    (folder / "bin").mkdir()
    for name, start in (
        ("python", [sys.executable]),
        ("torchrun", [sys.executable, "-m", "torch.distributed.run"]),
    ):
        (folder / "bin" / name).write_text(
            f'#!/bin/bash\ncase "$*" in *finetune.py*|*train_mixer.py*) exec {shlex.join(start)} "$@"'
            f" {' '.join(SMALL)} ;; esac\n"
            f'exec {shlex.join(start)} "$@"\n'
        )
        (folder / "bin" / name).chmod(0o755)
    return folder


def run(place: Path, line: str, **env: str) -> subprocess.Popen:
    env = environment(**env) | {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
        "HEAD": "127.0.0.1",
    }
    if "histocc.plot" in line:
        env["PYTHONPATH"] = str(REPO)  # matplotlib is hidden from the others
    return subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=place,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check(place: Path, line: str) -> None:
    """Runs it; where the number of a machine stands in it, on two at once."""
    numbers = ["0", "1"] if "$NODE_RANK" in line else ["0"]
    running = [run(place, line, NODE_RANK=number) for number in numbers]
    for process in running:
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, f"{line}\n{output}"


def is_short(line: str) -> bool:
    return (
        line.startswith("python ")
        and "torch.distributed" not in line
        and ("--config" in line or "histocc.prepare" in line)
    )


def test_there_are_commands():
    assert len(commands()) > 15 and sum(is_short(line) for _, line in commands()) >= 2


@pytest.mark.parametrize("name", GUIDES)
def test_what_the_guides_name_is_there(name):
    """Files between backquotes, and long flags."""
    text = (REPO / name).read_text(encoding="utf-8")
    files = {path for path in re.findall(r"`((?:[\w.]+/)*[\w]+\.(?:py|sh|toml|md))`", text)}
    assert [
        path
        for path in files - {"report.md"}
        if not any(at.exists() for at in (REPO / path, REPO / "histocc" / path))
    ] == []
    scripts = subprocess.run(
        [sys.executable, "-c", HELP], cwd=REPO, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert scripts.returncode == 0, scripts.stderr
    known = scripts.stdout
    ours = {flag for flag in re.findall(r"`(--[a-z][a-z0-9-]+)", text)}
    others = {"--array", "--max-restarts", "--faults", "--slurm", "--guides", "--print-only", "--plain"}
    assert len(ours) > 4 and [flag for flag in sorted(ours - others) if flag not in known] == []


@pytest.mark.processes
def test_short_commands_run(place):
    for _, line in commands():
        if is_short(line):
            check(place, line)


@pytest.mark.processes
def test_the_two_commands_that_compare_losses_agree(place):
    lines = [line for _, line in commands() if "--float64" in line]
    assert [line.split()[-1] for line in lines] == ["./one", "./two"]
    for line in lines:
        check(place, line)
    one, two = ([row["train_loss"] for row in read_logs(place / name)] for name in ("one", "two"))
    assert len(one) == 2 and one == pytest.approx(two, rel=1e-9)


@pytest.mark.processes
@pytest.mark.parametrize("name", GUIDES)
def test_every_command_runs(place, request, name):
    """In the order in which they stand, in one folder for each guide."""
    if not request.config.getoption("--guides"):
        pytest.skip("--guides runs them: some minutes")
    for guide, line in commands():
        if guide == name:
            print(f"{name}: {line}", flush=True)
            check(place, line)
    for block in blocks(name, "python"):
        done = subprocess.run(
            [sys.executable, "-c", block],
            cwd=place,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
