"""The estimator with the conventions of scikit-learn: what it learns, takes, refuses and saves."""

import os
import pickle
import sys

import numpy as np
import pytest
from helpers import TITLES, read, run_here, write_csv
from test_errors import in_child

import finetune
from histocc import OccupationClassifier
from histocc.predict import __main__ as predicting

pytest.importorskip("sklearn")

from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import InputTags
from sklearn.utils.estimator_checks import parametrize_with_checks

X = [f"{title} {place}" for place in ("of Leeds", "in town", "and son", "retired") for title, _ in TITLES]
Y = [code for _ in range(4) for _, code in TITLES]
NEW = [f"the {title}" for title, _ in TITLES]


@pytest.fixture(scope="module")
def model():
    return OccupationClassifier(prior="none", language="en").fit(X, Y)


def test_it_learns_and_answers_as_finetune_and_predict_do(model, tmp_path):
    rows = write_csv(tmp_path / "rows.csv", ("occ1", "lang", "code_1"), zip(X, ["en"] * len(X), Y))
    flags = ["--target-cols", "code_1", "--language", "en", "--model-size", "ngrams", "--prior", "none"]
    run_here(finetune.main, "--dataset", rows, "--save-path", tmp_path / "run", *flags)
    new = write_csv(tmp_path / "new.csv", ("occ1",), [[text] for text in [*NEW, *X]])
    model.save(tmp_path / "saved")
    coded = []
    for folder in ("run", "saved"):
        out = tmp_path / f"{folder}.csv"
        run_here(predicting.main, "--model", tmp_path / folder, "--input", new, "--output", out)
        (codes,) = (name for name in read(out)[0] if name.endswith("_1") and "prob" not in name)
        coded.append([(row[codes], row["conf"]) for row in read(out)])
    assert coded[0] == coded[1]
    assert model.predict([*NEW, *X]).tolist() == [code for code, _ in coded[0]]
    assert {*os.listdir(tmp_path / "run")} == {*os.listdir(tmp_path / "saved")}
    with pytest.raises(ValueError, match="is not empty"):
        model.save(tmp_path / "run")


def test_single_labels_are_those_of_the_user_and_probabilities_agree(model):
    probs = model.predict_proba(NEW)
    assert model.classes_.tolist() == sorted({*Y}) and probs.shape == (len(NEW), 8)
    assert probs.sum(axis=1) == pytest.approx(np.ones(len(NEW)))
    assert (model.classes_[probs.argmax(axis=1)] == model.predict(NEW)).all()
    assert model.score(X, Y) == 1 == accuracy_score(Y, model.predict(X))
    assert model.score(["farmer", "weaver"], ["61110", "0"]) == 0.5
    for kind in (int, float, bool):
        labels = np.array([code.startswith("7") if kind is bool else int(code) for code in Y]).astype(kind)
        found = clone(model).fit(np.array(X), labels)
        assert found.classes_.dtype == labels.dtype and accuracy_score(labels, found.predict(X)) == 1
    # nothing is known of these: the label that most rows have
    most = clone(model).fit([*X, "old weaver"], [*Y, "75400"])
    assert most.predict(["", "ξψ"]).tolist() == ["75400"] * 2
    assert most.predict_proba([""])[0] == pytest.approx([(4 + (x == "75400")) / 33 for x in most.classes_])


def test_numbers_are_hisco_codes_with_lost_zeros_if_asked():
    labels = [int(code) if code != "61110" else 2210 for code in Y]
    found = OccupationClassifier("none", formatter="hisco").fit(X, labels)
    assert found.score(X, labels) == 1 and 2210 in found.classes_ and "02210" in found._coder.codes


def test_rows_may_have_several_labels():
    texts = [f"{x} and {TITLES[i % 8 - 1][0]}" if i % 2 else x for i, x in enumerate(X)]
    lists = [[Y[i], Y[i % 8 - 1]] if i % 2 else [Y[i]] for i in range(len(X))]
    model = OccupationClassifier("none").fit(texts, lists)
    found = model.predict(texts)
    assert found.shape == (32,) and [{*row} for row in found] == [{*row} for row in lists]
    assert model.score(texts, lists) == 1 > model.score(texts, Y) > 0.4
    table = np.array([[*row, ""][:2] for row in lists])
    assert clone(model).fit(texts, table).predict(NEW).tolist() == model.predict(NEW).tolist()
    assert 0 <= cross_val_score(model, np.array(texts), table, cv=2).mean() <= 1
    assert len(cross_val_score(model, texts, lists, cv=KFold(2))) == 2


def test_texts_may_hold_any_characters():
    odd = ['væver; "linned"', "a,b\tc", "line\r\nline", "smith|tailor", "do."]
    model = OccupationClassifier("none").fit([*odd, *X], ["1", "2", "3", "4", "5", *Y])
    assert model.predict(odd).tolist() == ["1", "2", "3", "4", "5"]
    assert OccupationClassifier("none").fit(odd, odd).predict(odd).tolist() == odd


