"""What was written again for speed gives what the plain way gives: values, and gradients of training."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F

from benchmarks.reference_model import Reference
from histocc.formatter import BOS_IDX, EOS_IDX, PAD_IDX, hisco_blocky5
from histocc.model.canine import CanineConfig, CanineEncoder
from histocc.model.layers import (
    MAX_GROUPS,
    MIN_GROUP_ROWS,
    Dropout,
    Group,
    attend,
    dropout,
    packed_attention,
    width_groups,
)
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.runtime import device
from histocc.runtime.device import has_bfloat16
from histocc.runtime.world import World
from histocc.text import encode, padded_width
from histocc.trainer.batches import Rows, batch_plan
from histocc.trainer.config import ScriptConfig

HEADS, WIDTH = 2, 8
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def batch(rows=64, seed=0, longest=60):
    """(ids, mask, target) of random texts with one or two codes."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    texts = ["x" * draw.randint(1, longest) for _ in range(rows)]
    ids, mask = map(torch.from_numpy, encode(texts, ["en"] * rows))
    target = torch.full((rows, 27), PAD_IDX)
    target[:, 0], target[:, -1] = BOS_IDX, EOS_IDX
    target[:, 1:6] = torch.randint(8, 18, (rows, 5), generator=generator)
    target[::3, 6:11] = torch.randint(8, 18, (len(target[::3]), 5), generator=generator)
    return ids, mask, target


def results(model, *inputs) -> list[torch.Tensor]:
    """Outputs, and the gradient of each parameter."""
    model.zero_grad(set_to_none=True)
    outputs = model(*inputs)
    sum(output.square().mean() for output in outputs).backward()
    return [
        *(output.detach() for output in outputs),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]


@pytest.mark.parametrize("ngrams", [None, {"rows": 64, "width": 16}])
@pytest.mark.parametrize("encoder", [True, False])
@pytest.mark.parametrize("longest", [60, 119, 121, 126])
def test_a_batch_in_groups_is_that_of_full_width(ngrams, encoder, longest):
    """In float64; rows come back in their order. PAD after all codes, whose keys are left out, included."""
    if not encoder and not ngrams:
        return
    torch.manual_seed(0)
    config, classes = model_config("tiny", **NO_DROPOUT), hisco_blocky5().num_classes
    model = Seq2SeqMixerOccCANINE(classes, 30, config=config, encoder=encoder, ngrams=ngrams).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids, mask, target = batch(longest=longest)
    assert width_groups(mask) is not None
    fast = results(model, ids, mask, target[:, :-1])
    model.in_groups = False
    for one, other in zip(fast, results(model, ids, mask, target[:, :-1]), strict=True):
        assert (one - other).abs().max() <= 1e-12 * max(1.0, other.abs().max())


