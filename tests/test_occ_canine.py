"""The model as an object: predictions in every form, copies, and fine-tuning as finetune.py does it."""

import contextlib
import copy
import json
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import FINETUNE, read, run, write_csv, write_rows
from test_predict import CODES, make_model, model  # noqa: F401  a checkpoint of random weights

import histocc
from histocc import EvalEngine, occ_canine
from histocc.occ_canine import OccCANINE
from histocc.published import models
from histocc.runtime.errors import TrainingError, UserError, as_user_error
from histocc.runtime.signals import Stopped, stop_request
from histocc.text import encode

TEXTS, LANGUAGES = ["smed", " ", "wine merchant and fisher", "smed"], ["da", "en", "en", "da"]
TWO, OF_TWO = ["smed", "wine merchant and fisher"], ["da", "en"]
NAN = float("nan")


@pytest.fixture(scope="module")
def coder(model):  # noqa: F811
    return OccCANINE(name=model, device="cpu", batch_size=2)


@pytest.fixture(autouse=True)
def no_pandas(request, monkeypatch):
    if "frames" not in request.keywords:
        monkeypatch.setitem(sys.modules, "pandas", None)


def test_a_model_knows_its_languages_by_any_spelling(coder, monkeypatch):
    monkeypatch.setattr(coder.coder, "languages", ["sv", "da", "unk"])
    names = ["sv", "SE", "Swedish", "sv-FI", "Danish", "xx", ""]
    assert list(map(coder.coder.known, names)) == ["sv", "sv", "sv", "sv", "da", "unk", "unk"]


def codes_of(row: dict, count: int = 5) -> list:
    return [row[f"hisco_{i}"] for i in range(1, count + 1)]


def test_predictions(coder):
    assert histocc.OccCANINE is OccCANINE and "OccCANINE" in histocc.__all__
    good = coder.predict(TEXTS, lang=LANGUAGES)
    again = coder.predict(TEXTS, LANGUAGES, behavior="fast", prediction_type="greedy", deduplicate=False)
    assert [codes_of(row) for row in good] == [codes_of(row) for row in again]
    assert [row["occ1"] for row in good] == TEXTS and [row["lang"] for row in good] == LANGUAGES
    names = [f"{name}_{i}" for i in range(1, 6) for name in ("hisco", "prob", "desc")]
    assert list(good[0]) == ["occ1", "lang", *names, "conf"]
    assert good[0] == good[3] and set(list(good[1].values())[2:]) == {None}
    assert 0 < good[2]["conf"] < 1 and len(coder.predict("smed", "da", k_pred=2)[0]) == 9

    fast = coder.predict(TEXTS, LANGUAGES, behavior="fast", threshold={"en": 0.0, None: 1.0})
    assert fast[2]["hisco_5"] in CODES and fast[0]["hisco_1"] is None
    assert fast == coder.predict(TEXTS, LANGUAGES, prediction_type="flat", threshold={"EN": 0.0, "da": 1.0})
    best = coder.predict(TEXTS, LANGUAGES, prediction_type="topk", k_pred=7)
    every = coder.predict(TEXTS, LANGUAGES, prediction_type="full", k_pred=7)
    assert [codes_of(row, 7) for row in best] == [codes_of(row, 7) for row in every]
    assert sorted(codes_of(best[0], 7)) == sorted(CODES)
    long = coder.predict(TEXTS, LANGUAGES, prediction_type="greedy-topk", k_pred=3)
    assert [list(row) for row in long] == [["occ1", "lang", "hisco_1", "desc_1", "conf", "top-k-pos"]] * 12
    assert [row["top-k-pos"] for row in long] == [0, 1, 2] * 4
    assert [row["hisco_1"] for row in long[6:9]] == codes_of(best[2], 3)
    assert long[3]["hisco_1"] is long[3]["conf"] is None
    assert [row["conf"] for row in long[:3]] == [best[0][f"prob_{i}"] for i in (1, 2, 3)]
    some = coder.predict(TEXTS, LANGUAGES, prediction_type="full", k_pred=7, threshold=best[0]["prob_3"])
    assert codes_of(some[0], 3) == [*codes_of(best[0], 2), None]


