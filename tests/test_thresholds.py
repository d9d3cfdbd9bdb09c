"""Which outputs of the linear decoder count: published thresholds, fitted ones, the usual one, and those that
are given.
"""

import json

import pytest
import torch
from helpers import run_inside, words, write_csv
from test_evaluate import VALIDATION, trained  # noqa: F401  a run whose linear decoder knows some rows
from test_predict import read

from histocc.evaluate import __main__ as evaluate
from histocc.formatter import BlockyFormatter, hisco_key
from histocc.model.confidence import PUBLISHED, Thresholds
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.predict import __main__ as predict
from histocc.predict.coder import Coder

FITTED = {"default": 0.3, "by_language": {"da": 0.2}, "source": "fitted"}


def test_what_a_checkpoint_holds_and_what_is_given():
    assert Thresholds.of({}).least("da") == 0.5 and "the usual one" in str(Thresholds.of({}))
    fitted = Thresholds.of({"thresholds": FITTED})
    assert (fitted.least("da"), fitted.least("en"), str(fitted)) == (0.2, 0.3, "da 0.2, others 0.3 (fitted)")
    assert fitted.with_given(None) is fitted and fitted.with_given(0.7).least("da") == 0.7
    partly = fitted.with_given({"en": 0.9})
    assert [partly.least(language) for language in ("da", "en", "fr")] == [0.2, 0.9, 0.3]
    assert [fitted.with_given({"en": 0.9, None: 0.1}).least(language) for language in ("da", "en")] == [
        0.1,
        0.9,
    ]
    always = Thresholds.of({"thresholds": {**FITTED, "at_least_one": True}})
    assert (
        not fitted.at_least_one
        and always.at_least_one
        and always.with_given(0.7).at_least_one
        and always.with_given({"en": 0.9}).at_least_one
    )
    assert str(always) == f"{fitted}, and in any case the most probable code"
    published = Thresholds.of({"thresholds": PUBLISHED})
    assert [published.least(language) for language in ("unk", "da", "no", "is", "xx")] == [
        0.31,
        0.24,
        0.34,
        0.17,
        0.31,
    ]
    for wrong in (
        {},
        {"default": 0.5},
        {"default": 2.0, "by_language": {}, "source": "x"},
        {"default": 0.5, "by_language": {"da": "x"}, "source": "x"},
        [0.5],
    ):
        with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
            Thresholds.of({"thresholds": wrong})


def flat_rows(model, folder, name, *flags):
    source = write_csv(folder / "in.csv", ("occ1", "lang"), [(row[0], row[3]) for row in VALIDATION])
    code, said = run_inside(
        predict.main,
        "--model",
        model,
        "--input",
        source,
        *words("--language-column lang --output"),
        folder / name,
        *words("--decoder flat --device cpu"),
        *flags,
    )
    assert code == 0, said
    return read(folder / name), said


