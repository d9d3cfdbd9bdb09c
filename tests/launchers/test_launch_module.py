"""The decisions of the launchers, in Python: arguments, flags, GPUs, nodes, threads and the torchrun line."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import write_table

from histocc import launch
from histocc.launch import arguments, command, data, launchers, machine, main, output, slurm
from histocc.runtime.errors import UserError

FOLDER = Path(launch.__file__).parent
TORCH = machine.Torch("2.13.0", "13.0", ["--signals-to-handle", "--shutdown-timeout"])


def given(*flags: str, config: tuple[str, ...] = ()) -> arguments.Arguments:
    return arguments.Arguments(flags=list(flags), config=list(config))


# ---- arguments ----


@pytest.mark.parametrize(
    "words, processes, has_data, flags",
    [
        ([], "", False, []),
        (["4"], "4", False, []),
        (["007", "DATA"], "7", True, []),
        (["DATA", "all"], "all", True, []),
        (["--print-only", "DATA", "--", "3", "--help"], "", True, ["3", "--help"]),
        (["2", "--", "--", "-x"], "2", False, ["--", "-x"]),
    ],
)
def test_arguments_are_told_apart(tmp_path, words, processes, has_data, flags):
    path = str(write_table(tmp_path / "rows.csv", "occ1"))
    found = arguments.parse([path if word == "DATA" else word for word in words])
    assert (found.processes, found.data, found.flags) == (processes, path if has_data else "", flags)
    assert not found.help


@pytest.mark.parametrize(
    "words, said",
    [
        (["0"], "NUM is the number of processes: at least 1"),
        (["-3"], "NUM=-3: expected the number of processes"),
        (["2", "all"], "NUM is given twice: 2 and all."),
        (["/", "/"], "DATA is given twice: / and /."),
        (["--epochs"], "unknown option --epochs. Flags for the training script stand after --"),
        (["1.5"], "1.5: no such file or folder, and no number of processes.\n  DATA is"),
        ([""], "DATA is empty.\n  DATA is a CSV file"),
    ],
)
def test_wrong_arguments_are_refused(words, said):
    with pytest.raises(UserError) as error:
        arguments.parse(words)
    assert str(error.value).startswith(said)


def test_help_ends_the_reading_where_it_stands():
    assert arguments.parse(["2", "-h", "--bogus"]).help
    with pytest.raises(UserError, match="--bogus"):
        arguments.parse(["--bogus", "-h"])


def test_values_of_flags():
    found = given("--save_path=a=b", "x", "--lr-scaling", "sqrt", "--overwrite", "--lr_scaling")
    assert found.value("--save-path", "--save-dir") == "a=b"
    assert found.value("--lr-scaling") == ""  # the last one counts
    assert found.value("--overwrite") == "--lr_scaling"
    assert found.value("--save") is None and not found.has("x")
    assert given("--device", "cpu", config=("--device=cuda",)).value("--device") == "cpu"
    assert given(config=("--device=cuda",)).value("--device") == "cuda"


def test_a_configuration_counts_as_flags(tmp_path):
    (tmp_path / "run.toml").write_text('save_path = "x"\noverwrite = true\nlog_wandb = false\n')
    (tmp_path / "args.json").write_text('{"save_path": "y", "overwrite": true, "key": null}')
    found = given("--config", str(tmp_path / "run.toml"))
    arguments.read_config(found)
    assert found.config == ["--save_path=x", "--overwrite=True"]
    found = given("--config", str(tmp_path / "args.json"))
    arguments.read_config(found)
    assert found.config == ["--save_path=y"]


# ---- data ----


def test_the_script_fits_the_data(tmp_path):
    table = str(write_table(tmp_path / "rows.TSV", "occ1"))
    folder = write_table(tmp_path / "both" / "train.csv", "occ1").parent
    with pytest.raises(UserError, match="without val.csv or val.parquet"):
        data.training_for(str(folder))
    write_table(folder / "val.parquet", "occ1")
    one, two = data.training_for(table), data.training_for(f"{folder}/")
    assert (one.script, one.flags, one.table) == ("finetune.py", ["--dataset", table], table)
    assert (two.script, two.table) == ("train_mixer.py", f"{folder}/train.csv")
    assert two.flags == ["--train-data", f"{folder}/train.csv", "--val-data", f"{folder}/val.parquet"]
    with pytest.raises(UserError, match="neither a table nor a folder"):
        data.training_for(__file__)


@pytest.mark.parametrize(
    "script, flags, path, added",
    [
        ("finetune.py", [], "./output", ["--save-path", "./output"]),
        ("train_mixer.py", [], "./output", ["--save-dir", "./output"]),
        ("finetune.py", ["--checkpoint_dir", "x"], "x", []),
        ("finetune.py", ["--save-path=-x"], "./-x", []),
    ],
)
def test_save_path(script, flags, path, added):
    training = data.Training(script, "rows.csv")
    data.choose_save_path(training, given(*flags))
    assert (training.save_path, training.flags) == (path, added)


# ---- GPUs, processes and threads ----


@pytest.mark.parametrize(
    "visible, count",
    [
        (None, 4),
        ("", 0),
        ("0,1", 2),
        ("3, 2 ,1,", 3),
        ("3,7,1", 1),
        ("0,,1", 1),
        ("-1", 0),
        ("GPU-1,MIG-2", 2),
        ("0" * 9, 0),
    ],
)
def test_gpus_are_counted(visible, count):
    listed = "".join(f"GPU {i}: NVIDIA H100\n" for i in range(4))
    assert machine.count_gpus(listed, visible) == count
    assert machine.count_gpus("NVIDIA-SMI has failed\n", visible) == 0


@pytest.mark.parametrize(
    "processes, default, gpus, count",
    [("", "2", 4, 2), ("", "2", 1, 1), ("", "all", 4, 4), ("all", "2", 3, 3), ("3", "all", 4, 3)],
)
def test_a_process_has_a_gpu_each(processes, default, gpus, count):
    devices = machine.gpu_devices(processes, default, gpus, "", TORCH)
    assert devices == machine.Devices(count, f"{count} of {gpus} GPU(s)")


def test_too_many_processes_are_refused():
    with pytest.raises(UserError, match=r"5 processes need a GPU each, but 4 can be used here \(why\)"):
        machine.gpu_devices("5", "2", 4, " (why)", TORCH)
    assert machine.cpu_devices("12", 3, "").processes == 12
    assert machine.cpu_devices("all", 1, "").processes == 2
    for number, cores in (("13", 3), ("9", 1), ("9" * 5000, 64)):
        with pytest.raises(UserError, match="processes are too many"):
            machine.cpu_devices(number, cores, "")


def test_a_torch_without_cuda_is_named():
    without = machine.parse_torch("2.13.0 none")
    assert "WARNING: torch 2.13.0" in machine.gpu_devices("", "2", 2, "", without).description
    assert machine.parse_torch("") is None


def test_threads():
    assert [machine.choose_threads("", 0), machine.choose_threads("", 3)] == ["1", "3"]
    assert [machine.choose_threads(text, 1) for text in ("1024", "4,2")] == ["1024", "4,2"]
    for wrong in ("0", "1025", "4,x", "08", "2\n"):
        with pytest.raises(UserError, match="set it to the threads of a process"):
            machine.choose_threads(wrong, 1)


# ---- where the processes meet ----


def test_meeting_point_of_several_nodes():
    variables = {"NNODES": "2", "MASTER_ADDR": "host1"}
    found = machine.meeting_point({**variables, "NODE_RANK": "1"}, "./run")
    assert found == machine.MeetingPoint(2, "1", "host1", "29500")
    assert machine.meeting_point(variables, "./run", numbered_by_srun=True).node_rank == ""
    with pytest.raises(UserError, match="NNODES=2 needs MASTER_ADDR") as error:
        machine.meeting_point(variables, "./run")
    assert str(error.value).endswith("MASTER_ADDR=host1 MASTER_PORT=29500 ./run ...")


@pytest.mark.parametrize(
    "nodes, node_rank, port, said",
    [
        ("0", "", "", "NNODES=0"),
        ("2", "2", "", "NODE_RANK=2, but NNODES=2"),
        ("1", "", "65536", "MASTER_PORT=65536"),
        ("1", "", "1\n", "MASTER_PORT=1"),
    ],
)
def test_a_wrong_meeting_point_is_refused(nodes, node_rank, port, said):
    with pytest.raises(UserError, match=said):
        machine.check_meeting_point(nodes, node_rank, port)
    machine.check_meeting_point("2", "1", "65535")


# ---- the torchrun line ----


def plan(*flags: str, torch=TORCH, nodes: int = 1, node_rank: str = "", own_script: str = "", chosen=()):
    return command.Plan(
        "python",
        torch,
        given(*flags),
        data.Training("finetune.py", "rows.csv", ["--dataset", "rows.csv", *chosen], save_path="out"),
        machine.Devices(3, "NO GPU"),
        machine.MeetingPoint(nodes, node_rank, "host1", "29511"),
        own_script,
        "4",
    )


def test_the_torchrun_line():
    words = command.torchrun_command(plan("--seed", "7", nodes=2, node_rank="1"), False, "tiny")
    assert words == [
        "python",
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=3",
        "--master-addr=host1",
        "--master-port=29511",
        "--node-rank=1",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "--shutdown-timeout=120",
        f"{command.REPO}/finetune.py",
        "--distributed",
        "--dataset",
        "rows.csv",
        "--model-size",
        "tiny",
        "--seed",
        "7",
    ]


def test_the_torchrun_line_takes_what_torchrun_knows():
    old = command.torchrun_command(plan(torch=machine.Torch("2.10", "none", [])), False)
    assert not [word for word in old if word.startswith(("--signals", "--shutdown", "--node-rank"))]
    unknown = command.torchrun_command(plan(torch=None), hangup_is_ignored=True)
    assert "--signals-to-handle=SIGTERM,SIGINT,SIGQUIT,SIGUSR1" in unknown
    assert "--shutdown-timeout=120" in unknown
    own = command.torchrun_command(plan("--model_size=base", own_script="mine.py"), False, "tiny")
    assert "mine.py" in own and "--model-size" not in own


@pytest.mark.parametrize(
    "flags, chosen, said",
    [
        ([], [], "the learning rate of the script, whatever the number of processes"),
        (
            [],
            ["--lr-scaling", "linear"],
            "the learning rate of the script x 6 processes (--lr-scaling linear)",
        ),
        (
            ["--learning-rate=3", "--lr_scaling", "sqrt"],
            [],
            "learning rate 3 x square root of 6 processes (--lr-scaling sqrt)",
        ),
        (["--lr-scaling", "none"], [], "the learning rate of the script, whatever the number of processes"),
    ],
)
def test_the_learning_rate_in_words(flags, chosen, said):
    assert command.learning_rate(plan(*flags, nodes=2, chosen=chosen)) == said


@pytest.mark.parametrize(
    "word, quoted",
    [
        ("", "''"),
        ("--a=b/c.d", "--a=b/c.d"),
        ("my data,1", r"my\ data\,1"),
        ("~a~", r"\~a~"),
        ("x=~", r"x=\~"),
        ("#a#", r"\#a#"),
        ("it's $x", r"it\'s\ \$x"),
        ("é", "é"),
        ("a\nb'\x1b\x01", r"$'a\nb\'\E\001'"),
    ],
)
def test_words_are_quoted_as_bash_does(word, quoted):
    assert output.quote(word) == quoted


# ---- SLURM ----


def test_flags_of_an_array_and_of_a_job_that_comes_back(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    found = given("--seed", "%a", "--overwrite")
    assert slurm.name_job(found) == "17" and found.flags[1] == "%a"
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "15")
    assert slurm.name_job(found) == "15_3" and found.flags[1] == "3"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    slurm.leave_out_overwrite(found)
    assert found.flags == ["--seed", "3", "--overwrite"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    slurm.leave_out_overwrite(found)
    assert found.flags == ["--seed", "3"]
    with pytest.raises(UserError, match="overwrite in a config"):
        slurm.leave_out_overwrite(given(config=("--overwrite=True",)))


def test_srun_starts_one_torchrun_for_each_node(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    words = slurm.srun_command(4, ["python", "x y"])
    assert words[:4] == ["srun", "--nodes=4", "--ntasks=4", "--ntasks-per-node=1"]
    assert "--cpus-per-task=6" in words and words[-3:] == ["torchrun", "python", "x y"]
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    assert not [word for word in slurm.srun_command(4, []) if "cpus" in word]


# ---- the program ----


def run(monkeypatch, capfd, *argv: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the program."""
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # set by the program, restored after the test
    for name in ("SCRIPT", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    code = main.main(list(argv))
    return code, *capfd.readouterr()


@pytest.mark.parametrize("launcher", launchers.LAUNCHERS)
def test_a_mistake_ends_with_2_and_its_message(monkeypatch, capfd, launcher):
    code, out, err = run(monkeypatch, capfd, launcher, "--check", "--started-as=x.sh", "--", "no.csv")
    assert code == 2 and out == ""
    said = "this is a job for SLURM: sbatch x.sh DATA" if launcher == slurm.SLURM_JOB else "no.csv: no such"
    assert err.startswith(f"error: {said}")


@pytest.mark.parametrize("launcher", launchers.LAUNCHERS)
def test_help_is_that_of_the_launcher(monkeypatch, capfd, launcher):
    code, out, err = run(monkeypatch, capfd, launcher, "--check", "--", "--help")
    assert code == 0 and err == "" and out.startswith("Usage: ") and f"{launcher}.sh" in out.split("\n")[0]
    assert ("From the environment:" in out) == (launcher != slurm.SLURM_JOB)


def test_data_are_needed_by_one_launcher(monkeypatch, capfd):
    assert run(monkeypatch, capfd, "launch_training", "--check", "--") == (0, "", "")
    code, _, err = run(monkeypatch, capfd, "run_multi_gpu_train", "--check", "--")
    assert code == 2 and err.startswith("error: DATA is missing: ./run_multi_gpu_train.sh DATA [NUM]")


def test_the_check_says_nothing_of_what_is_well(monkeypatch, capfd, tmp_path):
    path = str(write_table(tmp_path / "rows.csv", "occ1"))
    assert run(monkeypatch, capfd, "run_multi_gpu_train", "--check", "--", "4", path) == (0, "", "")
    assert os.environ["PYTHONPATH"] == command.REPO


# ---- what it is built of ----


def test_older_pythons_can_read_it():
    """Print-only is for machines whose Python cannot train, too."""
    for path in (*FOLDER.glob("*.py"), FOLDER.parent / "runtime" / "errors.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
        has_code = any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in tree.body)
        if has_code and path.name != "__main__.py":
            assert "from __future__ import annotations" in path.read_text(encoding="utf-8"), path


@pytest.mark.processes
def test_it_needs_no_torch():
    program = (
        f"import runpy, sys; sys.argv = ['launch', 'launch_training', '--check', '--']\n"
        f"sys.modules['torch'] = sys.modules['numpy'] = None\n"
        f"try: runpy.run_path({str(FOLDER)!r}, run_name='__main__')\n"
        f"except SystemExit as end: sys.exit(end.code)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
