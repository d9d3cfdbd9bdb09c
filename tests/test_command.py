"""`histocc COMMAND`: every command under one name, with the parsers of the scripts."""

import importlib
import re
import subprocess
import sys

import pytest
from helpers import REPO, environment

import finetune
from histocc import __main__ as command
from histocc.review import __main__ as review
from histocc.runtime.errors import UserError


@pytest.mark.parametrize("name", command.COMMANDS)
def test_each_command_has_the_parser_of_its_script(name, monkeypatch):
    parser = importlib.import_module(command.COMMANDS[name][0]).get_args_parser()
    monkeypatch.setattr(sys, "argv", [f"histocc {name}"])
    same = importlib.import_module(command.COMMANDS[name][0]).get_args_parser()
    assert {*same._option_string_actions} == {*parser._option_string_actions}
    assert same.format_usage().startswith(f"usage: histocc {name} ")
    assert not parser.format_usage().startswith("usage: histocc ")


def test_the_overview_names_every_command(capsys):
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert command.main(argv) == 0 and "histocc COMMAND [flags]" in capsys.readouterr().out
    assert all(f"\n  {name} " in command.overview() for name in command.COMMANDS)


def test_what_is_no_command(capsys):
    assert command.main(["predit", "--model", "x"]) == 2
    assert "predit: there is no such command; did you mean histocc predict?" in capsys.readouterr().err
    assert command.main(["--version"]) == 0 and capsys.readouterr().out.startswith("histocc ")


@pytest.mark.parametrize("name", [*command.COMMANDS, *(f"review {action}" for action in review.ABOUT)])
def test_help_is_one_screen_with_examples_that_are_accepted(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    command_of, action = f"{name} ".split(" ", 1)
    monkeypatch.setattr(sys, "argv", [f"histocc {command_of}"])
    module = importlib.import_module(command.COMMANDS[command_of][0])
    parser = module.get_args_parser(*filter(None, [action.strip()]))
    for lines in (parser.format_help().splitlines(), parser.format_help(everything=True).splitlines()):
        assert len(lines) <= 40 or lines[-1][:2] == "  "
        assert max(map(len, lines)) <= 100
        assert not re.search(r"\(default: (False|None|)\)", "\n".join(lines))
    if name == "review":
        return
    examples = [line.split() for line in parser.format_help().splitlines() if line.startswith("  histocc ")]
    assert len(examples) == 2
    for words in examples:
        parser.parse_args(words[1 + len(name.split()) :] if ">" not in words else words[2:4])


def test_the_table_is_a_word_and_other_spellings_are_accepted(monkeypatch):
    parse = finetune.get_args_parser().parse_args
    files = ["a.csv", "b.csv"]
    assert parse([*files, "--save-path", "run"]) == parse(["--data", *files, "--output", "run"])
    assert parse(["--output", "run", "a.csv"]).dataset == ["a.csv"]
    assert parse(["a.csv"]).save_path == "./Finetuned/"
    for argv, said in (
        ([], "required: FILE.csv (it comes before the flags: finetune.py FILE.csv …)"),
        (["--target-cols", "hisco_1", "a.csv"], "it comes before the flags"),
        (["a.csv", "--data-dir", "b.csv"], "a.csv: also given by --data-dir: leave one of them out"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            parse(argv)
    monkeypatch.setattr(sys, "argv", ["histocc train"])
    assert finetune.get_args_parser().parse_args(["a.csv"]).save_path == "./output"
    assert "--output FOLDER" in finetune.get_args_parser().format_help()


@pytest.mark.parametrize(
    "own, expected", [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_threads_spin_shortly_unless_the_user_says_how_long(own, expected):
    """libgomp reads the variable when torch is loaded, so it must be there before."""
    program = "import histocc, os, sys; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    env = environment()
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        env.pop(name, None)
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, cwd=REPO, env=env | own, capture_output=True, text=True)
    assert done.stdout.split() == ["False", expected], done.stderr
