"""Runs whose model has n-grams: the same on any processes, resumed to the bit, handed on, exported."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from helpers import (
    DEFAULT,
    all_tests,
    read_logs,
    run,
    run_here,
    start_forked,
    wait_until,
    write_csv,
    write_rows,
)
from test_initial_weights import published  # noqa: F401

import finetune
import train_mixer
from histocc import export
from histocc.formatter import BlockyFormatter
from histocc.job.config import decide
from histocc.job.inputs import make_rows, prepare_data, read_initial_weights
from histocc.job.model import make_loss, make_model
from histocc.learn import ngram_fit
from histocc.model.ngrams import PATTERNS
from histocc.predict.coder import Coder
from histocc.runtime import checkpoint
from histocc.runtime.world import World
from histocc.text import encode

pytestmark = pytest.mark.processes
WITH_NGRAMS = [*DEFAULT, "--language-col", "lang"]
PROCESSES = 3 if all_tests() else None
NO_DROPOUT = ["--dropout", 0, "--encoder-dropout", 0, "--ngram-dropout", 0]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """25 rows to train on, which is 2 × 12 + 1, and 7 to validate on."""
    folder = tmp_path_factory.mktemp("data")
    train, val = write_rows(folder / "train.csv", 25), write_rows(folder / "val.csv", 7, 100)
    return ["--train-data", train, "--val-data", val]


def same(one: dict, two: dict) -> bool:
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def load(path) -> dict:
    return torch.load(path, weights_only=True)


def test_the_fit_is_the_same_on_any_number_of_processes_and_threads(tmp_path):
    """To the bit; rank 0 alone fits, once. The processes have one thread each, one process has two."""
    rows = write_rows(tmp_path / "rows.csv", 48)
    flags = ["--dataset", rows, "--seq2seq-weight", 0.1, "--ngram-passes", 1, "--save-path"]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    said = {1: run_here(finetune.main, *flags, tmp_path / "1")}
    torch.set_num_threads(threads)
    for number in (2, 4) if all_tests() else (2,):
        said[number] = run("finetune.py", *flags, tmp_path / str(number), processes=number)
    states = {number: load(tmp_path / str(number) / "last.bin") for number in said}
    assert states[1]["config"]["encoder"] is False
    for number, state in states.items():
        assert state["rng"]["processes"] == number
        assert same(state["model"], states[1]["model"]), number
        assert said[number].count("Fitting the n-grams") == said[number].count("Fitted in ") == 1


# ---- resumed (the steps behind a fit: test_training)


@pytest.fixture(scope="module")
def runs(files, tmp_path_factory):
    """(folder, flags) of a whole run with dropout. Two processes always sum gradients in one order."""
    folder = tmp_path_factory.mktemp("resume")
    common = [*files, *WITH_NGRAMS, "--dropout", 0.1, "--encoder-dropout", 0.1, "--num-epochs", 1]
    common += ["--global-batch-size", 12, "--ngram-passes", 2, "--save-interval", 1000]
    flags = [*common, "--save-dir", folder / "whole"]
    run("train_mixer.py", *flags, processes=3) if PROCESSES else run_here(train_mixer.main, *flags)
    return folder, common


def test_a_fit_that_is_killed_continues_to_the_bit(runs, tmp_path):
    """In the middle of its second part. What was put in the place of its file is noticed."""
    log, flags = tmp_path / "log", [*runs[1], "--save-interval", 1, "--save-dir", tmp_path / "run"]
    log.touch()
    processes = start_forked("train_mixer.py", flags + ["--distributed"] * bool(PROCESSES), log, PROCESSES)
    wait_until(lambda: log.read_text().count("Saved ngrams.bin of step 1:") > 1, log.read_text, 100)
    for process in processes:
        process.kill()
        process.join()
    assert not (tmp_path / "run" / "last.bin").exists(), log.read_text()
    folder, whole = tmp_path / "run", runs[0] / "whole" / "last.bin"
    kept = load(folder / "ngrams.bin")
    for other in (load(whole), {name: kept[name] for name in kept if name != "checksum"}, kept | {"part": 7}):
        changed = shutil.copytree(folder, tmp_path / f"other{len(other)}")
        torch.save(other, changed / "ngrams.bin")
        *_, said = prepared(runs[1], changed)
        assert "the fit starts over" in said and "Fitted in" in said, said
    output = run("train_mixer.py", *flags, processes=PROCESSES)
    assert "The fit continues" in output
    assert same(load(folder / "last.bin")["model"], load(whole)["model"])
    assert not (folder / "ngrams.bin").exists() and read_logs(folder)[0]["step"] == 0


# ---- what a new run starts from


def prepared(flags, folder, *more):
    """(model, its config, data, what was said) of a run as it would start, in this process."""
    world, said = World(), []
    object.__setattr__(world, "print", lambda *words: said.append(" ".join(words)))
    given = [str(flag) for flag in (*flags, *more, "--save-dir", folder)]
    args = train_mixer.get_args_parser().parse_args(given)
    args, read = prepare_data(args, world, args.train_data, args.val_data)
    formatter, data = BlockyFormatter.from_dict(read.settings.formatter), read.data
    named = args.initial_checkpoint, args.initial_key, args.key
    first = read_initial_weights(*named) if args.initial_checkpoint else None
    args = decide(args, None, first)
    args, model, config = make_model(args, formatter, world, data, None, first)
    if first is None and args.ngram_passes != 0:
        encoding, loss_fn = make_rows(args, formatter, data, config)[0].encoding, make_loss(args, formatter)
        fit = ngram_fit.Fit(args, args.ngram_passes, data, encoding, loss_fn, model, say=world.print)
        ngram_fit.fit_ngrams(fit, world)
    return model, config, data, "\n".join(said)


def test_the_first_step_continues_what_was_fitted(runs, tmp_path):
    """The encoder, which the decoders were fitted without, adds nothing to them until it is trained."""
    model, config, _, said = prepared(runs[1], tmp_path / "fitted", "--ngrams", 6)
    assert config["ngrams"]["rows"] == 64 and "Fitting the n-grams" in said
    more = ["--ngram-passes", 0, "--ngram-dropout", 0]
    other, config, _, said = prepared(runs[1], tmp_path / "unfitted", *more)
    assert model.ngrams.dropout == 0.3 and other.ngrams.dropout == 0
    assert config["ngrams"]["rows"] > 64 and "Fitting" not in said and not other.ngrams.linear.weight.any()
    ids, mask = map(torch.from_numpy, encode(["farmer", "smith of the parish"], ["en", "da"]))
    with torch.no_grad():
        assert not model.eval().encoder(ids, mask)[0].any() and other.eval().encoder(ids, mask)[0].any()
        assert torch.equal(model.encode(ids, mask)[0], model.ngrams([ids])[1][0])


def test_from_an_own_model_with_the_same_key_and_with_another(runs, tmp_path):
    """Rows of both linear parts go with their codes; those of new codes change nothing but the bias."""
    last = runs[0] / "whole" / "last.bin"
    own, start = checkpoint.load(last), ["--initial-checkpoint", last]
    model, config, _, said = prepared(runs[1], tmp_path / "same", *start)
    assert config["ngrams"] == own["config"]["ngrams"] and "Fitting" not in said and "random" not in said
    titles = (("pilot", "04220"), ("tailor", "79100"), ("weaver", "75400"))
    rows = [(f"{name} {i}", code, "", "en") for i in range(6) for name, code in titles]
    source = write_csv(tmp_path / "other.csv", ("occ1", "hisco_1", "hisco_2", "lang"), rows)
    key = write_csv(tmp_path / "key.csv", KEY, [("04220", 0), ("75400", 1), ("79100", 2)])
    data = ["--train-data", source, "--val-data", source, "--key", key]
    other, _, prepared_data, said = prepared(runs[1], tmp_path / "run", *data, *start)
    assert prepared_data.codes == ["04220", "75400", "79100"] and "the weights of 2 of 3 codes" in said
    before, state = model.state_dict(), other.state_dict()
    kept = [own["key"]["75400"], own["key"]["79100"]]
    for name in ("ngrams.linear.weight", "linear_decoder.weight", "linear_decoder.bias"):
        assert torch.equal(state[name][1:], before[name][kept]) and before[name][kept].any(), name
    assert not state["ngrams.linear.weight"][0].any() and not state["linear_decoder.weight"][0].any()
    rest = {name for name in state if name.startswith("ngrams.") and name != "ngrams.linear.weight"}
    assert len(rest) == 5 and all(torch.equal(state[name], before[name]) for name in rest)


def test_ngrams_are_trained_with_the_rest_and_what_was_decided_is_kept(runs, tmp_path):
    model, _, _, _ = prepared(runs[1], tmp_path)
    first, state = model.state_dict(), load(runs[0] / "whole" / "last.bin")
    changed = {name for name, value in state["model"].items() if not torch.equal(first[name], value)}
    trained = ("table", "linear", "word_to_memory", "text_to_memory")
    assert {name for name in changed if "ngrams" in name} == {f"ngrams.{name}.weight" for name in trained}
    assert first["ngrams.linear.weight"].any() and (first["ngrams.hashes"].diff() > 0).all()
    assert state["thresholds"]["at_most"] == 2  # no more codes than a row has
    decided = {"learning_rate": 1e-3, "empty_blocks": "first", "linear_loss": "rows"}
    asked = json.loads((runs[0] / "whole" / "args.json").read_text())
    assert state["args"].items() >= decided.items() and {asked[name] for name in decided} == {None}
    assert asked["ngrams"] == state["args"]["ngrams"] == "auto"
    expected = {"rows": len(first["ngrams.hashes"]), "width": 128, "patterns": list(PATTERNS), "case": "all"}
    assert state["config"]["ngrams"] == expected


@pytest.mark.parametrize("asked", ["none", "4"])
def test_fewer_than_the_initial_weights_have_are_refused(runs, tmp_path, asked):
    flags = ["--save-dir", tmp_path, "--initial-checkpoint", runs[0] / "whole", "--ngrams", asked]
    said = run_here(train_mixer.main, *runs[1], *flags, code=2)
    assert f"--ngrams {asked}: " in said and "--only-encoder" in said and not list(tmp_path.glob("*.bin"))


@pytest.mark.full
def test_added_to_published_weights_they_change_no_bit_and_learn_faster(runs, published, tmp_path):
    flags = [*runs[1], "--initial-checkpoint", published, *NO_DROPOUT]
    without, config, data, _ = prepared(flags, tmp_path / "without")
    assert config["ngrams"] is None and same(load(published)["model"], without.state_dict())
    model, config, _, said = prepared(flags, tmp_path / "with", "--ngrams", 7)
    assert config["ngrams"]["rows"] == 128 and "Fitting" not in said and (model.ngrams.idf >= 1).all()
    state = {"key": dict.fromkeys(data.codes), "languages": ["en"], "config": config}
    coders = [Coder(made.eval(), BlockyFormatter("hisco"), state) for made in (without, model)]
    texts, languages = ["farmer no 1", "wine merchant and tailor no 3", "smith"], ["en"] * 3
    assert np.array_equal(*(coder.probabilities(texts, languages, logits=True) for coder in coders))
    assert coders[0].code(texts, languages, "greedy") == coders[1].code(texts, languages, "greedy")
    flags += ["--ngrams", 7, "--max-steps", 1, "--save-dir", tmp_path / "with"]
    said = run_here(train_mixer.main, *flags)
    assert re.search("Learning rate: 2e-05 .* of the n-grams 30 times that$", said, re.M)


def test_texts_without_ngrams_train_without(tmp_path):
    rows = [(".", "61110", "", "en"), ("-", "41025", "", "en")] * 4
    source = write_csv(tmp_path / "short.csv", ("occ1", "hisco_1", "hisco_2", "lang"), rows)
    flags = ["--train-data", source, "--val-data", source, *WITH_NGRAMS, "--batch-size", 4]
    run_here(train_mixer.main, *flags, "--num-epochs", 1, "--save-dir", tmp_path / "run")
    assert read_logs(tmp_path / "run")[-1]["val_loss"] < 100


# ---- its files

KEY = ("system_code", "code")
TEXTS = ["farmer no 1", "wine merchant and tailor no 7", "q", "an unknown one 12345 of the parish"]
LANGUAGES = ["en", "da", "unk", "en"]


@pytest.mark.parametrize("form, name", [("published", "model.bin"), ("safetensors", "model.safetensors")])
def test_an_export_codes_and_starts_as_the_run_does(runs, tmp_path, form, name):
    if form == "safetensors":
        pytest.importorskip("safetensors")
    target = tmp_path / "out" / name
    notes = run_here(export.main, runs[0] / "whole", "--to", form, target)
    assert "--ngrams none" in notes
    one, two = Coder.load(str(runs[0] / "whole")), Coder.load(str(target))
    assert two.model.ngrams is not None and same(one.model.state_dict(), two.model.state_dict())
    for decoder in ("greedy", "flat", "topk", "full"):
        assert one.code(TEXTS, LANGUAGES, decoder) == two.code(TEXTS, LANGUAGES, decoder)
    model, config, _, _ = prepared(runs[1], tmp_path / "run", "--initial-checkpoint", target)
    assert same(one.model.state_dict(), model.state_dict()) and config["ngrams"]