def test_the_order_of_codes_in_the_confidence(coder):
    texts, languages = [*TEXTS, "weaver 1", "x of", "x and"], [*LANGUAGES, "en", "en", "da"]
    in_any, as_written = (coder.predict(texts, languages, order_invariant_conf=way) for way in (True, False))
    assert in_any[1]["conf"] is as_written[1]["conf"] is None and all(row["hisco_2"] for row in in_any[4:])
    for one, other in zip(in_any[2:], as_written[2:]):
        assert codes_of(one) == codes_of(other)
        probs = [other[f"prob_{i}"] for i in range(1, 6) if other[f"prob_{i}"] is not None]
        assert 0 < other["conf"] <= min(probs, default=1.0)
        if len(probs) == len({*codes_of(one)} - {None}) > 1:
            assert one["conf"] > other["conf"]  # all orders, of which this is one


def test_numbers_behind_the_codes(coder):
    ids, mask = map(torch.from_numpy, encode(["smed"], ["da"]))
    with torch.no_grad():
        text = coder.model.encode(ids, mask)[1]
        logits = coder.model.classify(text)[0]
    probs = coder.predict(TEXTS, LANGUAGES, what="probs", behavior="fast")
    assert probs.shape == (4, 7) and np.isnan(probs[1]).all()
    assert probs[0] == pytest.approx(logits.sigmoid().numpy(), rel=1e-3)
    every = coder.predict(["smed"], "da", what="probs")[0]
    ranked = coder.predict(["smed"], "da", prediction_type="full", k_pred=7)[0]
    order = [coder.codes.index(code) for code in codes_of(ranked, 7)]
    assert every[order] == pytest.approx([ranked[f"prob_{i}"] for i in range(1, 8)], rel=1e-4)
    found = coder.predict(TEXTS, LANGUAGES, what="embeddings")[0]
    assert list(found) == ["occ1", *range(64)]
    assert [found[i] for i in range(64)] == pytest.approx(text.encoded[0].tolist(), rel=1e-2, abs=1e-4)
    found = coder.predict(TEXTS, LANGUAGES, what="logits", behavior="fast")[0]
    assert [found[i] for i in range(7)] == pytest.approx(logits.tolist(), rel=1e-3, abs=1e-4)
    with pytest.raises(ValueError, match="linear decoder"):
        coder.predict(TEXTS, LANGUAGES, what="logits")
    for kind in ("greedy", "flat", "full"):
        given = {"prediction_type": kind, "threshold": None if kind == "greedy" else 0.1}
        pred, found = (coder.predict(TEXTS, LANGUAGES, what=what, **given) for what in ("pred", "bin"))
        assert list(found[0]) == [f"hisco_{code}" for code in coder.codes]
        for row, ones in zip(pred, found):
            codes = {*codes_of(row)} & {*coder.codes}
            assert {name for name, value in ones.items() if value} == {f"hisco_{code}" for code in codes}


@pytest.mark.frames
def test_data_frames_have_the_same_columns_and_types_whatever_the_rows_hold(coder):
    pandas = pytest.importorskip("pandas")
    frames = [coder.predict(texts, "da") for texts in (TEXTS, [" "], ["smed"], [])]
    assert len({tuple(zip(frame.columns, map(str, frame.dtypes))) for frame in frames}) == 1
    assert [len(frame) for frame in frames] == [4, 1, 1, 0]
    assert frames[0]["prob_5"].dtype == frames[0]["conf"].dtype == float
    of_text = [frames[0][name].dtype for name in frames[0] if not name.startswith(("prob", "conf"))]
    assert {*of_text} == {pandas.Series(["text"]).dtype}  # Dask and Arrow refuse columns of dtype object
    assert frames[0]["conf"].isna().tolist() == [False, True, False, False]
    assert frames[0]["hisco_1"].isna().tolist() == frames[0]["prob_1"].isna().tolist()
    given = pandas.DataFrame({"occ1": ["smed", None, 7], "lang": ["da", "en", None]})
    found = coder(given["occ1"], given["lang"])
    assert found["occ1"].tolist()[0] == "smed" and found["conf"].isna().tolist() == [False, True, False]
    assert coder.predict(TEXTS, "da", what="embeddings").shape == (4, 65)
    assert coder.predict("smed", what="bin").shape == (1, 7)
    assert isinstance(coder.predict(TEXTS, "da", get_dict=True), list)


