"""The commands of README.md, MULTI_GPU_TRAINING.md and docs/ are run as they stand there, page by page, on
the files of `histocc sample --demo`, with small sizes put behind them; and the notebook, and the page of the
benchmarks. Links lead somewhere, and the flags that a page names are there.
"""

import functools
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from helpers import REPO, environment, read_logs, run_here, words

from benchmarks import common
from histocc.__main__ import COMMANDS
from histocc.occ_canine import OccCANINE
from histocc.sample import __main__ as sample

DOCS = sorted(f"docs/{path.name}" for path in (REPO / "docs").glob("*.md"))
PAGES = ("README.md", "MULTI_GPU_TRAINING.md", *DOCS)
# Written by commands: the length of these, and how they begin, are not checked
GENERATED = [f"docs/{name}.md" for name in words("benchmarks glossary reference-commands reference-files")]
BY_HAND = [page for page in PAGES if page not in GENERATED]
ENGINES = {"dask": "dask.dataframe", "spark": "pyspark", "datasets": "datasets", "ray": "ray.data"}
TINY = "--device cpu --model-size tiny --max-steps 2 --batch-size 4 --ngram-passes 1"
LAUNCHED = ("finetune.py", "train_mixer.py", "histocc train", "histocc mix")
SMALL = {  # put behind commands that hold these words; a model without encoder needs nothing
    **{f"torch.distributed*{name}": TINY for name in LAUNCHED},
    "histocc train*--model-size": TINY,
    "finetune.py*--model-size": TINY,
    "train_llada.py": "--device cpu --max-steps 2 --val-windows 2",
    "train_prs_med.py": "--device cpu --max-steps 2 --scenes 16 --val-scenes 8",
    "train_from_config.py": "--device cpu --max-steps 2",
    "next_byte.py": "--device cpu --max-steps 8 --log-interval 1",
}
# The run in ./output that pages read
TRAINING = "histocc train data.csv --output ./output"
# in test_launchers, and the installation by .ci/run
ELSEWHERE = ("tests/run", "pip install", "./launch_training.sh\n", "scripts/gpu_check.sh")
SCRIPTS = [f"examples.{name}" for name in ("next_byte", "train_from_config", "train_llada", "train_prs_med")]
LINKED = ("README.md", "finetune.py", "train_mixer.py", "launch_training.sh", "run_multi_gpu_train.sh")
LINKED += ("histocc", "scripts", "configs", "docs", "examples", "benchmarks")
OF_OTHERS = {"--array", "--max-restarts", "--numa-binding", "--print-only", "--shutdown-timeout", "--ipc"}
BROWSER = """
import json, sys, urllib.request

def ask(**content):
    body = json.dumps({"window": "R", **content}).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "api", body)))

text = ask()["text"]
ask(id=text["id"], seen=text["seen"], answer=["02210"])
"""
R_BEFORE = """
Sys.setlocale("LC_ALL", "C.UTF-8")
options(browser = function(url) system2("python", c("browser.py", url)))
"""
R_AFTER = """
is_empty <- new$occ1 == "?"
stopifnot(nrow(new) == 400, sum(is_empty) == 1, is.na(new$hisco_1[is_empty]))
stopifnot(grepl("^-?[0-9]+$", new$hisco_1[!is_empty]), result$id == new$id)
stopifnot(sum(result$decided_by == "model") %in% 360:399, "02210" %in% result$hisco_1)
failed <- tryCatch(histocc("predict", "new.csv", "--modl", "./output"), error = conditionMessage)
stopifnot(grepl("did you mean --model", failed))
"""
NOTEBOOK = REPO / "docs" / "tour.ipynb"


@functools.cache
def text_of(page):
    return (REPO / page).read_text(encoding="utf-8")


def blocks(page, *languages):
    """(line of the page where it begins, language, block of code)."""
    matches = re.finditer(rf"^```({'|'.join(languages)})\n(.*?)^```", text_of(page), re.M | re.S)
    return [(text_of(page)[: match.start(2)].count("\n") + 1, match[1], match[2]) for match in matches]


def commands_of(number, block):
    """(line of the page, command) of a block that begins in line `number`; some are of several lines."""
    found, command, start = [], "", number
    for at, line in enumerate(block.splitlines(keepends=True), number):
        start = start if command else at
        command += line
        if not line.endswith("\\\n") and is_whole(command):
            found += [(start, command.strip())] if command.strip() else []
            command = ""
    assert not command, f"the block in line {number} ends within a command"
    return [(at, text) for at, text in found if not f"{text}\n".startswith(ELSEWHERE)]


