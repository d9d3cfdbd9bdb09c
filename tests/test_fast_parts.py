"""What was written again for speed gives what the plain way gives."""

import copy

import pytest
import torch
import torch.nn.functional as F

from histocc.formatter import PAD_IDX
from histocc.model.canine import CanineConfig, CanineEncoder
from histocc.model.layers import Dropout, attend, dropout
from histocc.model.loss import BlockOrderInvariantLoss

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_hash_buckets": 512,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def texts(rows: int = 6, width: int = 24, highest: int = 120):
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(width) < torch.randint(4, width - 4, (rows, 1), generator=generator)
    return torch.randint(97, highest, (rows, width), generator=generator) * mask, mask


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_draws_each_value_alone_and_keeps_the_mean(p):
    torch.manual_seed(1)
    x = torch.full((1000, 999), 2.0, requires_grad=True)
    y = dropout(x, p)
    kept = y != 0
    assert abs(kept.float().mean() - (1 - p)) < 2e-3 and abs(y.mean() - 2) < 0.02
    # neighbours share a draw of 64 bits
    assert abs((kept[:, 1:] == kept[:, :-1]).float().mean() - (p * p + (1 - p) ** 2)) < 3e-3
    assert torch.allclose(y[kept], torch.tensor(2 / (1 - p)), rtol=1e-3)
    y.sum().backward()
    assert torch.equal(x.grad != 0, kept)
    torch.manual_seed(1)
    assert torch.equal(dropout(x, p) != 0, kept)


def test_dropout_of_nothing_of_all_and_of_what_is_no_probability():
    x = torch.ones(7, dtype=torch.float64)
    assert (
        torch.equal(dropout(x, 0.0), x)
        and torch.equal(dropout(x, 1.0), 0 * x)
        and dropout(x, 0.5).dtype == x.dtype
    )
    assert dropout(x, 1 - 1e-6).shape == x.shape
    half = dropout(torch.ones(10_000, dtype=torch.bfloat16), 0.1)
    assert (
        half.dtype == torch.bfloat16
        and set(half.tolist()) == {0.0, float(torch.tensor(1 / 0.9).bfloat16())}
        and 0.87 < float((half != 0).double().mean()) < 0.93
    )
    assert torch.equal(Dropout(0.5).eval()(x), x)
    with pytest.raises(ValueError, match="between 0 and 1"):
        Dropout(1.5)


@pytest.mark.parametrize("kind", ["masked", "causal", "all"])
def test_attention_in_steps_is_that_of_the_fused_kernel(kind):
    q, k, v = torch.randn(3, 2, 2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    visible = torch.tensor([1, 1, 0, 1, 0], dtype=torch.bool)[None, None, None] if kind == "masked" else None
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=kind == "causal")
    q.requires_grad_()
    assert torch.allclose(attend(q, k, v, visible, 0.0, causal=kind == "causal"), expected, atol=1e-12)
    assert attend(q, k, v, visible, 0.5).count_nonzero() > 0
    if visible is not None:
        with pytest.raises(ValueError, match="no further mask"):
            attend(q, k, v, visible, 0.0, causal=True)


def test_rows_that_no_text_touches_are_left_out_of_training():
    torch.manual_seed(0)
    whole = CanineEncoder(CanineConfig(**SMALL)).double()
    part = copy.deepcopy(whole)
    ids, mask = texts()
    # fewer than the texts have: the others are there, untrained
    part.char_embeddings.train_rows_of(ids.unique(), positions=20)
    assert part.state_dict().keys() == whole.state_dict().keys()
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
        for model in (whole, part)
    ]
    trained = sum(p.numel() for p in part.char_embeddings.parameters() if p.requires_grad)
    assert trained < sum(p.numel() for p in whole.char_embeddings.parameters()) / 3
    for _ in range(3):
        for model, optimizer in zip((whole, part), optimizers):
            hidden, pooled = model(ids[:, :20], mask[:, :20])
            (hidden[mask[:, :20]].square().sum() + pooled.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in whole.state_dict().items():
        assert torch.allclose(value, part.state_dict()[name], atol=1e-10), name
    other, other_mask = texts(highest=4000)  # characters that were not announced
    assert torch.allclose(part(other, other_mask)[1], whole(other, other_mask)[1], atol=1e-10)
    fresh = CanineEncoder(CanineConfig(**SMALL)).double()
    fresh.load_state_dict(part.state_dict())
    part.load_state_dict(copy.deepcopy(whole).state_dict())
    assert torch.allclose(fresh(ids, mask)[0], part(ids, mask)[0], atol=1e-9)


def test_only_the_first_empty_block_counts_whatever_the_companions():
    loss = BlockOrderInvariantLoss(PAD_IDX, 5, 5, empty_blocks="first")
    generator = torch.Generator().manual_seed(1)
    target = torch.full((2, 27), PAD_IDX)
    target[:, 0], target[:, -1] = 2, 3
    target[0, 1:6], target[1, 1:16] = 10, torch.arange(8, 23) % 9 + 8
    logits = torch.randn(2, 26, 18, generator=generator, dtype=torch.float64)
    found = loss(logits, target, reduction="none")
    log_probs = logits.log_softmax(-1)
    one = -log_probs[0, 0:5, 10].mean() - log_probs[0, 5:10, PAD_IDX].mean() / 5
    assert abs(found[0] - one) < 1e-12
    # as the row comes in its own micro-batch
    short = torch.cat([target[:1, :11], target[:1, -1:]], dim=1)
    assert abs(loss(logits[:1, :11], short) - one) < 1e-12
    assert found[1] < BlockOrderInvariantLoss(PAD_IDX, 5, 5)(logits[1:], target[1:])
    full = torch.full((1, 27), 9)
    assert torch.equal(loss(logits[:1], full), BlockOrderInvariantLoss(PAD_IDX, 5, 5)(logits[:1], full))
    with pytest.raises(ValueError, match="'all' or 'first'"):
        BlockOrderInvariantLoss(PAD_IDX, empty_blocks="none")
