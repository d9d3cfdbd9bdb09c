"""The launchers: what they make of their arguments, of the machine and of the environment; what they start,
with nothing behind it; the environment that they make or take.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPO, all_tests, read_logs, write_csv

LAUNCH, MULTI = "launch_training.sh", "run_multi_gpu_train.sh"
SLURM, TRAIN = "scripts/train_slurm_multi_node.sh", "scripts/train_multi_gpu.sh"
ARRAY, GPU_CHECK = "scripts/predict_slurm_array.sh", "scripts/gpu_check.sh"
SOURCED = ["scripts/common.sh", "scripts/environment.sh"]
SHELL_FILES = [LAUNCH, MULTI, SLURM, TRAIN, *SOURCED, ARRAY, GPU_CHECK, "tests/run", ".ci/run"]
TOOLS = "bash cat cksum cp dirname env getconf grep mkdir readlink rm sed sleep tail touch uname"
JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "4", "SLURM_SUBMIT_DIR": str(REPO), "MASTER_ADDR": "gpu1"}
SAMPLE = ["histocc.sample", "torch.distributed.run", "histocc.sample.show"]
CAPTURED = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}

# A python that answers at once what the launcher asks about torch, and hands everything else to the real one.
# With STARTED it only notes in that file which module it was to run.
FAST_PYTHON = """#!/bin/bash
if [[ $1 == - ]]; then
  cat >/dev/null
  options="--signals-to-handle --shutdown-timeout $FAKE_NUMA"
  echo "2.13.0 ${FAKE_CUDA:-13.0} ${FAKE_GPUS:-0} $options${FAKE_WHY:+
$FAKE_WHY}"; exit
elif [[ $1 == -m && -n $STARTED ]]; then
  echo "$2" >>"$STARTED"; exit $([[ $2 != "$FAILING" ]] || echo 7)
fi
exec REAL "$@"
"""
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


def write_executable(path, text):
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def commands(done):
    return [shlex.split(line) for line in done.stdout.splitlines() if line.startswith(" /")]


def printed(done):
    """That of torchrun."""
    return next(words for words in commands(done) if "torch.distributed.run" in words)


def option(words, name):
    return next(word.partition("=")[2] for word in words if word.startswith(f"--{name}="))


def after(words, flag):
    """What follows the last occurrence of a flag, or None."""
    return words[len(words) - words[::-1].index(flag)] if flag in words else None


@pytest.fixture
def bin_dir(tmp_path):
    """A folder with the few tools that the launchers need, and no nvidia-smi whatever this machine has."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS.split():
        (folder / tool).symlink_to(shutil.which(tool))
    write_executable(folder / "nproc", '#!/bin/bash\necho "${OMP_NUM_THREADS:-${OMP_THREAD_LIMIT:-6}}"\n')
    write_executable(folder / "python", FAST_PYTHON.replace("REAL", shlex.quote(sys.executable)))
    return folder


@pytest.fixture
def plan(bin_dir, tmp_path):
    """Runs a launcher in the test's folder, where ./output is, without starting anything unless `starts`.
    Returns the finished process. variables: FAKE_GPUS is the number of GPUs that torch sees.
    """

    def run(script, *arguments, code=0, shell=(), hangup=signal.SIG_DFL, starts=False, **variables):
        done = subprocess.run(
            [*shell, str(REPO / script), *(() if starts else ("--print-only",)), *arguments],
            cwd=tmp_path,
            env={"PATH": str(bin_dir), "HOME": str(tmp_path), "MASTER_PORT": "29511", **variables},
            timeout=60,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),  # this process may ignore it
            **CAPTURED,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def data(tmp_path):
    """A table; beside it a folder of two, one that lacks a table, and one with a table in both formats."""
    both, twice = "both/train.csv both/val.parquet", "twice/train.csv twice/train.parquet twice/val.csv"
    for name in [*both.split(), "half/train.csv", *twice.split()]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()  # only names are looked at
    rows = [(f"labourer no. {i}", "en", ("99910", "61110")[i % 2]) for i in range(60)]
    return write_csv(tmp_path / "my data.csv", ("occ1", "lang", "hisco_1"), rows)


@pytest.fixture
def job(tmp_path):
    """Variables of a SLURM job that was submitted in a copy of the checkout, where ./output is nobody's."""
    return JOB | {"SLURM_SUBMIT_DIR": str(copy_of_checkout(tmp_path / "checkout", SLURM))}


def copy_of_checkout(folder, *names):
    for name in (*SOURCED, "requirements.txt", "requirements-test.txt", *names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, folder / name)
    return folder


# ---- arguments ----


