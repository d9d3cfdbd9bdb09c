"""The sample data set: real codes, one label for each text, the same bytes everywhere."""

import csv
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from histocc.sample import demo_rows, rows
from histocc.sample.files import in_validation, write
from histocc.sample.table import forms, read_table
from histocc.sample.words import AND, TAGS

ROOT = Path(__file__).resolve().parents[1]
NO_OCCUPATION = {"-1", "-2", "-3"}


@pytest.fixture(scope="module")
def many():
    return list(rows(20_000, 1))


@pytest.fixture(scope="module")
def title_codes():
    """The codes of each (title, language tag) of the table."""
    return {(form.title, tag): form.code for tag, occupations in forms().items() for each in occupations for form in each}


def run(*arguments, hash_seed="0"):
    return subprocess.run([sys.executable, "-m", "histocc.sample", *map(str, arguments)], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, "PYTHONHASHSEED": hash_seed})


# The table

def test_table_codes_are_five_digits_and_stand_once():
    codes = [row["hisco"] for row in read_table()]
    assert all(re.fullmatch(r"\d{5}", code) or code in NO_OCCUPATION for code in codes)
    assert len(set(codes)) == len(codes)


def test_table_has_a_hundred_occupations_in_all_six_languages():
    full = [row for row in read_table() if row["hisco"] not in NO_OCCUPATION and all(row[column] for column in TAGS)]
    assert len(full) >= 100
    assert any(row["hisco"] == "-1" for row in read_table())


def test_table_titles_are_tidy_and_read_like_one_occupation():
    for row in read_table():
        assert None not in row and None not in row.values()
        for column in TAGS:
            for title in row[column].split("|"):
                assert title and title == " ".join(title.split()).lower(), (row["hisco"], column, title)
                assert not set(title.split()) & {*AND[column], ","}


def test_every_code_is_in_the_published_key():
    key_file = Path(os.environ.get("HISTOCC_REAL_DATA") or "none") / "hisco_key.csv"
    if not key_file.is_file():
        pytest.skip("HISTOCC_REAL_DATA does not point to a folder with hisco_key.csv")
    with open(key_file, encoding="utf-8", newline="") as file:
        raw = [row["hisco"].strip() for row in csv.DictReader(file)]
    known = {code if code.startswith("-") else code.zfill(5) for code in raw}
    assert {row["hisco"] for row in read_table()} <= known


# Rows

def test_rows_have_known_codes_and_published_languages(many):
    from histocc.text import LANGUAGES
    codes = {row["hisco"] for row in read_table()}
    assert {row[1] for row in many} == set(TAGS.values()) <= set(LANGUAGES)
    assert {row[2] for row in many} <= codes
    assert {row[3] for row in many} <= codes - NO_OCCUPATION | {""}
    assert all(text == " ".join(text.split()) and text for text, *_ in many)
    assert all(first != second for _, _, first, second in many)


def test_a_text_of_a_language_has_one_label(many):
    labels = {}
    for text, lang, *codes in many:
        assert labels.setdefault((text.casefold(), lang), codes) == codes, (text, lang)


def test_no_way_of_writing_a_title_is_shared_by_two_codes():
    for tag, occupations in forms().items():
        seen = {}
        for form in (form for each in occupations for form in each):
            for text in (form.title, *form.spellings, *form.slips, *form.short):
                assert seen.setdefault(text, form.code) == form.code, (tag, text)


def test_a_plain_title_has_the_code_of_the_table(many, title_codes):
    plain = [row for row in many if (row[0].lower(), row[1]) in title_codes]
    assert 0.3 < len(plain) / len(many) < 0.6
    assert all((row[2], row[3]) == (title_codes[row[0].lower(), row[1]], "") for row in plain)


def test_shares_of_the_kinds_of_rows(many):
    def share(fits):
        return sum(bool(fits(row)) for row in many) / len(many)

    assert 0.09 < share(lambda row: row[3] != "") < 0.13
    assert 0.03 < share(lambda row: row[2] == "-1") < 0.05
    widow = re.compile(r"widow|wid\.|enke|änka|enka|weduwe|wed\.|wit?twe|wwe\.|veuve|vve")
    assert 0.03 < share(lambda row: widow.search(row[0].lower())) < 0.10
    assert 0.02 < share(lambda row: re.search(r"[^ .]{3}\.$", row[0]))
    assert 0.15 < share(lambda row: row[0] != row[0].lower()) < 0.35
    by_language = Counter(row[1] for row in many)
    assert max(by_language.values()) < 1.15 * min(by_language.values())


def test_two_codes_are_joined_by_a_word_and_stand_in_the_order_of_the_text(many, title_codes):
    words = {TAGS[column]: set(joining) for column, joining in AND.items()}
    known = 0
    for text, lang, first, second in many:
        joined = [part for part in words[lang] if f" {part} " in text.lower()]
        assert bool(second) == bool(joined), text
        if second:
            left, right = text.lower().split(f" {joined[0]} ")
            known += (left, lang) in title_codes
            assert title_codes.get((left, lang), first) == first and title_codes.get((right, lang), second) == second
    assert known > 1000


