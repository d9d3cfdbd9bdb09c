"""Wrong arguments of the calls from Python: one message at the door that names them."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import write_csv
from test_predict import CODES, make_model, model  # noqa: F401  a checkpoint of random weights

from histocc import EvalEngine
from histocc.formatter import BlockyOCC1950Formatter, construct_finetune_formatter
from histocc.occ_canine import OccCANINE
from histocc.runtime.errors import UserError

TEXTS, LANGUAGES = ["smed", "wine merchant and fisher"], ["da", "en"]
NAN = float("nan")


class Lies:
    """Promises more rows than there is memory for."""

    def __len__(self):
        return 10**12

    def __iter__(self):
        return iter(TEXTS)


class Other:
    pass


@pytest.fixture(scope="module")
def coder(model):  # noqa: F811
    return OccCANINE(name=model, device="cpu", batch_size=2)


@pytest.fixture(autouse=True)
def no_pandas(request, monkeypatch):
    if "frames" not in request.keywords:
        monkeypatch.setitem(sys.modules, "pandas", None)


# ---- predict


def test_arguments_of_predict(coder):
    for name, values in {
        "k_pred": [1.5, True, "3", 0, None, NAN],
        "what": [0, "PRED", None],
        "behavior": ["GOOD", 0],
        "prediction_type": ["beam", 0],
        "threshold": [NAN, -1, 2, 10**400, "0.5", True, [0.5], {"xx": 0.5}, {"en": NAN}, {1: 0.5}],
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name}: found .*, expected ") as raised:
                coder.predict(TEXTS, **{name: value})
            assert len(str(raised.value).splitlines()) == 1 and len(str(raised.value)) < 400
    assert coder.predict(TEXTS, k_pred=10**9, deduplicate=np.bool_(True))[0]["hisco_1"]
    assert len(coder.predict(TEXTS, what=np.int64(1))[0]) == 6
    assert coder.predict(TEXTS, behavior="fast", threshold=np.float32(0.5))[0]["occ1"] == "smed"


def test_texts_and_languages_in_any_form(coder):
    expected = coder.predict(TEXTS)
    for texts in (tuple(TEXTS), (text for text in TEXTS), np.array(TEXTS), dict.fromkeys(TEXTS).keys()):
        assert coder.predict(texts) == expected
    assert coder.predict([]) == []
    numbers = coder.predict([7, 7.0, np.int64(7), None, NAN, ""], "da")
    assert numbers[0]["hisco_1"] == numbers[2]["hisco_1"] == coder.predict("7", "da")[0]["hisco_1"]
    assert [row["conf"] is None for row in numbers] == [False] * 3 + [True] * 3
    for texts in ({"a", "b"}, b"smed", np.array([TEXTS]), {"occ1": TEXTS}, object(), str, True):
        with pytest.raises(ValueError, match="^occ1: found .*, expected a text, or a list"):
            coder.predict(texts)
    for texts in ([TEXTS], [b"smed"], [True], [object()]):
        with pytest.raises(ValueError, match=r"^occ1: row 0 \(counted from 0\): .* is not a text"):
            coder.predict(texts)
    expected = coder.predict(TEXTS, [None, "en"])
    for languages in (("unk", "en"), np.array([None, "en"], dtype=object), ["", "en"]):
        assert coder.predict(TEXTS, languages) == expected
    unknown = [coder.predict(TEXTS, language) for language in (None, NAN, "", "unk")]
    assert all(found == unknown[0] for found in unknown)
    for languages in ({"en", "da"}, {"en": 1, "da": 2}, 3, [3, 4], ["en", b"da"]):
        with pytest.raises(ValueError, match="^lang: "):
            coder.predict(TEXTS, languages)
    with pytest.raises(ValueError, match="2 texts, but 1 languages"):
        coder.predict(TEXTS, ["da"])


def test_ditto_is_the_text_before(coder):
    texts = ["smed", "do.", "fisker", "ditto"]
    found = coder.predict(texts, "da", ditto=True)
    assert [row["occ1"] for row in found] == texts
    assert [row["conf"] for row in found[1::2]] == [row["conf"] for row in found[::2]]
    assert found[1]["conf"] != coder.predict(texts, "da")[1]["conf"]


@pytest.mark.frames
def test_columns_of_pandas_are_paired_by_position(coder):
    pandas = pytest.importorskip("pandas")
    texts = pandas.Series(TEXTS, index=[5, 6])
    found = coder.predict(texts, pandas.Series(LANGUAGES, index=[6, 5]))
    for languages in (LANGUAGES, pandas.Series(LANGUAGES, index=[5, 6], dtype="category")):
        pandas.testing.assert_frame_equal(coder.predict(texts, languages), found)
    with pytest.raises(ValueError, match="lang: found DataFrame, expected"):
        coder.predict(texts, pandas.DataFrame({"lang": LANGUAGES}))
    assert coder.predict(texts, pandas.NA)["lang"].tolist() == ["unk", "unk"]


def test_arguments_without_effect_are_said(coder):
    flat = {"prediction_type": "flat", "what": "probs"}
    for arguments in ({"behavior": "good"}, {"prediction_type": "topk"}, flat, {"what": "embeddings"}):
        with pytest.warns(UserWarning, match="threshold: has no effect on"):
            coder.predict(TEXTS, "da", threshold=0.3, **arguments)
    with pytest.warns(UserWarning, match="behavior 'fast' has no effect: prediction_type 'full'"):
        coder.predict(TEXTS, "da", behavior="fast", prediction_type="full")
    with pytest.warns(UserWarning, match="coded as unk: 'se' .2.; it knows unk, en, da"):
        coder.predict(TEXTS, "se")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for arguments in ({"behavior": "fast"}, {"prediction_type": "full"}):
            coder.predict(TEXTS, "da", threshold=0.3, **arguments)
        assert coder.predict(TEXTS, "da", threshold={}) == coder.predict(TEXTS, "da")


# ---- the constructor


def test_arguments_of_the_constructor(model):  # noqa: F811
    for name, value in {
        "batch_size": 0,
        "model_type": "mixer",
        "device": "gpu",
        "classes": ["class"],
    }.items():
        with pytest.raises(ValueError, match=name if name != "device" else "cuda:N"):
            OccCANINE(model, **{"device": "cpu", name: value})
    device, size = torch.device("cpu"), np.int64(10**12)
    found = OccCANINE(Path(model), device=device, batch_size=size, target_cols="hisco_1")
    assert found.name == model and len(found.predict(TEXTS)) == 2
    with pytest.raises(ValueError, match="batch_size: found nan"):
        found.batch_size = NAN
    assert found.batch_size == 10**12


@pytest.mark.frames
def test_descriptions_in_any_form(model, tmp_path):  # noqa: F811
    pandas = pytest.importorskip("pandas")
    pairs = [(CODES[1], "one"), (CODES[2], None), (None, "two"), (CODES[1], "again")]
    rows = [{"system_code": code, "desc": desc} for code, desc in pairs]
    forms = [
        rows,
        {name: [row[name] for row in rows] for name in rows[0]},
        Path(write_csv(tmp_path / "words.csv", ["system_code", "desc"], [pairs[0], pairs[3]])),
        pandas.DataFrame(rows),
        pandas.DataFrame({"system_code": [float(CODES[1]), NAN], "desc": ["one", "two"]}),
    ]
    for form in forms:
        assert OccCANINE(model, device="cpu", descriptions=form).key_desc == {CODES[1]: "one"}
    for form, message in (
        ({"code": [1]}, "descriptions: has no column 'system_code'; it has 'code'"),
        ([], "descriptions: has no column 'system_code'"),
        ({"system_code": ["99999"], "desc": ["x"]}, "none of the 7 codes"),
        (tmp_path / "none.csv", "no such file"),
    ):
        with pytest.raises((UserError, ValueError), match=message):
            OccCANINE(model, device="cpu", descriptions=form)


# ---- the other calls


def test_tables_of_the_engines_of_evaluation(coder):
    truth, found = [{"hisco_1": "22222"}, {"hisco_1": None}], [{"hisco_1": "22222"}, {"hisco_1": "33333"}]
    assert EvalEngine(coder, truth, {"hisco_1": ["22222", "33333"]}, "hisco").accuracy() == 0.5
    given = {"model": coder, "ground_truth": truth, "predicitons": found, "pred_col": "hisco"}
    for change, message in (
        ({"predicitons": [{"hisco_1": "1"}, {"x": 1}]}, "predictions: row 1 .* has no 'hisco_1'"),
        ({"predicitons": {"hisco_1": 3}}, "no column of cells"),
        ({"predicitons": [{"code": "1"}] * 2}, "predictions: needs columns .* that begin with 'hisco'"),
        ({"predicitons": {"hisco_1": ["a", "b"], "hisco_2": ["a"]}}, "of the same length"),
        ({"predicitons": found[:1]}, "2 rows of truth, but 1 of predictions"),
    ):
        with pytest.raises(ValueError, match=message):
            EvalEngine(**given | change)


@pytest.mark.frames
def test_a_column_that_is_there_twice(coder):
    pandas = pytest.importorskip("pandas")
    truth = pandas.DataFrame({"hisco_1": ["22222"]})
    with pytest.raises(ValueError, match="ground truth: has more than one column 'hisco_1'"):
        EvalEngine(coder, pandas.concat([truth, truth], axis=1), truth, "hisco")
    assert EvalEngine(coder, truth, truth, "hisco").f1() == 1.0


def test_formatters_by_their_published_names(coder):
    for given in (0, 3):
        with pytest.raises(ValueError, match="takes 1 to 2 target columns, not"):
            BlockyOCC1950Formatter(given)
    assert construct_finetune_formatter(3, "code_1").target_cols == ["code_1"]
    with pytest.raises(ValueError, match="at least one target column"):
        construct_finetune_formatter(3, [])
