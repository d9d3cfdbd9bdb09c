"""Curves of runs as plots, where matplotlib is."""

import importlib.util

import pytest
from helpers import TINY, run_inside, write_rows

import train_mixer
from histocc import plot
from histocc.seq2seq_mixer_engine import COLUMNS
from histocc.trainer.run_log import RunLog
from histocc.trainer.schedule import Steps

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
PNG = b"\x89PNG\r\n\x1a\n"


def a_run(folder, steps=5):
    folder.mkdir()
    log = RunLog(str(folder), Steps(100), COLUMNS, bar=False)
    for step in range(1, steps + 1):
        row = {"step": step, "epoch": 0, "samples": step * 8, "train_loss": 2.0 / step}
        log.row({**row, "lr": 1e-3, "samples_per_sec": 50.0, "data_share": 0.0})
    log.row({"step": steps, "epoch": 0, "val_loss": 1.0, "seq_acc": 0.5})
    return str(folder)


@needs_matplotlib
def test_one_run_and_several(tmp_path, capsys):
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other", 60)
    assert plot.main([one]) == 0 and capsys.readouterr().out.endswith(f"{one}/curves.png\n")
    assert (tmp_path / "one" / "curves.png").read_bytes().startswith(PNG)
    assert plot.main([one, other, "--output", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").read_bytes().startswith(PNG)
    assert (tmp_path / "both.png").stat().st_size > (tmp_path / "one" / "curves.png").stat().st_size


def test_a_run_without_rows_is_said_to_be_left_out(tmp_path, capsys, monkeypatch):
    one, empty = a_run(tmp_path / "one"), tmp_path / "empty"
    empty.mkdir()
    RunLog(str(empty), Steps(100), COLUMNS, bar=False)
    monkeypatch.setattr(plot, "available", lambda: True)
    monkeypatch.setattr(plot, "draw", lambda runs, path, own: path)
    assert plot.main([one, str(empty), "--output", str(tmp_path / "both.png")]) == 0
    assert capsys.readouterr().err == f"Note: {empty}: left out, the log has no rows yet\n"
    assert plot.main([one]) == 0 and capsys.readouterr().err == ""


@needs_matplotlib
def test_a_run_draws_its_own(tmp_path):
    train, val = write_rows(tmp_path / "train.csv", 16), write_rows(tmp_path / "val.csv", 6, 100)
    files = ["--train-data", train, "--val-data", val, "--save-dir", tmp_path / "run"]
    code, _ = run_inside(train_mixer.main, *files, *TINY, "--batch-size", 8, "--num-epochs", 1)
    assert code == 0 and (tmp_path / "run" / "curves.png").read_bytes().startswith(PNG)


def test_what_cannot_be_drawn_is_said(tmp_path, capsys, monkeypatch):
    one = a_run(tmp_path / "one")
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setattr(plot, "available", lambda: True)
    for argv, words in (
        ([one, one], "--output names its file"),
        ([str(empty)], "no run there"),
        ([str(tmp_path / "nothing")], "no run there"),
    ):
        assert plot.main(argv) == 2 and words in capsys.readouterr().err
    RunLog(str(empty), Steps(100), COLUMNS, bar=False)
    assert plot.main([str(empty)]) == 2 and "has no rows yet" in capsys.readouterr().err
    monkeypatch.setattr(plot, "available", lambda: False)
    assert plot.main([one]) == 2 and "pip install matplotlib" in capsys.readouterr().err
