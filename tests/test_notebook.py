"""docs/tour.ipynb: its outputs are those of a real run, and its cells run."""

import json

import pytest
from helpers import REPO, all_tests

NOTEBOOK = REPO / "docs" / "tour.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_its_outputs_are_there_and_small():
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert len(code) > 10 and [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
    assert "error" not in kinds and kinds.count("stream") >= 4
    text = json.dumps(CELLS)
    assert text.count("image/png") == 3 and len(text) < 700_000
    assert "/home/" not in text and "/tmp/" not in text and "/root/" not in text


@pytest.mark.processes
def test_its_cells_run(request, tmp_path, monkeypatch):
    """With few rows and steps."""
    if not (request.config.getoption("--guides") or all_tests()):
        pytest.skip("--guides and --all run it: a minute")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient (extra `test`)")
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat (extra `test`)")
    pytest.importorskip("ipykernel", reason="needs ipykernel (extra `notebook`)")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    short = {
        "ROWS, EPOCHS = 6000, 5": "ROWS, EPOCHS = 400, 1",
        "--num-epochs": "--ngram-passes 1 --num-epochs",
    }
    for there, instead in short.items():
        assert sum(there in cell.source for cell in notebook.cells) == 1
        for cell in notebook.cells:
            cell.source = cell.source.replace(there, instead)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = "".join(output.get("text", "") for output in outputs)
    assert "Finished at step" in said and "All else checks out" not in said