def test_what_does_not_fit_is_said(coder, tmp_path):
    for dataset, message in (([{"occ1": "smed"}], "a file or a DataFrame"), (3, "found 3")):
        with pytest.raises(UserError, match=message):
            coder.finetune(dataset)
    with pytest.raises(UserError, match="no checkpoint there"):
        OccCANINE(str(tmp_path))
    weights, key = make_model(memory_mask=False).state_dict(), {code: i for i, code in enumerate(CODES)}
    file = str(tmp_path / "mixer.bin")
    torch.save({"model": weights, "key": key}, file)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2, "num_hash_buckets": 256}')
    assert OccCANINE(file, device="cpu").predict("smed", "da")[0]["conf"] > 0
    with pytest.raises(UserError, match="hisco codes, not codes of occ1950"):
        OccCANINE(file, system="occ1950")
    with pytest.raises(UserError, match="hf=False: the hub is not searched"):
        OccCANINE("OccCANINE_s2s_mix", hf=False)
    with pytest.warns(UserWarning, match="is of type 'mix'"):
        OccCANINE(file, model_type="flat")


def test_the_calls_of_the_published_package(coder, capsys, tmp_path, monkeypatch):
    first = coder(["smed"], lang="da")
    assert first == coder.predict(occ1=["smed"], lang="da", what="pred", threshold=None)
    assert first == coder.predict(["smed"], "da", 5)
    coder.batch_size = 7
    assert coder.batch_size == coder.coder.batch_size == 7
    assert coder.key[0] == CODES[0] and coder.model_type == "mix"
    assert repr(coder).startswith("OccCANINE(name=") and "model_type='mix'" in repr(coder)
    coder.citation(), coder.citation(BibTex=True)
    assert capsys.readouterr().out.count("2402.13604") >= 2
    rows = [(code, f"words of {code}") for code in CODES[:5]]
    words = write_csv(tmp_path / "words.csv", ["system_code", "desc"], rows)
    topk = {"prediction_type": "topk", "k_pred": 7}
    row = OccCANINE(coder.file, device="cpu", descriptions=words).predict("smed", **topk)[0]
    assert list(row)[:5] == ["occ1", "lang", "hisco_1", "prob_1", "desc_1"]
    assert [row[f"desc_{i}"] for i in range(1, 8)] == [dict(rows).get(code) for code in codes_of(row, 7)]
    with_classes = OccCANINE(coder.file, device="cpu", classes=["hisclass", "hiscam"])
    monkeypatch.setitem(occ_canine.hisco_classes()["hiscam"], "22222", "55.31")
    row = with_classes.predict("smed", "da", **topk)[0]
    assert list(row)[2:7] == ["hisco_1", "prob_1", "desc_1", "hisclass_1", "hiscam_1"]
    assert {row[f"hiscam_{i}"] for i in range(1, 8)} == {55.31, None}
    titles = {row[f"hisco_{i}"]: row[f"desc_{i}"] for i in range(1, 8)}
    assert titles["-1"] == "Missing, no title" and titles["22222"] is None
    from_hub = Mock(return_value=str(tmp_path))
    monkeypatch.setattr(occ_canine.formats, "from_hub", from_hub)
    with pytest.raises(UserError, match="no checkpoint there"):
        OccCANINE("OccCANINE_s2s_mix", hf=True, force_download=True)
    from_hub.assert_called_once_with("OccCANINE_s2s_mix", True)


def test_arguments_of_predict(coder):
    for name, values in {
        "k_pred": [1.5, "3", 0, None, NAN],
        "what": [0, "PRED", None],
        "behavior": ["GOOD", 0],
        "prediction_type": ["beam", 0],
        "threshold": [NAN, -1, 2, "0.3", "", {"en": NAN}],
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name}: found .*, expected "):
                coder.predict(TWO, **{name: value})
    assert coder.predict(TWO, k_pred=10**9, deduplicate=np.bool_(True))[0]["hisco_1"]
    assert len(coder.predict(TWO, what=np.int64(1))[0]) == len(coder.predict(TWO, k_pred=1.0)[0]) == 6
    assert coder.predict(TWO, behavior="fast", threshold=np.float32(0.5))[0]["occ1"] == "smed"


