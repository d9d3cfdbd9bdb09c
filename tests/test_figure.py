"""The figure of a model is the same wherever it stands: on the screen, in cards, in reports, in Python."""

import re

import numpy as np
import pytest
import torch
from helpers import run_here, words, write_rows
from test_initial_weights import mixer

import finetune
from histocc import watch
from histocc.evaluate import __main__ as evaluate
from histocc.evaluate.report import data_lines
from histocc.figure import LEFT_OUT, OTHER, VALIDATION, Figure, percent, wilson
from histocc.formatter import classes_in_words
from histocc.predict import __main__ as predict
from histocc.runtime import checkpoint
from histocc.runtime.log import highlighted

COLUMNS = ["--target-cols", "hisco_1", "hisco_2", "--language-col", "lang", "--device", "cpu"]
RUNS = {
    "default": (["--prior", "none"], LEFT_OUT),
    "closed form, validated": (["--prior", "none", "--share-val", 0.3], VALIDATION),
    "steps": (words("--model-size tiny --max-steps 3 --batch-size 16 --ngram-passes 1"), VALIDATION),
}


def rows_twice(path):
    """Write 60 texts, every other one in two rows."""
    write_rows(path, 60)
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *lines, *lines[::2]]) + "\n")
    return path


@pytest.mark.parametrize("name", [*RUNS][:1] + [pytest.param(x, marks=pytest.mark.full) for x in [*RUNS][1:]])
def test_the_same_figure_everywhere(name, tmp_path):
    (flags, source), data, folder = RUNS[name], rows_twice(tmp_path / "data.csv"), tmp_path / "run"
    said = run_here(finetune.main, "--dataset", data, "--save-path", folder, *COLUMNS, *flags)
    figure = Figure.of(checkpoint.load(str(folder / "best.bin")))
    assert figure == Figure.of_run(str(folder)) and figure.source == source and figure.texts < figure.rows
    *_, sentence, model, _, _, code, review, test = said.splitlines()
    assert sentence == f"{figure}." and model.startswith(f"The best model is {folder / 'best.bin'}")
    assert f"--model {folder} " in code and test.endswith(f"--model {folder}")
    serve = rf"  histocc review serve coded.csv( --input-col \S+)?( --key {folder / 'key.csv'})?"
    assert re.fullmatch(serve, review)
    assert (folder / "MODEL.md").read_text(encoding="utf-8").count(sentence) == 2
    assert str(figure) in " ".join(watch.view(str(folder))[0].split())
    rows = ["--input", data, "--output", tmp_path / "coded.csv", "--system", "new", "--processes", 1]
    assert str(figure) in run_here(predict.main, "--model", folder, *rows, *COLUMNS[3:])
    if source == VALIDATION:
        share = 0.3 if 0.3 in flags else 0.1
        report = evaluate.evaluate(folder, data, tmp_path / "report", share_val=share, device="cpu")
        assert Figure.of(report) == pytest.approx(figure) and sentence in report._repr_markdown_()
        (row,) = list(getattr(report.table(), "to_dict", lambda _: report.table())("records"))
        assert row["share"] == figure.share and (row["low"], row["high"]) == figure.interval


def test_a_published_model_has_none_until_it_is_evaluated(tmp_path):
    torch.save({"model": mixer().state_dict()}, tmp_path / "mixer.bin")
    data = write_rows(tmp_path / "data.csv", 12)
    rows = ["--input", data, "--output", tmp_path / "coded.csv", "--system", "new", "--processes", 1]
    said = run_here(predict.main, "--model", tmp_path / "mixer.bin", *rows, *COLUMNS[3:])
    assert "It has not been evaluated" in said and "got exactly" not in said
    how = ["--model", tmp_path / "mixer.bin", "--data", data, "--output", tmp_path / "report"]
    said = run_here(evaluate.main, *how, *COLUMNS)
    assert f"of 12 texts got exactly their codes (95 % interval 0.0 to 24.2; {OTHER}; whether the" in said


def test_shares_and_their_intervals():
    assert percent(0.6549) == "65.5 %" and wilson(0.0, 12) == pytest.approx((0, 0.2425), abs=1e-4)
    assert wilson(0.655, 1204) == pytest.approx((0.6277, 0.6813), abs=1e-4)
    right, text = np.array([1.0, 0, 1, 1]), np.array([7, 7, 9, 9])
    figure = Figure.measured(right, text, OTHER, "flat")
    assert figure[:4] == (0.75, 2, 0.75, 4) and Figure.measured(right[:0], text[:0], OTHER, "flat") is None
    some = Figure.measured(right[1:3], text[1:3], OTHER, "flat", times=np.array([30, 10]))
    assert some[:4] == (0.5, 2, 0.25, 40)


ONE = dict.fromkeys(("rows_read", "rows", "texts", "rows_outside_key", "texts_trained_on"), 1)
ONE |= dict.fromkeys(("other_part_rows", "learned_rows", "texts_validated_on", "test_part"), 0)
ONE |= {"share_val": None, "rejected": {}, "unknown_languages": {"xx": 1}}


@pytest.mark.parametrize(
    "said, words",
    [
        (str(Figure(1.0, 1, 1.0, 3, OTHER, "flat")), "of its 3 rows"),
        (classes_in_words(["7"]), "1 class of 1 character"),
        (data_lines(ONE)[1], "1 row (rejected_rows.csv), left out of the figures"),
        (data_lines(ONE)[2], "1 row coded as unk"),
        (data_lines(ONE)[3], "trained on 1 of 1 text evaluated"),
    ],
)
def test_one_is_not_many(said, words):
    assert said.endswith(words) or f"{words}; " in said


def test_colour_only_on_a_terminal(monkeypatch):
    assert highlighted("text") == "text"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert highlighted("text") == "\x1b[1mtext\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert highlighted("text") == "text"
