"""docs/tour.ipynb: its outputs are those of a real run, and its cells run."""

import json

import pytest
from helpers import REPO, all_tests

NOTEBOOK = REPO / "docs" / "tour.ipynb"


def test_its_outputs_are_there_and_small():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert "error" not in [output["output_type"] for cell in code for output in cell["outputs"]]
    text = json.dumps(cells)
    assert text.count("image/png") == 3 and len(text) < 700_000
    assert not any(place in text for place in ("/home/", "/tmp/", "/root/"))


@pytest.mark.processes
def test_its_cells_run(request, tmp_path, monkeypatch):
    """With few rows and steps."""
    if not (request.config.getoption("--guides") or all_tests()):
        pytest.skip("--guides and --all run it: a minute")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="needs ipykernel (extra `notebook`)")
    source = NOTEBOOK.read_text(encoding="utf-8")
    for there, instead in {"= 6000, 5": "= 400, 1", "--num-epochs": "--ngram-passes 1 --num-epochs"}.items():
        assert source.count(there) == 1
        source = source.replace(there, instead)
    notebook = nbformat.reads(source, as_version=4)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert "Finished at step" in "".join(output.get("text", "") for output in outputs)
