"""The encoder against the published implementation (transformers' CanineModel, random weights), and by
itself.
"""

import pytest
import torch

from histocc.model.canine import CanineConfig, CanineEncoder
from histocc.text import padded_width

TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
# width 768 with fewer layers and smaller tables, for speed
BASE = {"num_hidden_layers": 2, "num_hash_buckets": 1024}
TOLERANCE = 3e-5


def make_pair(sizes: dict):
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


def batch(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random texts of so many positions, [CLS] and [SEP] included if they are long enough."""
    generator = torch.Generator().manual_seed(sum(lengths) + width)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.randint(32, 0x3000, mask.shape, generator=generator)
    ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = 0xE001
    ids[:, 0] = 0xE000
    return ids * mask, mask


@torch.no_grad()
def difference(reference, ours, ids, mask, reference_width: int | None = None) -> float:
    """Largest difference at real positions and in the pooled output; the reference may get more padding."""
    width = ids.shape[1]
    more = (reference_width or width) - width
    expected = reference(
        input_ids=torch.nn.functional.pad(ids, (0, more)),
        attention_mask=torch.nn.functional.pad(mask.long(), (0, more)),
    )
    hidden, pooled = ours(ids, mask, padding_follows=0 < more and width < 128)
    at_characters = (expected.last_hidden_state[:, :width] - hidden)[mask].abs().max()
    assert torch.equal(ours.pooled(ids, mask, 0 < more and width < 128), pooled)
    return max(at_characters.item(), (expected.pooler_output - pooled).abs().max().item())


@pytest.mark.parametrize("width, lengths", [(128, range(1, 129)), (256, [*range(1, 97, 9), *range(97, 256)])])
def test_tiny_equals_reference_at_every_length(tiny_pair, width, lengths):
    for start in range(0, len(lengths), 32):
        assert difference(*tiny_pair, *batch(list(lengths[start : start + 32]), width)) <= TOLERANCE


def by_width(max_len: int) -> list[tuple[int, list[int]]]:
    """(least width, positions of each text) for texts of all numbers of characters."""
    groups: dict[int, list[int]] = {}
    for n in range(1, 127) if max_len == 128 else range(90, 254, 3):
        groups.setdefault(padded_width(n, max_len), []).append(n + 2)
    return sorted(groups.items())


@pytest.mark.parametrize("max_len", [128, 256])
def test_tiny_equals_reference_with_least_padding(tiny_pair, max_len):
    for width, lengths in by_width(max_len):
        assert difference(*tiny_pair, *batch(lengths, width), reference_width=max_len) <= TOLERANCE, width


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


@torch.no_grad()
def test_rows_do_not_see_each_other(tiny):
    tiny.eval().double()
    ids, mask = batch([9, 30, 48], 48)
    for together, alone in zip(tiny(ids, mask), tiny(ids[1:2], mask[1:2])):
        assert (together[1:2] - alone).abs().max() <= 1e-11


@pytest.mark.parametrize("width", [48, 192])
def test_rows_of_padding_stay_finite(tiny, width):
    ids, mask = batch([9, 30], width)
    mask[1] = False
    hidden, pooled = tiny(ids, mask.long())
    (hidden.square().mean() + pooled.square().mean()).backward()
    assert hidden.isfinite().all() and pooled.isfinite().all()
    assert all(p.grad.isfinite().all() for p in tiny.parameters())


def test_dropout_is_set_by_the_config():
    ids, mask = batch([30], 48)

    def in_training(hidden: float, attention: float) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        config = CanineConfig(**TINY, hidden_dropout_prob=hidden, attention_probs_dropout_prob=attention)
        model = CanineEncoder(config)
        return model.train()(ids, mask)[0], model.eval()(ids, mask)[0]

    assert torch.allclose(*in_training(0.0, 0.0), atol=1e-6)
    assert not torch.allclose(*in_training(0.1, 0.0), atol=1e-3)
    assert not torch.allclose(*in_training(0.0, 0.1), atol=1e-3)


def test_random_weights_follow_the_seed():
    def weights(seed: int) -> dict:
        torch.manual_seed(seed)
        return CanineEncoder(CanineConfig(**TINY)).state_dict()

    first, second, other = weights(1), weights(1), weights(2)
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
    with pytest.raises(ValueError, match="bert"):
        CanineConfig.from_dict({"model_type": "bert"})


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("num_attention_heads", 5, "not a multiple"),
        ("hidden_size", "128", "expected a int"),
        ("hidden_size", 0, "expected 1 …"),
        ("layer_norm_eps", float("nan"), "expected 0 … 1"),
        ("hidden_act", "swish", "is not one of gelu"),
    ],
)
def test_impossible_configs_are_errors(field, value, message):
    with pytest.raises(ValueError, match=f"{field}: .*{message}"):
        CanineConfig(**TINY | {field: value})


def test_impossible_inputs_are_errors(tiny):
    with pytest.raises(ValueError, match="at least 4"):
        tiny(*batch([2], 3))
    with pytest.raises(ValueError, match="attention_mask"):
        tiny(batch([2], 16)[0], batch([2], 12)[1])
    small = CanineEncoder(CanineConfig(**TINY, max_position_embeddings=64))
    with pytest.raises(ValueError, match="only 64"):
        small(*batch([2], 80))
