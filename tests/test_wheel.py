"""The package as it is installed: a wheel holds every folder, and trains outside the checkout."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from helpers import REPO, TINY, write_rows

pytestmark = pytest.mark.processes
PARTS = ("histocc", "finetune.py", "train_mixer.py", "pyproject.toml", "README.md")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if not {"pip", "setuptools"} <= {
        name for name in ("pip", "setuptools") if importlib.util.find_spec(name)
    }:
        pytest.skip("needs pip and setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # setuptools leaves folders beside pyproject.toml
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PARTS],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("needs a git checkout")
    for name in listed.stdout.split():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((REPO / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", folder]
    subprocess.run([*map(str, build), str(source)], check=True, timeout=300)
    return next(folder.glob("*.whl"))


def test_a_wheel_holds_every_file_of_the_package(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("histocc/")}
    files = (path.relative_to(REPO).as_posix() for path in (REPO / "histocc").rglob("*.*"))
    assert inside == {name for name in files if "__pycache__" not in name}


@pytest.mark.full
def test_an_installed_wheel_trains(wheel, tmp_path):
    """In a separate environment, which sees torch and numpy where they are installed."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        site,
        wheel,
    ]
    subprocess.run(list(map(str, install)), check=True, timeout=120)
    (site / "torch.pth").write_text(sysconfig.get_paths()["purelib"])
    data = write_rows(tmp_path / "rows.csv", 40)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = "import histocc; print(histocc.__file__)"
    found = subprocess.run([python, "-c", where], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path), found.stderr
    command = [
        python,
        "-m",
        "train_mixer",
        "--train-data",
        data,
        "--val-data",
        data,
        "--save-dir",
        "run",
        *TINY,
    ]
    done = subprocess.run(
        list(map(str, [*command, "--max-steps", 2])), cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "last.bin").is_file()
    script = [python, site / "bin" / "histocc", "predict", "--help"]
    shown = subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stdout.startswith("usage: histocc predict "), shown.stderr
