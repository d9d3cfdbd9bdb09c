"""The encoder against the published implementation (transformers' CanineModel, random weights), and alone;
and that what was written again for speed gives what the plain way gives: values, and gradients of training.
"""

import copy
import random

import pytest
import torch
import torch.nn.functional as F

from benchmarks.reference_model import Reference
from histocc.formatter import BOS_IDX, EOS_IDX, PAD_IDX, hisco_blocky5
from histocc.model.canine import CanineConfig, CanineEncoder
from histocc.model.layers import Dropout, dropout, width_groups
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.runtime import device
from histocc.runtime.device import has_bfloat16
from histocc.text import encode, padded_width

TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
# width 768 with fewer layers and smaller tables, for speed
BASE = {"num_hidden_layers": 2, "num_hash_buckets": 1024}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOLERANCE = 3e-5


def make_pair(sizes):
    """The published implementation with random weights, and ours with the same ones."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    reference = transformers.CanineModel(transformers.CanineConfig(**sizes)).eval()
    ours = CanineEncoder(CanineConfig(**sizes)).eval()
    ours.load_state_dict(reference.state_dict(), strict=True)
    return reference, ours


@pytest.fixture(scope="module")
def tiny_pair():
    return make_pair(TINY)


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    return CanineEncoder(CanineConfig(**TINY))


def batch(lengths, width):
    """(ids, mask) of random texts of so many positions, [CLS] and [SEP] included if they are long enough."""
    generator = torch.Generator().manual_seed(sum(lengths) + width)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.randint(32, 0x3000, mask.shape, generator=generator)
    ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = 0xE001
    ids[:, 0] = 0xE000
    return ids * mask, mask


@torch.no_grad()
def difference(reference, ours, ids, mask, reference_width=None):
    """Largest difference at real positions and in the pooled output; the reference may get more padding."""
    width = ids.shape[1]
    more = (reference_width or width) - width
    expected = reference(input_ids=F.pad(ids, (0, more)), attention_mask=F.pad(mask.long(), (0, more)))
    hidden, pooled = ours(ids, mask, padding_follows=0 < more and width < 128)
    at_characters = (expected.last_hidden_state[:, :width] - hidden)[mask].abs().max()
    assert torch.equal(ours.pooled(ids, mask, 0 < more and width < 128), pooled)
    return max(at_characters.item(), (expected.pooler_output - pooled).abs().max().item())


@pytest.mark.full
@pytest.mark.parametrize("width, lengths", [(128, range(1, 129)), (256, [*range(1, 97, 9), *range(97, 256)])])
def test_tiny_equals_reference_at_every_length(tiny_pair, width, lengths):
    for start in range(0, len(lengths), 32):
        assert difference(*tiny_pair, *batch(list(lengths[start : start + 32]), width)) <= TOLERANCE


@pytest.mark.parametrize("max_len, characters", [(128, range(1, 127, 2)), (256, range(90, 254, 9))])
def test_tiny_equals_reference_with_least_padding(tiny_pair, max_len, characters):
    groups = {}
    for n in characters:
        groups.setdefault(padded_width(n, max_len), []).append(n + 2)
    for width, lengths in groups.items():
        assert difference(*tiny_pair, *batch(lengths, width), reference_width=max_len) <= TOLERANCE, width


@pytest.mark.full
def test_base_width_equals_reference():
    pair = make_pair(BASE)
    assert difference(*pair, *batch([1, 3, 61, 126, 128], 128)) <= TOLERANCE
    assert difference(*pair, *batch([5, 128, 255], 256)) <= TOLERANCE
    assert difference(*pair, *batch([22], padded_width(20)), reference_width=128) <= TOLERANCE


def test_state_dict_fits_both_ways(tiny_pair):
    reference, ours = tiny_pair
    reference.load_state_dict(ours.state_dict(), strict=True)
    older = dict(reference.state_dict()) | {"char_embeddings.position_ids": torch.arange(16384)[None]}
    ours.load_state_dict(older, strict=True)
    with pytest.raises(RuntimeError, match="char_embeddings.other"):
        ours.load_state_dict(older | {"char_embeddings.other": torch.zeros(1)}, strict=True)


@pytest.mark.parametrize("width", [48, 192])
def test_rows_of_padding_stay_finite(tiny, width):
    ids, mask = batch([9, 30], width)
    mask[1] = False
    hidden, pooled = tiny(ids, mask.long())
    (hidden.square().mean() + pooled.square().mean()).backward()
    assert hidden.isfinite().all() and pooled.isfinite().all()
    assert all(p.grad.isfinite().all() for p in tiny.parameters())


@pytest.mark.parametrize("hidden, attention, differs", [(0, 0, False), (0.1, 0, True), (0, 0.1, True)])
def test_dropout_is_set_by_the_config(hidden, attention, differs):
    config = CanineConfig(**TINY, hidden_dropout_prob=hidden, attention_probs_dropout_prob=attention)
    model, inputs = CanineEncoder(config), batch([30], 48)
    assert torch.allclose(model.train()(*inputs)[0], model.eval()(*inputs)[0], atol=1e-6) != differs


def test_random_weights_follow_the_seed():
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(CanineEncoder(CanineConfig(**TINY)).state_dict())
    first, second, other = states
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["pooler.dense.weight"], other["pooler.dense.weight"])
    for name in ("char_embeddings.char_position_embeddings", "projection.conv", "pooler.dense"):
        assert abs(first[f"{name}.weight"].std().item() - 0.02) < 0.001, name
    assert not first["encoder.layer.1.intermediate.dense.bias"].any()


def test_config():
    transformers = pytest.importorskip("transformers")
    published = transformers.CanineConfig()
    assert all(getattr(published, name) == value for name, value in CanineConfig().to_dict().items())
    config = CanineConfig(**TINY, hidden_dropout_prob=0.0)
    assert CanineConfig.from_dict(config.to_dict()) == config
    entries = {"model_type": "canine", "bos_token_id": 0xE000, "hidden_size": 256, "num_attention_heads": 4}
    assert CanineConfig.from_dict(entries) == CanineConfig(hidden_size=256, num_attention_heads=4)


def test_impossible_inputs_are_errors(tiny):
    with pytest.raises(ValueError, match="at least 4"):
        tiny(*batch([2], 3))
    with pytest.raises(ValueError, match="attention_mask"):
        tiny(batch([2], 16)[0], batch([2], 12)[1])
    small = CanineEncoder(CanineConfig(**TINY, max_position_embeddings=64))
    with pytest.raises(ValueError, match="only 64"):
        small(*batch([2], 80))


# ---- groups of rows


def texts(rows, seed=0, longest=60):
    """(ids, mask, target) of random texts with one or two codes."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lines = ["x" * draw.randint(1, longest) for _ in range(rows)]
    ids, mask = map(torch.from_numpy, encode(lines, ["en"] * rows))
    target = torch.full((rows, 27), PAD_IDX)
    target[:, 0], target[:, -1] = BOS_IDX, EOS_IDX
    target[:, 1:6] = torch.randint(8, 18, (rows, 5), generator=generator)
    target[::3, 6:11] = torch.randint(8, 18, (len(target[::3]), 5), generator=generator)
    return ids, mask, target


