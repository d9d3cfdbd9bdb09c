"""Losses of the linear decoder against torch's own and a plain formula."""

import math

import pytest
import torch
from torch import nn

from histocc.model.linear_loss import LINEAR_LOSSES, MEAN, ROWS, LinearLoss
from histocc.model.loss import BlockOrderInvariantLoss, LossMixer


@pytest.fixture
def batch():
    torch.manual_seed(0)
    target = (torch.rand(9, 37) < 0.08).float()
    target[0] = 0  # a row without codes
    target[1, :3] = 1
    return torch.randn(9, 37) * 4, target


def plain(logits: list[float], target: list[float]) -> float:
    """«rows» of one row, number by number."""
    losses = [math.log1p(math.exp(-abs(x))) + max(x, 0) - x * y for x, y in zip(logits, target)]
    norm, count = math.log(sum(map(math.exp, logits))), sum(target)
    return sum(losses) + sum((norm - x) * y / count for x, y in zip(logits, target) if y)


def test_mean_of_a_mixer_is_bitwise_that_of_torch(batch):
    sequence = BlockOrderInvariantLoss(1)
    logits = torch.randn(9, 26, 20)
    target = torch.ones(9, 27, dtype=torch.long)
    found = [
        LossMixer(sequence, linear, 0.3).per_sample(logits, batch[0], target, batch[1])["loss_linear"]
        for linear in (LinearLoss(MEAN), nn.BCEWithLogitsLoss())
    ]
    assert found[0].shape == (9,) and torch.equal(*found)
    assert found[0].mean().item() == pytest.approx(
        nn.functional.binary_cross_entropy_with_logits(*batch).item(), rel=1e-6
    )


def test_rows_are_the_plain_formula(batch):
    found = LinearLoss(ROWS)(batch[0].double(), batch[1])
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(
        [plain(*row) for row in zip(batch[0].double().tolist(), batch[1].tolist())], rel=1e-12
    )


@pytest.mark.parametrize("kind", LINEAR_LOSSES)
def test_a_row_knows_nothing_of_the_others(batch, kind):
    logits, target = batch[0].clone().requires_grad_(), batch[1]
    loss = LinearLoss(kind)
    whole = loss(logits, target)
    changed = torch.cat([batch[0][:4], torch.full((2, 37), 50.0)]), torch.cat([target[:4], torch.ones(2, 37)])
    assert torch.equal(loss(*changed)[:4], whole[:4])
    whole[2].backward()
    assert logits.grad[2].any() and not logits.grad[[0, 1, 3, 4, 5, 6, 7, 8]].any()


@pytest.mark.parametrize("kind", LINEAR_LOSSES)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(batch, kind, half):
    logits = batch[0].to(half)
    found = LinearLoss(kind)(logits, batch[1].to(half))
    assert found.dtype == torch.float32 and torch.equal(found, LinearLoss(kind)(logits.float(), batch[1]))


@pytest.mark.parametrize("kind", LINEAR_LOSSES)
def test_large_logits_and_rows_without_codes_are_finite(kind):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 3.0]], requires_grad=True)
    loss = LinearLoss(kind)(logits, torch.tensor([[0.0, 0, 0], [1, 0, 1]]))
    loss.sum().backward()
    assert loss.isfinite().all() and logits.grad.isfinite().all()


def test_another_kind_is_refused():
    with pytest.raises(ValueError, match="linear loss 'sum' is not one of mean, rows"):
        LinearLoss("sum")
