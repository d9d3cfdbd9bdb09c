"""The commands of README.md, MULTI_GPU_TRAINING.md and docs/ are run as they stand there, on a small file,
with small sizes put behind them.

Those of one process that end soon are run always; `--guides` runs all of them, page by page, in the order in
which they stand. Links lead somewhere, and the flags that a page names are there.
"""

import functools
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPO, all_tests, environment, read_logs, write_csv, write_rows

from histocc.__main__ import COMMANDS

DOCS = sorted(f"docs/{path.name}" for path in (REPO / "docs").glob("*.md"))
PAGES = ("README.md", "MULTI_GPU_TRAINING.md", *DOCS)
NEED_A_RUN = ("docs/coding.md", "docs/python.md")  # in ./output
SMALL = "--model-size tiny --device cpu --max-steps 2 --batch-size 4 --ngram-passes 1"
TRAINING = (
    "python finetune.py --dataset data.csv --formatter hisco --target-cols hisco_1 hisco_2"
    " --language-col lang --save-path ./output"
)
ELSEWHERE = (
    "tests/run",
    "pip install",
    "./launch_training.sh\n",
)  # launchers/, and the installation by .ci/run
SHORT = ("python -m histocc.prepare", "python -m histocc.sample", "python examples/train_from_config.py")
SCRIPTS = [f"examples.{name}" for name in ("train_from_config", "train_llada", "train_prs_med")]
OF_OTHERS = {"--array", "--completion", "--max-restarts", "--print-only"}
CODE = {"bash", "python", "diff"}


@functools.cache
def text_of(page: str) -> str:
    return (REPO / page).read_text(encoding="utf-8")


def blocks(page: str, *languages: str) -> list[tuple[int, str, str]]:
    """(line of the page where it begins, language, block of code)."""
    matches = re.finditer(rf"^```({'|'.join(languages)})\n(.*?)^```", text_of(page), re.M | re.S)
    return [(text_of(page)[: match.start(2)].count("\n") + 1, match[1], match[2]) for match in matches]


def commands(page: str) -> list[tuple[int, str]]:
    """(line of the page, command)."""
    return [each for number, _, block in blocks(page, "bash") for each in commands_of(number, block)]


def commands_of(number: int, block: str) -> list[tuple[int, str]]:
    """(line of the page, command) of a block that begins in line `number`."""
    lines = enumerate(block.splitlines(keepends=True), number)
    return [(at, line.strip()) for at, line in lines if line.strip() and not line.startswith(ELSEWHERE)]


@pytest.fixture
def place(tmp_path):
    """A folder that looks like the repository, with small files of rows, and commands that add SMALL to every
    training.
    """
    for name in (
        *("README.md", "finetune.py", "train_mixer.py", "launch_training.sh", "run_multi_gpu_train.sh"),
        *("histocc", "scripts", "configs", "docs", "examples", "benchmarks"),
    ):
        (tmp_path / name).symlink_to(REPO / name)
    for name, rows in {"data": 60, "train": 60, "val": 12, "a": 40, "b": 30, "v": 12, "test": 30}.items():
        write_rows(tmp_path / f"{name}.csv", rows, 0 if rows == 60 else 1000)
    write_csv(tmp_path / "new.csv", ("id", "occ1", "lang"), [(i, f"weaver no {i}", "en") for i in range(20)])
    (tmp_path / "bin").mkdir()
    for name, start in {"python": "", "torchrun": "-m torch.distributed.run"}.items():
        start = f'exec {shlex.quote(sys.executable)} {start} "$@"'
        (tmp_path / "bin" / name).write_text(
            f'#!/bin/bash\ncase "$*" in *finetune.py*|*train_mixer.py*) {start} {SMALL} ;;'
            f" *examples/train_*) {start} --device cpu --max-steps 2 ;; esac\n{start}\n"
        )
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def check(place: Path, page: str, number: int, line: str) -> None:
    """Runs a command; if the number of a machine stands in it, on two at once."""
    env = environment(HEAD="127.0.0.1", PYTHONWARNINGS="ignore")
    env["PATH"] = f"{place / 'bin'}:{os.environ['PATH']}"
    if "histocc.plot" in line:
        env["PYTHONPATH"] = str(REPO)  # matplotlib is hidden from the others
    running = [
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=place,
            env=env | {"NODE_RANK": node},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (["0", "1"] if "$NODE_RANK" in line else ["0"])
    ]
    for process in running:
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, f"{page}, line {number}: {line}\n{output}"


