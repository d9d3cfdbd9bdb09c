"""What the machine refuses, in words; and a terminal that never ends a run."""

import contextlib
import errno
import io
import os
import pickle
import pty
import resource
import subprocess
import sys
import termios
import time
from unittest.mock import Mock

import pytest
import torch
from helpers import FINETUNE, PIPED, TINY, command, environment, write_rows
from torch.utils.data import DataLoader

from histocc.runtime import checkpoint, errors, log
from histocc.runtime.checkpoint import Saver
from histocc.runtime.errors import TrainingError, UserError, as_user_error, in_words
from histocc.runtime.files import OwnFiles, run_lock
from histocc.runtime.log import Stage
from histocc.runtime.world import World

STATE = {"model": {"w": torch.zeros(500_000)}}


def in_child(work, *limit):
    """What `work` returns, or (type, words) of what it raises, in a process with a limit (kind, number)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # those of the parent process are not here
        try:
            if limit:
                resource.setrlimit(limit[0], (limit[1], limit[1]))
            result = work()
        except BaseException as error:
            result = type(as_user_error(error)), str(as_user_error(error))
        os.write(writer, pickle.dumps(result))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        result = pickle.load(file)
    os.waitpid(child, 0)
    return result


@pytest.mark.parametrize("work", [lambda: torch.zeros(10**9), lambda: bytearray(10**9)])
def test_out_of_memory(work):
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    assert in_child(work, resource.RLIMIT_AS, used + 10**8) == (TrainingError, "out of memory")


def test_too_many_open_files():
    kind, text = in_child(lambda: [open(os.devnull) for _ in range(99)], resource.RLIMIT_NOFILE, 40)
    assert kind is TrainingError and "too many open files; ulimit -n 4096" in text


class Share(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {str(name): torch.zeros(300) for name in range(6)}


def test_processes_that_load_data_have_as_many_open_files_as_the_system_lets_them():
    def load():
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        errors.allow_open_files()
        count = 0
        for _ in DataLoader(Share(), batch_size=None, num_workers=4, prefetch_factor=4):
            if count < 3:
                time.sleep(0.1)  # all that they can have ready is on its way
            count += 1
        return count

    assert in_child(load) == 40


@pytest.mark.parametrize(
    "error, kind, words",
    [
        (RuntimeError("received 0 items of ancdata"), TrainingError, "too many open files"),
        (RuntimeError("shared memory </torch_1>: Too many open files"), TrainingError, "too many open"),
        (RuntimeError("file </torch_12>: No space left on device (28)"), TrainingError, "/dev/shm is full"),
        (RuntimeError("can't start new thread"), TrainingError, "no more processes or threads can be"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB."), TrainingError, "out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), TrainingError, "out of memory"),
        (RuntimeError("Caught OSError.\nInput/output error"), TrainingError, "output error; the disk"),
        (RuntimeError("Connection reset by peer"), type(None), "Connection reset by peer"),
        (OSError(errno.ENOSPC, "x", "a/b"), TrainingError, "a/b: no space left on the device; make room"),
        (OSError(errno.EDQUOT, "x", "a/b"), TrainingError, "a/b: the disk quota is used up; make room"),
        (OSError(errno.ENOMEM, "x", "a/b"), TrainingError, "a/b: out of memory"),
        (OSError(errno.EROFS, "Read-only file system", "a/b"), UserError, "a/b: Read-only file system"),
        (OSError(errno.EACCES, "Permission denied", "a/b"), UserError, "a/b: Permission denied"),
        (OSError(errno.ECONNRESET, "reset"), type(None), "reset"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, Exception) else None,
)
def test_errors_of_torch_and_of_the_system_are_known(error, kind, words):
    known = as_user_error(error)
    assert type(known) is kind and words in in_words(error)
    assert known is None or words in str(known)


def test_a_save_beyond_the_limit_of_files(tmp_path):
    def save_one():
        lines = []
        files = OwnFiles(str(tmp_path))
        save = Saver(files, 3, World(), lambda step, position: {**STATE, "step": step}, lines.append)
        return save(4, ["4.bin", "last.bin"], {}), lines

    failed, lines = in_child(save_one, resource.RLIMIT_FSIZE, 1_000_000)
    assert failed.startswith(f"{tmp_path}/last.bin: the file is too large") and "ulimit -f" in failed
    [line] = lines
    assert line.startswith("WARNING: ") and "of step 4" in line and failed in line
    path, lock = str(tmp_path / "best.bin"), run_lock(str(tmp_path))
    for work, name in (lambda: checkpoint.rewrite(path, STATE), "best.bin"), (lock.__enter__, "run.lock"):
        kind, said = in_child(work, resource.RLIMIT_FSIZE, 0)
        assert kind is TrainingError and said.startswith(f"{tmp_path}/{name}: the file is too large")


def test_commands_of_one_process_say_what_is_wrong_once(capsys):
    def ends_with(error):
        return errors.run_command(Mock(side_effect=error))

    assert errors.run_command(lambda: None) == 0 and ends_with(UserError("no such run")) == 2
    assert ends_with(OSError(28, "No space left on device", "out.csv")) == 1
    assert ends_with(KeyboardInterrupt()) == 130
    said = capsys.readouterr().err
    assert said.count("error: ") == 2 and "error: no such run\n" in said and "out.csv" in said


# ---- printing


class Broken(io.StringIO):
    """Takes `lines` lines, then fails as a pipe without a reader does."""

    def __init__(self, lines=0, error=None):
        super().__init__()
        self.lines, self.error = lines, error or BrokenPipeError(32, "Broken pipe")

    def flush(self):
        if self.getvalue().count("\n") > self.lines:
            raise self.error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("closed file")])
def test_a_stream_that_fails_is_dropped_and_that_is_said_once(monkeypatch, error):
    out, err = Broken(2, error), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with log.safe_output():
        for i in range(4):
            print(f"line {i}", flush=True)
        print("a fault", file=sys.stderr)
        assert log.output_is_lost()
    assert sys.stdout is out and sys.stderr is err and "line 3" not in out.getvalue()
    assert err.getvalue().count("standard output") == 1 and "a fault" in err.getvalue()


def test_if_both_are_gone_work_goes_on_and_errors_come_through(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # closed: `>&-`
    monkeypatch.setattr(sys, "stderr", Broken())
    with pytest.raises(ZeroDivisionError), log.safe_output():
        print("first")
        print("second", file=sys.stderr, flush=True)
        1 / 0  # noqa: B018


def test_letters_that_a_terminal_does_not_have_end_nothing(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    with log.safe_output():
        print("væver")
    assert raw.getvalue() == b"v?ver\n"


@pytest.mark.full
def test_a_run_outlives_its_terminal(tmp_path):
    """Both streams are pipes whose reader ends after the first lines."""
    flags = ["--dataset", write_rows(tmp_path / "data.csv", 40), "--target-cols", "hisco_1", *TINY]
    flags += ["--formatter", "hisco", "--save-path", tmp_path / "run", "--batch-size", 4, "--num-epochs", 1]
    line = command(FINETUNE, *flags, "--log-interval", 1)
    process = subprocess.Popen(line, env=environment(), **PIPED)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 0
    assert (tmp_path / "run" / "last.bin").exists()


def test_a_line_of_progress_every_few_seconds_unless_quiet(capsys, monkeypatch):
    stage = Stage("reading", 40, "rows", first=10)
    log.show_progress(True)
    for seconds, done in ((0, 20), (0, 25), (3600, 30), (0, 90)):
        monkeypatch.setattr(log, "PROGRESS_SECONDS", seconds)
        stage.at(done)
    log.show_progress(False)
    stage.at(40)
    lines = [line.partition(" rows, ")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [f"reading: {done} of 40" for done in (20, 25, 40)]


BARS = """
import time
from histocc.runtime import log
from histocc.runtime.log import Stage
log.show_progress(True)
with log.safe_output():
    reading = Stage("reading", 40, "rows", first=10)
    print("a note")
    time.sleep(0.2)  # tqdm draws ten times a second
    reading.at(30)
    reading.at(40)
    print("ended")
    Stage("coding", None, "texts").add()
    Stage("validation", 2, "batches")
    print("another")
    log.show_progress(False)
    Stage("quiet", 2, "rows").add()
"""


def test_a_terminal_shows_bars_that_leave_nothing_behind():
    pytest.importorskip("tqdm", reason="needs tqdm (extra `progress`)")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    line = [sys.executable, "-c", BARS]
    subprocess.run(line, env=environment(), stdout=theirs, stderr=theirs, check=True, timeout=60)
    os.close(theirs)
    parts = []
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 1 << 16):
            parts.append(part)
    os.close(ours)
    said = b"".join(parts).decode()
    assert "\rreading:  25%|" in said and "30/40 [" in said and "quiet" not in said
    assert "\rcoding: 0 texts" in said and "\rvalidation:   0%|" in said
    assert "reading" not in said.partition("ended")[2]
    lines = []
    for line in said.split("\n"):  # as it stands there in the end
        lines.append("")
        for part in line.split("\r"):
            lines[-1] = part + lines[-1][len(part) :]
    assert list(map(str.rstrip, lines)) == ["a note", "ended", "another", ""]
