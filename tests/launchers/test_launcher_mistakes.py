"""What the launchers say to arguments and variables that cannot be meant so, and what they leave out where it
would do harm.
"""

import os
import shutil
import subprocess

import pytest
from launching import LAUNCH, MULTI, NAMED, REPO, SLURM, after, option, printed_command, write_executable

ON_TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host1"}
JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(REPO), "MASTER_ADDR": "gpu1"}


# ---- where the processes meet ----


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"MASTER_PORT": "abc"}, "MASTER_PORT=abc: set it to a port"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0: set it to a port"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: set it to a port"),
        ({**ON_TWO, "MASTER_PORT": "-1"}, "MASTER_PORT=-1: set it to a port"),
        ({"NNODES": "0"}, "NNODES=0: set it to the number of machines"),
        ({**ON_TWO, "NNODES": "1.5"}, "NNODES=1.5: set it to the number of machines"),
        ({**ON_TWO, "NODE_RANK": ""}, "NNODES=2 needs MASTER_ADDR, the first machine, and NODE_RANK"),
        ({**ON_TWO, "NODE_RANK": "2"}, "NODE_RANK=2, but NNODES=2: set NNODES"),
        ({**ON_TWO, "NODE_RANK": "-1"}, "NODE_RANK=-1, but NNODES=2"),
        ({**ON_TWO, "NODE_RANK": "first"}, "NODE_RANK=first, but NNODES=2"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1, but NNODES=1: set NNODES"),
    ],
)
def test_a_meeting_point_that_cannot_be_is_refused(plan, data, variables, said):
    assert plan(LAUNCH, data, "--", *NAMED, code=2, **variables).stderr.startswith(f"error: {said}")


def test_a_meeting_point_at_the_limits_is_taken(plan, data):
    words = printed_command(plan(LAUNCH, data, "--", *NAMED, **ON_TWO, MASTER_PORT="65535"))
    assert [option(words, name) for name in ("nnodes", "node-rank", "master-port")] == ["2", "1", "65535"]
    assert (
        option(printed_command(plan(MULTI, data, "--", *NAMED, NNODES="1", NODE_RANK="0")), "node-rank")
        == "0"
    )


# ---- cores ----


def test_cores_are_those_that_the_process_may_use(plan, bin_dir, data):
    write_executable(bin_dir / "nproc", '#!/bin/bash\necho "${OMP_NUM_THREADS:-${OMP_THREAD_LIMIT:-6}}"\n')
    done = plan(LAUNCH, "2", data, "--", *NAMED)
    assert "2 process(es) on 6 core(s)" in done.stdout and "OMP_NUM_THREADS=3\n" in done.stdout
    assert (
        "on 6 core(s)"
        in plan(LAUNCH, "2", data, "--", *NAMED, OMP_NUM_THREADS="1", OMP_THREAD_LIMIT="1").stdout
    )
    write_executable(bin_dir / "nproc", "#!/bin/bash\nexit 1\n")
    write_executable(bin_dir / "other", "#!/bin/bash\necho 4\n")
    (bin_dir / "getconf").unlink()
    (bin_dir / "other").rename(bin_dir / "getconf")
    assert "on 4 core(s)" in plan(LAUNCH, "2", data, "--", *NAMED).stdout


# ---- data ----


@pytest.mark.parametrize(
    "line",
    ['dataset = "mine.csv"', 'data_dir = "mine.csv"', 'data-root = "mine.csv"', 'train_data = ["mine.csv"]'],
)
def test_data_of_a_configuration_are_not_replaced_by_the_sample(plan, data, tmp_path, line):
    (tmp_path / "m.toml").write_text(line + "\n")
    for script, slurm in ((LAUNCH, {}), (MULTI, {}), (SLURM, JOB)):
        message = plan(script, "--", "--config", str(tmp_path / "m.toml"), code=2, **slurm).stderr
        assert message.startswith("error: DATA is missing") and "takes the data from DATA alone" in message
    assert (
        after(
            printed_command(plan(LAUNCH, data, "--", *NAMED, "--config", str(tmp_path / "m.toml"))),
            "--dataset",
        )
        == data
    )


def test_data_among_the_flags_are_not_replaced_by_the_sample(plan, tmp_path):
    assert (
        "DATA is missing" in plan(LAUNCH, "--", "--train_data=mine.csv", "--val-data", "v.csv", code=2).stderr
    )
    (tmp_path / "rows.csv").write_text("occ1,hisco_1\nfarmer,61110\n")
    said = plan(LAUNCH, "rows.csv", "--", "--data_dir=mine.csv", code=2).stderr
    assert said.startswith("error: DATA is rows.csv, and --data-dir behind -- names data, too")
    (tmp_path / "m.toml").write_text("batch_size = 16\n")
    assert "sample/train.csv" in plan(LAUNCH, "--", "--config", "m.toml").stdout


