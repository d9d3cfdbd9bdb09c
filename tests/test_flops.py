"""Floating point operations of the model on what is real in a batch, and the share that they have of what the
device can do.
"""

import json
import math

import pytest
import torch
from helpers import REPO, run
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from histocc.formatter import EOS_IDX, PAD_IDX, hisco_blocky5
from histocc.model.loss import BlockOrderInvariantLoss, LossMixer
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.runtime import device
from histocc.runtime.device import Precision, matmul_rate
from histocc.seq2seq_mixer_engine import MixerTask, forward

CPU = torch.device("cpu")
CODES = 40
BLOCKS = hisco_blocky5()


@pytest.fixture(autouse=True)
def counted_products(monkeypatch):
    """torch counts the operations of its own products, not of those that oneDNN is asked for."""
    monkeypatch.setattr(device, "onednn_pays", lambda: False)


def model_of(size, ngrams=False, frozen=False):
    torch.manual_seed(1)
    table = {"rows": 100, "width": 32} if ngrams else None
    config = model_config(size, num_hash_buckets=512, local_transformer_stride=64)
    model = Seq2SeqMixerOccCANINE(BLOCKS.num_classes, CODES, 0.1, config=config, ngrams=table)
    model.encoder.requires_grad_(not frozen)
    return model.train()


def task_of(model, empty_blocks="all"):
    blocks = BlockOrderInvariantLoss(PAD_IDX, empty_blocks=empty_blocks)
    return MixerTask(LossMixer(blocks, nn.BCEWithLogitsLoss()), model=model)


def batch_of(rows, length, codes=5, width=None, blocks=5, **more):
    """`rows` texts of `length` characters, padded to `width`, and targets of so many codes."""
    width = width or length
    targets = torch.full((rows, 5 * blocks + 2), PAD_IDX)
    targets[:, 0], targets[:, -1] = 2, EOS_IDX
    targets[:, 1 : 1 + 5 * codes] = torch.randint(8, 18, (rows, 5 * codes))
    return {
        "input_ids": torch.randint(97, 123, (rows, width)),
        "attention_mask": torch.arange(width).expand(rows, width) < length,
        "targets_seq2seq": targets,
        "targets_linear": torch.zeros(rows, 1, dtype=torch.long),
        **more,
    }


def joined(*batches):
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def counted_by_torch(model, batch):
    with FlopCounterMode(display=False) as counted:
        seq2seq, linear = forward(model, batch)
        (seq2seq.sum() + linear.sum()).backward()
    return counted.get_total_flops()


@pytest.mark.parametrize(
    "size, length, ngrams, frozen",
    [
        ("tiny", 40, False, False),
        ("tiny", 160, True, False),
        ("tiny", 64, True, True),
        ("small", 40, False, True),
    ],
)
def test_are_those_of_the_matrix_products_of_a_batch_without_padding(size, length, ngrams, frozen):
    """Those that torch counts itself; it also computes a token behind the last one that is trained."""
    model, batch = model_of(size, ngrams, frozen), batch_of(2, length)
    assert task_of(model).flops(batch) == pytest.approx(counted_by_torch(model, batch), rel=0.03)
    if not ngrams:
        other = MixerTask(nn.Module(), model=model)  # a criterion that trains all that the model reads
        assert other.flops(batch) == pytest.approx(counted_by_torch(model, batch), rel=1e-6)


def test_padding_and_rows_of_no_weight_need_none():
    task = task_of(model_of("tiny"))
    short, long = batch_of(3, 20, width=64), batch_of(2, 50, width=64)
    alone = task.flops(batch_of(3, 20, width=28)) + task.flops(batch_of(2, 50, width=56))
    assert task.flops(joined(short, long)) == pytest.approx(alone)
    weights = torch.tensor([1.0] * 3 + [0.0] * 2)
    assert task.flops({**joined(short, long), "weights": weights}) == pytest.approx(task.flops(short))
    assert math.isnan(task_of(nn.Linear(1, 1)).flops(short))  # not known of another model


def test_empty_blocks_need_what_is_trained_of_them():
    model = model_of("tiny")
    found = [task_of(model, "first").flops(batch_of(2, 20, codes)) for codes in (1, 2, 3, 4, 5)]
    # the first of them is as long as a code
    like = [task_of(model).flops(batch_of(2, 20, blocks, blocks=blocks)) for blocks in (2, 3, 4, 5, 5)]
    assert found == like


# ---- the log


def test_the_log_has_rates_over_all_processes(tmp_path):
    """Three operations a sample and process, which multiplies matrices at a rate of 100."""
    script = tmp_path / "rates.py"
    script.write_text(CODE.format(repo=str(REPO)))
    for processes in (None, 2):
        output = run(script, processes=processes)
        rows = json.loads(next(line for line in output.splitlines() if line.startswith("ROWS"))[5:])
        for row in rows:
            assert row["model_flops_per_sec"] / row["samples_per_sec"] == pytest.approx(3)
            assert row["mfu"] == pytest.approx(row["model_flops_per_sec"] / (100 * (processes or 1)))


CODE = """
import json, sys
sys.path[:0] = [{repo!r}, {repo!r} + "/tests"]
from histocc.runtime.arguments import make_parser
from histocc.runtime.entrypoint import add_process_arguments, start
from histocc.trainer import loop
import test_toy_task as toy

loop.matmul_rate = lambda device, dtype: 100.0

def work(args, world):
    rows, _ = toy.train(world)
    names = ("model_flops_per_sec", "mfu", "samples_per_sec")
    if world.is_main:
        print("ROWS", json.dumps([{{name: row[name] for name in names}} for row in rows]))

parser = make_parser("flops", "")
add_process_arguments(parser)
start(parser, work, ["--device", "cpu"])
"""


# ---- the rate of matrix products


@pytest.mark.parametrize("name", ["float32", "float64", "bf16", "fp16"])
def test_a_rate_in_each_format_that_leaves_random_numbers_alone(name):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert matmul_rate(CPU, Precision(name).matmul_dtype, seconds=0.0) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_the_rate_does_with_the_memory_that_is_there(monkeypatch):
    def short(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "linspace", short)
    assert matmul_rate(CPU, torch.float32, 0.05) == 0