def test_training_is_that_of_the_published_layers():
    """Both decoders on texts of any length, as transformers' encoder and torch's decoder at 128 positions."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = model_config("tiny", num_hash_buckets=512, **NO_DROPOUT)
    ours = Seq2SeqMixerOccCANINE(hisco_blocky5().num_classes, 30, config=config)
    reference = Reference(config, ours.vocab_size, 30, config.hidden_size)
    reference.load_state_dict(ours.state_dict())
    ids, mask, target = batch(rows=40)
    padding = [0, 128 - ids.shape[1]]
    fast = results(ours, ids, mask, target[:, :-1])
    plain = results(reference, F.pad(ids, padding), F.pad(mask.long(), padding), target[:, :-1])
    for one, other in zip(fast, plain, strict=True):
        assert (one - other).abs().max() <= 1e-3 * other.abs().max() + 1e-7
    assert len(fast) - 2 == len(list(ours.parameters()))  # each has a gradient


# ---- groups of rows


def test_groups_hold_every_row_once_and_as_wide_as_it_needs():
    for seed in range(20):
        rows = random.Random(seed).randint(2 * MIN_GROUP_ROWS, 200)
        ids, mask, _ = batch(rows, seed)
        order, groups = width_groups(mask)
        counts, widths = zip(*groups)
        assert sorted(order.tolist()) == list(range(rows)) and sum(counts) == rows
        assert 2 <= len(groups) <= MAX_GROUPS and list(widths) == sorted(set(widths))
        for lengths, width in zip(mask.sum(1)[order].split(counts), widths):
            assert max(padded_width(n - 2) for n in lengths.tolist()) == width
        assert int(mask.sum()) <= sum(count * width for count, width in groups) < 0.9 * ids.numel()
        mask[:, 1] = False  # a position in the middle may be masked
        again = width_groups(mask)
        assert torch.equal(again[0], order) and again[1] == groups


def test_no_groups_if_there_is_nothing_to_gain():
    ids, mask = map(torch.from_numpy, encode(["farmer"] * 64, ["en"] * 64))
    assert width_groups(mask) is None
    order, groups = width_groups(F.pad(mask, (0, 40)))  # of a piece of a batch
    assert groups == [(64, mask.shape[1])] and sorted(order.tolist()) == list(range(64))


@pytest.mark.parametrize("kind, parts", [("cpu", 1), ("cuda", 3)])
def test_a_share_is_one_micro_batch_if_the_model_has_groups(kind, parts):
    class Texts(Rows):
        has_lengths = True
        groups_in_model = ("cpu",)

        def __len__(self):
            return 400

    plan = batch_plan(ScriptConfig(batch_size=200), Texts(), World(device=torch.device(kind)))
    assert plan.micro_batches(0) == parts


# ---- attention


def some_groups() -> list[Group]:
    seen = torch.rand(3, 1, 1, 5) > 0.4
    seen[..., 0] = True
    return [
        Group(3, 5, 5, seen, torch.tensor([1.0, 0.0, 1.0])),
        Group(2, 4, 4, torch.ones(4, 4, dtype=torch.bool).tril()),
        Group(1, 6, 6, torch.randn(1, 1, 1, 6)),
        Group(2, 3, 3),
    ]


def plain_attention(q, k, v, group: Group) -> torch.Tensor:
    """One group's rows by torch's attention: q [rows · T, H], k, v [rows · S, H] → [rows · T, H]."""
    q, k, v = (x.unflatten(0, (group.rows, -1)).unflatten(2, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    if group.query_scale is not None:
        q = q * group.query_scale.to(q)[:, None, None, None]
    seen = group.visible
    seen = seen.to(q) if seen is not None and seen.is_floating_point() else seen
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_packed_attention_is_torchs(kind):
    """Positions after those of all groups are 0, and have no gradient."""
    torch.manual_seed(1)
    groups = some_groups() if kind == "self" else [Group(3, 4, 7), Group(2, 4, 2, torch.randn(2, 1, 1, 2))]
    sizes, key_sizes = (
        [g.rows * n for g, n in zip(groups, counts)] for counts in zip(*((g.queries, g.keys) for g in groups))
    )
    queries = torch.randn(sum(sizes) + 7, WIDTH * (3 if kind == "self" else 1), dtype=torch.float64)
    keys_values = None if kind == "self" else torch.randn(sum(key_sizes) + 3, 2 * WIDTH, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (queries, keys_values) if x is not None]
    q, k, v = queries.chunk(3, dim=1) if kind == "self" else (queries, *keys_values.chunk(2, dim=1))
    parts = (q[: sum(sizes)].split(sizes), *(x[: sum(key_sizes)].split(key_sizes) for x in (k, v)), groups)
    expected = torch.cat([*(plain_attention(*part) for part in zip(*parts)), q.new_zeros(7, WIDTH)])
    found = packed_attention(queries, keys_values, groups, HEADS, 0.0)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in (found, expected)]
    assert all(torch.allclose(*pair, rtol=1e-10, atol=1e-13) for pair in zip(*gradients))
    if kind == "self":
        half = queries.detach().bfloat16()  # is computed in float32 and given back as it came
        exact = packed_attention(half.float(), None, groups, HEADS, 0.0)
        assert torch.equal(packed_attention(half, None, groups, HEADS, 0.0), exact.bfloat16())


def test_gradients_with_dropout_are_those_of_the_forward_pass():
    torch.manual_seed(3)
    groups, x = some_groups(), torch.randn(33, 3 * WIDTH, dtype=torch.float64, requires_grad=True)

    def with_the_same_draws(x):
        torch.manual_seed(4)
        return packed_attention(x, None, groups, HEADS, 0.3)

    assert torch.autograd.gradcheck(with_the_same_draws, (x,))
    assert not torch.equal(with_the_same_draws(x), packed_attention(x, None, groups, HEADS, 0.0))
    assert not packed_attention(x, None, groups, HEADS, 1.0).any()


def test_attention_in_steps_is_that_of_the_fused_kernel():
    q, k, v = torch.randn(3, 2, 2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    masked = torch.tensor([True, True, False, True, False])[None, None, None]
    for visible in (masked, torch.randn(2, 1, 5, 5), None):
        expected = attend(q, k, v, visible, 0.0)
        assert torch.allclose(attend(q.clone().requires_grad_(), k, v, visible, 0.0), expected, atol=1e-12)


# ---- dropout, linear layers, embeddings


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


def test_dropout_at_its_limits():
    x = torch.ones(7, dtype=torch.float64)
    assert torch.equal(dropout(x, 0.0), x) and not dropout(x, 1.0).any() and not dropout(x, 1 - 1e-6).any()
    half = dropout(torch.ones(10_000, dtype=torch.bfloat16), 0.1)
    assert half.dtype == torch.bfloat16 and set(half.tolist()) == {
        0.0,
        float(torch.tensor(1 / 0.9).bfloat16()),
    }
    assert torch.equal(Dropout(0.5).eval()(x), x) and torch.equal(Dropout(0.5).eval().add(x, x), 2 * x)
    with pytest.raises(ValueError, match="between 0 and 1"):
        Dropout(1.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_and_residual_in_one_step(dtype):
    torch.manual_seed(7)
    wide = torch.promote_types(dtype, torch.float32)
    x = torch.randn(40, 30, dtype=dtype, requires_grad=True)
    residual = torch.randn(40, 30, dtype=wide, requires_grad=True)
    torch.manual_seed(8)
    found = Dropout(0.25).add(x, residual)
    torch.manual_seed(8)
    expected = dropout(x.to(wide), 0.25) + residual
    assert found.dtype == wide and torch.equal(found, expected)
    gradients = [
        torch.autograd.grad((out * expected.detach()).sum(), (x, residual)) for out in (found, expected)
    ]
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(*gradients))


@pytest.mark.skipif(not has_bfloat16("cpu"), reason="this CPU has no bfloat16")
@pytest.mark.parametrize("shape", [(80, 256), (4, 20, 256)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_layers_in_bfloat16_are_those_of_autocast(shape, has_bias):
    torch.manual_seed(9)
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(128, 256, requires_grad=True)
    bias = torch.randn(128, requires_grad=True) if has_bias else None
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = device.linear(x, weight, bias), F.linear(x, weight, bias)
    assert ours.dtype == theirs.dtype == torch.bfloat16 and "_Linear" in type(ours.grad_fn).__name__
    assert torch.allclose(ours.float(), theirs.float(), rtol=0.01, atol=0.05)
    weights, inputs = (
        torch.randn(theirs.shape).bfloat16(),
        [each for each in (x, weight, bias) if each is not None],
    )
    for one, other in zip(*(torch.autograd.grad((out * weights).sum(), inputs) for out in (ours, theirs))):
        assert one.dtype == other.dtype == torch.float32
        assert float((one - other).norm() / other.norm()) < 0.01


def test_rows_that_no_text_touches_are_left_out_of_training():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = CanineConfig(**sizes, num_hash_buckets=512, **NO_DROPOUT)
    full = CanineEncoder(config).double()
    part, fresh = copy.deepcopy(full), CanineEncoder(config).double()

    def texts(highest: int):
        generator = torch.Generator().manual_seed(3)
        mask = torch.arange(24) < torch.randint(4, 20, (6, 1), generator=generator)
        return torch.randint(97, highest, (6, 24), generator=generator) * mask, mask

    ids, mask = texts(120)
    # fewer positions than the texts have: the others are there, untrained
    part.char_embeddings.train_rows_of(ids.unique(), positions=20)
    assert part.state_dict().keys() == full.state_dict().keys()
    trained = sum(p.numel() for p in part.char_embeddings.parameters() if p.requires_grad)
    assert trained < sum(p.numel() for p in full.char_embeddings.parameters()) / 3
    for model in (full, part):
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
        for _ in range(3):
            hidden, pooled = model(ids[:, :20], mask[:, :20])
            (hidden[mask[:, :20]].square().sum() + pooled.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full.state_dict().items():
        assert torch.allclose(value, part.state_dict()[name], atol=1e-10), name
    other = texts(4000)  # characters that were not announced
    assert torch.allclose(part(*other)[1], full(*other)[1], atol=1e-10)
    fresh.load_state_dict(part.state_dict())
    part.load_state_dict(copy.deepcopy(full).state_dict())
    assert torch.allclose(fresh(ids, mask)[0], part(ids, mask)[0], atol=1e-9)
