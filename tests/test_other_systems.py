"""Other places than a checkout on Linux: systems without what POSIX alone has, such as Windows, and a wheel
that is installed.

This file is also a script that runs another one on what stands in for Windows. What POSIX alone has is
missing, folders cannot be opened, processes are spawned, and a file that is open or mapped into memory can be
neither removed nor renamed nor replaced.
"""

import builtins
import faulthandler
import fcntl
import functools
import importlib.util
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import types
import venv
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
POSIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios"}
POSIX_NAMES = {
    signal: "SIGUSR1 SIGUSR2 SIGHUP SIGCHLD SIGKILL SIGQUIT SIGPIPE siginterrupt",
    faulthandler: "register unregister",
    os: "sched_getaffinity fork geteuid getuid getpgid killpg sysconf O_DIRECTORY O_NOFOLLOW O_NONBLOCK"
    " mkfifo fchmod posix_fadvise",
}


def in_use(path):
    """Whether this process has a file, or what a link leads to, open or mapped."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        used = {line.rstrip().partition("/")[2] for line in maps}
    used |= {os.path.realpath(link)[1:] for link in Path("/proc/self/fd").iterdir()}
    return os.path.isfile(path) and os.path.realpath(path)[1:] in used


def locking(descriptor, *_):
    """The one of msvcrt."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PermissionError(13, "Permission denied") from None