def test_most_occupations_are_met_often_and_none_drowns_the_others(many):
    counts = Counter(row[2] for row in many)
    codes = [row["hisco"] for row in read_table()]
    assert min(counts[code] for code in codes) >= 15
    assert max(counts.values()) < 0.06 * len(many)


def test_fewer_rows_are_the_first_of_more_and_another_seed_makes_others():
    assert list(islice(rows(10**9, 7), 500)) == list(rows(500, 7))
    assert list(rows(500, 8)) != list(rows(500, 7))
    assert list(rows(0, 1)) == []


@pytest.mark.parametrize("n, seed", [(-1, 1), (5, -1)])
def test_negative_numbers_are_refused(n, seed):
    with pytest.raises(ValueError, match="negative"):
        rows(n, seed)


# The demonstration

def test_demo_rows_are_twelve_in_six_languages_with_codes_of_the_table():
    demo, codes = demo_rows(), {row["hisco"] for row in read_table()}
    assert len(demo) == 12 == len({text for text, *_ in demo})
    assert {lang for _, lang, *_ in demo} == set(TAGS.values())
    assert {code for row in demo for code in row[2:]} - {""} <= codes
    assert sum(row[3] != "" for row in demo) == 2 and sum(row[2] == "-1" for row in demo) == 1


def test_the_generator_never_writes_a_demo_text(many, monkeypatch):
    shown = {(text.casefold(), lang) for text, lang, *_ in demo_rows()}
    assert not shown & {(text.casefold(), lang) for text, lang, *_ in many}
    common = next((text, lang) for text, lang, *_ in many if lang == "en")
    monkeypatch.setattr("histocc.sample.generate._DEMO", frozenset([(common[0].casefold(), "en")]))
    assert common in {row[:2] for row in many} and common not in {row[:2] for row in rows(20_000, 1)}


# Files and the command

def test_same_seed_same_bytes_in_two_processes(tmp_path):
    outputs = []
    for hash_seed in ("1", "2"):
        done = run("--rows", 3000, "--seed", 5, "--output", tmp_path / f"{hash_seed}.csv", "--split-dir", tmp_path / hash_seed,
                   hash_seed=hash_seed)
        assert done.returncode == 0, done.stderr
        outputs.append([path.read_bytes() for path in (tmp_path / f"{hash_seed}.csv", tmp_path / hash_seed / "train.csv",
                                                       tmp_path / hash_seed / "val.csv")])
    assert outputs[0] == outputs[1]
    whole, train, val = (part.decode().split("\n") for part in outputs[0])
    assert "\r" not in outputs[0][0].decode() and whole[0] == train[0] == val[0] == "occ1,lang,hisco_1,hisco_2"
    assert sorted(whole[1:-1]) == sorted(train[1:-1] + val[1:-1]) and len(whole) == 3002
    texts = [{row[0].casefold() for row in csv.reader(part[1:-1])} for part in (train, val)]
    assert not texts[0] & texts[1] and 0.07 < len(val) / 3000 < 0.14


def test_a_file_holds_what_the_generator_makes(tmp_path):
    path = tmp_path / "new" / "sample.csv"
    assert write(rows(300, 2), str(path)) == {str(path): 300}
    with open(path, encoding="utf-8", newline="") as file:
        assert list(map(tuple, csv.reader(file)))[1:] == list(rows(300, 2))
    assert [child.name for child in path.parent.iterdir()] == ["sample.csv"]


def test_a_failure_leaves_the_older_file_and_nothing_else(tmp_path):
    path = tmp_path / "sample.csv"
    path.write_text("older")

    def failing():
        yield from rows(10, 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(failing(), str(path), str(tmp_path / "split"))
    assert path.read_text() == "older" and list((tmp_path / "split").iterdir()) == [] and len(list(tmp_path.iterdir())) == 2


def test_the_split_looks_at_the_text_alone():
    assert in_validation("Blacksmith") == in_validation("BLACKSMITH")
    assert 900 < sum(in_validation(str(n)) for n in range(10_000)) < 1100


@pytest.mark.parametrize("arguments, said", [
    (("--rows", "0", "--output", "{}/x.csv"), "at least 1"),
    (("--rows", "many", "--output", "{}/x.csv"), "'many' is not a whole number"),
    (("--seed", "-1", "--output", "{}/x.csv"), "at least 0"),
    (("--rows", "5"), "--output FILE"),
    (("--rows", "5", "--output", "{}/file/x.csv"), "file is not a folder"),
    (("--rows", "5", "--output", "{}"), "is not a regular file"),
    (("--rows", "5", "--split-dir", "{}/file"), "file is not a folder"),
    (("--rows", "5", "--split-dir", "{}", "--output", "{}/val.csv"), "also a file of --split-dir"),
    (("--rows", "5", "--colour", "red"), "unrecognized arguments"),
])
def test_bad_arguments_end_with_one_line(tmp_path, arguments, said, capsys):
    from histocc.sample.__main__ import main
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        main([part.format(tmp_path) for part in arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and said in error
    assert [child.name for child in tmp_path.iterdir()] == ["file"]


def test_the_command_itself_ends_with_code_2_and_no_traceback(tmp_path):
    (tmp_path / "file").write_text("")
    done = run("--rows", 5, "--output", tmp_path / "file" / "x.csv")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
