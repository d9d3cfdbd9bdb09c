"""Baselines: what they answer, what is counted, and what `histocc.evaluate --baseline` says of them."""

import importlib.util
import json
import sys

import numpy as np
import pytest
from helpers import TINY, TRAIN_MIXER, run, run_inside, write_csv

from histocc.data.arrays import PreparedData
from histocc.data.prepare import prepare
from histocc.data.settings import PrepareSettings
from histocc.evaluate import __main__ as evaluate
from histocc.evaluate import baseline
from histocc.evaluate import markdown as report_text
from histocc.formatter import make_formatter

needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed"
)
FARMER, SMITH, TAILOR, SERVANT = "61110", "83110", "79100", "54010"
WORDS = {
    FARMER: ("farmer", "farmhand"),
    SMITH: ("blacksmith", "smith"),
    TAILOR: ("tailor", "tailoress"),
    SERVANT: ("servant", "maidservant"),
}
TOWNS = ("leeds", "york", "hull", "bath", "ripon")
HEADER = ("occ1", "hisco_1", "hisco_2", "lang")
ONE = [
    (f"{word} of {town}", code, "", "en") for code, words in WORDS.items() for word in words for town in TOWNS
]
TWO = [
    (f"{WORDS[a][0]} and {WORDS[b][1]} of {town}", a, b, "en")
    for a, b in ((FARMER, SMITH), (SMITH, TAILOR), (SERVANT, TAILOR), (FARMER, TAILOR))
    for town in TOWNS
]
HELD_OUT = [
    ("farmer in selby", FARMER, "", "en"),
    ("the blacksmith", SMITH, "", "en"),
    ("Tailor of Leeds", TAILOR, "", "en"),
    ("smith of hull", FARMER, "", "en"),
    ("smith of hull", FARMER, "", "en"),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepares rows: (training rows, held-out rows) → PreparedData."""

    def make(train, val=HELD_OUT) -> PreparedData:
        folder = tmp_path_factory.mktemp("baseline")
        columns = ["hisco_1", "hisco_2"]
        settings = PrepareSettings(
            [write_csv(folder / "train.csv", HEADER, train)],
            make_formatter("hisco", columns).to_dict(),
            columns,
            val_files=[write_csv(folder / "val.csv", HEADER, val)],
            language_col="lang",
        )
        return PreparedData.open(prepare(settings, str(folder), lambda line: None))

    return make


def answers(name, data):
    known = baseline.known_rows(data)
    texts = baseline.texts_of(data.val, data.languages if known.languages else None)
    return [set(codes) for codes in baseline.BASELINES[name](known, texts).codes]


def test_of_many_rows_a_sample_is_taken(prepared):
    data = prepared(ONE)
    some, again, others = (baseline.known_rows(data, seed, 11) for seed in (1, 1, 2))
    assert some.rows == 11 and some.total == len(ONE) and set(some.texts) < {row[0] for row in ONE}
    assert some.texts == again.texts and set(some.texts) != set(others.texts)


def test_majority_and_look_up(prepared):
    two, one = ("dyer", SMITH, TAILOR, "en"), ("dyer", FARMER, "", "en")
    asked = [("dyer", SMITH, "", "en"), ("never seen", SMITH, "", "en")]
    data = prepared([*ONE, two, one, one], asked)
    assert answers("majority", data) == [{FARMER}, {FARMER}] == answers("look-up", data)
    assert answers("look-up", prepared([*ONE, two, two, one], asked)) == [{SMITH, TAILOR}, {FARMER}]


@needs_sklearn
def test_nearest_text_and_svm_give_several_codes_where_rows_have_several(prepared):
    asked = [
        ("farmer of leedz", FARMER, "", "en"),
        ("servant and tailoress of selby", SERVANT, TAILOR, "en"),
        ("xyz", FARMER, "", "en"),
    ]
    data = prepared([*ONE, *TWO], asked)
    assert answers("nearest", data)[:2] == [{FARMER}, {SERVANT, TAILOR}]
    found = answers("svm", data)
    assert found[:2] == [{FARMER}, {SERVANT, TAILOR}] and len(found[2]) >= 1


@needs_sklearn
def test_svm_is_that_of_repeated_rows(prepared):
    """Weights against the rows themselves, one-vs-rest by scikit-learn; letters beyond ASCII."""
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.svm import LinearSVC

    rows = [*ONE, *ONE[::2], *ONE[::3], (ONE[1][0], SMITH, "", "en"), ("skrædder 𝕏å", TAILOR, "", "en")]
    texts = [row[0] for row in rows]
    asked = [f"{word}s of {town}e" for word in ("smith", "maid", "tail", "farm") for town in TOWNS]
    tables = [
        TfidfVectorizer(analyzer=kind, ngram_range=size).fit(texts)
        for kind, size in (("char_wb", (2, 5)), ("word", (1, 2)))
    ]
    features = [hstack([table.transform(each) for table in tables]).tocsr() for each in (texts, asked)]
    fitted = LinearSVC(C=1.0, random_state=0).fit(features[0], [row[1] for row in rows])
    expected = fitted.predict(features[1])
    found = answers("svm", prepared(rows, [(text, FARMER, "", "en") for text in asked]))
    assert found == [{code} for code in expected] and len(set(expected)) == 4


@needs_sklearn
def test_one_code_alone_and_texts_without_words(prepared):
    data = prepared([("-", FARMER, "", "en"), ("!", FARMER, "", "en")], [("?", FARMER, "", "en")])
    assert answers("svm", data) == [{FARMER}] and answers("nearest", data) == [{FARMER}]


@needs_sklearn
def test_it_can_be_stopped(prepared):
    class Stop(BaseException):
        pass

    def check():
        raise Stop

    for name in ("svm", "nearest"):
        with pytest.raises(Stop):
            baseline.BASELINES[name](baseline.known_rows(prepared(ONE)), ["farmer"], check)


def test_accuracy_counts_sets_over_rows_and_over_texts():
    sets = [frozenset(codes) for codes in ("a", "ab", "ab", "c", "c", "c")]
    predicted = [frozenset(codes) for codes in ("a", "ba", "a", "d", "c", "d")]
    found = baseline.accuracies(predicted, sets, np.array([1, 2, 3, 9, 9, 9], dtype=np.uint64), 50, 1)
    assert (found["rows"], found["texts"]) == (6, 4)
    assert found["over_rows"][0] == pytest.approx(3 / 6) and found["over_texts"][0] == pytest.approx(
        (1 + 1 + 0 + 1 / 3) / 4
    )
    assert found["over_texts"][1] <= found["over_texts"][0] <= found["over_texts"][2]
    assert found["several"]["rows"] == 2 and found["several"]["over_rows"][0] == pytest.approx(0.5)
    assert (
        baseline.accuracies(predicted[:1], sets[:1], np.array([1], dtype=np.uint64), 50, 1)["several"] is None
    )


# ---- python -m histocc.evaluate --baseline


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with run/, a model of a few steps on rows with one and two codes, and val.csv."""
    folder = tmp_path_factory.mktemp("run")
    val = [
        *HELD_OUT,
        ("farmer and tailoress of selby", FARMER, TAILOR, "en"),
        ("farmer of leeds", FARMER, "", "en"),
    ]
    train, val = (
        write_csv(folder / f"{name}.csv", HEADER, rows)
        for name, rows in (("train", [*ONE, *TWO]), ("val", val))
    )
    files = ["--train-data", train, "--val-data", val, "--save-dir", folder / "run", "--language-col", "lang"]
    run(TRAIN_MIXER, *files, *TINY, "--batch-size", 16, "--max-steps", 2)
    return folder


def flags_of(trained, output):
    files = ["--model", trained / "run", "--data", trained / "val.csv", "--output", output]
    return [*files, "--device", "cpu", "--resamples", 50]


def evaluated(trained, output, *flags):
    return run_inside(evaluate.main, *flags_of(trained, output), *flags)


def expected_in(report):
    svm = report["baseline"]["baselines"]["svm"]
    assert svm["rows"] == report["data"]["rows"] == 7 and svm["texts"] == report["data"]["texts"] == 6
    assert svm["over_rows"][0] == pytest.approx(5 / 7) and svm["over_texts"][0] == pytest.approx(5 / 6)
    assert svm["several"]["rows"] == 1 and svm["several"]["over_rows"][0] == 1
    assert report["baseline"]["rows"] == report["baseline"]["rows_of_training"] == len(ONE) + len(TWO)
    found = report["baseline"]["baselines"]
    assert [found[name]["over_rows"][0] for name in ("look-up", "majority")] == pytest.approx([3 / 7, 4 / 7])


@needs_sklearn
def test_the_report_says_what_the_model_adds(trained, tmp_path):
    code, said = evaluated(trained, tmp_path / "out", "--baseline")
    assert code == 0, said
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    expected_in(report)
    line = report_text.baseline_line(report)
    value = 100 * report["decoders"]["seq2seq"]["by_digits"][-1]["over_texts"]["accuracy"][0]
    assert (
        "s): 83.3% of texts; the model: " in line
        and f"{value:.1f}% by the seq2seq decoder, {83.3 - value:.1f} points" in line
    )
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert (
        line in said
        and f"{line}." in text
        and "## Baseline" in text
        and "3 of whose distinct texts both were trained on" in text
    )
    report["baseline"]["rows"] -= 1  # as after a sample
    assert (
        f"a sample of {len(ONE) + len(TWO) - 1} of the {len(ONE) + len(TWO)} training rows"
        in report_text.markdown(report)
    )
    del report["baseline"]
    assert "## Baseline" not in report_text.markdown(report)


@needs_sklearn
@pytest.mark.processes
@pytest.mark.full
def test_rank_0_fits_and_the_other_waits(trained, tmp_path):
    said = run("histocc.evaluate", *flags_of(trained, tmp_path / "two"), "--baseline", processes=2)
    assert said.count("Baseline (linear SVM") == 1, said
    expected_in(json.loads((tmp_path / "two" / "report.json").read_text(encoding="utf-8")))


@needs_sklearn
def test_rows_that_are_gone_are_said(trained, tmp_path):
    (trained / "run" / "prepared").rename(trained / "moved")
    try:
        code, said = evaluated(trained, tmp_path / "out", "--baseline")
        assert code == 2 and "rows of the training are not in" in said and "--prepare-only" in said
        assert "Traceback" not in said and not (tmp_path / "out").exists()
        assert evaluated(trained, tmp_path / "out")[0] == 0  # without it they are not needed
    finally:
        (trained / "moved").rename(trained / "run" / "prepared")


def test_a_missing_package_is_said_before_anything_is_done(trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for name in [name for name in sys.modules if name.startswith("sklearn.")]:
        monkeypatch.setitem(sys.modules, name, None)
    code, said = evaluated(trained, tmp_path / "out", "--baseline")
    assert code == 2 and "histocc[baseline]" in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()
