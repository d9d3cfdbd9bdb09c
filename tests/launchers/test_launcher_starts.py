"""How a launcher may be started: through links, by other shells, without an environment, with nowhere to
print to, under nohup.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from launching import (
    LAUNCH,
    MULTI,
    NAMED,
    REPO,
    RUN_AND_WAIT,
    SLURM,
    SOURCED,
    after,
    option,
    printed_command,
    write_executable,
    write_table,
)

# A python that notes which module it was to run, and runs none.
STARTED = """#!/bin/bash
[[ $1 != -m ]] || { echo "$2" >>started; exit; }
"""
JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(REPO), "MASTER_ADDR": "gpu1"}


@pytest.fixture
def starting(bin_dir):
    """Makes the launchers start what only notes its name in the file `started`."""
    python = bin_dir / "python"
    write_executable(python, STARTED + python.read_text().partition("\n")[2])


# ---- links and shells ----


def test_a_launcher_starts_through_links(plan, bin_dir, tmp_path, data):
    (bin_dir / "readlink").symlink_to(shutil.which("readlink"))
    links = tmp_path / "a -b" / "bin"
    links.mkdir(parents=True)
    (links / "absolute").symlink_to(REPO / LAUNCH)
    (links / "relative").symlink_to(os.path.relpath(REPO / LAUNCH, links))
    (links / "-x").symlink_to("../bin/relative")
    straight = printed_command(plan(LAUNCH, data, "--", *NAMED))
    for name in ("absolute", "relative", "-x"):
        assert printed_command(plan(str(links / name), data, "--", *NAMED)) == straight
    found = plan(str(links / "-x"), data, "--", *NAMED, PATH=f"{links}:{bin_dir}", CDPATH="/")
    assert printed_command(found) == straight


def test_a_copy_of_a_launcher_says_where_it_belongs(plan, tmp_path):
    shutil.copy(REPO / MULTI, tmp_path / "copied.sh")
    message = plan(str(tmp_path / "copied.sh"), code=2).stderr
    assert message.startswith(f"error: {tmp_path} is not the folder of histocc")


@pytest.mark.parametrize("script", [LAUNCH, MULTI, SLURM])
def test_other_shells_start_a_launcher(plan, data, script):
    variables = JOB if script == SLURM else {}
    straight = printed_command(plan(script, data, "--", *NAMED, **variables))
    shells = [("bash", "--posix"), *((path,) for name in ("dash", "zsh") if (path := shutil.which(name)))]
    for shell in shells:
        assert printed_command(plan(script, data, "--", *NAMED, shell=shell, **variables)) == straight
    assert printed_command(plan(script, data, "--", *NAMED, POSIXLY_CORRECT="1", **variables)) == straight


@pytest.mark.skipif(shutil.which("dash") is None, reason="dash is not installed")
def test_a_missing_bash_is_named(plan, tmp_path):
    (tmp_path / "empty").mkdir()
    for script in (LAUNCH, MULTI, SLURM):
        message = plan(script, code=2, shell=(shutil.which("dash"),), PATH=str(tmp_path / "empty")).stderr
        assert "needs bash, which was not found" in message


# ---- printing ----


@pytest.mark.parametrize("closed", [">/dev/full", ">&-", "<&- >&- 2>&-", "| true"])
def test_printing_ends_no_run(plan, starting, data, tmp_path, closed):
    shell = ("bash", "-o", "pipefail", "-c", f'"$0" "$@" {closed}')
    plan(LAUNCH, data, "--", *NAMED, shell=shell, HISTOCC_LAUNCH_DRY_RUN="")
    plan(LAUNCH, shell=shell, HISTOCC_LAUNCH_DRY_RUN="")
    plan(SLURM, data, "--", *NAMED, "--overwrite", shell=shell, SLURM_RESTART_COUNT="1", **JOB)
    assert (tmp_path / "started").read_text().split() == [
        "torch.distributed.run",
        "histocc.sample",
        "torch.distributed.run",
        "histocc.sample.show",
    ]


@pytest.mark.parametrize("closed", ["2>/dev/full", "2>&-"])
def test_a_mistake_ends_with_2_even_where_it_cannot_be_said(plan, closed):
    plan(LAUNCH, "nowhere.csv", code=2, shell=("bash", "-c", f'"$0" "$@" {closed}'))


def test_variables_that_are_not_set(plan, starting, data, bin_dir):
    env = ("env", "-i", f"PATH={bin_dir}", "bash")
    assert "torch.distributed.run" in plan(LAUNCH, data, "--print-only", "--", *NAMED, shell=env).stdout
    assert "torch.distributed.run" in plan(LAUNCH, "--print-only", shell=env).stdout


# ---- what --print-only makes ----


@pytest.fixture
def bare(tmp_path, bin_dir):
    """A copy of the launchers without .venv, on a machine whose one Python has no torch."""
    repo = tmp_path / "repo"
    (repo / "scripts").mkdir(parents=True)
    for name in (LAUNCH, MULTI, SLURM, *SOURCED, "requirements.txt"):
        shutil.copy(REPO / name, repo / name)
    (repo / "histocc").symlink_to(REPO / "histocc")
    (bin_dir / "python").rename(bin_dir / "with torch")
    write_executable(
        bin_dir / "python3.11",
        "#!/bin/bash\n[[ $* != - ]] || { echo it has no torch; exit 1; }\n"
        f'exec {shlex.quote(sys.executable)} "$@"\n',
    )
    return repo


def test_print_only_makes_nothing(plan, bare, data):
    before = sorted(bare.rglob("*"))
    for script, variables in ((LAUNCH, {}), (MULTI, {}), (SLURM, JOB | {"SLURM_SUBMIT_DIR": str(bare)})):
        done = plan(str(bare / script), "2", data, "--", *NAMED, **variables)
        words = printed_command(done)
        assert words[0] == f"{bare}/.venv/bin/python" and after(words, "--dataset") == data
        assert option(words, "shutdown-timeout") and done.stderr == "" and "not read" not in done.stdout
        assert "would make it with" in done.stdout and "install requirements.txt: torch==" in done.stdout
        columns = plan(str(bare / script), data, **variables).stdout
        assert "Columns:     not read, since that needs torch" in columns
    assert "histocc.sample.show" in plan(str(bare / LAUNCH)).stdout
    assert sorted(bare.rglob("*")) == before


def test_print_only_reads_a_configuration_without_torch(plan, bare, data, tmp_path):
    (tmp_path / "run.toml").write_text(
        'save_path = "./elsewhere"\ntarget_cols = ["hisco_1"]\nlanguage = "en"\n'
    )
    (tmp_path / "args.json").write_text('{"save_path": "kept", "language": "en", "overwrite": true}')
    assert "Save path:   ./elsewhere" in plan(str(bare / LAUNCH), data, "--", "--config", "run.toml").stdout
    slurm = plan(
        str(bare / SLURM),
        data,
        "--",
        "--config",
        str(tmp_path / "args.json"),
        **JOB | {"SLURM_SUBMIT_DIR": str(bare)},
    )
    assert "Save path:   kept" in slurm.stdout  # and overwrite, of that start alone, is not in the way


def test_print_only_without_any_python(plan, bare, bin_dir, data):
    (bin_dir / "python3.11").unlink()
    done = plan(str(bare / MULTI), data, "--", "--config", "run.toml", MASTER_PORT="")
    assert "Python 3.11 or newer (not found here" in done.stdout
    assert "Config:      run.toml is not read here" in done.stdout
    assert option(printed_command(done), "master-port") == "29500" and done.stderr == ""


def test_the_variable_for_print_only_can_be_off(plan, starting, data, tmp_path):
    plan(LAUNCH, data, "--", *NAMED, HISTOCC_LAUNCH_DRY_RUN="0")
    assert (tmp_path / "started").read_text() == "torch.distributed.run\n"


# ---- hang-ups ----


def test_an_ignored_hang_up_stays_ignored(plan, data):
    ignored = option(
        printed_command(plan(LAUNCH, data, "--", *NAMED, hangup=signal.SIG_IGN)), "signals-to-handle"
    )
    assert ignored == "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"
    assert "SIGHUP" in option(printed_command(plan(LAUNCH, data, "--", *NAMED)), "signals-to-handle")


@pytest.mark.parametrize("hangup", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_hang_up_reaches_what_is_followed_by_something(hangup):
    child = "trap 'echo told; exit 7' HUP; trap 'exit 8' TERM; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_AND_WAIT, child],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    if hangup == signal.SIG_IGN:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.4)
        process.send_signal(signal.SIGTERM)
    told = ["told", "ended", "7"] if hangup == signal.SIG_DFL else ["ended", "8"]
    assert process.communicate(timeout=20)[0].split() == told


# ---- the sample ----


def test_the_run_on_the_sample_is_known_by_every_spelling_of_its_folder(plan, tmp_path):
    write_table(tmp_path / "new é" / "sample" / "train.csv", "occ1,hisco_1")
    (tmp_path / "new é" / "last.bin").touch()
    args = '{\n "train_data": [\n  "./new \\u00e9/sample/train.csv"\n ]\n}'
    (tmp_path / "new é" / "args.json").write_text(args)
    for spelled in ("./new é", "new é/", str(tmp_path / "new é")):
        assert "histocc.sample.show" in plan(LAUNCH, "--", "--save-path", spelled).stdout
