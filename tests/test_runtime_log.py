"""A terminal never ends a run: printing never raises; and how far a stage has come."""

import io
import os
import pty
import subprocess
import sys

import pytest
from helpers import FINETUNE, REPO, TINY, command, environment, write_rows

from histocc.runtime import entrypoint, log, signals
from histocc.runtime.errors import UserError
from histocc.runtime.log import Stage, duration


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
    with log.opened():
        for i in range(3):
            print(f"line {i}", flush=True)
        print("line 3")
        print("a fault", file=sys.stderr)
        assert log.output_is_lost()
    assert sys.stdout is out and sys.stderr is err and "line 3" not in out.getvalue()
    assert err.getvalue().count("standard output cannot be written any more (") == 1
    assert "a fault" in err.getvalue()


def test_if_both_are_gone_work_goes_on_and_errors_come_through(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # closed: `>&-`
    monkeypatch.setattr(sys, "stderr", Broken())
    with pytest.raises(ZeroDivisionError), log.opened():
        print("first")
        print("second", file=sys.stderr)
        1 / 0  # noqa: B018


@pytest.mark.parametrize("stops", [False, True])
def test_a_reader_that_does_not_read_is_not_waited_for_without_end(monkeypatch, stops):
    monkeypatch.setattr(log, "PATIENCE_SECONDS", 1000.0 if stops else 0.4)
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "w") as out, signals.listening() as stop:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        stop.limit(0.0 if stops else None)
        with log.opened():
            for i in range(5000):
                print(f"line {i} {'x' * 80}")


def test_letters_that_a_terminal_does_not_have_end_nothing(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    with log.opened():
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
    assert (tmp_path / "run" / "last.bin").exists()


# ---- progress


def test_lines_without_a_terminal_every_few_seconds_unless_quiet(capsys, monkeypatch):
    monkeypatch.setattr(log, "_progress_shown", True)
    monkeypatch.setattr(log, "PROGRESS_SECONDS", 0.0)
    with Stage("reading", 40, "rows", first=10) as stage:
        stage.at(20)
        stage.add(5)
        monkeypatch.setattr(log, "PROGRESS_SECONDS", 3600.0)
        stage.at(30)
        monkeypatch.setattr(log, "PROGRESS_SECONDS", 0.0)
        stage.at(90)
        log.show_progress(False)
        stage.at(40)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" rows, ")[0] for line in lines] == [
        f"reading: {done} of 40" for done in (20, 25, 40)
    ]


def test_rate_and_time_left():
    stage = Stage("coding", 1000, "rows", first=100)
    stage.at(600)
    assert stage.line(5.0) == "coding: 600 of 1,000 rows, 100/s, 4s left"
    stage = Stage("reading", None, "rows")
    stage.at(7)
    assert stage.line(2.0) == "reading: 7 rows, 3.5/s"
    times = {0: "0s", 59.9: "59s", 190: "3m10s", 7500: "2h05m", 86399: "23h59m", 273659: "3d04h"}
    assert {seconds: duration(seconds) for seconds in times} == times


@pytest.mark.processes
@pytest.mark.parametrize("quiet", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_terminal_shows_bars_unless_quiet(tmp_path, quiet):
    """A run whose stderr is a terminal, with tqdm."""
    pytest.importorskip("tqdm")
    data = write_rows(tmp_path / "rows.csv", 60)
    ours, theirs = pty.openpty()
    flags = ["--dataset", data, "--formatter", "hisco", "--target-cols", "hisco_1", *TINY, "--max-steps", 3]
    flags += ["--ngrams", 8, "--ngram-passes", 1, "--save-path", tmp_path / "run", *["--quiet"] * quiet]
    process = subprocess.Popen(
        [sys.executable, "finetune.py", *map(str, flags)],
        cwd=REPO,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        said += part
        if not part:
            break
    os.close(ours)
    assert process.wait(120) == 0, said
    fits = (b"fitting n-grams, linear decoder:", b"fitting n-grams, both decoders:")  # each has a rate
    bars = [name for name in (b"training:", b"validation:", b"reading ", *fits) if name in said]
    assert len(bars) == (0 if quiet else 5), said
