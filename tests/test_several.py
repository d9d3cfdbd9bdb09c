"""Texts that name several occupations: a model whose training codes each codes their parts."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import read, run_here, words, write_csv

import finetune
from histocc import OccCANINE
from histocc.data.learned import hashes_of
from histocc.data.several import listed_hashes, parts_of_texts
from histocc.predict import __main__ as predicting
from histocc.predict.coder import Coded, Coder
from histocc.runtime import checkpoint
from histocc.sample.generate import rows as sample_rows

JOINED = [f" {word} " for word in words("and und u. en och O. o og et e y & +")]
JOINED += ["/", ", ", "; ", ", and "]


def test_texts_are_split_between_titles_and_never_in_one():
    known = np.append(listed_hashes("as-is"), hashes_of(["qolqez, qex", "qobbler"], "as-is"))
    texts = [f"Baker{between}wheelwright" for between in JOINED]
    assert parts_of_texts(texts, known, "as-is") == [["Baker", "wheelwright"]] * len(JOINED)
    whole = ["wine and spirit merchant", "qolqez,  Qex", "baker and qex", "baker & ", "and", "", "Bakeranden"]
    assert not any(parts_of_texts(whole, known, "as-is"))
    several = ["baker, wine and spirit merchant and qobbler", "qolqez, qex / baker"]
    parts = [["baker", "wine and spirit merchant", "qobbler"], ["qolqez, qex", "baker"]]
    assert parts_of_texts(several, known, "as-is") == parts


@pytest.mark.parametrize(
    "text, conf, codes, is_split",
    [
        ("smith / baker", 0.4, ["83110", "77610"], True),
        ("smith / baker", 0.2, ["83110", "77610"], False),
        ("smith and baker", 0.4, ["83110", "77610"], False),
        ("smith and baker", 0.6, ["83110", "77610"], True),
        ("sergeant / gunner", 0.9, ["58330", "58340"], False),
        ("smith / pensioner", 0.9, ["83110", "-1"], False),
    ],
)
def test_parts_are_joined_if_all_are_sure_and_are_different_occupations(text, conf, codes, is_split):
    names = text.replace("/", "and").split(" and ")
    whole = Coded(["61110"], [0.5], 0.5)
    parts = [Coded([codes[0]], [conf], conf), Coded([codes[1]], [0.95], 0.95)]
    answer = Coder._joined(SimpleNamespace(choices=0), whole, text, names, parts, 5)  # pyright: ignore
    assert (answer.codes, answer.conf) == ((codes, conf) if is_split else (["61110"], 0.5))


def rows_of_one_code(number=600):
    """Return made-up rows whose text names one occupation."""
    rows = [row for row in sample_rows(number, 5) if not row[3] and row[2] > "0"]
    return [row for row in rows if not any(sign in f" {row[0].casefold()} " for sign in JOINED)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A model that learned rows of two occupations with both codes, and one with the first code alone."""
    folder, header = tmp_path_factory.mktemp("several"), ["occ1", "lang", "hisco_1", "hisco_2", "hisco_3"]
    one = rows_of_one_code()
    two = [(f"{a[0]} & {b[0]}", a[1], a[2], b[2], "") for a, b in zip(one[:40], one[1:]) if a[2] != b[2]]
    for name, rows in (("each", two), ("first", [(*row[:3], "", "") for row in two])):
        write_csv(folder / f"{name}.csv", header, [*one, *rows])
        how = ["--target-cols", *header[2:], "--language-col", "lang", "--formatter", "hisco"]
        given = ["--dataset", folder / f"{name}.csv", "--save-path", folder / name, "--prior", "none"]
        run_here(finetune.main, *given, *how, "--device", "cpu")
    return folder


def code(runs, folder, rows, *more, model="each"):
    source, output = write_csv(folder / "in.csv", ["occ1", "lang"], rows), folder / "out.csv"
    given = ["--model", runs / model, "--input", source, "--output", output, "--device", "cpu", "--overwrite"]
    run_here(predicting.main, *given, *more)
    return read(output)


def found(row):
    return [row[name] for name in ("hisco_1", "hisco_2", "hisco_3") if row.get(name)]


def pairs():
    """(text, language, code, code) of two texts of the training each, in other pairs than there."""
    one = rows_of_one_code()
    found = zip(one[:120], one[7:], itertools.cycle(JOINED))
    return [(f"{a[0]}{by}{b[0]}", a[1], a[2], b[2]) for a, b, by in found if a[2][:3] != b[2][:3]]


