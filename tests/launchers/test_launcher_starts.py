"""What the launchers start, with nothing behind it: the run on the sample, signals, a SLURM job that comes
back; other shells, nowhere to print to, no environment.
"""

import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from launching import JOB, LAUNCH, MULTI, REPO, SLURM, SOURCED, printed_command, write_executable

SAMPLE = ["histocc.sample", "torch.distributed.run", "histocc.sample.show"]


@pytest.mark.parametrize("shell", ["dash", "zsh", "bash --posix"])
def test_other_shells_start_a_launcher(plan, data, shell, job):
    words = shell.split()
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    words[0] = shutil.which(words[0])
    for script, variables in ((LAUNCH, {}), (MULTI, {}), (SLURM, job)):
        done = plan(script, data, shell=tuple(words), **variables)
        assert printed_command(done) == printed_command(plan(script, data, **variables))


@pytest.mark.parametrize("closed", [">/dev/full", ">&-", "<&- >&- 2>&-", "| true"])
def test_printing_ends_no_run(plan, data, tmp_path, closed):
    shell = ("bash", "-o", "pipefail", "-c", f'"$0" "$@" {closed}')
    started = tmp_path / "started"
    plan(MULTI, data, shell=shell, starts=True, STARTED=str(started))
    plan(LAUNCH, shell=shell, starts=True, STARTED=str(started))
    assert started.read_text().split() == [SAMPLE[1], *SAMPLE]
    plan(LAUNCH, "nowhere.csv", code=2, shell=("bash", "-c", '"$0" "$@" 2>/dev/full'))


@pytest.mark.parametrize("failing", SAMPLE)
def test_the_run_on_the_sample_ends_with_the_first_command_that_fails(plan, tmp_path, failing):
    started = tmp_path / "started"
    plan(LAUNCH, starts=True, code=7, STARTED=str(started), FAILING=failing)
    assert started.read_text().split() == SAMPLE[: SAMPLE.index(failing) + 1]


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "HUP under nohup"])
def test_signals_reach_the_command_that_is_waited_for(name):
    child = (
        "trap 'echo told; exit 7' TERM INT HUP; trap 'exit 8' USR1; echo ready; while :; do sleep 0.05; done"
    )
    program = 'source scripts/common.sh; run_and_wait bash -c "$1" || echo "ended $?"'
    ignored = signal.SIG_IGN if "nohup" in name else signal.SIG_DFL
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", program, "-", child],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, ignored),
    )
    while process.stdout.readline() != "ready\n":
        pass
    process.send_signal(getattr(signal, f"SIG{name.split()[0]}"))
    if "nohup" in name:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.4)
        process.send_signal(signal.SIGUSR1)
    expected = ["ended", "8"] if "nohup" in name else ["told", "ended", "7"]
    assert process.communicate(timeout=20)[0].split() == expected


def test_a_slurm_job_saves_before_its_time_limit_and_goes_back_into_the_queue(plan, bin_dir, data, tmp_path):
    """srun tells the job that the limit is near, and ends with 1 once scancel has told the training."""
    write_executable(
        bin_dir / "srun",
        '#!/bin/bash\ntrap \'echo saved; exit 1\' USR1\necho $$ >srun\nprintf "%s " "$@" >args\n'
        "kill -USR1 $PPID\nwhile :; do sleep 0.05; done\n",
    )
    write_executable(bin_dir / "scancel", '#!/bin/bash\necho "$*" >scancel\nkill -USR1 $(cat srun)\n')
    write_executable(bin_dir / "scontrol", '#!/bin/bash\necho "$*" >scontrol\nkill $PPID\n')
    (tmp_path / "scripts").symlink_to(REPO / "scripts")
    job = JOB | {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK": "6"}
    write_executable(
        bin_dir / "sleep",
        '#!/bin/bash\n[[ $1 == 60 ]] || exec -a sleep REAL "$1"\n'.replace("REAL", shutil.which("sleep")),
    )
    done = plan(SLURM, data, starts=True, code=1, **job)
    assert "time limit is near" in done.stdout and "saved\n" in done.stdout
    assert "Job 17 goes back into the queue" in done.stdout
    assert (tmp_path / "scancel").read_text() == "--signal=USR1 17\n"
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"
    words = (tmp_path / "args").read_text().split()
    assert words[:3] == ["--nodes=4", "--ntasks=4", "--ntasks-per-node=1"] and "--cpus-per-task=6" in words
    write_executable(bin_dir / "srun", "#!/bin/bash\nexit 3\n")
    assert "queue" not in plan(SLURM, data, starts=True, code=3, **job).stdout


def test_print_only_makes_nothing(plan, tmp_path, bin_dir, data):
    """Copies without .venv, on a machine without Python, and on one whose Python has no torch."""
    repo = tmp_path / "repo"
    (repo / "scripts").mkdir(parents=True)
    for name in (LAUNCH, MULTI, SLURM, *SOURCED, "requirements.txt"):
        shutil.copy(REPO / name, repo / name)
    (bin_dir / "python").unlink()
    before = sorted(repo.rglob("*"))
    for python in ("", "python3.11"):
        if python:
            text = "#!/bin/bash\n[[ $* != - ]] || { echo it has no torch; exit 1; }\n"
            write_executable(bin_dir / python, f'{text}exec {shlex.quote(sys.executable)} "$@"\n')
        for script, variables in ((LAUNCH, {}), (MULTI, {}), (SLURM, JOB | {"SLURM_SUBMIT_DIR": str(repo)})):
            done = plan(str(repo / script), "2", data, **variables)
            assert printed_command(done)[0] == f"{repo}/.venv/bin/python" and done.stderr == ""
            assert f"would make it with {bin_dir if python else 'Python 3.11'}" in done.stdout
            assert "install requirements.txt: torch==" in done.stdout
        assert "histocc.sample.show" in plan(str(repo / LAUNCH)).stdout
    assert sorted(repo.rglob("*")) == before