def test_texts_and_languages_in_any_form(coder, monkeypatch):
    expected = coder.predict(TWO)
    for texts in (tuple(TWO), (text for text in TWO), np.array(TWO), dict.fromkeys(TWO).keys()):
        assert coder.predict(texts) == expected
    assert coder.predict([]) == []
    numbers = coder.predict([7, 7.0, np.int64(7), None, NAN, ""], "da")
    assert numbers[0]["hisco_1"] == numbers[2]["hisco_1"] == coder.predict("7", "da")[0]["hisco_1"]
    assert [row["conf"] is None for row in numbers] == [False] * 3 + [True] * 3
    for texts in ({"a", "b"}, b"smed", {"occ1": TWO}, object()):
        with pytest.raises(ValueError, match="^occ1: found .*, expected a text, or a list"):
            coder.predict(texts)
    for texts in ([TWO], [b"smed"], [object()], True, [True, True]):  # R's NA is True if it is no text
        with pytest.raises(ValueError, match=r"^occ1: row 0 \(counted from 0\): .* is not a text"):
            coder.predict(texts)
    expected = coder.predict(TWO, [None, "en"])
    for languages in (("unk", "en"), np.array([None, "en"], dtype=object), ["", "en"]):
        assert coder.predict(TWO, languages) == expected
    unknown = [coder.predict(TWO, language) for language in (None, NAN, "", "unk")]
    assert all(found == unknown[0] for found in unknown)
    with monkeypatch.context() as patched:  # trained on rows of one language
        patched.setattr(coder.coder, "language", "da")
        assert coder.predict(TWO) == coder.predict(TWO, "da") != unknown[0] == coder.predict(TWO, "unk")
    for languages in ({"en", "da"}, 3, ["en", b"da"]):
        with pytest.raises(ValueError, match="^lang: "):
            coder.predict(TWO, languages)
    with pytest.raises(ValueError, match="2 texts, but 1 language"):
        coder.predict(TWO, ["da"])


def test_ditto_is_the_text_before(coder):
    texts = ["smed", "do.", "fisker", "ditto"]
    found = coder.predict(texts, "da", ditto=True)
    assert [row["occ1"] for row in found] == texts
    assert [row["conf"] for row in found[1::2]] == [row["conf"] for row in found[::2]]
    assert found[1]["conf"] != coder.predict(texts, "da")[1]["conf"]


@pytest.mark.frames
def test_columns_of_pandas_are_paired_if_their_index_is_one(coder):
    pandas = pytest.importorskip("pandas")
    texts = pandas.Series(TWO, index=[5, 6])
    with pytest.raises(ValueError, match="lang: has another index than occ1; pass"):
        coder.predict(texts, pandas.Series(OF_TWO, index=[6, 5]))
    found = coder.predict(texts, pandas.Series(OF_TWO, index=[5, 6]))
    for languages in (OF_TWO, pandas.Series(OF_TWO, index=[5, 6], dtype="category")):
        pandas.testing.assert_frame_equal(coder.predict(texts, languages), found)
    with pytest.raises(ValueError, match="lang: found DataFrame, expected"):
        coder.predict(texts, pandas.DataFrame({"lang": OF_TWO}))
    assert coder.predict(texts, pandas.NA)["lang"].tolist() == ["unk", "unk"]


@pytest.mark.frames
def test_results_have_the_index_of_a_series(coder):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"occ1": TEXTS}, index=pandas.Index(["a", "b", "c", "a"], name="id"))
    for given in ({}, {"what": "bin"}, {"what": "embeddings"}, {"what": "logits", "behavior": "fast"}):
        pandas.testing.assert_index_equal(coder.predict(table.occ1, **given).index, table.index)
    long = coder.predict(table.occ1[1:3], prediction_type="greedy-topk", k_pred=2)
    assert long.index.tolist() == ["b", "b", "c", "c"] and long["top-k-pos"].tolist() == [0, 1, 0, 1]
    table["hisco_1"] = coder.predict(table.occ1[table.occ1 == "wine merchant and fisher"]).hisco_1
    assert table["hisco_1"].notna().tolist() == [False, False, True, False]
    assert coder.predict(table.occ1[:0]).index.name == "id"
    assert coder.predict(TEXTS).index.tolist() == [0, 1, 2, 3]


