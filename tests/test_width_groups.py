"""Rows of a batch in groups of similar width: which groups, and that the model gives the same with them."""

import random

import pytest
import torch

from histocc.formatter import BOS_IDX, EOS_IDX, PAD_IDX, hisco_blocky5
from histocc.model import mixer
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.model.width_groups import LEAST_ROWS, MOST_GROUPS, joined, parted, width_groups
from histocc.runtime.world import World
from histocc.text import encode, padded_width
from histocc.trainer.batches import Rows, batch_plan
from histocc.trainer.config import ScriptConfig


def batch(rows=64, seed=0, longest=60):
    """(ids, mask, target) of random texts."""
    draw = random.Random(seed)
    texts = ["x" * draw.randint(1, longest) for _ in range(rows)]
    ids, mask = map(torch.from_numpy, encode(texts, ["en"] * rows))
    target = torch.full((rows, 12), PAD_IDX)
    target[:, 0], target[:, -1] = BOS_IDX, EOS_IDX
    target[:, 1:6] = torch.randint(8, 18, (rows, 5), generator=torch.Generator().manual_seed(seed))
    return ids, mask, target


def test_groups_hold_every_row_once_and_as_wide_as_it_needs():
    for seed in range(20):
        rows = random.Random(seed).randint(2 * LEAST_ROWS, 200)
        ids, mask, _ = batch(rows, seed)
        order, groups = width_groups(mask)
        assert sorted(order.tolist()) == list(range(rows))
        assert sum(number for number, _ in groups) == rows and 2 <= len(groups) <= MOST_GROUPS
        widths = [width for _, width in groups]
        assert widths == sorted(set(widths)) and widths[-1] <= ids.shape[1]
        lengths = mask.sum(1)[order].split([number for number, _ in groups])
        for each, width in zip(lengths, widths):
            assert max(padded_width(n - 2) for n in each.tolist()) == width
        computed = sum(number * width for number, width in groups)
        assert int(mask.sum()) <= computed < 0.9 * ids.numel()
        mask[:, 1] = False  # a position in the middle may be masked
        again = width_groups(mask)
        assert torch.equal(again[0], order) and again[1] == groups


def test_no_groups_where_there_is_nothing_to_gain():
    ids, mask = map(torch.from_numpy, encode(["farmer"] * 64, ["en"] * 64))
    assert width_groups(mask) is None
    order, groups = width_groups(torch.nn.functional.pad(mask, (0, 40)))  # of a piece of a batch
    assert groups == [(64, mask.shape[1])] and sorted(order.tolist()) == list(range(64))


def test_positions_of_groups_together_and_apart():
    parts = [torch.randn(3, 4, 2), torch.randn(5, 8, 2)]
    whole = joined(parts)
    assert whole.shape == (56, 2) and not whole[52:].any()  # up to a round number
    shapes = [part.shape for part in parts]
    assert all(torch.equal(one, other) for one, other in zip(parted(whole, shapes), parts))
    assert torch.equal(parted(joined(parts[:1]), shapes[:1])[0], parts[0])
    assert joined(parts, 60).shape == (60, 2)


@pytest.mark.parametrize("more", [{}, {"ngrams": {"rows": 64, "width": 16}}])
@pytest.mark.parametrize("encoder", [True, False])
@pytest.mark.parametrize("longest", [60, 119, 121, 126])
def test_the_model_gives_the_same_in_groups(more, encoder, longest, monkeypatch):
    """Outputs and gradients, in float64; the rows come back in their order."""
    if not encoder and not more:
        return
    torch.manual_seed(0)
    config = model_config("tiny", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = Seq2SeqMixerOccCANINE(
        hisco_blocky5().num_classes, 30, config=config, encoder=encoder, **more
    ).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids, mask, target = batch(longest=longest)
    found, seen = [], []
    for groups in (width_groups, lambda mask: None):
        monkeypatch.setattr(
            mixer, "width_groups", lambda mask, groups=groups: seen.append(groups(mask)) or seen[-1]
        )
        model.zero_grad(set_to_none=True)
        written, linear = model(ids, mask, target[:, :-1])
        (written.square().mean() + linear.square().mean()).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([written.detach(), linear.detach(), *gradients])
    assert seen[0] is not None and seen[1] is None
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-12 * max(1.0, other.abs().max())


def test_only_in_training_on_a_cpu_where_padding_is_left_out(monkeypatch):
    asked = []
    monkeypatch.setattr(mixer, "width_groups", lambda mask: asked.append(1))
    formatter, (ids, mask, target) = hisco_blocky5(), batch()
    model = Seq2SeqMixerOccCANINE(formatter.num_classes, 30, config=model_config("tiny"))
    model(ids, mask, target[:, :-1])
    assert asked == [1]
    with torch.no_grad():
        model(ids, mask, target[:, :-1])
    published = Seq2SeqMixerOccCANINE(
        formatter.num_classes, 30, config=model_config("tiny"), memory_mask=False
    )
    published(ids, mask, target[:, :-1])
    assert asked == [1]


class Texts(Rows):
    has_lengths = True
    groups_in_model = ("cpu",)

    def __len__(self):
        return 400


def test_a_share_is_one_micro_batch_where_the_model_has_groups():
    for kind, number in (("cpu", 1), ("cuda", 3)):
        plan = batch_plan(ScriptConfig(batch_size=200), Texts(), World(device=torch.device(kind)))
        assert plan.micro_batches(0) == number, kind
