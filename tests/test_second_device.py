"""On a device that is not the CPU: the CPU's figures, no operation on tensors of two places, and no step that
waits for the device.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from helpers import read_logs, run_inside, write_rows
from second_device import DEVICE, second_device, waits
from test_predict import CODES, make_model

import finetune
from histocc.formatter import hisco_blocky5
from histocc.occ_canine import settings_of_torch
from histocc.predict.coder import DECODERS, Coder
from histocc.runtime import device
from histocc.runtime.device import choose_device, device_of
from histocc.runtime.errors import UserError

TEXTS = [
    "wine merchant",
    "huusmand og væver",
    "farmer",
    "",
    "keeper of a very long description " * 5,
    "smith",
]
HERE = ("--device", DEVICE.type)
TWO_EPOCHS = ["--num-epochs", 2, "--log-interval", 1, "--eval-interval", 2, "--float64"]
MODEL = ["--model-size", "tiny", "--ngrams", "none", "--dropout", 0, "--encoder-dropout", 0]


def train(rows, folder, *more):
    """On the device that the scripts choose; the epoch is two steps long."""
    data = ["--dataset", rows, "--target-cols", "hisco_1", "hisco_2", "--formatter", "hisco"]
    data += ["--language-col", "lang", *MODEL, "--batch-size", 64, "--learning-rate", 1e-3]
    with settings_of_torch():
        code, output = run_inside(finetune.main, *data, "--save-path", folder, *more)
    assert code == 0, output


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.csv", 100)


@pytest.fixture(scope="module")
def on_cpu(rows, tmp_path_factory):
    """Folder of a run of two epochs."""
    folder = tmp_path_factory.mktemp("run")
    train(rows, folder, *TWO_EPOCHS, "--device", "cpu")
    return folder


@pytest.mark.full
def test_a_run_and_one_that_goes_on_have_the_losses_of_the_cpu(rows, on_cpu, tmp_path, monkeypatch):
    with second_device(monkeypatch):
        train(rows, tmp_path, *TWO_EPOCHS, *HERE, "--max-steps", 3)
        assert waits["_to_copy"] > 0  # the weights, to save them
        train(rows, tmp_path, *TWO_EPOCHS, *HERE)
    here, there = read_logs(on_cpu), read_logs(tmp_path)
    assert [row["step"] for row in there] == [row["step"] for row in here] == [1, 2, 3, 4]
    for name in ("train_loss", "train_loss_linear", "grad_norm", "val_loss", "token_acc", "seq_acc"):
        pairs = [(row[name], other[name]) for row, other in zip(here, there) if row[name] is not None]
        assert [other for _, other in pairs] == pytest.approx([value for value, _ in pairs], rel=1e-8)
    assert here[1]["val_loss"] and here[3]["val_loss"]
    models = [torch.load(folder / "last.bin", weights_only=True)["model"] for folder in (on_cpu, tmp_path)]
    assert all(
        type(value) is torch.Tensor and float((value - models[0][name]).abs().max()) < 1e-6
        for name, value in models[1].items()
    )


@pytest.mark.full
def test_steps_that_are_not_logged_do_not_wait_for_the_device(rows, tmp_path, monkeypatch):
    def count(epochs):
        with second_device(monkeypatch):
            train(rows, tmp_path / f"epochs{epochs}", "--num-epochs", epochs, "--share-val", 0, *HERE)
        return Counter(waits)

    assert count(1) == count(2)


def test_what_is_no_device_here_is_said(monkeypatch):
    with pytest.raises(UserError, match="--device xpu: torch .* finds no accelerator here; take --device"):
        choose_device("xpu", 0, 1)
    with second_device(monkeypatch):
        assert choose_device("meta", 0, 1) == DEVICE == device_of("meta")
        with pytest.raises(UserError, match="finds meta here"):
            choose_device("xpu", 0, 1)
        with pytest.raises(UserError, match="a run has one process there"):
            choose_device("meta", 1, 2)
    monkeypatch.setattr(device, "accelerator", lambda: "mps")
    with pytest.raises(UserError, match="does not compute in float64"):
        choose_device("mps", 0, 1)


def test_every_decoder_codes_as_on_the_cpu(monkeypatch):
    state = {
        "key": {code: i for i, code in enumerate(CODES)},
        "languages": ["en", "da"],
        "config": {"max_len": 128, "text": "as-is"},
    }

    def found(device):
        coder = Coder(make_model().to(device), hisco_blocky5(), state, batch_size=3)
        return (
            {
                decoder: coder.code(
                    TEXTS, ["en", "da", "xx", "en", "en", "en"], decoder, threshold={"da": 0.3, None: 0.5}
                )
                for decoder in DECODERS
            },
            [coder.probabilities(TEXTS, ["en"] * 6, decoder) for decoder in ("flat", "full")],
            coder.embeddings(TEXTS, ["en"] * 6),
        )

    codes, probabilities, vectors = found("cpu")
    with second_device(monkeypatch):
        there, probabilities_there, vectors_there = found(DEVICE)
    for decoder, texts in codes.items():
        assert [text.codes for text in texts] == [text.codes for text in there[decoder]]
        assert all(
            np.allclose(text.probs, other.probs, atol=1e-6) for text, other in zip(texts, there[decoder])
        )
    assert (
        len({len(text.codes) for text in codes["greedy"]}) > 2
        and len({len(text.codes) for text in codes["flat"]}) > 1
    )
    assert np.allclose(vectors, vectors_there, atol=1e-4, equal_nan=True)
    assert all(
        np.allclose(one, other, atol=1e-6, equal_nan=True)
        for one, other in zip(probabilities, probabilities_there)
    )
