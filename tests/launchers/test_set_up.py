"""The environment that the launchers make or take, the shell files, and real runs."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import MULTI, REPO, SHELL_FILES, SOURCED, write_executable, write_table

# ---- environment ----

# A python whose venv and pip do nothing but say so in calls.log; the probe finds torch where pip has
# "installed" it.
FAKE_PYTHON = """#!/bin/bash
here=${BASH_SOURCE[0]%/*}
echo "$*" >>"$CALLS"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "${BASH_SOURCE[0]}" "$3/bin/python" ;;
  *"pip install"*) echo "pip at work"; [[ -z $PIP_FAILS ]] || { echo "No matching distribution"; exit 1; }
    touch "$here/torch"; [[ $* != *-test.txt ]] || touch "$here/pytest" ;;
  "--version") echo "Python 3.11.7" ;;
  "-" | "- "*) cat >/dev/null
    for module in torch "${@:2}"; do [[ -e $here/$module ]] || { echo "it has no $module"; exit 1; }; done
    echo "2.13.0 none 0" ;;
esac
"""


@pytest.fixture
def set_up(bin_dir, tmp_path):
    """Runs the set-up in a copy of the repository's set-up files, with a fake python3.11; returns (process,
    its calls).
    """
    repo = tmp_path / "repo"
    (repo / "scripts").mkdir(parents=True)
    for name in SOURCED:
        shutil.copy(REPO / name, repo / "scripts")
    for name in ("requirements.txt", "requirements-test.txt"):
        shutil.copy(REPO / name, repo)
    (bin_dir / "python").unlink()
    write_executable(bin_dir / "python3.11", FAKE_PYTHON)

    def run(
        requirements: str = "requirements.txt", pip_fails: str = ""
    ) -> tuple[subprocess.CompletedProcess, str]:
        calls = tmp_path / "calls.log"
        calls.write_text("")
        script = f'source scripts/common.sh; set_up {requirements}; echo "uses $PYTHON"'
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=repo,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            env={"PATH": str(bin_dir), "CALLS": str(calls), "PIP_FAILS": pip_fails},
        )
        return done, calls.read_text()

    run.repo, run.bin = repo, bin_dir
    return run


def test_set_up_makes_a_venv_once(set_up):
    done, calls = set_up()
    assert done.returncode == 0, done.stderr
    assert f"uses {set_up.repo}/.venv/bin/python" in done.stdout and "pip at work" not in done.stdout
    assert "pip at work" in (set_up.repo / ".venv" / "pip.log").read_text()
    assert "venv" in calls and "pip install" in calls
    done, calls = set_up()
    assert done.returncode == 0 and "pip" not in calls and "installing" not in done.stdout
    (set_up.repo / "requirements.txt").write_text("torch==2.14.0\n")
    done, calls = set_up()
    assert "pip install" in calls and "-m venv" not in calls
    done, calls = set_up("requirements-test.txt pytest")
    assert "requirements-test.txt" in calls and "-m venv" not in calls


@pytest.mark.parametrize("half", ["no pip yet", "while pip was at work"])
def test_set_up_mends_what_an_interrupted_start_left(set_up, half):
    set_up()
    if half == "no pip yet":
        shutil.rmtree(set_up.repo / ".venv" / "bin")
    else:
        (set_up.repo / ".venv" / "unfinished").touch()
    done, calls = set_up()
    assert done.returncode == 0 and "-m venv" in calls and "pip install" in calls
    assert not (set_up.repo / ".venv" / "unfinished").exists()
    assert "pip" not in set_up()[1]


def test_a_failed_installation_shows_the_end_of_its_log_and_is_tried_again(set_up):
    done, _ = set_up(pip_fails="1")
    assert done.returncode == 1 and "No matching distribution" in done.stderr and "pip.log" in done.stderr
    done, calls = set_up()
    assert done.returncode == 0 and "pip install" in calls


def test_an_environment_with_torch_is_used_as_it_is(set_up):
    write_executable(set_up.bin / "python", FAKE_PYTHON)
    (set_up.bin / "torch").touch()
    done, calls = set_up()
    assert f"uses {set_up.bin}/python" in done.stdout and "pip" not in calls
    assert not (set_up.repo / ".venv").exists()


def test_an_environment_of_the_user_is_not_cleared_away(set_up):
    (set_up.repo / ".venv").mkdir()
    (set_up.repo / ".venv" / "mine").touch()
    done, calls = set_up()
    assert done.returncode == 2 and ".venv was not made by this program and cannot be used" in done.stderr
    assert (set_up.repo / ".venv" / "mine").exists() and "-m venv" not in calls


def test_no_python_says_which_is_needed(set_up):
    (set_up.bin / "python3.11").unlink()
    done, _ = set_up()
    assert done.returncode != 0 and "Python 3.11 or newer" in done.stderr
    assert not (set_up.repo / ".venv").exists()


# ---- shell ----


@pytest.mark.parametrize("name", SHELL_FILES)
def test_shell_files_are_sound(name):
    subprocess.run(["bash", "-n", str(REPO / name)], check=True)
    assert name in SOURCED or os.access(REPO / name, os.X_OK)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say():
    done = subprocess.run(["shellcheck", "-x", *SHELL_FILES], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.processes
@pytest.mark.full
def test_a_run_on_two_processes(tmp_path):
    data = write_table(tmp_path / "rows.csv", "occ1,lang,hisco_1")
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "MODEL_SIZE": "tiny"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    flags = ["--max-steps", "2", "--batch-size", "4", "--ngram-passes", "1", "--save-path", "run"]
    done = subprocess.run(
        [str(REPO / MULTI), str(data), "--", *flags],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Distributed environment: MULTI_CPU" in done.stdout and "Number of processes: 2" in done.stdout
    assert "Columns: --formatter hisco --target-cols hisco_1 --language-col lang, by" in done.stdout
    assert "linear" in next(line for line in done.stdout.splitlines() if line.startswith("Learning rate"))
    with open(tmp_path / "run" / "logs.csv") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["2"]
    assert (tmp_path / "run" / "last.bin").is_file()
