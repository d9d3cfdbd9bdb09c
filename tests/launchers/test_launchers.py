"""What the launchers make of their arguments, of the machine and of the environment, without running it."""

import shlex
import shutil
import signal
import socket
import subprocess

import pytest
from launching import (
    JOB,
    LAUNCH,
    MULTI,
    REPO,
    SLURM,
    after,
    option,
    printed_command,
    write_executable,
    write_table,
)

# ---- arguments ----


@pytest.mark.parametrize("script", [LAUNCH, MULTI])
def test_arguments_in_every_order(plan, data, script):
    flags = ["--", "--language", "en", "--num-epochs", "3", "--help"]
    lines = {
        tuple(printed_command(plan(script, *words, *flags)))
        for words in ([data, "3"], ["3", data], ["--print-only", "03", data], ["3", "--print-only", data])
    }
    assert len(lines) == 1
    words = list(lines.pop())
    assert option(words, "nproc-per-node") == "3"
    assert str(REPO / "finetune.py") in words and "--distributed" in words
    assert after(words, "--dataset") == data and words[-5:] == flags[1:]


@pytest.mark.parametrize("script", [LAUNCH, MULTI])
def test_wrong_arguments_say_what_was_expected(plan, data, tmp_path, script):
    write_table(tmp_path / "half" / "train.csv", "occ1,hisco_1")
    for name in ("train.csv", "train.parquet", "val.csv"):
        write_table(tmp_path / "twice" / name, "occ1,hisco_1")
    for words, said in (
        (["nowhere.csv"], "nowhere.csv: no such file or folder, and no number of processes"),
        ([""], ": no such file or folder"),
        (["half"], "half is a folder without val.csv or val.parquet"),
        (["twice"], "twice holds both train.csv and train.parquet: leave one"),
        (["/dev/null"], "/dev/null is no regular file"),
        (
            [data, "--num-epochs", "3"],
            "unknown option --num-epochs. Flags for the training script stand after --",
        ),
        (["2", "all"], "NUM is given twice: 2 and all"),
        ([data, data], f"DATA is given twice: {data} and {data}"),
        (["000", data], "NUM is the number of processes: at least 1"),
        ([data, "--", "--data_dir=x.csv"], f"DATA is {data}, and the flags behind -- name data, too"),
    ):
        assert plan(script, *words, code=2).stderr.startswith(f"error: {said}"), words


@pytest.mark.parametrize("script", [LAUNCH, MULTI, SLURM])
def test_help(plan, script):
    text = plan(script, "2", "--help").stdout
    assert text.startswith("Usage: ") and script in text.partition("\n")[0] and "#SBATCH" not in text
    assert {"NUM", "DATA", "FLAGS", "--print-only"} <= set(text.split()) and "HERE" not in text
    if script == LAUNCH:
        assert {"MODEL_SIZE", "CUDA_VISIBLE_DEVICES", "SCRIPT", "MASTER_PORT"} <= set(text.split())


@pytest.mark.parametrize("name", ["new\nline *.csv", "$(touch no).csv", "'\" \\.csv"])
def test_names_of_every_kind(plan, data, tmp_path, name):
    shutil.copy(data, tmp_path / name)
    done = plan(LAUNCH, name, "--", "--save-path", name[:-4])
    line = done.stdout.partition("Command:\n")[2]
    printed = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True)
    words = printed.stdout.split("\0")
    assert after(words, "--dataset") == name and after(words, "--save-path") == name[:-4]
    assert not (tmp_path / "no").exists()


# ---- data, flags and the folder of the run ----


@pytest.mark.parametrize("script", [LAUNCH, MULTI])
def test_a_folder_goes_to_train_mixer(plan, folder, script):
    words = printed_command(plan(script, folder + "/"))
    assert str(REPO / "train_mixer.py") in words and after(words, "--save-dir") == "./output"
    assert after(words, "--train-data") == f"{folder}/train.csv"
    assert after(words, "--val-data") == f"{folder}/val.parquet"


def test_what_the_columns_mean_is_left_to_the_script(plan, data):
    assert not {"--target-cols", "--formatter", "--language-col"} & set(printed_command(plan(MULTI, data)))


