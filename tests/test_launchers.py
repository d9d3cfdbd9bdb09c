"""The launchers and the set-up: what they make of their arguments and of the machine, without running it; and one real run."""

import csv
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
LAUNCH, MULTI = "launch_training.sh", "run_multi_gpu_train.sh"
SLURM = "scripts/train_slurm_multi_node.sh"
SHELL_FILES = [LAUNCH, MULTI, SLURM, "scripts/common.sh", "tests/run", ".ci/run"]
TOOLS = ("bash", "cat", "cksum", "cp", "dirname", "env", "getconf", "grep", "mkdir", "rm", "sleep", "tail", "touch")
NAMED = ["--target-cols", "hisco_1", "--language", "en"]      # with these a launcher need not look into the file

# A python that answers at once what the launcher asks about torch, and hands everything else to the real one.
FAST_PYTHON = """#!/bin/bash
if [[ $1 == - ]]; then
  program=$(cat)
  if [[ $program == *get_args_parser* ]]; then echo "2.13.0 ${FAKE_CUDA:-13.0} --signals-to-handle --shutdown-timeout"; exit; fi
  exec REAL "$@" <<<"$program"
fi
exec REAL "$@"
"""


def write_executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def bin_dir(tmp_path):
    """A folder with the few tools that the launchers need, and no nvidia-smi whatever this machine has."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    write_executable(folder / "python", FAST_PYTHON.replace("REAL", shlex.quote(sys.executable)))
    return folder


@pytest.fixture
def gpus(bin_dir):
    """Makes nvidia-smi list so many GPUs."""
    def listed(count: int) -> None:
        lines = "".join(f"echo 'GPU {i}: NVIDIA H100 (UUID: GPU-0{i})'\n" for i in range(count))
        write_executable(bin_dir / "nvidia-smi", "#!/bin/bash\n" + lines)
    return listed


@pytest.fixture
def plan(bin_dir, tmp_path):
    """Runs a launcher in a folder of its own without starting anything. Returns the finished process."""
    def run(script: str, *arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess:
        env = {"PATH": str(bin_dir), "HOME": str(tmp_path), "HISTOCC_LAUNCH_DRY_RUN": "1", "MASTER_PORT": "29511", **variables}
        done = subprocess.run([str(REPO / script), *arguments], capture_output=True, text=True, cwd=tmp_path, env=env,
                              stdin=subprocess.DEVNULL, timeout=60)
        assert done.returncode == code, done.stdout + done.stderr
        return done
    return run


def command(done: subprocess.CompletedProcess) -> list[str]:
    """The torchrun command line that was printed, as arguments."""
    return shlex.split(next(line for line in done.stdout.splitlines() if "torch.distributed.run" in line))


def option(words: list[str], name: str) -> str:
    return next(word.partition("=")[2] for word in words if word.startswith(f"--{name}="))


def after(words: list[str], flag: str) -> str:
    """What follows the last occurrence of a flag."""
    return words[len(words) - words[::-1].index(flag)]


def write_csv(path: Path, columns: str, rows: int = 60) -> Path:
    values = {"occ1": "labourer no. {}", "lang": "en"}
    names = columns.split(",")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([values.get(name, ("99910", "61110")[i % 2]).format(i) for name in names] for i in range(rows))
    return path


@pytest.fixture
def data(tmp_path) -> str:
    return str(write_csv(tmp_path / "my data.csv", "occ1,lang,hisco_1,hisco_2"))


@pytest.fixture
def folder(tmp_path) -> str:
    write_csv(tmp_path / "both" / "train.csv", "occ1,OCC1950_1")
    write_csv(tmp_path / "both" / "val.csv", "occ1,OCC1950_1")
    return str(tmp_path / "both")


# ---- arguments ----

@pytest.mark.parametrize("script", [LAUNCH, MULTI])
def test_arguments_in_every_order(plan, data, script):
    flags = ["--", *NAMED, "--num-epochs", "3"]
    lines = {tuple(command(plan(script, *words, *flags))) for words in
             ([data, "3"], ["3", data], ["--print-only", "3", data], ["3", "--print-only", data])}
    assert len(lines) == 1
    words = list(lines.pop())
    assert option(words, "nproc-per-node") == "3"
    assert str(REPO / "finetune.py") in words and "--distributed" in words
    assert after(words, "--dataset") == data
    assert words[-6:] == [*NAMED, "--num-epochs", "3"]


@pytest.mark.parametrize("script", [LAUNCH, MULTI])
def test_a_folder_goes_to_train_mixer(plan, folder, script):
    words = command(plan(script, folder + "/", "--", *NAMED))
    assert str(REPO / "train_mixer.py") in words
    assert after(words, "--train-data") == f"{folder}/train.csv"
    assert after(words, "--val-data") == f"{folder}/val.csv"
    assert after(words, "--save-dir") == "./output"


def test_without_data_the_sample_is_trained_and_shown(plan, tmp_path):
    done = plan(LAUNCH)
    words = command(done)
    assert after(words, "--train-data") == "./output/sample/train.csv"
    assert after(words, "--model-size") == "tiny"
    assert option(words, "nproc-per-node") == "2"
    assert "-m histocc.sample.show --model ./output" in done.stdout
    assert not (tmp_path / "output").exists()
    assert "DATA is missing" in plan(MULTI, code=2).stderr


def test_the_plan_says_what_will_run(plan, data):
    text = plan(LAUNCH, data, "--", *NAMED, "--save_path=/tmp/elsewhere").stdout
    for part in ("my data.csv", "finetune.py", "Processes:   2", "NO GPU", "TRAINING ON CPUS", "Port:        29511",
                 "Save path:   /tmp/elsewhere", "OMP_NUM_THREADS="):
        assert part in text


@pytest.mark.parametrize("flag", [["--save-path", "x"], ["--save_dir=x"], ["--checkpoint-dir", "x"]])
def test_a_save_path_among_the_flags_is_the_only_one(plan, data, flag):
    words = command(plan(LAUNCH, data, "--", *NAMED, *flag))
    assert "./output" not in words and words[-len(flag):] == flag


def test_wrong_arguments_say_what_was_expected(plan, data, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    write_csv(tmp_path / "half" / "train.csv", "occ1,hisco_1")
    (tmp_path / "table.xlsx").write_bytes(b"PK")
    for name in ("train.csv", "train.parquet", "val.csv"):
        write_csv(tmp_path / "twice" / name, "occ1,hisco_1")
    for script in (LAUNCH, MULTI):
        for path, reason in (("nowhere.csv", "no such file"), ("empty", "without train.csv"), ("half", "without val.csv"),
                             ("table.xlsx", "neither a table"), ("", "is empty")):
            message = plan(script, path, code=2).stderr
            assert message.startswith("error: ") and reason in message and "train.csv and val.csv" in message
        assert "both train.csv and train.parquet: leave one" in plan(script, "twice", code=2).stderr
        assert "unknown option --num-epochs" in plan(script, data, "--num-epochs", "3", code=2).stderr
        assert "NUM is given twice" in plan(script, "2", "3", code=2).stderr
        assert "DATA is given twice" in plan(script, data, data, code=2).stderr
        assert "at least 1" in plan(script, "0", data, code=2).stderr


@pytest.mark.parametrize("script", [LAUNCH, MULTI])
def test_help(plan, script):
    text = plan(script, "--help").stdout
    for part in ("Usage:", "NUM", "DATA", "-- FLAGS", "--print-only", "MODEL_SIZE", "CUDA_VISIBLE_DEVICES", "MASTER_PORT"):
        assert part in text


def test_the_learning_rate_is_scaled_by_one_launcher_only(plan, data):
    assert after(command(plan(MULTI, data, "--", *NAMED)), "--lr-scaling") == "linear"
    assert "--lr-scaling" not in command(plan(LAUNCH, data, "--", *NAMED))
    assert after(command(plan(MULTI, data, "--", *NAMED, "--lr-scaling", "sqrt")), "--lr-scaling") == "sqrt"
    assert command(plan(MULTI, data, "--", *NAMED, "--lr_scaling=none")).count("--lr-scaling") == 0
    assert "--lr-scaling" not in command(plan(MULTI, data, "--", *NAMED, "--global-batch-size", "32"))


def test_model_size_and_port_from_the_environment(plan, data):
    words = command(plan(LAUNCH, data, "--", *NAMED, MODEL_SIZE="small", MASTER_PORT="31234"))
    assert after(words, "--model-size") == "small" and option(words, "master-port") == "31234"
    words = command(plan(LAUNCH, data, "--", *NAMED, "--model-size", "tiny", MODEL_SIZE="small"))
    assert words.count("--model-size") == 1 and "small" not in words
    assert 1024 <= int(option(command(plan(LAUNCH, data, "--", *NAMED, MASTER_PORT="")), "master-port")) < 65536


def test_a_port_in_use_is_replaced_on_one_machine(plan, data):
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = str(held.getsockname()[1])
        done = plan(MULTI, data, "--", *NAMED, MASTER_PORT=port)
        assert f"Port {port} (MASTER_PORT) is in use: another one is taken" in done.stdout
        assert option(command(done), "master-port") not in ("", port)
        several = plan(MULTI, data, "--", *NAMED, MASTER_PORT=port, NNODES="2", NODE_RANK="0", MASTER_ADDR="host1")
        assert option(command(several), "master-port") == port               # the others expect it


def test_several_machines_from_the_environment(plan, data):
    words = command(plan(LAUNCH, "3", data, "--", *NAMED, NNODES="2", NODE_RANK="1", MASTER_ADDR="host1", MASTER_PORT=""))
    assert [option(words, name) for name in ("nnodes", "node-rank", "master-addr", "master-port", "nproc-per-node")] == ["2", "1", "host1", "29500", "3"]
    assert "Processes:   3 on each of 2 machines" in plan(LAUNCH, "3", data, "--", *NAMED, NNODES="2", NODE_RANK="0", MASTER_ADDR="a").stdout
    for missing in ("NODE_RANK", "MASTER_ADDR"):
        given = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "host1"}
        del given[missing]
        assert "NNODES=2 needs MASTER_ADDR" in plan(LAUNCH, data, "--", *NAMED, code=2, **given).stderr
    assert "NNODES=two" in plan(LAUNCH, data, "--", *NAMED, code=2, NNODES="two").stderr


def test_what_a_configuration_says_is_not_said_again(plan, data, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('save_path = "./elsewhere"\ntarget_cols = ["hisco_1"]\nlanguage = "en"\nglobal_batch_size = 64\n')
    done = plan(MULTI, data, "--", "--config", str(file))
    words = command(done)
    assert not {"--save-path", "--target-cols", "--lr-scaling", "--language-col"} & set(words) and words[-2:] == ["--config", str(file)]
    assert "Save path:   ./elsewhere" in done.stdout and "the learning rate of the script, whatever" in done.stdout
    assert "--lr-scaling" in command(plan(MULTI, data, "--", "--config", "missing.toml", *NAMED))       # the script says that it is not there


def test_a_script_of_ones_own(plan, data, tmp_path):
    (tmp_path / "mine.py").write_text("")
    words = command(plan(LAUNCH, data, "--", *NAMED, SCRIPT="mine.py"))
    assert "mine.py" in words and str(REPO / "finetune.py") not in words and "--dataset" in words
    assert "SCRIPT=no.py: no such file" in plan(LAUNCH, data, "--", *NAMED, code=2, SCRIPT="no.py").stderr


@pytest.mark.parametrize("script, flags, said", [
    (MULTI, [], "the learning rate of the script x 2 processes (--lr-scaling linear)"), (LAUNCH, [], "the learning rate of the script, whatever"),
    (LAUNCH, ["--lr-scaling", "sqrt", "--learning-rate", "1e-4"], "learning rate 1e-4 x square root of 2 processes"),
    (MULTI, ["--global-batch-size", "64"], "the learning rate of the script, whatever")])
def test_the_learning_rate_is_said(plan, data, script, flags, said):
    assert f"Rate:        {said}" in plan(script, data, "--", *NAMED, *flags).stdout


def test_the_slurm_job_is_for_slurm(plan, data):
    assert "this is a job for SLURM: sbatch" in plan(SLURM, data, code=2).stderr


def test_the_slurm_job_says_what_it_will_run(plan, data):
    done = plan(SLURM, "3", data, "--", *NAMED, SLURM_JOB_ID="17", SLURM_JOB_NUM_NODES="4", SLURM_JOB_NODELIST="gpu[1-4]", SLURM_SUBMIT_DIR=str(REPO),
                SLURM_CPUS_PER_TASK="12", MASTER_ADDR="gpu1", SLURM_RESTART_COUNT="1")
    words = command(done)
    assert [option(words, name) for name in ("nnodes", "master-addr", "master-port", "nproc-per-node")] == ["4", "gpu1", "29511", "3"]
    array = plan(SLURM, "3", data, "--", *NAMED, "--save-path", "run%a", SLURM_JOB_ID="17", SLURM_JOB_NUM_NODES="4", SLURM_SUBMIT_DIR=str(REPO),
                 SLURM_ARRAY_JOB_ID="15", SLURM_ARRAY_TASK_ID="2", MASTER_ADDR="gpu1")
    assert after(command(array), "--save-path") == "run2" and "Job:         15_2 on 4 node(s)" in array.stdout
    assert "--node-rank" not in done.stdout and "Job:         17 on 4 node(s): gpu[1-4], start number 2" in done.stdout
    assert "OMP_NUM_THREADS=4" in done.stdout
    elsewhere = plan(SLURM, data, code=2, SLURM_JOB_ID="17", SLURM_SUBMIT_DIR="/")
    assert "/ is not the folder of histocc" in elsewhere.stderr


def test_torchrun_is_told_about_signals_and_threads(plan, data):
    words = command(plan(LAUNCH, data, "--", *NAMED))
    assert option(words, "signals-to-handle") == "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    assert int(option(words, "shutdown-timeout")) > 30
    many = plan(LAUNCH, "1000", data, "--", *NAMED).stdout
    assert "OMP_NUM_THREADS=1\n" in many
    assert "OMP_NUM_THREADS=7\n" in plan(LAUNCH, data, "--", *NAMED, OMP_NUM_THREADS="7").stdout


def test_columns_are_found_in_the_file(plan, data, folder):
    words = command(plan(LAUNCH, data))
    at = words.index("--formatter")
    assert words[at:at + 5] == ["--formatter", "hisco", "--target-cols", "hisco_1", "hisco_2"]
    assert after(words, "--language-col") == "lang"
    words = command(plan(LAUNCH, folder))
    assert after(words, "--formatter") == "occ1950" and after(words, "--target-cols") == "OCC1950_1"
    assert "--language-col" not in words
    words = command(plan(LAUNCH, data, "--", "--formatter", "gpf", "--language", "en"))
    assert words.count("--formatter") == 1 and after(words, "--target-cols") == "hisco_1"
    assert "--language-col" not in words


def test_a_file_without_known_columns_says_which_flag_names_them(plan, tmp_path):
    path = write_csv(tmp_path / "other.csv", "occ1,code")
    assert "--target-cols" in plan(LAUNCH, str(path), code=2).stderr


def test_the_run_on_the_sample_is_not_mistaken_for_another(plan, data, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    (output / "last.bin").touch()
    (output / "args.json").write_text('{"train_data": ["./output/sample/train.csv"]}')
    message = plan(LAUNCH, data, "--", *NAMED, code=2).stderr
    assert "holds the run on the sample" in message and "--save-path" in message and "--overwrite" in message
    plan(LAUNCH, data, "--", *NAMED, "--overwrite")
    plan(LAUNCH)
    (output / "args.json").write_text('{"dataset": "mine.csv"}')
    assert "holds another run" in plan(LAUNCH, code=2).stderr
    plan(LAUNCH, data, "--", *NAMED)


# ---- devices ----

def test_processes_by_the_gpus_there_are(plan, gpus, data):
    def processes(script, *words, **variables):
        done = plan(script, data, *words, "--", *NAMED, **variables)
        return option(command(done), "nproc-per-node"), done.stdout

    gpus(4)
    assert processes(MULTI)[0] == "4" and "4 of 4 GPU(s)" in processes(MULTI)[1]
    assert processes(LAUNCH)[0] == "2" and processes(LAUNCH, "all")[0] == "4"
    assert processes(MULTI, CUDA_VISIBLE_DEVICES="0,1")[0] == "2"
    assert processes(MULTI, CUDA_VISIBLE_DEVICES="3,7,1")[0] == "1"        # CUDA stops at the first that is not there
    assert processes(MULTI, CUDA_VISIBLE_DEVICES="GPU-00,GPU-02")[0] == "2"
    count, text = processes(MULTI, CUDA_VISIBLE_DEVICES="")
    assert count == "2" and "NO GPU (CUDA_VISIBLE_DEVICES=): TRAINING ON CPUS" in text
    assert "built without CUDA" in processes(MULTI, FAKE_CUDA="none")[1]
    gpus(1)
    assert processes(LAUNCH)[0] == "1" and processes(MULTI)[0] == "1"


def test_more_processes_than_gpus_is_an_error_that_says_what_to_do(plan, gpus, data):
    gpus(4)
    for script in (LAUNCH, MULTI):
        message = plan(script, data, "8", "--", *NAMED, code=2).stderr
        assert "8 processes" in message and "4 can be used" in message and "--device cpu" in message
        assert "CUDA_VISIBLE_DEVICES=0,1" in plan(script, data, "3", "--", *NAMED, code=2, CUDA_VISIBLE_DEVICES="0,1").stderr
    words = command(plan(LAUNCH, data, "8", "--", *NAMED, "--device", "cpu"))
    assert option(words, "nproc-per-node") == "8"


def test_without_a_working_nvidia_smi_cpus_are_used(plan, bin_dir, data):
    assert "TRAINING ON CPUS" in plan(MULTI, data, "--", *NAMED).stdout
    write_executable(bin_dir / "nvidia-smi", "#!/bin/bash\necho 'NVIDIA-SMI has failed because it could not talk to the driver'\nexit 9\n")
    assert option(command(plan(MULTI, data, "--", *NAMED, CUDA_VISIBLE_DEVICES="0,1")), "nproc-per-node") == "2"


# ---- environment ----

# A python whose venv and pip do nothing but say so in calls.log; the probe finds torch where pip has "installed" it.
FAKE_PYTHON = """#!/bin/bash
here=${BASH_SOURCE[0]%/*}
echo "$*" >>"$CALLS"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "${BASH_SOURCE[0]}" "$3/bin/python" ;;
  *"pip install"*) echo "pip at work"; [[ -z $PIP_FAILS ]] || { echo "No matching distribution"; exit 1; }
    touch "$here/torch"; [[ $* != *-test.txt ]] || touch "$here/pytest" ;;
  "--version") echo "Python 3.11.7" ;;
  "-" | "- "*) cat >/dev/null
    for module in torch "${@:2}"; do [[ -e $here/$module ]] || { echo "it has no $module"; exit 1; }; done; echo "2.13.0 none" ;;
esac
"""


@pytest.fixture
def set_up(bin_dir, tmp_path):
    """Runs the set-up in a copy of the repository's set-up files, with a fake python3.11; returns (process, its calls)."""
    repo = tmp_path / "repo"
    (repo / "scripts").mkdir(parents=True)
    shutil.copy(REPO / "scripts" / "common.sh", repo / "scripts")
    for name in ("requirements.txt", "requirements-test.txt"):
        shutil.copy(REPO / name, repo)
    (bin_dir / "python").unlink()
    write_executable(bin_dir / "python3.11", FAKE_PYTHON)

    def run(requirements: str = "requirements.txt", pip_fails: str = "") -> tuple[subprocess.CompletedProcess, str]:
        calls = tmp_path / "calls.log"
        calls.write_text("")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"source scripts/common.sh; set_up {requirements}; echo \"uses $PYTHON\""], cwd=repo,
            capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
            env={"PATH": str(bin_dir), "CALLS": str(calls), "PIP_FAILS": pip_fails})
        return done, calls.read_text()
    run.repo, run.bin = repo, bin_dir
    return run


def test_set_up_makes_a_venv_once(set_up):
    done, calls = set_up()
    assert done.returncode == 0, done.stderr
    assert f"uses {set_up.repo}/.venv/bin/python" in done.stdout and "installing requirements.txt" in done.stdout
    assert "pip at work" not in done.stdout and "pip at work" in (set_up.repo / ".venv" / "pip.log").read_text()
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


def test_no_python_says_which_is_needed(set_up):
    (set_up.bin / "python3.11").unlink()
    done, _ = set_up()
    assert done.returncode != 0 and "Python 3.11 or newer" in done.stderr and not (set_up.repo / ".venv").exists()


# ---- shell ----

@pytest.mark.parametrize("name", SHELL_FILES)
def test_shell_files_are_sound(name):
    subprocess.run(["bash", "-n", str(REPO / name)], check=True)
    assert name == "scripts/common.sh" or os.access(REPO / name, os.X_OK)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say():
    done = subprocess.run(["shellcheck", "-x", *SHELL_FILES], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_signals_reach_what_is_followed_by_something(tmp_path):
    child = "trap 'echo told; exit 7' TERM INT; echo ready; while :; do sleep 0.05; done"
    for number in (signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c",
             f"source {shlex.quote(str(REPO / 'scripts/common.sh'))}; run_and_return bash -c \"$1\" || echo ended $?", "-", child],
            stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.communicate(timeout=20)[0].split() == ["told", "ended", "7"]


@pytest.mark.processes
def test_a_run_on_two_processes(tmp_path):
    data = write_csv(tmp_path / "rows.csv", "occ1,lang,hisco_1")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "",
           "MODEL_SIZE": "tiny", "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    done = subprocess.run([str(REPO / MULTI), str(data), "--", "--max-steps", "2", "--batch-size", "4", "--save-path", "run"],
                          cwd=tmp_path, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Distributed environment: MULTI_CPU" in done.stdout and "Number of processes: 2" in done.stdout
    assert "linear" in next(line for line in done.stdout.splitlines() if line.startswith("Learning rate"))
    with open(tmp_path / "run" / "logs.csv") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["2"]
    assert (tmp_path / "run" / "last.bin").is_file(), f"after {time.monotonic() - started:.0f} s"
