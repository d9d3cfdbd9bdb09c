"""Runs whose model has n-grams, with real processes: same result on any number, resumed to the bit, handed
on, exported, refused."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from helpers import (
    REPO,
    TINY,
    environment,
    greatest_difference,
    read_logs,
    run,
    run_inside,
    write_csv,
    write_rows,
)

import train_mixer
from histocc import export
from histocc.formatter import BlockyFormatter
from histocc.job import build, initial_weights
from histocc.job import data as job_data
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.predict.coder import Coder
from histocc.published import models
from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.runtime.world import World
from histocc.text import encode

pytestmark = pytest.mark.processes
LOSSES = (
    "train_loss",
    "train_loss_linear",
    "train_loss_seq2seq",
    "val_loss",
    "val_loss_linear",
    "val_loss_seq2seq",
)
FIGURES = ("seq_acc", "token_acc", "flat_acc", "samples", "lr", "epoch")
WITH_NGRAMS = [*TINY, "--ngrams", "auto", "--ngram-passes", 4]
# train_mixer.py that also writes down what each process starts from, and its id; SLOW makes each step of the
# fit last longer.
SCRIPT = """
import os, time
import torch
import train_mixer
from histocc.job import build, ngram_fit
from histocc.runtime import signals

def made(args, formatter, world, *rest, make=build.make_model):
    folder = args.save_path
    with open(f"{folder}.pid{world.rank}", "w") as file:
        file.write(str(os.getpid()))
    args, model, config = make(args, formatter, world, *rest)
    torch.save(model.state_dict(), f"{folder}.first{world.rank}")
    return args, model, config

def slow(*arguments, fast=ngram_fit.without_encoder):
    time.sleep(float(os.environ.get("SLOW", 0)))
    return fast(*arguments)

build.make_model, ngram_fit.without_encoder = made, slow
ngram_fit.LINEAR_PASSES = 4  # as many as with both decoders: rounding grows with what is fitted
if __name__ == "__main__":
    signals.start_listening()
    train_mixer.main()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """25 rows to train on, which is 2 × 12 + 1, and 7 to validate on."""
    folder = tmp_path_factory.mktemp("data")
    return [
        "--train-data",
        write_rows(folder / "train.csv", 25),
        "--val-data",
        write_rows(folder / "val.csv", 7, 100),
    ]


