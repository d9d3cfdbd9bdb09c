"""The contracts of a run, from its rows to its checkpoint: the same result on any number of processes,
nothing lost or repeated by a restart.
"""

import functools
import json
import shutil
from collections import Counter

import pytest
import torch
from helpers import (
    DEFAULT,
    TINY,
    TRAIN_MIXER,
    all_tests,
    examples,
    full,
    greatest_difference,
    read_logs,
    run,
    run_here,
    state_of,
    write_csv,
    write_rows,
)
from hypothesis import given
from hypothesis import strategies as st

import finetune
import train_mixer
from histocc.data import prepare as prep
from histocc.data.arrays import PreparedData
from histocc.data.config import PrepareSettings
from histocc.data.dataset import RowEncoding, TextRows
from histocc.data.noise import Augmenter
from histocc.formatter import make_formatter
from histocc.seq2seq_mixer_engine import accuracy
from histocc.trainer.batches import BatchPlan, MicroBatches

pytestmark = pytest.mark.processes
LOSSES = [f"{part}_loss{name}" for part in ("train", "val") for name in ("", "_linear", "_seq2seq")]
FIGURES = ("seq_acc", "token_acc", "flat_acc", "samples", "lr", "epoch")


def times_of(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Makes the noisy rows of each step from `start` on, whichever rank has them, of 37 rows."""
    folder, columns = tmp_path_factory.mktemp("noise"), ["hisco_1", "hisco_2"]
    formatter, rows = make_formatter("hisco", columns), write_rows(folder / "data.csv", 37)
    what = PrepareSettings(
        train_files=[rows],
        formatter=formatter.to_dict(),
        target_cols=columns,
        share_val=0.0,
        language_col="lang",
    )
    data = PreparedData.open(prep.prepare(what, str(folder), lambda *_: None))
    augmenter = Augmenter(3, augmentation_prob=0.8)
    texts = TextRows(data.train, data, RowEncoding(formatter), augmenter)

    def steps(plan, epoch, start):
        joined = [Counter() for _ in range(plan.steps_per_epoch - start)]
        for rank in range(plan.processes):
            dataset = MicroBatches(texts, plan, rank, 7)
            for number, counter in enumerate(joined):
                for batch in dataset[epoch, start + number]:
                    names = ("input_ids", "attention_mask", "targets_linear", "weights")
                    for ids, mask, codes, weight in zip(*(batch[name] for name in names)):
                        counter[(*ids[mask].tolist(), *codes[codes >= 0].tolist())] += bool(weight)
        return joined

    return steps


@examples(25)
@given(
    total=st.integers(1, 17),
    processes=st.integers(1, 4),
    micro=st.integers(1, 5),
    epoch=st.integers(0, 2),
    first=st.integers(0, 3),
)
def test_noise_of_a_resumed_epoch_is_that_of_a_whole_one(noisy, total, processes, micro, epoch, first):
    one, many = BatchPlan(37, total), BatchPlan(37, total, processes, micro, 3, 1)
    first = min(first, one.steps_per_epoch)
    assert noisy(many, epoch, first) == noisy(one, epoch, 0)[first:]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """25 rows to train on, which is 2 × 12 + 1, and 5 to validate on, in which a rank has none."""
    folder = tmp_path_factory.mktemp("data")
    train, val = write_rows(folder / "train.csv", 25), write_rows(folder / "val.csv", 5, 100)
    flags = ["--train-data", train, "--val-data", val, *DEFAULT, "--language-col", "lang"]
    return [*flags, "--num-epochs", 2, "--ngram-passes", 1]


@pytest.fixture(scope="module")
def curves(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("curves")
    common = [*files, "--dropout", 0, "--encoder-dropout", 0, "--ngram-dropout", 0, "--float64"]
    common += ["--log-interval", 1, "--eval-interval", 2, "--augmentation-prob", 0.9]
    common += ["--linear-loss", "mean", "--block-loss", "best-fit", "--empty-blocks", "all"]
    total = ["--global-batch-size", 12]
    fsdp = [*total, "--parallel", "fsdp", "--max-steps", 2, "--batch-size", 2]
    ways = {
        "one": (None, None, ["--batch-size", 12]),
        "accumulated": (None, None, ["--batch-size", 6, "--accumulate-steps", 2]),
        "older launcher": (2, "launch", ["--batch-size", 6]),  # the one from before torchrun
        "two": (2, None, [*total, "--batch-size", 3]),
        "four": (4, None, [*total, "--batch-size", 1]),
        "sharded": (3, None, fsdp),
    }
    outputs = {
        name: run(
            TRAIN_MIXER, *common, *flags, "--save-dir", folder / name, processes=count, launcher=launcher
        )
        for name, (count, launcher, flags) in ways.items()
        if all_tests() or name in ("one", "two")  # which accumulates, too
    }
    if all_tests():
        common += [*total, "--batch-size", 6, "--save-dir", folder / "sharded"]
        outputs["ddp after fsdp"] = run(TRAIN_MIXER, *common, "--max-steps", 4, processes=2)
        outputs["fsdp after ddp"] = run(TRAIN_MIXER, *common, "--parallel", "fsdp", processes=2)
    return folder, outputs


class TestAnyNumberOfProcesses:
    """Total batch 12 on 25 rows: the last step of each epoch has one row, and all ranks but one have none.
    "sharded" trains in three processes with FSDP, continues in two with DDP, and ends in two with FSDP.
    """

    @pytest.mark.parametrize(
        "other", [full("accumulated"), full("older launcher"), "two", full("four"), full("sharded")]
    )
    def test_the_log_is_that_of_one_process(self, curves, other):
        """In operations of a sample neither padding counts, nor samples that only fill a batch up."""
        assert greatest_difference(curves[0] / "one", curves[0] / other, LOSSES) < 1e-9
        rows, others = read_logs(curves[0] / "one"), read_logs(curves[0] / other)
        for row, there in zip(rows, others, strict=True):
            assert [row[name] for name in FIGURES] == [there[name] for name in FIGURES]
            if row["step"]:
                of_sample = [part["model_flops_per_sec"] / part["samples_per_sec"] for part in (row, there)]
                assert of_sample[1] == pytest.approx(of_sample[0], rel=1e-4) and 0 < there["mfu"] < 2

    def test_every_row_counts_once_the_loss_falls_and_the_last_step_is_validated(self, curves):
        rows, alone = (read_logs(curves[0] / name) for name in ("two", "one"))
        assert [row["samples"] for row in rows] == [0, 12, 24, 25, 37, 49, 50]
        assert [row["step"] for row in rows if row["val_loss"] is not None] == [0, 2, 4, 6]
        assert rows[-1]["val_loss"] < rows[0]["val_loss"]
        for name in ("val_loss", "seq_acc", "token_acc", "flat_acc"):  # of all 5 rows, and no others
            assert rows[-1][name] == pytest.approx(alone[-1][name], rel=1e-9)

    @pytest.mark.full
    def test_checkpoints_of_sharded_weights_are_whole(self, curves):
        """Names, shapes and values; in Adam's second moments, which are tiny, the last digits count less."""
        said = curves[1]
        assert "Parallel: FSDP" in said["sharded"] and "Parallel: DDP" in said["ddp after fsdp"]
        assert "Resuming from step 4" in said["fsdp after ddp"]
        one, sharded = (state_of(curves[0] / name) for name in ("one", "sharded"))
        torch.testing.assert_close(sharded["model"], one["model"], rtol=1e-6, atol=1e-9)
        moments = [state["optimizer"]["state"] for state in (sharded, one)]
        torch.testing.assert_close(*moments, rtol=1e-6, atol=1e-12)

    @pytest.mark.parametrize("name", ["two", full("sharded")])
    def test_checkpoint_is_plain_and_enough(self, curves, name):
        state = state_of(curves[0] / name)
        assert state["step"] == 6 and state["system"] == "hisco" and state["format"] == 1
        assert state["scheduler"]["last_epoch"] == 6  # as torch's schedulers count steps
        assert not any(name.startswith("module.") for name in state["model"])
        rows = [row for row in read_logs(curves[0] / name) if row["val_loss"]]
        best = max(rows, key=lambda row: max(row["seq_acc"], row["flat_acc"]))  # the first of equal ones
        assert state_of(curves[0] / name, "best.bin")["step"] == best["step"]
        for figures in ({"seq_acc": 0.2, "flat_acc": 0.6}, {"seq_acc": 0.6, "flat_acc": 0.2}):
            assert accuracy(figures) == 0.6


@pytest.fixture(scope="module", params=["1 ddp", full("2 ddp"), full("4 ddp"), full("2 fsdp")])
def runs(request, files, tmp_path_factory):
    folder, (processes, mode) = tmp_path_factory.mktemp("resume"), request.param.split()
    common = [*files, "--dropout", 0.1, "--global-batch-size", 12, "--log-interval", 2]
    common += ["--eval-interval", 4, "--save-interval", 1000, "--learning-rate", 1e-3, "--parallel", mode]
    ran = functools.partial(run, TRAIN_MIXER, *common, processes=int(processes))
    if processes == "1":
        ran = functools.partial(run_here, train_mixer.main, *common)
    ran("--save-dir", folder / "whole")
    ran("--save-dir", folder / "parts", "--max-steps", 4)
    assert "Resuming from step 4" in ran("--save-dir", folder / "parts")
    return folder


class TestGoingOn:
    """Dropout and noise on, float32: a run in two parts ends with the very bits of a run in one."""

    def test_weights_and_optimizer_are_bitwise_equal(self, runs):
        whole, parts = (state_of(runs / name) for name in ("whole", "parts"))
        assert whole["step"] == parts["step"] == 6
        held = [[state["model"], state["optimizer"]["state"]] for state in (whole, parts)]
        torch.testing.assert_close(*held, rtol=0, atol=0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    flags = ["--dataset", write_rows(folder / "data.csv", 60), "--target-cols", "hisco_1", "hisco_2"]
    flags += ["--formatter", "hisco", "--language-col", "lang", *TINY, "--batch-size", 16]
    flags += ["--num-epochs", 1, "--save-interval", 1, "--keep-checkpoints", 2, "--save-each-epoch"]
    words = write_csv(folder / "words.csv", ("word", "freq"), [("old", 1)])
    flags += ["--learning-rate", 1e-3, "--fn-word-freq", words]
    run_here(finetune.main, *flags, "--save-path", folder / "run")
    return folder / "run", flags


class TestFinetune:
    def test_files_of_a_run(self, finished):
        step = state_of(finished[0])["step"]
        names = {"last.bin", "best.bin", "epoch_1.bin", f"{step}.bin", f"{step - 1}.bin"}
        assert {path.name for path in finished[0].glob("*.bin")} == names
        key = (finished[0] / "key.csv").read_text().splitlines()
        assert key[0] == "system_code,code" and len(key) == 9 and key[1:] == sorted(key[1:])

    def test_best_by_loss_until_it_no_longer_falls(self, tmp_path):
        data, folder = write_rows(tmp_path / "data.csv", 60), tmp_path / "run"
        flags = ["--dataset", data, *TINY, "--batch-size", 16, "--save-path", folder, "--best-by", "loss"]
        flags += ["--eval-interval", 1, "--learning-rate", 0.03, "--patience", 2]
        columns = ["--formatter", "hisco", "--target-cols", "hisco_1", "hisco_2", "--language-col", "lang"]
        said = run_here(finetune.main, *flags)
        assert f"Columns: {' '.join(columns)}, by their names in {data}\n" in said
        args = state_of(folder)["args"]
        assert (args["formatter"], args["language"], args["language_col"]) == ("hisco", "unk", "lang")
        losses = {row["step"]: row["val_loss"] for row in read_logs(folder)}
        best, last = min(losses, key=losses.get), len(losses)
        assert state_of(folder, "best.bin")["step"] == best == last - 2 and state_of(folder)["step"] == last
        assert f"finished at step {last} of 20." in said
        before, said = times_of(folder), run_here(finetune.main, *flags)
        assert f"is finished ({last} steps)" in said and times_of(folder) == before
        said = run_here(finetune.main, *flags[:-1], 3, "--max-steps", last + 1, *columns)
        assert f"Resuming from step {last} " in said
        assert "--patience" in run_here(finetune.main, *flags, "--overwrite", "--share-val", 0, code=2)

    def test_other_arguments_are_refused_by_name(self, finished, tmp_path):
        other, again = write_rows(tmp_path / "other.csv", 60, 8), [*finished[1], "--save-path", finished[0]]
        more = ["--seed", 7, "--weight-decay", 0.5, "--ngrams", 6]
        said = run_here(finetune.main, *again, *more, code=2)
        for name, was, now in (("seed", 42, 7), ("weight-decay", 0.01, 0.5), ("ngrams", "'none'", "'6'")):
            assert f"--{name} was {was}, now it is {now}" in said
        assert "--global-batch-size 16" in run_here(finetune.main, *again, "--batch-size", 8, code=2)
        shutil.copytree(finished[0], tmp_path / "run", ignore=lambda *_: ["prepared", "data_report.json"])
        said = run_here(finetune.main, *again, "--save-path", tmp_path / "run", "--dataset", other, code=2)
        assert "run holds a run on other data" in said
        assert said.startswith("error: ")  # before a report on data that will not be used
        words = finished[0].parent / "words.csv"
        before = words.read_text()
        words.write_text(before.replace("old", "new"))
        assert f"error: {words}: " in run_here(finetune.main, *again, code=2)
        words.write_text(before)

    def test_more_epochs_go_on_and_overwrite_starts_anew(self, finished, tmp_path):
        folder, run = finished[0], tmp_path / "run"
        flags = [*finished[1], "--save-path", run]
        shutil.copytree(folder, run)
        assert "2 epochs instead of 1" in run_here(finetune.main, *flags, "--num-epochs", 2)
        assert state_of(run)["step"] == 2 * state_of(folder)["step"]
        assert "only more can continue" in run_here(finetune.main, *flags, code=2)
        run_here(finetune.main, *flags, "--overwrite", "--seed", 7, "--max-steps", 1)
        assert json.loads((run / "args.json").read_text())["seed"] == 7 and state_of(run)["step"] == 1
        assert not (run / "epoch_1.bin").exists()

    def test_eval_only_repeats_the_validation_and_writes_nothing(self, finished):
        folder, flags = finished
        before = times_of(folder)
        again = ["--save-path", folder, "--eval-only", "--linear-loss", "mean"]
        output = run_here(finetune.main, *flags, *again)
        assert "--linear-loss was" in output
        assert f"loss {read_logs(folder)[-1]['val_loss']:.4f}" in output and before == times_of(folder)

    def test_first_weights_with_another_key_keep_the_known_codes(self, finished, tmp_path):
        other = write_rows(tmp_path / "other.csv", 60)
        with open(other, "a", encoding="utf-8") as file:
            file.write("".join(f"pilot of boats {i},04220,,en\n" for i in range(6)))
        flags = ["--dataset", other, "--initial-checkpoint", finished[0], "--save-path", tmp_path / "run"]
        flags += ["--freeze-encoder", "--max-steps", 1, "--batch-size", 8, "--learning-rate", 1e-9]
        flags += ["--device", "cpu", "--overwrite"]
        assert "--formatter hisco --block-size 5" in run_here(finetune.main, *flags, "--formatter", "gpf")
        output = run_here(finetune.main, *flags)
        assert "the weights of 8 of 9 codes" in output and "Model: tiny" in output
        old, new = state_of(finished[0], "best.bin"), state_of(tmp_path / "run")
        encoder = [name for name in old["model"] if name.startswith("encoder.")]
        assert all(torch.equal(old["model"][name], new["model"][name]) for name in encoder)
        assert [*new["key"]] == [*old["key"], "04220"] and new["config"]["text"] == "as-is"
        rows, kept = (state["model"]["linear_decoder.weight"] for state in (old, new))
        for code, number in old["key"].items():
            assert torch.allclose(rows[number], kept[new["key"][code]], atol=1e-6)

    def test_codes_may_be_shorter_than_a_block_if_asked(self, tmp_path):
        rows = [("miller", "a12"), ("smith", "b9"), ("farmer", "?")]
        data = write_csv(tmp_path / "data.csv", ("occ1", "code"), rows)
        flags = ["--dataset", data, "--target-cols", "code"]
        flags += ["--block-size", 3, "--allow-codes-shorter-than-block-size", *TINY, "--share-val", 0]
        run_here(finetune.main, *flags, "--max-steps", 1, "--save-path", tmp_path / "run")
        state = state_of(tmp_path / "run")
        assert list(state["key"]) == ["?", "a12", "b9"] and state["system"] == "code"