def is_whole(command):
    checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True)
    return checked.returncode == 0 and not checked.stderr  # a warning: the end of a <<document is missing


def reads_a_run(page):
    """Whether the blocks of a page read ./output before they write it."""
    code = "".join(block for _, _, block in blocks(page, "bash", "python", "r"))
    read = re.search(r"""(--model|watch|plot|export) \./output\b(?!_)|\(["']\./output["']""", code)
    made = re.search(r"""(--output|--save-path)["',]* ["']?\./output\b(?![_/])""", code)
    return bool(read) and not (made and made.start() < read.start())


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages") / "demo"
    run_here(sample.main, "--demo", folder)
    return folder


@pytest.fixture
def place(tmp_path, demo):
    """A copy of the folder of the demo, also the folder `demo` in it, with the repository's scripts. Commands
    add SMALL to long trainings, give them few rows, and start two processes instead of four.
    """
    shutil.copytree(demo, tmp_path, dirs_exist_ok=True)
    for name, few in {"data.csv": "few.csv", "train.csv": "few.csv", "val.csv": "few_val.csv"}.items():
        lines = (demo / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / few).write_text("".join(lines[: 100 if "val" in few else 300]), encoding="utf-8")
    for name in LINKED:
        (tmp_path / name).symlink_to(REPO / name)
    (tmp_path / "demo").symlink_to(".")
    (tmp_path / "bin").mkdir()
    few = '"${@/%data.csv/few.csv}"; set -- "${@/%train.csv/few.csv}"; set -- "${@/%val.csv/few_val.csv}"'
    cases = "\n".join(f"*{words.replace(' ', '?')}*) set -- {few} {more} ;;" for words, more in SMALL.items())
    starts = {"python": "", "histocc": "-m histocc", "torchrun": "-m torch.distributed.run"}
    for name, start in starts.items():
        lines = [
            "#!/bin/bash",
            f'set -- {start} "${{@/#--nproc[-_]per[-_]node=4/--nproc-per-node=2}}"',
            f'case "$*" in\n{cases}\nesac',
            f'exec {shlex.quote(sys.executable)} "$@"',
        ]
        (tmp_path / "bin" / name).write_text("\n".join(lines) + "\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def check(place, where, line, given=None):
    """Runs a command, with `given` as its input; if the number of a machine stands in it, on two at once."""
    env = environment(HEAD="127.0.0.1", PYTHONWARNINGS="ignore")
    env["PATH"] = f"{place / 'bin'}:{os.environ['PATH']}"
    if re.search(r"histocc[ .]plot|-m benchmarks", f"{line}\n{given or ''}"):
        env["PYTHONPATH"] = str(REPO)  # matplotlib is hidden from the others
    running = [
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=place,
            env=env | {"NODE_RANK": node},
            stdin=subprocess.PIPE if given else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (["0", "1"] if "$NODE_RANK" in line else ["0"])
    ]
    for process in running:
        output = process.communicate(given, timeout=900)[0]
        assert process.returncode == 0, f"{where}: {line}\n{given or ''}\n{output}"


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/LOG.md"])
def test_what_a_page_names_is_there(page):
    """Files between backquotes, links and their sections, and long flags."""
    files = set(re.findall(r"`((?:[\w.]+/)*[\w]+\.(?:py|sh|toml|md))`", text_of(page)))
    missing = [name for name in files if not any((at / name).exists() for at in (REPO, REPO / "histocc"))]
    assert set(missing) <= {"report.md", "MODEL.md"}
    for link, section in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text_of(page)):
        if "://" not in link:
            target = (REPO / page).parent / link if link else REPO / page
            assert target.exists(), link
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M) if section else []
            known = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not section or section in known, f"{link}#{section}"
    modules = [importlib.import_module(name) for name, _ in COMMANDS.values()]
    modules += [importlib.import_module(name) for name in SCRIPTS]
    actions = [action for module in modules for action in module.get_args_parser()._actions]
    flags = {flag for action in actions for flag in action.option_strings} | OF_OTHERS
    named = set(re.findall(r"`(--[a-z][a-z0-9-]+)", text_of(page)))
    assert page not in BY_HAND or sorted(named - flags) == []  # others name flags of earlier versions


