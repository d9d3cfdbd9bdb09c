"""The model as an object: predictions in every form, and fine-tuning as finetune.py does it."""

import sys

import numpy as np
import pytest
import torch
from helpers import FINETUNE, run, write_csv, write_rows
from test_predict import CODES, make_model, model  # noqa: F401  a checkpoint of random weights

import finetune
import histocc
from histocc import occ_canine
from histocc.occ_canine import OccCANINE, device_of, finetune_parser
from histocc.published import models
from histocc.runtime.errors import UserError
from histocc.text import encode

TEXTS, LANGUAGES = ["smed", " ", "wine merchant and fisher", "smed"], ["da", "en", "en", "da"]


@pytest.fixture(scope="module")
def coder(model):  # noqa: F811
    return OccCANINE(name=model, device="cpu", batch_size=2)


@pytest.fixture(autouse=True)
def no_pandas(request, monkeypatch):
    if "frames" not in request.keywords:
        monkeypatch.setitem(sys.modules, "pandas", None)


def test_it_is_there_by_its_name():
    assert histocc.OccCANINE is OccCANINE and "OccCANINE" in histocc.__all__


def test_predictions(coder):
    good = coder.predict(TEXTS, lang=LANGUAGES)
    again = coder.predict(TEXTS, LANGUAGES, behavior="fast", prediction_type="greedy", deduplicate=False)
    for row, other in zip(good, again):
        assert all(
            (
                value == pytest.approx(other[name], rel=1e-3)
                if isinstance(value, float)
                else value == other[name]
            )
            for name, value in row.items()
        )
    assert [row["occ1"] for row in good] == TEXTS and [row["lang"] for row in good] == LANGUAGES
    assert list(good[0]) == [
        "occ1",
        "lang",
        *(f"{name}_{i}" for i in range(1, 6) for name in ("hisco", "prob", "desc")),
        "conf",
    ]
    assert good[0] == good[3] and all(
        value is None for name, value in good[1].items() if name not in ("occ1", "lang")
    )
    assert 0 < good[2]["conf"] < 1 and len(coder.predict("smed", "da", k_pred=2)[0]) == 9

    fast = coder.predict(TEXTS, LANGUAGES, behavior="fast", threshold={"en": 0.0, None: 1.0})
    assert fast[2]["hisco_5"] in CODES and fast[0]["hisco_1"] is None
    assert fast == coder.predict(TEXTS, LANGUAGES, prediction_type="flat", threshold={"en": 0.0, "da": 1.0})
    best, every = (
        coder.predict(TEXTS, LANGUAGES, prediction_type=kind, k_pred=7) for kind in ("topk", "full")
    )
    assert [row[f"hisco_{i}"] for row in best for i in range(1, 8)] == [
        row[f"hisco_{i}"] for row in every for i in range(1, 8)
    ]
    assert sorted(best[0][f"hisco_{i}"] for i in range(1, 8)) == sorted(CODES)
    long = coder.predict(TEXTS, LANGUAGES, prediction_type="greedy-topk", k_pred=3)
    assert [list(row) for row in long] == [
        ["occ1", "lang", "hisco_1", "desc_1", "conf", "top-k-pos"]
    ] * 12 and [row["top-k-pos"] for row in long] == [0, 1, 2] * 4
    assert [row["hisco_1"] for row in long[6:9]] == [best[2][f"hisco_{i}"] for i in (1, 2, 3)] and long[3][
        "hisco_1"
    ] is long[3]["conf"] is None
    assert [row["conf"] for row in long[:3]] == [best[0][f"prob_{i}"] for i in (1, 2, 3)]
    some = coder.predict(TEXTS, LANGUAGES, prediction_type="full", k_pred=7, threshold=best[0]["prob_3"])
    assert [some[0][f"hisco_{i}"] for i in (1, 2, 3)] == [best[0]["hisco_1"], best[0]["hisco_2"], None]


def test_the_order_of_codes_in_the_confidence(coder):
    texts, languages = [*TEXTS, "weaver 1", "x of", "x and"], [*LANGUAGES, "en", "en", "da"]
    in_any, as_written = (coder.predict(texts, languages, order_invariant_conf=way) for way in (True, False))
    assert in_any[1]["conf"] is as_written[1]["conf"] is None and all(
        row["hisco_2"] is not None for row in in_any[4:]
    )
    for one, other in zip(in_any[2:], as_written[2:]):
        assert [one[f"hisco_{i}"] for i in range(1, 6)] == [other[f"hisco_{i}"] for i in range(1, 6)]
        probs = [other[f"prob_{i}"] for i in range(1, 6) if other[f"prob_{i}"] is not None]
        assert 0 < other["conf"] <= min(probs, default=1.0)
        if len(probs) == len({one[f"hisco_{i}"] for i in range(1, 6)} - {None}) > 1:
            assert one["conf"] > other["conf"]  # all orders, of which this is one