def pretend():
    plain_import, plain_open = builtins.__import__, os.open

    def imported(name, namespace=None, *rest, **more):
        importer = (namespace or more.get("globals") or {}).get("__name__", "")
        if name == "msvcrt" and importer.startswith("histocc"):
            return types.SimpleNamespace(locking=locking, LK_NBLCK=2)
        if name in POSIX_MODULES and importer.startswith("histocc"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return plain_import(name, *([namespace] if namespace is not None else []), *rest, **more)

    def opened(path, *rest, **more):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", path)
        return plain_open(path, *rest, **more)

    import torch._dynamo  # torch's use of these names is its affair  # noqa: F401
    import torch.utils.data._utils.signal_handling as of_torch

    of_torch._set_SIGCHLD_handler = lambda: None
    builtins.__import__, os.open = imported, opened
    for plain in (os.unlink, os.remove, os.rename, os.replace):

        def refusing(*paths, plain=plain, **more):
            for path in filter(in_use, paths):
                raise PermissionError(13, "The file is being used by another process", path)
            return plain(*paths, **more)

        setattr(os, plain.__name__, refusing)
    tempfile.TemporaryFile = tempfile.NamedTemporaryFile
    shutil._use_fd_functions = False
    multiprocessing.set_start_method("spawn", force=True)
    for name in [name for name in sys.modules if name.startswith("histocc")]:
        del sys.modules[name]  # of the process that this one was forked from
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
from helpers import FINETUNE, TINY, all_tests, run, start_forked, wait_until, write_rows

from histocc.runtime.config import ProcessFlags
from histocc.runtime.errors import UserError
from histocc.runtime.world import init_world

pytestmark = pytest.mark.processes
USE_FROM_PYTHON = """
import sys
import torch
from finetune import main as train
from histocc import OccCANINE
from histocc.data import prepare
from histocc.evaluate import evaluate
from histocc.predict.__main__ import main as predict
from histocc.review.__main__ import main as review
from histocc.runtime.errors import UserError

torch.backends.fp32_precision = "tf32"  # torch then refuses to name it in the older way
model, data, folder, texts, *how = sys.argv[1:]
assert not train([*how, model, "--max-steps", "3"])
coded, sheet, final = (folder + name for name in (".coded.csv", ".sheet.csv", ".final.csv"))
columns = ["--column", "occ1", "--language-column", "lang"]
assert not predict(["--model", model, "--input", texts, *columns, "--output", coded])
assert not review(["make", coded, "--output", sheet])
assert not review(["apply", sheet, "--to", coded, "--output", final])
coder = OccCANINE(model, device="cpu", verbose=False)
print(coder.predict(["blacksmith"], lang="en"))
columns = {"target_cols": ["hisco_1", "hisco_2"], "language_col": "lang"}
coder.finetune(data, folder, max_steps=1, device="cpu", **columns)
try:
    evaluate(model, data, device="cpu", **columns)
except UserError as error:
    print(error)
columns |= {"share_val": 1}
print(evaluate(model, data, device="cpu", **columns))

def full(*_):
    raise OSError(28, "No space left on device")

prepare.compare_rows = full
try:
    evaluate(model, data, folder + "/report", device="cpu", **columns)
except UserError as error:
    print(error)
"""
DATA_COLUMNS = ["--formatter", "hisco", "--target-cols", "hisco_1", "hisco_2", "--language-col", "lang"]


on_other_system = functools.partial(run, __file__)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    data = write_rows(tmp_path_factory.mktemp("data") / "data.csv", 40)
    how = [*DATA_COLUMNS, *TINY, "--batch-size", "8", "--share-val", "0"]
    return [FINETUNE, "--dataset", data, *how, "--save-path"]


def test_one_process_does_all_that_a_user_asks_for(train, tmp_path):
    data, model, texts = train[2], tmp_path / "run", tmp_path / "texts.csv"
    texts.write_text("occ1,lang\nblacksmith,en\nfisker,da\n")
    (tmp_path / "use.py").write_text(USE_FROM_PYTHON)
    on_other_system(*train, model, "--max-steps", "2", "--num-workers", "1")
    if all_tests():
        on_other_system("histocc.prepare", data, *DATA_COLUMNS, "--save-path", tmp_path / "report")
        others = write_rows(tmp_path / "others.csv", 40, 1000)
        on_other_system("histocc.evaluate", "--model", model, "--data", others, "--fit-thresholds")
        on_other_system("histocc.export", model, tmp_path / "exported.bin", "--to", "published")
        on_other_system("histocc.watch", model, "--once")
        on_other_system("histocc.doctor", "--device", "cpu")
    said = on_other_system(tmp_path / "use.py", model, data, tmp_path / "tuned", texts, *train[1:])
    assert "Resuming from step 2" in said
    assert "the model was trained on all texts" in said
    assert (tmp_path / "tuned.final.csv").read_text().count("\n") == 3
    assert "prob_1" in said and "no space left on the device" in said.splitlines()[-1]
    assert not list(tmp_path.rglob("run.lock"))


def test_a_folder_is_held_by_the_run_in_it_until_that_is_killed(train, tmp_path):
    folder, said = tmp_path / "run", tmp_path / "said"
    line, watch = [*train, folder, "--num-epochs", "400"], ["histocc.watch", folder, "--once"]
    said.touch()
    [first] = start_forked(__file__, line, said)
    try:
        wait_until((folder / "status.json").is_file, said.read_text)
        assert "in use by another job" in on_other_system(*line, code=2)
        assert "state       running" in on_other_system(*watch)
    finally:
        first.kill()
        first.join()
    assert "ended unexpectedly" in on_other_system(*watch)
    on_other_system(*line, "--max-steps", "1")


def test_several_processes_on_windows_are_one_message(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="WSL"):
        init_world(ProcessFlags())


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


def test_every_file_is_of_a_kind_that_a_wheel_holds():
    settings = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    kinds, files = ["*.py", *settings["package-data"]["*"]], [*(REPO / "histocc").rglob("*.*")]
    files = [path for path in files if "__pycache__" not in path.parts and path.is_file()]
    assert [path for path in files if not any(map(path.match, kinds))] == []
    assert [path for path in files if not (path.parent / "__init__.py").is_file()] == []


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
        line = [str(python), *map(str, line)]
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = output_of("-c", "import histocc; print(histocc.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path)
    flags = ["--train-data", data, "--val-data", data, "--save-dir", "run", *TINY, "--max-steps", 2]
    output_of("-m", "train_mixer", *flags)
    assert (tmp_path / "run" / "last.bin").is_file()
    assert output_of(site / "bin" / "histocc", "predict", "--help").startswith("usage: histocc predict ")
