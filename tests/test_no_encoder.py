"""Models without an encoder, of n-grams alone; and what the linear decoder needs of an encoder."""

import pytest
import torch
from helpers import greatest_difference, run, run_inside, write_rows

import train_mixer
from histocc import export
from histocc.formatter import hisco_blocky5
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.predict.coder import Coder
from histocc.published import models
from histocc.runtime import checkpoint
from histocc.text import encode

TEXTS = ["farmer no 3", "wine merchant and weaver of linen no 12, deceased", "tailor"]


NGRAMS = {"rows": 64, "width": 16}


def made(narrow=True, **more):
    torch.manual_seed(0)
    classes = hisco_blocky5().num_classes
    return Seq2SeqMixerOccCANINE(classes, 30, config=model_config("tiny"), memory_mask=narrow, **more).eval()


def test_without_an_encoder_the_model_has_its_ngrams_alone():
    model = made(ngrams=NGRAMS, encoder=False).double()
    assert not [name for name in model.state_dict() if name.startswith("encoder.")]
    ids, mask = map(torch.from_numpy, encode(TEXTS, ["en"] * 3))
    text, memory = model.ngrams(ids)
    found = model.encode(ids, mask)
    assert torch.equal(found[0], memory) and torch.equal(found[1][:, 128:], text)
    assert found[1].dtype == torch.float64 and not found[1][:, :128].any()
    with pytest.raises(ValueError, match="needs n-grams"):
        made(encoder=False)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return write_rows(folder / "train.csv", 96), write_rows(folder / "val.csv", 24, 96)


def flags(rows, folder, *more):
    data = ["--train-data", rows[0], "--val-data", rows[1], "--save-dir", folder, "--language-col", "lang"]
    size = ["--model-size", "ngrams", "--ngram-passes", 2, "--num-epochs", 2, "--log-interval", 1]
    return [*data, "--target-cols", "hisco_1", "hisco_2", *size, "--device", "cpu", *more]


@pytest.mark.processes
def test_runs_of_ngrams_alone(rows, tmp_path):
    """They learn, are resumed, and code; the same on two processes."""
    exact = ["--float64", "--dropout", 0, "--ngram-dropout", 0]
    one, two = tmp_path / "one", tmp_path / "two"
    said = run("train_mixer.py", *flags(rows, one, *exact, "--batch-size", 32))
    assert "Model: ngrams (no encoder, width 128, 0 layers)" in said and "Learning rate: 0.001" in said
    for more in (["--max-steps", 3], []):
        run("train_mixer.py", *flags(rows, tmp_path / "again", *exact, "--batch-size", 32, *more))
    whole, again = (checkpoint.load(str(path / "last.bin"))["model"] for path in (one, tmp_path / "again"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    run("train_mixer.py", *flags(rows, two, *exact, "--batch-size", 16), processes=2)
    losses = ("train_loss", "train_loss_linear", "train_loss_seq2seq", "val_loss")
    assert greatest_difference(one, two, losses) < 1e-9
    state = checkpoint.load(str(one / "last.bin"))
    assert state["config"]["encoder"] is False and models.size_name(state["config"]) == "ngrams"
    coder = Coder.load(str(one))
    for decoder in ("flat", "topk"):
        coded = coder.code(["farmer no 8", "tailor no 7"], ["en", "da"], decoder)
        assert [each.codes[0] for each in coded] == ["61110", "79100"]


def test_what_does_not_go_with_it(rows, tmp_path):
    for more, message in (
        (["--ngrams", "none"], "--model-size ngrams has nothing but n-grams"),
        (["--freeze-encoder"], "--model-size ngrams has no encoder"),
    ):
        code, said = run_inside(train_mixer.main, *flags(rows, tmp_path / "run", *more))
        assert code == 2 and message in said


def test_it_starts_other_runs_and_is_exported(rows, tmp_path):
    run("train_mixer.py", *flags(rows, tmp_path / "run", "--max-steps", 2))
    for size, expected in (("ngrams", 0), ("tiny", 2)):
        more = ["--initial-checkpoint", tmp_path / "run", "--max-steps", 1, "--model-size", size]
        code, said = run_inside(train_mixer.main, *flags(rows, tmp_path / f"next-{size}", *more))
        assert code == expected and (code == 0 or "has another size" in said), said
    export.export(str(tmp_path / "run"), "safetensors", str(tmp_path / "out.safetensors"))
    coded = [Coder.load(str(tmp_path / name)).code(TEXTS, ["en"] * 3) for name in ("run", "out.safetensors")]
    assert coded[0] == coded[1]
