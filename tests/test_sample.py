"""The sample data set: real codes, one label for each text, the same bytes everywhere."""

import csv
import hashlib
import sys
from itertools import islice

import openpyxl
import pytest
from helpers import read as read_table
from helpers import run_here

from histocc.formatter import hisco_key
from histocc.lexicon import LEXICON_LANGUAGES
from histocc.sample import __main__ as command
from histocc.sample.__main__ import in_validation
from histocc.sample.generate import demo_rows, languages, read, rows
from histocc.text import LANGUAGES as PUBLISHED

NO_OCCUPATION = {"-1", "-2", "-3"}
CODES = {row["hisco"] for row in read("occupations.csv")}
SUMS = {  # sha256 of what 3,000 rows of seed 5 have always been
    "all.csv": "878d1a798170fe7559b25d29b153054038dfd497bae84426a5cc09eb90826835",
    "train.csv": "6f1f7ba476dbe8b8fbf3bf8f4d702f2e8489d856378481ec60dad0095da6fdab",
    "val.csv": "96c7809d0a521157eefcdbd979cbb696e51634cc241aff7f580140838d769b62",
}
# of the names and contents of the CSV files of --demo
DEMO_SUM = "a68a06df8b70a6a1ac3228949e312d017dfa233f800fd5a8ffba620b38b0c095"


@pytest.fixture(scope="module")
def many():
    return list(rows(60_000, 1))


def test_rows_have_known_codes_and_a_text_of_a_language_has_one_label(many):
    assert {row[1] for row in many} == set(LEXICON_LANGUAGES) <= set(PUBLISHED) and CODES <= set(hisco_key())
    labels = {}
    for text, lang, *codes in many:
        some = [code for code in codes if code]
        assert codes == some + [""] * (3 - len(some)) and len(set(some)) == len(some)
        assert some[0] in CODES and set(some[1:]) <= CODES - NO_OCCUPATION
        assert text and text == " ".join(text.split())
        assert labels.setdefault((text.casefold(), lang), codes) == codes


def test_no_way_of_writing_is_shared_by_two_codes_or_made_by_a_stray_or_shown():
    shown = {row[0].casefold() for row in demo_rows()}
    for language in languages():
        code_of = {}
        for title in {*(each for titles in [*language.common, *language.nothing] for each in titles)}:
            for text in (title.text, *title.spellings, *title.slips, *title.careless, *title.short):
                assert code_of.setdefault(text.casefold(), title.code) == title.code
        assert not shown & code_of.keys()
        for stray in language.phrases["stray"]:
            before, after = stray.split("{}")
            assert not any(text.startswith(before) and text.endswith(after) for text in code_of)


def test_fewer_rows_are_the_first_of_more_and_another_seed_makes_others():
    assert list(islice(rows(10**9, 7), 500)) == list(rows(500, 7)) != list(rows(500, 8))


def test_the_demonstration_is_never_written(many):
    shown = demo_rows()
    assert len(shown) == 12 and {row[1] for row in shown} == set(LEXICON_LANGUAGES)
    assert {code for row in shown for code in row[2:]} - {""} <= CODES
    assert not {row[0].casefold() for row in shown} & {row[0].casefold() for row in many}


def test_the_same_seed_gives_the_bytes_it_has_always_given(tmp_path):
    out = ("--output", tmp_path / "all.csv", "--split-dir", tmp_path)
    run_here(command.main, "--rows", 3000, "--seed", 5, *out)
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    assert found == SUMS
    train, val = ({line.split(",")[0].casefold() for line in open(tmp_path / name)} for name in [*SUMS][1:])
    assert train & val == {"occ1"} and in_validation("Blacksmith") == in_validation("BLACKSMITH")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--seed", "-1", "--output", "{}/x.csv"), "at least 0"),
        (("--rows", "5"), "--output FILE"),
        (("--rows", "5", "--output", "{}/x.csv.gz"), "tables are written as CSV: name it"),
        (("--rows", "5", "--output", "{}/file/x.csv"), "file is not a folder"),
        (("--rows", "5", "--split-dir", "{}", "--output", "{}/val.csv"), "also a file of --split-dir"),
        (("--rows", "5", "--output", "{}/file"), "exists with other content; --overwrite"),
    ],
)
def test_bad_arguments_end_with_one_message(tmp_path, arguments, said):
    (tmp_path / "file").write_text("")
    assert said in run_here(command.main, *(part.format(tmp_path) for part in arguments), code=2)
    assert [child.name for child in tmp_path.iterdir()] == ["file"]


# ---- the files that the pages name


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    run_here(command.main, "--demo", folder)
    return folder


def texts_of(path, *columns):
    return [tuple(row[column] for column in columns or ("occ1", "lang")) for row in read_table(path)]


def test_the_files_of_the_pages_are_what_they_have_always_been(demo):
    files = {str(path.relative_to(demo)): path.read_text("utf-8") for path in demo.rglob("*.csv")}
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(name.encode() + (demo / name).read_bytes())
    assert total.hexdigest() == DEMO_SUM
    rows = openpyxl.load_workbook(demo / "register.xlsx").active.iter_rows(values_only=True)
    assert [list(map(str, row)) for row in rows] == list(csv.reader(files["register.csv"].splitlines()))


def test_the_files_of_the_pages_fit_together(demo):
    data, twice = read_table(demo / "data.csv"), read_table(demo / "second_coder.csv")
    assert len(data) == 2000 and len(texts_of(demo / "new.csv")) == 400
    differing = [(one, two) for one, two in zip(data, twice) if one != two]
    assert 0.07 < len(differing) / len(twice) < 0.13
    assert all(one["id"] == two["id"] and one["occ1"] == two["occ1"] for one, two in zip(data, twice))
    tables = [read_table(demo / f"{name}.csv") for name in ("train", "val", "test")]
    parts = [{row["occ1"].casefold() for row in table} for table in tables]
    assert all(parts) and not parts[0] & parts[1] and not (parts[0] | parts[1]) & parts[2]
    known = texts_of(demo / "known.csv")
    assert 50 < len(known) == len({*known}) and {*known} < {*texts_of(demo / "new.csv")}
    texts = {*texts_of(demo / "register.csv")}
    assert len(texts) < 1500 / 3 and 50 < len({*texts_of(demo / "register_decided.csv")} & texts) < 70
    assert {row["part"] for row in read_table(demo / "sources.csv")} == {"train", "test"}
    shops = {}
    for text, code in {*texts_of(demo / "purchases.csv", "text", "coicop")}:
        shops.setdefault(text, set()).add(code)
    assert sum(len(codes) > 1 for codes in shops.values()) > 10  # these texts need the shop


def test_files_with_other_content_stay(demo, tmp_path, monkeypatch):
    for name in ("known.csv", "notes.txt"):
        (tmp_path / name).write_text("mine")
    said = run_here(command.main, "--demo", tmp_path, code=2)
    assert "known.csv exists with other content; --overwrite" in said
    assert (tmp_path / "known.csv").read_text() == "mine"
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    said = run_here(command.main, "--demo", tmp_path, "--overwrite")
    assert "register.xlsx was not written: it needs xlsxwriter (pip install 'histocc[excel]')" in said
    assert not (tmp_path / "register.xlsx").exists() and (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "known.csv").read_bytes() == (demo / "known.csv").read_bytes()
    assert "leave out --output" in run_here(command.main, "--demo", tmp_path, "--output", "x.csv", code=2)
