"""Progress of a stage: a bar on a terminal, lines elsewhere, nothing when nobody asked for it."""

import os
import pty
import subprocess
import sys

import pytest
from helpers import REPO, TINY, environment, write_rows

from histocc.runtime import progress
from histocc.runtime.progress import Stage


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.setattr(progress, "_shown", True)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)


def test_lines_without_a_terminal(shown, capsys):
    with Stage("reading", 40, "rows", first=10) as stage:
        stage.at(20)
        stage.add(5)
        stage.at(90)
    lines = capsys.readouterr().err.splitlines()
    assert [line[: line.index(" rows, ")] for line in lines] == [
        f"reading: {done} of 40" for done in (20, 25, 40)
    ]
    assert all(line.endswith(" left") for line in lines)


def test_rate_and_time_left():
    stage = Stage("coding", 1000, "rows", first=100)
    stage.at(600)
    assert stage.line(5.0) == "coding: 600 of 1,000 rows, 100/s, 4s left"
    stage = Stage("reading", None, "rows")
    stage.at(7)
    assert stage.line(2.0) == "reading: 7 rows, 3.5/s"


def test_nothing_unless_asked_for(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_shown", False)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    with Stage("reading", 40, "rows") as stage:
        stage.at(20)
    assert capsys.readouterr() == ("", "")


def test_lines_come_every_few_seconds_only(shown, capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_SECONDS", 3600.0)
    with Stage("reading", 40, "rows") as stage:
        stage.at(20)
    assert capsys.readouterr().err == ""


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
    fits = (
        b"fitting n-grams, linear decoder:",
        b"fitting n-grams, both decoders:",
    )  # each with a rate of its own
    bars = [name for name in (b"training:", b"validation:", b"reading ", *fits) if name in said]
    assert len(bars) == (0 if quiet else 5), said
