"""Attention in training on CPUs, as one step of autograd, against torch's own; dropout with a residual;
linear layers in bfloat16.
"""

import pytest
import torch
import torch.nn.functional as F

from histocc.model import packed_attention
from histocc.model.decoder import TransformerDecoder
from histocc.model.layers import dropout, dropout_add
from histocc.model.packed_attention import Group, cross_attention, self_attention
from histocc.runtime import device
from histocc.runtime.device import has_bfloat16

HEADS, WIDTH = 2, 8


def by_hand(q, k, v, group: Group) -> torch.Tensor:
    """One group's rows by torch's attention: q [rows · T, H], k, v [rows · S, H] → [rows · T, H]."""
    q, k, v = (
        each.unflatten(0, (group.rows, -1)).unflatten(2, (HEADS, -1)).transpose(1, 2) for each in (q, k, v)
    )
    if group.weight is not None:
        q = q * group.weight.to(q)[:, None, None, None]
    seen = group.visible
    if seen is not None and seen.is_floating_point():
        seen = seen.to(q)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


def some_groups() -> list[Group]:
    seen = torch.rand(3, 1, 1, 5) > 0.4
    seen[..., 0] = True
    return [
        Group(3, 5, 5, seen, torch.tensor([1.0, 0.0, 1.0])),
        Group(2, 4, 4, torch.ones(4, 4, dtype=torch.bool).tril()),
        Group(1, 6, 6, torch.randn(1, 1, 1, 6)),
        Group(2, 3, 3),
    ]


def compare(found, expected, leaves):
    """Values, and gradients of the same weighted sum; returns those of `found`."""
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)
    weights = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), leaves) for each in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-13)
    return ours


def test_self_attention_of_groups_is_torchs():
    torch.manual_seed(1)
    groups = some_groups()
    sizes, others = [each.rows * each.queries for each in groups], 7
    x = torch.randn(sum(sizes) + others, 3 * WIDTH, dtype=torch.float64, requires_grad=True)
    parts = zip(*(each[: sum(sizes)].split(sizes) for each in x.chunk(3, dim=1)), groups)
    expected = torch.cat([by_hand(*each) for each in parts] + [x.new_zeros(others, WIDTH)])
    (gradient,) = compare(self_attention(x, groups, HEADS, 0.0), expected, [x])
    assert not gradient[sum(sizes) :].any()
    half = x.detach().bfloat16()  # is computed in float32 and given back as it came
    exact = self_attention(half.float(), groups, HEADS, 0.0)
    assert torch.equal(self_attention(half, groups, HEADS, 0.0), exact.bfloat16())


def test_cross_attention_of_groups_is_torchs():
    torch.manual_seed(2)
    seen = torch.rand(3, 1, 1, 7) > 0.4
    seen[..., 1] = True
    groups = [Group(3, 4, 7, seen), Group(2, 4, 2)]
    queries = torch.randn(20, WIDTH, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(3 * 7 + 2 * 2 + 3, 2 * WIDTH, dtype=torch.float64, requires_grad=True)
    k, v = memory[:25].chunk(2, dim=1)
    parts = zip(queries.split([12, 8]), k.split([21, 4]), v.split([21, 4]), groups)
    expected = torch.cat([by_hand(*each) for each in parts])
    compare(cross_attention(queries, memory, groups, HEADS, 0.0), expected, [queries, memory])


def test_gradients_with_dropout_are_those_of_the_forward_pass():
    torch.manual_seed(3)
    groups = some_groups()
    x = torch.randn(32 + 1, 3 * WIDTH, dtype=torch.float64, requires_grad=True)

    def with_the_same_draws(x):
        torch.manual_seed(4)
        return self_attention(x, groups, HEADS, 0.3)

    assert torch.autograd.gradcheck(with_the_same_draws, (x,))
    assert not torch.equal(with_the_same_draws(x), self_attention(x, groups, HEADS, 0.0))


def test_dropout_of_everything():
    x = torch.randn(4, 3 * WIDTH, requires_grad=True)
    found = self_attention(x, [Group(1, 4, 4)], HEADS, 1.0)
    found.sum().backward()
    assert not found.any() and x.grad is not None and not x.grad.any()
    many = torch.ones(1 << 22)
    assert not dropout(many, 1.0).any() and torch.equal(dropout_add(many, many, 1.0), many)
    assert torch.equal(dropout_add(many, many, 0.0), 2 * many)


@pytest.mark.parametrize("codes", [1, 2, 3])
def test_the_decoder_leaves_out_keys_that_nobody_looks_at(monkeypatch, codes):
    """Keys and values of PAD behind all codes of a batch are not computed; what comes out is the same."""
    torch.manual_seed(6)
    decoder = TransformerDecoder(12, 16, 32, dropout=0.0).double()
    memory = torch.randn(4, 9, 16, dtype=torch.float64)
    target = torch.ones(4, 16, dtype=torch.int64)
    target[:, 0] = 2
    for row in range(4):
        target[row, 1 : 1 + 5 * min(codes, row + 1)] = torch.randint(5, 12, (5 * min(codes, row + 1),))

    def results():
        decoder.zero_grad()
        out = decoder(memory, target, None, target == 1)
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in decoder.parameters() if p.grad is not None)]

    keys, plain = [], packed_attention.cross_attention

    def spied(queries, keys_values, groups, *more):
        keys.extend(group.keys for group in groups)
        return plain(queries, keys_values, groups, *more)

    monkeypatch.setattr(packed_attention, "cross_attention", spied)
    packed = results()
    assert (1 + 5 * codes in keys) == (codes < 3)  # 16 positions are all
    monkeypatch.setattr(packed_attention, "applies", lambda _: False)
    for ours, theirs in zip(packed, results(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_and_residual_in_one_step(dtype):
    torch.manual_seed(7)
    x = torch.randn(40, 30, dtype=dtype, requires_grad=True)
    wide = torch.promote_types(dtype, torch.float32)
    residual = torch.randn(40, 30, dtype=wide, requires_grad=True)
    torch.manual_seed(8)
    found = dropout_add(x, residual, 0.25)
    torch.manual_seed(8)
    expected = dropout(x.to(wide), 0.25) + residual
    assert found.dtype == wide and torch.equal(found, expected)
    weights = torch.randn_like(found)
    for ours, theirs in zip(
        *(torch.autograd.grad((each * weights).sum(), (x, residual)) for each in (found, expected))
    ):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.skipif(not has_bfloat16("cpu"), reason="this CPU has no bfloat16")
@pytest.mark.parametrize("shape", [(80, 256), (4, 20, 256)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_layers_in_bfloat16_are_those_of_autocast(shape, has_bias, monkeypatch):
    torch.manual_seed(9)
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(128, 256, requires_grad=True)
    bias = torch.randn(128, requires_grad=True) if has_bias else None
    inputs = [each for each in (x, weight, bias) if each is not None]
    calls, plain = [], device.onednn_product
    monkeypatch.setattr(device, "onednn_product", lambda *a: calls.append(0) or plain(*a))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = device.linear(x, weight, bias), F.linear(x, weight, bias)
    assert calls and ours.dtype == theirs.dtype == torch.bfloat16
    assert torch.allclose(ours.float(), theirs.float(), rtol=0.01, atol=0.05)
    weights = torch.randn(theirs.shape).bfloat16()
    for one, other in zip(*(torch.autograd.grad((each * weights).sum(), inputs) for each in (ours, theirs))):
        assert one.dtype == other.dtype == torch.float32
        assert float((one - other).norm() / other.norm()) < 0.01
