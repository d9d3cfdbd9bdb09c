"""`histocc.evaluate.evaluate`: a report from Python, its tables and figures."""

import json
import sys

import pytest
from helpers import FINETUNE, TINY, run, write_rows

from histocc.evaluate import Report, evaluate
from histocc.plot import curves
from histocc.runtime.errors import UserError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("call")
    data = write_rows(folder / "rows.csv", 60)
    flags = ["--dataset", data, "--formatter", "hisco", "--target-cols", "hisco_1", "hisco_2"]
    flags += ["--language-col", "lang", "--max-steps", 4, "--log-interval", 2, "--save-path", folder / "run"]
    run(FINETUNE, *flags, *TINY)
    return folder


@pytest.fixture(scope="module")
def report(trained):
    return evaluate(trained / "run", trained / "rows.csv", trained / "out", resamples=20, device="cpu")


def rows_of(table):
    return table if isinstance(table, list) else table.to_dict("records")


def test_it_is_what_the_command_writes(trained, report):
    written = json.loads((trained / "out" / "report.json").read_text(encoding="utf-8"))
    assert dict(report) == written == dict(Report.read(trained / "out")) and report["resamples"] == 20
    assert report._repr_markdown_().startswith("# Evaluation\n")


@pytest.mark.parametrize("decoder", [None, "seq2seq"])
@pytest.mark.parametrize("over", ["texts", "rows"])
def test_tables_hold_the_figures(report, decoder, over):
    found = report["decoders"][decoder or list(report["decoders"])[-1]]
    by_digits = rows_of(report.accuracy("digits", decoder, over))
    assert [row["digits"] for row in by_digits] == [1, 2, 3, 4, 5]
    for row, each in zip(by_digits, found["by_digits"]):
        assert [row["accuracy"], row["low"], row["high"]] == each[f"over_{over}"]["accuracy"]
    languages = rows_of(report.accuracy("language", decoder, over))
    assert {row["language"]: row["rows"] for row in languages} == {
        name: each["rows"] for name, each in found["by_language"].items()
    }
    confusions = rows_of(report.confusions(decoder))
    assert [row["true"] for row in confusions] == [each["true"] for each in found["confusions"]]


def test_without_pandas_tables_are_lists_of_dicts(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    table = report.accuracy("major_group")
    assert isinstance(table, list)
    assert list(table[0]) == ["major_group", "rows", "texts", "accuracy", "low", "high"]
    first = report.coverage()[0]
    assert first["accuracy"] == 0.9 and {"confidence", "stay", "stay_low", "right", "right_high"} <= set(
        first
    )


def test_without_a_folder_none_is_left(trained):
    before = sorted(path.name for path in trained.rglob("*"))
    found = evaluate(trained / "run", [trained / "rows.csv"], share_val=0.1, resamples=5)
    assert found["data"]["rows"] > 0 and sorted(path.name for path in trained.rglob("*")) == before


def test_figures(report, trained, monkeypatch):
    pytest.importorskip("matplotlib")
    digits, reliability = report.figures()
    assert digits.axes[0].get_xlabel() == "digits" and reliability.axes[0].get_xlabel() == "confidence"
    assert [axes.get_title() for axes in curves(trained / "run").axes][:2] == ["loss", "accuracy, %"]
    with pytest.raises(UserError, match="no run there"):
        curves(trained / "out")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        report.figures()


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda report: report.accuracy("size"), "choose by from"),
        (lambda report: report.accuracy(decoder="third"), "the report has seq2seq"),
        (lambda report: Report.read("nowhere"), "no report there"),
        (lambda report: evaluate("nowhere", "x.csv"), "nowhere"),
        (lambda report: evaluate("nowhere", "x.csv", colour="red"), "colour"),
    ],
)
def test_mistakes_are_said(report, call, words):
    with pytest.raises(UserError, match=words):
        call(report)