def same(one: dict, two: dict) -> bool:
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def curves(files, script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("curves")
    common = [
        *files,
        *WITH_NGRAMS,
        "--language-col",
        "lang",
        "--dropout",
        0,
        "--encoder-dropout",
        0,
        "--ngram-dropout",
        0,
        "--float64",
        "--num-epochs",
        7,
        "--log-interval",
        1,
        "--eval-interval",
        7,
        "--augmentation-prob",
        0.9,
    ]
    ways = {
        "one": (None, ["--batch-size", 12], {}),
        "accumulated": (
            None,
            ["--batch-size", 6, "--accumulate-steps", 2],
            {"OMP_NUM_THREADS": "2"},
        ),
        "two": (2, ["--batch-size", 6], {}),
        "four": (4, ["--global-batch-size", 12, "--batch-size", 128], {}),
        "sharded": (
            2,
            ["--parallel", "fsdp", "--global-batch-size", 12, "--batch-size", 3, "--max-steps", 7],
            {},
        ),
    }
    outputs = {
        name: run(script, *common, *flags, "--save-dir", folder / name, processes=processes, **env)
        for name, (processes, flags, env) in ways.items()
    }
    outputs["one after fsdp"] = run(
        script, *common, "--global-batch-size", 12, "--batch-size", 4, "--save-dir", folder / "sharded"
    )
    return folder, outputs


@pytest.mark.full
class TestAnyNumberOfProcesses:
    """ "sharded" trains in two processes with FSDP and ends in one."""

    @pytest.mark.parametrize("other", ["accumulated", "two", "four", "sharded"])
    def test_curves_are_those_of_one_process(self, curves, other):
        rows, others = read_logs(curves[0] / "one"), read_logs(curves[0] / other)
        assert len(rows) == 21 and greatest_difference(curves[0] / "one", curves[0] / other, LOSSES) < 1e-9
        assert [[row[name] for name in FIGURES] for row in rows] == [
            [row[name] for name in FIGURES] for row in others
        ]

    @pytest.mark.parametrize("other, rank", [("accumulated", 0), ("two", 0), ("two", 1), ("four", 3)])
    def test_the_fit_is_the_same_to_the_bit_in_every_process(self, curves, other, rank):
        """ "accumulated" has two threads, the others one."""
        first, there = (
            torch.load(f"{curves[0] / name}.first{number}", weights_only=True)
            for name, number in (("one", 0), (other, rank))
        )
        assert same(first, there) and "ngrams.table.weight" in first

    def test_the_fit_has_learned(self, curves):
        first = torch.load(f"{curves[0] / 'one'}.first0", weights_only=True)
        assert first["ngrams.linear.weight"].any() and first["ngrams.table.weight"].dtype == torch.float64
        assert (
            first["ngrams.hashes"].dtype == torch.int64
            and (first["ngrams.hashes"].diff() > 0).all()
            and (first["ngrams.idf"] >= 1).all()
        )
        assert not first["linear_decoder.weight"].any() and first["linear_decoder.bias"].any()

    def test_rank_0_alone_says_so_and_once(self, curves):
        for name in ("one", "two", "four"):
            assert curves[1][name].count("Fitting ") == curves[1][name].count("Fitted in ") == 1, name
        assert (
            "Fitting" not in curves[1]["one after fsdp"]
            and "Resuming from step 7" in curves[1]["one after fsdp"]
        )

    def test_they_are_trained_with_the_rest(self, curves):
        first = torch.load(f"{curves[0] / 'one'}.first0", weights_only=True)
        last = torch.load(curves[0] / "one" / "last.bin", weights_only=True)["model"]
        changed = {
            name for name in last if name.startswith("ngrams.") and not torch.equal(first[name], last[name])
        }
        assert changed == {
            "ngrams.table.weight",
            "ngrams.linear.weight",
            "ngrams.word_to_memory.weight",
            "ngrams.text_to_memory.weight",
        }

    def test_what_was_decided_is_kept_and_what_was_asked_stays(self, curves):
        asked = json.loads((curves[0] / "two" / "args.json").read_text())
        state = torch.load(curves[0] / "two" / "last.bin", weights_only=True)
        decided = {
            "learning_rate": 1e-3,
            "empty_blocks": "first",
            "linear_loss": "rows",
            "block_loss": "one-to-one",
        }
        assert state["args"].items() >= decided.items() and {asked[dest] for dest in decided} == {None}
        assert asked["ngrams"] == state["args"]["ngrams"] == "auto"
        assert state["config"]["ngrams"] == {"rows": len(state["model"]["ngrams.hashes"]), "width": 128}


@pytest.fixture(scope="module")
def runs(files, script, tmp_path_factory):
    """A run with dropout in two processes, whole, and in two parts."""
    folder = tmp_path_factory.mktemp("resume")
    common = [
        *files,
        *WITH_NGRAMS,
        "--language-col",
        "lang",
        "--dropout",
        0.1,
        "--encoder-dropout",
        0.1,
        "--num-epochs",
        3,
        "--batch-size",
        6,
        "--log-interval",
        2,
        "--save-interval",
        1000,
    ]
    run(script, *common, "--save-dir", folder / "whole", processes=2)
    run(script, *common, "--save-dir", folder / "parts", "--max-steps", 4, processes=2)
    output = run(script, *common, "--save-dir", folder / "parts", processes=2)
    return folder, output, common


class TestGoingOn:
    def test_weights_and_optimizer_are_bitwise_equal(self, runs):
        whole, parts = (
            torch.load(runs[0] / name / "last.bin", weights_only=True) for name in ("whole", "parts")
        )
        assert whole["step"] == parts["step"] == 9 and same(whole["model"], parts["model"])
        assert all(
            same(values, parts["optimizer"]["state"][index])
            for index, values in whole["optimizer"]["state"].items()
        )
        first, again = (torch.load(f"{runs[0] / 'parts'}.first{rank}", weights_only=True) for rank in (0, 1))
        assert same(first, again)

    def test_the_fit_is_not_repeated(self, runs):
        assert "Resuming from step 4" in runs[1] and "Fitting" not in runs[1]

    def test_ngrams_have_a_dropout_of_their_own(self, runs, tmp_path):
        flags = [*runs[2], "--ngram-passes", 0]
        assert prepared(flags, tmp_path / "usual")[0].ngrams.dropout == 0.3
        assert prepared(flags, tmp_path / "none", "--ngram-dropout", 0)[0].ngrams.dropout == 0

    def test_the_first_step_continues_what_was_fitted(self, runs, tmp_path):
        """The encoder, which the decoders were fitted without, adds nothing to them until it is trained."""
        model, _, _, _ = prepared(runs[2], tmp_path / "fitted")
        unfitted, _, _, _ = prepared(runs[2], tmp_path / "unfitted", "--ngram-passes", 0)
        ids, mask = map(torch.from_numpy, encode(["farmer", "smith of the parish"], ["en", "da"]))
        with torch.no_grad():
            assert not model.eval().encoder(ids, mask)[0].any()
            assert torch.equal(model.encode(ids, mask)[0], model.ngrams(ids)[1])
            assert unfitted.eval().encoder(ids, mask)[0].any()

    @pytest.mark.parametrize("asked", ["none", "6"])
    def test_others_are_refused_by_name(self, runs, asked):
        before = (runs[0] / "whole" / "last.bin").read_bytes()
        code, said = run_inside(
            train_mixer.main, *runs[2], "--save-dir", runs[0] / "whole", "--ngrams", asked, "--num-epochs", 4
        )
        assert code == 2 and f"--ngrams was 'auto', now it is '{asked}'" in said and "Traceback" not in said
        assert (runs[0] / "whole" / "last.bin").read_bytes() == before

    @pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.full)])
    @pytest.mark.full
    def test_a_signal_ends_the_fit(self, files, script, tmp_path, processes):
        """To the last of the processes; rank 0 is the one that fits."""
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if processes == 2 else []
        )
        command = [
            sys.executable,
            "-W",
            "ignore",
            *launcher,
            str(script),
            *["--distributed"] * (processes == 2),
            *files,
            *WITH_NGRAMS,
            "--ngram-passes",
            "900",
            "--batch-size",
            "6",
            "--num-epochs",
            "1",
            "--save-dir",
            str(tmp_path / "run"),
        ]
        process = subprocess.Popen(
            list(map(str, command)),
            env=environment(SLOW="0.1"),
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said, pid = "", tmp_path / f"run.pid{processes - 1}"
        while "Fitting" not in said and (line := process.stdout.readline()):
            said += line
        until = time.monotonic() + 30
        while not (pid.exists() and pid.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(int(pid.read_text()), signal.SIGTERM)
        said += process.communicate(timeout=60)[0]
        assert (
            process.returncode == 0
            and "before the first step" in said
            and "fewer --ngram-passes make it shorter" in said
            and "Fitted" not in said
            and "Traceback" not in said
        ), said
        assert ("Stopped by SIGTERM" if processes == 1 else "Stopped by a signal to another process") in said
        assert not list((tmp_path / "run").glob("*.bin"))


def prepared(flags, folder, *more):
    """(model, its config, data, what was said) of a run as it would start, in this process."""
    world, said = World(), []
    object.__setattr__(world, "print", lambda *words: said.append(" ".join(words)))
    args = train_mixer.get_args_parser().parse_args(
        [str(flag) for flag in (*flags, *more, "--save-dir", folder)]
    )
    args, read, data = job_data.prepared(args, world, args.train_data, args.val_data)
    formatter = BlockyFormatter.from_dict(read.formatter)
    _, model, config = build.make_model(args, formatter, world, data, None)
    return model, config, data, "\n".join(said)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A file as the published HISCO models are: 1,919 outputs and no key."""
    torch.manual_seed(1)
    model = Seq2SeqMixerOccCANINE(BlockyFormatter("hisco").num_classes, 1919, config=model_config("tiny"))
    path = tmp_path_factory.mktemp("published") / "hisco.bin"
    torch.save({"model": model.state_dict(), "step": 1}, path)
    return path


class TestStarts:
    def test_from_an_own_model_with_the_same_key(self, runs, tmp_path):
        own = checkpoint.load(runs[0] / "whole" / "last.bin")
        model, config, _, said = prepared(
            runs[2], tmp_path / "run", "--initial-checkpoint", runs[0] / "whole" / "last.bin"
        )
        assert same(own["model"], model.state_dict()) and config["ngrams"] == own["config"]["ngrams"]
        assert "Fitting" not in said and "random weights" not in said

    def test_from_an_own_model_with_another_key(self, runs, tmp_path):
        """Rows of both linear parts go with their codes; those of new codes change nothing but the bias,
        and words stay as they are."""
        own = checkpoint.load(runs[0] / "whole" / "last.bin")
        rows = [
            (f"{name} {i}", code, "", "en")
            for i in range(6)
            for name, code in (("pilot", "04220"), ("tailor", "79100"), ("weaver", "75400"))
        ]
        source = write_csv(tmp_path / "other.csv", ("occ1", "hisco_1", "hisco_2", "lang"), rows)
        model, config, data, said = prepared(
            runs[2],
            tmp_path / "run",
            "--train-data",
            source,
            "--val-data",
            source,
            "--shrink-key",
            "--initial-checkpoint",
            runs[0] / "whole" / "last.bin",
        )
        assert data.codes == ["04220", "75400", "79100"] and "2 of 3 codes keep their weights" in said
        state, old = model.state_dict(), [own["key"]["75400"], own["key"]["79100"]]
        for name in ("ngrams.linear.weight", "linear_decoder.weight", "linear_decoder.bias"):
            assert torch.equal(state[name][1:], own["model"][name][old]) and own["model"][name][old].any(), (
                name
            )
        assert not state["ngrams.linear.weight"][0].any() and not state["linear_decoder.weight"][0].any()
        rest = {name for name in state if name.startswith("ngrams.") and name != "ngrams.linear.weight"}
        assert len(rest) == 5 and all(torch.equal(state[name], own["model"][name]) for name in rest)

    def test_none_and_fewer_against_a_model_that_has_them_are_refused(self, runs, tmp_path):
        for asked in ("none", "4"):
            code, said = run_inside(
                train_mixer.main,
                *runs[2],
                "--save-dir",
                tmp_path / asked,
                "--initial-checkpoint",
                runs[0] / "whole",
                "--ngrams",
                asked,
            )
            assert (
                code == 2
                and f"--ngrams {asked}: the initial weights have" in said
                and "--only-encoder" in said
                and "Traceback" not in said
            )
            assert not list((tmp_path / asked).glob("*.bin"))

    def test_only_the_encoder(self, runs, tmp_path):
        own = checkpoint.load(runs[0] / "whole" / "last.bin")["model"]
        for asked in ("auto", "none", "6"):
            model, config, _, said = prepared(
                runs[2],
                tmp_path / asked,
                "--initial-checkpoint",
                runs[0] / "whole" / "last.bin",
                "--only-encoder",
                "--ngrams",
                asked,
            )
            assert bool(model.ngrams) == bool(config["ngrams"]) == (asked == "6")
            assert ("new: 64 n-grams, not fitted" in said) == (asked == "6")
            assert "new, with random weights" in said and "tensors of ngrams" not in said
            state = model.state_dict()
            assert all(
                torch.equal(state[name], value) for name, value in own.items() if name.startswith("encoder.")
            ), asked

    def test_published_weights_have_none_and_stay_bit_for_bit(self, runs, published, tmp_path):
        model, config, _, _ = prepared(runs[2], tmp_path / "run", "--initial-checkpoint", published)
        assert config["ngrams"] is None and model.ngrams is None
        assert same(torch.load(published, weights_only=True)["model"], model.state_dict())

    @pytest.mark.full
    def test_added_to_published_weights_they_change_no_bit_and_learn(self, runs, published, tmp_path):
        flags = [
            *runs[2],
            "--initial-checkpoint",
            published,
            "--language-col",
            "lang",
            "--dropout",
            0,
            "--encoder-dropout",
            0,
            "--ngram-dropout",
            0,
        ]
        without, _, data, _ = prepared(flags, tmp_path / "without")
        model, config, _, said = prepared(flags, tmp_path / "with", "--ngrams", 7)
        assert config["ngrams"]["rows"] == 128 and "Fitting" not in said and (model.ngrams.idf >= 1).all()
        coders = [
            Coder(
                each.eval(),
                BlockyFormatter("hisco"),
                {"key": dict.fromkeys(data.codes), "languages": ["en"], "config": config},
            )
            for each in (without, model)
        ]
        texts = ["farmer no 1", "wine merchant and tailor no 3", "x"]
        for what in (
            lambda coder: coder.probabilities(texts, ["en"] * 3, logits=True),
            lambda coder: coder.probabilities(texts, ["en"] * 3, "full"),
        ):
            assert np.array_equal(*map(what, coders))
        assert [coder.code(texts, ["en"] * 3) for coder in coders][0] == coders[1].code(texts, ["en"] * 3)
        run_inside(
            train_mixer.main,
            *flags,
            "--ngrams",
            7,
            "--save-dir",
            tmp_path / "with",
            "--max-steps",
            2,
            "--learning-rate",
            1e-3,
        )
        trained = checkpoint.load(tmp_path / "with" / "last.bin")["model"]
        for name in ("linear", "word_to_memory", "text_to_memory", "table"):
            assert not torch.equal(
                trained[f"ngrams.{name}.weight"], model.state_dict()[f"ngrams.{name}.weight"]
            ), name

    @pytest.mark.full
    def test_added_ngrams_alone_have_a_higher_rate_and_keep_it(self, runs, published, tmp_path):
        flags = [*runs[2], "--initial-checkpoint", published, "--ngrams", 7, "--save-dir", tmp_path / "run"]

        def said(*more) -> str:
            code, output = run_inside(train_mixer.main, *flags, *more)
            assert code == 0, output
            return next(line for line in output.splitlines() if "Learning rate: " in line)

        first = said("--max-steps", 2)
        assert "Learning rate: 2e-05 " in first and first.endswith("of the n-grams 30 times that"), first
        kept = said("--max-steps", 3)
        assert kept == first
        groups = checkpoint.load(tmp_path / "run" / "last.bin")["optimizer"]["param_groups"]
        assert len(groups) == 2 and len(groups[1]["params"]) == 4
        given = said("--overwrite", "--max-steps", 1, "--linear-lr-factor", 3)
        assert given.endswith("of the linear decoder and the n-grams 3 times that"), given

    @pytest.mark.full
    def test_a_dry_run_says_the_rates_of_the_run(self, runs, tmp_path):
        lines = []
        for number, more in enumerate((["--dry-run"], [], ["--ngram-passes", 0])):
            code, output = run_inside(
                train_mixer.main, *runs[2], *more, "--max-steps", 1, "--save-dir", tmp_path / str(number)
            )
            assert code == 0, output
            lines.append(next(line for line in output.splitlines() if "Learning rate: " in line))
            assert ("before it the fit of the n-grams, not measured" in output) == ("--dry-run" in more)
        assert lines[0] == lines[1] and lines[0].endswith(
            "of the linear decoder and the n-grams 0.1 times that"
        )
        assert lines[2].endswith("of the linear decoder and the n-grams 5 times that")

    def test_a_number_of_bits_is_the_most(self, runs, tmp_path):
        for bits in (4, 6):
            model, config, _, said = prepared(runs[2], tmp_path / str(bits), "--ngrams", bits)
            assert (
                config["ngrams"]["rows"] == len(model.ngrams.hashes) == 1 << bits
                and f"Fitting {1 << bits} n-grams" in said
            )
        model, config, _, said = prepared(runs[2], tmp_path / "unfitted", "--ngram-passes", 0)
        assert (
            config["ngrams"]["rows"] > 64 and "Fitting" not in said and not model.ngrams.linear.weight.any()
        )

    def test_an_encoder_that_stays_untrained_is_named(self, runs, tmp_path):
        for more in ([], ["--freeze-encoder"]):
            _, _, _, said = prepared(runs[2], tmp_path / str(len(more)), "--ngram-passes", 1, *more)
            assert "Fitted in" in said and ("the decoders have the n-grams alone" in said) == bool(more)

    def test_texts_without_ngrams_train_without(self, files, tmp_path):
        rows = [(".", "61110", "", "en"), ("-", "41025", "", "en")] * 4
        source = write_csv(tmp_path / "short.csv", ("occ1", "hisco_1", "hisco_2", "lang"), rows)
        output = run(
            REPO / "train_mixer.py",
            "--train-data",
            source,
            "--val-data",
            source,
            *WITH_NGRAMS,
            "--batch-size",
            4,
            "--num-epochs",
            1,
            "--save-dir",
            tmp_path / "run",
        )
        assert "Finished" in output and all(
            row["val_loss"] is None or row["val_loss"] < 100 for row in read_logs(tmp_path / "run")
        )


TEXTS = [
    "farmer no 1",
    "wine merchant and tailor no 7",
    "shoemaker",
    "q",
    "an unknown one 12345 of the parish of somewhere",
] * 2
LANGUAGES = ["en", "da", "se", "unk", "en"] * 2


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory):
    pytest.importorskip("safetensors")
    folder = tmp_path_factory.mktemp("exported")
    (folder / "safe").mkdir()
    targets = {"published": folder / "model.bin", "safetensors": folder / "safe" / "model.safetensors"}
    return targets, {
        form: export.export(str(runs[0] / "whole"), form, str(target)) for form, target in targets.items()
    }


class TestExport:
    @pytest.mark.parametrize("form", ["published", "safetensors"])
    def test_it_codes_as_the_run_does(self, runs, exported, form):
        one, two = Coder.load(str(runs[0] / "whole")), Coder.load(str(exported[0][form]))
        assert two.model.ngrams is not None and same(one.model.state_dict(), two.model.state_dict())
        for decoder in ("greedy", "flat", "topk", "full"):
            assert one.code(TEXTS, LANGUAGES, decoder) == two.code(TEXTS, LANGUAGES, decoder)

    @pytest.mark.parametrize("form", ["published", "safetensors"])
    def test_that_the_published_program_knows_none_is_said(self, runs, exported, tmp_path, form):
        notes = "\n".join(exported[1][form])
        assert "for histocc alone" in notes and "n-grams" in notes and "--ngrams none" in notes
        with pytest.raises(UserError, match="(?s)would code otherwise with it:.*n-grams.*--ngrams none"):
            export.export(
                str(runs[0] / "whole"),
                form,
                str(tmp_path / exported[0][form].name),
                for_published_program=True,
            )
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("form", ["published", "safetensors"])
    def test_training_starts_from_it_as_from_the_run(self, runs, exported, tmp_path, form):
        model, config, _, _ = prepared(runs[2], tmp_path / "run", "--initial-checkpoint", exported[0][form])
        best = models.load_model(str(runs[0] / "whole"))[0].state_dict()
        assert same(best, model.state_dict()) and config["ngrams"]
        args = [
            train_mixer.get_args_parser().parse_args(
                ["--train-data", "x", "--val-data", "y", "--save-dir", "z", "--initial-checkpoint", str(path)]
            )
            for path in (runs[0] / "whole" / "last.bin", exported[0][form])
        ]
        one, two = (
            {
                name: value
                for name, value in initial_weights.initial_weights(each).items()
                if name not in ("model", "what")
            }
            for each in args
        )
        assert one == two

    def test_embeddings_are_those_of_the_encoder(self, runs):
        coder = Coder.load(str(runs[0] / "whole"))
        found = coder.embeddings(TEXTS, LANGUAGES)
        assert found.shape == (10, 128) and np.isfinite(found).all()
        with torch.no_grad():
            coder.model.ngrams.table.weight.mul_(50)
        assert np.array_equal(found, coder.embeddings(TEXTS, LANGUAGES))

    def test_predictions_of_two_processes_are_those_of_one(self, runs, tmp_path):
        source = write_csv(
            tmp_path / "in.csv",
            ("occ1", "lang"),
            [(f"{TEXTS[i % 5]} {i % 60}", LANGUAGES[i % 4]) for i in range(300)],
        )
        for name, processes in (("one.csv", None), ("two.csv", 2)):
            files = ["--model", runs[0] / "whole", "--input", source, "--output", tmp_path / name]
            columns = ["--column", "occ1", "--language-column", "lang"]
            run("histocc.predict", *files, *columns, "--device", "cpu", processes=processes)
        assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes() and (
            tmp_path / "one.csv"
        ).read_bytes().count(b"\n") == 301


def put(entry, change):
    return lambda s: s["model"].update({entry: change(s["model"][entry])})


DAMAGED = {
    "floats": put("ngrams.hashes", torch.Tensor.double),
    "short numbers": put("ngrams.hashes", torch.Tensor.int),
    "too few": put("ngrams.hashes", lambda hashes: hashes[:-1].clone()),
    "none": lambda s: s["model"].pop("ngrams.hashes"),
    "weights that are no numbers": lambda s: s["model"]["ngrams.idf"].fill_(torch.nan),
    "fewer outputs": put("ngrams.linear.weight", lambda weight: weight[:-1].clone()),
    "a table of other rows": put("ngrams.table.weight", lambda weight: weight[:-1].clone()),
    "not in config": lambda s: s["config"].update(ngrams=None),
    "in config alone": lambda s: [s["model"].pop(n) for n in list(s["model"]) if n.startswith("ngrams.")],
    "no rows": lambda s: s["config"]["ngrams"].update(rows=0),
    "too many rows": lambda s: s["config"]["ngrams"].update(rows=1 << 40),
    "other rows": lambda s: s["config"]["ngrams"].update(rows=77),
    "a width of words": lambda s: s["config"]["ngrams"].update(width="wide"),
    "a list": lambda s: s["config"].update(ngrams=[1]),
    "no width": lambda s: s["config"]["ngrams"].pop("width"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_are_refused(runs, tmp_path, damage):
    state = checkpoint.load(runs[0] / "whole" / "last.bin")
    del state["checksum"]
    torch.save(state, tmp_path / "whole.bin")
    models.load_model(str(tmp_path / "whole.bin"))  # as it is, it is read
    DAMAGED[damage](state)
    torch.save(state, tmp_path / "bad.bin")
    with pytest.raises(UserError, match="bad.bin: cannot be read as a checkpoint"):
        models.load_model(str(tmp_path / "bad.bin"))