def test_arguments_without_effect_are_said(coder):
    flat = {"prediction_type": "flat", "what": "probs"}
    for arguments in ({"behavior": "good"}, {"prediction_type": "topk"}, flat, {"what": "embeddings"}):
        with pytest.warns(UserWarning, match="threshold: has no effect on"):
            coder.predict(TWO, "da", threshold=0.3, **arguments)
    with pytest.warns(UserWarning, match="does not know: 'se' .2.; it knows unk, en, da"):
        coder.predict(TWO, "se")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for arguments in ({"behavior": "fast"}, {"prediction_type": "full"}):
            coder.predict(TWO, "da-DK", threshold=0.3, **arguments)


def test_arguments_of_the_constructor(model):  # noqa: F811
    for name, value in {"batch_size": 0, "device": "gpu", "classes": ["class"]}.items():
        with pytest.raises(ValueError, match=name if name != "device" else "cuda:N"):
            OccCANINE(model, **{"device": "cpu", name: value})
    size = np.int64(10**12)
    found = OccCANINE(Path(model), device=torch.device("cpu"), batch_size=size, target_cols="hisco_1")
    assert found.name == model and len(found.predict(TWO)) == 2
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
        ({"system_code": ["99999"], "desc": ["x"]}, "none of the codes of the model"),
        (tmp_path / "none.csv", "no such file"),
    ):
        with pytest.raises((UserError, ValueError), match=message):
            OccCANINE(model, device="cpu", descriptions=form)


def test_tables_of_the_engines_of_evaluation(coder):
    truth, found = [{"hisco_1": "22222"}, {"hisco_1": None}], [{"hisco_1": "22222"}, {"hisco_1": "33333"}]
    assert EvalEngine(coder, truth, {"hisco_1": ["22222", "33333"]}, "hisco").accuracy() == 0.5
    given = {"model": coder, "ground_truth": truth, "predicitons": found, "pred_col": "hisco"}
    for change, message in (
        ({"predicitons": [{"code": "1"}] * 2}, "predictions: needs columns .* that begin with 'hisco'"),
        ({"predicitons": {"hisco_1": ["a", "b"], "hisco_2": ["a"]}}, "of the same length"),
        ({"predicitons": found[:1]}, "rows of truth: 2, but of predictions: 1"),
    ):
        with pytest.raises(ValueError, match=message):
            EvalEngine(**given | change)


def test_copies_give_the_same_codes(coder):
    coder.predict(TEXTS, prediction_type="topk")
    for other in (pickle.loads(pickle.dumps(coder)), copy.deepcopy(coder)):
        for kind in ("greedy", "flat", "topk"):
            found, expected = (one.predict(TEXTS, LANGUAGES, prediction_type=kind) for one in (other, coder))
            assert found == expected
        assert repr(other) == repr(coder) and other.codes == coder.codes
        assert other.model is other.coder.model is not coder.model
        other.batch_size = 1
        assert coder.batch_size == coder.coder.batch_size != 1 == other.coder.batch_size


@pytest.mark.frames
@pytest.mark.parametrize("package", ["pyarrow", "pandas", "polars"])
def test_columns_of_other_packages_are_texts(coder, package):
    module, expected = pytest.importorskip(package), coder.predict([*TWO, None], [*OF_TWO, None])
    if package == "pyarrow":
        columns = [module.array, lambda cells: module.chunked_array([cells[:1], cells[1:]])]
    elif package == "pandas":
        pyarrow = pytest.importorskip("pyarrow")
        columns = [lambda cells: module.Series(cells, dtype=module.ArrowDtype(pyarrow.string()))]
    else:
        columns = [module.Series]
    for column in columns:
        found = coder.predict(column([*TWO, None]), column([*OF_TWO, None]))
        assert found.equals(expected) and found.dtypes.equals(expected.dtypes)