def test_tables_have_columns_of_texts_and_one_of_languages():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"shop": ["a", "b"] * 16, "ware": X, "lang": ["en", "da"] * 16})
    labels = pandas.Series([f"{code}{'ab'[i % 2]}" for i, code in enumerate(Y)], index=range(100, 132))
    model = OccupationClassifier("none", language_col="lang").fit(table, labels)
    assert model.predict(table[["lang", "ware", "shop"]]).tolist() == labels.tolist()
    assert model._coder.language_col == "lang" and model._coder.input_cols == ["shop", "ware"]
    with pytest.raises(ValueError, match="X has no column 'shop'"):
        model.predict(table[["lang", "ware"]])


FEW, NONE = "no more than one class", "row 2 of y has no label"
BAD = [
    ("rows of y: 2, but of X: 3", ["a", "b", "c"], ["1", "2"]),
    (FEW, [], []),
    (FEW, ["a", "b"], ["1", "1"]),
    (NONE, ["a", "b", "c"], ["1", "2", None]),
    (NONE, ["a", "b", "c"], ["1", "2", "NA"]),
    (NONE, ["a", "b", "c"], [1.0, 2.0, float("nan")]),
    (NONE, ["a", "b", "c"], [["1"], ["2"], []]),
    ("rows of y: 1, but of X: 2", ["a", "b"], None),
    ("is not a text", np.zeros((4, 2)), ["1", "2", "1", "2"]),
]


@pytest.mark.parametrize(("said", "texts", "labels"), BAD)
def test_bad_input_is_refused(said, texts, labels):
    with pytest.raises(ValueError, match=said):
        OccupationClassifier("none").fit(texts, labels)


def test_scikit_learn_clones_searches_pickles_and_runs_it_in_parallel(model):
    estimator = clone(model)
    with pytest.raises(NotFittedError):
        estimator.predict(NEW)
    assert is_classifier(model) and estimator.get_params() == model.get_params()
    with pytest.raises(ValueError, match="'c' is not a parameter"):
        estimator.set_params(c=1)
    scores = cross_val_score(estimator, X, Y, cv=2)
    assert scores.mean() > 0.9
    lower = make_pipeline(FunctionTransformer(lambda texts: [text.lower() for text in texts]), estimator)
    search = GridSearchCV(lower, {"occupationclassifier__language": ["en", "unk"]}, cv=2).fit(X, Y)
    assert search.predict(NEW).tolist() == [code for _, code in TITLES]
    again = pickle.loads(pickle.dumps(model))
    assert (again.predict_proba(NEW) == model.predict_proba(NEW)).all()
    assert (clone(model).fit(X, Y).predict_proba(NEW) == model.predict_proba(NEW)).all()


@pytest.mark.parametrize("kind", ["threading", pytest.param("loky", marks=pytest.mark.full)])
def test_it_learns_the_same_in_parallel(model, kind):
    joblib = pytest.importorskip("joblib")
    with joblib.parallel_backend(kind, n_jobs=2):
        scores = cross_val_score(model, X, Y, cv=2)
    assert scores.tolist() == cross_val_score(model, X, Y, cv=2).tolist()


def test_a_prior_adds_its_codes(model, tmp_path):
    model.save(tmp_path / "prior")
    rows = [(x, y) for x, y in zip(X, Y) if y != "79100"]
    found = OccupationClassifier(str(tmp_path / "prior")).fit(*zip(*rows))
    assert found.classes_.tolist() == model.classes_.tolist()
    assert found.predict(["the tailor"]).tolist() == ["79100"]


def test_it_works_without_scikit_learn():
    def work():
        for name in [name for name in sys.modules if name.partition(".")[0] in ("histocc", "sklearn")]:
            del sys.modules[name]
        sys.modules["sklearn"] = None
        from histocc import OccupationClassifier

        model = OccupationClassifier("none").fit(X, Y)
        return model.get_params()["prior"], *model.predict(["farmer"])

    assert in_child(work) == ("none", "61110")


# ---- the checks of scikit-learn


class OfNumbers(OccupationClassifier):
    """The estimator for the tables of numbers of these checks: each number is a word."""

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags = InputTags()  # tables of numbers
        return tags

    def _words(self, X):
        rows = ((f"{'abcdefghij'[j % 10]}{x:.1f}" for j, x in enumerate(row)) for row in np.asarray(X))
        return list(map(" ".join, rows))

    def fit(self, X, y):
        return super().fit(self._words(X), y)

    def _coded(self, X, choices=False):
        return super()._coded(self._words(X), choices)


REASONS = {  # for checks that texts and labels of any kind do not meet
    "columns have names, no number": "n_features_in_after_fitting n_features_in",
    "all numbers and cells are words here": "complex_data dtype_object estimators_nan_inf",
    "a row of no words is an empty text": "estimators_empty_data_messages",
    "texts are in no sparse matrix": "estimator_sparse_tag estimator_sparse_array estimator_sparse_matrix",
    "a text may have more words than those of the training": "classifiers_train",
    "0.5 is also a label": "classifiers_regression_target",
    "a table is several labels for each row": "supervised_y_2d",
    "the words of these tests are made from tables": "fit1d fit2d_predict1d",
    "its message is our own": "requires_y_none",
}
OTHERS = {f"check_{name}": reason for reason, names in REASONS.items() for name in names.split()}


@pytest.mark.full
@parametrize_with_checks([OfNumbers("none")], expected_failed_checks=lambda _: OTHERS)
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)
