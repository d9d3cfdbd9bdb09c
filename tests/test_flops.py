"""Floating point operations of the model on what is real in a batch, and the share that they have of what the
device can do.
"""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from histocc.formatter import EOS_IDX, hisco_blocky5
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.runtime import device
from histocc.seq2seq_mixer_engine import MixerTask, forward

CPU = torch.device("cpu")


def model_of(size, ngrams=False, frozen=False):
    torch.manual_seed(1)
    table = {"rows": 100, "width": 32} if ngrams else None
    config = model_config(size, num_hash_buckets=512, local_transformer_stride=64)
    model = Seq2SeqMixerOccCANINE(hisco_blocky5().num_classes, 40, 0.1, config=config, ngrams=table)
    model.encoder.requires_grad_(not frozen)
    return model.train()


def batch_of(rows, length, width=None, **more):
    """`rows` texts of `length` characters, padded to `width`, and targets of five codes."""
    width = width or length
    targets = torch.randint(8, 18, (rows, 27))
    targets[:, 0], targets[:, -1] = 2, EOS_IDX
    return {
        "input_ids": torch.randint(97, 123, (rows, width)),
        "attention_mask": torch.arange(width).expand(rows, width) < length,
        "targets_seq2seq": targets,
        "targets_linear": torch.zeros(rows, 1, dtype=torch.long),
        **more,
    }


@pytest.mark.parametrize(
    "size, length, ngrams, frozen",
    [
        ("tiny", 40, False, False),
        ("tiny", 160, True, False),
        ("tiny", 64, True, True),
        ("small", 40, False, True),
    ],
)
def test_are_about_those_of_the_matrix_products(monkeypatch, size, length, ngrams, frozen):
    monkeypatch.setattr(device, "onednn_pays", lambda: False)
    model, batch = model_of(size, ngrams, frozen), batch_of(2, length)
    with FlopCounterMode(display=False) as counted:
        sum(logits.sum() for logits in forward(model, batch)).backward()
    flops = MixerTask(nn.Module(), model=model).flops(batch)
    assert flops == pytest.approx(counted.get_total_flops(), rel=0.06)


def test_padding_and_rows_of_no_weight_need_none():
    task = MixerTask(nn.Module(), model=model_of("tiny"))
    short, long = batch_of(3, 20, 64), batch_of(2, 50, 64)
    joined = {name: torch.cat([short[name], long[name]]) for name in short}
    alone = task.flops(batch_of(3, 20, 28)) + task.flops(batch_of(2, 50, 56))
    assert task.flops(joined) == pytest.approx(alone)
    weights = torch.tensor([1.0] * 3 + [0.0] * 2)
    assert task.flops({**joined, "weights": weights}) == pytest.approx(task.flops(short))
    assert math.isnan(MixerTask(nn.Module(), model=nn.Linear(1, 1)).flops(short))  # of another model
