"""`python -m histocc.evaluate --baseline`: what the baselines answer, and what the report says of them."""

import importlib.util
import json
import sys

import pytest
from helpers import TINY, TRAIN_MIXER, run, run_inside, write_csv

from histocc.data.arrays import PreparedData
from histocc.data.config import PrepareSettings
from histocc.data.prepare import prepare
from histocc.evaluate import __main__ as evaluate
from histocc.evaluate import baseline
from histocc.formatter import make_formatter

needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed"
)
FARMER, SMITH, TAILOR = "61110", "83110", "79100"
WORDS = {FARMER: ("farmer", "farmhand"), SMITH: ("blacksmith", "smith"), TAILOR: ("tailor", "tailoress")}
TOWNS = ("leeds", "york", "hull", "bath", "ripon")
HEADER = ("occ1", "hisco_1", "hisco_2", "lang")
ONE = [
    (f"{word} of {town}", code, "", "en") for code, words in WORDS.items() for word in words for town in TOWNS
]
TWO = [
    (f"{WORDS[a][0]} and {WORDS[b][1]} of {town}", a, b, "en")
    for a, b in ((FARMER, SMITH), (SMITH, TAILOR), (FARMER, TAILOR))
    for town in TOWNS
]
HELD_OUT = [
    ("farmer in selby", FARMER, "", "en"),
    ("the blacksmith", SMITH, "", "en"),
    ("Tailor of Leeds", TAILOR, "", "en"),
    ("smith of hull", FARMER, "", "en"),
    ("smith of hull", FARMER, "", "en"),
    ("farmer and tailoress of selby", FARMER, TAILOR, "en"),
    ("farmer of leeds", FARMER, "", "en"),
]


def known(folder, rows, **more):
    """`baseline.known_rows` of training rows."""
    settings = PrepareSettings(
        [write_csv(folder / "train.csv", HEADER, rows)],
        make_formatter("hisco", ["hisco_1", "hisco_2"]).to_dict(),
        ["hisco_1", "hisco_2"],
        val_files=[write_csv(folder / "val.csv", HEADER, HELD_OUT)],
        language_col="lang",
    )
    return baseline.known_rows(PreparedData.open(prepare(settings, str(folder), lambda line: None)), **more)


def test_look_up_and_majority(tmp_path):
    two, one = ("dyer", SMITH, TAILOR, "en"), ("dyer", FARMER, "", "en")
    rows = known(tmp_path, [*ONE, *ONE[:10], two, two, one])
    assert baseline.look_up(rows, ["Dyer ", "never seen"]) == [{SMITH, TAILOR}, {FARMER}]
    assert baseline.look_up(rows, ["Dyer ", "never seen"], False) == [{FARMER}, {FARMER}]
    some, again, others = (known(tmp_path, ONE, seed=seed, most=11) for seed in (1, 1, 2))  # a sample
    assert sum(some.times) == 11 and some.total == len(ONE)
    assert some.texts == again.texts and set(some.texts) != set(others.texts)


@needs_sklearn
def test_svm_is_that_of_repeated_rows(tmp_path):
    """Weights against the rows themselves, one-vs-rest by scikit-learn; letters beyond ASCII; one code alone;
    several codes where rows have several.
    """
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.svm import LinearSVC

    rows = [*ONE, *ONE[::2], *ONE[::3], (ONE[1][0], SMITH, "", "en"), ("skrædder 𝕏å", TAILOR, "", "en")]
    asked = [f"{word}s of {town}e" for word in ("smith", "maid", "tail", "farm") for town in TOWNS]
    tables = [
        TfidfVectorizer(analyzer=kind, ngram_range=size).fit([row[0] for row in rows])
        for kind, size in (("char_wb", (2, 5)), ("word", (1, 2)))
    ]
    features = [hstack([t.transform(each) for t in tables]) for each in ([row[0] for row in rows], asked)]
    expected = LinearSVC(C=1.0, random_state=0).fit(features[0], [row[1] for row in rows])
    expected = expected.predict(features[1])
    assert baseline.svm(known(tmp_path, rows), asked)[0] == [{code} for code in expected]
    assert baseline.svm(known(tmp_path, [("-", FARMER, "", "en")]), ["?"])[0] == [{FARMER}]
    several = baseline.svm(known(tmp_path, [*ONE, *TWO]), ["farmer of leedz", "smith and tailoress of selby"])
    assert several[0] == [{FARMER}, {SMITH, TAILOR}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with run/, a model of a few steps on rows with one and two codes, and val.csv."""
    folder = tmp_path_factory.mktemp("run")
    train = write_csv(folder / "train.csv", HEADER, [*ONE, *TWO])
    val = write_csv(folder / "val.csv", HEADER, HELD_OUT)
    files = ["--train-data", train, "--val-data", val, "--save-dir", folder / "run", "--language-col", "lang"]
    run(TRAIN_MIXER, *files, *TINY, "--batch-size", 16, "--max-steps", 2)
    return folder


def evaluated(trained, output):
    files = ["--model", trained / "run", "--data", trained / "val.csv", "--output", output]
    return run_inside(evaluate.main, *files, "--device", "cpu", "--resamples", 50, "--baseline")


@needs_sklearn
def test_the_report_says_what_the_model_adds(trained, tmp_path):
    code, said = evaluated(trained, tmp_path / "out")
    assert code == 0, said
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    found = report["baseline"]["baselines"]
    svm = found["svm"]
    assert (svm["rows"], svm["texts"], svm["several"]["rows"]) == (7, 6, 1)
    assert svm["over_rows"][0] == pytest.approx(5 / 7) and svm["over_texts"][0] == pytest.approx(5 / 6)
    assert [found[name]["over_rows"][0] for name in ("look-up", "majority")] == pytest.approx([3 / 7, 4 / 7])
    assert report["baseline"]["rows"] == report["baseline"]["rows_of_training"] == len(ONE) + len(TWO)
    value = 100 * report["decoders"]["seq2seq"]["by_digits"][-1]["over_texts"]["accuracy"][0]
    line = f"83.3% of texts; the model: {value:.1f}% by the seq2seq decoder, {83.3 - value:.1f} points"
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert line in said and line in text and "## Baseline" in text
    assert "3 of whose distinct texts both were trained on" in text


def test_what_is_not_there_is_said_before_anything_is_done(trained, tmp_path, monkeypatch):
    (trained / "run" / "prepared").rename(trained / "moved")
    try:
        if importlib.util.find_spec("sklearn"):
            code, said = evaluated(trained, tmp_path / "out")
            assert code == 2 and "rows of the training are not in" in said and "--prepare-only" in said
    finally:
        (trained / "moved").rename(trained / "run" / "prepared")
    for name in ["sklearn", *(name for name in sys.modules if name.startswith("sklearn."))]:
        monkeypatch.setitem(sys.modules, name, None)
    code, said = evaluated(trained, tmp_path / "out")
    assert code == 2 and "histocc[baseline]" in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()
