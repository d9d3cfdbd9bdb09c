"""A machine with the few tools that launchers need and as many GPUs as wanted, and launchers that print what
they would start.
"""

import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from launching import FAST_PYTHON, JOB, REPO, SOURCED, TOOLS, write_executable, write_table


@pytest.fixture
def bin_dir(tmp_path):
    """A folder with the few tools that the launchers need, and no nvidia-smi whatever this machine has."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    write_executable(folder / "nproc", '#!/bin/bash\necho "${OMP_NUM_THREADS:-${OMP_THREAD_LIMIT:-2}}"\n')
    write_executable(folder / "python", FAST_PYTHON.replace("REAL", shlex.quote(sys.executable)))
    return folder


@pytest.fixture
def plan(bin_dir, tmp_path):
    """Runs a launcher in the test's own folder, where ./output is, without starting anything unless `starts`.
    Returns the finished process. variables: FAKE_GPUS is the number of GPUs that torch sees.
    """

    def run(
        script: str,
        *arguments: str,
        code: int = 0,
        shell: tuple[str, ...] = (),
        hangup=signal.SIG_DFL,
        starts: bool = False,
        **variables: str,
    ) -> subprocess.CompletedProcess:
        done = subprocess.run(
            [*shell, str(REPO / script), *(() if starts else ("--print-only",)), *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PATH": str(bin_dir), "HOME": str(tmp_path), "MASTER_PORT": "29511", **variables},
            stdin=subprocess.DEVNULL,
            timeout=60,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),  # this process may ignore it
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def data(tmp_path) -> str:
    return str(write_table(tmp_path / "my data.csv", "occ1,lang,hisco_1,hisco_2"))


@pytest.fixture
def folder(tmp_path) -> str:
    write_table(tmp_path / "both" / "train.csv", "occ1,OCC1950_1")
    write_table(tmp_path / "both" / "val.parquet", "occ1,OCC1950_1")  # only its name is looked at
    return str(tmp_path / "both")


@pytest.fixture
def job(tmp_path):
    """Variables of a SLURM job that was submitted in a copy of the checkout, where ./output is nobody's."""
    for name in (*SOURCED, "requirements.txt"):
        copy = tmp_path / "checkout" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, copy)
    return JOB | {"SLURM_SUBMIT_DIR": str(tmp_path / "checkout")}
