"""What users are told: exit code 2, one message that names the thing and what to do, and nothing left
behind.
"""

import signal
import subprocess
import sys
import types

import pytest
from helpers import FINETUNE, REPO, TINY, run, run_here, start_forked, wait_until_handled, words, write_rows
from test_distributed import no_launcher  # noqa: F401

import finetune
import train_mixer
from histocc.predict import __main__ as predict


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "data.csv", 30)


def refused(tmp_path, *flags):
    """The message of a run that must be refused; its save folder must not be there afterwards."""
    columns = [] if "--target-cols" in flags else ["--target-cols", "hisco_1"]
    save = [] if "--save-path" in flags else ["--save-path", tmp_path / "run"]
    output = run_here(finetune.main, *TINY, *flags, *columns, *save, code=2)
    assert not (tmp_path / "run").exists()
    return output


def test_several_problems_are_reported_together(tmp_path, data):
    wrong = words("--target-cols hisco_9 --input-col occupation --language en --language-col lang")
    wrong += ["--max-len", 3, "--persistent-workers", "--save-path", f"{data}/run"]
    output = refused(tmp_path, "--dataset", data, *wrong)
    for said in (
        "6 problems",
        f"since {data} is not a folder",
        "no column 'hisco_9'",
        "no column 'occupation'",
        "it has 'occ1', 'hisco_1', 'hisco_2', 'lang'",
        "--language and --language-col",
        "--max-len must be at least 16 and at most 2048, not 3",
        "--persistent-workers needs --num-workers",
    ):
        assert said in output, said


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--bf16 --float64", "--bf16, --fp16, --use-amp and --float64 are mutually exclusive"),
        ("--global-batch-size 8 --lr-scaling linear", "mutually exclusive"),
        ("--device cuda", "take --device cpu"),
        ("--initial-checkpoint /nowhere", "/nowhere: no checkpoint there"),
        ("--eval-only", "no checkpoint there"),
        ("--distributed", "torchrun --nproc-per-node=2 finetune.py --distributed"),
        ("--dry-run --target-cols nothing", "no column 'nothing'"),
        ("--weight-col hisco_1 --target-cols hisco_1", "column 'hisco_1' is named twice"),
        ("--dry-run --eval-only", "--dry-run and --eval-only are mutually exclusive"),
        ("--include-descriptions", "--include-descriptions needs --descriptions-file"),
        ("--descriptions-file x.csv", "--descriptions-file needs --include-descriptions"),
        ("--description-template {occ}", "must contain {desc}"),
        ("--model-size ngrams", "--model-size ngrams consists only of n-grams"),
        ("--model-size ngrams --ngrams auto --freeze-encoder", "--model-size ngrams has no encoder"),
    ],
)
def test_flags_that_cannot_be_followed(tmp_path, data, flags, said, monkeypatch):
    monkeypatch.setattr("sys.argv", ["finetune.py"])
    assert said in refused(tmp_path, "--dataset", data, *words(flags))


@pytest.mark.processes
@pytest.mark.full
def test_on_several_processes_rank_0_alone_speaks_and_every_rank_ends_with_2(tmp_path, data):
    """--world-size contradicts WORLD_SIZE: found before the ranks meet. A missing column: found by rank 0
    afterwards.
    """
    for flags, said in (
        (["--target-cols", "hisco_1", "--world-size", "4"], "--world-size 4 contradicts the launcher"),
        (["--target-cols", "none"], "no column 'none'"),
    ):
        (tmp_path / "log").write_text("")
        line = ["--dataset", data, "--save-path", tmp_path / "run", *TINY, "--distributed", *flags]
        first, second = start_forked(FINETUNE, line, tmp_path / "log", 2)
        first.join(60)
        if "--world-size" in flags:
            wait_until_handled(signal.SIGTERM, second.pid)
            second.terminate()  # as a launcher does when a process has ended
        second.join(60)
        assert (first.exitcode, second.exitcode) == (2, 2)
        output = (tmp_path / "log").read_text()
        assert output.count("error:") == 1 and said in output and "Traceback" not in output
        assert not (tmp_path / "run").exists()


@pytest.mark.processes
def test_help_is_printed_once(tmp_path):
    output = run("train_mixer.py", "--help", processes=2)
    assert output.count("usage: train_mixer.py") == 1


def test_the_weights_that_a_run_starts_from_are_not_overwritten(tmp_path, data):
    old = tmp_path / "old"
    old.mkdir()
    (old / "best.bin").write_bytes(b"weights")
    start = ["--dataset", data, "--save-path", old, "--initial-checkpoint", old]
    assert "--overwrite would remove" in refused(tmp_path, *start, "--overwrite")
    assert (old / "best.bin").exists()


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--batch-size 0", "'0' is not a whole number of at least 1"),
        ("--seed", "--seed"),
        ("--bach_size 8", "unrecognized arguments: --bach-size; did you mean --batch-size?"),
        ("--lr -1", "--learning-rate: '-1' is not a number above 0"),
        ("--zzz --seeed=3", "unrecognized arguments: --zzz --seeed=3; did you mean --seed?"),
    ],
)
def test_a_wrong_flag_or_value_names_the_help(tmp_path, flags, said):
    output = refused(tmp_path, "--dataset", "x.csv", *words(flags))
    assert said in output and "finetune.py --help lists the flags" in output


def test_a_required_flag_that_is_misspelled_is_named(tmp_path):
    assert "unrecognized arguments: --datset" in (said := refused(tmp_path, "--datset=x.csv"))
    assert "; did you mean --dataset?" in said


@pytest.mark.parametrize(
    "failure, said",
    [
        ("ConnectError", "the hub could not be asked for nosuchmodel: is there a network?"),
        ("RepositoryNotFoundError", "the hub has no model nosuchmodel, or keeps it private"),
        (None, "the hub cannot be asked without a package: pip install huggingface_hub"),
    ],
)
def test_a_model_that_is_nowhere_is_one_line_without_the_words_of_the_hub(data, monkeypatch, failure, said):
    def download(*_, **__):
        raise type(failure, (Exception,), {})("Got: [Errno -2] specified revision on")

    hub = failure and types.SimpleNamespace(snapshot_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    output = run_here(predict.main, data, "--model", "nosuchmodel", "--output", "coded.csv", code=2)
    assert output == f"error: nosuchmodel: no such file or folder, and {said}\n"


def test_mixer_without_validation_files_names_the_command_that_splits_one_table(data):
    output = run_here(train_mixer.main, "--train-data", data, "--save-dir", "run", code=2)
    assert "arguments are required: --val-data; or use histocc train (finetune.py), which splits" in output


def test_a_python_without_torch_says_where_it_may_be():
    hidden = "import sys; sys.modules['torch'] = None; import histocc"
    done = subprocess.run([sys.executable, "-c", hidden], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1 and "source .venv/bin/activate" in done.stderr
    assert "histocc needs torch, which this Python" in done.stderr.splitlines()[-1]
    command = hidden.replace("import histocc", "sys.argv[0] = '-m'; import histocc")
    done = subprocess.run([sys.executable, "-c", command], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: histocc needs torch")
    assert len(done.stderr.splitlines()) == 1
