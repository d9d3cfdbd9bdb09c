"""Curves of runs as plots, if matplotlib is installed."""

import importlib.util
from unittest.mock import Mock

import pytest
from helpers import TINY, run_here, write_rows

import train_mixer
from histocc import plot
from histocc.plot import main
from histocc.runtime.files import OwnFiles
from histocc.seq2seq_mixer_engine import COLUMNS
from histocc.trainer.log import RunLog, read_numbers

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
PNG = b"\x89PNG\r\n\x1a\n"


def a_run(folder, steps=5):
    """The folder of a run whose log has so many rows."""
    folder.mkdir()
    log = RunLog(OwnFiles(str(folder)), COLUMNS, 100)
    for step in range(1, steps + 1):
        row = {"step": step, "epoch": 0, "samples": step * 8, "train_loss": 2.0 / step, "seq_acc": 0.5}
        log.row({**row, "lr": 1e-3, "samples_per_sec": 50.0, "data_share": 0.0})
    return str(folder)


@needs_matplotlib
def test_one_run_and_several_without_those_that_have_no_rows(tmp_path, capsys):
    one, other, empty = (
        a_run(tmp_path / name, rows) for name, rows in (("one", 5), ("other", 60), ("empty", 0))
    )
    with open(f"{one}/logs.csv", "r+") as file:
        cells = file.read().splitlines()[-1].split(",")
        for i in range(3):  # a step, an epoch, samples that are no numbers
            file.write(",".join([*cells[:i], "inf", *cells[i + 1 :]]) + "\n")
    assert main([one]) == 0 and capsys.readouterr().out.endswith(f"{one}/curves.png\n")
    assert len(read_numbers(f"{one}/logs.csv")) == 5
    assert (tmp_path / "one" / "curves.png").read_bytes().startswith(PNG)
    assert main([one, other, empty, "--output", str(tmp_path / "all.png")]) == 0
    assert f"{empty}: left out" in capsys.readouterr().err
    assert (tmp_path / "all.png").stat().st_size > (tmp_path / "one" / "curves.png").stat().st_size


@needs_matplotlib
def test_a_run_draws_its_own_at_its_end_and_outlives_a_plot_that_fails(tmp_path, monkeypatch):
    train, val = write_rows(tmp_path / "train.csv", 16), write_rows(tmp_path / "val.csv", 6, 100)
    files = ["--train-data", train, "--val-data", val, "--save-dir", tmp_path / "run"]
    flags = [*files, *TINY, "--batch-size", 8, "--num-epochs"]
    run_here(train_mixer.main, *flags, 1)
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(PNG)
    monkeypatch.setattr(plot, "curves", Mock(side_effect=AttributeError("no such backend")))
    assert run_here(train_mixer.main, *flags, 2).count("WARNING: curves.png: no such backend") == 1


def test_what_cannot_be_drawn_is_said(tmp_path, capsys, monkeypatch):
    one, empty = a_run(tmp_path / "one"), a_run(tmp_path / "empty", 0)
    monkeypatch.setattr("histocc.plot.importlib.util.find_spec", lambda name: name)
    for argv, words in (
        ([one, one], "--output names its file"),
        ([str(tmp_path)], "no run there"),
        ([str(tmp_path / "nothing")], "no run there"),
        ([empty], "no run has rows in its log yet"),
    ):
        assert main(argv) == 2 and words in capsys.readouterr().err
    monkeypatch.setattr("histocc.plot.importlib.util.find_spec", lambda name: None)
    assert main([one]) == 2 and "pip install matplotlib" in capsys.readouterr().err