def run_on(place: Path, command: list[str], given: str = "") -> None:
    """Runs a command on what is given."""
    done = subprocess.run(
        command, cwd=place, env=environment(), input=given, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{given}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    """Files between backquotes, links and their sections, and long flags."""
    files = set(re.findall(r"`((?:[\w.]+/)*[\w]+\.(?:py|sh|toml|md))`", text_of(page)))
    missing = [each for each in files if not any((at / each).exists() for at in (REPO, REPO / "histocc"))]
    assert set(missing) <= {"report.md", "mine.py"}
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
    assert sorted(set(re.findall(r"`(--[a-z][a-z0-9-]+)", text_of(page))) - flags) == []


def test_readme_is_short_and_names_every_page():
    assert len(text_of("README.md").splitlines()) <= 130
    assert [page for page in PAGES[1:] if f"]({page})" not in text_of("README.md")] == []


def test_every_promise_has_its_tests():
    """Those of docs/architecture.md: the first of two tests is run by default."""
    rows = re.findall(r"^\| (.+) \| `([\w/.:]+)` \| `([\w/.:]+)` \|$", text_of("docs/architecture.md"), re.M)
    assert len(rows) > 20
    for _, default, full in rows:
        for test in (default, full):
            file, name = test.split("::")
            found = re.search(rf"((?:^ *@.*\n)*) *def {name}\(", text_of(f"tests/{file}"), re.M)
            assert found, f"{test}: there is no such test"
            assert test == full or "mark.full" not in found[1], f"{test} is left to --all"


@pytest.mark.processes
def test_short_commands_run(place):
    short = [(page, *each) for page in PAGES for each in commands(page) if each[1].startswith(SHORT)]
    assert len(short) > 2
    for page, number, line in short:
        check(place, page, number, line)


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("page", ["docs/your-own-model.md", "docs/training.md"])
def test_two_commands_have_the_same_losses_on_one_process_and_on_two(place, page):
    for _, language, block in blocks(page, "python", "diff") if "own-model" in page else []:
        if language == "python":
            (place / "mine.py").write_text(block)
        else:
            run_on(place, ["patch", "--fuzz=0"], block)
    lines = [(number, line) for number, line in commands(page) if "--float64" in line]
    assert [line.split()[-1] for _, line in lines] == ["./one", "./two"]
    for number, line in lines:
        check(place, page, number, line)
    one, two = ([row["train_loss"] for row in read_logs(place / name)] for name in ("one", "two"))
    assert len(one) > 1 and one == pytest.approx(two, rel=1e-9)


@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(place, request, page):
    """In the order in which they stand, in one folder for each page."""
    if not (request.config.getoption("--guides") or all_tests()):
        pytest.skip("--guides and --all run them: some minutes")
    if page in NEED_A_RUN:
        check(place, page, 0, TRAINING)
    for number, language, block in blocks(page, *CODE):
        if language == "bash":
            for at, line in commands_of(number, block):
                print(f"{page}:{at}: {line}", flush=True)
                check(place, page, at, line)
        elif language == "diff":
            run_on(place, ["patch", "--fuzz=0"], block)
        elif script := re.match(r"# (\w+\.py): ", block):
            (place / script[1]).write_text(block)
        else:
            run_on(place, [sys.executable, "-c", block])
