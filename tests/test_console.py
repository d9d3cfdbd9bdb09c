"""A terminal never ends a run: printing never raises, and what is not shown stands in console.log."""

import io
import os
import subprocess
import sys
import threading

import pytest
from helpers import FINETUNE, REPO, TINY, command, environment, run_inside, write_rows

import finetune
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


@pytest.mark.parametrize(
    "error, words",
    [
        (BrokenPipeError(32, "Broken pipe"), "Broken pipe"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (ValueError("closed file"), "closed file"),
    ],
)
def test_a_stream_that_fails_is_dropped_said_once_and_kept_in_a_file(tmp_path, monkeypatch, error, words):
    out, err = Broken(2, error), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with console.opened():
        for number in range(3):
            print(f"line {number}", flush=True)
        assert console.output_is_lost()
        console.write_into(str(tmp_path / console.FILE))
        print("line 3")
        print("a fault", file=sys.stderr)
    assert sys.stdout is out and sys.stderr is err
    assert out.getvalue().startswith("line 0\nline 1\n") and "line 3" not in out.getvalue()
    said = err.getvalue()
    assert (
        said.count(f"standard output cannot be written any more ({words})") == 1
        and str(tmp_path / console.FILE) in said
        and "a fault" in said
    )
    kept = (tmp_path / console.FILE).read_text()
    assert "line 2\n" in kept and "line 3\n" in kept and "line 1" not in kept


def test_where_both_are_gone_the_file_has_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # closed: `>&-`
    monkeypatch.setattr(sys, "stderr", Broken())
    with pytest.raises(ZeroDivisionError), console.opened():
        print("first")
        print("second", file=sys.stderr)
        console.write_into(str(tmp_path / console.FILE))
        print("third")
        1 / 0  # noqa: B018
    kept = (tmp_path / console.FILE).read_text()
    assert "first\n" in kept and "second\n" in kept and "third\n" in kept and "ZeroDivisionError" in kept


@pytest.mark.parametrize("stops", [False, True])
def test_a_reader_that_does_not_read_is_not_waited_for_without_end(tmp_path, monkeypatch, stops):
    monkeypatch.setattr(console, "PATIENCE_SECONDS", 1000.0 if stops else 0.4)
    reader, writer = os.pipe()
    err = io.StringIO()
    with open(reader, "rb"), open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with console.opened():
            console.write_into(str(tmp_path / console.FILE))
            console.give_up_when(lambda: stops)
            for number in range(5000):
                print(f"line {number} {'x' * 80}")
            assert console.output_is_lost()
    assert (
        "line 4999" in (tmp_path / console.FILE).read_text()
        and "cannot be written any more (nobody" in err.getvalue()
    )


def test_a_library_that_replaces_the_streams(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with console.opened():
        sys.stdout = None
        console.put_back()
        print("still there")
    assert "still there" in out.getvalue()


def test_lines_of_threads_stay_whole(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)

    def say(word):
        for _ in range(200):
            print(word, word, flush=True)

    with console.opened():
        threads = [threading.Thread(target=say, args=(word,)) for word in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(out.getvalue().splitlines()) == {"a a", "b b"}


def test_a_slow_terminal_is_not_lost(monkeypatch):
    slow = Broken(0, BlockingIOError(11, "Resource temporarily unavailable"))
    monkeypatch.setattr(sys, "stdout", slow)
    with console.opened():
        print("a")
        assert not console.output_is_lost()


def test_letters_that_a_terminal_does_not_have_end_nothing(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    with console.opened():
        print("væver")
    assert raw.getvalue() == b"v?ver\n"


def test_closed_descriptors_are_not_given_to_files():
    code = (
        "import os, histocc.runtime.signals as s; s.start_listening(); "
        "print(os.open('/dev/null', os.O_RDONLY), file=open(os.environ['SAID'], 'w'))"
    )
    said = f"/tmp/said.{os.getpid()}"
    try:
        subprocess.run(
            ["bash", "-c", f'{sys.executable} -c "{code}" <&- >&- 2>&-'],
            env=environment(SAID=said),
            cwd=REPO,
            check=True,
            timeout=60,
        )
        with open(said) as file:
            assert int(file.read()) > 2
    finally:
        os.unlink(said)


def test_commands_of_one_process_say_what_is_wrong_once(capsys):
    def fails(error):
        def work():
            raise error

        return work

    assert (
        entrypoint.run_command(fails(UserError("no such run"))) == 2
        and entrypoint.run_command(lambda: None) == 0
    )
    assert (
        entrypoint.run_command(fails(OSError(28, "No space left on device", "out.csv"))) in (1, 2)
        and entrypoint.run_command(fails(KeyboardInterrupt())) == 130
    )
    said = capsys.readouterr().err
    assert said.count("error: ") == 2 and "error: no such run\n" in said and "out.csv" in said


@pytest.fixture
def flags(tmp_path):
    return [
        "--dataset",
        write_rows(tmp_path / "data.csv", 40),
        "--target-cols",
        "hisco_1",
        "hisco_2",
        "--formatter",
        "hisco",
        *TINY,
        "--batch-size",
        4,
        "--num-epochs",
        1,
        "--log-interval",
        1,
        "--save-path",
        tmp_path / "run",
    ]


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
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(FINETUNE, *flags, processes=2),
            stdout=full,
            stderr=full,
            env=environment(),
            cwd=REPO,
            timeout=180,
        )
    assert done.returncode == 0 and "Finished at step" in (tmp_path / "run" / "console.log").read_text()


def test_a_user_s_console_log_is_not_written_to(flags, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / console.FILE).write_text("mine")
    monkeypatch.setattr(sys, "stdout", Broken())
    code = run_inside_with_broken_output(flags)
    assert code == 0 and (tmp_path / "run" / console.FILE).read_text() == "mine"
    assert "Finished at step" in (tmp_path / "run" / "console.1.log").read_text()


def run_inside_with_broken_output(flags):
    try:
        finetune.main([str(flag) for flag in flags])
    except SystemExit as end:
        return end.code or 0
    return 0


@pytest.mark.full
def test_watching_ends_with_its_reader(flags, tmp_path):
    assert run_inside(finetune.main, *flags)[0] == 0
    status = tmp_path / "run" / "status.json"
    status.write_text(status.read_text().replace('"finished"', '"running"'))
    lock = tmp_path / "run" / "run.lock"
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            (
                f"import fcntl,time; f=open({str(lock)!r},'w'); fcntl.flock(f, fcntl.LOCK_EX); "
                "print(1, flush=True); time.sleep(60)"
            ),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        holder.stdout.readline()
        process = subprocess.Popen(
            [sys.executable, "-m", "histocc.watch", tmp_path / "run", "--every", "0.2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            cwd=REPO,
        )
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 0
    finally:
        holder.kill()