def test_arguments_in_every_order(plan, data):
    flags = ["--", "--language", "en", "--num-epochs", "3", "--help"]
    lines = {
        tuple(printed(plan(LAUNCH, *words, *flags)))
        for words in ([data, "3"], ["3", data], ["--print-only", "03", data])
    }
    assert len(lines) == 1
    words = list(lines.pop())
    assert option(words, "nproc-per-node") == "3" and after(words, "--dataset") == data
    assert words[words.index("--distributed") - 1] == str(REPO / "finetune.py") and words[-5:] == flags[1:]


def test_wrong_arguments_say_what_was_expected(plan, data):
    for words, said in (
        (["nowhere.csv"], "nowhere.csv: no such file"),
        (["half"], "half is a folder without val.csv"),
        (["twice"], "twice holds several tables: twice/train.csv twice/train.parquet"),
        (["/dev/null"], "/dev/null is no regular file"),
        ([data, "--num-epochs", "3"], "unknown option --num-epochs"),
        (["2", "all"], "NUM is given twice: 2 and all"),
        ([data, data], f"DATA is given twice: {data} and {data}"),
        (["000", data], "NUM is the number of processes: at least 1"),
        ([data, "--", "--data_dir=x.csv"], f"DATA is {data}, and the flags"),
        ([data, "--", "--data", "x.csv"], f"DATA is {data}, and the flags"),
    ):
        assert plan(LAUNCH, *words, code=2).stderr.startswith(f"error: {said}"), words


@pytest.mark.parametrize("script", [LAUNCH, MULTI, SLURM])
def test_help(plan, script):
    text = plan(script, "2", "--help").stdout
    assert text.startswith("Usage: ") and script in text.partition("\n")[0] and "#SBATCH" not in text
    assert {"NUM", "DATA", "FLAGS", "--print-only"} <= set(text.split())


def test_names_of_every_kind(plan, data, tmp_path):
    name = "new\nline * '\" \\ $(touch no).csv"
    shutil.copy(data, tmp_path / name)
    line = plan(LAUNCH, name, "--", "--save-path", name[:-4]).stdout.partition("Command:\n")[2]
    shown = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True)
    words = shown.stdout.split("\0")
    assert after(words, "--dataset") == name and after(words, "--save-path") == name[:-4]
    assert not (tmp_path / "no").exists()


def some(*cases):
    """Every second case by default, all under --all."""
    return [pytest.param(*case, marks=[pytest.mark.full] * (i % 2)) for i, case in enumerate(cases)]


LEFT_TO_THE_SCRIPT = dict.fromkeys(("--target-cols", "--formatter", "--language-col"))


@pytest.mark.parametrize(
    "script, words, variables, expected",
    some(
        (LAUNCH, ["both/"], {}, {"--train-data": "both/train.csv", "--val-data": "both/val.parquet"}),
        (MULTI, ["both"], {}, {"--save-dir": "./output", "--dataset": None, "--lr-scaling": "linear"}),
        (MULTI, ["DATA"], {}, {"--save-dir": "./output", "--lr-scaling": "linear"} | LEFT_TO_THE_SCRIPT),
        (MULTI, ["DATA", "--", "--lr_scaling", "none"], {}, {"--lr-scaling": None}),
        (MULTI, ["DATA", "--", "--global-batch-size=64"], {}, {"--lr-scaling": None}),
        (LAUNCH, ["DATA"], {}, {"--lr-scaling": None}),
        (LAUNCH, ["DATA", "--", "--save_dir=x"], {}, {"--save-dir": None}),
        (LAUNCH, ["DATA", "--", "--checkpoint-dir", "x"], {}, {"--save-dir": None, "--checkpoint-dir": "x"}),
        (LAUNCH, [], {}, {"--num-epochs": None, "--global-batch-size": None}),  # of n-grams alone
        (LAUNCH, ["--", "--max-steps", "9"], {}, {"--num-epochs": "1", "--global-batch-size": "64"}),
        (LAUNCH, [], {"MODEL_SIZE": "small"}, {"--model-size": "small", "--num-epochs": "1"}),
        (LAUNCH, ["DATA", "--", "--model_size=base"], {"MODEL_SIZE": "small"}, {"--model-size": None}),
    ),
)
def test_flags_that_a_launcher_adds(plan, data, script, words, variables, expected):
    """Those that the user gives are the only ones; what the columns mean is left to the script."""
    done = plan(script, *(data if word == "DATA" else word for word in words), **variables)
    assert {flag: after(printed(done), flag) for flag in expected} == expected
    assert ("Save path:   x\n" in done.stdout) == (words[-1:] in (["x"], ["--save_dir=x"]))