def test_each_part_has_its_code_and_conf_is_the_least(runs, tmp_path):
    rows, single = pairs(), [row[:2] for row in rows_of_one_code()]
    texts = [row[:2] for row in rows] + single
    split, whole = (code(runs, tmp_path, texts, "--split-texts", how) for how in ("auto", "none"))
    filled = [[{*filter(all, row.items())} for row in coded[len(rows) :]] for coded in (split, whole)]
    assert filled[0] == filled[1]  # no text of the training is split
    right = [[found(row) == [*codes] for row, (_, _, *codes) in zip(coded, rows)] for coded in (split, whole)]
    assert np.mean(right[0]) > 0.9 and np.mean(right[1]) < 0.5
    first = code(runs, tmp_path, [row[:2] for row in rows], "--k", "1")
    assert [found(row) for row in first] == [found(row)[:1] for row in split[: len(rows)]]
    for row in split[: len(rows)]:
        assert float(row["conf"]) > 0.3 and row["needs_review"] == str(int(float(row["conf"]) < 0.5))


def test_a_model_of_one_code_each_splits_nothing(runs, tmp_path):
    """Its rows say which of several occupations has the code."""
    texts = [row[:2] for row in pairs()[:50]]
    one, none = (code(runs, tmp_path, texts, "--split-texts", how, model="first") for how in ("auto", "none"))
    states = [checkpoint.load(str(runs / name / "best.bin"))["splits"] for name in ("each", "first")]
    assert one == none and states == [True, False]


def test_the_parts_are_one_answer_whatever_is_asked(runs, tmp_path):
    """Processes and batches change nothing; levels, choices and draws are those of the parts."""
    texts = [row[:2] for row in pairs()[:60]]
    more = ["--choices", "4", "--draws", "3", "--level", "2"]
    coded = code(runs, tmp_path, texts, *more, "--processes", "1")
    again = code(runs, tmp_path, texts[::-1], *more, "--processes", "2", "--batch-size", "7")
    plain = code(runs, tmp_path, texts)
    for row, other, alone in zip(coded, reversed(again), plain):
        names = [name for name in row if "prob" not in name and "conf" not in name and "hiscam" not in name]
        assert [row[name] for name in names] == [other[name] for name in names] and found(row) == found(alone)
        assert [row[f"choice_{i}"] for i in range(1, len(found(row)) + 1)] == found(row)
        assert {*row["level_code"].split("&")} == {each[:2] for each in found(row)}
        assert float(row["level_conf"]) >= float(row["conf"])


def test_occ_canine_splits_and_raw_confidence_does_not(runs):
    text, language, *codes = pairs()[0]
    (row,) = OccCANINE(runs / "each").predict([text], lang=[language], get_df=False)
    assert [row["hisco_1"], row["hisco_2"]] == codes
    raw = Coder.load(str(runs / "each"), raw_confidence=True)
    assert len(raw.code([text], [language])[0].codes) < 3 and not len(raw.known_texts)


def test_all_parts_of_a_folder_have_the_columns_that_any_text_needs(runs, tmp_path):
    """More than the training has: a part with four occupations in a text, and one without."""
    by_group = {code[:1]: text for text, language, code, *_ in rows_of_one_code() if language == "da"}
    several = " & ".join(list(by_group.values())[:4])
    (tmp_path / "in").mkdir()
    for i, text in enumerate((several.partition(" & ")[0], several)):
        write_csv(tmp_path / "in" / f"{i}.csv", ["occ1", "lang"], [[text, "da"]])
    how = ["--model", runs / "each", "--input", tmp_path / "in", "--device", "cpu", "--output"]
    run_here(predicting.main, *how, f"{tmp_path}/out/")
    run_here(predicting.main, *how, tmp_path / "whole.csv")
    run_here(predicting.main, "--join", tmp_path / "out", "--output", tmp_path / "joined.csv")
    first, second = ([*read(tmp_path / "out" / f"{i}.csv")[0]] for i in (0, 1))
    assert first == second and read(tmp_path / "joined.csv")[1]["hisco_4"]
    assert [*read(tmp_path / "joined.csv")[1]] == [*read(tmp_path / "whole.csv")[1]]
