"""The examples in docstrings of what docs/python.md names, in a folder of the demo with two small runs."""

import doctest

import pytest
from helpers import REPO, all_tests, run_here

import finetune
from histocc import OccCANINE, OccupationClassifier, join_columns, load_model
from histocc.evaluate import __main__ as evaluating
from histocc.evaluate.compare import compare
from histocc.evaluate.report import Report
from histocc.plot import curves, evaluation
from histocc.sample import __main__ as sampling

pytestmark = pytest.mark.processes
NAMED = (
    *(OccCANINE, OccCANINE.predict, OccupationClassifier, evaluating.evaluate),
    *(Report.table, compare, curves, evaluation, join_columns, load_model),
)
ENCODER = ("tiny", "--ngrams", "none", "--max-steps", 1, "--seq2seq-weight", 0)
PLOTS = ("curves", "evaluation")  # which need matplotlib


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A folder with data.csv, and two runs on it with a test part; under --all one has an encoder."""
    folder = tmp_path_factory.mktemp("doctests")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_here(sampling.main, "--demo", ".")
        for name, model in {
            "output": ("ngrams", "--prior", "none"),
            "encoder": ENCODER if all_tests() else ("ngrams", "--prior", "none", "--seed", 2),
        }.items():
            flags = ["--dataset", "data.csv", "--save-path", f"./{name}", "--share-test", 0.1]
            run_here(finetune.main, *flags, "--ngram-passes", 1, "--model-size", *model)
            run_here(evaluating.main, "--model", f"./{name}", "--dataset", "data.csv")
    return folder


@pytest.mark.parametrize(
    "named",
    [*NAMED, pytest.param(OccCANINE.finetune, marks=pytest.mark.full)],
    ids=lambda named: named.__qualname__,
)
def test_the_example_of_a_docstring_runs(named, demo, monkeypatch):
    if named.__name__ in PLOTS:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(demo)
    (found,) = doctest.DocTestFinder(recurse=False).find(named, named.__qualname__)
    assert found.examples
    output = []
    assert not doctest.DocTestRunner().run(found, out=output.append).failed, "".join(output)


def test_the_page_names_no_others():
    """What docs/python.md imports from histocc has an example here."""
    page = (REPO / "docs" / "python.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("from histocc")]
    imported = {name for line in lines for name in line.split(" import ")[1].split(", ")}
    assert lines and imported <= {named.__name__ for named in NAMED}
