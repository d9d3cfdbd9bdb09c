"""Runs without an encoder: the fit is all, unless steps are asked for; resumed, handed on, exported."""

import os
import re

import pytest
import torch
from helpers import greatest_difference, read, read_logs, run, run_here, write_rows
from test_ngram_runs import LANGUAGES, TEXTS, prepared

import train_mixer
from histocc import export, watch
from histocc.formatter import BlockyFormatter
from histocc.learn import ngram_fit
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.predict.coder import Coder
from histocc.published import models
from histocc.runtime import checkpoint
from histocc.text import encode

pytestmark = pytest.mark.processes


def test_without_an_encoder_the_model_has_its_ngrams_alone():
    torch.manual_seed(0)
    options = {"config": model_config("tiny"), "encoder": False}
    classes, size = BlockyFormatter("hisco").num_classes, {"rows": 64, "width": 16}
    model = Seq2SeqMixerOccCANINE(classes, 30, ngrams=size, **options).eval().double()
    assert not [name for name in model.state_dict() if name.startswith("encoder.")]
    ids, mask = map(torch.from_numpy, encode(TEXTS, LANGUAGES))
    vectors, (memory,) = model.ngrams([ids])
    found, text = model.encode(ids, mask)
    assert torch.equal(found, memory) and torch.equal(text.ngrams, vectors)
    assert text.encoded.dtype == torch.float64 and not text.encoded.any()
    with pytest.raises(ValueError, match="needs n-grams"):
        Seq2SeqMixerOccCANINE(classes, 30, **options)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return write_rows(folder / "train.csv", 48), write_rows(folder / "val.csv", 24, 48)


def alone(table, folder, *more):
    """Flags of a run whose n-grams are fitted by steps, with both decoders."""
    data = ["--train-data", table[0], "--val-data", table[1], "--save-dir", folder, "--language-col", "lang"]
    size = ["--model-size", "ngrams", "--num-epochs", 10, "--log-interval", 1]
    columns = ["--target-cols", "hisco_1", "hisco_2", "--seq2seq-weight", 0.5]
    return [*data, *columns, *size, "--device", "cpu", *more]


@pytest.fixture(scope="module")
def fitted(table, tmp_path_factory):
    """A run that is a fit."""
    folder = tmp_path_factory.mktemp("fitted") / "run"
    run_here(train_mixer.main, *alone(table, folder, "--ngram-passes", 1))
    return folder


