"""What a run does where its arguments leave it open, by what it starts from, and that it stays so; how the
linear decoder starts, and its own learning rate.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import TINY, run_inside, write_rows

import finetune
from histocc.formatter import BlockyFormatter, hisco_key
from histocc.job import build
from histocc.job.config import CHOICES, FinetuneConfig, decide, refuse_other_arguments
from histocc.model.loss import BEST_FIT, MEAN, ONE_TO_ONE, ROWS
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.runtime.errors import UserError
from histocc.runtime.world import World
from histocc.trainer.schedule import linear_factor, make_optimizer, set_learning_rate

SCRATCH = {"learning_rate": 1.5e-4, "empty_blocks": "first", "linear_loss": ROWS, "block_loss": ONE_TO_ONE}
TRAINED = {"learning_rate": 2e-5, "empty_blocks": "all", "linear_loss": MEAN, "block_loss": BEST_FIT}
GIVEN = {"learning_rate": 5e-4, "empty_blocks": "all", "linear_loss": MEAN, "block_loss": BEST_FIT}
PARTS = {"encoder.x": 0, "decoder.x": 0, "linear_decoder.weight": 0}


def parsed(*flags) -> FinetuneConfig:
    return finetune.get_args_parser().parse_args(["--dataset", "x.csv", *map(str, flags)])


def decided(*flags, trained=None, first=None) -> dict:
    found = decide(parsed(*flags), trained, first).values()
    return {dest: found[dest] for dest in CHOICES}


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
        ([], OWN, {**SCRATCH, "learning_rate": 2e-5}),  # as it was trained
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


def test_a_run_is_not_resumed_with_others():
    given = parsed("--linear-loss", "rows", "--ngrams", "6", "--learning-rate", 2.0)
    state = {
        "args": {**TRAINED, "num_epochs": 1, "learning_rate": 1.0, "ngrams": "none"},
        "position": {"steps_per_epoch": 10},
        "config": {"memory_mask": True, "target_mask": True, "text": "as-is"},
    }
    with pytest.raises(UserError) as refused:
        refuse_other_arguments(given, state)
    said = str(refused.value)
    assert "--linear-loss was 'mean', now it is 'rows'" in said
    assert "--learning-rate was 1.0, now it is 2.0" in said
    assert "--ngrams was 'none', now it is '6'" in said and "--block-loss" not in said
    refuse_other_arguments(parsed("--num-epochs", 3, "--ngrams", "none"), state)  # with nothing given
    state["args"]["ngrams"] = "6"
    with pytest.raises(UserError, match="--ngrams was '6', now it is 'auto'"):
        refuse_other_arguments(parsed("--num-epochs", 3), state)


def test_the_loss_is_the_one_that_was_decided():
    made = build.make_loss(decide(parsed("--seq2seq-weight", 0.25)), BlockyFormatter("hisco"))
    sequence, linear = made.loss_fn_seq2seq, made.loss_fn_linear
    assert (sequence.empty_blocks, sequence.matching, linear.kind) == ("first", ONE_TO_ONE, ROWS)
    assert made.seq2seq_weight == 0.25


def test_of_own_and_published_files(tmp_path):
    """What the files themselves say: a published one nothing, an own one all but the rate, which belongs
    to a schedule."""
    formatter = BlockyFormatter("hisco")
    model = Seq2SeqMixerOccCANINE(formatter.num_classes, 1919, config=model_config("tiny"))
    torch.save({"model": model.state_dict()}, tmp_path / "published.bin")
    config = {**model.config.to_dict(), "max_len": 128, "memory_mask": True, "target_mask": True}
    own = {
        "model": model.state_dict(),
        "format": 1,
        "config": {**config, "decoder_dim_feedforward": 128, "text": "as-is"},
        "formatter": formatter.to_dict(),
        "system": "hisco",
        "languages": ["en", "unk"],
        "key": {code: i for i, code in enumerate(hisco_key())},
        "args": {**SCRATCH, "num_epochs": 3},
        "kept_codes": 0,
    }
    torch.save(own, tmp_path / "own.bin")
    for name, values in {"published": TRAINED, "own": {**SCRATCH, "learning_rate": 2e-5}}.items():
        given = parsed("--initial-checkpoint", tmp_path / f"{name}.bin")
        found = decide(given, None, build.initial_weights(given)).values()
        assert {dest: found[dest] for dest in CHOICES} == values, name


@pytest.mark.parametrize("codes_per_row, expected", [({"1": 9}, 1), ({"1": 9, "3": 1}, 3)])
def test_no_more_codes_count_than_a_row_has(codes_per_row, expected):
    data = SimpleNamespace(report={"codes_per_row": codes_per_row}, codes=[], languages=[])
    data.kept_codes = data.hisco_numbers = 0
    args, config = decide(parsed()), {"ngrams": None}
    found = build.checkpoint_entries(args, BlockyFormatter("hisco"), data, config)
    assert found["thresholds"]["at_most"] == expected and "linear_share" not in found


# ---- the linear decoder


def flags(data, folder, *more):
    columns = ["--target-cols", "hisco_1", "hisco_2", "--formatter", "hisco"]
    return ["--dataset", data, *columns, *TINY, "--save-path", str(folder), *more]


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """(decided arguments, data, model) of a new run."""
    folder = tmp_path_factory.mktemp("linear")
    asked = flags(write_rows(folder / "data.csv", 120), folder / "run")
    args = finetune.get_args_parser().parse_args(asked)
    args, read, data = build.prepare_data(args, World(), [args.dataset], [])
    formatter = BlockyFormatter.from_dict(read.formatter)
    args, model, _ = build.make_model(args, formatter, World(), data, None)
    return args, data, model


def test_it_starts_at_the_frequencies_of_the_training_rows(setup):
    _, data, model = setup
    rows = [set(codes[codes >= 0].tolist()) for codes in data.train.codes]
    shares = [(sum(code in row for row in rows) + 0.5) / (len(rows) + 1) for code in range(len(data.codes))]
    found = model.classify(torch.randn(3, model.config.hidden_size)).sigmoid()
    assert np.allclose(found.detach().numpy(), shares, rtol=1e-5) and max(shares) > 1.1 * min(shares)


def test_its_rate_is_a_multiple_of_the_other_at_every_step(setup):
    args, _, model = setup
    fast = build.fast_parameters(args, model, None)
    assert fast == (["linear_decoder.weight", "linear_decoder.bias"], 5.0)
    optimizer = make_optimizer(model, 0.01, 1e-3, fast)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    assert optimizer.param_groups[1]["params"] == list(model.linear_decoder.parameters())
    rates = []
    for step in range(10):
        set_learning_rate(optimizer, linear_factor(step, 2, 10))
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert max(rates)[0] == pytest.approx(1e-3)
    assert np.allclose([linear / other for other, linear in rates], 5)
    assert len(make_optimizer(model, 0.01, 1e-3, ([], 1.0)).param_groups) == 1


@pytest.mark.full
def test_a_new_one_has_a_higher_rate_and_keeps_it(tmp_path):
    """A run that continues has the rates of its start; one that starts from a linear decoder trains it like
    the rest.
    """
    data = write_rows(tmp_path / "data.csv", 60)

    def rate(folder, *more) -> str:
        asked = flags(data, tmp_path / folder, "--batch-size", 16, *more)
        code, output = run_inside(finetune.main, *asked)
        assert code == 0, output
        return re.search(r"Learning rate: (.*)", output)[1]

    start, published = "(not scaled; warm-up over 1 step)", ["--learning-rate", 2e-5, "--linear-loss", "mean"]
    assert rate("new", "--max-steps", 2) == f"0.001 {start}, of the linear decoder 5 times that"
    assert rate("new", "--max-steps", 4).endswith("of the linear decoder 5 times that")
    mean = rate("published", "--max-steps", 2, *published)
    assert mean == f"2e-05 {start}, of the linear decoder 30 times that"
    assert rate("published", "--max-steps", 4).endswith("of the linear decoder 30 times that")
    initial = ["--max-steps", 1, "--initial-checkpoint", tmp_path / "new"]
    assert rate("initial", *initial) == f"2e-05 {start}"
