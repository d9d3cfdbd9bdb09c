"""What the tests of the launchers share: names, small files, and the command lines that a launcher prints."""

import csv
import shlex
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
LAUNCH, MULTI = "launch_training.sh", "run_multi_gpu_train.sh"
SLURM = "scripts/train_slurm_multi_node.sh"
SOURCED = ["scripts/common.sh", "scripts/environment.sh"]
SHELL_FILES = [LAUNCH, MULTI, SLURM, "scripts/train_multi_gpu.sh", *SOURCED, "tests/run", ".ci/run"]
TOOLS = ["bash", "cat", "cksum", "cp", "dirname", "env", "getconf"]
TOOLS += ["grep", "mkdir", "rm", "sed", "sleep", "tail", "touch", "uname"]
JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "4", "SLURM_SUBMIT_DIR": str(REPO), "MASTER_ADDR": "gpu1"}

# A python that answers at once what the launcher asks about torch, and hands everything else to the real one.
# With STARTED it only notes in that file which module it was to run.
FAST_PYTHON = """#!/bin/bash
if [[ $1 == - ]]; then
  cat >/dev/null
  echo "2.13.0 ${FAKE_CUDA:-13.0} ${FAKE_GPUS:-0} --signals-to-handle --shutdown-timeout"; exit
elif [[ $1 == -m && -n $STARTED ]]; then
  echo "$2" >>"$STARTED"; exit $([[ $2 != "$FAILING" ]] || echo 7)
fi
exec REAL "$@"
"""


def write_executable(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
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
