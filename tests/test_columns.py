"""What the columns of a table mean; texts in several of them; rows that count as often as a column says."""

import pickle

import numpy as np
import pytest
from helpers import read, run, run_here, write_csv
from preparing import Result, prepare, quiet, settings_for

from histocc.data import prepare as prep
from histocc.data.config import columns_of
from histocc.job.config import finetune_parser, train_mixer_parser
from histocc.predict import __main__ as predict
from histocc.review import __main__ as review
from histocc.text import COLUMN_SEPARATOR, join_columns

UNFIT = "weight is not above 0 and at most 1,000,000, or may be two numbers (1,000)"
SHOPS = {"baker": ("01.1", "01.2"), "butcher": ("01.2", "01.1")}  # of a pie and of a roll


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder: a table whose code follows only from both columns, a model of it, and new rows coded."""
    folder = tmp_path_factory.mktemp("shops")
    wares = [(shop, *ware) for shop, codes in SHOPS.items() for ware in zip(("pie", "roll"), codes)]
    rows = [(f"{ware} {i}", shop, code) for i in range(12) for shop, ware, code in wares]
    write_csv(folder / "data.csv", ("text", "shop", "coicop"), rows)
    columns = ["--input-col", "text", "shop"]
    flags = ["--target-cols", "coicop", "--save-path", folder / "run", "--device", "cpu", "--seed", 3]
    run("finetune.py", "--dataset", folder / "data.csv", *columns, *flags)
    new = [("pie", "butcher"), ("pie", " Baker "), ("pie", "NA"), ("", "baker"), ("roll", "butcher")]
    write_csv(folder / "new.csv", ("shop", "text"), [(shop, text) for text, shop in new])
    files = ["--input", folder / "new.csv", "--output", folder / "coded.csv"]
    run("histocc.predict", "--model", folder / "run", *files, *columns)
    return folder


def test_both_columns_together_decide(model):
    coded = read(model / "coded.csv")
    assert [row["coicop_1"] for row in coded[:2]] == ["01.2", "01.1"] and coded[4]["coicop_1"] == "01.1"
    assert coded[3]["coicop_1"] == "" and coded[2]["coicop_1"] != ""  # there is no text; there is no shop
    given = ["--model", model / "run", "--input", model / "new.csv", "--overwrite", "--device", "cpu"]
    said = run_here(predict.main, *given, "--output", model / "found.csv")
    assert "Note: descriptions are read from text and shop, as in the training" in said
    assert read(model / "found.csv") == coded
    said = run_here(predict.main, *given, "--output", model / "x.csv", "--input-col", "text")
    assert "Note: the model was trained on descriptions in text and shop, not in text" in said
    occ1 = write_csv(model / "occ1.csv", ("occ1", "text"), [("pie", "x")])
    said = run_here(predict.main, *given, "--output", model / "x.csv", "--input", occ1)
    assert "trained on descriptions in text and shop, not in occ1" in said
    alone = write_csv(model / "alone.csv", ("text", "price"), [("pie", "2")])
    said = run_here(predict.main, *given, "--output", model / "x.csv", "--input", alone, code=2)
    assert "has no column 'shop'; it has 'text', 'price'" in said and "occ1" not in said
    report = run("histocc.evaluate", "--model", model / "run", "--data", model / "data.csv", "--share-val", 1)
    assert "column text and shop" in report  # as in training


def test_a_text_is_in_one_part_whatever_its_further_columns(model, tmp_path):
    how = {"kind": "classes", "cols": ["coicop"], "share_val": 0.5, "input_col": ["text", "shop"]}
    data = Result(prep.prepare(settings_for(model / "data.csv", **how), str(tmp_path), quiet))
    sides = [{text.partition(f" {COLUMN_SEPARATOR} ")[0] for text, *_ in x} for x in (data.train, data.val)]
    assert all(sides) and not sides[0] & sides[1]


def test_decisions_are_on_all_columns_of_a_text(model, tmp_path):
    columns = ["--input-col", "text", "shop", "--key", model / "run" / "key.csv"]
    sheet = tmp_path / "sheet.csv"
    run_here(review.main, "make", model / "coded.csv", "--output", sheet, *columns)
    rows = read(sheet)
    assert f"pie {COLUMN_SEPARATOR} butcher" in (row["\ufefftext"] for row in rows)
    for row in rows:
        row["decision"] = "01.1" if row["\ufefftext"].startswith("pie") else "skip"
    write_csv(sheet, rows[0], [row.values() for row in rows])
    more = ["--to", model / "coded.csv", "--output", tmp_path / "final.csv", *columns]
    for _ in range(2):  # the second time all texts are there
        run_here(review.main, "apply", sheet, *more, "--training-data", tmp_path / "new.csv", "--overwrite")
    assert [row["coicop_1"] for row in read(tmp_path / "final.csv")][:3] == ["01.1"] * 3
    added = sorted((row["text"], row["shop"], row["coicop_1"]) for row in read(tmp_path / "new.csv"))
    assert added == [("pie", "", "01.1"), ("pie", "Baker", "01.1"), ("pie", "butcher", "01.1")]


def test_rows_count_as_often_as_their_column_says(tmp_path):
    header = ("occ1", "hisco_1", "n")
    rows = [("smith", "83110", 2), ("farmer", "61110", "3.0"), ("baker", "77610", "1,000")]
    first = prepare(tmp_path, [header, *rows], weight_col="n")
    second = prepare(tmp_path, [header, *[("smith", "83110", 1)] * 2, *[("farmer", "61110", 1)] * 3])
    assert first.train == second.train
    assert first.data.train.times.tolist() == [2, 3] and first.report["rejected"] == {UNFIT: 1}
    assert any("--weight-col n" in line for line in second.report["read"])  # a column that is not read


@pytest.mark.parametrize(
    ("weights", "times", "rejected", "how"),
    [
        (["99.5", "100,0", " 199.0 ", "995"], [1, 1, 2, 10], 0, "99.5, the least,"),
        (["0.5", "1", "2.25", "0,125"], [4, 8, 18, 1], 0, "0.125, the least,"),
        (["5", "10", "1,5", "1,500", "0", "-1", "nan", "inf", "1.000", "x", ""], [3, 7, 1], 8, "1.5, the"),
        (["500000", "1e6", "1000000", "1000001"], [1, 2, 2], 1, "500000, the least,"),  # more than a million
        (["1", "1000000", "3"], [1, 1000000, 3], 0, ""),  # the least one is 1
        (["1.234,5", "1 000", "1\xa0000", "1'000", "1,000.5", "1.000.000"], [1] * 5 + [1000], 0, "the least"),
        (["0.001", "1000", "1.234,5,6", "1.234.5", "1 00"], [1, 1000], 3, "1, by which none is above 1,000,"),
    ],
)
def test_weights_that_are_not_whole_or_great_count_in_proportion(tmp_path, weights, times, rejected, how):
    rows = [(f"text {i}", "61110", weight) for i, weight in enumerate(weights)]
    path = write_csv(tmp_path / "a.csv", ("occ1", "hisco_1", "n"), rows)
    data = prep.PreparedData.open(prep.prepare(settings_for(path, weight_col="n"), str(tmp_path), quiet))
    counts = np.unique(data.train.text_hash, return_counts=True)[1]
    assert np.abs(np.sort(counts) - np.sort(times)).max() <= 1 and len(data.train.times) == len(times)
    assert data.report["rejected"].get(UNFIT, 0) == rejected
    divided = [line for line in data.report["read"] if "weights are divided by" in line]
    assert len(divided) == bool(how) and all(how in line for line in divided)
    held = pickle.loads(pickle.dumps(data.train))  # as a worker of the loader gets it
    assert held.strings(np.arange(2)) == data.train.strings(np.arange(2))


def test_joined_columns():
    texts = join_columns([" a ", "b", "", "NA"], [["x", "", "x", "x"], ["", "y", "", ""]])
    assert texts == ["a ␟ x", "b ␟  ␟ y", "", ""] and join_columns(["a "], []) == ["a "]


# ---- by their names

BY_NAME, GPF = "--formatter hisco --target-cols hisco_1 hisco_2", "--formatter gpf --target-cols"
AUTO = "--formatter auto --target-cols"
BY_NUMBER = "--formatter hisco --target-cols code1 code2"
ANY_CODES = "Note: hisco_1 may hold any codes; --formatter hisco takes them as HISCO"
OCC1950, LANG_COL = "--formatter occ1950 --target-cols OCC1950_1", " --language-col lang"


@pytest.mark.parametrize(
    "header, flags, expected, note",
    [
        ("occ1,lang,hisco_1,hisco_2", "", ("hisco", 2, "unk", "lang"), f"{BY_NAME}{LANG_COL}"),
        ("occ1,lang,hisco_1,hisco_2", "--language da", ("hisco", 2, "da", None), BY_NAME),
        ("occ1,l,hisco_1,hisco_2", "--language-col l", ("hisco", 2, "unk", "l"), BY_NAME),
        ("lang,hisco_1,hisco_2", "--input-col lang", ("hisco", 2, "unk", None), BY_NAME),
        ("occ1,OCC1950_1", "", ("occ1950", 1, "unk", None), OCC1950),
        ("occ1,lang,hisco_1,x", "--target-cols x", ("auto", 1, "unk", None), ""),
        ("occ1,hisco_1,hisco_2", "--formatter auto", ("hisco", 2, "unk", None), BY_NAME),
        ("occ1,hisco_1", "--target-cols hisco_1", ("auto", 1, "unk", None), ANY_CODES),
        ("occ1,x", "--target-cols x --block-size 3", ("gpf", 1, "unk", None), ""),
        ("occ1,hisco_1", "--formatter gpf", ("gpf", 1, "unk", None), f"{GPF} hisco_1"),
        ("occ1,lang,code1,hisco_1", "--key k.csv", ("auto", 1, "unk", "lang"), f"{AUTO} code1{LANG_COL}"),
        ("occ1,hisco_1,hisco_2", "--key hisco", ("hisco", 2, "unk", None), BY_NAME),
        ("occ1,hisco_1,OCC1950_1", "--formatter occ1950", ("occ1950", 1, "unk", None), OCC1950),
        ("occ1,code1,code2,hisco_1", "--key hisco --formatter hisco", ("hisco", 2, "unk", None), BY_NUMBER),
        ("occ1,code1,code2,code1x", "--formatter hisco", ("hisco", 2, "unk", None), BY_NUMBER),
    ],
)
def test_what_the_columns_of_a_file_mean(tmp_path, header, flags, expected, note):
    path = write_csv(tmp_path / "a.csv", header.split(","), [])
    args, problems = finetune_parser().parse_args([f"--dataset={path}", *flags.split()]), []
    asked = dict(vars(args))
    columns, said = columns_of(args, path, problems)
    meant = (columns.formatter, len(columns.target_cols), columns.language, columns.language_col)
    assert meant == expected and problems == [] and vars(args) == asked
    is_whole = note in ("", ANY_CODES)
    assert said == (note if is_whole else f"Columns: {note}, by their names in {path}")


def test_columns_that_tell_no_system_or_two(tmp_path):
    parser = train_mixer_parser()
    for header, words in (
        ("occ1,x", "has none of the columns hisco_1, OCC1950_1; name yours with --target-cols"),
        ("occ1,hisco_1,OCC1950_1", "has columns of two systems, hisco_1 and OCC1950_1: choose one with"),
    ):
        path = write_csv(tmp_path / "a.csv", header.split(","), [])
        args = parser.parse_args(["--train-data", path, "--val-data", path, "--save-dir", str(tmp_path)])
        problems = []
        assert columns_of(args, path, problems, "hisco")[0].target_cols == []
        assert len(problems) == 1 and problems[0].startswith(f"{path}: {words}")
    assert problems[0].endswith("--formatter hisco or --formatter occ1950")
    path = write_csv(tmp_path / "a.csv", ("icem_1", "icem_2"), [])
    columns, _ = columns_of(args, path, [], "gpf", "icem")
    assert (columns.formatter, columns.target_cols) == ("gpf", ["icem_1", "icem_2"])
