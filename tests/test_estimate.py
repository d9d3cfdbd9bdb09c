"""What a run takes: --batch-size auto, --dry-run, and what it says if it does not fit into memory."""

import json
import os
import re

import pytest
import torch
from helpers import TINY, TRAIN_MIXER, read_logs, run, run_here, state_of, write_rows

import train_mixer
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.runtime.errors import TrainingError
from histocc.runtime.world import World
from histocc.trainer.config import ScriptConfig
from histocc.trainer.estimate import memory_advice


@pytest.fixture
def flags(tmp_path):
    train, val = write_rows(tmp_path / "train.csv", 24), write_rows(tmp_path / "val.csv", 6, 500)
    flags = ["--train-data", train, "--val-data", val, "--save-dir", tmp_path / "run", *TINY]
    return [*flags, "--num-epochs", 4, "--learning-rate", 1e-3, "--log-interval", 1]


def test_what_it_says_and_leaves(flags, tmp_path):
    output = run_here(train_mixer.main, *flags, "--dry-run", "--batch-size", 8)
    assert re.search(r"Steps:  12 of [\d.e-]+ s: ", output) and re.search(r"Memory: \d+\.\d GB", output)
    assert os.listdir(tmp_path / "run") == ["prepared"]
    run_here(train_mixer.main, *flags, "--batch-size", 8, "--max-steps", 2)
    before = state_of(tmp_path / "run")
    output = run_here(train_mixer.main, *flags, "--dry-run", "--batch-size", 8)
    assert "Steps:  10 of" in output and "from step 2." in output
    after = state_of(tmp_path / "run")
    assert before["step"] == after["step"] == 2
    torch.testing.assert_close(before["model"], after["model"], rtol=0, atol=0)


@pytest.mark.processes
@pytest.mark.full
def test_two_processes(flags, tmp_path):
    output = run(TRAIN_MIXER, *flags, "--dry-run", processes=2)
    assert output.count("Everything checks out") == 1 and os.listdir(tmp_path / "run") == ["prepared"]


@pytest.mark.parametrize(
    "given, advice",
    [
        ({"batch_size": 6}, "--batch-size 3 --accumulate-steps 2: .* 12"),
        ({"batch_size": 9, "accumulate_steps": 2}, "--batch-size 3 --accumulate-steps 6: .* 36"),
        ({"batch_size": 8, "global_batch_size": 15}, "--batch-size 4 --global-batch-size 15:"),
        ({"batch_size": 1}, "with --batch-size 1. .* --bf16, or --parallel fsdp"),
    ],
)
def test_the_advice_is_what_the_program_takes(given, advice):
    memory = memory_advice(ScriptConfig(**given), World(rank=1, size=2))
    with pytest.raises(TrainingError, match=rf"\(rank 1\) .*{advice}"), memory:
        raise torch.OutOfMemoryError("not enough memory")


def test_out_of_memory_says_what_to_type(flags, tmp_path, monkeypatch):
    forward = Seq2SeqMixerOccCANINE.forward

    def small_memory(self, input_ids, *rest, **more):
        if len(input_ids) > 3:
            raise torch.OutOfMemoryError("not enough memory for so many rows")
        return forward(self, input_ids, *rest, **more)

    monkeypatch.setattr(Seq2SeqMixerOccCANINE, "forward", small_memory)
    said = run_here(train_mixer.main, *flags, "--batch-size", 6, code=1)
    assert "--batch-size 3 --accumulate-steps 2" in said
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "ended by an error"


@pytest.mark.processes
@pytest.mark.full
def test_auto_keeps_the_total_and_the_losses(flags, tmp_path):
    flags = [*flags, "--dropout", 0, "--encoder-dropout", 0, "--float64"]
    auto = ["--batch-size", "auto", "--global-batch-size", 5]
    output = run(TRAIN_MIXER, *flags, *auto, "--profile", 9)
    assert "profiler_start" not in output  # lines of torch's own
    # all after the first three
    assert "Profile of rank 0" in output and (tmp_path / "run" / "trace.json").stat().st_size > 1000
    assert "Backward" in (tmp_path / "run" / "profile.txt").read_text()
    # as given, so that it can be given back
    written = json.loads((tmp_path / "run" / "args.json").read_text())
    assert [written[name] for name in ("batch_size", "global_batch_size")] == ["auto", 5]
    assert "total batch 5" in output
    run(TRAIN_MIXER, *flags, "--save-dir", tmp_path / "fixed", "--batch-size", 5)
    for one, other in zip(read_logs(tmp_path / "run"), read_logs(tmp_path / "fixed"), strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-9)
        assert one["samples"] == other["samples"]
