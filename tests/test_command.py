"""`histocc COMMAND`: every command under one name, with the parsers of the scripts."""

import importlib
import subprocess
import sys

import pytest
from helpers import REPO, TINY, environment, read_logs, run, write_csv, write_rows

from histocc import __main__ as command


@pytest.mark.parametrize("name", command.COMMANDS)
def test_each_command_has_the_parser_of_its_script(name, monkeypatch):
    parser = importlib.import_module(command.COMMANDS[name][0]).get_args_parser()
    monkeypatch.setattr(sys, "argv", [f"histocc {name}"])
    same = importlib.import_module(command.COMMANDS[name][0]).get_args_parser()
    assert [action.option_strings for action in same._actions] == [a.option_strings for a in parser._actions]
    assert same.format_usage().startswith(f"usage: histocc {name} ")
    assert not parser.format_usage().startswith("usage: histocc ")


def test_the_overview_names_every_command(capsys):
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert command.main(argv) == 0 and "histocc COMMAND [flags]" in capsys.readouterr().out
    assert all(f"\n  {name} " in command.overview() for name in command.COMMANDS)


def test_what_is_no_command(capsys):
    assert command.main(["predit", "--model", "x"]) == 2
    assert "predit: there is no such command" in capsys.readouterr().err
    assert command.main(["--version"]) == 0 and capsys.readouterr().out.startswith("histocc ")


@pytest.mark.processes
@pytest.mark.full
def test_it_trains_resumes_and_codes_as_the_scripts_do(tmp_path):
    data = write_rows(tmp_path / "rows.csv", 60)
    flags = ["--dataset", data, "--formatter", "hisco", "--target-cols", "hisco_1", "--batch-size", 8, *TINY]
    train = ["histocc", "train", *flags, "--max-steps"]
    run(*train, 4, "--save-path", tmp_path / "one")
    run(*train, 2, "--save-path", tmp_path / "two", processes=2, launcher="run")
    assert "--seed was" in run(*train, 4, "--seed", 3, "--save-path", tmp_path / "one", code=2)
    run(*train, 6, "--save-path", tmp_path / "one")
    assert read_logs(tmp_path / "one")[-1]["step"] == 6 and read_logs(tmp_path / "two")[-1]["step"] == 2
    new = write_csv(tmp_path / "new.csv", ("occ1",), [(f"weaver no {i}",) for i in range(20)])
    coded = tmp_path / "coded.csv"
    run("histocc", "predict", "--model", tmp_path / "one", "--input", new, "--output", coded)
    assert len(coded.read_text(encoding="utf-8").splitlines()) == 21


@pytest.mark.parametrize(
    "own, expected", [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_threads_spin_shortly_unless_the_user_says_how_long(own, expected):
    """libgomp reads the variable when torch is loaded, so it must be there before."""
    program = "import histocc, os, sys; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    env = environment()
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, env=env | own, capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", expected], done.stderr