def test_the_page_on_models_shows_the_example():
    parts = [block for _, _, block in blocks("docs/your-own-model.md", "py")]
    assert len(parts) == 3 and all(part in text_of("examples/next_byte.py") for part in parts)


def test_readme_is_short_and_names_every_page():
    assert len(text_of("README.md").splitlines()) <= 130
    assert [page for page in PAGES[1:] if f"]({page})" not in text_of("README.md")] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_can_be_pasted(page):
    lines = text_of(page).splitlines()
    fences = [at for at, line in enumerate(lines) if line.startswith("```")]
    assert len(fences) % 2 == 0
    inside = [(at + 1, lines[at]) for a, b in zip(fences[::2], fences[1::2]) for at in range(a + 1, b)]
    assert [(at, line) for at, line in inside if len(line) > 100] == []
    assert [(at, line) for at, line in inside if re.search(r"(^|[|;&(]) *sed ", line)] == []


@pytest.mark.parametrize("page", [page for page in BY_HAND if page != "README.md"])
def test_a_page_begins_with_its_readers_and_its_time(page):
    title, blank, start, *_ = text_of(page).splitlines()
    assert title.startswith("# ") and not blank
    assert re.fullmatch(r"\*For [^*]+\. \d+ minutes\.\*", start), start


def test_pages_are_short():
    lines = {page: len(text_of(page).splitlines()) for page in BY_HAND}
    assert {page: n for page, n in lines.items() if n > 250} == {} and sum(lines.values()) <= 2000


def test_every_page_has_a_place_in_the_site():
    named = re.findall(r": ([\w-]+\.md)$", text_of("mkdocs.yml"), re.M)
    pages = [page.removeprefix("docs/") for page in PAGES if page != "README.md"]
    assert sorted(named) == sorted([*pages, "index.md"])


def test_every_promise_has_its_tests():
    """Those of docs/architecture.md: the first of two tests is run by default."""
    rows = re.findall(r"^\| (.+) \| `([\w/.:]+)` \| `([\w/.:]+)` \|$", text_of("docs/architecture.md"), re.M)
    assert len(rows) > 20
    for _, default, full in rows:
        for test in (default, full):
            file, name = test.split("::")
            found = re.search(rf"((?:^ *@.*\n)*) *def {name}\(", text_of(f"tests/{file}"), re.M)
            assert found, f"{test}: there is no such test"
            assert test == full or "@pytest.mark.full" not in found[1], f"{test} is left to --all"


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(place, page):
    """In the order in which they stand, in one folder for each page. Two that are said to have the same
    losses, on one process and on two, have them.
    """
    if reads_a_run(page):
        check(place, page, TRAINING)
    for number, language, block in blocks(page, "bash", "python"):
        if language == "bash":
            for at, line in commands_of(number, block):
                print(f"{page}:{at}: {line}", flush=True)
                check(place, f"{page}, line {at}", line)
        elif script := re.match(r"# (\w+\.py): ", block):
            (place / script[1]).write_text(block)
        else:
            check(place, f"{page}, line {number}", "python -", block)
    if (place / "one").exists():
        logs = ([row["train_loss"] for row in read_logs(place / name)] for name in ("one", "two"))
        one, two = ([loss for loss in losses if loss is not None] for losses in logs)  # none at step 0
        assert len(one) > 1 and one == pytest.approx(two, rel=1e-9)


def test_two_pages_show_equal_losses():
    """On one process and on two; the commands are run by the test above."""
    found = [page for page in PAGES if all(f"./{name}" in text_of(page) for name in ("one", "two"))]
    assert len(found) == 2 and "docs/your-own-model.md" in found


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.frames
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_give_the_codes_of_one_call(place, engine, monkeypatch):
    """Two workers of the page on large tables, some of whose parts have no code at all."""
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip(ENGINES[engine])
    if engine == "dask":
        pytest.importorskip("distributed")
    elif engine == "spark" and not shutil.which("java"):
        pytest.skip("needs Java")
    check(place, "docs/scale.md", f"{TRAINING} --prior none")
    texts = [f"weaver no {i % 15}" for i in range(40)]
    table = pandas.DataFrame({"id": range(40), "occ1": texts, "lang": "en"})
    table.loc[[3, *range(20, 30)], "occ1"] = table.loc[4, "lang"] = None
    (place / "rows").mkdir()
    for start in range(0, 40, 10):
        table[start : start + 10].to_parquet(place / "rows" / f"{start}.parquet")
    for _, _, block in blocks("docs/scale.md", "python"):
        (place / re.match(r"# (\w+\.py): ", block)[1]).write_text(block)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    check(place, "docs/scale.md", f"python with_{engine}.py")
    found = pandas.read_parquet(place / f"coded_{engine}").sort_values("id", ignore_index=True)
    expected = OccCANINE(place / "output", device="cpu").predict(table["occ1"], table["lang"], k_pred=1)
    columns = ["hisco_1", "prob_1", "conf"]
    pandas.testing.assert_frame_equal(found[columns], expected[columns], check_dtype=False)
    assert len(found) == 40 and 0 < found["hisco_1"].isna().sum() < 40


