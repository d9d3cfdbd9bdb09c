"""Nothing that this program did not write is replaced or removed."""

import contextlib
import json
import os
import signal
import stat
import time
from datetime import datetime, timedelta
from unittest.mock import Mock

import pytest
import torch
from helpers import TINY, TITLES, mutations, run_here, run_inside, write_csv, write_rows
from hypothesis import example, given, settings
from hypothesis import strategies as st

import finetune
import histocc
from histocc import export, plot, prepare
from histocc.data.prepare import LISTS
from histocc.evaluate import __main__ as evaluate
from histocc.predict import __main__ as predict
from histocc.review.__main__ import main as review
from histocc.runtime import files as runtime_files
from histocc.runtime.checkpoint import SECOND_NAME
from histocc.runtime.errors import UserError
from histocc.runtime.files import LIST, OwnFiles, atomic_write, is_held, problems, run_lock
from histocc.sample.__main__ import main as sample

HISCO = ["--target-cols", "hisco_1", "--formatter", "hisco"]


def contents(folder):
    """What stands below a folder: kind and content of each name."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in folders + files:
            path = os.path.join(root, name)
            mode = os.lstat(path).st_mode
            content = open(path, "rb").read() if stat.S_ISREG(mode) else None
            found[os.path.relpath(path, folder)] = stat.S_IFMT(mode), content
    return found


# ---- files


def test_what_cannot_be_an_output_is_said(tmp_path):
    (tmp_path / "a.csv").write_text("input")
    os.link(tmp_path / "a.csv", tmp_path / "hard.csv")
    (tmp_path / "soft.csv").symlink_to("a.csv")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    read = {str(tmp_path / "a.csv"): "the input", None: "the file of --key"}
    for name, words in [
        ("a.csv", "is the input, and inputs are never written to"),
        ("hard.csv", "is the input"),
        ("soft.csv", "is the input"),
        ("pipe", "is a pipe, which is not written to"),
        ("folder", "is a folder"),
        ("/dev/null", "is a device"),
        ("a\0b", "is not a valid file name"),
    ]:
        assert words in problems([str(tmp_path / name)], read, overwrite=True)[0]
    hard, new = str(tmp_path / "hard.csv"), str(tmp_path / "new.csv")
    assert "not a valid" in problems([""], {})[0] and "--overwrite replaces it" in problems([hard], {})[0]
    assert problems([hard], {}, True) == [] == problems([new], read)


def test_a_file_is_there_complete_or_not_at_all(tmp_path):
    for path in (tmp_path / "new.csv", tmp_path / "old.csv"):
        (tmp_path / "old.csv").write_text("before")
        before = contents(tmp_path)
        with pytest.raises(OSError) as error, atomic_write(str(path)) as file:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        assert error.value.filename == str(path) and contents(tmp_path) == before
    with atomic_write(str(tmp_path / "old.csv")) as file:
        file.write(b"after")
    assert (tmp_path / "old.csv").read_text() == "after" and os.listdir(tmp_path) == ["old.csv"]


def test_a_file_that_was_made_meanwhile_stays(tmp_path, monkeypatch):
    own = OwnFiles(str(tmp_path))
    path = tmp_path / "coded.csv"
    for made in ("somebody's", "result", "somebody's", "result"):
        expected = pytest.raises(FileExistsError) if made != "result" else contextlib.nullcontext()
        with expected, atomic_write(str(path), overwrite=False) as file:
            file.write(b"result")
            path.write_text(made)
        assert path.read_text() == made and os.listdir(tmp_path) == ["coded.csv"]
        if made == "result":  # again, on a file system without hard links
            monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError))
    with pytest.raises(FileExistsError):
        own.claim("coded.csv")
    for content in ("mine", "[]", '{"written_by": "histocc", "format": 2, "files": []}'):
        (tmp_path / LIST).write_text(content)
        with pytest.raises(UserError, match="histocc.json: is not the list of files"):
            own.claim("key.csv")
        assert (tmp_path / LIST).read_text() == content


def test_only_listed_files_are_its_own(tmp_path):
    own, other = OwnFiles(str(tmp_path)), OwnFiles(str(tmp_path))
    for name in ("key.csv", "last.bin"):
        open(own.claim(name)[0], "w").close()
    other.claim("logs.csv")  # another process, which had read the list before
    (tmp_path / "500.bin").write_text("somebody's")
    again = OwnFiles(str(tmp_path))
    assert again.names == {"key.csv", "last.bin", "logs.csv"} and again.holds(str(tmp_path / "key.csv"))
    assert not again.holds(str(tmp_path / "500.bin")) and not again.holds("key.csv")
    with pytest.raises(FileExistsError):
        again.claim("500.bin")
    again.remove(["last.bin", "500.bin"])
    assert sorted(os.listdir(tmp_path)) == ["500.bin", LIST, "key.csv"]
    assert OwnFiles(str(tmp_path)).names == {"key.csv", "logs.csv"}
    (tmp_path / "key.csv").unlink()
    (tmp_path / "key.csv").symlink_to("500.bin")
    with open(again.claim("key.csv")[0], "w") as file:
        file.write("ours")
    assert (tmp_path / "500.bin").read_text() == "somebody's"


def test_leftovers_have_exact_names(tmp_path):
    others = [".key.csv.new", ".git", "last.bin.tmp7x", "notes.csv.tmp77", "thesis.bin.tmp5", "logs.csv.tmp"]
    left = ["last.bin.tmp77", "epoch_2.bin.tmp1"]
    for name in [*left, *others, f"{LIST}.tmp3"]:
        (tmp_path / name).touch()
    own = OwnFiles(str(tmp_path))
    own.remove_leftovers()  # without a list nothing is one but what was to become the list
    assert sorted(os.listdir(tmp_path)) == sorted([*left, *others])
    own.claim("last.bin", "epoch_2.bin", "logs.csv")
    own.remove_leftovers()
    assert sorted(os.listdir(tmp_path)) == sorted([LIST, *others])


def test_one_live_job_to_a_folder(tmp_path):
    lock = tmp_path / "run.lock"
    lock.touch()  # of a job that was killed at once
    for _ in range(2):
        with run_lock(str(tmp_path)):
            refused = pytest.raises(UserError, match=f"in use by another job: .*process {os.getpid()}, since")
            with refused, run_lock(str(tmp_path)):
                pass
            assert is_held(str(tmp_path))
            left = lock.read_text()
        assert not lock.exists() and is_held(str(tmp_path)) is False
        lock.write_text(left)  # that of a killed job is taken over
    lock.write_text("mine")
    with pytest.raises(UserError, match="is not the lock of a run"), run_lock(str(tmp_path)):
        pass
    assert lock.read_text() == "mine"
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(UserError, match="is not the lock of a run"), run_lock(str(tmp_path)):
        pass


def test_a_process_that_loads_data_does_not_keep_a_dead_jobs_folder(tmp_path):
    reader, writer = os.pipe()
    owner = os.fork()
    if owner == 0:
        with run_lock(str(tmp_path)):
            worker = os.fork()
            if worker == 0:
                time.sleep(60)
                os._exit(0)
            os.write(writer, str(worker).encode())
            time.sleep(60)
        os._exit(0)
    worker = int(os.read(reader, 20))
    try:
        refused = pytest.raises(UserError, match=f"in use by another job: .* process {owner}, since")
        with refused, run_lock(str(tmp_path)):
            pass
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        with run_lock(str(tmp_path)):
            pass
        assert not (tmp_path / "run.lock").exists()
    finally:
        os.kill(worker, signal.SIGKILL)


# ---- commands


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "data.csv", 40)


def flags(data, folder, *more):
    epoch = ["--batch-size", 16, "--num-epochs", 1, "--save-path", folder]
    return ["--dataset", data, *HISCO, *TINY, *epoch, *more]


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    run_here(finetune.main, *flags(data, folder))
    return folder


def refused(folder, main, *arguments):
    """What a command says that ends with exit code 2 and one message, and changes nothing in the folder."""
    before = contents(folder)
    output = run_here(main, *arguments, code=2)
    assert contents(folder) == before
    return output


def test_an_input_is_never_written_to(data, run, tmp_path):
    """Whatever it is called, with --overwrite and without."""
    codes = [(code, number) for number, (_, code) in enumerate(TITLES)]
    key = write_csv(tmp_path / "key.csv", ["system_code", "code"], codes)
    rows = tmp_path / "conflicts.csv"
    for path in (rows, tmp_path / "t.csv", tmp_path / "rejected_rows.csv"):
        path.write_bytes(open(data, "rb").read())
    all_codes = ["--prepare-only", "--all-codes-file", key, "--all-codes-col", "system_code"]
    coded = ["--model", run, "--input", tmp_path / "t.csv", "--output", tmp_path / "t.csv", "--system", "x"]
    evaluated = ["--model", run, "--data", tmp_path / "rejected_rows.csv", "--output", tmp_path]
    runs = [flags(data, tmp_path, *given) for given in (["--key", key], all_codes)]
    for more in ([], ["--overwrite"]):
        for arguments in (*runs, flags(rows, tmp_path)):
            assert "inputs are never written to" in refused(tmp_path, finetune.main, *arguments, *more)
        refused(tmp_path, prepare.main, rows, *HISCO, "--save-path", tmp_path, *more)
        refused(tmp_path, predict.main, *coded, *more)
        refused(tmp_path, evaluate.main, *evaluated, *more)
        refused(run, plot.main, run, "--output", run / "logs.csv", *more)


def test_a_save_folder_with_somebody_s_files(data, tmp_path):
    names = ("logs.csv", "key.csv", "args.json", "status.json", "histocc.json", "best.bin", "prepared")
    for name in names:
        (tmp_path / name).write_text("mine")
        assert name in refused(tmp_path, finetune.main, *flags(data, tmp_path))
        (tmp_path / name).unlink()


@pytest.mark.full
def test_what_a_user_edited_stays_when_the_run_is_resumed(data, tmp_path):
    start = flags(data, tmp_path, "--batch-size", 4)
    run_here(finetune.main, *start, "--max-steps", 1)
    key = (tmp_path / "key.csv").read_text()
    (tmp_path / "key.csv").write_text("my notes")
    assert f"error: {tmp_path}/key.csv: " in run_here(finetune.main, *start, code=2)
    assert (tmp_path / "key.csv").read_text() == "my notes"
    os.rename(tmp_path / "key.csv", tmp_path / "notes.csv")
    run_here(finetune.main, *start)
    assert (tmp_path / "key.csv").read_text() == key


def test_starting_over_leaves_what_is_not_the_runs(data, tmp_path):
    torch.save({"model": {}, SECOND_NAME: {}}, tmp_path / "last.bin")  # of another trainer
    for name in ("9.bin", "MODEL.md"):
        (tmp_path / name).write_text("mine")
    refused(tmp_path, finetune.main, *flags(data, tmp_path))
    run_here(finetune.main, *flags(data, tmp_path, "--overwrite"))
    assert (tmp_path / "9.bin").read_text() == "mine"
    assert "# Model card" in (tmp_path / "MODEL.md").read_text()
    state = torch.load(tmp_path / "last.bin", weights_only=True)
    assert "format" in state  # what --overwrite is for
    for made_by in (state["made_by"], json.loads((tmp_path / "args.json").read_text())["made_by"]):
        assert (made_by["histocc"], made_by["torch"]) == (histocc.__version__, torch.__version__)
        assert datetime.fromisoformat(made_by["date"]).utcoffset() == timedelta(0)
    assert "is finished" in run_here(finetune.main, "--config", tmp_path / "args.json")


def test_exports_and_samples_replace_nothing(run, tmp_path):
    pytest.importorskip("safetensors")
    (tmp_path / "config.json").write_text("mine")
    refused(tmp_path, export.main, run, "--to", "safetensors", tmp_path / "m.safetensors")
    refused(tmp_path, export.main, run, "--to", "published", "/dev/null")
    said = refused(tmp_path, export.main, run, "--to", "safetensors", tmp_path / "m.bin")
    assert "m.bin: --to safetensors writes another kind of file: name it" in said
    assert f"{tmp_path / 'm.safetensors'}, or omit --to" in said
    path = str(tmp_path / "real.csv")
    left = [tmp_path / f"{name}.tmp123" for name in ("real.csv", "m.bin", "sheet.csv", "other.csv")]
    for each in left:  # as by processes that were killed
        each.write_text("half")
    assert sample(["--rows", "5", "--output", path]) == 0 == sample(["--rows", "5", "--output", path])
    assert run_inside(export.main, run, "--to", "published", tmp_path / "m.bin")[0] in (0, None)
    assert review(["make", path, "--key", "hisco", "--output", str(tmp_path / "sheet.csv")]) == 0
    assert [each.exists() for each in left] == [False, False, False, True]
    before = contents(tmp_path)
    with contextlib.suppress(SystemExit):
        assert sample(["--rows", "6", "--output", path]) == 2
    assert contents(tmp_path) == before and sample(["--rows", "6", "--output", path, "--overwrite"]) == 0


def test_temporary_names_are_never_written_through(data, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious.txt").write_text("mine")
    for name in ("status.json", "logs.csv", "last.bin", "args.json", LIST):
        (tmp_path / "run" / f"{name}.tmp{os.getpid()}").symlink_to(tmp_path / "precious.txt")
    run_here(finetune.main, *flags(data, tmp_path / "run"))
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_written(run, tmp_path):
    given = ["--model", run, "--data", "x.csv", "--output", f"{run}/evaluation/../../{run.name}"]
    assert "is not a folder yet" in refused(run, evaluate.main, *given)
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert f"{tmp_path}/file is not a folder" in runtime_files.save_path_problems(str(folder))[0]
    (tmp_path / "link").symlink_to("/proc/self")
    for folder in ("/proc/run", f"{tmp_path}/link/../new"):
        assert "cannot write there: " in runtime_files.save_path_problems(folder)[0]
    os.unlink(tmp_path / "link")
    assert runtime_files.save_path_problems(f"{tmp_path}/../{tmp_path.name}/new") == []
    assert runtime_files.save_path_problems(str(tmp_path / "new" / "run")) == [] and os.listdir(tmp_path) == [
        "file"
    ]


NAMES = [*LISTS, "args.json", "logs.csv", "status.json", "curves.png", "last.bin", "best.bin", "3.bin"]
NAMES += ["run.lock", "histocc.json", "prepared", "prepared/.git", "prepared/notes.txt"]
NAMES += ["notes.txt", "key.csv.tmp1x", ".key.csv.newer", "tensorboard"]
KINDS = st.sampled_from(["text", "json", "empty", "folder", "pipe", "link", "dangling"])


@settings(max_examples=mutations(0.2), deadline=None, derandomize=True)
@given(
    files=st.dictionaries(st.sampled_from(NAMES), KINDS, max_size=3),
    more=st.sampled_from([(), ("--prepare-only",), ("--dry-run",)]),
)
@example(files={"run.lock": "text"}, more=())
@pytest.mark.full
def test_whatever_lies_in_the_folder_stays(data, tmp_path_factory, files, more):
    """The run does its work, or says in one message why not; what was there is there, byte for byte."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "elsewhere").write_text("mine, elsewhere")
    target = folder / "run"
    target.mkdir()
    for name, kind in files.items():
        path = target / name
        with contextlib.suppress(FileExistsError, NotADirectoryError, IsADirectoryError):
            path.parent.mkdir(exist_ok=True)
            make(path, kind, folder / "elsewhere")
    before = contents(folder)
    code, output = run_inside(finetune.main, *flags(data, target, *more))
    after = contents(folder)
    changed = [path for path in before if after.get(path) != before[path]]
    assert changed == [], output
    assert "Traceback" not in output and (code == 0 or code == 2 and output.count("error: ") == 1), output


def make(path, kind, elsewhere):
    if kind in ("text", "json", "empty"):
        path.write_text({"text": "mine\n", "json": json.dumps({"written_by": "me"}), "empty": ""}[kind])
    elif kind == "folder":
        path.mkdir()
        (path / "mine").write_text("mine")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(elsewhere if kind == "link" else elsewhere.parent / "nothing")
