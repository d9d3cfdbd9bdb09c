"""Half precision: the same learning, and nothing half where it must not be."""

import pytest
import torch
from helpers import TINY, TRAIN_MIXER, read_logs, run, write_rows

from histocc.runtime.device import Precision, has_bfloat16
from histocc.trainer.config import ScriptConfig

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same 4 steps in three formats: folder → rows of its log."""
    folder = tmp_path_factory.mktemp("precision")
    write_rows(folder / "train.csv", 12)
    write_rows(folder / "val.csv", 6, 500)
    flags = ["--train-data", folder / "train.csv", "--val-data", folder / "val.csv", *TINY]
    flags += ["--num-epochs", 2, "--batch-size", 6, "--learning-rate", 1e-3, "--dropout", 0]
    flags += ["--encoder-dropout", 0, "--log-interval", 2, "--save-interval", 2]
    for name in ("bf16", "fp16"):
        output = run(TRAIN_MIXER, *flags, "--save-dir", folder / name, f"--{name}")
        assert f"Precision: {name}" in output and ("many times slower" in output) == (
            name == "fp16" or not has_bfloat16("cpu")
        )
    run(TRAIN_MIXER, *flags, "--save-dir", folder / "float32")
    run(TRAIN_MIXER, *flags, "--save-dir", folder / "again", "--fp16", "--max-steps", 2)
    run(TRAIN_MIXER, *flags, "--save-dir", folder / "again", "--fp16")
    return folder


@pytest.mark.full
def test_validation_loss_is_that_of_float32_and_so_are_weights_and_optimizer(runs):
    whole = read_logs(runs / "float32")[-1]
    for name in ("bf16", "fp16"):
        half = read_logs(runs / name)[-1]
        assert (half["step"], half["samples"]) == (whole["step"], whole["samples"])
        assert half["val_loss"] == pytest.approx(whole["val_loss"], rel=0.01)
        assert half["val_loss"] != whole["val_loss"]
        assert half["skipped_steps"] == 0  # a scaler that looks for its scale is no bad step
        state = torch.load(runs / name / "last.bin", weights_only=True)
        values = [
            *state["model"].values(),
            *(x for part in state["optimizer"]["state"].values() for x in part.values()),
        ]
        assert {value.dtype for value in values} == {torch.float32}


def test_a_resumed_run_goes_on_with_the_scale_of_the_loss(runs):
    one, other = (torch.load(runs / name / "last.bin", weights_only=True) for name in ("fp16", "again"))
    assert one["scaler"] == other["scaler"] and one["scaler"]["_growth_tracker"] > 0
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])


def test_what_the_flags_choose():
    def chosen(**flags):
        return Precision.of(ScriptConfig(**flags), torch.device("cpu"))

    assert chosen().name == "float32" and chosen(float64=True).dtype == torch.float64
    assert chosen(fp16=True).scaler.is_enabled()
    native = has_bfloat16("cpu")
    assert chosen(use_amp=True).name == ("bf16" if native else "float32") and chosen(bf16=True).name == "bf16"
    assert (chosen(bf16=True).warning() is None) == native and chosen().warning() is None
