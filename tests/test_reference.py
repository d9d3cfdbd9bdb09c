"""The reference of docs/ is what the program gives: its flags, and files and fields of a run of the demo."""

import importlib.util
import json
import re
from argparse import SUPPRESS

import pytest
from helpers import REPO, run_here

from histocc.__main__ import main

SPEC = importlib.util.spec_from_file_location("reference", REPO / "scripts" / "reference.py")
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)
NOT_ALWAYS = re.compile(r" \([^()]*(\([^()]*\))?[^()]*\)$")  # when it is there, at the end


def always(table):
    return {name for name, what in table.items() if not NOT_ALWAYS.search(what)}


def header(path):
    return path.read_text(encoding="utf-8").partition("\n")[0].split(",")


@pytest.mark.parametrize("name", reference.pages())
def test_the_pages_are_what_the_command_writes(name):
    page = (REPO / "docs" / name).read_text(encoding="utf-8")
    assert page == reference.pages()[name], "python scripts/reference.py writes the pages again"


def test_every_flag_is_in_the_page():
    sections = re.split(r"^## histocc ", reference.commands(), flags=re.M)[1:]
    parsers = reference.parsers()
    assert [section.split("\n", 1)[0] for section in sections] == list(parsers)
    for section, parser in zip(sections, parsers.values()):
        listed = set(re.findall(r"`(--?[a-z][a-z0-9-]*)", section))
        positional = [action.dest for action in parser._actions if not action.option_strings]
        words = {name.removesuffix(" words") for name in positional}
        actions = parser._option_string_actions.items()
        shown = {name for name, action in actions if action.help != SUPPRESS or action.dest in words}
        assert shown - listed == set() and all(flag in parser._option_string_actions for flag in listed)


@pytest.mark.processes
def test_a_run_writes_the_files_and_fields_that_the_page_lists(tmp_path, monkeypatch):
    demo, output, report = tmp_path / "demo", tmp_path / "output", tmp_path / "evaluation"
    monkeypatch.setattr("sys.argv", ["pytest"])  # `main` sets it
    run_here(main, "sample", "--demo", demo)
    run_here(main, "train", demo / "data.csv", "--prior", "none", "--output", output)
    run_here(main, "evaluate", demo / "test.csv", "--model", output, "--output", report, "--by", "lang")
    for folder, files in ((output, reference.RUN_FOLDER), (report, reference.EVALUATION)):
        found = {f"{path.name}{'/' * path.is_dir()}" for path in folder.iterdir()}
        assert always(files) <= found and found <= {*files, "curves.svg"}
        for name in reference.COLUMNS.keys() & found:
            columns, written = reference.COLUMNS[name], {*header(folder / name)}
            assert always(columns) <= {re.sub("column lang", "column NAME", x) for x in written} <= {*columns}
    assert {*json.loads((output / "data_report.json").read_text())} == {*reference.DATA_REPORT}

    content, fields = json.loads((report / "report.json").read_text()), set()
    for name, value in content.items():
        if name == "decoders":
            fields |= {f"decoders.*.{field}" for figures in value.values() for field in figures}
        else:
            fields |= {f"{name}.{field}" for field in value} if isinstance(value, dict) else {name}
    fields = {re.sub("by_column lang", "by_column NAME", field) for field in fields}
    assert fields == {*reference.REPORT}

    for flags in ("", "--k 2", "--choices 2 --classes hisclass --draws 2 --explain --level 3"):
        known = ("--known", demo / "known.csv") if flags else ()
        given = ("--model", output, "--output", tmp_path / "coded.csv", "--overwrite", *flags.split(), *known)
        run_here(main, "predict", demo / "new.csv", *given)
        # hisco_2 is as hisco_1
        added = [re.sub(r"_\d+$", "_1", name) for name in header(tmp_path / "coded.csv")[3:]]
        assert always(reference.CODED) <= {*added} <= {*reference.CODED}


def test_the_glossary_has_a_sentence_for_each_word():
    words, sentences = [*reference.GLOSSARY], reference.GLOSSARY.values()
    assert len(words) >= 35 and words == sorted(words, key=str.lower)
    assert all(what[0].isupper() and what.endswith(".") and ". " not in what for what in sentences)
