"""The contracts of a run, with real processes: same result on any number, nothing lost or repeated by a
restart.
"""

import json
import os
import shutil

import pytest
import torch
from helpers import FINETUNE, TINY, TRAIN_MIXER, all_tests, greatest_difference, read_logs, run, write_rows

pytestmark = pytest.mark.processes
LOSSES = [f"{part}_loss{name}" for part in ("train", "val") for name in ("", "_linear", "_seq2seq")]
FIGURES = ("seq_acc", "token_acc", "flat_acc", "samples", "lr", "epoch")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """25 rows to train on, which is 2 × 12 + 1, and 7 to validate on."""
    folder = tmp_path_factory.mktemp("data")
    train, val = write_rows(folder / "train.csv", 25), write_rows(folder / "val.csv", 7, 100)
    return ["--train-data", train, "--val-data", val]


def full(name):
    """A parameter that is for --all."""
    return pytest.param(name, marks=pytest.mark.full)


@pytest.fixture(scope="module")
def curves(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("curves")
    common = [*files, *TINY, "--language-col", "lang", "--dropout", 0, "--encoder-dropout", 0, "--float64"]
    common += ["--num-epochs", 3, "--log-interval", 1, "--eval-interval", 4, "--learning-rate", 1e-3]
    common += ["--augmentation-prob", 0.9, "--linear-loss", "mean", "--block-loss", "best-fit"]
    common += ["--empty-blocks", "all"]
    ways = {
        "one": (None, False, ["--batch-size", 12]),
        "accumulated": (None, False, ["--batch-size", 6, "--accumulate-steps", 2]),
        "two": (2, True, ["--batch-size", 6]),  # the legacy launcher
        "four": (4, False, ["--global-batch-size", 12, "--batch-size", 128]),
        "sharded": (
            3,
            False,
            ["--parallel", "fsdp", "--max-steps", 4, "--global-batch-size", 12, "--batch-size", 2],
        ),
    }
    outputs = {
        name: run(
            TRAIN_MIXER, *common, *flags, "--save-dir", folder / name, processes=processes, legacy=legacy
        )
        for name, (processes, legacy, flags) in ways.items()
        if all_tests() or name not in ("two", "sharded")
    }
    if not all_tests():
        return folder, outputs
    common += ["--global-batch-size", 12, "--batch-size", 6, "--save-dir", folder / "sharded"]
    outputs["ddp after fsdp"] = run(TRAIN_MIXER, *common, "--max-steps", 8, processes=2)
    outputs["fsdp after ddp"] = run(TRAIN_MIXER, *common, "--parallel", "fsdp", processes=2)
    return folder, outputs


class TestAnyNumberOfProcesses:
    """Total batch 12 on 25 rows: the last step of each epoch has one row, and all ranks but one have none.
    "sharded" trains in three processes with FSDP, continues in two with DDP, and ends in two with
    FSDP.
    """

    @pytest.mark.parametrize("other", ["accumulated", full("two"), "four", full("sharded")])
    def test_the_log_is_that_of_one_process(self, curves, other):
        """In operations of a sample neither padding counts, nor samples that only fill a batch up."""
        assert greatest_difference(curves[0] / "one", curves[0] / other, LOSSES) < 1e-9
        rows, others = read_logs(curves[0] / "one"), read_logs(curves[0] / other)
        for row, there in zip(rows, others, strict=True):
            assert [row[name] for name in FIGURES] == [there[name] for name in FIGURES]
            of_sample = [each["model_flops_per_sec"] / each["samples_per_sec"] for each in (row, there)]
            assert of_sample[1] == pytest.approx(of_sample[0], rel=1e-4) and 0 < there["mfu"] < 2

    def test_every_row_counts_once_the_loss_falls_and_the_last_step_is_validated(self, curves):
        rows = read_logs(curves[0] / "four")
        assert [row["samples"] for row in rows] == [12, 24, 25, 37, 49, 50, 62, 74, 75]
        assert [row["step"] for row in rows if row["val_loss"] is not None] == [4, 8, 9]
        assert rows[-1]["train_loss"] < 0.7 * rows[0]["train_loss"]

    def test_banner_and_files(self, curves):
        folder, outputs = curves
        for words in (
            "Distributed environment: MULTI_CPU",
            "Number of processes: 4",
            "Number of GPUs: 0",
            "Backend: gloo",
            "Total batch size: 12",
            "Steps per epoch: 3",
            "Vocabulary size: 19",
            "Starting training for 3 epochs",
            "Training on 4 CPU processes",
        ):
            assert words in outputs["four"], words
            assert outputs["four"].count(words) == 1  # rank 0 alone speaks
        assert "Distributed environment: SINGLE" in outputs["one"]
        names = "last.bin best.bin args.json logs.csv key.csv rejected_rows.csv prepared"
        assert set(names.split()) <= set(os.listdir(folder / "four"))

    @pytest.mark.full
    def test_how_the_model_is_spread_is_said(self, curves):
        assert "Parallel: FSDP" in curves[1]["sharded"] and "Parallel: DDP" in curves[1]["ddp after fsdp"]
        assert (
            "Resuming from step 4" in curves[1]["ddp after fsdp"]
            and "Resuming from step 8" in curves[1]["fsdp after ddp"]
        )

    @pytest.mark.full
    def test_checkpoints_of_sharded_weights_are_whole(self, curves):
        """Names, shapes and values; in Adam's second moments, which are tiny, the last digits count less."""
        one, sharded = (
            torch.load(curves[0] / name / "last.bin", weights_only=True) for name in ("one", "sharded")
        )
        assert (
            one["model"].keys() == sharded["model"].keys()
            and one["optimizer"]["state"].keys() == sharded["optimizer"]["state"].keys()
        )
        torch.testing.assert_close(sharded["model"], one["model"], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(
            sharded["optimizer"]["state"], one["optimizer"]["state"], rtol=1e-6, atol=1e-12
        )

    @pytest.mark.parametrize("name", ["four", full("sharded")])
    def test_checkpoint_is_plain_and_enough(self, curves, name):
        state = torch.load(curves[0] / name / "last.bin", weights_only=True)
        names = (
            "model optimizer scheduler step key format config formatter system languages args rng position"
        )
        assert {*names.split(), "position"} <= state.keys()
        assert state["step"] == 9 and state["system"] == "hisco" and state["format"] == 1
        assert not any(name.startswith("module.") for name in state["model"])
        best = torch.load(curves[0] / name / "best.bin", weights_only=True)
        validated = {
            row["step"]: row["val_loss"] for row in read_logs(curves[0] / name) if row["val_loss"] is not None
        }
        assert best["step"] == min(validated, key=validated.get)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((4, "ddp"), id="4 ddp"),
        pytest.param((2, "fsdp"), id="2 fsdp", marks=pytest.mark.full),
    ],
)
def runs(request, files, tmp_path_factory):
    processes, mode = request.param
    folder = tmp_path_factory.mktemp("resume")
    common = [*files, *TINY, "--language-col", "lang", "--dropout", 0.1, "--num-epochs", 3]
    common += ["--batch-size", 12 // processes, "--log-interval", 2, "--eval-interval", 4]
    common += ["--save-interval", 1000, "--learning-rate", 1e-3, "--parallel", mode]
    run(TRAIN_MIXER, *common, "--save-dir", folder / "whole", processes=processes)
    run(TRAIN_MIXER, *common, "--save-dir", folder / "parts", "--max-steps", 4, processes=processes)
    output = run(TRAIN_MIXER, *common, "--save-dir", folder / "parts", processes=processes)
    return folder, output, common, processes


class TestGoingOn:
    """Dropout and noise on, float32: a run in two parts ends with the very bits of a run in one. Two
    processes: tests/faults.
    """

    def test_weights_and_optimizer_are_bitwise_equal(self, runs):
        whole, parts = (
            torch.load(runs[0] / name / "last.bin", weights_only=True) for name in ("whole", "parts")
        )
        assert whole["step"] == parts["step"] == 9
        assert all(torch.equal(whole["model"][name], parts["model"][name]) for name in whole["model"])
        for index, values in whole["optimizer"]["state"].items():
            assert all(torch.equal(values[name], parts["optimizer"]["state"][index][name]) for name in values)

    def test_the_log_reads_as_one(self, runs):
        whole, parts = (read_logs(runs[0] / name) for name in ("whole", "parts"))
        for row in (*whole, *parts):
            for name in ("samples_per_sec", "seconds_data", "model_flops_per_sec", "mfu"):
                row.pop(name)
        assert whole == parts
        assert "Resuming from step 4 (epoch 2, batch 1)" in runs[1]

    def test_a_finished_run_says_so_and_changes_nothing(self, runs):
        folder, _, common, processes = runs
        if processes != 2:
            pytest.skip("once is enough")
        before = {name: (folder / "whole" / name).stat().st_mtime_ns for name in os.listdir(folder / "whole")}
        output = run(TRAIN_MIXER, *common, "--save-dir", folder / "whole", processes=processes)
        assert "is finished (9 steps): nothing to do" in output
        assert before == {
            name: (folder / "whole" / name).stat().st_mtime_ns for name in os.listdir(folder / "whole")
        }


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of finetune.py in one process, with its flags."""
    folder = tmp_path_factory.mktemp("finetune")
    flags = ["--dataset", write_rows(folder / "data.csv", 60), "--target-cols", "hisco_1", "hisco_2"]
    flags += ["--formatter", "hisco", "--language-col", "lang", *TINY, "--batch-size", 16]
    flags += ["--num-epochs", 1, "--save-interval", 1, "--keep-checkpoints", 2, "--save-each-epoch"]
    flags += ["--learning-rate", 1e-3]
    run(FINETUNE, *flags, "--save-path", folder / "run")
    return folder, flags


class TestFinetune:
    def test_old_checkpoints_are_pruned_but_never_those_of_epochs(self, finished):
        names = {name for name in os.listdir(finished[0] / "run") if name.endswith(".bin")}
        steps = torch.load(finished[0] / "run" / "last.bin", weights_only=True)["step"]
        assert names == {"last.bin", "best.bin", "epoch_1.bin", f"{steps}.bin", f"{steps - 1}.bin"}

    def test_same_text_is_on_one_side(self, finished):
        key = (finished[0] / "run" / "key.csv").read_text().splitlines()
        assert key[0] == "system_code,code" and len(key) == 9 and key[1:] == sorted(key[1:])

    def test_the_columns_bring_formatter_and_language(self, tmp_path):
        """The same as the flags, also on resume."""
        data = write_rows(tmp_path / "data.csv", 60)
        flags = ["--dataset", data, *TINY, "--batch-size", 16, "--save-path", tmp_path / "run"]
        found = ["--formatter", "hisco", "--target-cols", "hisco_1", "hisco_2", "--language-col", "lang"]
        assert "Columns: --" not in run(FINETUNE, *flags, *found, "--max-steps", 1)
        said = run(FINETUNE, *flags, "--max-steps", 2)
        assert f"Columns: {' '.join(found)}, by their names in {data}\n" in said
        assert "Resuming from step 1" in said
        args = torch.load(tmp_path / "run" / "last.bin", weights_only=True)["args"]
        assert (args["formatter"], args["language"], args["language_col"]) == ("hisco", "unk", "lang")
        said = run(FINETUNE, *flags, "--formatter", "gpf", code=2)
        assert "--formatter was 'hisco', now it is 'gpf'" in said

    def test_other_arguments_are_refused_by_name(self, finished):
        folder, flags = finished
        output = run(
            FINETUNE, *flags, "--save-path", folder / "run", "--seed", 7, "--weight-decay", 0.5, code=2
        )
        assert "--seed was 42, now it is 7" in output and "--weight-decay was 0.01, now it is 0.5" in output
        assert "Traceback" not in output

    def test_other_data_are_refused(self, finished, tmp_path):
        folder, flags = finished
        other = write_rows(tmp_path / "other.csv", 61)
        output = run(FINETUNE, "--dataset", other, *flags[2:], "--save-path", folder / "run", code=2)
        assert "holds a run on other data" in output

    def test_another_total_batch_is_refused_with_the_flag_to_set(self, finished):
        folder, flags = finished
        output = run(FINETUNE, *flags, "--save-path", folder / "run", "--batch-size", 8, code=2)
        assert "--global-batch-size 16" in output

    def test_more_epochs_go_on(self, finished, tmp_path):
        folder, flags = finished
        shutil.copytree(folder / "run", tmp_path / "run")
        output = run(FINETUNE, *flags, "--save-path", tmp_path / "run", "--num-epochs", 2)
        assert "2 epochs instead of 1, with the longer schedule" in output
        first, second = (
            torch.load(f / "run" / "last.bin", weights_only=True)["step"] for f in (folder, tmp_path)
        )
        assert second == 2 * first

    def test_overwrite_starts_anew(self, finished, tmp_path):
        folder, flags = finished
        shutil.copytree(folder / "run", tmp_path / "run")
        run(FINETUNE, *flags, "--save-path", tmp_path / "run", "--overwrite", "--seed", 7, "--max-steps", 1)
        assert json.loads((tmp_path / "run" / "args.json").read_text())["seed"] == 7
        assert torch.load(tmp_path / "run" / "last.bin", weights_only=True)["step"] == 1
        assert not (tmp_path / "run" / "epoch_1.bin").exists()

    def test_eval_only_repeats_the_validation_and_writes_nothing(self, finished):
        folder, flags = finished
        before = sorted(
            (name, os.stat(folder / "run" / name).st_mtime_ns) for name in os.listdir(folder / "run")
        )
        output = run(FINETUNE, *flags, "--save-path", folder / "run", "--eval-only")
        assert "Note: the model and its losses" not in output
        other = run(FINETUNE, *flags, "--save-path", folder / "run", "--eval-only", "--linear-loss", "mean")
        assert "Note: the model and its losses are those of" in other and "--linear-loss was" in other
        loss = read_logs(folder / "run")[-1]["val_loss"]
        assert f"loss {loss:.4f}" in output
        assert before == sorted(
            (name, os.stat(folder / "run" / name).st_mtime_ns) for name in os.listdir(folder / "run")
        )

    def test_first_weights_with_another_key_keep_the_known_codes(self, finished, tmp_path):
        folder, _ = finished
        other = write_rows(tmp_path / "other.csv", 60)
        with open(other, "a", encoding="utf-8") as file:
            file.write("".join(f"pilot of boats {i},04220,,en\n" for i in range(6)))
        flags = ["--dataset", other, "--initial-checkpoint", folder / "run", "--save-path", tmp_path / "run"]
        flags += ["--freeze-encoder", "--max-steps", 1, "--batch-size", 8, "--learning-rate", 1e-9]
        output = run(FINETUNE, *flags, "--device", "cpu")
        assert "8 of 9 codes keep their weights" in output and "Model: tiny" in output
        old = torch.load(folder / "run" / "best.bin", weights_only=True)
        new = torch.load(tmp_path / "run" / "last.bin", weights_only=True)
        encoder = [name for name in old["model"] if name.startswith("encoder.")]
        assert all(torch.equal(old["model"][name], new["model"][name]) for name in encoder)
        for code, number in old["key"].items():
            assert torch.allclose(
                old["model"]["linear_decoder.weight"][number],
                new["model"]["linear_decoder.weight"][new["key"][code]],
                atol=1e-6,
            )

    def test_prepare_only_trains_nothing(self, finished, tmp_path):
        output = run(FINETUNE, *finished[1], "--save-path", tmp_path / "run", "--prepare-only")
        assert "60 read" in output and sorted(os.listdir(tmp_path / "run")) == [
            "conflicts.csv",
            "data_report.json",
            "histocc.json",
            "key.csv",
            "prepared",
            "rejected_rows.csv",
        ]

    @pytest.mark.full
    def test_general_formatter_with_short_codes_and_workers(self, tmp_path):
        data = tmp_path / "data.csv"
        data.write_text("occ1,code\n" + "".join(f"text {i},{('a12', 'b9', '?')[i % 3]}\n" for i in range(30)))
        run(
            FINETUNE,
            "--dataset",
            data,
            "--target-cols",
            "code",
            "--block-size",
            3,
            "--save-path",
            tmp_path / "run",
            "--allow-codes-shorter-than-block-size",
            "--max-steps",
            2,
            "--batch-size",
            8,
            "--num-workers",
            2,
            "--persistent-workers",
            *TINY,
        )
        state = torch.load(tmp_path / "run" / "last.bin", weights_only=True)
        assert list(state["key"]) == ["?", "a12", "b9"] and state["system"] == "code"
