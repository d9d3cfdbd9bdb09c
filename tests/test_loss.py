"""Losses against hand-computed values, plain loops and finite differences."""

import math
from itertools import permutations

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from histocc.model.loss import (
    BLOCK_LOSSES,
    LINEAR_LOSSES,
    MEAN,
    ROWS,
    BlockOrderInvariantLoss,
    LinearLoss,
    LossMixer,
    OrderInvariantSeq2SeqCrossEntropy,
    cheapest_assignment,
)

PAD, BOS, EOS = 1, 2, 3


def make_targets(counts, nb_blocks=3, block_size=2, vocab=9, seed=0):
    """[B, S] with counts[i] random codes in row i; some end in EOS as short codes do."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.full((len(counts), nb_blocks * block_size + 2), PAD)
    targets[:, 0], targets[:, -1] = BOS, EOS
    for row, count in enumerate(counts):
        used = count * block_size
        targets[row, 1 : 1 + used] = torch.randint(4, vocab, (used,), generator=generator)
        if count > 1:
            targets[row, used] = EOS
    return targets


def make_logits(rows, nb_blocks=3, block_size=2, vocab=9, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(rows, nb_blocks * block_size + 1, vocab, generator=generator, dtype=dtype)


def loss_of(nb_blocks=3, block_size=2, **options):
    return BlockOrderInvariantLoss(PAD, nb_blocks, block_size, **options)


def cross_entropy(logits, token):
    return (torch.logsumexp(logits, 0) - logits[token]).item()


def plain_loss(logits, targets, nb_blocks, block_size, matching="best-fit", empty="all"):
    """The definition, one number at a time, order by order."""
    losses = []
    for row, target in zip(logits, targets):
        blocks = [range(i * block_size, (i + 1) * block_size) for i in range((len(target) - 2) // block_size)]
        count = sum(target[1 + block[0]].item() != PAD for block in blocks)
        costs = [
            [
                sum(cross_entropy(row[p], target[1 + t]) for p, t in zip(predicted, block)) / block_size
                for block in blocks[:count]
            ]
            for predicted in blocks[:count]
        ]
        if matching == "best-fit":
            total = sum(min(column) for column in zip(*costs))
        else:
            total = min(sum(costs[p][t] for p, t in enumerate(order)) for order in permutations(range(count)))
        total /= max(count, 1)
        for block in blocks[count : count + 1 if empty == "first" else None]:
            total += sum(cross_entropy(row[p], PAD) for p in block) / block_size / nb_blocks
        losses.append(total)
    return torch.tensor(losses, dtype=torch.float64)


def plain_older_loss(logits, targets, block_size, scale, smoothing):
    losses = []
    for row, target in zip(logits, targets):
        blocks = [range(i, i + block_size) for i in range(0, len(target) - 2, block_size)]
        real = [block for block in blocks if target[1 + block[0]].item() != PAD]
        total = 0.0
        for block in real:
            costs = [
                [cross_entropy(row[p], target[1 + t]) for p, t in zip(one, block) if target[1 + t] != PAD]
                for one in blocks
            ]
            total += min(map(sum, costs)) / block_size / len(real)
        for position in row[:-1]:
            even = sum(cross_entropy(position, token) for token in range(row.shape[1])) / row.shape[1]
            towards = (1 - smoothing) * cross_entropy(position, PAD) + smoothing * even
            total += scale * towards / (len(target) - 2)
        losses.append(total)
    return torch.tensor(losses, dtype=torch.float64)


# ---- of blocks


@pytest.mark.parametrize("matching", BLOCK_LOSSES)
@pytest.mark.parametrize("empty", ["all", "first"])
@examples(20)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 10**6), st.integers(1, 3))
def test_matches_plain_loops(matching, empty, counts, seed, block_size):
    logits = make_logits(len(counts), 5, block_size, seed=seed)
    targets = make_targets(counts, 5, block_size, seed=seed + 1)
    loss_fn = loss_of(5, block_size, empty_blocks=empty, matching=matching)
    expected = plain_loss(logits, targets, 5, block_size, matching, empty)
    torch.testing.assert_close(loss_fn.per_row(logits, targets), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss_fn(logits, targets), expected.mean(), rtol=1e-12, atol=1e-12)


def test_more_codes_than_all_orders_are_tried_for():
    """Seven columns: the first five codes of a row are assigned, those after them stay in their order."""
    for seed in range(3):
        counts = [7, 1, 6, 5, 0, 7, 2]
        costs = make_logits(7, 7, 1, vocab=7, seed=seed)[:, :7]
        found = cheapest_assignment(costs, torch.tensor(counts)).tolist()
        for row, count, order in zip(costs.tolist(), counts, found):
            n = min(count, 5)
            sums = {p: sum(row[i][j] for i, j in enumerate(p)) for p in permutations(range(n))}
            assert order == [*min(sums, key=sums.__getitem__), *range(n, 7)]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_older_loss_matches_plain_loops(smoothing):
    logits, targets = make_logits(4), make_targets([1, 3, 2, 0])
    targets[0, 2] = PAD  # a code that PAD fills up: that token counts 0
    loss_fn = OrderInvariantSeq2SeqCrossEntropy(PAD, 3, 2, 0.3, smoothing)
    expected = plain_older_loss(logits, targets, 2, 0.3, smoothing)
    torch.testing.assert_close(loss_fn.per_row(logits, targets), expected, rtol=1e-12, atol=1e-12)


KINDS = [
    loss_of(),
    loss_of(matching="one-to-one"),
    loss_of(empty_blocks="first"),
    OrderInvariantSeq2SeqCrossEntropy(PAD, 3, 2, push_to_pad_label_smoothing=0.1),
]


@pytest.mark.parametrize("loss_fn", KINDS)
def test_gradients_are_right(loss_fn):
    """Of rows without a code, too; the last EOS has none, those inside a code have."""
    logits, targets = make_logits(4, vocab=7).requires_grad_(), make_targets([0, 1, 2, 3], vocab=7)
    assert torch.autograd.gradcheck(lambda x: loss_fn.per_row(x, targets), logits)
    loss_fn(logits, targets).backward()
    assert not logits.grad[:, -1].any() and logits.grad[2, :4, EOS].min() < 0
    six = loss_of(6, matching="one-to-one")
    logits, targets = make_logits(2, 6, vocab=6).requires_grad_(), make_targets([6, 2], 6, vocab=6)
    assert torch.autograd.gradcheck(lambda x: six.per_row(x, targets), logits)


@pytest.mark.parametrize("loss_fn", KINDS)
def test_a_row_does_not_depend_on_its_micro_batch(loss_fn):
    """Alone or in another order: the same loss and gradient, to the last bit."""
    targets = make_targets([1, 2, 3, 0, 2, 1])

    def rows_of(rows):
        x = make_logits(6)[rows].requires_grad_()
        loss = loss_fn.per_row(x, targets[rows])
        loss.sum().backward()
        return loss.detach(), x.grad

    losses, gradients = rows_of(list(range(6)))
    for rows in ([5, 2, 0], [4], [3, 1]):
        loss, gradient = rows_of(rows)
        assert torch.equal(loss, losses[rows]) and torch.equal(gradient, gradients[rows])


@pytest.mark.parametrize("empty", ["all", "first"])
def test_empty_tail_blocks_may_be_cut(empty):
    logits, targets = make_logits(2, nb_blocks=2), make_targets([1, 2], nb_blocks=2)
    loss = loss_of(5, empty_blocks=empty).per_row(logits, targets)
    torch.testing.assert_close(loss, plain_loss(logits, targets, 5, 2, empty=empty), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_assignments_of_costs_that_are_not_finite_are_assignments(value):
    for blocks in (3, 7):
        costs = torch.full((4, blocks, blocks), value)
        found = cheapest_assignment(costs, torch.tensor([0, 1, blocks - 1, blocks]))
        assert found.sort(1).values.tolist() == [list(range(blocks))] * 4
        assert found[0].tolist() == list(range(blocks)) and found[2, -1] == blocks - 1


@pytest.mark.parametrize("steps, targets", [(7, (3, 8)), (8, (2, 8)), (6, (2, 7)), (1, (2, 2))])
def test_shapes_that_do_not_fit(steps, targets):
    with pytest.raises(ValueError, match="do not fit"):
        loss_of()(torch.zeros(2, steps, 9), torch.ones(targets, dtype=torch.long))


# ---- of the linear decoder


@pytest.fixture
def outputs():
    """(logits [9, 37], target), a row without codes and one with many among them."""
    torch.manual_seed(0)
    target = (torch.rand(9, 37) < 0.08).float()
    target[0] = 0
    target[1, :3] = 1
    return torch.randn(9, 37) * 4, target


def plain_rows(logits: list[float], target: list[float]) -> float:
    """«rows» of one row, number by number."""
    losses = [math.log1p(math.exp(-abs(x))) + max(x, 0) - x * y for x, y in zip(logits, target)]
    norm, count = math.log(sum(map(math.exp, logits))), sum(target)
    return sum(losses) + sum((norm - x) * y / count for x, y in zip(logits, target) if y)


def test_linear_losses_are_the_plain_formulas(outputs):
    logits, target = outputs[0].double(), outputs[1]
    expected = nn.BCEWithLogitsLoss(reduction="none")(logits, target.double()).mean(1)
    assert torch.equal(LinearLoss(MEAN)(logits, target), expected)
    rows = [plain_rows(*row) for row in zip(logits.tolist(), target.tolist())]
    assert LinearLoss(ROWS)(logits, target).tolist() == pytest.approx(rows, rel=1e-12)


@pytest.mark.parametrize("kind", LINEAR_LOSSES)
def test_a_row_of_the_linear_loss_knows_nothing_of_the_others(outputs, kind):
    logits, target = (torch.cat([x[:4], torch.full((2, 37), y)]) for x, y in zip(outputs, (1e4, 1.0)))
    loss = LinearLoss(kind)(logits.requires_grad_(), target)
    assert torch.equal(loss[:4], LinearLoss(kind)(*outputs)[:4]) and loss.isfinite().all()
    loss[2].backward()
    assert logits.grad.isfinite().all()
    assert logits.grad.any(1).tolist() == [False, False, True] + [False] * 3


WEIGHTED = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))


@pytest.mark.parametrize("linear", [LinearLoss(MEAN), WEIGHTED])
def test_mixer(linear):
    seq2seq = loss_of()
    mixer = LossMixer(seq2seq, linear, seq2seq_weight=0.1)
    logits, targets = make_logits(3), make_targets([1, 2, 3])
    outputs = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    labels = torch.tensor([[1.0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 1, 1]])
    parts = mixer.per_sample(logits, outputs, targets, labels)
    assert list(parts) == ["loss", "loss_linear", "loss_seq2seq"]
    torch.testing.assert_close(parts["loss_seq2seq"], plain_loss(logits, targets, 3, 2))
    of_rows = [linear(outputs[row : row + 1], labels[row : row + 1]).item() for row in range(3)]
    assert parts["loss_linear"].tolist() == pytest.approx(of_rows)
    torch.testing.assert_close(parts["loss"], 0.1 * parts["loss_seq2seq"] + 0.9 * parts["loss_linear"])
    assert mixer(logits, outputs, targets, labels).item() == pytest.approx(parts["loss"].mean().item())
    assert getattr(linear, "reduction", "mean") == "mean"  # the user's module is as it was


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("linear", [nn.BCEWithLogitsLoss(), LinearLoss(ROWS)])
def test_half_precision_is_computed_in_float32(dtype, linear):
    logits, targets = make_logits(3).to(dtype), make_targets([1, 2, 3])
    outputs, labels = torch.randn(3, 4).to(dtype), torch.ones(3, 4)
    for seq2seq in KINDS:
        mixer = LossMixer(seq2seq, linear)
        halves = mixer.per_sample(logits, outputs, targets, labels)
        floats = mixer.per_sample(logits.float(), outputs.float(), targets, labels)
        for name, value in halves.items():
            assert value.dtype == torch.float32 and torch.equal(value, floats[name])


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: loss_of(matching="hungarian"), "'best-fit' or 'one-to-one'"),
        (lambda: loss_of(empty_blocks="none"), "'all' or 'first'"),
        (lambda: LinearLoss("sum"), "linear loss 'sum' is not one of mean, rows"),
        (lambda: LossMixer(loss_of(), nn.MSELoss(), -0.1), "between 0 and 1"),
        (lambda: LossMixer(loss_of(), nn.MSELoss(), 1.1), "between 0 and 1"),
        (lambda: LossMixer(loss_of(), nn.MSELoss(), math.nan), "between 0 and 1"),
    ],
)
def test_settings_out_of_range(make, said):
    with pytest.raises(ValueError, match=said):
        make()
