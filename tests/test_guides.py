"""The commands of README.md, MULTI_GPU_TRAINING.md and docs/ are run as they stand there, on a small file,
with small sizes put behind them.

Those of one process that end soon are run always; `--guides` runs all of them, page by page, in the order in
which they stand. Links lead somewhere, and every flag of every command is on a page.
"""

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPO, all_tests, environment, read_logs, write_csv, write_rows

PAGES = (
    "README.md",
    "MULTI_GPU_TRAINING.md",
    *sorted(f"docs/{path.name}" for path in (REPO / "docs").glob("*.md")),
)
NEED_A_RUN = (
    "docs/predicting.md",
    "docs/evaluating.md",
    "docs/python.md",
    "docs/reviewing.md",
)  # in ./output
SMALL = [
    "--model-size",
    "tiny",
    "--device",
    "cpu",
    "--max-steps",
    "2",
    "--batch-size",
    "4",
    "--ngram-passes",
    "1",
]
TRAINING = (
    "python finetune.py --dataset data.csv --formatter hisco --target-cols hisco_1 hisco_2"
    " --language-col lang --save-path ./output"
)
# test_launchers and the installation by .ci/run
ELSEWHERE = (
    "tests/run",
    "pip install",
    "./launch_training.sh\n",
)
FLAGS = """
import finetune, train_mixer
from examples import train_from_config, train_llada, train_prs_med
from histocc import doctor, export, plot, prepare, watch
from histocc.evaluate import __main__ as evaluate
from histocc.predict import config as predict
from histocc.review import __main__ as review
from histocc.sample import __main__ as sample
own = (finetune, train_mixer, train_from_config, train_llada, train_prs_med)
for script in (*own, doctor, evaluate, export, plot, predict, prepare, review, sample, watch):
    for action in script.get_args_parser()._actions:
        if action.help == "==SUPPRESS==":  # --no- forms, for what a file has switched on
            continue
        print(*(flag for flag in action.option_strings if flag.startswith("--")))
"""
OF_OTHERS = {
    "--completion",
    "--array",
    "--max-restarts",
    "--faults",
    "--slurm",
    "--guides",
    "--print-only",
    "--lint",
    "--all",
}


@functools.cache
def text_of(page: str) -> str:
    return (REPO / page).read_text(encoding="utf-8")


@functools.cache
def flags() -> list[set[str]]:
    """The spellings of each flag of each command."""
    done = subprocess.run(
        [sys.executable, "-c", FLAGS], cwd=REPO, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stdout.splitlines() if line]


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """(line of the page where it begins, block of code)."""
    found = re.finditer(rf"^```{language}\n(.*?)^```", text_of(page), re.M | re.S)
    return [(text_of(page)[: match.start(1)].count("\n") + 1, match[1]) for match in found]


def commands(page: str) -> list[tuple[int, str]]:
    """(line of the page, command)."""
    return [each for number, block in blocks(page, "bash") for each in commands_of(number, block)]


def commands_of(number: int, block: str) -> list[tuple[int, str]]:
    """(line of the page, command) of a block that begins in line `number`."""
    found = []
    joined = re.sub(r"\\\n", lambda _: "\0", block)  # keeps the number of the line
    for line in joined.splitlines(keepends=True):
        command = re.sub("\0\\s*", "", line)
        if command.strip() and not command.startswith(ELSEWHERE):
            found.append((number, command.strip()))
        number += 1 + line.count("\0")
    return found


@pytest.fixture
def place(tmp_path):
    """A folder that looks like the repository, with data.csv, train.csv, val.csv, and commands that add SMALL
    to every training.
    """
    folder = tmp_path
    for name in (
        "README.md",
        "finetune.py",
        "train_mixer.py",
        "launch_training.sh",
        "run_multi_gpu_train.sh",
        "histocc",
        "scripts",
        "configs",
        "docs",
        "examples",
        "benchmarks",
    ):
        (folder / name).symlink_to(REPO / name)
    for name, rows in (
        ("data.csv", 60),
        ("train.csv", 60),
        ("val.csv", 12),
        ("a.csv", 40),
        ("b.csv", 30),
        ("v.csv", 12),
        ("test.csv", 30),
    ):
        write_rows(folder / name, rows, 0 if rows == 60 else 1000)
    write_csv(folder / "new.csv", ("id", "occ1", "lang"), [(i, f"weaver no {i}", "en") for i in range(20)])
    (folder / "bin").mkdir()
    for name, start in (
        ("python", [sys.executable]),
        ("torchrun", [sys.executable, "-m", "torch.distributed.run"]),
    ):
        (folder / "bin" / name).write_text(
            f'#!/bin/bash\ncase "$*" in *finetune.py*|*train_mixer.py*) exec {shlex.join(start)} "$@"'
            f" {' '.join(SMALL)} ;; *examples/train_*) exec {shlex.join(start)}"
            ' "$@" --device cpu --max-steps 2 ;; esac\n'
            f'exec {shlex.join(start)} "$@"\n'
        )
        (folder / "bin" / name).chmod(0o755)
    return folder


def run(place: Path, line: str, **env: str) -> subprocess.Popen:
    env = environment(**env) | {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
        "HEAD": "127.0.0.1",
    }
    if "histocc.plot" in line:
        env["PYTHONPATH"] = str(REPO)  # matplotlib is hidden from the others
    return subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=place,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check(place: Path, page: str, number: int, line: str) -> None:
    """Runs it; where the number of a machine stands in it, on two at once."""
    numbers = ["0", "1"] if "$NODE_RANK" in line else ["0"]
    running = [run(place, line, NODE_RANK=number) for number in numbers]
    for process in running:
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, f"{page}, line {number}: {line}\n{output}"