def test_what_a_configuration_says_is_not_said_again(plan, data, tmp_path):
    (tmp_path / "run.toml").write_text('save-path = "./else where"  # there\nglobal_batch_size = 64\n')
    kept = '{\n "save_path": "kept",\n "lr_scaling": "none",\n "model_size": "auto"\n}'
    (tmp_path / "args.json").write_text(kept)
    for name, path in (("run.toml", "./else where"), ("args.json", "kept")):
        done = plan(MULTI, data, "--", "--config", name, MODEL_SIZE="tiny")
        words = printed(done)
        assert not {"--save-dir", "--lr-scaling"} & set(words) and words[-2:] == ["--config", name]
        assert f"Save path:   {path}\n" in done.stdout and after(words, "--model-size") == "tiny"


def test_a_script_of_ones_own(plan, data, tmp_path):
    mine, scenes = tmp_path / "mine.py", str(REPO / "configs" / "scenes.toml")
    mine.write_text("")
    words = printed(plan(LAUNCH, data, SCRIPT="mine.py"))
    assert words[words.index("--distributed") - 1] == "mine.py" and after(words, "--dataset") == data
    mine.write_text('import sys\nDATA_FLAG = "--text"  # to which the launchers give DATA\n')
    assert after(printed(plan(LAUNCH, "both", SCRIPT="mine.py")), "--text") == "both"
    assert printed(plan(MULTI, SCRIPT="mine.py"))[-4:-2] == ["--save-dir", "./output"]
    assert "SCRIPT=no.py: no such file" in plan(LAUNCH, data, code=2, SCRIPT="no.py").stderr
    for given in ([scenes], [], ["3"]):
        words = printed(plan(TRAIN, *given, "--print-only", "--", "--seed", "1", starts=True, FAKE_GPUS="3"))
        assert str(REPO / "examples" / "train_from_config.py") in words and after(words, "--config") == scenes
        assert option(words, "nproc-per-node") == "3" and words[-2:] == ["--seed", "1"]


# ---- the sample ----


def test_without_data_the_sample_is_trained_and_shown(plan, tmp_path):
    write, train, show = commands(plan(LAUNCH))
    assert write[1:3] == ["-m", "histocc.sample"] and write[-2:] == ["--split-dir", "./output/sample"]
    assert after(train, "--train-data") == "./output/sample/train.csv"
    assert after(train, "--model-size") == "ngrams" and after(train, "--save-dir") == "./output"
    assert "--built-in" in write and after(train, "--seq2seq-weight") == "0"
    assert "--built-in" not in commands(plan(LAUNCH, "--", "--model-size", "tiny"))[0]
    assert show[1:] == ["-m", "histocc.sample.show", "--model", "./output"]
    assert not (tmp_path / "output").exists()
    assert len(commands(plan(LAUNCH, "--", "--prepare_only"))) == 2  # there is no model to show
    assert plan(MULTI, code=2).stderr.startswith("error: DATA is missing")
    assert "error: DATA is missing" in plan(LAUNCH, "--", "--train_data=mine.csv", code=2).stderr


