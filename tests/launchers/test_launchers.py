"""The launchers: what they make of their arguments and of the machine, without running it."""

import socket

import pytest
from launching import (
    LAUNCH,
    MULTI,
    NAMED,
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
    flags = ["--", *NAMED, "--num-epochs", "3"]
    lines = {
        tuple(printed_command(plan(script, *words, *flags)))
        for words in ([data, "3"], ["3", data], ["--print-only", "3", data], ["3", "--print-only", data])
    }
    assert len(lines) == 1
    words = list(lines.pop())
    assert option(words, "nproc-per-node") == "3"
    assert str(REPO / "finetune.py") in words and "--distributed" in words
    assert after(words, "--dataset") == data
    assert words[-6:] == [*NAMED, "--num-epochs", "3"]


@pytest.mark.parametrize("script", [LAUNCH, MULTI])
def test_a_folder_goes_to_train_mixer(plan, folder, script):
    words = printed_command(plan(script, folder + "/", "--", *NAMED))
    assert str(REPO / "train_mixer.py") in words
    assert after(words, "--train-data") == f"{folder}/train.csv"
    assert after(words, "--val-data") == f"{folder}/val.csv"
    assert after(words, "--save-dir") == "./output"


def test_without_data_the_sample_is_trained_and_shown(plan, tmp_path):
    done = plan(LAUNCH)
    words = printed_command(done)
    assert after(words, "--train-data") == "./output/sample/train.csv"
    assert after(words, "--model-size") == "tiny"
    assert option(words, "nproc-per-node") == "2"
    assert "-m histocc.sample.show --model ./output" in done.stdout
    assert not (tmp_path / "output").exists()
    assert "DATA is missing" in plan(MULTI, code=2).stderr


def test_the_plan_says_what_will_run(plan, data):
    text = plan(LAUNCH, data, "--", *NAMED, "--save_path=/tmp/elsewhere").stdout
    for part in (
        "my data.csv",
        "finetune.py",
        "Processes:   2",
        "NO GPU",
        "TRAINING ON CPUS",
        "Port:        29511",
        "Save path:   /tmp/elsewhere",
        "OMP_NUM_THREADS=",
    ):
        assert part in text


@pytest.mark.parametrize("flag", [["--save-path", "x"], ["--save_dir=x"], ["--checkpoint-dir", "x"]])
def test_a_save_path_among_the_flags_is_the_only_one(plan, data, flag):
    words = printed_command(plan(LAUNCH, data, "--", *NAMED, *flag))
    assert "./output" not in words and words[-len(flag) :] == flag


def test_wrong_arguments_say_what_was_expected(plan, data, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    write_table(tmp_path / "half" / "train.csv", "occ1,hisco_1")
    (tmp_path / "table.xlsx").write_bytes(b"PK")
    for name in ("train.csv", "train.parquet", "val.csv"):
        write_table(tmp_path / "twice" / name, "occ1,hisco_1")
    for script in (LAUNCH, MULTI):
        for path, reason in (
            ("nowhere.csv", "no such file"),
            ("empty", "without train.csv"),
            ("half", "without val.csv"),
            ("table.xlsx", "neither a table"),
            ("", "is empty"),
        ):
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
    for part in (
        "Usage:",
        "NUM",
        "DATA",
        "-- FLAGS",
        "--print-only",
        "MODEL_SIZE",
        "CUDA_VISIBLE_DEVICES",
        "MASTER_PORT",
    ):
        assert part in text


def test_the_learning_rate_is_scaled_by_one_launcher_only(plan, data):
    assert after(printed_command(plan(MULTI, data, "--", *NAMED)), "--lr-scaling") == "linear"
    assert "--lr-scaling" not in printed_command(plan(LAUNCH, data, "--", *NAMED))
    assert (
        after(printed_command(plan(MULTI, data, "--", *NAMED, "--lr-scaling", "sqrt")), "--lr-scaling")
        == "sqrt"
    )
    assert printed_command(plan(MULTI, data, "--", *NAMED, "--lr_scaling=none")).count("--lr-scaling") == 0
    assert "--lr-scaling" not in printed_command(plan(MULTI, data, "--", *NAMED, "--global-batch-size", "32"))


def test_model_size_and_port_from_the_environment(plan, data):
    words = printed_command(plan(LAUNCH, data, "--", *NAMED, MODEL_SIZE="small", MASTER_PORT="31234"))
    assert after(words, "--model-size") == "small" and option(words, "master-port") == "31234"
    words = printed_command(plan(LAUNCH, data, "--", *NAMED, "--model-size", "tiny", MODEL_SIZE="small"))
    assert words.count("--model-size") == 1 and "small" not in words
    assert (
        1024
        <= int(option(printed_command(plan(LAUNCH, data, "--", *NAMED, MASTER_PORT="")), "master-port"))
        < 65536
    )


def test_a_port_in_use_is_replaced_on_one_machine(plan, data):
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = str(held.getsockname()[1])
        done = plan(MULTI, data, "--", *NAMED, MASTER_PORT=port)
        assert f"Port {port} (MASTER_PORT) is in use: another one is taken" in done.stdout
        assert option(printed_command(done), "master-port") not in ("", port)
        several = plan(
            MULTI, data, "--", *NAMED, MASTER_PORT=port, NNODES="2", NODE_RANK="0", MASTER_ADDR="host1"
        )
        assert option(printed_command(several), "master-port") == port  # the others expect it


def test_several_machines_from_the_environment(plan, data):
    words = printed_command(
        plan(LAUNCH, "3", data, "--", *NAMED, NNODES="2", NODE_RANK="1", MASTER_ADDR="host1", MASTER_PORT="")
    )
    assert [
        option(words, name)
        for name in ("nnodes", "node-rank", "master-addr", "master-port", "nproc-per-node")
    ] == ["2", "1", "host1", "29500", "3"]
    assert (
        "Processes:   3 on each of 2 machines"
        in plan(LAUNCH, "3", data, "--", *NAMED, NNODES="2", NODE_RANK="0", MASTER_ADDR="a").stdout
    )
    for missing in ("NODE_RANK", "MASTER_ADDR"):
        given = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "host1"}
        del given[missing]
        assert "NNODES=2 needs MASTER_ADDR" in plan(LAUNCH, data, "--", *NAMED, code=2, **given).stderr
    assert "NNODES=two" in plan(LAUNCH, data, "--", *NAMED, code=2, NNODES="two").stderr


def test_what_a_configuration_says_is_not_said_again(plan, data, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'save_path = "./elsewhere"\ntarget_cols = ["hisco_1"]\nlanguage = "en"\nglobal_batch_size = 64\n'
    )
    done = plan(MULTI, data, "--", "--config", str(file))
    words = printed_command(done)
    assert not {"--save-path", "--target-cols", "--lr-scaling", "--language-col"} & set(words) and words[
        -2:
    ] == ["--config", str(file)]
    assert (
        "Save path:   ./elsewhere" in done.stdout
        and "the learning rate of the script, whatever" in done.stdout
    )
    # the script says that it is not there
    assert "--lr-scaling" in printed_command(plan(MULTI, data, "--", "--config", "missing.toml", *NAMED))


def test_a_script_of_ones_own(plan, data, tmp_path):
    (tmp_path / "mine.py").write_text("")
    words = printed_command(plan(LAUNCH, data, "--", *NAMED, SCRIPT="mine.py"))
    assert "mine.py" in words and str(REPO / "finetune.py") not in words and "--dataset" in words
    assert "SCRIPT=no.py: no such file" in plan(LAUNCH, data, "--", *NAMED, code=2, SCRIPT="no.py").stderr


@pytest.mark.parametrize(
    "script, flags, said",
    [
        (MULTI, [], "the learning rate of the script x 2 processes (--lr-scaling linear)"),
        (LAUNCH, [], "the learning rate of the script, whatever"),
        (
            LAUNCH,
            ["--lr-scaling", "sqrt", "--learning-rate", "1e-4"],
            "learning rate 1e-4 x square root of 2 processes",
        ),
        (MULTI, ["--global-batch-size", "64"], "the learning rate of the script, whatever"),
    ],
)
def test_the_learning_rate_is_said(plan, data, script, flags, said):
    assert f"Rate:        {said}" in plan(script, data, "--", *NAMED, *flags).stdout


def test_the_slurm_job_is_for_slurm(plan, data):
    assert "this is a job for SLURM: sbatch" in plan(SLURM, data, code=2).stderr


def test_the_slurm_job_says_what_it_will_run(plan, data):
    done = plan(
        SLURM,
        "3",
        data,
        "--",
        *NAMED,
        SLURM_JOB_ID="17",
        SLURM_JOB_NUM_NODES="4",
        SLURM_JOB_NODELIST="gpu[1-4]",
        SLURM_SUBMIT_DIR=str(REPO),
        SLURM_CPUS_PER_TASK="12",
        MASTER_ADDR="gpu1",
        SLURM_RESTART_COUNT="1",
    )
    words = printed_command(done)
    assert [option(words, name) for name in ("nnodes", "master-addr", "master-port", "nproc-per-node")] == [
        "4",
        "gpu1",
        "29511",
        "3",
    ]
    array = plan(
        SLURM,
        "3",
        data,
        "--",
        *NAMED,
        "--save-path",
        "run%a",
        SLURM_JOB_ID="17",
        SLURM_JOB_NUM_NODES="4",
        SLURM_SUBMIT_DIR=str(REPO),
        SLURM_ARRAY_JOB_ID="15",
        SLURM_ARRAY_TASK_ID="2",
        MASTER_ADDR="gpu1",
    )
    assert (
        after(printed_command(array), "--save-path") == "run2"
        and "Job:         15_2 on 4 node(s)" in array.stdout
    )
    assert (
        "--node-rank" not in done.stdout
        and "Job:         17 on 4 node(s): gpu[1-4], start number 2" in done.stdout
    )
    assert "OMP_NUM_THREADS=4" in done.stdout
    elsewhere = plan(SLURM, data, code=2, SLURM_JOB_ID="17", SLURM_SUBMIT_DIR="/")
    assert "/ is not the folder of histocc" in elsewhere.stderr


def test_torchrun_is_told_about_signals_and_threads(plan, bin_dir, data):
    write_executable(bin_dir / "nproc", "#!/bin/bash\necho 2\n")
    words = printed_command(plan(LAUNCH, data, "--", *NAMED))
    assert option(words, "signals-to-handle") == "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    assert int(option(words, "shutdown-timeout")) > 30
    many = plan(LAUNCH, "8", data, "--", *NAMED).stdout
    assert "OMP_NUM_THREADS=1\n" in many
    assert "OMP_NUM_THREADS=7\n" in plan(LAUNCH, data, "--", *NAMED, OMP_NUM_THREADS="7").stdout


@pytest.mark.full
def test_columns_are_found_in_the_file(plan, data, folder):
    words = printed_command(plan(LAUNCH, data))
    at = words.index("--formatter")
    assert words[at : at + 5] == ["--formatter", "hisco", "--target-cols", "hisco_1", "hisco_2"]
    assert after(words, "--language-col") == "lang"
    words = printed_command(plan(LAUNCH, folder))
    assert after(words, "--formatter") == "occ1950" and after(words, "--target-cols") == "OCC1950_1"
    assert "--language-col" not in words
    words = printed_command(plan(LAUNCH, data, "--", "--formatter", "gpf", "--language", "en"))
    assert words.count("--formatter") == 1 and after(words, "--target-cols") == "hisco_1"
    assert "--language-col" not in words


@pytest.mark.full
def test_a_file_without_known_columns_says_which_flag_names_them(plan, tmp_path):
    path = write_table(tmp_path / "other.csv", "occ1,code")
    assert "--target-cols" in plan(LAUNCH, str(path), code=2).stderr


def test_the_run_on_the_sample_is_not_mistaken_for_another(plan, data, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    (output / "last.bin").touch()
    write_table(output / "sample" / "train.csv", "occ1,hisco_1")
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
        return option(printed_command(done), "nproc-per-node"), done.stdout

    gpus(4)
    assert processes(MULTI)[0] == "4" and "4 of 4 GPU(s)" in processes(MULTI)[1]
    assert processes(LAUNCH)[0] == "2" and processes(LAUNCH, "all")[0] == "4"
    assert processes(MULTI, CUDA_VISIBLE_DEVICES="0,1")[0] == "2"
    # CUDA stops at the first that is not there
    assert processes(MULTI, CUDA_VISIBLE_DEVICES="3,7,1")[0] == "1"
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
        assert (
            "CUDA_VISIBLE_DEVICES=0,1"
            in plan(script, data, "3", "--", *NAMED, code=2, CUDA_VISIBLE_DEVICES="0,1").stderr
        )
    words = printed_command(plan(LAUNCH, data, "8", "--", *NAMED, "--device", "cpu"))
    assert option(words, "nproc-per-node") == "8"


def test_without_a_working_nvidia_smi_cpus_are_used(plan, bin_dir, data):
    assert "TRAINING ON CPUS" in plan(MULTI, data, "--", *NAMED).stdout
    write_executable(
        bin_dir / "nvidia-smi",
        "#!/bin/bash\necho 'NVIDIA-SMI has failed because it could not talk to the driver'\nexit 9\n",
    )
    assert (
        option(printed_command(plan(MULTI, data, "--", *NAMED, CUDA_VISIBLE_DEVICES="0,1")), "nproc-per-node")
        == "2"
    )