@pytest.mark.parametrize("flag", ["--dry-run", "--prepare-only", "--prepare_only"])
def test_what_makes_no_model_is_not_followed_by_showing_it(plan, bin_dir, tmp_path, flag):
    assert "histocc.sample.show" not in plan(LAUNCH, "--", flag).stdout
    assert "histocc.sample.show" in plan(LAUNCH).stdout
    write_executable(
        bin_dir / "python",
        '#!/bin/bash\n[[ $1 != -m ]] || { echo "$*" >>calls; exit 0; }\n' + (bin_dir / "python").read_text(),
    )
    plan(LAUNCH, "--", flag, HISTOCC_LAUNCH_DRY_RUN="")
    assert [line.split()[1] for line in (tmp_path / "calls").read_text().splitlines()] == [
        "histocc.sample",
        "torch.distributed.run",
    ]


@pytest.mark.full
def test_a_parquet_file_is_taken_and_its_columns_are_found(plan, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = str(tmp_path / "rows.Parquet")
    parquet.write_table(pyarrow.table({"occ1": ["weaver"], "lang": ["en"], "hisco_1": ["75400"]}), path)
    words = printed_command(plan(LAUNCH, path))
    assert (
        after(words, "--dataset") == path
        and after(words, "--target-cols") == "hisco_1"
        and after(words, "--language-col") == "lang"
    )
    folder = tmp_path / "both"
    folder.mkdir()
    for name in ("train.parquet", "val.parquet"):
        shutil.copy(path, folder / name)
    words = printed_command(plan(LAUNCH, str(folder)))
    assert (
        after(words, "--train-data") == f"{folder}/train.parquet"
        and after(words, "--val-data") == f"{folder}/val.parquet"
    )


# ---- the job for SLURM ----


def test_help_of_the_slurm_job_is_there_without_slurm(plan, bin_dir, tmp_path):
    copy = tmp_path / "slurm_script"  # SLURM runs a copy
    shutil.copy(REPO / SLURM, copy)
    inside = subprocess.run(
        ["bash", str(copy), "2", "-h"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": str(bin_dir), **JOB},
        timeout=60,
    )
    assert inside.returncode == 0
    for text in (plan(SLURM, "--help").stdout, inside.stdout):
        assert (
            text.startswith("Usage: sbatch ")
            and "#SBATCH" not in text
            and "SBATCH --" not in text
            and "--array=0-4" in text
        )
    assert "this is a job for SLURM" in plan(SLURM, "x.csv", "--", "--help", code=2).stderr


@pytest.mark.full
def test_a_requeued_job_starts_nothing_anew(plan, data):
    flags = ["--", *NAMED, "--overwrite", "--num-epochs", "3"]
    for count in ({}, {"SLURM_RESTART_COUNT": "0"}):
        first = plan(SLURM, data, *flags, **JOB, **count)
        assert "--overwrite" in printed_command(first) and "is left out" not in first.stdout
    again = plan(SLURM, data, *flags, **JOB, SLURM_RESTART_COUNT="1")
    assert (
        printed_command(again) == [word for word in printed_command(first) if word != "--overwrite"]
        and "--overwrite is left out" in again.stdout
    )
    alone = plan(SLURM, data, "--", "--overwrite", **JOB, SLURM_RESTART_COUNT="2")
    assert "--overwrite" not in printed_command(alone)
    assert "is left out" not in plan(SLURM, data, "--", *NAMED, **JOB, SLURM_RESTART_COUNT="1").stdout


def test_overwrite_in_a_configuration_is_not_for_slurm(plan, data, tmp_path):
    for name, text in (
        ("m.toml", "overwrite = true\n"),
        ("kept.toml", "overwrite = false\n"),
        ("args.json", '{"overwrite": true, "language": "en"}'),
    ):
        (tmp_path / name).write_text(text)
    message = plan(SLURM, data, "--", *NAMED, "--config", str(tmp_path / "m.toml"), code=2, **JOB).stderr
    assert (
        message
        == "error: overwrite in a config would start over after every requeue: give --overwrite on the"
        " command line\n"
    )
    for name in ("kept.toml", "args.json"):
        plan(SLURM, data, "--", *NAMED, "--config", str(tmp_path / name), **JOB)


# ---- numbers ----


@pytest.mark.parametrize(
    "number, said",
    [
        ("99999999999999999999", "99999999999999999999 processes are too many for the 2 core(s)"),
        ("999", "999 processes are too many"),
        ("9", "9 processes are too many for the 2 core(s) of this machine.\n  Ask for at most 8"),
        ("0", "NUM is the number of processes"),
        ("000", "NUM is the number of processes"),
        ("-3", "NUM=-3: expected the number of processes, at least 1"),
        ("abc", "abc: no such file or folder, and no number of processes"),
        ("1e3", "1e3: no such file or folder, and no number"),
        ("*", "*: no such file or folder, and no number"),
    ],
)
def test_a_number_of_processes_that_cannot_be_is_refused(plan, bin_dir, data, number, said):
    write_executable(bin_dir / "nproc", "#!/bin/bash\necho 2\n")
    for words in ([number, data], [number]):
        message = plan(LAUNCH, *words, "--", *NAMED, code=2).stderr
        assert message.startswith(f"error: {said}") and "line" not in message


def test_a_number_of_processes_at_the_limit_is_taken(plan, bin_dir, gpus, data):
    for cores, number in (("1", "8"), ("2", "008"), ("16", "64")):
        write_executable(bin_dir / "nproc", f"#!/bin/bash\necho {cores}\n")
        assert option(
            printed_command(plan(LAUNCH, number, data, "--", *NAMED)), "nproc-per-node"
        ) == number.lstrip("0")
    gpus(4)
    for number in ("5", "99999999999999999999"):
        message = plan(LAUNCH, number, data, "--", *NAMED, code=2).stderr
        assert f"error: {number} processes need a GPU each, but 4 can" in message


@pytest.mark.parametrize("threads", ["abc", "0", "-1", "08", "1025", "99999999999999999999", "4,x"])
def test_threads_that_cannot_be_are_refused(plan, data, threads):
    message = plan(LAUNCH, data, "--", *NAMED, code=2, OMP_NUM_THREADS=threads).stderr
    assert message.startswith(f"error: OMP_NUM_THREADS={threads}: set it to the threads of a process")


def test_threads_by_level_are_taken(plan, data):
    assert "OMP_NUM_THREADS=4,2\n" in plan(LAUNCH, data, "--", *NAMED, OMP_NUM_THREADS="4,2").stdout


@pytest.mark.parametrize(
    "visible, count",
    [("*", 0), ("08", 0), ("99999999999999999999", 0), ("0, 1", 2), ("NoDevFiles", 0), ("003,0", 2)],
)
def test_gpus_are_counted_whatever_the_variable_holds(plan, gpus, data, visible, count):
    gpus(4)
    done = plan(LAUNCH, data, "--", *NAMED, CUDA_VISIBLE_DEVICES=visible)
    assert (f"of {count} GPU(s)" if count else "NO GPU") in done.stdout and done.stderr == ""


def test_one_machine_meets_at_itself(plan, data):
    assert (
        option(printed_command(plan(LAUNCH, data, "--", *NAMED, MASTER_ADDR="gone")), "master-addr")
        == "127.0.0.1"
    )


# ---- files and folders ----


def test_data_that_are_no_file_are_refused(plan, tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    os.mkfifo(tmp_path / "run.toml")
    for path in ("pipe.csv", "/dev/null"):
        assert f"{path} is no regular file" in plan(LAUNCH, path, code=2).stderr
    assert "/proc/nowhere: no such file" in plan(MULTI, "/proc/nowhere", code=2).stderr
    done = plan(LAUNCH, "--", "--config", "run.toml")
    assert "histocc.sample.show" in done.stdout  # what is wrong with the pipe the script says


@pytest.mark.skipif(os.geteuid() == 0, reason="everything may be read by root")
def test_data_that_may_not_be_read_are_refused(plan, data, folder):
    for path in (data, folder):
        os.chmod(path, 0)
        assert "may not be read" in plan(LAUNCH, path, code=2).stderr
        os.chmod(path, 0o700)


@pytest.mark.parametrize("name", ["new\nline *.csv", "$(touch no).csv", "'\" \\.csv"])
def test_names_of_every_kind(plan, data, tmp_path, name):
    shutil.copy(data, tmp_path / name)
    done = plan(LAUNCH, name, "--", *NAMED, "--save-path", name[:-4])
    line = done.stdout[done.stdout.index("Command:\n") + 9 :]
    printed = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, timeout=60
    )
    words = printed.stdout.split("\0")
    assert after(words, "--dataset") == name and after(words, "--save-path") == name[:-4]
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("flags", [["--save-path", ""], ["--save_dir="], ["--save-path"]])
def test_an_empty_save_path_is_refused(plan, data, flags):
    for words in ([data], []):
        assert (
            "--save-path is empty: expected a folder"
            in plan(LAUNCH, *words, "--", *NAMED, *flags, code=2).stderr
        )


def test_a_leading_hyphen_is_part_of_a_name(plan, data, tmp_path):
    (tmp_path / "-mine.py").touch()
    assert "./-mine.py" in printed_command(plan(LAUNCH, data, "--", *NAMED, SCRIPT="-mine.py"))
    assert (
        after(printed_command(plan(LAUNCH, "--", "--save-path=-x")), "--train-data")
        == "./-x/sample/train.csv"
    )


@pytest.mark.parametrize(
    "name, text", [("a.json", "[1]"), ("b.json", "[" * 100_000), ("c.toml", "x = "), ("d.toml", "\0")]
)
def test_a_broken_configuration_is_left_to_the_script(plan, data, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    done = plan(LAUNCH, data, "--", *NAMED, "--config", name)
    assert printed_command(done)[-1] == name and done.stderr == "" and "not read" not in done.stdout


def test_a_value_of_a_configuration_is_no_other_flag(plan, data, tmp_path):
    (tmp_path / "run.toml").write_text('save_path = "a\\n--lr-scaling=sqrt"\n')
    done = plan(LAUNCH, data, "--", *NAMED, "--config", "run.toml")
    assert "Rate:        the learning rate of the script, whatever" in done.stdout
