"""Other places than a checkout on Linux: systems without what POSIX alone has, such as Windows, and a wheel
that is installed.

This file is also a script that runs another one on what stands in for Windows. What POSIX alone has is
missing, folders cannot be opened, and a file that is mapped into memory cannot be replaced.
"""

import builtins
import faulthandler
import importlib.util
import os
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
POSIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios"}
POSIX_NAMES = {
    signal: "SIGUSR1 SIGUSR2 SIGHUP SIGCHLD SIGKILL SIGQUIT SIGPIPE siginterrupt",
    faulthandler: "register unregister",
    os: "sched_getaffinity fork geteuid getuid getpgid killpg sysconf O_DIRECTORY O_NOFOLLOW O_NONBLOCK"
    " mkfifo fchmod posix_fadvise",
}


def pretend():
    plain_import, plain_open, plain_replace = builtins.__import__, os.open, os.replace

    def imported(name, namespace=None, *rest, **more):
        importer = (namespace or more.get("globals") or {}).get("__name__", "")
        if name in POSIX_MODULES and importer.startswith("histocc"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return plain_import(name, *([namespace] if namespace is not None else []), *rest, **more)

    def opened(path, *rest, **more):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", path)
        return plain_open(path, *rest, **more)

    def replaced(source, target, **more):
        with open("/proc/self/maps", encoding="utf-8") as maps:
            if any(line.rstrip().endswith(os.path.realpath(target)) for line in maps):
                raise PermissionError(13, "Permission denied", target)
        return plain_replace(source, target, **more)

    import torch._dynamo  # torch's use of these names is its affair  # noqa: F401

    builtins.__import__, os.open, os.replace = imported, opened, replaced
    for module, names in POSIX_NAMES.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)


if __name__ == "__main__":
    sys.path[0] = str(REPO)
    pretend()
    sys.argv[:] = sys.argv[1:]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.exit()

import pytest
from helpers import FINETUNE, TINY, run, write_rows

from histocc.runtime.errors import UserError
from histocc.runtime.world import init_world

pytestmark = pytest.mark.processes
USE_FROM_PYTHON = """
import sys
from histocc import OccCANINE
print(OccCANINE(sys.argv[1], device="cpu", verbose=False).predict(["blacksmith"], lang="en"))
"""


def test_one_process_does_all_that_a_user_asks_for(tmp_path):
    def on_other_system(*line):
        return run(__file__, *line)

    data, model, coded = (tmp_path / name for name in ("data.csv", "run", "coded.csv"))
    write_rows(data, 40)
    (tmp_path / "texts.csv").write_text("occ1,lang\nblacksmith,en\nfisker,da\n")
    (tmp_path / "use.py").write_text(USE_FROM_PYTHON)
    columns = ["--formatter", "hisco", "--target-cols", "hisco_1", "hisco_2", "--language-col", "lang"]
    train = [FINETUNE, "--dataset", data, *columns, *TINY, "--batch-size", "8", "--save-path", model]
    on_other_system("histocc.prepare", data, *columns, "--save-path", tmp_path / "report")
    on_other_system(*train, "--max-steps", "2")
    assert "Resuming from step 2" in on_other_system(*train, "--max-steps", "3")
    texts = ["--input", tmp_path / "texts.csv", "--column", "occ1", "--language-column", "lang"]
    on_other_system("histocc.predict", "--model", model, *texts, "--output", coded)
    assert coded.read_text().count("\n") == 3
    on_other_system("histocc.evaluate", "--model", model, "--data", data)
    on_other_system("histocc.review", "make", coded, "--output", tmp_path / "sheet.csv")
    on_other_system("histocc.export", model, tmp_path / "exported.bin", "--to", "published")
    on_other_system("histocc.watch", model, "--once")
    on_other_system("histocc.doctor", "--device", "cpu")
    assert "prob_1" in on_other_system(tmp_path / "use.py", model)


def test_several_processes_on_windows_are_one_message(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="WSL"):
        init_world(True)


# ---- the package as it is installed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if None in map(importlib.util.find_spec, ("pip", "setuptools")):
        pytest.skip("needs pip and setuptools")
    source = tmp_path_factory.mktemp("wheel") / "source"  # setuptools leaves folders beside pyproject.toml
    shutil.copytree(REPO / "histocc", source / "histocc", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("finetune.py", "train_mixer.py", "pyproject.toml", "README.md"):
        shutil.copy(REPO / name, source)
    build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", source.parent, source]
    subprocess.run([sys.executable, "-m", *map(str, build)], check=True, timeout=300)
    return next(source.parent.glob("*.whl"))


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
    install = ["pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run([sys.executable, "-m", *map(str, install)], check=True, timeout=120)
    (site / "torch.pth").write_text(sysconfig.get_paths()["purelib"])
    data = write_rows(tmp_path / "rows.csv", 40)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def output_of(*line):
        done = subprocess.run(
            [str(python), *map(str, line)], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = output_of("-c", "import histocc; print(histocc.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path)
    flags = ["--train-data", data, "--val-data", data, "--save-dir", "run", *TINY, "--max-steps", 2]
    output_of("-m", "train_mixer", *flags)
    assert (tmp_path / "run" / "last.bin").is_file()
    assert output_of(site / "bin" / "histocc", "predict", "--help").startswith("usage: histocc predict ")
