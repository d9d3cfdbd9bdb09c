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


def texts_in(figure):
    """All words of a figure and of its panels, with line breaks as blanks."""
    found = [text.get_text() for text in figure.findobj(lambda x: hasattr(x, "get_text"))]
    return " ".join(" ".join(found).split())


@needs_matplotlib
def test_one_run_and_several(tmp_path, capsys):
    one, other = (a_run(tmp_path / name, rows) for name, rows in (("one", 5), ("other", 60)))
    with open(f"{one}/logs.csv", "r+") as file:
        cells = file.read().splitlines()[-1].split(",")
        for i in range(3):  # a step, an epoch, samples that are no numbers
            file.write(",".join([*cells[:i], "inf", *cells[i + 1 :]]) + "\n")
    assert main([one]) == 0 and capsys.readouterr().out.endswith(f"\n{one}/curves.svg\n{one}/curves.png\n")
    assert len(read_numbers(f"{one}/logs.csv")) == 5
    assert (tmp_path / "one" / "curves.png").read_bytes().startswith(PNG)
    assert "<svg" in (tmp_path / "one" / "curves.svg").read_text()
    assert main([one, other, "--output", str(tmp_path / "all.png")]) == 0
    assert (tmp_path / "all.png").stat().st_size > (tmp_path / "one" / "curves.png").stat().st_size
    assert (tmp_path / "all.svg").exists()
    words = texts_in(plot.curves(one, other))
    assert "one" in words and "other" in words and str(tmp_path) not in words


@needs_matplotlib
def test_each_part_of_a_fit_has_its_panel_and_no_panel_has_one_point(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    log = RunLog(OwnFiles(str(folder)), COLUMNS, 0, -91)
    rate = {"lr": 1e-3, "samples_per_sec": 50.0, "data_share": 0.0}
    log.row({"step": -90, "epoch": 0, "samples": 0})
    for first, last, loss in ((-90, -40, 9.0), (-40, 0, 50.0)):
        for step in range(first + 10, last + 1, 10):
            samples = (step - first) * 8
            log.row({"step": step, "epoch": 0, "samples": samples, "train_loss": loss + step, **rate})
    log.row({"step": 0, "epoch": 0, "samples": 0, "val_loss": 3.0, "flat_acc": 0.5, "lr": 1e-3})
    linear, both = "loss, n-grams and linear decoder", "loss, n-grams and both decoders"
    found = {title: points["train_loss"] for (title, _), points in plot.panels(str(folder)).items()}
    assert found == {
        linear: [(step, 9.0 - 90 + step) for step in (10, 20, 30, 40, 50)],
        both: [(step, 50.0 - 40 + step) for step in (10, 20, 30, 40)],
    }
    for step in (5, 10):  # the run continues by steps
        log.row({"step": step, "epoch": 0, "samples": step * 8, "train_loss": 1.0, "val_loss": 2.0, **rate})
    found = {title: points for (title, _), points in plot.panels(str(folder)).items()}
    assert [*found] == [linear, both, "loss"]
    assert found["loss"] == {"train_loss": [(5, 1.0), (10, 1.0)], "val_loss": [(0, 3.0), (5, 2.0), (10, 2.0)]}
    assert len(plot.curves(folder).axes) == 3


@needs_matplotlib
def test_a_run_draws_its_own_at_its_end_and_outlives_a_plot_that_fails(tmp_path, monkeypatch):
    train, val = write_rows(tmp_path / "train.csv", 16), write_rows(tmp_path / "val.csv", 6, 100)
    files = ["--train-data", train, "--val-data", val, "--save-dir", tmp_path / "run"]
    flags = [*files, *TINY, "--batch-size", 8, "--log-interval", 1, "--num-epochs"]
    run_here(train_mixer.main, *flags, 1, draws=True)
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(PNG)
    monkeypatch.setattr(plot, "curves", Mock(side_effect=AttributeError("no such backend")))
    said = run_here(train_mixer.main, *flags, 2, draws=True)
    assert said.count("WARNING: curves.png: no such backend") == 1


def test_what_cannot_be_drawn_is_said(tmp_path, capsys, monkeypatch):
    one, empty, begun = (a_run(tmp_path / str(steps), steps) for steps in (5, 0, 1))
    report = tmp_path / "evaluation" / "report.json"
    report.parent.mkdir()
    report.write_text("{}")
    monkeypatch.setattr("histocc.plot.importlib.util.find_spec", lambda name: name)
    for argv, words in (
        ([one, one], "name its file with --output"),
        ([one, "--output", "x.pdf"], "choose a name that ends in .png"),
        ([str(tmp_path)], "is neither a run (no logs.csv) nor an evaluation (no report.json)"),
        ([empty], f"{empty}: nothing to draw: no curve has two points"),
        ([one, begun, "--output", "x.png"], f"{begun}: nothing to draw"),
        ([one, str(report.parent), "--output", "x.png"], "draw them separately"),
        ([str(report.parent)], f"{report}: is damaged, or from another version: evaluate again"),
    ):
        assert main(argv) == 2 and words in capsys.readouterr().err
    monkeypatch.setattr("histocc.plot.importlib.util.find_spec", lambda name: None)
    assert main([one]) == 2 and "pip install matplotlib" in capsys.readouterr().err