def test_the_run_on_the_sample_is_not_mistaken_for_another(plan, data, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    (output / "last.bin").touch()
    (output / "args.json").write_text('{\n "train_data": [\n  "./output/sample/train.csv"\n ]\n}')
    message = plan(LAUNCH, data, code=2).stderr
    assert "holds the run on the sample" in message and "--save-path" in message and "--overwrite" in message
    plan(LAUNCH, data, "--", "--overwrite")
    plan(LAUNCH)
    (output / "args.json").write_text('{"dataset": "mine.csv"}')
    assert "holds another run" in plan(LAUNCH, code=2).stderr
    plan(LAUNCH, data)


# ---- devices, processes, threads, and where the processes meet ----


@pytest.mark.parametrize(
    "script, words, variables, processes, said",
    some(
        (MULTI, [], {"FAKE_GPUS": "4"}, "4", "Devices:     4 of 4 GPU(s)\n"),
        (LAUNCH, [], {"FAKE_GPUS": "4"}, "2", "Devices:     2 of 4 GPU(s)\n"),
        (LAUNCH, ["all"], {"FAKE_GPUS": "4"}, "4", ""),
        (LAUNCH, [], {"FAKE_GPUS": "1"}, "1", ""),
        (MULTI, [], {"CUDA_VISIBLE_DEVICES": ""}, "2", "NO GPU (CUDA_VISIBLE_DEVICES=): TRAINING ON CPUS"),
        (MULTI, [], {"FAKE_WHY": "old driver"}, "2", "NO GPU (old driver): TRAINING ON CPUS"),
        (MULTI, [], {"FAKE_WHY": "x", "CUDA_VISIBLE_DEVICES": "MIG-9"}, "2", "_DEVICES=MIG-9)"),
        (MULTI, [], {"FAKE_CUDA": "none"}, "2", "NO GPU (torch 2.13.0 was built without CUDA)"),
        (MULTI, ["3", "--", "--device=cpu"], {"FAKE_GPUS": "1"}, "3", "NO GPU (--device cpu)"),
        (LAUNCH, ["2"], {"OMP_THREAD_LIMIT": "1"}, "2", "OMP_NUM_THREADS=3\n"),
        (LAUNCH, ["2"], {"OMP_NUM_THREADS": "7"}, "2", "OMP_NUM_THREADS=7\n"),
        (LAUNCH, ["24"], {}, "24", "OMP_NUM_THREADS=1\n"),
    ),
)
def test_processes_and_threads(plan, data, script, words, variables, processes, said):
    done = plan(script, data, *words, **variables)
    assert option(printed(done), "nproc-per-node") == processes and said in done.stdout


def fake_torch(folder, **modules):
    """Write a torch whose modules have these texts; return the environment in which Python finds it."""
    torch = "from torch import cuda\n__version__ = '2.13.0'\nclass version: cuda = '13.0'\n"
    for name, text in {"torch.__init__": torch, **modules}.items():
        path = folder / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    kept = (name for name in os.environ if not name.endswith(("DEVICES", "ALLOC_CONF")))
    return {name: os.environ[name] for name in kept} | {"PYTHONPATH": str(folder)}


def probed(program, env):
    line = ["bash", "-c", f'source scripts/common.sh; probe "$0"; {program}', sys.executable]
    return subprocess.run(line, cwd=REPO, env=env, **CAPTURED).stdout


def test_gpus_that_torch_can_use_count_and_get_memory_in_segments_that_grow(tmp_path):
    """torch counts GPUs before it starts CUDA; the driver of the two here is too old."""
    cuda = "def is_available(): return False\ndef device_count(): return 2\n"
    cuda += "def init(): raise RuntimeError('The driver is too old\\nMore')\n"
    run = "import argparse\nget_args_parser = argparse.ArgumentParser\n"
    env = fake_torch(tmp_path, **{"torch.cuda": cuda, "torch.distributed.run": run})
    program = 'for PROBED in "$PROBED" "2.13.0 13.0 2"; do\n'
    program += 'choose_processes all; echo "$DEVICES $PYTORCH_ALLOC_CONF"; done'
    for given, expected in (({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "mine:1"}, "mine:1")):
        old, new = probed(program, env | given).splitlines()
        assert old.startswith("NO GPU (The driver is too old): TRAINING ON CPUS")
        assert new == f"2 of 2 GPU(s) {expected}" and "expand" not in old


NUMA = """
import enum
AffinityMode, NumaOptions = enum.Enum("AffinityMode", "NODE"), dict
def _get_validated_logical_cpus_to_bind_to(gpu_index, numa_options):
    if gpu_index > 1: raise RuntimeError("Must bind to a non-empty set of CPU indices")
    return {0, 1}
"""
SITE = """
import builtins, io
original = open
def faked(path, *args, **named):
    return io.StringIO("NODES\\n") if "has_memory" in str(path) else original(path, *args, **named)
builtins.open = faked
"""
PARSER = """
import argparse
def get_args_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("OPTION")
    return parser
"""


@pytest.mark.parametrize(
    "nodes, gpus, option, bound",
    [("0-1", 2, True, True), ("0", 2, True, False), ("0-1", 3, True, False), ("0-1", 2, False, False)],
)
def test_torchrun_binds_to_the_memory_beside_each_gpu_where_it_can(tmp_path, nodes, gpus, option, bound):
    modules = {"sitecustomize": SITE.replace("NODES", nodes), "torch.numa.binding": NUMA}
    modules["torch.cuda"] = f"def is_available(): return True\ndef device_count(): return {gpus}\n"
    modules["torch.distributed.run"] = PARSER.replace("OPTION", "--numa-binding" if option else "--other")
    said = probed('echo "$PROBED"', fake_torch(tmp_path, **modules))
    assert said == f"2.13.0 13.0 {gpus}{' --numa-binding' * bound}\n"


def test_the_command_binds_processes_that_have_a_gpu(plan, data):
    for more, expected in (({}, False), ({"FAKE_NUMA": "--numa-binding"}, True)):
        words = printed(plan(LAUNCH, data, FAKE_GPUS="2", **more))
        assert ("--numa-binding=node" in words) == expected
    words = printed(plan(LAUNCH, data, "--", "--device", "cpu", FAKE_GPUS="2", FAKE_NUMA="--numa-binding"))
    assert "--numa-binding=node" not in words


def test_too_many_processes(plan, data):
    for number in ("5", "99999999999999999999"):
        message = plan(LAUNCH, data, number, code=2, FAKE_GPUS="4", CUDA_VISIBLE_DEVICES="0,1,2,3").stderr
        assert f"{number} processes need a GPU each, but 4 " in message and "--device cpu" in message
    assert "25 processes are too many for the 6 core(s)" in plan(LAUNCH, "25", data, code=2).stderr
    message = plan(LAUNCH, data, code=2, SLURM_CPUS_PER_TASK="08").stderr
    assert message.startswith("error: SLURM_CPUS_PER_TASK=08: ") and message.count("\n") == 1


def test_one_machine_meets_at_itself_at_a_free_port(plan, data):
    words = printed(plan(LAUNCH, data, MASTER_ADDR="gone"))
    assert option(words, "master-addr") == "127.0.0.1" and option(words, "master-port") == "29511"
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        taken = str(held.getsockname()[1])
        ports = {option(printed(plan(LAUNCH, data, MASTER_PORT=port)), "master-port") for port in ("", taken)}
    assert not ports & {"", "0", "29500", taken}


def test_several_machines(plan, data):
    on_two = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host1", "MASTER_PORT": ""}
    done = plan(MULTI, data, **on_two)
    names = ("nnodes", "node-rank", "master-addr", "master-port")
    assert [option(printed(done), name) for name in names] == ["2", "1", "host1", "29500"]
    assert "2 on each of 2 machines" in done.stdout
    for variables, said in (
        ({**on_two, "NODE_RANK": ""}, "NNODES=2 needs MASTER_ADDR, the first machine, and NODE_RANK"),
        ({**on_two, "NODE_RANK": "2"}, "NODE_RANK=2, but NNODES=2"),
        ({**on_two, "NNODES": "1.5"}, "NNODES=1.5: set it to the number of machines"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: set it to a port"),
    ):
        assert plan(LAUNCH, data, code=2, **variables).stderr.startswith(f"error: {said}")


@pytest.mark.parametrize("hangup, hears", [(signal.SIG_DFL, "SIGHUP,"), (signal.SIG_IGN, "")])
def test_torchrun_is_told_about_signals_but_for_those_that_nohup_keeps_away(plan, data, hangup, hears):
    words = printed(plan(LAUNCH, data, hangup=hangup))
    assert option(words, "signals-to-handle") == f"SIGTERM,SIGINT,{hears}SIGQUIT,SIGUSR1"
    assert int(option(words, "shutdown-timeout")) > 30


# ---- the job for SLURM ----


def test_the_slurm_job_says_what_it_will_run(plan, data, job):
    more = {"SLURM_JOB_NODELIST": "gpu[1-4]", "SLURM_CPUS_PER_TASK": "12", "SLURM_RESTART_COUNT": "1"}
    done = plan(SLURM, "3", data, **job, **more)
    names = ("nnodes", "master-addr", "master-port", "nproc-per-node")
    assert [option(printed(done), name) for name in names] == ["4", "gpu1", "29511", "3"]
    assert "--node-rank" not in done.stdout and "OMP_NUM_THREADS=4\n" in done.stdout
    assert "Job:         17 on 4 node(s): gpu[1-4], start number 2" in done.stdout
    array = {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "2"}
    done = plan(SLURM, "3", data, "--", "--save-path", "run%a", **job, **array)
    assert after(printed(done), "--save-path") == "run2" and "Job:         15_2 on" in done.stdout
    assert "error: SLURM_RESTART_COUNT=x: set" in plan(SLURM, code=2, **job, SLURM_RESTART_COUNT="x").stderr
    sample, train = commands(plan(SLURM, **job))
    assert sample[2] == "histocc.sample" and after(train, "--train-data") == "./output/sample/train.csv"
    assert "this is a job for SLURM: sbatch" in plan(SLURM, data, code=2).stderr
    elsewhere = plan(SLURM, data, code=2, **JOB | {"SLURM_SUBMIT_DIR": "/"})
    assert "/ is not the folder of histocc" in elsewhere.stderr


def test_the_array_for_slurm_becomes_predict(plan, bin_dir, job, tmp_path):
    words, array = ["--input", "in put/", "--output", "out/"], {"SLURM_ARRAY_TASK_ID": "3"}
    job |= {"SLURM_SUBMIT_DIR": str(REPO), "SLURM_CPUS_PER_TASK": "5"}
    done = plan(ARRAY, *words, starts=True, STARTED=str(tmp_path / "started"), **job, **array)
    assert commands(done)[0][1:] == ["-m", "histocc.predict", *words]
    assert (tmp_path / "started").read_text() == "histocc.predict\n"
    assert "Usage: sbatch" in plan(ARRAY, "--help", starts=True).stdout
    assert "an array job for SLURM" in plan(ARRAY, *words, starts=True, code=2, **job).stderr
    (bin_dir / "python").unlink()  # twenty tasks would make the same environment
    job["SLURM_SUBMIT_DIR"] = str(copy_of_checkout(tmp_path / "other", ARRAY))
    assert "no environment has torch" in plan(ARRAY, *words, starts=True, code=2, **job, **array).stderr


def test_the_output_of_a_slurm_job_moves_to_logs(bin_dir, data, job):
    """But for a file of the user's. A job that is started again appends; what it cannot move stays."""
    folder, env = Path(job["SLURM_SUBMIT_DIR"]), {"PATH": str(bin_dir), "SLURM_ARRAY_JOB_ID": "15", **job}

    def start(output, *arguments):
        with open(folder / output, "ab") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            line = [str(REPO / SLURM), "--print-only", *arguments]
            return subprocess.run(line, env=env | {"SLURM_ARRAY_TASK_ID": "2"}, **streams).returncode

    assert start("mine.txt", data) == 0 and not (folder / "logs").exists()
    assert [start("train_17.out", *words) for words in ([data], [data], ["nowhere.csv"])] == [0, 0, 2]
    assert (folder / "logs/train_15_2.out").read_text().count("Command:") == 2
    assert (folder / "logs/train_15_2.err").read_text().startswith("error: nowhere.csv")
    assert not (folder / "train_17.out").exists()
    (folder / "logs").rename(folder / "old")
    (folder / "logs").touch()
    assert start("train_17.out", data) == 0 and "Command:" in (folder / "train_17.out").read_text()


def test_overwrite_counts_for_the_first_start_of_a_job(plan, data, tmp_path, job):
    first = plan(SLURM, data, "--", "--overwrite", "--seed", "3", **job)
    again = plan(SLURM, data, "--", "--overwrite", "--seed", "3", **job, SLURM_RESTART_COUNT="1")
    assert "--overwrite" in printed(first) and "--overwrite is left out" in again.stdout
    assert printed(again) == [word for word in printed(first) if word != "--overwrite"]
    (tmp_path / "m.toml").write_text("overwrite = true\n")
    message = plan(SLURM, data, "--", "--config", str(tmp_path / "m.toml"), code=2, **job).stderr
    assert message.startswith("error: overwrite in a config")


def test_a_slurm_job_saves_before_its_time_limit_and_goes_back_into_the_queue(plan, bin_dir, data, tmp_path):
    """srun tells the job that the limit is near, and ends with 1 once scancel has told the training."""
    write_executable(
        bin_dir / "srun",
        '#!/bin/bash\ntrap \'echo saved; exit 1\' USR1\necho $$ >srun\nprintf "%s " "$@" >args\n'
        "kill -USR1 $PPID\nwhile :; do sleep 0.05; done\n",
    )
    write_executable(bin_dir / "scancel", '#!/bin/bash\necho "$*" >scancel\nkill -USR1 $(cat srun)\n')
    write_executable(bin_dir / "scontrol", '#!/bin/bash\necho "$*" >scontrol\nkill $PPID\n')
    sleep = f'#!/bin/bash\n[[ $1 == 60 ]] || exec -a sleep {shutil.which("sleep")} "$1"\n'
    write_executable(bin_dir / "sleep", sleep)
    (tmp_path / "scripts").symlink_to(REPO / "scripts")
    job = JOB | {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK": "6", "MASTER_ADDR": "127.0.0.1"}
    for script in (SLURM, LAUNCH, MULTI):
        place = {"MASTER_ADDR": "nowhere.invalid", "NNODES": "2", "NODE_RANK": "1"}
        said = plan(script, data, starts=True, code=2, **job | place).stderr
        assert said.startswith("error: MASTER_ADDR=nowhere.invalid: this machine knows no host of that name")
    assert not (tmp_path / "args").exists()
    done = plan(SLURM, data, starts=True, code=1, **job)
    assert "time limit is near" in done.stdout and "saved\n" in done.stdout
    assert "Job 17 goes back into the queue" in done.stdout
    assert (tmp_path / "scancel").read_text() == "--signal=USR1 17\n"
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"
    words = (tmp_path / "args").read_text().split()
    assert words[:3] == ["--nodes=4", "--ntasks=4", "--ntasks-per-node=1"] and "--cpus-per-task=6" in words
    write_executable(bin_dir / "srun", "#!/bin/bash\nexit 3\n")
    assert "queue" not in plan(SLURM, data, starts=True, code=3, **job).stdout


# ---- starting ----


@pytest.mark.parametrize("script", [LAUNCH, SLURM])
def test_another_shell_starts_a_launcher(plan, data, script, job):
    if shutil.which("dash") is None:
        pytest.skip("dash is not installed")
    variables = job if script == SLURM else {}
    done = plan(script, data, shell=[shutil.which("dash")], **variables)
    assert printed(done) == printed(plan(script, data, **variables))


@pytest.mark.parametrize("script", [LAUNCH, MULTI, TRAIN, "tests/run"])
def test_a_launcher_starts_through_a_link(plan, data, tmp_path, script):
    link, started = tmp_path / "link", tmp_path / "started"
    link.symlink_to(os.path.relpath(REPO / script, tmp_path))
    plan(str(link), *([data] if script in (LAUNCH, MULTI) else []), starts=True, STARTED=str(started))
    assert started.read_text() == ("pytest\n" if script == "tests/run" else "torch.distributed.run\n")


@pytest.mark.parametrize("closed", [">/dev/full", "<&- >&- 2>&-", "| true"])
def test_printing_ends_no_run(plan, data, tmp_path, closed):
    started = tmp_path / "started"
    shell = ("bash", "-o", "pipefail", "-c", f'"$0" "$@" {closed}')
    plan(LAUNCH, shell=shell, starts=True, STARTED=str(started))
    assert started.read_text().split() == SAMPLE


@pytest.mark.parametrize("failing", SAMPLE)
def test_the_run_on_the_sample_ends_with_the_first_command_that_fails(plan, tmp_path, failing):
    started = tmp_path / "started"
    plan(LAUNCH, starts=True, code=7, STARTED=str(started), FAILING=failing)
    assert started.read_text().split() == SAMPLE[: SAMPLE.index(failing) + 1]


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "HUP under nohup"])
def test_signals_reach_the_command_that_is_waited_for(name):
    child = "trap 'echo told; exit 7' TERM INT HUP; trap 'exit 8' USR1; echo ready; "
    child += "while :; do sleep 0.05; done"
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


@pytest.mark.parametrize("name", SHELL_FILES)
def test_shell_files_are_sound(name):
    assert name in SOURCED or os.access(REPO / name, os.X_OK)
    is_checked = shutil.which("shellcheck") and (all_tests() or name in (LAUNCH, "scripts/common.sh"))
    check = ["shellcheck", "-x"] if is_checked else ["bash", "-n"]
    done = subprocess.run([*check, name], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.full
def test_a_run_on_two_processes(data, tmp_path):
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "MODEL_SIZE": "tiny"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    flags = "--max-steps 2 --batch-size 4 --ngram-passes 1 --save-path run"
    line = [str(REPO / MULTI), data, "--", *flags.split()]
    done = subprocess.run(line, cwd=tmp_path, env=env, timeout=300, **CAPTURED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Distributed environment: MULTI_CPU" in done.stdout and "Number of processes: 2" in done.stdout
    assert "--formatter hisco --target-cols hisco_1 --language-col lang" in done.stdout
    rate = re.search(r"^Learning rate: (\S+) \((\S+) with linear scaling", done.stdout, re.M)
    assert rate and float(rate[1]) == pytest.approx(2 * float(rate[2]))
    assert [row["step"] for row in read_logs(tmp_path / "run")] == [0, 2]
    assert (tmp_path / "run" / "last.bin").is_file()


@pytest.mark.processes
@pytest.mark.full
def test_the_check_of_a_machine_with_gpus(tmp_path):
    """Tried on CPUs, smaller than on a GPU: two decoders, one epoch, and batches of 16."""
    repo = copy_of_checkout(tmp_path / "repo", GPU_CHECK)
    for name in ("histocc", "train_mixer.py", ".venv"):
        if (REPO / name).exists():
            (repo / name).symlink_to(REPO / name)
    script = (repo / GPU_CHECK).read_text()
    for long, short in {
        "flat greedy both topk full": "flat full",
        "--num-epochs 10": "--num-epochs 1",
        "--global-batch-size 64": "--global-batch-size 16",
    }.items():
        assert script.count(long) == 1
        script = script.replace(long, short)
    (repo / GPU_CHECK).write_text(script)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env |= {"GPU": "cpu", "STEPS": "4", "ROWS": "120", "SIZE": "tiny", "BATCH": "16"}
    line = [str(repo / GPU_CHECK), "check"]
    done = subprocess.run(line, cwd=tmp_path, env=env, timeout=1800, **CAPTURED)
    assert done.returncode == 0 and "FAILED" not in done.stdout, done.stdout + done.stderr
    assert {"fsdp is one process, to 1e-8", "codes of full are those of a CPU in 99 % of rows"} <= {
        line[14:].strip() for line in done.stdout.splitlines()
    }
    assert re.search(r"^speed_two +[\d,]+ samples/s", done.stdout, re.M), done.stdout
    done = subprocess.run(line, cwd=tmp_path, env=env, **CAPTURED)
    assert done.returncode == 2 and "check is there already" in done.stderr
    env |= {"GPU": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*line[:1], "other"], cwd=tmp_path, env=env, **CAPTURED)
    assert done.returncode == 2 and "torch can use no GPU here" in done.stderr


# ---- environment ----


@pytest.fixture
def set_up(bin_dir, tmp_path):
    """Runs the set-up in a copy of its files, with a fake python3.11; returns (process, its calls)."""
    repo = copy_of_checkout(tmp_path / "repo")
    (bin_dir / "python").unlink()
    write_executable(bin_dir / "python3.11", FAKE_PYTHON)

    def run(requirements="requirements.txt", pip_fails=""):
        calls = tmp_path / "calls.log"
        calls.write_text("")
        script = f'source scripts/common.sh; set_up {requirements}; echo "uses $PYTHON"'
        line = ["bash", "-euo", "pipefail", "-c", script]
        env = {"PATH": str(bin_dir), "CALLS": str(calls), "PIP_FAILS": pip_fails}
        done = subprocess.run(line, cwd=repo, env=env, timeout=60, **CAPTURED)
        return done, calls.read_text()

    run.venv, run.bin, run.repo = repo / ".venv", bin_dir, repo
    return run


def test_set_up_makes_a_venv_once(set_up):
    done, calls = set_up()
    assert done.returncode == 0, done.stderr
    assert f"uses {set_up.venv}/bin/python" in done.stdout and "pip at work" not in done.stdout
    assert "pip at work" in (set_up.venv / "pip.log").read_text()
    assert "venv" in calls and "pip install" in calls
    assert f"--no-deps -e {set_up.repo}\n" in calls  # the program histocc
    done, calls = set_up()
    assert done.returncode == 0 and "pip" not in calls and "installing" not in done.stdout
    (set_up.repo / "requirements.txt").write_text("torch==2.14.0\n")
    done, calls = set_up()
    assert "pip install" in calls and "-m venv" not in calls
    done, calls = set_up("requirements-test.txt pytest")
    assert "requirements-test.txt" in calls and "-m venv" not in calls


@pytest.mark.parametrize("half", ["no pip yet", "while pip was at work", "pip failed"])
def test_set_up_mends_what_an_interrupted_start_left(set_up, half):
    done, _ = set_up(pip_fails="1" if half == "pip failed" else "")
    if half == "pip failed":
        assert done.returncode == 1 and "No matching distribution" in done.stderr and "pip.log" in done.stderr
    elif half == "no pip yet":
        shutil.rmtree(set_up.venv / "bin")
    else:
        (set_up.venv / "unfinished").touch()
    done, calls = set_up()
    assert done.returncode == 0 and "pip install" in calls and not (set_up.venv / "unfinished").exists()
    assert "pip" not in set_up()[1]


def test_what_is_there_is_used_or_left_alone(set_up):
    """An active environment with torch; a .venv of the user; no Python."""
    set_up.venv.mkdir()
    (set_up.venv / "mine").touch()
    done, calls = set_up()
    assert done.returncode == 2 and ".venv was not made by this program and cannot be used" in done.stderr
    assert (set_up.venv / "mine").exists() and "-m venv" not in calls
    shutil.rmtree(set_up.venv)
    write_executable(set_up.bin / "python", FAKE_PYTHON)
    (set_up.bin / "torch").touch()
    done, calls = set_up()
    assert f"uses {set_up.bin}/python" in done.stdout and "pip" not in calls and not set_up.venv.exists()
    for name in ("python", "python3.11"):
        (set_up.bin / name).unlink()
    done, _ = set_up()
    assert done.returncode != 0 and "Python 3.11 or newer" in done.stderr and not set_up.venv.exists()


def test_print_only_makes_nothing(plan, tmp_path, bin_dir, data):
    """A copy without .venv, on a machine without Python, and on one whose Python has no torch."""
    repo = copy_of_checkout(tmp_path / "repo", LAUNCH, SLURM)
    (bin_dir / "python").unlink()
    before = sorted(repo.rglob("*"))
    for python in ("", "python3.11"):
        if python:
            text = "#!/bin/bash\n[[ $* != - ]] || { echo it has no torch; exit 1; }\n"
            write_executable(bin_dir / python, f'{text}exec {shlex.quote(sys.executable)} "$@"\n')
        for script, variables in ((LAUNCH, {}), (SLURM, JOB | {"SLURM_SUBMIT_DIR": str(repo)})):
            done = plan(str(repo / script), "2", data, **variables)
            assert printed(done)[0] == f"{repo}/.venv/bin/python" and done.stderr == ""
            assert f"would make it with {bin_dir if python else 'Python 3.11'}" in done.stdout
            assert "install requirements.txt: torch==" in done.stdout
        assert "histocc.sample.show" in plan(str(repo / LAUNCH)).stdout
    assert sorted(repo.rglob("*")) == before
