"""A job on a real SLURM controller with two nodes: the time limit strikes, the job comes back, and ends as if
nothing had happened.

Ten minutes, as root, with Debian's slurm-wlm and munge: tests/run --slurm
"""

import os
import re
import subprocess
import sys
import time

import pytest
import torch
from cluster import available, cluster, wait_for
from helpers import REPO, TRAIN_MIXER, environment, read_logs, run, write_rows

JOB = REPO / "scripts" / "train_slurm_multi_node.sh"
SECONDS = 180  # of training at the speed of a trial; the limit strikes 60 to 120 seconds after each start
FLAGS = ["--formatter", "hisco", "--target-cols", "hisco_1", "hisco_2", "--language-col", "lang"]
FLAGS += ["--model-size", "tiny", "--device", "cpu", "--batch-size", 8, "--num-epochs", 1000]
FLAGS += ["--log-interval", 5, "--eval-interval", 100, "--learning-rate", 1e-3, "--ngrams", "none"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment of jobs."""
    if not available():
        pytest.skip("needs root and munged, slurmctld, slurmd, sbatch, srun: apt-get install slurm-wlm munge")
    with cluster(tmp_path_factory.mktemp("slurm")) as env:
        yield environment(**{name: value for name, value in env.items() if name.startswith("SLURM")}) | {
            "PATH": os.path.dirname(sys.executable) + ":" + os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
        }


def submit(env, *arguments):
    """Number of the job."""
    done = subprocess.run(
        ["sbatch", "--parsable", *map(str, arguments)], env=env, capture_output=True, text=True, cwd=REPO
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def state_of(env, job):
    done = subprocess.run(["scontrol", "show", "job", job, "-o"], env=env, capture_output=True, text=True)
    return re.search(r"JobState=(\w+)", done.stdout)[1], int(re.search(r"Restarts=(\d+)", done.stdout)[1])


def has_ended(env, job):
    return state_of(env, job)[0] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


def test_a_job_that_meets_its_time_limit_comes_back_and_ends_as_if_it_had_not(slurm, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "train.csv", 160)
    write_rows(folder / "val.csv", 16, 1000)
    files = ["--train-data", folder / "train.csv", "--val-data", folder / "val.csv"]
    run(TRAIN_MIXER, *files, *FLAGS, "--save-dir", tmp_path / "trial", "--max-steps", 40, processes=2)
    rates = [row["samples_per_sec"] for row in read_logs(tmp_path / "trial")]
    steps = round(rates[-2] / 16 * SECONDS)
    flags = [*FLAGS, "--max-steps", steps]

    logs = str(tmp_path / "%j.out")
    options = ["--gres=none", "--cpus-per-task=2", "--time=3", "--signal=B:USR1@60"]
    options += ["--output", logs, "--error", logs]
    job = submit(slurm, *options, JOB, 1, folder, "--", *flags, "--save-dir", tmp_path / "job")
    log = tmp_path / f"{job}.out"
    wait_for(lambda: has_ended(slurm, job), "end of the job", 900)
    text = log.read_text()
    print(text)
    state, restarts = state_of(slurm, job)
    assert state == "COMPLETED" and restarts >= 1, text
    assert "one,two" in text and "Number of processes: 2" in text and "Nodes: 2" in text
    for said in ("The time limit is near", "goes back into the queue", "Resuming from step"):
        assert said in text
    time.sleep(1)
    run(TRAIN_MIXER, *files, *flags, "--save-dir", tmp_path / "whole", processes=2, timeout=900)
    whole, parts = (torch.load(tmp_path / name / "last.bin", weights_only=True) for name in ("whole", "job"))
    assert whole["step"] == parts["step"] == steps
    assert all(torch.equal(whole["model"][name], parts["model"][name]) for name in whole["model"])
    assert [row["step"] for row in read_logs(tmp_path / "whole")] == [
        row["step"] for row in read_logs(tmp_path / "job")
    ]


def test_a_job_that_is_submitted_elsewhere_says_so(slurm, tmp_path):
    options = [
        "--parsable",
        "--wait",
        "--gres=none",
        "--cpus-per-task=1",
        "--output",
        "out",
        "--error",
        "out",
    ]
    line = ["sbatch", *options, str(JOB), "data.csv"]
    done = subprocess.run(line, env=slurm, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2 and "is not the folder of histocc" in (tmp_path / "out").read_text()


def test_tasks_of_an_array_are_stopped_and_started_again_by_themselves(slurm, tmp_path):
    write_rows(tmp_path / "data.csv", 160)
    options = ["--array=0-1", "--nodes=1", "--gres=none", "--cpus-per-task=2", "--time=10"]
    options += ["--output", tmp_path / "%a.out", "--error", tmp_path / "%a.out"]
    more = ["--max-steps", 300, "--eval-interval", 1000, "--seed", "%a", "--save-path", tmp_path / "run%a"]
    job = submit(slurm, *options, JOB, 1, tmp_path / "data.csv", "--", *FLAGS, *more)
    first, second = (tmp_path / f"{task}.out" for task in range(2))
    wait_for(lambda: second.exists() and "step 20/" in second.read_text(), "step of the second task", 180)
    # as SLURM does before the time limit
    subprocess.run(["scancel", "--batch", "--signal=USR1", f"{job}_1"], env=slurm, check=True)
    wait_for(lambda: all(has_ended(slurm, f"{job}_{task}") for task in range(2)), "end of both", 400)
    print(first.read_text(), second.read_text())
    assert [state_of(slurm, f"{job}_{task}") for task in range(2)] == [("COMPLETED", 0), ("COMPLETED", 1)]
    assert "The time limit is near" not in first.read_text() and "Stopped by" not in first.read_text()
    assert "goes back into the queue" in second.read_text() and "Resuming from step" in second.read_text()
    runs = [torch.load(tmp_path / f"run{task}" / "last.bin", weights_only=True) for task in range(2)]
    assert [(run["args"]["seed"], run["step"]) for run in runs] == [(0, 300), (1, 300)]


@pytest.mark.parametrize(
    "script, data, flags",
    [
        ("train_llada.py", "docs", ["--val-windows", 2]),
        ("train_prs_med.py", "", ["--scenes", 40, "--val-scenes", 8, "--width", 16]),
        ("train_from_config.py", "configs/scenes.toml", []),
    ],
)
def test_a_script_of_another_model_on_two_nodes(slurm, tmp_path, script, data, flags):
    env = slurm | {"SCRIPT": f"examples/{script}"}
    output = ["--output", tmp_path / "out", "--error", tmp_path / "out"]
    job = submit(
        env,
        *["--gres=none", "--cpus-per-task=1", "--time=10", *output, JOB, 1, *([data] if data else [])],
        *["--", "--device", "cpu", "--max-steps", 3, *flags, "--save-dir", tmp_path / "run"],
    )
    wait_for(lambda: has_ended(env, job), "end of the job", 300)
    text = (tmp_path / "out").read_text()
    print(text)
    assert state_of(env, job)[0] == "COMPLETED", text
    assert "Number of processes: 2" in text and "Nodes: 2" in text and "at step 3 of" in text