def test_threads_get_the_answers_of_one_call_each(model, monkeypatch):  # noqa: F811
    """All at once from the first call on; what they share is made by one of them, while the others wait."""
    at_work, seen = [], []

    def fit(*_):
        at_work.append(1)
        time.sleep(0.01)
        seen.append(len(at_work))
        at_work.pop()

    texts, names = [[f"smed {i} {j}" for j in range(2)] for i in range(4)], ("flat", "greedy", "topk")
    alone = OccCANINE(model, device="cpu")
    expected = [[alone.predict(part, "da", prediction_type=name) for name in names] for part in texts]
    monkeypatch.setattr(occ_canine, "fit_ranked", fit)
    shared, start = OccCANINE(model, device="cpu"), threading.Barrier(len(texts))

    def predict(part):
        start.wait()
        return [shared.predict(part, "da", prediction_type=name) for name in names]

    with ThreadPoolExecutor(len(texts)) as pool:
        assert list(pool.map(predict, texts)) == expected
    assert seen == [1] * len(texts) * len(names)


# ---- fine-tuning


@pytest.mark.processes
@pytest.mark.full
def test_finetune_does_what_the_script_does(model, tmp_path, monkeypatch):  # noqa: F811
    data = write_rows(tmp_path / "data.csv", 40)
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    coder = OccCANINE(model, device="cpu")
    before = torch.get_rng_state()
    common = {"target_cols": ["hisco_1", "hisco_2"], "language_col": "lang", "num_epochs": 1}
    common |= {"batch_size": 16, "share_val": 0.3, "learning_rate": 1e-3}
    assert coder.finetune(data, save_path="here", **common) is coder
    assert torch.equal(torch.get_rng_state(), before)
    assert "61110" in coder.codes and coder.file.startswith("here")
    flags = ["--dataset", data, "--save-path", tmp_path / "there", "--formatter", "hisco", "--device", "cpu"]
    for name, value in common.items():
        flags += [f"--{name}", *(value if isinstance(value, list) else [value])]
    run(FINETUNE, *flags, "--initial-checkpoint", f"{model}/last.bin")
    ours, theirs = (torch.load(tmp_path / name / "last.bin", weights_only=True) for name in ("here", "there"))
    assert ours["step"] == theirs["step"] > 1
    assert all(torch.equal(value, theirs["model"][name]) for name, value in ours["model"].items())
    assert coder.predict("farmer no 3", "en")[0]["conf"] is not None
    assert models.load_model(coder.file)[2]["step"] == ours["step"]

    for arguments, message in [
        ({"distributed": True}, "torchrun"),
        ({"save_path": "here", "seed": 1}, "was 42"),
    ]:
        with pytest.raises(UserError, match=message):
            coder.finetune(data, **({"target_cols": ["hisco_1"], "save_path": "other"} | arguments))


def test_a_dry_run_trains_nothing(coder, tmp_path, capsys):
    file, save_path = coder.file, tmp_path / "out"
    given = {"target_cols": ["hisco_1"], "num_epochs": 1, "batch_size": 16, "dry_run": True}
    coder.finetune(write_rows(tmp_path / "data.csv", 40), save_path, **given)
    assert "nothing was trained or saved" in capsys.readouterr().out
    assert coder.file == file and not list(save_path.glob("*.bin"))