@pytest.mark.parametrize("flag", [["--save-path", "x"], ["--save_dir=x"], ["--checkpoint-dir", "x"]])
def test_a_save_path_among_the_flags_is_the_only_one(plan, data, flag):
    done = plan(LAUNCH, data, "--", *flag)
    assert "./output" not in done.stdout and "Save path:   x\n" in done.stdout
    assert printed_command(done)[-len(flag) :] == flag


def test_the_learning_rate_is_scaled_by_one_launcher_only(plan, data):
    assert after(printed_command(plan(MULTI, data)), "--lr-scaling") == "linear"
    assert "--lr-scaling" not in printed_command(plan(LAUNCH, data))
    for flags in (["--lr_scaling", "none"], ["--global-batch-size=64"]):
        assert "linear" not in printed_command(plan(MULTI, data, "--", *flags))


def test_what_a_configuration_says_is_not_said_again(plan, data, tmp_path):
    (tmp_path / "run.toml").write_text('save-path = "./else where"  # there\nglobal_batch_size = 64\n')
    (tmp_path / "args.json").write_text(
        '{\n "save_path": "kept",\n "lr_scaling": "none",\n "model_size": null\n}'
    )
    for name, path in (("run.toml", "./else where"), ("args.json", "kept")):
        done = plan(MULTI, data, "--", "--config", name, MODEL_SIZE="tiny")
        words = printed_command(done)
        assert not {"--save-dir", "--lr-scaling"} & set(words) and words[-2:] == ["--config", name]
        assert f"Save path:   {path}\n" in done.stdout and after(words, "--model-size") == "tiny"
    assert "--lr-scaling" in printed_command(plan(MULTI, data, "--", "--config", "missing.toml"))


def test_the_size_of_the_model(plan, data):
    for words in ([data], []):
        assert after(printed_command(plan(LAUNCH, *words, MODEL_SIZE="small")), "--model-size") == "small"
    assert "small" not in printed_command(plan(LAUNCH, data, "--", "--model_size=base", MODEL_SIZE="small"))


def test_a_script_of_ones_own(plan, data, tmp_path):
    (tmp_path / "mine.py").write_text("")
    words = printed_command(plan(LAUNCH, data, SCRIPT="mine.py"))
    assert words[words.index("--distributed") - 1] == "mine.py" and after(words, "--dataset") == data
    (tmp_path / "mine.py").write_text(
        'import sys\nDATA_FLAG = "--text"  # to which the launchers give DATA\n'
    )
    words = printed_command(plan(LAUNCH, str(tmp_path), SCRIPT="mine.py"))
    assert after(words, "--text") == str(tmp_path)
    assert printed_command(plan(MULTI, SCRIPT="mine.py"))[-4:-2] == ["--save-dir", "./output"]
    assert "SCRIPT=no.py: no such file" in plan(LAUNCH, data, code=2, SCRIPT="no.py").stderr


# ---- the sample ----


def commands(done: subprocess.CompletedProcess) -> list[list[str]]:
    return [shlex.split(line) for line in done.stdout.splitlines() if line.startswith(" ")]


def test_without_data_the_sample_is_trained_and_shown(plan, tmp_path):
    write, train, show = commands(plan(LAUNCH))
    assert write[1:3] == ["-m", "histocc.sample"] and write[-2:] == ["--split-dir", "./output/sample"]
    assert after(train, "--train-data") == "./output/sample/train.csv"
    assert after(train, "--model-size") == "tiny" and after(train, "--save-dir") == "./output"
    assert show[1:] == ["-m", "histocc.sample.show", "--model", "./output"]
    assert not (tmp_path / "output").exists()
    for flag in ("--dry-run", "--prepare_only"):
        assert len(commands(plan(LAUNCH, "--", flag))) == 2  # there is no model to show