@pytest.mark.full
def test_fitted_ones_are_stored_and_used(trained, tmp_path):  # noqa: F811
    content = torch.load(trained / "run" / "best.bin", weights_only=True)
    torch.save(content, tmp_path / "model.bin")
    before, said = flat_rows(tmp_path / "model.bin", tmp_path, "before.csv")
    assert "Thresholds of the linear decoder: 0.5 (the usual one" in said
    code, said = run_inside(
        evaluate.main,
        "--model",
        tmp_path / "model.bin",
        "--data",
        trained / "val.csv",
        "--output",
        tmp_path / "out",
        *words("--device cpu --resamples 20 --fit-thresholds"),
    )
    assert code == 0 and f"Thresholds stored in {tmp_path}/model.bin: " in said, said
    rows = len((trained / "val.csv").read_text().splitlines()) - 1
    assert (f"WARNING: they are fitted on {rows} rows; take 100 or more" in said) == (rows < 100)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    stored = torch.load(tmp_path / "model.bin", weights_only=True)
    best = report["decoders"]["linear"]["thresholds"]["all"]
    kept = {
        name: value
        for name, value in (content.get("thresholds") or {}).items()
        if name in ("at_least_one", "at_most")
    }
    always = ", and in any case the most probable code" if kept.get("at_least_one") else ""
    always += f", at most {kept['at_most']} of a text" if kept.get("at_most") else ""
    # no language has rows enough
    assert stored["thresholds"] == {
        "default": best["threshold_f1"],
        "by_language": {},
        "source": "fitted",
        **kept,
    }
    assert (
        all(torch.equal(value, content["model"][name]) for name, value in stored["model"].items())
        and stored["step"] == content["step"]
    )
    after, said = flat_rows(tmp_path / "model.bin", tmp_path, "after.csv")
    limit = best["threshold_f1"]
    assert f"Thresholds of the linear decoder: {limit:g} (fitted)" in said
    given, _ = flat_rows(tmp_path / "model.bin", tmp_path, "given.csv", "--threshold", "0.5")
    assert given == before and (always or all(float(row["prob_1"]) > limit for row in after if row["prob_1"]))
    assert all(float(row["prob_2"]) > limit for row in after if row["prob_2"])
    code, said = run_inside(
        evaluate.main,
        "--model",
        tmp_path / "model.bin",
        "--data",
        trained / "val.csv",
        "--output",
        tmp_path / "again",
        *words("--device cpu --resamples 20"),
    )
    again = json.loads((tmp_path / "again" / "report.json").read_text())["decoders"]["linear"]
    assert again["codes_above"] == f"{limit:g} (fitted){always}" and again["by_digits"][-1]["over_rows"][
        "f1"
    ][0] == pytest.approx(best["f1"])
    assert f"Thresholds: {limit:g} (fitted){always}." in (tmp_path / "again" / "report.md").read_text()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Files of a mixer, a seq2seq model and a flat classifier, with the outputs of the HISCO key."""
    torch.manual_seed(1)
    weights = Seq2SeqMixerOccCANINE(
        BlockyFormatter("hisco").num_classes, 1919, config=model_config("tiny")
    ).state_dict()
    folder = tmp_path_factory.mktemp("published")
    torch.save({"model": weights}, folder / "mixer.bin")
    torch.save(
        {"model": {name: value for name, value in weights.items() if not name.startswith("linear_decoder")}},
        folder / "seq2seq.bin",
    )
    torch.save(
        {
            name.replace("encoder.", "basemodel.", 1).replace("linear_decoder.", "out."): value
            for name, value in weights.items()
            if not name.startswith("decoder.")
        },
        folder / "flat.bin",
    )
    return folder


def test_published_ones(published, tmp_path):
    assert Coder.load(str(published / "mixer.bin")).thresholds.source == "published"
    rows, said = flat_rows(published / "mixer.bin", tmp_path, "out.csv")
    assert "da 0.24, en 0.26" in said and "others 0.31 (published)" in said
    rows, said = flat_rows(published / "flat.bin", tmp_path, "all.csv", "--threshold", "da=0", "en=0")
    assert all(row["hisco_5"] in hisco_key() for row in rows) and "(given)" in said.replace(
        "as given", "given"
    )


@pytest.mark.parametrize(
    "kind, there, figures",
    [
        ("flat", "linear", ["val_loss_linear", "flat_acc"]),
        ("seq2seq", "seq2seq", ["val_loss_seq2seq", "seq_acc", "token_acc"]),
    ],
)
def test_models_with_one_decoder_are_evaluated_on_it(published, tmp_path, kind, there, figures):
    data = write_csv(
        tmp_path / "data.csv", ("occ1", "hisco_1"), [(f"smed {i}", hisco_key()[i * 7]) for i in range(9)]
    )
    code, said = run_inside(
        evaluate.main,
        "--model",
        published / f"{kind}.bin",
        "--data",
        data,
        *words("--target-cols hisco_1 --output"),
        tmp_path / "out",
        *words("--device cpu --resamples 20"),
    )
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert code == 0 and "the report is on the decoder that it has" in said, said
    assert list(report["decoders"]) == [there] and list(report["validation"]) == figures
    code, said = run_inside(
        evaluate.main,
        "--model",
        published / f"{kind}.bin",
        "--data",
        data,
        *words("--target-cols hisco_1 --output"),
        tmp_path / "no",
        *words("--device cpu --fit-thresholds"),
    )
    assert code == 2 and "is not a .bin of histocc" in said


def test_the_flags_of_the_published_script(trained, tmp_path):  # noqa: F811
    source = write_csv(tmp_path / "in.csv", ("title", "x"), [(row[0], 1) for row in VALIDATION])
    code, said = run_inside(
        predict.main,
        "--model",
        trained / "run",
        "--fn-in",
        source,
        "--fn_out",
        tmp_path / "out.csv",
        *words("--col title --language en --device cpu --non-verbose"),
    )
    assert code == 0 and said == "" and len(read(tmp_path / "out.csv")) == len(VALIDATION)
    code, said = run_inside(predict.main, "--fn-inn", source)
    assert (
        code == 2
        and "unrecognized arguments: --fn-inn" in said
        and "--fn-in" in said.partition("meant")[0]
        and "required" not in said
    )