def test_numbers_behind_the_codes(coder):
    ids, mask = map(torch.from_numpy, encode(["smed"], ["da"]))
    with torch.no_grad():
        pooled = coder.model.encode(ids, mask)[1]
        logits = coder.model.classify(pooled)[0]
    probs = coder.predict(TEXTS, LANGUAGES, what="probs", behavior="fast")
    assert (
        probs.shape == (4, 7)
        and probs[0] == pytest.approx(logits.sigmoid().numpy(), rel=1e-3)
        and np.isnan(probs[1]).all()
    )
    every = coder.predict(["smed"], "da", what="probs")[0]
    ranked = coder.predict(["smed"], "da", prediction_type="full", k_pred=7)[0]
    assert all(
        every[coder.codes.index(ranked[f"hisco_{i}"])] == pytest.approx(ranked[f"prob_{i}"], rel=1e-4)
        for i in range(1, 8)
    )
    found = coder.predict(TEXTS, LANGUAGES, what="embeddings")
    assert list(found[0]) == ["occ1", *range(64)] and [found[0][i] for i in range(64)] == pytest.approx(
        pooled[0].tolist(), rel=1e-2, abs=1e-4
    )
    found = coder.predict(TEXTS, LANGUAGES, what="logits", behavior="fast")
    assert [found[0][i] for i in range(7)] == pytest.approx(logits.tolist(), rel=1e-3, abs=1e-4)
    with pytest.raises(ValueError, match="linear decoder"):
        coder.predict(TEXTS, LANGUAGES, what="logits")
    for kind in ("greedy", "flat", "full"):
        pred, found = (
            coder.predict(
                TEXTS, LANGUAGES, what=what, prediction_type=kind, threshold=None if kind == "greedy" else 0.1
            )
            for what in ("pred", "bin")
        )
        assert list(found[0]) == [f"hisco_{code}" for code in coder.codes]
        for row, ones in zip(pred, found):
            codes = {value for name, value in row.items() if name.startswith("hisco_") and value is not None}
            assert {name for name, value in ones.items() if value} == {
                f"hisco_{code}" for code in codes & set(coder.codes)
            }


@pytest.mark.frames
def test_data_frames_have_the_same_columns_and_types_whatever_the_rows_hold(coder):
    pandas = pytest.importorskip("pandas")
    frames = [coder.predict(texts, "da") for texts in (TEXTS, [" "], ["smed"], [])]
    assert len({tuple(zip(frame.columns, map(str, frame.dtypes))) for frame in frames}) == 1
    assert [len(frame) for frame in frames] == [4, 1, 1, 0] and frames[0]["prob_5"].dtype == frames[0][
        "conf"
    ].dtype == float
    assert frames[0]["conf"].isna().tolist() == [False, True, False, False]
    assert frames[0]["hisco_1"].isna().tolist() == frames[0]["prob_1"].isna().tolist()
    given = pandas.DataFrame({"occ1": ["smed", None, 7], "lang": ["da", "en", None]})
    found = coder(given["occ1"], given["lang"])
    assert found["occ1"].tolist()[0] == "smed" and found["conf"].isna().tolist() == [False, True, False]
    assert coder.predict(TEXTS, "da", what="embeddings").shape == (4, 65) and coder.predict(
        "smed", what="bin"
    ).shape == (1, 7)
    assert isinstance(coder.predict(TEXTS, "da", get_dict=True), list)


