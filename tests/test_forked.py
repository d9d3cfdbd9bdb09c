"""Work that forked processes share: results in order, errors, a process that dies; coding and evaluating on
several cores without a launcher.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import REPO, run_here, write_csv
from test_predict import CODES, flags, model, predict_here, table  # noqa: F401

from histocc.evaluate import __main__ as evaluate
from histocc.predict import __main__ as predict
from histocc.predict import coding
from histocc.runtime import forked
from histocc.runtime.device import settings_of_torch
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.forked import Forked, choose_processes
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World


def never() -> None:
    pass


def test_results_come_in_order_and_memory_is_that_of_the_parent():
    weights, here = torch.ones(1000), os.getpid()
    found = Forked(3, never).each(lambda number: (number, float(weights.sum()), os.getpid()))
    assert [each[:2] for each in found] == [(0, 1000.0), (1, 1000.0), (2, 1000.0)]
    assert found[0][2] == here and len({process for *_, process in found}) == 3


@pytest.mark.parametrize(
    "error, kind, said",
    [
        (UserError("a column is missing"), UserError, "a column is missing"),
        (Stopped(), Stopped, None),
        (None, TrainingError, "has died .SIGKILL"),
    ],
)
def test_a_process_that_dies_or_fails_is_noticed_while_others_work(error, kind, said):
    shared = Forked(3, never)

    def work(number: int) -> None:
        if number == 1 and error:
            raise error
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            shared.check()
            time.sleep(0.01)

    with pytest.raises(kind, match=said):
        shared.each(work)


def test_a_process_is_waited_for_as_long_as_it_works():
    shared = Forked(3, never, 1.0)

    def work(number: int) -> bytes:
        for _ in range(30 * number):
            time.sleep(0.05)
            shared.check()
        return b"x" * 10**6  # more than a pipe takes at once

    assert list(map(len, shared.each(work))) == [10**6] * 3
    with pytest.raises(TrainingError, match=r"process \d+.* 1 s"):
        shared.each(lambda number: number == 2 and os.kill(os.getpid(), signal.SIGSTOP))


THREADS = """
import os, sys, time
sys.path[:0] = ["{repo}"]
import torch
from histocc.runtime import forked
from histocc.runtime.signals import Stopped, listening
from histocc.runtime.world import World

torch.set_num_threads(4)
x = torch.rand(512, 512)
x @ x  # the parent has threads now
print("sums", *forked.Forked(2, lambda: None).each(lambda number: float((x @ x).sum()) > 0), flush=True)

with listening() as request:
    try:
        shared = forked.Forked(2, World().give_up_if_asked)
        shared.each(lambda number: time.sleep(60) if number else print("waits", flush=True))
    except Stopped:
        print("stopped by", request.reason)