@pytest.mark.processes
@pytest.mark.full
def test_the_page_of_r_runs(place):
    """As one script, without what needs packages that are not there. One text is decided in the browser."""
    if not shutil.which("Rscript"):
        pytest.skip("needs Rscript")
    script = "".join(block for _, _, block in blocks("docs/r.md", "r")).replace("200L", "4")
    asked = ["Rscript", "-e", 'cat(paste(packageVersion("reticulate")))']
    version = subprocess.run(asked, capture_output=True, text=True).stdout
    if list(map(int, re.findall(r"\d+", version))) < [1, 45]:
        script = script.split("# reticulate 1.45" if version else "library(reticulate)")[0]
    (place / "browser.py").write_text(BROWSER)
    (place / "page.R").write_text(R_BEFORE + script + R_AFTER)
    check(place, "docs/r.md", "Rscript page.R")


# ---- the notebook


def test_the_outputs_of_the_notebook_are_there_and_small():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert "error" not in [output["output_type"] for cell in code for output in cell["outputs"]]
    text = json.dumps(cells)
    assert text.count("image/png") == 1 and len(text) < 700_000
    assert not any(folder in text for folder in ("/home/", "/tmp/", "/root/"))


@pytest.mark.processes
@pytest.mark.full
def test_the_cells_of_the_notebook_run(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="needs ipykernel (extra `notebook`)")
    notebook = nbformat.reads(NOTEBOOK.read_text(encoding="utf-8"), as_version=4)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = "".join(output.get("text", "") for output in outputs)
    assert "error: " not in said and said.count("Expected to be right") == 2
    assert len((tmp_path / "demo" / "final.csv").read_text(encoding="utf-8").splitlines()) == 1501


# ---- the benchmarks


def test_the_page_of_the_benchmarks_is_what_its_results_give(tmp_path, place):
    pytest.importorskip("matplotlib")
    check(place, "benchmarks", f"python -m benchmarks --output {tmp_path / 'pages'}")
    written = {path.name for path in (tmp_path / "pages").iterdir()}
    assert written == {path.name for path in (REPO / "docs").glob("benchmarks*")}
    assert (tmp_path / "pages" / "benchmarks.md").read_text(encoding="utf-8") == text_of("docs/benchmarks.md")
    part = json.loads(text_of("benchmarks/results.json"))["small"]
    rates, times = part["train"] | part["decode"], {}
    for kind in ("", "flat ", "greedy "):
        for name in (f"{kind}float32", f"{kind}bf16"):
            times[name] = rates[name] / rates[f"{kind}reference"]
    assert (
        f"training is {times['float32']:.1f} times as fast on two CPU cores"
        f" ({times['bf16']:.1f} times in bfloat16), coding by the linear decoder"
        f" {times['flat float32']:.1f} times and digit by digit {times['greedy float32']:.0f} times"
    ) in " ".join(text_of("README.md").split())


def test_a_benchmark_sees_gpus_if_its_flags_name_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    for line, seen in {"--bf16": "", "--bf16 --device cuda": "1"}.items():
        assert common.environment(line=line)["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.full
def test_everything_is_measured(place):
    pytest.importorskip("matplotlib")
    check(place, "benchmarks", "python -m benchmarks --quick --results results.json --output pages")
    parts = json.loads((place / "results.json").read_text()).values()
    assert all(part["command"] and part["machine"]["cores"] for part in parts)
    assert "tiny: training" in (place / "pages" / "benchmarks.md").read_text()
