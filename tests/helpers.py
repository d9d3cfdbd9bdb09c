"""Tools that the tests share: small files of rows, and the start of scripts as real processes."""

import contextlib
import csv
import functools
import io
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import types
import unittest.mock
import warnings
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
FINETUNE, TRAIN_MIXER = REPO / "finetune.py", REPO / "train_mixer.py"
DEFAULT = ["--model-size", "tiny", "--device", "cpu"]  # with n-grams, fitted before the first step
TINY = [*DEFAULT, "--ngrams", "none"]
TITLES = [
    ("farmer", "61110"),
    ("wine merchant", "41025"),
    ("blacksmith", "83110"),
    ("shoemaker", "80110"),
    ("farm servant", "62105"),
    ("weaver of linen", "75400"),
    ("carpenter", "95410"),
    ("tailor", "79100"),
]
PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": REPO}
OF_LAUNCHERS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def write_csv(path, header, rows, delimiter=","):
    """Write a UTF-8 CSV file; return its path as text."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    return str(path)


def read(path):
    """Return the rows of a UTF-8 CSV file, a dict of texts each."""
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def words(text):
    """Return flags and their values, separated by blanks."""
    return text.split()


def write_rows(path, n, start=0):
    """Write `n` rows occ1, hisco_1, hisco_2, lang with different texts; every third has two codes."""
    rows = []
    for i in range(start, start + n):
        (text, code), (other, second) = TITLES[i % 8], TITLES[(i * 5 + 3) % 8]
        two = i % 3 == 0 and code != second
        text = f"{text} and {other} no {i}" if two else f"{text} no {i}"
        rows.append((text, code, second if two else "", ("en", "da", "se")[i % 3]))
    return write_csv(path, ("occ1", "hisco_1", "hisco_2", "lang"), rows)


@functools.cache
def without_matplotlib():
    """Return a folder that hides matplotlib if it is on Python's path; not every run draws curves."""
    folder = tempfile.TemporaryDirectory(prefix="histocc")
    Path(folder.name, "sitecustomize.py").write_text("import sys\n\nsys.modules['matplotlib'] = None\n")
    return folder


def environment(**more):
    """Return this environment and `more`, without matplotlib and launchers' variables, one thread each."""
    env = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    path = os.pathsep.join((str(REPO), without_matplotlib().name))
    return env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""} | more


def command(script, *args, processes=None, launcher="run"):
    """Return the command line that starts a script, or a module named as in `python -m`: plain python or
    torchrun; launcher "launch" is the one from before torchrun.
    """
    line = [*([] if str(script).endswith(".py") else ["-m"]), str(script), *map(str, args)]
    if processes:
        torchrun = ["-m", f"torch.distributed.{launcher}", "--standalone", f"--nproc_per_node={processes}"]
        line = [*torchrun, *line, "--distributed"]
    return [sys.executable, "-W", "ignore", *line]


def run(script, *args, processes=None, launcher=None, code=0, timeout=240, **env):
    """Run a script, or a module named as in `python -m`, to the end and check the exit code; return the
    output.

    Its processes are forked, with the variables that a launcher sets. If a launcher is named, it starts them,
    and its exit code counts; `env` takes a fresh process, too.
    """
    if env or launcher:
        line = command(script, *args, processes=processes, launcher=launcher or "run")
        done = subprocess.run(line, env=environment(**env), timeout=timeout, **PIPED)
        ended, output = done.returncode, done.stdout
    else:
        more = ["--distributed"] if processes else []
        ended, output = run_forked(script, [*args, *more], timeout, processes)
    assert ended == code, f"exit code {ended} instead of {code}\n{output}"
    return output


def wait_until(
    condition, said=lambda: "", seconds=240, process=None
):  # busy machines take a minute to load torch
    """Wait until the condition holds; fail with what was `said` when the time is over or the process ends."""
    until = time.monotonic() + seconds
    while not condition():
        assert (process is None or process.poll() is None) and time.monotonic() < until, said()
        time.sleep(0.02)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@functools.cache
def fork_server():
    """Return a context that forks processes with torch and the package imported: most of a short run."""
    context, here = multiprocessing.get_context("forkserver"), dict(os.environ)
    context.set_forkserver_preload(["torch", "torch._dynamo", "histocc.job.train"])
    os.environ.clear()
    os.environ.update(environment())
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(here)
    return context


def start_forked(script, args, output, processes=None, **variables):
    """Fork the processes of a script or module: one in `environment()`, or several with the variables of a
    launcher. Their output is appended to the file `output`.
    """
    Path(output).touch()
    common, ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}, []
    for rank in map(str, range(processes or 1)):
        if processes:
            variables |= {"RANK": rank, "LOCAL_RANK": rank, **common}
            variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = str(processes)
        more = (str(script), list(map(str, args)), str(output), environment(**variables))
        ranks.append(fork_server().Process(target=_as_script, args=more))
        ranks[-1].start()
    return ranks


