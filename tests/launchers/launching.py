"""What the tests of the launchers share: names, small files, and the command line that a launcher prints."""

import csv
import shlex
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
LAUNCH, MULTI = "launch_training.sh", "run_multi_gpu_train.sh"
SLURM = "scripts/train_slurm_multi_node.sh"
SOURCED = ["scripts/common.sh", "scripts/environment.sh"]
SHELL_FILES = [LAUNCH, MULTI, SLURM, *SOURCED, "tests/run", ".ci/run"]
TOOLS = (
    "bash",
    "cat",
    "cksum",
    "cp",
    "dirname",
    "env",
    "getconf",
    "grep",
    "mkdir",
    "rm",
    "sleep",
    "tail",
    "touch",
)
NAMED = ["--target-cols", "hisco_1", "--language", "en"]  # with these a launcher need not look into the file

# Runs a line of bash as the run on the sample runs its commands.
RUN_AND_WAIT = """
import sys
from histocc.launch.processes import run_and_wait
print("ended", run_and_wait(["bash", "-c", sys.argv[1]]))
"""

# A python that answers at once what the launcher asks about torch, and hands everything else to the real one.
FAST_PYTHON = """#!/bin/bash
if [[ $1 == - ]]; then
  program=$(cat)
  if [[ $program == *get_args_parser* ]]; then
    echo "2.13.0 ${FAKE_CUDA:-13.0} --signals-to-handle --shutdown-timeout"; exit
  fi
  exec REAL "$@" <<<"$program"
fi
exec REAL "$@"
"""


def write_executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def printed_command(done: subprocess.CompletedProcess) -> list[str]:
    """The torchrun command line that was printed, as arguments."""
    return shlex.split(next(line for line in done.stdout.splitlines() if "torch.distributed.run" in line))


def option(words: list[str], name: str) -> str:
    return next(word.partition("=")[2] for word in words if word.startswith(f"--{name}="))


def after(words: list[str], flag: str) -> str:
    """What follows the last occurrence of a flag."""
    return words[len(words) - words[::-1].index(flag)]


def write_table(path: Path, columns: str, rows: int = 60) -> Path:
    values = {"occ1": "labourer no. {}", "lang": "en"}
    names = columns.split(",")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(
            [values.get(name, ("99910", "61110")[i % 2]).format(i) for name in names] for i in range(rows)
        )
    return path
