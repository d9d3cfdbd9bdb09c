"""Which outputs of the linear decoder count: published, fitted, usual and given thresholds."""

import json

import pytest
import torch
from helpers import read, run_here, words, write_csv
from test_evaluate import VALIDATION
from test_initial_weights import mixer

from histocc.evaluate import __main__ as evaluate
from histocc.formatter import hisco_key
from histocc.model.confidence import PUBLISHED, Thresholds
from histocc.predict import __main__ as predict
from histocc.predict.coder import Coder

FITTED = {"default": 0.3, "by_language": {"da": 0.2}, "source": "fitted"}


def least(thresholds: Thresholds, *languages: str) -> list[float]:
    return [thresholds.least(language) for language in languages]


def test_what_a_checkpoint_holds_and_what_is_given():
    assert Thresholds.of({}).least("da") == 0.5 and "the default" in str(Thresholds.of({}))
    fitted = Thresholds.of({"thresholds": FITTED})
    assert least(fitted, "da", "en") == [0.2, 0.3] and str(fitted) == "da 0.2, others 0.3 (fitted)"
    assert fitted.with_given(None) is fitted and fitted.with_given(0.7).least("da") == 0.7
    assert least(fitted.with_given({"en": 0.9}), "da", "en", "fr") == [0.2, 0.9, 0.3]
    assert least(fitted.with_given({"en": 0.9, None: 0.1}), "da", "en") == [0.1, 0.9]
    always = Thresholds.of({"thresholds": {**FITTED, "at_least_one": True}})
    assert not fitted.at_least_one and always.with_given(0.7).at_least_one
    assert str(always) == f"{fitted}, and in any case the most probable code"
    published = Thresholds.of({"thresholds": PUBLISHED})
    assert least(published, "unk", "da", "no", "is", "xx") == [0.31, 0.24, 0.34, 0.17, 0.31]


def flat_rows(model, folder, name, *flags):
    source = write_csv(folder / "in.csv", ("occ1", "lang"), [(row[0], row[3]) for row in VALIDATION])
    given = ["--model", model, "--input", source, "--output", folder / name, *flags]
    how = words("--language-column lang --decoder flat --device cpu")
    said = run_here(predict.main, *given, *how)
    return read(folder / name), said


def evaluated(model, data, folder, *flags, code=0):
    """Return the report and what was said."""
    given = ["--model", model, "--data", data, "--output", folder, *flags]
    said = run_here(evaluate.main, *given, *words("--device cpu"), code=code)
    return None if code else json.loads((folder / "report.json").read_text()), said


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Files of a mixer, a seq2seq model and a flat classifier, with the outputs of the HISCO key."""
    weights, folder = mixer().state_dict(), tmp_path_factory.mktemp("published")
    seq2seq = {name: value for name, value in weights.items() if not name.startswith("linear_decoder")}
    flat = {
        name.replace("encoder.", "basemodel.", 1).replace("linear_decoder.", "out."): value
        for name, value in weights.items()
        if not name.startswith("decoder.")
    }
    torch.save({"model": weights}, folder / "mixer.bin")
    torch.save({"model": seq2seq}, folder / "seq2seq.bin")
    torch.save(flat, folder / "flat.bin")
    return folder


def test_published_ones(published, tmp_path):
    assert Coder.load(str(published / "mixer.bin")).thresholds.source == "published"
    rows, said = flat_rows(published / "mixer.bin", tmp_path, "out.csv")
    assert "da 0.24, en 0.26" in said and "others 0.31 (published)" in said
    rows, said = flat_rows(published / "flat.bin", tmp_path, "all.csv", "--threshold", "da=0", "en=0")
    assert all(row["hisco_5"] in hisco_key() for row in rows) and "(as given)" in said


@pytest.mark.parametrize("kind, there", [("flat", "linear"), ("seq2seq", "seq2seq")])
def test_models_with_one_decoder_are_evaluated_on_it(published, tmp_path, kind, there):
    rows, model = [(f"smed {i}", hisco_key()[i * 7]) for i in range(9)], published / f"{kind}.bin"
    data = write_csv(tmp_path / "data.csv", ("occ1", "hisco_1"), rows)
    report, _ = evaluated(model, data, tmp_path / "out", "--target-cols", "hisco_1")
    assert list(report["decoders"]) == [there]
    more = ["--target-cols", "hisco_1", "--fit-thresholds"]
    assert "is not a .bin of histocc" in evaluated(model, data, tmp_path / "no", *more, code=2)[1]


def test_the_flags_of_the_published_script(published, tmp_path):
    source = write_csv(tmp_path / "in.csv", ("title", "x"), [(row[0], 1) for row in VALIDATION])
    given = ["--model", published / "mixer.bin", "--fn-in", source, "--fn_out", tmp_path / "out.csv"]
    more = words("--col title --language en --device cpu --non-verbose")
    assert run_here(predict.main, *given, *more) == ""
    assert len(read(tmp_path / "out.csv")) == len(VALIDATION)
    assert "unrecognized arguments: --fn-inn" in run_here(predict.main, *given, "--fn-inn", source, code=2)
