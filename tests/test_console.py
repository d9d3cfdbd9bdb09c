"""A terminal never ends a run: printing never raises, and what is not shown stands in console.log."""

import fcntl
import io
import os
import subprocess
import sys

import pytest
from helpers import FINETUNE, REPO, TINY, command, environment, write_rows

import finetune
from histocc import watch
from histocc.runtime import console, entrypoint
from histocc.runtime.errors import UserError


class Broken(io.StringIO):
    """Takes `lines` lines, then fails as a pipe without a reader does."""

    def __init__(self, lines=0, error=None):
        super().__init__()
        self.lines, self.error = lines, error or BrokenPipeError(32, "Broken pipe")

    def flush(self):
        if self.getvalue().count("\n") > self.lines:
            raise self.error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("closed file")])
def test_a_stream_that_fails_is_dropped_said_once_and_kept_in_a_file(tmp_path, monkeypatch, error):
    out, err = Broken(2, error), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with console.opened():
        for number in range(3):
            print(f"line {number}", flush=True)
        console.write_into(str(tmp_path / console.FILE))
        print("line 3")
        print("a fault", file=sys.stderr)
    assert sys.stdout is out and sys.stderr is err
    assert out.getvalue().startswith("line 0\nline 1\n") and "line 3" not in out.getvalue()
    assert err.getvalue().count("standard output cannot be written any more (") == 1
    assert str(tmp_path / console.FILE) in err.getvalue() and "a fault" in err.getvalue()
    kept = (tmp_path / console.FILE).read_text()
    assert "line 2\n" in kept and "line 3\n" in kept and "line 1" not in kept


def test_where_both_are_gone_the_file_has_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # closed: `>&-`
    monkeypatch.setattr(sys, "stderr", Broken())
    with pytest.raises(ZeroDivisionError), console.opened():
        print("first")
        console.write_into(str(tmp_path / console.FILE))
        print("second", file=sys.stderr)
        1 / 0  # noqa: B018
    kept = (tmp_path / console.FILE).read_text()
    assert "first\n" in kept and "second\n" in kept and "ZeroDivisionError" in kept


@pytest.mark.parametrize("stops", [False, True])
def test_a_reader_that_does_not_read_is_not_waited_for_without_end(tmp_path, monkeypatch, stops):
    monkeypatch.setattr(console, "PATIENCE_SECONDS", 1000.0 if stops else 0.4)
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        with console.opened():
            console.write_into(str(tmp_path / console.FILE))
            console.give_up_when(lambda: stops)
            for number in range(5000):
                print(f"line {number} {'x' * 80}")
    assert "line 4999" in (tmp_path / console.FILE).read_text()


def test_letters_that_a_terminal_does_not_have_end_nothing(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    with console.opened():
        print("væver")
    assert raw.getvalue() == b"v?ver\n"


def test_commands_of_one_process_say_what_is_wrong_once(capsys):
    def ends_with(error):
        def work():
            raise error

        return entrypoint.run_command(work)

    assert entrypoint.run_command(lambda: None) == 0 and ends_with(UserError("no such run")) == 2
    assert ends_with(OSError(28, "No space left on device", "out.csv")) == 1
    assert ends_with(KeyboardInterrupt()) == 130
    said = capsys.readouterr().err
    assert said.count("error: ") == 2 and "error: no such run\n" in said and "out.csv" in said


@pytest.fixture
def flags(tmp_path):
    data = write_rows(tmp_path / "data.csv", 40)
    columns = ["--target-cols", "hisco_1", "hisco_2", "--formatter", "hisco", "--save-path", tmp_path / "run"]
    return ["--dataset", data, *columns, *TINY, "--batch-size", 4, "--num-epochs", 1, "--log-interval", 1]


@pytest.mark.full
def test_a_run_outlives_its_terminal(flags, tmp_path):
    """Both streams are pipes whose reader ends after the first lines."""
    process = subprocess.Popen(
        command(FINETUNE, *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(),
        cwd=REPO,
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 0
    kept = (tmp_path / "run" / "console.log").read_text()
    assert "Broken pipe" in kept and "Finished at step" in kept and (tmp_path / "run" / "last.bin").exists()


@pytest.mark.full
def test_two_processes_outlive_a_full_disk_under_their_output(flags, tmp_path):
    line = command(FINETUNE, *flags, processes=2)
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, stdout=full, stderr=full, env=environment(), cwd=REPO, timeout=180)
    assert done.returncode == 0 and "Finished at step" in (tmp_path / "run" / "console.log").read_text()


def test_a_user_s_console_log_is_not_written_to_and_watching_ends_with_its_reader(
    flags, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / console.FILE).write_text("mine")
    monkeypatch.setattr(sys, "stdout", Broken())
    finetune.main([str(flag) for flag in flags])
    assert (folder / console.FILE).read_text() == "mine"
    assert "Finished at step" in (folder / "console.1.log").read_text()
    monkeypatch.undo()
    status = folder / "status.json"
    status.write_text(status.read_text().replace('"finished"', '"running"'))
    with open(folder / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(sys, "stdout", Broken(1))
        assert watch.main([str(folder), "--every", "0.1"]) == 0
