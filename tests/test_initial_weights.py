"""What a run takes from the weights that it starts from: text rule, key, linear decoder; what it does where
its arguments leave it open, and that it stays so; the learning rate of the linear decoder.
"""

import json
import os
import re

import numpy as np
import pytest
import torch
from helpers import REPO, TINY, run_here, state_of, words, write_csv, write_rows

import finetune
from histocc import export
from histocc.formatter import BlockyFormatter, hisco_key
from histocc.job import inputs
from histocc.job import model as of_run
from histocc.job.config import LEFT_OPEN, FinetuneConfig, decide
from histocc.model.loss import BEST_FIT, MEAN, ONE_TO_ONE, ROWS
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.model.ngrams import TextVectors
from histocc.published import models
from histocc.runtime.errors import UserError
from histocc.runtime.world import World
from histocc.trainer.schedule import make_optimizer

TITLES = [
    ("Væver", "75400"),
    ("Smed og Gårdmand", "83110"),
    ("WINE MERCHANT", "41025"),
    ("Tjenestepige", "54020"),
    ("Høker", "41030"),
]
CODES = sorted(code for _, code in TITLES)
SMALL = words(
    "--device cpu --num-epochs 1 --batch-size 16 --learning-rate 1e-9 --log-interval 1 --save-interval 2"
    " --ngrams none"
)
HISCO = words("--formatter hisco --target-cols hisco_1 --share-val 0.3")


def titles(path, n=48, more=()):
    """Rows with capitals and national letters; `more`: further pairs of a text and a code."""
    pairs = [*TITLES, *more]
    rows = [(f"{pairs[i % len(pairs)][0]} {i}", pairs[i % len(pairs)][1], "da") for i in range(n)]
    return write_csv(path, ("occ1", "hisco_1", "lang"), rows)


def key_file(path, codes):
    return write_csv(path, ["system_code", "code"], [(code, i) for i, code in enumerate(codes)])


