"""The page of the benchmarks: what it says is what was measured."""

import importlib.util
import json
import subprocess
import sys

import pytest
from helpers import REPO, environment

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
RESULTS = REPO / "benchmarks" / "results.json"
PAGE = REPO / "docs" / "benchmarks.md"


def benchmarks(*arguments, timeout=60):
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=REPO,
        env=environment(PYTHONPATH=str(REPO)),  # with matplotlib
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def test_the_page_is_what_its_results_give(tmp_path):
    done = benchmarks("--output", tmp_path)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "benchmarks.md").read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
    for name in ("length", "batch", "processes", "rows"):
        assert (tmp_path / f"benchmarks_{name}.png").stat().st_size > 5_000
        assert (PAGE.parent / f"benchmarks_{name}.png").exists()


def test_the_readme_says_the_same():
    part = json.loads(RESULTS.read_text(encoding="utf-8"))["small"]
    rates, base = part["train"] | part["decode"], part["train"]["reference"]
    words = " ".join((REPO / "README.md").read_text(encoding="utf-8").split())
    said = (
        f"training is {rates['float32'] / base:.1f} times as fast on two CPU cores"
        f" ({rates['bf16'] / base:.1f} times in bfloat16), coding by the linear decoder"
        f" {rates['flat float32'] / rates['flat reference']:.1f} times and digit by digit"
        f" {rates['greedy float32'] / rates['greedy reference']:.0f} times"
    )
    assert said in words


@pytest.mark.full
def test_everything_is_measured(tmp_path):
    done = benchmarks(
        "--quick", "--results", tmp_path / "results.json", "--output", tmp_path / "docs", timeout=900
    )
    assert done.returncode == 0, done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(each["command"] and each["machine"]["cores"] for each in results.values())
    assert "tiny: training" in (tmp_path / "docs" / "benchmarks.md").read_text()