def results(model, *inputs):
    """Outputs, and the gradient of each parameter."""
    model.zero_grad(set_to_none=True)
    outputs = model(*inputs)
    sum(output.square().mean() for output in outputs).backward()
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    return [*(output.detach() for output in outputs), *gradients]


NGRAMS = {"rows": 64, "width": 16}


@pytest.mark.parametrize("longest, encoder, ngrams", [(60, 1, None), (121, 1, NGRAMS), (119, 0, NGRAMS)])
def test_a_batch_in_groups_is_that_of_full_width(ngrams, encoder, longest):
    """In float64; rows come back in their order. PAD after all codes, whose keys are left out, included."""
    torch.manual_seed(0)
    config, classes = model_config("tiny", **NO_DROPOUT), hisco_blocky5().num_classes
    model = Seq2SeqMixerOccCANINE(classes, 30, config=config, encoder=bool(encoder), ngrams=ngrams).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids, mask, target = texts(rows=36, longest=longest)
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
    ids, mask, target = texts(rows=40)
    padding = [0, 128 - ids.shape[1]]
    fast = results(ours, ids, mask, target[:, :-1])
    plain = results(reference, F.pad(ids, padding), F.pad(mask.long(), padding), target[:, :-1])
    for one, other in zip(fast, plain, strict=True):
        assert (one - other).abs().max() <= 1e-3 * other.abs().max() + 1e-7
    assert len(fast) - 2 == len(list(ours.parameters()))  # each has a gradient


# ---- dropout, linear layers, embeddings


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_draws_each_value_alone_and_keeps_the_mean(p):
    torch.manual_seed(1)
    x = torch.full((1000, 999), 2.0, requires_grad=True)
    y = dropout(x, p)
    kept = y != 0
    assert abs(kept.float().mean() - (1 - p)) < 2e-3 and abs(y.mean() - 2) < 0.02
    # neighbors share a draw of 64 bits
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
    assert half.dtype == torch.bfloat16 and len(set(half.tolist())) == 2
    assert torch.equal(Dropout(0.5).eval()(x), x)
    with pytest.raises(ValueError, match="between 0 and 1"):
        Dropout(1.5)


@pytest.mark.skipif(not has_bfloat16("cpu"), reason="this CPU has no bfloat16")
@pytest.mark.parametrize("shape, has_bias", [((80, 256), True), ((4, 20, 256), False)])
def test_linear_layers_in_bfloat16_are_those_of_autocast(shape, has_bias):
    torch.manual_seed(9)
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(128, 256, requires_grad=True)
    bias = torch.randn(128, requires_grad=True) if has_bias else None
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = device.linear(x, weight, bias), F.linear(x, weight, bias)
    assert ours.dtype == theirs.dtype == torch.bfloat16 and "_Linear" in type(ours.grad_fn).__name__
    assert torch.allclose(ours.float(), theirs.float(), rtol=0.01, atol=0.05)
    weights = torch.randn(theirs.shape).bfloat16()
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
    for one, other in zip(*(torch.autograd.grad((out * weights).sum(), inputs) for out in (ours, theirs))):
        assert one.dtype == other.dtype == torch.float32
        assert float((one - other).norm() / other.norm()) < 0.01


def test_rows_that_no_text_touches_are_left_out_of_training():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = CanineConfig(**sizes, num_hash_buckets=512, **NO_DROPOUT)
    full = CanineEncoder(config).double()
    part, fresh = copy.deepcopy(full), CanineEncoder(config).double()

    def some(highest):
        generator = torch.Generator().manual_seed(3)
        mask = torch.arange(24) < torch.randint(4, 20, (6, 1), generator=generator)
        return torch.randint(97, highest, (6, 24), generator=generator) * mask, mask

    ids, mask = some(120)
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
    other = some(4000)  # characters that were not announced
    assert torch.allclose(part(*other)[1], full(*other)[1], atol=1e-10)
    fresh.load_state_dict(part.state_dict())
    part.load_state_dict(copy.deepcopy(full).state_dict())
    assert torch.allclose(fresh(ids, mask)[0], part(ids, mask)[0], atol=1e-9)
