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


def benchmarks(*arguments, timeout=60):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        cwd=REPO,
        env=environment(PYTHONPATH=str(REPO)),  # with matplotlib
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout


def test_the_page_is_what_its_results_give(tmp_path):
    benchmarks("--output", tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {path.name for path in (REPO / "docs").glob("benchmarks*")}
    page = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert page == (REPO / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_the_readme_says_the_same():
    part = json.loads((REPO / "benchmarks" / "results.json").read_text(encoding="utf-8"))["small"]
    rates = part["train"] | part["decode"]
    times = {
        name: rates[name] / rates[f"{kind}reference"]
        for kind in ("", "flat ", "greedy ")
        for name in (f"{kind}float32", f"{kind}bf16")
    }
    assert (
        f"training is {times['float32']:.1f} times as fast on two CPU cores"
        f" ({times['bf16']:.1f} times in bfloat16), coding by the linear decoder"
        f" {times['flat float32']:.1f} times and digit by digit {times['greedy float32']:.0f} times"
    ) in " ".join((REPO / "README.md").read_text(encoding="utf-8").split())


@pytest.mark.full
def test_everything_is_measured(tmp_path):
    results, output = tmp_path / "results.json", tmp_path / "docs"
    benchmarks("--quick", "--results", results, "--output", output, timeout=900)
    parts = json.loads(results.read_text()).values()
    assert all(part["command"] and part["machine"]["cores"] for part in parts)
    assert "tiny: training" in (output / "benchmarks.md").read_text()