def ended(ranks, seconds=60):
    """Wait for forked processes; return their exit codes."""
    for rank in ranks:
        rank.join(seconds)
    return [rank.exitcode for rank in ranks]


def wait_until_handled(number, pid):
    """Wait until the process has a handler for the signal."""
    status = Path(f"/proc/{pid}/status")
    wait_until(lambda: int(status.read_text().partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def run_forked(script, args, timeout, processes=None):
    """Run a script or module, see `start_forked`; return (exit code, output). The exit code is the first that
    is not 0, and such a process ends the others, as in a launcher. Its functions of atexit are not called.
    """
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as output:
        left = ranks = start_forked(script, args, output.name, processes)
        until = time.monotonic() + timeout
        while left and time.monotonic() < until:
            multiprocessing.connection.wait([rank.sentinel for rank in left], until - time.monotonic())
            left = [rank for rank in left if rank.is_alive()]
            if any(rank.exitcode for rank in ranks):
                for rank in left:
                    rank.terminate()
        for rank in left:
            rank.kill()
            rank.join()
        if left:
            raise TimeoutError(f"{script} ran longer than {timeout} s\n{output.read()}")
        return next((rank.exitcode for rank in ranks if rank.exitcode), 0), output.read()


def _as_script(script, args, output, variables):
    os.environ.clear()
    os.environ.update(variables)
    written = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.chdir(REPO)
    warnings.simplefilter("ignore")
    sys.path[:] = [
        str(Path(script).parent if script.endswith(".py") else REPO),
        *(folder for folder in sys.path if not Path(folder).is_relative_to(REPO / "tests")),
    ]
    sys.argv = [script, *args]
    if script.endswith(".py"):
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def run_inside(main, *args, draws=False):
    """Run a script's `main` in this process, for what is small or ends before any training; return (exit
    code, output). Torch has its settings (threads, precision) again afterwards. draws: whether a run draws
    its curves, which takes longer than a small training.
    """
    from histocc import plot
    from histocc.runtime.device import settings_of_torch

    output, draw = io.StringIO(), plot.draw_run if draws else lambda folder: None
    with (
        settings_of_torch(),
        unittest.mock.patch.object(plot, "draw_run", draw),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as end:
            code = end.code
    return code or 0, output.getvalue()


def run_here(main, *args, code=0, draws=False):
    """Run a script's `main` in this process, see `run_inside`, and check its exit code, and that it ends with
    one message if it is 2, and without a traceback; return the output.
    """
    ended, output = run_inside(main, *args, draws=draws)
    assert ended == code, f"exit code {ended} instead of {code}\n{output}"
    assert "Traceback" not in output and (code != 2 or output.count("error: ") == 1), output
    return output


def read_statistics_here(monkeypatch):
    """Read files of Stata and SPSS in this process: most of the time of a small file is to start another."""
    import pyreadstat

    from histocc.data import binary

    def run_here(_, input, **how):
        *_, reader, path, how = pickle.loads(input)
        read = getattr(pyreadstat, reader)(path, output_format="dict", **how)
        return subprocess.CompletedProcess((), 0, pickle.dumps(read))

    monkeypatch.setattr(binary, "subprocess", types.SimpleNamespace(run=run_here))


def state_of(folder, name="last.bin"):
    """Return what a checkpoint holds."""
    import torch

    return torch.load(Path(folder) / name, weights_only=True)


def read_logs(folder):
    """Return the rows of logs.csv: a dict of floats each, None where a cell is empty."""
    rows = read(Path(folder) / "logs.csv")
    return [{name: float(value) if value else None for name, value in row.items()} for row in rows]


def greatest_difference(folder, other, names):
    """Return the greatest relative difference of two runs in columns `names` of all rows of logs.csv."""
    rows, others = read_logs(folder), read_logs(other)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    pairs = [(row[name], row2[name]) for row, row2 in zip(rows, others) for name in names]
    assert all((a is None) == (b is None) for a, b in pairs)
    return max(abs(a - b) / abs(a) for a, b in pairs if a is not None and a != 0)


def full(*values):
    """Return a case of a test that is for --all."""
    import pytest

    return pytest.param(*values, marks=pytest.mark.full)


def all_tests():
    """Return whether --all is given."""
    return bool(os.environ.get("HISTOCC_ALL_TESTS"))


def examples(number):
    """Return settings of a property test: so many examples under --all, 20 by default."""
    from hypothesis import settings

    return settings(max_examples=number if all_tests() else min(number, 20), deadline=None)


def mutations(share):
    """Return how many changed files a property test tries: its share of HISTOCC_MUTATIONS, 250 under --all
    and 50 by default unless it is set.
    """
    number = int(os.environ.get("HISTOCC_MUTATIONS") or (250 if all_tests() else 50))
    return max(1, round(share * number))
