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
from histocc.sample.generate import SHARES, kinds, languages
from histocc.sample.places import EMPLOYED, EMPLOYER, IN_TOWN, PEOPLE, TOWNS
from histocc.sample.short import abbreviations
from histocc.sample.table import forms, read_table
from histocc.sample.words import AND, TAGS

ROOT = Path(__file__).resolve().parents[1]
NO_OCCUPATION = {"-1", "-2", "-3"}


@pytest.fixture(scope="module")
def many():
    return list(rows(60_000, 1))


@pytest.fixture(scope="module")
def title_codes():
    """The codes of each (title, language tag) of the table."""
    return {
        (form.title, tag): form.code
        for tag, occupations in forms().items()
        for each in occupations
        for form in each
    }


def run(*arguments, hash_seed="0"):
    return subprocess.run(
        [sys.executable, "-m", "histocc.sample", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )


# The table


def test_table_codes_are_five_digits_and_stand_once():
    codes = [row["hisco"] for row in read_table()]
    assert all(re.fullmatch(r"\d{5}", code) or code in NO_OCCUPATION for code in codes)
    assert len(set(codes)) == len(codes)


def test_table_has_three_hundred_occupations_in_all_six_languages_and_what_is_none():
    table = read_table()
    full = [row for row in table if row["hisco"] not in NO_OCCUPATION and all(row[column] for column in TAGS)]
    assert len(full) >= 300
    assert [row["hisco"] for row in table[-3:]] == ["-1", "-2", "-3"]
    assert all(len(row[column].split("|")) >= 4 for row in table[-3:] for column in TAGS)


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
    assert {code for row in many for code in row[3:]} <= codes - NO_OCCUPATION | {""}
    assert all(text == " ".join(text.split()) and text for text, *_ in many)
    for _, _, *three in many:
        some = [code for code in three if code]
        assert len(set(some)) == len(some) and three == some + [""] * (3 - len(some))


def test_a_text_of_a_language_has_one_label(many):
    labels = {}
    for text, lang, *codes in many:
        assert labels.setdefault((text.casefold(), lang), codes) == codes, (text, lang)


def test_no_way_of_writing_a_title_is_shared_by_two_codes():
    for tag, occupations in forms().items():
        seen = {}
        for form in (form for each in occupations for form in each):
            for text in form.all():
                assert seen.setdefault(text.casefold(), form.code) == form.code, (tag, text)


def test_a_plain_title_has_the_code_of_the_table(many, title_codes):
    plain = [row for row in many if (row[0].lower(), row[1]) in title_codes]
    assert 0.40 < len(plain) / len(many) < 0.55
    assert all(row[2:] == (title_codes[row[0].lower(), row[1]], "", "") for row in plain)


def test_shares_of_the_kinds_of_rows(many):
    def share(fits):
        return sum(bool(fits(row)) for row in many) / len(many)

    assert 0.09 < share(lambda row: row[3] and not row[4]) < 0.11
    assert 0.008 < share(lambda row: row[4]) < 0.012
    assert 0.026 < share(lambda row: row[2] == "-1") < 0.034
    assert all(0.012 < share(lambda row, code=code: row[2] == code) < 0.018 for code in ("-2", "-3"))
    widow = re.compile(r"widow|wid\.|enke|änka|enka|weduwe|wed\.|wit?twe|wwe\.|veuve|vve")
    assert 0.03 < share(lambda row: widow.search(row[0].lower())) < 0.10
    assert 0.02 < share(lambda row: re.search(r"[^ .]{3}\.$", row[0]))
    assert 0.15 < share(lambda row: row[0] != row[0].lower()) < 0.35
    by_language = Counter(row[1] for row in many)
    assert max(by_language.values()) < 1.15 * min(by_language.values())


def test_several_codes_are_joined_by_a_word_and_stand_in_the_order_of_the_text(many, title_codes):
    words = {TAGS[column]: set(joining) for column, joining in AND.items()}
    known = Counter()
    for text, lang, *codes in many:
        codes = [code for code in codes if code]
        joined = [part for part in words[lang] if f" {part} " in text.lower()]
        assert (len(codes) > 1) == bool(joined), text
        if joined:
            start, last = text.lower().split(f" {joined[0]} ")
            parts = [*start.split(", "), last]
            assert len(parts[:-1]) == len(codes) - 1, text
            known[len(codes)] += all((part, lang) in title_codes for part in parts)
            assert all(title_codes.get((part, lang), code) == code for part, code in zip(parts, codes)), text
    assert known[2] > 3000 and known[3] > 250


def test_most_occupations_are_met_often_and_none_drowns_the_others(many):
    counts = Counter(row[2] for row in many)
    codes = [row["hisco"] for row in read_table()]
    assert min(counts[code] for code in codes) >= 6
    assert max(counts.values()) < 0.06 * len(many)


def test_shares_leave_plain_titles_the_largest_kind():
    names = Counter((kind.__name__.removeprefix("_"), language.tag) for kind, language, _ in kinds())
    for tag in TAGS.values():
        assert {name: names[name, tag] for name in SHARES} == SHARES
        assert names["plain", tag] == 1000 - sum(SHARES.values()) > max(SHARES.values())


# Forms


def test_abbreviations_are_of_several_hands():
    titles = [(title, row["hisco"]) for row in read_table() for title in row["en"].split("|")]
    short = abbreviations(titles, "en")
    assert {"carp.", "carpr."} <= set(short["carpenter"])  # as clerks usually write it
    assert {"blacks.", "blacksm."} <= set(short["blacksmith"])  # cut after a consonant
    assert "gardnr" in short["gardener"]  # without the vowels of the middle
    # the first letters of the first words
    assert {"f. knitter", "f.knitter"} <= set(short["framework knitter"])
    assert "f. labourer" not in short["farm labourer"]  # nor is it "forest labourer"
    for tag, occupations in forms().items():
        working = [form for each in occupations for form in each if form.code not in NO_OCCUPATION]
        assert sum(len(form.short) > 1 for form in working) > 0.5 * len(working), tag
        assert not any(form.short for each in occupations for form in each if form.code in NO_OCCUPATION)


def test_abbreviations_that_could_be_two_codes_are_not_made():
    short = abbreviations(
        [
            ("barometer maker", "1"),
            ("barrel maker", "2"),
            ("carpenter", "3"),
            ("carpeter", "4"),
            ("carpentry", "3"),
            ("cordwainer", "5"),
        ],
        "en",
    )
    assert not {"b. maker", "b.m."} & {*short["barometer maker"], *short["barrel maker"]}
    assert "carpen." in short["carpentry"] and not {"carper", "carpr"} & {
        *short["carpenter"][3:],
        *short["carpeter"],
    }
    assert (
        "cordwn." not in short["cordwainer"] and "cordwain." not in short["carpenter"] and short["cordwainer"]
    )


def test_slips_are_those_of_handwriting():
    english = {form.title: form for each in forms()["en"] for form in each}
    assert {"fanmer", "farner", "farmcr", "famer", "farrmer", "famrer"} <= set(english["farmer"].slips)
    assert {"btacksmith", "blocksmith", "blaeksmith", "backsmith", "balcksmith"} <= set(
        english["blacksmith"].slips
    )
    assert "schoolrnaster" in english["schoolmaster"].slips and "joumalist" in english["journalist"].slips
    assert {"lab ourer", "labo-urer", "labourer."} <= set(english["labourer"].careless)
    assert {"daylabourer", "day-labourer"} <= set(english["day labourer"].careless)
    assert "epicier" in {text for each in forms()["fr"] for form in each for text in form.careless}
    dutch = {text for each in forms()["nl"] for form in each for text in form.slips}
    assert {"mynwerker", "mÿnwerker"} <= dutch


def test_strays_cannot_make_another_way_of_writing(many):
    for language in languages():
        texts = {text for each in forms()[language.tag] for form in each for text in form.all()}
        for before, after in language.strays:
            assert (before or after) and not any(
                text.startswith(before) and text.endswith(after) for text in texts
            )
    met = {text.lower() for text, *_ in many}
    assert any(text.endswith(" do.") for text in met) and any(text.startswith("(") for text in met)


def test_places_are_many_in_each_language_and_their_templates_begin_with_the_title():
    for column in TAGS:
        assert len(set(TOWNS[column])) >= 30 and len(set(PEOPLE[column])) >= 10
        templates = [*IN_TOWN[column], *(text for kind in EMPLOYER.values() for text in kind[column])]
        assert all(text.startswith("{}") and text.count("{}") == 1 for text in templates)
        assert not any(
            set(text.split()) & {*AND[column]} for text in (*templates, *PEOPLE[column], *TOWNS[column])
        )
    assert {kind for _, some in EMPLOYED for kind in some} == set(EMPLOYER)
    met = {town for text, *_ in rows(30_000, 4) for town in TOWNS["da"] if town in text.lower()}
    assert len(met) >= 30
    employed = {
        entry.code
        for language in languages()
        for titles in language.common
        for entry in titles
        if entry.employers
    }
    assert {"83110", "54010", "62105", "33110", "98135", "58340", "99910"} <= employed and not {
        "61110",
        "06105",
    } & employed


# Order and amount


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
    assert {row[4] for row in demo} == {""} and sum(row[3] != "" for row in demo) == 2
    assert sum(row[2] == "-1" for row in demo) == 1


def test_the_generator_never_writes_a_demo_text(many, monkeypatch):
    shown = {(text.casefold(), lang) for text, lang, *_ in demo_rows()}
    assert not shown & {(text.casefold(), lang) for text, lang, *_ in many}
    common = next(text for text, lang, *_ in many if text.startswith("widow of ") and "," not in text)
    monkeypatch.setattr("histocc.sample.generate._DEMO", frozenset([common.casefold()]))
    assert common.casefold() not in {row[0].casefold() for row in rows(60_000, 1)}


def test_a_title_that_is_a_demo_text_is_refused(monkeypatch):
    monkeypatch.setattr("histocc.sample.generate._DEMO", frozenset(["carpenter"]))
    kinds.cache_clear()
    with pytest.raises(ValueError, match="'carpenter' is written like"):
        kinds()


# Files and the command


@pytest.mark.full
def test_same_seed_same_bytes_in_two_processes(tmp_path):
    outputs = []
    for hash_seed in ("1", "2"):
        done = run(
            "--rows",
            3000,
            "--seed",
            5,
            "--output",
            tmp_path / f"{hash_seed}.csv",
            "--split-dir",
            tmp_path / hash_seed,
            hash_seed=hash_seed,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(
            [
                path.read_bytes()
                for path in (
                    tmp_path / f"{hash_seed}.csv",
                    tmp_path / hash_seed / "train.csv",
                    tmp_path / hash_seed / "val.csv",
                )
            ]
        )
    assert outputs[0] == outputs[1]
    whole, train, val = (part.decode().split("\n") for part in outputs[0])
    assert (
        "\r" not in outputs[0][0].decode()
        and whole[0] == train[0] == val[0] == "occ1,lang,hisco_1,hisco_2,hisco_3"
    )
    assert sorted(whole[1:-1]) == sorted(train[1:-1] + val[1:-1]) and len(whole) == 3002
    texts = [{row[0].casefold() for row in csv.reader(part[1:-1])} for part in (train, val)]
    assert not texts[0] & texts[1] and 0.07 < len(val) / 3000 < 0.14


def test_a_file_holds_what_the_generator_makes(tmp_path):
    path = tmp_path / "new" / "sample.csv"
    assert write(rows(1300, 2), str(path)) == {str(path): 1300}
    with open(path, encoding="utf-8", newline="") as file:
        assert list(map(tuple, csv.reader(file)))[1:] == list(rows(1300, 2))
    assert [child.name for child in path.parent.iterdir()] == ["sample.csv"]


def test_a_failure_leaves_the_older_file_and_nothing_else(tmp_path):
    path = tmp_path / "sample.csv"
    path.write_text("older")

    def failing():
        yield from rows(10, 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(failing(), str(path), str(tmp_path / "split"))
    assert (
        path.read_text() == "older"
        and list((tmp_path / "split").iterdir()) == []
        and len(list(tmp_path.iterdir())) == 2
    )


def test_the_split_looks_at_the_text_alone():
    assert in_validation("Blacksmith") == in_validation("BLACKSMITH")
    assert 900 < sum(in_validation(str(n)) for n in range(10_000)) < 1100


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--rows", "0", "--output", "{}/x.csv"), "at least 1"),
        (("--rows", "many", "--output", "{}/x.csv"), "'many' is not a whole number"),
        (("--seed", "-1", "--output", "{}/x.csv"), "at least 0"),
        (("--rows", "5"), "--output FILE"),
        (("--rows", "5", "--output", "{}/file/x.csv"), "file is not a folder"),
        (("--rows", "5", "--output", "{}"), "is not a regular file"),
        (("--rows", "5", "--split-dir", "{}/file"), "file is not a folder"),
        (("--rows", "5", "--split-dir", "{}", "--output", "{}/val.csv"), "also a file of --split-dir"),
        (("--rows", "5", "--colour", "red"), "unrecognized arguments"),
    ],
)
def test_bad_arguments_end_with_one_message(tmp_path, arguments, said, capsys):
    from histocc.sample.__main__ import main

    (tmp_path / "file").write_text("")
    assert main([part.format(tmp_path) for part in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error
    assert error.count("\n") == 1 or error.endswith("\n  python -m histocc.sample --help lists the flags\n")
    assert [child.name for child in tmp_path.iterdir()] == ["file"]


def test_help_is_printed():
    done = run("--help")
    assert done.returncode == 0 and "10% of the texts are in val.csv" in " ".join(done.stdout.split())


def test_the_command_itself_ends_with_code_2_and_no_traceback(tmp_path):
    (tmp_path / "file").write_text("")
    done = run("--rows", 5, "--output", tmp_path / "file" / "x.csv")
    assert (
        done.returncode == 2
        and done.stdout == ""
        and done.stderr.count("\n") == 1
        and "Traceback" not in done.stderr
    )
