"""The sample data set: real codes, one label for each text, the same bytes everywhere."""

import hashlib
from itertools import islice

import pytest
from helpers import run_here

from histocc.formatter import hisco_key
from histocc.sample import __main__ as command
from histocc.sample.__main__ import in_validation
from histocc.sample.generate import LANGUAGES, demo_rows, languages, read, rows
from histocc.text import LANGUAGES as PUBLISHED

NO_OCCUPATION = {"-1", "-2", "-3"}
CODES = {row["hisco"] for row in read("occupations.csv")}
SUMS = {  # sha256 of what 3,000 rows of seed 5 have always been
    "all.csv": "878d1a798170fe7559b25d29b153054038dfd497bae84426a5cc09eb90826835",
    "train.csv": "6f1f7ba476dbe8b8fbf3bf8f4d702f2e8489d856378481ec60dad0095da6fdab",
    "val.csv": "96c7809d0a521157eefcdbd979cbb696e51634cc241aff7f580140838d769b62",
}


@pytest.fixture(scope="module")
def many():
    return list(rows(60_000, 1))


def test_rows_have_known_codes_and_a_text_of_a_language_has_one_label(many):
    assert {row[1] for row in many} == set(LANGUAGES) <= set(PUBLISHED) and CODES <= set(hisco_key())
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
    assert len(shown) == 12 and {row[1] for row in shown} == set(LANGUAGES)
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