def mixer(kind="hisco", codes=1919, **more):
    torch.manual_seed(1)
    formatter = BlockyFormatter(kind, **more)
    return Seq2SeqMixerOccCANINE(formatter.num_classes, codes, config=model_config("tiny"))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A file as the published HISCO models are: 1,919 outputs and no key."""
    path = tmp_path_factory.mktemp("published") / "hisco.bin"
    torch.save({"model": mixer().state_dict(), "step": 1}, path)
    return str(path)


def tuned(data, folder, *flags, code=0):
    return run_here(finetune.main, "--dataset", data, "--save-path", folder, *SMALL, *flags, code=code)


def rows_of(state, codes):
    return torch.stack([state["model"]["linear_decoder.weight"][state["key"][code]] for code in codes])


@pytest.mark.processes
@pytest.mark.full
def test_a_published_model_keeps_its_outputs_and_its_text_rule(published, tmp_path):
    data, out = titles(tmp_path / "data.csv", more=[("Maskinfører", "99998")]), tmp_path / "out"
    common = [*HISCO, *words("--language-col lang --initial-checkpoint"), published]
    output = tuned(data, out, *common, "--max-steps", 1)
    assert "the weights of 1,919 of 1,920 codes" in output and "Texts: ascii-lower" in output
    assert "Resuming from step 1" in tuned(data, out, *common)  # from the run's own files
    state, first = state_of(out), torch.load(published, weights_only=True)["model"]
    assert list(state["key"]) == [*hisco_key(), "99998"] and state["kept_codes"] == 1919
    assert state["config"]["text"] == "ascii-lower"
    assert not state["config"]["memory_mask"] and state["config"]["target_mask"]
    assert torch.allclose(rows_of(state, hisco_key()), first["linear_decoder.weight"], atol=1e-6)
    (prepared,) = out.glob("prepared/*/train.chars")
    chars = prepared.read_bytes()
    assert bytes(chars[::4]).decode().islower() and b"v\0\0\0a\0\0\0e\0\0\0v\0\0\0e\0\0\0r" in chars

    stripped = key_file(tmp_path / "key.csv", [code.lstrip("0") or "00000" for code in hisco_key()])
    known = titles(tmp_path / "known.csv")
    tuned(known, tmp_path / "keyed", *common, "--key", stripped, "--clean-text", "as-is", "--max-steps", 1)
    keyed = state_of(tmp_path / "keyed")  # as spreadsheets leave a key
    assert list(keyed["key"]) == list(hisco_key()) and keyed["config"]["text"] == "as-is"
    assert torch.allclose(rows_of(keyed, hisco_key()), first["linear_decoder.weight"], atol=1e-6)
    others = words("--memory-mask --published-target-mask --clean-text as-is")
    said = tuned(data, out, *common, *others, code=2)
    for flag in ("memory-mask was False", "published-target-mask was False", "clean-text was 'ascii-lower'"):
        assert f"--{flag}, now it is " in said


@pytest.mark.processes
@pytest.mark.full
def test_a_key_names_the_outputs_of_a_file_that_holds_none(tmp_path):
    codes, model = [*CODES, "00000"], mixer(codes=6)
    torch.save({"model": model.state_dict()}, tmp_path / "six.bin")
    key = key_file(tmp_path / "key.csv", codes)
    data, common = titles(tmp_path / "data.csv"), [*HISCO, "--initial-checkpoint", tmp_path / "six.bin"]
    output = tuned(data, tmp_path / "out", *common, "--key", key)
    state = state_of(tmp_path / "out")
    assert list(state["key"]) == codes and "the key differs" not in output
    assert torch.allclose(state["model"]["linear_decoder.weight"], model.linear_decoder.weight, atol=1e-6)
    output = tuned(data, tmp_path / "none", *common, "--max-steps", 1)
    assert "the weights of 0 of 5 codes" in output and "--initial-key" in output
    tuned(data, tmp_path / "added", *common, "--max-steps", 1, "--initial-key", key)
    assert list(state_of(tmp_path / "added")["key"]) == codes  # and new ones could have come behind them


@pytest.mark.processes
def test_what_the_published_program_shall_code_is_trained_for_it(tmp_path):
    flags = words("--model-size tiny --max-steps 2 --clean-text ascii-lower --no-memory-mask --key hisco")
    data, out = titles(tmp_path / "data.csv"), tmp_path / "out"
    assert "Codes: 1,919" in tuned(data, out, *HISCO, *flags, "--published-target-mask")
    _, formatter, state = models.load_model(str(out))
    assert state["thresholds"]["at_most"] == 1  # no more codes than a row has
    [reason] = export.differences(state, formatter)
    assert reason.endswith("--model-size base")


def test_the_published_target_mask_is_the_float_that_torch_adds():
    """In training the published decoder adds 1 to the score of PAD; in decoding it masks nothing but what
    comes later.
    """
    pytest.importorskip("transformers")
    from benchmarks.parity import hisco_program

    program, hisco = hisco_program("tiny"), BlockyFormatter("hisco")
    masks = {"memory_mask": False, "target_mask": False}
    ours = Seq2SeqMixerOccCANINE(hisco.num_classes, 1919, config=model_config("tiny"), **masks).eval()
    ours.load_state_dict(program.state_dict())
    target = torch.tensor(hisco.transform_label("61110&-1")).long()[None, :-1].expand(3, -1)
    memory = torch.randn(3, 12, 128)
    with torch.no_grad():
        expected = program.decoder(memory, target, (target == 1).float())
        assert torch.allclose(ours.decode(memory, target), expected, atol=1e-4)
        ours.decoder.target_mask = True
        assert not torch.allclose(ours.decode(memory, target), expected, atol=1e-2)


def test_names_of_systems():
    for columns, name in (("OCC1950_1", "OCC1950"), ("code1 code2", "code"), ("a_1 a_10", "a"), ("a b", "a")):
        assert models.system_name(BlockyFormatter("gpf", words(columns))) == name


@pytest.mark.processes
def test_the_folder_of_another_trainer_is_left_alone(published, tmp_path):
    content = torch.load(published, weights_only=True) | {"optimizer": {}, "scheduler": {}}
    torch.save({**content, "key": {code: i for i, code in enumerate(hisco_key())}}, tmp_path / "last.bin")
    before = (tmp_path / "last.bin").read_bytes()
    said = tuned(titles(tmp_path / "data.csv"), tmp_path, *HISCO, code=2)
    assert f"--initial-checkpoint {tmp_path}/last.bin and another folder" in said
    assert "overwrite" not in said and (tmp_path / "last.bin").read_bytes() == before
    torch.save(torch.load(published, weights_only=True), tmp_path / "last.bin")
    assert "--key" in tuned(titles(tmp_path / "data.csv"), tmp_path, *HISCO, "--eval-only", code=2)


@pytest.mark.processes
def test_a_data_set_may_be_a_folder(tmp_path):
    assert inputs.dataset_files(["x.csv", "y.csv"]) == (["x.csv", "y.csv"], [])
    train = write_rows(tmp_path / "train.csv", 24)
    assert inputs.dataset_files([str(tmp_path)]) == ([train], [])
    val = write_rows(tmp_path / "val.csv", 8, 300)
    assert inputs.dataset_files([str(tmp_path)]) == ([train], [val])
    flags = words("--formatter hisco --model-size tiny --max-steps 1")
    assert "24 rows for training, 8 for validation" in tuned(tmp_path, tmp_path / "out", *flags)
    both = ["--dataset", train, val, "--save-path", tmp_path / "both", "--prepare-only", "--share-val", 0]
    assert "Rows: 32 read, 32 for training" in run_here(finetune.main, *both)
    names = "conflicts.csv data_report.json histocc.json key.csv prepared rejected_rows.csv"
    assert sorted(os.listdir(tmp_path / "both")) == names.split()
    write_csv(tmp_path / "more.csv", ["a"], [])
    with pytest.raises(UserError, match=r"a folder with 3 tables .*histocc mix --train-data"):
        inputs.dataset_files([str(tmp_path)])
    (hand := tmp_path / "hand").mkdir()
    for name in ("data_train.csv", "data_val.csv", "key.csv"):
        write_csv(hand / name, ["a"], [])
    command = f"--train-data {hand}/data_train.csv --val-data {hand}/data_val.csv --key {hand}/key.csv"
    with pytest.raises(UserError, match=re.escape(f"histocc mix {command}") + "$"):
        inputs.dataset_files([str(hand)])


def parsed(*flags) -> FinetuneConfig:
    return finetune.get_args_parser().parse_args(["--dataset", "x.csv", *map(str, flags)])


def first_weights(*flags):
    args = parsed(*flags)
    return inputs.read_initial_weights(args.initial_checkpoint, args.initial_key, args.key)


def test_a_seq2seq_model_gives_the_key_of_its_system(published, tmp_path):
    weights = torch.load(published, weights_only=True)["model"]
    kept = {name: value for name, value in weights.items() if not name.startswith("linear_decoder")}
    torch.save({"model": kept}, tmp_path / "s2s.bin")
    assert list(first_weights("--initial-checkpoint", tmp_path / "s2s.bin")["key"]) == list(hisco_key())


def test_a_key_of_another_size_is_refused_wherever_it_comes_from(published, tmp_path):
    (tmp_path / "hisco.bin").symlink_to(published)
    start, two = ["--initial-checkpoint", tmp_path / "hisco.bin"], ["61110", "64100"]
    with pytest.raises(UserError, match="outputs .1,919. and codes of its key .2. differ: .*--initial-key"):
        first_weights(*start, "--initial-key", key_file(tmp_path / "two.csv", two))
    (tmp_path / "key.json").write_text(json.dumps({code: i for i, code in enumerate(two)}))
    with pytest.raises(UserError, match="hisco.bin: outputs .1,919. and codes of its key .2."):
        first_weights(*start)


@pytest.mark.processes
def test_a_general_purpose_model_is_fine_tuned_with_its_tokens(tmp_path, monkeypatch):
    """From the object, with a DataFrame: formatter, tokens and key are those of the file; new codes stand
    behind them.
    """
    pandas = pytest.importorskip("pandas")
    from histocc import OccCANINE

    monkeypatch.chdir(tmp_path)
    digits, key = [*"0123456789-"], [f"{i:03d}" for i in range(40)]
    settings = {"target_cols": ["icem_1", "icem_2"], "block_size": 3, "allow_short": True, "chars": digits}
    formatter, model = BlockyFormatter("gpf", **settings), mixer("gpf", 40, **settings)
    content = {"model": model.state_dict(), "key": {code: i for i, code in enumerate(key)}, "chars": digits}
    torch.save(content, tmp_path / "icem.bin")
    mod = OccCANINE("icem.bin", device="cpu", hf=False, system="icem", target_cols=["icem_1", "icem_2"])
    assert mod.system == "icem" and mod.coder.clean("Æ") == "ae"
    once = {"num_epochs": 1, "batch_size": 16, "share_val": 0.0, "learning_rate": 1e-9, "max_steps": 1}
    texts, codes = [f"Væver {i}" for i in range(40)], [f"{i % 7:03d}" for i in range(39)] + ["999"]
    columns = {"occ1": texts, "icem_1": codes, "icem_2": [None, *(["001"] * 39)], "lang": "da"}
    frame = pandas.DataFrame(columns)
    before = frame.copy()
    assert mod.finetune(frame, "out", "occ1", "da", "lang", **once) is mod and frame.equals(before)
    state = state_of("out")
    assert state["formatter"] == {**formatter.to_dict(), "chars": digits, "allow_short": False}
    assert state["system"] == "icem" and list(state["key"]) == [*key, "999"]
    assert state["config"]["text"] == "ascii-lower"
    decoder = {name: value for name, value in state["model"].items() if name.startswith("decoder.")}
    assert all(torch.allclose(decoder[n], model.state_dict()[n], atol=1e-6) for n in decoder)
    assert mod.predict("væver", "da") is not None and mod.formatter.chars == tuple(digits)
    assert not mod.model.memory_mask

    mod = OccCANINE("icem.bin", device="cpu", target_cols=["icem_1", "icem_2"])
    second = [float("nan"), *([102.0] * 39)]
    first = [101.0 + i % 7 for i in range(40)]
    numbers = pandas.DataFrame({"occ1": texts, "icem_1": first, "icem_2": second})
    mod.finetune(numbers, save_path="floats", **once)
    found = state_of("floats")["key"]
    assert list(found) == [*key, *map(str, range(101, 108))]


# ---- what a run does if its arguments leave it open

SCRATCH = {"learning_rate": 1.5e-4, "empty_blocks": "first", "linear_loss": ROWS, "block_loss": ONE_TO_ONE}
SCRATCH["best_by"] = "accuracy"
TRAINED = {"learning_rate": 2e-5, "empty_blocks": "all", "linear_loss": MEAN, "block_loss": BEST_FIT}
TRAINED["best_by"] = "loss"
GIVEN = TRAINED | {"learning_rate": 5e-4}
PARTS = {"encoder.x": 0, "decoder.x": 0, "linear_decoder.weight": 0}


def decided(*flags, trained=None, first=None) -> dict:
    found = decide(parsed(*flags), trained, first).values()
    return {dest: found[dest] for dest in LEFT_OPEN}


def flags_of(values: dict) -> list:
    return [part for dest, value in values.items() for part in (f"--{dest.replace('_', '-')}", value)]


NEW_LINEAR = {name: 0 for name in PARTS if not name.startswith("linear_decoder.")}
NEW_DECODER = {name: 0 for name in PARTS if not name.startswith("decoder.")}
OWN = {"model": PARTS, "args": {**SCRATCH, "learning_rate": 1.0}}


@pytest.mark.parametrize(
    "flags, first, expected",
    [
        ([], None, SCRATCH),
        (["--model-size", "tiny"], None, {**SCRATCH, "learning_rate": 1e-3}),
        (["--model-size", "small"], None, {**SCRATCH, "learning_rate": 5e-4}),
        (["--model-size", "tiny"], {"model": PARTS}, TRAINED),
        ([], {"model": PARTS}, TRAINED),
        ([], {"model": {"encoder.x": 0}}, {**TRAINED, "linear_loss": ROWS, "block_loss": ONE_TO_ONE}),
        (["--only-encoder"], {"model": PARTS}, {**TRAINED, "linear_loss": ROWS, "block_loss": ONE_TO_ONE}),
        ([], {"model": NEW_LINEAR}, {**TRAINED, "linear_loss": ROWS}),
        ([], {"model": NEW_DECODER}, {**TRAINED, "block_loss": ONE_TO_ONE}),
        ([], OWN, {**SCRATCH, "learning_rate": 2e-5, "best_by": "loss"}),  # as it was trained
        (flags_of(GIVEN), None, GIVEN),
        (flags_of(SCRATCH), {"model": PARTS}, SCRATCH),
    ],
)
def test_what_a_new_run_decides(flags, first, expected):
    assert decided(*flags, first=first) == expected


def test_what_is_resumed_or_validated_is_as_it_was_started():
    assert decided(trained={"args": SCRATCH}) == SCRATCH
    assert decided(*flags_of(SCRATCH), trained={"args": GIVEN}) == GIVEN
    assert decided(trained={}) == TRAINED  # published weights do not say


def test_of_own_and_published_files(published):
    """A published one says nothing, an own one all but the rate, which belongs to a schedule."""
    own = REPO / "tests" / "data" / "run_of_2026.bin"
    for file, values in ((published, TRAINED), (own, {**SCRATCH, "learning_rate": 2e-5, "best_by": "loss"})):
        start = ["--initial-checkpoint", file]
        assert decided(*start, first=first_weights(*start)) == values


def test_the_loss_is_the_one_that_was_decided():
    made = of_run.make_loss(decide(parsed("--seq2seq-weight", 0.25)), BlockyFormatter("hisco"))
    sequence, linear = made.loss_fn_seq2seq, made.loss_fn_linear
    assert (sequence.empty_blocks, sequence.matching, linear.kind) == ("first", ONE_TO_ONE, ROWS)
    assert made.seq2seq_weight == 0.25


def flags(data, folder, *more):
    columns = ["--target-cols", "hisco_1", "hisco_2", "--formatter", "hisco"]
    return ["--dataset", data, *columns, *TINY, "--save-path", str(folder), *more]


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """(decided arguments, data, model) of a new run."""
    folder = tmp_path_factory.mktemp("linear")
    asked = flags(write_rows(folder / "data.csv", 120), folder / "run")
    args = finetune.get_args_parser().parse_args(asked)
    args, read = inputs.prepare_data(args, World(), args.dataset, [])
    formatter = BlockyFormatter.from_dict(read.settings.formatter)
    args, model, _ = of_run.make_model(decide(args), formatter, World(), read.data)
    return args, read.data, model


def test_it_starts_at_the_frequencies_of_the_training_rows(setup):
    _, data, model = setup
    rows = [set(codes[codes >= 0].tolist()) for codes in data.train.codes]
    shares = [(sum(code in row for row in rows) + 0.5) / (len(rows) + 1) for code in range(len(data.codes))]
    found = model.classify(TextVectors(torch.randn(3, model.config.hidden_size))).sigmoid()
    assert np.allclose(found.detach().numpy(), shares, rtol=1e-5) and max(shares) > 1.1 * min(shares)


def test_its_rate_is_a_multiple_of_the_other(setup):
    args, _, model = setup
    fast = of_run.fast_parameters(model, None, False, args.linear_loss)
    assert fast == (["linear_decoder.weight", "linear_decoder.bias"], 5.0)
    assert of_run.fast_parameters(model, None, False, MEAN) == (fast[0], 30.0)
    assert of_run.fast_parameters(mixer(), None, False, MEAN) == ([], 1.0)  # of initial weights
    optimizer = make_optimizer(model, 0.01, 1e-3, fast)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    assert optimizer.param_groups[1]["params"] == list(model.linear_decoder.parameters())
    assert [group["initial_lr"] for group in optimizer.param_groups] == pytest.approx([1e-3, 5e-3])
    assert len(make_optimizer(model, 0.01, 1e-3, ([], 1.0)).param_groups) == 1
