"""--batch-size auto, and what a run says that does not fit into memory."""

import json
import time

import pytest
import torch
from helpers import REPO, TINY, TRAIN_MIXER, read_logs, run, write_rows

from histocc.runtime.errors import TrainingError
from histocc.runtime.world import World
from histocc.trainer.config import ScriptConfig
from histocc.trainer.estimate import find_batch_size, memory_advice


def test_the_fastest_size_that_fits_is_taken():
    def work(rows):  # a pass costs 20 ms, and each row beyond 32 as much as two
        time.sleep(0.02 + 0.002 * rows + 0.01 * max(0, rows - 32))

    def small(rows):
        time.sleep(0.01)
        if rows > 16:
            raise torch.OutOfMemoryError("not enough memory")

    def broken(rows):
        raise RuntimeError("something else")

    assert find_batch_size(work, 4096, World()) == 32 and find_batch_size(small, 4096, World()) == 16
    assert find_batch_size(lambda rows: time.sleep(0.01), 20, World()) == 20
    with pytest.raises(RuntimeError, match="something else"):
        find_batch_size(broken, 64, World())


@pytest.mark.parametrize(
    "given, of_steps, advice",
    [
        ({"batch_size": 6}, True, "Give --batch-size 3 --accumulate-steps 2: the total batch stays 12"),
        (
            {"batch_size": 9, "accumulate_steps": 2},
            True,
            "36 without --accumulate-steps:",
        ),
        ({"batch_size": 8, "global_batch_size": 15}, True, "Give --batch-size 4 --global-batch-size 15:"),
        ({"batch_size": 1}, True, "with one sample at once: take a smaller model, or"),
        ({"batch_size": 8}, False, "for the model itself, whatever the batch size: take a smaller model"),
    ],
)
def test_the_advice_is_what_the_program_takes(given, of_steps, advice):
    memory = memory_advice(ScriptConfig(**given), World(size=2), of_steps=of_steps)
    with pytest.raises(TrainingError, match=advice) as error, memory:
        raise torch.OutOfMemoryError("not enough memory")
    assert error.value.said_by_all


OUT_OF_MEMORY = """
import os, sys
sys.path.insert(0, {repo!r})
import torch, train_mixer
from histocc.model.mixer import Seq2SeqMixerOccCANINE
forward = Seq2SeqMixerOccCANINE.forward

def small_memory(self, input_ids, *args, **kwargs):
    if len(input_ids) > 3 and os.environ.get("RANK", "0") in ("", {rank!r}):
        raise torch.OutOfMemoryError("not enough memory for so many rows")
    return forward(self, input_ids, *args, **kwargs)

Seq2SeqMixerOccCANINE.forward = small_memory
train_mixer.main()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("auto")
    write_rows(folder / "train.csv", 24)
    write_rows(folder / "val.csv", 6, 500)
    data = ["--train-data", folder / "train.csv", "--val-data", folder / "val.csv", *TINY]
    exact = ["--dropout", 0, "--encoder-dropout", 0, "--float64", "--learning-rate", 1e-3]
    return folder, [*data, *exact, "--num-epochs", 1, "--log-interval", 1]


@pytest.mark.processes
@pytest.mark.full
def test_out_of_memory_says_what_to_type(files):
    folder, flags = files
    script = folder / "small.py"
    ends = OUT_OF_MEMORY.replace("train_mixer.main()", "sys.exit(train_mixer.main())")
    script.write_text(ends.format(repo=str(REPO), rank="0"))
    given = [*flags, "--save-dir", folder / "oom"]
    output = run(script, *given, "--batch-size", 6, processes=2, code=1)
    assert (
        "Give --batch-size 3 --accumulate-steps 2: the total batch stays 12" in output
        and "the model is too large: a smaller --model-size" in output
        and "Traceback" not in output.partition("torch/distributed/elastic")[0]  # torchrun has its own
    )
    run(script, *given, "--batch-size", 3, "--accumulate-steps", 2, processes=2)
    assert [row["step"] for row in read_logs(folder / "oom")] == [1, 2]
    script.write_text(ends.format(repo=str(REPO), rank="1"))
    given = [*flags, "--save-dir", folder / "oom of one"]
    output = run(script, *given, "--batch-size", 4, processes=2, code=1)
    assert "(rank 1) with --batch-size 4. Give --batch-size 2 --accumulate-steps 2" in output


@pytest.mark.processes
@pytest.mark.full
def test_auto_keeps_the_total_and_the_losses(files):
    folder, flags = files
    auto = ["--batch-size", "auto", "--global-batch-size", 5]
    output = run(TRAIN_MIXER, *flags, "--save-dir", folder / "auto", *auto, "--profile", 9)
    # all after the first three
    assert "Profile of rank 0" in output and (folder / "auto" / "trace.json").stat().st_size > 1000
    assert "Backward" in (folder / "auto" / "profile.txt").read_text()
    # as given, so that it can be given back
    written = json.loads((folder / "auto" / "args.json").read_text())
    assert [written[name] for name in ("batch_size", "global_batch_size")] == ["auto", 5]
    assert "samples at once per process, chosen automatically; total batch 5" in output
    run(TRAIN_MIXER, *flags, "--save-dir", folder / "fixed", "--batch-size", 5)
    for one, other in zip(read_logs(folder / "auto"), read_logs(folder / "fixed"), strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-9)
        assert one["samples"] == other["samples"]