def test_arguments_of_finetune(coder, tmp_path):
    data = write_rows(tmp_path / "data.csv", 20)
    wrong = {"save_path": b"x", "input_col": {"occ1": 1}, "target_cols": {"a"}, "num_epochs": ""}
    for name, value in {**wrong, "freeze_encoder": "no", "initial_checkpoint": False}.items():
        with pytest.raises(UserError, match=f"'{name}': "):
            coder.finetune(data, **{"save_path": tmp_path / "out", name: value})
    for name in ("help", "version"):
        with pytest.raises(UserError, match=f"'{name}': there is no such flag"):
            coder.finetune(data, save_path=tmp_path / "out", **{name: True})
    with pytest.raises(UserError, match="'num_epoch': there is no such flag"):
        coder.finetune(data, num_epoch=3)
    for dataset in (None, [1], {"occ1": ["a"]}):
        with pytest.raises(UserError, match="^dataset: "):
            coder.finetune(dataset, save_path=tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["data.csv"]


@pytest.mark.frames
def test_a_column_lang_of_a_frame_is_read_and_what_is_none_is_not_given(coder, tmp_path):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"occ1": TWO, "lang": OF_TWO, "hisco_1": ["61110", "41025"]})
    more = {"target_cols": "hisco_1", "share_val": 0, "initial_checkpoint": None, "device": None}
    of_column = dict.fromkeys(OF_TWO, 1)
    for given, expected in (
        ({}, of_column),
        ({"language": "da"}, {"da": 2}),
        ({"language": "da", "language_col": "lang"}, of_column),
    ):
        folder = tmp_path / f"{len(given)}"
        coder.finetune(table, folder, **given, **more, prepare_only=True)
        assert json.loads((folder / "data_report.json").read_text())["languages"] == expected
        assert (folder / "key.csv").read_text().splitlines()[1].startswith(CODES[0])  # those of the model


@pytest.mark.frames
def test_missing_whole_numbers_of_r(coder, tmp_path, monkeypatch):
    """-2^31 is a missing whole number in a table of R, and whole floats are whole numbers."""
    given, pandas = [], pytest.importorskip("pandas")
    table = pandas.DataFrame({"occ1": TWO, "hisco_1": ["02210", None], "hisco_2": [-(2**31), 7]})
    monkeypatch.setattr(
        OccCANINE, "_train", lambda self, args, _: given.extend([args, read(args.dataset[0])])
    )
    coder.finetune(table, tmp_path / "out", target_cols="hisco_1", num_epochs=2.0)
    assert given[0].num_epochs == 2
    assert [(row["hisco_1"], row["hisco_2"]) for row in given[1]] == [("02210", ""), ("", "7")]


def test_texts_are_repaired_as_in_the_training(coder, monkeypatch):
    broken, whole = ["smÃ¦d", "bogf&oslash;rer"], ["smæd", "bogfører"]
    assert coder(broken, what="probs").tolist() != coder(whole, what="probs").tolist()
    monkeypatch.setattr(coder.coder, "repair_text", True)
    assert coder(broken, what="probs").tolist() == coder(whole, what="probs").tolist()
    assert [row["occ1"] for row in coder(broken)] == broken


def test_out_of_memory_advises_a_smaller_batch_on_any_rank(coder, monkeypatch):
    """The error that one rank raises is the message of all."""
    monkeypatch.setattr(coder.coder, "_are_known", Mock(side_effect=torch.OutOfMemoryError("CUDA")))
    with pytest.raises(TrainingError, match="^out of memory with --batch-size .: choose a smaller one$") as e:
        coder.predict(TEXTS, LANGUAGES)
    assert as_user_error(e.value) is e.value


@pytest.mark.parametrize("how", ["error", "signal", "damaged"])
def test_the_weights_stay_where_finetuning_does_not_end(model, tmp_path, monkeypatch, how):  # noqa: F811
    coder = OccCANINE(model, device="cpu")
    expected, precision = coder.predict(TEXTS, LANGUAGES), torch.get_float32_matmul_precision()
    other, whole = tmp_path / "out", (Path(model) / "last.bin").read_bytes()

    def ends(*_):
        torch.set_float32_matmul_precision("high")
        other.mkdir(exist_ok=True)
        (other / "last.bin").write_bytes(b"half a file" if how == "damaged" else whole)
        if how == "error":
            raise RuntimeError("out of memory")
        if how == "signal":
            stop_request().signal = signal.SIGINT
            raise Stopped

    monkeypatch.setattr(occ_canine.train, "run_training", ends)

    said = pytest.warns(match="stopped by SIGINT") if how == "signal" else contextlib.nullcontext()
    error = {"error": RuntimeError, "signal": KeyboardInterrupt, "damaged": UserError}[how]
    with said, pytest.raises(error):
        coder.finetune(write_rows(tmp_path / "data.csv", 20), other, target_cols=["hisco_1"], share_val=0)
    assert (coder.name, coder.file) == (model, f"{model}/last.bin")
    assert coder.predict(TEXTS, LANGUAGES) == expected
    assert torch.get_float32_matmul_precision() == precision