def test_the_sample_takes_the_place_of_no_other_data(plan, tmp_path):
    (tmp_path / "m.toml").write_text('data-root = "mine.csv"\n')
    assert plan(MULTI, code=2).stderr.startswith("error: DATA is missing")
    assert plan(SLURM, code=2, **JOB).stderr.startswith("error: DATA is missing")
    for flags in (["--train_data=mine.csv"], ["--config", "m.toml"]):
        said = plan(LAUNCH, "--", *flags, code=2).stderr
        assert said.startswith("error: DATA is missing") and "takes the data from DATA alone" in said


def test_the_run_on_the_sample_is_not_mistaken_for_another(plan, data, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    (output / "last.bin").touch()
    (output / "args.json").write_text('{\n "train_data": [\n  "./output/sample/train.csv"\n ]\n}')
    message = plan(LAUNCH, data, code=2).stderr
    assert "holds the run on the sample" in message and "--save-path" in message and "--overwrite" in message
    plan(LAUNCH, data, "--", "--overwrite")
    plan(LAUNCH, "--", "--save-path", f"{output}/")
    (output / "args.json").write_text('{"dataset": "mine.csv"}')
    assert "holds another run" in plan(LAUNCH, code=2).stderr
    plan(LAUNCH, "--", "--overwrite")
    plan(LAUNCH, data)


# ---- devices, processes and threads ----


def test_processes_by_the_gpus_that_torch_sees(plan, data):
    def processes(script, *words, **variables):
        done = plan(script, data, *words, **variables)
        return option(printed_command(done), "nproc-per-node"), done.stdout

    count, text = processes(MULTI, FAKE_GPUS="4")
    assert count == "4" and "Devices:     4 of 4 GPU(s)\n" in text
    assert processes(LAUNCH, FAKE_GPUS="4")[0] == "2" and processes(LAUNCH, "all", FAKE_GPUS="4")[0] == "4"
    assert processes(LAUNCH, FAKE_GPUS="1")[0] == processes(MULTI, FAKE_GPUS="1")[0] == "1"
    count, text = processes(MULTI, CUDA_VISIBLE_DEVICES="")
    assert count == "2" and "NO GPU (CUDA_VISIBLE_DEVICES=): TRAINING ON CPUS, 2 process(es)" in text
    assert "NO GPU (torch 2.13.0 was built without CUDA)" in processes(MULTI, FAKE_CUDA="none")[1]
    count, text = processes(MULTI, "3", "--", "--device=cpu", FAKE_GPUS="1")
    assert count == "3" and "NO GPU (--device cpu)" in text


@pytest.mark.parametrize("number", ["5", "99999999999999999999"])
def test_more_processes_than_gpus_is_an_error_that_says_what_to_do(plan, data, number):
    for script in (LAUNCH, MULTI):
        message = plan(script, data, number, code=2, FAKE_GPUS="4", CUDA_VISIBLE_DEVICES="0,1,2,3").stderr
        assert f"{number} processes need a GPU each, but 4 can be used here (CUDA_VISIBLE" in message
        assert "--device cpu" in message


def test_processes_share_the_cores(plan, bin_dir, data):
    write_executable(bin_dir / "nproc", '#!/bin/bash\necho "${OMP_NUM_THREADS:-${OMP_THREAD_LIMIT:-6}}"\n')
    for variables, threads in (({}, "3"), ({"OMP_THREAD_LIMIT": "1"}, "3"), ({"OMP_NUM_THREADS": "7"}, "7")):
        text = plan(LAUNCH, "2", data, **variables).stdout
        assert "2 process(es) on 6 core(s)" in text and f"OMP_NUM_THREADS={threads}\n" in text
    assert "OMP_NUM_THREADS=1\n" in plan(LAUNCH, "24", data).stdout
    assert "25 processes are too many for the 6 core(s)" in plan(LAUNCH, "25", data, code=2).stderr
    write_executable(bin_dir / "nproc", "#!/bin/bash\nexit 1\n")
    write_executable(bin_dir / "getconf", "#!/bin/bash\necho 1\n")
    assert option(printed_command(plan(LAUNCH, "8", data)), "nproc-per-node") == "8"
    assert "9 processes are too many for the 1 core(s)" in plan(LAUNCH, "9", data, code=2).stderr


# ---- where the processes meet, and torchrun ----


def test_one_machine_meets_at_itself_at_a_free_port(plan, data):
    words = printed_command(plan(LAUNCH, data, MASTER_ADDR="gone"))
    assert option(words, "master-addr") == "127.0.0.1" and option(words, "master-port") == "29511"
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        taken = str(held.getsockname()[1])
        ports = {
            option(printed_command(plan(LAUNCH, data, MASTER_PORT=p)), "master-port") for p in ("", taken)
        }
    assert not ports & {"", "0", "29500", taken}


def test_several_machines(plan, data):
    on_two = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host1", "MASTER_PORT": ""}
    done = plan(MULTI, data, **on_two)
    names = ("nnodes", "node-rank", "master-addr", "master-port")
    assert [option(printed_command(done), name) for name in names] == ["2", "1", "host1", "29500"]
    assert "2 on each of 2 machines" in done.stdout
    for variables, said in (
        ({**on_two, "NODE_RANK": ""}, "NNODES=2 needs MASTER_ADDR, the first machine, and NODE_RANK"),
        ({**on_two, "NODE_RANK": "2"}, "NODE_RANK=2, but NNODES=2"),
        ({**on_two, "NNODES": "1.5"}, "NNODES=1.5: set it to the number of machines"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1, but NNODES=1"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: set it to a port"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0: set it to a port"),
    ):
        assert plan(LAUNCH, data, code=2, **variables).stderr.startswith(f"error: {said}")


@pytest.mark.parametrize("hangup, hears", [(signal.SIG_DFL, "SIGHUP,"), (signal.SIG_IGN, "")])
def test_torchrun_is_told_about_signals_but_for_those_that_nohup_keeps_away(plan, data, hangup, hears):
    words = printed_command(plan(LAUNCH, data, hangup=hangup))
    assert option(words, "signals-to-handle") == f"SIGTERM,SIGINT,{hears}SIGQUIT,SIGUSR1"
    assert int(option(words, "shutdown-timeout")) > 30


# ---- the job for SLURM ----


def test_the_slurm_job_is_for_slurm_and_for_the_folder_of_histocc(plan, data):
    assert "this is a job for SLURM: sbatch" in plan(SLURM, data, code=2).stderr
    elsewhere = plan(SLURM, data, code=2, **JOB | {"SLURM_SUBMIT_DIR": "/"})
    assert "/ is not the folder of histocc" in elsewhere.stderr


def test_the_slurm_job_says_what_it_will_run(plan, data, job):
    more = {"SLURM_JOB_NODELIST": "gpu[1-4]", "SLURM_CPUS_PER_TASK": "12", "SLURM_RESTART_COUNT": "1"}
    done = plan(SLURM, "3", data, **job, **more)
    names = ("nnodes", "master-addr", "master-port", "nproc-per-node")
    assert [option(printed_command(done), name) for name in names] == ["4", "gpu1", "29511", "3"]
    assert "--node-rank" not in done.stdout and "OMP_NUM_THREADS=4\n" in done.stdout
    assert "Job:         17 on 4 node(s): gpu[1-4], start number 2" in done.stdout
    array = {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "2"}
    done = plan(SLURM, "3", data, "--", "--save-path", "run%a", **job, **array)
    assert after(printed_command(done), "--save-path") == "run2" and "Job:         15_2 on" in done.stdout


def test_overwrite_counts_for_the_first_start_of_a_job(plan, data, tmp_path, job):
    first = plan(SLURM, data, "--", "--overwrite", "--seed", "3", **job)
    again = plan(SLURM, data, "--", "--overwrite", "--seed", "3", **job, SLURM_RESTART_COUNT="1")
    assert "--overwrite" in printed_command(first) and "--overwrite is left out" in again.stdout
    assert printed_command(again) == [word for word in printed_command(first) if word != "--overwrite"]
    plan(SLURM, data, "--", "--overwrite", **job, SLURM_RESTART_COUNT="1")
    (tmp_path / "m.toml").write_text("overwrite = true\n")
    message = plan(SLURM, data, "--", "--config", str(tmp_path / "m.toml"), code=2, **job).stderr
    assert message.startswith("error: overwrite in a config would start over after every requeue")