"""


@pytest.mark.processes
def test_threads_of_the_parent_and_a_signal_to_all(tmp_path):
    """A fork leaves the parent's threads behind; a queue sends its signal to all processes of a job."""
    script = tmp_path / "threads.py"
    script.write_text(THREADS.format(repo=REPO))
    line = [sys.executable, str(script)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "sums True True\n"
    assert process.stdout.readline() == "waits\n"
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and output == "stopped by SIGTERM\n"


def limit_cores(monkeypatch, folder, groups, limits):
    """Set the cgroups of this process, and the files of their limits, by their paths."""
    (folder / "own").write_text(groups)
    for name, content in limits.items():
        (folder / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "all" / name).write_text(content + "\n")
    monkeypatch.setattr(forked, "OWN_CGROUPS", str(folder / "own"))
    monkeypatch.setattr(forked, "CGROUPS", str(folder / "all"))


FIRST = "cpu,cpuacct/docker/cpu.cfs_quota_us", "cpu,cpuacct/docker/cpu.cfs_period_us"  # version 1


@pytest.mark.parametrize(
    "groups, limits, cores",
    [
        ("0::/", {}, 64),
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "390000 100000"}, 4),
        ("0::/a.slice/b c", {"a.slice/b c/cpu.max": "300000 100000"}, 3),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2),
        ("0::/gone/on/the/host", {"cpu.max": "500000 100000"}, 5),
        ("0::/other", {"a/cpu.max": "200000 100000"}, 64),
        ("3:memory:/x\n2:cpu,cpuacct:/docker/1\n0::/", dict(zip(FIRST, ("700000", "100000"))), 7),
        ("2:cpu,cpuacct:/docker", dict(zip(FIRST, ("-1", "100000"))), 64),
    ],
)
def test_the_limits_of_cgroups_and_of_those_above_are_kept(groups, limits, cores, monkeypatch, tmp_path):
    """Processes and the launchers' shell both keep them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    limit_cores(monkeypatch, tmp_path, groups + "\n", limits)
    assert forked.usable_cores() == cores
    script = "set -euo pipefail; source scripts/common.sh; env() { echo 64; }"  # instead of nproc
    script += f"; OWN_CGROUPS={tmp_path}/own CGROUPS={tmp_path}/all; usable_cores"
    done = subprocess.run(["bash", "-c", script], cwd=REPO, capture_output=True, text=True)
    assert done.stdout == f"{cores}\n", done.stderr


def test_how_many_processes(monkeypatch, tmp_path):
    alone = World()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    limit_cores(monkeypatch, tmp_path, "0::/\n", {"cpu.max": "390000 100000"})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert [choose_processes(None, alone, pieces) for pieces in (0, 1, 2, 3, 9)] == [1, 1, 1, 3, 4]
    assert choose_processes(7, alone, 9) == 7 and choose_processes(7, alone, 2) == 2
    on_gpu = World(device=torch.device("cuda"))
    for world, why in ((World(size=2), "the launcher"), (on_gpu, "it is for CPUs")):
        assert choose_processes(None, world, 9) == 1 == choose_processes(1, world, 9)
        with pytest.raises(UserError, match=why):
            choose_processes(2, world, 9)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # OMP_NUM_THREADS=1
    assert choose_processes(None, alone, 9) == 1 and choose_processes(3, alone, 9) == 3
    monkeypatch.setattr(sys, "platform", "darwin")  # where nothing computes in a forked process
    assert choose_processes(1, alone, 9) == 1
    with pytest.raises(UserError, match="--processes 2: this system"):
        choose_processes(2, alone, 9)


def coded(tmp_path, model, *more) -> tuple[bytes, str]:
    source, output = table(tmp_path / "in.csv", 100), tmp_path / f"out{'_'.join(map(str, more))}.csv"
    said = predict_here(*flags(model, source, output, "--batch-size", 16, *more))
    return output.read_bytes(), said


def test_a_file_is_the_same_on_several_cores_also_if_a_process_died(tmp_path, model, monkeypatch):
    monkeypatch.setattr(coding, "PIECE", 12)  # so that there are some to share
    one, _ = coded(tmp_path, model, "--processes", 1)
    several, said = coded(tmp_path, model, "--processes", 3)
    assert "3 processes on cpu" in said and one == several and one.count(b"\n") > 100
    part = coding.Coding.code_piece

    def dies(coding, number, texts) -> None:
        if number == 3:  # of the second process
            os.kill(os.getpid(), signal.SIGKILL)
        part(coding, number, texts)

    asked = flags(model, tmp_path / "in.csv", tmp_path / "out.csv", "--batch-size", 16, "--processes", 2)
    with monkeypatch.context() as patched:
        patched.setattr(coding.Coding, "code_piece", dies)
        assert "has died" in run_here(predict.main, *asked, "--device", "cpu", code=1)
    assert list((tmp_path / "out.csv.parts").glob("*.part")) and "resuming" in predict_here(*asked)
    assert (tmp_path / "out.csv").read_bytes() == one


def test_a_report_is_the_same_on_one_core_and_on_several(tmp_path, model):
    texts = [(f"{word} {i}", CODES[1 + i % 5]) for i in range(20) for word in ("smed", "fisker", "farmer")]
    data = write_csv(tmp_path / "known.csv", ["occ1", "hisco_1"], texts)
    reports = []
    for number in (1, 2):
        folder = tmp_path / f"report{number}"
        asked = ["--model", model, "--data", data, "--target-cols", "hisco_1", "--output", folder]
        asked += ["--batch-size", 8, "--device", "cpu", "--processes", number]
        with settings_of_torch():
            torch.set_num_threads(1)
            run_here(evaluate.main, *asked)
        reports.append(json.loads((folder / "report.json").read_text()))
    digits = [{name: each["by_digits"] for name, each in report["decoders"].items()} for report in reports]
    assert digits[0] == digits[1]