@pytest.mark.full
def test_runs_of_ngrams_alone(table, tmp_path):
    """They learn, are resumed, and code; steps behind the fit are the same on four processes."""
    exact = ["--float64", "--dropout", 0, "--ngram-dropout", 0, "--num-epochs", 15, "--max-steps", 30]
    one, four = tmp_path / "one", tmp_path / "four"
    said = run("train_mixer.py", *alone(table, one, *exact, "--batch-size", 32))
    assert "Learning rate: 0.001" in said and "no effect" not in said
    for more in (["--max-steps", 3], []):
        run("train_mixer.py", *alone(table, tmp_path / "again", *exact, "--batch-size", 32, *more))
    whole, again = (checkpoint.load(str(path / "last.bin"))["model"] for path in (one, tmp_path / "again"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    run("train_mixer.py", *alone(table, four, *exact, "--batch-size", 8), processes=4)
    losses = ("train_loss", "train_loss_linear", "train_loss_seq2seq", "val_loss")
    assert greatest_difference(one, four, losses) < 1e-9
    state = checkpoint.load(str(one / "last.bin"))
    assert state["config"]["encoder"] is False and models.size_name(state["config"]) == "ngrams"
    coder = Coder.load(str(one))
    texts = ["farmer no 8", "tailor no 7"], ["en", "da"]
    for decoder in ("flat", "topk"):
        assert [each.codes[0] for each in coder.code(*texts, decoder)] == ["61110", "79100"]
    assert (coder.embeddings(*texts) != 0).any(axis=1).all()  # n-grams have vectors, too


def test_the_fit_is_all_of_it(table, tmp_path):
    """Without --max-steps; flat_acc is the share of rows that `flat` answers as they are."""
    flags = alone(table, tmp_path / "run", "--log-interval", 10, "--ngram-passes", 2)
    dry = run_here(train_mixer.main, *flags, "--dry-run")
    steps = int(re.search(r"The fit takes about \d+s, (\d+) steps", dry)[1])
    said = run_here(train_mixer.main, *flags)
    assert "Finished: the fit was all" in said and "have no effect: --num-epochs." in said
    assert f"step {steps}/{steps} · both decoders, pass" in said and "left" in said
    assert not re.search("Epochs|Learning rate|Batch size|Steps per epoch|step 0 of", dry + said)
    fit, shown = read_logs(tmp_path / "run")[:-1], watch.view(str(tmp_path / "run"))[0]
    assert [row["step"] for row in fit if row["train_loss"] is None] == [-steps] == [fit[0]["step"]]
    assert {*range(10 - steps, -10, 10)} - {row["step"] for row in fit} == set() and fit[-1]["step"] == 0
    assert f"step {steps} of {steps}" in shown and f"{fit[-1]['train_loss']:.4f}" in shown
    assert os.path.samefile(tmp_path / "run" / "best.bin", tmp_path / "run" / "last.bin")
    scaled = alone(table, tmp_path / "scaled", "--lr-scaling", "linear", "--ngram-passes", 1)
    assert "--lr-scaling" not in run_here(train_mixer.main, *scaled)  # a launcher adds it
    row, saved = read_logs(tmp_path / "run")[-1], (tmp_path / "run" / "last.bin").stat().st_mtime_ns
    rows = read(table[1])
    texts, languages = ([row[name] for row in rows] for name in ("occ1", "lang"))
    coded = Coder.load(str(tmp_path / "run")).code(texts, languages, "flat", 5)
    right = [{*one.codes} == {row["hisco_1"], row["hisco_2"]} - {""} for one, row in zip(coded, rows)]
    assert sum(right) / len(rows) == pytest.approx(row["flat_acc"], abs=1e-9)
    said = run_here(train_mixer.main, *flags, "--batch-size", 16)
    assert "is finished: nothing" in said and "have no effect: --" in said  # no step had another total batch
    assert (tmp_path / "run" / "last.bin").stat().st_mtime_ns == saved
    again = alone(table, tmp_path / "run", "--ngram-passes", 3)
    for more, end in ((["--max-steps", 1], "at step 1"), ([], "is finished (1 step)")):
        said = run_here(train_mixer.main, *again, *more)
        assert end in said and "--ngram-passes has no effect" in said
    assert read_logs(tmp_path / "run")[: len(fit) + 1] == [*fit, row]


def test_ngrams_alone_are_not_trained_on_from_a_checkpoint(table, fitted, tmp_path):
    """Their fit is left out there; steps are taken where they are asked for."""
    flags = alone(table, tmp_path / "new", "--initial-checkpoint", fitted)
    said = run_here(train_mixer.main, *flags, code=2)
    assert "--initial-checkpoint" in said and "histocc train" in said and not (tmp_path / "new").exists()
    for more, end in ((["--max-steps", 1], "Stopped at step 1"), (["--eval-only"], "validation at step 0")):
        assert end in run_here(train_mixer.main, *flags, *more)


def test_many_rows_keep_their_linear_decoder_while_the_other_learns(table, tmp_path, monkeypatch):
    monkeypatch.setattr(ngram_fit, "MANY_ROWS", 48)
    for passes in ("1", "2"):
        run_here(train_mixer.main, *alone(table, tmp_path / passes, "--ngram-passes", passes))
    one, two = (checkpoint.load(str(tmp_path / passes / "last.bin"))["model"] for passes in ("1", "2"))
    same = {name for name in one if torch.equal(one[name], two[name])}
    assert {"ngrams.table.weight", "ngrams.linear.weight", "linear_decoder.bias"} <= same
    assert "ngrams.word_to_memory.weight" not in same
    model, *_ = prepared(alone(table, tmp_path), tmp_path / "more", "--ngram-passes", "1")
    assert all(weight.requires_grad for weight in model.parameters())  # for steps after the fit


def test_it_starts_other_runs_and_is_exported(table, fitted, tmp_path):
    for size, code in (("ngrams", 0), ("tiny", 2)):
        more = ["--initial-checkpoint", fitted, "--max-steps", 1, "--model-size", size]
        said = run_here(train_mixer.main, *alone(table, tmp_path / size, *more), code=code)
        assert ("has another size" in said) == (code == 2)
    run_here(export.main, fitted, "--to", "safetensors", out := tmp_path / "out.safetensors")
    one, two = (Coder.load(str(path)).code(TEXTS, LANGUAGES) for path in (fitted, out))
    assert one == two
