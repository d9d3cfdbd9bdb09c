"""What a run does where its arguments leave it open, by what it starts from; and that it stays so."""

from types import SimpleNamespace

import pytest
import torch

import finetune
from histocc.formatter import BlockyFormatter, hisco_key
from histocc.job.config import FinetuneConfig
from histocc.job.data import initial_weights
from histocc.job.recipe import CHOICES, coding_entries, decide, make_loss, refuse_other_arguments
from histocc.model.loss import BEST_FIT, MEAN, ONE_TO_ONE, ROWS
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.runtime.errors import UserError

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
    assert decide(parsed("--many-codes-weight", 3), None, first).many_codes_weight == 3


def test_what_is_resumed_or_validated_is_as_it_was_started():
    assert decided(trained={"args": SCRATCH}) == SCRATCH
    assert decided(*flags_of(SCRATCH), trained={"args": GIVEN}) == GIVEN
    resumed = decide(parsed("--many-codes-weight", 3), {"args": {"many_codes_weight": 2.0}})
    assert resumed.many_codes_weight == 2.0
    assert decided(trained={}) == TRAINED  # published weights do not say
    assert decide(parsed("--many-codes-weight", 3), {}).many_codes_weight == 1.0


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
    given = decide(parsed("--seq2seq-weight", 0.25, "--many-codes-weight", 2))
    made = make_loss(given, BlockyFormatter("hisco"))
    sequence, linear = made.loss_fn_seq2seq, made.loss_fn_linear
    assert (sequence.empty_blocks, sequence.matching, linear.kind) == ("first", ONE_TO_ONE, ROWS)
    assert sequence.many_codes_weight == 2.0


def test_of_own_and_published_files(tmp_path):
    """What the files themselves say: a published one nothing, an own one all but the rate, which belongs
    to a schedule."""
    torch.manual_seed(1)
    formatter = BlockyFormatter("hisco")
    model = Seq2SeqMixerOccCANINE(formatter.num_classes, 1919, config=model_config("tiny"))
    torch.save({"model": model.state_dict()}, tmp_path / "published.bin")
    config = {
        **model.config.to_dict(),
        "max_len": 128,
        "memory_mask": True,
        "target_mask": True,
        "decoder_dim_feedforward": 128,
        "text": "as-is",
    }
    own = {
        "model": model.state_dict(),
        "format": 1,
        "config": config,
        "formatter": formatter.to_dict(),
        "system": "hisco",
        "languages": ["en", "unk"],
        "key": {code: i for i, code in enumerate(hisco_key())},
        "args": {**SCRATCH, "num_epochs": 3},
        "kept_codes": 0,
    }
    torch.save(own, tmp_path / "own.bin")
    expected = {
        "published": TRAINED,
        "own": {**SCRATCH, "learning_rate": 2e-5},
    }
    for name, values in expected.items():
        given = parsed("--initial-checkpoint", tmp_path / f"{name}.bin")
        found = decide(given, None, initial_weights(given)).values()
        assert {dest: found[dest] for dest in CHOICES} == values, name


@pytest.mark.parametrize(
    "codes_per_row, room, join_rows, expected",
    [
        ({"1": 9}, 5, 0.0, 1),
        ({"1": 9, "3": 1}, 5, 0.0, 3),
        ({"1": 9}, 5, 0.2, 2),
        ({"1": 9}, 1, 0.2, 1),
        ({"1": 1, "4": 2}, 5, 0.2, 4),
    ],
)
def test_no_more_codes_count_than_a_row_has(codes_per_row, room, join_rows, expected):
    """Where rows are joined they have two, unless the formatter has room for one alone."""
    data = SimpleNamespace(report={"codes_per_row": codes_per_row}, max_codes=room)
    assert coding_entries(ROWS, join_rows, False, data)["thresholds"]["at_most"] == expected