def is_short(line: str) -> bool:
    return (
        line.startswith("python ")
        and "torch.distributed" not in line
        and ("--config" in line or "histocc.prepare" in line)
    )


def test_there_are_commands():
    lines = [line for page in PAGES for _, line in commands(page)]
    assert len(lines) > 25 and sum(map(is_short, lines)) >= 2


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    """Files between backquotes, links, and long flags."""
    files = set(re.findall(r"`((?:[\w.]+/)*[\w]+\.(?:py|sh|toml|md))`", text_of(page)))
    assert [
        path
        for path in files - {"report.md", "mine.py"}
        if not any(at.exists() for at in (REPO / path, REPO / "histocc" / path))
    ] == []
    links = re.findall(r"\]\(([^)#]+)(#[^)]*)?\)", text_of(page))
    here = (REPO / page).parent
    assert [link for link, _ in links if "://" not in link and not (here / link).exists()] == []
    known = set().union(*flags()) | OF_OTHERS
    assert sorted(set(re.findall(r"`(--[a-z][a-z0-9-]+)", text_of(page))) - known) == []


@pytest.mark.parametrize("page", PAGES)
def test_links_to_sections_lead_to_one(page):
    for link, section in re.findall(r"\]\(([^)#]*)#([^)]*)\)", text_of(page)):
        if "://" not in link:
            target = (REPO / page).parent / link if link else REPO / page
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            assert section in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_every_flag_is_on_a_page():
    written = set(re.findall(r"--[a-z][a-z0-9-]*", " ".join(map(text_of, PAGES))))
    assert [sorted(spellings) for spellings in flags() if not spellings & written] == []


def test_readme_is_short_and_names_every_page():
    readme = text_of("README.md")
    assert len(readme.splitlines()) <= 150
    assert [page for page in PAGES[1:] if f"]({page})" not in readme] == []


def marks_of(test: str) -> list[str]:
    """The marks on a test (file::function) and on its class; raises where there is no such test."""
    file, name = test.split("::")
    tree = ast.parse((REPO / "tests" / file).read_text(encoding="utf-8"))
    for holder in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in holder.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                both = [*node.decorator_list, *getattr(holder, "decorator_list", [])]
                return [ast.unparse(each) for each in both]
    raise AssertionError(f"{test}: there is no such test")


def test_every_promise_has_its_tests():
    """Those of docs/architecture.md, by the table of tests/README.md; the first of two is run by default."""
    promises = re.findall(r"^- \*\*([^*]+)\*\*:", text_of("docs/architecture.md"), re.M)
    rows = re.findall(r"^\| ([\w -]+) \| `([\w/.:]+)` \| `([\w/.:]+)` \|$", text_of("tests/README.md"), re.M)
    assert len(promises) > 20 and sorted(promises) == sorted(name for name, _, _ in rows)
    for _, default, full in rows:
        assert default != full and "pytest.mark.full" not in marks_of(default), default
        marks_of(full)


@pytest.mark.processes
def test_short_commands_run(place):
    for page in PAGES:
        for number, line in commands(page):
            if is_short(line):
                check(place, page, number, line)


@pytest.mark.processes
@pytest.mark.full
def test_a_script_of_ones_own_has_the_same_losses_on_two_processes(place):
    page = "docs/your-own-model.md"
    [(_, first)] = blocks(page, "python")
    (place / "mine.py").write_text(first)
    for _, step in blocks(page, "diff"):
        run_on(place, ["patch", "--fuzz=0"], step)
    lines = [(number, line) for number, line in commands(page) if "--float64" in line]
    assert [line.split()[-1] for _, line in lines] == ["./one", "./two"]
    for number, line in lines:
        check(place, page, number, line)
    one, two = ([row["train_loss"] for row in read_logs(place / name)] for name in ("one", "two"))
    assert len(one) > 2 and one == pytest.approx(two, rel=1e-9) and one[-1] < one[0] - 1


@pytest.mark.processes
@pytest.mark.full
def test_the_two_commands_that_compare_losses_agree(place):
    page = "docs/training.md"
    lines = [(number, line) for number, line in commands(page) if "--float64" in line]
    assert [line.split()[-1] for _, line in lines] == ["./one", "./two"]
    for number, line in lines:
        check(place, page, number, line)
    one, two = ([row["train_loss"] for row in read_logs(place / name)] for name in ("one", "two"))
    assert len(one) == 2 and one == pytest.approx(two, rel=1e-9)


@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(place, request, page):
    """In the order in which they stand, in one folder for each page."""
    if not (request.config.getoption("--guides") or all_tests()):
        pytest.skip("--guides and --all run them: some minutes")
    if page in NEED_A_RUN:
        check(place, page, 0, TRAINING)
    found = [
        (*block, language) for language in ("bash", "python", "diff") for block in blocks(page, language)
    ]
    for number, block, language in sorted(found):
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


def run_on(place: Path, command: list[str], given: str = "") -> None:
    """Runs a command on what is given."""
    done = subprocess.run(
        command, cwd=place, env=environment(), input=given, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{given}\n{done.stdout}{done.stderr}"