def test_what_does_not_fit_is_said(coder, tmp_path):
    with pytest.warns(UserWarning, match="coded as unk: 'se' .2.; it knows unk, en, da"):
        found = coder.predict(["smed", "x"], "se")
    assert found[0]["hisco_1"] == coder.predict("smed")[0]["hisco_1"]
    for arguments, message in [
        ({"lang": ["da"]}, "2 texts, but 1 languages"),
        ({"what": "codes"}, "what: found 'codes', expected one of"),
        ({"behavior": "slow"}, "'slow'"),
        ({"prediction_type": "beam"}, "'beam'"),
    ]:
        with pytest.raises(ValueError, match=message):
            coder.predict(["smed", "x"], **arguments)
    for arguments, message in [
        (({"occ1": ["smed"]},), "of a table give a column"),
        (
            (["smed"], "da", "pred", {"danish": 0.9}),
            "found {'danish': 0.9}, expected .* that the model knows: unk, en, da",
        ),
        ((["smed"], "da", "pred", "0.1"), "threshold: found '0.1', expected a probability"),
    ]:
        with pytest.raises(ValueError, match=message):
            coder.predict(*arguments)
    assert (
        coder.predict("smed", None)[0]["lang"] == coder.predict("smed", float("nan"))[0]["lang"] == "unk"
        and coder.predict(None)[0]["conf"] is None
    )
    for dataset, message in (([{"occ1": "smed"}], "a file or a DataFrame, not list"), (3, "not int")):
        with pytest.raises(UserError, match=message):
            coder.finetune(dataset)
    with pytest.raises(UserError, match="no checkpoint there"):
        OccCANINE(str(tmp_path))
    made = make_model(memory_mask=False)
    torch.save(
        {"model": made.state_dict(), "key": {code: i for i, code in enumerate(CODES)}}, tmp_path / "mixer.bin"
    )
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2, "num_hash_buckets": 256}')
    assert OccCANINE(str(tmp_path / "mixer.bin"), device="cpu").predict("smed", "da")[0]["conf"] > 0
    with pytest.raises(UserError, match="hisco codes, which those of occ1950 are others"):
        OccCANINE(str(tmp_path / "mixer.bin"), system="occ1950")
    with pytest.raises(UserError, match="hf=False leaves the hub out"):
        OccCANINE("OccCANINE_s2s_mix", hf=False)
    with pytest.warns(UserWarning, match="is of type 'mix'"):
        OccCANINE(str(tmp_path / "mixer.bin"), model_type="flat")


def test_texts_that_are_none(coder):
    assert [row["lang"] for row in coder.predict(["smed", "smed"], [None, float("nan")])] == ["unk", "unk"]
    assert (
        coder.predict([None, float("nan"), "smed"], "da")[1]["conf"] is None
        and coder.predict([None, "smed"], "da")[1]["conf"] > 0
    )
    assert coder.predict([7, 7.0, np.int64(7)], "da")[0]["hisco_1"] == coder.predict("7", "da")[0]["hisco_1"]
    with pytest.raises(ValueError, match="row 1 .*: .'smed'. is not a text"):
        coder.predict(["smed", ["smed"]], "da")
    with pytest.raises(ValueError, match="k_pred: found 0, expected a whole number of at least 1"):
        coder.predict("smed", "da", k_pred=0)


def test_the_calls_of_the_published_package(coder, capsys, tmp_path, monkeypatch):
    assert (
        coder(["smed"], lang="da")
        == coder.predict(occ1=["smed"], lang="da", what="pred", threshold=None)
        == coder.predict(["smed"], "da", 5)
    )
    coder.batch_size = 7
    assert (
        coder.batch_size == coder.coder.batch_size == 7
        and coder.key[0] == CODES[0]
        and coder.model_type == "mix"
    )
    with pytest.raises(ValueError, match="batch_size: found 0, expected a whole number"):
        coder.batch_size = 0
    assert repr(coder).startswith("OccCANINE(name=") and "model_type='mix'" in repr(coder)
    coder.citation(), coder.citation(BibTex=True)
    assert capsys.readouterr().out.count("2402.13604") >= 2
    words = write_csv(
        tmp_path / "words.csv", ["system_code", "desc"], [(code, f"words of {code}") for code in CODES[:5]]
    )
    described = OccCANINE(coder.file, device="cpu", descriptions=words)
    row = described.predict("smed", "da", prediction_type="topk", k_pred=7)[0]
    assert list(row)[:5] == ["occ1", "lang", "hisco_1", "prob_1", "desc_1"]
    assert all(
        row[f"desc_{i}"] == (f"words of {row[f'hisco_{i}']}" if row[f"hisco_{i}"] in CODES[:5] else None)
        for i in range(1, 8)
    )
    with_classes = OccCANINE(coder.file, device="cpu", classes=["hisclass", "hiscam"])
    row = with_classes.predict("smed", "da", prediction_type="topk", k_pred=7)[0]
    assert list(row)[2:7] == ["hisco_1", "prob_1", "desc_1", "hisclass_1", "hiscam_1"]
    titles = {row[f"hisco_{i}"]: row[f"desc_{i}"] for i in range(1, 8)}
    assert titles["-1"] == "Missing, no title" and titles["22222"] is None
    with pytest.raises(ValueError, match="classes: found .*, expected some of hisclass"):
        OccCANINE(coder.file, device="cpu", classes=["class"])
    asked = []
    monkeypatch.setattr(
        occ_canine.formats, "from_hub", lambda name, force: asked.append((name, force)) or str(tmp_path)
    )
    with pytest.raises(UserError, match="no checkpoint there"):
        OccCANINE("OccCANINE_s2s_mix", hf=True, force_download=True)
    assert asked == [("OccCANINE_s2s_mix", True)]


