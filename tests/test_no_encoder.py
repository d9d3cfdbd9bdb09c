"""Models without an encoder, of n-grams alone; and what the linear decoder needs of an encoder."""

import pytest
import torch
from helpers import greatest_difference, run, run_inside, write_rows

import train_mixer
from histocc import export
from histocc.formatter import hisco_blocky5
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.model.no_encoder import NoEncoder
from histocc.predict.coder import Coder
from histocc.published import models
from histocc.runtime import checkpoint
from histocc.text import encode

TEXTS = ["farmer no 3", "wine merchant and weaver of linen no 12, deceased", "tailor"]


def made(narrow=True, **more):
    torch.manual_seed(0)
    config = model_config("tiny", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    formatter = hisco_blocky5()
    return Seq2SeqMixerOccCANINE(formatter.num_classes, 30, config=config, memory_mask=narrow, **more).eval()


@pytest.mark.parametrize("ngrams", [None, {"rows": 64, "width": 16}])
@pytest.mark.parametrize("narrow", [True, False])
def test_the_text_alone_is_what_encode_gives(ngrams, narrow):
    model = made(narrow, ngrams=ngrams)
    ids, mask = map(torch.from_numpy, encode(TEXTS, ["en"] * 3, 128, None if narrow else 128))
    with torch.no_grad():
        memory, pooled = model.encode(ids, mask)
        assert torch.equal(model.encode_text(ids, mask), pooled)
        assert torch.equal(model.encoder(ids, mask, narrow)[1], pooled[:, :128])
    assert memory.shape == (*ids.shape, 128)


def test_no_encoder_gives_zeros_in_the_type_of_the_model():
    model = made(ngrams={"rows": 64, "width": 16}, encoder=False)
    assert isinstance(model.encoder, NoEncoder) and not list(model.encoder.parameters())
    assert not [name for name in model.state_dict() if name.startswith("encoder.")]
    ids, mask = map(torch.from_numpy, encode(TEXTS, ["en"] * 3))
    memory, pooled = model.double().encoder(ids, mask)
    assert memory.dtype == pooled.dtype == torch.float64 and not memory.any() and not pooled.any()
    assert memory.shape == (*ids.shape, 128) and pooled.shape == (3, 128)
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
        assert [
            coded.codes[0] for coded in coder.code(["farmer no 8", "tailor no 7"], ["en", "da"], decoder)
        ] == [
            "61110",
            "79100",
        ]


def test_what_does_not_go_with_it(rows, tmp_path):
    for more, message in (
        (["--ngrams", "none"], "--model-size ngrams has nothing but n-grams"),
        (["--freeze-encoder"], "--model-size ngrams has no encoder"),
    ):
        code, said = run_inside(train_mixer.main, *flags(rows, tmp_path / "run", *more))
        assert code == 2 and message in said


def test_it_starts_other_runs_and_is_exported(rows, tmp_path):
    run("train_mixer.py", *flags(rows, tmp_path / "run", "--max-steps", 2))
    for size, code in ((["--model-size", "ngrams"], 0), (["--model-size", "tiny"], 2), ([], 0)):
        more = ["--initial-checkpoint", tmp_path / "run", "--max-steps", 1]
        arguments = [*flags(rows, tmp_path / f"next{len(size)}{code}", *more)]
        at = arguments.index("--model-size")
        arguments[at : at + 2] = size
        found, said = run_inside(train_mixer.main, *arguments)
        assert found == code, said
        assert code == 0 or "has another size" in said
    export.export(str(tmp_path / "run"), "safetensors", str(tmp_path / "out.safetensors"))
    whole = Coder.load(str(tmp_path / "run")).code(TEXTS, ["en"] * 3)
    assert Coder.load(str(tmp_path / "out.safetensors")).code(TEXTS, ["en"] * 3) == whole