def test_devices_by_name(model):  # noqa: F811
    for given in ("cpu", "cpu:0", torch.device("cpu")):
        assert device_of(given).type == "cpu"
    assert device_of(None) == device_of("auto")
    for given in ("gpu", "cuda:", "cuda:x", "mps", "cpu:1", "auto:0", ""):
        with pytest.raises(ValueError, match="'cuda:N'"):
            OccCANINE(model, device=given)
    with pytest.raises(UserError, match="CUDA|GPUs are visible"):
        device_of("cuda:99")


def test_settings_of_torch_come_back(coder, tmp_path, monkeypatch):
    def train(*_, **__):
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.enable_cudnn_sdp(False)
        raise UserError("ends")

    monkeypatch.setattr(occ_canine.train, "train", train)
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(UserError, match="ends"):
        coder.finetune(
            write_rows(tmp_path / "data.csv", 20),
            target_cols=["hisco_1"],
            share_val=0,
            save_path=str(tmp_path / "out"),
        )
    assert (torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()) == before


def test_arguments_of_finetune_are_those_of_the_script():
    def arguments(parser):
        return {
            action.dest: (
                action.option_strings if action.dest != "dataset" else [],
                action.default,
                action.choices,
                action.nargs,
            )
            for action in parser._actions
        }

    assert arguments(finetune_parser()) == arguments(finetune.get_args_parser())


@pytest.mark.processes
@pytest.mark.full
def test_finetune_does_what_the_script_does(model, tmp_path, monkeypatch):  # noqa: F811
    data = write_rows(tmp_path / "data.csv", 40)
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    coder = OccCANINE(model, device="cpu")
    before = torch.get_rng_state()
    common = {
        "target_cols": ["hisco_1", "hisco_2"],
        "language_col": "lang",
        "num_epochs": 1,
        "batch_size": 16,
        "share_val": 0.3,
        "learning_rate": 1e-3,
    }
    assert coder.finetune(data, save_path="here", **common) is coder
    assert (
        torch.equal(torch.get_rng_state(), before)
        and "61110" in coder.codes
        and coder.file.startswith("here")
    )
    run(
        FINETUNE,
        "--dataset",
        data,
        "--save-path",
        tmp_path / "there",
        "--formatter",
        "hisco",
        "--initial-checkpoint",
        f"{model}/last.bin",
        "--device",
        "cpu",
        *(
            part
            for name, value in common.items()
            for part in (f"--{name}", *(value if isinstance(value, list) else [value]))
        ),
    )
    ours, theirs = (torch.load(tmp_path / name / "last.bin", weights_only=True) for name in ("here", "there"))
    assert ours["step"] == theirs["step"] > 1 and all(
        torch.equal(value, theirs["model"][name]) for name, value in ours["model"].items()
    )
    assert coder.predict("farmer no 3", "en")[0]["conf"] is not None
    assert models.load_model(coder.file)[2]["step"] == ours["step"]

    for arguments, message in [
        ({"epochs_of": 3}, "'epochs_of': there is no such flag"),
        ({"target_cols": ["nothing"]}, "has no column 'nothing'"),
        ({"distributed": True}, "torchrun"),
        ({"learning_rate": -1}, "is not a number above 0"),
        ({"save_path": "here", "seed": 1}, "was 42"),
    ]:
        with pytest.raises(UserError, match=message):
            coder.finetune(data, **({"target_cols": ["hisco_1"], "save_path": "other"} | arguments))


def test_a_dry_run_trains_nothing(coder, tmp_path, capsys):
    file, save_path = coder.file, tmp_path / "out"
    coder.finetune(
        write_rows(tmp_path / "data.csv", 40),
        target_cols=["hisco_1"],
        num_epochs=1,
        batch_size=16,
        save_path=save_path,
        dry_run=True,
    )
    assert (
        "nothing was trained or saved" in capsys.readouterr().out
        and coder.file == file
        and not list(save_path.glob("*.bin"))
    )


def test_finetune_needs_a_file(coder, tmp_path):
    with pytest.raises(UserError, match="no such file"):
        coder.finetune(tmp_path / "none.csv", target_cols=["hisco_1"], save_path=str(tmp_path / "out"))
    with pytest.raises(UserError, match="blank|is empty"):
        coder.finetune(
            write_csv(tmp_path / "empty.csv", [], []),
            target_cols=["hisco_1"],
            save_path=str(tmp_path / "out"),
        )
